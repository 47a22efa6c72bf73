"""Sizes: how a number of ranks fits a configuration. No code of the user is run."""

from __future__ import annotations

import math

from pipegrad.train.config import Config
from pipegrad.train.data.dataset import check_data


def sizes_of(config: Config, num_ranks: int | None = None) -> tuple[int, int, int, int]:
    """Returns how many ranks, pipeline ranks, ranks along ``dp``, and parts of a batch there are.

    Args:
        config: The configuration.
        num_ranks: Number of all ranks. None means as many as the configuration needs.

    Raises:
        ConfigError: If keys contradict each other or the number of ranks.
    """
    check_data(config)
    _check_saves(config)
    parallel = config.parallel
    inside = math.prod(parallel.dimensions.values())
    num_ranks = num_ranks or (parallel.pipeline or 1) * (parallel.data or 1) * inside
    pipeline, data = _pipeline_and_data(config, num_ranks)
    num_shares = _num_shares(config, data)
    if data % parallel.data_shard or (
        parallel.data_shard > 1 and parallel.data_dimensions != ["dp"]
    ):
        config.refuse(
            "parallel.data_shard",
            f"expected a divisor of the {data} data-parallel ranks, and data_dimensions = ['dp']",
        )
    share = num_shares * parallel.microbatches
    if config.data.dataset is None and config.data.batch_size % share:
        config.refuse(
            "data.batch_size",
            f"{num_shares} replicas x {parallel.microbatches} microbatches do not divide it: "
            f"choose a multiple of {share}",
        )
    return num_ranks, pipeline, data, num_shares


def _check_saves(config: Config) -> None:
    """Refuses keys of ``[train]`` about checkpoints that have no effect."""
    train = config.train
    if not train.save:
        for name in ("save_every", "keep_last", "keep_every"):
            if name in train.model_fields_set and getattr(train, name) is not None:
                config.refuse(f"train.{name}", "has no effect: train.save = false saves nothing")
    if train.keep_every is not None and train.save_every is None:
        config.refuse("train.keep_every", "has no effect without train.save_every")
    if train.keep_every is not None and train.keep_every % (train.save_every or 1):
        config.refuse(
            "train.keep_every",
            f"should be a multiple of train.save_every, {train.save_every}: no checkpoint is "
            f"written after other steps",
        )


# Sizes are checked in an order: the most specific message comes first. So one rank of a larger job
# is refused before anything is divided.


def _pipeline_and_data(config: Config, num_ranks: int) -> tuple[int, int]:
    parallel = config.parallel
    pipeline, data, inside = (
        parallel.pipeline,
        parallel.data,
        math.prod(parallel.dimensions.values()),
    )
    named = {f"parallel.dimensions.{n}": size for n, size in parallel.dimensions.items()}
    if len(named) > 1:
        named["parallel.dimensions"] = inside
    needed = (pipeline or 1) * (data or 1) * inside
    if num_ranks == 1 < needed:
        key_name = "pipeline" if pipeline else "data" if data else "dimensions"
        config.refuse(
            f"parallel.{key_name}",
            f"this is one rank of {needed}: start them by `torchrun --nproc-per-node {needed} "
            f"-m pipegrad train {config.path}`",
        )
    for key, size in {"parallel.pipeline": pipeline, "parallel.data": data, **named}.items():
        if size is not None and num_ranks % size:
            config.refuse(
                key,
                f"{num_ranks} ranks cannot be cut into groups of {size}: start a multiple "
                f"of {size}, or choose a divisor of {num_ranks}",
            )
    known = {"pipeline": pipeline, "data": data, **parallel.dimensions}
    sizes = {name: size for name, size in known.items() if size is not None}
    product = math.prod(sizes.values())
    whole = pipeline is not None and data is not None
    if num_ranks % product or (whole and product != num_ranks):
        config.refuse(
            f"parallel.{'data' if data else 'pipeline' if pipeline else 'dimensions'}",
            f"{' x '.join(f'{name} {size}' for name, size in sizes.items())} are {product} "
            f"ranks, but there are {num_ranks}: start "
            f"{'that many' if whole else 'a multiple'}, or leave one of pipeline and data out",
        )
    pipeline = pipeline or num_ranks // product
    return pipeline, num_ranks // (pipeline * inside)


def _num_shares(config: Config, data: int) -> int:
    """Returns the size of the data dimensions."""
    parallel = config.parallel
    sizes = {"dp": data, **parallel.dimensions}
    names = parallel.data_dimensions
    if len(set(names)) < len(names) or not set(names) <= set(sizes):
        config.refuse("parallel.data_dimensions", f"expected of {[*sizes]}, once each")
    return math.prod(sizes[name] for name in names)
