"""Trees: the values that a step is given, leaf by leaf.

[Note: trees] A value may be a tree: dicts, lists and tuples of tensors. Each of its tensors is cut,
and each microbatch gets a tree of the same structure. A leaf that cannot be cut goes to all
microbatches only if it is a number, a string or None. Any other leaf may belong to one sample, so
it is refused. For the same reason a list of numbers or strings counts as a leaf, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import TypeGuard

import torch
from torch import Tensor

from pipegrad.errors import StepError
from pipegrad.interop.private import flat


def flattened(value: object) -> tuple[list[tuple[str, object]], Callable[[list[object]], object]]:
    """Returns the leaves of a value behind their paths, and how to make such a value of others."""
    if isinstance(value, Tensor):
        return [("", value)], lambda leaves: leaves[0]
    leaves, rebuilt = flat(value, _is_plain_list)
    if isinstance(value, Mapping) and leaves and leaves[0][1] is value:
        return flat(dict(value), _is_plain_list)  # torch does not know its class
    return leaves, rebuilt


def leaves_of(values: Mapping[str, object]) -> dict[str, object]:
    """Returns the leaves of some values, by name and path: ``"batch['mask']"``."""
    return {f"{name}{path}": x for name, value in values.items() for path, x in flattened(value)[0]}


def versions_of(values: Sequence[object]) -> list[int]:
    """Returns how often each tensor of some values was written in place."""
    leaves = [
        leaf
        for value in values
        for leaf in ((value,) if isinstance(value, Tensor) else leaves_of({"": value}).values())
    ]
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def is_cut(leaf: object) -> TypeGuard[Tensor]:
    """Returns whether a leaf has a first dimension."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def check_kind(path: str, leaf: object) -> None:
    """Refuses a leaf that is no tensor, number, string or None; see [Note: trees]."""
    name = path.partition("[")[0]
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
            f"tuple of tensors. If every microbatch is to get all of it, give it by a name of its "
            f"own, and make the Scheduler with whole=({name!r},)"
        )


def _is_plain_list(value: object) -> bool:
    if not isinstance(value, tuple | list) or not value:
        return False
    return all(isinstance(item, Number | str) for item in value)
