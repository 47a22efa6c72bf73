"""Staging: values of a checkpoint are copied to CPU memory, so that the training can go on.

[Note: what waits for the copy] The copies of a device run on a side stream. It first waits for an
event of the current stream, because the optimizer and the parameter sync may still write. The next
optimizer waits for the copies, because it overwrites what they read. Forwards and backwards do not
wait: they only read parameters and the optimizer's state. They write buffers, and so the caller
gives copies of buffers. Who writes the checkpoint blocks its own thread until all copies are there.
On CPU the copies are made at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipegrad.comm import sync_points
from pipegrad.comm.comm_stream import CommStream, Ticket
from pipegrad.gradients.main_params import Chunk

WRITTEN = sync_points.Record(
    "checkpoint.written", "the copy for a checkpoint reads what the step has just written"
)
_COPY_SECONDS = 600.0


class Staging:
    """CPU memory for the values of one checkpoint. It is kept for the next one.

    Args:
        device: Of this rank's stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = CommStream("pipegrad checkpoint", device, threaded=False)
        self._memory: dict[str, Tensor] = {}
        self._ticket: Ticket | None = None
        self._is_ordered = True  # whether the current stream waits for the copies
        # What is copied stays alive until it is copied, whatever the optimizer drops.
        self._sources: Mapping[str, Tensor] = {}

    def copy(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies in CPU memory. Nobody may use the copies of the call before it any more.

        Sync: enqueues the copies behind the current stream, on a side stream. `wait` orders what
        overwrites the values; `finish` blocks the host until the copies are there.
        """
        staged = {key: self._place(key, tensor) for key, tensor in state.items()}
        self._memory = {key: _local(tensor) for key, tensor in staged.items()}
        self._sources = dict(state)

        def copy_all() -> None:
            for key, tensor in self._sources.items():
                self._memory[key].copy_(_local(tensor), non_blocking=True)

        event = WRITTEN(self._device)
        self._ticket = self._stream.submit(copy_all, [] if event is None else [event])
        self._is_ordered = False
        return staged

    def wait(self) -> None:
        """Orders the current stream behind the copies.

        Sync: the current stream waits. The host does not.
        """
        if not self._is_ordered and self._ticket is not None:
            self._ticket.wait(_COPY_SECONDS)
        self._is_ordered = True

    def finish(self) -> None:
        """Blocks the calling thread until the copies are there."""
        if self._ticket is not None:
            event, _ = self._ticket.done.result()
            sync_points.finish_event(event)
        self._sources = {}

    def _place(self, key: str, tensor: Tensor) -> Tensor:
        """Returns memory for a value; that of the checkpoint before it if it fits."""
        local, memory = _local(tensor), self._memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (local.shape, local.dtype):
            # A device copies beside the host only into memory that is pinned.
            is_pinned = local.device.type != "cpu"
            memory = torch.empty(local.shape, dtype=local.dtype, pin_memory=is_pinned)
        if isinstance(tensor, Chunk):
            return tensor.with_local(memory)
        return memory


def _local(tensor: Tensor) -> Tensor:
    """Returns the values that a rank has of a tensor."""
    return tensor.local if isinstance(tensor, Chunk) else tensor
