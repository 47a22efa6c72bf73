"""attach: exact gradients on any schedule of torch.distributed.pipelining, with one line.

The only file that knows torch's private names. A torch schedule tells us of a step through
``schedule.step``, of a stage's forwards through ``stage.forward_one_chunk``, of its last backward
through ``stage.backward_one_chunk``, and of its final gradients (REDUCE_GRAD) through
``stage.perform_reduce_grad`` or, in the oldest runtime, ``stage.scale_grads``. These are replaced
on the instances; torch itself is left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipegrad.agreement import AGREE_SECONDS, agree
from pipegrad.errors import PlanError, ReduceError, TopologyError
from pipegrad.gradients.shards import fsdp_modules
from pipegrad.gradients.shared import Shared, unwrapped
from pipegrad.gradients.sync import GradientSync
from pipegrad.handler import HandlerSpec
from pipegrad.topology import Topology

TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti

_BACKWARDS = ("B", "W", "I")  # torch's letters: full backward, weight gradient, input gradient


def attach(
    schedule: TorchSchedule,
    *,
    topology: Topology,
    shared: Shared = (),
    handlers: Sequence[HandlerSpec] = ("pipeline-shared", "data-parallel"),
    **options: Any,  # noqa: ANN401 - GradientSync's own, checked there
) -> GradientSync:
    """Makes ``schedule.step`` leave the gradients that one process would have computed.

    Call it on all ranks, once, before the optimizer is made of ``sync.optimizer_parameters()``, or
    after it where all placements are REPLICATE. From then on each step prepares, reduces and
    finishes by itself, and forwards wait for parameters that are on their way; the schedule divides
    by the number of microbatches (``scale_grads``) once for each parameter, when it is final.
    ``schedule.eval`` and schedules without a loss reduce nothing. To accumulate over several steps,
    run all but the last one under ``with sync.accumulate():``.

    Of stages that FSDP2 shards, which reduces over the data ranks, give ``["pipeline-shared"]`` as
    handlers: ties are summed behind FSDP2's own reduction.

    Args:
        schedule: Any schedule of ``torch.distributed.pipelining``, its stages manual or traced.
        topology: Ranks; which stage is where is taken from the schedule.
        shared: Parameters that several stages hold: `find_shared` of the uncut model, mappings
            stage -> name, or ``pipe.replicated_params`` of a traced model.
        handlers: Which gradients take which reduction.
        **options: Further arguments of `GradientSync`.

    Returns:
        The `GradientSync` that does it: for clipping, statistics, its plan.

    Raises:
        PlanError: If the schedule is attached already, or splits backward on torch before 2.13,
            whose split gradients are wrong (pytorch#180952); or splits it where FSDP2 reshards
            after forward, for which torch loses gradients. On all ranks alike.
        PipegradError: As `GradientSync` does.
    """
    stages = _stages(schedule)

    def check() -> None:
        if any(not _sync_of(stage).is_closed for stage in stages if hasattr(stage, "_pipegrad")):
            raise PlanError(
                "this schedule is attached already; attach once, before training, or close() the "
                "GradientSync that attach returned, and attach again"
            )
        _check_split_backward(schedule)
        _check_sharded(schedule, stages)
        _placed(topology, stages[0])

    agree("attach", check, timeout_seconds=options.get("agree_seconds", AGREE_SECONDS))
    for followed in (schedule, *stages):
        _leave(followed)  # to an earlier one, which is closed
    placed = _placed(topology, stages[0])
    sync = GradientSync(
        {stage.stage_index: stage.submod for stage in stages},
        placed,
        shared=shared,
        handlers=handlers,
        stage_ticks=_stage_ticks(schedule, placed),
        **options,
    )
    for stage in stages:
        _follow_stage(stage, sync)
    _follow_step(schedule, sync)
    return sync


def is_profiled() -> bool:
    """Whether a torch profiler is recording. Asking costs less than a range that nobody records."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def inner_module(module: nn.Module) -> nn.Module:
    """Returns the module whose forward a wrapper of torch calls: compiled, checkpointed or DDP."""
    while True:
        found = getattr(module, "_orig_mod", None)
        found = found or getattr(module, "_checkpoint_wrapped_module", None) or unwrapped(module)
        if not isinstance(found, nn.Module) or found is module:
            return module
        module = found


def script_arguments(function: Any) -> list[str] | None:  # noqa: ANN401 - its schema is C++'s
    """Returns the names of what a scripted or traced function takes; None of any other."""
    if not isinstance(function, torch.ScriptMethod | torch.ScriptFunction):
        return None
    schema: Any = function.schema
    return [argument.name for argument in schema.arguments if argument.name != "self"]


def is_arriving(tensor: torch.Tensor) -> bool:
    """Returns whether a collective of torch, of tensor parallelism say, still writes a tensor."""
    return isinstance(tensor, AsyncCollectiveTensor)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has no memory of its own, but stands for other tensors."""
    return is_traceable_wrapper_subclass(tensor)


def num_holders(tensor: torch.Tensor) -> int:
    """Returns how many tensors share the memory of one, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # but for `storage` itself


def end_backward(part: FSDPModule) -> None:
    """Does for an outermost FSDP2 module what autograd calls FSDP2 for behind each backward."""
    state = part._get_fsdp_state()
    if state._is_root:
        state._root_post_backward_final_callback()


def forget_backwards(parts: Iterable[FSDPModule]) -> None:
    """Lets go of all that FSDP2 keeps of a step that failed, what has added up as well."""
    for part in parts:
        state = part._get_fsdp_state()
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        if state._is_root:
            state._reset_iter_state()


def _follow_step(schedule: TorchSchedule, sync: GradientSync) -> None:
    step = schedule.step
    modules = {stage.stage_index: stage.submod for stage in _stages(schedule)}

    @functools.wraps(step)
    def synced_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
        if not schedule._has_backward:
            if not sync.is_closed:
                sync.publish_if_due()
                sync.reshard()
            return step(*args, **kwargs)
        begun = False
        try:
            sync.prepare(divisor=_divisor(schedule))
            begun = True
            result = step(*args, **kwargs)
        except Exception as error:
            cause = sync.abort(error, begun=begun)
            for parts in fsdp_modules(modules).values():
                forget_backwards(parts)
            if begun and cause is not None:
                raise ReduceError(f"a step failed on another rank: {cause}") from error
            raise
        sync.finish()
        return result

    _replace(schedule, step=synced_step)


def _follow_stage(stage: _PipelineStageBase, sync: GradientSync) -> None:
    backward = stage.backward_one_chunk
    index = stage.stage_index

    @functools.wraps(backward)
    def watched_backward(
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        # A dw_builder writes gradients behind autograd's back: then only the stage's end counts.
        if stage.has_backward and last_backward and full_backward and stage.dw_builder is None:
            sync.stage_last_backward(index)
        backward(bwd_chunk_id, loss, full_backward, last_backward)

    forward, reduce = stage.forward_one_chunk, getattr(stage, "perform_reduce_grad", None)

    @functools.wraps(forward)
    def awaited_forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
        if not sync.is_closed:
            sync.stage_first_use(index)
        return forward(*args, **kwargs)

    def final(grad_scale_factor: float) -> None:  # noqa: ARG001 - scaling is prepare's divisor
        # GPipe and 1F1B come here in eval() too, and would divide gradients that are already there.
        if stage.has_backward:
            if reduce and isinstance(stage.submod, FSDPModule) and not sync.is_accumulating:
                reduce(1)  # FSDP2's own reduction alone
            sync.stage_final(index)

    _replace(
        stage,
        forward_one_chunk=awaited_forward,
        backward_one_chunk=watched_backward,
        perform_reduce_grad=final,
        scale_grads=final,
    )
    stage._pipegrad = sync  # type: ignore[attr-defined]


def _replace(followed: object, **methods: Callable[..., object]) -> None:
    """Puts methods in the place of an instance's own, which `_leave` brings back."""
    vars(followed)["_pipegrad_before"] = {n: vars(followed).get(n) for n in methods}
    vars(followed).update(methods)


def _leave(followed: object) -> None:
    """Gives an instance the methods back that it had before `attach`."""
    for name, method in vars(followed).pop("_pipegrad_before", {}).items():
        del vars(followed)[name]
        if method is not None:
            vars(followed)[name] = method


def _sync_of(stage: _PipelineStageBase) -> GradientSync:
    return stage._pipegrad  # type: ignore[attr-defined,no-any-return]


def _stages(schedule: TorchSchedule) -> list[_PipelineStageBase]:
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    return sorted(schedule._stages, key=lambda stage: stage.stage_index)


def _divisor(schedule: TorchSchedule) -> float:
    return float(schedule._n_microbatches) if schedule.scale_grads else 1.0


def _placed(topology: Topology, stage: _PipelineStageBase) -> Topology:
    """Returns `topology` with the schedule's stages on it."""
    world = dist.group.WORLD
    assert world is not None
    ranks = dist.get_process_group_ranks(stage.group or world)
    pipeline = topology.ranks_along(topology.pipeline)
    if ranks != list(pipeline):
        raise TopologyError(
            f"stage {stage.stage_index} runs its pipeline over ranks {ranks}, the topology over "
            f"{list(pipeline)}: give the stages group=topology.group_along("
            f"{topology.pipeline!r})"
        )
    mapping = stage.stage_index_to_group_rank
    places = tuple(mapping[index] for index in range(stage.num_stages))
    one_each = tuple(range(len(pipeline)))
    if topology.stage_to_rank not in (places, one_each):
        raise TopologyError(
            f"the schedule puts stages on pipeline ranks {places}, the topology on "
            f"{topology.stage_to_rank}: leave stage_to_rank out, attach takes the schedule's"
        )
    return topology.with_stages(places)


def _check_split_backward(schedule: TorchSchedule) -> None:
    splits = any(letter in ("I", "W") for _, _, letter in _backwards(schedule))
    if splits and torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        raise PlanError(
            f"{type(schedule).__name__} splits backward, and torch {torch.__version__} computes "
            f"wrong gradients then (pytorch#180952): use torch 2.13, or a schedule without split"
        )


def _check_sharded(schedule: TorchSchedule, stages: Sequence[_PipelineStageBase]) -> None:
    """Refuses FSDP2 where torch looks for gathered parameters that are not there any more."""
    splits = any(letter == "W" for _, _, letter in _backwards(schedule))
    for stage in stages if splits else ():
        for part in fsdp_modules({0: stage.submod})[0]:
            state = part._get_fsdp_state()
            is_root = stage.submod in state._modules  # which torch itself keeps gathered
            if any(g._reshard_after_forward and not is_root for g in state._fsdp_param_groups):
                raise PlanError(
                    f"{type(schedule).__name__} splits backward, and stage {stage.stage_index} has "
                    f"modules that FSDP2 reshards after forward: torch loses their gradients then; "
                    f"give fully_shard reshard_after_forward=False, or take another schedule"
                )


def _stage_ticks(schedule: TorchSchedule, topology: Topology) -> list[int] | None:
    """Returns when each stage's last backward is, in the schedule's own time steps."""
    ticks: dict[int, int] = {}
    for tick, stage, letter in _backwards(schedule):
        if letter != "I":
            ticks[stage] = max(tick, ticks.get(stage, 0))
    if sorted(ticks) != list(range(topology.num_stages)):
        return None
    return [ticks[stage] for stage in range(topology.num_stages)]


def _backwards(schedule: TorchSchedule) -> Iterable[tuple[int, int, str]]:
    """Yields time step, stage and letter of every backward; nothing for one stage a rank.

    There torch's list has no idle steps, so it tells no time, and nothing splits backward.
    """
    order = schedule.pipeline_order if isinstance(schedule, PipelineScheduleMulti) else {}
    for row in order.values():
        for tick, action in enumerate(row):
            for part in (action and action.sub_actions) or (action,):
                if part is not None and part.computation_type.value in _BACKWARDS:
                    yield tick, part.stage_index, part.computation_type.value
