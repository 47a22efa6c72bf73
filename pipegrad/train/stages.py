"""Stages: every rank makes the model, keeps its own stages, and tries them out.

Many errors of a model appear only when it runs. Here they are errors of the configuration, on all
ranks alike, before any training. `profile_job` runs stages for their times.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipegrad.comm.activity import failure_of
from pipegrad.comm.agreement import agree, agree_keeping, nobody_comes
from pipegrad.errors import ConfigError, in_words
from pipegrad.model.dtensor import local
from pipegrad.model.suspects import same_bits
from pipegrad.observe.stage_profile import profile_stages
from pipegrad.partition.cut_model import Cut
from pipegrad.pipeline.loss_message import TOKEN_MEAN
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.pipeline.stage import Stage
from pipegrad.plugins.written import digest
from pipegrad.simulation.costs import StageCosts
from pipegrad.topology import Topology
from pipegrad.train.config import Config
from pipegrad.train.corpus import Tokenizer, tokenizer_of
from pipegrad.train.feed import Feed, Texts
from pipegrad.train.functions import with_options
from pipegrad.train.job import Job
from pipegrad.train.transformers_model import check_batch, check_tokenizer, load_stages

_PREPARE_SECONDS = 600.0  # timeout for the slowest rank to make or to try the model
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by precision
RANDOM = "the next random number"  # sorts behind names of parameters


def build_stages(
    job: Job, topology: Topology, feed: Feed, texts: Texts, device: torch.device
) -> tuple[Cut, list[Stage]]:
    """Returns the cut and this rank's stages on its device; every rank calls it.

    Args:
        job: The job.
        topology: As this rank sees it, with process groups.
        feed: Has the first batch of this rank.
        texts: The texts of the job.
        device: Of this rank's stages.

    Raises:
        PipegradError: If the model cannot be made or cut; on all ranks.
    """
    config = job.config
    cut = _make_model(job, topology, feed, texts.tokenizer)
    own = cut.stages(topology.local_stages, recompute=config.train.recompute)

    def place() -> None:
        for stage in own:
            stage.module.to(device)
        if (choice := config.parallel.prepare) is not None:
            prepare = with_options(config, "parallel.prepare", choice, lambda names: names[:2])
            try:
                prepare([stage.module for stage in own], topology)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user
                config.refuse("parallel.prepare", f"it fails: {in_words(error)}", cause=error)
        for stage in own:
            if (dtype := _AUTOCAST.get(config.train.precision)) is not None:
                autocast = torch.autocast(device.type, dtype=dtype)
                stage.module.forward = autocast(stage.module.forward)

    agree("placing the stages", place, timeout_seconds=_PREPARE_SECONDS)
    return cut, own


def _make_model(job: Job, topology: Topology, feed: Feed, tokenizer: Tokenizer | None) -> Cut:
    """Makes and cuts the model on every rank."""
    config = job.config
    example: Tensor | None = None
    uncut = job.model() if config.model.is_transformers else None
    inputs = None if feed.pair is None else feed.pair[0]
    if uncut is None and job.dataset is not None and isinstance(inputs, Tensor):
        # Data ranks may have sequences of other lengths, and all must cut alike.
        example = agree("a look at the first batch", lambda: inputs[:2].cpu().clone())[0]

    def make() -> tuple[Cut, tuple[object, dict[str, str]]]:
        if uncut is None:
            cut = job.cut(job.model(topology=topology), example)
        else:
            if isinstance(inputs, Mapping):
                check_batch(config, uncut, inputs)
            if tokenizer is not None:
                check_tokenizer(config, uncut, tokenizer)
            cut = job.cut(uncut)
        if not any(p.requires_grad for m in cut.modules.values() for p in m.parameters()):
            config.refuse("model", "it has no parameter that requires a gradient: nothing to train")
        location = tuple(topology.coordinate(axis) for axis in config.parallel.dimensions)
        return cut, (location, digests_of([cut.modules[i] for i in topology.local_stages]))

    cut, digests = agree_keeping("the model", make, timeout_seconds=_PREPARE_SECONDS)
    if uncut is None:
        check_alike(config, dict(enumerate(digests)))
    else:
        load_stages(config, cut, topology.local_stages)
    return cut


def try_out(
    job: Job,
    scheduler: Scheduler,
    modules: Sequence[nn.Module],
    *,
    feed: Feed,
    tokenizer: Tokenizer | None,
    device: torch.device,
) -> None:
    """Evaluates a batch, and restores the buffers of this rank's stages; every rank calls it.

    Args:
        job: The job.
        scheduler: The pipeline.
        modules: This rank's stages.
        feed: Has the first batch of this rank.
        tokenizer: Makes the tokens of a text; None if a function makes batches.
        device: Of this rank's stages.

    Raises:
        ConfigError: If the model or the loss fails, or the loss is not finite; on all ranks.
    """
    pair = feed.pair
    assert pair is not None
    if tokenizer is not None:  # a text may not have the largest token for many steps
        tokens = largest_first(job.config, tokenizer).repeat(job.schedule.num_sequences, 1)
        pair = tokens, tokens
    inputs, target = job.placed(pair, scheduler.topology, device)
    # A forward may replace a buffer, or write into it.
    buffers = [
        (layer, name, buffer, buffer.clone())
        for module in modules
        for layer in module.modules()
        for name, buffer in layer.named_buffers(recurse=False)
    ]

    def evaluate() -> tuple[bool, str]:
        try:
            loss = scheduler.evaluate(inputs, target=target, outputs=False).loss.item()
        except (Exception, SystemExit) as error:
            if nobody_comes(error):
                raise
            failure = failure_of(error)
            return failure.follows, failure.error
        return False, "" if math.isfinite(loss) else f"the loss of the first batch is {loss}"

    replies = agree("trying the model out", evaluate, timeout_seconds=_PREPARE_SECONDS)
    for _, words in sorted(reply for reply in replies if reply[1]):
        job.config.refuse("model", " ".join(words.split()))  # one line
    for layer, name, buffer, before in buffers:
        setattr(layer, name, buffer)
        if not same_bits(buffer, before):  # one that is expanded cannot be written
            with torch.no_grad():
                buffer.copy_(before)


def agreed(what: str, function: Callable[[], object]) -> list[Any]:
    """Does as `agree`; but a ConfigError of some ranks is raised on all ranks as it is."""

    def tried() -> object:
        try:
            return function()
        except ConfigError as error:
            return str(error)

    replies = agree(what, tried, timeout_seconds=_PREPARE_SECONDS)
    for reply in replies:
        if isinstance(reply, str):
            raise ConfigError(reply)
    return replies


def digests_of(modules: Sequence[nn.Module]) -> dict[str, str]:
    """Returns a digest of the bits of each parameter and buffer of stages, by name.

    What a factory has drawn has one too. It shows that ranks have drawn alike, also for layers that
    only one of them keeps. Call this right after the model was made.
    """
    named = [n for m in modules for n in chain(m.named_parameters(), m.named_buffers())]
    drawn = repr((random.getstate(), np.random.get_state()))
    return {
        **{name: digest(local(tensor)) for name, tensor in named if not tensor.is_meta},
        RANDOM: f"{digest(torch.get_rng_state())} {hashlib.sha256(drawn.encode()).hexdigest()}",
    }


def check_alike(config: Config, replies: Mapping[int, tuple[object, Mapping[str, str]]]) -> None:
    """Refuses a factory that made other values on one rank than on another.

    Args:
        config: The configuration.
        replies: For each rank its location in the dimensions that a factory may shard along, and
            its `digests_of` the model.

    Raises:
        ConfigError: If values differ. Names the first parameter that differs, and two ranks.
    """
    # Ranks of one location must have the same values. Other locations may hold other shards. A rank
    # has values of its own stages only, so each name has a first rank of its own.
    first: dict[tuple[object, str], tuple[int, str]] = {}
    for rank, (location, digests) in replies.items():
        differs = dict[str, int]()
        for name, own in digests.items():
            other, expected = first.setdefault((location, name), (rank, own))
            if own != expected:
                differs[name] = other
        if differs:
            name = min(differs)
            config.refuse(
                "model.factory",
                f"it makes other values on rank {rank} than on rank {differs[name]}, of {name!r} "
                f"and {len(differs) - 1} more, though train.seed seeds torch, numpy and random "
                f"alike: draw from these alone, in an order that no set or hash decides",
            )


def largest_first(config: Config, tokenizer: Tokenizer) -> Tensor:
    """Returns a sequence of tokens that begins with the largest one, ``(1, length)``."""
    length = config.data.sequence_length
    tokens = torch.arange(tokenizer.size - 1, tokenizer.size - 1 - length, -1)
    return tokens.remainder(tokenizer.size)[None]


def profile_job(job: Job, *, repeats: int = 5) -> tuple[StageCosts, ...]:
    """Returns what one microbatch costs on each stage, measured in this process alone.

    Args:
        job: A job that trains on text; its model fits into this process.
        repeats: Of each pass; the median counts.

    Raises:
        ConfigError: If its stages can only be made, or fed, by their ranks.
        Exception: What a stage raises.
    """
    config, advice = job.config, "call pipegrad.measure_costs in a loop of your own"
    if config.model.is_transformers:
        config.refuse("model", f"its stages are loaded by their ranks, not here: {advice}")
    if job.dataset is not None:
        config.refuse("data.dataset", f"its batches are made by the ranks, not here: {advice}")
    rows = config.data.batch_size // (job.num_shares * config.parallel.microbatches)
    tokens = largest_first(config, tokenizer_of(config)).repeat(rows, 1)
    num_stages = len(job.schedule.stage_to_rank)
    stages = job.cut(job.model("cpu")).stages(range(num_stages), recompute=config.train.recompute)
    (name,) = stages[0].inputs
    return profile_stages(
        stages,
        {name: tokens},
        target=tokens,
        loss_fn=job.loss,
        splits=job.schedule.splits_backward,
        is_weighted=config.train.loss_reduction == TOKEN_MEAN,
        repeats=repeats,
    )
