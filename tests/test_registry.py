"""Every way to find a plug-in and to fail at it, against real dist-info directories."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipegrad.errors import (
    PluginConflictError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
    PluginOptionError,
)
from pipegrad.handler import GradientHandler, ParameterRecord, Reduction, handlers
from pipegrad.registry import DISABLE_VARIABLE, Plugin, Registry
from pipegrad.topology import Topology
from tests.distributions import write_distribution

GROUP = "test_registry.handlers"

ACME = """
from pipegrad.handler import GradientHandler

class Sum(GradientHandler):
    def __init__(self, *, axis="dp", scale=1.0):
        self.axis, self.scale = axis, scale
    def reductions(self, parameters, topology):
        return []

class Outer:
    class Inner(Sum):
        pass
"""

BROKEN = "raise RuntimeError('the driver is too old')"

Install = Callable[..., Path]
Handlers = Registry[GradientHandler]


class Local(GradientHandler):
    def __init__(self, *, axis: str, scale: float = 1.0) -> None:
        if scale <= 0:
            raise ValueError(f"scale must be positive, found {scale}")
        self.axis = axis
        self.scale = scale

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return []


class Plain(GradientHandler):
    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return []


class Greedy(Plain):
    def __init__(self, **options: object) -> None:
        self.options = options


class Unfinished(GradientHandler):
    pass


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution in a directory of its own at the front of sys.path."""

    def install(name: str, **contents: Any) -> Path:
        site = tmp_path / f"site{len(list(tmp_path.iterdir()))}"
        write_distribution(site, name, group=GROUP, **contents)
        monkeypatch.syspath_prepend(site)
        return site

    yield install
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def registry() -> Handlers:
    return Registry(GROUP, GradientHandler)  # type: ignore[type-abstract]


def acme(install: Install, **entry_points: str) -> Path:
    return install(
        "acme-handlers",
        version="2.5",
        entry_points=entry_points or {"acme-sum": "acme:Sum"},
        modules={"acme": ACME},
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
    assert list(found) == ["acme-sum", "acme-sum#1", f"{__name__}:Plain"]
    assert [resolved.plugin.axis for resolved in list(found.values())[:2]] == ["dp", "pp"]  # type: ignore[attr-defined]


def test_listing_has_what_is_registered(install: Install, registry: Handlers) -> None:
    acme(install)
    registry.register("local", Local)

    assert registry.list() == (
        Plugin("acme-sum", "acme:Sum", "acme-handlers", "2.5"),
        Plugin("local", f"{__name__}:Local"),
    )


def test_listing_imports_nothing(install: Install, registry: Handlers) -> None:
    install("rusty", entry_points={"rusty": "rusty:Handler"}, modules={"rusty": BROKEN})

    assert [plugin.name for plugin in registry] == ["rusty"]
    assert "rusty" not in sys.modules


def test_listing_is_the_same_for_every_hash_seed_and_path_order(tmp_path: Path) -> None:
    names = ["delta", "alpha", "gamma", "beta"]
    sites = [
        str(write_distribution(tmp_path / n, n, group=GROUP, entry_points={"sum": "x:Y", n: "x:Z"}))
        for n in names
    ]
    script = f"""
import sys
sys.path[:0] = sys.argv[1:]
from pipegrad.handler import GradientHandler
from pipegrad.registry import Registry
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
    assert resolved.identity == (f"{__name__}:Local", f"{__name__}:Local", "", "", ())


def test_a_class_is_constructed(registry: Handlers) -> None:
    resolved = registry.resolve(Plain)

    assert type(resolved.plugin) is Plain
    assert resolved.identity == (f"{__name__}:Plain", f"{__name__}:Plain", "", "", ())


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

    assert vars(resolved.plugin) == {"axis": "tp", "scale": 0.5}
    assert resolved.options == (("axis", "'tp'"), ("scale", "0.5"))


def test_a_table_may_name_a_class(registry: Handlers) -> None:
    resolved = registry.resolve({"name": Local, "axis": "tp"})

    assert vars(resolved.plugin) == {"axis": "tp", "scale": 1.0}
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

    assert registry.resolve("acme-sum").identity == ("acme-sum", f"{__name__}:Plain", "", "", ())
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
    assert registry.list() == (Plugin("mine", f"{__name__}:Greedy"),)


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


# --- failures


def test_an_unknown_name_lists_the_known_ones_closest_first(
    install: Install, registry: Handlers
) -> None:
    acme(install, expert="acme:Sum", noop="acme:Sum", **{"data-parallel": "acme:Sum"})
    registry.register("sharded", Plain)

    with pytest.raises(PluginNotFoundError) as caught:
        registry.resolve("shraded")
    assert str(caught.value) == (
        f"no plug-in of group '{GROUP}' is called 'shraded'; known, closest first: "
        "sharded, data-parallel, expert, noop. Install the distribution that brings it, "
        "register it in this process, or give its class as 'module:attr'."
    )


def test_an_unknown_name_in_an_empty_group(registry: Handlers) -> None:
    with pytest.raises(PluginNotFoundError, match="known, closest first: none"):
        registry.resolve("anything")


def test_an_unknown_distribution_is_not_imported_as_a_module(
    install: Install, registry: Handlers
) -> None:
    acme(install)
    with pytest.raises(PluginNotFoundError, match="closest first: acme-handlers::acme-sum"):
        registry.resolve("acme-handler::acme-sum")


def test_a_broken_plugin_fails_only_when_selected_and_names_itself(
    install: Install, registry: Handlers
) -> None:
    acme(install)
    install("rusty", version="0.9", entry_points={"rust": "rusty:H"}, modules={"rusty": BROKEN})

    assert registry.resolve("acme-sum").distribution == "acme-handlers"
    with pytest.raises(PluginLoadError, match=r"'rust' \(rusty:H, rusty 0\.9\)") as caught:
        registry.resolve("rust")
    assert repr(caught.value.__cause__) == "RuntimeError('the driver is too old')"
    assert registry.resolve("acme-sum").distribution == "acme-handlers"


def test_a_failure_is_not_remembered(install: Install, registry: Handlers) -> None:
    site = install("rusty", entry_points={"rust": "rusty:Sum"}, modules={"rusty": BROKEN})
    with pytest.raises(PluginLoadError):
        registry.resolve("rust")

    site.joinpath("rusty.py").write_text(ACME)
    assert type(registry.resolve("rust").plugin).__name__ == "Sum"


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("acme:Absent", AttributeError),
        ("absent_module:Sum", ModuleNotFoundError),
        ("syntax_error:Sum", SyntaxError),
        ("not a value", Exception),
    ],
)
def test_every_way_not_to_load(
    install: Install,
    registry: Handlers,
    value: str,
    cause: type[Exception],
) -> None:
    install(
        "acme-handlers",
        entry_points={"bad": value},
        modules={"acme": ACME, "syntax_error": "def"},
    )
    with pytest.raises(PluginLoadError, match=f"'bad' .{value}, acme-handlers 1.0") as caught:
        registry.resolve("bad")
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.parametrize("value", ["acme:Outer", "acme:__name__", "acme"])
def test_what_is_loaded_must_be_a_handler(install: Install, registry: Handlers, value: str) -> None:
    acme(install, wrong=value)
    expected = rf"'wrong' \({value}, acme-handlers 2\.5\).*pipegrad\.handler:GradientHandler"
    with pytest.raises(PluginContractError, match=expected):
        registry.resolve("wrong")


@pytest.mark.parametrize("spec", [3, int, len, {"name": Plain()}, None])
def test_what_is_given_must_be_a_handler(registry: Handlers, spec: object) -> None:
    with pytest.raises(PluginContractError, match="expected a concrete subclass of"):
        registry.resolve(spec)  # type: ignore[arg-type]


def test_a_handler_must_be_finished(registry: Handlers) -> None:
    with pytest.raises(PluginContractError, match=r"Unfinished.* lacks reductions\(\)"):
        registry.resolve(Unfinished)
    with pytest.raises(PluginContractError, match=r"'mine' .* lacks reductions\(\)"):
        registry.register("mine", Unfinished)  # type: ignore[type-abstract]
    assert registry.list() == ()


def test_only_handlers_are_registered(registry: Handlers) -> None:
    with pytest.raises(PluginContractError, match="expected a concrete subclass of"):
        registry.register("mine", int)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"axis": "dp", "scal": 2.0}, "has no option 'scal'; allowed, closest first: scale, axis"),
        ({}, "needs the option 'axis'; allowed, closest first: axis, scale"),
        (
            {"axs": "dp"},
            "has no option 'axs', needs the option 'axis'; allowed, closest first: axis, scale",
        ),
    ],
)
def test_options_must_be_those_of_the_constructor(
    registry: Handlers, options: Mapping[str, object], complaint: str
) -> None:
    registry.register("local", Local)
    with pytest.raises(PluginOptionError) as caught:
        registry.resolve({"name": "local", **options})
    assert str(caught.value) == (
        f"plug-in 'local' ({__name__}:Local, of no distribution) {complaint}"
    )


def test_a_handler_without_a_constructor_has_no_options(
    registry: Handlers,
) -> None:
    with pytest.raises(PluginOptionError, match=r"has no option 'axis'; .* none"):
        registry.resolve({"name": Plain, "axis": "dp"})


def test_a_handler_may_take_any_option(registry: Handlers) -> None:
    resolved = registry.resolve({"name": Greedy, "anything": 1})
    assert resolved.options == (("anything", "1"),)


def test_a_refusal_by_the_constructor_names_the_plugin(
    install: Install, registry: Handlers
) -> None:
    refusing = ACME + "\nclass Picky(Sum):\n    def __init__(self, *, scale):\n        1 / scale\n"
    install("picky", version="3.1", entry_points={"p": "picky:Picky"}, modules={"picky": refusing})

    with pytest.raises(
        PluginOptionError, match=r"'p' \(picky:Picky, picky 3\.1\).*'scale': 0"
    ) as e:
        registry.resolve({"name": "p", "scale": 0})
    assert isinstance(e.value.__cause__, ZeroDivisionError)


def test_a_table_must_have_a_name(registry: Handlers) -> None:
    with pytest.raises(PluginOptionError, match=r"\{'axis': 'dp'\} lacks 'name'"):
        registry.resolve({"axis": "dp"})


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


def test_the_handlers_of_pipegrad_are_entry_points_like_any_other() -> None:
    ours = [plugin.name for plugin in handlers if plugin.distribution == "pipegrad"]
    assert ours == ["data-parallel", "noop", "pipeline-shared"]


@pytest.mark.parametrize("name", ["data-parallel", "noop", "pipeline-shared"])
def test_the_handlers_of_pipegrad_resolve(name: str) -> None:
    resolved = handlers.resolve(name)

    assert isinstance(resolved.plugin, GradientHandler)
    assert (resolved.name, resolved.distribution) == (name, "pipegrad")
