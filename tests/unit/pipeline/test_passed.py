"""Numbers of what a rank was given: equal bits, order, shape and dtype, on any device."""

from __future__ import annotations

import pytest
import torch

from pipegrad.pipeline import trees
from pipegrad.pipeline.trees import number_of

X = torch.arange(48.0).reshape(6, 8)
SAME = {
    "a copy": X.clone(),
    "other memory": X.t().contiguous().t(),
    "with a graph": X.clone().requires_grad_(),
    "in a list": [X],
    "beside a number": {"a": X, "b": 3, "c": None},
}
OTHER: dict[str, object] = {
    "another value": X + 1,
    "one bit": torch.nextafter(X, X + 1).where(X == 5, X),
    "another order of rows": X.flip(0),
    "another order in a row": X.roll(1, 1),
    "another order of pairs": X.reshape(-1, 2).flip(0).reshape(6, 8),
    "another sign": -X,
    "another shape": X.reshape(8, 6),
    "another dtype": X.double(),
    "the same bits of another dtype": X.view(torch.int32),
    "fewer": X[:5],
    "more tensors": [X, X],
}


@pytest.mark.parametrize("value", SAME.values(), ids=SAME)
def test_the_same_tensors_have_one_number(value: object) -> None:
    with torch.device("meta"):  # as after torch.set_default_device
        trees._table.cache_clear()
        number = number_of(value)
    assert number == number_of(X)


def test_other_tensors_have_other_numbers_from_1_to_2_to_the_32() -> None:
    numbers = {name: number_of(value) for name, value in (OTHER | {"X": X}).items()}
    assert len({*numbers.values()}) == len(OTHER) + 1
    assert all(isinstance(n, int) and 1 <= n <= 2**32 for n in numbers.values())
    assert number_of({"a": 3, "b": [None, "x"]}) is None


def test_batches_of_tokens_and_of_flags_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(50, (4, 7), generator=generator) for _ in range(500)]
    assert len({number_of(batch) for batch in tokens}) == 500
    flags = [torch.rand(3, 11, generator=generator) > 0.5 for _ in range(500)]
    assert len({number_of(batch) for batch in flags}) == 500


def test_a_device_has_the_number_of_the_cpu() -> None:
    """It computes the weights of positions anew; the host has a table of them."""
    for number in (0, 1, 7, 1000):
        table = trees._table(number.bit_length())
        assert torch.equal(table[:number], trees._scattered(torch.arange(number)))
