"""Executor: one rank of a Program, item by item. It interprets, and decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import record_function

from pipegrad.errors import ScheduleError, StepError
from pipegrad.gradients.sync import GradientSync
from pipegrad.runtime.stage import Stage, Wiring
from pipegrad.runtime.torch_pipelining import is_profiled
from pipegrad.runtime.transfer import Buffer, Spec, Transfers
from pipegrad.schedules.program import Channel, Op, Program

Tensor = torch.Tensor
Key = tuple[int, int]  # a link, channel or stage, and a microbatch
_Method = Callable[[int, int], object]
_Step = tuple[_Method, int, int]
Loss = Callable[..., object]  # a tensor of one element


class PeerFailedError(StepError):
    """What a stage needs never came, since another rank failed first."""


@dataclass(slots=True)
class _Value:
    """A value that stages of this rank take.

    Attributes:
        tensor: A leaf, if a gradient will come back.
        num_readers: Stages of this rank that still read it, in forward or, if any, backward.
        channel: What brought it.
        buffer: Where it lies, if it came from another rank.
    """

    tensor: Tensor
    num_readers: int
    channel: int = -1
    buffer: Buffer | None = None


class Executor:
    """Runs the items of one rank.

    A received value is a leaf for all stages of this rank that take it: autograd itself sums what
    they send back. A value that a stage of the same rank takes is handed over as it is.

    Args:
        program: What all ranks do.
        rank: This rank's place in the pipeline.
        stages: This rank's.
        wiring: How stages hang together.
        transfers: This rank's end of them.
        sync: Told of last backwards and final stages; None in a forward-only program.
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
        sync: GradientSync | None,
        loss_fn: Loss | None,
    ) -> None:
        self._program = program
        self._channels: Sequence[Channel] = program.channels
        self._stages = stages
        self._wiring = wiring
        self._transfers = transfers
        self._sync = sync
        self._loss_fn = loss_fn
        self._last = len(wiring.made) - 1
        self._places = program.schedule.stage_to_rank
        self._rank = rank
        self._index(program, wiring)
        # What a rank does; the same where a profiler looks; and what is left of a step that failed.
        self._items: list[_Step] = []
        self._ranged: list[_Step] = []
        self._afterwards: list[_Step] = []
        self._compile(program)
        self.place = 0
        self._forget()

    def _index(self, program: Program, wiring: Wiring) -> None:
        """Looks up who takes and who makes what, once."""
        rank, stages = self._rank, self._stages
        self._num_consumers = [
            sum(self._places[c] == rank for c in link.consumers) for link in program.links
        ]
        self._incoming: dict[int, dict[int, int]] = {}  # link -> rank -> channel back
        for number, (link, kind, source, target) in enumerate(program.channels):
            if kind == "B" and target == rank:
                self._incoming.setdefault(link, {})[source] = number
        # Of a value that goes to one other rank alone, the channel back.
        self._back = {link: min(channels.values()) for link, channels in self._incoming.items()}
        # Stage -> what it takes: links, or external names.
        self._taken: dict[int, list[tuple[int | None, str]]] = {
            stage: [(s, "") if isinstance(s, int) else (None, s) for s in wiring.taken[stage]]
            for stage in stages
        }
        self._links = {
            stage: [link for link, _ in taken if link is not None]
            for stage, taken in self._taken.items()
        }
        # Stage -> what its backward begins with: the links it makes, or the loss.
        self._ends: dict[int, tuple[int | None, ...]] = {
            stage: (None,) if stage == self._last else wiring.made[stage] for stage in stages
        }
        self._returns = {
            stage: [
                channel
                for link in wiring.made[stage]
                if stage != self._last
                for channel in self._incoming.get(link, {}).values()
            ]
            for stage in stages
        }

    def _compile(self, program: Program) -> None:
        """Turns items into calls."""
        transfers = self._transfers
        methods: dict[Op, _Method] = {
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: self._receive,
            Op.JOIN: self._join,
            Op.LAST_BACKWARD: self._last_backward,
            Op.SEND: self._send,
            Op.RELEASE: transfers.release,
            Op.FINAL: self._become_final,
        }
        drained: dict[Op, _Method] = {
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: self._receive_and_drop,
            Op.SEND: self._send_nothing,
            Op.RELEASE: transfers.release,
        }
        for item in program.decoded(self._rank):
            method: _Method
            ranged: _Method | None = None
            which = item.which
            if item.op is Op.COMPUTE:
                which, kind, _ = program.action(item)
                method = self._forward if kind == "F" else self._backward
                ranged = partial(self._in_range, method)
            elif item.op in methods:
                method = methods[item.op]
            elif item.op is Op.LAUNCH:
                continue  # it leaves with what makes it final
            else:
                raise ScheduleError(f"{item.op} can be planned, but not run yet")
            self._items.append((method, which, item.microbatch))
            self._ranged.append((ranged or method, which, item.microbatch))
            self._afterwards.append((drained.get(item.op, _skip), which, item.microbatch))

    def _forget(self) -> None:
        """Lets go of everything of a step."""
        self._inputs: Mapping[str, Sequence[object]] = {}
        self._targets: Sequence[object] | None = None
        self._values = dict[Key, _Value]()
        self._roots = dict[Key, tuple[Tensor, ...]]()
        self._made = dict[int, Tensor]()  # values to send, by link: they leave at once
        self._arrived = dict[Key, Buffer | None]()  # received gradients, by channel
        self._gradients = dict[Key, Tensor | None]()  # of values, by link, to send or hand over
        self._met = set[int]()  # stages whose forward has run
        self._own = set[int]()  # addresses of their buffers, which they may write into
        self._bare = dict[int, list[Tensor]]()  # stage -> parameters without a gradient yet
        self._losses = list[Tensor]()
        self._outputs = list[tuple[Tensor, ...]]()
        self._transfers.lent.clear()

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
        self._inputs, self._targets, self._divisor = inputs, targets, divisor
        self.place = 0
        items = self._ranged if is_profiled() else self._items
        try:
            for method, which, microbatch in items:
                method(which, microbatch)
                self.place += 1
        except Exception as error:
            self._tell_where(error)
            raise
        losses, outputs = self._losses, self._outputs
        self._forget()
        return losses, outputs

    def finish_transfers(self) -> None:
        """Makes the transfers that are left of a step that failed, of zeros.

        So all that other ranks send and wait for ends, on any backend, and no edge is out of step.
        """
        for method, index, microbatch in self._afterwards[self.place :]:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                method(index, microbatch)
        for value in self._values.values():
            if value.buffer is not None:
                self._transfers.give_back(value.channel, value.buffer)
        for (channel, _), buffer in self._arrived.items():
            if buffer is not None:
                self._transfers.give_back(channel, buffer)
        self._forget()

    # Transfers.

    def _receive(self, channel: int, microbatch: int) -> None:
        link, kind, _, _ = self._channels[channel]
        buffer = self._transfers.wait(channel, microbatch)
        if kind == "B":
            self._arrived[channel, microbatch] = buffer
            return
        if buffer is None:
            raise PeerFailedError(f"{self._program.transfer(channel, microbatch)} never came")
        tensor = buffer.tensor
        spec = self._transfers.specs[link]
        assert spec is not None
        if spec.differentiable and self._sync is not None:
            tensor = tensor.detach().requires_grad_()
        value = _Value(tensor, self._num_consumers[link], channel, buffer)
        self._values[link, microbatch] = value

    def _send(self, channel: int, microbatch: int) -> None:
        link, kind, _, _ = self._channels[channel]
        if kind == "F":
            self._transfers.send(channel, microbatch, self._made[link])
        else:
            self._transfers.send(channel, microbatch, self._gradients[link, microbatch])
            del self._gradients[link, microbatch]

    def _send_nothing(self, channel: int, microbatch: int) -> None:
        self._transfers.send(channel, microbatch, None)

    def _receive_and_drop(self, channel: int, microbatch: int) -> None:
        buffer = self._transfers.wait(channel, microbatch)
        if buffer is not None:
            self._transfers.give_back(channel, buffer)

    # Compute.

    def _in_range(self, compute: Callable[[int, int], object], stage: int, microbatch: int) -> None:
        """Computes inside a range that profilers see: ``pipegrad 2F0``."""
        kind = "F" if compute == self._forward else "B"
        with record_function(f"pipegrad {stage}{kind}{microbatch}"):
            compute(stage, microbatch)

    def _forward(self, stage: int, microbatch: int) -> None:
        values: list[object] = []
        for link, name in self._taken[stage]:
            if link is None:
                values += (self._inputs[name][microbatch],)
            else:
                values += (self._values[link, microbatch].tensor,)
        outputs = self._stages[stage].forward(values)
        if stage not in self._met:
            self._met.add(stage)
            buffers = self._stages[stage].module.buffers()
            self._own.update(buffer.untyped_storage().data_ptr() for buffer in buffers)
        if stage == self._last:
            outputs = self._end(microbatch, outputs)
        else:
            self._hand_on(stage, microbatch, outputs)
        if self._sync is None:
            self._let_go(stage, microbatch)
        else:
            self._roots[stage, microbatch] = outputs

    def _hand_on(self, stage: int, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        """Keeps what a stage made, for its consumers on this rank and for those on others."""
        for link, output in zip(self._wiring.made[stage], outputs, strict=True):
            spec = self._transfers.specs.get(link)
            if (output.shape, output.dtype, output.requires_grad) != spec:
                self._learn(link, stage, microbatch, Spec.of(output))
            value = self._apart(output).detach()
            self._made[link] = value
            if self._num_consumers[link]:
                local = value.requires_grad_() if output.requires_grad else value
                self._values[link, microbatch] = _Value(local, self._num_consumers[link])

    def _end(self, microbatch: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Computes the loss of the last stage; returns what backward begins with."""
        if self._sync is None:
            self._outputs.append(tuple(map(self._apart, outputs)))
        if self._targets is None:
            return ()
        assert self._loss_fn is not None
        loss = self._loss_fn(*outputs, self._targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise StepError(f"loss_fn returned {loss!r}, expected a tensor of one element")
        if self._sync is not None and not loss.requires_grad:
            raise StepError(
                "the loss does not depend on anything that requires a gradient: loss_fn detaches "
                "it, or step() runs under no_grad"
            )
        self._losses.append(self._apart(loss.detach()).reshape(()))
        return (loss,)

    def _backward(self, stage: int, microbatch: int) -> None:
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for root, link in zip(self._roots[stage, microbatch], self._ends[stage], strict=True):
            if not root.requires_grad:
                continue
            gradient = (
                torch.full_like(root, 1.0 / self._divisor)
                if link is None
                else self._gradient(link, microbatch)
            )
            if gradient is not None:
                roots += (root,)
                gradients += (gradient,)
        del self._roots[stage, microbatch]
        if roots:
            torch.autograd.backward(roots, gradients)
        self._part_gradients(stage, microbatch)
        self._let_go(stage, microbatch)
        for channel in self._returns[stage]:
            buffer = self._arrived[channel, microbatch]
            del self._arrived[channel, microbatch]
            if buffer is not None:
                self._transfers.give_back(channel, buffer)

    def _gradient(self, link: int, microbatch: int) -> Tensor | None:
        """Returns what came back for a value: from this rank, from another one, or summed."""
        key = link, microbatch
        if key in self._gradients:
            gradient = self._gradients[key]
            del self._gradients[key]
            return gradient
        buffer = self._arrived[self._back[link], microbatch]
        return None if buffer is None else buffer.tensor

    def _join(self, link: int, microbatch: int) -> None:
        """Sums in the order of ranks, so that the bits never differ."""
        arrived = {rank: self._arrived[c, microbatch] for rank, c in self._incoming[link].items()}
        terms = {rank: buffer.tensor for rank, buffer in arrived.items() if buffer is not None}
        local = self._gradients.pop((link, microbatch), None)
        if local is not None:
            terms[self._rank] = local
        total: Tensor | None = None
        for rank in sorted(terms):
            total = terms[rank] if total is None else total.add_(terms[rank])
        self._gradients[link, microbatch] = total

    def _let_go(self, stage: int, microbatch: int) -> None:
        """Takes up what came back to a stage's inputs, once all that share one are done with it."""
        for link in self._links[stage]:
            value = self._values[link, microbatch]
            value.num_readers -= 1
            if value.num_readers:
                continue
            del self._values[link, microbatch]
            if self._sync is not None:
                self._gradients[link, microbatch] = value.tensor.grad
            if value.buffer is not None:
                self._transfers.give_back(value.channel, value.buffer)

    # What must not be mistaken.

    def _learn(self, link: int, stage: int, microbatch: int, found: Spec) -> None:
        """Takes what a value looks like from its first microbatch; refuses any other."""
        known = self._transfers.specs.setdefault(link, found)
        if known != found:
            raise StepError(
                f"stage {stage}, microbatch {microbatch}: {self._program.links[link].name!r} is "
                f"{found}, and was {known} in the first microbatch; all microbatches of all steps "
                f"must look alike: pad them, or make another Scheduler"
            )

    def _apart(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`, copied if it lies where somebody else will write."""
        address = tensor.untyped_storage().data_ptr()
        return tensor.clone() if address in self._transfers.lent or address in self._own else tensor

    def _part_gradients(self, stage: int, microbatch: int) -> None:
        """Copies gradients that share memory with one another, or with a buffer.

        Autograd lets several gradients be views of one, as behind a sum, and adds to each in place
        later on. A parameter's can share only when it is new.
        """
        taken = {**self._transfers.lent}
        for link in self._links[stage]:
            value = self._values[link, microbatch].tensor
            if value.grad is not None:
                address = value.grad.untyped_storage().data_ptr()
                if address in taken:
                    value.grad = value.grad.clone()
                taken[address] = None
        if stage not in self._bare:
            self._bare[stage] = list(self._stages[stage].module.parameters())
        if self._bare[stage]:
            for parameter in self._bare[stage]:
                if parameter.grad is not None:
                    address = parameter.grad.untyped_storage().data_ptr()
                    if address in taken:
                        parameter.grad = parameter.grad.clone()
                    taken[address] = None
            self._bare[stage] = [p for p in self._bare[stage] if p.grad is None and p.requires_grad]

    # Gradients.

    def _last_backward(self, stage: int, _microbatch: int) -> None:
        assert self._sync is not None
        self._sync.stage_last_backward(stage)

    def _become_final(self, stage: int, _microbatch: int) -> None:
        assert self._sync is not None
        self._sync.stage_final(stage)

    def _tell_where(self, error: Exception) -> None:
        method, stage, microbatch = self._items[self.place]
        if method in (self._forward, self._backward):
            kind = "F" if method == self._forward else "B"
            error.add_note(f"In {stage}{kind}{microbatch} on pipeline rank {self._rank}.")


def _skip(_index: int, _microbatch: int) -> None:
    """What a rank that has failed does in the place of a compute."""
