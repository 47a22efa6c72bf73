"""Losses of stages, weights and metrics against one process, under schedules and placements.

With ``token_mean`` one process calls cross_entropy with ignore_index once, over the whole batch.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipegrad import Scheduler
from tests.support.pairwise import pairwise
from tests.support.pipeline.losses import (
    LEARNING_RATE,
    MOST,
    TIED,
    Case,
    Result,
    alone,
    build,
)
from tests.support.pipeline.schedulers import error, share, topology, wrong
from tests.support.pipeline.trained import (
    Seen,
    backward,
    bits,
    differences,
    held_by,
    on_ranks,
    once,
    train,
)
from tests.support.ranked import gathered

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
PLACEMENTS = ("replicate", "sharded", "owner", "owner+sharded")
SMOKE = Case("1f1b", mesh="2x1")
CASES = [
    *(
        Case(schedule, handlers, loss_reduction=reduction, recompute=again)
        for schedule, handlers, reduction, again in pairwise(
            SCHEDULES, PLACEMENTS, ("token_mean", "mean"), (False, True)
        )
    ),
    Case("1f1b", mesh="4x1"),
    Case("zb-h1", mesh="4x1", loss_reduction="mean"),
    Case("gpipe", mesh="4x1"),
    Case("1f1b", "sharded", mesh="1x4"),
    Case("zb-h1", "owner", mesh="2x1", loss_reduction="mean", recompute=True),
    SMOKE,
]
# The first step learns the names of the metrics, and the last one accumulates two batches.
BATCHES, EVALUATED = ((0,), (1,), (10, 11)), 20
TRAINING: dict[str, Any] = {"steps": len(BATCHES), "parts": [len(parts) for parts in BATCHES]}


@once
def truth(reduction: str) -> tuple[Seen, list[Result]]:
    """Trains in one process, and evaluates; returns the results too."""
    model, results = build(), list[Result]()

    def step(number: int, part: int) -> Tensor:
        parts = BATCHES[number]
        found = alone(reduction, model, parts[part])
        results.append(replace(found, loss=found.loss.detach()))
        if reduction == "mean":
            return backward(found.loss)
        if part + 1 == len(parts):  # with weights a step is one batch of all
            backward(alone(reduction, model, *parts).loss)
        return found.loss

    held = dict(model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    seen = train(step, lambda: held, optimizer=optimizer, **TRAINING)
    with torch.no_grad():
        results.append(alone(reduction, model, EVALUATED))
    return seen, results


def gradient_errors(scheduler: Scheduler, gradients: Any, true: Any) -> dict[str, float]:
    """Returns the errors of what this rank's optimizer steps: parameters, or shards of them."""
    found = {}
    for main in scheduler.sync.main_parameters():
        name = main.record.name
        mine, whole = gradients[f"{name} from {main.begin}"], true[name]
        if main.sharded and mine is not None:
            part = whole.flatten()[main.begin : main.begin + main.tensor.numel()]
            apart = (mine - part).abs()
            found[name] = (apart.max() / whole.abs().max()).item() if len(part) else 0.0
        else:
            found[name] = error(mine, whole)
    return found


@pytest.mark.parametrize("case", on_ranks(CASES, SMOKE))
def test_loss_metrics_and_gradients_are_those_of_one_process(case: Case) -> None:
    at, scheduler = topology(case.pipeline), case.scheduler(build())
    sync, results, tied = scheduler.sync, list[Any](), list[dict[str, Tensor]]()
    mine = functools.partial(held_by, scheduler)

    def look() -> None:
        """Looks at what is tied, after the optimizer."""
        sync.wait_parameters()
        tied.append({n: p.detach().clone() for n, p in mine().items() if n in TIED[0]})

    def step(number: int, part: int) -> Tensor:
        if number > 0 and part == 0:
            look()
        tokens, target = case.batch(BATCHES[number][part])
        results.append(scheduler.step(tokens, target=target, outputs=True))
        return results[-1].loss  # type: ignore[no-any-return]

    def stepped() -> dict[str, Any]:
        return {f"{one.record.name} from {one.begin}": one.tensor for one in sync.main_parameters()}

    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=LEARNING_RATE)
    seen = train(step, stepped, sync=sync, optimizer=optimizer, **TRAINING)
    look()
    tokens, target = case.batch(EVALUATED)
    results.append(scheduler.evaluate(tokens, target=target))

    true, true_results = truth(case.loss_reduction)
    for number, gradients in enumerate(seen.gradients):
        errors = gradient_errors(scheduler, gradients, true.gradients[number])
        assert wrong(errors, MOST) == {}, f"step {number}"
        # Of two tied names the main parameter has the first.
        names = {TIED[0][0] if name in TIED[0] else name for name in true.parameters}
        assert set().union(*gathered({*errors})) >= names
    assert differences(replace(seen, gradients=[]), true, MOST) == {}
    for result, true_result in zip(results, true_results, strict=True):
        apart = {"loss": error(result.loss, true_result.loss)}
        assert result.metrics.keys() == true_result.metrics.keys()
        for name, value in true_result.metrics.items():
            apart[name] = abs(result.metrics[name] - value) / (abs(value) or 1.0)
        for n, out in enumerate(result.outputs):
            apart[f"output {n}"] = error(out, share(true_result.outputs, at))
        assert wrong(apart, MOST) == {}
        assert bool(result.outputs) == (at.coordinate("pp") == at.size("pp") - 1)
    numbers = [(result.loss.item(), *result.metrics.values()) for result in results]
    assert len({tuple(others) for others in gathered(numbers)}) == 1, "they differ by rank"
    assert len({*numbers}) == len(numbers), "a step that was not run again would not show"
    for copies in tied:
        assert bits(copies, TIED).keys() == {TIED[0][0]}
    sync.check_replicas()
    scheduler.close()
