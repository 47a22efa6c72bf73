"""What a user's function may return; and that its batches are the same wherever they are taken."""

from __future__ import annotations

import random
import sys
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pipegrad.errors import ConfigError
from pipegrad.train.config import Config
from pipegrad.train.dataset import Batches, pair_of
from pipegrad.train.schema import Data, Model, Named, Parallel

TOKENS = torch.arange(12).reshape(3, 4)
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def config() -> Config:
    data = Data(dataset=Named(name="a:b"))
    return Config(model=Model(factory="a:b"), data=data, parallel=Parallel(microbatches=1))


def batches(function: Any, *, data_rank: int = 0, repeat: bool = True) -> Batches:
    ranks = {"data_rank": data_rank, "num_data_ranks": 2}
    return Batches(config(), "data.dataset", function, repeat=repeat, **ranks)


def taken(found: Batches, *numbers: int) -> list[list[int]]:
    batches = [found.batch(number) for number in numbers]
    inputs = [batch and batch[0][0] for batch in batches]
    return [x.flatten().tolist() if isinstance(x, torch.Tensor) else [] for x in inputs]


@pytest.mark.parametrize(
    "batch",
    [
        TOKENS,
        [TOKENS],
        (INPUTS, TARGETS),
        [INPUTS, TARGETS.numpy()],
        {"input_ids": TOKENS},
        {"input_ids": INPUTS, "labels": TARGETS},
        {"target": TARGETS, "x": INPUTS},
        UserDict(input_ids=INPUTS.numpy(), labels=TARGETS),
        TOKENS.numpy().astype(np.uint16),
        TOKENS.to(torch.uint8),
    ],
)
def test_ordinary_batches(batch: object) -> None:
    inputs: Any
    named: Any
    inputs, target = pair_of(batch)
    assert torch.equal(inputs, INPUTS)
    assert torch.equal(target, TARGETS)
    assert inputs.dtype == target.dtype == torch.int64
    named, target = pair_of({"x": INPUTS, "mask": INPUTS.int(), "target": TARGETS})
    assert {name: x.dtype for name, x in named.items()} == {"x": torch.int64, "mask": torch.int64}
    images = np.zeros((2, 3, 4, 4), np.float32)  # they stay what they are
    inputs, target = pair_of((images, np.array([1, 2], np.uint8)))
    assert (inputs.dtype, target.dtype) == (torch.float32, torch.int64)
    assert (tuple(inputs.shape), target.tolist()) == ((2, 3, 4, 4), [1, 2])


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (None, "it is NoneType: expected a tensor of tokens"),
        ((TOKENS, TOKENS, TOKENS), "it is tuple: expected a tensor of tokens, a pair of inputs"),
        ({"input_ids": TOKENS, "attention_mask": TOKENS}, r"it has the names \['input_ids', 'att"),
        (TOKENS[0], r"it has one tensor, int64 \(4,\): expected tokens \(rows, 2 or more\)"),
        (TOKENS[:, :1], r"it has one tensor, int64 \(3, 1\)"),
        ((TOKENS, TOKENS[:2]), r"inputs are int64 \(3, 4\) and targets int64 \(2, 4\): expected"),
        ([[1, 2, 3], [4, 5]], "it is list: expected a tensor of tokens"),
        ({"text": ["one", "two"]}, "it is dict: .* as tensors"),
        ({"input_ids": [*TOKENS]}, "it is dict: .* as tensors"),
    ],
)
def test_whatever_is_no_batch_says_what_it_is(batch: object, says: str) -> None:
    with pytest.raises(ConfigError, match=f"data.dataset = 'a:b': batch 1: {says}"):
        batches(lambda: [batch]).batch(1)


def test_epochs_follow_and_functions_are_told() -> None:
    calls: list[tuple[int, int, int, int]] = []

    def function(data_rank: int, num_data_ranks: int, epoch: int, seed: int) -> list[Tensor]:
        calls.append((data_rank, num_data_ranks, epoch, seed))
        return [TOKENS + 100 * epoch, TOKENS + 200 * epoch]

    found = taken(batches(function, data_rank=1), 1, 2, 3)
    assert [values[0] for values in found] == [100, 200, 200]
    assert calls == [(1, 2, 1, 0), (1, 2, 2, 0)]
    assert taken(batches(partial(function, epoch=5)), 3)[0][0] == 500
    passed = batches(lambda: [TOKENS]).batch(4)
    assert passed is not None
    assert passed[1] == 4 * 9  # also of those that are passed over
    once = batches(lambda: iter([TOKENS, TOKENS]), repeat=False)
    assert [once.batch(number) is None for number in (1, 2, 3)] == [False, False, True]
    assert once.batch(1) is not None  # from the beginning
    assert batches(list, repeat=False).batch(1) is None


def test_what_can_be_iterated_again_is_made_once() -> None:
    calls: list[str] = []

    def loader() -> DataLoader[Any]:
        calls.append("loader")
        data = TensorDataset(torch.arange(8)[:, None].expand(8, 3), torch.arange(8))
        return DataLoader(data, batch_size=2, shuffle=True)

    def generator() -> Iterator[Tensor]:
        calls.append("generator")
        yield TOKENS
        yield TOKENS

    first = taken(batches(loader), *range(1, 9))
    assert calls == ["loader"]
    epochs = [sorted(x for values in first[i : i + 4] for x in values[::3]) for i in (0, 4)]
    assert epochs == [[*range(8)]] * 2
    assert first[:4] != first[4:]  # each epoch in another order
    torch.rand(3)
    assert taken(batches(loader), *range(1, 9)) == first  # but in no other run
    calls.clear()
    taken(batches(generator), 5)
    assert calls == ["generator"] * 3


def test_a_batch_does_not_depend_on_where_one_began() -> None:
    def as_tokens() -> Iterator[Tensor]:
        while True:
            row = [float(torch.randint(99, ())), random.random(), np.random.rand()]
            yield (torch.tensor([row] * 2, dtype=torch.float64) * 1e6).long()

    through = taken(batches(as_tokens), 1, 2, 3, 4)
    assert taken(batches(as_tokens), 4) == through[3:]
    again = batches(as_tokens)
    taken(again, 3)
    assert taken(again, 1, 2) == through[:2]
    assert len({*map(tuple, through)}) == 4
    assert taken(batches(as_tokens, data_rank=1), 1, 2)[1] != through[1]


def failing() -> Iterator[Tensor]:
    yield TOKENS
    raise KeyError("no such shard")


def exiting() -> Iterator[Tensor]:
    yield sys.exit(0)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (list, "the function has no batch in epoch 1: return an iterable that begins anew"),
        # One iterator, always the same.
        (partial(iter, iter([TOKENS] * 7)), "the function has no batch in epoch 2 after 7 batches"),
        (lambda: 3, "fails at batch 1: TypeError.*not iterable"),
        (failing, r"fails at batch 2: KeyError\('no such shard'\) \(test_dataset.py:"),
        (exiting, r"fails at batch 1: SystemExit\(0\)"),
        (lambda: [TOKENS[:0]], r"batch 1 has 0 rows \(inputs int64 \(0, 3\)\), fewer than"),
    ],
)
def test_a_function_that_goes_wrong_says_where(function: Any, says: str) -> None:
    found = batches(function)
    with pytest.raises(ConfigError, match=says):
        taken(found, *range(1, 10))
