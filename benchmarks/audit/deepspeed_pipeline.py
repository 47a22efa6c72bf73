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
    VOCABULARY,
    WIDTH,
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


def options() -> Audit:
    """Options of the configuration, of PipelineModule and of the loss, each beside one process."""
    variants: dict[str, Callable[[], Audit]] = {
        "clipping, ZeRO 1": partial(
            _audit, {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.1}, max_norm=0.1
        ),
        "clipping": partial(_audit, {"gradient_clipping": 0.1}, max_norm=0.1),
        "padding": partial(_audit, _UNCLIPPED, has_padding=True),
        "label smoothing": partial(_audit, _UNCLIPPED, loss=_smoothed),
        "recompute": partial(
            _audit,
            _UNCLIPPED,
            activation_checkpoint_interval=1,
            checkpointable_layers=["Block"],
        ),
        "warm-up": partial(_audit, {**_UNCLIPPED, "scheduler": _WARM_UP}, warm_up=4),
        "AdamW": partial(_audit, {**_UNCLIPPED, "optimizer": _ADAMW}),
        "Muon": partial(_audit, {**_UNCLIPPED, "optimizer": _MUON}),
        "Muon, untied": partial(_audit, {**_UNCLIPPED, "optimizer": _MUON}, is_tied=False),
    }
    return replace(_audit(_UNCLIPPED), variants=variants)


_UNCLIPPED: Mapping[str, Any] = {"gradient_clipping": 0.0}
_ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
_MUON = {"type": "Muon", "params": {"lr": 0.01, "weight_decay": 0.1}}
_WARM_UP = {
    "type": "WarmupLR",
    "params": {
        "warmup_min_lr": LEARNING_RATE / 4,
        "warmup_max_lr": LEARNING_RATE,
        "warmup_num_steps": 4,
        "warmup_type": "linear",
    },
}


def _smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), label_smoothing=0.1)


class _OneProcess:
    """What updates the uncut model: torch, and DeepSpeed's Muon for the matrices of blocks."""

    def __init__(
        self, optimizer: Mapping[str, Any] | None, max_norm: float, warm_up: int, model: nn.Module
    ) -> None:
        self._parameters, self._max_norm = list(model.parameters()), max_norm
        options = {**optimizer["params"]} if optimizer else {}
        options.pop("torch_adam", None)
        self._optimizer: torch.optim.Optimizer
        if optimizer is None:
            self._optimizer = torch.optim.SGD(self._parameters, lr=LEARNING_RATE)
        elif optimizer["type"] == "AdamW":
            self._optimizer = torch.optim.AdamW(self._parameters, **options)
        else:
            from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam

            blocks = {
                id(p): p for m in model.modules() if isinstance(m, Block) for p in m.parameters()
            }
            matrices = [p for p in blocks.values() if p.ndim == 2]
            others = [p for p in self._parameters if not any(p is m for m in matrices)]
            self._optimizer = SingleDeviceMuonWithAuxAdam(
                [
                    {"params": matrices, "use_muon": True, **options},
                    {"params": others, "use_muon": False, **options},
                ]
            )
        # "From min lr to max lr over warmup_num_steps steps", says DeepSpeed's WarmupLR.
        self._rate = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, start_factor=1 / warm_up, total_iters=warm_up
        )

    def step(self) -> None:
        """Updates the model."""
        nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        self._optimizer.step()
        self._rate.step()


def _head(tied: Embedding, hidden: Tensor) -> Tensor:
    return functional.linear(hidden, tied.weight)


def _audit(
    config: Mapping[str, Any],
    *,
    num_stages: int | None = None,
    has_padding: bool = False,
    loss: Callable[[Tensor, Tensor], Tensor] = loss_fn,
    max_norm: float = 1e9,
    warm_up: int = 1,
    is_tied: bool = True,
    **more: Any,  # noqa: ANN401 - of PipelineModule
) -> Audit:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.utils import safe_get_full_grad

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = tied_layers()
    ends = [
        TiedLayerSpec("embed", Embedding),
        TiedLayerSpec("embed", Embedding, forward_fn=_head),
    ]
    if not is_tied:
        model[-1].weight = nn.Parameter(model[0].weight.detach().clone())
        ends = [LayerSpec(Embedding), LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)]
    layers = [ends[0], *[LayerSpec(Block) for _ in range(LAYERS)], ends[1]]
    num_stages = num_stages or dist.get_world_size()
    net = PipelineModule(
        layers, num_stages=num_stages, loss_fn=loss, partition_method="uniform", **more
    )
    if not is_tied:  # DeepSpeed makes layers anew on each rank
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(model.get_parameter(name))
    own = None if "optimizer" in config else torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=own,
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
    one = partial(_OneProcess, config.get("optimizer"), max_norm, warm_up)
    audit = of_deepspeed(engine, model=model, batches=data, optimizer=one)
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
