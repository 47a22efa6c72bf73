"""Executor: one rank of a Program, item by item. It interprets, and decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.profiler import record_function

from pipegrad.errors import StepError
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.interop.private import is_profiled
from pipegrad.pipeline.compute import Compute, Loss, Method
from pipegrad.pipeline.split_backward.weights import WeightGradients
from pipegrad.pipeline.stage import Stage, Wiring
from pipegrad.pipeline.transfers import Spec, Transfers
from pipegrad.pipeline.values import LocalValues, Value
from pipegrad.schedules.program.program import Channel, Op, Program

_Step = tuple[Method, int, int]


class PeerFailedError(StepError):
    """What a stage needs never came, since another rank failed first."""


class Executor:
    """Runs the items of one rank.

    Args:
        program: What all ranks do.
        rank: This rank's place in the pipeline.
        stages: This rank's.
        wiring: How stages hang together.
        transfers: This rank's end of them.
        sync: Told of last backwards and final stages; waits for parameters at their first use.
        weights: What waits of backwards.
        sharded: Told of last backwards too.
        loss_fn: Of the last stage's outputs and a microbatch's target.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        *,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        transfers: Transfers,
        sync: GradientSync,
        weights: WeightGradients,
        sharded: ShardedStages,
        loss_fn: Loss | None,
    ) -> None:
        self._program = program
        self._rank = rank
        self._channels: Sequence[Channel] = program.channels
        self._transfers = transfers
        self._sync = sync
        self._sharded = sharded
        self._local = LocalValues(program, rank, stages, wiring)
        self._compute = Compute(
            program,
            stages,
            self._local,
            transfers=transfers,
            sync=None if program.forward_only else sync,
            weights=weights,
            sharded=sharded,
            loss_fn=loss_fn,
        )
        # What a rank does; the same where a profiler looks; and what is left of a step that failed.
        self._items: list[_Step] = []
        self._ranged: list[_Step] = []
        self._afterwards: list[_Step] = []
        self._labels: dict[Method, str] = {}  # of what may fail, for messages and traces
        self._compile(program, weights)
        self.place = 0

    def _compile(self, program: Program, weights: WeightGradients) -> None:
        """Turns items into calls."""
        transfers = self._transfers
        methods: dict[Op, Method] = {
            Op.FIRST_USE: self._first_use,
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: self._receive,
            Op.JOIN: self._join,
            Op.LAST_BACKWARD: self._last_backward,
            Op.SEND: self._send,
            Op.RELEASE: transfers.release,
            Op.FINAL: self._become_final,
            Op.INPUTS_FINAL: weights.inputs_are_final,
            Op.SHARED_WEIGHTS: weights.compute_shared,
        }
        self._labels[weights.compute_shared] = "shared weights of stage {0}"
        drained: dict[Op, Method] = {
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: self._receive_and_drop,
            Op.SEND: self._send_nothing,
            Op.RELEASE: transfers.release,
        }
        for item in program.decoded(self._rank):
            method: Method
            ranged: Method | None = None
            which = item.which
            if item.op is Op.COMPUTE:
                which, kind, _ = program.action(item)
                method = self._compute.method_of(which, kind)
                self._labels[method] = f"{{0}}{kind}{{1}}"
                ranged = partial(self._in_range, method)
            elif item.op in methods:
                method = methods[item.op]
            else:  # LAUNCH, which leaves with what makes it final, and PUBLISH, when it was stepped
                continue
            self._items.append((method, which, item.microbatch))
            self._ranged.append((ranged or method, which, item.microbatch))
            self._afterwards.append((drained.get(item.op, _skip), which, item.microbatch))

    def _forget(self) -> None:
        """Lets go of everything of a step."""
        self._local.forget()
        self._compute.forget()
        self._transfers.lent.clear()

    @property
    def is_in_doubt(self) -> bool:
        """Whether an interrupt came while a transfer began: nobody can tell what is left then."""
        return self._transfers.is_in_doubt

    @property
    def forward_only(self) -> bool:
        """Whether it computes no gradients."""
        return self._program.forward_only

    @property
    def specs(self) -> dict[int, Spec]:
        """What the values look like that this rank has seen, by link."""
        return {link: spec for link, spec in self._transfers.specs.items() if spec is not None}

    def run(
        self,
        inputs: Mapping[str, Sequence[object]],
        targets: Sequence[object] | None,
        divisor: float,
    ) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        """Runs all items; returns the losses and, forward-only, the outputs of the last stage.

        If it raises, call `finish_transfers`.

        Args:
            inputs: External name -> its value for each microbatch.
            targets: For each microbatch, on the rank of the last stage.
            divisor: Of every loss, as backward sees it.

        Sync: all on the current stream.
        """
        self._forget()  # an interrupt may have left something, behind any clearing up
        self._compute.begin(inputs, targets, divisor)
        if self.forward_only:
            self._sharded.begin_evaluation()
        else:
            self._sharded.begin()
        self.place = 0
        items = self._ranged if is_profiled() else self._items
        try:
            for method, which, microbatch in items:
                method(which, microbatch)
                self.place += 1
        except BaseException as error:
            self._tell_where(error)
            raise
        losses, outputs = self._compute.losses, self._compute.outputs
        self._forget()
        return losses, outputs

    def finish_transfers(self) -> None:
        """Makes the transfers that are left of a step that failed, of zeros.

        So all that other ranks send and wait for ends, on any backend, and no edge is out of step.
        """
        self._transfers.note_ended()
        for method, index, microbatch in self._afterwards[self.place :]:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                method(index, microbatch)
        for value in self._local.held.values():
            if value.buffer is not None:
                self._transfers.give_back(value.channel, value.buffer)
        for (channel, _), buffer in self._local.arrived.items():
            if buffer is not None:
                self._transfers.give_back(channel, buffer)
        self._forget()

    # Transfers.

    def _receive(self, channel: int, microbatch: int) -> None:
        link, kind, _, _ = self._channels[channel]
        buffer = self._transfers.wait(channel, microbatch)
        if kind == "B":
            self._local.arrived[channel, microbatch] = buffer
            return
        if buffer is None:
            raise PeerFailedError(f"{self._program.transfer(channel, microbatch)} never came")
        tensor = buffer.tensor
        spec = self._transfers.specs[link]
        assert spec is not None
        if spec.differentiable and not self._program.forward_only:
            tensor = tensor.detach().requires_grad_()
        num = self._local.num_consumers[link]
        value = Value(tensor, num, num, channel, buffer)
        self._local.held[link, microbatch] = value

    def _send(self, channel: int, microbatch: int) -> None:
        link, kind, _, _ = self._channels[channel]
        if kind == "F":
            self._transfers.send(channel, microbatch, self._local.leaving[link])
        else:
            self._transfers.send(channel, microbatch, self._local.gradients[link, microbatch])
            del self._local.gradients[link, microbatch]

    def _join(self, link: int, microbatch: int) -> None:
        """Sums in the order of ranks, so that the bits never differ."""
        arrived = {
            rank: self._local.arrived[c, microbatch]
            for rank, c in self._local.incoming[link].items()
        }
        terms = {rank: buffer.tensor for rank, buffer in arrived.items() if buffer is not None}
        local = self._local.gradients.pop((link, microbatch), None)
        if local is not None:
            terms[self._rank] = local
        total: Tensor | None = None
        for rank in sorted(terms):
            total = terms[rank] if total is None else total.add_(terms[rank])
        self._local.gradients[link, microbatch] = total

    def _send_nothing(self, channel: int, microbatch: int) -> None:
        self._transfers.send(channel, microbatch, None)

    def _receive_and_drop(self, channel: int, microbatch: int) -> None:
        buffer = self._transfers.wait(channel, microbatch)
        if buffer is not None:
            self._transfers.give_back(channel, buffer)

    # Gradients, and what is told.

    def _first_use(self, stage: int, _microbatch: int) -> None:
        self._sync.stage_first_use(stage)

    def _last_backward(self, stage: int, _microbatch: int) -> None:
        self._sync.stage_last_backward(stage)
        self._sharded.last_backward(stage)

    def _become_final(self, stage: int, _microbatch: int) -> None:
        self._sync.stage_final(stage)

    def _in_range(self, compute: Method, stage: int, microbatch: int) -> None:
        """Computes inside a range that profilers see: ``pipegrad 2F0``."""
        with record_function(f"pipegrad {self._labels[compute].format(stage, microbatch)}"):
            compute(stage, microbatch)

    def _tell_where(self, error: BaseException) -> None:
        method, stage, microbatch = self._items[self.place]
        label = self._labels.get(method)
        if label is not None:
            where = label.format(stage, microbatch)
            error.add_note(f"In {where} on pipeline rank {self._rank}.")


def _skip(_index: int, _microbatch: int) -> None:
    """What a rank that has failed does in the place of a compute."""
