"""Transfers: values and their gradients, from rank to rank. Each edge is first in, first out.

[Note: held buffers] A module may keep what it is given, as a memory of the microbatch before or for
a hook to look at. Then more than the buffer's own tensor holds its storage when it comes back, and
it is left to those who hold it: the next receive makes another one.

[Note: interrupts] Ctrl-C may come between any two lines. Between the start of a transfer and its
entry in a table nobody could say whether it was started: `is_in_doubt` is set around the two. A
transfer that has ended may still be in its table: gloo would wait with it for one more message.
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
    """Receive buffers, used again and again. As many as were ever held at one time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_made = 0
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Buffer]] = {}

    def free(self, spec: Spec) -> list[Buffer]:
        """Returns the free buffers for a spec: take from its end, and give back there."""
        return self._free.setdefault((spec.shape, spec.dtype), [])

    def make(self, spec: Spec) -> Buffer:
        """Returns a new buffer, contents undefined."""
        self.num_made += 1
        with torch.inference_mode(mode=False):  # or it could never be trained with
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        return Buffer(tensor, tensor.untyped_storage().data_ptr())


class Edges:
    """The communicators of one pipeline.

    On gloo one group serves all edges: messages have tags. Elsewhere each directed edge has a
    communicator of its own, since a receive that is posted early would block the sends behind it.

    Args:
        channels: Of all ranks; every rank must give the same.
        topology: Ranks; every pipeline of the mesh gets its own.
        device: Where the tensors are.
    """

    def __init__(
        self, channels: Sequence[Channel], topology: Topology, device: torch.device
    ) -> None:
        self._tagged = blocks_host(None, device)
        self._made: list[dist.ProcessGroup] = []
        self._out: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._in: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._ending = Ending(self, groups=self._made, is_local=is_local(device))
        edges = sorted({(c.source, c.target) for c in channels})
        if not edges:
            return
        me = topology.coordinate(topology.pipeline)
        for pipeline in topology.pipelines:
            mine = topology.rank in pipeline
            if self._tagged:
                group = new_group(pipeline, "pipegrad edges", device)
                if mine:
                    self._made.append(group)
                    for peer, rank in enumerate(pipeline):
                        place = group, dist.get_group_rank(group, rank)
                        self._out[peer] = self._in[peer] = place
                continue
            for source, target in edges:
                pair = [pipeline[source], pipeline[target]]
                group = new_group(pair, f"pipegrad edge {source} to {target}", device)
                if mine and me in (source, target):
                    self._made.append(group)
                    peer = target if me == source else source
                    there = group, dist.get_group_rank(group, pipeline[peer])
                    (self._out if me == source else self._in)[peer] = there
                    # Connects, in one order on all ranks: else the first transfers would.
                    dist.all_reduce(torch.zeros(1, device=device), group=group)

    def to(self, target: int) -> tuple[dist.ProcessGroup, int]:
        """Returns the group that serves the edge to a pipeline rank, and that rank in it."""
        return self._out[target]

    def of(self, source: int) -> tuple[dist.ProcessGroup, int]:
        """Returns the group that serves the edge from a pipeline rank, and that rank in it."""
        return self._in[source]

    def cut(self) -> None:
        """Closes this rank's connections, so that what waits for it fails at once, on gloo."""
        if self._tagged:
            for group in self._made:
                cut(group)

    def close(self) -> None:
        """Destroys the groups; every rank must call it."""
        self._ending.end()
        self._out.clear()
        self._in.clear()


@dataclass(frozen=True)
class _End:
    """This rank's end of a channel, once it is known what crosses it."""

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
            tag = microbatch * self._num_channels + channel
            self.is_in_doubt = True
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
        if buffer.address:  # what is empty lies nowhere
            self._lent[buffer.address] = None
        return buffer

    def give_back(self, channel: int, buffer: Buffer) -> None:
        """Takes a received buffer that no action reads any more; see [Note: held buffers]."""
        end = self._ends[channel]
        assert end is not None
        if buffer.address:
            del self._lent[buffer.address]
        if num_holders(buffer.tensor) == 1:
            end.free.append(buffer)

    def send(self, channel: int, microbatch: int, tensor: torch.Tensor | None) -> None:
        """Starts to send `tensor`; zeros if it is None.

        Sync: reads it behind the current stream, and holds it until `release`.
        """
        end = self._ends[channel] if channel in self._ends else self._sending_end(channel)
        if end is None:
            return
        if tensor is None:
            tensor = torch.zeros(end.spec.shape, dtype=end.spec.dtype, device=self._pool.device)
        elif not tensor.is_contiguous():
            tensor = tensor.contiguous()
        tag = microbatch * self._num_channels + channel
        self.is_in_doubt = True
        work = sync_points.in_use.send(end.group, tensor, end.peer, tag)
        self._sending[channel, microbatch] = work, SENDING(tensor)
        self.is_in_doubt = False

    def release(self, channel: int, microbatch: int) -> None:
        """Lets go of what was sent; it has arrived."""
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
