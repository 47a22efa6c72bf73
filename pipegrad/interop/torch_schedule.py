"""Reads torch schedules and their stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from pipegrad.errors import PlanError, StepError, TopologyError
from pipegrad.interop.private import groups_of
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.wrappers import fsdp_modules
from pipegrad.topology import Topology

if TYPE_CHECKING:
    from pipegrad.interop.private import PipelineStageBase


TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti

_IS_OLD = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
_BACKWARDS = ("B", "W", "I")  # torch's letters: full backward, weight gradient, input gradient


def stages_of(schedule: TorchSchedule) -> list[PipelineStageBase]:
    """Returns the stages of this rank, by index."""
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    return sorted(schedule._stages, key=lambda stage: stage.stage_index)


def num_microbatches(schedule: TorchSchedule) -> int:
    """Returns the number of microbatches of a step."""
    return int(schedule._n_microbatches)


def loss_fn_of(schedule: TorchSchedule) -> Callable[..., torch.Tensor] | None:
    """Returns the loss function that the schedule was made with."""
    return schedule._loss_fn


def divisor(schedule: TorchSchedule) -> float:
    """Returns the number by which torch divides gradients."""
    return float(schedule._n_microbatches) if schedule.scale_grads else 1.0


def with_stages_of(topology: Topology, stage: PipelineStageBase) -> Topology:
    """Returns `topology` with the schedule's stages.

    Raises:
        TopologyError: If the stages use other pipeline ranks than the topology.
    """
    default_group = dist.group.WORLD
    assert default_group is not None
    ranks = dist.get_process_group_ranks(stage.group or default_group)
    pipeline = topology.ranks_along(topology.pipeline)
    if ranks != list(pipeline):
        raise TopologyError(
            f"stage {stage.stage_index} runs its pipeline over ranks {ranks}, the topology over "
            f"{list(pipeline)}: give the stages group=topology.group_along("
            f"{topology.pipeline!r})"
        )
    mapping = stage.stage_index_to_group_rank
    stage_to_rank = tuple(mapping[index] for index in range(stage.num_stages))
    one_stage_each = tuple(range(len(pipeline)))
    if topology.stage_to_rank not in (stage_to_rank, one_stage_each):
        raise TopologyError(
            f"the schedule puts stages on pipeline ranks {stage_to_rank}, the topology on "
            f"{topology.stage_to_rank}: leave stage_to_rank out, attach takes the schedule's"
        )
    return topology.with_stages(stage_to_rank)


def check_stages(stages: Sequence[PipelineStageBase]) -> None:
    """Refuses stages of an unknown torch, and a DistributedDataParallel that is wrong here."""
    for stage in stages:
        for part in stage.submod.modules():
            # Refuse DDP's other ways to find ready gradients, because with several forwards before
            # a backward they fail an assertion of torch, or leave later gradients unreduced.
            if isinstance(part, DistributedDataParallel) and (
                part is not stage.submod or part.static_graph or not part.find_unused_parameters
            ):
                raise PlanError(
                    f"stage {stage.stage_index} has a DistributedDataParallel that reduces wrong "
                    f"gradients behind several microbatches: give the module inside, and the "
                    f"handler 'data-parallel' reduces its gradients; or wrap the whole stage, with "
                    f"find_unused_parameters=True and without static_graph"
                )
    if any(forwards_of(stage) is None for stage in stages):
        raise PlanError(
            f"attach does not know the pipeline stages of torch {torch.__version__}: use torch "
            f"2.11 to 2.15, or run your stages by pipegrad.Scheduler"
        )


# The state of a stage for a microbatch between its forward and its backward.


def forwards_of(stage: Any) -> dict[int, Any]:  # noqa: ANN401 - torch's, with private names
    """Returns the state of a stage for each forward whose backward has not run, in their order."""
    # Since torch 2.15 it has another name, and instances of a class instead of tuples.
    older: Any = getattr(stage, "fwd_cache", None)
    kept: dict[int, Any] = getattr(stage, "_forward_chunk_states", older)
    return kept


def forward_of(stage: PipelineStageBase, microbatch: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the outputs of a forward, as roots of its backward, and its inputs.

    torch 2.15 drops an output when it has been sent. The result has its gradient edge, or None.
    """
    kept = forwards_of(stage)[microbatch]
    roots, inputs = (
        kept if isinstance(kept, tuple) else (kept.stage_output_for_backward(), kept.input_values)
    )
    return roots, inputs


def renew_inputs(stage: PipelineStageBase, microbatch: int) -> None:
    """Makes the received inputs of a microbatch new leaves of autograd, in the same memory."""
    # Detach, because torch uses one tensor in every step, and hooks on it would pile up.
    for info in stage.args_recv_info[microbatch]:
        if (buffer := getattr(info, "buffer", None)) is not None:
            info.buffer = buffer.detach()
            if _IS_OLD and stage.has_backward:  # it has set the flag once, when it made the memory
                info.buffer.requires_grad_()


def output_metas(stage: Any) -> Sequence[Any] | None:  # noqa: ANN401 - torch's, private
    """Returns the metadata of a stage's outputs; None if torch has none."""
    if hasattr(stage, "_stage_meta"):
        outputs: Sequence[Any] | None = stage._stage_meta.outputs
        return outputs
    return list(stage.get_outputs_meta())


def refuse_other_shapes(stage: Any) -> None:  # noqa: ANN401 - torch's, with private names
    """Refuses outputs that do not fit into the next stage's buffers. torch itself sends them.

    Raises:
        StepError: If an output has another shape or dtype. Names stage, microbatch and both shapes.
    """
    metas = output_metas(stage)
    if stage.is_last or metas is None:
        return
    chunk = next(reversed(forwards_of(stage)))
    for output, meta in zip(forward_of(stage, chunk)[0], metas, strict=False):
        if is_dtensor(output) or not isinstance(output, torch.Tensor):
            continue
        if (output.shape, output.dtype) != (meta.shape, meta.dtype):
            raise StepError(
                f"stage {stage.stage_index}, microbatch {chunk}: an output is {output.dtype} "
                f"{list(output.shape)}, and was {meta.dtype} {list(meta.shape)} when the schedule "
                f"began: give it batches of one size, or make another schedule"
            )


def refuse_written_outputs(stage: PipelineStageBase, versions: dict[tuple[int, int], int]) -> None:
    """Refuses a forward that wrote into outputs of an earlier one, which torch may still send.

    Raises:
        StepError: Names the stage and both microbatches.
    """
    now = {
        (chunk, number): output._version
        for chunk in forwards_of(stage)
        for number, output in enumerate(forward_of(stage, chunk)[0])
        if isinstance(output, torch.Tensor)
    }
    last = next(reversed(forwards_of(stage)))
    written = next(
        (c for (c, n), v in now.items() if c != last and versions.get((c, n), v) != v), None
    )
    versions.clear()
    versions.update(now)
    if written is not None:
        raise StepError(
            f"stage {stage.stage_index}: the forward of microbatch {last} has written into what "
            f"that of microbatch {written} returned, which may still be on its way: return a clone"
        )


def check_split_backward(schedule: TorchSchedule, stages: Sequence[PipelineStageBase]) -> None:
    """Refuses a split backward with which torch computes wrong gradients, or loses some."""
    splits = any(letter in ("I", "W") for _, _, letter in _backwards(schedule))
    if splits and torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        raise PlanError(
            f"{type(schedule).__name__} splits backward, and torch {torch.__version__} computes "
            f"wrong gradients then (pytorch#180952): use torch 2.13, or a schedule without split"
        )
    # torch computes W later than the backward. If FSDP2 has resharded a module after its forward,
    # torch silently drops the gradients, because the parameters that W would write to are gone.
    for stage in stages if splits else ():
        for part in fsdp_modules({0: stage.submod})[0]:
            # torch itself keeps the root gathered.
            is_root = stage.submod in part._get_fsdp_state()._modules
            if any(group._reshard_after_forward and not is_root for group in groups_of(part)):
                raise PlanError(
                    f"{type(schedule).__name__} splits backward, and stage {stage.stage_index} has "
                    f"modules that FSDP2 reshards after forward: torch loses their gradients then; "
                    f"give fully_shard reshard_after_forward=False, or take another schedule"
                )


def stage_ticks(schedule: TorchSchedule, topology: Topology) -> list[int] | None:
    """Returns the time step of each stage's last backward; None if the schedule has none."""
    ticks: dict[int, int] = {}
    for tick, stage, letter in _backwards(schedule):
        if letter != "I":
            ticks[stage] = max(tick, ticks.get(stage, 0))
    if sorted(ticks) != list(range(topology.num_stages)):
        return None
    return [ticks[stage] for stage in range(topology.num_stages)]


def _backwards(schedule: TorchSchedule) -> Iterable[tuple[int, int, str]]:
    """Yields time step, stage and letter of every backward; nothing for one stage on each rank.

    With one stage on each rank, positions in torch's list are no times, because it has no idle
    steps. Such schedules never split backward.
    """
    order = schedule.pipeline_order if isinstance(schedule, PipelineScheduleMulti) else {}
    for actions in order.values():
        for tick, action in enumerate(actions):
            for part in (action and action.sub_actions) or (action,):
                if part is not None and part.computation_type.value in _BACKWARDS:
                    yield tick, part.stage_index, part.computation_type.value
