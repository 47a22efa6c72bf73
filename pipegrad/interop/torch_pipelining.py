"""attach: exact gradients on any schedule of torch.distributed.pipelining, with one line.

`attach` replaces methods on instances and leaves torch itself alone. Each method marks an event:

- ``schedule.step``: a step.
- ``stage.forward_one_chunk``: a forward of a stage.
- ``stage.backward_one_chunk``: a backward, and whether it is the last.
- ``stage.perform_reduce_grad``, ``stage.scale_grads`` and, of FSDP2 since torch 2.15,
  ``stage.wait_for_gradient_reduction``: gradients are final.

If a step raises on a rank, the job ends on all ranks, because they wait in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipegrad.comm.agreement import AGREE_SECONDS, agree
from pipegrad.comm.watch import watch
from pipegrad.errors import PlanError, StepError, root_of
from pipegrad.gradients.loose import LooseLeaves
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.private import forget_backwards, tree_map
from pipegrad.interop.torch_schedule import (
    TorchSchedule,
    check_split_backward,
    check_stages,
    divisor,
    forward_of,
    num_microbatches,
    refuse_other_shapes,
    refuse_written_outputs,
    renew_inputs,
    stage_ticks,
    stages_of,
    with_stages_of,
)
from pipegrad.model.ties import Tied
from pipegrad.model.wrappers import fsdp_modules, is_fsdp2
from pipegrad.plan.check import refuse_loss_parameters
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

    Call it on all ranks, once, before you make the optimizer by ``sync.optimizer``. If all
    placements are REPLICATE, an optimizer of your modules may be there already. Then each step
    prepares, reduces and finishes automatically, and forwards wait for the parameter sync. The
    schedule divides a gradient by the number of microbatches (``scale_grads``) once, when it is
    final.
    ``schedule.eval`` and schedules without a loss reduce nothing. To accumulate over several steps,
    run all steps but the last under ``with sync.accumulate():``.

    If a step raises on one rank, the job ends, because torch's stages wait for messages that the
    rank has not sent. All ranks raise a StallError that names the rank and its error, in later
    steps too. Go on from a checkpoint, or run the stages by a `Scheduler`, which goes on after a
    failed step.

    FSDP2 reduces over the data ranks. For stages that FSDP2 shards, give ``["pipeline-shared"]`` as
    handlers. Ties are then summed after FSDP2's own reduction.

    Args:
        schedule: Any schedule of ``torch.distributed.pipelining``, with manual or traced stages.
        topology: The ranks. The ranks of the stages are taken from the schedule.
        tied: Parameters that several stages hold: `find_tied` of the uncut model, mappings
            stage -> name, or ``pipe.replicated_params`` of a traced model.
        handlers: Gradient handlers, which choose the reduction of each gradient.
        **options: Further arguments of `GradientSync`: ``accessor``, ``agree_seconds``, and the
            fields of `GradientOptions`.

    Returns:
        The `GradientSync` of the schedule, for clipping, statistics and its plan.

    Raises:
        PlanError: If the schedule was attached before. If it splits backward on torch before 2.13,
            whose split gradients are wrong (pytorch#180952). If it splits backward and FSDP2
            reshards after forward, because torch then loses gradients. If its loss has parameters
            that no stage holds. On all ranks alike.
        PipegradError: As `GradientSync` does.
    """
    stages = stages_of(schedule)

    def check() -> None:
        if any(hasattr(stage, "_pipegrad") for stage in stages):
            raise PlanError(
                "this schedule is attached already: attach once, before training. After close() "
                "make another schedule, of new stages"
            )
        check_stages(stages)
        check_split_backward(schedule, stages)
        with_stages_of(topology, stages[0])  # refuses one that does not fit
        if any(stage.is_last for stage in stages):
            refuse_loss_parameters(schedule._loss_fn, [stage.submod for stage in stages])

    # Check everything that can fail on one rank alone inside `agree`, because all ranks must raise.
    # Replace methods only after that.
    agree("attach", check, timeout_seconds=options.get("agree_seconds", AGREE_SECONDS))
    staged = with_stages_of(topology, stages[0])
    sync = GradientSync(
        {stage.stage_index: stage.submod for stage in stages},
        staged,
        tied=tied,
        handlers=handlers,
        stage_ticks=stage_ticks(schedule, staged),
        **options,
    )
    reduced = set[int]()  # stages for which torch has called the reduction in this step
    loose = LooseLeaves(sync, {stage.stage_index: stage.submod for stage in stages})
    for stage in stages:
        _follow_stage(stage, sync, reduced, loose)
    _follow_step(schedule, sync, reduced, loose)
    return sync


def _follow_step(
    schedule: TorchSchedule, sync: GradientSync, reduced: set[int], loose: LooseLeaves
) -> None:
    step = schedule.step

    @functools.wraps(step)
    def synced_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
        if schedule._has_backward:
            sync.refuse_closed()
        with sync.bounded("schedule.step()"):
            is_begun = False
            reduced.clear()
            try:
                _begin_step(schedule, sync)
                if is_begun := schedule._has_backward:
                    loose.begin()
                    given = args, {k: x for k, x in kwargs.items() if k != "losses"}  # a result
                    args, copied = tree_map(partial(_divided, by=divisor(schedule)), given)
                    kwargs |= copied
                    kwargs |= _finalizing(schedule, sync, **kwargs)
                result = step(*args, **kwargs)
                if schedule._has_backward:
                    _complete(schedule, reduced)
                    loose.refuse(num_microbatches(schedule))
            except BaseException as error:
                _fail(schedule, sync, error, is_begun=is_begun)
                raise
            if schedule._has_backward:
                sync.finish()  # raises on all ranks alike, and has ended the step then
        return result

    vars(schedule)["step"] = synced_step


def _fail(
    schedule: TorchSchedule, sync: GradientSync, error: BaseException, *, is_begun: bool
) -> None:
    """Ends the job, because other ranks wait in torch for messages that this one will not send."""
    if (watched := watch()) is not None:
        watched.fail(root_of(error))  # torch wraps it
    elif schedule._has_backward:  # one rank alone may go on
        sync.abort(error, begun=is_begun)
        for stage in stages_of(schedule):
            forget_backwards(fsdp_modules({0: stage.submod})[0])


def _divided(value: object, *, by: float) -> object:
    """Returns an input with a hook that divides its gradient, because torch does not divide it."""
    if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
        value = value.view_as(value)
        value.register_hook(lambda gradient: gradient / by)
    return value


def _finalizing(
    schedule: TorchSchedule, sync: GradientSync, *, finalize_gradients: bool = True, **_: object
) -> dict[str, bool]:
    """Returns torch 2.15's argument for steps that accumulate; nothing for older versions.

    Raises:
        StepError: If it was given, and the steps do not accumulate.
    """
    if not finalize_gradients and not sync.is_accumulating:
        raise StepError(
            "finalize_gradients=False is torch's way to accumulate with FSDP2 alone, and this step "
            "would reduce: run it under `with sync.accumulate():` instead"
        )
    is_known = hasattr(schedule, "_finalize_gradients")
    return {"finalize_gradients": not sync.is_accumulating} if is_known else {}


def _begin_step(schedule: TorchSchedule, sync: GradientSync) -> None:
    if schedule._has_backward:
        sync.prepare(divisor=divisor(schedule))
    elif not sync.is_closed:
        sync.publish()
        # Parameters that FSDP2 gathered before the optimizer's step have old values.
        sync.reshard()


def _complete(schedule: TorchSchedule, reduced: set[int]) -> None:
    # Gradients become final here if a hand-written order has no REDUCE_GRAD.
    for stage in stages_of(schedule):
        if stage.stage_index not in reduced:
            stage.scale_grads(1)


def _follow_stage(
    stage: PipelineStageBase, sync: GradientSync, reduced: set[int], loose: LooseLeaves
) -> None:
    backward = stage.backward_one_chunk
    index = stage.stage_index

    @functools.wraps(backward)
    def watched_backward(
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        # Not with a dw_builder, because it writes gradients without autograd: no hook runs when a
        # parameter becomes final, and only the end of the stage counts.
        if stage.has_backward and last_backward and full_backward and stage.dw_builder is None:
            sync.stage_last_backward(index)
        _look(loose, stage, bwd_chunk_id, loss)
        backward(bwd_chunk_id, loss, full_backward, last_backward)

    versions = dict[tuple[int, int], int]()
    forward = stage.forward_one_chunk

    @functools.wraps(forward)
    def awaited_forward(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not sync.is_closed:
            sync.stage_first_use(index)
        renew_inputs(stage, fwd_chunk_id)
        output = forward(fwd_chunk_id, *args, **kwargs)
        refuse_other_shapes(stage)
        refuse_written_outputs(stage, versions)
        return output

    methods: dict[str, Callable[..., object]] = {
        "forward_one_chunk": awaited_forward,
        "backward_one_chunk": watched_backward,
    }
    vars(stage).update(methods | _reductions(stage, sync, reduced), _pipegrad=sync)


def _reductions(
    stage: PipelineStageBase, sync: GradientSync, reduced: set[int]
) -> dict[str, Callable[..., object]]:
    """Returns methods after which gradients are final; they do not scale, as `prepare` does."""
    index, reduce = stage.stage_index, stage.perform_reduce_grad
    wait = getattr(stage, "wait_for_gradient_reduction", None)

    def end() -> None:
        if index not in reduced:
            reduced.add(index)
            sync.stage_final(index)

    def final(grad_scale_factor: float) -> None:  # noqa: ARG001
        # Only with a backward, because GPipe and 1F1B call this in eval() too, and would divide
        # existing gradients once more.
        if stage.has_backward:
            if is_fsdp2(stage.submod) and not sync.is_accumulating:
                reduce(1)  # only FSDP2's own reduction
            end()

    def waited(grad_scale_factor: float) -> None:  # noqa: ARG001
        assert wait is not None
        wait(1)
        end()

    methods: dict[str, Callable[..., object]] = {"perform_reduce_grad": final, "scale_grads": final}
    # Since torch 2.15 FSDP2 reduces in two actions of an order. The second one is this wait.
    return methods | ({"wait_for_gradient_reduction": waited} if wait else {})


def _look(
    loose: LooseLeaves, stage: PipelineStageBase, microbatch: int, loss: torch.Tensor | None
) -> None:
    if not stage.has_backward:
        return
    outputs, given = forward_of(stage, microbatch)
    if loss is not None:
        loose.look(stage.stage_index, [microbatch], [loss], outputs)
    if loose.is_looking:
        loose.look(stage.stage_index, [microbatch], outputs, given)
