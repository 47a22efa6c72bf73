"""Executor: one rank of a Program, item by item. It interprets, and decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.profiler import record_function

from pipegrad.comm.tape import Recorder
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.interop.private import is_profiled
from pipegrad.pipeline.compute import Compute, Method
from pipegrad.pipeline.loss import LossTerms
from pipegrad.pipeline.split_backward.weights import WeightGradients
from pipegrad.pipeline.step_times import StepTimes
from pipegrad.pipeline.transfers.transfers import Transfers
from pipegrad.pipeline.values import Values
from pipegrad.schedules.program.program import Op, Program

_Call = tuple[Method, int, int]  # and its arguments: what the item means, and a microbatch


class Executor:
    """Runs the items of one rank.

    Args:
        program: What all ranks do.
        rank: The pipeline rank.
        values: Receives, sends and sums values and gradients.
        compute: Runs forwards and backwards.
        transfers: Posts receives, and frees what was sent.
        sync: The gradient layer. It learns of first uses, last backwards and final stages.
        weights: The weights' gradients that I leaves to W.
        sharded: The stages whose parameters FSDP2 swaps. It learns of last backwards.
        times: Watches what takes time; None if nothing does.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        *,
        values: Values,
        compute: Compute,
        transfers: Transfers,
        sync: GradientSync,
        weights: WeightGradients,
        sharded: ShardedStages,
        times: StepTimes | None = None,
    ) -> None:
        self._rank = rank
        self._forward_only = program.forward_only
        self._values = values
        self._compute = compute
        self._transfers = transfers
        self._sync = sync
        self._sharded = sharded
        # Three lists of equal length: the calls of a step, the same calls inside of ranges for a
        # profiler, and the calls that finish a failed step.
        self._calls: list[_Call] = []
        self._ranged_calls: list[_Call] = []
        self._drain_calls: list[_Call] = []
        self._labels: dict[Method, str] = {}  # for messages and traces
        self._compile(program, weights, times)
        self._position = 0  # of the next call
        self.num_different: int | Tensor = 0  # second forwards of the last step: see `Recompute`

    def _compile(self, program: Program, weights: WeightGradients, times: StepTimes | None) -> None:
        """Turns items into calls, so that a step looks nothing up."""
        # None of them is a method of this object. It would hold itself, and the threads of a
        # Scheduler that nobody holds any more would wait for the garbage collector.
        transfers, values, sync = self._transfers, self._values, self._sync
        methods: dict[Op, Method] = {
            Op.FIRST_USE: partial(_first_use, sync),
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: values.receive,
            Op.JOIN: values.join,
            Op.LAST_BACKWARD: partial(_last_backward, sync, self._sharded),
            Op.SEND: values.send,
            Op.RELEASE: transfers.release,
            Op.FINAL: partial(_become_final, sync),
            Op.INPUTS_FINAL: weights.inputs_are_final,
            Op.SHARED_WEIGHTS: weights.compute_shared,
        }
        self._labels[weights.compute_shared] = "shared weights of stage {0}"
        drain_methods: dict[Op, Method] = {
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: values.receive_and_drop,
            Op.SEND: transfers.send_failed,
            Op.RELEASE: transfers.release,
        }
        for item in program.called(self._rank):
            method: Method
            ranged: Method | None = None
            which = item.which
            if item.op is Op.COMPUTE:
                which, kind, _ = program.action(item)
                method = self._compute.method_of(which, kind)
                if times is not None:
                    method = times.watched(item, method)
                self._labels[method] = f"{{0}}{kind}{{1}}"
                ranged = partial(_in_range, method, self._labels[method])
            else:
                method = methods[item.op]
                if times is not None:
                    method = times.watched(item, method)
            self._calls.append((method, which, item.microbatch))
            self._ranged_calls.append((ranged or method, which, item.microbatch))
            self._drain_calls.append((drain_methods.get(item.op, _skip), which, item.microbatch))

    @property
    def is_in_doubt(self) -> bool:
        """Whether an interrupt came while a transfer began; see [Note: interrupts]."""
        return self._transfers.is_in_doubt

    @property
    def position(self) -> int:
        """The number of the item that runs, of those that are called."""
        return self._position

    def rewind(self) -> None:
        """Goes back to the first item.

        Called before anything of a step can fail: `finish_transfers` then makes all transfers of
        a step whose first item never ran.
        """
        self._position = 0
        self._transfers.ends.grow()

    def run(
        self,
        inputs: Mapping[str, Sequence[object]],
        targets: Sequence[object] | None,
        terms: LossTerms,
        *,
        keeps_outputs: bool,
    ) -> list[tuple[Tensor, ...]]:
        """Runs all items; returns the outputs of the last stage, if they are kept.

        If it raises, call `finish_transfers`.

        Args:
            inputs: External name -> its value for each microbatch.
            targets: For each microbatch, on the rank of the last stage.
            terms: Collects the losses of this rank.
            keeps_outputs: Whether to keep what the last stage makes.

        Sync: all on the current stream.
        """
        # An interrupt may have come while the last step was cleared up. So tables are emptied when
        # a step begins, too.
        self._forget()
        self._values.begin(inputs, targets)
        self._compute.begin(targets, terms, keeps_outputs=keeps_outputs)
        if self._forward_only:
            self._sharded.begin_evaluation()
        else:
            self._sharded.begin()
        calls = self._ranged_calls if is_profiled() else self._calls
        recorder = None if self._forward_only else self._sync.tape.recorder
        try:
            if recorder is not None:
                self._run_recorded(calls, recorder)
            else:
                for method, which, microbatch in calls:
                    method(which, microbatch)
                    self._position += 1
        except BaseException as error:
            self._add_location(error)
            raise
        # The list is taken first: `forget` makes a new one.
        outputs = self._compute.outputs
        self.num_different = self._compute.num_different
        self._forget()
        return outputs

    def _run_recorded(self, calls: Sequence[_Call], recorder: Recorder) -> None:
        """Runs all items, and keeps the times between those that matter."""
        now = recorder.now
        kept, keep = recorder.items()
        keep(now())
        for (method, which, microbatch), is_kept in zip(calls, kept, strict=True):
            method(which, microbatch)
            self._position += 1
            if is_kept:
                keep(now())

    def finish_transfers(self) -> None:
        """Makes the transfers that are left of a failed step, without values.

        Other ranks still wait for messages of this rank, and send their own. After this, each of
        these transfers ends on any backend, and the next step begins with the same messages on
        both ends of every edge.
        """
        self._transfers.note_ended()
        # Transfers are made in the order of the program. It is proven that ranks which keep this
        # order never wait for each other in a circle.
        for method, which, microbatch in self._drain_calls[self._position :]:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                method(which, microbatch)
        self._forget()

    def _forget(self) -> None:
        """Lets go of everything of a step."""
        self._values.forget()
        self._compute.forget()

    def _add_location(self, error: BaseException) -> None:
        """Adds the failed action and this rank to an error's notes."""
        method, stage, microbatch = self._calls[self._position]
        label = self._labels.get(method)
        if label is not None:
            where = label.format(stage, microbatch)
            error.add_note(f"In {where} on pipeline rank {self._rank}.")


def _skip(_index: int, _microbatch: int) -> None:
    """Does nothing, in the place of an item that a failed step leaves out."""


def _first_use(sync: GradientSync, stage: int, _microbatch: int) -> None:
    sync.stage_first_use(stage)


def _last_backward(
    sync: GradientSync, sharded: ShardedStages, stage: int, _microbatch: int
) -> None:
    sync.stage_last_backward(stage)
    sharded.last_backward(stage)


def _become_final(sync: GradientSync, stage: int, _microbatch: int) -> None:
    sync.stage_final(stage)


def _in_range(compute: Method, label: str, stage: int, microbatch: int) -> None:
    """Computes inside a range that profilers see: ``pipegrad 2F0``."""
    with record_function(f"pipegrad {label.format(stage, microbatch)}"):
        compute(stage, microbatch)
