"""Transfers: values and their gradients, from rank to rank. Each edge is first in, first out."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pipegrad.agreement import Board
from pipegrad.errors import StepError
from pipegrad.gradients import order
from pipegrad.gradients.collective import blocks_host
from pipegrad.schedules.program import Channel
from pipegrad.topology import Topology

RECEIVED = order.WaitWork("transfer.received", "a stage reads what is still arriving")
SENT = order.WaitWork("transfer.sent", "what is leaving would be freed, and overwritten")
SENDING = order.Hold("transfer.sending", "nobody else keeps what is leaving from being freed")

Key = tuple[int, int]  # channel and microbatch


@dataclass(frozen=True)
class Spec:
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


class BufferPool:
    """Receive buffers, used again and again. As many as were ever held at one time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}
        self.num_made = 0

    def take(self, spec: Spec) -> torch.Tensor:
        """Returns a buffer, contents undefined."""
        free = self._free.get((spec.shape, spec.dtype))
        if free:
            return free.pop()
        self.num_made += 1
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)

    def give_back(self, spec: Spec, buffer: torch.Tensor) -> None:
        """Takes a buffer that nobody reads any more."""
        self._free.setdefault((spec.shape, spec.dtype), []).append(buffer)


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
        edges = sorted({(c.source, c.target) for c in channels})
        if not edges:
            return
        me = topology.coordinate(topology.pipeline)
        for pipeline in _pipelines(topology):
            mine = topology.rank in pipeline
            if self._tagged:
                group = dist.new_group(list(pipeline), group_desc="pipegrad edges")
                if mine:
                    self._made.append(group)
                    for peer, rank in enumerate(pipeline):
                        place = group, dist.get_group_rank(group, rank)
                        self._out[peer] = self._in[peer] = place
                continue
            for source, target in edges:
                pair = [pipeline[source], pipeline[target]]
                group = dist.new_group(pair, group_desc=f"pipegrad edge {source} to {target}")
                if mine and me in (source, target):
                    self._made.append(group)
                    peer = target if me == source else source
                    there = group, dist.get_group_rank(group, pipeline[peer])
                    (self._out if me == source else self._in)[peer] = there
                    # Connects, in one order on all ranks: else the first transfers would.
                    dist.all_reduce(torch.zeros(1, device=device), group=group)

    def send(self, target: int, tensor: torch.Tensor, tag: int) -> dist.Work:
        """Starts to send to a pipeline rank.

        Sync: reads `tensor` behind the current stream, until the work is waited for.
        """
        group, peer = self._out[target]
        return order.backend().start(lambda: group.send([tensor], peer, tag))

    def receive(self, source: int, tensor: torch.Tensor, tag: int) -> dist.Work:
        """Starts to receive from a pipeline rank.

        Sync: writes `tensor` behind the current stream, until the work is waited for.
        """
        group, peer = self._in[source]
        return order.backend().start(lambda: group.recv([tensor], peer, tag))

    def close(self) -> None:
        """Destroys the groups; every rank must call it."""
        for group in self._made:
            dist.destroy_process_group(group)


class Transfers:
    """One rank's end of all transfers of a kind of step.

    What a value looks like its producer says once, when it first sends it; buffers are made then.

    Args:
        channels: Of the Program.
        edges: The communicators.
        pool: The buffers.
        board: Where producers say what they make.
        specs: What they make, by link, where that is known already.
        wait_seconds: How long to wait for that.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        edges: Edges,
        pool: BufferPool,
        board: Board,
        specs: Mapping[int, Spec],
        *,
        wait_seconds: float,
    ) -> None:
        self._channels = channels
        self._edges = edges
        self._pool = pool
        self._board = board
        self._wait_seconds = wait_seconds
        self._told = set(range(len(channels))) if specs else set[int]()
        self.specs: dict[int, Spec | None] = dict(specs)  # by link; None: its producer failed
        self._receiving: dict[Key, tuple[torch.Tensor, dist.Work]] = {}
        self._sending: dict[Key, tuple[object, dist.Work]] = {}
        self._tag_stride = len(channels)

    def post(self, channel: int, microbatch: int) -> None:
        """Starts a receive."""
        spec = self._incoming(channel)
        if spec is not None:
            buffer = self._pool.take(spec)
            tag = microbatch * self._tag_stride + channel
            work = self._edges.receive(self._channels[channel].source, buffer, tag)
            self._receiving[channel, microbatch] = buffer, work

    def wait(self, channel: int, microbatch: int) -> torch.Tensor | None:
        """Waits for a receive; returns the buffer, which is the caller's to `give_back`.

        Sync: the current stream waits, and the host where its backend blocks it.
        """
        found = self._receiving.pop((channel, microbatch), None)
        if found is None:
            return None
        buffer, work = found
        RECEIVED(work)
        return buffer

    def give_back(self, link: int, buffer: torch.Tensor) -> None:
        """Takes a received buffer that nobody reads any more."""
        spec = self.specs[link]
        assert spec is not None
        self._pool.give_back(spec, buffer)

    def send(self, channel: int, microbatch: int, tensor: torch.Tensor | None) -> None:
        """Starts to send `tensor`, contiguous; zeros if it is None.

        Sync: holds `tensor` until `release`.
        """
        link, kind, _, target = self._channels[channel]
        if kind == "F" and channel not in self._told:
            self._told.add(channel)
            self._board.post(f"{link} to {target}", pickle.dumps(self.specs.setdefault(link, None)))
        spec = self.specs.get(link)
        if spec is None or (kind == "B" and not spec.differentiable):
            return
        if tensor is None:
            tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=self._pool.device)
        tag = microbatch * self._tag_stride + channel
        work = self._edges.send(target, tensor, tag)
        self._sending[channel, microbatch] = SENDING(tensor), work

    def release(self, channel: int, microbatch: int) -> None:
        """Lets go of what was sent; it has arrived."""
        found = self._sending.pop((channel, microbatch), None)
        if found is not None:
            SENT(found[1])

    def _incoming(self, channel: int) -> Spec | None:
        """Returns what a channel brings; None if nothing will come."""
        link, kind, _, target = self._channels[channel]
        if kind == "F" and link not in self.specs:
            told = self._board.wait(f"{link} to {target}", timedelta(seconds=self._wait_seconds))
            self.specs[link] = pickle.loads(told)
        spec = self.specs.get(link)
        return None if spec is None or (kind == "B" and not spec.differentiable) else spec


def check_spec(known: Spec | None, found: Spec, name: str, stage: int, microbatch: int) -> None:
    """Refuses a value that is not what it was in the first microbatch.

    Raises:
        StepError: Names value, stage and microbatch.
    """
    if known is not None and known != found:
        raise StepError(
            f"stage {stage}, microbatch {microbatch}: {name!r} is {found}, and was {known} in the "
            f"first microbatch; all microbatches of all steps must look alike: pad them, or make "
            f"another Scheduler"
        )


def _pipelines(topology: Topology) -> list[tuple[int, ...]]:
    """Returns the ranks of every pipeline of the mesh, the same on all ranks."""
    found = {topology.at(rank).ranks_along(topology.pipeline) for rank in topology.ranks}
    return sorted(found)
