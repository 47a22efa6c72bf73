"""Compute: forwards and backwards of one rank's stages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from pipegrad.errors import StepError
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.interop.private import is_arriving, is_wrapper, num_holders
from pipegrad.model.dtensor import is_dtensor, local
from pipegrad.pipeline.activation_checkpoint import Recompute
from pipegrad.pipeline.split_backward.weights import WeightGradients
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.transfers import Spec, Transfers
from pipegrad.pipeline.values import Key, LocalValues, Value
from pipegrad.schedules.program.program import Program
from pipegrad.schedules.schedule import Kind

Method = Callable[[int, int], object]
Loss = Callable[..., object]  # a tensor of one element


class Compute:
    """Runs the actions of one rank.

    A received value is a leaf for all stages of this rank that take it: autograd itself sums what
    they send back. A value that a stage of the same rank takes is handed over as it is.

    Args:
        program: What all ranks do.
        stages: This rank's.
        local: Where it finds values, and puts them.
        transfers: Whose buffers values lie in.
        sync: None in a forward-only program.
        weights: What waits of backwards.
        sharded: The stages whose parameters FSDP2 swaps.
        loss_fn: Of the last stage's outputs and a microbatch's target.

    Attributes:
        losses: Of the microbatches.
        outputs: What the last stage made, forward-only.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        local: LocalValues,
        *,
        transfers: Transfers,
        sync: GradientSync | None,
        weights: WeightGradients,
        sharded: ShardedStages,
        loss_fn: Loss | None,
    ) -> None:
        self._program = program
        self._stages = stages
        self._local = local
        self._transfers = transfers
        self._sync = sync
        self._loss_fn = loss_fn
        self._last = len(program.schedule.stage_to_rank) - 1
        self._weights = weights
        self._sharded = sharded
        self._is_trained = sync is not None and any(
            record.requires_grad for record in sync.manifest.parameters
        )
        self._recomputes = {
            index: Recompute(stage.module, sync.device)
            for index, stage in stages.items()
            if stage.recompute and sync is not None
        }
        self.forget()

    def begin(
        self,
        inputs: Mapping[str, Sequence[object]],
        targets: Sequence[object] | None,
        divisor: float,
    ) -> None:
        """Takes what a step is given: see `Executor.run`."""
        self._inputs = inputs
        self._targets = targets
        self._divisor = divisor

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self.begin({}, None, 1.0)
        self._roots = dict[Key, tuple[Tensor, ...]]()
        for recompute in self._recomputes.values():
            recompute.forget()
        self._met = set[int]()  # stages whose forward has run
        self._own = set[int]()  # addresses of their buffers, which they may write into
        self._bare = dict[int, list[Tensor]]()  # stage -> parameters without a gradient yet
        self.losses = list[Tensor]()
        self.outputs = list[tuple[Tensor, ...]]()
        self._weights.forget()

    def method_of(self, stage: int, kind: Kind) -> Method:
        """Returns what computes an action."""
        methods: dict[Kind, Method] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._backward_weights,
        }
        if stage in self._recomputes:
            methods |= {
                "B": partial(self._recomputed, self._backward),
                "I": partial(self._recomputed, self._backward_inputs),
            }
        return methods[kind]

    # Forward.

    def _forward(self, stage: int, microbatch: int) -> None:
        values = self._given(stage, microbatch)
        if stage in self._recomputes:
            forward = partial(self._stages[stage].forward, values)
            outputs = self._recomputes[stage].first(microbatch, values, forward)
        else:
            outputs = self._stages[stage].forward(values)
        if stage != self._last or self._sync is None:
            made = [*outputs]
            del outputs
            outputs = self._settled(stage, made)
        if stage not in self._met:
            self._met.add(stage)
            buffers = self._stages[stage].module.buffers()
            self._own.update(buffer.untyped_storage().data_ptr() for buffer in buffers)
        if stage == self._last:
            outputs = self._end(microbatch, outputs)
        else:
            self._hand_on(stage, microbatch, outputs)
        if self._sync is None:
            del values, outputs
            self._let_go(stage, microbatch)
        else:
            self._roots[stage, microbatch] = () if stage in self._recomputes else outputs

    def _given(self, stage: int, microbatch: int) -> list[object]:
        """Returns what a stage takes."""
        values: list[object] = []
        for link, name in self._local.taken[stage]:
            if link is None:
                values += (self._inputs[name][microbatch],)
            else:
                values += (self._local.held[link, microbatch].tensor,)
        return values

    def _hand_on(self, stage: int, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        """Keeps what a stage made, for its consumers on this rank and for those on others."""
        for link, output in zip(self._local.made[stage], outputs, strict=True):
            spec = self._transfers.specs.get(link)
            if (output.shape, output.dtype, output.requires_grad) != spec:
                self._learn(link, stage, microbatch, Spec.of(output))
            value = self._apart(output).detach()
            self._local.leaving[link] = value
            if num := self._local.num_consumers[link]:
                local = value.requires_grad_() if output.requires_grad else value
                self._local.held[link, microbatch] = Value(local, num, num)

    def _end(self, microbatch: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Computes the loss of the last stage; returns what backward begins with."""
        if self._sync is None:
            self.outputs.append(tuple(map(self._apart, outputs)))
        if self._targets is None:
            return ()
        loss = self._loss_of(microbatch, outputs)
        self.losses.append(self._apart(loss.detach()).reshape(()))
        return (loss,)

    def _loss_of(self, microbatch: int, outputs: tuple[Tensor, ...]) -> Tensor:
        assert self._loss_fn is not None
        assert self._targets is not None
        loss = self._loss_fn(*outputs, self._targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise StepError(f"loss_fn returned {loss!r}, expected a tensor of one element")
        self._check_plain(loss, "loss_fn returned its loss")
        if self._sync is not None and not loss.requires_grad and self._is_trained:
            raise StepError(
                "the loss does not depend on anything that requires a gradient: loss_fn detaches "
                "it, or step() runs under no_grad"
            )
        return loss

    # Backward.

    def _backward(self, stage: int, microbatch: int) -> None:
        roots, gradients = self._begin_backward(stage, microbatch)
        if roots:
            torch.autograd.backward(roots, gradients)
        else:
            self._sharded.without_backward(stage)
        del roots, gradients
        self._end_backward(stage, microbatch)
        self._let_go(stage, microbatch)

    def _backward_inputs(self, stage: int, microbatch: int) -> None:
        roots, gradients = self._begin_backward(stage, microbatch)
        lent = self._transfers.lent
        self._weights.backward(stage, microbatch, roots, gradients, lent)
        del roots, gradients
        self._end_backward(stage, microbatch)

    def _backward_weights(self, stage: int, microbatch: int) -> None:
        self._weights.compute(stage, microbatch)
        self._let_go(stage, microbatch)

    def _recomputed(self, compute: Method, stage: int, microbatch: int) -> None:
        """Runs a forward again, then its backward."""
        values = self._given(stage, microbatch)
        with self._recomputes[stage].again(microbatch, values):
            outputs = self._stages[stage].forward(values)
            if stage == self._last:
                outputs = (self._loss_of(microbatch, outputs),)
        self._roots[stage, microbatch] = outputs
        del outputs, values
        compute(stage, microbatch)

    def _begin_backward(
        self, stage: int, microbatch: int
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns what backward begins with, and its gradients."""
        if stage not in self._bare:
            parameters = self._stages[stage].module.parameters()
            bare = [p for p in parameters if p.grad is None and p.requires_grad]
            self._bare[stage] = [p for p in bare if not self._sharded.reduces(stage, p)]
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for root, link in zip(self._roots[stage, microbatch], self._local.ends[stage], strict=True):
            if not root.requires_grad:
                continue
            gradient = (
                self._loss_gradient(root) if link is None else self._gradient(link, microbatch)
            )
            if gradient is not None:
                roots += (root,)
                gradients += (gradient,)
        del self._roots[stage, microbatch]
        return roots, gradients

    def _loss_gradient(self, loss: Tensor) -> Tensor:
        """Returns what backward begins with, behind the loss.

        Raises:
            StepError: If the loss's dtype has no such number.
        """
        exact = 1.0 / self._divisor
        info = torch.finfo(loss.dtype)
        if not info.smallest_normal <= exact <= info.max:
            raise StepError(
                f"the loss is {loss.dtype}, and its gradient, 1 / {self._divisor:g} for the number "
                f"of microbatches or loss_divisor, is none of its numbers: return loss.float() "
                f"from loss_fn, and compute it of float32"
            )
        return torch.full_like(loss, exact)

    def _end_backward(self, stage: int, microbatch: int) -> None:
        """Takes up what came back to a stage's inputs, once all that share one are done with it."""
        self._part_gradients(stage, microbatch)
        for link in self._local.links[stage]:
            value = self._local.held[link, microbatch]
            value.num_returns -= 1
            if not value.num_returns:
                self._local.gradients[link, microbatch] = value.tensor.grad
                value.tensor.grad = None
        for channel in self._local.returns[stage]:
            buffer = self._local.arrived[channel, microbatch]
            del self._local.arrived[channel, microbatch]
            if buffer is not None:
                self._transfers.give_back(channel, buffer)

    def _gradient(self, link: int, microbatch: int) -> Tensor | None:
        """Returns what came back for a value: from this rank, from another one, or summed."""
        key = link, microbatch
        if key in self._local.gradients:
            gradient = self._local.gradients[key]
            del self._local.gradients[key]
            return gradient
        buffer = self._local.arrived[self._local.back[link], microbatch]
        return None if buffer is None else buffer.tensor

    def _let_go(self, stage: int, microbatch: int) -> None:
        """Frees a stage's inputs that nobody reads again."""
        for link in self._local.links[stage]:
            value = self._local.held[link, microbatch]
            value.num_readers -= 1
            if not value.num_readers:
                del self._local.held[link, microbatch]
                channel, buffer = value.channel, value.buffer
                del value  # and its tensor
                if buffer is not None:
                    self._transfers.give_back(channel, buffer)

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

    @staticmethod
    def _check_plain(output: Tensor, what: str) -> None:
        """Refuses a tensor that is no piece of memory, which could be sent."""
        if type(output) is Tensor and output.layout is torch.strided:
            return
        if is_dtensor(output):
            advice = "return output.full_tensor(), or output.to_local() if each rank has all of it"
        elif is_wrapper(output):
            advice = "return a torch.Tensor of its values"
        elif output.layout != torch.strided:
            advice = "return output.to_dense()"
        else:
            return
        raise StepError(
            f"{what} as a {type(output).__name__} of layout {output.layout}, expected a plain "
            f"strided tensor, which can be handed on: {advice}"
        )

    def _settled(self, stage: int, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Returns what a stage made, copied where the module keeps it and may write into it later.

        Of a tensor that requires a gradient autograd itself notices that.

        Args:
            stage: Whose forward it was.
            outputs: This list alone may hold them here; it is changed.
        """
        for i, name in enumerate(self._stages[stage].outputs):
            if type(outputs[i]) is not Tensor and is_arriving(outputs[i]):
                outputs[i] = outputs[i].clone()  # which waits, and is a plain tensor
            if type(outputs[i]) is not Tensor or outputs[i].layout is not torch.strided:
                self._check_plain(outputs[i], f"stage {stage} returned {name!r}")
            if not outputs[i].requires_grad:
                kept = weakref.ref(outputs[i])
                outputs[i] = outputs[i].detach()
                if kept() is not None or num_holders(outputs[i]) > 1:
                    outputs[i] = outputs[i].clone()
        return tuple(outputs)

    def _apart(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`, copied if it lies where somebody else will write."""
        address = tensor.untyped_storage().data_ptr()
        return tensor.clone() if address in self._transfers.lent or address in self._own else tensor

    def _outer(self, stage: int, microbatch: int) -> Iterator[Tensor]:
        """Yields what a stage was given that a gradient goes into behind the step."""
        given = [self._inputs[name] for link, name in self._local.taken[stage] if link is None]
        if stage == self._last and self._targets is not None:
            given.append(self._targets)
        for values in given:
            value = values[microbatch]
            if isinstance(value, Tensor) and value.requires_grad:
                yield value

    @staticmethod
    def _part(value: Tensor, taken: dict[int, None]) -> None:
        """Copies the gradient of a value if it lies in memory that is taken; takes its memory."""
        if value.grad is not None:
            address = value.grad.untyped_storage().data_ptr()
            if address in taken:
                value.grad = value.grad.clone()
            taken[address] = None

    def _part_gradients(self, stage: int, microbatch: int) -> None:
        """Copies gradients that share memory with one another, or with a buffer.

        Autograd lets several gradients be views of one, as behind a sum, and adds to each in place
        later on. A parameter's can share only when it is new; those in buckets lie where they must.
        """
        taken = {**self._transfers.lent}
        for link in self._local.links[stage]:
            value = self._local.held[link, microbatch].tensor
            self._part(value, taken)
        for value in self._outer(stage, microbatch):
            self._part(value, taken)
        if bare := [*self._bare[stage], *self._sharded.gathered(stage)]:
            for parameter in bare:
                if parameter.grad is None:
                    continue
                if parameter.grad.layout != torch.strided:  # its values may lie anywhere
                    parameter.grad = parameter.grad.clone()
                    continue
                address = local(parameter.grad).untyped_storage().data_ptr()
                if address in taken:
                    parameter.grad = parameter.grad.clone()
                taken[address] = None
            self._bare[stage] = [p for p in self._bare[stage] if p.grad is None]
