"""Edges: the communicators between the ranks of a pipeline, and the headers that cross them.

A header has the spec of a value: see [Note: shapes] in `transfers`. It consists of 19 numbers of 8
bytes: its step, the channel and microbatch of its transfer, the dtype of the value, whether a
gradient comes back, the number of dimensions, and the shape.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.collectives import HEADERS
from pipegrad.comm.ending import Ending, cut
from pipegrad.comm.process_groups import is_local, new_group
from pipegrad.comm.sync_points import Work
from pipegrad.errors import StepError
from pipegrad.schedules.program.program import Channel
from pipegrad.topology import Topology

Key = tuple[int, int]  # channel and microbatch
Serving = tuple[dist.ProcessGroup, int]  # a group, and a rank in it

WORDS = 19
_MOST_DIMENSIONS = WORDS - 6
_FAILED = -1
# The number of a dtype in a header is its index here.
_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint8", "uint64", "uint32", "uint16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)


class Spec(NamedTuple):
    """The shape and dtype of a value in one microbatch, and whether it has a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """Returns the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the value."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        gradient = "with" if self.differentiable else "without"
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} {gradient} gradient"


def header(step: int, key: Key, spec: Spec | None) -> torch.Tensor:
    """Returns the header of a value, ``(19,)`` int64 on the host; None: it will never come.

    Raises:
        StepError: If it has too many dimensions, or a dtype that no message has.
    """
    if spec is None:
        words = [step, *key, _FAILED]
    elif len(spec.shape) > _MOST_DIMENSIONS or spec.dtype not in _DTYPES:
        raise StepError(
            f"a value is {spec}, expected at most {_MOST_DIMENSIONS} dimensions and a dtype of "
            f"{[str(dtype).removeprefix('torch.') for dtype in _DTYPES]}, which can be sent"
        )
    else:
        kind = _DTYPES.index(spec.dtype)
        words = [step, *key, kind, spec.differentiable, len(spec.shape), *spec.shape]
    return torch.tensor(words + [0] * (WORDS - len(words)))


def read_header(step: int, words: Sequence[int]) -> tuple[Key, Spec | None]:
    """Returns the transfer and the spec of a header; None if the value never comes.

    Raises:
        StepError: If it is no header that `header` makes in this step.
    """
    of_step, channel, microbatch, kind, has_gradient, dimensions, *shape = words
    if of_step == step and kind == _FAILED:
        return (channel, microbatch), None
    # It comes from another rank, and may have any content.
    if not (
        of_step == step
        and 0 <= kind < len(_DTYPES)
        and has_gradient in (0, 1)
        and 0 <= dimensions <= _MOST_DIMENSIONS
        and min(shape) >= 0
        and not any(shape[dimensions:])
    ):
        raise StepError(f"another rank has sent a header that no value has: {list(words)}")
    spec = Spec(tuple(shape[:dimensions]), _DTYPES[kind], bool(has_gradient))
    return (channel, microbatch), spec


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor as a row of bytes, in the same memory if it has no flag."""
    # Torch conjugates and negates by a flag. Its sends resolve it, a view of bytes does not.
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


ARRIVED = sync_points.WaitWork("header.arrived", "the host reads a header that is still arriving")


class Edges:
    """The communicators of one pipeline.

    On CPUs messages have tags: one group serves all edges, and a second one serves skips, for the
    reason in [Note: skips] in `program`. NCCL has no tags, and a receive that is posted early would
    block the sends after it. Therefore each directed edge has a communicator of its own on other
    devices. One group of all ranks takes messages between hosts. It has all ranks because a world
    that was made with ``device_id`` makes a group on gloo in two ways: ranks outside of it wait in
    NCCL for its members, and members do not wait (pytorch#197568).

    Attributes:
        is_tagged: Whether messages have tags, and one may be shorter than the memory that takes it.
        is_cut: Whether this rank has closed its connections.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        topology: Topology,
        device: torch.device,
        skips: Collection[Channel] = (),
    ) -> None:
        self.is_tagged = has_tags(device)
        self.is_cut = False
        self._groups: list[dist.ProcessGroup] = []
        self._out: dict[int, Serving] = {}
        self._in: dict[int, Serving] = {}
        self._hosts: dict[int, Serving] = {}
        self._skips = frozenset(skips) if self.is_tagged else frozenset()
        self._beside: dict[int, Serving] = {}
        self._inboxes: dict[Serving, Inbox] = {}
        self._ending = Ending(self, groups=self._groups, is_local=is_local(device))
        edges = sorted({(c.source, c.target) for c in channels})
        if not edges:
            return
        # All ranks make the groups of all pipelines, in one order, as torch demands.
        if self.is_tagged:
            for pipeline in topology.pipelines:
                self._connect_hosts(pipeline, topology, "pipegrad edges", self._hosts)
                if self._skips:
                    self._connect_hosts(pipeline, topology, "pipegrad skips", self._beside)
            self._out = self._in = self._hosts
        else:
            self._connect_hosts(sorted(topology.ranks), topology, "pipegrad hosts", self._hosts)
            for pipeline in topology.pipelines:
                self._connect_devices(pipeline, topology, device, edges)

    def _connect_hosts(
        self,
        members: Sequence[int],
        topology: Topology,
        name: str,
        ends: dict[int, Serving],
    ) -> None:
        """Makes a group whose messages have tags; enters the ranks of this rank's pipeline."""
        # On gloo in any world: its messages between two ranks do not overtake each other.
        group = new_group(members, name, torch.device("cpu"), "gloo")
        if topology.rank in members:
            self._groups.append(group)
            (pipeline_ranks,) = (p for p in topology.pipelines if topology.rank in p)
            for peer, rank in enumerate(pipeline_ranks):
                ends[peer] = group, dist.get_group_rank(group, rank)

    def _connect_devices(
        self,
        pipeline: Sequence[int],
        topology: Topology,
        device: torch.device,
        edges: Sequence[tuple[int, int]],
    ) -> None:
        """Makes a group for each directed edge."""
        me, is_here = topology.coordinate(topology.pipeline), topology.rank in pipeline
        for source, target in edges:
            pair = [pipeline[source], pipeline[target]]
            group = new_group(pair, f"pipegrad edge {source} to {target}", device)
            if is_here and me in (source, target):
                self._groups.append(group)
                peer = target if me == source else source
                end = group, dist.get_group_rank(group, pipeline[peer])
                (self._out if me == source else self._in)[peer] = end
                # NCCL connects two ranks in their first message, and the host of each waits there
                # for the other. All ranks connect here in one order. Otherwise the first transfers
                # would connect, in an order that could be a deadlock.
                message = torch.zeros(1, device=device)
                if me == source:
                    sync_points.in_use.send(group, message, end[1], 0).wait()
                else:
                    sync_points.in_use.receive(group, message, end[1], 0).wait()

    def to(self, target: int, channel: Channel | None = None) -> Serving:
        """Returns the group that serves the edge to a pipeline rank, and that rank in it."""
        return (self._beside if channel in self._skips else self._out)[target]

    def of(self, source: int, channel: Channel | None = None) -> Serving:
        """Returns the group that serves the edge from a pipeline rank, and that rank in it."""
        return (self._beside if channel in self._skips else self._in)[source]

    def host(self, peer: int, channel: Channel | None = None) -> Serving:
        """Returns the group that takes headers to or from a pipeline rank, and that rank in it.

        On CPUs they use the same connection as the values.
        """
        return self.of(peer, channel) if self.is_tagged else self._hosts[peer]

    def inbox(self, source: int, channel: Channel) -> Inbox:
        """Returns the headers from a pipeline rank, for a channel that ends here."""
        key = self.host(source, channel)
        return self._inboxes.setdefault(key, Inbox(*key))

    def cut(self) -> None:
        """Closes this rank's connections on gloo: ranks that wait for it fail at once."""
        self.is_cut = True
        # Only a closed connection ends the wait of a rank in gloo. This rank cannot send the
        # missing messages, because it cannot determine which of them it has sent.
        both = (*self._hosts.values(), *self._beside.values())
        for group in dict.fromkeys(group for group, _ in both):
            cut(group)

    def close(self) -> None:
        """Destroys the groups; every rank must call it."""
        self._ending.end()
        for ends in (self._out, self._in, self._hosts, self._beside):
            ends.clear()
        self._inboxes.clear()


class Inbox:
    """The headers that another rank sends to this one; see [Note: headers] in `transfers`.

    Attributes:
        posted: For each header that may come, in order: its memory, zero before it arrives; the
            same memory as a numpy array; and the receive.
        spare: The number of posted receives that no transfer has reserved.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer
        self.posted: deque[tuple[torch.Tensor, np.ndarray, Work]] = deque()
        self.spare = 0

    def post(self) -> None:
        """Starts to receive one more header."""
        # Zeros, because the host polls the step, the first word: it is not zero once the header is
        # there.
        head = torch.zeros(WORDS, dtype=torch.int64)
        work = sync_points.in_use.receive(self._group, head, self._peer, HEADERS)
        self.posted.append((head, head.numpy(), work))

    def wait(self) -> list[int]:
        """Waits for the next header; returns its words.

        Sync: blocks the host.
        """
        _, words, work = self.posted[0]
        ARRIVED(work)
        return words.tolist()  # type: ignore[no-any-return]


def has_tags(device: torch.device) -> bool:
    """True if messages between such devices have tags; on CPUs they have."""
    return device.type == "cpu"
