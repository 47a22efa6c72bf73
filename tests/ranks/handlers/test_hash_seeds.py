"""Other processes plan under other hash seeds, and are started once, not for every handler."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

import pytest

from pipegrad import ParameterRecord, Reduction, Topology
from pipegrad.testing.handlers.hash_seeds import plans_under_seeds
from pipegrad_handlers.data_parallel import DataParallel

SEEDS = "1", "4242"
QUESTIONS = list[str]()
Parameters = Sequence[ParameterRecord]


class Remembers(DataParallel):
    """Raises what it knows: whose child it is, its hash of a word, and all that was asked."""

    def reductions(self, parameters: Parameters, topology: Topology) -> Iterable[Reduction]:
        QUESTIONS.append("asked")
        said = f"{os.getppid()} {hash('word')} {QUESTIONS} {os.environ['SAID']}"
        raise RuntimeError(f"it says {said}.")


class Prints(DataParallel):
    def reductions(self, parameters: Parameters, topology: Topology) -> Iterable[Reduction]:
        print("not a plan")  # noqa: T201 - what is tested
        return super().reductions(parameters, topology)


class Dies(DataParallel):
    def reductions(self, parameters: Parameters, topology: Topology) -> Iterable[Reduction]:
        os._exit(3)


def spec(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


def said() -> list[list[str]]:
    ended = plans_under_seeds([spec(Remembers)], *SEEDS)
    found = [re.search(r"it says (\S+) (\S+) (.*)\.$", one.stderr, re.MULTILINE) for one in ended]
    return [list(one.groups()) for one in found if one]


def test_a_question_starts_no_python_and_finds_nothing_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Issue 16, time of the suite. Two Pythons were started for each of fifteen handlers."""
    monkeypatch.setenv("SAID", "first")
    first = said()
    monkeypatch.setenv("SAID", "then")
    then = said()

    assert [(parent, word) for parent, word, _ in first] == [(p, word) for p, word, _ in then]
    assert len({word for _, word, _ in first}) == 2, "both hash alike"
    assert [known for *_, known in first] == ["['asked'] first"] * 2
    assert [known for *_, known in then] == ["['asked'] then"] * 2


def test_what_a_handler_prints_is_no_plan() -> None:
    one, other = plans_under_seeds([spec(Prints), "pipeline-shared"], *SEEDS)
    silent, _ = plans_under_seeds(["data-parallel", "pipeline-shared"], *SEEDS)

    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout == other.stdout
    assert one.stdout.startswith("1 rank: ")
    assert silent.returncode == 0


def test_a_handler_that_ends_its_process_is_told_and_the_next_one_is_asked() -> None:
    for ended in plans_under_seeds([spec(Dies)], *SEEDS):
        assert (ended.returncode, ended.stdout) == (3, "")
        assert ended.stderr == "it ended with 3, and made no plan"
    assert [ended.returncode for ended in plans_under_seeds(["noop"], *SEEDS)] == [0, 0]
