"""Executor: one rank of a Program, item by item. It interprets, and decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.profiler import record_function

from pipegrad.errors import StepError
from pipegrad.gradients.sync import GradientSync
from pipegrad.runtime.stage import Stage, Wiring
from pipegrad.runtime.transfer import Spec, Transfers, check_spec
from pipegrad.schedules.program import Channel, Op, Program, decode

Tensor = torch.Tensor
Key = tuple[int, int]  # a link, channel or stage, and a microbatch
Loss = Callable[..., Tensor]


class PeerFailedError(StepError):
    """What a stage needs never came, since another rank failed first."""


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
        self._num_consumers = [
            sum(self._places[c] == rank for c in link.consumers) for link in program.links
        ]
        self._incoming: dict[int, list[tuple[int, int]]] = {}  # link -> (rank, channel back)
        for number, (link, kind, source, target) in enumerate(program.channels):
            if kind == "B" and target == rank:
                self._incoming.setdefault(link, []).append((source, number))
        methods = {
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: self._receive,
            Op.JOIN: self._join,
            Op.LAST_BACKWARD: self._last_backward,
            Op.SEND: self._send,
            Op.RELEASE: transfers.release,
            Op.FINAL: self._become_final,
        }
        self._items: list[tuple[Callable[[int, int], object], int, int]] = []
        self.place = 0
        self._afterwards: list[tuple[Callable[[int, int], object], int, int]] = []
        drained: dict[Op, Callable[[int, int], object]] = {
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: self._drop,
            Op.SEND: self._send_nothing,
            Op.RELEASE: transfers.release,
        }
        for op, index, microbatch in map(decode, program.items[rank]):
            method: Callable[[int, int], object]
            if op is Op.COMPUTE:
                method = self._forward if index & 3 == 0 else self._backward
                index >>= 2  # noqa: PLW2901 - the stage
            elif op in methods:
                method = methods[op]
            else:
                continue  # launches leave with what makes them final
            self._items.append((method, index, microbatch))
            self._afterwards.append((drained.get(op, _nothing), index, microbatch))

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
        root_gradient: Tensor | None,
    ) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        """Runs all items; returns the losses and, forward-only, the outputs of the last stage.

        If it raises, call `finish_transfers`.

        Args:
            inputs: External name -> its value for each microbatch.
            targets: For each microbatch, on the rank of the last stage.
            root_gradient: What the losses' gradients are, a scalar.

        Sync: all on the current stream.
        """
        self._inputs, self._targets, self._root_gradient = inputs, targets, root_gradient
        self._values: dict[Key, Tensor] = {}
        self._buffers: dict[Key, Tensor] = {}  # received values, by link
        self._left: dict[Key, int] = {}
        self._roots: dict[Key, tuple[Tensor, ...]] = {}
        self._arrived: dict[Key, Tensor | None] = {}  # received gradients, by channel
        self._joined: dict[Key, Tensor | None] = {}
        self._made: dict[int, Tensor] = {}  # values to send, by link: they leave at once
        self._outgoing: dict[Key, Tensor | None] = {}  # gradients of values, by link
        self._began = set[int]()
        self._losses: list[Tensor] = []
        self._outputs: list[tuple[Tensor, ...]] = []
        self.place = 0
        try:
            for method, index, microbatch in self._items:
                method(index, microbatch)
                self.place += 1
        except Exception as error:
            self._tell_where(error)
            raise
        return self._losses, self._outputs

    def finish_transfers(self) -> None:
        """Makes the transfers that are left of a step that failed, of zeros.

        So all that other ranks send and wait for ends, on any backend, and no edge is out of step.
        """
        for method, index, microbatch in self._afterwards[self.place :]:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                method(index, microbatch)
        self.place = 0

    # Transfers.

    def _receive(self, channel: int, microbatch: int) -> None:
        link, kind, _, _ = self._channels[channel]
        buffer = self._transfers.wait(channel, microbatch)
        if kind == "B":
            self._arrived[channel, microbatch] = buffer
            return
        if buffer is None:
            raise PeerFailedError(f"{self._program.transfer(channel, microbatch)} never came")
        self._buffers[link, microbatch] = buffer
        spec = self._transfers.specs[link]
        assert spec is not None
        if spec.differentiable and self._sync is not None:
            buffer = buffer.detach().requires_grad_()
        self._values[link, microbatch] = buffer
        self._left[link, microbatch] = self._num_consumers[link]

    def _send(self, channel: int, microbatch: int) -> None:
        link, kind, _, _ = self._channels[channel]
        if kind == "F":
            tensor = self._made[link]
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            self._transfers.send(channel, microbatch, tensor)
        else:
            gradient = self._outgoing.pop((link, microbatch), None)
            self._transfers.send(channel, microbatch, gradient)

    def _send_nothing(self, channel: int, microbatch: int) -> None:
        self._transfers.send(channel, microbatch, None)

    def _drop(self, channel: int, microbatch: int) -> None:
        buffer = self._transfers.wait(channel, microbatch)
        if buffer is not None:
            self._transfers.give_back(self._channels[channel].link, buffer)

    # Compute.

    def _forward(self, stage: int, microbatch: int) -> None:
        values = [
            self._values[source, microbatch]
            if isinstance(source, int)
            else self._inputs[source][microbatch]
            for source in self._wiring.taken[stage]
        ]
        with record_function(f"{stage}F{microbatch}"):
            outputs = self._stages[stage].forward(values)
            if stage == self._last:
                self._end(stage, microbatch, outputs)
                return
        roots = list[Tensor]()
        for made, output in zip(self._wiring.made[stage], outputs, strict=True):
            assert made is not None
            self._check(made, stage, microbatch, output)
            output = self._apart(output, stage, microbatch)  # noqa: PLW2901
            roots.append(output)
            left = self._num_consumers[made]
            sent = output.detach()
            if left:
                local = sent.requires_grad_() if output.requires_grad else sent
                self._values[made, microbatch] = local
                self._left[made, microbatch] = left
            self._made[made] = sent
        if self._sync is not None:
            self._roots[stage, microbatch] = tuple(roots)
        self._let_go_after(stage, microbatch, forward=True)

    def _end(self, stage: int, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        """Computes the loss of the last stage."""
        if self._targets is not None:
            assert self._loss_fn is not None
            loss = self._loss_fn(*outputs, self._targets[microbatch])
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise StepError(f"loss_fn returned {loss!r}, expected a tensor of one element")
            self._losses.append(loss.detach())
            if self._sync is not None:
                self._roots[stage, microbatch] = (loss,)
        if self._sync is None:
            self._outputs.append(
                tuple(self._apart(output, stage, microbatch) for output in outputs)
            )
        self._let_go_after(stage, microbatch, forward=True)

    def _backward(self, stage: int, microbatch: int) -> None:
        roots = self._roots.pop((stage, microbatch))
        gradients: list[Tensor | None]
        if stage == self._last:
            gradients = [self._root_gradient]
        else:
            gradients = [
                self._gradient(made, microbatch)
                for made in self._wiring.made[stage]
                if made is not None
            ]
        pairs = [
            (root, gradient)
            for root, gradient in zip(roots, gradients, strict=True)
            if gradient is not None and root.requires_grad
        ]
        if pairs:
            with record_function(f"{stage}B{microbatch}"):
                torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        if stage not in self._began:
            self._began.add(stage)
            self._own_gradients(stage, microbatch)
        self._let_go_after(stage, microbatch, forward=False)
        for made in self._wiring.made[stage]:
            self._forget(made, microbatch)

    def _gradient(self, link: int, microbatch: int) -> Tensor | None:
        """Returns what came back for a value, from one rank or summed."""
        if (link, microbatch) in self._joined:
            return self._joined[link, microbatch]
        if link in self._incoming:
            return self._arrived[self._incoming[link][0][1], microbatch]
        return self._outgoing.pop((link, microbatch), None)

    def _join(self, link: int, microbatch: int) -> None:
        """Sums in the order of ranks, so that the bits never differ."""
        terms = {rank: self._arrived[number, microbatch] for rank, number in self._incoming[link]}
        if self._num_consumers[link]:
            terms[self._rank] = self._outgoing.pop((link, microbatch), None)
        total: Tensor | None = None
        for rank in sorted(terms):
            term = terms[rank]
            if term is not None:
                total = term if total is None else total.add_(term)
        self._joined[link, microbatch] = total

    def _let_go_after(self, stage: int, microbatch: int, *, forward: bool) -> None:
        """Takes up what came back to the inputs of a stage, once all that share one are done."""
        if forward and self._sync is not None:
            return
        for source in self._wiring.taken[stage]:
            if not isinstance(source, int):
                continue
            key = source, microbatch
            self._left[key] -= 1
            if self._left[key]:
                continue
            del self._left[key]
            value = self._values.pop(key)
            if not forward and value.requires_grad:
                gradient = value.grad
                if gradient is not None:
                    gradient = self._apart(gradient, stage, microbatch)
                    if not gradient.is_contiguous():
                        gradient = gradient.contiguous()
                self._outgoing[key] = gradient
            buffer = self._buffers.pop(key, None)
            if buffer is not None:
                self._transfers.give_back(source, buffer)

    def _forget(self, link: int | None, microbatch: int) -> None:
        """Gives back the gradients that a value's producer has read."""
        if link is None:
            return
        self._joined.pop((link, microbatch), None)
        for _, channel in self._incoming.get(link, ()):
            buffer = self._arrived.pop((channel, microbatch), None)
            if buffer is not None:
                self._transfers.give_back(link, buffer)

    # What must not be mistaken.

    def _check(self, link: int, stage: int, microbatch: int, output: Tensor) -> None:
        known = self._transfers.specs.get(link)
        if known is None:
            self._transfers.specs[link] = Spec.of(output)
        elif (
            output.shape != known.shape
            or output.dtype != known.dtype
            or output.requires_grad != known.differentiable
        ):
            name = self._program.links[link].name
            check_spec(known, Spec.of(output), name, stage, microbatch)

    def _apart(self, tensor: Tensor, stage: int, microbatch: int) -> Tensor:
        """Returns `tensor`, copied if it lies in a buffer that will be used again."""
        where = tensor.untyped_storage().data_ptr()
        return tensor.clone() if where in self._lent(stage, microbatch) else tensor

    def _lent(self, stage: int, microbatch: int) -> set[int]:
        """Returns where the buffers lie that a stage reads in a microbatch."""
        found = [
            self._buffers.get((source, microbatch))
            for source in self._wiring.taken[stage]
            if isinstance(source, int)
        ]
        for made in self._wiring.made[stage]:
            if made is not None:
                found += [
                    self._arrived.get((channel, microbatch))
                    for _, channel in self._incoming.get(made, ())
                ]
        return {b.untyped_storage().data_ptr() for b in found if b is not None}

    def _own_gradients(self, stage: int, microbatch: int) -> None:
        """Makes gradients that autograd took over as they were the parameters' own."""
        lent = self._lent(stage, microbatch)
        for parameter in self._stages[stage].module.parameters() if lent else ():
            gradient = parameter.grad
            if gradient is not None and gradient.untyped_storage().data_ptr() in lent:
                parameter.grad = gradient.clone()

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


def _nothing(_index: int, _microbatch: int) -> None:
    """What a rank that has failed does in the place of a compute."""
