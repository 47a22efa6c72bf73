"""Scheduler against one process: stages hung together by names, wherever they are.

One process runs them one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage
from tests.support.pipeline.pieces import Part, Wiring
from tests.support.pipeline.schedulers import (
    MOST,
    Report,
    Sent,
    compare,
    error,
    finder,
    greedy,
    named,
    run_each,
    topology,
    wrong,
)
from tests.support.pipeline.wirings import wirings
from tests.support.worlds import smoked

# One process.


def alone(parts: Sequence[Part], given: Mapping[str, Any]) -> Tensor:
    """Returns what the last stage makes, in one process."""
    known = dict(given)
    for module, inputs, outputs in parts:
        keywords: Sequence[str] = getattr(module, "keywords", ())
        positions = [known[name] for name in inputs.split() if name not in keywords]
        out = module(*positions, **{name: known[name] for name in keywords})
        names = outputs.split()
        if isinstance(out, Mapping):
            known |= {name: out[name] for name in names}
        else:
            values = out if isinstance(out, tuple | list) else (out,)
            known |= dict(zip(names, values, strict=True))
    last: Tensor = known[parts[-1][2]]
    return last


def microbatches(
    wiring: Wiring, given: Mapping[str, Any], target: Tensor
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yields what each microbatch is given, and its target."""
    number = wiring.num_microbatches
    for m in range(number):
        cut = {n: v.chunk(number)[m] if _is_cut(v) else v for n, v in given.items()}
        yield cut, target.chunk(number)[m]


def accumulated(
    wiring: Wiring, parts: Sequence[Part], given: Mapping[str, Any], target: Tensor
) -> Tensor:
    """Returns the mean loss of all microbatches, and leaves the gradients.

    Not by backward(): torch may leave the gradients of two parameters in one storage, and then adds
    those of the next microbatch to both.
    """
    parameters = [p for module, _, _ in parts for p in module.parameters() if p.requires_grad]
    total = torch.zeros(())
    for part, wanted in microbatches(wiring, given, target):
        loss = wiring.loss(alone(parts, part), wanted) / wiring.num_microbatches
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                before = 0.0 if parameter.grad is None else parameter.grad
                parameter.grad = gradient + before
        total += loss.detach()
    return total


@torch.no_grad()
def evaluated(
    wiring: Wiring, parts: Sequence[Part], given: Mapping[str, Any], target: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the mean loss, and what the last stage makes."""
    losses, outputs = list[Tensor](), list[Tensor]()
    for part, wanted in microbatches(wiring, given, target):
        outputs.append(alone(parts, part))
        losses.append(wiring.loss(outputs[-1], wanted))
    whole = torch.cat(outputs) if outputs[0].dim() else torch.stack(outputs)
    return torch.stack(losses).mean(), whole


def _is_cut(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


# One rank.


def run_wiring(wiring: Wiring) -> Report:
    """Trains three steps and evaluates two, the first ones of which learn. Runs on every rank."""
    at, report = topology(wiring.num_ranks), Report()
    parts, true = wiring.built(), wiring.built()
    whole = nn.ModuleList([module for module, _, _ in true])
    local = at.with_stages(wiring.places).local_stages
    again = wiring.recompute
    stages = [
        Stage(parts[s][0], s, parts[s][1].split(), parts[s][2].split(), recompute=again)
        for s in local
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
    mine = {f"{s.index}.{n}": p for s in stages for n, p in named([s]).items()}
    for step in range(3):
        given, target = wiring.batch(step)
        result = scheduler.step(**given, target=target)
        true_loss = accumulated(wiring, true, given, target)
        report.errors[f"step {step} loss"] = error(result.loss, true_loss)
        compare(report.errors, step, mine, whole, lenient=wiring.lenient)
        report.buffers.append(scheduler.receive_buffers)
    for step in range(2):
        given, target = wiring.batch(step)
        result = scheduler.evaluate(**given, target=target)
        true_loss, true_out = evaluated(wiring, true, given, target)
        report.errors[f"evaluation {step} loss"] = error(result.loss, true_loss)
        for out in result.outputs:
            report.errors[f"evaluation {step} out"] = error(out, true_out)
    report.sent = sent(scheduler)
    scheduler.close()
    return report


def sent(scheduler: Scheduler) -> list[Sent]:
    """Returns what crosses, in the program of a step that is not the first."""
    program = scheduler.program
    return [(program.links[c.link].name, *c[1:]) for c in program.channels]


# As it is; with its backward split; and some with their forwards run again.
WIRINGS = [
    *wirings,
    *(replace(w, late=number % 3) for number, w in enumerate(wirings)),
    *(
        replace(w, late=number % 4 - 1, recompute=True)
        for number, w in enumerate(wirings)
        if number % 2
        and w.name != "a_parameter_that_the_first_microbatch_does_not_use"  # it counts
    ),
]


def run_wirings(names: list[str]) -> list[Report]:
    return run_each(run_wiring, WIRINGS, names)


found = finder(WIRINGS, run_wirings)

SMOKE = next(w for w in WIRINGS if str(w) == "skips (0, 1, 1, 0), B first, 6")  # both ranks take it
every_wiring = pytest.mark.parametrize("wiring", smoked(WIRINGS, SMOKE))


@every_wiring
def test_a_wiring_computes_what_one_process_does(wiring: Wiring) -> None:
    reports = found(wiring)

    for at, report in enumerate(reports):
        assert wrong(report.errors, MOST) == {}, f"{wiring}, rank {at}"
    parameters = [
        f"{stage}.{name}"
        for stage, (module, _, _) in enumerate(wiring.parts())
        for name, _ in module.named_parameters()
    ]
    steps = {f"step {step} {name}" for step in range(3) for name in (*parameters, "loss")}
    evaluations = {f"evaluation {step} {name}" for step in range(2) for name in ("loss", "out")}
    assert {name for report in reports for name in report.errors} == steps | evaluations


@every_wiring
def test_a_wiring_makes_no_more_buffers_in_later_steps(wiring: Wiring) -> None:
    for at, report in enumerate(found(wiring)):
        learning, second, third = report.buffers
        assert learning <= second == third, f"{wiring}, rank {at}"


def crossing(name: str, places: Sequence[int]) -> set[Any]:
    (wiring,) = (w for w in wirings if (w.name, w.places) == (name, tuple(places)))
    (sent,) = {tuple(report.sent) for report in found(wiring)}
    assert len(set(sent)) == len(sent)
    return set(sent)


def test_a_value_crosses_once_to_a_rank_however_many_of_its_stages_take_it() -> None:
    there = {("skip", "F", 0, 1), ("x", "F", 0, 1)}

    assert crossing("skips", (0, 1, 1, 1)) == there | {(n, "B", 1, 0) for n, *_ in there}
    assert crossing("skips", (0, 0, 0, 0)) == set()


def test_a_value_goes_straight_to_each_rank_that_takes_it() -> None:
    found = crossing("skips", (0, 1, 2, 3))

    forth = {(name, source, target) for name, kind, source, target in found if kind == "F"}
    back = {(name, target, source) for name, kind, source, target in found if kind == "B"}
    assert forth == back
    assert {target for name, source, target in forth if (name, source) == ("skip", 0)} == {1, 2, 3}
    assert {target for name, source, target in forth if name == "other"} == {3}
    assert {n for n, *_ in crossing("skips", (0, 1, 1, 0))} == {"x", "skip", "other"}


def test_what_has_no_gradient_sends_none_back() -> None:
    def back(name: str) -> set[Any]:
        return {(n, s, t) for n, kind, s, t in crossing(name, (0, 1, 2)) if kind == "B"}

    assert back("integers_and_bools") == {("x", 1, 0), ("x", 2, 1)}
    assert back("nothing_but_integers") == back("frozen_first") == {("x", 2, 1)}
    assert back("frozen_middle") == back("frozen_last") == {("x", 1, 0), ("x", 2, 1)}
    assert back("frozen_but_the_last") == set()
