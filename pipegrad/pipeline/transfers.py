"""Transfers: values and their gradients, from rank to rank. Each edge is first in, first out.

[Note: memory] A receive has memory of its own, which belongs to the tensor that is received:
nothing writes into it again, and it is freed when nobody holds it any more. So a module may keep
its input, or a view of it.

[Note: shapes] A value may have another shape, number of dimensions or dtype in each microbatch. No
rank agrees on that beforehand, and receives are posted before anybody knows it. So both ends of a
link keep the same record of what crossed it (`Sizes`):

- A value that looks like the one before it on its link is sent alone. Before any other value goes
  a header (`edges`). So does the first one: see [Note: first step] in `steps`.
- Between processors a receive takes messages of up to `capacity` bytes, and a message may be
  shorter. The capacity grows when a step begins, to the largest value of the steps before.
  Instead of a larger message goes an empty one. The larger one follows, and its receive is posted
  behind the empty one.
- The gradient of a value looks like the value. Its receiver made the value and needs no header.

[Note: headers] Whoever waits for a message between processors must know whether a header belongs to
it, and gloo tells nobody that a receive has ended, only that a wait has. But messages of one
connection do not overtake each other if their receives were posted in the order of the sends, and
`verify` proves that they are. Each transfer reserves the receive of a header, posted before its
own. So when a value is there, so is its header, in memory that was zero before. What was reserved
and not used is left to a later transfer: if shapes stay, nothing is posted and nothing crosses. In
evaluations a sender may be a step ahead, so a header has its step, and is read in no earlier one.

[Note: interrupts] Ctrl-C may come between any two lines, such as between the start of a transfer
and its entry in a table, and no table says so. So no step follows an interrupted one, unless the
job has one rank. An error of another kind may come in the middle of a wait alone: then
`is_in_doubt` says that nobody knows which parts of the message have come, and on gloo a second wait
for a part would wait for one more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.collectives import HEADERS, TRANSFERS
from pipegrad.comm.sync_points import HostWork, Work
from pipegrad.errors import StepError
from pipegrad.pipeline.codings import CodecChoice, Coding, Feedback
from pipegrad.pipeline.edges import Edges, Inbox, Key, Spec, header, read_header
from pipegrad.schedules.program.program import Channel

RECEIVED = sync_points.WaitWork("transfer.received", "a stage reads what is still arriving")
SENDING = sync_points.Hold("transfer.sending", "what is leaving would be freed by who made it")
SENT = sync_points.WaitWork("transfer.sent", "what is let go of may still be leaving")
# Of a value, by the largest before it; any value may have the bytes.
_MOST_GROWTH, _LARGE_BYTES = 1024, 2**30


@dataclass(slots=True, eq=False)
class Receive:
    """A receive that was posted, or the memory for one.

    Attributes:
        key: Which transfer it is.
        memory: Where the message arrives, as large as `like`.
        like: What the memory looks like.
        work: The receive; None if it is not started.
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

    A message of a codec is shorter than the value, so no size depends on codecs.

    Attributes:
        spec: Of the value that crossed last. At first that of the first microbatch, if it is known.
        largest: Bytes of the largest value so far.
        capacity: Bytes of the largest message that a posted receive takes.
        like: What the memory of the next receive looks like.
        unread: Of values: receives in the order of their posts, up to the first whose spec is not
            known.
    """

    spec: Spec | None
    largest: int = field(init=False)
    capacity: int = field(init=False)
    like: Spec = field(init=False)
    unread: deque[Receive] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.capacity = self.largest = 0 if self.spec is None else self.spec.nbytes
        self._fit()

    def check_size(self, spec: Spec) -> None:
        """Refuses a value before memory is made for it; both ends of a link have the same limit.

        Raises:
            StepError: If it is far larger than all values that crossed the link before.
        """
        if self.spec is None:
            return
        most = max(_LARGE_BYTES, _MOST_GROWTH * self.largest)
        if spec.nbytes > most:
            raise StepError(
                f"a value is {spec}, {spec.nbytes} bytes, and those before it had "
                f"{self.spec.nbytes}: expected at most {most}. If that is meant, begin with a "
                f"larger one"
            )

    def record(self, spec: Spec) -> None:
        """Records what crosses the link; both of its ranks do so for every value, in one order."""
        self.spec = spec
        self.largest = max(self.largest, spec.nbytes)
        self._fit()

    def grow(self) -> None:
        """Lets receives take the largest messages so far. Called when a step begins."""
        # Both ranks know the same messages here: in a step that failed, they have made all
        # transfers, too. So a sender knows how much its receiver takes.
        if self.capacity != self.largest:
            self.capacity = self.largest
            self._fit()

    def _fit(self) -> None:
        self.like = Spec((self.capacity,), torch.uint8, differentiable=False)
        if self.spec is not None and self.spec.nbytes == self.capacity:
            self.like = self.spec


@dataclass(frozen=True)
class End:
    """This rank's end of a channel that something crosses.

    Attributes:
        group: Where its messages go.
        peer: The rank there.
        host: Where headers go.
        host_peer: The rank there.
        inbox: The headers of the edge, if the channel ends here.
        sizes: The same for a value and its gradient.
        coding: Makes the messages; None if they are as values and gradients are.
        is_value: Whether values cross it, and not gradients.
    """

    group: dist.ProcessGroup
    peer: int
    host: dist.ProcessGroup
    host_peer: int
    inbox: Inbox
    sizes: Sizes
    coding: Coding | None
    is_value: bool

    def on_wire(self, spec: Spec) -> Spec:
        """Returns what the message of a value looks like."""
        return spec if self.coding is None else self.coding.on_wire(spec)


class PeerFailedError(StepError):
    """A value never came, since another rank failed first."""

    follows = True


class Transfers:
    """One rank's end of all transfers of a kind of step, between processors.

    Attributes:
        is_in_doubt: Whether a wait has failed half-way: see [Note: interrupts].
        posts_receives: Whether a receive is started before its header is there.
    """

    posts_receives = True

    def __init__(
        self,
        channels: Sequence[Channel],
        rank: int,
        edges: Edges,
        device: torch.device,
        *,
        specs: dict[int, Spec],
        codecs: CodecChoice,
        feedback: Feedback,
    ) -> None:
        self._channels = channels
        self._num_channels = len(channels)
        self._device = device
        self._step = 0  # of the Scheduler, as all its ranks count
        self._specs = specs
        self._sizes: dict[tuple[int, int], Sizes] = {}  # by link, and the rank at its other end
        self._ends = {
            number: self._end(channel, rank, edges, codecs, feedback)
            for number, channel in enumerate(channels)
            if rank in (channel.source, channel.target)
        }
        self.is_in_doubt = False
        self._receiving: dict[Key, Receive] = {}
        self._announced: dict[Key, Spec | None] = {}  # by headers; None of what never comes
        self._sending: dict[Key, list[tuple[Work, torch.Tensor | None]]] = {}

    def begin(self, step: int) -> None:
        """Begins a step of a number, and lets receives take the largest messages so far."""
        self._step = step
        for sizes in self._sizes.values():
            sizes.grow()

    def _end(
        self, channel: Channel, rank: int, edges: Edges, codecs: CodecChoice, feedback: Feedback
    ) -> End:
        """Returns this rank's end of a channel."""
        link, kind, source, target = channel
        sends, is_value = source == rank, kind == "F"
        other = target if sends else source
        return End(
            *(edges.to(other, channel) if sends else edges.of(other, channel)),
            *edges.host(other, channel),
            edges.inbox(other, channel),
            self._sizes.setdefault((link, other), Sizes(self._specs.get(link))),
            codecs.coding(source, target, "activations" if is_value else "gradients", feedback),
            is_value,
        )

    def post(self, channel: int, microbatch: int) -> None:
        """Starts a receive."""
        end = self._ends[channel]
        like = end.sizes.like
        # First, since nothing is started if there is no memory.
        memory = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        # Reserved before the receive of the value is posted, or the value could be there before its
        # header: see [Note: headers].
        if end.inbox.spare:
            end.inbox.spare -= 1
        else:
            end.inbox.post()
        receive = Receive((channel, microbatch), memory, like)
        if self.posts_receives:
            tag = TRANSFERS + microbatch * self._num_channels + channel  # `_tag`, without a call
            receive.work = sync_points.in_use.receive(end.group, memory, end.peer, tag)
        self._receiving[channel, microbatch] = receive
        if end.is_value:
            end.sizes.unread.append(receive)

    def wait(self, channel: int, microbatch: int, known: Spec | None = None) -> torch.Tensor | None:
        """Waits for a receive; returns what arrived, in memory of its own.

        It returns None for the gradient of a value that has none.

        Raises:
            PeerFailedError: If it will never come.
            StepError: If a header is wrong. The transfer stays in doubt.

        Sync: the current stream waits, and the host where its backend blocks it.
        """
        message, spec = self._arrived((channel, microbatch), known)
        if spec is None:
            if known is not None and not known.differentiable:
                return None
            raise PeerFailedError("another rank failed before it made a value for this one")
        coding = self._ends[channel].coding
        if coding is None or coding.on_wire(spec) is spec:
            return message
        value = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        coding.decode(message, value)
        return value

    def drop(self, channel: int, microbatch: int, known: Spec | None) -> None:
        """Waits for a receive of a failed step, unless that has ended; the arguments of `wait`."""
        if (channel, microbatch) in self._receiving:
            self._arrived((channel, microbatch), known)

    def _arrived(self, key: Key, known: Spec | None) -> tuple[torch.Tensor, Spec | None]:
        """Waits for a message; returns it, and what its value looks like, None if none comes."""
        receive, end = self._receiving[key], self._ends[key[0]]
        sizes, inbox = end.sizes, end.inbox
        self.is_in_doubt = True  # see [Note: interrupts]
        assert receive.work is not None
        RECEIVED(receive.work)
        # Read without a wait. The value is there, so its header is, too, if it has one.
        while self.posts_receives and inbox.posted and 0 != inbox.posted[0][1][0] <= self._step:
            self._read_header(inbox)
        if end.is_value:
            # A stage may take microbatches in another order than they come.
            while receive in sizes.unread:
                self._look(key[0], sizes)
            spec = receive.spec
        else:  # it looks like its value
            spec = None if self._announced.get(key, known) is None else known
        if key in self._announced:
            del self._announced[key]
        else:
            inbox.spare += 1
        message = receive.memory
        if spec is not None and (wire := end.on_wire(spec)) != receive.like:
            message = self._shown(end, receive, wire)
        del self._receiving[key]
        self.is_in_doubt = False
        return message, spec

    def _read_header(self, inbox: Inbox) -> tuple[Key, Spec | None]:
        """Reads the next header of an edge.

        Sync: the host waits for the header.
        """
        key, spec = read_header(self._step, inbox.wait())
        inbox.posted.popleft()
        self._announced[key] = spec
        return key, spec

    def _look(self, channel: int, sizes: Sizes) -> None:
        """Finds out what the first unread value of a channel looks like, and records it.

        Raises:
            StepError: If it is too large.
        """
        receive = sizes.unread.popleft()
        receive.spec = self._announced.get(receive.key, sizes.spec)
        if receive.key in self._announced and receive.spec is not None:
            self._specs.setdefault(self._channels[channel].link, receive.spec)
            sizes.check_size(receive.spec)
            sizes.record(receive.spec)

    def _shown(self, end: End, receive: Receive, wire: Spec) -> torch.Tensor:
        """Returns what has arrived, if it does not look like the memory that it was posted for."""
        memory = receive.memory
        if wire.nbytes > memory.nbytes:  # what came was empty, and another message follows
            memory = torch.empty(wire.shape, dtype=wire.dtype, device=self._device)
            tag = self._tag(*receive.key)
            RECEIVED(sync_points.in_use.receive(end.group, memory, end.peer, tag))
            return memory
        # No view, which a module could not tell from its own.
        shown: torch.Tensor = torch.empty(0, dtype=wire.dtype, device=memory.device)
        shown.set_(memory.untyped_storage(), 0, wire.shape)  # type: ignore[call-overload]
        return shown

    def send(
        self, channel: int, microbatch: int, tensor: torch.Tensor, spec: Spec | None = None
    ) -> None:
        """Starts to send `tensor`.

        Raises:
            StepError: If no header says what the value looks like, or it is too large.

        Sync: the send waits for the current stream. The tensor is held until `release`.
        """
        end, key = self._ends[channel], (channel, microbatch)
        if end.coding is not None:
            position = self._channels[channel].link, microbatch
            tensor = end.coding.encoded(tensor, spec or Spec.of(tensor), position)
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        tag = TRANSFERS + microbatch * self._num_channels + channel  # `_tag`, without a call
        if spec is not None and spec != end.sizes.spec:
            end.sizes.check_size(spec)
            head = header(self._step, key, spec)
            self._start(key, end.host, head, end.host_peer, HEADERS)
            end.sizes.record(spec)
        # The posted receive is too small. An empty message ends it, and the receiver, which has the
        # header, posts another one behind it.
        if tensor.nbytes > end.sizes.capacity:
            self._start(key, end.group, torch.empty(0), end.peer, tag)
        self._start(key, end.group, tensor, end.peer, tag)

    def _start(
        self, key: Key, group: dist.ProcessGroup, message: torch.Tensor, peer: int, tag: int
    ) -> None:
        """Starts to send a message of a transfer."""
        work = sync_points.in_use.send(group, message, peer, tag)
        self._sending.setdefault(key, []).append((work, SENDING(message)))

    def release(self, channel: int, microbatch: int, has_arrived: bool = False) -> None:
        """Lets go of a tensor that was sent."""
        for work, _ in self._sending.pop((channel, microbatch)):
            if has_arrived and type(work) is HostWork:
                work.has_arrived = True
            SENT(work)

    def _tag(self, channel: int, microbatch: int) -> int:
        """Returns the tag of a transfer: another one for each of a step, the same on both ranks."""
        return TRANSFERS + microbatch * self._num_channels + channel

    def send_nothing(self, channel: int, microbatch: int) -> None:
        """Sends, instead of a value or a gradient, that it will never come."""
        end, key = self._ends[channel], (channel, microbatch)
        self._start(key, end.host, header(self._step, key, None), end.host_peer, HEADERS)
        if self.posts_receives:  # only a message ends the receive
            self._start(key, end.group, torch.empty(0), end.peer, self._tag(*key))
