"""Gradients that do not lie whole in ``.grad``: in shards, in copies, on owners, with experts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import pipegrad
from pipegrad.audit import Audit, Report

MICROBATCHES, WIDTH, OUT = 4, 4, 6


def batches(out: int = OUT) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(16, WIDTH), torch.randn(16, out)) for _ in range(2)]


def audited(
    topology: pipegrad.Topology,
    handler: str,
    *,
    factor: int = 1,
    scales: bool = False,
    **options: Any,
) -> Report:
    """Audits a Scheduler of 2 stages x 2 replicas, tied and clipped; `factor` multiplies losses."""
    stage, replica = topology.coordinate("pp"), topology.coordinate("dp")
    torch.manual_seed(0)
    first, last = (nn.Linear(WIDTH, OUT, bias=False) for _ in range(2))
    last.weight = first.weight
    model = nn.Sequential(first, nn.Linear(OUT, WIDTH), nn.Tanh(), last)
    module = copy.deepcopy(model)[2 * stage : 2 * stage + 2]
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(module, stage)], topology, schedule="1f1b", num_microbatches=MICROBATCHES,
        loss_fn=lambda output, target: factor * functional.mse_loss(output, target),
        handlers=["pipeline-shared", handler], tied=pipegrad.find_tied(model), **options,
    )  # fmt: skip
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=0.01)
    scaler = pipegrad.GradScaler(scheduler.sync, init_scale=64.0, enabled=scales)

    def step(inputs: Tensor, target: Tensor) -> Mapping[str, object]:
        optimizer.zero_grad()
        scheduler.step(inputs, target=target)
        norm = scheduler.sync.clip_grad_norm_(0.01)
        scaler.step(optimizer)
        scaler.update()
        return {"grad_norm": norm}

    report = Audit(
        step=step, modules=module, model=model, loss_fn=functional.mse_loss, batches=batches(),
        microbatches=MICROBATCHES, replica=replica, num_replicas=2,
    ).run()  # fmt: skip
    scheduler.close()
    return report


CASES: Sequence[Mapping[str, Any]] = [
    {"handler": "data-parallel"},
    {"handler": "data-parallel", "scales": True},
    {"handler": "data-parallel", "master_dtype": torch.float64},
    {"handler": "sharded"},
    {"handler": "sharded", "scales": True},
    {"handler": "sharded", "master_dtype": torch.float64},
    {"handler": "owned"},
]


@pytest.mark.ranks(4)
def test_placed_gradients_are_compared_whole_and_a_wrong_one_is_named() -> None:
    topology = pipegrad.Topology.create(pipeline=2)
    for case in CASES:
        report = audited(topology, **case)
        assert report.is_right, (case, str(report))
        is_placed = case["handler"] != "data-parallel"
        assert len(report.gradients) == (4 if is_placed else 8), (case, report.gradients)
        # Shards are stepped again in one process; a copy in another dtype is not.
        assert any("main parameters" in note for note in report.notes) == ("master_dtype" in case)
    for handler in ("data-parallel", "sharded", "owned"):
        [finding] = audited(topology, handler, factor=MICROBATCHES).findings
        assert "it is multiplied by the number of microbatches, 4, once" in finding.cause
        assert finding.names == ("0.weight", "1.weight", "1.bias")


def gathered(own: Tensor) -> Tensor:
    """Returns the rows of all ranks."""
    every = [torch.zeros_like(own)] * 2
    every[dist.get_rank()] = own
    return cast("Tensor", all_reduce(torch.cat(every)))


def summed(every: Tensor) -> Tensor:
    """Returns the sum over all ranks of this rank's rows."""
    return cast("Tensor", all_reduce(every).chunk(2)[dist.get_rank()])


class Experts(nn.Module):
    """A sum of experts. With `is_cut` each data rank has one of them, for the rows of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in range(2)})
        self.is_cut = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.router(x))
        if not self.is_cut:
            return self.experts["0"](x).tanh() + self.experts["1"](x).tanh()  # type: ignore[no-any-return]
        [own] = self.experts.values()
        return summed(own(gathered(x)).tanh())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("averages", [False, True])
def test_experts_that_replicas_share_are_compared_with_their_norm(averages: bool) -> None:
    torch.manual_seed(0)
    model, rank = Experts(), dist.get_rank()
    module = copy.deepcopy(model)
    module.is_cut, module.experts = True, nn.ModuleDict({str(rank): module.experts[str(rank)]})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    own = list(module.experts.parameters())

    def step(inputs: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        (functional.mse_loss(module(inputs), target) / 2).backward()
        for parameter in module.router.parameters():
            dist.all_reduce(parameter.grad)
        for parameter in own if averages else ():
            cast("Tensor", parameter.grad).div_(2)
        squares = nn.utils.get_total_norm([p.grad for p in own if p.grad is not None]) ** 2
        dist.all_reduce(squares)
        squares += (
            nn.utils.get_total_norm([cast("Tensor", p.grad) for p in module.router.parameters()])
            ** 2
        )
        nn.utils.clip_grads_with_norm_(module.parameters(), 0.01, squares.sqrt())
        optimizer.step()

    report = Audit(
        step=step, modules=module, model=model, loss_fn=functional.mse_loss,
        batches=batches(WIDTH), microbatches=1, replica=rank, num_replicas=2,
    ).run()  # fmt: skip
    assert "parameters that replicas share, as experts are" in report.notes[0]
    causes = [finding.cause for finding in report.findings]
    assert len(causes) == averages, causes
    assert all("divided by the number of replicas, 2, once" in cause for cause in causes), causes


class Shared(nn.Module):
    """Two layers that ranks share, and between them a scale that each applies to its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, OUT)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.down(self.up(x).tanh() * self.scale))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sums", [True, False])
def test_gradients_of_layers_that_ranks_share_are_compared_whole(sums: bool) -> None:
    torch.manual_seed(0)
    model = Shared()
    module = copy.deepcopy(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(module, init_device_mesh("cpu", (2,)), plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(inputs: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        functional.mse_loss(module(inputs), target).backward()
        if sums:
            dist.all_reduce(module.scale.grad)
        optimizer.step()

    report = Audit(
        step=step, modules=module, model=model, loss_fn=functional.mse_loss, batches=batches(),
        microbatches=1,
    ).run()  # fmt: skip
    assert report.is_right == sums
    assert {gradient.name for gradient in report.gradients} == set(dict(model.named_parameters()))
    for finding in report.findings:
        assert finding.cause.startswith("the gradient is not summed over the ranks that hold the")
        assert finding.names == ("scale",)
