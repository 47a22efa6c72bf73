"""Sources: the texts and functions of a job, and the feeds that they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pipegrad.comm.agreement import agree_keeping, same
from pipegrad.topology import Topology
from pipegrad.train.config import Config
from pipegrad.train.data.corpus import Corpus, files_of, open_corpus
from pipegrad.train.data.dataset import Batches
from pipegrad.train.data.feed import Feed
from pipegrad.train.data.pairs import INPUT_IDS, Inputs, Pair
from pipegrad.train.data.tokenizer import Tokenizer, tokenizer_of
from pipegrad.train.data.tokens import shared_token_file
from pipegrad.train.job import Job

_OPEN_SECONDS = 600.0  # timeout for the slowest rank to open its text


@dataclass(frozen=True)
class Texts:
    """The texts of a job.

    Attributes:
        tokenizer: Makes their tokens; None if there is no text.
        training: What is trained on; None if a function gives batches.
        held_out: What is held out; None if there is no such text.
    """

    tokenizer: Tokenizer | None
    training: Corpus | None
    held_out: Corpus | None


def read_texts(config: Config) -> Texts:
    """Returns the texts of a job; every rank must call it.

    Raises:
        PipegradError: If a text cannot be used, or differs between ranks; on all ranks.
    """
    if config.data.dataset is not None:
        return Texts(None, None, None)
    keys = ["data.files", "eval.files"] if config.eval.files else ["data.files"]

    def make_tokenizer() -> tuple[Tokenizer, str]:
        tokenizer = tokenizer_of(config)
        return tokenizer, tokenizer.digest

    tokenizer, digests = agree_keeping("the tokenizer", make_tokenizer)
    same("the tokenizer", dict(enumerate(digests)))
    written = {
        key: shared_token_file(config, key, files, tokenizer)
        for key in keys
        if (files := files_of(config, key))
    }

    def open_corpora() -> tuple[dict[str, Corpus], str]:
        corpora = {key: open_corpus(config, key, tokenizer, written.get(key)) for key in keys}
        _check_held_out(config, corpora)
        return corpora, " ".join(corpus.digest for corpus in corpora.values())

    corpora, digests = agree_keeping("the text", open_corpora, timeout_seconds=_OPEN_SECONDS)
    same("the text", dict(enumerate(digests)))
    return Texts(tokenizer, corpora["data.files"], corpora.get("eval.files"))


def _check_held_out(config: Config, corpora: dict[str, Corpus]) -> None:
    held_out, size = corpora.get("eval.files"), config.data.batch_size
    if held_out is not None and held_out.num_sequences < size:
        config.refuse(
            "eval.files",
            f"the text has {held_out.num_sequences} sequences of data.sequence_length = "
            f"{config.data.sequence_length}: expected data.batch_size = {size} or more",
        )


def make_feed(job: Job, topology: Topology, texts: Texts, *, held_out: bool = False) -> Feed:
    """Returns the feed of this rank. Local.

    Args:
        job: The job.
        topology: As this rank sees it, with the stages of the schedule.
        texts: The texts of the job.
        held_out: Whether it is what is held out, each time once from the beginning; there is some.
    """
    config = job.config
    function = job.held_out if held_out else job.dataset
    corpus = texts.held_out if held_out else texts.training
    table = "eval" if held_out else "data"
    data_rank = topology.coordinate(topology.data)
    takes = {
        "takes_inputs": takes_inputs(config, topology),
        "takes_target": topology.num_stages - 1 in topology.local_stages,
    }
    if function is not None:
        batches = Batches(
            config,
            f"{table}.dataset",
            function,
            data_rank=data_rank,
            num_data_ranks=job.num_shares,
            repeat=not held_out,
        )
        what = f"{table}.dataset"
        return Feed(topology, batches.batch, lambda _: batches.elements_seen, what, **takes)
    assert corpus is not None
    size = config.data.batch_size
    share = {"size": size, "share": data_rank, "num_shares": job.num_shares}
    elements = size * config.data.sequence_length // job.num_shares
    draw: Callable[[int], tuple[Tensor, Tensor] | None] = (
        partial(corpus.sequences, **share)
        if held_out
        else partial(corpus.batch, seed=config.train.seed, **share)
    )

    def source(number: int) -> Pair | None:
        pair = draw(number)
        return None if pair is None else (named_inputs(config, pair[0]), pair[1])

    return Feed(topology, source, lambda number: number * elements, f"{table}.files", **takes)


def takes_inputs(config: Config, topology: Topology) -> bool:
    """Whether stages of this rank take the inputs of a batch.

    All stages of a model of transformers do: each makes its own masks and positions of them.
    """
    return config.model.is_transformers or 0 in topology.local_stages


def named_inputs(config: Config, tokens: Tensor) -> Inputs:
    """Returns tokens as the model takes them."""
    return {INPUT_IDS: tokens} if config.model.is_transformers else tokens
