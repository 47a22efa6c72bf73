"""Program: everything that every rank does in a step, in order. Plain integers, no torch."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal, NamedTuple

from pipegrad.schedules.schedule import Action, Kind, Schedule

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
# An item is one integer, because a Program of many microbatches has millions of items. Its lowest
# bits are an Op. Then comes a microbatch, then the number of a channel, link, collective or stage.
# For COMPUTE that number holds a stage and an index into KINDS.
OP_BITS, MICROBATCH_BITS, KIND_BITS = 4, 28, 2
OP_MASK, MICROBATCH_MASK, KIND_MASK = 2**OP_BITS - 1, 2**MICROBATCH_BITS - 1, 2**KIND_BITS - 1


class Op(IntEnum):
    """What an item does.

    The number in an item is a channel for transfers, a link for JOIN, a collective for LAUNCH and
    PUBLISH, a stage and a kind for COMPUTE, and a stage for all others.
    """

    FIRST_USE = 0  # wait for the parameter sync of a stage
    POST_RECEIVE = 1  # start to receive a transfer into a buffer
    WAIT_RECEIVE = 2  # wait until the transfer has arrived
    JOIN = 3  # sum the gradients that the consumers of a value sent back
    LAST_BACKWARD = 4  # the next backward of a stage is the last: parameters become final in it
    COMPUTE = 5
    SEND = 6  # start a transfer; does not wait
    RELEASE = 7  # the transfer has arrived: free the sent tensor
    FINAL = 8  # the gradients of a stage are complete
    LAUNCH = 9  # the latest time to start a collective on its comm stream; does not wait
    PUBLISH = 10  # send updated parameters
    INPUTS_FINAL = 11  # all input gradients of a stage are computed, but not all weight gradients
    SHARED_WEIGHTS = 12  # compute the weight gradients that other ranks wait for

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


class Item(NamedTuple):
    """One thing that a rank does."""

    op: Op
    which: int
    microbatch: int


def encode(op: int, which: int, microbatch: int = 0) -> int:
    """Returns an item as one integer."""
    return (which << MICROBATCH_BITS | microbatch) << OP_BITS | op


def decode(code: int) -> Item:
    """Returns the item that an integer stands for."""
    rest = code >> OP_BITS
    return Item(Op(code & OP_MASK), rest >> MICROBATCH_BITS, rest & MICROBATCH_MASK)


def action_index(action: Action) -> int:
    """Returns the number of an action in a COMPUTE item."""
    return action.stage * len(KINDS) + KINDS.index(action.kind)


class Link(NamedTuple):
    """A named value that one stage makes and later stages take.

    Attributes:
        name: Name of the producer's output and of the consumers' input.
        producer: The stage that makes the value.
        consumers: The stages that take the value, ascending. All are later than the producer.
        differentiable: True if a gradient comes back.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    differentiable: bool = True


class Channel(NamedTuple):
    """A value that crosses from one rank to another in each microbatch, or its gradient back.

    A value goes to a rank only once, even if several stages of that rank take it. That rank sums
    their gradients and sends the sum back once.
    """

    link: int
    kind: Literal["F", "B"]
    source: int
    target: int


class Collective(NamedTuple):
    """A reduction as the pipeline sees it.

    Attributes:
        name: Its name in messages.
        ranks: Pipeline ranks that take part.
        stages: Its stages. A rank can launch it when its own stages among these are final.
        comm_stream: Number of its comm stream. Collectives of one comm stream run one by one.
        readers: Stages whose parameter sync belongs to it. The sync runs during the next forwards.
    """

    name: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    comm_stream: int
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """A schedule with its transfers, sums and reductions. `lower` makes it.

    Attributes:
        schedule: The schedule; in a forward-only program it has only forwards.
        links: The values that stages hand on.
        channels: The values and gradients that cross between ranks.
        collectives: Reductions, in the order in which every rank launches its own.
        items: For each pipeline rank its items, as integers; see `decode`.
        forward_only: True if only forwards are computed.
    """

    schedule: Schedule
    links: tuple[Link, ...]
    channels: tuple[Channel, ...]
    collectives: tuple[Collective, ...]
    items: tuple[array[int], ...]
    forward_only: bool = False

    @property
    def num_items(self) -> int:
        """Number of items of all ranks."""
        return sum(map(len, self.items))

    @cached_property
    def skips(self) -> frozenset[Channel]:
        """Channels that have a connection of their own; see [Note: skips].

        [Note: skips] A value that skips stages is needed later than what the next stage takes. If
        both go from one rank to another on one connection, a large skip holds up the values behind
        it, for which a rank waits. On two connections they share the NIC, and the small one is
        soon there. That happens only where ranks have several stages: otherwise each of the two
        goes to another rank.
        """
        skips = {channel for channel in self.channels if self._is_skip(channel)}
        next_ones = {(c.source, c.target) for c in self.channels if c not in skips}
        return frozenset(c for c in skips if (c.source, c.target) in next_ones)

    def _is_skip(self, channel: Channel) -> bool:
        """Returns whether no stage of the taking rank comes right behind the one that makes it."""
        link = self.links[channel.link]
        rank = channel.target if channel.kind == "F" else channel.source
        return min(c for c in link.consumers if self.schedule.stage_to_rank[c] == rank) > (
            link.producer + 1
        )

    def decoded(self, rank: int) -> Iterator[Item]:
        """Yields the items of a pipeline rank."""
        return map(decode, self.items[rank])

    def called(self, rank: int) -> Iterator[Item]:
        """Yields the items of a pipeline rank that its executor calls.

        A LAUNCH leaves by itself with the last gradient of its bucket, and a PUBLISH after the
        optimizer's step.
        """
        return (item for item in self.decoded(rank) if item.op not in (Op.LAUNCH, Op.PUBLISH))

    def listing(self, rank: int) -> str:
        """Returns the items of a pipeline rank as text, one line for each."""
        return "\n".join([f"rank {rank}", *(f"  {self.words(i)}" for i in self.decoded(rank))])

    def __str__(self) -> str:
        return "\n".join(self.listing(rank) for rank in range(len(self.items)))

    def words(self, item: Item) -> str:
        """Returns an item as text: ``send            x of 0F3 to rank 1``."""
        op, which, microbatch = item
        if op is Op.COMPUTE:
            text = str(self.action(item))
        elif op in _TRANSFERS:
            peer = _TRANSFERS[op].format(c=self.channels[which])
            text = f"{self.transfer(which, microbatch)} {peer}"
        elif op is Op.JOIN:
            link = self.links[which]
            text = f"gradients of {link.name} of {link.producer}F{microbatch}"
        elif op in (Op.LAUNCH, Op.PUBLISH):
            text = self.collectives[which].name
        else:
            text = f"stage {which}"
        return f"{op!s:<15}{text}"

    def transfer(self, channel: int, microbatch: int) -> str:
        """Returns a transfer as text: the value, and the action that made it."""
        link, kind, _, _ = self.channels[channel]
        name, producer, _, _ = self.links[link]
        return f"{'gradient of ' if kind == 'B' else ''}{name} of {producer}F{microbatch}"

    @staticmethod
    def action(item: Item) -> Action:
        """Returns the action of a COMPUTE item."""
        stage, kind = divmod(item.which, len(KINDS))
        return Action(stage, KINDS[kind], item.microbatch)


# The peer of a transfer, as it stands in messages.
_TRANSFERS: Mapping[Op, str] = {
    Op.POST_RECEIVE: "from rank {c.source}",
    Op.WAIT_RECEIVE: "from rank {c.source}",
    Op.SEND: "to rank {c.target}",
    Op.RELEASE: "to rank {c.target}",
}


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
