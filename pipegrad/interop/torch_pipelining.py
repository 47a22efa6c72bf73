"""attach: exact gradients on any schedule of torch.distributed.pipelining, with one line.

A torch schedule tells us of a step through
``schedule.step``, of a stage's forwards through ``stage.forward_one_chunk``, of its last backward
through ``stage.backward_one_chunk``, and of its final gradients (REDUCE_GRAD) through
``stage.perform_reduce_grad`` or, in the oldest runtime, ``stage.scale_grads``. These are replaced
on the instances; torch itself is left alone.

Where something of a step raises on a rank, the rank runs the rest of the step all the same, on
zeros: so no other rank waits for it in torch's receives, and all raise at the end of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pipegrad.comm.agreement import AGREE_SECONDS, agree
from pipegrad.errors import PlanError
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.torch_failure import TorchFailure, refuse_other_shapes
from pipegrad.interop.torch_schedule import (
    TorchSchedule,
    check_sharded,
    check_split_backward,
    divisor,
    leave,
    placed_on,
    replace,
    stage_ticks,
    stages_of,
)
from pipegrad.model.ties import Tied
from pipegrad.model.wrappers import is_fsdp2
from pipegrad.plan.check_replicas import refuse_loss_parameters
from pipegrad.plugins.handler import DEFAULT_HANDLERS, HandlerSpec
from pipegrad.topology import Topology

if TYPE_CHECKING:
    from pipegrad.interop.private import PipelineStageBase


def attach(
    schedule: TorchSchedule,
    *,
    topology: Topology,
    tied: Tied = (),
    handlers: Sequence[HandlerSpec] = DEFAULT_HANDLERS,
    **options: Any,  # noqa: ANN401 - GradientSync's own, checked there
) -> GradientSync:
    """Makes ``schedule.step`` leave the gradients that one process would have computed.

    Call it on all ranks, once, before the optimizer is made of ``sync.optimizer_parameters()``, or
    after it where all placements are REPLICATE. From then on each step prepares, reduces and
    finishes by itself, and forwards wait for parameters that are on their way; the schedule divides
    by the number of microbatches (``scale_grads``) once for each parameter, when it is final.
    ``schedule.eval`` and schedules without a loss reduce nothing. To accumulate over several steps,
    run all but the last one under ``with sync.accumulate():``.

    What raises in a step on one rank is an error on all: they make all transfers of the step, of
    zeros, and raise at its end in the words of the first. A rank that has ended the step by then,
    and has no gradient to reduce with one that failed, does not hear of it. An interrupt within one
    of torch's own receives cannot be told, nor what raises among the collectives of FSDP2.

    Of stages that FSDP2 shards, which reduces over the data ranks, give ``["pipeline-shared"]`` as
    handlers: ties are summed behind FSDP2's own reduction.

    Args:
        schedule: Any schedule of ``torch.distributed.pipelining``, its stages manual or traced.
        topology: Ranks; which stage is where is taken from the schedule.
        tied: Parameters that several stages hold: `find_tied` of the uncut model, mappings
            stage -> name, or ``pipe.replicated_params`` of a traced model.
        handlers: Which gradients take which reduction.
        **options: Further arguments of `GradientSync`.

    Returns:
        The `GradientSync` that does it: for clipping, statistics, its plan.

    Raises:
        PlanError: If the schedule is attached already, or splits backward on torch before 2.13,
            whose split gradients are wrong (pytorch#180952); or splits it where FSDP2 reshards
            after forward, for which torch loses gradients; or if its loss has parameters that no
            stage holds. On all ranks alike.
        PipegradError: As `GradientSync` does.
    """
    stages = stages_of(schedule)

    def check() -> None:
        if any(not _sync_of(stage).is_closed for stage in stages if hasattr(stage, "_pipegrad")):
            raise PlanError(
                "this schedule is attached already; attach once, before training, or close() the "
                "GradientSync that attach returned, and attach again"
            )
        check_split_backward(schedule)
        check_sharded(schedule, stages)
        placed = placed_on(topology, stages[0])
        refuse_loss_parameters(schedule._loss_fn, [stage.submod for stage in stages], placed)

    agree("attach", check, timeout_seconds=options.get("agree_seconds", AGREE_SECONDS))
    for followed in (schedule, *stages):
        leave(followed)  # to an earlier one, which is closed
    placed = placed_on(topology, stages[0])
    sync = GradientSync(
        {stage.stage_index: stage.submod for stage in stages},
        placed,
        tied=tied,
        handlers=handlers,
        stage_ticks=stage_ticks(schedule, placed),
        **options,
    )
    failure = TorchFailure(schedule, sync)
    for stage in stages:
        _follow_stage(stage, sync, failure)
    _follow_step(schedule, sync, failure)
    return sync


def _follow_step(schedule: TorchSchedule, sync: GradientSync, failure: TorchFailure) -> None:
    step = schedule.step

    @functools.wraps(step)
    def synced_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
        if schedule._has_backward:
            sync.refuse_closed()
        failure.begin()
        result = None
        try:
            _begin_step(schedule, sync)
            failure.prepared()
            result = step(*args, **kwargs)
            if failure.error is None:
                _end_step(schedule, sync, failure)
        except BaseException as error:  # noqa: BLE001 - raised below, or what came before it
            failure.fail(error)
            failure.finish_transfers()
        failure.raise_first()
        return result

    replace(schedule, {"step": synced_step})


def _begin_step(schedule: TorchSchedule, sync: GradientSync) -> None:
    if schedule._has_backward:
        sync.prepare(divisor=divisor(schedule))
    elif not sync.is_closed:
        sync.publish_if_due()
        sync.reshard()


def _end_step(schedule: TorchSchedule, sync: GradientSync, failure: TorchFailure) -> None:
    if schedule._has_backward:
        for stage in stages_of(schedule):  # a hand-written order may have no REDUCE_GRAD
            if stage.stage_index not in failure.reduced:
                stage.scale_grads(1)
        if failure.error is not None:
            return
        sync.finish()
    if not schedule._has_backward or sync.is_accumulating:  # else finish has looked
        failure.refuse_failed()


def _follow_stage(stage: PipelineStageBase, sync: GradientSync, failure: TorchFailure) -> None:
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
        output = forward(*args, **kwargs)
        refuse_other_shapes(stage)
        return output

    def final(grad_scale_factor: float) -> None:  # noqa: ARG001 - scaling is prepare's divisor
        # GPipe and 1F1B come here in eval() too, and would divide gradients that are already there.
        if stage.has_backward:
            failure.reduced.add(index)
            if reduce and is_fsdp2(stage.submod) and not sync.is_accumulating:
                reduce(1)  # FSDP2's own reduction alone
            sync.stage_final(index)

    methods: dict[str, Callable[..., object]] = {
        "forward_one_chunk": awaited_forward,
        "backward_one_chunk": watched_backward,
        "perform_reduce_grad": final,
        "scale_grads": final,
    }
    replace(stage, methods)
    failure.follow(stage)
    stage._pipegrad = sync  # type: ignore[attr-defined]


def _sync_of(stage: PipelineStageBase) -> GradientSync:
    return stage._pipegrad  # type: ignore[attr-defined,no-any-return]
