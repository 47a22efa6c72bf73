"""Tests inside of ranks: what they are given, and what a failure says and leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

pytest_plugins = ["pytester"]
CASES = {"one": lambda: 1, "two": lambda: 2}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("made", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("a", "b"), [(1, 2), pytest.param(3, 4, id="x")])
def test_parameters_and_fixtures_reach_every_rank(
    made: Callable[[], int], a: int, b: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_A_TEST", "1")
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert (made(), b) in {(1, a + 1), (2, a + 1)}


@pytest.mark.ranks(2)
def test_patches_of_another_test_are_gone() -> None:
    assert "OF_A_TEST" not in os.environ


TESTS_THAT_FAIL = """
import os, pytest, torch.distributed as dist

@pytest.mark.ranks(2)
def test_passes():
    pass

@pytest.mark.ranks(2)
def test_fails():
    found = [7, dist.get_rank()]
    assert found == [7, 0]

@pytest.mark.ranks(2, seconds=1)
def test_hangs():
    if dist.get_rank() == 0:
        dist.barrier()

@pytest.mark.ranks(2)
def test_ends():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()

@pytest.mark.ranks(3)
def test_passes_later():
    assert dist.get_world_size() == 3
"""


def test_a_failure_is_told_by_its_test_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)  # with it, pytest's summary has whole messages
    pytester.makeconftest(
        "from tests.conftest import pytest_pyfunc_call, pytest_runtest_teardown\n"
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'ranks: of a test')"
    )
    pytester.makepyfile(TESTS_THAT_FAIL)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--import-mode=importlib")
    result.assert_outcomes(passed=2, failed=3)
    text = result.stdout.str()
    assert "AssertionError: assert [7, 1] == [7, 0]" in text
    assert "First failure on rank 1." in text
    assert "TimeoutError: not finished after 1 s: rank 0" in text
    assert "RuntimeError: rank 1 ended without a result: exit code 3" in text
    assert "ranked.py" not in text.split("short test summary")[1]
