"""Options by name: what is unknown, what is missing, and what was probably meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipegrad.plugins.registry import closest_first, complaints_of


def plain(model: object, *, width: int, depth: int = 2) -> None: ...


def open_to_all(model: object, width: int = 3, **others: object) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "given", "expected"),
    [
        (plain, ["width"], ["model"], ""),
        (plain, ["width", "depth"], ["model"], ""),
        (plain, [], ["model"], "needs the option 'width'; allowed, closest first: width, depth"),
        (plain, ["widht"], ["model"], "has no option 'widht', needs the option 'width'; allowed"),
        (plain, ["width", "model"], ["model"], "has no option 'model'; allowed"),
        (plain, ["width"], [], "needs the option 'model'; allowed"),
        (open_to_all, ["anything"], ["model"], ""),
        (open_to_all, ["model"], ["model"], "has no option 'model'"),
        (max, ["x"], [], ""),
        (list, ["x"], [], "has no option 'x'; allowed, closest first: none"),
    ],
)
def test_complaints(
    function: Callable[..., object], options: list[str], given: list[str], expected: str
) -> None:
    found = complaints_of(function, options, given=given)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_close_names_come_first() -> None:
    assert closest_first("stpes", ["seed", "steps", "device"]) == "steps, device, seed"
    assert closest_first("Adamw", ["Adam", "AdamW", "SGD"]) == "AdamW, Adam, SGD"
    assert closest_first("x", []) == "none"
