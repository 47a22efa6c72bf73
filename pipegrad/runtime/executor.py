"""Executor: one rank of a Program, item by item. It interprets, and decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import record_function

from pipegrad.errors import ScheduleError, StepError
from pipegrad.gradients.sync import GradientSync
from pipegrad.runtime.recompute import RandomState, keeping_nothing
from pipegrad.runtime.stage import Stage, Wiring
from pipegrad.runtime.torch_pipelining import is_profiled
from pipegrad.runtime.transfer import Buffer, Spec, Transfers
from pipegrad.runtime.weights import WeightGradients
from pipegrad.schedules.action import Kind
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
        num_returns: Stages of this rank that have not sent its gradient back.
        num_readers: Those that still read it, for any gradient.
        channel: What brought it.
        buffer: Where it lies, if it came from another rank.
    """

    tensor: Tensor
    num_returns: int
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
        self._weights: WeightGradients | None = None
        if sync is not None:
            modules = {index: stage.module for index, stage in stages.items()}
            self._weights = WeightGradients(modules, sync, transfers.lent)
        self._last = len(wiring.made) - 1
        self._places = program.schedule.stage_to_rank
        self._rank = rank
        self._index(program, wiring)
        # What a rank does; the same where a profiler looks; and what is left of a step that failed.
        self._kinds: dict[_Method, Kind] = {}
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
        if self._weights is not None:
            methods[Op.INPUTS_FINAL] = self._inputs_final
            methods[Op.SHARED_WEIGHTS] = self._shared_weights
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
                method = self._method_of(kind, recompute=self._stages[which].recompute)
                self._kinds[method] = kind
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

    def _method_of(self, kind: Kind, *, recompute: bool) -> _Method:
        """Returns what computes an action."""
        methods: dict[Kind, _Method] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._backward_weights,
        }
        if recompute and self._sync is not None:
            methods |= {
                "F": self._forward_keeping_nothing,
                "B": partial(self._recomputed, self._backward),
                "I": partial(self._recomputed, self._backward_inputs),
            }
        return methods[kind]

    def _forget(self) -> None:
        """Lets go of everything of a step."""
        self._inputs: Mapping[str, Sequence[object]] = {}
        self._targets: Sequence[object] | None = None
        self._values = dict[Key, _Value]()
        self._roots = dict[Key, tuple[Tensor, ...]]()
        self._random = dict[Key, RandomState]()  # of forwards that will be run again
        self._made = dict[int, Tensor]()  # values to send, by link: they leave at once
        self._arrived = dict[Key, Buffer | None]()  # received gradients, by channel
        self._gradients = dict[Key, Tensor | None]()  # of values, by link, to send or hand over
        self._met = set[int]()  # stages whose forward has run
        self._own = set[int]()  # addresses of their buffers, which they may write into
        self._bare = dict[int, list[Tensor]]()  # stage -> parameters without a gradient yet
        self._losses = list[Tensor]()
        self._outputs = list[tuple[Tensor, ...]]()
        self._transfers.lent.clear()
        if self._weights is not None:
            self._weights.forget()

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
        num = self._num_consumers[link]
        value = _Value(tensor, num, num, channel, buffer)
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
        with record_function(f"pipegrad {stage}{self._kinds[compute]}{microbatch}"):
            compute(stage, microbatch)

    def _forward(self, stage: int, microbatch: int) -> None:
        outputs = self._outputs_of(stage, microbatch)
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

    def _outputs_of(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        values: list[object] = []
        for link, name in self._taken[stage]:
            if link is None:
                values += (self._inputs[name][microbatch],)
            else:
                values += (self._values[link, microbatch].tensor,)
        return self._stages[stage].forward(values)

    def _hand_on(self, stage: int, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        """Keeps what a stage made, for its consumers on this rank and for those on others."""
        for link, output in zip(self._wiring.made[stage], outputs, strict=True):
            spec = self._transfers.specs.get(link)
            if (output.shape, output.dtype, output.requires_grad) != spec:
                self._learn(link, stage, microbatch, Spec.of(output))
            value = self._apart(output).detach()
            self._made[link] = value
            if num := self._num_consumers[link]:
                local = value.requires_grad_() if output.requires_grad else value
                self._values[link, microbatch] = _Value(local, num, num)

    def _end(self, microbatch: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Computes the loss of the last stage; returns what backward begins with."""
        if self._sync is None:
            self._outputs.append(tuple(map(self._apart, outputs)))
        if self._targets is None:
            return ()
        loss = self._loss_of(microbatch, outputs)
        self._losses.append(self._apart(loss.detach()).reshape(()))
        return (loss,)

    def _loss_of(self, microbatch: int, outputs: tuple[Tensor, ...]) -> Tensor:
        assert self._loss_fn is not None
        assert self._targets is not None
        loss = self._loss_fn(*outputs, self._targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise StepError(f"loss_fn returned {loss!r}, expected a tensor of one element")
        if self._sync is not None and not loss.requires_grad:
            raise StepError(
                "the loss does not depend on anything that requires a gradient: loss_fn detaches "
                "it, or step() runs under no_grad"
            )
        return loss

    def _backward(self, stage: int, microbatch: int) -> None:
        roots, gradients = self._begin_backward(stage, microbatch)
        if roots:
            torch.autograd.backward(roots, gradients)
        self._end_backward(stage, microbatch)
        self._let_go(stage, microbatch)

    def _backward_inputs(self, stage: int, microbatch: int) -> None:
        assert self._weights is not None
        roots, gradients = self._begin_backward(stage, microbatch)
        inputs = [self._values[link, microbatch].tensor for link in self._links[stage]]
        kept = self._weights.backward(stage, microbatch, roots, gradients, inputs)
        del roots, gradients
        self._end_backward(stage, microbatch, kept)

    def _backward_weights(self, stage: int, microbatch: int) -> None:
        assert self._weights is not None
        self._weights.compute(stage, microbatch)
        self._let_go(stage, microbatch)

    def _forward_keeping_nothing(self, stage: int, microbatch: int) -> None:
        assert self._sync is not None
        self._random[stage, microbatch] = RandomState(self._sync.device)
        with keeping_nothing():
            self._forward(stage, microbatch)
        self._roots[stage, microbatch] = ()

    def _recomputed(self, compute: _Method, stage: int, microbatch: int) -> None:
        """Runs a forward again, then its backward."""
        random = self._random.pop((stage, microbatch))
        with random.again():
            outputs = self._outputs_of(stage, microbatch)
            if stage == self._last:
                outputs = (self._loss_of(microbatch, outputs),)
        self._roots[stage, microbatch] = outputs
        del outputs
        compute(stage, microbatch)

    def _begin_backward(
        self, stage: int, microbatch: int
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns what backward begins with, and its gradients."""
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
        return roots, gradients

    def _end_backward(self, stage: int, microbatch: int, kept: Iterable[Tensor] = ()) -> None:
        """Takes up what came back to a stage's inputs, once all that share one are done with it."""
        self._part_gradients(stage, microbatch, kept)
        for link in self._links[stage]:
            value = self._values[link, microbatch]
            value.num_returns -= 1
            if not value.num_returns:
                self._gradients[link, microbatch] = value.tensor.grad
                value.tensor.grad = None
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
        """Frees a stage's inputs that nobody reads again."""
        for link in self._links[stage]:
            value = self._values[link, microbatch]
            value.num_readers -= 1
            if not value.num_readers:
                del self._values[link, microbatch]
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

    def _part_gradients(self, stage: int, microbatch: int, kept: Iterable[Tensor]) -> None:
        """Copies gradients that share memory with one another, with a buffer, or with `kept` ones.

        Autograd lets several gradients be views of one, as behind a sum, and adds to each in place
        later on. A parameter's can share only when it is new.
        """
        taken = {**self._transfers.lent}
        for gradient in kept:
            taken[gradient.untyped_storage().data_ptr()] = None
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

    def _inputs_final(self, stage: int, _microbatch: int) -> None:
        assert self._weights is not None
        self._weights.inputs_are_final(stage)

    def _shared_weights(self, stage: int, _microbatch: int) -> None:
        assert self._weights is not None
        self._weights.compute_shared(stage)

    def _tell_where(self, error: Exception) -> None:
        method, stage, microbatch = self._items[self.place]
        kind = self._kinds.get(method)
        if kind is not None:
            error.add_note(f"In {stage}{kind}{microbatch} on pipeline rank {self._rank}.")


def _skip(_index: int, _microbatch: int) -> None:
    """What a rank that has failed does in the place of a compute."""
