"""Rows: elements of a flat tensor that other ranks have the rest of, as checkpoints take them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Row(Tensor):
    """Elements ``begin:begin + local.numel()`` of a tensor ``(numel,)``.

    A tensor in name only, of the whole size: torch.distributed.checkpoint asks it for what is here,
    by the three methods that DTensor answers it by, and reads any rows of what was written in any.
    """

    local: Tensor
    begin: int

    @staticmethod
    def of(local: Tensor, begin: int, numel: int) -> Row:
        """Returns what is here, flat and contiguous, in its place of `numel` elements."""
        whole = torch.empty((), dtype=local.dtype, device=local.device).expand(numel)
        shard = whole.as_subclass(Row)
        shard.local, shard.begin = local, begin
        return shard

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        data = TensorWriteData(chunk=self._chunk, properties=properties, size=self.size())
        index = MetadataIndex(fqn, self._chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]

    def __get_tensor_shard__(self, _: object) -> Tensor:
        return self.local

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.begin]), self.local.size())
