"""Options as text, which ranks compare: by value, whatever they are. Issue 16, point 10 (1.13).

And records and handlers in whichever order they come.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from pipegrad import ParameterRecord, Reduction, Topology
from pipegrad.plugins.written import written
from pipegrad.testing import HandlerContract
from pipegrad_handlers.data_parallel import DataParallel


@pytest.mark.parametrize("first", [{"b", "a"}, {"x": {1, 2}, "y": (1.0, None)}, [torch.ones(5000)]])
def test_equal_options_are_written_alike(first: Any) -> None:
    """Sets and tensors of the same values were refused, or agreed."""
    again = copy.deepcopy(first)
    if isinstance(again, dict):
        again = dict(reversed(again.items()))
    assert written(first) == written(again)
    assert written([first]) != written([[*first, 0]])


def test_options_are_written_by_value() -> None:
    """No address, and all elements of a tensor."""

    class Plain:
        def __init__(self, value: object) -> None:
            self.value = value

    one, other = torch.zeros(5000), torch.zeros(5000)
    other[2500] = 1
    assert written(one) != written(other)
    assert written(Plain(1)) == written(Plain(1)) != written(Plain(2))
    assert "0x" not in written([Plain(lambda: 1), object(), print])
    assert written(1) != written(1.0) != written("1.0")
    assert written(lambda: 1) != written(lambda: 2)
    loop: list[object] = []
    loop.append(loop)
    assert written(loop) == "[...]"


def test_a_record_is_of_one_module_and_one_stage_unless_it_is_said() -> None:
    record = ParameterRecord("0.w", "w", 0, (2, 3), torch.float32, True, (0,), 0)
    assert (record.kind, record.aliases, record.tied_in_stage) == ("", (), False)
    assert (record.shared, record.numel) == (False, 6)


class Counts(DataParallel):
    """Keeps the keys of the parameters that it is given, by rank."""

    given: ClassVar[list[tuple[int, tuple[str, ...]]]] = []

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        self.given.append((topology.rank, tuple(record.key for record in parameters)))
        return super().reductions(parameters, topology)


def test_in_each_order_each_parameter_comes_once() -> None:
    class Contract(HandlerContract):
        handler = Counts
        beside = ("pipeline-shared",)

    Contract().test_the_order_of_parameters_changes_nothing()
    orders: dict[tuple[int, frozenset[str]], set[tuple[str, ...]]] = {}
    for rank, keys in Counts.given:
        assert len(set(keys)) == len(keys)
        orders.setdefault((rank, frozenset(keys)), set()).add(keys)
    several = {at: of for at, of in orders.items() if len(at[1]) > 2}
    assert several
    assert all(len(of) == 3 for of in several.values())
