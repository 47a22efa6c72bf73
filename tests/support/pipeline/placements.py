"""One model under any placement, trained by ranks and by one process; and how they are compared.

What is stepped are pieces of parameters, on some ranks, and parameters come back in several ways.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, cut, find_tied, schedules
from pipegrad.schedules import Schedule
from tests.support.gradients.placements import WHOLE, By, in_memory_order
from tests.support.pipeline.models import LAYERS, TOKENS, WIDTH, Block, Lookup, matrix, tied
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import ROWS, batch, error, share, topology, wrong
from tests.support.pipeline.trained import (
    OnMesh,
    Seen,
    backward,
    copied,
    differences,
    differences_of_stepped,
    once,
    stepped,
    train,
)
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
    "v-half": "v-half",
    "v-min": "v-min",
}
PRECISIONS: dict[str, dict[str, Any]] = {  # of what travels, and of what is stepped
    "fp32": {},
    "wire": {"reduce_dtype": torch.float64},
    "master": {"master_dtype": torch.float64},
    "both": {"reduce_dtype": torch.float64, "master_dtype": torch.float64},
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
    # v-half and v-min place stages as zbv does: rows of their own have what differs.
    "schedule": tuple(name for name in SCHEDULES if not name.startswith("v-")),
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

    def exact(self, *, steps: int = 1) -> float:
        """Returns the relative error of fp32 after some steps, for sums in another order."""
        rows = ROWS * self.num_microbatches * self.data
        return rounding(rows * TOKENS * int(self.parts) * steps)

    @property
    def made(self) -> Schedule:
        return make_schedule(self.schedule, self.pipeline, self.num_microbatches)

    @property
    def training(self) -> dict[str, Any]:
        """How `train` trains it."""
        return {
            "steps": self.steps,
            "parts": int(self.parts),
            "clip": (MAX_NORM, 2.0) if self.clip == "clip" else None,
            "set_to_none": self.zeroed == "none",
        }

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
    return model  # type: ignore[no-any-return]


def boundaries(num_stages: int) -> list[int]:
    return [round(LAYERS * stage / num_stages) for stage in range(1, num_stages)]


# One process.


@dataclass
class Truth(Seen):
    """What one process sees, or a rank that says the same.

    Attributes:
        evaluated: Losses of the first batch of each step, after it.
        read: Parameters after the first step.
    """

    evaluated: list[Tensor] = field(default_factory=list)
    read: dict[str, Tensor] = field(default_factory=dict)


def truth(case: Case) -> Truth:
    """Returns how one process trains; many cases are one to it."""
    ranks: Any = dict.fromkeys(("handlers", "schedule", "precision", "recompute"), "")
    return _truth(replace(case, **ranks, buckets="", after="", end=""))


@once
def _truth(case: Case) -> Truth:
    model, true = build(case), Truth()
    named = dict(model.named_parameters(remove_duplicate=False))

    def step(number: int, part: int) -> Tensor:
        tokens, target = case.batch(number, part)
        return backward(loss_of(model(tokens), target))

    @torch.no_grad()
    def look(number: int) -> None:
        tokens, target = case.batch(number, 0)
        true.evaluated.append(loss_of(model(tokens), target))
        true.read = true.read or copied(named)

    optimizer = case.make_optimizer(model.parameters())
    seen = train(step, lambda: named, optimizer=optimizer, look=look, **case.training)
    return replace(true, **vars(seen))


# The ranks.


class Run:
    """One case on one rank, and what of it is not as in one process, by name."""

    def __init__(self, case: Case) -> None:
        self.case, model = case, build(case)
        self.names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.ties = [*find_tied(model)]
        self.at, places = topology(case.pipeline), case.made.stage_to_rank
        parts = cut(model, len(places), boundaries=boundaries(len(places)))
        local = self.at.with_stages(places).local_stages
        self.modules = {stage: parts.modules[stage] for stage in local}
        self.scheduler = Scheduler(
            [Stage(m, i, recompute=case.recompute != "keep") for i, m in self.modules.items()],
            self.at,
            schedule=case.made,
            loss_fn=loss_of,
            tied=parts.tied,
            handlers=HANDLERS[case.handlers],
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
        self.seen = Truth()

    def train(self) -> None:
        seen = train(
            self._step,
            lambda: stepped(self.sync),
            sync=self.sync,
            optimizer=self.optimizer,
            look=self._look,
            **self.case.training,
        )
        self.seen = replace(self.seen, **vars(seen))
        if self.case.end == "wait":
            self.sync.wait_parameters()
            self.seen.parameters = copied(self._held)
            self.sync.check_replicas()
        self.scheduler.close()
        if self.case.end == "close":
            self.seen.parameters = copied(self._held)

    def _step(self, number: int, part: int) -> Tensor:
        tokens, target = (share(whole, self.at) for whole in self.case.batch(number, part))
        return self.scheduler.step(tokens, target=target).loss

    def _look(self, number: int) -> None:
        """Does what comes after a step of the optimizer, whose gradients are still there."""
        if self.case.after.startswith("publish"):
            self.sync.publish()
        if self.case.after.endswith("eval"):
            tokens, target = (share(whole, self.at) for whole in self.case.batch(number, 0))
            self.seen.evaluated.append(self.scheduler.evaluate(tokens, target=target).loss)
        if self.case.after == "read":
            self.sync.wait_parameters()
            self.seen.read = self.seen.read or copied(self._held)

    @property
    def _held(self) -> dict[str, nn.Parameter]:
        modules = self.modules.values()
        return {n: p for m in modules for n, p in m.named_parameters(remove_duplicate=False)}

    # What is not as in one process.

    @functools.cached_property
    def true(self) -> Truth:
        return truth(self.case)

    def numbers(self) -> dict[str, float]:
        """Of losses, of those of an evaluation right after a step, and of norms."""
        most = self.case.exact(steps=self.case.steps)
        pairs = zip(self.seen.evaluated, self.true.evaluated, strict=False)
        evaluated = {f"evaluated {n}": error(*pair) for n, pair in enumerate(pairs)}
        numbers = differences(replace(self.seen, gradients=[]), self.true, most)
        return numbers | wrong(evaluated, most)

    def gradients(self) -> dict[str, float]:
        """Of the first step's, wherever they are stepped."""
        pair = self.seen.gradients[0], self.true.gradients[0]
        return wrong(differences_of_stepped(self.sync, *pair), self.case.exact())

    def parameters(self) -> dict[str, float]:
        """In the end, and after the first step if they were read then."""
        found = {}
        for when, mine, true in (
            ("in the end", self.seen.parameters, self.true.parameters),
            ("after a step", self.seen.read, self.true.read),
        ):
            for name, parameter in mine.items():
                found[f"{name} {when}"] = error(parameter, true[name]) / self._most(name)
        return wrong(found, 1.0)

    def copies(self) -> set[str]:
        """Names of which a rank has other bits than what it has stepped."""
        found = set[str]()
        for one in self.sync.main_parameters():
            part = in_memory_order(self.seen.parameters[one.record.name])[one.begin :]
            mine = in_memory_order(one.tensor.detach().to(part.dtype))
            found |= set() if torch.equal(mine, part[: len(mine)]) else {one.record.name}
        return found

    def _most(self, name: str) -> float:
        """Returns how far a parameter may be from that of one process."""
        case, gradient = self.case, self.true.gradients[0][name]
        most = case.exact(steps=case.steps)
        if case.optimizer == "AdamW" and gradient is not None:  # which moves it for rounding
            rate, largest = LEARNING_RATES["AdamW"] * case.steps, self.true.parameters[name].abs()
            most += rate / ADAM_EPS * case.exact() * (gradient.abs().max() / largest.max()).item()
        return most


def product(steps: int = 3) -> Iterator[Case]:
    """Yields a case of every product of some factors; of the others it has a random level."""
    chance = random.Random(7)
    for levels in itertools.product(*(FACTORS[name] for name in CROSSED)):
        named = {name: chance.choice(known) for name, known in FACTORS.items()}
        yield Case.of([*(named | dict(zip(CROSSED, levels, strict=True))).values()], steps)
