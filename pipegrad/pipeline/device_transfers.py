"""Transfers between devices: each message has a header, and is received after it.

[Note: headers between devices] A header goes from host to host, also for a gradient. The sender
enqueues its send first and then sends the header. The receiver's host waits for the header, which
is a wait for the host of the sender alone, and then enqueues a receive of exactly that size.
Messages of a communicator have no tags there: they are matched by their order. Therefore receives
are enqueued in the order of the headers, which is the order of the sends, and not in the order of
the waits.

A device's allocator keeps memory by stream, and reuses it at once. The memory for a receive belongs
to the current stream. The receive runs on a side stream, and waits for all work that was on the
current stream when it was posted.

[Note: receives on devices] A receive of NCCL is a kernel that runs until its message is there. If
it is enqueued before the send, its wait may never end, because the host of this rank may wait for
the receive: a kernel that is used for the first time is loaded after all kernels that run. Work of
another stream may also wait for it, because streams share hardware queues. A receive that is
enqueued after its send waits only for work that was enqueued before it. A send runs until its
receive is there, and the host of the receiver comes to it, unless it loads a kernel after a send of
its own: two ranks that do so at the same time wait for each other. CUDA_MODULE_LOADING=EAGER loads
kernels before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipegrad.comm import sync_points
from pipegrad.comm.collectives import HEADERS
from pipegrad.comm.sync_points import Done
from pipegrad.errors import StepError
from pipegrad.pipeline.codings import CodecChoice, Feedback
from pipegrad.pipeline.edges import Edges, Key, Spec, as_bytes, header
from pipegrad.pipeline.transfers import Transfers
from pipegrad.schedules.program.program import Channel

FREED = sync_points.Record("transfer.freed", "a receive would overwrite what is still read")
REUSED = sync_points.Wait("transfer.reused", "a receive would overwrite what is still read")


class DeviceTransfers(Transfers):
    """One rank's end of all transfers of a kind of step, between devices; see `Transfers`."""

    posts_receives = False

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
        super().__init__(
            channels, rank, edges, device, specs=specs, codecs=codecs, feedback=feedback
        )
        self._inbound = sync_points.in_use.stream(device, "pipegrad receives")

    def post(self, channel: int, microbatch: int) -> None:
        """Allocates memory for a receive, and starts the receive of its header."""
        super().post(channel, microbatch)
        self._receiving[channel, microbatch].is_free = FREED(self._device)

    def _arrived(self, key: Key, known: Spec | None) -> tuple[torch.Tensor, Spec | None]:
        """Waits for a message; see `Transfers`.

        Sync: the host waits for headers, of this transfer and of those posted before it on its
        edge.
        """
        self.is_in_doubt = True
        while key not in self._announced:
            self._enqueue(*self._read_header(self._ends[key[0]].inbox))
        return super()._arrived(key, known)

    def _enqueue(self, key: Key, spec: Spec | None) -> None:
        """Enqueues the receive of a transfer whose header was read.

        Sync: the receive waits for the last reader of its memory.
        """
        if key not in self._receiving:
            raise StepError(f"another rank has sent a header of {key}, which nobody waits for")
        receive, end = self._receiving[key], self._ends[key[0]]
        receive.work = Done()
        if end.is_value:
            self._look(key[0], end.sizes)
        if spec is None:
            return
        wire = end.on_wire(spec)
        if wire.nbytes > receive.memory.nbytes:
            memory = torch.empty(wire.shape, dtype=wire.dtype, device=self._device)
            receive.memory, receive.like = memory, wire
            receive.is_free = FREED(self._device)
        # On a side stream, because on the current one all computes after the receive would wait for
        # the message.
        with sync_points.in_use.running(self._inbound):
            REUSED(receive.is_free, self._device)
            if wire.nbytes:  # NCCL sends no message of none
                message = as_bytes(receive.memory)[: wire.nbytes]
                receive.work = sync_points.in_use.receive(
                    end.group, message, end.peer, self._tag(*key)
                )

    def send(
        self, channel: int, microbatch: int, tensor: torch.Tensor, spec: Spec | None = None
    ) -> None:
        """Starts to send a tensor, and then its header; see `Transfers.send`."""
        end, key, like = self._ends[channel], (channel, microbatch), spec or Spec.of(tensor)
        if end.coding is not None:
            position = self._channels[channel].link, microbatch
            tensor = end.coding.encoded(tensor, like, position)
        message, head = as_bytes(tensor.contiguous()), header(self._step, key, like)
        if end.is_value:
            end.sizes.check_size(like)
        if message.nbytes:
            self._start(key, end.group, message, end.peer, self._tag(*key))
        self._start(key, end.host, head, end.host_peer, HEADERS)
        if end.is_value:
            end.sizes.record(like)
