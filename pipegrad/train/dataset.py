"""Dataset: the batches that a user's function returns, one for each step.

[Note: batches of a function] Each rank calls the function and takes every batch itself, so nothing
is sent. The ranks of a pipeline must get the same batches. So all generators of random numbers get
a seed when the function's code runs: when an epoch begins it depends on ``train.seed`` and the
epoch, and for each later batch also on the data rank and the number of the batch. The training
draws the same numbers as without a function. Ranks compare a digest of every batch before its step
(`Feed`).

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
from torch.utils.data import default_convert

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
        seed, data_rank = self._config.train.seed, self._known["data_rank"]
        returned, epoch, number, is_first = self._returned(), 1, 1, True
        while True:
            numbers = (seed, epoch) if is_first else (seed, number, data_rank)
            batch = self._seeded(mixed(*numbers), number, returned)
            if batch is not _END:
                pair = self._pair(number, batch)
                if pair is None:
                    return
                yield pair
                number, is_first = number + 1, False
                continue
            if not self._repeat:
                return
            if is_first:
                after = f" after {number - 1} batches" if number > 1 else ""
                self._config.refuse(
                    self._key,
                    f"the function has no batch in epoch {epoch}{after}: return an iterable "
                    f"that begins anew each time it is called, with a batch or more",
                )
            epoch, is_first = epoch + 1, True

    def _returned(self) -> Iterator[object]:
        """Yields what the function's batches are, with `_END` behind each epoch."""
        takes, bound = parameters_of(self._function), getattr(self._function, "keywords", {})
        iterable: Any = None
        iterator: Any = None
        for epoch in count(1):
            # An iterator can be used only once. So can the batches of one epoch.
            if iterator is iterable or "epoch" in takes:
                known = {**self._known, "epoch": epoch, "seed": self._config.train.seed}
                passed = {n: x for n, x in known.items() if n in takes and n not in bound}
                iterable = self._function(**passed)
            iterator = iter(iterable)
            yield from iterator
            yield _END

    def _seeded(self, seed: int, number: int, returned: Iterator[object]) -> object:
        """Returns what code of the user returns next, with seeds."""
        try:
            with _seeded(seed):
                return next(returned)
        except ConfigError:  # of a stream of files
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user
            words = str(error) if isinstance(error, PipegradError) else in_words(error)
            self._config.refuse(
                self._key, f"the function fails at batch {number}: {words}", cause=error
            )

    def _pair(self, number: int, batch: object) -> Pair | None:
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
            Values may be tensors or arrays.
        is_named: Whether a model of transformers takes the inputs. A table may then have more
            names, and labels are shifted as the model does: a label is the target of the token
            before it. A ``target`` is not shifted. Without both the tokens are the labels, but for
            those whose ``attention_mask`` is 0.

    Raises:
        TypeError: If it is anything else.
        ValueError: If numbers of rows or dimensions do not fit.
    """
    given: Any = default_convert(batch)
    if isinstance(given, Tensor):
        given = [given]
    if isinstance(given, Sequence) and 1 <= len(given) <= 2:
        given = dict(zip((INPUT_IDS, "target"), given, strict=False))
    if not isinstance(given, Mapping) or not all(isinstance(x, Tensor) for x in given.values()):
        raise TypeError(
            f"it is {type(batch).__name__}: expected a tensor of tokens, a pair of inputs and "
            f"targets, or a table of these, as tensors"
        )
    named = {str(name): tensor.detach() for name, tensor in given.items()}
    targets = [name for name in named if name in _TARGETS]
    if is_named and len(named) > 1:
        return _shifted(named, targets)
    if len(named) == 1:
        [tokens] = named.values()
        if tokens.is_floating_point() or tokens.dim() != 2 or tokens.shape[1] < 2:
            raise ValueError(
                f"it has one tensor, {_described(tokens)}: expected tokens (rows, 2 or more), "
                f"whose targets are their successors, or inputs and targets"
            )
        inputs, target = tokens[:, :-1].long().contiguous(), tokens[:, 1:].long().contiguous()
        return {INPUT_IDS: inputs} if is_named else inputs, target
    if len(named) != 2 or len(targets) != 1:
        raise TypeError(
            f"it has the names {[*named]}: expected one, of tokens, or two, of which one is of "
            f"{[*_TARGETS]}: the first layer takes one tensor, so leave out the others"
        )
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
    if INPUT_IDS not in named or len(targets) > 1:
        raise TypeError(f"it has the names {[*named]}: expected input_ids, and labels or target")
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


def _described(tensor: Tensor) -> str:
    """Returns dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
