"""Audits DeepSpeed's PipelineModule, by engine.train_batch. Embedding and head are tied.

pipegrad audit benchmarks/audit/deepspeed_pipeline.py:default_clipping --ranks 2

All ranks are stages of one pipeline. `two_stages` makes replicas of two stages.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shared import (
    LAYERS,
    LEARNING_RATE,
    MICROBATCHES,
    ROWS,
    Block,
    Embedding,
    batches,
    loss_fn,
    tied_layers,
)
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.audit import Audit, of_deepspeed

os.environ.setdefault("DS_ACCELERATOR", "cpu")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def no_clipping() -> Audit:
    """float32, without ZeRO, and ``gradient_clipping`` is 0."""
    return _audit({"gradient_clipping": 0.0})


def default_clipping() -> Audit:
    """The same, and the configuration says nothing about clipping: DeepSpeed then clips to 1."""
    return _audit({})


def two_stages() -> Audit:
    """As `no_clipping`, in pipelines of two stages: with 4 ranks there are two replicas."""
    return _audit({"gradient_clipping": 0.0}, num_stages=2)


def padding() -> Audit:
    """As `no_clipping`; microbatches have different numbers of targets."""
    return _audit({"gradient_clipping": 0.0}, has_padding=True)


def zero_1() -> Audit:
    """ZeRO 1, clipped to 1."""
    return _audit({"zero_optimization": {"stage": 1}})


def bfloat16() -> Audit:
    """bf16, clipped to 1."""
    return _audit({"bf16": {"enabled": True}})


def _head(tied: Embedding, hidden: Tensor) -> Tensor:
    return functional.linear(hidden, tied.weight)


def _audit(
    config: Mapping[str, Any],
    *,
    num_stages: int | None = None,
    has_padding: bool = False,
) -> Audit:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.utils import safe_get_full_grad

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = tied_layers()
    layers = [
        TiedLayerSpec("embed", Embedding),
        *[LayerSpec(Block) for _ in range(LAYERS)],
        TiedLayerSpec("embed", Embedding, forward_fn=_head),
    ]
    num_stages = num_stages or dist.get_world_size()
    net = PipelineModule(layers, num_stages=num_stages, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=LEARNING_RATE),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICROBATCHES,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            **config,
        },
    )
    replicas = dist.get_world_size() // num_stages
    data = batches(num_replicas=replicas, has_padding=has_padding)
    audit = of_deepspeed(engine, model=model, batches=data)
    if "bf16" in config:
        return replace(audit, gradients=partial(_gradients, net, safe_get_full_grad))
    if "zero_optimization" in config:
        return replace(audit, gradients=partial(_gradients, net, partial(_of_zero, engine)))
    return audit


def _gradients(net: nn.Module, gradient: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Returns gradients by name, as the inner optimizer gets them."""
    return {name: gradient(parameter) for name, parameter in net.named_parameters()}


def _of_zero(engine: Any, parameter: Tensor) -> Tensor:  # noqa: ANN401 - DeepSpeed's
    """Returns a parameter's gradient, from the partitions of all replicas."""
    flat = engine.optimizer.single_partition_of_fp32_groups[0].grad
    full = torch.zeros(parameter.numel())
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:  # a part of it is in this rank's partition
        low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
        part = flat[high.start : high.start + high.numel]
        full[low.start : low.start + low.numel] = part
    dist.all_reduce(full, group=engine.grid.get_data_parallel_group())
    return full.view_as(parameter)
