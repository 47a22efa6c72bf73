"""Dataset: the batches that a user's function returns, one for each step.

[Note: batches of a function] The rank of the first stage needs the inputs of a batch, and the rank
of the last stage its targets. Each of them calls the function and takes every batch itself, so
nothing is sent. Both must get the same batches. So all generators of random numbers have a seed of
their own in the function's code: when an epoch begins it depends on ``train.seed`` and the epoch,
and for each later batch also on the data rank and the number of the batch. The training draws the
same numbers as without a function. Ranks compare a digest of every batch before its step (`Feed`).

A run that goes on from a checkpoint takes all batches of the steps before it, and drops them. Their
seeds are the same again, so the batch of a step does not depend on where the run began.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipegrad.errors import PipegradError, in_words
from pipegrad.train.config import Config
from pipegrad.train.data.corpus import mixed
from pipegrad.train.data.pairs import INPUT_IDS, Pair, described, named_pair_of, pair_of
from pipegrad.train.functions import parameters_of, with_options

MakeBatches = Callable[..., Any]

_RANKS = ("data_rank", "num_data_ranks")
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
    # The file may give a seed or an epoch of its own, but not a data rank.
    known = {*_RANKS, *({"epoch", "seed"} - choice.options.keys())}
    function = with_options(config, key, choice, known.intersection)
    if num_shares > 1 and "data_rank" not in parameters_of(function):
        config.refuse(
            key,
            f"the function has no parameter data_rank, so all {num_shares} data ranks would get "
            f"the same batches: give it the parameters data_rank and num_data_ranks, and return "
            f"the batches of that rank",
        )
    return function


def check_data(config: Config) -> None:
    """Refuses keys of ``[data]`` and ``[eval]`` that have no effect, or contradict each other.

    Raises:
        ConfigError: For the first of them.
    """
    data, held_out = config.data, config.eval
    if data.dataset is not None:
        for name in sorted(data.model_fields_set - {"dataset"}):
            example = f"dataset = {{name = {data.dataset.name!r}, {name} = ...}}"
            config.refuse(
                f"data.{name}",
                f"has no effect beside data.dataset: if its function has such an argument, write "
                f"{example}",
            )
        for name in sorted(held_out.model_fields_set & {"files", "sample_every"}):
            config.refuse(f"eval.{name}", "needs text, and data.dataset gives batches")
    measured = sorted(held_out.model_fields_set & {"files", "dataset"})
    if len(measured) == 2:
        config.refuse("eval.dataset", "eval.files are set too: choose one of them")
    if held_out.every is not None and not measured:
        config.refuse("eval.every", "there is nothing to measure: set eval.files or eval.dataset")
    for name in measured:
        if held_out.every is None:
            config.refuse(f"eval.{name}", "nothing measures it: set eval.every, in steps")


class Batches:
    """The batches of a function for one data rank, epoch after epoch.

    Args:
        config: The configuration.
        key: Where it names the function, for messages.
        function: As `dataset_of` returns it.
        data_rank: Which data rank's batches these are.
        num_data_ranks: How many data ranks there are.
        repeat: Whether the next epoch follows when the function has no more batches.

    Attributes:
        elements_seen: Elements of the targets of all batches so far.
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
        known = {"data_rank": data_rank, "num_data_ranks": num_data_ranks}
        self._takes = set(parameters_of(function))
        self._ranks = {name: n for name, n in known.items() if name in self._takes}
        self._data_rank, self._repeat = data_rank, repeat
        self._first: tuple[torch.dtype, torch.dtype] | None = None
        self._restart()

    def batch(self, number: int) -> Pair | None:
        """Returns inputs and targets of a batch, from 1; None if there are no more.

        Batches are taken in order. A smaller number than the last one starts again. Without
        `repeat` the batches end before one that has fewer rows than there are microbatches.

        Raises:
            ConfigError: If the function fails, or what it returns is no batch.
        """
        if number <= self._position:
            self._restart()
        taken: Pair | None = None
        while self._position < number:
            taken = self._take()
            if taken is None:
                break
            self.elements_seen += taken[1].numel()
        return taken

    def _restart(self) -> None:
        self._position, self._epoch, self.elements_seen = 0, 0, 0
        self._iterable: Any = None
        self._iterator: Iterator[Any] = iter(())

    def _take(self) -> Pair | None:
        """Returns the next batch; None if there are no more."""
        number = self._position + 1
        seed = mixed(self._config.train.seed, number, self._data_rank)
        found = self._call(number, seed, lambda: next(self._iterator, _END))
        if found is _END and (self._repeat or not self._epoch):
            self._epoch += 1
            seed = mixed(self._config.train.seed, self._epoch)
            found = self._call(number, seed, self._first_of_epoch)
            if found is _END and self._repeat:
                after = f" after {self._position} batches" if self._position else ""
                self._config.refuse(
                    self._key,
                    f"the function has no batch in epoch {self._epoch}{after}: return an iterable "
                    f"that begins anew each time it is called, with a batch or more",
                )
        if found is _END:
            return None
        pair = self._pair(number, found)
        if pair is not None:
            self._position = number
        return pair

    def _first_of_epoch(self) -> object:
        """Begins an epoch; returns its first batch."""
        # An iterator can be used only once. So can the batches of one epoch.
        if self._iterable is None or self._iterator is self._iterable or "epoch" in self._takes:
            known = {"epoch": self._epoch, "seed": self._config.train.seed}
            known = {
                name: value
                for name, value in known.items()
                if name in self._takes and name not in getattr(self._function, "keywords", {})
            }
            self._iterable = self._function(**self._ranks, **known)
        self._iterator = iter(self._iterable)
        return next(self._iterator, _END)

    def _call(self, number: int, seed: int, function: Callable[[], object]) -> object:
        """Returns what code of the user returns, with seeds of its own."""
        try:
            with _seeded(seed):
                return function()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user
            words = str(error) if isinstance(error, PipegradError) else in_words(error)
            self._config.refuse(
                self._key, f"the function fails at batch {number}: {words}", cause=error
            )

    def _pair(self, number: int, found: object) -> Pair | None:
        """Returns a batch as inputs and targets; refuses one that cannot be trained on.

        None if it has too few rows, and others were measured before: then the measurement ends.
        """
        try:
            pair = (named_pair_of if self._config.model.is_transformers else pair_of)(found)
        except (TypeError, ValueError) as error:
            self._config.refuse(self._key, f"batch {number}: {error}", cause=error)
        inputs = pair[0] if isinstance(pair[0], Tensor) else pair[0][INPUT_IDS]
        target = pair[1]
        rows, microbatches = len(inputs), self._config.parallel.microbatches
        if rows < microbatches and self._position and not self._repeat:
            return None
        if rows < microbatches:
            self._config.refuse(
                self._key,
                f"batch {number} has {rows} rows (inputs {described(inputs)}), fewer than "
                f"parallel.microbatches = {microbatches}: return batches, not single examples, and "
                f"leave out a smaller batch at the end, as a DataLoader does with drop_last=True",
            )
        if self._first is None:
            self._first = inputs.dtype, target.dtype
        for what, tensor, dtype in zip(
            ("inputs", "targets"), (inputs, target), self._first, strict=True
        ):
            if tensor.dtype != dtype:
                self._config.refuse(
                    self._key,
                    f"the {what} of batch {number} are {described(tensor)}, and those of the "
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
