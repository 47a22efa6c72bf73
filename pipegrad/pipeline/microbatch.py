"""Batches: what a step is given on this rank, cut into microbatches."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from numbers import Number
from typing import TypeGuard

import torch

from pipegrad.errors import StepError
from pipegrad.pipeline.outer_graph import OuterGraphs
from pipegrad.pipeline.stage import Wiring


class Batches:
    """Cuts the batches of one kind of step, which all look like the first one.

    Args:
        wiring: What stages take from outside.
        stages: Those of this rank.
        num_microbatches: Into how many a batch is cut, along the first dimension.
        needs_target: Whether this rank computes a loss.
        takes_target: Whether it may.
        has_loss: Whether it could.
        whole: Names of what every microbatch gets whole.

    Attributes:
        rows: Rows of the tensors of the first batch, by name.
        report: What is done with each value, by name, in words.
        outer: Of the last batch, those of its values that a gradient is to go into.
    """

    def __init__(
        self,
        wiring: Wiring,
        stages: Collection[int],
        num_microbatches: int,
        *,
        needs_target: bool,
        takes_target: bool,
        has_loss: bool,
        whole: Collection[str] = (),
    ) -> None:
        self._external = wiring.external
        self._needed = sorted({s for i in stages for s in wiring.taken[i] if isinstance(s, str)})
        self._made = list(dict.fromkeys(link.name for link in wiring.links))
        self._num_microbatches = num_microbatches
        self._needs_target = needs_target
        self._takes_target = takes_target
        self._has_loss = has_loss
        self._whole = whole
        self._last = _Repeated()
        self.rows: dict[str, int] = {}
        self.report: dict[str, str] = {}
        self.outer = OuterGraphs()

    def cut(
        self, inputs: Sequence[object], named: Mapping[str, object], target: object
    ) -> tuple[dict[str, Sequence[object]], Sequence[object] | None]:
        """Returns the microbatches of each external input that this rank needs, and of the target.

        Raises:
            StepError: If inputs are missing, given twice, unknown, cannot be cut, or not alike.
        """
        self.outer.forget()
        values = self._values(inputs, named)
        if self._needs_target or (self._takes_target and target is not None):
            if target is None or not self._has_loss:
                raise StepError("the last stage's rank needs target= and a Scheduler with loss_fn=")
            values["target"] = target
        for name, value in values.items():
            if name not in self._whole:
                _check_kind(name, value)
        self._check_rows(values)
        self._last.check({**dict(zip(self._external, inputs, strict=False)), **named}, self.rows)
        cut = {name: self._microbatches(name, value) for name, value in values.items()}
        return cut, cut.pop("target", None)

    def _values(self, inputs: Sequence[object], named: Mapping[str, object]) -> dict[str, object]:
        external = list(self._external)
        if len(inputs) > len(external):
            raise StepError(f"{len(inputs)} inputs, expected at most {external}")
        given = dict(zip(external, inputs, strict=False))
        unknown = [name for name in named if name not in external]
        if unknown:
            raise StepError(f"no stage takes {unknown}; from outside they take {external}")
        twice = [name for name in named if name in given]
        if twice:
            raise StepError(f"inputs {twice} are given twice, by position and by name")
        given |= named
        missing = [name for name in self._needed if name not in given]
        if missing:
            raise StepError(
                f"inputs {missing} are missing, which stages of this rank take; what stages make "
                f"for later ones is {self._made}"
            )
        return {name: given[name] for name in self._needed}

    def _check_rows(self, values: Mapping[str, object]) -> None:
        """Refuses tensors that are not cut alike, or not as in the first step."""
        rows = {name: len(x) for name, x in values.items() if self._is_cut(x, name)}
        number = self._num_microbatches
        if len(set(rows.values())) > 1 or any(n == 0 or n % number for n in rows.values()):
            raise StepError(
                f"tensors of {rows} rows cannot be cut into {number} microbatches that belong "
                f"together: give all the same number of rows, a multiple of {number}"
            )
        if any(self.rows.get(name, n) != n for name, n in rows.items()):
            raise StepError(
                f"tensors of {rows} rows, and of {self.rows} in the first step of this kind: all "
                f"microbatches must look alike: pad them, or make another Scheduler"
            )
        self.rows = rows | self.rows

    def _microbatches(self, name: str, value: object) -> Sequence[object]:
        number = self._num_microbatches
        is_cut = self._is_cut(value, name)
        rows = self.rows.get(name, 0)
        self.report[name] = (
            f"{rows} rows, cut into {number} microbatches of {rows // number}"
            if is_cut
            else "whole in every microbatch"
        )
        if isinstance(value, torch.Tensor):
            return self.outer.microbatches(value, number, whole=not is_cut)
        return [value] * number

    def _is_cut(self, value: object, name: str) -> TypeGuard[torch.Tensor]:
        return name not in self._whole and isinstance(value, torch.Tensor) and value.dim() > 0


def _check_kind(name: str, value: object) -> None:
    """Refuses what nobody can tell how to cut."""
    if value is not None and not isinstance(value, torch.Tensor | Number | str):
        what = "target" if name == "target" else f"input {name!r}"
        raise StepError(
            f"the {what} is a {type(value).__name__}, expected a tensor, which is cut into "
            f"microbatches, or a number, string or None, which each of them gets. Give its tensors "
            f"as inputs of their own; or, if every microbatch is to get all of it, make the "
            f"Scheduler with whole=({name!r},)"
        )


class _Repeated:
    """Looks for tensors that are cut, and yet are the same in two steps while others are not."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._warned = set[str]()

    def check(self, given: Mapping[str, object], cut: Collection[str]) -> None:
        """Warns of a tensor that may belong to no sample, once a name."""
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
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
        is_new_batch = bool(self._before) and len(same) < len(now)
        self._before = now
        for name in same if is_new_batch else ():
            value = tensors[name]
            if name in self._warned or name not in cut:
                continue
            self._warned.add(name)
            if not bool((value == value[:1]).all()):  # else it does not matter which rows are read
                warnings.warn(
                    f"the input {name!r} is the same tensor as in the step before, while others "
                    f"are not, and is cut into microbatches: its first dimension, "
                    f"{len(value)}, is taken for the batch's. If its rows are not of the samples, "
                    f"make the Scheduler with whole=({name!r},)",
                    stacklevel=_level_of_caller(),
                )


def _level_of_caller() -> int:
    """Returns how many calls lie between a warning here and who called pipegrad."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"].startswith(("pipegrad.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def joined(outputs: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Returns outputs of all microbatches, each in one tensor."""
    return tuple(
        torch.cat(parts) if parts[0].dim() else torch.stack(parts)
        for parts in zip(*outputs, strict=True)
    )
