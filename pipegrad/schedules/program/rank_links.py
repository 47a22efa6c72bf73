"""RankLinks: which links and channels the stages of one rank take and make."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from pipegrad.schedules.program.program import Program


@dataclass(frozen=True)
class RankLinks:
    """The links of one rank, by stage.

    Attributes:
        taken: Stage -> for each link that it takes: the link, whether it comes from another rank,
            and its producer.
        produced: Stage -> for each differentiable link that it makes: the link, the channels of
            the gradients that come back, its consumers on this rank, and whether gradients are
            summed.
        num_readers: Link -> how many stages of this rank take it.
        incoming: Link -> the channel that brings it to this rank.
    """

    taken: dict[int, list[tuple[int, bool, int]]]
    produced: dict[int, list[tuple[int, list[int], list[int], bool]]]
    num_readers: dict[int, int]
    incoming: dict[int, int]

    @classmethod
    def of(cls, program: Program, rank: int) -> RankLinks:
        """Returns the links of a pipeline rank."""
        rank_of = program.schedule.stage_to_rank
        taken = defaultdict[int, list[tuple[int, bool, int]]](list)
        produced = defaultdict[int, list[tuple[int, list[int], list[int], bool]]](list)
        num_readers: dict[int, int] = {}
        incoming: dict[int, int] = {}
        back = defaultdict[int, list[int]](list)
        # A link has one channel to this rank for its value, and one from each other rank for the
        # gradient that comes back.
        for number, (link, kind, _, target) in enumerate(program.channels):
            if target == rank and kind == "F":
                incoming[link] = number
            if target == rank and kind == "B":
                back[link].append(number)
        for number, link_ in enumerate(program.links):
            local = [c for c in link_.consumers if rank_of[c] == rank]
            num_readers[number] = len(local)
            remote = rank_of[link_.producer] != rank
            for consumer in local:
                taken[consumer].append((number, remote, link_.producer))
            if not remote and link_.differentiable:
                joined = len({rank_of[c] for c in link_.consumers}) > 1
                produced[link_.producer].append((number, back[number], local, joined))
        return cls(taken, produced, num_readers, incoming)
