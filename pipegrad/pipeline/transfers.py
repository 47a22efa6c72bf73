"""Transfers: values and their gradients, from rank to rank. Each edge is first in, first out.

[Note: memory] A receive has memory of its own, which belongs to the received tensor: nothing writes
into it again, and it is freed with the last reference. Therefore a module may keep its input, or a
view of it.

[Note: shapes] A value may have another shape, number of dimensions or dtype in each microbatch.
Ranks do not agree on it beforehand, and receives are posted before the shape exists. Therefore both
ends of a link keep the same record of the values that crossed it (`Sizes`):

- A value with the same spec as the one before it on its link is sent alone. A header (`edges`) goes
  before any other value, and before the first one: see [Note: first step] in `steps`.
- On CPUs a receive takes messages of up to `capacity` bytes, and a message may be shorter. The
  capacity grows when a step begins, to the largest value of the steps before. A larger message is
  replaced by an empty one. The larger message follows, and its receive is posted after the empty
  one.
- The gradient of a value has the spec of the value. Its receiver made the value and needs no
  header.

[Note: headers] On CPUs a rank that waits for a message must find out whether a header belongs to
it. gloo does not report that a receive has ended, only that a wait has. But messages of one
connection do not overtake each other if their receives were posted in the order of the sends, and
`verify` proves that they are. Each transfer reserves the receive of a header, posted before its
own. Therefore the header is there when its value is there, in memory that was zero before. A later
transfer uses a reserved receive that got no header: if shapes stay, nothing is posted and nothing
crosses. In evaluations a sender may be a step ahead. A header has its step for this reason, and is
not read in an earlier step.

[Note: interrupts] Ctrl-C may come between any two lines, for example between the start of a
transfer and its entry in a table, and then the table is wrong. Therefore no step follows an
interrupted one, unless the job has one rank. An error of another kind may come in the middle of a
wait alone: then `is_in_doubt` is True, because it is unknown which parts of the message have come.
On gloo a second wait for a part would wait for one more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.collectives import HEADERS, TRANSFERS
from pipegrad.comm.sync_points import HostWork, Work
from pipegrad.errors import StepError, following
from pipegrad.pipeline.codings import CodecChoice, Coding, Feedback
from pipegrad.pipeline.edges import Edges, Inbox, Key, Spec, header, read_header
from pipegrad.schedules.program.program import Channel

RECEIVED = sync_points.WaitWork("transfer.received", "a stage reads what is still arriving")
SENDING = sync_points.Hold("transfer.sending", "what is leaving would be freed by who made it")
SENT = sync_points.WaitWork("transfer.sent", "what is let go of may still be leaving")
# Limits of a value: a multiple of the largest one before it, or a size that is always allowed.
_MOST_GROWTH, _LARGE_BYTES = 1024, 2**30


@dataclass(slots=True, eq=False)
class Receive:
    """A receive that was posted, or the memory for one.

    Attributes:
        key: The channel and microbatch of the transfer.
        memory: The memory for the message, as large as `like`.
        like: The spec of the memory.
        work: The receive; None if it is not started.
        is_free: On devices, an event after all work that may still read the memory.
        spec: The spec of the value, once it is known; None if the value never comes.
    """

    key: Key
    memory: torch.Tensor
    like: Spec
    work: Work | None = None
    is_free: torch.Event | None = None
    spec: Spec | None = None


class Sizes:
    """The sizes of a link between two ranks, equal on both of them; see [Note: shapes].

    They do not depend on codecs, because a message of a codec is shorter than its value.

    Attributes:
        spec: The spec of the last value; at first of the first microbatch's value, if it is known.
        largest: Bytes of the largest value so far.
        capacity: Bytes of the largest message that a posted receive takes.
        like: The spec of the next receive's memory.
        unread: Receives of values, in the order of their posts, up to the first whose spec is not
            known.
    """

    def __init__(self, spec: Spec | None) -> None:
        self.spec = spec
        self.capacity = self.largest = 0 if spec is None else spec.nbytes
        self.unread = deque[Receive]()
        self._fit()

    def check_size(self, spec: Spec) -> None:
        """Refuses a value before memory is allocated for it; both ends of a link have one limit.

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
        """Records a value that crosses the link; both ranks record every value, in one order."""
        self.spec = spec
        self.largest = max(self.largest, spec.nbytes)
        self._fit()

    def grow(self) -> None:
        """Lets receives take the largest messages so far. Called when a step begins."""
        # Both ranks have recorded the same messages here, because they make all transfers of a step
        # that failed, too. Therefore a sender has the right capacity of its receiver.
        if self.capacity != self.largest:
            self.capacity = self.largest
            self._fit()

    def _fit(self) -> None:
        self.like = Spec((self.capacity,), torch.uint8, differentiable=False)
        if self.spec is not None and self.spec.nbytes == self.capacity:
            self.like = self.spec


@dataclass(frozen=True)
class End:
    """This rank's end of a channel.

    Attributes:
        group: The process group of its messages.
        peer: The other rank in this group.
        host: The process group of headers.
        host_peer: The other rank in that group.
        inbox: The headers of the edge, if the channel ends here.
        sizes: The sizes of the link, shared by a value and its gradient.
        coding: Makes the messages; None if values and gradients cross unencoded.
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
        """Returns the spec of a value's message."""
        return spec if self.coding is None else self.coding.on_wire(spec)


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
        self._announced: dict[Key, Spec | None] = {}  # by headers; None if the value never comes
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
        # First, because nothing may be started if there is no memory.
        memory = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        # Reserved before the receive of the value is posted, because the value must not be there
        # before its header: see [Note: headers].
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
        """Waits for a receive; returns the received tensor, in memory of its own.

        It returns None for the gradient of a value that has none.

        Raises:
            StepError: If it will never come; it follows from another rank's failure. Or if a header
                is wrong. Then the transfer stays in doubt.

        Sync: the current stream waits, and the host where its backend blocks it.
        """
        message, spec = self._arrived((channel, microbatch), known)
        if spec is None:
            if known is not None and not known.differentiable:
                return None
            raise following(StepError("another rank failed before it made a value for this one"))
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
        """Waits for a message; returns it and the spec of its value, None if none comes."""
        receive, end = self._receiving[key], self._ends[key[0]]
        sizes, inbox = end.sizes, end.inbox
        self.is_in_doubt = True  # see [Note: interrupts]
        assert receive.work is not None
        RECEIVED(receive.work)
        # Read without a wait. The value is there, and therefore its header, if it has one.
        while self.posts_receives and inbox.posted and 0 != inbox.posted[0][1][0] <= self._step:
            self._read_header(inbox)
        if end.is_value:
            # A stage may take microbatches in another order than they come.
            while receive in sizes.unread:
                self._look(key[0], sizes)
            spec = receive.spec
        else:  # a gradient has the spec of its value
            spec = None if key in self._announced and self._announced[key] is None else known
        if key in self._announced:
            del self._announced[key]
        else:
            inbox.spare += 1
        message = receive.memory
        wire = spec if end.coding is None or spec is None else end.on_wire(spec)
        if wire is not None and wire != receive.like:
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
        """Sets the spec of the first unread value of a channel, and records it.

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
        """Returns the message of a receive whose memory has another spec than the message."""
        memory = receive.memory
        if wire.nbytes > memory.nbytes:  # the message was empty, and another one follows
            memory = torch.empty(wire.shape, dtype=wire.dtype, device=self._device)
            tag = self._tag(*receive.key)
            RECEIVED(sync_points.in_use.receive(end.group, memory, end.peer, tag))
            return memory
        # No view, because a module could not distinguish it from a view of its own.
        shown: torch.Tensor = torch.empty(0, dtype=wire.dtype, device=memory.device)
        shown.set_(memory.untyped_storage(), 0, wire.shape)  # type: ignore[call-overload]
        return shown

    def send(
        self, channel: int, microbatch: int, tensor: torch.Tensor, spec: Spec | None = None
    ) -> None:
        """Starts to send `tensor`.

        Raises:
            StepError: If no header can describe the value, or if it is too large.

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
        # The posted receive is too small. An empty message ends it. The receiver has the header,
        # and posts another receive after it.
        if tensor.nbytes > end.sizes.capacity:
            self._start(key, end.group, torch.empty(0), end.peer, tag)
        sending = sync_points.in_use.send(end.group, tensor, end.peer, tag), SENDING(tensor)
        if key in self._sending:  # else without `_start`, because each call costs the host
            self._sending[key].append(sending)
        else:
            self._sending[key] = [sending]

    def _start(
        self, key: Key, group: dist.ProcessGroup, message: torch.Tensor, peer: int, tag: int
    ) -> None:
        """Starts to send a message of a transfer."""
        work = sync_points.in_use.send(group, message, peer, tag)
        self._sending.setdefault(key, []).append((work, SENDING(message)))

    def release(self, channel: int, microbatch: int, has_arrived: bool = False) -> None:
        """Waits until a tensor was sent, and drops it."""
        sent = self._sending[channel, microbatch]
        del self._sending[channel, microbatch]  # first, because a wait that failed is not repeated
        for work, _ in sent:
            if has_arrived and type(work) is HostWork:
                work.has_arrived = True
            SENT(work)

    def _tag(self, channel: int, microbatch: int) -> int:
        """Returns the tag of a transfer: another one for each of a step, the same on both ranks."""
        return TRANSFERS + microbatch * self._num_channels + channel

    def send_nothing(self, channel: int, microbatch: int) -> None:
        """Sends a header without a value or a gradient, which will never come."""
        end, key = self._ends[channel], (channel, microbatch)
        self._start(key, end.host, header(self._step, key, None), end.host_peer, HEADERS)
        if self.posts_receives:  # only a message ends the receive
            self._start(key, end.group, torch.empty(0), end.peer, self._tag(*key))
