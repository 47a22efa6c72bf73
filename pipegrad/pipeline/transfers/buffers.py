"""Buffers: the receive buffers of a rank, by capacity.

[Note: held buffers] A module may keep one of its inputs, for example a memory of the microbatch
before. A hook may keep one, too. Then the storage of the receive buffer has more holders than the
buffer's own tensors when the value is released. Such a buffer does not go back to the pool: the
next receive makes another one, and the kept tensor is never overwritten.
"""

from __future__ import annotations

from ctypes import c_int64

import torch

from pipegrad.interop.private import storage_holders, storage_key
from pipegrad.pipeline.transfers.specs import Spec

OWN_HOLDERS = 3  # of a buffer's storage: `storage`, `memory` and `tensor`
_STEPS = 8  # capacities between two powers of two: at most 1/8 of a buffer stays unused


class Buffer:
    """A receive buffer.

    Args:
        memory: All of it, as bytes.

    Attributes:
        memory: All of it, as bytes.
        capacity: How many bytes it has.
        storage: Of the memory.
        address: Of the storage.
        head: Its first eight bytes, as the host reads them; zero if they are on another device.
        holders: What `storage_holders` needs to count who holds the storage.
        tensor: The value that arrived last, in the memory.
        spec: What the value looks like, if it begins where the memory begins.
        freed: Behind its last reader; None on processors, and in use.
    """

    __slots__ = (
        *("address", "capacity", "freed", "head", "holders"),
        *("memory", "spec", "storage", "tensor"),
    )

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.capacity = len(memory)
        self.storage = memory.untyped_storage()
        self.holders = storage_key(self.storage)
        self.address = self.storage.data_ptr()
        self.head = c_int64.from_address(self.address) if memory.is_cpu else c_int64(0)
        self.freed: torch.Event | None = None
        self.show(Spec((self.capacity,), memory.dtype, differentiable=False), 0)

    def show(self, spec: Spec, offset: int) -> None:
        """Makes `tensor` the value of `spec` that begins `offset` bytes behind the start."""
        # A tensor made in inference mode can never take part in autograd, and a pool serves
        # evaluations and training steps.
        with torch.inference_mode(mode=False):
            # Not a view of a view, which would hold the memory once more.
            value = torch.empty(0, dtype=spec.dtype, device=self.memory.device)
        begin = offset // spec.dtype.itemsize
        self.tensor = value.set_(self.storage, begin, spec.shape)  # type: ignore[call-overload]
        self.spec = spec if offset == 0 else None


class BufferPool:
    """Receive buffers, used again and again. It makes as many as are in use at one time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_made = 0
        self._free: dict[int, list[Buffer]] = {}

    def free(self, capacity: int) -> list[Buffer]:
        """Returns the list of free buffers of so many bytes; callers take from its end."""
        return self._free.setdefault(capacity, [])

    def give_back(self, buffer: Buffer) -> None:
        """Takes a buffer that nobody reads any more; see [Note: held buffers]."""
        if storage_holders(buffer.holders) == OWN_HOLDERS:
            self._free.setdefault(buffer.capacity, []).append(buffer)

    def drop(self, capacity: int) -> None:
        """Frees the memory of the free buffers of so many bytes."""
        self.free(capacity).clear()

    def clear(self) -> None:
        """Frees the memory of all free buffers, and counts anew. No buffer may be in use."""
        for buffers in self._free.values():
            buffers.clear()
        self._free.clear()
        self.num_made = 0

    def make(self, capacity: int) -> Buffer:
        """Returns a new buffer of so many bytes. Its first bytes are zero, the rest undefined."""
        self.num_made += 1
        with torch.inference_mode(mode=False):
            memory = torch.empty(capacity, dtype=torch.uint8, device=self.device)
            # Memory of a message that was freed may begin with its mark.
            memory[:8].zero_()
        return Buffer(memory)


def rounded(nbytes: int) -> int:
    """Returns a capacity of at least so many bytes. Few of them exist, so buffers are shared."""
    step = max(512, (1 << nbytes.bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step
