"""torchtitan's trainer for tied models with pipeline parallelism, which torchtitan alone refuses.

``torchrun --nproc-per-node 4 -m pipegrad.interop.torchtitan ...`` takes the arguments of
``torchtitan.train``. In your own program, call `enable_tied_pipeline` before you make a Trainer.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from pipegrad.errors import PlanError
from pipegrad.interop.torch_pipelining import attach
from pipegrad.topology import Topology

_Titan = Any  # arguments and results of torchtitan's functions
_DATA = ("dp_replicate", "dp_shard", "cp")  # the dimensions over which FSDP2 reduces
_heads = WeakTensorKeyDictionary()  # tied weights that count in the norm as the embedding


@functools.cache  # torchtitan is changed once
def enable_tied_pipeline() -> None:
    """Lets torchtitan's Trainer train tied decoders in stages, with the gradients of one process.

    It serves all models that have ``enable_weight_tying``. Runs without a tie, or without a
    pipeline, stay as they are. FSDP2 still reduces over the data ranks; pipegrad sums the tie.

    Raises:
        PlanError: If torchtitan is not installed, or is not like 0.3, for which this was written.
    """
    try:
        from torchtitan.distributed import pipeline_parallel, utils
        from torchtitan.models.common.decoder import Decoder
        from torchtitan.trainer import Trainer

        changes = {
            (Decoder.Config, "update_from_config"): _allow_tie,
            (pipeline_parallel, "_split_module"): _untie_part,
            (Trainer, "__init__"): _attach,
            (Trainer, "pp_forward_backward_step"): _accumulate,
            (utils, "clip_grad_norm_"): _count_once,
        }
        originals = {attribute: getattr(*attribute) for attribute in changes}
    except (ImportError, AttributeError) as error:
        raise PlanError(f"{error}: enable_tied_pipeline needs torchtitan 0.3.0") from error
    for attribute, change in changes.items():
        setattr(*attribute, _changed(originals[attribute], change))


def _changed(original: _Titan, change: _Titan) -> _Titan:
    return functools.wraps(original)(lambda *args, **kwargs: change(original, *args, **kwargs))


def _allow_tie(update: _Titan, model: _Titan, **kwargs: _Titan) -> None:
    is_tied, model.enable_weight_tying = model.enable_weight_tying, False
    try:
        update(model, **kwargs)  # refuses tied models
    finally:
        model.enable_weight_tying = is_tied


def _untie_part(split: _Titan, whole: _Titan, names: list[str]) -> _Titan:
    part = split(whole, names)
    if getattr(part, "enable_weight_tying", False) and not (part.tok_embeddings and part.lm_head):
        part.enable_weight_tying = False
        # The embedding starts as the head of the uncut model does. `attach` overwrites the zeros.
        start = whole.lm_head._param_init
        if part.tok_embeddings:
            part.tok_embeddings._param_init = start
        if part.lm_head:
            part.lm_head._param_init = {**start, "weight": nn.init.zeros_}
    return part


def _attach(init: _Titan, trainer: _Titan, config: _Titan) -> None:
    init(trainer, config)
    dims, parts = trainer.parallel_dims, trainer.model_parts
    if not (dims.pp_enabled and getattr(trainer.model_config, "enable_weight_tying", False)):
        return
    axes = [(name, getattr(dims, name)) for name in ("pp", *_DATA, "tp")]
    trainer.tied_sync = attach(
        trainer.pp_schedule,
        topology=Topology.build(axes=axes, rank=dist.get_rank(), data=_DATA),
        tied=[["tok_embeddings.weight", "lm_head.weight"]],
        handlers=["pipeline-shared"],
    )
    trainer.tied_calls = itertools.count(1)
    _heads.update({p.lm_head.weight: None for p in parts if p.lm_head and not p.tok_embeddings})


def _accumulate(run: _Titan, trainer: _Titan, **kwargs: _Titan) -> _Titan:
    sync: _Titan = getattr(trainer, "tied_sync", None)
    more_to_come = sync and next(trainer.tied_calls) % trainer.gradient_accumulation_steps
    with sync.accumulate() if more_to_come else nullcontext():
        return run(trainer, **kwargs)


def _count_once(clip: _Titan, parameters: _Titan, max_norm: float, **kwargs: _Titan) -> _Titan:
    parameters = list(parameters)
    norm = clip([p for p in parameters if p not in _heads], max_norm, **kwargs)
    nn.utils.clip_grads_with_norm_([p for p in parameters if p in _heads], max_norm, norm)
    return norm


if __name__ == "__main__":
    enable_tied_pipeline()
    from torchtitan.train import main

    main()
