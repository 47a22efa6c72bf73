"""What ranks read that disagree: the difference alone."""

from __future__ import annotations

import pytest

from pipegrad.comm.agreement import same
from pipegrad.errors import AgreementError

LONG = "SGD of all parameters of this model, with {{'lr': {}}}; all others are as everywhere else"
CASES: list[tuple[dict[int, str], str]] = [
    ({0: "4", 1: "8", 2: "4"}, "4 on ranks [0, 2], 8 on rank 1"),
    ({0: "a\nb\nc", 1: "a\nx\ny"}, "b on rank 0, x on rank 1"),
    ({0: "a\nb", 1: "a"}, "b on rank 0, nothing on rank 1"),
    ({0: "", 1: "a"}, "nothing on rank 0, a on rank 1"),
    (
        {0: LONG.format(0.1), 1: LONG.format(0.2)},
        "... model, with {'lr': 0.1}; ... on rank 0, ... model, with {'lr': 0.2}; ... on rank 1",
    ),
    (
        {rank: str(rank) for rank in range(6)},
        "0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3, and 2 more values",
    ),
    (
        {rank: "ab"[rank == 9] for rank in range(10)},
        "a on ranks [0, 1, 2, 3, 4, 5, 6, 7] and 1 more, b on rank 9",
    ),
]


@pytest.mark.parametrize(("values", "words"), CASES)
def test_what_differs_is_shown_alone(values: dict[int, str], words: str) -> None:
    with pytest.raises(AgreementError) as caught:
        same("it", values)
    assert str(caught.value) == f"ranks disagree on it: {words}; make them the same"


def test_equal_values_are_no_error() -> None:
    same("it", {0: "a", 1: "a"})
