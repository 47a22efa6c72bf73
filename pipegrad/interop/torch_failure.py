"""A step of a torch schedule that fails on one rank: it ends with zeros, and all ranks raise.

[Note: failed torch step] torch's ranks wait in blocking receives. If a failed rank stopped, other
ranks would wait until the timeout. So the parts of a step are guarded: after one has raised, later
ones make zeros and compute nothing. All transfers of the step are made in their order, on any
backend, and no rank waits for this one. At the end all ranks look at the failure notice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pipegrad.comm.failures import FailureNotice
from pipegrad.errors import ReduceError, root_of
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.private import forget_backwards
from pipegrad.interop.torch_schedule import TorchSchedule, output_metas, replace, stages_of
from pipegrad.model.wrappers import fsdp_modules

_FAILED = "pipegrad: this stage has failed"  # sent instead of the metadata of its outputs
_INITIALIZE = ("_initialize_pp_stages", "_initialize_stage", "_initialize_stages")  # by version
_instances = itertools.count()


class TorchFailure:
    """The failure of a step of a torch schedule on this rank; see [Note: failed torch step].

    Args:
        schedule: The schedule whose steps are guarded.
        sync: The gradient layer. Gradients of a failed step are dropped.

    Attributes:
        notice: Of the failures of all ranks.
        error: The first error of this step on this rank; None without one.
        is_begun: Whether the gradients of this step have been prepared.
        reduced: Stages for which torch has called the reduction of gradients in this step.
    """

    def __init__(self, schedule: TorchSchedule, sync: GradientSync) -> None:
        self._schedule: Any = schedule  # with private names
        self._sync = sync
        self.notice = FailureNotice(f"attach {next(_instances)}")
        self.error: BaseException | None = None
        self.is_begun = False
        self.reduced = set[int]()
        self._has_entered = False  # torch has come to the first transfer of a value
        self._is_learning = False  # stages exchange the metadata of their values
        self._has_received = False  # this stage has received its neighbour's metadata
        name = next(name for name in _INITIALIZE if hasattr(schedule, name))
        parts = {"_maybe_compute_loss": self._add_zero_loss, "_maybe_get_loss": _nothing}
        methods = {n: self.guard(getattr(schedule, n), instead) for n, instead in parts.items()}
        replace(schedule, {name: partial(self._initialized, getattr(schedule, name)), **methods})

    def begin(self) -> None:
        """Begins a step or an evaluation."""
        self.notice.next_step()
        self.error = None
        self.is_begun = self._has_entered = False
        self.reduced.clear()

    def guard(
        self, method: Callable[..., Any], instead: Callable[..., Any], kind: str = ""
    ) -> Callable[..., Any]:
        """Returns `method`, replaced by `instead` once something has failed in this step."""

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
        """Posts the first error of a step to the other ranks; later ones often follow from it."""
        if self.error is not None:
            return
        self.error = error
        # Posted before the zeros leave: a rank that fails on zeros finds the cause on the board.
        self.notice.fail(root_of(error), where)  # torch wraps it
        if self._schedule._has_backward:
            self._sync.abort(error, begun=self.is_begun)
            stages = {stage.stage_index: stage.submod for stage in stages_of(self._schedule)}
            for parts in fsdp_modules(stages).values():
                forget_backwards(parts)

    def finish_transfers(self) -> None:
        """Runs the microbatches with zeros, if the step failed before torch came to them."""
        if self._has_entered:
            return
        # Other ranks are in their microbatches already, and wait for this rank's messages.
        for stage in stages_of(self._schedule):
            stage.has_backward = self._schedule._has_backward
            stage.clear_runtime_states()
        try:
            self._schedule._step_microbatches()
        except BaseException as error:
            if error is not self.error:
                raise

    def raise_first(self) -> None:
        """Raises the error of this rank, or that of another rank if it failed earlier."""
        error, self.error = self.error, None
        if error is None:
            return
        self._schedule._internal_losses.clear()
        # An error before the step has begun, such as that of a wrong batch, is this rank's own.
        if self.is_begun or not self._schedule._has_backward:
            self.notice.raise_first(error, ReduceError)
        raise error

    def follow(self, stage: Any) -> None:  # noqa: ANN401 - torch's, with private names
        """Guards the parts of a stage."""
        parts: tuple[tuple[str, Callable[..., Any], str], ...] = (
            ("forward_one_chunk", partial(_forward_zeros, stage), "F"),
            ("backward_one_chunk", partial(_backward_zeros, stage), "B"),
            ("backward_weight_one_chunk", partial(_forget_weights, stage), "W"),
            ("perform_reduce_grad", _nothing, ""),
            ("scale_grads", _nothing, ""),
        )
        methods = {
            name: self.guard(getattr(stage, name), instead, kind and f"{stage.stage_index}{kind}")
            for name, instead, kind in parts
        }
        if hasattr(stage, "_recv_meta"):
            methods["_recv_meta"] = partial(self._received, stage._recv_meta)
            for name, sign in (("_prepare_forward_infra", 1), ("_prepare_backward_infra", -1)):
                guarded = self.guard(getattr(stage, name), partial(self._pass_on, stage, sign))
                methods[name] = partial(self._learned, guarded)
        replace(stage, methods)

    # The first step, in which stages exchange the metadata of their values.

    def _initialized(self, initialize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self._is_learning = False
        result = initialize(*args, **kwargs)
        self._has_entered = True
        # The metadata of this rank was never learned. Without an error here torch would mark the
        # stages as ready, and later steps would use wrong shapes.
        if self.error is not None and self._is_learning:
            raise self.error
        return result

    def _learned(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self._has_received, self._is_learning = False, True
        return prepare(*args, **kwargs)

    def _received(self, receive: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        self._has_received = True
        return receive(*args)

    def _pass_on(self, stage: Any, sign: int, *_args: object, **_kwargs: object) -> None:  # noqa: ANN401
        """Sends a mark of failure to the neighbour, which waits for a stage's metadata."""
        # In torch's dynamic mode each stage receives metadata from one neighbour and sends its own
        # to the other. Both messages must be made here, once, or the neighbours go on waiting.
        if stage._inference_mode is None or stage._inference_mode.name != "DYNAMIC":
            return
        previous, following = stage.stage_index - sign, stage.stage_index + sign
        stages = range(stage.num_stages)
        if previous in stages and not stage._is_same_rank(previous) and not self._has_received:
            stage._recv_meta(previous)
        if following in stages and not stage._is_same_rank(following):
            stage._send_meta(_FAILED, following)

    def _add_zero_loss(self, stage: Any, *_args: object, **_kwargs: object) -> None:  # noqa: ANN401
        if stage.is_last and self._schedule._loss_fn is not None:
            self._schedule._internal_losses.append(torch.zeros((), device=stage.device))


# What stands in for the parts of a failed step.


def _nothing(*_args: object, **_kwargs: object) -> None:
    pass


def _forward_zeros(
    stage: Any,  # noqa: ANN401 - torch's, with private names
    chunk: int,
    _args: object = None,
    _kwargs: object = None,
    save_forward_output: bool = True,
) -> Any:  # noqa: ANN401 - torch's signature
    """Stands in for a forward of a failed step: its outputs are zeros."""
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
    """Stands in for a backward of a failed step: its gradients are zeros."""
    if not stage.has_backward:
        return
    # torch sends the contents of `bwd_cache` back. Newer versions replace None by zeros. Older
    # versions need real zeros, with the shapes of the received values.
    stage.fwd_cache.pop(chunk, None)
    infos = stage.args_recv_info[chunk]
    if hasattr(stage, "_get_grad_send_meta"):
        stage.bwd_cache[chunk] = (None,) * len(infos)
        return
    buffers = [getattr(info, "buffer", None) for info in infos]
    stage.bwd_cache[chunk] = tuple(b if b is None else torch.zeros_like(b) for b in buffers)


def _forget_weights(stage: Any, chunk: int, *_args: object, **_kwargs: object) -> None:  # noqa: ANN401
    stage.dw_runner.pop(chunk, None)
    stage.backward_state.pop(chunk, None)
