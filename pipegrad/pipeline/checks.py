"""Checks: warn of conditions that make training differ from one process, without an error.

They run in the training steps in which ranks compare their batches, because a model may be put into
evaluation mode between two steps. A stage that runs in chunks of time is checked before its first
forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Number
from typing import TypeGuard

import torch
from torch import Tensor, nn

from pipegrad.comm.agreement import warn_once
from pipegrad.model.suspects import begin_of
from pipegrad.model.wrappers import fsdp_modules
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.wiring import WiredPipeline

Check = Callable[[], None]
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_FEW = 32  # tokens, enough to find out whether chunks see each other


def checks_of(pipeline: WiredPipeline, name: str) -> list[Check]:
    """Returns the checks of this rank."""
    stages, mixed = pipeline.stages, pipeline.mixed
    checks: list[Check] = [
        partial(_warn_of_evaluation_mode, stages, name),
        partial(_warn_of_batch_norm, pipeline, name),
    ]
    if mixed is not None and pipeline.topology.rank == mixed[0]:
        checks.append(partial(_warn_of_mixed_models, stages, mixed, _begins(stages), name))
    return checks


def _warn_of_evaluation_mode(stages: Sequence[Stage], name: str) -> None:
    """Warns of dropout in a training step whose modules are all in evaluation mode."""
    parts = [named for stage in stages for named in stage.module.named_modules()]
    drops = next((name for name, part in parts if _has_dropout(part)), None)
    if drops is not None and not any(part.training for _, part in parts):
        warn_once(
            f"a training step, and all modules of a rank are in evaluation mode, so {drops!r} "
            f"drops nothing out. from_pretrained() of transformers returns such models. Call "
            f"train() of the model before the cut, or of each stage's module",
            f"evaluation mode {name}",
        )


def _has_dropout(module: nn.Module) -> bool:
    is_dropout = "Dropout" in type(module).__name__
    rates = [p for n, p in vars(module).items() if "dropout" in n or (is_dropout and n == "p")]
    return any(isinstance(p, float) and p > 0 for p in rates)


def _warn_of_batch_norm(pipeline: WiredPipeline, name: str) -> None:
    """Warns of BatchNorm in training mode, if it does not see the whole batch."""
    parts = (
        (part_name, stage.index)
        for stage in pipeline.stages
        for part_name, part in stage.module.named_modules()
        if isinstance(part, _BATCH_NORMS) and part.training
    )
    norm, stage = next(parts, ("", -1))
    number = len(pipeline.topology.ranks_along(pipeline.topology.data_axes))
    replicas = f" of one of {number} replicas, which evaluate by statistics of their own" * (
        number > 1
    )
    if stage >= 0 and (pipeline.schedule.num_microbatches > 1 or replicas):
        warn_once(
            f"{norm!r} of stage {stage} is a BatchNorm: it normalizes by the rows of a "
            f"microbatch{replicas}, and one process by those of the batch. GroupNorm and LayerNorm "
            f"look at one row alone. If it stays: few microbatches, momentum divided by their "
            f"number, and the mean of its buffers over replicas before an evaluation",
            f"batch norm {name}",
        )


def _warn_of_mixed_models(
    stages: Sequence[Stage], ranks: tuple[int, int], begins: list[str], name: str
) -> None:
    """Warns of stages that train on from the first values of different models."""
    if begins == _begins(stages):
        warn_once(
            f"ranks {ranks[0]} and {ranks[1]} have cut models with different first "
            f"values, as after another torch.manual_seed on each rank, and their stages start "
            f"with them: they are a mix of several models. Set one seed on all ranks before "
            f"the model is made, or load one checkpoint into all stages",
            f"mixed models {name}",
        )


def _begins(stages: Sequence[Stage]) -> list[str]:
    return [begin_of(stage.module) for stage in stages]


# Chunks of time.


def warn_of_blind(stage: Stage, values: Sequence[object], key: str) -> None:
    """Warns once of a stage whose chunks do not see each other, as a whole sequence does.

    A few tokens run in evaluation mode, as one sequence and in two chunks, and the outputs are
    compared. They differ if a layer looks at other positions and carries too little of them.
    """
    lengths = {x.shape[1] for x in values if _has_time(x)}
    is_plain = all(isinstance(x, Tensor | Number | str | None) for x in values)
    few = min([_FEW, *lengths])
    # Another mode may be more than a flag: some adapters write into their weights.
    is_plain &= all(type(part).train is nn.Module.train for part in stage.module.modules())
    if len(lengths) != 1 or few < 2 or not is_plain or fsdp_modules({0: stage.module})[0]:
        return
    parameters = {id(p): p for p in stage.module.parameters()}
    devices = {p.device for p in parameters.values() if p.device.type != "cpu"}
    try:
        with torch.no_grad(), torch.random.fork_rng([*devices]):
            # A copy with the same parameters, because a forward may write buffers or attributes.
            alike = copy.copy(stage)
            alike.__dict__.pop("binding", None)
            alike.module = copy.deepcopy(stage.module, parameters)
            for part in alike.module.modules():
                part.training = False
            whole, again = (_few(alike, values, [(0, few)]) for _ in range(2))
            cut = _few(alike, values, [(0, few // 2), (few // 2, few)])
    except Exception:  # noqa: BLE001 - the step itself raises the error
        return
    if cut.shape != whole.shape or not whole.is_floating_point() or not torch.equal(whole, again):
        return
    finfo = torch.finfo(whole.dtype)
    off = float((cut - whole).abs().max()) / max(float(whole.abs().max()), finfo.tiny)
    if off > finfo.eps**0.5:
        warn_once(
            f"stage {stage.index}: a sequence in two chunks of time gives other outputs than at "
            f"once, by {off:.1g} of the largest. What looks at other positions, or counts them, "
            f"must carry what it needs: Stage(carry=...)",
            key,
        )


def _few(stage: Stage, values: Sequence[object], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the outputs of a few tokens that go through a stage in parts."""
    number = len(values) - len(stage.carry)
    state, outputs = list(values[number:]), list[Tensor]()
    for begin, end in spans:
        part = [x[:, begin:end] if _has_time(x) else x for x in values[:number]]
        returned = stage.forward([*part, *state])
        state = list(returned[len(returned) - len(stage.carry) :]) if stage.carry else []
        outputs.append(returned[0])
    return torch.cat(outputs, 1)


def _has_time(value: object) -> TypeGuard[Tensor]:
    # Tokens, or a vector for each position: of two dimensions the second may be anything.
    return isinstance(value, Tensor) and value.dim() > 1 + value.is_floating_point()
