"""Scheduler against one process: stages hung together by names, wherever they are.

One process runs them one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from pipegrad import Scheduler, Stage
from tests.support.pairwise import everything
from tests.support.pipeline.schedulers import MOST, error, greedy, named, topology
from tests.support.pipeline.trained import differences, on_ranks, once, train
from tests.support.pipeline.wirings import STEPS, Wiring, trained_alone, wirings
from tests.support.ranked import gathered


def variants() -> Iterator[Wiring]:
    """Yields wirings as they are, with their backward split, and with their forwards run again.

    Of alike wirings in several places every other one is split; one that is alone is both.
    """

    def kind(w: Wiring) -> Any:
        return w.name, w.first, w.num_microbatches, w.options

    sizes, seen = Counter(map(kind, wirings)), Counter[Any]()
    for number, wiring in enumerate(wirings):
        # Who counts the calls of its forward cannot run it again.
        can = wiring.name != "a_parameter_that_the_first_microbatch_does_not_use"
        whole, split = (-1, number % 4 // 2 == 0), (number % 3, number % 4 // 2 == 1)
        some = (
            [whole, split] if sizes[kind(wiring)] == 1 else [[whole, split][seen[kind(wiring)] % 2]]
        )
        seen[kind(wiring)] += 1
        if everything():
            some = [(late, again) for late in (-1, 0, 1, 2) for again in (False, True)]
        yield from dict.fromkeys(replace(wiring, late=n, recompute=a and can) for n, a in some)


truth = once(trained_alone)

THERE = {("skip", "F", 0, 1), ("x", "F", 0, 1)}
# What crosses, of some: once to a rank however many of its stages take it, straight to each rank
# that does; and nothing comes back of what has no gradient.
FORTH = [("x", 0, 1), ("x", 1, 2), ("x", 2, 3), ("other", 1, 3)]
FORTH += [("skip", 0, rank) for rank in (1, 2, 3)]
CROSSING: dict[tuple[str, tuple[int, ...]], Any] = {
    ("skips", (0, 1, 1, 1)): THERE | {(name, "B", 1, 0) for name, *_ in THERE},
    ("skips", (0, 0, 0, 0)): set(),
    ("skips", (0, 1, 2, 3)): {(n, "F", s, t) for n, s, t in FORTH}
    | {(n, "B", t, s) for n, s, t in FORTH},
}
BACK = {
    "integers_and_bools": {("x", 1, 0), ("x", 2, 1)},
    "nothing_but_integers": {("x", 2, 1)},
    "frozen_first": {("x", 2, 1)},
    "frozen_middle": {("x", 1, 0), ("x", 2, 1)},
    "frozen_last": {("x", 1, 0), ("x", 2, 1)},
    "frozen_but_the_last": set[Any](),
}
WIRINGS = list(variants())
SMOKE = next(w for w in WIRINGS if w.name == "skips" and w.places == (0, 1, 1, 0))


@pytest.mark.parametrize("wiring", on_ranks(WIRINGS, SMOKE))
def test_a_wiring_computes_what_one_process_does(wiring: Wiring) -> None:
    at, parts = topology(wiring.num_ranks), wiring.built()
    stages = [
        Stage(parts[s][0], s, parts[s][1].split(), parts[s][2].split(), recompute=wiring.recompute)
        for s in at.with_stages(wiring.places).local_stages
    ]
    scheduler = Scheduler(
        stages,
        at,
        schedule=greedy(
            wiring.places, wiring.num_microbatches, first=wiring.first, late=wiring.late
        ),
        loss_fn=wiring.loss,
        **dict(wiring.options),
    )
    held = {f"{s.index}.{n}": p for s in stages for n, p in named([s]).items()}

    def step(number: int, _: int) -> Tensor:
        given, target = wiring.batch(number)
        return scheduler.step(**given, target=target).loss

    seen = train(step, lambda: held, sync=scheduler.sync, steps=STEPS)
    known = replace(wiring, places=(), first="B", options=(), late=-1, recompute=False)
    true, evaluations = truth(known)
    assert differences(seen, true, MOST, lenient=wiring.lenient) == {}
    assert set().union(*gathered({*held})) == set(true.parameters)
    for number, (loss, out) in enumerate(evaluations):
        given, target = wiring.batch(number)
        result = scheduler.evaluate(**given, target=target)
        assert error(result.loss, loss) <= MOST
        assert [error(mine, out) <= MOST for mine in result.outputs] in ([], [True])
        assert bool(result.outputs) == (len(wiring.places) - 1 in {s.index for s in stages})

    program = scheduler.program
    sent = [(program.links[c.link].name, *c[1:]) for c in program.channels]
    if (crossing := CROSSING.get((wiring.name, wiring.places))) is not None:
        assert (set(sent), len(sent)) == (crossing, len(crossing))
    if wiring.places == (0, 1, 2):
        back = {(name, source, target) for name, kind, source, target in sent if kind == "B"}
        assert back == BACK.get(wiring.name, back)
        assert len(set(sent)) == len(sent)
    if wiring.name == "skips" and wiring.places == (0, 1, 1, 0):
        assert {name for name, *_ in sent} == {"x", "skip", "other"}
    scheduler.close()


def test_some_of_each_wiring_are_split_and_some_are_not() -> None:
    for name in {wiring.name for wiring in wirings}:
        assert {w.late >= 0 for w in WIRINGS if w.name == name} == {True, False}
    assert {(w.recompute, w.late) for w in WIRINGS} >= {
        (a, n) for a in (True, False) for n in (-1, 0, 1, 2)
    }
    assert {*CROSSING} <= {(w.name, w.places) for w in WIRINGS}
    assert {(name, (0, 1, 2)) for name in BACK} <= {(w.name, w.places) for w in WIRINGS}
