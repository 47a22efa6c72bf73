"""attach: exact gradients on any schedule of torch.distributed.pipelining, with one line.

The only file that knows torch's private names. A torch schedule tells us of a step through
``schedule.step``, of a stage's forwards through ``stage.forward_one_chunk``, of its last backward
through ``stage.backward_one_chunk``, and of its final gradients (REDUCE_GRAD) through
``stage.perform_reduce_grad`` or, in the oldest runtime, ``stage.scale_grads``. These are replaced
on the instances; torch itself is left alone.

Where something of a step raises on a rank, the rank runs the rest of the step all the same, on
zeros: so no other rank waits for it in torch's receives, and all raise at the end of the step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

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
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipegrad.agreement import AGREE_SECONDS, FailureNotice, agree
from pipegrad.errors import PlanError, ReduceError, StepError, TopologyError, root_of
from pipegrad.gradients.shards import fsdp_modules
from pipegrad.gradients.shared import Shared, unwrapped
from pipegrad.gradients.sync import GradientSync
from pipegrad.handler import HandlerSpec
from pipegrad.topology import Topology

TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti

_BACKWARDS = ("B", "W", "I")  # torch's letters: full backward, weight gradient, input gradient
_FAILED = "pipegrad: this stage has failed"  # sent in the place of what its outputs look like
_INITIALIZE = ("_initialize_pp_stages", "_initialize_stage", "_initialize_stages")  # by version
_instances = itertools.count()


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

    What raises in a step on one rank is an error on all: they make all transfers of the step, of
    zeros, and raise at its end in the words of the first. A rank that has ended the step by then,
    and has no gradient to reduce with one that failed, does not hear of it. An interrupt within one
    of torch's own receives cannot be told, nor what raises among the collectives of FSDP2.

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
            after forward, for which torch loses gradients; or if its loss has parameters that no
            stage holds. On all ranks alike.
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
        placed = _placed(topology, stages[0])
        refuse_loss_parameters(schedule._loss_fn, [stage.submod for stage in stages], placed)

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
    failure = _Failure(schedule, sync)
    for stage in stages:
        _follow_stage(stage, sync, failure)
    _follow_step(schedule, sync, failure)
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


def refuse_loss_parameters(loss: object, modules: Sequence[nn.Module], topology: Topology) -> None:
    """Refuses a loss with parameters of its own, which nobody would average over replicas.

    Args:
        loss: A function, a module or a method of one.
        modules: This rank's stages.
        topology: Ranks.

    Raises:
        PlanError: Names them.
    """
    owner = getattr(loss, "func", loss)  # of a functools.partial
    owner = getattr(owner, "__self__", owner)
    if not isinstance(owner, nn.Module) or len(topology.pipelines) == 1:
        return
    held = {id(parameter) for module in modules for parameter in module.parameters()}
    bare = [n for n, p in owner.named_parameters() if p.requires_grad and id(p) not in held]
    if bare:
        raise PlanError(
            f"the loss has parameters {bare} that no stage holds, so nobody would average their "
            f"gradients over the replicas: make the loss's module a part of the last stage's"
        )


class _Failure:
    """What fails in a step of a torch schedule on this rank, and how the step ends all the same.

    The parts of a step are guarded: when one has raised, those behind it make zeros in the place of
    values, and compute nothing. So all transfers of the step are made, on any backend, and no rank
    waits for this one. The ranks look at the end whether one of them has failed.

    Args:
        schedule: Whose steps.
        sync: Its gradients are dropped.

    Attributes:
        error: The first one of this step; None if nothing has failed here.
        reduced: Stages whose gradients torch has called final in this step.
    """

    def __init__(self, schedule: TorchSchedule, sync: GradientSync) -> None:
        self._schedule = cast("Any", schedule)  # with private names
        self._sync = sync
        self._notice = FailureNotice(f"attach {next(_instances)}")
        self.error: BaseException | None = None
        self.reduced = set[int]()
        self._cause: str | None = None
        self._begun = False  # whether the gradients of this step have been prepared
        self._entered = False  # whether torch has come to the first transfer of a value
        self._is_learning = False  # whether stages tell each other what their values look like
        self._has_heard = False  # whether this stage has received what its neighbour has sent
        name = next(name for name in _INITIALIZE if hasattr(schedule, name))
        self._initialize: Callable[..., Any] = getattr(schedule, name)
        losses = {"_maybe_compute_loss": self._lose, "_maybe_get_loss": self._nothing}
        guarded = {n: self.guard(getattr(schedule, n), instead) for n, instead in losses.items()}
        _replace(schedule, {name: self._initialized, **guarded})

    def begin(self) -> None:
        """Turns to a step, or an evaluation."""
        self._notice.next_step()
        self.error = self._cause = None
        self._begun = self._entered = False
        self.reduced.clear()

    def prepared(self) -> None:
        """Says that this step's gradients have a place to go to."""
        self._begun = self._schedule._has_backward

    def guard(
        self, method: Callable[..., Any], instead: Callable[..., Any], kind: str = ""
    ) -> Callable[..., Any]:
        """Returns `method`, but `instead` where something has failed in this step."""

        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
            if self.error is None:
                try:
                    return method(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001 - raised at the end of the step
                    self.fail(error, f" In {kind}{args[0]}." if kind and args else "")
            return instead(*args, **kwargs)

        return guarded

    def fail(self, error: BaseException, where: str = "") -> None:
        """Tells the other ranks of the first error of a step."""
        if self.error is not None:
            return
        self.error = error
        root = root_of(error)  # torch wraps what a stage raises
        own = self._notice.post(f"{type(root).__name__}: {root}{where}")
        if self._schedule._has_backward:
            self._sync.abort(error, begun=self._begun)
            stages = {stage.stage_index: stage.submod for stage in _stages(self._schedule)}
            for parts in fsdp_modules(stages).values():
                forget_backwards(parts)
        first = self._notice.read()
        self._cause = first if first != own else None

    def finish_transfers(self) -> None:
        """Runs the microbatches, of zeros, if the step failed before torch had come to them."""
        if self._entered:
            return
        for stage in _stages(self._schedule):
            stage.has_backward = self._schedule._has_backward
            stage.clear_runtime_states()
        try:
            self._schedule._step_microbatches()
        except BaseException as error:
            if error is not self.error:
                raise

    def refuse_failed(self) -> None:
        """Raises if another rank has failed."""
        if (first := self._notice.read()) is not None:
            raise ReduceError(f"a step failed on another rank: {first}")

    def raise_first(self) -> None:
        """Raises what has failed here, or what another rank said that failed before."""
        error, self.error = self.error, None
        if error is None:
            return
        self._schedule._internal_losses.clear()
        is_interrupt = not isinstance(error, Exception)  # it stays one, whoever was first
        counts = self._begun or not self._schedule._has_backward
        if self._cause is not None and counts and not is_interrupt:
            raise ReduceError(f"a step failed on another rank: {self._cause}") from error
        raise error

    # What takes part in the rest of a step that has failed.

    def follow(self, stage: Any) -> None:  # noqa: ANN401 - torch's, with private names
        """Guards the parts of a stage."""
        parts: tuple[tuple[str, Callable[..., Any], str], ...] = (
            ("forward_one_chunk", functools.partial(_forward_zeros, stage), "F"),
            ("backward_one_chunk", functools.partial(_backward_zeros, stage), "B"),
            ("backward_weight_one_chunk", functools.partial(_forget_weights, stage), "W"),
            ("perform_reduce_grad", self._nothing, ""),
            ("scale_grads", self._nothing, ""),
        )
        methods = {
            name: self.guard(getattr(stage, name), instead, kind and f"{stage.stage_index}{kind}")
            for name, instead, kind in parts
        }
        if hasattr(stage, "_recv_meta"):
            methods["_recv_meta"] = self._hearing(stage._recv_meta)
            for name, sign in (("_prepare_forward_infra", 1), ("_prepare_backward_infra", -1)):
                instead = functools.partial(self._pass_on, stage, sign)
                methods[name] = self._deaf(self.guard(getattr(stage, name), instead))
        _replace(stage, methods)

    def _nothing(self, *_args: object, **_kwargs: object) -> None:
        """Does nothing."""

    def _lose(self, stage: Any, *_args: object, **_kwargs: object) -> None:  # noqa: ANN401
        if stage.is_last and self._schedule._loss_fn is not None:
            self._schedule._internal_losses.append(torch.zeros((), device=stage.device))

    def _initialized(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
        self._is_learning = False
        done = self._initialize(*args, **kwargs)
        self._entered = True
        if self.error is not None and self._is_learning:  # or torch would take them for ready
            raise self.error
        return done

    def _hearing(self, receive: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*args: Any) -> Any:  # noqa: ANN401 - torch's signature
            self._has_heard = True
            return receive(*args)

        return heard

    def _deaf(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def begun(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
            self._has_heard, self._is_learning = False, True
            return method(*args, **kwargs)

        return begun

    def _pass_on(self, stage: Any, sign: int, *_args: object, **_kwargs: object) -> None:  # noqa: ANN401
        """Tells a stage's neighbour, who waits for what its outputs or gradients look like."""
        if stage._inference_mode is None or stage._inference_mode.name != "DYNAMIC":
            return
        before, behind = stage.stage_index - sign, stage.stage_index + sign
        known = range(stage.num_stages)
        if before in known and not stage._is_same_rank(before) and not self._has_heard:
            stage._recv_meta(before)
        if behind in known and not stage._is_same_rank(behind):
            stage._send_meta(_FAILED, behind)


def _output_metas(stage: Any) -> Sequence[Any] | None:  # noqa: ANN401 - torch's, private
    """Returns what a stage's outputs look like; None where torch does not know."""
    if hasattr(stage, "_stage_meta"):
        outputs: Sequence[Any] | None = stage._stage_meta.outputs
        return outputs
    return list(stage.get_outputs_meta())


def _refuse_other_shapes(stage: Any) -> None:  # noqa: ANN401 - torch's, with private names
    """Refuses outputs that would not fit into the next stage's buffers: torch sends them as well.

    Raises:
        StepError: Names stage, microbatch, and both shapes.
    """
    metas = _output_metas(stage)
    if stage.is_last or metas is None:
        return
    chunk = next(reversed(stage.fwd_cache))
    for output, meta in zip(stage.fwd_cache[chunk][0], metas, strict=False):
        if isinstance(output, DTensor) or not isinstance(output, torch.Tensor):
            continue
        if (output.shape, output.dtype) != (meta.shape, meta.dtype):
            raise StepError(
                f"stage {stage.stage_index}, microbatch {chunk}: an output is {output.dtype} "
                f"{list(output.shape)}, and was {meta.dtype} {list(meta.shape)} when the schedule "
                f"began: give it batches of one size, or make another schedule"
            )


def _forward_zeros(
    stage: Any,  # noqa: ANN401 - torch's, with private names
    chunk: int,
    _args: object = None,
    _kwargs: object = None,
    save_forward_output: bool = True,
) -> Any:  # noqa: ANN401 - torch's signature
    """Does what is left of a forward where something has failed: its outputs are zeros."""
    metas = _output_metas(stage) or ()
    zeros = tuple(torch.zeros(m.shape, dtype=m.dtype, device=stage.device) for m in metas)
    stage.fwd_cache[chunk] = zeros, []
    if stage.is_last and save_forward_output:
        stage.output_chunks.append(zeros)
    return zeros


def _backward_zeros(
    stage: Any,  # noqa: ANN401 - torch's, with private names
    chunk: int,
    *_args: object,
    **_kwargs: object,
) -> None:
    """Does what is left of a backward where something has failed: nothing comes back."""
    if not stage.has_backward:
        return
    stage.fwd_cache.pop(chunk, None)
    infos = stage.args_recv_info[chunk]
    if hasattr(stage, "_get_grad_send_meta"):  # which sends zeros where there is no gradient
        stage.bwd_cache[chunk] = (None,) * len(infos)
        return
    buffers = [getattr(info, "buffer", None) for info in infos]
    stage.bwd_cache[chunk] = tuple(b if b is None else torch.zeros_like(b) for b in buffers)


def _forget_weights(stage: Any, chunk: int, *_args: object, **_kwargs: object) -> None:  # noqa: ANN401
    stage.dw_runner.pop(chunk, None)
    stage.backward_state.pop(chunk, None)


def _follow_step(schedule: TorchSchedule, sync: GradientSync, failure: _Failure) -> None:
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

    _replace(schedule, {"step": synced_step})


def _begin_step(schedule: TorchSchedule, sync: GradientSync) -> None:
    if schedule._has_backward:
        sync.prepare(divisor=_divisor(schedule))
    elif not sync.is_closed:
        sync.publish_if_due()
        sync.reshard()


def _end_step(schedule: TorchSchedule, sync: GradientSync, failure: _Failure) -> None:
    if schedule._has_backward:
        for stage in _stages(schedule):  # a hand-written order may have no REDUCE_GRAD
            if stage.stage_index not in failure.reduced:
                stage.scale_grads(1)
        if failure.error is not None:
            return
        sync.finish()
    if not schedule._has_backward or sync.is_accumulating:  # else finish has looked
        failure.refuse_failed()


def _follow_stage(stage: _PipelineStageBase, sync: GradientSync, failure: _Failure) -> None:
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
        _refuse_other_shapes(stage)
        return output

    def final(grad_scale_factor: float) -> None:  # noqa: ARG001 - scaling is prepare's divisor
        # GPipe and 1F1B come here in eval() too, and would divide gradients that are already there.
        if stage.has_backward:
            failure.reduced.add(index)
            if reduce and isinstance(stage.submod, FSDPModule) and not sync.is_accumulating:
                reduce(1)  # FSDP2's own reduction alone
            sync.stage_final(index)

    methods: dict[str, Callable[..., object]] = {
        "forward_one_chunk": awaited_forward,
        "backward_one_chunk": watched_backward,
        "perform_reduce_grad": final,
        "scale_grads": final,
    }
    _replace(stage, methods)
    failure.follow(stage)
    stage._pipegrad = sync  # type: ignore[attr-defined]


def _replace(followed: object, methods: Mapping[str, Callable[..., object]]) -> None:
    """Puts methods in the place of an instance's own, which `_leave` brings back."""
    before = vars(followed).setdefault("_pipegrad_before", {})
    for name, method in methods.items():
        before.setdefault(name, vars(followed).get(name))
        vars(followed)[name] = method


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
