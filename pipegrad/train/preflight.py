"""What only running shows, run before the first step: stages, the optimizer, its learning rate."""

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

NUM_TOKENS = 256  # a byte a token


def check_parameters(config: Config, cut: Cut) -> None:
    """Refuses a model that this trainer cannot train.

    Raises:
        ConfigError: If there is nothing to train, or a parameter is a DTensor.
    """
    named = {n: p for m in cut.modules.values() for n, p in m.named_parameters()}
    if not any(p.requires_grad for p in named.values()):
        config.refuse("model", "it has no parameter that requires a gradient: nothing to train")
    lying = [name for name, p in named.items() if is_dtensor(p)]
    if lying:
        config.refuse(
            "model",
            f"{lying[0]!r} and {len(lying) - 1} more are DTensors, which checkpoints here do not "
            f"take: keep plain shards, as examples/tensor_parallel.py, or train with "
            f"pipegrad.Scheduler or pipegrad.attach in a loop of your own",
        )


def digests_of(model: nn.Module) -> dict[str, str]:
    """Returns a digest of the bits of each parameter and buffer of a model, by name."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: digest(found) for name, found in named if not found.is_meta}


def check_alike(config: Config, told: Mapping[int, tuple[object, Mapping[str, str]]]) -> None:
    """Refuses a factory that made other values on one rank than on another.

    Args:
        config: The configuration.
        told: Of each rank what it may choose its shards by, and its `digests_of` the model.

    Raises:
        ConfigError: Names the first parameter that differs, and two ranks.
    """
    first: dict[object, tuple[int, Mapping[str, str]]] = {}
    for rank, (location, digests) in told.items():
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
    """Sends one sequence through all stages as a pipeline would; nothing is kept of it.

    Raises:
        ConfigError: If a stage fails, or does not return one tensor that can be sent on, or the
            last one not logits of bytes.
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
    found: Tensor = tokens[None]
    with torch.random.fork_rng(devices=[]):
        for stage, module in enumerate(modules):
            found = _sent(config, stage, module, found)
    for layer, name, buffer, before in buffers:
        setattr(layer, name, buffer)  # a forward may have put another one there, or written into it
        if not torch.equal(buffer, before):
            with torch.no_grad():
                buffer.copy_(before)
    shape = (*found.shape, 0, 0, 0)[:3]
    if found.ndim != 3 or shape[:2] != (1, length) or shape[2] < NUM_TOKENS:
        config.refuse(
            "model",
            f"it returns {found.dtype} {tuple(found.shape)} for {length} bytes; expected logits "
            f"(1, {length}, {NUM_TOKENS} or more), one a possible byte",
        )
    if not bool(found.isfinite().all()):
        config.refuse("model", "it returns logits that are not finite")


def _sent(config: Config, stage: int, module: nn.Module, given: Tensor) -> Tensor:
    """Returns what a stage sends to the next one, cut off from the stage as by a transfer."""
    layers = [name for name, _ in module.named_children()]
    who = f"stage {stage} (layers {layers[0]} to {layers[-1]})"
    try:
        found: object = module(given)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody's code
        told = f"{who} fails on {given.dtype} {tuple(given.shape)}: {in_words(error)}"
        config.refuse("model", told, cause=error)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        kind = type(found).__name__
        told = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {kind}"
        config.refuse(
            "model",
            f"{who} returns {told}; expected one tensor of floats: other boundaries may do",
        )
    return found.detach().requires_grad_()


def try_out_optimizer(config: Config, device: torch.device) -> set[str]:
    """Makes a step of the optimizer and every step of its learning rate, on a matrix of its own.

    Returns:
        What the optimizer keeps of a matrix, by its names in the optimizer's state.

    Raises:
        ConfigError: If torch takes options and fails with them later.
    """
    probe = nn.Parameter(torch.ones(2, 2, device=device))
    probe.grad = torch.ones_like(probe)
    optimizer = make_optimizer(config, [{"params": [probe]}])
    learning_rate = make_learning_rate(config, optimizer)
    try:
        optimizer.step()
    except Exception as error:  # noqa: BLE001 - whatever torch says of an option
        config.refuse("optimizer", f"its first step fails: {error!r}", cause=error)
    kept = set(optimizer.state[probe])
    if learning_rate is None:
        return kept
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses the optimizer's steps between these
            for _ in range(config.train.steps):
                learning_rate.step()
    except Exception as error:  # noqa: BLE001 - whatever torch says of an option
        told = f"fails within {config.train.steps} steps: {error!r}"
        config.refuse("optimizer.schedule", told, cause=error)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not all(map(math.isfinite, rates)):
        config.refuse("optimizer.schedule", f"ends with the learning rate {rates[0]}")
    return kept
