"""A step of a torch schedule that fails on one rank: run to its end on zeros, told to all ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from pipegrad.comm.failures import FAILED_ELSEWHERE, FailureNotice
from pipegrad.errors import ReduceError, StepError, root_of
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.private import forget_backwards
from pipegrad.interop.torch_schedule import TorchSchedule, replace, stages_of
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.wrappers import fsdp_modules

_FAILED = "pipegrad: this stage has failed"  # sent in the place of what its outputs look like
_INITIALIZE = ("_initialize_pp_stages", "_initialize_stage", "_initialize_stages")  # by version
_instances = itertools.count()


class TorchFailure:
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
        replace(schedule, {name: self._initialized, **guarded})

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
                    self.fail(error, f"In {kind}{args[0]}." if kind and args else "")
            return instead(*args, **kwargs)

        return guarded

    def fail(self, error: BaseException, where: str = "") -> None:
        """Tells the other ranks of the first error of a step."""
        if self.error is not None:
            return
        self.error = error
        self._cause = self._notice.fail(root_of(error), where)  # torch wraps it
        if self._schedule._has_backward:
            self._sync.abort(error, begun=self._begun)
            stages = {stage.stage_index: stage.submod for stage in stages_of(self._schedule)}
            for parts in fsdp_modules(stages).values():
                forget_backwards(parts)

    def finish_transfers(self) -> None:
        """Runs the microbatches, of zeros, if the step failed before torch had come to them."""
        if self._entered:
            return
        for stage in stages_of(self._schedule):
            stage.has_backward = self._schedule._has_backward
            stage.clear_runtime_states()
        try:
            self._schedule._step_microbatches()
        except BaseException as error:
            if error is not self.error:
                raise

    def refuse_failed(self) -> None:
        """Raises if another rank has failed."""
        self._notice.refuse_failed()

    def raise_first(self) -> None:
        """Raises what has failed here, or what another rank said that failed before."""
        error, self.error = self.error, None
        if error is None:
            return
        self._schedule._internal_losses.clear()
        is_interrupt = not isinstance(error, Exception)  # it stays one, whoever was first
        counts = self._begun or not self._schedule._has_backward
        if self._cause is not None and counts and not is_interrupt:
            raise ReduceError(f"{FAILED_ELSEWHERE}: {self._cause}") from error
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
        replace(stage, methods)

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


def output_metas(stage: Any) -> Sequence[Any] | None:  # noqa: ANN401 - torch's, private
    """Returns what a stage's outputs look like; None where torch does not know."""
    if hasattr(stage, "_stage_meta"):
        outputs: Sequence[Any] | None = stage._stage_meta.outputs
        return outputs
    return list(stage.get_outputs_meta())


def refuse_other_shapes(stage: Any) -> None:  # noqa: ANN401 - torch's, with private names
    """Refuses outputs that would not fit into the next stage's buffers: torch sends them as well.

    Raises:
        StepError: Names stage, microbatch, and both shapes.
    """
    metas = output_metas(stage)
    if stage.is_last or metas is None:
        return
    chunk = next(reversed(stage.fwd_cache))
    for output, meta in zip(stage.fwd_cache[chunk][0], metas, strict=False):
        if is_dtensor(output) or not isinstance(output, torch.Tensor):
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
    metas = output_metas(stage) or ()
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
