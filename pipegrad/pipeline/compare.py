"""Comparisons: whether all ranks are about to make one step.

[Note: what was passed] The ranks of a pipeline train on one batch: one of them uses the inputs,
another one the target. A loader that divides the data over all ranks, as one for DDP does, gives
each of them another batch, and nothing else would detect that. Therefore each rank computes a
number from every tensor of its batch, whether its stages use it or not, and all ranks exchange
these numbers.

They compare before anything is computed, because a mistake then costs no step. All ranks wait for
the slowest one. To limit this cost, ranks compare in the steps 1, 2, 4, 8 and so on, and later
every `check_every` steps: a wrong sampler is wrong from the first step. They also compare in the
first step of a kind, because it may be a repetition of a step that failed. Evaluations are counted
separately.

Replicas that get the same batch waste their work, but users may want that: it is a warning. Two
more conditions only warn: an optimizer's rate has changed on some ranks alone, or an optimizer has
stepped on some ranks alone.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import AgreementError, level_of_caller
from pipegrad.gradients.optimizer_watch import News
from pipegrad.pipeline.trees import leaves_of, name_in, versions_of
from pipegrad.topology import Topology

_MOST_SAME = 3  # comparisons in which replicas have the same batch, before a warning
_MOST_REPEATED = 3  # after the first one: in steps 2, 4 and 8
_Numbers = Mapping[str, int]  # by name; arguments that were not given have none


@dataclass(frozen=True)
class Facts:
    """The facts that a rank sends to all others; empty if its batch was refused.

    Attributes:
        numbers: The results of `number_of`, by name of the argument.
        rows: The number of rows of its batch; None if it cut nothing.
        length: The length in time, if it was cut alike for all rows; else None.
        divisor: Its loss_divisor, or the default.
        news: Events of its optimizers since the last comparison: see `OptimizerWatch.news`.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    rows: int | None = None
    length: int | None = None
    divisor: float | None = None
    news: int = 0


class BatchCheck:
    """Compares batches, divisors and optimizers over all ranks; see [Note: what was passed]."""

    def __init__(self, topology: Topology, *, timeout_seconds: float) -> None:
        self._topology = topology
        self._ranks = sorted(topology.ranks)
        self._timeout_seconds = timeout_seconds
        data = topology.data
        self._sampler = (
            f"DistributedSampler(dataset, num_replicas=topology.size({data!r}), "
            f"rank=topology.coordinate({data!r}))"
        )
        self._num_same = 0  # comparisons, one after the other
        self._warned = set[str]()
        # Tensors that were the same in all comparisons with a new batch, and how many these were.
        self._tables: dict[str, tuple[weakref.ref[Tensor], list[int]]] | None = None
        self._num_new = 0

    def compare(self, facts: Facts, number: int, *, forward_only: bool) -> None:
        """Compares the facts of all ranks; warns of optimizers and replicas.

        Raises:
            AgreementError: If ranks differ, or one does not come; on all ranks.
        """
        try:
            replies = agree(
                f"the batch of {'evaluation' if forward_only else 'step'} {number}",
                lambda: facts,
                ranks=self._ranks,
                timeout_seconds=self._timeout_seconds,
            )
            by_rank = dict(zip(self._ranks, replies, strict=True))
            for pipeline in self._topology.pipelines:
                self._refuse_unlike({rank: by_rank[rank] for rank in pipeline})
            given = {r: one.divisor for r, one in by_rank.items() if one.divisor is not None}
            same("loss_divisor", {rank: str(divisor) for rank, divisor in given.items()})
        except AgreementError as error:
            error.is_everyones = True
            raise
        if not forward_only:
            if self._topology.rank == self._ranks[0]:
                self._warn_of_news({rank: one.news for rank, one in by_rank.items() if one.news})
            self._warn_of_replicas(by_rank)

    def _refuse_unlike(self, facts: Mapping[int, Facts]) -> None:
        """Refuses batches that differ within a pipeline."""
        for name in dict.fromkeys(name for one in facts.values() for name in one.numbers):
            numbers = {r: one.numbers[name] for r, one in facts.items() if name in one.numbers}
            first = min(numbers)
            other = next((rank for rank in numbers if numbers[rank] != numbers[first]), None)
            if other is not None:
                targets = [facts[rank].numbers.get("target") for rank in (first, other)]
                raise AgreementError(self._words(name, first, other, targets))
        rows = {rank: str(one.rows) for rank, one in facts.items() if one.rows}
        same("how many rows their tensors have", rows)
        lengths = {rank: str(one.length) for rank, one in facts.items() if one.length}
        same("how long their tensors are in time", lengths)

    def _words(self, name: str, first: int, other: int, targets: Sequence[int | None]) -> str:
        data = self._topology.data
        advice = f"A sampler must divide the data along {data!r} alone: {self._sampler}"
        if targets[0] is not None and targets[0] == targets[1]:
            advice = (
                f"Their targets are equal, so the samples are the same, and their random "
                f"augmentation is not: seed it by topology.coordinate({data!r}), not by the rank, "
                f"as in DataLoader(..., num_workers=1, generator=torch.Generator().manual_seed("
                f"topology.coordinate({data!r}))). In the main process dropout draws, too"
            )
        return (
            f"ranks {first} and {other} were given different tensors as {name!r}, but are ranks of "
            f"one pipeline, which trains on one batch. {advice}"
        )

    # Warnings.

    def _warn_of_news(self, news: Mapping[int, int]) -> None:
        """Warns once of events of optimizers on some ranks alone."""
        by_rank = {rank: News(number) for rank, number in news.items()}
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
                    f"since the last comparison {what} on ranks {ranks}, and not on ranks "
                    f"{others}, whose stages go on as they were: call {verb} on all ranks, also "
                    f"where the optimizer has no parameters",
                    stacklevel=level_of_caller(),
                )

    def _warn_of_replicas(self, facts: Mapping[int, Facts]) -> None:
        """Warns of two replicas that had one batch several times."""
        topology, batches = self._topology, dict[tuple[int, ...], _Numbers]()
        for pipeline in topology.pipelines:
            batches[pipeline] = {n: x for rank in pipeline for n, x in facts[rank].numbers.items()}
        at = {ranks: topology.at(ranks[0]).coordinate(topology.data) for ranks in batches}
        pairs = [(a, b) for a, b in pairwise(batches) if at[a] != at[b]]
        alike = [(a, b) for a, b in pairs if batches[a] and batches[a] == batches[b]]
        self._num_same = self._num_same + 1 if alike else 0
        if self._num_same == _MOST_SAME:
            a, b = alike[0]
            warnings.warn(
                f"ranks {list(a)} and {list(b)} are replicas, and were given the same batch in "
                f"{_MOST_SAME} steps, so one of them does nothing new. A sampler divides the data: "
                f"{self._sampler}",
                stacklevel=level_of_caller(),
            )

    def look_for_tables(self, passed: Mapping[str, object], cut: Collection[str]) -> None:
        """Warns of a tensor that is cut as if its rows were samples, and is in all batches.

        A GAN has a second step with the same batch, and not an eighth one.
        """
        tensors = {path: x for path, x in leaves_of(passed).items() if isinstance(x, Tensor)}
        # Torch counts changes in place. A tensor that was filled anew is a new batch.
        if self._tables is None:
            self._tables = {p: (weakref.ref(x), versions_of([x])) for p, x in tensors.items()}
        repeated = {
            path: (first, versions)
            for path, (first, versions) in self._tables.items()
            if path in tensors and first() is (x := tensors[path]) and versions == versions_of([x])
        }
        # If all inputs are the same, then the caller repeats one batch, as benchmarks do.
        inputs = [path for path in tensors if name_in(path) != "target"]
        if repeated.keys() >= {*(inputs or tensors)}:
            return
        self._tables, self._num_new = repeated, self._num_new + 1
        for path in sorted(repeated.keys() & cut) if self._num_new == _MOST_REPEATED else ():
            value = tensors[path]
            if not bool((value == value[:1]).all()):  # else it does not matter which rows are read
                is_leaf = not path.isidentifier()  # of a tree: no name for `whole`
                warnings.warn(
                    f"the input {path!r} is the same tensor in all steps, while others are not, "
                    f"and is cut into microbatches: its first dimension, {len(value)}, is taken "
                    f"for the batch's. If its rows are not of the samples, "
                    f"{'give it by a name of its own, and ' if is_leaf else ''}make the Scheduler "
                    f"with whole={'' if is_leaf else (path,)}",
                    stacklevel=level_of_caller(),
                )
