"""Values go to the parameters of their names, or are refused where they look swapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pipegrad import Stage
from pipegrad.errors import ScheduleError
from pipegrad.pipeline.stage import bind

TAKES: dict[str, tuple[Callable[..., Any], str, Any]] = {
    "in order": (lambda x, skip: (x, skip), "x skip", ("x", "skip")),
    "in another order": (lambda skip, x: (x, skip), "x skip", ("x", "skip")),
    "no name fits": (lambda a, b: (a, b), "x skip", ("x", "skip")),
    "one name fits, in order": (lambda x, m: (x, m), "x mask", ("x", "mask")),
    "an option left out": (lambda h, m=0, rope=0: (h, m, rope), "x rope", ("x", 0, "rope")),
    "keyword only": (lambda h, *, mask: (h, mask), "mask x", ("x", "mask")),
    "*args": (lambda *rest: rest, "x mask", ("x", "mask")),
    "a name and *args": (lambda x, *rest: (x, *rest), "x mask", ("x", "mask")),
    "**kwargs": (lambda x, **named: (x, named), "x mask", ("x", {"mask": "mask"})),
    "**kwargs, no name": (lambda h, **named: (h, named), "x mask", ("x", {"mask": "mask"})),
    "**kwargs and options": (
        lambda h, mask=0, ids=0, **named: (h, mask, ids, named),
        "x mask rope",
        ("x", "mask", 0, {"rope": "rope"}),
    ),
    "*args and **kwargs": (lambda *a, **named: (a, named), "x mask", (("x", "mask"), {})),
    "by position alone": (lambda a, /, x: (a, x), "a x", ("a", "x")),
}


@pytest.mark.parametrize("case", TAKES)
def test_a_value_goes_where_its_name_is(case: str) -> None:
    """Issue 16, point 7: names were followed only where no ``*rest`` or ``**kwargs`` was."""
    function, names, wanted = TAKES[case]
    assert bind(function, names.split(), "stage 0")(*names.split()) == wanted


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda hidden, x: (hidden, x), "x skip"),
        (lambda b, c: (b, c), "a b"),
        (lambda target, out: (target, out), "x target"),
    ],
)
def test_names_that_look_swapped_are_refused(function: Callable[..., Any], names: str) -> None:
    """Issue 16, point 7: ``forward(hidden, x)`` was given x by name and skip as hidden."""
    with pytest.raises(ScheduleError, match="some names are the same, but the order is not"):
        bind(function, names.split(), "stage 0")


class Swaps(nn.Module):
    def forward(self, skip: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x - skip


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda module: module,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, (torch.ones(1), torch.ones(1))),
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_those_of_the_module_inside_a_wrapper(wrapper: str) -> None:
    """Issue 16, point 7: a compiled stage was given its inputs in order: another loss."""
    stage = Stage(WRAPPERS[wrapper](Swaps()), 0, inputs=("x", "skip"))
    (out,) = stage.forward([torch.full((2,), 5.0), torch.full((2,), 3.0)])
    assert out.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss(), nn.functional.l1_loss, torch.dist])
def test_losses_of_torch_are_called_as_ever(loss: Callable[..., Any]) -> None:
    """Issue 16, point 7: a loss is bound by names too, where it has them."""
    values = torch.tensor([1.0]), torch.tensor([3.0])
    assert bind(loss, ("x", "target"), "the loss")(*values) == loss(*values)


def test_a_loss_with_its_target_first_is_given_the_target() -> None:
    """Issue 16, point 7: loss_fn(target, x) was given the output as its target."""
    assert bind(lambda target, x: (target, x), ("x", "target"), "the loss")(1, 2) == (2, 1)
