"""Microbatches: what a step is given on this rank, by name, cut or ready.

[Note: the rest] The stages of a `Cut` run the uncut model's own code, so each of them needs the
model's arguments, and these may be others in another step. An input of such stages is a mapping of
all that a step is given and that no stage names. Up to the end it is kept name by name, so all
rules for inputs hold for each of them. One more holds: a tensor of one row beside tensors of more
rows, such as position_ids, goes whole to every microbatch, as it would be broadcast in the model.

[Note: rows of samples] A tensor may have other rows than samples: one for each image, or for each
patch of one. ``rows_of`` has how many of them each sample has, in the order of samples, and so they
are cut where samples are. Stages that run a model's own code know some of these numbers themselves
(`Stage.rows_of`). A microbatch without rows gets a tensor without rows.

[Note: outer graphs] An input may have a graph of the caller's, such as an encoder's output. The
pipeline runs a backward for each microbatch, and the caller's graph can be run only once. So such a
value is cut off its graph. The gradients of all microbatches go into the graph together, when the
step ends.

[Note: chunks of time] With ``chunks`` each microbatch is cut once more, along the dimension of
time, and each chunk counts as a microbatch: chunk c of microbatch m is number m * chunks + c. A
tensor that has as many dimensions is cut. All of them have the same length there, or `time_dim`
names them. What has no time, such as a number for each row, goes whole to every chunk.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from pipegrad.errors import StepError, level_of_caller
from pipegrad.pipeline.stage import fields_of
from pipegrad.pipeline.trees import (
    Numbers,
    check_kind,
    flattened,
    is_cut,
    leaves_of,
    name_in,
    number_of,
)
from pipegrad.pipeline.wiring import REST, Wiring
from pipegrad.plugins.registry import closest_first

_OF_STEP = [
    "target",
    "microbatches",
    "num_microbatches",
    "chunks",
    "time_dim",
    "rows_of",
    "loss_divisor",
    "outputs",
]
_MOST_SAME = 8  # steps with one tensor and another batch, before a warning
_T = TypeVar("_T", Tensor, Sequence[int])
_Values = dict[str, object]  # by name
_Parts = dict[str, Sequence[object]]  # by name, a value for each microbatch
Counts = Sequence[int] | Tensor  # for each sample, how many rows of a tensor it has
InTime = tuple[Mapping[str, object], Mapping[str, int | None]]  # as `Stage.in_time` returns


class Batch(NamedTuple):
    """What a step is given: the arguments of `Scheduler.step` and of `Scheduler.evaluate`.

    Attributes:
        chunks: Into how many chunks of time, or their lengths; None if the Scheduler's own number
            is right.
        time_dim: The dimension of time, or for each name its own, None if it has no time.
        error: Why this rank cannot take the step; None if it can.
    """

    inputs: Sequence[object]
    named: Mapping[str, object]
    target: object
    loss_divisor: float | None
    microbatches: Sequence[object] | None
    num_microbatches: int | None
    keeps_outputs: bool
    rows_of: Mapping[str, Counts] | None = None
    chunks: int | Sequence[int] | None = None
    time_dim: int | Mapping[str, int | None] = 1
    error: BaseException | None = None

    @property
    def number(self) -> int | None:
        """How many microbatches it asks for; None if the Scheduler's own number is right."""
        if isinstance(self.microbatches, tuple | list):
            return len(self.microbatches)
        return self.num_microbatches


class Batches:
    """Turns what steps are given into microbatches.

    Args:
        wiring: Which external inputs stages take.
        stages: The stages of this rank.
        accepts: Names of what stages take that take everything, in order; None if it may be
            anything.
        has_loss: Whether there is a loss_fn.
        whole: Names of values that every microbatch gets whole.
        labels: Names of the inputs that are the target, too.
        rows_of: As `Stage.rows_of`.
        samples_along: As `Stage.samples_along`.
        in_time: As `Stage.in_time`.

    Attributes:
        rows: Samples of the batch that was cut last; None if nothing was cut.
        length: Its length in time, if that was cut into chunks alike for all rows; else None.
        sizes: How much of the batch each microbatch has, if that is known; else empty.
        report: What was done last with each value, by name and path, in words.
        passed: A number of each tensor that was given last: see [Note: what was passed].
        outer: Those values of the last batch that have a graph of the caller's.
    """

    def __init__(
        self,
        wiring: Wiring,
        stages: Collection[int],
        *,
        accepts: Sequence[str] | None = None,
        has_loss: bool,
        whole: Collection[str],
        labels: Sequence[str] = (),
        rows_of: Callable[[Mapping[str, object]], Mapping[str, Counts]] = lambda _: {},
        samples_along: Callable[[Mapping[str, object]], Mapping[str, int | None]] = lambda _: {},
        in_time: Callable[[Mapping[str, object]], InTime] = lambda given: (given, {}),
    ) -> None:
        # An input takes everything that no stage names: [Note: the rest].
        self._rest = next((name for name in wiring.external if name.startswith(REST)), None)
        self._external = [name for name in wiring.external if name != self._rest]
        self._labels = labels
        self._accepts = accepts
        self._in_order = [*self._external, *((self._rest and accepts) or ())]
        needed = {s for i in stages for s in wiring.taken[i] if isinstance(s, str)}
        self._needed = sorted(needed - {self._rest})
        self._links = list(dict.fromkeys(link.name for link in wiring.links))
        self._has_last_stage = len(wiring.taken) - 1 in stages
        self._has_loss = has_loss
        self._whole = whole
        self._rows_of = rows_of
        self._samples_along = samples_along
        self._in_time = in_time
        self._repeated = Repeated()
        self.rows: int | None = None
        self.length: int | None = None
        self.sizes: Sequence[float] = ()
        self.report: dict[str, str] = {}
        self.passed: Numbers = {}
        self.outer = OuterGraphs()

    def apart(self) -> Batches:
        """Returns one with the same rules, which leaves no trace in this one."""
        other = copy.copy(self)
        other._repeated, other.outer = Repeated(), OuterGraphs()
        return other

    def cut(
        self, batch: Batch, number: int, chunks: int = 1, *, needs_target: bool
    ) -> tuple[_Parts, Sequence[object] | None]:
        """Returns the microbatches of each external input that this rank needs, and of the target.

        Args:
            batch: What the step is given.
            number: How many microbatches rows are cut into.
            chunks: How many chunks of time each of them is cut into, and each is a microbatch.
            needs_target: Whether the rank of the last stage must have a target.

        Raises:
            StepError: If inputs are missing, given twice, unknown, or cannot be cut.
            BaseException: The error of the batch.
        """
        self.outer.forget()  # a failed step may have left something
        self.rows, self.sizes, self.length, self.report, self.passed = None, (), None, {}, {}
        if batch.error is not None:
            raise batch.error
        if batch.microbatches is None:
            passed = self._by_name(batch.inputs, batch.named, batch.target)
            given = self._given_counts(batch.rows_of)
            counts = {path: torch.tensor(numbers) for path, numbers in given.items()}
            self._number_passed({**passed, "rows_of": counts} if given else passed)
            values = self._taken_here(passed, needs_target=needs_target)
            values, time_dims = self._with_time(values, batch, chunks)
            parts = self._cut(passed, values, given, number=number)
        else:
            parts, time_dims = self._ready(batch, chunks, needs_target=needs_target)
        if chunks > 1:
            lengths = list(map(int, batch.chunks)) if isinstance(batch.chunks, tuple | list) else ()
            parts = self._in_chunks(parts, lengths or chunks, time_dims, number)
        parts = self._folded(self.outer.cut_off(parts), number * chunks)
        return parts, parts.pop("target", None)

    # Names.

    def _by_name(
        self, inputs: Sequence[object], named: Mapping[str, object], target: object
    ) -> _Values:
        """Returns everything that is given, by name."""
        known, fields = {*self._external, "target"}, _Values()
        only = inputs[0] if len(inputs) == 1 else None
        parts = fields_of(only)
        if parts is not None and (parts.keys() <= known or not isinstance(only, tuple)):
            inputs, fields = (), self._of_stages(parts, target)
        elif isinstance(only, tuple | list):
            inputs = only
        if len(inputs) > len(self._in_order):
            raise StepError(
                f"{len(inputs)} inputs, expected at most {self._in_order}; the loss gets target=, "
                f"and a tuple or list that is an input itself is given by name"
            )
        unknown = [name for name in named if not self._is_taken(name)]
        if unknown:
            raise StepError(
                f"no stage takes {unknown}; from outside they take {self._taken}, and step() "
                f"itself, closest first: {closest_first(unknown[0], _OF_STEP)}"
            )
        values = dict(zip(self._in_order, inputs, strict=False))
        for more in (named, fields, {} if target is None else {"target": target}):
            twice = [name for name in more if name in values]
            if twice:
                raise StepError(f"inputs {twice} are given twice, by position and by name")
            values |= more
        return values

    def _is_taken(self, name: str) -> bool:
        """Returns whether a stage takes an input of a name."""
        if self._rest is None:
            return name in self._external
        return self._accepts is None or name in self._accepts

    @property
    def _taken(self) -> list[str]:
        """The names of all inputs, for messages."""
        return self._external if self._rest is None else sorted(self._accepts or ())

    def _of_stages(self, fields: Mapping[str, object], target: object) -> _Values:
        """Returns the inputs that a mapping holds. What else it holds must be in the target."""
        others = {
            key: x for key, x in fields.items() if key != "target" and not self._is_taken(key)
        }
        # The batches of Hugging Face's collators have the labels among the inputs.
        in_target = {id(target), *map(id, leaves_of({"": target}).values())}
        extra = [key for key, x in others.items() if id(x) not in in_target]
        if extra:
            raise StepError(
                f"no stage takes {extra}; from outside they take {self._taken}. A mapping alone "
                f"gives inputs by name: leave out what no stage takes, or give it as target=. A "
                f"mapping that is an input itself is given by name, as in "
                f"step({[*self._taken, 'x'][0]}=...)"
            )
        return {name: value for name, value in fields.items() if name not in others}

    def _taken_here(self, passed: _Values, *, needs_target: bool) -> _Values:
        """Returns what the stages of this rank take, and the target of the last stage."""
        missing = [name for name in self._needed if name not in passed]
        if missing:
            raise StepError(
                f"inputs {missing} are missing, which stages of this rank take; what stages make "
                f"for later ones is {self._links}"
            )
        values, target = {name: passed[name] for name in self._needed}, passed.get("target")
        if self._rest is not None:
            others = {*self._external, "target"}
            values |= {name: value for name, value in passed.items() if name not in others}
        if self._labels:
            target = self._target_of(passed)
        if self._has_last_stage and (needs_target or target is not None):
            if target is None or not self._has_loss:
                raise StepError(
                    f"the last stage's rank needs {list(self._labels)}, of which the model "
                    f"computes its loss"
                    if self._labels
                    else "the last stage's rank needs target=, which loss_fn compares with outputs"
                    if self._has_loss
                    else "the last stage's rank needs a Scheduler with loss_fn=: the model has "
                    "no loss of its own that transformers' own code computes as one mean over "
                    "labels or samples"
                )
            values["target"] = target
        return values

    def _target_of(self, passed: _Values) -> object:
        """Returns the target of a model that computes its own loss; None in an evaluation."""
        if passed.get("target") is not None:
            raise StepError(
                f"the model computes its own loss of {list(self._labels)}: give these and no "
                f"target=, or make the Scheduler with loss_fn="
            )
        labels = {name: passed[name] for name in self._labels if passed.get(name) is not None}
        return next(iter(labels.values())) if len(labels) == 1 else labels or None

    def _number_passed(self, passed: _Values) -> None:
        """Makes a number of each value, whether a stage of this rank takes it or not."""
        # Each rank may compute a value with a graph by itself, with dropout of its own.
        numbers = {
            name: number_of(value)
            for name, value in passed.items()
            if name in self._needed or not any(has_graph(leaf) for _, leaf in flattened(value)[0])
        }
        self.passed = {name: number for name, number in numbers.items() if number is not None}

    def _folded(self, parts: _Parts, number: int) -> _Parts:
        """Returns parts, with those that no stage names in one mapping for each microbatch."""
        if self._rest is None:
            return parts
        named = {*self._external, "target"}
        rest = {name: column for name, column in parts.items() if name not in named}
        mappings = [{name: column[m] for name, column in rest.items()} for m in range(number)]
        return {n: column for n, column in parts.items() if n in named} | {self._rest: mappings}

    # Microbatches.

    def _given_counts(self, rows_of: object) -> dict[str, list[int]]:
        """Returns how many rows each sample has, as the caller says it."""
        if rows_of is None:
            return {}
        if not isinstance(rows_of, Mapping):
            raise StepError(
                f"rows_of is a {type(rows_of).__name__}, expected a mapping from names of inputs "
                f"to how many rows each sample has, such as {{'pixel_values': [1, 0, 2, 1]}}"
            )
        for path in rows_of:
            name = name_in(str(path))
            if name in self._whole or not (name == "target" or self._is_taken(name)):
                raise StepError(
                    f"rows_of has {path!r}, which is whole in every microbatch"
                    if name in self._whole
                    else f"rows_of has {path!r}, which no stage takes; from outside they take "
                    f"{self._taken}"
                )
        return {path: _counts(path, counts) for path, counts in rows_of.items()}

    def _cut(
        self,
        passed: _Values,
        values: _Values,
        given: Mapping[str, Sequence[int]],
        *,
        number: int,
    ) -> _Parts:
        """Returns the microbatches of a batch, of what this rank takes of it."""
        along = self._samples_along(values)
        no_samples = {name for name, dim in along.items() if dim is None}
        whole = [name for name in values if name in self._whole or name in no_samples]
        leaves = leaves_of({name: x for name, x in values.items() if name not in whole})
        for path, leaf in leaves.items():
            check_kind(path, leaf)
        rows = {p: leaf.shape[along.get(p) or 0] for p, leaf in leaves.items() if is_cut(leaf)}
        if counts := self._counts_of(values, leaves, given):
            rows = {path: length for path, length in rows.items() if path not in counts}
        if self._rest is not None and max(rows.values(), default=1) > 1:
            # Beside tensors of many rows, one of a single row belongs to no sample: a mask or
            # positions for all.
            single = [path for path, length in rows.items() if length == 1]
            rows = {path: length for path, length in rows.items() if length > 1}
            whole += single
        samples = rows or {path: len(numbers) for path, numbers in counts.items()}
        if len(set(samples.values())) > 1 or any(n < number for n in samples.values()):
            few = len(set(samples.values())) == 1
            last = ". A DataLoader with drop_last=True leaves a last batch of few rows out"
            other = (
                ". If rows of some are images or patches and not samples, rows_of= says how many "
                "each sample has"
            )
            raise StepError(
                f"tensors of {samples} rows cannot be cut into {number} microbatches that belong "
                f"together: give all the same number of rows, at least {number}, or give another "
                f"num_microbatches= on all ranks{last if few else other}"
            )
        if rows_in_all := min(samples.values(), default=0):
            least, more = divmod(rows_in_all, number)
            self.rows, self.sizes = rows_in_all, [least + (m < more) for m in range(number)]
        for path, numbers in counts.items():
            if len(numbers) != self.rows:
                raise StepError(
                    f"rows_of[{path!r}] has {len(numbers)} numbers, and the batch has {self.rows} "
                    f"samples: give a number for each, 0 for one that has no rows"
                )
        self._repeated.check({**leaves, **passed}, rows)
        self.report = dict.fromkeys([*leaves, *whole], "whole in every microbatch")
        for path, length in rows.items():
            least, rest = divmod(length, number)
            sizes = f"{least} or {least + 1}" if rest else f"{least}"
            self.report[path] = f"{length} rows, cut into {number} microbatches of {sizes}"
        uneven = {path: [sum(x) for x in _split(n, number)] for path, n in counts.items()}
        for path, lengths in uneven.items():
            self.report[path] = (
                f"{sum(lengths)} rows of {self.rows} samples, cut with these into {number} "
                f"microbatches of {min(lengths)} to {max(lengths)}"
            )
        return {
            name: value.tensor_split(number, dim)
            if (dim := along.get(name)) and name not in whole and isinstance(value, Tensor)
            else _parts(name, value, number, whole=name in whole, sizes=uneven)
            for name, value in values.items()
        }

    def _counts_of(
        self,
        values: _Values,
        leaves: Mapping[str, object],
        given: Mapping[str, Sequence[int]],
    ) -> dict[str, Sequence[int]]:
        """Returns the tensors whose rows are no samples, and how many each sample has."""
        counts = dict[str, Sequence[int]]()
        if not (found := self._rows_of(values)) and not given:
            return counts
        known = {path: _counts(path, numbers) for path, numbers in found.items()}
        for path, numbers in {**known, **given}.items():
            leaf = leaves.get(path)  # none if no stage of this rank takes it
            if not is_cut(leaf):
                continue
            if sum(numbers) != len(leaf):
                raise StepError(
                    f"rows_of[{path!r}] adds up to {sum(numbers)}, and the tensor has {len(leaf)} "
                    f"rows"
                )
            counts[path] = numbers
        return counts

    def _ready(
        self, batch: Batch, chunks: int, *, needs_target: bool
    ) -> tuple[_Parts, dict[str, int | None]]:
        """Returns microbatches that are given ready, as they are, and where time is."""
        ready = batch.microbatches
        if not isinstance(ready, tuple | list):
            raise StepError(
                f"microbatches is a {type(ready).__name__}, expected a list; each microbatch is "
                f"what a step could be given, such as {{'x': x, 'target': y}}"
            )
        if batch.num_microbatches not in (None, len(ready)):
            raise StepError(
                f"{len(ready)} microbatches, and num_microbatches is {batch.num_microbatches}"
            )
        beside = [*batch.named, *(["target"] if batch.target is not None else [])]
        beside = [name for name in beside if name not in self._whole]
        beside += ["rows_of"] if batch.rows_of is not None else []
        if batch.inputs or beside:
            raise StepError(
                f"{beside or 'inputs'} beside microbatches=: put into each microbatch what is for "
                f"it. What is for all of them may stand beside, if whole= of the Scheduler names it"
            )
        taken, every, time_dims = list[_Values](), list[_Values](), dict[str, int | None]()
        for number, one in enumerate(ready):
            try:
                inputs = () if one is None else (one,)
                passed = self._by_name(inputs, batch.named, batch.target)
                values = self._taken_here(passed, needs_target=needs_target)
                values, time_dims = self._with_time(values, batch, chunks)
                taken.append(values)
                every.append(passed)
                if taken[-1].keys() != taken[0].keys():
                    raise StepError("all microbatches have the same inputs, and a target or none")
            except StepError as error:
                raise StepError(f"microbatch {number}: {error}{self._labels_of(one)}") from None
        names = dict.fromkeys(name for passed in every for name in passed)
        self._number_passed({name: [passed.get(name) for passed in every] for name in names})
        self.report = dict.fromkeys(taken[0], f"as given in each of {len(taken)} microbatches")
        return {name: [values[name] for values in taken] for name in taken[0]}, time_dims

    def _labels_of(self, one: object) -> str:
        """Returns where the labels of a ready microbatch belong, if it may have them elsewhere."""
        fields = fields_of(one) or {}
        others = [name for name in fields if not self._is_taken(name)]
        if not others or "target" in fields or self._labels:
            return ""
        return ". The labels of a ready microbatch are its 'target', whatever a loader calls them"

    # Chunks of time.

    def _with_time(
        self, values: _Values, batch: Batch, chunks: int
    ) -> tuple[_Values, dict[str, int | None]]:
        """Returns values that may be cut into chunks of time, and by name where time is.

        The entry ``""`` is for names without one of their own.
        """
        if chunks == 1:
            return values, {}
        own = batch.time_dim if isinstance(batch.time_dim, Mapping) else {"": batch.time_dim}
        for name, dim in own.items():
            known = not name or name == "target" or self._is_taken(name_in(name))
            least = 0 if name in self._whole else 1
            if not known or not (dim is None or (type(dim) is int and dim >= least)):
                raise StepError(
                    f"time_dim is {batch.time_dim!r}, expected a dimension from 1, since rows are "
                    f"the first one, or a mapping from names of inputs, out of {self._taken}, to "
                    f"dimensions, or to None for those without time"
                )
        in_time, dims = self._in_time(values)
        return dict(in_time), {"": 1, **dict.fromkeys(self._whole), **dims, **own}

    def _in_chunks(
        self,
        parts: _Parts,
        chunks: int | Sequence[int],
        time_dims: Mapping[str, int | None],
        number: int,
    ) -> _Parts:
        """Returns the chunks of microbatches; see [Note: chunks of time]."""
        columns: dict[str, Any] = {name: [] for name in parts}
        sizes, every = list[float](), set[int]()
        rows = self.sizes or [1] * number
        for m in range(number):
            values = {name: column[m] for name, column in parts.items()}
            leaves = leaves_of(values)
            dims = {
                path: dim
                for path, leaf in leaves.items()
                for dim in [_dim_of(path, time_dims)]
                if isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim
            }
            found = {
                p: x.shape[dims[p]]
                for p, x in leaves.items()
                if isinstance(x, Tensor) and p in dims
            }
            lengths = _lengths(found, chunks)
            if "target" in values and not any(path.startswith("target") for path in found):
                raise StepError(
                    "the target has no dimension of time, and each chunk has a loss of its own: "
                    "give a target for each position, ignored where there is none, or chunks=1"
                )
            every.add(sum(lengths))
            sizes += [rows[m] * length / (sum(lengths) or 1) for length in lengths]
            for name, value in values.items():
                columns[name] += _chunks_of(name, value, dims, lengths)
            for path in found if m == 0 else ():
                words = self.report.get(path, self.report.get(name_in(path)))
                self.report[path] = f"{words}, each cut into chunks of {_in_words(lengths)}"
        self.sizes = sizes
        self.length = every.pop() if len(every) == 1 else None
        return columns


def _lengths(found: Mapping[str, int], chunks: int | Sequence[int]) -> list[int]:
    """Returns the lengths of the chunks of a microbatch.

    Args:
        found: By path, how long tensors are.
        chunks: How many there are, or how long.

    Raises:
        StepError: If tensors differ, or cannot be cut like that.
    """
    number = chunks if isinstance(chunks, int) else len(chunks)
    length = next(iter(found.values()), 0)
    if len(set(found.values())) > 1 or (found and length < number):
        raise StepError(
            f"tensors of lengths {dict(found)} cannot be cut into {number} chunks of time that "
            f"belong together: give all the same length, at least {number}; or name what has no "
            f"time, or has it elsewhere, as in time_dim={{{next(iter(found))!r}: None}}"
        )
    if not isinstance(chunks, int):
        if found and sum(chunks) != length:
            raise StepError(
                f"chunks {list(chunks)} add up to {sum(chunks)}, and tensors are {length} long"
            )
        return list(chunks)
    least, more = divmod(length, number)
    return [least + (c < more) for c in range(number)]


def _dim_of(path: str, time_dims: Mapping[str, int | None]) -> int | None:
    """Returns the dimension of time of a leaf, by its path or the name before it."""
    return time_dims.get(path, time_dims.get(name_in(path), time_dims[""]))


def _chunks_of(
    name: str, value: object, dims: Mapping[str, int], lengths: Sequence[int]
) -> Sequence[object]:
    """Returns a value for each chunk: those of its tensors that have time are cut there."""
    leaves, rebuilt = flattened(value)
    if not any(f"{name}{path}" in dims for path, _ in leaves):
        return [value] * len(lengths)
    columns = [
        leaf.split(lengths, dims[f"{name}{path}"])
        if f"{name}{path}" in dims and isinstance(leaf, Tensor)
        else [leaf] * len(lengths)
        for path, leaf in leaves
    ]
    return [rebuilt(list(row)) for row in zip(*columns, strict=True)]


def _in_words(lengths: Sequence[int]) -> str:
    few, many = min(lengths), max(lengths)
    return f"{few}" if few == many else f"{few} to {many}"


def _parts(
    name: str,
    value: object,
    number: int,
    *,
    whole: bool,
    sizes: Mapping[str, Sequence[int]],
) -> Sequence[object]:
    """Returns a value for each of so many microbatches; see [Note: trees].

    Args:
        name: Of the value.
        value: What the step is given.
        number: How many microbatches there are.
        whole: Whether each of them gets all of it.
        sizes: By path, how many rows each of them gets of a tensor that is not cut evenly.
    """
    leaves, rebuilt = flattened(value)
    if whole or not any(is_cut(leaf) for _, leaf in leaves):
        return [value] * number
    columns = [
        _split(leaf, number, sizes.get(f"{name}{path}")) if is_cut(leaf) else [leaf] * number
        for path, leaf in leaves
    ]
    return [rebuilt(list(row)) for row in zip(*columns, strict=True)]


def _split(value: _T, number: int, sizes: Sequence[int] | None = None) -> Sequence[_T]:
    """Returns pieces of a tensor or a list, of these sizes, or as even as can be."""
    least, rest = divmod(len(value), number)
    sizes = sizes or [least + (m < rest) for m in range(number)]
    if isinstance(value, Tensor):
        # One node of a graph for all pieces, whose backward joins their gradients.
        pieces: Sequence[_T] = value.split(list(sizes))
        return pieces
    return [value[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _counts(path: str, counts: object) -> list[int]:
    """Returns how many rows of a tensor each sample has.

    Raises:
        StepError: If that is no list of such numbers.
    """
    numbers = counts.tolist() if isinstance(counts, Tensor) else counts
    if isinstance(numbers, tuple | list) and all(type(n) is int and n >= 0 for n in numbers):
        return list(numbers)
    raise StepError(
        f"rows_of[{path!r}] is {counts!r:.80}, expected an integer from 0 for each sample: how "
        f"many rows of the tensor it has"
    )


def joined(
    outputs: Sequence[tuple[Tensor, ...]], chunks: int = 1, time_dim: int = 1
) -> tuple[Any, ...]:
    """Returns outputs of all microbatches, each in one tensor, or one for each microbatch.

    The second is what there is of microbatches whose outputs differ beyond the first dimension.
    Those of the chunks of a sequence are joined along the dimension of time, or a new last one.
    """
    columns: Any = zip(*outputs, strict=True)
    if chunks > 1:
        columns = [
            [_joined(column[i : i + chunks], time_dim) for i in range(0, len(column), chunks)]
            for column in columns
        ]
    return tuple(_joined(tuple(column)) for column in columns)


def joined_tree(parts: Sequence[object]) -> object:
    """Returns the values of all microbatches in one, tensors as `joined`.

    What is not cut is that of the first one. Trees of other structures stay a tuple of them.
    """
    trees = [flattened(part) for part in parts]
    if len({tuple(path for path, _ in leaves) for leaves, _ in trees}) > 1:
        return tuple(parts)
    columns = list[object]()
    for values in zip(*([leaf for _, leaf in leaves] for leaves, _ in trees), strict=True):
        is_whole = all(value is values[0] for value in values)
        tensors = tuple(value for value in values if isinstance(value, Tensor))
        is_cut_up = len(tensors) == len(values) and not is_whole
        columns.append(_joined(tensors) if is_cut_up else values[0])
    return trees[0][1](columns)


def _joined(parts: tuple[Any, ...], dim: int = 0) -> Any:  # noqa: ANN401 - a tensor, or parts
    if (
        any(isinstance(part, tuple) for part in parts)
        or len(set(map(partial(_form, dim), parts))) > 1
    ):
        return parts
    return torch.cat(parts, dim) if parts[0].dim() > dim else torch.stack(parts, -1)


def _form(dim: int, part: Tensor) -> tuple[object, ...]:
    """Returns what tensors have in common that are joined along a dimension."""
    return part.dim(), part.shape[:dim], part.shape[dim + 1 :], part.dtype


def has_graph(leaf: object) -> TypeGuard[Tensor]:
    """Returns whether a leaf is a tensor that is to get a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()


class OuterGraphs:
    """The values of a step that were cut off their graphs; see [Note: outer graphs].

    Attributes:
        leaves: What stages read instead, by name and microbatch; the same table in all steps.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, dict[int, list[Tensor]]] = {}
        self._cut_off: list[tuple[Tensor, Tensor]] = []  # a piece with its graph, and its leaf

    def cut_off(self, parts: _Parts) -> _Parts:
        """Returns the values of all microbatches, with leaves in place of pieces with a graph."""
        return {name: self._of_name(name, column) for name, column in parts.items()}

    def _of_name(self, name: str, column: Sequence[object]) -> Sequence[object]:
        trees = [flattened(value) for value in column]
        if not any(has_graph(leaf) for leaves, _ in trees for _, leaf in leaves):
            return column
        # What is whole in several microbatches is one tensor, and one leaf.
        leaf_of = dict[int, Tensor]()
        values = list[object]()
        for microbatch, (leaves, rebuilt) in enumerate(trees):
            row = list[object]()
            for _, piece in leaves:
                if has_graph(piece):
                    if id(piece) not in leaf_of:
                        leaf_of[id(piece)] = piece.detach().requires_grad_()
                        self._cut_off.append((piece, leaf_of[id(piece)]))
                    piece = leaf_of[id(piece)]  # noqa: PLW2901 - the graph ends here
                    self.leaves.setdefault(name, {}).setdefault(microbatch, []).append(piece)
                row.append(piece)
            values.append(rebuilt(row))
        is_whole = all(value is column[0] for value in column)
        return values[:1] * len(values) if is_whole else values

    @property
    def is_empty(self) -> bool:
        """Whether no value of the step came from a graph."""
        return not self._cut_off

    def backward(self, divisor: Tensor | float) -> None:
        """Runs one backward through the graphs that the values came from.

        Args:
            divisor: What the gradients of all microbatches are still to be divided by.

        Sync: on the current stream.
        """
        # A divisor on the device is a float64, and would make a gradient without dimensions one.
        reached = [
            (x, (leaf.grad / divisor).to(leaf.grad.dtype))
            for x, leaf in self._cut_off
            if leaf.grad is not None
        ]
        self.forget()
        if reached:
            torch.autograd.backward([x for x, _ in reached], [gradient for _, gradient in reached])

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self.leaves.clear()
        self._cut_off = []


class Repeated:
    """Looks for tables that are cut as if their rows were samples.

    Such a tensor is the same from the first step on, while other inputs are not. A GAN has a second
    step with the same batch, and not an eighth one.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._num_steps: dict[str, int] = {}  # in a row, with the first tensor, and others beside

    def check(self, values: Mapping[str, object], cut: Collection[str]) -> None:
        """Warns of a tensor that may belong to no sample.

        Args:
            values: What a step is given, by name.
            cut: Names of the values that are cut.
        """
        tensors = {name: x for name, x in values.items() if isinstance(x, Tensor)}
        same = list[str]()
        for name, x in tensors.items():
            # Torch counts changes in place in `_version`. A tensor that was filled anew is a new
            # batch.
            written = 0 if x.is_inference() else x._version
            first, version = self._first.setdefault(name, (weakref.ref(x), written))
            if first() is x and version == written:
                same.append(name)
        # If all inputs are the same, then the caller repeats one batch, as benchmarks do.
        inputs = [name for name in tensors if name_in(name) != "target"]
        is_new_batch = any(name not in same for name in inputs or tensors)
        self._num_steps = {name: self._num_steps.get(name, 0) + is_new_batch for name in same}
        for name in same if is_new_batch else ():
            value = tensors[name]
            if self._num_steps[name] != _MOST_SAME or name not in cut:
                continue
            if not bool((value == value[:1]).all()):  # else it does not matter which rows are read
                is_leaf = not name.isidentifier()  # of a tree: no name for `whole`
                warnings.warn(
                    f"the input {name!r} is the same tensor in {_MOST_SAME} steps, while others "
                    f"are not, and is cut into microbatches: its first dimension, "
                    f"{len(value)}, is taken for the batch's. If its rows are not of the samples, "
                    f"{'give it by a name of its own, and ' if is_leaf else ''}make the Scheduler "
                    f"with whole={'' if is_leaf else (name,)}",
                    stacklevel=level_of_caller(),
                )
