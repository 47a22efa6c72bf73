"""Cases that share a spawn, any of which can also run alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import pytest

CaseT = TypeVar("CaseT")
FoundT = TypeVar("FoundT")

_parameters = set[object]()  # of all tests that run


def note_selected(items: Iterable[pytest.Item]) -> None:
    """Remembers the tests that run: a spawn leaves out cases that none of them is about."""
    functions = [item for item in items if isinstance(item, pytest.Function)]
    for function in [f for f in functions if hasattr(f, "callspec")]:
        for value in function.callspec.params.values():
            with contextlib.suppress(TypeError):  # what has no hash is no case
                _parameters.add(value)


def smoked(cases: Iterable[CaseT], smoke: CaseT) -> list[Any]:
    """Returns the cases as parameters, one of them with the mark `smoke`."""
    cases = list(cases)
    assert smoke in cases
    marks = pytest.mark.smoke
    return [pytest.param(one, id=str(one), marks=marks if one == smoke else ()) for one in cases]


class World(Generic[CaseT, FoundT]):
    """Cases on one number of ranks, and what each rank found.

    The first question starts a spawn, which runs the cases that parametrize a selected test. A case
    that is not among them runs in a spawn of its own when a test asks for it. A spawn that fails is
    not run again: all its cases raise its error.
    """

    def __init__(
        self, cases: Iterable[CaseT], run: Callable[[Sequence[CaseT]], Iterable[FoundT]]
    ) -> None:
        """Takes the cases, and a function that runs some of them and returns what it found."""
        self._cases, self._run = list(cases), run
        self._found: dict[CaseT, FoundT | Exception] = {}

    def __getitem__(self, case: CaseT) -> FoundT:
        if case not in self._found:
            selected = [one for one in self._cases if one in _parameters]
            self._spawn(selected if case in selected and not self._found else [case])
        found = self._found[case]
        if isinstance(found, Exception):
            raise found
        return found

    def _spawn(self, cases: Sequence[CaseT]) -> None:
        try:
            self._found.update(zip(cases, self._run(cases), strict=True))
        except Exception as error:  # noqa: BLE001 - raised for each case
            self._found.update(dict.fromkeys(cases, error))
