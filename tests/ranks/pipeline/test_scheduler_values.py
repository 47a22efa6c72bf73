"""What a step is given: cut, whole, or refused; and graphs of the caller's that it comes from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from tests.support.gradients.cases import Case, Replies, on, outcome, rank, replies
from tests.support.pipeline.layers import (
    WIDTH,
    Layer,
    distance,
    make,
    mean_square,
    normal,
    train,
)
from tests.support.pipeline.scales import ELSEWHERE
from tests.support.schedules.programs import rows

PAIR: list[Case] = []
pair = replies(2, PAIR)
ROWS = 4
MOST = 1e-12  # float64; sums of some ten terms in another order


def batch() -> tuple[Tensor, Tensor]:
    return normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=1)


# What cannot be cut.


@on(PAIR)
def refused_values() -> Any:
    scheduler = make(Layer(), Layer())
    x, y = batch()
    given: dict[str, Callable[[], Any]] = {
        "numpy": lambda: train(scheduler, x.numpy(), target=y),
        "strings": lambda: train(scheduler, x=list("abcd"), target=y),
        "a target of numpy": lambda: train(scheduler, x, target=np.ones(ROWS)),
        "a target of strings": lambda: train(scheduler, x, target={"y": y, "names": list("abcd")}),
        "evaluated": lambda: scheduler.evaluate(x.numpy(), target=y),
    }
    said = {name: outcome(call) for name, call in given.items()}
    right = train(scheduler, x, target=y)
    said_later = {name: outcome(call) for name, call in given.items()}
    scheduler.close()
    return said, said_later, right


@pytest.mark.parametrize(
    ("case", "by", "words"),
    [
        ("numpy", 0, "the input 'x' is a ndarray, expected a tensor"),
        ("strings", 0, "the input 'x' is a list, expected a tensor"),
        ("a target of numpy", 1, "the target is a ndarray, expected a tensor"),
        ("a target of strings", 1, "the target['names'] is a list, expected a tensor"),
        ("evaluated", 0, "the input 'x' is a ndarray, expected a tensor"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_all_ranks(
    case: str, by: int, words: str, pair: Replies
) -> None:
    """Issue 16, point 4: each microbatch got all of it: loss 1.76, one process 1.72."""
    for place, reply in enumerate(pair):
        *answers, right = reply["refused_values"]
        for said in answers:
            start = "StepError: " if place == by else ELSEWHERE
            assert said[case].startswith(start)
            assert words in said[case]
            assert "whole=(" in said[case]
        assert right > 0


@on(PAIR)
def declared_whole() -> Any:
    """A table of as many rows as the batch has, a dict, and a target that all get."""
    names = {0: (("x", "rope", "extra"),), 1: (("x",),)}
    modules = [
        Layer(lambda linear, x, rope, extra: linear(x * rope.sum() * extra["scale"])),
        Layer(),
    ]
    options: dict[str, Any] = {"names": names, "whole": ("rope", "extra", "target")}
    scheduler = make(*modules, loss_fn=lambda x, target: (x * target["y"]).mean(), **options)
    (x, _), rope = batch(), normal(ROWS, WIDTH, seed=2)
    extra, target = {"scale": torch.tensor(0.5)}, {"y": 3.0}
    before = dict(scheduler.inputs)
    losses = [train(scheduler, x, rope, extra, target=target)]
    told = scheduler.inputs
    losses.append(train(scheduler, x, rope, extra, target=target))
    evaluated = float(scheduler.evaluate(x, rope, extra, target=target).loss)
    first, last = Layer(modules[0]._function), Layer()
    true = (last(first(x, rope, extra)) * 3.0).mean()
    scheduler.close()
    return before, told, [abs(f - float(true)) for f in (*losses, evaluated)]


def test_what_is_declared_whole_is_not_cut_and_steps_say_so(pair: Replies) -> None:
    """Issue 16, point 4: a table whose first size is the batch's was cut without a word."""
    first, last = (reply["declared_whole"] for reply in pair)
    assert (first[0], last[0]) == ({}, {})
    assert first[1] == {
        "x": "4 rows, cut into 4 microbatches of 1",
        "rope": "whole in every microbatch",
        "extra": "whole in every microbatch",
    }
    assert last[1] == {"target": "whole in every microbatch"}
    assert max(*first[2], *last[2]) < 1e-6  # the loss is float32


@on(PAIR)
def wrong_names_of_whole() -> Any:
    said = [
        outcome(lambda w=whole: make(Layer(), Layer(), whole=w))  # type: ignore[misc]
        for whole in ("x", ("rope",), 3)
    ]
    return [*said, outcome(lambda: make(Layer(), Layer(), whole=("x",) if rank() else ()))]


def test_wrong_names_of_what_is_whole_are_refused(pair: Replies) -> None:
    """Issue 16, point 4: declaring what is whole must not fail without a word itself."""
    for reply in pair:
        *said, differs = reply["wrong_names_of_whole"]
        for text, found in zip(said, ("'x'", "('rope',)", "3"), strict=True):
            wanted = "expected a tuple of names of what step() is given, out of ['x', 'target']"
            assert text == f"ScheduleError: whole is {found}, {wanted}"
        assert differs.startswith("AgreementError: ranks disagree on the schedule")


@on(PAIR)
def tables_that_are_cut() -> Any:
    """A table with as many rows as the batch, the same in each step, not declared."""
    names = {0: (("x", "rope", "mask"),)}
    modules = [Layer(lambda linear, x, rope, mask: linear(x * rope * mask)), Layer()]
    scheduler = make(*modules, names=names)
    x, y = batch()
    rope, mask = normal(ROWS, WIDTH, seed=2), torch.ones(ROWS, 1, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            train(scheduler, x.clone(), rope, mask, target=y)
    told = [
        (str(w.message), w.filename == train.__code__.co_filename)
        for w in caught
        if "whole" in str(w.message)
    ]
    scheduler.close()
    return told


def test_a_table_that_is_cut_though_every_step_has_the_same_is_warned_of(pair: Replies) -> None:
    """Issue 16, point 4: rotary frequencies of as many rows as the batch were cut."""
    (told,) = pair[0]["tables_that_are_cut"]
    assert told[0].startswith("the input 'rope' is the same tensor as in the step before")
    assert told[0].endswith("make the Scheduler with whole=('rope',)")
    assert told[1]


# Graphs of the caller's.

ORDERS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zb-h1": {"schedule": "zb-h1"},
    "recompute": {"recompute": True},
}


@on(PAIR)
def outer_graphs() -> Any:
    """Inputs, a whole one, and the target come from an encoder that the caller trains."""
    found = {}
    for order, options in ORDERS.items():
        modules = [
            Layer(lambda linear, x, more, table: linear(x + more * table.sum())),
            Layer(lambda linear, x, more: linear(x) + more),
        ]
        names = {0: (("x", "more", "table"),), 1: (("x", "more"),)}
        scheduler = make(*modules, names=names, whole=("table",), **options)
        for step in range(3):
            x, y = batch()
            given, encoder = encoded(x, y)
            train(scheduler, *given[:3], target=given[3])
            mine = {n: p.grad for n, p in encoder.items()}
            given, encoder = encoded(x, y)
            one = [Layer(module._function) for module in modules]
            if rank() == 0:  # what the other rank does with `more` goes into its own
                out = one[0](*given[:3])
                out = one[1](out, given[1].detach())
                mean_square(out, given[3].detach()).backward()
            else:
                out = one[1](one[0](*[v.detach() for v in given[:3]]), given[1])
                mean_square(out, given[3]).backward()
            found[f"{order} {step}"] = {n: distance(mine[n], encoder[n].grad) for n in mine}
            for module, true in zip(modules, one, strict=True):
                if module is modules[rank()]:
                    for p, q in zip(module.parameters(), true.parameters(), strict=True):
                        found[f"{order} {step}"]["own"] = distance(p.grad, q.grad)
                        p.grad = None
        scheduler.close()
    return found


def encoded(x: Tensor, y: Tensor) -> tuple[list[Tensor], dict[str, nn.Parameter]]:
    """Returns x, more, table and target, and the parameters they are made of."""
    made = {n: nn.Parameter(normal(WIDTH, WIDTH, seed=i)) for i, n in enumerate("abcd", start=5)}
    hidden = (x @ made["a"]).tanh()
    more = (hidden @ made["b"]).tanh()  # through one graph
    return [hidden, more, made["c"].exp(), (y @ made["d"]).tanh()], made


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_flow_once_into_what_inputs_were_made_of(order: str, pair: Replies) -> None:
    """Issue 16, point 13: M backwards ran into the caller's graph, which ends with the first."""
    for reply in pair:
        for step in range(3):
            found = reply["outer_graphs"][f"{order} {step}"]
            assert {n: d for n, d in found.items() if not d <= MOST} == {}
    assert pair[0]["outer_graphs"][f"{order} 0"]["d"] == 0.0


@on(PAIR)
def trees_with_graphs() -> Any:
    """Autograd gives both terms of a sum one gradient, and adds to that of the table in place."""
    found = {}
    for order, options in ORDERS.items():
        scheduler = make(
            Layer(lambda _, tree, table: tree["x"][0].view(-1) + table.view(-1)),
            Layer(lambda linear, x: linear(x.view(-1, WIDTH)).tanh()),
            names={0: (("tree", "table"),)},
            whole=("table",),
            **options,
        )
        errors = []
        for _ in range(2):
            x, y = batch()
            given, encoder = encoded(x, y)
            tree, table, target = {"x": [given[0]]}, given[2][:1], given[3].detach()
            train(scheduler, tree=tree, table=table, target=target)
            mine = {name: p.grad for name, p in encoder.items()}
            given, encoder = encoded(x, y)
            mean_square(Layer()(given[0] + given[2][:1]), given[3].detach()).backward()
            errors += [distance(mine[name], encoder[name].grad) for name in ("a", "c")]
        found[order] = errors if rank() == 0 else []
        scheduler.close()
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_flow_into_the_leaves_of_a_tree(order: str, pair: Replies) -> None:
    errors = pair[0]["trees_with_graphs"][order]
    assert len(errors) == 4
    assert all(error <= MOST for error in errors)


@on(PAIR)
def frozen() -> Any:
    """All parameters frozen, then those of one stage; split and not."""
    found = {}
    for frozen_stages in ((0, 1), (0,), (1,)):
        for order, options in ORDERS.items():
            modules = [Layer(), Layer()]
            for stage in frozen_stages:
                modules[stage].requires_grad_(False)
            scheduler = make(*modules, **options)
            x, y = batch()
            losses = [train(scheduler, x, target=y) for _ in range(3)]
            one = [Layer(), Layer()]
            for stage in frozen_stages:
                one[stage].requires_grad_(False)
            true = mean_square(one[1](one[0](x)), y)
            if true.requires_grad:
                true.backward()
            off = max(abs(loss - float(true)) for loss in losses)
            gradients = [
                distance(p.grad, q.grad)
                for p, q in zip(modules[rank()].parameters(), one[rank()].parameters(), strict=True)
            ]
            found[f"{frozen_stages} {order}"] = max(off, *gradients)
            scheduler.close()
    return found


def test_a_step_of_frozen_parameters_runs(pair: Replies) -> None:
    """Issue 16, point 13: "the loss does not depend on anything that requires a gradient"."""
    for reply in pair:
        assert {n: d for n, d in reply["frozen"].items() if not d <= 1e-6} == {}  # losses: float32


FIRST = "1F0 0F0 1F1 0F1 1B0 0B0 1B1 0B1"


@on(PAIR)
def towers() -> Any:
    """Two towers on one rank, the second first, and a head that takes both."""
    schedule = rows(FIRST, "2F0 2F1 2B0 2B1", stages=(0, 0, 1), num_microbatches=2)
    modules = [
        Layer(),
        Layer(lambda linear, x: linear(x).sigmoid()),
        Layer(lambda linear, a, b: linear(a * b)),
    ]
    names = [(("left",), ("a",)), (("right",), ("b",)), (("a", "b"), ("x",))]
    stages = [Stage(modules[i], i, *names[i]) for i in ([2] if rank() else [0, 1])]
    topology = Topology.create(pipeline=2)
    scheduler = Scheduler(
        stages, topology, schedule=schedule, loss_fn=mean_square, handlers=["noop"]
    )
    (x, y), right = batch(), normal(ROWS, WIDTH, seed=9)
    loss = train(scheduler, left=x, right=right, target=y)
    one = [Layer(module._function) for module in modules]
    true = mean_square(one[2](one[0](x), one[1](right)), y)
    true.backward()
    held = [(modules[s.index], one[s.index]) for s in stages]
    errors = [
        distance(p.grad, q.grad)
        for module, twin in held
        for p, q in zip(module.parameters(), twin.parameters(), strict=True)
    ]
    grid = str(scheduler.schedule)
    scheduler.close()
    return max(abs(loss - float(true)) / 1e6, *errors), grid


def test_towers_in_another_order_than_a_chains_are_run(pair: Replies) -> None:
    """Issue 16, point 11: "1F0 needs 'x', which has not arrived", where no stage makes an x."""
    for reply in pair:
        error, grid = reply["towers"]
        assert error <= MOST
        assert grid.splitlines()[0].split() == ["rank", "0", *FIRST.split()]
