"""Feed: the batches of this rank, fetched a step ahead.

[Note: a batch ahead] A rank whose batch fails, or differs from the one that another rank of its
pipeline has, must not leave the others alone in a step. So each batch is fetched while the step
before it still computes. The ranks exchange what they know of the batch together with the metrics
of that step, in one message. Then all of them begin the next step, or all raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipegrad.comm.agreement import agree, agree_keeping, same
from pipegrad.errors import PipegradError, StepError, in_words
from pipegrad.topology import Topology
from pipegrad.train.config import Config
from pipegrad.train.corpus import (
    Corpus,
    Tokenizer,
    read_corpus,
    streamed,
    tokenizer_file,
    tokenizer_of,
)
from pipegrad.train.dataset import Batches, MakeBatches, Pair
from pipegrad.train.job import Job

_READ_SECONDS = 4 * 3600.0  # timeout for the slowest machine to make tokens of its text
_SLOW_SECONDS = 3600.0  # timeout for the slowest rank to come to its first batch
_READY, _ENDED, _FAILED = range(3)
_DIGEST_BYTES = 2**20  # of each tensor; the rest of a large one is not compared


@dataclass(frozen=True)
class Texts:
    """The texts of a job.

    Attributes:
        tokenizer: Makes their tokens; None if there is no text.
        of_samples: Makes the tokens of samples; None if there are none.
        training: What is trained on; None if a function or a stream gives batches.
        stream: Gives the batches of a stream; None if there is none.
        held_out: What is held out; None if there is no such text.
    """

    tokenizer: Tokenizer | None = None
    of_samples: Tokenizer | None = None
    training: Corpus | None = None
    stream: MakeBatches | None = None
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
        tokenizer = tokenizer_of(config)
        which = f"{tokenizer.digest} {sorted(tokenizer.ends)}"
        if has_batches:
            if tokenizer_file(config) is None:
                config.refuse(
                    "eval.sample_every",
                    "needs a tokenizer.json in the directory model.pretrained, as data.dataset "
                    "gives batches and no text",
                )
            return Texts(of_samples=tokenizer), which
        stream = streamed(config) if config.data.streaming else None
        training = None if stream else read_corpus(config)
        held_out, size = None, config.data.batch_size
        if config.eval.files:
            held_out = read_corpus(config, "eval.files")
            if held_out.num_sequences < size:
                config.refuse(
                    "eval.files",
                    f"the text has {held_out.num_sequences} sequences of data.sequence_length = "
                    f"{config.data.sequence_length}: expected data.batch_size = {size} or more",
                )
        digests = [corpus.digest for corpus in (training, held_out) if corpus is not None]
        return Texts(tokenizer, tokenizer, training, stream, held_out), " ".join((which, *digests))

    # Each rank reads by itself, and waits at the lock of the cache for the first one.
    texts, digests = agree_keeping("the text", read, timeout_seconds=_READ_SECONDS)
    same("the text", dict(enumerate(digests)))
    return texts


def make_feed(job: Job, topology: Topology, texts: Texts, *, held_out: bool = False) -> Feed:
    """Returns the feed of this rank. Local.

    Args:
        job: The job.
        topology: As this rank sees it, with the stages of the schedule.
        texts: The texts of the job.
        held_out: Whether it is what is held out, each time once from the beginning; there is some.
    """
    config, data_rank = job.config, topology.coordinate(topology.data)
    table = "eval" if held_out else "data"
    function = job.held_out if held_out else job.dataset or texts.stream
    key = f"{table}.files" if function in (None, texts.stream) else f"{table}.dataset"
    if function is not None:
        ranks = {"data_rank": data_rank, "num_data_ranks": job.num_shares}
        batches = Batches(config, key, function, **ranks, repeat=not held_out)
        return Feed(topology, batches.batch, key)
    corpus, size = texts.held_out if held_out else texts.training, config.data.batch_size
    assert corpus is not None
    share = {"size": size, "share": data_rank, "num_shares": job.num_shares}
    draw: Callable[[int], tuple[Tensor, Tensor] | None] = (
        partial(corpus.sequences, **share)
        if held_out
        else partial(corpus.batch, seed=config.train.seed, **share)
    )

    def source(number: int) -> tuple[Pair, int] | None:
        pair = draw(number)
        return None if pair is None else (pair, number * pair[1].numel())

    return Feed(topology, source, key)


class Feed:
    """The batches of this rank.

    Args:
        topology: Says which ranks have the same data.
        source: Returns a batch by its number, from 1, and how many elements the targets of all
            batches up to it have; None if there are no more.
        what: What the batches are, for messages.

    Attributes:
        what: As above.
        number: Of the batch that was fetched last.
        pair: Inputs and targets of this batch; None if there is none.
        reply: What other ranks need to know of the batch.
        replies: By rank, its `reply`. Who fetches a batch without `begin` sets it.
        elements: Elements of the targets of the compared batch, all data ranks together.
        elements_seen: The same of all batches up to it.
        has_ended: Whether a rank has no such batch.
        is_repeated: Whether all data ranks have the same batch.
    """

    def __init__(
        self, topology: Topology, source: Callable[[int], tuple[Pair, int] | None], what: str
    ) -> None:
        self._source = source
        self.what = what
        by_data: dict[int, list[int]] = {}
        for rank in topology.ranks:
            by_data.setdefault(topology.at(rank).coordinate(topology.data), []).append(rank)
        self._by_data = list(by_data.values())
        self.number = 0
        self.pair: Pair | None = None
        self._error: BaseException | None = None
        self.reply: list[float] = []
        self.replies: Sequence[Sequence[float]] = ()
        self.elements = self.elements_seen = 0
        self.has_ended = self.is_repeated = False

    def begin(self, number: int) -> None:
        """Fetches a batch and compares it; every rank must call it.

        Raises:
            PipegradError: As `compare` does.
        """
        if self.number != number:

            def fetched() -> list[float]:
                self.fetch(number)
                return self.reply

            self.replies = agree(self.what, fetched, timeout_seconds=_SLOW_SECONDS)
        self.compare()

    def fetch(self, number: int) -> None:
        """Fetches a batch. If that fails, `compare` raises the error. Local."""
        self.number, self.pair, self._error = number, None, None
        try:
            batch = self._source(number)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - `compare` raises it on all ranks
            self._error = error
            self.reply = [_FAILED, 0, 0, 0]
            return
        if batch is None:
            self.reply = [_ENDED, 0, 0, 0]
        else:
            self.pair, seen = batch
            self.reply = [_READY, _digest_of(self.pair), self.pair[1].numel(), seen]

    def compare(self) -> None:
        """Compares what all ranks have fetched; every rank must call it.

        Raises:
            PipegradError: If a rank has failed, or ranks of a pipeline have different batches. On
                all ranks.
        """
        replies = self.replies
        states = {int(reply[0]) for reply in replies}
        if _FAILED in states:
            agree(f"batch {self.number} of {self.what}", self._raise)
        self.has_ended = _ENDED in states
        if self.has_ended:
            return
        for ranks in self._by_data:
            for rank in ranks[1:]:
                if replies[rank][1] != replies[ranks[0]][1]:
                    advice = "let the files be the same on all machines"
                    if self.what.endswith("dataset"):
                        advice = (
                            "let the function draw random numbers from torch, numpy and random "
                            "alone, and go by data_rank, not by the rank"
                        )
                    raise StepError(
                        f"batch {self.number} of {self.what} is another one on rank {rank} than "
                        f"on rank {ranks[0]}, which need the same: {advice}"
                    )
        firsts = [replies[ranks[0]] for ranks in self._by_data]
        self.is_repeated = len(firsts) > 1 and len({digest for _, digest, *_ in firsts}) == 1
        self.elements = int(sum(elements for *_, elements, _ in firsts))
        self.elements_seen = int(sum(seen for *_, seen in firsts))

    def _raise(self) -> None:
        if self._error is None:
            return
        if isinstance(self._error, PipegradError):
            raise self._error
        # A function of the user has errors in words already. This may be too little memory.
        raise StepError(
            f"batch {self.number} of {self.what} cannot be made: {in_words(self._error)}"
        ) from self._error


def _digest_of(pair: Pair) -> float:
    """Returns a digest of a batch that a float64 has exactly."""
    digest = hashlib.sha256()
    inputs, target = pair
    named = {"": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    for name, tensor in [*sorted(named.items()), ("target", target)]:
        digest.update(name.encode())
        flat = tensor.detach().flatten()
        part = flat[: _DIGEST_BYTES // max(1, tensor.itemsize)].cpu().contiguous()
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(part.view(torch.uint8).numpy().tobytes())
    return float(int.from_bytes(digest.digest()[:6]))
