"""Audits of torch's schedules, DeepSpeed's engine and Megatron's functions, without a step by hand.

DeepSpeed and Megatron are stood in for; benchmarks/audit runs the real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pipegrad
from pipegrad.audit import Audit, of_deepspeed, of_megatron, of_torch

MICROBATCHES, WIDTH = 4, 6


def uncut() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    layers[3].weight = layers[0].weight
    return nn.Sequential(*layers)


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(2)]


def own_layers(model: nn.Sequential) -> nn.Sequential:
    rank = dist.get_rank()
    return cast("nn.Sequential", copy.deepcopy(model)[2 * rank : 2 * rank + 2])


def schedule_of(module: nn.Module) -> Schedule1F1B:
    stage = PipelineStage(module, dist.get_rank(), 2, torch.device("cpu"))
    return Schedule1F1B(stage, MICROBATCHES, nn.functional.mse_loss)


def reduce_tie(module: nn.Module) -> None:
    dist.all_reduce(list(module.parameters())[-dist.get_rank()].grad)


def torch_schedule(reduces: bool) -> Audit:
    model = uncut()
    module = own_layers(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before_step: Callable[[], object] | None = None
    schedule = schedule_of(module)
    if reduces:
        topology = pipegrad.Topology.create(pipeline=2)
        sync = pipegrad.attach(schedule, topology=topology, tied=pipegrad.find_tied(model))
        before_step = lambda: sync.clip_grad_norm_(0.01)  # noqa: E731
    return of_torch(
        schedule,
        optimizer,
        model=model,
        batches=batches(),
        before_step=before_step,
        clip_norm=0.01 if reduces else None,
    )


class PipelineModule(nn.Module):
    """What the names of DeepSpeed's PipelineModule look like: layers by index, ties by key."""

    loss_fn = staticmethod(nn.functional.mse_loss)

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        rank = dist.get_rank()
        self._local_start, self._local_stop = 2 * rank, 2 * rank + 2
        tied = SimpleNamespace(key="ends")
        self._layer_specs = [tied, SimpleNamespace(), SimpleNamespace(), tied]
        self._order = list(layers)
        self.tied_modules = nn.ModuleDict({"ends": layers[-rank]})
        self.add_module(str(rank + 1), layers[1 - rank])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._order:
            x = layer(x)
        return x


class Engine:
    """What an engine of DeepSpeed does, with torch's schedule."""

    def __init__(self, module: PipelineModule, *, reduces: bool, clip_norm: float = 0.0) -> None:
        self.module, self._reduces, self._clip_norm = module, reduces, clip_norm
        self._schedule = schedule_of(module)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.grid = SimpleNamespace(
            get_data_parallel_world_size=lambda: 1, get_data_parallel_rank=lambda: 0
        )

    def gradient_accumulation_steps(self) -> int:
        return MICROBATCHES

    def gradient_clipping(self) -> float:
        return self._clip_norm

    def clip_fp32_gradients(self) -> None:
        """Clips by its own code, and by the norm of this rank alone."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        factor = self._clip_norm / float(nn.utils.get_total_norm(gradients))
        for gradient in gradients:
            gradient.mul_(factor)

    def get_global_grad_norm(self) -> None:
        return None

    def train_batch(self, data_iter: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        inputs, targets = (torch.cat(parts) for parts in zip(*data_iter, strict=True))
        self._optimizer.zero_grad()
        losses = list[Tensor]()
        if dist.get_rank() == 0:
            self._schedule.step(inputs)
        else:
            self._schedule.step(target=targets, losses=losses)
        if self._reduces:
            dist.all_reduce(self.module.tied_modules["ends"].weight.grad)
        if self._clip_norm:
            self.clip_fp32_gradients()
        self._optimizer.step()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, src=1)
        return loss


def deepspeed_engine(reduces: bool, clip_norm: float = 0.0) -> Audit:
    model = uncut()
    engine = Engine(PipelineModule(own_layers(model)), reduces=reduces, clip_norm=clip_norm)
    return of_deepspeed(engine, model=model, batches=batches())


class Optimizer:
    """What an optimizer of Megatron returns."""

    config = SimpleNamespace(clip_grad=0.0)

    def __init__(self, module: nn.Module, *, reduces: bool) -> None:
        self._module, self._reduces = module, reduces
        self._inner = torch.optim.SGD(module.parameters(), lr=0.1)

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    def step(self) -> tuple[bool, None, int]:
        if self._reduces:
            reduce_tie(self._module)
        self._inner.step()
        return True, None, 0


def megatron_functions(reduces: bool) -> Audit:
    model = uncut()
    module = own_layers(model)
    schedule = schedule_of(module)

    def forward_step(data_iterator: Any, model: nn.Module) -> None:
        """Is passed on; the schedule here needs none."""

    def forward_backward(*, data_iterator: Any, **options: Any) -> list[Tensor]:
        assert options.pop("forward_step_func") is forward_step
        assert options == {
            "model": [module],
            "num_microbatches": MICROBATCHES,
            "forward_only": False,
            "seq_length": 5,
        }
        inputs, targets = (torch.cat(parts) for parts in zip(*data_iterator, strict=True))
        losses = list[Tensor]()
        if dist.get_rank() == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        return losses

    return of_megatron(
        forward_backward,
        forward_step,
        [module],
        Optimizer(module, reduces=reduces),
        microbatches=MICROBATCHES,
        options={"seq_length": 5},
        loss_of=lambda losses: losses or None,
        model=model,
        loss_fn=nn.functional.mse_loss,
        batches=batches(),
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("audit_of", [torch_schedule, deepspeed_engine, megatron_functions])
def test_a_tie_that_a_runtime_leaves_is_named_alone(audit_of: Callable[[bool], Audit]) -> None:
    right = audit_of(True).run()
    assert right.is_right, str(right)
    assert {gradient.name for gradient in right.gradients} == {"0.weight", "1.weight", "2.weight"}
    [finding] = audit_of(False).run().findings
    assert finding.cause.startswith("the tie is not reduced")
    assert (finding.names, finding.ranks) == (("0.weight",), (0, 1))


@pytest.mark.ranks(2)
def test_a_norm_that_deepspeed_does_not_keep_is_named() -> None:
    causes = [finding.cause for finding in deepspeed_engine(True, 0.01).run().findings]
    assert causes == ["the gradient norm is that of this rank's parameters alone"]
