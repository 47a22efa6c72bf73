"""Microbatches: the batch of a step on this rank, cut along the first dimension.

[Note: outer graphs] An input may have a graph of the caller's, such as an encoder's output. The
pipeline runs a backward for each microbatch, and the caller's graph can be run only once. So such a
value is cut off its graph. The gradients of all microbatches go into the graph together, when the
step ends.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from numbers import Number
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from pipegrad.errors import StepError
from pipegrad.pipeline.wiring import Wiring


class Batch(NamedTuple):
    """What a step is given: the arguments of `Scheduler.step` and of `Scheduler.evaluate`."""

    inputs: Sequence[object]
    named: Mapping[str, object]
    target: object
    loss_divisor: float | None
    keeps_outputs: bool


class Batches:
    """Cuts the batches of one kind of step, which all look like the first one.

    Args:
        wiring: Which external inputs stages take.
        stages: The stages of this rank.
        num_microbatches: Into how many a batch is cut, along the first dimension.
        needs_target: Whether this rank must compute a loss.
        takes_target: Whether it computes a loss if there is a target.
        has_loss: Whether there is a loss_fn.
        whole: Names of values that every microbatch gets whole.
        first: What cut the first batch of this kind; None if the next batch is the first.

    Attributes:
        rows: Rows of the tensors of the first batch, by name.
        report: What is done with each value, by name, in words.
        outer: Those values of the last batch that have a graph of the caller's.
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
        first: Batches | None = None,
    ) -> None:
        self._external = wiring.external
        self._needed = sorted({s for i in stages for s in wiring.taken[i] if isinstance(s, str)})
        self._links = list(dict.fromkeys(link.name for link in wiring.links))
        self._num_microbatches = num_microbatches
        self._needs_target = needs_target
        self._takes_target = takes_target
        self._has_loss = has_loss
        self._whole = whole
        self._repeated = _Repeated()
        self.rows: dict[str, int] = {} if first is None else first.rows
        self.report: dict[str, str] = {} if first is None else first.report
        self.outer = OuterGraphs()

    def cut(self, batch: Batch) -> tuple[dict[str, Sequence[object]], Sequence[object] | None]:
        """Returns the microbatches of each external input that this rank needs, and of the target.

        Raises:
            StepError: If inputs are missing, given twice, unknown, cannot be cut, or not alike.
        """
        self.outer.forget()  # a failed step may have left something
        inputs, named, target, *_ = batch
        values = self._values(inputs, named)
        if self._needs_target or (self._takes_target and target is not None):
            if target is None or not self._has_loss:
                raise StepError("the last stage's rank needs target= and a Scheduler with loss_fn=")
            values["target"] = target
        for name, value in values.items():
            if name not in self._whole:
                _check_kind(name, value)
        self._check_rows(values)
        by_name = {**dict(zip(self._external, inputs, strict=False)), **named}
        self._repeated.check(by_name, self.rows)
        cut = {name: self._microbatches(name, value) for name, value in values.items()}
        return cut, cut.pop("target", None)

    def _values(self, inputs: Sequence[object], named: Mapping[str, object]) -> dict[str, object]:
        external = list(self._external)
        if len(inputs) > len(external):
            raise StepError(f"{len(inputs)} inputs, expected at most {external}")
        values = dict(zip(external, inputs, strict=False))
        unknown = [name for name in named if name not in external]
        if unknown:
            raise StepError(f"no stage takes {unknown}; from outside they take {external}")
        twice = [name for name in named if name in values]
        if twice:
            raise StepError(f"inputs {twice} are given twice, by position and by name")
        values |= named
        missing = [name for name in self._needed if name not in values]
        if missing:
            raise StepError(
                f"inputs {missing} are missing, which stages of this rank take; what stages make "
                f"for later ones is {self._links}"
            )
        return {name: values[name] for name in self._needed}

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
        # A name is new if its value was no tensor in the first step.
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
        if isinstance(value, Tensor):
            return self.outer.microbatches(value, number, whole=not is_cut)
        return [value] * number

    def _is_cut(self, value: object, name: str) -> TypeGuard[Tensor]:
        return name not in self._whole and isinstance(value, Tensor) and value.dim() > 0


class OuterGraphs:
    """The values of a step that were cut off their graphs; see [Note: outer graphs]."""

    def __init__(self) -> None:
        self._cut_off: list[tuple[Tensor, Sequence[Tensor]]] = []

    def microbatches(self, value: Tensor, number: int, *, whole: bool) -> Sequence[Tensor]:
        """Returns a value for each microbatch; they are leaves if `value` requires a gradient.

        Args:
            value: What the step is given.
            number: How many microbatches there are.
            whole: Whether each of them gets all of the value.
        """
        if not (value.requires_grad and torch.is_grad_enabled()):
            return [value] * number if whole else value.tensor_split(number)
        detached = value.detach()
        leaves = [detached] if whole else list(detached.tensor_split(number))
        for leaf in leaves:
            leaf.requires_grad_()
        self._cut_off.append((value, leaves))
        return leaves * number if whole else leaves

    def backward(self) -> None:
        """Runs one backward through the graphs that the values came from.

        Sync: on the current stream.
        """
        values, gradients = list[Tensor](), list[Tensor]()
        for value, leaves in self._cut_off:
            leaf_gradients = [leaf.grad for leaf in leaves]
            if any(gradient is not None for gradient in leaf_gradients):
                # No microbatch may be missing: `value` has one gradient, of its own shape.
                parts = [
                    torch.zeros_like(leaf) if gradient is None else gradient
                    for leaf, gradient in zip(leaves, leaf_gradients, strict=True)
                ]
                values.append(value)
                gradients.append(parts[0] if parts[0].shape == value.shape else torch.cat(parts))
        self.forget()
        if values:
            torch.autograd.backward(values, gradients)

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._cut_off = []


def _check_kind(name: str, value: object) -> None:
    """Refuses a value that is no tensor, number, string or None."""
    if value is not None and not isinstance(value, Tensor | Number | str):
        what = "target" if name == "target" else f"input {name!r}"
        raise StepError(
            f"the {what} is a {type(value).__name__}, expected a tensor, which is cut into "
            f"microbatches, or a number, string or None, which each of them gets. Give its tensors "
            f"as inputs of their own; or, if every microbatch is to get all of it, make the "
            f"Scheduler with whole=({name!r},)"
        )


class _Repeated:
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


def joined(outputs: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor | tuple[Tensor, ...], ...]:
    """Returns the outputs of all microbatches, each in one tensor.

    An output whose microbatches differ in more than their first dimension stays a tuple of them.
    """
    return tuple(
        parts
        if len({(part.dim(), part.shape[1:]) for part in parts}) > 1
        else torch.cat(parts)
        if parts[0].dim()
        else torch.stack(parts)
        for parts in zip(*outputs, strict=True)
    )
