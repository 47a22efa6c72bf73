"""examples/custom_handler keeps the contract, as its own test says, by its entry point."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipegrad import handlers
from pipegrad.testing import HandlerContract
from tests.support.distributions import write_distribution

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_handler"


def theirs() -> type[HandlerContract]:
    """Returns the class of the example's own test."""
    spec = importlib.util.spec_from_file_location("test_bf16_mean", EXAMPLE / "test_bf16_mean.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    contract: type[HandlerContract] = module.TestBf16Mean
    return contract


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Does what pip would: the module is found, and metadata tells the entry point."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    ((group, entries),) = project["entry-points"].items()
    site = write_distribution(
        tmp_path_factory.mktemp("site"),
        project["name"],
        entry_points=entries,
        group=group,
        version=project["version"],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.syspath_prepend(site)
        yield
    sys.modules.pop("bf16_mean", None)


class TestBf16Mean(theirs()):  # type: ignore[misc]  # mypy cannot know it
    pass


def test_it_is_known_by_its_entry_point() -> None:
    identity = ("bf16-mean", "bf16_mean:Bf16Mean", "pipegrad-bf16-mean", "1.0", ())
    assert handlers.resolve("bf16-mean").identity == identity


def test_half_of_the_bytes_is_not_exact() -> None:
    class Exact(theirs()):  # type: ignore[misc]
        relative_error = 1e-6

    with pytest.raises(AssertionError, match=r"wrong by more than relative_error 1e-06"):
        Exact().test_gradients_are_those_of_one_process()
