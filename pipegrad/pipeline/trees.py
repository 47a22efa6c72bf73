"""Trees: the values that a step is given, leaf by leaf, and a number of their tensors.

[Note: trees] A value may be a tree: dicts, lists and tuples of tensors. Each of its tensors is cut,
and each microbatch gets a tree of the same structure. A leaf that cannot be cut goes to all
microbatches only if it is a number, a string or None. Any other leaf may belong to one sample, and
raises a StepError. For the same reason a list of numbers or strings counts as a leaf, and raises.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Number
from operator import itemgetter
from typing import TypeGuard

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.gradients.drift import bytes_of
from pipegrad.interop.private import flat


def flattened(value: object) -> tuple[list[tuple[str, object]], Callable[[list[object]], object]]:
    """Returns the paths and leaves of a value, and a function that rebuilds it from leaves."""
    if isinstance(value, Tensor):
        return [("", value)], itemgetter(0)
    leaves, rebuilt = flat(value, _is_plain_list)
    if isinstance(value, Mapping) and leaves and leaves[0][1] is value:
        return flat(dict(value), _is_plain_list)  # its class is no pytree of torch
    return leaves, rebuilt


def leaves_of(values: Mapping[str, object]) -> dict[str, object]:
    """Returns the leaves of some values, by name and path: ``"batch['mask']"``."""
    return {f"{name}{path}": x for name, value in values.items() for path, x in flattened(value)[0]}


def versions_of(values: Sequence[object]) -> list[int]:
    """Returns the version of each tensor in some values: the count of its writes in place."""
    leaves = [
        leaf
        for value in values
        for leaf in ((value,) if isinstance(value, Tensor) else leaves_of({"": value}).values())
    ]
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def name_in(path: str) -> str:
    """Returns the name that a path begins with: ``"batch['mask']"``, ``"batch.mask"``."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def is_cut(leaf: object) -> TypeGuard[Tensor]:
    """Returns True if a leaf has a first dimension."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def check_kind(path: str, leaf: object) -> None:
    """Refuses a leaf that is no tensor, number, string or None; see [Note: trees]."""
    name = name_in(path)
    what = path if name == "target" else f"input {path!r}"
    if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
        raise StepError(
            f"the {what} is a tensor of layout {leaf.layout}, which cannot be cut into "
            f"microbatches: give microbatches= that are ready"
        )
    if leaf is not None and not isinstance(leaf, Tensor | Number | str):
        raise StepError(
            f"the {what} is a {type(leaf).__name__}, expected a tensor, which is cut into "
            f"microbatches; a number, string or None, which each of them gets; or a dict, list or "
            f"tuple of tensors. If the model needs none of it, such as texts, drop the column. If "
            f"every microbatch is to get all of it, give it by a name of its own, and make the "
            f"Scheduler with whole=({name!r},)"
        )


def _is_plain_list(value: object) -> bool:
    if not isinstance(value, tuple | list) or not value:
        return False
    return all(isinstance(item, Number | str) for item in value)


_ODD = 0x1E3779B97F4A7C15
_LOW = 2**32 - 1


def number_of(value: object) -> int | Tensor | None:
    """Returns a number from 1 to 2^32 of the tensors in a value; None if it has none.

    It is the same on every device. Other bits, another order, shape or dtype give another number,
    but for one in 2^32.

    Sync: on the current stream; the host waits for nothing.
    """
    leaves = [value] if isinstance(value, Tensor) else [leaf for _, leaf in flattened(value)[0]]
    tensors = [leaf for leaf in leaves if _is_plain(leaf)]
    if not tensors:
        return None
    total = torch.zeros((), dtype=torch.int64, device="cpu")  # all below is modulo 2^64
    for leaf in tensors:
        kind = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        total = total * _ODD + _sum(leaf) + kind
    # The highest bits of a product depend on all bits of its factors.
    number = (total * _ODD >> 32 & _LOW) + 1
    return int(number) if number.is_cpu else number


def _is_plain(leaf: object) -> TypeGuard[Tensor]:
    if not isinstance(leaf, Tensor) or type(leaf) not in (Tensor, nn.Parameter):
        return False
    return leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_meta


def _sum(tensor: Tensor) -> Tensor:
    """Returns the sum of the words of 8 bytes, each times the weight of its position."""
    octets = bytes_of(tensor.resolve_conj().resolve_neg())
    if len(octets) % 8 or octets.storage_offset() % 8:
        padded = octets.new_zeros(-(-len(octets) // 8) * 8)
        padded[: len(octets)] = octets
        octets = padded
    words = octets.view(torch.int64)
    if words.is_cpu:
        weights = _table(len(words).bit_length())[: len(words)]
    else:
        weights = _scattered(torch.arange(len(words), device=words.device))
    return (words * weights).sum()


@lru_cache(maxsize=32)
def _table(exponent: int) -> Tensor:
    """Returns the weights of the first 2^exponent positions, on the host."""
    return _scattered(torch.arange(2**exponent, device="cpu"))


def _scattered(positions: Tensor) -> Tensor:
    """Returns odd numbers that look random: with 1, 3, 5, ... sums of tokens would be equal."""
    positions = (positions + 1) * _ODD
    return (positions ^ (positions >> 32)) * _ODD | 1
