"""Dataset: the batches that a user's function returns, one for each step.

[Note: batches of a function] The rank of the first stage needs the inputs of a batch, and the rank
of the last stage its targets. Each of them calls the function and takes every batch itself, so
nothing is sent. Both must get the same batches. So all generators of random numbers get a seed
when the function's code runs: when an epoch begins it depends on ``train.seed`` and the epoch,
and for each later batch also on the data rank and the number of the batch. The training draws the
same numbers as without a function. Ranks compare a digest of every batch before its step (`Feed`).

A run that goes on from a checkpoint takes all batches of the steps before it, and drops them. Their
seeds are the same again, so the batch of a step does not depend on where the run began. The state
of a stream, which `datasets` could save, lacks what waits to be shuffled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipegrad.errors import ConfigError, PipegradError, in_words
from pipegrad.train.config import Config
from pipegrad.train.corpus import mixed
from pipegrad.train.functions import parameters_of, with_options

MakeBatches = Callable[..., Any]
Inputs = Tensor | Mapping[str, Tensor]  # of a model of transformers by name
Pair = tuple[Inputs, Tensor]

INPUT_IDS = "input_ids"
_IGNORED = -100  # a target that the loss leaves out
_LABELS = "labels"
_TARGETS = ("target", "targets", _LABELS)
# Integers that torch takes neither as indices nor as classes.
_SMALL = (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32)
_END = object()


def dataset_of(config: Config, key: str, num_shares: int) -> MakeBatches | None:
    """Returns the function ``data.dataset`` or ``eval.dataset``, with its keyword arguments.

    Raises:
        ConfigError: If it cannot be imported, does not take these arguments, or does not take
            `data_rank` although data ranks need different batches.
    """
    choice = (config.data if key == "data.dataset" else config.eval).dataset
    if choice is None:
        return None
    # The file may give a seed or an epoch, but not a data rank.
    known = {"data_rank", "num_data_ranks", *({"epoch", "seed"} - choice.options.keys())}
    function = with_options(config, key, choice, known.intersection)
    if num_shares > 1 and "data_rank" not in parameters_of(function):
        config.refuse(
            key,
            f"the function has no parameter data_rank, so all {num_shares} data ranks would get "
            f"the same batches: give it the parameters data_rank and num_data_ranks, and return "
            f"the batches of that rank",
        )
    return function


class Batches:
    """The batches of a function for one data rank, epoch after epoch.

    Args:
        config: The configuration.
        key: Where it names the function, for messages.
        function: As `dataset_of` returns it.
        data_rank: Which data rank's batches these are.
        num_data_ranks: How many data ranks there are.
        repeat: Whether the next epoch follows when the function has no more batches.
    """

    def __init__(
        self,
        config: Config,
        key: str,
        function: MakeBatches,
        *,
        data_rank: int,
        num_data_ranks: int,
        repeat: bool,
    ) -> None:
        self._config, self._key, self._function = config, key, function
        self._known = {"data_rank": data_rank, "num_data_ranks": num_data_ranks}
        self._repeat = repeat
        self._position = self._elements = 0
        self._pairs = self._epochs()

    def batch(self, number: int) -> tuple[Pair, int] | None:
        """Returns a batch, from 1, and the elements of all targets so far; None at the end.

        Batches are taken in order. A smaller number than the last one starts again. Without
        `repeat` the batches end before one that has fewer rows than there are microbatches.

        Raises:
            ConfigError: If the function fails, or what it returns is no batch.
        """
        if number <= self._position:
            self._position = self._elements = 0
            self._pairs = self._epochs()
        for pair in self._pairs:
            self._position += 1
            self._elements += pair[1].numel()
            if self._position == number:
                return pair, self._elements
        return None

    def _epochs(self) -> Iterator[Pair]:
        """Yields the batches of all epochs."""
        seed, number, dtypes = self._config.train.seed, 1, list[torch.dtype]()
        takes, bound = parameters_of(self._function), getattr(self._function, "keywords", {})
        iterable: Any = None
        iterator: Iterator[Any] = iter(())
        for epoch in count(1):

            def begin(epoch: int = epoch) -> object:
                nonlocal iterable, iterator
                # An iterator can be used only once. So can the batches of one epoch.
                if iterable is None or iterator is iterable or "epoch" in takes:
                    known = self._known | {"epoch": epoch, "seed": seed}
                    passed = {n: x for n, x in known.items() if n in takes and n not in bound}
                    iterable = self._function(**passed)
                iterator = iter(iterable)
                return next(iterator, _END)

            batch = self._call(number, mixed(seed, epoch), begin)
            if batch is _END and self._repeat:
                after = f" after {number - 1} batches" if number > 1 else ""
                self._config.refuse(
                    self._key,
                    f"the function has no batch in epoch {epoch}{after}: return an iterable "
                    f"that begins anew each time it is called, with a batch or more",
                )
            while batch is not _END:
                pair = self._pair(number, batch, dtypes)
                if pair is None:
                    return
                yield pair
                number += 1
                here = mixed(seed, number, self._known["data_rank"])
                batch = self._call(number, here, lambda: next(iterator, _END))
            if not self._repeat:
                return

    def _call(self, number: int, seed: int, function: Callable[[], object]) -> object:
        """Returns what code of the user returns, with seeds."""
        try:
            with _seeded(seed):
                return function()
        except ConfigError:  # of a stream of files
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user
            words = str(error) if isinstance(error, PipegradError) else in_words(error)
            self._config.refuse(
                self._key, f"the function fails at batch {number}: {words}", cause=error
            )

    def _pair(self, number: int, batch: object, dtypes: list[torch.dtype]) -> Pair | None:
        """Returns a batch as inputs and targets; refuses one that cannot be trained on.

        None if it has too few rows, and others were measured before: then the measurement ends.
        """
        try:
            pair = pair_of(batch, is_named=self._config.model.is_transformers)
        except (TypeError, ValueError) as error:
            self._config.refuse(self._key, f"batch {number}: {error}", cause=error)
        inputs = pair[0] if isinstance(pair[0], Tensor) else pair[0][INPUT_IDS]
        rows, microbatches = len(inputs), self._config.parallel.microbatches
        if rows < microbatches:
            if number > 1 and not self._repeat:
                return None
            self._config.refuse(
                self._key,
                f"batch {number} has {rows} rows (inputs {_described(inputs)}), fewer than "
                f"parallel.microbatches = {microbatches}: return batches, not single examples, and "
                f"leave out a smaller batch at the end, as a DataLoader does with drop_last=True",
            )
        dtypes += [] if dtypes else [inputs.dtype, pair[1].dtype]
        for what, tensor, dtype in zip(
            ("inputs", "targets"), (inputs, pair[1]), dtypes, strict=True
        ):
            if tensor.dtype != dtype:
                self._config.refuse(
                    self._key,
                    f"the {what} of batch {number} are {_described(tensor)}, and those of the "
                    f"first batch are of {str(dtype).removeprefix('torch.')}: all must be of one "
                    f"dtype",
                )
        return pair


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Gives the generators of random numbers on the CPU a seed, and then their states back."""
    before, before_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(before_numpy)


def pair_of(batch: object, *, is_named: bool = False) -> Pair:
    """Returns inputs and targets of a batch, as a function may return it.

    Args:
        batch: Tokens ``(rows, length)``, whose targets are their successors; or a pair of inputs
            and targets; or a table of two, whose targets are called ``labels`` or ``target``.
            Values may be tensors, arrays or lists.
        is_named: Whether a model of transformers takes the inputs. A table may then have more
            names, and labels are shifted as the model does: a label is the target of the token
            before it. A ``target`` is not shifted. Without both the tokens are the labels, but for
            those whose ``attention_mask`` is 0.

    Raises:
        TypeError: If it is anything else.
        ValueError: If numbers of rows or dimensions do not fit.
    """
    table = _table(batch)
    targets = [name for name in table if name in _TARGETS]
    if is_named and len(table) > 1:
        if INPUT_IDS not in table or len(targets) > 1:
            raise TypeError(
                f"it has the names {[*table]}: expected input_ids, and labels or target"
            )
    elif not table or len(table) > 2 or (len(table) == 2 and len(targets) != 1):
        raise TypeError(
            f"it has the names {[*table]}: expected one, of tokens, or two, of which one is of "
            f"{[*_TARGETS]}: the first layer takes one tensor, so leave out the others"
        )
    named = {name: _tensor(value) for name, value in table.items()}
    if len(named) == 1:
        [tokens] = named.values()
        if tokens.is_floating_point() or tokens.dim() != 2 or tokens.shape[1] < 2:
            raise ValueError(
                f"it has one tensor, {_described(tokens)}: expected tokens (rows, 2 or more), "
                f"whose targets are their successors, or inputs and targets"
            )
        inputs, target = tokens[:, :-1].long().contiguous(), tokens[:, 1:].long().contiguous()
        return {INPUT_IDS: inputs} if is_named else inputs, target
    if is_named:
        return _shifted(named, targets)
    target = named.pop(targets[0])
    [inputs] = named.values()
    if not inputs.dim() or not target.dim() or len(inputs) != len(target):
        raise ValueError(
            f"inputs are {_described(inputs)} and targets {_described(target)}: expected as many "
            f"rows of both"
        )
    if inputs.dtype in _SMALL:
        inputs = inputs.long()
    return inputs, target.long() if target.dtype in (*_SMALL, torch.uint8) else target


def _shifted(named: dict[str, Tensor], targets: list[str]) -> Pair:
    """Returns inputs by name, and targets, which are shifted unless they are called so."""
    tokens = named[INPUT_IDS] = named[INPUT_IDS].long()
    if targets:
        target = named.pop(targets[0]).long()
    else:
        mask = named.get("attention_mask", torch.ones_like(tokens))
        target = tokens.where(mask != 0, _IGNORED) if mask.shape == tokens.shape else tokens
    if tokens.dim() != 2 or target.shape != tokens.shape:
        raise ValueError(
            f"input_ids are {_described(tokens)} and {(targets or ['tokens'])[0]} "
            f"{_described(target)}: expected (rows, length) of both"
        )
    if not targets or targets[0] == _LABELS:
        target = functional.pad(target[:, 1:], (0, 1), value=_IGNORED)
    return named, target


def _table(batch: object) -> dict[str, object]:
    """Returns the tensors of a batch by name."""
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        if not batch or not all(isinstance(value, Tensor | np.ndarray) for value in batch):
            return {INPUT_IDS: batch}  # tokens as lists
        if len(batch) > 2:
            raise TypeError(
                f"it has {len(batch)} tensors: expected tokens, or inputs and targets: the first "
                f"layer takes one tensor"
            )
        return dict(zip((INPUT_IDS, "target"), batch, strict=False))
    if isinstance(batch, Tensor | np.ndarray):
        return {INPUT_IDS: batch}
    raise TypeError(
        f"it is {'None' if batch is None else type(batch).__name__}: expected a tensor of tokens, "
        f"a pair of inputs and targets, or a table of these"
    )


def _tensor(value: object) -> Tensor:
    """Returns a tensor, array or list as a tensor."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        value = np.array(value)  # torch cannot share memory that is read-only or runs backwards
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        raise TypeError(
            f"a list of {len(value)} tensors in it: expected one tensor; a DataLoader makes such "
            f"lists of examples that are lists: make tensors of them first"
        )
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise TypeError(f"a {kind} in it is no tensor: {error}: rows need one length") from error


def _described(tensor: Tensor) -> str:
    """Returns dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
