"""Every way to find a plug-in, against real dist-info directories; and options as text."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from pipegrad import ParameterRecord, Reduction, Topology
from pipegrad.comm import plain
from pipegrad.errors import PluginError
from pipegrad.plugins.handler import GradientHandler, handlers
from pipegrad.plugins.registry import Plugin
from pipegrad.plugins.written import written
from pipegrad.testing import HandlerContract
from pipegrad_handlers.data_parallel import DataParallel
from tests.support.distributions import declared
from tests.support.plugins import (
    ACME,
    BROKEN,
    GROUP,
    HERE,
    Handlers,
    Install,
    Local,
    Plain,
    acme,
)

# --- listing


def test_listing_is_sorted_by_name_then_distribution_then_value_and_imports_nothing(
    install: Install, registry: Handlers
) -> None:
    points = {"sum": "zeta:Sum", "mean": "zeta:Mean"}
    install("zeta", entry_points=points, modules={"zeta": BROKEN})
    install("alpha", version="0.3", entry_points={"sum": "alpha:Sum"})
    # The same twice: installed, and as a source tree.
    install("Acme.Handlers", entry_points={"acme-sum": "acme:Sum"})
    acme(install)
    expected = (
        Plugin("acme-sum", "acme:Sum", "acme-handlers", "2.5"),
        Plugin("mean", "zeta:Mean", "zeta", "1.0"),
        Plugin("sum", "alpha:Sum", "alpha", "0.3"),
        Plugin("sum", "zeta:Sum", "zeta", "1.0"),
    )
    assert tuple(registry) == expected
    assert "zeta" not in sys.modules


# --- resolving


@pytest.mark.parametrize(
    ("spec", "qualname", "identity"),
    [
        (Plain, "Plain", (f"{HERE}:Plain", f"{HERE}:Plain", "", "", ())),
        ("acme-sum", "Sum", ("acme-sum", "acme:Sum", "acme-handlers", "2.5", ())),
        ("acme:Sum", "Sum", ("acme:Sum", "acme:Sum", "", "", ())),
        ("acme:Outer.Inner", "Outer.Inner", ("acme:Outer.Inner", "acme:Outer.Inner", "", "", ())),
        # An entry point comes before a module and attribute.
        ("else:Sum", "Sum", ("else:Sum", "acme:Sum", "acme-handlers", "2.5", ())),
        ("acme-handlers::mine", "Sum", ("mine", "acme:Sum", "acme-handlers", "2.5", ())),
    ],
)
def test_what_is_found_is_constructed_and_knows_its_origin(
    install: Install, registry: Handlers, spec: object, qualname: str, identity: tuple[object, ...]
) -> None:
    acme(install, mine="acme:Sum", **{"acme-sum": "acme:Sum", "else:Sum": "acme:Sum"})
    resolved = registry.resolve(spec)  # type: ignore[arg-type]
    assert type(resolved.plugin).__qualname__ == qualname
    assert resolved.identity == identity
    # An instance is taken as it is.
    handler = Local(axis="dp")
    given = registry.resolve(handler)
    assert given.plugin is handler
    assert given.identity == (f"{HERE}:Local", f"{HERE}:Local", "", "", (("axis", "'dp'"),))


@pytest.mark.parametrize("name", ["acme-sum", Local])
def test_a_table_carries_options(install: Install, registry: Handlers, name: object) -> None:
    acme(install)
    resolved = registry.resolve({"name": name, "scale": 0.5, "axis": "tp"})
    assert vars(resolved.plugin).items() >= {"axis": "tp", "scale": 0.5}.items()
    assert resolved.options == (("axis", "'tp'"), ("scale", "0.5"))
    # Their order does not matter.
    other = registry.resolve({"axis": "tp", "scale": 0.5, "name": name})
    assert plain.loads(plain.dumps(resolved.identity)) == other.identity


def test_resolve_all_numbers_what_is_listed_again(install: Install, registry: Handlers) -> None:
    acme(install)
    table = {"name": "acme-sum", "axis": "pp"}
    resolved = registry.resolve_all(["acme-sum", table, Plain])
    assert list(resolved) == ["acme-sum", "acme-sum#1", f"{HERE}:Plain"]
    assert [each.plugin.axis for each in list(resolved.values())[:2]] == ["dp", "pp"]  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match=r"expected a list: \['acme-sum'\]"):
        registry.resolve_all("acme-sum")


# --- conflicts


def test_two_distributions_with_one_name_are_a_conflict_that_shows_both(
    install: Install, registry: Handlers
) -> None:
    acme(install, sum="acme:Sum")
    install("zeta", entry_points={"sum": "zeta:Sum"}, modules={"zeta": BROKEN})
    with pytest.raises(PluginError) as caught:
        registry.resolve("sum")
    both = "acme-handlers 2.5 acme:Sum ('acme-handlers::sum'); zeta 1.0 zeta:Sum ('zeta::sum')"
    assert f"2 plug-ins of group '{GROUP}' are called 'sum': {both}." in str(caught.value)


@pytest.mark.parametrize("spelling", ["acme-handlers", "Acme_Handlers", "ACME.handlers", "acme--h"])
def test_a_conflict_is_settled_by_naming_the_distribution(
    install: Install, registry: Handlers, spelling: str
) -> None:
    name = "acme--h" if spelling == "acme--h" else "acme-handlers"
    install(name, entry_points={"sum": "acme:Sum"}, modules={"acme": ACME})
    install("zeta", entry_points={"sum": "zeta:Sum"})
    assert registry.resolve(f"{spelling}::sum").identity == ("sum", "acme:Sum", name, "1.0", ())


# --- pipegrad's own


def test_the_handlers_of_pipegrad_are_entry_points_like_any_other() -> None:
    ours = [plugin.name for plugin in handlers if plugin.distribution == "pipegrad"]
    assert ours == list(declared("pipegrad.handlers"))
    required: dict[str, dict[str, object]] = {
        "sequence-parallel": {"parameters": ["*norm*"]},
        "diloco": {"every": 50},
    }
    for name in ours:
        resolved = handlers.resolve({"name": name, **required.get(name, {})})
        assert isinstance(resolved.plugin, GradientHandler)
        assert (resolved.name, resolved.distribution) == (name, "pipegrad")


# Options as text, which ranks compare: by value, whatever they are. Issue 16, point 10 (1.13).


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
    # What a factory of optimizers has of its own: tuples, defaults, functions inside.
    assert written(lambda: (1, 2)) != written(lambda: (1, 3))
    assert written(lambda x=1: x) != written(lambda x=2: x)
    assert written(lambda *, x=1: x) != written(lambda *, x=2: x)
    assert written(lambda: lambda: 1) != written(lambda: lambda: 2)
    assert written(lambda x: x in {"b", "a"}) == written(lambda x: x in {"a", "b"})
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
