"""Program: everything that every rank does in a step, in order. Plain integers, no torch."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal, NamedTuple

from pipegrad.schedules.schedule import Action, Kind, Schedule

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
# An item is one integer, because a Program of many microbatches has millions of items. Its lowest
# bits are an Op. Then comes a microbatch, then the number of a channel, link or stage.
# For COMPUTE that number holds a stage and an index into KINDS.
OP_BITS, MICROBATCH_BITS, KIND_BITS = 4, 28, 2
OP_MASK, MICROBATCH_MASK, KIND_MASK = 2**OP_BITS - 1, 2**MICROBATCH_BITS - 1, 2**KIND_BITS - 1


class Op(IntEnum):
    """The operation of an item.

    The number in an item is a channel for transfers, a stage and a kind for COMPUTE, and a stage
    for all others.
    """

    FIRST_USE = 0  # wait for the parameter sync of a stage
    POST_RECEIVE = 1  # start to receive a transfer into a buffer
    WAIT_RECEIVE = 2  # wait until the transfer has arrived
    LAST_BACKWARD = 3  # the next backward of a stage is the last: parameters become final in it
    COMPUTE = 4
    SEND = 5  # start a transfer; does not wait
    RELEASE = 6  # the transfer has arrived: free the sent tensor
    FINAL = 7  # the gradients of a stage are complete
    INPUTS_FINAL = 8  # all input gradients of a stage are computed, but not all weight gradients
    SHARED_WEIGHTS = 9  # compute the weight gradients that other ranks wait for

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
    """Returns the item that an integer encodes."""
    rest = code >> OP_BITS
    return Item(Op(code & OP_MASK), rest >> MICROBATCH_BITS, rest & MICROBATCH_MASK)


def action_index(action: Action) -> int:
    """Returns the number of an action in a COMPUTE item."""
    return action.stage * len(KINDS) + KINDS.index(action.kind)


class Link(NamedTuple):
    """A named value that one stage outputs and later stages read.

    Attributes:
        name: Name of the producer's output and of the consumers' input.
        producer: The stage that outputs the value.
        consumers: The stages that read the value, ascending. All are later than the producer.
        differentiable: True if a gradient comes back.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    differentiable: bool = True


class Channel(NamedTuple):
    """A value that crosses from one rank to another in each microbatch, or its gradient back.

    A value is sent to a rank only once, even if several stages of that rank read it. That rank sums
    their gradients and sends the sum back once.
    """

    link: int
    kind: Literal["F", "B"]
    source: int
    target: int


@dataclass(frozen=True)
class Program:
    """A schedule with its transfers. `lower` makes it.

    Reductions are not in it, because each is launched with the last gradient of its bucket, in the
    order of the plan (`print(sync.plan)`).

    Attributes:
        schedule: The schedule; in a forward-only program it has only forwards.
        links: The values that stages output.
        channels: The values and gradients that cross between ranks.
        items: For each pipeline rank its items, as integers; see `decode`.
        forward_only: True if only forwards are computed.
        synced: Stages with parameters that other ranks update; a FIRST_USE waits for them.
    """

    schedule: Schedule
    links: tuple[Link, ...]
    channels: tuple[Channel, ...]
    items: tuple[array[int], ...]
    forward_only: bool = False
    synced: frozenset[int] = frozenset()

    @cached_property
    def rank_links(self) -> tuple[RankLinks, ...]:
        """For each pipeline rank its view of the links."""
        return tuple(RankLinks(self, rank) for rank in range(self.schedule.num_ranks))

    @property
    def num_items(self) -> int:
        """Number of items of all ranks."""
        return sum(map(len, self.items))

    @cached_property
    def skips(self) -> frozenset[Channel]:
        """Channels that have a separate connection; see [Note: skips].

        [Note: skips] A value that skips stages is needed later than the inputs of the next stage.
        If both go from one rank to another on one connection, a large skip delays the next values,
        for which a rank waits. On two connections they share the NIC, and the small one is soon
        there. That happens only if ranks have several stages, because otherwise each of the two
        goes to another rank.
        """
        skips = {channel for channel in self.channels if self._is_skip(channel)}
        next_ones = {(c.source, c.target) for c in self.channels if c not in skips}
        return frozenset(c for c in skips if (c.source, c.target) in next_ones)

    def _is_skip(self, channel: Channel) -> bool:
        """Returns True if no stage of the reading rank comes right after the producer."""
        rank = channel.target if channel.kind == "F" else channel.source
        first = self.rank_links[rank].consumers[channel.link][0]
        return first > self.links[channel.link].producer + 1

    def decoded(self, rank: int) -> Iterator[Item]:
        """Yields the items of a pipeline rank."""
        return map(decode, self.items[rank])

    def listing(self, rank: int) -> str:
        """Returns the items of a pipeline rank as text, one line for each."""
        return "\n".join([f"rank {rank}", *(f"  {self.words(i)}" for i in self.decoded(rank))])

    def __str__(self) -> str:
        return "\n".join(self.listing(rank) for rank in range(len(self.items)))

    def words(self, item: Item, ranks: Sequence[int] | None = None) -> str:
        """Returns an item as text: ``send            x of 0F3 to rank 1``.

        Args:
            item: The item.
            ranks: For each pipeline rank its number in the text; by default its index.
        """
        op, which, microbatch = item
        if op is Op.COMPUTE:
            text = str(self.action(item))
        elif op in _PEERS:
            way, peer = _PEERS[op], self.peer(item)
            rank = peer if ranks is None else ranks[peer]
            text = f"{self.transfer(which, microbatch)} {way} rank {rank}"
        else:
            text = f"stage {which}"
        return f"{op!s:<15}{text}"

    def peer(self, item: Item) -> int:
        """Returns the rank at the other end of a transfer."""
        channel = self.channels[item.which]
        return channel.source if _PEERS[item.op] == "from" else channel.target

    def transfer(self, channel: int, microbatch: int) -> str:
        """Returns a transfer as text: the value, and the action that computed it."""
        link, kind, _, _ = self.channels[channel]
        name, producer, _, _ = self.links[link]
        return f"{'gradient of ' if kind == 'B' else ''}{name} of {producer}F{microbatch}"

    @staticmethod
    def action(item: Item) -> Action:
        """Returns the action of a COMPUTE item."""
        stage, kind = divmod(item.which, len(KINDS))
        return Action(stage, KINDS[kind], item.microbatch)


# Direction of the peer of a transfer.
_PEERS: Mapping[Op, Literal["from", "to"]] = {
    Op.POST_RECEIVE: "from",
    Op.WAIT_RECEIVE: "from",
    Op.SEND: "to",
    Op.RELEASE: "to",
}


class RankLinks:
    """The links of a Program from the view of one rank.

    Attributes:
        taken: Stage -> the links that it reads. Here and in `made`, stages are of all ranks.
        made: Stage -> the links that it outputs.
        consumers: Link -> the stages of this rank that read it.
        values: Link -> the channel that brings its value to this rank.
        sent: Link -> the channels that bring its value to other ranks.
        gradients: Link -> the channels of the gradients that come back, by the rank that sends.
        returned: Link -> the channel of the gradient that this rank sends back.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.taken = defaultdict[int, list[int]](list)
        self.made = defaultdict[int, list[int]](list)
        self.consumers = list[list[int]]()
        for number, link in enumerate(program.links):
            self.made[link.producer].append(number)
            for consumer in link.consumers:
                self.taken[consumer].append(number)
            stage_to_rank = program.schedule.stage_to_rank
            self.consumers.append([s for s in link.consumers if stage_to_rank[s] == rank])
        self.values: dict[int, int] = {}
        self.sent = defaultdict[int, list[int]](list)
        self.gradients = defaultdict[int, dict[int, int]](dict)
        self.returned: dict[int, int] = {}
        for number, (of_link, kind, source, target) in enumerate(program.channels):
            if kind == "F" and target == rank:
                self.values[of_link] = number
            elif kind == "F" and source == rank:
                self.sent[of_link].append(number)
            elif target == rank:
                self.gradients[of_link][source] = number
            elif source == rank:
                self.returned[of_link] = number
