"""What is installed, upgraded, repaired or removed is seen at once; else no metadata is read."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from importlib.abc import MetaPathFinder
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipegrad.errors import PluginContractError, PluginLoadError, PluginNotFoundError
from pipegrad.plugins.codec import codecs
from pipegrad.plugins.handler import handlers
from pipegrad.plugins.registry import DISABLE_VARIABLE
from tests.support.distributions import write_distribution
from tests.support.plugins import ACME, BROKEN, GROUP, Handlers, Install, acme


@pytest.fixture
def site(install: Install, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on sys.path: others may change while a test runs."""
    site = acme(install)
    monkeypatch.setattr(sys, "path", [str(site)])
    return site


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the scans."""
    reads = Mock(wraps=metadata.entry_points)
    monkeypatch.setattr(metadata, "entry_points", reads)
    return reads


def age(folder: Path) -> None:
    """Makes a folder so old that its scan is used again."""
    os.utime(folder, (0, 0))


def listed(registry: Handlers) -> str:
    return ", ".join(f"{plugin.name} of {plugin.source}" for plugin in registry)


def test_metadata_is_read_once_for_all_names_and_groups(
    site: Path, registry: Handlers, reads: Mock
) -> None:
    write_distribution(site, "codec", group=codecs.group, entry_points={"tiny": "tiny:Codec"})
    age(site)
    for _ in range(3):
        assert type(registry.resolve("acme-sum").plugin).__name__ == "Sum"
        assert registry.resolve("acme-handlers::acme-sum").version == "2.5"
        assert [plugin.name for plugin in codecs] == ["tiny"]
        assert list(handlers) == []
    reads.assert_called_once_with()


def test_a_scan_of_a_folder_that_just_changed_is_not_used_again(
    site: Path, registry: Handlers, reads: Mock
) -> None:
    os.utime(site, (2**33,) * 2)  # so it stays new however long this takes
    assert listed(registry) == listed(registry) == "acme-sum of acme-handlers 2.5"
    assert reads.call_count == 2


def installed(site: Path, name: str = "zeta", version: str = "1.0") -> Path:
    points = {name: f"{name}:Sum"}
    return write_distribution(site, name, group=GROUP, version=version, entry_points=points)


def upgrade(site: Path) -> None:
    shutil.rmtree(site / "acme_handlers-2.5.dist-info")
    installed(site, "acme-handlers", "2.6")


FIRST, ZETA = "acme-sum of acme-handlers 2.5", "zeta of zeta 1.0"
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "installed": (installed, f"{FIRST}, {ZETA}"),
    "upgraded": (upgrade, "acme-handlers of acme-handlers 2.6"),
    "removed": (lambda site: shutil.rmtree(site / "acme_handlers-2.5.dist-info"), ""),
    "removed with its folder": (shutil.rmtree, ""),
}


@pytest.mark.parametrize(("change", "after"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_at_once(
    site: Path, registry: Handlers, reads: Mock, change: Callable[[Path], object], after: str
) -> None:
    age(site)
    assert listed(registry) == listed(registry) == FIRST
    reads.assert_called_once_with()
    change(site)
    assert listed(registry) == after


class Finder(MetaPathFinder):
    """Has the distributions of a folder that is not on sys.path."""

    def __init__(self, site: Path) -> None:
        self.site = site

    def find_distributions(self, context: object) -> Iterable[metadata.Distribution]:
        return [metadata.PathDistribution(info) for info in self.site.glob("*.dist-info")]


# Of what a scan looks at: a folder more, a folder before the others, ...
PATCHES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "a folder": (
        lambda more, patch: patch.setattr(sys, "path", [*sys.path, str(installed(more))]),
        f"{FIRST}, {ZETA}",
    ),
    "a folder before the others": (
        lambda more, patch: patch.syspath_prepend(installed(more, "acme-handlers", "3")),
        "acme-handlers of acme-handlers 3",
    ),
    "a finder": (
        lambda more, patch: patch.setattr(
            sys, "meta_path", [*sys.meta_path, Finder(installed(more))]
        ),
        f"{FIRST}, {ZETA}",
    ),
    "a function of importlib": (
        lambda _, patch: patch.setattr(metadata, "entry_points", metadata.EntryPoints),
        "",
    ),
    "the switch": (lambda _, patch: patch.setenv(DISABLE_VARIABLE, "1"), ""),
}


@pytest.mark.parametrize(("change", "after"), PATCHES.values(), ids=PATCHES)
def test_a_change_of_where_to_look_is_seen_and_so_is_its_end(
    site: Path, registry: Handlers, change: Callable[[Path, pytest.MonkeyPatch], object], after: str
) -> None:
    age(site)
    assert listed(registry) == FIRST
    with pytest.MonkeyPatch.context() as patch:
        change(site / "more", patch)
        age(site)  # so that its time tells nothing
        assert listed(registry) == listed(registry) == after
    assert listed(registry) == FIRST


def test_the_working_folder_is_another_one_elsewhere(
    site: Path, registry: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = installed(site.with_name("elsewhere"))
    age(site)
    age(elsewhere)
    monkeypatch.setattr(sys, "path", [""])
    for folder, expected in [(site, FIRST), (elsewhere, ZETA), (site, FIRST)]:
        monkeypatch.chdir(folder)
        assert listed(registry) == expected
    gone = site / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", str(site)])
    assert listed(registry) == FIRST


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("acme-sum = absent:Sum", PluginLoadError),
        ("acme-sum = acme:Outer", PluginContractError),
        ("other = acme:Sum", PluginNotFoundError),
    ],
)
def test_metadata_and_modules_may_be_repaired_in_place(
    site: Path, install: Install, registry: Handlers, wrong: str, error: type[Exception]
) -> None:
    points = site / "acme_handlers-2.5.dist-info" / "entry_points.txt"
    points.write_text(f"[{GROUP}]\n{wrong}")
    age(site)
    with pytest.raises(error):
        registry.resolve("acme-sum")
    points.write_text(f"[{GROUP}]\nacme-sum = acme:Sum")
    assert registry.resolve("acme-sum").value == "acme:Sum"
    rusty = install("rusty", entry_points={"rust": "rusty:Sum"}, modules={"rusty": BROKEN})
    age(rusty)
    with pytest.raises(PluginLoadError):
        registry.resolve("rust")
    rusty.joinpath("rusty.py").write_text(ACME)
    assert type(registry.resolve("rust").plugin).__name__ == "Sum"
