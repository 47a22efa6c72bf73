"""Trees: the values that a step is given, leaf by leaf, and whether ranks were given one batch.

[Note: trees] A value may be a tree: dicts, lists and tuples of tensors. Each of its tensors is cut,
and each microbatch gets a tree of the same structure. A leaf that cannot be cut goes to all
microbatches only if it is a number, a string or None. Any other leaf may belong to one sample, so
it is refused. For the same reason a list of numbers or strings counts as a leaf, and is refused.

[Note: what was passed] The ranks of a pipeline train on one batch: one of them takes the inputs,
another one the target. A loader that divides the data over all ranks, as one for DDP does, gives
each of them another batch, and nothing else would notice. So each rank makes a number of every
tensor that it was given, whether its stages take it or not, and all ranks compare them.

In the first step of a kind the numbers are a part of the exchange at its end, and the ranks learn
the names. In every later step they ride on the message of the loss: an entry for each rank and
name, which the other ranks leave at 0. A rank that was not given a tensor leaves its own at 0.

Whoever reads the loss compares. On CPU every rank also reads the message of the step before the
last one when a step begins: it has arrived by then, and all ranks raise in the same step. On other
devices this would make the host wait.

Replicas that are given the same batch in several steps waste their work, but they may want to:
that is a warning. So is a rate of the optimizer that has changed on some ranks since the step
before, or an optimizer that has stepped on some: each rank has an entry for that, too.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from numbers import Number
from operator import itemgetter
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from pipegrad.errors import StepError, level_of_caller
from pipegrad.gradients.drift import bytes_of
from pipegrad.gradients.optimizer_watch import News
from pipegrad.interop.private import flat
from pipegrad.topology import Topology


def flattened(value: object) -> tuple[list[tuple[str, object]], Callable[[list[object]], object]]:
    """Returns the leaves of a value behind their paths, and how to make such a value of others."""
    if isinstance(value, Tensor):
        return [("", value)], itemgetter(0)
    leaves, rebuilt = flat(value, _is_plain_list)
    if isinstance(value, Mapping) and leaves and leaves[0][1] is value:
        return flat(dict(value), _is_plain_list)  # torch does not know its class
    return leaves, rebuilt


def leaves_of(values: Mapping[str, object]) -> dict[str, object]:
    """Returns the leaves of some values, by name and path: ``"batch['mask']"``."""
    return {f"{name}{path}": x for name, value in values.items() for path, x in flattened(value)[0]}


def versions_of(values: Sequence[object]) -> list[int]:
    """Returns how often each tensor of some values was written in place."""
    leaves = [
        leaf
        for value in values
        for leaf in ((value,) if isinstance(value, Tensor) else leaves_of({"": value}).values())
    ]
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def name_in(path: str) -> str:
    """Returns the name that a path begins with: ``"batch['mask']"``, ``"batch.mask"``."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def is_cut(leaf: object) -> TypeGuard[Tensor]:
    """Returns whether a leaf has a first dimension."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def check_kind(path: str, leaf: object) -> None:
    """Refuses a leaf that is no tensor, number, string or None; see [Note: trees]."""
    name = name_in(path)
    what = path if name == "target" else f"input {path!r}"
    if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
        raise StepError(
            f"the {what} is a tensor of layout {leaf.layout}, which cannot be cut into "
            f"microbatches: give microbatches= that are ready"
        )
    if leaf is not None and not isinstance(leaf, Tensor | Number | str):
        raise StepError(
            f"the {what} is a {type(leaf).__name__}, expected a tensor, which is cut into "
            f"microbatches; a number, string or None, which each of them gets; or a dict, list or "
            f"tuple of tensors. If the model needs none of it, such as texts, drop the column. If "
            f"every microbatch is to get all of it, give it by a name of its own, and make the "
            f"Scheduler with whole=({name!r},)"
        )


def _is_plain_list(value: object) -> bool:
    if not isinstance(value, tuple | list) or not value:
        return False
    return all(isinstance(item, Number | str) for item in value)


# By name; of what was not given there is none. A number on a device is an int64 scalar.
Numbers = Mapping[str, int | Tensor]
# Takes the sums of what ranks were given; returns what is wrong with them.
Compare = Callable[[Sequence[float]], str | None]
_Array = np.ndarray[Any, Any]
_ODD = 0x1E3779B97F4A7C15
_LOW = 2**32 - 1
_MOST_SAME = 3  # steps in which replicas were given the same, before a warning


def number_of(value: object) -> int | Tensor | None:
    """Returns a number from 1 to 2^32 of the tensors in a value; None if it has none.

    It is the same on every device. Other bits, another order, shape or dtype give another number,
    but for one in 2^32.

    Sync: on the current stream; the host waits for nothing.
    """
    total: Any = 0
    leaves = [value] if isinstance(value, Tensor) else [leaf for _, leaf in flattened(value)[0]]
    tensors = [leaf for leaf in leaves if _is_plain(leaf)]
    for leaf in tensors:
        total = _wrapped(_wrapped(total * _ODD) + _sum(leaf) + _kind(leaf.shape, leaf.dtype))
    if not tensors:
        return None
    # The highest bits of a product depend on all bits of its factors.
    mixed = total * _ODD
    number: int | Tensor = (mixed >> 32 & _LOW) + 1
    return number


def _is_plain(leaf: object) -> TypeGuard[Tensor]:
    if not isinstance(leaf, Tensor) or type(leaf) not in (Tensor, nn.Parameter):
        return False
    return leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_meta


def _wrapped(total: Any) -> Any:  # noqa: ANN401 - an int, or a tensor of a device
    """Returns a number modulo 2^64 as an int64 has it."""
    return total if isinstance(total, Tensor) else (total + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=1024)
def _kind(shape: torch.Size, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{tuple(shape)} {dtype}".encode())


def _sum(tensor: Tensor) -> Any:  # noqa: ANN401 - an int, or a tensor of a device
    """Returns the sum of the words of 8 bytes, each times the weight of its position."""
    if tensor.is_cpu:  # a third of the time that torch takes for few words
        try:
            array = tensor.numpy(force=True)
        except TypeError:  # numpy does not know the dtype
            array = bytes_of(tensor).numpy()
        octets: _Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if len(octets) % 8:
            octets = np.pad(octets, (0, -len(octets) % 8))
        words = octets.view(np.int64)
        return int(np.dot(words, _weights(len(words))))
    return _sum_on_device(tensor)


def _sum_on_device(tensor: Tensor) -> Tensor:
    octets = bytes_of(tensor.resolve_conj().resolve_neg())
    if len(octets) % 8 or octets.storage_offset() % 8:
        padded = octets.new_zeros(-(-len(octets) // 8) * 8)
        padded[: len(octets)] = octets
        octets = padded
    words = octets.view(torch.int64)
    total: Tensor = (words * _scattered(torch.arange(len(words), device=words.device))).sum()
    return total


def _scattered(positions: Any) -> Any:  # noqa: ANN401 - an int64 array of numpy, or a tensor
    """Returns odd numbers that look random: with 1, 3, 5, ... sums of tokens would be equal."""
    positions = (positions + 1) * _ODD
    return (positions ^ (positions >> 32)) * _ODD | 1


_known_weights: _Array = _scattered(np.arange(1024))


def _weights(number: int) -> _Array:
    global _known_weights  # noqa: PLW0603 - they are the same for all
    if number > len(_known_weights):
        _known_weights = _scattered(np.arange(2 * number))
    return _known_weights[:number]


class Passed:
    """Compares what ranks were given; see [Note: what was passed].

    Args:
        topology: Over all ranks.
    """

    def __init__(self, topology: Topology) -> None:
        self._ranks = sorted(topology.ranks)
        self._rank = topology.rank
        self._pipelines = topology.pipelines
        self._sampler = (
            f"DistributedSampler(dataset, num_replicas=topology.size({topology.data!r}), "
            f"rank=topology.coordinate({topology.data!r}))"
        )
        self._data = topology.data
        at = {p: topology.at(p[0]).coordinate(topology.data) for p in self._pipelines}
        self._replicas = [(a, b) for a, b in pairwise(self._pipelines) if at[a] != at[b]]
        self._num_same = 0  # steps, one after the other
        self._warned = set[str]()
        self._names = dict[bool, tuple[str, ...]]()  # by forward_only

    def of_step(
        self, numbers: Numbers, news: int, *, forward_only: bool
    ) -> tuple[list[int | Tensor], Compare]:
        """Returns what this rank adds to the message of a step, and what compares the sums.

        Args:
            numbers: What this rank was given.
            news: What its optimizers did: see `OptimizerWatch.news`.
            forward_only: Which kind of step it is.
        """
        names = self._names.get(forward_only, ())
        sent = [
            numbers.get(name, 0) if rank == self._rank else 0
            for name in names
            for rank in self._ranks
        ]
        if not forward_only:
            sent += [news if rank == self._rank else 0 for rank in self._ranks]
        return sent, partial(self._wrong, names, forward_only=forward_only)

    def learn(self, numbers: Mapping[int, Numbers], *, forward_only: bool) -> str | None:
        """Takes what each rank was given in a first step; returns what is wrong with it."""
        every = {name for by_name in numbers.values() for name in by_name}
        names = tuple(sorted(every, key=lambda name: (name == "target", name)))
        by_rank = [numbers[rank] for rank in self._ranks]
        table = [float(of_rank.get(name, 0)) for name in names for of_rank in by_rank]
        wrong = self._wrong(names, table, forward_only=forward_only)
        if wrong is None:  # else the next step is a first step again
            self._names.setdefault(forward_only, names)
        return wrong

    def _wrong(
        self, names: Sequence[str], numbers: Sequence[float], *, forward_only: bool
    ) -> str | None:
        """Returns what is wrong with a step; warns of replicas that have one batch.

        Args:
            names: Of what was given.
            numbers: For each name, one for each rank; then the news of each rank, if there are.
            forward_only: Which kind of step it is.
        """
        size = len(self._ranks)
        if not forward_only and self._rank == self._ranks[0]:
            self._compare_news(numbers[len(names) * size :][:size])
        tables = {
            name: dict(zip(self._ranks, numbers[i * size : (i + 1) * size], strict=True))
            for i, name in enumerate(names)
        }
        if (words := self._differing(tables)) is not None:
            return words
        if self._replicas and not forward_only:
            self._compare_replicas(tables)
        return None

    def differing(self, numbers: Mapping[int, Numbers]) -> str | None:
        """Returns what differs within a pipeline, of what ranks were given in a step that failed.

        Args:
            numbers: By rank; empty of one that does not know.
        """
        names = dict.fromkeys(name for by_name in numbers.values() for name in by_name)
        return self._differing(
            {n: {rank: float(numbers[rank].get(n, 0)) for rank in self._ranks} for n in names}
        )

    def _differing(self, tables: Mapping[str, Mapping[int, float]]) -> str | None:
        for name, by_rank in tables.items():
            for pipeline in self._pipelines:
                numbers_of = {rank: by_rank[rank] for rank in pipeline if by_rank[rank]}
                if len(set(numbers_of.values())) > 1:
                    return self._words(name, numbers_of, tables.get("target", {}))
        return None

    def _words(
        self, name: str, numbers_of: Mapping[int, float], targets: Mapping[int, float]
    ) -> str:
        first, *others = numbers_of
        rank = next(rank for rank in others if numbers_of[rank] != numbers_of[first])
        are_augmented = targets.get(first, 0) == targets.get(rank, 0) != 0
        advice = (
            f"Their targets are equal, so the samples are the same, and their random augmentation "
            f"is not: seed it by topology.coordinate({self._data!r}), not by the rank, as in "
            f"DataLoader(..., num_workers=1, generator=torch.Generator().manual_seed("
            f"topology.coordinate({self._data!r}))). In the main process dropout draws, too"
            if are_augmented
            else f"A sampler must divide the data along {self._data!r} alone: {self._sampler}"
        )
        return (
            f"ranks {first} and {rank} were given different tensors as {name!r}, but are ranks of "
            f"one pipeline, which trains on one batch. {advice}"
        )

    def _compare_news(self, news: Sequence[float]) -> None:
        """Warns once of what optimizers did on some ranks alone."""
        by_rank = {r: News(int(n)) for r, n in zip(self._ranks, news, strict=False) if n}
        for flag, what, verb in (
            (
                News.CHANGED,
                "an option of the optimizer, such as its rate, has changed",
                "lr_schedule.step()",
            ),
            (News.STEPPED, "an optimizer has stepped", "optimizer.step()"),
        ):
            ranks = [rank for rank, did in by_rank.items() if flag in did]
            others = [rank for rank in by_rank if rank not in ranks]
            if ranks and others and verb not in self._warned:
                self._warned.add(verb)
                warnings.warn(
                    f"since the step before {what} on ranks {ranks}, and not on ranks {others}, "
                    f"whose stages go on as they were: call {verb} on all ranks, also where the "
                    f"optimizer has no parameters",
                    stacklevel=level_of_caller(),
                )

    def _compare_replicas(self, tables: Mapping[str, Mapping[int, float]]) -> None:
        same = next((pair for pair in self._replicas if _are_same(pair, tables)), None)
        self._num_same = 0 if same is None else self._num_same + 1
        if self._num_same == _MOST_SAME:
            a, b = same or ((), ())
            warnings.warn(
                f"ranks {list(a)} and {list(b)} are replicas, and were given the same batch in "
                f"{_MOST_SAME} steps, so one of them does nothing new. A sampler divides the data: "
                f"{self._sampler}",
                stacklevel=level_of_caller(),
            )


def _are_same(pair: Sequence[Sequence[int]], tables: Mapping[str, Mapping[int, float]]) -> bool:
    """Returns whether two pipelines were given the same of every name, and of one at least."""
    first, second = ([_of(pipeline, by_rank) for by_rank in tables.values()] for pipeline in pair)
    return first == second and any(first)


def _of(pipeline: Sequence[int], by_rank: Mapping[int, float]) -> float:
    return next((by_rank[rank] for rank in pipeline if by_rank[rank]), 0.0)
