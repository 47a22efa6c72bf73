"""Every way to find a plug-in, against real dist-info directories."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from pipegrad.errors import (
    PluginConflictError,
    PluginContractError,
    PluginNotFoundError,
)
from pipegrad.plugins.handler import GradientHandler, handlers
from pipegrad.plugins.registry import DISABLE_VARIABLE, Plugin
from tests.support.distributions import declared, write_distribution
from tests.support.plugins import (
    ACME,
    BROKEN,
    GROUP,
    HERE,
    Greedy,
    Handlers,
    Install,
    Local,
    Plain,
    acme,
)

# --- listing


def test_listing_is_sorted_by_name_then_distribution_then_value(
    install: Install, registry: Handlers
) -> None:
    install("zeta", entry_points={"sum": "zeta:Sum", "mean": "zeta:Mean"})
    install("alpha", version="0.3", entry_points={"sum": "alpha:Sum"})

    expected = (
        Plugin("mean", "zeta:Mean", "zeta", "1.0"),
        Plugin("sum", "alpha:Sum", "alpha", "0.3"),
        Plugin("sum", "zeta:Sum", "zeta", "1.0"),
    )
    assert registry.list() == expected
    assert tuple(registry) == expected


def test_a_summary_is_read_from_the_source_and_imports_nothing(
    install: Install, registry: Handlers
) -> None:
    source = """
import no_such_module
class Outer:
    class Sum:
        '''Sums everything.

        And more.
        '''
class Bare: pass
value = 3
"""
    values = ["Outer.Sum", "Bare", "value", "Absent", "Outer.Absent.Sum"]
    install(
        "acme-handlers",
        entry_points={value: f"acme:{value}" for value in values}
        | {"none": "absent_module:Sum", "deep": "os.path.absent:X", "wrong": "wrong:X"},
        modules={"acme": source, "wrong": "class X(:"},
    )
    summaries = {plugin.name: plugin.summary for plugin in registry}
    assert summaries.pop("Outer.Sum") == "Sums everything."
    assert set(summaries.values()) == {""}
    assert "acme" not in sys.modules


def test_resolve_all_numbers_what_is_listed_again(install: Install, registry: Handlers) -> None:
    acme(install)
    table = {"name": "acme-sum", "axis": "pp"}
    found = registry.resolve_all(["acme-sum", table, Plain])
    assert list(found) == ["acme-sum", "acme-sum#1", f"{HERE}:Plain"]
    assert [resolved.plugin.axis for resolved in list(found.values())[:2]] == ["dp", "pp"]  # type: ignore[attr-defined]
    with pytest.raises(PluginContractError, match=r"expected a list: \['acme-sum'\]"):
        registry.resolve_all("acme-sum")


def test_listing_has_what_is_registered(install: Install, registry: Handlers) -> None:
    acme(install)
    registry.register("local", Local)

    assert registry.list() == (
        Plugin("acme-sum", "acme:Sum", "acme-handlers", "2.5"),
        Plugin("local", f"{HERE}:Local"),
    )


def test_listing_imports_nothing(install: Install, registry: Handlers) -> None:
    install("rusty", entry_points={"rusty": "rusty:Handler"}, modules={"rusty": BROKEN})

    assert [plugin.name for plugin in registry] == ["rusty"]
    assert "rusty" not in sys.modules


@pytest.mark.slow
def test_listing_is_the_same_for_every_hash_seed_and_path_order(tmp_path: Path) -> None:
    names = ["delta", "alpha", "gamma", "beta"]
    sites = [
        str(write_distribution(tmp_path / n, n, group=GROUP, entry_points={"sum": "x:Y", n: "x:Z"}))
        for n in names
    ]
    script = f"""
import sys
sys.path[:0] = sys.argv[1:]
from pipegrad.plugins.handler import GradientHandler
from pipegrad.plugins.registry import Registry
print(*Registry({GROUP!r}, GradientHandler), sep="\\n")
"""

    def listed(seed: str, path: list[str]) -> list[str]:
        command = [sys.executable, "-c", script, *path]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.check_output(command, env=environment, text=True).splitlines()

    first = listed("1", sites)
    assert [line.split()[0] for line in first] == [
        "'alpha'", "'beta'", "'delta'", "'gamma'", "'sum'", "'sum'", "'sum'", "'sum'",
    ]  # fmt: skip
    assert listed("2", sites[::-1]) == first


def test_a_distribution_found_twice_counts_once(install: Install, registry: Handlers) -> None:
    install("Acme.Handlers", entry_points={"acme-sum": "acme:Sum"})
    acme(install)

    assert registry.list() == (Plugin("acme-sum", "acme:Sum", "acme-handlers", "2.5"),)


# --- resolving


def test_an_instance_is_taken_as_it_is(registry: Handlers) -> None:
    handler = Local(axis="dp")
    resolved = registry.resolve(handler)

    assert resolved.plugin is handler
    made_with = (("axis", "'dp'"),)
    assert resolved.identity == (f"{HERE}:Local", f"{HERE}:Local", "", "", made_with)


def test_a_class_is_constructed(registry: Handlers) -> None:
    resolved = registry.resolve(Plain)

    assert type(resolved.plugin) is Plain
    assert resolved.identity == (f"{HERE}:Plain", f"{HERE}:Plain", "", "", ())


def test_an_entry_point_is_found_by_name_and_knows_its_distribution(
    install: Install, registry: Handlers
) -> None:
    acme(install)
    resolved = registry.resolve("acme-sum")

    assert type(resolved.plugin).__name__ == "Sum"
    assert resolved.identity == ("acme-sum", "acme:Sum", "acme-handlers", "2.5", ())


def test_a_table_carries_options(install: Install, registry: Handlers) -> None:
    acme(install)
    resolved = registry.resolve({"name": "acme-sum", "scale": 0.5, "axis": "tp"})

    assert vars(resolved.plugin).items() >= {"axis": "tp", "scale": 0.5}.items()
    assert resolved.options == (("axis", "'tp'"), ("scale", "0.5"))


def test_a_table_may_name_a_class(registry: Handlers) -> None:
    resolved = registry.resolve({"name": Local, "axis": "tp"})

    assert vars(resolved.plugin).items() >= {"axis": "tp", "scale": 1.0}.items()
    assert resolved.options == (("axis", "'tp'"),)


def test_the_order_of_options_does_not_matter(registry: Handlers) -> None:
    one = registry.resolve({"name": Local, "axis": "tp", "scale": 2.0})
    other = registry.resolve({"scale": 2.0, "axis": "tp", "name": Local})

    assert one.identity == other.identity
    assert pickle.loads(pickle.dumps(one.identity)) == one.identity


@pytest.mark.parametrize("attribute", ["Sum", "Outer.Inner"])
def test_module_and_attribute_need_no_entry_point(
    install: Install, registry: Handlers, attribute: str
) -> None:
    install("unrelated", entry_points={}, modules={"acme": ACME})
    resolved = registry.resolve(f"acme:{attribute}")

    assert type(resolved.plugin).__qualname__ == attribute
    assert resolved.identity == (f"acme:{attribute}", f"acme:{attribute}", "", "", ())


def test_what_is_registered_comes_before_entry_points(install: Install, registry: Handlers) -> None:
    acme(install)
    registry.register("acme-sum", Plain)

    assert registry.resolve("acme-sum").identity == ("acme-sum", f"{HERE}:Plain", "", "", ())
    assert registry.resolve("acme-handlers::acme-sum").distribution == "acme-handlers"


def test_an_entry_point_comes_before_module_and_attribute(
    install: Install, registry: Handlers
) -> None:
    acme(install, **{"elsewhere:Sum": "acme:Sum"})

    assert registry.resolve("elsewhere:Sum").value == "acme:Sum"


# --- conflicts


def test_a_second_registration_is_a_conflict(registry: Handlers) -> None:
    registry.register("mine", Plain)
    with pytest.raises(PluginConflictError, match=r"'mine' is \S+:Plain already.*override=True"):
        registry.register("mine", Greedy)
    assert type(registry.resolve("mine").plugin) is Plain


def test_a_registration_can_be_overridden(registry: Handlers) -> None:
    registry.register("mine", Plain)
    registry.register("mine", Greedy, override=True)

    assert type(registry.resolve("mine").plugin) is Greedy
    assert registry.list() == (Plugin("mine", f"{HERE}:Greedy"),)


def test_two_distributions_with_one_name_are_a_conflict_that_shows_both(
    install: Install, registry: Handlers
) -> None:
    acme(install, sum="acme:Sum")
    install("zeta", entry_points={"sum": "zeta:Sum"}, modules={"zeta": BROKEN})

    with pytest.raises(PluginConflictError) as caught:
        registry.resolve("sum")
    assert str(caught.value) == (
        f"2 plug-ins of group '{GROUP}' are called 'sum': "
        "acme-handlers 2.5 acme:Sum ('acme-handlers::sum'); zeta 1.0 zeta:Sum ('zeta::sum'). "
        "Pick one by its distribution::name or as 'module:attr', or uninstall the others."
    )


@pytest.mark.parametrize("spelling", ["acme-handlers", "Acme_Handlers", "ACME.handlers", "acme--h"])
def test_a_conflict_is_settled_by_naming_the_distribution(
    install: Install, registry: Handlers, spelling: str
) -> None:
    name = "acme--h" if spelling == "acme--h" else "acme-handlers"
    install(name, entry_points={"sum": "acme:Sum"}, modules={"acme": ACME})
    install("zeta", entry_points={"sum": "zeta:Sum"})

    assert registry.resolve(f"{spelling}::sum").identity == ("sum", "acme:Sum", name, "1.0", ())


# --- switching plug-ins off


def test_other_distributions_can_be_switched_off(
    install: Install, registry: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme(install)
    install("Pipegrad", entry_points={"ours": "acme:Sum"})
    monkeypatch.setenv(DISABLE_VARIABLE, "1")

    assert registry.list() == (Plugin("ours", "acme:Sum", "Pipegrad", "1.0"),)
    assert registry.resolve("ours").distribution == "Pipegrad"
    with pytest.raises(PluginNotFoundError, match=f"{DISABLE_VARIABLE} is set"):
        registry.resolve("acme-sum")


@pytest.mark.parametrize("setting", ["", "0"])
def test_the_switch_can_be_off(
    install: Install,
    registry: Handlers,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
) -> None:
    acme(install)
    monkeypatch.setenv(DISABLE_VARIABLE, setting)

    assert [plugin.name for plugin in registry] == ["acme-sum"]


# --- pipegrad's own


BUILT_IN = list(declared("pipegrad.handlers"))


def test_the_handlers_of_pipegrad_are_entry_points_like_any_other() -> None:
    ours = [plugin.name for plugin in handlers if plugin.distribution == "pipegrad"]
    assert ours == BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_handlers_of_pipegrad_resolve(name: str) -> None:
    required: dict[str, dict[str, object]] = {
        "sequence-parallel": {"parameters": ["*norm*"]},
        "diloco": {"every": 50},
    }
    resolved = handlers.resolve({"name": name, **required.get(name, {})})

    assert isinstance(resolved.plugin, GradientHandler)
    assert (resolved.name, resolved.distribution) == (name, "pipegrad")
