"""Chunks: parts of a whole tensor, in the form that torch.distributed.checkpoint reads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes in a tensor


class Chunk(Tensor):
    """Some boxes of a whole tensor; of a flat one, elements ``begin:begin + local.numel()``.

    It is a tensor of the whole size without memory of that size. torch.distributed.checkpoint calls
    the three methods below, which DTensor has too. They return only the elements of this rank. So a
    checkpoint can be read in other chunks than it was written.

    It can be copied and moved to another device. It has no other values than `local`, so nothing
    else can be computed of it.

    Attributes:
        local: The elements of this rank, flat and contiguous, box by box.
        boxes: Where they lie in the whole tensor. Boxes do not overlap.
    """

    local: Tensor
    boxes: tuple[Box, ...]

    @staticmethod
    def of(local: Tensor, begin: int, numel: int) -> Chunk:
        """Returns the chunk at `begin` of `numel` elements; `local` is flat and contiguous."""
        return Chunk.in_boxes(local, (numel,), [((begin,), (local.numel(),))])

    @staticmethod
    def in_boxes(local: Tensor, shape: Sequence[int], boxes: Sequence[Box]) -> Chunk:
        """Returns boxes of a tensor of a shape; `local` has their elements, box by box."""
        # One element, expanded: it has the whole size and needs no memory.
        whole = torch.empty((), dtype=local.dtype, device=local.device).expand(*shape)
        shard = whole.as_subclass(Chunk)
        shard.local, shard.boxes = local, tuple(boxes)
        return shard

    def with_local(self, local: Tensor) -> Chunk:
        """Returns the same boxes with other elements."""
        return Chunk.in_boxes(local, self.size(), self.boxes)

    @property
    def begin(self) -> int:
        """Index of the first element in a flat tensor."""
        ((begin,), _), *_ = self.boxes
        return begin

    # torch.distributed.checkpoint takes long to import. If it calls these, it is imported.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        # The offset is part of the index, so torch finds the chunks of all ranks under one name.
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        begin = 0
        for offsets, sizes in self.boxes:
            end = begin + math.prod(sizes)
            if index.offset is None or tuple(index.offset) == offsets:
                return self.local[begin:end].view(sizes)
            begin = end
        raise KeyError(f"{index.fqn} has no box at {index.offset} on this rank")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Chunk(boxes {self.boxes} of {tuple(self.size())}: {self.local})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Chunk:
        return self.with_local(copy.deepcopy(self.local, memo))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's signature
        """Copies and moves the local elements; refuses to compute."""
        options = dict(kwargs or {})
        if func in _COPIES:
            chunk = args[0]
            return chunk.with_local(func(chunk.local, *args[1:], **options))
        found = super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        if isinstance(found, Tensor):
            raise TypeError(
                f"{func} of a Chunk, this rank's part of a sharded state: take its `local` values, "
                f"or save and load it by torch.distributed.checkpoint"
            )
        return found


_COPIES = {Tensor.detach, Tensor.clone, Tensor.cpu, Tensor.to}

# torch.load reads only classes that it knows.
torch.serialization.add_safe_globals([Chunk])
