"""Stages: every rank makes the model with memory for its own stages, and tries these out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipegrad.comm.agreement import agree, agree_keeping
from pipegrad.errors import ConfigError
from pipegrad.partition.conventions import BATCH
from pipegrad.partition.cut_model import Cut
from pipegrad.pipeline.stage import Stage
from pipegrad.topology import Topology
from pipegrad.train.data.feed import Feed, Texts
from pipegrad.train.job import Job
from pipegrad.train.models.recorded_model import RecordedModel
from pipegrad.train.models.sharded_layers import shard_stages
from pipegrad.train.models.transformers_model import check_batch, check_tokenizer, load_stages
from pipegrad.train.preflight import (
    Sample,
    check_alike,
    check_parameters,
    digests_of,
    sample_of,
    try_out_loss,
    try_out_stage,
)

_PREPARE_SECONDS = 600.0  # timeout for the slowest rank to make the model
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by precision


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
        check_parameters(config, cut)
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
