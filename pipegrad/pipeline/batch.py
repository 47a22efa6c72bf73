"""Batch: the inputs of a step on this rank, by name, cut into microbatches or ready.

1. `Batches.cut` finds the name of each value, and selects the values that stages of this rank need.
   It detaches tensors from a graph of the caller: [Note: outer graphs].
2. A table has the path of each leaf to cut, the sizes of its pieces, and the dimension. A value
   without an entry goes whole to every piece. `_split` cuts by the table: along rows, and then
   along time.

[Note: the rest] The stages of a `Cut` run the uncut model's own code. Each of them needs the
model's arguments, and these may differ from step to step. An input of such stages is a mapping of
all arguments of a step that no stage names. It is kept name by name until the end of `cut`, because
all rules for inputs hold for each of them. One more rule holds: a tensor of one row, such as
position_ids, goes whole to every microbatch if other tensors have more rows, as it would be
broadcast in the model.

[Note: rows of samples] The rows of a tensor may be no samples: for example, one row for each image,
or for each patch of an image. ``rows_of`` has the number of rows of each sample, in the order of
samples, and the tensor is cut at the borders of samples. Stages that run a model's own code derive
some of these numbers from other inputs (`BatchRules`). A microbatch without rows gets a tensor
without rows.

[Note: outer graphs] An input may have a graph of the caller's, such as an encoder's output. The
pipeline runs a backward for each microbatch, but the caller's graph can be run only once. Therefore
the value is detached from its graph before it is cut into microbatches. The backwards of all
microbatches add to the gradient of one leaf, and this gradient goes into the graph at the end of
the step.

[Note: chunks of time] With ``chunks`` each microbatch is cut once more, along the dimension of
time, and each chunk counts as a microbatch: chunk c of microbatch m is number m * chunks + c. A
tensor that has as many dimensions is cut. All of them have the same length there, or `time_dim`
names them. A value without time, such as a number for each row, goes whole to every chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from pipegrad.errors import StepError
from pipegrad.pipeline.stage import BatchRules, Counts, fields_of
from pipegrad.pipeline.trees import check_kind, flattened, is_cut, leaves_of, name_in, number_of
from pipegrad.pipeline.wiring import OF_STEP, REST, Wiring
from pipegrad.plugins.registry import closest_first

_Values = dict[str, Any]  # by name
_Table = dict[str, tuple[list[int], int]]  # path -> sizes of pieces, and the dimension
_TimeDims = Mapping[str, int | None]  # by name or path; "" for those without one of their own


class Batch(NamedTuple):
    """The arguments of `Scheduler.step` and of `Scheduler.evaluate`.

    Attributes:
        chunks: The number of chunks of time, or their lengths; None for the Scheduler's own number.
        time_dim: The dimension of time; or a dimension by name, None if the input has no time.
        error: The reason why this rank cannot run the step; None if it can.
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
        """The number of microbatches of this step; None for the Scheduler's own number."""
        if isinstance(self.microbatches, tuple | list):
            return len(self.microbatches)
        return self.num_microbatches


@dataclass
class Given:
    """The microbatches of a step.

    Attributes:
        passed: All inputs of this rank, and the target, by name.
        inputs: The microbatches of each external input that this rank needs.
        targets: The microbatches of the target; None if there is none.
        rows: Samples of the batch; None if it was not cut.
        length: Its length in time, if that was cut into chunks alike for all rows; else None.
        sizes: The share of the batch in each microbatch, if that is known; else empty.
        cut: The tensors that are cut, by name and path.
        report: The treatment of each value, in words, by name and path.
    """

    passed: _Values = field(default_factory=dict)
    inputs: dict[str, list[Any]] = field(default_factory=dict)
    targets: list[Any] | None = None
    rows: int | None = None
    length: int | None = None
    sizes: Sequence[float] = ()
    cut: Collection[str] = ()
    report: dict[str, str] = field(default_factory=dict)


class Batches:
    """Turns the arguments of steps into microbatches.

    Attributes:
        outer: The values of the last batch that have a graph of the caller's.
    """

    def __init__(
        self,
        wiring: Wiring,
        stages: Collection[int],
        *,
        rules: BatchRules,
        has_loss: bool,
        whole: Collection[str],
        labels: Sequence[str] = (),
    ) -> None:
        # An input takes everything that no stage names: [Note: the rest].
        self._rest = next((name for name in wiring.external if name.startswith(REST)), None)
        self._external = [name for name in wiring.external if name != self._rest]
        self._labels = labels
        self._rules = rules
        # The names of inputs: those that may be given (None: any), in order, and for messages.
        self._accepts = self._external if self._rest is None else rules.accepts
        self._in_order = [*self._external, *((self._rest and rules.accepts) or ())]
        self._taken = self._external if self._rest is None else sorted(rules.accepts or ())
        needed = {s for i in stages for s in wiring.taken[i] if isinstance(s, str)}
        self._needed = sorted(needed - {self._rest})
        self._links = list(dict.fromkeys(link.name for link in wiring.links))
        self._has_last_stage = len(wiring.taken) - 1 in stages
        self._has_loss = has_loss
        self._whole = whole
        self.outer = OuterGraphs()

    def cut(self, batch: Batch, number: int, chunks: int = 1, *, needs_target: bool) -> Given:
        """Returns the microbatches of the inputs that this rank needs.

        Raises:
            StepError: If inputs are missing, given twice, unknown, or cannot be cut.
            BaseException: The error of the batch.
        """
        self.outer.forget()  # a failed step may have left something
        if batch.error is not None:
            raise batch.error
        given = Given()
        if batch.microbatches is None:
            parts = self._in_microbatches(given, batch, number, needs_target=needs_target)
        else:
            parts = self._ready(given, batch, needs_target=needs_target)
        if chunks > 1:
            parts = self._in_chunks(given, parts, batch, chunks)
        named = {*self._external, "target"}
        for values in parts:
            if self._rest is not None:
                others = [name for name in values if name not in named]
                values[self._rest] = {name: values.pop(name) for name in others}
            for name, value in values.items():
                given.inputs.setdefault(name, []).append(value)
        given.targets = given.inputs.pop("target", None)
        return given

    def numbers(self, given: Given) -> dict[str, int]:
        """Returns a number of each value; see [Note: what was passed].

        Sync: the host waits for the device.
        """
        # Each rank may compute a value with a graph on its own, with its own dropout.
        numbers = {
            name: number_of(value)
            for name, value in given.passed.items()
            if name in self._needed or not any(has_graph(leaf) for _, leaf in flattened(value)[0])
        }
        return {name: int(number) for name, number in numbers.items() if number is not None}

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
                f"itself, closest first: {closest_first(unknown[0], OF_STEP)}"
            )
        values = dict(zip(self._in_order, inputs, strict=False))
        for more in (named, fields, {} if target is None else {"target": target}):
            twice = [name for name in more if name in values]
            if twice:
                raise StepError(f"inputs {twice} are given twice, by position and by name")
            values |= more
        return values

    def _is_taken(self, name: str) -> bool:
        """Returns True if a stage takes an input of a name."""
        return self._accepts is None or name in self._accepts

    def _of_stages(self, fields: Mapping[str, object], target: object) -> _Values:
        """Returns the inputs that a mapping holds. What else it holds must be in the target."""
        others = [key for key in fields if key != "target" and not self._is_taken(key)]
        # The batches of Hugging Face's collators have the labels among the inputs.
        in_target = {id(target), *map(id, leaves_of({"": target}).values())}
        extra = [key for key in others if id(fields[key]) not in in_target]
        if extra:
            raise StepError(
                f"no stage takes {extra}; from outside they take {self._taken}. A mapping alone "
                f"gives inputs by name: leave out what no stage takes, or give it as target=; in a "
                f"ready microbatch it is 'target', whatever a loader calls it. A mapping that is "
                f"an input itself is given by name, as in step({[*self._taken, 'x'][0]}=...)"
            )
        return {name: value for name, value in fields.items() if name not in others}

    def _taken_here(self, passed: _Values, *, needs_target: bool) -> _Values:
        """Returns the inputs of this rank's stages, and the target if it has the last stage."""
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
        return self.outer.cut_off(values)

    def _target_of(self, passed: _Values) -> object:
        """Returns the target of a model that computes its own loss; None in an evaluation."""
        if passed.get("target") is not None:
            raise StepError(
                f"the model computes its own loss of {list(self._labels)}: give these and no "
                f"target=, or make the Scheduler with loss_fn="
            )
        labels = {name: passed[name] for name in self._labels if passed.get(name) is not None}
        return next(iter(labels.values())) if len(labels) == 1 else labels or None

    # Ready microbatches.

    def _ready(self, given: Given, batch: Batch, *, needs_target: bool) -> list[_Values]:
        """Returns microbatches that are given ready, as they are."""
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
        beside = {**batch.named, "target": batch.target, "rows_of": batch.rows_of}
        wrong = [n for n, x in beside.items() if n not in self._whole and x is not None]
        if batch.inputs or wrong:
            raise StepError(
                f"{wrong or 'inputs'} beside microbatches=: put into each microbatch what is for "
                f"it. What is for all of them may stand beside, if whole= of the Scheduler names it"
            )
        parts, every = list[_Values](), list[_Values]()
        for number, one in enumerate(ready):
            try:
                inputs = () if one is None else (one,)
                every.append(self._by_name(inputs, batch.named, batch.target))
                parts.append(self._taken_here(every[-1], needs_target=needs_target))
                if parts[-1].keys() != parts[0].keys():
                    raise StepError("all microbatches have the same inputs, and a target or none")
            except StepError as error:
                raise StepError(f"microbatch {number}: {error}") from None
        names = dict.fromkeys(name for passed in every for name in passed)
        given.passed = {name: [passed.get(name) for passed in every] for name in names}
        given.report = dict.fromkeys(parts[0], f"as given in each of {len(parts)} microbatches")
        return parts

    # Rows.

    def _in_microbatches(
        self, given: Given, batch: Batch, number: int, *, needs_target: bool
    ) -> list[_Values]:
        """Returns the inputs of this rank's stages, cut along their rows."""
        given.passed = self._by_name(batch.inputs, batch.named, batch.target)
        values = self._taken_here(given.passed, needs_target=needs_target)
        known, asked = self._rules.rows_of(values), batch.rows_of
        counts = self._counts(known, asked) if known or asked is not None else {}
        if batch.rows_of is not None:
            given.passed["rows_of"] = {path: torch.tensor(counts[path]) for path in batch.rows_of}
        along = self._rules.samples_along(values)
        whole = [name for name in values if name in self._whole or along.get(name, 0) is None]
        leaves = leaves_of({name: x for name, x in values.items() if name not in whole})
        for path, leaf in leaves.items():
            check_kind(path, leaf)
        table = self._by_rows(
            given, {p: x for p, x in leaves.items() if is_cut(x)}, along, counts, number
        )
        given.report = {
            path: f"{sum(table[path][0])} rows, cut into {number} microbatches of "
            f"{_in_words(table[path][0])}"
            if path in table
            else "whole in every microbatch"
            for path in [*leaves, *whole]
        }
        given.cut = table.keys()
        if not given.sizes:  # a loss of its stages counts by the rows of a microbatch, too
            passed = leaves_of({n: x for n, x in given.passed.items() if n not in self._whole})
            lengths = {len(leaf) for leaf in passed.values() if is_cut(leaf)}
            if len(lengths) == 1 and min(lengths) >= number:
                given.sizes = _even(min(lengths), number)
        return _split(values, table, number)

    def _by_rows(
        self,
        given: Given,
        tensors: Mapping[str, Tensor],
        along: Mapping[str, int | None],
        counts: Mapping[str, Sequence[int]],
        number: int,
    ) -> _Table:
        """Returns the table by which tensors are cut into microbatches."""
        dims = {path: along.get(path) or 0 for path in tensors}
        lengths = {path: x.shape[dims[path]] for path, x in tensors.items()}
        counts = {path: numbers for path, numbers in counts.items() if path in tensors}
        rows = {path: length for path, length in lengths.items() if path not in counts}
        if self._rest is not None and max(rows.values(), default=1) > 1:
            # If other tensors have many rows, one of a single row belongs to no sample: it is a
            # mask, or positions, for all of them.
            rows = {path: length for path, length in rows.items() if length > 1}
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
        sizes = list[int]()
        if samples:
            given.rows = next(iter(samples.values()))
            given.sizes = sizes = _even(given.rows, number)
        table: _Table = {path: (sizes, dims[path]) for path in rows}
        for path, numbers in counts.items():
            table[path] = _at_borders(path, numbers, lengths[path], sizes), 0
        return table

    def _counts(self, known: Mapping[str, Counts], rows_of: object) -> dict[str, list[int]]:
        """Returns the number of rows of each sample, by tensor, where rows are no samples.

        The numbers of the caller override those of the model.
        """
        if not isinstance(rows_of, Mapping | None):
            raise StepError(
                f"rows_of is a {type(rows_of).__name__}, expected a mapping from names of inputs "
                f"to how many rows each sample has, such as {{'pixel_values': [1, 0, 2, 1]}}"
            )
        for path in rows_of or ():
            name = name_in(str(path))
            if name in self._whole or not (name == "target" or self._is_taken(name)):
                raise StepError(
                    f"rows_of has {path!r}, which is whole in every microbatch"
                    if name in self._whole
                    else f"rows_of has {path!r}, which no stage takes; from outside they take "
                    f"{self._taken}"
                )
        counts = dict[str, list[int]]()
        for path, given in {**known, **(rows_of or {})}.items():
            numbers = given.tolist() if isinstance(given, Tensor) else given
            is_list = isinstance(numbers, tuple | list)
            if not is_list or not all(type(n) is int and n >= 0 for n in numbers):
                raise StepError(
                    f"rows_of[{path!r}] is {given!r:.80}, expected an integer from 0 for each "
                    f"sample: how many rows of the tensor it has"
                )
            counts[path] = list(numbers)
        return counts

    # Chunks of time.

    def _in_chunks(
        self, given: Given, parts: list[_Values], batch: Batch, chunks: int
    ) -> list[_Values]:
        """Returns the chunks of microbatches; see [Note: chunks of time]."""
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
        asked = list(map(int, batch.chunks)) if isinstance(batch.chunks, tuple | list) else None
        pieces, sizes, totals = list[_Values](), list[float](), set[int]()
        for part, rows in zip(parts, given.sizes or [1] * len(parts), strict=True):
            values, dims = self._rules.in_time(part)
            dims = {"": 1, **dict.fromkeys(self._whole), **dims, **own}
            table = _by_time(values, dims, asked, chunks)
            lengths, _ = next(iter(table.values()), (asked or [0] * chunks, 0))
            if "target" in values and not any(name_in(path) == "target" for path in table):
                raise StepError(
                    "the target has no dimension of time, and each chunk has a loss of its own: "
                    "give a target for each position, ignored where there is none, or chunks=1"
                )
            for path in table if not pieces else ():
                words = given.report.get(path, given.report.get(name_in(path)))
                given.report[path] = f"{words}, each cut into chunks of {_in_words(lengths)}"
            totals.add(sum(lengths))
            sizes += [rows * length / (sum(lengths) or 1) for length in lengths]
            pieces += _split(values, table, chunks)
        given.sizes = sizes
        given.length = totals.pop() if len(totals) == 1 else None
        return pieces


def _at_borders(path: str, numbers: Sequence[int], length: int, sizes: Sequence[int]) -> list[int]:
    """Returns the sizes of pieces of a tensor that has some rows of each sample."""
    if sum(numbers) != length:
        raise StepError(
            f"rows_of[{path!r}] adds up to {sum(numbers)}, and the tensor has {length} rows"
        )
    if len(numbers) != sum(sizes):
        raise StepError(
            f"rows_of[{path!r}] has {len(numbers)} numbers, and the batch has {sum(sizes)} "
            f"samples: give a number for each, 0 for one that has no rows"
        )
    left = iter(numbers)
    return [sum(islice(left, size)) for size in sizes]


def _by_time(
    values: Mapping[str, object], dims: _TimeDims, asked: list[int] | None, chunks: int
) -> _Table:
    """Returns the table by which tensors of a microbatch are cut into chunks of time.

    Raises:
        StepError: If tensors differ, or cannot be cut like that.
    """
    found = dict[str, tuple[int, int]]()  # the length, and the dimension
    for path, leaf in leaves_of(values).items():
        dim = dims.get(path, dims.get(name_in(path), dims[""]))
        if isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim:
            found[path] = leaf.shape[dim], dim
    lengths = {path: length for path, (length, _) in found.items()}
    length = next(iter(lengths.values()), 0)
    if len(set(lengths.values())) > 1 or (found and length < chunks):
        raise StepError(
            f"tensors of lengths {lengths} cannot be cut into {chunks} chunks of time that "
            f"belong together: give all the same length, at least {chunks}; or name what has no "
            f"time, or has it elsewhere, as in time_dim={{{next(iter(found))!r}: None}}"
        )
    if asked is not None and found and sum(asked) != length:
        raise StepError(f"chunks {asked} add up to {sum(asked)}, and tensors are {length} long")
    return {path: (asked or _even(length, chunks), dim) for path, (_, dim) in found.items()}


def _even(length: int, number: int) -> list[int]:
    """Returns the sizes of pieces that are as even as can be."""
    least, more = divmod(length, number)
    return [least + (i < more) for i in range(number)]


def _in_words(sizes: Sequence[int]) -> str:
    few, many = min(sizes), max(sizes)
    return f"{few}" if few == many else f"{few} to {many}"


def _split(values: Mapping[str, Any], table: _Table, number: int) -> list[_Values]:
    """Returns the values of each piece: tensors in the table are cut, all others are whole."""
    pieces: list[_Values] = [{} for _ in range(number)]
    for name, value in values.items():
        leaves, rebuilt = flattened(value)
        rows: list[object] = [value] * number
        if any(f"{name}{path}" in table for path, _ in leaves):
            # One node of a graph for all pieces, whose backward joins their gradients.
            columns: list[Any] = [
                leaf.split(*table[f"{name}{path}"])
                if f"{name}{path}" in table and isinstance(leaf, Tensor)
                else [leaf] * number
                for path, leaf in leaves
            ]
            rows = [rebuilt(list(row)) for row in zip(*columns, strict=True)]
        for piece, row in zip(pieces, rows, strict=True):
            piece[name] = row
    return pieces


# Outputs of a step.


def joined(
    outputs: Sequence[tuple[Tensor, ...]], chunks: int = 1, time_dim: int = 1
) -> tuple[Any, ...]:
    """Returns outputs of all microbatches, each in one tensor, or in a tuple with one for each.

    An output is a tuple if its microbatches differ beyond the first dimension. Outputs of the
    chunks of a sequence are joined along the dimension of time, or along a new last one.
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

    A value that was not cut is taken from the first one. Trees that differ in structure stay a
    tuple.
    """
    trees = [flattened(part) for part in parts]
    if len({tuple(path for path, _ in leaves) for leaves, _ in trees}) > 1:
        return tuple(parts)
    columns = list[object]()
    for values in zip(*([leaf for _, leaf in leaves] for leaves, _ in trees), strict=True):
        is_whole = all(value is values[0] for value in values)
        is_tensor = all(isinstance(value, Tensor) for value in values)
        columns.append(_joined(values) if is_tensor and not is_whole else values[0])
    return trees[0][1](columns)


def _joined(parts: tuple[Any, ...], dim: int = 0) -> Any:  # noqa: ANN401 - a tensor, or parts
    if any(isinstance(part, tuple) for part in parts):
        return parts
    if len({(x.dim(), x.shape[:dim], x.shape[dim + 1 :], x.dtype) for x in parts}) > 1:
        return parts
    return torch.cat(parts, dim) if parts[0].dim() > dim else torch.stack(parts, -1)


# Graphs of the caller's.


def has_graph(leaf: object) -> TypeGuard[Tensor]:
    """Returns True if a leaf is a tensor that is to get a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()


class OuterGraphs:
    """The values of a step that were detached from their graphs; see [Note: outer graphs].

    Attributes:
        leaves: The leaves that stages read instead; the same list in all steps.
    """

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self._cut_off: dict[int, tuple[Tensor, Tensor]] = {}  # by id; and the leaf of each

    def cut_off(self, values: _Values) -> _Values:
        """Returns values with leaves instead of tensors with a graph."""
        for name, value in values.items():
            leaves, rebuilt = flattened(value)
            if any(has_graph(leaf) for _, leaf in leaves):
                values[name] = rebuilt([self._leaf_of(leaf) for _, leaf in leaves])
        return values

    def _leaf_of(self, value: object) -> object:
        if not has_graph(value):
            return value
        if id(value) not in self._cut_off:
            self.leaves.append(value.detach().requires_grad_())
            self._cut_off[id(value)] = value, self.leaves[-1]
        return self._cut_off[id(value)][1]

    def backward(self, divisor: Tensor | float) -> None:
        """Runs one backward through the graphs of the values.

        Sync: on the current stream.
        """
        # A divisor on the device is float64, and would turn a gradient without dimensions into one.
        reached = [
            (x, (leaf.grad / divisor).to(leaf.grad.dtype))
            for x, leaf in self._cut_off.values()
            if leaf.grad is not None
        ]
        self.forget()
        if reached:
            torch.autograd.backward([x for x, _ in reached], [gradient for _, gradient in reached])

    def forget(self) -> None:
        """Drops all references of a step."""
        self.leaves.clear()
        self._cut_off.clear()
