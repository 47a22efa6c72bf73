"""What a step is given: cut, whole, or refused; and graphs of the caller's that it comes from."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.layers import (
    WIDTH,
    Layer,
    distance,
    farthest,
    make,
    mean_square,
    normal,
    train,
)
from tests.support.pipeline.scales import ELSEWHERE
from tests.support.schedules.programs import rows

ROWS = 4
MOST = 1e-12  # float64; sums of some ten terms in another order
MOST_OF_LOSS = 1e-6  # it is float32
X, Y = normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=1)
pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize(
    ("x", "target", "by", "words"),
    [
        (X.numpy(), Y, 0, "the input 'x' is a ndarray, expected a tensor"),
        (X, np.ones(ROWS), 1, "the target is a ndarray, expected a tensor"),
    ],
)
@pytest.mark.parametrize("verb", ["step", "evaluate"])
def test_what_cannot_be_cut_is_refused(x: Any, target: Any, by: int, words: str, verb: str) -> None:
    """Issue 16, point 4: each microbatch got all of it: loss 1.76, one process 1.72."""
    with closing(make(Layer(), Layer())) as scheduler:
        for _ in range(2):  # at first, and later
            said = outcome(partial(getattr(scheduler, verb), x=x, target=target))
            assert said.startswith("StepError: " if rank() == by else ELSEWHERE)
            assert words in said
            assert "whole=(" in said
            assert train(scheduler, X, target=Y) > 0


def test_what_is_declared_whole_is_not_cut_and_steps_say_so() -> None:
    """A table of as many rows as the batch has, a dict, and a target that all get."""
    first = Layer(lambda linear, x, rope, extra: linear(x * rope.sum() * extra["scale"]))
    options: dict[str, Any] = {
        "names": {0: (("x", "rope", "extra"),), 1: (("x",),)},
        "whole": ("rope", "extra", "target"),
        "loss_fn": lambda x, target: (x * target["y"]).mean(),
    }
    given = X, normal(ROWS, WIDTH, seed=2), {"scale": torch.tensor(0.5)}
    true = float((Layer()(first(*given)) * 3.0).mean())
    with closing(make(first, Layer(), **options)) as scheduler:
        assert dict(scheduler.inputs) == {}
        for _ in range(2):
            assert abs(train(scheduler, *given, target={"y": 3.0}) - true) < MOST_OF_LOSS
            whole = "whole in every microbatch"
            taken = {"x": "4 rows, cut into 4 microbatches of 1", "rope": whole, "extra": whole}
            assert scheduler.inputs == ({"target": whole} if rank() else taken)
        evaluated = scheduler.evaluate(*given, target={"y": 3.0}).loss
        assert abs(float(evaluated) - true) < MOST_OF_LOSS
    # Wrong names of what is whole are refused. Issue 16, point 4: declaring what is whole must not
    # fail without a word itself.
    make_with = partial(make, Layer(), Layer())
    wrong: list[tuple[Any, str]] = [("x", "'x'"), (("rope",), "('rope',)"), (3, "3")]
    for names, found in wrong:
        wanted = "expected a tuple of names of what step() is given, out of ['x', 'target']"
        said = outcome(partial(make_with, whole=names))
        assert said == f"ScheduleError: whole is {found}, {wanted}"
    differs = outcome(partial(make_with, whole=("x",) if rank() else ()))
    assert differs.startswith("AgreementError: ranks disagree on the schedule")


ORDERS = pytest.mark.parametrize(
    "options", [{}, {"schedule": "zb-h1"}, {"recompute": True}], ids=["1f1b", "zb-h1", "recompute"]
)


def encoded() -> tuple[list[Tensor], dict[str, nn.Parameter]]:
    """Returns x, more, table and target, and the parameters they are made of."""
    made = {n: nn.Parameter(normal(WIDTH, WIDTH, seed=i)) for i, n in enumerate("abcd", start=5)}
    hidden = (X @ made["a"]).tanh()
    more = (hidden @ made["b"]).tanh()  # through one graph
    return [hidden, more, made["c"].exp(), (Y @ made["d"]).tanh()], made


@ORDERS
def test_gradients_flow_once_into_what_inputs_were_made_of(options: dict[str, Any]) -> None:
    """Inputs, a whole one, and the target come from an encoder that the caller trains."""
    modules, one = (
        [
            Layer(lambda linear, x, more, table: linear(x + more * table.sum())),
            Layer(lambda linear, x, more: linear(x) + more),
        ]
        for _ in range(2)
    )
    names = {0: (("x", "more", "table"),), 1: (("x", "more"),)}
    with closing(make(*modules, names=names, whole=("table",), **options)) as scheduler:
        for _ in range(3):
            given, encoder = encoded()
            train(scheduler, *given[:3], target=given[3])
            true, twin = encoded()
            if rank() == 0:  # what the other rank does with `more` goes into its own
                out = one[1](one[0](*true[:3]), true[1].detach())
                mean_square(out, true[3].detach()).backward()
            else:
                out = one[1](one[0](*[value.detach() for value in true[:3]]), true[1])
                mean_square(out, true[3]).backward()
            for name, parameter in encoder.items():
                assert distance(parameter.grad, twin[name].grad) <= MOST, name
            assert farthest(modules[rank()], one[rank()]) <= MOST
            for module in one:
                module.zero_grad()
    # Gradients flow into the leaves of a tree. Autograd gives both terms of a sum one gradient, and
    # adds to that of the table in place.
    scheduler = make(
        Layer(lambda _, tree, table: tree["x"][0].view(-1) + table.view(-1)),
        Layer(lambda linear, x: linear(x.view(-1, WIDTH)).tanh()),
        names={0: (("tree", "table"),)},
        whole=("table",),
        **options,
    )
    for _ in range(2):
        given, encoder = encoded()
        tree, table, target = {"x": [given[0]]}, given[2][:1], given[3].detach()
        train(scheduler, tree=tree, table=table, target=target)
        true, twin = encoded()
        mean_square(Layer()(true[0] + true[2][:1]), true[3].detach()).backward()
        for name in "ac" if rank() == 0 else "":
            assert distance(encoder[name].grad, twin[name].grad) <= MOST
    scheduler.close()


@pytest.mark.parametrize("frozen", [(0, 1), (0,), (1,)])
@ORDERS
def test_a_step_of_frozen_parameters_runs(frozen: tuple[int, ...], options: dict[str, Any]) -> None:
    """Issue 16, point 13: "the loss does not depend on anything that requires a gradient"."""
    modules, one = [[Layer(), Layer()] for _ in range(2)]
    for stage in frozen:
        modules[stage].requires_grad_(False)
        one[stage].requires_grad_(False)
    true = mean_square(one[1](one[0](X)), Y)
    if true.requires_grad:
        true.backward()
    with closing(make(*modules, **options)) as scheduler:
        for _ in range(3):
            assert abs(train(scheduler, X, target=Y) - float(true)) <= MOST_OF_LOSS
    assert farthest(modules[rank()], one[rank()]) <= MOST


def test_towers_in_another_order_than_a_chains_are_run() -> None:
    """Two towers on one rank, the second first, and a head that takes both."""
    first = "1F0 0F0 1F1 0F1 1B0 0B0 1B1 0B1"
    schedule = rows(first, "2F0 2F1 2B0 2B1", stages=(0, 0, 1), num_microbatches=2)
    modules, one = (
        [
            Layer(),
            Layer(lambda linear, x: linear(x).sigmoid()),
            Layer(lambda linear, a, b: linear(a * b)),
        ]
        for _ in range(2)
    )
    names = [(("left",), ("a",)), (("right",), ("b",)), (("a", "b"), ("x",))]
    here = [2] if rank() else [0, 1]
    scheduler = Scheduler(
        [Stage(modules[i], i, *names[i]) for i in here],
        Topology.create(pipeline=2),
        schedule=schedule,
        loss_fn=mean_square,
        handlers=["noop"],
    )
    right = normal(ROWS, WIDTH, seed=9)
    loss = train(scheduler, left=X, right=right, target=Y)
    true = mean_square(one[2](one[0](X), one[1](right)), Y)
    true.backward()
    assert abs(loss - float(true)) <= MOST_OF_LOSS
    assert max(farthest(modules[i], one[i]) for i in here) <= MOST
    assert str(scheduler.schedule).splitlines()[0].split() == ["rank", "0", *first.split()]
    scheduler.close()
