"""Ends: this rank's ends of all channels, and what both ends know of what crossed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pipegrad.comm.sync_points import Work
from pipegrad.errors import StepError
from pipegrad.pipeline.coding.coding import Coding, Codings
from pipegrad.pipeline.transfers.edges import Edges, Inbox
from pipegrad.pipeline.transfers.messages import Key, Spec, Specs
from pipegrad.schedules.program.program import Channel

# Of a value, by the largest before it; any value may have the bytes.
_MOST_GROWTH, _LARGE_BYTES = 1024, 2**30


@dataclass(slots=True, eq=False)
class Receive:
    """A receive that was posted, or the memory for one.

    Attributes:
        key: Which transfer it is.
        memory: Where the message arrives, as large as `like`.
        like: What the memory looks like.
        work: The receive; None between devices, until its header is there.
        is_free: On devices, behind all that may still read the memory.
        spec: Of a value, when it is known; None if it never comes.
    """

    key: Key
    memory: torch.Tensor
    like: Spec
    work: Work | None = None
    is_free: torch.Event | None = None
    spec: Spec | None = None


@dataclass(slots=True, eq=False)
class Sizes:
    """What crosses a link between two ranks, as both of them know it; see [Note: shapes].

    Attributes:
        spec: Of the value that crossed last. At first that of the first microbatch.
        coding: Makes the messages; None if values cross as they are.
        back: Of the gradients, if these or the values are encoded.
        largest: Bytes of the largest message so far.
        capacity: Bytes of the largest message that a posted receive takes.
        like: What the memory of the next receive looks like.
        unread: Of values: receives in the order of their posts, up to the first whose spec is not
            known.
    """

    spec: Spec
    coding: Coding | None = None
    back: Sizes | None = None
    largest: int = 0
    capacity: int = 0
    like: Spec = field(init=False)
    unread: deque[Receive] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.note(self.spec)
        self.grow()

    def on_wire(self, spec: Spec) -> Spec:
        """Returns what the message of a value looks like."""
        return spec if self.coding is None else self.coding.on_wire(spec)

    def check_size(self, spec: Spec) -> None:
        """Refuses a value before memory is made for it; both ends of a link have the same limit.

        Raises:
            StepError: If it is far larger than all values that crossed the link before.
        """
        most = max(_LARGE_BYTES, _MOST_GROWTH * max(self.largest, self.spec.nbytes))
        if spec.nbytes > most:
            raise StepError(
                f"a value is {spec}, {spec.nbytes} bytes, and those before it had "
                f"{self.spec.nbytes}: expected at most {most}. If that is meant, begin with a "
                f"larger one"
            )

    def ask(self, spec: Spec) -> None:
        """Asks the codecs of both directions about a value, so that `note` cannot fail.

        Raises:
            Exception: What a codec raises.
        """
        self.on_wire(spec)
        if self.back is not None:
            self.back.ask(spec)

    def note(self, spec: Spec) -> None:
        """Notes what crosses the link; both of its ranks do so for every value, in one order."""
        self.spec = spec
        self.largest = max(self.largest, self.on_wire(spec).nbytes)
        self._fit()
        if self.back is not None:
            self.back.note(spec)

    def grow(self) -> None:
        """Lets receives take the largest messages so far. Called when a step begins."""
        # Both ranks know the same messages here: in a step that failed, they have made all
        # transfers, too. So a sender knows how much its receiver takes.
        self.capacity = self.largest
        self._fit()
        if self.back is not None:
            self.back.grow()

    def _fit(self) -> None:
        self.like = self.on_wire(self.spec)
        if self.like.nbytes != self.capacity:
            self.like = Spec((self.capacity,), torch.uint8, differentiable=False)


@dataclass(frozen=True)
class End:
    """This rank's end of a channel that something crosses.

    Attributes:
        group: Where its messages go.
        peer: The rank there.
        host: Where headers go.
        host_peer: The rank there.
        inbox: The headers of the edge, if the channel ends here.
        sizes: The same for a value and its gradient, unless one of them is encoded.
        is_value: Whether values cross it, and not gradients.
    """

    group: dist.ProcessGroup
    peer: int
    host: dist.ProcessGroup
    host_peer: int
    inbox: Inbox
    sizes: Sizes
    is_value: bool


class Ends:
    """This rank's ends of all channels, each made when it is first used; see [Note: shapes].

    Args:
        channels: Of the Program.
        edges: The communicators.
        specs: What values look like in the first microbatch.
        codings: Which values cross in fewer bytes.

    Attributes:
        known: The ends that were used, by channel. None: nothing will ever cross.
    """

    def __init__(
        self, channels: Sequence[Channel], edges: Edges, specs: Specs, codings: Codings
    ) -> None:
        self._channels = channels
        self._codings = codings
        self._edges = edges
        self._specs = specs
        self.known: dict[int, End | None] = {}
        self._sizes: dict[tuple[int, int], Sizes] = {}  # by link, and the rank at its other end

    def of_receive(self, number: int) -> End | None:
        """Returns the end of a channel that ends here."""
        if number not in self.known:
            channel = self._channels[number]
            spec, serving = self._specs.of_receive(channel), self._edges.of(channel.source, channel)
            self.known[number] = self._made(channel, spec, channel.source, serving)
        return self.known[number]

    def of_send(self, number: int) -> End | None:
        """Returns the end of a channel that begins here."""
        if number not in self.known:
            channel = self._channels[number]
            spec, serving = self._specs.of_send(channel), self._edges.to(channel.target, channel)
            self.known[number] = self._made(channel, spec, channel.target, serving)
        return self.known[number]

    def _made(
        self,
        channel: Channel,
        spec: Spec | None,
        other: int,
        serving: tuple[dist.ProcessGroup, int],
    ) -> End | None:
        # Both ranks of a channel must decide alike whether anything crosses it. They do, since
        # they have the same spec: a gradient comes back only for a differentiable value.
        link, kind, source, target = channel
        if spec is None or (kind == "B" and not spec.differentiable):
            return None
        if (link, other) not in self._sizes:
            # The same codings in both directions: those of a hop.
            forth = self._codings.of(source, target, "activations")
            back = self._codings.of(source, target, "gradients")
            apart = None if forth is None and back is None else Sizes(spec, back)
            self._sizes[link, other] = Sizes(spec, forth, apart)
        sizes = self._sizes[link, other]
        return End(
            *serving,
            *(serving if self._edges.is_tagged else self._edges.host(other)),
            self._edges.inbox(other, channel),
            sizes if kind == "F" or sizes.back is None else sizes.back,
            is_value=kind == "F",
        )

    def grow(self) -> None:
        """Lets receives take the largest messages so far. Called when a step begins."""
        for sizes in self._sizes.values():
            sizes.grow()
