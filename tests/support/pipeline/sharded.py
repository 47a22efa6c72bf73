"""A tied model whose stages FSDP2 shards, unevenly, trained beside one process that has it all."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

import pipegrad
from pipegrad import GradientSync, Scheduler, Stage, Topology, find_tied
from pipegrad.model.dtensor import local
from pipegrad.plugins.handler import Exchange
from pipegrad.testing import OrderChecker
from tests.support.pipeline.pipelines import CPU, VEES, loss_of
from tests.support.pipeline.schedulers import digest, error
from tests.support.rounding import ADAM_EPS

VOCAB, WIDTH, TOKENS, ROWS, LAYERS = 33, 6, 5, 2, 4  # of 33 rows the second of two ranks has 16
PIPELINE = 2
TIED = ("0.weight", "3.weight")


class Embed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((1,), 0.7))  # a rank but the first has none of it
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(self.norm(x)))


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


def build() -> nn.Sequential:
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)
    return nn.Sequential(Embed(weight), Block(), Block(), Head(weight))


@dataclass(frozen=True)
class Case:
    """One way of training: a schedule of torch's, or one of ours."""

    schedule: str
    attached: bool = False
    replicate: int = 1  # of the data ranks; above 1 it is HSDP
    num_microbatches: int = 4
    steps: int = 3
    accumulate: int = 1
    recompute: bool = False
    evaluate: bool = False
    wrap: str = "all"  # "layers": not the stage; "stage": nothing else
    keep: bool = False  # reshard_after_forward=False
    low: bool = False  # bf16 parameters, fp32 reductions
    exchange: Exchange = "all-reduce"

    def __str__(self) -> str:
        fields = self.__dataclass_fields__.values()
        told = {f.name: getattr(self, f.name) for f in fields}
        changed = [f"{f.name}={told[f.name]}" for f in fields if told[f.name] != f.default]
        return " ".join(changed)

    @property
    def num_terms(self) -> int:
        """Returns of how many tokens a gradient is a sum, on eight ranks."""
        return self.accumulate * self.num_microbatches * 4 * ROWS * TOKENS

    @property
    def places(self) -> tuple[int, ...]:
        if self.schedule in VEES:
            return (0, 1, 1, 0)
        loops = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "interleaved-1f1b")
        return (0, 1, 0, 1) if self.schedule in loops else (0, 1)


@dataclass
class Found:
    """What one rank saw; errors are relative to the largest true value."""

    errors: dict[str, float] = field(default_factory=dict)
    bits: dict[str, str] = field(default_factory=dict)
    reduce_scatters: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)


def mesh_of(case: Case, num_ranks: int) -> DeviceMesh:
    shape = (PIPELINE, case.replicate, num_ranks // PIPELINE // case.replicate)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "outer", "dp"))


class Run:
    """One case on one rank."""

    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self.case, self.mesh = case, mesh
        data = "dp" if mesh["dp"].size() > 1 else "outer"
        self.topology = Topology.from_mesh(mesh, data=data, stage_to_rank=case.places)
        self.num_shares = mesh["outer"].size() * mesh["dp"].size()
        here = mesh.get_coordinate()
        assert here is not None
        self.share = here[1] * mesh["dp"].size() + here[2]
        model = build()
        self.modules = {s: self.stage(model, s) for s in self.topology.local_stages}
        self.shared = find_tied(model)
        self.found = Found()
        self.scheduler: Scheduler | None = None
        self.step, self.sync = self.attached() if case.attached else self.scheduled()
        self.optimizer = torch.optim.AdamW(
            [p for g in self.sync.optimizer_parameters() for p in g["params"]],
            lr=1e-2,
            eps=ADAM_EPS,
        )
        self.truth = truth_of(case, self.num_shares)

    def stage(self, model: nn.Sequential, stage: int) -> nn.Sequential:
        number = LAYERS // len(self.case.places)
        layers = range(stage * number, (stage + 1) * number)
        whole = OrderedDict((str(i), copy.deepcopy(model[i])) for i in layers)
        module = nn.Sequential(whole)
        options: dict[str, Any] = {"mesh": self.mesh["dp"]}
        if self.case.replicate > 1:
            options["mesh"] = self.mesh["outer", "dp"]
        if self.case.keep:
            options["reshard_after_forward"] = False
        if self.case.low:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if self.case.wrap != "stage":
            for layer in module:
                fully_shard(layer, **options)
        if self.case.wrap != "layers":
            fully_shard(module, **options)
        return module

    def attached(self) -> tuple[Any, GradientSync]:
        total, group = len(self.case.places), self.topology.group_along("pp")
        stages = [PipelineStage(m, s, total, CPU, group=group) for s, m in self.modules.items()]
        kind = get_schedule_class(self.case.schedule)
        given: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        schedule = kind(given, self.case.num_microbatches, loss_fn=loss_of)
        sync = pipegrad.attach(
            schedule,
            topology=self.topology,
            tied=self.shared,
            handlers=[{"name": "pipeline-shared", "exchange": self.case.exchange}],
        )

        def step(tokens: Tensor, target: Tensor) -> Tensor | None:
            losses: list[Tensor] = []
            inputs = [tokens] if 0 in self.modules else []
            goal = target if total - 1 in self.modules else None
            if self.case.evaluate:
                schedule.eval(*inputs, target=goal)
            schedule.step(*inputs, target=goal, losses=losses)
            return torch.stack(losses).mean() if losses else None

        return step, sync

    def scheduled(self) -> tuple[Any, GradientSync]:
        recompute = self.case.recompute
        stages = [Stage(m, s, recompute=recompute) for s, m in self.modules.items()]
        self.scheduler = scheduler = Scheduler(
            stages,
            self.topology,
            schedule=self.case.schedule,
            num_microbatches=self.case.num_microbatches,
            loss_fn=loss_of,
            tied=self.shared,
            handlers=[{"name": "pipeline-shared", "exchange": self.case.exchange}],
        )

        def step(tokens: Tensor, target: Tensor) -> Tensor | None:
            if self.case.evaluate:
                scheduler.evaluate(tokens, target=target)
            return scheduler.step(tokens, target=target).loss

        return step, scheduler.sync

    def named(self) -> dict[str, nn.Parameter]:
        self.sync.reshard()
        return {n: p for m in self.modules.values() for n, p in m.named_parameters()}

    def train(self) -> Found:
        for number in range(self.case.steps):
            for part in range(self.case.accumulate):
                loss, true_loss = self.take(number, part), self.truth.losses[number][part]
                if loss is not None and self.scheduler is not None:
                    self.found.errors[f"{number} loss {part}"] = error(loss, true_loss)
            if number == 0:
                self.compare("gradient", self.truth.gradients)
            norm = self.sync.clip_grad_norm_(0.5)
            self.found.errors[f"{number} norm"] = error(norm, self.truth.norms[number])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.found.early.append(self.sync.statistics().early)
        self.compare("parameter", self.truth.parameters)
        self.sync.check_replicas()
        self.found.bits = {n: digest(local(p)) for n, p in self.named().items() if n in TIED}
        if self.scheduler is not None:
            self.scheduler.close()
        else:
            self.sync.close()
        return self.found

    def take(self, number: int, part: int) -> Tensor | None:
        """Takes a part of a step; returns the loss where there is one."""
        tokens, target = given(self.case, self.num_shares, number, part)
        accumulating = part < self.case.accumulate - 1
        mine = [t.chunk(self.num_shares)[self.share] for t in (tokens, target)]
        adding = self.sync.accumulate() if accumulating else contextlib.nullcontext()
        with adding, counting() as calls:
            loss: Tensor | None = self.step(*mine)
        self.found.reduce_scatters.append(calls["reduce_scatter"])
        return loss

    def compare(self, what: str, true: Mapping[str, Tensor | None]) -> None:
        for name, parameter in self.named().items():
            ours, theirs = parameter.grad if what == "gradient" else parameter, true[name]
            if ours is None or theirs is None:
                self.found.missing.add(name)
                assert ours is theirs, name
                continue
            assert isinstance(ours, DTensor)
            found: Any = ours.detach()
            self.found.errors[f"{what} {name}"] = error(found.full_tensor(), theirs)


@dataclass
class Truth:
    """What one process has: losses by step and part, norms by step, the first step's gradients."""

    losses: list[list[Tensor]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: dict[str, Tensor | None] = field(default_factory=dict)


def truth_of(case: Case, num_shares: int) -> Truth:
    """Returns what one process has, which knows of a case how it trains and what it is given."""
    alone = Case(
        "",
        num_microbatches=case.num_microbatches,
        steps=case.steps,
        accumulate=case.accumulate,
        low=case.low,
    )
    return _truth(alone, num_shares)


@functools.cache
def _truth(case: Case, num_shares: int) -> Truth:
    model, true = build(), Truth()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPS)
    named = dict(model.named_parameters(remove_duplicate=False))
    for number in range(case.steps):
        parts = [given(case, num_shares, number, part) for part in range(case.accumulate)]
        true.losses.append([true_step(case, num_shares, model, *part) for part in parts])
        if number == 0:
            grads = {name: p.grad for name, p in named.items()}
            true.gradients = {n: None if g is None else g.clone() for n, g in grads.items()}
        true.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    true.parameters = {name: p.detach() for name, p in named.items()}
    return true


def given(case: Case, num_shares: int, number: int, part: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and targets of a part of a step, of all ranks."""
    return batch(10 * number + part, ROWS * case.num_microbatches * num_shares)


def true_step(
    case: Case, num_shares: int, model: nn.Sequential, tokens: Tensor, target: Tensor
) -> Tensor:
    """Forward and backward of the uncut model; returns the loss."""
    if case.low:
        return low_step(model, tokens, target, case.num_microbatches * num_shares)
    true_loss = loss_of(model(tokens), target)
    true_loss.backward()
    return true_loss.detach()


def batch(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, target = torch.randint(VOCAB, (2, rows, TOKENS), generator=generator)
    return tokens, target


def low_step(model: nn.Sequential, tokens: Tensor, target: Tensor, parts: int) -> Tensor:
    """Forward and backward in bf16, gradients of the parts and of both uses summed in fp32."""
    total = torch.zeros(())
    for mine, goal in zip(tokens.chunk(parts), target.chunk(parts), strict=True):
        low: Any = copy.deepcopy(model).bfloat16()
        low[3].weight = nn.Parameter(low[0].weight.detach().clone())
        low.zero_grad()
        loss = loss_of(low(mine), goal)
        loss.backward()
        total += loss.detach().float() / parts
        true = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in low.named_parameters():
            if parameter.grad is not None:
                before = true[name].grad
                found = parameter.grad.to(true[name].dtype) / parts
                true[name].grad = found if before is None else before + found
    return total


@contextlib.contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Counts what FSDP2 asks of torch.distributed."""
    calls = {"reduce_scatter": 0}
    module: Any = _fsdp_collectives
    before = module.foreach_reduce_scatter_copy_in

    def counted(*args: Any) -> Any:
        calls["reduce_scatter"] += 1
        return before(*args)

    module.foreach_reduce_scatter_copy_in = counted
    try:
        yield calls
    finally:
        module.foreach_reduce_scatter_copy_in = before


def run_cases(cases: Sequence[Case]) -> Mapping[Case, Found]:
    """Trains every case. Runs on every rank."""
    found: dict[Case, Found] = {}
    meshes: dict[int, DeviceMesh] = {}
    for case in cases:
        if case.replicate not in meshes:
            meshes[case.replicate] = mesh_of(case, torch.distributed.get_world_size())
        mesh = meshes[case.replicate]
        truth_of(case, mesh.size() // PIPELINE)  # computed once, unwatched
        try:
            with OrderChecker() as checker:
                found[case] = Run(case, mesh).train()
            found[case].violations = list(map(str, checker.violations))
        except Exception as error:
            error.add_note(f"in the case: {case}")
            raise
    return found
