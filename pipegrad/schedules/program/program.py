"""Program: everything every rank does in a step, in order. Plain data, integers, no torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

from pipegrad.schedules.schedule import Action, Kind, Schedule

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
# An item is one integer, from its lowest bits: an Op, a microbatch, and which channel, link,
# collective or stage is meant. A compute means a stage and its kind, an index into KINDS.
OP_BITS, MICROBATCH_BITS, KIND_BITS = 4, 28, 2
OP_MASK, MICROBATCH_MASK, KIND_MASK = 2**OP_BITS - 1, 2**MICROBATCH_BITS - 1, 2**KIND_BITS - 1


class Op(IntEnum):
    """What an item does.

    Which one is meant: a channel for transfers, a link for JOIN, a collective for LAUNCH and
    PUBLISH, stage and kind for COMPUTE, and a stage for all others.
    """

    FIRST_USE = 0  # wait for the parameters of a stage, which may still be on their way
    POST_RECEIVE = 1  # give a buffer to a transfer that will come
    WAIT_RECEIVE = 2  # wait for it
    JOIN = 3  # sum the gradients that the consumers of a value sent back
    LAST_BACKWARD = 4  # the next backward of a stage is the last: parameters become final in it
    COMPUTE = 5
    SEND = 6  # start a transfer; does not wait
    RELEASE = 7  # the transfer has been received: let go of what was sent
    FINAL = 8  # the gradients of a stage are complete
    LAUNCH = 9  # at the latest here a collective starts, in its comm stream; does not wait
    PUBLISH = 10  # send updated parameters
    INPUTS_FINAL = 11  # no gradients of a stage's inputs are left to compute, of weights there are
    SHARED_WEIGHTS = 12  # compute those of them that other ranks wait for

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
    """Returns which action a COMPUTE item means."""
    return action.stage * len(KINDS) + KINDS.index(action.kind)


class Link(NamedTuple):
    """A named value that one stage makes and later stages take.

    Attributes:
        name: Of the producer's output, and of the consumers' input.
        producer: The stage that makes it.
        consumers: The stages that take it, ascending, all later.
        differentiable: Whether a gradient comes back.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    differentiable: bool = True


class Channel(NamedTuple):
    """What crosses from one rank to another, once a microbatch: a value, or its gradient back.

    A value goes to a rank once, however many of its stages take it. Their gradients are summed
    there, and come back once.
    """

    link: int
    kind: Literal["F", "B"]
    source: int
    target: int


class Collective(NamedTuple):
    """A reduction as the pipeline sees it.

    Attributes:
        name: For messages.
        ranks: Pipeline ranks that take part.
        stages: It can leave when these are final, each on its rank.
        comm_stream: Where it runs, behind the others of its comm stream.
        readers: Stages whose parameters come back along it, under the next step's forwards.
    """

    name: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    comm_stream: int
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """A schedule with all that belongs to it: transfers, sums, reductions. Made by `lower`.

    Attributes:
        schedule: What it was made of; in a forward-only program, its forwards.
        links: The values that stages hand on.
        channels: What crosses between ranks.
        collectives: Reductions, in the order in which every rank launches its own.
        items: For each pipeline rank its items, as integers; see `decode`.
        forward_only: Whether nothing but forwards is computed.
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

    def decoded(self, rank: int) -> Iterator[Item]:
        """Yields the items of a pipeline rank."""
        return map(decode, self.items[rank])

    def listing(self, rank: int) -> str:
        """Returns what a pipeline rank does, a line an item."""
        return "\n".join([f"rank {rank}", *(f"  {self.words(i)}" for i in self.decoded(rank))])

    def __str__(self) -> str:
        return "\n".join(self.listing(rank) for rank in range(len(self.items)))

    def words(self, item: Item) -> str:
        """Returns an item in words: ``send            x of 0F3 to rank 1``."""
        op, which, microbatch = item
        if op is Op.COMPUTE:
            said = str(self.action(item))
        elif op in _TRANSFERS:
            peer = _TRANSFERS[op].format(c=self.channels[which])
            said = f"{self.transfer(which, microbatch)} {peer}"
        elif op is Op.JOIN:
            link = self.links[which]
            said = f"gradients of {link.name} of {link.producer}F{microbatch}"
        elif op in (Op.LAUNCH, Op.PUBLISH):
            said = self.collectives[which].name
        else:
            said = f"stage {which}"
        return f"{op!s:<15}{said}"

    def transfer(self, channel: int, microbatch: int) -> str:
        """Returns a transfer in words: the value, and the action that made it."""
        link, kind, _, _ = self.channels[channel]
        name, producer, _, _ = self.links[link]
        return f"{'gradient of ' if kind == 'B' else ''}{name} of {producer}F{microbatch}"

    @staticmethod
    def action(item: Item) -> Action:
        """Returns the action of a COMPUTE item."""
        stage, kind = divmod(item.which, len(KINDS))
        return Action(stage, KINDS[kind], item.microbatch)


_TRANSFERS: Mapping[Op, str] = {
    Op.POST_RECEIVE: "from rank {c.source}",
    Op.WAIT_RECEIVE: "from rank {c.source}",
    Op.SEND: "to rank {c.target}",
    Op.RELEASE: "to rank {c.target}",
}
