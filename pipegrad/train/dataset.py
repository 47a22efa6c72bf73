"""Dataset: the batches of a rank, one for each step, and those that a user's function returns.

[Note: a batch ahead] Each batch is fetched while the step before it still computes, because a rank
without a batch must not leave the others alone in a step. The ranks exchange whether they have it
together with the metrics of that step, in one message. Then all of them begin the next step, or all
raise the same error. The Scheduler compares the batches themselves.

[Note: batches of a function] Each rank calls the function and takes every batch itself: nothing is
sent. All generators of random numbers get a seed before the function's code runs, because the ranks
of a pipeline must get the same batches. When an epoch begins, the seed depends on ``train.seed``
and the epoch. For each later batch it depends on ``train.seed``, the number of the batch and the
data rank. Each step of the training sets another seed. The Scheduler compares the batches of the
ranks.

A run that goes on from a checkpoint takes all batches of the steps before it, and drops them. The
batch of a step does not depend on the first step of the run, because its seed is the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import default_convert

from pipegrad.comm.agreement import agree, agree_keeping, same
from pipegrad.errors import PipegradError, StepError, in_words
from pipegrad.topology import Topology
from pipegrad.train.config import Config, parameters_of, with_options
from pipegrad.train.corpus import (
    Corpus,
    Tokenizer,
    mixed,
    read_corpus,
    seed_all,
    tokenizer_file,
    tokenizer_of,
)

if TYPE_CHECKING:
    from pipegrad.train.job import Job

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
_READ_SECONDS = 4 * 3600.0  # timeout for the slowest machine to make tokens of its text
_SLOW_SECONDS = 3600.0  # timeout for the slowest rank to come to its first batch
_READY, _ENDED, _FAILED = range(3)
Source = Callable[[int], tuple[Pair, int] | None]


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
    """The batches of a function for one data rank, epoch after epoch."""

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
            ConfigError: If the function fails, or returns something other than batches.
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
        """Yields the batches of all epochs; see [Note: batches of a function]."""
        seed, takes = self._config.train.seed, parameters_of(self._function)
        bound = getattr(self._function, "keywords", {})
        iterable: Any = None
        iterator: Any = None
        number = 1
        for epoch in count(1) if self._repeat else [1]:
            first = number
            seed_all(mixed(seed, epoch))
            with self._config.refusing(self._key, f"the function fails at batch {number}: "):
                # Call the function again if it returned an iterator, because an iterator can be
                # used only once, and if its batches depend on the epoch.
                if iterator is iterable or "epoch" in takes:
                    known = {**self._known, "epoch": epoch, "seed": seed}
                    passed = {n: x for n, x in known.items() if n in takes and n not in bound}
                    iterable = self._function(**passed)
                iterator = iter(iterable)
            while (pair := self._next(number, iterator)) is not None:
                yield pair
                number += 1
                seed_all(mixed(seed, number, self._known["data_rank"]))
            if number == first and self._repeat:
                after = f" after {number - 1} batches" if number > 1 else ""
                self._config.refuse(
                    self._key,
                    f"the function has no batch in epoch {epoch}{after}: return an iterable "
                    f"that begins anew each time it is called, with a batch or more",
                )

    def _next(self, number: int, iterator: Iterator[object]) -> Pair | None:
        """Returns a batch as inputs and targets; refuses one that cannot be trained on.

        None at the end of an epoch, and where a measurement ends: at a batch of too few rows, if
        others were measured before.
        """
        with self._config.refusing(self._key, f"the function fails at batch {number}: "):
            batch = next(iterator, _END)
        if batch is _END:
            return None
        with self._config.refusing(self._key, f"batch {number}: ", TypeError, ValueError, say=str):
            pair = pair_of(batch, is_named=self._config.model.is_transformers)
        inputs = pair[0] if isinstance(pair[0], Tensor) else next(iter(pair[0].values()))
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


def pair_of(batch: object, *, is_named: bool = False) -> Pair:
    """Returns inputs and targets of a batch, as a function may return it.

    Args:
        batch: Tokens ``(rows, length)``, whose targets are their successors; or a pair of inputs
            and targets; or a table of inputs and of targets, which are called ``labels`` or
            ``target``. Values may be tensors or arrays.
        is_named: True if a model of transformers takes the inputs. Labels are then shifted as the
            model does: a label is the target of the token before it. A ``target`` is not shifted.
            Without both the tokens are the labels, but for those whose ``attention_mask`` is 0.

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
        tokens, target = tokens[:, :-1].long().contiguous(), tokens[:, 1:].long().contiguous()
        return {INPUT_IDS: tokens} if is_named else tokens, target
    if len(named) < 2 or len(targets) != 1:
        raise TypeError(
            f"it has the names {[*named]}: expected one, of tokens, or inputs and one of "
            f"{[*_TARGETS]}"
        )
    target = named.pop(targets[0])
    for tensor in named.values():
        if not tensor.dim() or not target.dim() or len(tensor) != len(target):
            raise ValueError(
                f"inputs are {_described(tensor)} and targets {_described(target)}: expected as "
                f"many rows of both"
            )
    inputs = {n: x.long() if x.dtype in _SMALL else x for n, x in named.items()}
    target = target.long() if target.dtype in (*_SMALL, torch.uint8) else target
    return inputs if len(inputs) > 1 else next(iter(inputs.values())), target


def _shifted(named: dict[str, Tensor], targets: list[str]) -> Pair:
    """Returns inputs by name, and targets. Labels are shifted; a ``target`` is not."""
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


# The batches of a rank: of a text or a function.


class Texts(NamedTuple):
    """The texts of a job.

    Attributes:
        tokenizer: Makes the tokens of texts and samples; None if there are neither.
        training: The training text; None if a function gives batches.
        held_out: The held-out text; None if there is none.
    """

    tokenizer: Tokenizer | None = None
    training: Corpus | None = None
    held_out: Corpus | None = None


def read_texts(config: Config) -> Texts:
    """Returns the texts of a job; every rank must call it.

    Raises:
        PipegradError: If a text cannot be used, or differs between ranks; on all ranks.
    """
    has_batches = config.data.dataset is not None
    if has_batches and config.eval.sample_every is None:
        return Texts()

    def read() -> tuple[Texts, str]:
        if has_batches and tokenizer_file(config) is None:
            config.refuse(
                "eval.sample_every",
                "needs a tokenizer.json in the directory model.pretrained, as data.dataset "
                "gives batches and no text",
            )
        tokenizer = tokenizer_of(config)
        digests = [tokenizer.digest]
        training = None if has_batches else read_corpus(config)
        held_out = read_corpus(config, "eval.files") if config.eval.files else None
        digests += [corpus.digest for corpus in (training, held_out) if corpus is not None]
        return Texts(tokenizer, training, held_out), " ".join(digests)

    # Each rank reads the text, and waits at the lock of the cache for the first one.
    texts, digests = agree_keeping("the text", read, timeout_seconds=_READ_SECONDS)
    same("the text", dict(enumerate(digests)))
    return texts


def make_feed(job: Job, topology: Topology, texts: Texts, *, held_out: bool = False) -> Feed:
    """Returns the feed of this rank. Local."""
    config, data_rank = job.config, topology.coordinate(topology.data)
    table = "eval" if held_out else "data"
    function = job.held_out if held_out else job.dataset
    if function is not None:
        key = f"{table}.dataset"
        ranks = {"data_rank": data_rank, "num_data_ranks": job.num_shares}
        return Feed(Batches(config, key, function, **ranks, repeat=not held_out).batch, key)
    corpus = texts.held_out if held_out else texts.training
    assert corpus is not None
    share: Any = {
        "size": config.data.batch_size,
        "share": data_rank,
        "num_shares": job.num_shares,
    }
    draw: Callable[[int], tuple[Tensor, Tensor] | None] = (
        partial(corpus.sequences, **share)
        if held_out
        else partial(corpus.batch, seed=config.train.seed, **share)
    )

    def source(number: int) -> tuple[Pair, int] | None:
        pair = draw(number)
        return None if pair is None else (pair, number * pair[1].numel())

    return Feed(source, f"{table}.files")


class Feed:
    """The batches of this rank.

    Attributes:
        what: The key that names the batches, for messages.
        number: Number of the batch that was fetched last.
        pair: Inputs and targets of this batch; None if there is none.
        reply: The batch in numbers, for other ranks: its state, the elements of its targets, and
            the elements of the targets of all batches up to it.
    """

    def __init__(self, source: Source, what: str) -> None:
        self._source, self.what = source, what
        self.number = 0
        self.pair: Pair | None = None
        self.reply: tuple[int, int, int] = (_ENDED, 0, 0)
        self._error: BaseException | None = None

    def begin(self, number: int) -> Collection[tuple[int, int, int]]:
        """Fetches a batch on all ranks; returns the replies of all. Every rank must call it.

        Raises:
            PipegradError: If a rank has failed; on all ranks.
        """

        def fetched() -> tuple[int, int, int]:
            self.fetch(number)
            return self.reply

        replies = agree(self.what, fetched, timeout_seconds=_SLOW_SECONDS)
        self.check(state for state, *_ in replies)
        return replies

    def fetch(self, number: int) -> None:
        """Fetches a batch. If that fails, `check` raises the error. Local."""
        self.number, self.pair, self._error, self.reply = number, None, None, (_ENDED, 0, 0)
        try:
            if (found := self._source(number)) is not None:
                self.pair, seen = found
                self.reply = _READY, self.pair[1].numel(), seen
        except (Exception, SystemExit) as error:  # noqa: BLE001 - `check` raises it on all ranks
            self._error, self.reply = error, (_FAILED, 0, 0)

    def check(self, states: Iterable[float]) -> bool:
        """Returns True if all ranks have the batch, by their states; every rank must call it.

        Raises:
            PipegradError: If a rank has failed; on all ranks.
        """
        states = {*states}
        if _FAILED in states:
            agree(f"batch {self.number} of {self.what}", self._raise)
        return _ENDED not in states

    def _raise(self) -> None:
        if isinstance(self._error, PipegradError):
            raise self._error
        # Errors of the user's function are of pipegrad already. This may be too little memory.
        if self._error is not None:
            raise StepError(
                f"batch {self.number} of {self.what} cannot be made: {in_words(self._error)}"
            ) from self._error
