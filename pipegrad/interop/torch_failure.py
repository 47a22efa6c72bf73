"""A step of a torch schedule that fails on one rank: it ends with zeros, and all ranks raise.

[Note: failed torch step] torch's ranks wait in blocking receives. If a failed rank stopped, other
ranks would wait until the timeout. So the parts of a step are guarded: after one has raised, later
ones make zeros and compute nothing. All transfers of the step are made in their order, on any
backend, and no rank waits for this one. At the end all ranks look at the failure notice.

In the first step, and the first one behind an evaluation, stages exchange the shapes of their
values. What fails before or in that exchange ends the job on all ranks, as a lost rank does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pipegrad.comm.failures import FailureNotice
from pipegrad.comm.watch import watch
from pipegrad.errors import ReduceError, root_of
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.private import forget_backwards
from pipegrad.interop.torch_schedule import (
    TorchSchedule,
    drop_received,
    forwards_of,
    output_metas,
    replace,
    set_forward,
    stages_of,
)
from pipegrad.model.wrappers import fsdp_modules

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
        self._has_entered = False  # torch has begun with microbatches: what follows is guarded
        is_single = hasattr(schedule, "_initialize_stage")
        begin = "_initialize_stage" if is_single else "_initialize_stages"  # in each step
        parts = {"_maybe_compute_loss": self._add_zero_loss, "_maybe_get_loss": _nothing}
        methods = {n: self.guard(getattr(schedule, n), instead) for n, instead in parts.items()}
        replace(schedule, {begin: partial(self._entered, getattr(schedule, begin)), **methods})

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
            for stage in stages_of(self._schedule):
                vars(stage).update(_gradient_reduction_handle=None)  # torch 2.15 would wait for it
                forget_backwards(fsdp_modules({0: stage.submod})[0])

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
            ("start_gradient_reduction", _nothing, ""),  # since torch 2.15, of FSDP2 alone
            ("wait_for_gradient_reduction", _nothing, ""),
            ("scale_grads", _nothing, ""),
        )
        methods = {
            name: self.guard(getattr(stage, name), instead, kind and f"{stage.stage_index}{kind}")
            for name, instead, kind in parts
            if hasattr(stage, name)
        }
        for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
            methods[name] = partial(self._exchanged, getattr(stage, name))
        replace(stage, methods)

    def _entered(self, initialize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self._has_entered = True
        return initialize(*args, **kwargs)

    def _exchanged(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # Stages tell each other their shapes, and wait in torch. An error before or in it is final.
        try:
            if self.error is not None:
                raise self.error
            return prepare(*args, **kwargs)
        except BaseException as error:
            self.fail(error)
            if (watched := watch()) is not None:
                watched.fail(root_of(error))
            raise

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
    set_forward(stage, chunk, zeros)
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
    forwards_of(stage).pop(chunk, None)
    drop_received(stage.grad_recv_info.get(chunk, ()))
    infos = stage.args_recv_info[chunk]
    if hasattr(stage, "_get_grad_send_meta"):
        stage.bwd_cache[chunk] = (None,) * len(infos)
        return
    buffers = [getattr(info, "buffer", None) for info in infos]
    stage.bwd_cache[chunk] = tuple(b if b is None else torch.zeros_like(b) for b in buffers)


def _forget_weights(stage: Any, chunk: int, *_args: object, **_kwargs: object) -> None:  # noqa: ANN401
    stage.dw_runner.pop(chunk, None)
    stage.backward_state.pop(chunk, None)
