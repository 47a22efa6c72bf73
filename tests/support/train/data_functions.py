"""Functions of batches that a configuration can name, and losses: right ones, and wrong ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

ROWS, LENGTH = 8, 16  # of a batch, all data ranks together


def rows_of(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(256, (ROWS, LENGTH + 1), generator=generator)


def listed(
    num_batches: int = 5, *, data_rank: int = 0, num_data_ranks: int = 1, kind: str = "tensor"
) -> list[Any]:
    """The same rows for any number of data ranks; five batches an epoch."""
    batches = [rows_of(number).chunk(num_data_ranks)[data_rank] for number in range(num_batches)]
    kinds: dict[str, list[Any]] = {
        "tensor": batches,
        "pair": [(x[:, :-1], x[:, 1:]) for x in batches],
        "table": [{"input_ids": x[:, :-1].numpy(), "labels": x[:, 1:]} for x in batches],
    }
    return kinds[kind]


def named(*, data_rank: int = 0, num_data_ranks: int = 1) -> list[Any]:
    """Inputs of two names."""
    rows = [x.chunk(num_data_ranks)[data_rank] for x in map(rows_of, range(3))]
    return [
        {"tokens": x[:, :-1], "mask": (x[:, :-1] % 3 > 0).float(), "target": x[:, 1:]} for x in rows
    ]


def endless() -> Iterator[Tensor]:
    """Each batch has numbers of all generators, and there is no end."""
    while True:
        words = [random.randrange(256) for _ in range(ROWS * (LENGTH + 1))]
        batch = torch.tensor(words).view(ROWS, LENGTH + 1)
        batch[0] = torch.from_numpy(np.random.randint(0, 256, LENGTH + 1))
        batch[1] = torch.randint(256, (LENGTH + 1,))
        yield batch


def generated(*, data_rank: int = 0, num_data_ranks: int = 1) -> Iterator[Tensor]:
    yield from listed(data_rank=data_rank, num_data_ranks=num_data_ranks)


def loaded(*, data_rank: int = 0, num_data_ranks: int = 1) -> DataLoader[Any]:
    """Shuffled by torch's global generator, and read by a process of its own."""
    data = TensorDataset(rows_of(0).repeat(5, 1)[data_rank::num_data_ranks] + 0)
    return DataLoader(data, ROWS // num_data_ranks, shuffle=True, drop_last=True)


def drawn(*, data_rank: int, num_data_ranks: int) -> Iterator[Tensor]:
    """Draws from every generator there is, for ever."""
    while True:
        shift = random.randrange(9) + int(np.random.randint(9)) + data_rank
        yield (torch.randint(200, (ROWS // num_data_ranks, LENGTH + 1)) + shift) % 256


def uneven(*, data_rank: int, num_data_ranks: int) -> list[Any]:
    """One data rank has more batches an epoch than the other."""
    return listed(data_rank=data_rank, num_data_ranks=num_data_ranks)[: 2 + data_rank]


def ragged_batch(number: int) -> list[Tensor]:
    """Rows of other lengths, another number of them in each batch."""
    rows = rows_of(number)[: ROWS - number % 3]
    return [row[: 3 + (5 * i + 7 * number) % (LENGTH - 1)] for i, row in enumerate(rows)]


def ragged(*, data_rank: int = 0, num_data_ranks: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Padded to the longest row of this data rank, with targets of -100."""
    for number in range(5):
        rows = ragged_batch(number)[data_rank::num_data_ranks]
        filled = torch.full((len(rows), max(map(len, rows))), -100)
        for i, row in enumerate(rows):
            filled[i, : len(row)] = row
        yield filled[:, :-1].clamp(min=0), filled[:, 1:]


def by_rank() -> list[Tensor]:
    """Goes by the rank, as a script for data parallelism does."""
    return [rows_of(dist.get_rank())]


def by_rank_later() -> list[Tensor]:
    """Ranks compare what they are given in the steps 1, 2, 4 and so on."""
    return [rows_of(0), rows_of(0), rows_of(0), rows_of(dist.get_rank())]


def told(*, epoch: int, seed: int, data_rank: int, num_data_ranks: int) -> list[Tensor]:
    """Needs everything that a function may be told."""
    return [rows_of(1000 * epoch + seed).chunk(num_data_ranks)[data_rank]]


def without_ranks() -> list[Any]:
    return listed()


def fails_on_one() -> Iterator[Tensor]:
    """Fails at the third batch, on the last rank."""
    yield from listed(2)
    if dist.get_rank() == dist.get_world_size() - 1:
        raise OSError("no such shard")
    yield from listed(3)


def ends_once(only: list[Any] = []) -> Iterator[Tensor]:  # noqa: B006 - wrong on purpose
    """Returns one iterator, always the same."""
    if not only:
        only.append(iter(listed(2)))
    return only[0]  # type: ignore[no-any-return]


def nothing() -> list[Tensor]:
    return []


def none_later() -> list[Any]:
    return [rows_of(0), None]


def last_smaller() -> list[Tensor]:
    return [rows_of(0), rows_of(1)[:1]]


def smoothed(output: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    return functional.cross_entropy(
        output.flatten(0, 1), target.flatten(), label_smoothing=smoothing
    )


def with_accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    hits = (output.argmax(-1) == target).float()
    return smoothed(output, target), {"accuracy": hits.mean()}


def not_reduced(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")


def fails(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def checks_algorithms(output: Tensor, target: Tensor) -> Tensor:
    assert torch.are_deterministic_algorithms_enabled()
    return smoothed(output, target)
