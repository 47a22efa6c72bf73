"""Checksums: integers that differ if one bit of a tensor differs, at the speed of memory."""

from __future__ import annotations

import torch

_BLOCK = 1024  # words of 8 bytes
_PIECE = 2**17  # words: what is mixed at a time fits into a cache
_LOW = 2**32 - 1
_ODD = 0x1E3779B97F4A7C15  # the golden ratio, so that products have bits in all places


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an int64 sum ``(1,)`` over the bits. It reads the tensor once.

    A change of any single word of 8 bytes changes it, so any single bit does. An exchange of
    elements in one block of 8 KiB may leave it.

    Args:
        tensor: Of any dtype and shape.
    """
    # Integers, so that the order of additions does not matter. Sums wrap around modulo 2^64. All
    # weights are odd, so the product of a change and a weight is never a multiple of 2^64.
    words, rest = _words(tensor)
    whole = words.numel() // _BLOCK * _BLOCK
    total = words[whole:].sum()
    if rest is not None:
        total = total + rest
    if whole:
        blocks = words[:whole].view(-1, _BLOCK).sum(1)
        weights = torch.arange(3, 2 * blocks.numel() + 3, 2, device=blocks.device)
        total = total + (blocks * weights).sum()
    return total.reshape(1)


def full_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns three int64 sums ``(3,)``: `checksum`, and two that also see exchanged elements.

    It takes several times as long as `checksum`.

    Args:
        tensor: Of any dtype and shape.
    """
    words, _ = _words(tensor)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    positions = torch.arange(min(_PIECE, words.numel()), device=words.device)
    for start in range(0, words.numel(), _PIECE):
        mixed = _mixed(words[start : start + _PIECE])
        plain = mixed.sum()
        weighted = (mixed * positions[: len(mixed)]).sum() + start * plain
        sums += torch.stack([plain, weighted])
    return torch.cat([checksum(tensor), sums])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, uint8 ``(nbytes,)``, in row-major order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the whole words of a tensor, int64, and the padded word of the bytes after them."""
    flat = bytes_of(tensor)
    if flat.storage_offset() % 8:  # a view of another tensor; words must begin at words
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    if whole == flat.numel():
        return words, None
    rest = flat.new_zeros(8)
    rest[: flat.numel() - whole] = flat[whole:]
    return words, rest.view(torch.int64)[0]


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Returns words of which each bit depends on several; different words stay different."""
    # Without it, a difference in the highest bits alone would vanish in the weighted sum.
    mixed = (words ^ ((words >> 32) & _LOW)) * _ODD
    return mixed ^ ((mixed >> 32) & _LOW)
