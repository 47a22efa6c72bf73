"""Random pipelines on real ranks: gradients, losses and outputs are those of one process.

A seed makes stages that are hung together at random, where they are, and what runs them: a schedule
of the registry, or any order that can be run. ``scripts/fuzz --minutes 60 -k wirings`` draws seeds
that are new each time. ``PIPEGRAD_FUZZ_SEED=7 pytest tests/fuzz -k wirings`` repeats one.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pipegrad import Scheduler, Stage, schedules
from pipegrad.pipeline import edges
from pipegrad.schedules import Link, Schedule
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.models import TOKENS, VOCAB, WIDTH
from tests.support.pipeline.schedulers import MOST, ROWS, error, named, topology
from tests.support.pipeline.trained import differences, train
from tests.support.pipeline.wirings import STEPS, Part, Piece, Wiring, trained_alone
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.schedules.programs import random_order

SECONDS = 20 * float(os.environ.get("PIPEGRAD_FUZZ_MINUTES", "0"))  # for 2, 3 and 4 ranks each
SEED = os.environ.get("PIPEGRAD_FUZZ_SEED")
NUM_SEEDS = 6  # of the ordinary run
MOST_OF_GRADIENTS = rounding(17 * ROWS * TOKENS, dtype=torch.float64)
REGISTERED = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-min")

# What a stage may hand on beside x: of the stage, of what it has computed, and of integers.
EXTRAS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "other": lambda m, h, ids: m.linear(h).sin(),
    "same": lambda m, h, ids: h,
    "view": lambda m, h, ids: h.mT,
    "row": lambda m, h, ids: h[:, :1],
    "ragged": lambda m, h, ids: h[:, : 1 + int(ids.sum()) % h.shape[1]],
    "scalar": lambda m, h, ids: h.mean(),
    "parameter": lambda m, h, ids: m.p,
    "integers": lambda m, h, ids: (ids + 1) % VOCAB,
    "bools": lambda m, h, ids: ids > VOCAB // 2,
    "detached": lambda m, h, ids: h.detach(),
    "kept": lambda m, h, ids: m.kept,
}
# Of x and of what a stage has computed: what it makes of them.
MAKES: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "layer": lambda m, x, h, ids: m.linear(h),
    "pooled": lambda m, x, h, ids: m.linear(h).mean(1),  # of the last stage
    "sum": lambda m, x, h, ids: x + h,
    "hidden": lambda m, x, h, ids: h,
    "input": lambda m, x, h, ids: x,
    "view of input": lambda m, x, h, ids: x[:, :],
    "ragged": lambda m, x, h, ids: m.linear(h)[:, : 1 + int(ids.sum()) % h.shape[1]],
}


@dataclass(frozen=True)
class Plan:
    """A stage: which values it takes beside x and ids, reads, and hands on."""

    takes: tuple[str, ...]
    reads: tuple[str, ...]
    gives: dict[str, str]  # name -> kind of EXTRAS
    make: str
    is_frozen: bool
    recompute: bool

    def part(self) -> Part:
        module = Piece(self._forward, w=(WIDTH, WIDTH), p=(WIDTH,)).double()
        module.kept = torch.ones(1, WIDTH, dtype=torch.float64)
        module.requires_grad_(not self.is_frozen)
        return module, " ".join(("x", "ids", *self.takes)), " ".join(("x", *self.gives))

    def _forward(self, m: Any, x: Tensor, ids: Tensor, *extras: Tensor) -> tuple[Tensor, ...]:
        terms = [read(v) for n, v in zip(self.takes, extras, strict=True) if n in self.reads]
        h = torch.tanh(sum(terms, x @ m.w / 4 + m.p))
        made = MAKES[self.make](m, x, h, ids)
        return made, *(EXTRAS[kind](m, h, ids) for kind in self.gives.values())


def read(value: Tensor) -> Tensor:
    """Returns a number a row, or one for all rows."""
    value = value.double().sin()
    return value.mean() if value.dim() < 3 else value.flatten(1).mean(1)[:, None, None]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target.mean(1)).square().mean()


@dataclass(frozen=True)
class Drawn:
    """A pipeline."""

    wiring: Wiring
    plans: list[Plan]
    schedule: Schedule
    tied: list[dict[int, str]]
    tags: bool


def drawn(seed: int, num_ranks: int) -> Drawn:
    chance = random.Random(seed)
    number = chance.randint(1, 5)
    schedule: Schedule | None = None
    places = [r for r in range(num_ranks) for _ in range(chance.randint(1, 2))]
    chance.shuffle(places)
    if chance.random() < 0.5:
        name = chance.choice(REGISTERED)
        number *= num_ranks if name.startswith("interleaved") else 1
        sizes = {"num_ranks": num_ranks, "num_microbatches": number}
        schedule = schedules.generate(schedules.registry.resolve(name), **sizes)
        places = [*schedule.stage_to_rank]
    plans = planned(chance, len(places))
    if schedule is None:
        in_order = chance.random() < 0.5
        order = [*random_order(chance, links_of(plans), len(places), number, in_order=in_order)]
        by_rank = [tuple(a for a in order if places[a.stage] == r) for r in range(num_ranks)]
        first = chance.random() < 0.5
        schedule = Schedule("random", number, tuple(places), tuple(by_rank), head_w_first=first)
    trained = [s for s, plan in enumerate(plans) if not plan.is_frozen]
    ties = chance.sample(trained, 2) if len(trained) > 1 and chance.random() < 0.5 else []

    def parts() -> list[Part]:
        built: Any = [plan.part() for plan in plans]
        for stage in ties[1:]:
            built[stage][0].w = built[ties[0]][0].w
        return built  # type: ignore[no-any-return]

    def given(rows: int) -> dict[str, object]:
        x = torch.randn(rows, TOKENS, WIDTH, dtype=torch.float64)
        return {"x": x, "ids": torch.randint(VOCAB, (rows, TOKENS))}

    wiring = Wiring(f"seed {seed}", parts, tuple(places), given=given, loss=loss_of)
    wiring = replace(wiring, num_microbatches=number)
    tied = [dict.fromkeys(sorted(ties), "w")] if ties else []
    return Drawn(wiring, plans, schedule, tied, chance.random() < 0.5)


def planned(chance: random.Random, num_stages: int) -> list[Plan]:
    """Returns stages that hand on nothing that no stage takes."""
    known, plans = list[str](), list[Plan]()
    for stage in range(num_stages):
        takes = tuple(n for n in known if chance.random() < 0.6)
        reads = tuple(n for n in takes if chance.random() < 0.9)
        some = chance.sample("abc", chance.choice((0, 1, 1, 2)))
        is_last = stage == num_stages - 1
        gives = {} if is_last else {name: chance.choice([*EXTRAS]) for name in some}
        frozen = chance.random() < 0.15 and not is_last
        make = "pooled" if is_last else chance.choice([m for m in MAKES if m != "pooled"])
        plans.append(Plan(takes, reads, gives, make, frozen, chance.random() < 0.2))
        known = sorted({*known, *gives})
    needed = set[str]()
    for stage in reversed(range(num_stages)):
        plan = plans[stage]
        plans[stage] = replace(plan, gives={n: k for n, k in plan.gives.items() if n in needed})
        needed = needed - {*plan.gives} | {*plan.takes}
    return plans


def links_of(plans: list[Plan]) -> list[Link]:
    """Returns who takes what, as if all of it had gradients."""
    makers, links = dict[str, int](), dict[tuple[str, int], list[int]]()
    for stage, plan in enumerate(plans):
        for name in ("x", *plan.takes) if stage else ():
            links.setdefault((name, makers[name]), []).append(stage)
        makers |= dict.fromkeys(("x", *plan.gives), stage)
    return [Link(name, maker, tuple(takers)) for (name, maker), takers in links.items()]


def complaints(seed: int, num_ranks: int) -> dict[str, object]:
    """Returns what is not as in one process, by name; called on every rank."""
    case = drawn(seed, num_ranks)
    wiring, at = case.wiring, topology(num_ranks)
    parts = wiring.built()
    stages = [
        Stage(module, s, names.split(), outputs.split(), recompute=case.plans[s].recompute)
        for s, (module, names, outputs) in enumerate(parts)
        if wiring.places[s] == rank()
    ]
    held = {f"{s.index}.{n}": p for s in stages for n, p in named([s]).items()}
    true, evaluations = trained_alone(wiring)
    found = dict[str, object]()
    with mock.patch.object(edges, "has_tags", return_value=case.tags):
        scheduler = Scheduler(
            stages,
            at,
            schedule=case.schedule,
            loss_fn=wiring.loss,
            tied=case.tied,
            step_timeout_seconds=30,
        )
        with closing(scheduler):

            def step(number: int, _: int) -> Tensor:
                given, target = wiring.batch(number)
                return scheduler.step(**given, target=target).loss

            seen = train(step, lambda: held, sync=scheduler.sync, steps=STEPS)
            found |= differences(seen, true, MOST_OF_GRADIENTS, later=MOST, lenient=True)
            # Nobody reads a loss before the last one, so ranks may be a step ahead of others.
            batches = [wiring.batch(number) for number, _ in enumerate(evaluations)]
            results = [scheduler.evaluate(**given, target=target) for given, target in batches]
            for number, (result, (loss, out)) in enumerate(zip(results, evaluations, strict=True)):
                wrong = [error(result.loss, loss), *(error(o, out) for o in result.outputs)]
                found |= {f"evaluation {number}": wrong} if not max(wrong) <= MOST else {}
    return found


def seeds() -> Iterator[int]:
    """Yields seeds, the same ones on all ranks."""
    if SEED is not None or not SECONDS:
        yield from range(NUM_SEEDS) if SEED is None else [int(SEED)]
        return
    deadline, chance = time.monotonic() + SECONDS, random.SystemRandom()
    while True:
        seed, goes_on = gathered((chance.randrange(2**32), time.monotonic() < deadline))[0]
        if not goes_on:
            return
        yield seed


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(n, marks=pytest.mark.ranks(n, seconds=SECONDS + 120)) for n in (2, 3, 4)],
)
def test_random_wirings_compute_what_one_process_does(num_ranks: int) -> None:
    said = {seed: gathered(outcome(partial(complaints, seed, num_ranks))) for seed in seeds()}
    wrong = {seed: words for seed, words in said.items() if {*words} != {"{}"}}
    if SECONDS and rank() == 0:
        sys.stderr.write(f"{len(said)} pipelines of {num_ranks} ranks, wrong seeds: {[*wrong]}\n")
    assert wrong == {}
