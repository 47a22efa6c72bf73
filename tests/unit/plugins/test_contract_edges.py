"""HandlerContract gives a handler each parameter once, in whichever order they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from pipegrad import ParameterRecord, Reduction, Topology
from pipegrad.testing import HandlerContract
from pipegrad_handlers.data_parallel import DataParallel


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
