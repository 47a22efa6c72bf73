"""Ends: this rank's ends of all channels, and what both ends know of what crossed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from pipegrad.errors import StepError
from pipegrad.interop.private import storage_holders
from pipegrad.pipeline.coding.coding import Coding, Codings
from pipegrad.pipeline.transfers.buffers import OWN_HOLDERS, Buffer, BufferPool, rounded
from pipegrad.pipeline.transfers.edges import Edges
from pipegrad.pipeline.transfers.messages import HEADER
from pipegrad.pipeline.transfers.specs import Spec, Specs
from pipegrad.schedules.program.program import Channel

# Of a value, by the largest before it; any value may have the bytes.
_MOST_GROWTH, _LARGE_BYTES = 1024, 2**30


@dataclass(slots=True, eq=False)
class Sizes:
    """What crosses a link between two ranks, as both of them know it; see [Note: shapes].

    Attributes:
        spec: Of the value that crossed last. At first that of the first microbatch.
        capacity: How many bytes a receive buffer has.
        largest: Bytes of the largest message so far.
        free: The free buffers of that capacity.
        coding: Makes the messages; None if values cross as they are.
        back: Of the gradients, if these or the values are encoded.
        value_capacity: Bytes of a buffer for what was decoded.
    """

    spec: Spec
    capacity: int
    largest: int
    free: list[Buffer]
    coding: Coding | None = None
    back: Sizes | None = None
    value_capacity: int = 0

    def on_wire(self, spec: Spec) -> Spec:
        """Returns what the message of a value looks like, without its header."""
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
        """Asks the codecs of both directions about a value, so that `Ends.note` cannot fail.

        Raises:
            Exception: What a codec raises.
        """
        self.on_wire(spec)
        if self.back is not None:
            self.back.ask(spec)


@dataclass(frozen=True)
class End:
    """This rank's end of a channel that something crosses.

    Attributes:
        group: Where its messages go.
        peer: The rank there.
        host: Where headers go that are messages of their own, and what does not fit.
        host_peer: The rank there.
        sizes: The same for a value and its gradient, unless one of them is encoded.
        is_value: Whether values cross it, and not gradients.
        has_headers: Whether headers are messages of their own.
    """

    group: dist.ProcessGroup
    peer: int
    host: dist.ProcessGroup
    host_peer: int
    sizes: Sizes
    is_value: bool
    has_headers: bool


class Ends:
    """This rank's ends of all channels, each made when it is first used; see [Note: shapes].

    Args:
        channels: Of the Program.
        edges: The communicators.
        pool: The receive buffers.
        specs: What values look like in the first microbatch.
        codings: Which values cross in fewer bytes.

    Attributes:
        known: The ends that were used, by channel. None: nothing will ever cross.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        edges: Edges,
        pool: BufferPool,
        specs: Specs,
        codings: Codings,
    ) -> None:
        self._channels = channels
        self._codings = codings
        self._edges = edges
        self._pool = pool
        self._specs = specs
        self.known: dict[int, End | None] = {}
        self._sizes: dict[tuple[int, int], Sizes] = {}  # by link, and the rank at its other end

    def of_receive(self, channel: int) -> End | None:
        """Returns the end of a channel that ends here."""
        if channel not in self.known:
            spec = self._specs.of_receive(self._channels[channel])
            source = self._channels[channel].source
            self.known[channel] = self._made(
                channel, spec, source, self._edges.of(source, self._channels[channel])
            )
        return self.known[channel]

    def of_send(self, channel: int) -> End | None:
        """Returns the end of a channel that begins here."""
        if channel not in self.known:
            spec = self._specs.of_send(self._channels[channel])
            target = self._channels[channel].target
            self.known[channel] = self._made(
                channel, spec, target, self._edges.to(target, self._channels[channel])
            )
        return self.known[channel]

    def _made(
        self, channel: int, spec: Spec | None, other: int, serving: tuple[dist.ProcessGroup, int]
    ) -> End | None:
        # Both ranks of a channel must decide alike whether anything crosses it. They do, since
        # they have the same spec: a gradient comes back only for a differentiable value.
        link, kind, source, target = self._channels[channel]
        if spec is None or (kind == "B" and not spec.differentiable):
            return None
        if (link, other) not in self._sizes:
            # The same codings in both directions: those of a hop.
            forth = self._sizes_of(spec, self._codings.of(source, target, "activations"))
            coding = self._codings.of(source, target, "gradients")
            if forth.coding is not None or coding is not None:
                forth.back = self._sizes_of(spec, coding)
            self._sizes[link, other] = forth
        sizes = self._sizes[link, other]
        return End(
            *serving,
            *self._edges.host(other),
            sizes if kind == "F" or sizes.back is None else sizes.back,
            is_value=kind == "F",
            has_headers=not self._edges.is_tagged,
        )

    def _sizes_of(self, spec: Spec, coding: Coding | None) -> Sizes:
        largest = self._needed(spec if coding is None else coding.on_wire(spec))
        capacity = rounded(largest)
        return Sizes(spec, capacity, largest, self._pool.free(capacity), coding)

    def note(self, sizes: Sizes, spec: Spec) -> None:
        """Notes what crossed a link; both of its ranks do so for every value."""
        sizes.spec = spec
        sizes.largest = max(sizes.largest, self._needed(sizes.on_wire(spec)))
        if sizes.back is not None:
            self.note(sizes.back, spec)

    def grow(self) -> None:
        """Lets receives take the largest messages so far. Called when a step begins."""
        # Both ranks know the same messages here: in a step that failed, they have made all
        # transfers, too. So a sender knows how much its receiver takes.
        for sizes in self._sizes.values():
            self.fit(sizes)
            if sizes.back is not None:
                self.fit(sizes.back)

    def fit(self, sizes: Sizes) -> None:
        """Lets the next receive take the largest message so far: between devices, in any step."""
        if sizes.largest > sizes.capacity:
            self._enlarge(sizes)

    def _enlarge(self, sizes: Sizes) -> None:
        self._pool.drop(sizes.capacity)
        sizes.capacity = rounded(sizes.largest)
        sizes.free = self._pool.free(sizes.capacity)

    def value_buffer(self, sizes: Sizes, spec: Spec) -> Buffer:
        """Returns a buffer that shows a value, which is to be decoded into it."""
        # These are not received into, so the other rank need not know how large they are.
        if spec.nbytes > sizes.value_capacity:
            self._pool.drop(sizes.value_capacity)
            sizes.value_capacity = rounded(spec.nbytes)
        free = self._pool.free(sizes.value_capacity)
        buffer = free.pop() if free else self._pool.make(sizes.value_capacity)
        buffer.show(spec, 0)
        return buffer

    def give_back(self, sizes: Sizes, buffer: Buffer) -> None:
        """Takes a buffer of a message, or of what was decoded, that no action reads any more."""
        is_usual = buffer.capacity in (sizes.capacity, sizes.value_capacity)
        if is_usual and storage_holders(buffer.holders) == OWN_HOLDERS:
            # What was decoded may begin like a header, and a message may be too short to overwrite
            # it. A buffer that somebody keeps is not touched.
            buffer.head.value = 0
            self._pool.free(buffer.capacity).append(buffer)

    def _needed(self, spec: Spec) -> int:
        """Returns the bytes of the largest message of a value."""
        return HEADER + spec.nbytes if self._edges.is_tagged else spec.nbytes
