"""Stages: every rank makes the model with memory for its own stages, and tries these out.

Many errors of a model appear only when it runs. Here they are errors of the configuration, on all
ranks alike, before any training. `profile_job` runs stages for their times.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipegrad.comm.agreement import agree, agree_keeping
from pipegrad.errors import ConfigError, StepError, in_words
from pipegrad.model.dtensor import local
from pipegrad.model.suspects import same_bits
from pipegrad.observe.stage_profile import profile_stages
from pipegrad.partition.conventions import BATCH
from pipegrad.partition.cut_model import Cut
from pipegrad.pipeline.loss_message import TOKEN_MEAN, loss_parts
from pipegrad.pipeline.stage import Stage
from pipegrad.plugins.written import digest
from pipegrad.simulation.costs import StageCosts
from pipegrad.topology import Topology
from pipegrad.train.config import Config
from pipegrad.train.corpus import Tokenizer, tokenizer_of
from pipegrad.train.dataset import Inputs
from pipegrad.train.feed import Feed, Texts, named_inputs
from pipegrad.train.job import Job
from pipegrad.train.recorded_model import RecordedModel
from pipegrad.train.sharded_layers import shard_stages
from pipegrad.train.transformers_model import check_batch, check_tokenizer, load_stages

_PREPARE_SECONDS = 600.0  # timeout for the slowest rank to make the model
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by precision
RANDOM = "the next random number"  # sorts behind names of parameters


def build_stages(
    job: Job, topology: Topology, feed: Feed, texts: Texts, device: torch.device
) -> tuple[Cut, list[Stage]]:
    """Returns the cut and this rank's stages, when all ranks have tried them; every rank calls it.

    Args:
        job: The job.
        topology: As this rank sees it, with process groups.
        feed: Has the first batch of this rank.
        texts: The texts of the job.
        device: Of this rank's stages.

    Raises:
        PipegradError: If the model cannot be made, cut or run; on all ranks.
    """
    sample = _sample(job, topology, feed, texts)
    cut = _make_model(job, topology, sample)
    own = job.stages(cut, topology.local_stages)
    _try_out(job, topology, cut, own, sample)

    def place() -> None:
        for stage in own:
            stage.module.to(device)
        shard_stages(job.config, topology, cut)
        for stage in own:
            if (dtype := _AUTOCAST.get(job.config.train.precision)) is not None:
                autocast = torch.autocast(device.type, dtype=dtype)
                stage.module.forward = autocast(stage.module.forward)

    agree("placing the stages", place, timeout_seconds=_PREPARE_SECONDS)
    return cut, own


def _make_model(job: Job, topology: Topology, sample: Sample) -> Cut:
    """Makes and cuts the model on every rank, with memory for its own stages if possible."""
    config, recorded = job.config, None
    is_transformers = config.model.is_transformers
    if is_transformers:
        uncut = job.model()
    else:

        def record() -> tuple[RecordedModel | None, bool]:
            found = job.recorded_model(topology)
            return found, found is not None

        # A factory may communicate. So all ranks make the model in parts, or all make it whole.
        recorded, replies = agree_keeping(
            "the outline of the model", record, timeout_seconds=_PREPARE_SECONDS
        )
        recorded = recorded if all(replies) else None

    def make() -> tuple[Cut, tuple[object, dict[str, str]]]:
        inputs, tokenizer = sample.inputs, sample.tokenizer
        if isinstance(inputs, Tensor):
            model = job.whole_model(topology) if recorded is None else recorded.model
            cut = job.cut(model, inputs)
        else:
            if tokenizer is None:
                check_batch(config, uncut, inputs)
            else:
                check_tokenizer(config, uncut, tokenizer)
            cut = job.cut(uncut)
        if not any(p.requires_grad for m in cut.modules.values() for p in m.parameters()):
            config.refuse("model", "it has no parameter that requires a gradient: nothing to train")
        own = [cut.modules[stage] for stage in topology.local_stages]
        if recorded is not None:
            recorded.load(own)
        location = tuple(topology.coordinate(axis) for axis in config.parallel.dimensions)
        return cut, (location, digests_of(own, 0 if recorded is None else recorded.num_draws))

    # Ranks of one location, which is along the dimensions that a factory may shard along, must
    # have the same values.
    cut, digests = agree_keeping("the model", make, timeout_seconds=_PREPARE_SECONDS)
    if is_transformers:
        load_stages(config, cut, topology.local_stages)
    else:
        check_alike(config, dict(enumerate(digests)))
    return cut


def _try_out(job: Job, topology: Topology, cut: Cut, own: list[Stage], sample: Sample) -> None:
    """Sends a sample through the stages, rank by rank; every rank must call it."""
    config, last = job.config, topology.num_stages - 1
    by_index = {stage.index: stage for stage in own}
    is_named = isinstance(sample.inputs, Mapping)
    known: dict[str, object] = {BATCH if is_named else "x": sample.inputs}
    for index in range(topology.num_stages):

        def run(index: int = index, known: Mapping[str, object] = known) -> dict[str, Tensor]:
            if index not in by_index:
                return {}
            stage, layers = by_index[index], cut.layers_of(index)
            name = f"stage {index} (layers {layers[0]} to {layers[-1]})"
            values = [known[name] for name in stage.inputs]
            outputs = try_out_stage(config, stage, name, values, sample.tokenizer)
            if index == last:
                if len(outputs) > 1:
                    config.refuse(
                        "model",
                        f"it returns {len(outputs)} tensors; expected one, or one that is called "
                        f"logits",
                    )
                try_out_loss(config, job.loss, outputs[0], sample)
                return {}  # nobody takes it, and it may be large
            return dict(zip(stage.outputs, outputs, strict=True))

        # Ranks of one pipeline have one value. Another pipeline may have another part of it.
        [source, *_] = topology.ranks_of([index])
        known = known | agreed(f"trying stage {index} out", run)[source]


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


def _sample(job: Job, topology: Topology, feed: Feed, texts: Texts) -> Sample:
    """Returns what stages are tried out with, the same on all ranks; every rank must call it."""
    if texts.tokenizer is not None:
        return sample_of(job.config, texts.tokenizer)
    # Ranks of middle stages have no batch. They get some rows of the first data rank's.
    pair, own = feed.pair, None
    if pair is not None and not topology.coordinate(topology.data):
        inputs, target = pair
        rows = max(1, min(2, len(target) // job.config.parallel.microbatches))
        first = (
            inputs[:rows].cpu().clone()
            if isinstance(inputs, Tensor)
            else {name: tensor[:rows].cpu().clone() for name, tensor in inputs.items()}
        )
        own = first, target[:rows].cpu().clone()
    replies = agree("a look at the first batch", lambda: own)
    return Sample(*next(reply for reply in replies if reply is not None))


def digests_of(modules: Sequence[nn.Module], num_draws: int) -> dict[str, str]:
    """Returns a digest of the bits of each parameter and buffer of stages, by name.

    What a factory has drawn has one too. It shows that ranks have drawn alike, also for layers that
    only one of them keeps. Call this right after the model was made.

    Args:
        modules: The stages.
        num_draws: How many draws were recorded when the model was made.
    """
    named = [n for m in modules for n in chain(m.named_parameters(), m.named_buffers())]
    states = repr((num_draws, random.getstate(), np.random.get_state()))
    drawn = hashlib.sha256(states.encode()).hexdigest()
    return {
        **{name: digest(local(tensor)) for name, tensor in named if not tensor.is_meta},
        RANDOM: f"{digest(torch.get_rng_state())} {drawn}",
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


@dataclass(frozen=True)
class Sample:
    """What stages are tried out with.

    Attributes:
        inputs: A row or two.
        target: Of the loss.
        tokenizer: Whose tokens `inputs` has; None for a batch of a function.
    """

    inputs: Inputs
    target: Tensor
    tokenizer: Tokenizer | None = None


def sample_of(config: Config, tokenizer: Tokenizer) -> Sample:
    """Returns a sequence of tokens that begins with the largest one."""
    length = config.data.sequence_length
    tokens = torch.arange(tokenizer.size - 1, tokenizer.size - 1 - length, -1)
    tokens = tokens.remainder(tokenizer.size)[None]
    return Sample(named_inputs(config, tokens), tokens, tokenizer)


def try_out_stage(
    config: Config,
    stage: Stage,
    name: str,
    values: Sequence[object],
    tokenizer: Tokenizer | None,
) -> tuple[Tensor, ...]:
    """Returns the outputs of a stage for some values, and restores all state.

    Args:
        config: The configuration.
        stage: The stage.
        name: Of the stage, for messages.
        values: What the stage is given.
        tokenizer: Whose tokens the first stage is given, if it is given tokens.

    Raises:
        ConfigError: If the stage fails; or if one of an nn.Sequential does not return one tensor of
            floats.
    """
    buffers = [
        (layer, attribute, buffer, buffer.clone())
        for layer in stage.module.modules()
        for attribute, buffer in layer.named_buffers(recurse=False)
    ]
    # Random numbers that are drawn here, for example by dropout, must not change the training.
    with torch.random.fork_rng(devices=[]):
        outputs = _outputs(config, stage, name, values, tokenizer)
    # A forward may have replaced a buffer or written into it. Both are undone, so that training
    # starts from the state that the factory made.
    for layer, attribute, buffer, before in buffers:
        setattr(layer, attribute, buffer)
        if not same_bits(buffer, before):
            with torch.no_grad():
                buffer.copy_(before)
    return outputs


def try_out_loss(
    config: Config, loss: Callable[[Tensor, Tensor], object], output: Tensor, sample: Sample
) -> None:
    """Computes the loss of the last stage's output.

    Raises:
        ConfigError: If the output is not what the loss needs, or if the loss is not one number.
    """
    if sample.tokenizer is not None and config.train.loss is None:
        _check_logits(config, output, sample.tokenizer)
    with torch.random.fork_rng(devices=[]):
        _check_loss(config, loss, output, sample.target)


def _check_logits(config: Config, value: Tensor, tokenizer: Tokenizer) -> None:
    length, size, unit = config.data.sequence_length, tokenizer.size, tokenizer.unit
    shape = (*value.shape, 0, 0, 0)[:3]
    if value.ndim != 3 or shape[:2] != (1, length) or shape[2] < size:
        config.refuse(
            "model",
            f"it returns {value.dtype} {tuple(value.shape)} for {length} {unit}; expected logits "
            f"(1, {length}, {size} or more), one a possible {unit.removesuffix('s')}",
        )
    if not bool(value.isfinite().all()):
        config.refuse("model", "it returns logits that are not finite")


def _check_loss(
    config: Config, loss: Callable[[Tensor, Tensor], object], output: Tensor, target: Tensor
) -> None:
    key = "model" if config.train.loss is None else "train.loss"
    given = f"{output.dtype} {tuple(output.shape)} and targets {target.dtype} {tuple(target.shape)}"
    try:
        returned = loss(output.detach().requires_grad_(), target)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user
        words = f"the loss fails on {given}: {in_words(error)}"
        config.refuse(key, words, cause=error)
    value = returned[0] if isinstance(returned, tuple) and returned else returned
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        words = f"the loss of {given} is {_described(value)}; expected one element of floats"
        config.refuse(key, words)
    try:
        loss_parts(returned, is_weighted=config.train.loss_reduction == TOKEN_MEAN)
    except StepError as error:
        config.refuse(key, f"the loss of {given}: {error}", cause=error)
    if not bool(value.isfinite()):
        config.refuse(key, f"the loss of {given} is {value.item()}")
    if not value.requires_grad:
        config.refuse(key, f"the loss of {given} has no gradient")


def _outputs(
    config: Config,
    stage: Stage,
    name: str,
    values: Sequence[object],
    tokenizer: Tokenizer | None,
) -> tuple[Tensor, ...]:
    """Returns the outputs of a stage, detached as by a transfer."""
    values = [
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in values
    ]
    is_sequential = isinstance(stage.module, nn.Sequential)
    try:
        returned: object = stage.module(*values) if is_sequential else stage.forward(values)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user
        words = f"{name} fails on {', '.join(map(_described, values))}: {in_words(error)}"
        if stage.index == 0 and tokenizer is not None:
            words += f"; it is given {tokenizer.unit} from 0 to {tokenizer.size - 1}"
        config.refuse("model", words, cause=error)
    if isinstance(returned, tuple) and not is_sequential:
        return tuple(output.detach() for output in returned)
    if not isinstance(returned, Tensor) or not returned.is_floating_point():
        config.refuse(
            "model",
            f"{name} returns {_described(returned)}; expected one tensor of floats: other "
            f"boundaries may do",
        )
    return (returned.detach(),)


def _described(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_described(part)}" for name, part in value.items())
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"a {type(value).__name__}"


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
    tokens = sample_of(config, tokenizer_of(config)).target.repeat(rows, 1)
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
