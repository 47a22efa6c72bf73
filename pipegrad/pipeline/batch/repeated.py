"""Repeated tensors: a warning where a table is cut as if its rows were samples."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping

from torch import Tensor

from pipegrad.errors import level_of_caller


class Repeated:
    """Looks for tensors that are cut, but are the same in two steps while others are not."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._warned = set[str]()

    def check(self, values: Mapping[str, object], cut: Collection[str]) -> None:
        """Warns of a tensor that may belong to no sample, once for each name.

        Args:
            values: What a step is given, by name.
            cut: Names of the values that are cut.
        """
        tensors = {name: x for name, x in values.items() if isinstance(x, Tensor)}
        # Torch counts changes in place in `_version`. A tensor that was filled anew is a new batch.
        now = {
            name: (weakref.ref(x), 0 if x.is_inference() else x._version)
            for name, x in tensors.items()
        }
        same = [
            name
            for name, (_, version) in now.items()
            if name in self._before
            and self._before[name][0]() is tensors[name]
            and self._before[name][1] == version
        ]
        # If all tensors are the same, then the caller repeats one batch, as benchmarks do.
        is_new_batch = bool(self._before) and len(same) < len(now)
        self._before = now
        for name in same if is_new_batch else ():
            value = tensors[name]
            if name in self._warned or name not in cut:
                continue
            self._warned.add(name)
            if not bool((value == value[:1]).all()):  # else it does not matter which rows are read
                is_leaf = not name.isidentifier()  # of a tree: no name for `whole`
                warnings.warn(
                    f"the input {name!r} is the same tensor as in the step before, while others "
                    f"are not, and is cut into microbatches: its first dimension, "
                    f"{len(value)}, is taken for the batch's. If its rows are not of the samples, "
                    f"{'give it by a name of its own, and ' if is_leaf else ''}make the Scheduler "
                    f"with whole={'' if is_leaf else (name,)}",
                    stacklevel=level_of_caller(),
                )
