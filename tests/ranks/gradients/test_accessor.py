"""Gradients wherever they live: main_grad, and a third party's ledger."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.utils.weak import WeakTensorKeyDictionary

from pipegrad import GradientSync, MainGrad, Scheduler, Stage, Topology, attach, find_tied
from pipegrad.errors import StepError
from pipegrad.model.gradient_storage import GradientAccessor
from pipegrad.testing import OrderChecker, run_ranks
from tests.support.pipeline.pipelines import CPU, loss_of
from tests.support.pipeline.schedulers import error
from tests.support.pipeline.sharded import TOKENS, batch, build, low_step
from tests.support.rounding import ADAM_EPS, rounding
from tests.support.versions import needs_2_13

MOST = rounding(3 * 2 * 8 * TOKENS)  # of three steps of two batches
ALONE = Topology.build(axes=(("pp", 1), ("dp", 1)))
SHARED = [["a.weight", "b.weight"]]


class Ledger:
    """Somebody else's: all gradients in one place."""

    def __init__(self) -> None:
        self.entries = WeakTensorKeyDictionary()

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return parameter.dtype

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        found: Tensor | None = self.entries.get(parameter)
        return found

    def write(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        self.entries[parameter] = gradient

    def accumulated(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        there = self.read(parameter)
        if there is None:
            self.write(parameter, gradient.clone())
        else:
            there.add_(gradient)


# main_grad.


def megatron(schedule: str, accumulate: int) -> dict[str, Any]:
    """Trains bf16 stages with fp32 main_grad and master copies, beside one process' arithmetic."""
    topology, model = Topology.create(pipeline=2), build()
    true: Any = copy.deepcopy(model).bfloat16().float()
    cut = copy.deepcopy(model).bfloat16()
    stage = topology.local_stages[0]
    module = cut[2 * stage : 2 * stage + 2]
    scheduler = Scheduler(
        [Stage(module, stage)],
        topology,
        schedule=schedule,
        num_microbatches=4,
        loss_fn=loss_of,
        tied=find_tied(model),
        accessor=MainGrad(),
        master_dtype=torch.float32,
    )
    sync = scheduler.sync
    optimizer = torch.optim.AdamW(sync.optimizer_parameters(), lr=1e-2, eps=ADAM_EPS)
    true_optimizer = torch.optim.AdamW(true.parameters(), lr=1e-2, eps=ADAM_EPS)
    stepped = {one.record.name: one.tensor for one in sync.main_parameters()}
    errors, early = dict[str, float](), list[int]()
    with OrderChecker() as checker:
        for step in range(3):
            for part in range(accumulate):
                tokens, target = batch(10 * step + part, 8)
                if part < accumulate - 1:
                    with sync.accumulate():
                        loss = scheduler.step(tokens, target=target).loss
                else:
                    loss = scheduler.step(tokens, target=target).loss
                errors[f"{step} loss {part}"] = error(loss, low_step(true, tokens, target, 4))
            early.append(sync.statistics().early)
            assert all(p.grad is None for p in module.parameters())
            mains = [MainGrad().read(sync.parameter(one.record)) for one in sync.main_parameters()]
            assert all(
                (m is None) == (s.tensor.grad is None)
                for m, s in zip(mains, sync.main_parameters(), strict=True)
            )
            norm = sync.clip_grad_norm_(0.5)
            errors[f"{step} norm"] = error(norm, nn.utils.clip_grad_norm_(true.parameters(), 0.5))
            for name, tensor in stepped.items():
                goal = true.get_parameter(name).grad  # of "3.weight" that of "0.weight"
                if goal is None:
                    assert tensor.grad is None
                    continue
                assert tensor.grad is not None
                errors[f"{step} gradient {name}"] = error(tensor.grad, goal)
            for one in (optimizer, true_optimizer):
                one.step()
                one.zero_grad()
            sync.publish()
            master = dict(true.named_parameters(remove_duplicate=False))
            errors |= {f"{step} master {n}": error(t, master[n]) for n, t in stepped.items()}
    sync.check_replicas()
    dtypes = {str(t.dtype) for t in stepped.values()}
    scheduler.close()
    return {"errors": errors, "early": early, "violations": len(checker.violations)} | {
        "dtypes": dtypes
    }


def megatrons(cases: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [megatron(*case) for case in cases]


def test_bf16_with_main_grad_and_master_copies_is_one_process_in_mixed_precision() -> None:
    cases = [("1f1b", 1), ("gpipe", 2), ("zb-h1", 1)]
    for rank, reports in enumerate(run_ranks(megatrons, 2, cases)):
        for case, report in zip(cases, reports, strict=True):
            wrong = {name: e for name, e in report["errors"].items() if not e <= MOST}
            assert wrong == {}, (rank, case)
            assert {name.split()[1] for name in report["errors"]} == {
                "loss",
                "norm",
                "gradient",
                "master",
            }
            assert report["violations"] == 0
            assert report["dtypes"] == {"torch.float32"}
            used = 8 if rank else 6
            assert report["early"] == [0, used, used] or case[0] == "zb-h1"


def torchs_split() -> dict[str, float]:
    """torch writes the gradients of weights itself, in a backward that fires no hooks."""
    topology = Topology.create(pipeline=2, stage_to_rank=(0, 1, 0, 1))
    torch.manual_seed(1)
    true = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    modules = {s: copy.deepcopy(true[s]) for s in topology.local_stages}
    group = topology.group_along("pp")
    stages: list[Any] = [PipelineStage(m, s, 4, CPU, group=group) for s, m in modules.items()]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    sync = attach(schedule, topology=topology, handlers=[], accessor=MainGrad())
    sync.optimizer_parameters()
    errors = {}
    for step in range(2):
        x, target = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
        schedule.step(*([x] if 0 in modules else []), target=target if 3 in modules else None)
        nn.functional.mse_loss(true(x), target).backward()
        for one in sync.main_parameters():
            goal = true.get_parameter(f"{one.record.stage}.{one.record.name}")
            errors[f"{step} {one.record.key}"] = error(one.tensor.grad, goal.grad)
            one.tensor.grad = None
        true.zero_grad()
        sync.publish()
        assert all(p.grad is None for module in modules.values() for p in module.parameters())
    sync.close()
    return errors


@needs_2_13
def test_what_torchs_split_backward_writes_is_taken_too() -> None:
    for errors in run_ranks(torchs_split, 2):
        assert len(errors) == 2 * 4
        assert {name: e for name, e in errors.items() if not e <= MOST} == {}


def alone(accessor: GradientAccessor, *, dtype: torch.dtype, **options: Any) -> Any:
    """Returns a sync of one rank, its module and its optimizer."""
    torch.manual_seed(1)
    module = nn.Linear(3, 2, dtype=dtype)
    sync = GradientSync({0: module}, ALONE, handlers=[], accessor=accessor, **options)
    return sync, module, torch.optim.SGD(sync.optimizer_parameters(), lr=0.5)


@pytest.mark.parametrize("make", [MainGrad, Ledger])
def test_an_optimizer_steps_what_has_its_gradients_elsewhere(make: type) -> None:
    sync, module, optimizer = alone(make(), dtype=torch.float32)
    true = copy.deepcopy(module)
    true_optimizer = torch.optim.SGD(true.parameters(), lr=0.5)
    for step in range(3):
        x = torch.full((4, 3), 1.0 + step)
        sync.prepare(divisor=2)
        for part in x.chunk(2):
            module(part).pow(2).mean().backward()
            assert module.weight.grad is None
        sync.stage_final(0)
        sync.finish()
        true(x).pow(2).mean().backward()
        norm = sync.clip_grad_norm_(1.0)
        true_norm = nn.utils.clip_grad_norm_(true.parameters(), 1.0)
        assert norm.item() == pytest.approx(true_norm.item(), rel=rounding(3 * 4 * 3))
        for one in (optimizer, true_optimizer):
            one.step()
            one.zero_grad()
        sync.publish()
        for mine, theirs in zip(module.parameters(), true.parameters(), strict=True):
            assert error(mine.detach(), theirs.detach()) <= rounding(3 * 4 * 3)
    sync.close()


def test_who_steps_the_parameters_themselves_is_told() -> None:
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    sync = GradientSync({0: module}, ALONE, handlers=[], accessor=MainGrad())
    sync.prepare()
    module(torch.ones(1, 3)).sum().backward()
    sync.stage_final(0)
    sync.finish()
    with pytest.raises(StepError, match=r"give the optimizer sync\.optimizer_parameters"):
        sync.publish()


class FusedKernel(torch.autograd.Function):
    """Adds to main_grad itself, as Megatron's and Transformer Engine's do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        made: Tensor = x @ weight.detach().T
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        weight.main_grad.add_(gradient.T.float() @ x.float())
        weight.grad_added_to_main_grad = True
        returned: Tensor = gradient @ weight.detach()
        return returned, torch.full_like(weight, torch.nan)  # a placeholder


def by_kernel(x: Tensor, weight: Tensor) -> Tensor:
    made: Tensor = FusedKernel.apply(x, weight)  # type: ignore[no-untyped-call]
    return made


def fused() -> list[Tensor]:
    """Two microbatches by the kernel, and one without it."""
    topology = Topology.create(pipeline=1)
    torch.manual_seed(1)
    module = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    sync = GradientSync(
        {0: module},
        topology,
        handlers=["data-parallel"],
        accessor=MainGrad(),
        master_dtype=torch.float32,
    )
    sync.optimizer_parameters()
    x = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3)
    found = []
    for _ in range(2):
        sync.prepare()
        for _ in range(2):
            by_kernel(x, module.weight).sum().backward()
        module(x).sum().backward()
        sync.stage_final(0)
        sync.finish()
        (one,) = sync.main_parameters()
        assert one.tensor.grad is not None
        found.append(one.tensor.grad.clone())
        one.tensor.grad = None
        sync.publish()
    sync.close()
    return found


def test_a_kernel_that_adds_to_main_grad_itself_is_believed() -> None:
    true = 3 * torch.arange(6.0).view(2, 3).sum(0).expand(2, 3)
    for found in run_ranks(fused, 2):
        for gradient in found:
            assert torch.equal(gradient, true)
