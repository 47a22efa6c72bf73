"""One model under any placement, trained by ranks and by one process; and how they are compared.

It has a loop of its own: what is stepped are pieces of parameters, on some ranks, and parameters
come back in several ways.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import GradientHandler, Scheduler, Stage, cut, find_tied, schedules
from pipegrad.plugins.handler import handlers as registry
from pipegrad.schedules import Schedule
from tests.support.gradients.placements import WHOLE, By
from tests.support.pipeline.models import LAYERS, TOKENS, WIDTH, Block, Lookup, matrix, tied
from tests.support.pipeline.schedulers import ROWS, batch, digest, error, share, topology
from tests.support.pipeline.trained import OnMesh
from tests.support.rounding import ADAM_EPS, rounding

HANDLERS: dict[str, list[Any]] = {
    "replicate": ["pipeline-shared", "data-parallel"],
    "sharded": ["pipeline-shared", "sharded"],
    "owner": [{"name": "pipeline-shared", "placement": "owner"}, "data-parallel"],
    "owner+sharded": [{"name": "pipeline-shared", "placement": "owner"}, "sharded"],
    "whole": [{"name": "pipeline-shared", "placement": "owner"}, By("dp", WHOLE, "mean")],
    "asymmetric": [{"name": "pipeline-shared", "exchange": "asymmetric"}, "data-parallel"],
    "asym+sharded": [{"name": "pipeline-shared", "exchange": "asymmetric"}, "sharded"],
    "noop": ["noop"],
}
SCHEDULES: dict[str, Any] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "eager": "eager-1f1b",
    "interleaved": "interleaved-1f1b",
    "zb-h1": "zb-h1",
    "zb-h1-head": {"name": "zb-h1", "head_w_first": True},
    "zbv": "zbv",
}
PRECISIONS: dict[str, dict[str, Any]] = {  # of parameters, and on the wire if that differs
    "fp32": {},
    "fp32-bf16": {"reduce_dtype": torch.bfloat16},
    "bf16": {"master_dtype": torch.float32},
    "bf16-fp32": {"master_dtype": torch.float32, "reduce_dtype": torch.float32},
}
FACTORS: dict[str, tuple[str, ...]] = {
    "handlers": (
        "replicate",
        "sharded",
        "owner",
        "owner+sharded",
        "whole",
        "asymmetric",
        "asym+sharded",
    ),
    "schedule": tuple(SCHEDULES),
    "mesh": ("1x2", "1x3", "2x1", "2x2", "3x2", "4x1"),  # pipeline x data
    "precision": tuple(PRECISIONS),
    "recompute": ("keep", "again"),
    "optimizer": ("SGD", "AdamW"),
    "clip": ("free", "clip"),
    "parts": ("1", "2"),  # batches that a step of the optimizer accumulates
    "ways": ("2", "4"),  # layers that hold the vocabulary
    "buckets": ("small", "one"),
    "after": ("publish", "forget", "publish+eval", "eval", "read"),  # every step
    "end": ("wait", "close"),
    "zeroed": ("none", "zero"),  # what gradients become
}

CROSSED = ("handlers", "schedule", "mesh", "precision", "recompute")  # of the whole product

MAX_NORM = 0.3
LEARNING_RATES = {"SGD": 0.05, "AdamW": 0.01}
ROUNDING = 2.0**-8  # of bfloat16, whose significand has 8 bits, to the nearest


@dataclass(frozen=True)
class Case(OnMesh):
    """A way to train: a level of each factor."""

    handlers: str
    schedule: str
    mesh: str
    precision: str
    recompute: str
    optimizer: str
    clip: str
    parts: str
    ways: str
    buckets: str
    after: str
    end: str
    zeroed: str
    steps: int = 3

    @classmethod
    def of(cls, levels: Sequence[str], steps: int = 3) -> Case:
        """Returns a case of a level of each factor, in order."""
        named: dict[str, Any] = dict(zip(FACTORS, levels, strict=True))
        return cls(**named, steps=steps)

    def __str__(self) -> str:
        levels = " ".join(getattr(self, name) for name in FACTORS)
        return levels if self.steps == 3 else f"{levels} {self.steps} steps"

    @property
    def num_microbatches(self) -> int:
        return 2 * self.pipeline

    @property
    def is_owned(self) -> bool:
        return self.handlers.startswith(("owner", "whole"))

    @property
    def is_whole(self) -> bool:
        """Whether each parameter is on one rank of those that share all of them."""
        return self.handlers == "whole"

    @property
    def is_sharded(self) -> bool:
        return self.handlers.endswith("sharded") or self.is_whole

    @property
    def is_placed(self) -> bool:
        """Whether its ranks are enough for all that its handlers can do."""
        meets = self.handlers.startswith(("owner", "asym"))
        return (self.pipeline > 1 or not meets) and (self.data > 1 or not self.is_sharded)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is of lower precision than fp32."""
        return self.precision == "fp32"

    def exact(self, *, steps: int = 1) -> float:
        """Returns the relative error of fp32 after some steps, for sums in another order."""
        rows = ROWS * self.num_microbatches * self.data
        return rounding(rows * TOKENS * int(self.parts) * steps)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision.startswith("bf16") else torch.float32

    @property
    def made(self) -> Schedule:
        return make_schedule(self.schedule, self.pipeline, self.num_microbatches)

    def batch(self, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Returns tokens and targets, over all data ranks."""
        return batch(200 + 2 * step + part, ROWS * self.num_microbatches * self.data)

    def make_optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        lr = LEARNING_RATES[self.optimizer]
        if self.optimizer == "SGD":
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.1)
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1, eps=ADAM_EPS)


@functools.cache
def make_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    generator = schedules.registry.resolve(SCHEDULES[name])
    return schedules.generate(generator, num_ranks=num_ranks, num_microbatches=num_microbatches)


@functools.cache
def make_handlers(name: str) -> list[GradientHandler]:
    """Returns them found by name once: in hundreds of cases looking for them is what takes time."""
    return [found.plugin for found in registry.resolve_all(HANDLERS[name]).values()]


# The model.


class Odd(Block):
    """Holds a scalar, a matrix that lies by columns, a frozen parameter and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.low = nn.Parameter(torch.randn(3, WIDTH).t() * 0.3)
        self.high = matrix(3)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = matrix(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.frozen) + self.gain * (x @ self.low @ self.high)


def build(case: Case) -> nn.Sequential:
    """Returns the uncut model: the same bits in every process.

    Beside the vocabulary it ties two matrices, what the first alone of two layers uses, and what
    the last alone does.
    """
    torch.manual_seed(7)
    model: Any = tied()
    model[1] = Odd()
    if case.ways == "4":
        model[3], model[5] = Lookup(model[0].weight), Lookup(model[0].weight)
    model[6].linear.weight = model[2].linear.weight
    model[6].kept = model[1].high
    model[1].kept = model[6].norm.weight
    built: nn.Sequential = model.to(case.dtype)
    return built


def boundaries(num_stages: int) -> list[int]:
    return [round(LAYERS * stage / num_stages) for stage in range(1, num_stages)]


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


# One process.


@dataclass
class Truth:
    """What one process sees, or a rank that says the same.

    Attributes:
        losses: Of every batch.
        evaluated: Of the first batch of each step, after it.
        norms: Before clipping.
        read: Parameters after the first step.
        parameters: In the end.
        gradients: Of the first step, before clipping.
        terms: For each of these the sum of the absolute values of all that it is a sum of.
    """

    losses: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    read: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)


def truth(case: Case) -> Truth:
    """Returns how one process trains; many cases are one to it."""
    known = replace(case, handlers="", schedule="", recompute="", buckets="", after="", end="")
    return _truth(known)


@functools.cache
def _truth(case: Case) -> Truth:
    model = build(case).float()  # the master copy, where parameters are of lower precision
    worker = nn.Sequential(*map(copy.deepcopy, model)).to(case.dtype)  # no two layers share any
    named = dict(model.named_parameters(remove_duplicate=False))
    optimizer, true = case.make_optimizer(model.parameters()), Truth()
    for step in range(case.steps):
        for part in range(int(case.parts)):
            terms = true.terms if step == 0 else {}
            whole = case.batch(step, part)
            true.losses.append(_backward(case, model, worker, *whole, terms=terms))
        true.gradients = true.gradients or {name: _copy(p.grad) for name, p in named.items()}
        if case.clip == "clip":
            true.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.zeroed == "none")
        with torch.no_grad():
            if not case.is_exact:
                for name, copied in worker.named_parameters():
                    copied.copy_(named[name])
            true.evaluated.append(_evaluate(case, model, worker, *case.batch(step, 0)))
        true.parameters = {name: p.detach().clone() for name, p in named.items()}
        true.read = true.read or true.parameters
    return true


def _backward(
    case: Case,
    model: nn.Sequential,
    worker: nn.Sequential,
    tokens: Tensor,
    target: Tensor,
    *,
    terms: dict[str, Tensor],
) -> float:
    """Adds to the gradients; returns the loss.

    What a rank rounds within a microbatch is rounded here too, whatever it adds up is not.
    """
    if case.is_exact:
        whole = loss_of(model(tokens), target)
        whole.backward()
        return whole.item()
    losses = list[float]()
    masters = dict(model.named_parameters(remove_duplicate=False))
    for one, its_target in _microbatches(case, tokens, target):
        loss = loss_of(worker(one), its_target)
        (loss / case.num_microbatches).backward()
        losses.append(loss.item())
        for name, parameter in worker.named_parameters():
            if parameter.grad is not None:
                term, master = parameter.grad.float() / case.data, masters[name]
                master.grad = term.clone() if master.grad is None else master.grad + term
                terms[name] = terms.get(name, torch.zeros(())) + term.abs()
                parameter.grad = None
    return sum(losses) / len(losses)


def _evaluate(
    case: Case, model: nn.Sequential, worker: nn.Sequential, tokens: Tensor, target: Tensor
) -> float:
    if case.is_exact:
        return loss_of(model(tokens), target).item()
    parts = _microbatches(case, tokens, target)
    losses = [loss_of(worker(one), its_target).item() for one, its_target in parts]
    return sum(losses) / len(losses)


def _microbatches(case: Case, tokens: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    number = case.num_microbatches * case.data
    return zip(tokens.chunk(number), target.chunk(number), strict=True)


# The ranks.


@dataclass
class Piece:
    """Elements of a parameter, or of its gradient, from `begin` on as they lie in memory."""

    name: str
    begin: int
    tensor: Tensor | None

    @property
    def numel(self) -> int:
        return 0 if self.tensor is None else self.tensor.numel()


@dataclass
class Seen(Truth):
    """What one rank sees.

    Attributes:
        first: The first step's gradients, before clipping, of what its optimizer steps.
        clipped: Those of each step, after clipping, where steps are few.
        stepped: What its optimizer has made of these parameters.
        state: For each of them how many elements of a state the optimizer has.
        idle: Parameters whose gradient is there, and nothing steps.
        padding: Elements of its sharded buckets that are no parameter's.
    """

    first: list[Piece] = field(default_factory=list)
    clipped: list[list[Piece]] = field(default_factory=list)
    stepped: list[Piece] = field(default_factory=list)
    state: dict[str, int] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    padding: int = 0


class Run:
    """One case on one rank."""

    def __init__(self, case: Case) -> None:
        self.case, self.seen, self.at = case, Seen(), topology(case.pipeline)
        places = case.made.stage_to_rank
        parts = cut(build(case), len(places), boundaries=boundaries(len(places)))
        local = self.at.with_stages(places).local_stages
        self.modules = {stage: parts.modules[stage] for stage in local}
        self.scheduler = Scheduler(
            [Stage(m, i, recompute=case.recompute != "keep") for i, m in self.modules.items()],
            self.at,
            schedule=case.made,
            loss_fn=loss_of,
            tied=parts.tied,
            handlers=make_handlers(case.handlers),
            bucket_bytes=600 if case.buckets == "small" else 2**20,
            **PRECISIONS[case.precision],
        )
        self.sync = self.scheduler.sync
        # The Scheduler's publishes by itself, so it has the cases in which the caller does not.
        self.optimizer = (
            case.make_optimizer(self.sync.optimizer_parameters())
            if case.after.startswith("publish")
            else self.scheduler.optimizer(case.make_optimizer)
        )

    def train(self) -> Seen:
        for step in range(self.case.steps):
            self._find_gradients(step)
            if self.case.clip == "clip":
                self.seen.norms.append(self.sync.clip_grad_norm_(MAX_NORM).item())
            if self.case.steps == 3:
                self.seen.clipped.append(self._pieces(of_gradients=True))
            self.optimizer.step()
            self._look(step)
            self.optimizer.zero_grad(set_to_none=self.case.zeroed == "none")
        if self.case.end == "wait":
            self.sync.wait_parameters()
            self.seen.parameters = self._parameters()
            self.sync.check_replicas()
        self.scheduler.close()
        self.seen.parameters = self.seen.parameters or self._parameters()
        self.seen.stepped = self._pieces()
        self._count()
        return self.seen

    def _find_gradients(self, step: int) -> None:
        parts = int(self.case.parts)
        for part in range(parts):
            tokens, target = (share(whole, self.at) for whole in self.case.batch(step, part))
            with self.sync.accumulate() if part + 1 < parts else nullcontext():
                result = self.scheduler.step(tokens, target=target)
            self.seen.losses.append(result.loss.item())
        if step == 0:
            self.seen.first = self._pieces(of_gradients=True)
            used = {id(one.tensor) for one in self.sync.main_parameters()}
            left = [(name, p) for name, p in self._named() if p.grad is not None]
            self.seen.idle = [name for name, p in left if id(p) not in used]

    def _look(self, step: int) -> None:
        """Does what comes after a step of the optimizer."""
        if self.case.after.startswith("publish"):
            self.sync.publish()
        if self.case.after.endswith("eval"):
            tokens, target = (share(whole, self.at) for whole in self.case.batch(step, 0))
            self.seen.evaluated.append(self.scheduler.evaluate(tokens, target=target).loss.item())
        if self.case.after == "read":
            self.sync.wait_parameters()
            self.seen.read = self.seen.read or self._parameters()

    def _pieces(self, *, of_gradients: bool = False) -> list[Piece]:
        stepped = [(one, one.tensor) for one in self.sync.main_parameters()]
        return [
            Piece(one.record.name, one.begin, _copy(tensor.grad if of_gradients else tensor))
            for one, tensor in stepped
        ]

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        modules = self.modules.values()
        return [pair for m in modules for pair in m.named_parameters(remove_duplicate=False)]

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._named()}

    def _count(self) -> None:
        for one in self.sync.main_parameters():
            state = self.optimizer.state.get(one.tensor, {})
            held = [state[name] for name in ("momentum_buffer", "exp_avg") if name in state]
            self.seen.state[one.record.name] = sum(tensor.numel() for tensor in held)
        for bucket in self.sync.plan.buckets:
            if len(bucket.region(self.at.rank, len(bucket.route))) < bucket.payload_numel:
                self.seen.padding += bucket.payload_numel - sum(s.numel for s in bucket.slots)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


# What is compared.

# How far something is from what it must be, and how far it may be, by name.
Distances = dict[str, tuple[float, float]]


def misses(distances: Distances) -> Distances:
    return {name: (e, most) for name, (e, most) in distances.items() if not e <= most}  # nor nan


class Comparison:
    """What all ranks saw of a case, and one process. Each aspect of it tells distances by name.

    Args:
        case: What was trained.
        seen: By rank.
    """

    def __init__(self, case: Case, seen: Sequence[Seen]) -> None:
        self.case, self.seen = case, seen
        model = build(case)
        self.named = dict(model.named_parameters(remove_duplicate=False))
        self.ties = {name: [name] for name in self.named}
        self.ties |= {name: list(tie) for tie in find_tied(model) for name in tie}
        self.roots = {name: tie[0] for name, tie in self.ties.items()}
        self.trained = [
            name for name, p in self.named.items() if p.requires_grad and self.roots[name] == name
        ]
        self.exact = case.exact()
        # Of a lower precision it is a unit in the last place.
        self.loss_limit = case.exact(steps=case.steps) if case.is_exact else 2 * ROUNDING

    @functools.cached_property
    def true(self) -> Truth:
        return truth(self.case)

    def losses(self) -> Distances:
        return self._numbers([seen.losses for seen in self.seen], self.true.losses)

    def evaluated(self) -> Distances:
        """Tells that of losses right after a step."""
        if not self.case.after.endswith("eval"):
            return {}
        return self._numbers([seen.evaluated for seen in self.seen], self.true.evaluated)

    def norms(self) -> Distances:
        return self._numbers([seen.norms for seen in self.seen], self.true.norms)

    def gradients(self) -> Distances:
        """Tells that of the first step's, wherever they are stepped."""
        found = self._wholes([seen.first for seen in self.seen])
        return {
            f"{root} of ranks {ranks}": self._gradient(root, gradient)
            for (root, ranks), gradient in found.items()
        }

    def parameters(self) -> Distances:
        """Tells that of each rank's."""
        found = {}
        for rank, seen in enumerate(self.seen):
            for when, mine, true in (
                ("in the end", seen.parameters, self.true.parameters),
                ("after a step", seen.read, self.true.read),
            ):
                for name, parameter in mine.items():
                    value = error(parameter.float(), true[name].to(self.case.dtype).float())
                    limit = self._parameter_limit(self.roots[name])
                    found[f"{name} of rank {rank} {when}"] = (value, limit)
        return found

    def replayed(self) -> Distances:
        """Tells that of what was stepped from what one optimizer makes of the same gradients."""
        number = len(self.seen[0].clipped)
        steps = [self._wholes([seen.clipped[i] for seen in self.seen]) for i in range(number)]
        if not steps:
            return {}
        replayed = {it: nn.Parameter(self.named[it[0]].detach().float().clone()) for it in steps[0]}
        optimizer = self.case.make_optimizer(replayed.values())
        for gradients in steps:
            for it, parameter in replayed.items():
                parameter.grad = gradients[it]
            optimizer.step()
        found = self._wholes([seen.stepped for seen in self.seen])
        return {
            f"{root} of ranks {ranks}": (error(found[root, ranks], p.detach()), self.exact)
            for (root, ranks), p in replayed.items()
        }

    def copies(self) -> Distances:
        """Tells how many others there are of the bits of a parameter; what is stepped is one."""
        found = defaultdict[str, set[str]](set)
        for seen in self.seen:
            for name, parameter in seen.parameters.items():
                found[self.roots[name]].add(digest(parameter))
            for name, parameter in seen.read.items():
                found[f"{self.roots[name]} after a step"].add(digest(parameter))
        for (root, _), stepped in self._wholes([seen.stepped for seen in self.seen]).items():
            found[root].add(digest(None if stepped is None else stepped.to(self.case.dtype)))
        return {name: (len(digests) - 1.0, 0.0) for name, digests in found.items()}

    def states(self) -> Distances:
        """Tells that of the number of elements that a rank steps, and has state of."""
        found: Distances = {}
        for rank, seen in enumerate(self.seen):
            mine = [r for r in self.trained if any(rank in ranks for ranks in self.steppers(r))]
            held = {self.roots[piece.name]: piece.numel for piece in seen.stepped}
            # A rank has its part of what is padded; that no element is missing `gradients` tells.
            excess = sum(held.values()) * (self.case.data if self.case.is_sharded else 1)
            excess -= sum(self.named[root].numel() for root in mine)
            # One rank may have more whole parameters than another, by the largest of them.
            most = max((self.named[root].numel() for root in mine), default=0)
            allowed = most * self.case.data if self.case.is_whole else seen.padding
            found[f"all of rank {rank}"] = (max(0, excess), allowed)
            found[f"others' of rank {rank}"] = (len(held.keys() - {*mine}), 0)
            found[f"idle of rank {rank}"] = (len(seen.idle), 0)
            for name, size in seen.state.items():
                root = self.roots[name]
                used = 0 if self.true.gradients[root] is None else held[root]
                found[f"{name} of rank {rank}"] = (abs(size - used), 0)
        return found

    # Where things must be.

    def holders(self, root: str) -> list[int]:
        """Returns who holds a parameter, along the pipeline."""
        places = self.case.made.stage_to_rank
        starts = [0, *boundaries(len(places))]
        layers = {int(name.partition(".")[0]) for name in self.ties[root]}
        stages = {sum(start <= layer for start in starts) - 1 for layer in layers}
        return sorted({places[stage] for stage in stages})

    def steppers(self, root: str) -> list[tuple[int, ...]]:
        """Returns the ranks that together step a parameter, in the order of their rows."""
        holders, data = self.holders(root), self.case.data
        if self.case.is_owned:
            holders = holders[:1]
        rows = [tuple(range(place * data, (place + 1) * data)) for place in holders]
        return rows if self.case.is_sharded else [(rank,) for row in rows for rank in row]

    def _wholes(
        self, pieces: Sequence[Sequence[Piece]]
    ) -> dict[tuple[str, tuple[int, ...]], Tensor | None]:
        """Returns what the ranks' pieces are of, by name and ranks; of what is missing nan."""
        by_rank = [{self.roots[piece.name]: piece for piece in mine} for mine in pieces]
        return {
            (root, ranks): joined(
                [by_rank[rank][root] for rank in ranks if root in by_rank[rank]], self.named[root]
            )
            for root in self.trained
            for ranks in self.steppers(root)
        }

    # How far they may be.

    def _numbers(self, found: Sequence[Sequence[float]], true: Sequence[float]) -> Distances:
        """Compares numbers that all ranks have, in the same bits."""
        return {
            f"{number}": (
                abs(one - mine[0]) / abs(one) if len({*mine}) == 1 else math.inf,
                self.loss_limit,
            )
            for number, (one, *mine) in enumerate(zip(true, *found, strict=True))
        }

    def _parameter_limit(self, root: str) -> float:
        if self.case.is_exact:
            return self.loss_limit + self._moved_by_rounding(root)
        # What began with zeros is a sum of gradients; a bit less of a cast makes a unit.
        limit = (self._num_roundings(root) + 2) * ROUNDING
        if self.case.optimizer == "AdamW":  # whichever sign rounding has left a gradient
            moved = LEARNING_RATES["AdamW"] * self.case.steps
            limit += 2 * moved / self.true.parameters[root].abs().max().item()
        return limit

    def _moved_by_rounding(self, root: str) -> float:
        """Returns how far AdamW moves a parameter for what rounding adds to its gradient."""
        gradient = self.true.gradients[root]
        if self.case.optimizer != "AdamW" or gradient is None:
            return 0.0
        added = self.exact * gradient.abs().max()
        moved = LEARNING_RATES["AdamW"] / ADAM_EPS * added * self.case.steps
        return (moved / self.true.parameters[root].abs().max()).item()

    def _gradient(self, root: str, found: Tensor | None) -> tuple[float, float]:
        true = self.true.gradients[root]
        value = error(found, true)
        if self.case.is_exact or found is None or true is None:
            return (value, self.exact)
        # An element is rounded with each addend on its way, by at most so much of all of them.
        terms = sum(self.true.terms.get(name, torch.zeros(())) for name in self.ties[root])
        limits = self._num_roundings(root) * ROUNDING * terms + self.exact * true.abs().max()
        used = ((found - true).abs() / limits).max().item()
        return (value, value / used if used else self.exact)

    def _num_roundings(self, root: str) -> int:
        """Returns how often a gradient is rounded to bf16: into a bucket, by each sum and mean."""
        number = len(self.holders(root)) + self.case.data
        if self.case.dtype == torch.bfloat16:
            number += self.case.num_microbatches * int(self.case.parts) * len(self.ties[root])
        return number


def joined(pieces: Sequence[Piece], like: Tensor) -> Tensor | None:
    """Returns what pieces are of, which lies in memory like a parameter; of what is missing nan."""
    if pieces and all(piece.tensor is None for piece in pieces):
        return None
    if len(pieces) == 1 and (only := pieces[0].tensor) is not None and only.shape == like.shape:
        return only.float()
    flat, end = torch.full((like.numel(),), math.nan), 0
    for piece in pieces:
        if piece.tensor is not None and piece.tensor.dim() == 1 and piece.begin == end:
            end += piece.numel
            flat[piece.begin : end] = piece.tensor
    return flat.as_strided(like.shape, like.stride())


def product(steps: int = 3) -> Iterator[Case]:
    """Yields a case of every product of some factors; of the others it has a random level."""
    chance = random.Random(7)
    for levels in itertools.product(*(FACTORS[name] for name in CROSSED)):
        named = {name: chance.choice(known) for name, known in FACTORS.items()}
        yield Case.of([*(named | dict(zip(CROSSED, levels, strict=True))).values()], steps)
