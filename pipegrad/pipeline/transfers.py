"""Transfers: values and their gradients, from rank to rank. Each edge is first in, first out.

[Note: held buffers] A module may keep one of its inputs, for example a memory of the microbatch
before. A hook may keep one, too. Then the storage of the receive buffer has more holders than the
buffer's own tensor when the value is released. Such a buffer does not go back to the pool: the next
receive makes another one, and the kept tensor is never overwritten.

[Note: interrupts] Ctrl-C may come between any two lines. If it comes between the start of a
transfer and its entry in a table, no table says that the transfer was started. So `is_in_doubt` is
set before the start and cleared after the entry. Ctrl-C may also come between the end of a transfer
and the removal of its entry. On gloo, a second wait for such a transfer would wait for one more
message. So `note_ended` replaces it by a `Done`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.collectives import blocks_host
from pipegrad.comm.ending import Ending, cut
from pipegrad.comm.process_groups import is_local, new_group
from pipegrad.comm.work import Done, Work
from pipegrad.interop.private import num_holders
from pipegrad.schedules.program.program import Channel
from pipegrad.topology import Topology

RECEIVED = sync_points.WaitWork("transfer.received", "a stage reads what is still arriving")
SENDING = sync_points.Hold("transfer.sending", "what is leaving would be freed by who made it")
SENT = sync_points.WaitWork("transfer.sent", "what is let go of may still be leaving")

Key = tuple[int, int]  # channel and microbatch


class Spec(NamedTuple):
    """What a value looks like in every microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """Returns the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        gradient = "with" if self.differentiable else "without"
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} {gradient} gradient"


class Specs:
    """What the values of a kind of step look like, known before the step.

    Args:
        by_link: A spec for each link; None if its producer failed before it made the value.

    Attributes:
        by_link: The same.
    """

    def __init__(self, by_link: Mapping[int, Spec | None]) -> None:
        self.by_link = by_link

    def expected(self, link: int, spec: Spec) -> Spec | None:
        """Returns what a value must look like that this rank has made.

        Args:
            link: The value.
            spec: What it looks like.
        """
        return self.by_link[link]

    def of_send(self, channel: Channel) -> Spec | None:
        """Returns what crosses a channel that begins here; called before its first send."""
        return self.by_link[channel.link]

    def of_receive(self, channel: Channel) -> Spec | None:
        """Returns what crosses a channel that ends here; called before its first receive."""
        return self.by_link[channel.link]


class Buffer(NamedTuple):
    """A receive buffer, and the address of its storage."""

    tensor: torch.Tensor
    address: int


class BufferPool:
    """Receive buffers, used again and again. It makes as many as are in use at one time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_made = 0
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Buffer]] = {}

    def free(self, spec: Spec) -> list[Buffer]:
        """Returns the list of free buffers for a spec; callers take from its end and append."""
        return self._free.setdefault((spec.shape, spec.dtype), [])

    def make(self, spec: Spec) -> Buffer:
        """Returns a new buffer, contents undefined."""
        self.num_made += 1
        # A tensor made in inference mode can never take part in autograd, and a pool serves
        # evaluations and training steps.
        with torch.inference_mode(mode=False):
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        return Buffer(tensor, tensor.untyped_storage().data_ptr())


class Edges:
    """The communicators of one pipeline.

    On gloo messages have tags, so one group serves all edges. NCCL has no tags, and a receive that
    is posted early would block the sends behind it. So on other backends than gloo each directed
    edge has a communicator of its own.

    Args:
        channels: Of all ranks; every rank must give the same.
        topology: Ranks; every pipeline of the mesh gets its own.
        device: Where the tensors are.
    """

    def __init__(
        self, channels: Sequence[Channel], topology: Topology, device: torch.device
    ) -> None:
        self._is_tagged = blocks_host(None, device)
        self._groups: list[dist.ProcessGroup] = []
        self._out: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._in: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._ending = Ending(self, groups=self._groups, is_local=is_local(device))
        edges = sorted({(c.source, c.target) for c in channels})
        if not edges:
            return
        me = topology.coordinate(topology.pipeline)
        for pipeline in topology.pipelines:
            # All ranks make the groups of all pipelines, in one order, as torch demands.
            is_own = topology.rank in pipeline
            if self._is_tagged:
                group = new_group(pipeline, "pipegrad edges", device)
                if is_own:
                    self._groups.append(group)
                    for peer, rank in enumerate(pipeline):
                        end = group, dist.get_group_rank(group, rank)
                        self._out[peer] = self._in[peer] = end
                continue
            for source, target in edges:
                pair = [pipeline[source], pipeline[target]]
                group = new_group(pair, f"pipegrad edge {source} to {target}", device)
                if is_own and me in (source, target):
                    self._groups.append(group)
                    peer = target if me == source else source
                    end = group, dist.get_group_rank(group, pipeline[peer])
                    (self._out if me == source else self._in)[peer] = end
                    # NCCL connects in the first operation of a communicator, and both ranks wait
                    # there. All ranks connect here in one order. Otherwise the first transfers
                    # would connect, in an order that could be a deadlock.
                    dist.all_reduce(torch.zeros(1, device=device), group=group)

    def to(self, target: int) -> tuple[dist.ProcessGroup, int]:
        """Returns the group that serves the edge to a pipeline rank, and that rank in it."""
        return self._out[target]

    def of(self, source: int) -> tuple[dist.ProcessGroup, int]:
        """Returns the group that serves the edge from a pipeline rank, and that rank in it."""
        return self._in[source]

    def cut(self) -> None:
        """Closes this rank's connections on gloo, so that ranks that wait for it fail at once."""
        if self._is_tagged:
            for group in self._groups:
                cut(group)

    def close(self) -> None:
        """Destroys the groups; every rank must call it."""
        self._ending.end()
        self._out.clear()
        self._in.clear()


@dataclass(frozen=True)
class _End:
    """This rank's end of a channel that something crosses."""

    group: dist.ProcessGroup
    peer: int
    spec: Spec
    free: list[Buffer]


class Transfers:
    """One rank's end of all transfers of a kind of step.

    Args:
        channels: Of the Program.
        edges: The communicators.
        pool: The receive buffers.
        specs: What values look like.

    Attributes:
        lent: Addresses of the buffers that stages of this rank read now: a view, which changes.
        is_in_doubt: Whether a transfer may have been started that is in no table.
    """

    def __init__(
        self, channels: Sequence[Channel], edges: Edges, pool: BufferPool, specs: Specs
    ) -> None:
        self._channels = channels
        self._num_channels = len(channels)
        self._edges = edges
        self._pool = pool
        self._specs = specs
        self._lent: dict[int, None] = {}  # a set, without a call for each microbatch
        self.lent = self._lent.keys()
        self.is_in_doubt = False
        self._ends: dict[int, _End | None] = {}  # None: nothing will ever cross
        self._receiving: dict[Key, tuple[Buffer, Work]] = {}
        self._sending: dict[Key, tuple[Work, torch.Tensor | None]] = {}

    def post(self, channel: int, microbatch: int) -> None:
        """Starts a receive."""
        end = self._ends[channel] if channel in self._ends else self._receiving_end(channel)
        if end is not None:
            buffer = end.free.pop() if end.free else self._pool.make(end.spec)
            # The tag is different for each transfer of a step, and the same on both ranks.
            tag = microbatch * self._num_channels + channel
            self.is_in_doubt = True  # see [Note: interrupts]
            work = sync_points.in_use.receive(end.group, buffer.tensor, end.peer, tag)
            self._receiving[channel, microbatch] = buffer, work
            self.is_in_doubt = False

    def wait(self, channel: int, microbatch: int) -> Buffer | None:
        """Waits for a receive; returns the buffer, which the caller has to `give_back`.

        Sync: the current stream waits, and the host where its backend blocks it.
        """
        key = channel, microbatch
        if key not in self._receiving:
            return None
        buffer, work = self._receiving[key]
        RECEIVED(work)
        del self._receiving[key]
        if buffer.address:  # a tensor without elements has no address
            self._lent[buffer.address] = None
        return buffer

    def give_back(self, channel: int, buffer: Buffer) -> None:
        """Takes a received buffer that no action reads any more; see [Note: held buffers].

        Sync: none. The next receive waits for the current stream, so it writes after all reads.
        """
        end = self._ends[channel]
        assert end is not None
        if buffer.address:
            del self._lent[buffer.address]
        if num_holders(buffer.tensor) == 1:
            end.free.append(buffer)

    def send(self, channel: int, microbatch: int, tensor: torch.Tensor | None) -> None:
        """Starts to send `tensor`; zeros if it is None.

        Sync: the send waits for the current stream. The tensor is held until `release`.
        """
        end = self._ends[channel] if channel in self._ends else self._sending_end(channel)
        if end is None:
            return
        if tensor is None:
            # The receiving rank has posted a receive, which only a message can end.
            tensor = torch.zeros(end.spec.shape, dtype=end.spec.dtype, device=self._pool.device)
        elif not tensor.is_contiguous():
            tensor = tensor.contiguous()
        tag = microbatch * self._num_channels + channel
        self.is_in_doubt = True
        work = sync_points.in_use.send(end.group, tensor, end.peer, tag)
        self._sending[channel, microbatch] = work, SENDING(tensor)
        self.is_in_doubt = False

    def release(self, channel: int, microbatch: int) -> None:
        """Lets go of a tensor that was sent.

        The program has this item behind a receive that proves that the message has arrived, or at
        the end of the step. So the wait is short.
        """
        key = channel, microbatch
        if key in self._sending:
            SENT(self._sending[key][0])
            del self._sending[key]

    def forget(self) -> None:
        """Lets go of what a step read. Its transfers stay, until they have ended."""
        self._lent.clear()

    # After a failure.

    def send_zeros(self, channel: int, microbatch: int) -> None:
        """Sends zeros in the place of a value or a gradient that was never computed."""
        self.send(channel, microbatch, None)

    def receive_and_drop(self, channel: int, microbatch: int) -> None:
        """Waits for a receive that no stage will read."""
        buffer = self.wait(channel, microbatch)
        if buffer is not None:
            self.give_back(channel, buffer)

    def note_ended(self) -> None:
        """Notes which transfers have ended; see [Note: interrupts]."""
        for key, (buffer, work) in self._receiving.items():
            if _has_ended(work):
                self._receiving[key] = buffer, Done()
        for key, (work, held) in self._sending.items():
            if _has_ended(work):
                self._sending[key] = Done(), held

    def _receiving_end(self, channel: int) -> _End | None:
        spec = self._specs.of_receive(self._channels[channel])
        return self._end(channel, spec, *self._edges.of(self._channels[channel].source))

    def _sending_end(self, channel: int) -> _End | None:
        spec = self._specs.of_send(self._channels[channel])
        return self._end(channel, spec, *self._edges.to(self._channels[channel].target))

    def _end(
        self, channel: int, spec: Spec | None, group: dist.ProcessGroup, peer: int
    ) -> _End | None:
        # Both ranks of a channel must decide alike whether anything crosses it. They do, since
        # they have the same spec: a gradient comes back only for a differentiable value.
        crosses = spec is not None and (self._channels[channel].kind == "F" or spec.differentiable)
        end = _End(group, peer, spec, self._pool.free(spec)) if spec and crosses else None
        self._ends[channel] = end
        return end


def _has_ended(work: Work) -> bool:
    return isinstance(work, dist.Work) and work.is_completed()
