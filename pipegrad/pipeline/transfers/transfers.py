"""Transfers: values and their gradients, from rank to rank. Each edge is first in, first out.

[Note: shapes] A value may have another shape, number of dimensions or dtype in each microbatch. No
rank agrees on that beforehand, and receives are posted before anybody knows it. So both ends of a
link keep the same record of what crossed it (`Sizes`):

- A receive takes messages of up to `capacity` bytes. The capacity grows when a step begins, to the
  largest message of the steps before.
- A value that looks like the one before it on its link is sent as it is. Any other value is sent
  behind a header (`messages`), in the same message. Between processors a receive may take a shorter
  message than it has memory for. The receiver knows a header by its mark. A value whose own first
  bytes are the mark gets a header too, so the mark never lies.
- What does not fit into the capacity follows in a second message. It is posted when the first one
  has been read. This happens only in a step that has a larger value than all steps before.
- The gradient of a value looks like the value. Its receiver made the value, so it needs no header.

Between other devices each message has a header that goes from host to host, also for a gradient: a
rank that failed says so in it. The sender enqueues its send first and then sends the header. The
receiver's host waits for the header, which is a wait for the host of the sender alone, and then
enqueues a receive of exactly that size. Messages of a communicator have no tags there: they are
matched by their order. So receives of an edge are enqueued in the order of their posts, which
`verify` proves to be that of the sends, and not in the order of the waits.

[Note: receives on devices] A receive of NCCL is a kernel that runs until its message is there. If
it is enqueued before the send, it may wait for ever, since the host of this rank may wait for it: a
kernel that is used for the first time is loaded behind all kernels that run. Streams share hardware
queues, so work of another stream may wait for it, too. A receive that is enqueued behind its send
waits only for work that was enqueued before it. It is on a side stream, which waits for the last
reader of the memory and for nothing else of this rank. A send runs until its receive is there, and
the host of the receiver comes to it, unless it loads a kernel behind a send of its own: two ranks
that do so at the same time wait for each other. CUDA_MODULE_LOADING=EAGER loads kernels before.

[Note: interrupts] Ctrl-C may come between any two lines. If it comes between the start of a
transfer and its entry in a table, no table says that the transfer was started. So `is_in_doubt` is
set before the start and cleared after the entry. Ctrl-C may also come between the end of a transfer
and the removal of its entry. On gloo, a second wait for such a transfer would wait for one more
message. So `note_ended` replaces it by a `Done`. A mark is erased when its header has been read, so
an interrupt there leaves the transfer in doubt, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from ctypes import c_int64

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.work import Done, Work
from pipegrad.errors import StepError
from pipegrad.interop.private import storage_holders
from pipegrad.pipeline.coding.coding import Codings, Position
from pipegrad.pipeline.transfers.buffers import OWN_HOLDERS, Buffer, BufferPool, rounded
from pipegrad.pipeline.transfers.edges import Edges
from pipegrad.pipeline.transfers.ends import End, Ends
from pipegrad.pipeline.transfers.messages import (
    HEADER,
    MARK,
    as_bytes,
    begins_with_mark,
    header,
    spec_in,
)
from pipegrad.pipeline.transfers.specs import Spec, Specs
from pipegrad.schedules.program.program import Channel

RECEIVED = sync_points.WaitWork("transfer.received", "a stage reads what is still arriving")
FREED = sync_points.Record("transfer.freed", "the next receive would overwrite what is still read")
REUSED = sync_points.Wait("transfer.reused", "a receive would overwrite what is still read")
SENDING = sync_points.Hold("transfer.sending", "what is leaving would be freed by who made it")
SENT = sync_points.WaitWork("transfer.sent", "what is let go of may still be leaving")

Key = tuple[int, int]  # channel and microbatch


class PeerFailedError(StepError):
    """A value never came, since another rank failed first."""


class Transfers:
    """One rank's end of all transfers of a kind of step.

    Args:
        channels: Of the Program.
        edges: The communicators.
        pool: The receive buffers.
        specs: What values look like in the first microbatch.
        codings: Which values cross in fewer bytes; see [Note: codecs].

    Attributes:
        ends: This rank's ends of the channels.
        lent: Addresses of the buffers that stages of this rank read now: a view, which changes.
        is_in_doubt: Whether a transfer may have been started that is in no table.
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
        self._num_channels = len(channels)
        self._pool = pool
        self.ends = Ends(channels, edges, pool, specs, codings)
        self._ends = self.ends.known
        self._lent: dict[int, None] = {}  # a set, without a call for each microbatch
        self.lent = self._lent.keys()
        self.is_in_doubt = False
        # Receives on devices wait for the readers of their memory here; see the note.
        self._inbound = (
            None if edges.is_tagged else sync_points.in_use.stream(pool.device, "pipegrad receives")
        )
        self._receiving: dict[Key, tuple[Buffer, Work]] = {}
        self._sending: dict[Key, tuple[Work, torch.Tensor | None]] = {}
        # Between devices: what was posted on each edge and not enqueued, in order, and what headers
        # of enqueued receives said; None for what never comes.
        self._posted = defaultdict[dist.ProcessGroup, deque[Key]](deque)
        self._announced: dict[Key, Spec | None] = {}
        # Messages between hosts that belong to transfers.
        self._headers: dict[Key, tuple[torch.Tensor, Work]] = {}
        self._leaving: dict[Key, list[tuple[Work, torch.Tensor | None]]] = {}

    def post(self, channel: int, microbatch: int) -> None:
        """Starts a receive; between devices that of its header."""
        end = self._ends[channel] if channel in self._ends else self.ends.of_receive(channel)
        if end is not None:
            # The tag is different for each message of a step, and the same on both ranks.
            tag = 2 * (microbatch * self._num_channels + channel)
            self.is_in_doubt = True  # see [Note: interrupts]
            if end.has_headers:
                head = torch.empty(HEADER, dtype=torch.uint8)
                work = sync_points.in_use.receive(end.host, head, end.host_peer, tag)
                self._headers[channel, microbatch] = head, work
                self._posted[end.group].append((channel, microbatch))
            else:
                sizes = end.sizes
                buffer = sizes.free.pop() if sizes.free else self._pool.make(sizes.capacity)
                work = sync_points.in_use.receive(end.group, buffer.memory, end.peer, tag)
                self._receiving[channel, microbatch] = buffer, work
            self.is_in_doubt = False

    def wait(self, channel: int, microbatch: int, spec: Spec | None = None) -> Buffer | None:
        """Waits for a receive; returns the buffer, which the caller has to `give_back`.

        Args:
            channel: What is received.
            microbatch: Of which microbatch.
            spec: What it looks like, if it is a gradient.

        Raises:
            PeerFailedError: If it will never come.

        Sync: the current stream waits, and the host where its backend blocks it.
        """
        key = channel, microbatch
        if key in self._headers or key in self._announced:
            spec = self._enqueued(key, spec)
        if key not in self._receiving:
            return None
        buffer = self._receiving[key][0]
        RECEIVED(self._receiving[key][1])  # no name for it: it holds the memory
        end = self._ends[channel]
        assert end is not None
        sizes = end.sizes
        like = sizes.spec if spec is None else spec
        if sizes.coding is not None:
            like = sizes.coding.on_wire(like)
        if not end.has_headers and (buffer.head.value == MARK or buffer.spec != like):
            buffer = self._opened(end, key, buffer, spec)
        del self._receiving[key]
        if sizes.coding is not None:
            buffer = self._decoded(end, buffer, spec or sizes.spec)
        self._lent[buffer.address] = None
        return buffer

    def _enqueued(self, key: Key, known: Spec | None) -> Spec:
        """Enqueues receives between devices, up to one; returns what that one looks like.

        Args:
            key: Which transfer it is.
            known: What it looks like, if it is a gradient.

        Raises:
            PeerFailedError: If it will never come.
            StepError: If a header is wrong. The transfer stays in doubt.

        Sync: the host waits for headers, of this one and of those posted before on its edge.
        """
        end = self._ends[key[0]]
        assert end is not None
        while key in self._headers:
            self._receive_behind_header(self._posted[end.group][0])
        spec = self._announced.pop(key)
        if spec is None:
            raise PeerFailedError("another rank failed before it made a value for this one")
        if known is not None and spec[:2] != known[:2]:
            self.is_in_doubt = True
            raise StepError(f"a gradient is {spec}, and its value is {known}")
        return spec

    def _receive_behind_header(self, key: Key) -> None:
        """Waits for the header of what was posted first on an edge, and enqueues its receive.

        Sync: the host waits for the header. The receive waits for who read its memory last.
        """
        end, (head, work) = self._ends[key[0]], self._headers[key]
        assert end is not None
        sizes, device = end.sizes, self._pool.device
        RECEIVED(work)
        self.is_in_doubt = True
        spec = self._announced[key] = self._noted(end, head)
        if spec is not None:
            self.ends.fit(sizes)
            if sizes.free:
                buffer = sizes.free.pop()
            else:
                buffer = self._pool.make(sizes.capacity)
                buffer.freed = FREED(device)
            wire = sizes.on_wire(spec)
            work = Done()
            with sync_points.in_use.running(self._inbound):
                REUSED(buffer.freed, device)
                buffer.show(wire, 0)
                if wire.nbytes:  # NCCL sends no message of none
                    message = buffer.memory[: wire.nbytes]
                    work = sync_points.in_use.receive(end.group, message, end.peer, self._tag(*key))
            self._receiving[key] = buffer, work
        del self._headers[key]
        self._posted[end.group].popleft()
        self.is_in_doubt = False

    def _noted(self, end: End, head: torch.Tensor) -> Spec | None:
        """Returns what a header says, and notes it if it is of a value; None: it never comes."""
        spec = spec_in(head, end.sizes.spec.differentiable)
        if spec is not None and end.is_value:
            end.sizes.check_size(spec)
            self.ends.note(end.sizes, spec)
        return spec

    def _opened(self, end: End, key: Key, buffer: Buffer, known: Spec | None) -> Buffer:
        """Finds out what has arrived between processors; returns the buffer that shows it.

        Raises:
            PeerFailedError: If it will never come.
            StepError: If its header is wrong. The transfer stays in doubt.
        """
        sizes, offset = end.sizes, 0
        self.is_in_doubt = True
        spec = sizes.spec if end.is_value else known
        if buffer.head.value == MARK:
            spec, offset = self._noted(end, buffer.memory), HEADER
            if known is not None and spec is not None and spec[:2] != known[:2]:
                raise StepError(f"a gradient is {spec}, and its value is {known}")
            # The memory will be used again, and a short message leaves the mark where it is.
            buffer.head.value = 0
        if spec is None:
            del self._receiving[key]
            self._pool.give_back(buffer)
            self.is_in_doubt = False
            raise PeerFailedError("another rank failed before it made a value for this one")
        wire = sizes.on_wire(spec)
        if offset + wire.nbytes > buffer.capacity:
            buffer = self._with_rest(end, self._tag(*key) + 1, buffer, offset + wire.nbytes)
        buffer.show(wire, offset)
        self._receiving[key] = buffer, Done()
        self.is_in_doubt = False
        return buffer

    def _decoded(self, end: End, message: Buffer, spec: Spec) -> Buffer:
        """Returns a buffer with the value of a message; that of the message may be used again.

        Sync: on the current stream, which has waited for the message.
        """
        coding = end.sizes.coding
        assert coding is not None
        if coding.on_wire(spec) is spec:
            return message
        value = self.ends.value_buffer(end.sizes, spec)
        coding.decode(message.tensor, value.tensor)
        if end.has_headers:
            message.freed = FREED(self._pool.device)
        self.ends.give_back(end.sizes, message)
        return value

    def _with_rest(self, end: End, tag: int, buffer: Buffer, nbytes: int) -> Buffer:
        """Receives what did not fit; returns a buffer with all of it."""
        rest = torch.empty(nbytes - buffer.capacity, dtype=torch.uint8)
        RECEIVED(sync_points.in_use.receive(end.host, rest, end.host_peer, tag))
        larger = self._pool.make(rounded(nbytes))
        larger.memory[: buffer.capacity] = buffer.memory
        larger.memory[buffer.capacity : nbytes] = rest
        self._pool.give_back(buffer)
        return larger

    def give_back(self, channel: int, buffer: Buffer) -> None:
        """Takes a received buffer that no action reads any more; see [Note: held buffers].

        Sync: the next receive waits for the current stream as it is now, so it writes after reads.
        """
        end = self._ends[channel]
        assert end is not None
        del self._lent[buffer.address]
        sizes = end.sizes
        if end.has_headers:
            buffer.freed = FREED(self._pool.device)
        if sizes.coding is not None:
            self.ends.give_back(sizes, buffer)
        # A buffer of another capacity was made for a value that did not fit. It is freed: from the
        # next step on all buffers are as large.
        elif buffer.capacity == sizes.capacity and storage_holders(buffer.holders) == OWN_HOLDERS:
            sizes.free.append(buffer)

    def send(
        self, channel: int, microbatch: int, tensor: torch.Tensor, spec: Spec | None = None
    ) -> None:
        """Starts to send `tensor`.

        Args:
            channel: Where to.
            microbatch: Of which microbatch.
            tensor: A value, or a gradient, which looks like its value.
            spec: What it looks like, if it is a value.

        Sync: the send waits for the current stream. The tensor is held until `release`.
        """
        end = self._ends[channel] if channel in self._ends else self.ends.of_send(channel)
        if end is None:
            return
        like, sizes = spec, end.sizes
        if sizes.coding is not None:
            like = like or Spec.of(tensor)
            position = Position(self._channels[channel].link, microbatch)
            tensor = sizes.coding.encoded(tensor, like, position)
        nbytes = tensor.nbytes
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        if end.has_headers:
            self._send_with_header(end, (channel, microbatch), tensor, spec, like)
            return
        # The last condition is `begins_with_mark`, without a call.
        if (
            (spec is not None and spec != sizes.spec)
            or nbytes > sizes.capacity
            or (nbytes >= 8 and c_int64.from_address(tensor.data_ptr()).value == MARK)
        ):
            tensor = self._wrapped(end, (channel, microbatch), tensor, spec, like)
        self.is_in_doubt = True
        tag = 2 * (microbatch * self._num_channels + channel)
        work = sync_points.in_use.send(end.group, tensor, end.peer, tag)
        self._sending[channel, microbatch] = work, SENDING(tensor)
        self.is_in_doubt = False

    def _send_with_header(
        self, end: End, key: Key, tensor: torch.Tensor, spec: Spec | None, like: Spec | None
    ) -> None:
        """Sends a message to another device, and then its header from host to host.

        Args:
            end: Where to.
            key: Which transfer it is.
            tensor: The value or gradient; or its message, if it is encoded.
            spec: What the value looks like; None for a gradient.
            like: What the value or gradient looks like, if `tensor` may not say it.

        Raises:
            StepError: If no header says what the value looks like, or it is too large.
        """
        head, message = header(like or Spec.of(tensor)), as_bytes(tensor)
        self._check(end, spec)
        self.is_in_doubt = True
        self._note(end, spec)
        work: Work = Done()
        if len(message):
            work = sync_points.in_use.send(end.group, message, end.peer, self._tag(*key))
        self._sending[key] = work, SENDING(message)
        self._start(key, head, end.host, end.host_peer, self._tag(*key))
        self.is_in_doubt = False

    def _check(self, end: End, spec: Spec | None) -> None:
        """Refuses a value that cannot be sent; a gradient is as its value, and has no spec."""
        if spec is not None:
            end.sizes.check_size(spec)
            # A codec may fail here, and nothing has been noted or sent yet. So the step fails, and
            # the next one is right.
            end.sizes.ask(spec)

    def _note(self, end: End, spec: Spec | None) -> None:
        if spec is not None:
            self.ends.note(end.sizes, spec)

    def _wrapped(
        self, end: End, key: Key, tensor: torch.Tensor, spec: Spec | None, like: Spec | None
    ) -> torch.Tensor:
        """Returns the message for a value that does not go as it is; see [Note: shapes].

        Leaves `is_in_doubt` set: what belongs to the message may have been sent. Arguments and
        errors are those of `_send_with_header`.
        """
        message, capacity, tag = as_bytes(tensor), end.sizes.capacity, self._tag(*key)
        needs_header = begins_with_mark(tensor) or (spec is not None and spec != end.sizes.spec)
        head = header(like or Spec.of(tensor)) if needs_header else None
        self._check(end, spec)
        self.is_in_doubt = True
        self._note(end, spec)
        if head is not None:
            message = torch.cat((head, message))
        if len(message) > capacity:
            self._start(key, message[capacity:], end.host, end.host_peer, tag + 1)
        return message[:capacity]

    def _start(
        self, key: Key, message: torch.Tensor, group: dist.ProcessGroup, peer: int, tag: int
    ) -> None:
        """Starts to send a message beside the value of a transfer, or in its place."""
        work = sync_points.in_use.send(group, message, peer, tag)
        self._leaving.setdefault(key, []).append((work, SENDING(message)))

    def release(self, channel: int, microbatch: int) -> None:
        """Lets go of a tensor that was sent.

        The program has this item behind a receive that proves that the message has arrived, or at
        the end of the step. So the wait is short.
        """
        key = channel, microbatch
        if key in self._sending:
            SENT(self._sending[key][0])
            del self._sending[key]
        if key in self._leaving:
            for work, _ in self._leaving[key]:
                SENT(work)
            del self._leaving[key]

    def forget(self) -> None:
        """Lets go of what a step read. Its transfers stay, until they have ended."""
        self._lent.clear()

    def _tag(self, channel: int, microbatch: int) -> int:
        """Returns the tag of a transfer; the next number is that of what does not fit.

        `post` and `send` compute it themselves, since each call costs every microbatch.
        """
        return 2 * (microbatch * self._num_channels + channel)

    # After a failure.

    def send_failed(self, channel: int, microbatch: int) -> None:
        """Sends in the place of a value or a gradient that it will never come."""
        end = self._ends[channel] if channel in self._ends else self.ends.of_send(channel)
        if end is None:
            return
        key, tag = (channel, microbatch), self._tag(channel, microbatch)
        to = (end.host, end.host_peer) if end.has_headers else (end.group, end.peer)
        self.is_in_doubt = True
        self._start(key, header(None), *to, tag)
        self.is_in_doubt = False

    def receive_and_drop(self, channel: int, microbatch: int, spec: Spec | None) -> None:
        """Waits for a receive that no stage will read."""
        buffer = self.wait(channel, microbatch, spec)
        if buffer is not None:
            self.give_back(channel, buffer)

    def note_ended(self) -> None:
        """Notes which transfers have ended; see [Note: interrupts]."""
        for key, (buffer, work) in self._receiving.items():
            if _has_ended(work):
                self._receiving[key] = buffer, Done()
        for key, (head, work) in self._headers.items():
            if _has_ended(work):
                self._headers[key] = head, Done()
        for key, (work, held) in self._sending.items():
            if _has_ended(work):
                self._sending[key] = Done(), held
        for key, messages in self._leaving.items():
            self._leaving[key] = [(Done() if _has_ended(w) else w, held) for w, held in messages]


def _has_ended(work: Work) -> bool:
    return isinstance(work, dist.Work) and work.is_completed()
