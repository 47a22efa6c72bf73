"""Launches: which collectives of a rank leave, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pipegrad.schedules.program.program import Collective, Op, encode


class Launches:
    """Which collectives of a rank are launched when a stage is final.

    Each comm stream has a queue. Its collectives are launched in one order on all ranks, so a
    collective waits until all collectives before it in the queue have left.
    """

    def __init__(self, rank: int, local: set[int], collectives: Sequence[Collective]) -> None:
        self._queues = defaultdict[int, list[int]](list)
        self._missing: dict[int, set[int]] = {}
        self._synced: list[int] = []
        self._unused = set[int]()
        self._shared = set[int]()
        for number, collective in enumerate(collectives):
            if rank in collective.ranks:
                stages = local.intersection(collective.stages)
                self._queues[collective.comm_stream].append(number)
                self._missing[number] = stages
                # Only a collective of several ranks makes another rank of the pipeline wait.
                if len(collective.ranks) > 1:
                    self._shared |= stages
                if collective.readers:
                    self._synced.append(number)
                    self._unused |= local.intersection(collective.readers)

    def is_shared(self, stage: int) -> bool:
        """True if other ranks of the pipeline wait for gradients of a stage."""
        return stage in self._shared

    def first_use(self, stage: int) -> Iterable[int]:
        """Yields the item before the first forward of a stage, if a parameter sync writes to it."""
        if stage in self._unused:
            self._unused.remove(stage)
            yield encode(Op.FIRST_USE, stage)

    def after(self, stage: int) -> list[int]:
        """Returns the items of the collectives that leave when a stage becomes final."""
        for stages in self._missing.values():
            stages.discard(stage)
        # A collective that is ready waits behind one that is not. All ranks then issue the same
        # order on each comm stream, so no order of final stages can deadlock them.
        items = list[int]()
        for queue in self._queues.values():
            while queue and not self._missing[queue[0]]:
                items.append(encode(Op.LAUNCH, queue.pop(0)))
        return items

    def published(self) -> Iterable[int]:
        """Yields the items that send parameters after the step."""
        for number in self._synced:
            yield encode(Op.PUBLISH, number)
