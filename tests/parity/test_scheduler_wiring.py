"""Wirings that were once wrong, and the plainest one, compute what one process does.

tests/fuzz/test_wirings.py draws all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch import Tensor

from pipegrad import Scheduler, Stage
from tests.support.pipeline.schedulers import MOST, error, greedy, named, topology
from tests.support.pipeline.trained import differences, on_ranks, once, train
from tests.support.pipeline.wirings import STEPS, Wiring, trained_alone, wirings
from tests.support.ranked import gathered


def variants() -> Iterator[Wiring]:
    """Yields wirings whole and with their backward split; of each one runs its forwards again."""
    for number, wiring in enumerate(wirings):
        # Who counts the calls of its forward cannot run it again.
        can = wiring.name != "a_parameter_that_the_first_microbatch_does_not_use"
        yield replace(wiring, recompute=can and number % 2 == 0)
        yield replace(wiring, late=number % 3, recompute=can and number % 2 == 1)


truth = once(trained_alone)
WIRINGS = list(variants())


@pytest.mark.parametrize("wiring", on_ranks(WIRINGS))
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
    assert differences(seen, true, MOST) == {}
    assert set().union(*gathered({*held})) == set(true.parameters)
    for number, (loss, out) in enumerate(evaluations):
        given, target = wiring.batch(number)
        result = scheduler.evaluate(**given, target=target)
        assert error(result.loss, loss) <= MOST
        assert [error(mine, out) <= MOST for mine in result.outputs] in ([], [True])
        assert bool(result.outputs) == (len(wiring.places) - 1 in {s.index for s in stages})
    scheduler.close()
