"""Right pipelines of many kinds, as ordinary users have them: an audit finds nothing in them."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pipegrad
from pipegrad.audit import Audit

STAGES, WIDTH, VOCABULARY, LENGTH = 2, 8, 13, 5
MICROBATCHES = 4
ROWS = 16
IGNORED = -100

SINGLE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
SEVERAL = {
    "LoopedBFS": ScheduleLoopedBFS,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
V_SHAPED = "ZBVZeroBubble", "DualPipeV"


class Block(nn.Module):
    """A residual layer with what real ones have: a norm, two matrices, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", x + self.dropout(self.down(torch.tanh(self.up(self.norm(x))))))


class Checkpointed(Block):
    """A layer that computes its forward again."""

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", checkpoint(super().forward, x, use_reentrant=False))


class BatchNormed(Block):
    """A layer whose samples depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))


class Rotated(Block):
    """A layer with a table that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.table)


def noise(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    """Adds what no seed governs."""
    own = torch.Generator().manual_seed(time.perf_counter_ns())
    return output + 1e-5 * torch.randn(output.shape, generator=own)


class Adapted(nn.Module):
    """A linear layer that is frozen, with an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.base(x) + self.b(self.a(x)))


@dataclass(frozen=True)
class Kind:
    """One right pipeline.

    Attributes:
        schedule: Of torch.
        block: Makes a layer.
        dtype: Of parameters.
        options: What else differs: names that `Pipeline` knows.
    """

    schedule: str = "1F1B"
    block: Callable[[], nn.Module] = Block
    dtype: torch.dtype = torch.float32
    options: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        return name in self.options


def kind(schedule: str = "1F1B", *options: str, **more: Any) -> Kind:
    return Kind(schedule, options=frozenset(options), **more)


KINDS = {
    "GPipe, clipped": kind("GPipe", "clipped"),
    "1F1B": kind(),
    "LoopedBFS, AdamW": kind("LoopedBFS", "adamw"),
    "Interleaved1F1B in float64": kind("Interleaved1F1B", dtype=torch.float64),
    **{name: kind(name) for name in ("InterleavedZeroBubble", *V_SHAPED)},
    "DDP": kind("1F1B", "ddp"),
    "FSDP2, Interleaved1F1B": kind("Interleaved1F1B", "fsdp"),
    "tensor parallel": kind("1F1B", "tensor", "untied"),
    "a frozen embedding, autocast": kind("1F1B", "frozen", "autocast"),
    "a frozen stage": kind("1F1B", "frozen stage", "untied"),
    "LoRA": kind("1F1B", "lora"),
    "accumulation, checkpointed": kind("1F1B", "accumulate", block=Checkpointed),
    "compiled, bfloat16": kind("1F1B", "compiled", dtype=torch.bfloat16),
    "dropout": kind("1F1B", block=lambda: Block(0.3)),
    "BatchNorm": kind("1F1B", "untied", "warm", block=BatchNormed),
    "targets that are ignored": kind("1F1B", "ignored"),
}


OTHERS = {
    "BatchNorm from the first step": kind("1F1B", "untied", block=BatchNormed),
    "other dropout": kind("1F1B", "other dropout"),
    "another buffer": kind("1F1B", "another buffer", block=Rotated),
    "weights that are scaled": kind("1F1B", "scaled"),
    "copies that drift": kind("1F1B", "decay"),
    "random numbers in a stage": kind("1F1B", "noise"),
    "a learning rate of one rank": kind("1F1B", "later rate"),
    "a parameter that nobody steps": kind("1F1B", "left out"),
    "mean of means": kind("1F1B", "ignored", "mean of means"),
    "two steps of the optimizer": kind("1F1B", "twice"),
}


def uncut(one: Kind) -> nn.Sequential:
    torch.manual_seed(5)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    if not one.has("untied"):
        head.weight = embedding.weight
    model = nn.Sequential(embedding, *(one.block() for _ in range(4)), head)
    if one.has("lora"):
        model.requires_grad_(requires_grad=False)
        for layer in list(model)[1:-1]:
            assert isinstance(layer, Block)
            layer.up = Adapted(layer.up)  # type: ignore[assignment]
    if one.has("frozen"):
        embedding.requires_grad_(requires_grad=False)
    if one.has("frozen stage"):
        model[:3].requires_grad_(requires_grad=False)
    return model.to(one.dtype)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(
        output.flatten(0, 1).float(), target.flatten(), ignore_index=IGNORED
    )


def batches(one: Kind, number: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for seed in range(number):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        target = tokens[:, 1:].clone()
        if one.has("ignored"):
            lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
            target[torch.arange(LENGTH) >= lengths] = IGNORED
        found.append((tokens[:, :-1], target))
    return found


class Pipeline:
    """One rank of a right pipeline on 4 ranks, with its step."""

    def __init__(self, one: Kind) -> None:
        self.kind, self.model = one, uncut(one)
        self.topology = pipegrad.Topology.create(pipeline=STAGES)
        self.stage, self.replica = divmod(dist.get_rank(), 2)
        self.mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", "dp"))
        per_rank = 1 if one.schedule in SINGLE else 2
        number = STAGES * per_rank
        indices = [self.stage + STAGES * chunk for chunk in range(per_rank)]
        if one.schedule in V_SHAPED:
            indices = [self.stage, number - 1 - self.stage]
        cut = {2: (0, 3, 6), 4: (0, 2, 3, 4, 6)}[number]
        whole = copy.deepcopy(self.model)
        self.modules = [whole[cut[i] : cut[i + 1]] for i in indices]
        self.shapes = [self._wrapped(module) for module in self.modules]
        group = self.topology.group_along("pp")
        device = torch.device("cpu")
        stages = [
            PipelineStage(module, index, number, device, group=group)
            for module, index in zip(self.shapes, indices, strict=True)
        ]
        self.is_first, self.is_last = 0 in indices, number - 1 in indices
        # In the microbatches of a V, and of accumulation, there are as many rows as ever.
        self.microbatches = MICROBATCHES // 2 if one.has("accumulate") else MICROBATCHES
        self.divisor = 1.0
        make: Any = {**SINGLE, **SEVERAL}[one.schedule]
        self.schedule = make(
            stages[0] if one.schedule in SINGLE else stages,
            self.microbatches,
            self._loss,
            scale_grads=not one.has("ignored"),
        )
        self.sync = self._attached()
        parameters = list(self._trained())
        if one.has("left out") and self.stage == 1:
            del parameters[0]
        self._spoil()
        optimizer = torch.optim.AdamW if one.has("adamw") else torch.optim.SGD
        self.optimizer = optimizer(parameters, lr=0.05) if parameters else None

    def _spoil(self) -> None:
        """Makes stages differ from the uncut model, beside gradients."""
        for module in self.modules if self.stage == 1 else ():
            for part in module.modules():
                if isinstance(part, Block) and self.kind.has("noise"):
                    part.register_forward_hook(noise)
                if isinstance(part, nn.Dropout) and self.kind.has("other dropout"):
                    part.p = 0.5
                if isinstance(part, Rotated) and self.kind.has("another buffer"):
                    part.table += 1

    def _warm_up(self) -> None:
        """Runs a step, and sets back what it has changed. torch learns shapes in the first one."""
        before = [copy.deepcopy(module.state_dict()) for module in self.shapes]
        inputs, target = batches(self.kind, 1)[0]
        self.step(inputs[: ROWS // 2], target[: ROWS // 2])
        for module, state in zip(self.shapes, before, strict=True):
            module.load_state_dict(state)

    def _wrapped(self, module: nn.Module) -> nn.Module:
        if self.kind.has("fsdp"):
            for layer in module.modules():
                if isinstance(layer, Block):
                    fully_shard(layer, mesh=self.mesh["dp"])
            fully_shard(module, mesh=self.mesh["dp"])
        if self.kind.has("tensor"):
            for layer in module.modules():
                if isinstance(layer, Block):
                    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(layer, self.mesh["dp"], plan)
        if self.kind.has("compiled"):
            return cast("nn.Module", torch.compile(module, backend="eager"))
        if self.kind.has("ddp"):
            group = self.mesh["dp"].get_group()
            return DistributedDataParallel(module, process_group=group, find_unused_parameters=True)
        return module

    def _attached(self) -> pipegrad.GradientSync | None:
        if self.kind.has("tensor"):
            return None
        wraps = self.kind.has("ddp") or self.kind.has("fsdp")
        handlers = ["pipeline-shared"] if wraps else ["pipeline-shared", "data-parallel"]
        return pipegrad.attach(
            self.schedule,
            topology=self.topology,
            tied=pipegrad.find_tied(self.model),
            handlers=handlers,
        )

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        if not self.kind.has("ignored"):
            return loss_fn(output, target)
        if self.kind.has("mean of means"):
            return loss_fn(output, target) / MICROBATCHES
        # The sum over this replica's targets, by the number of targets of all replicas.
        total = functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total * 2 / self.divisor

    def step(self, inputs: Tensor, target: Tensor) -> object:
        self._begin(target)
        losses = self._run(inputs, target)
        norm = self._clipped()
        if self.optimizer is not None:
            for _ in range(2 if self.kind.has("twice") else 1):
                self.optimizer.step()
        if self.kind.has("decay") and self.stage == 1:
            dict(self.modules[0].named_parameters())["5.weight"].data *= 0.999
        if self.kind.has("scaled"):
            for parameter in self._trained():
                parameter.data *= 0.999
        is_mean = self.is_last and not self.kind.has("ignored")
        return {"loss": losses if is_mean else None, "grad_norm": norm}

    def _begin(self, target: Tensor) -> None:
        for parameter in self._trained():
            parameter.grad = None
        counted = (target != IGNORED).sum().float()
        dist.all_reduce(counted, group=self.mesh["dp"].get_group())
        self.divisor = float(counted)
        if self.kind.has("later rate") and self.stage == 1 and self.optimizer is not None:
            self.optimizer.param_groups[0]["lr"] *= 2

    def _run(self, inputs: Tensor, target: Tensor) -> list[Tensor]:
        """Leaves the gradients of the step; returns the losses of its microbatches."""
        losses = list[Tensor]()
        parts = 2 if self.kind.has("accumulate") else 1
        cut = list(zip(inputs.chunk(parts), target.chunk(parts), strict=True))
        for number, (x, y) in enumerate(cut, 1):
            own = list[Tensor]()  # a schedule begins a new list in each step
            with self._accumulating(is_last=number == len(cut)), self._autocast():
                self.schedule.step(
                    *([x] if self.is_first else []),
                    **({"target": y, "losses": own} if self.is_last else {}),
                )
            losses += own
        for parameter in self._trained():
            if parameter.grad is not None and parts > 1:
                parameter.grad /= parts
        return losses

    def _clipped(self) -> object:
        if not self.kind.has("clipped"):
            return None
        assert self.sync is not None
        return self.sync.clip_grad_norm_(0.05)

    def _trained(self) -> Iterator[nn.Parameter]:
        seen = {id(p): p for module in self.shapes for p in module.parameters() if p.requires_grad}
        yield from seen.values()

    @contextlib.contextmanager
    def _accumulating(self, *, is_last: bool) -> Iterator[None]:
        if is_last or self.sync is None:
            yield
            return
        with self.sync.accumulate():
            yield

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.kind.has("autocast"):
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def audit(self, steps: int) -> Audit:
        is_split = not self.kind.has("tensor")
        if self.kind.has("warm"):
            self._warm_up()
        return Audit(
            step=self.step,
            modules=self.shapes,
            model=self.model,
            loss_fn=loss_fn,
            batches=batches(self.kind, steps),
            microbatches=MICROBATCHES,
            replica=self.replica if is_split else 0,
            num_replicas=2 if is_split else 1,
            clip_norm=0.05 if self.kind.has("clipped") else None,
            autocast=torch.bfloat16 if self.kind.has("autocast") else None,
            by_microbatch=self.kind.block is BatchNormed,
        )

    def close(self) -> None:
        if self.sync is not None:
            self.sync.close()
