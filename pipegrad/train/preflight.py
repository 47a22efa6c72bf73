"""Preflight: runs stages, optimizer and learning rate once, before the first step.

Many errors of a model or an optimizer appear only when it runs. Here they are errors of the
configuration, on all ranks alike, before any training.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from pipegrad.errors import in_words
from pipegrad.model.dtensor import is_dtensor
from pipegrad.pipeline.partition import Cut
from pipegrad.plugins.written import digest
from pipegrad.train.config import Config
from pipegrad.train.optimizer import make_learning_rate, make_optimizer

NUM_TOKENS = 256  # each byte is a token


def check_parameters(config: Config, cut: Cut) -> None:
    """Refuses a model that this trainer cannot train.

    Raises:
        ConfigError: If no parameter is trained, or a parameter is a DTensor.
    """
    named = {n: p for m in cut.modules.values() for n, p in m.named_parameters()}
    if not any(p.requires_grad for p in named.values()):
        config.refuse("model", "it has no parameter that requires a gradient: nothing to train")
    dtensors = [name for name, p in named.items() if is_dtensor(p)]
    if dtensors:
        config.refuse(
            "model",
            f"{dtensors[0]!r} and {len(dtensors) - 1} more are DTensors, which checkpoints here do "
            f"not take: keep plain shards, as examples/tensor_parallel.py, or train with "
            f"pipegrad.Scheduler or pipegrad.attach in a loop of your own",
        )


def digests_of(model: nn.Module) -> dict[str, str]:
    """Returns a digest of the bits of each parameter and buffer of a model, by name."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: digest(tensor) for name, tensor in named if not tensor.is_meta}


def check_alike(config: Config, replies: Mapping[int, tuple[object, Mapping[str, str]]]) -> None:
    """Refuses a factory that made other values on one rank than on another.

    Args:
        config: The configuration.
        replies: For each rank its location in the dimensions that a factory may shard along, and
            its `digests_of` the model.

    Raises:
        ConfigError: If values differ. Names the first parameter that differs, and two ranks.
    """
    # Ranks of one location must have the same values. Other locations may hold other shards.
    first: dict[object, tuple[int, Mapping[str, str]]] = {}
    for rank, (location, digests) in replies.items():
        other, expected = first.setdefault(location, (rank, digests))
        differs = [n for n in expected.keys() & digests.keys() if expected[n] != digests[n]]
        if differs:
            config.refuse(
                "model.factory",
                f"it makes other values on rank {rank} than on rank {other}, of {min(differs)!r} "
                f"and {len(differs) - 1} more, though train.seed seeds torch, numpy and random "
                f"alike: draw from these alone, in an order that no set or hash decides",
            )


def try_out_stages(config: Config, cut: Cut) -> None:
    """Sends one sequence through all stages as a pipeline would, and restores all state.

    Raises:
        ConfigError: If a stage fails or does not return one tensor of floats, or if the last stage
            does not return logits of bytes.
    """
    modules = [cut.modules[stage] for stage in sorted(cut.modules)]
    length = config.data.sequence_length
    tokens = torch.arange(NUM_TOKENS - 1, NUM_TOKENS - 1 - length, -1).remainder(NUM_TOKENS)
    buffers = [
        (layer, name, buffer, buffer.clone())
        for module in modules
        for layer in module.modules()
        for name, buffer in layer.named_buffers(recurse=False)
    ]
    value: Tensor = tokens[None]
    # Random numbers that are drawn here, for example by dropout, must not change the training.
    with torch.random.fork_rng(devices=[]):
        for stage, module in enumerate(modules):
            value = _sent(config, stage, module, value)
    # A forward may have replaced a buffer or written into it. Both are undone, so that training
    # starts from the state that the factory made.
    for layer, name, buffer, before in buffers:
        setattr(layer, name, buffer)
        if not torch.equal(buffer, before):
            with torch.no_grad():
                buffer.copy_(before)
    shape = (*value.shape, 0, 0, 0)[:3]
    if value.ndim != 3 or shape[:2] != (1, length) or shape[2] < NUM_TOKENS:
        config.refuse(
            "model",
            f"it returns {value.dtype} {tuple(value.shape)} for {length} bytes; expected logits "
            f"(1, {length}, {NUM_TOKENS} or more), one a possible byte",
        )
    if not bool(value.isfinite().all()):
        config.refuse("model", "it returns logits that are not finite")


def _sent(config: Config, stage: int, module: nn.Module, value: Tensor) -> Tensor:
    """Returns the value that a stage sends to the next stage, detached as by a transfer."""
    layers = [name for name, _ in module.named_children()]
    name = f"stage {stage} (layers {layers[0]} to {layers[-1]})"
    try:
        output: object = module(value)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user
        words = f"{name} fails on {value.dtype} {tuple(value.shape)}: {in_words(error)}"
        config.refuse("model", words, cause=error)
    if not isinstance(output, Tensor) or not output.is_floating_point():
        kind = type(output).__name__
        words = (
            f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {kind}"
        )
        config.refuse(
            "model",
            f"{name} returns {words}; expected one tensor of floats: other boundaries may do",
        )
    return output.detach().requires_grad_()


def try_out_optimizer(config: Config, device: torch.device) -> set[str]:
    """Makes one step of the optimizer and every step of its learning rate, on a small matrix.

    Returns:
        The names of the state that the optimizer keeps for a matrix.

    Raises:
        ConfigError: If torch accepts options and fails with them later.
    """
    probe = nn.Parameter(torch.ones(2, 2, device=device))
    probe.grad = torch.ones_like(probe)
    optimizer = make_optimizer(config, lambda kind, **options: kind([probe], **options))
    learning_rate = make_learning_rate(config, optimizer)
    try:
        optimizer.step()
    except Exception as error:  # noqa: BLE001 - whatever torch says of an option
        config.refuse("optimizer", f"its first step fails: {error!r}", cause=error)
    state_names = set(optimizer.state[probe])
    if learning_rate is None:
        return state_names
    try:
        with warnings.catch_warnings():
            # torch warns, because the optimizer makes no step between these.
            warnings.simplefilter("ignore")
            for _ in range(config.train.steps):
                learning_rate.step()
    except Exception as error:  # noqa: BLE001 - whatever torch says of an option
        complaint = f"fails within {config.train.steps} steps: {error!r}"
        config.refuse("optimizer.schedule", complaint, cause=error)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not all(map(math.isfinite, rates)):
        config.refuse("optimizer.schedule", f"ends with the learning rate {rates[0]}")
    return state_names
