"""One model under any placement, trained by ranks and by one process; and how they are compared.

What is stepped are pieces of parameters, on some ranks, and parameters come back in several ways.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import GradientHandler, Scheduler, Stage, cut, find_tied, schedules
from pipegrad.plugins.handler import handlers as registry
from pipegrad.schedules import Schedule
from tests.support.gradients.placements import WHOLE, By, in_memory_order
from tests.support.pipeline.models import LAYERS, TOKENS, WIDTH, Block, Lookup, matrix, tied
from tests.support.pipeline.schedulers import ROWS, batch, error, share, topology, wrong
from tests.support.pipeline.trained import (
    OnMesh,
    Seen,
    backward,
    copied,
    differences,
    digests_of,
    once,
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
class Truth(Seen):
    """What one process sees, or a rank that says the same.

    Attributes:
        evaluated: Losses of the first batch of each step, after it.
        read: Parameters after the first step.
        terms: For each gradient of the first step the sum of the absolute values of its terms.
    """

    evaluated: list[Tensor] = field(default_factory=list)
    read: dict[str, Tensor] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)


def truth(case: Case) -> Truth:
    """Returns how one process trains; many cases are one to it."""
    known = replace(case, handlers="", schedule="", recompute="", buckets="", after="", end="")
    return _truth(known)


@once
def _truth(case: Case) -> Truth:
    model, true = build(case).float(), Truth()  # the master copy, where parameters are lower
    worker = nn.Sequential(*map(copy.deepcopy, model)).to(case.dtype)  # no two layers share any
    named = dict(model.named_parameters(remove_duplicate=False))

    def step(number: int, part: int) -> Tensor:
        """What a rank rounds within a microbatch is rounded here too; what it adds up is not."""
        tokens, target = case.batch(number, part)
        if case.is_exact:
            return backward(loss_of(model(tokens), target))
        losses = list[Tensor]()
        for loss in _losses(case, worker, tokens, target):
            losses.append(backward(loss / case.num_microbatches).detach() / case.data)
            for name, parameter in worker.named_parameters():
                if parameter.grad is not None:
                    term, master = parameter.grad.float() / case.data, named[name]
                    master.grad = term.clone() if master.grad is None else master.grad + term
                    if number == 0:
                        true.terms[name] = true.terms.get(name, torch.zeros(())) + term.abs()
                    parameter.grad = None
        return torch.stack(losses).sum()

    @torch.no_grad()
    def look(number: int) -> None:
        tokens, target = case.batch(number, 0)
        losses = [loss_of(model(tokens), target)]
        if not case.is_exact:
            for name, parameter in worker.named_parameters():
                parameter.copy_(named[name])
            losses = [*_losses(case, worker, tokens, target)]
        true.evaluated.append(torch.stack(losses).mean())
        true.read = true.read or copied(named)

    optimizer = case.make_optimizer(model.parameters())
    seen = train(step, lambda: named, optimizer=optimizer, look=look, **case.training)
    return replace(true, **vars(seen))


def _losses(case: Case, model: nn.Module, tokens: Tensor, target: Tensor) -> Iterator[Tensor]:
    """Yields the losses of the microbatches of all ranks."""
    number = case.num_microbatches * case.data
    for one, its_target in zip(tokens.chunk(number), target.chunk(number), strict=True):
        yield loss_of(model(one), its_target)


# The ranks.


class Known:
    """What is known of the model of a case without training it.

    Attributes:
        named: Parameters of the uncut model as they begin.
        ties: Names of each parameter.
        roots: The first name of each parameter, by which others are known too.
        trained: Roots of those that require a gradient.
    """

    def __init__(self, case: Case) -> None:
        self.case, model = case, build(case)
        self.named = dict(model.named_parameters(remove_duplicate=False))
        self.ties = {name: [name] for name in self.named}
        self.ties |= {name: list(tie) for tie in find_tied(model) for name in tie}
        self.roots = {name: tie[0] for name, tie in self.ties.items()}
        self.trained = [
            name for name, p in self.named.items() if p.requires_grad and self.roots[name] == name
        ]

    def holders(self, root: str) -> list[int]:
        """Returns who holds a parameter, along the pipeline."""
        places = self.case.made.stage_to_rank
        starts = [0, *boundaries(len(places))]
        layers = {int(name.partition(".")[0]) for name in self.ties[root]}
        return sorted({places[sum(start <= layer for start in starts) - 1] for layer in layers})

    def steppers(self, root: str) -> list[tuple[int, ...]]:
        """Returns the ranks that together step a parameter, in the order of their rows."""
        holders, data = self.holders(root), self.case.data
        if self.case.is_owned:
            holders = holders[:1]
        rows = [tuple(range(place * data, (place + 1) * data)) for place in holders]
        return rows if self.case.is_sharded else [(rank,) for row in rows for rank in row]


class Run(Known):
    """One case on one rank, and what of it is not as in one process, by name.

    Attributes:
        idle: Parameters whose gradient is there in the first step, and nothing steps.
        replayed: What one optimizer makes of the gradients that this rank steps.
        padding: Elements of its sharded buckets that are no parameter's.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.at, places = topology(case.pipeline), case.made.stage_to_rank
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
        self.seen, self.idle, self.padding = Truth(), list[str](), 0
        self.replayed = {
            root: nn.Parameter(self.part(root, self.named[root].detach().float()))
            for root in self.mains
        }
        self._replay = case.make_optimizer(self.replayed.values())

    def train(self) -> None:
        seen = train(
            self._step,
            lambda: {root: one.tensor for root, one in self.mains.items()},
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
        for bucket in self.sync.plan.buckets:
            if len(bucket.region(self.at.rank, len(bucket.route))) < bucket.payload_numel:
                self.padding += bucket.payload_numel - sum(s.numel for s in bucket.slots)

    def _step(self, number: int, part: int) -> Tensor:
        tokens, target = (share(whole, self.at) for whole in self.case.batch(number, part))
        loss = self.scheduler.step(tokens, target=target).loss
        if number == 0 and part + 1 == int(self.case.parts):
            used = {id(one.tensor) for one in self.mains.values()}
            left = {name: p for name, p in self._held.items() if p.grad is not None}
            self.idle = [name for name, p in left.items() if id(p) not in used]
        return loss

    def _look(self, number: int) -> None:
        """Does what comes after a step of the optimizer, whose gradients are still there."""
        for root, one in self.mains.items():
            gradient = one.tensor.grad
            self.replayed[root].grad = None if gradient is None else self.flat(root, gradient)
        self._replay.step()
        if self.case.after.startswith("publish"):
            self.sync.publish()
        if self.case.after.endswith("eval"):
            tokens, target = (share(whole, self.at) for whole in self.case.batch(number, 0))
            self.seen.evaluated.append(self.scheduler.evaluate(tokens, target=target).loss)
        if self.case.after == "read":
            self.sync.wait_parameters()
            self.seen.read = self.seen.read or copied(self._held)

    @property
    def mains(self) -> dict[str, Any]:
        """What this rank's optimizer steps, by root."""
        return {self.roots[one.record.name]: one for one in self.sync.main_parameters()}

    @property
    def _held(self) -> dict[str, nn.Parameter]:
        modules = self.modules.values()
        return {n: p for m in modules for n, p in m.named_parameters(remove_duplicate=False)}

    def flat(self, root: str, tensor: Tensor) -> Tensor:
        """Returns the elements of a parameter, or of a piece of it, as they lie in memory."""
        if tensor.shape == self.named[root].shape:
            tensor = torch.empty_like(self.named[root], dtype=tensor.dtype).copy_(tensor)
        return in_memory_order(tensor)

    def part(self, root: str, whole: Tensor) -> Tensor:
        """Returns the elements that this rank steps."""
        one = self.mains[root]
        return self.flat(root, whole)[one.begin : one.begin + one.tensor.numel()]

    # What is not as in one process.

    @functools.cached_property
    def true(self) -> Truth:
        return truth(self.case)

    def numbers(self) -> dict[str, float]:
        """Of losses, of those of an evaluation right after a step, and of norms."""
        case = self.case  # of a lower precision it is a unit in the last place
        most = case.exact(steps=case.steps) if case.is_exact else 2 * ROUNDING
        pairs = zip(self.seen.evaluated, self.true.evaluated, strict=False)
        evaluated = {f"evaluated {n}": error(*pair) for n, pair in enumerate(pairs)}
        numbers = differences(replace(self.seen, gradients=[]), self.true, most)
        return numbers | wrong(evaluated, most)

    def gradients(self) -> dict[str, float]:
        """Of the first step's, wherever they are stepped: how many times what they may be."""
        found = {}
        for root, mine in self.seen.gradients[0].items():
            true = self.true.gradients[0][root]
            if mine is None or true is None:
                found[root] = 0.0 if mine is true else math.inf
                continue
            limits = torch.full_like(true, self.case.exact() * true.abs().max().item())
            if not self.case.is_exact:
                # An element is rounded with each addend on its way, by at most so much of them all.
                for name in self.ties[root]:
                    terms = self.true.terms.get(name, torch.zeros(()))
                    limits += self._num_roundings(root) * ROUNDING * terms
            apart = (self.flat(root, mine).float() - self.part(root, true)).abs()
            used = apart / self.part(root, limits).clamp(min=1e-30)
            found[root] = used.max().item() if len(used) else 0.0
        return wrong(found, 1.0)

    def parameters(self) -> dict[str, float]:
        """In the end, and after the first step if they were read then."""
        found = {}
        for when, mine, true in (
            ("in the end", self.seen.parameters, self.true.parameters),
            ("after a step", self.seen.read, self.true.read),
        ):
            for name, parameter in mine.items():
                value = error(parameter.float(), true[name].to(self.case.dtype).float())
                found[f"{name} {when}"] = value / self._parameter_limit(self.roots[name])
        return wrong(found, 1.0)

    def replays(self) -> dict[str, float]:
        """Of what was stepped, against what one optimizer makes of the same gradients."""
        found = {}
        for root, one in self.mains.items():
            mine, like = self.flat(root, one.tensor.detach()), self.replayed[root].detach()
            found[root] = error(mine, like) if len(mine) else 0.0
        return wrong(found, self.case.exact())

    def copies(self) -> set[str]:
        """Names of which two ranks, or a rank and what it has stepped, have other bits."""
        found = set[str]()
        for tensors in (self.seen.parameters, self.seen.read):
            digests = digests_of(tensors, [*self.ties.values()])
            found |= {name for name, known in digests.items() if len(set().union(*known)) > 1}
        for root, one in self.mains.items():
            stepped = self.flat(root, one.tensor.detach()).to(self.case.dtype)
            name = next(name for name in self.ties[root] if name in self.seen.parameters)
            found |= (
                set()
                if torch.equal(stepped, self.part(root, self.seen.parameters[name]))
                else {root}
            )
        return found

    # How far they may be.

    def _parameter_limit(self, root: str) -> float:
        case, largest = self.case, self.true.parameters[root].abs().max().item()
        gradient, rate = self.true.gradients[0][root], LEARNING_RATES["AdamW"] * case.steps
        if case.is_exact:
            limit = case.exact(steps=case.steps)
            if case.optimizer == "AdamW" and gradient is not None:  # which moves it for rounding
                limit += rate / ADAM_EPS * case.exact() * gradient.abs().max().item() / largest
            return limit
        # What began with zeros is a sum of gradients; a bit less of a cast makes a unit.
        limit = (self._num_roundings(root) + 2) * ROUNDING
        if case.optimizer == "AdamW":  # whichever sign rounding has left a gradient
            limit += 2 * rate / largest
        return limit

    def _num_roundings(self, root: str) -> int:
        """Returns how often a gradient is rounded to bf16: into a bucket, by each sum and mean."""
        number = len(self.holders(root)) + self.case.data
        if self.case.dtype == torch.bfloat16:
            number += self.case.num_microbatches * int(self.case.parts) * len(self.ties[root])
        return number


def product(steps: int = 3) -> Iterator[Case]:
    """Yields a case of every product of some factors; of the others it has a random level."""
    chance = random.Random(7)
    for levels in itertools.product(*(FACTORS[name] for name in CROSSED)):
        named = {name: chance.choice(known) for name, known in FACTORS.items()}
        yield Case.of([*(named | dict(zip(CROSSED, levels, strict=True))).values()], steps)
