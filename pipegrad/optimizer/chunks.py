"""Chunks: parts of a flat tensor, in the form that torch.distributed.checkpoint reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


class Chunk(Tensor):
    """Elements ``begin:begin + local.numel()`` of a tensor ``(numel,)``.

    It is a tensor of the whole size without memory of that size. torch.distributed.checkpoint calls
    the three methods below, which DTensor has too. They return only the elements of this rank. So a
    checkpoint can be read in other chunks than it was written.

    It can be copied and moved to another device. It has no other values than `local`, so nothing
    else can be computed of it.
    """

    local: Tensor
    begin: int

    @staticmethod
    def of(local: Tensor, begin: int, numel: int) -> Chunk:
        """Returns the chunk at `begin` of `numel` elements; `local` is flat and contiguous."""
        # One element, expanded: it has the whole size and needs no memory.
        whole = torch.empty((), dtype=local.dtype, device=local.device).expand(numel)
        shard = whole.as_subclass(Chunk)
        shard.local, shard.begin = local, begin
        return shard

    # torch.distributed.checkpoint takes long to import. If it calls these, it is imported.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        data = TensorWriteData(chunk=self._chunk, properties=properties, size=self.size())
        # The offset is part of the index, so torch finds the chunks of all ranks under one name.
        index = MetadataIndex(fqn, self._chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]

    def __get_tensor_shard__(self, _: object) -> Tensor:
        return self.local

    def __repr__(self) -> str:  # type: ignore[override]
        end = self.begin + self.local.numel()
        return f"Chunk(elements {self.begin} to {end} of {len(self)}: {self.local})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Chunk:
        return Chunk.of(copy.deepcopy(self.local, memo), self.begin, len(self))

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
            return cls.of(func(chunk.local, *args[1:], **options), chunk.begin, len(chunk))
        found = super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        if isinstance(found, Tensor):
            raise TypeError(
                f"{func} of a Chunk, this rank's part of a sharded state: take its `local` values, "
                f"or save and load it by torch.distributed.checkpoint"
            )
        return found

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(torch.Size([self.begin]), self.local.size())


_COPIES = {Tensor.detach, Tensor.clone, Tensor.cpu, Tensor.to}

# torch.load reads only classes that it knows.
torch.serialization.add_safe_globals([Chunk])
