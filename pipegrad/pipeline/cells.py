"""Cells: forwards, losses and backwards of the stages of one rank.

[Note: life of a cell] A stage in one microbatch is a `Cell`. Its forward creates the cell, which
keeps the tensors where the backward begins. Its backward removes the cell from the table, because
nothing else may hold the graph. In a split backward, I stores a new cell with the products of the
weights alone, and W removes that one. An evaluation keeps a cell for the next chunk of time.

[Note: handed on in a stage] A stage that carries something returns it for a chunk of time, and its
forward of the next chunk reads leaves of the same memory. The backward of the next chunk runs first
and leaves gradients in these leaves. The backward of the chunk itself begins with them, besides the
gradients of its outputs. Therefore each chunk has a graph of its own, as each microbatch has. With
``recompute`` the leaves are made of the first forward's outputs, and their gradients go into the
graph of the second forward. A loss over the whole batch reads leaves in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pipegrad.comm.agreement import warn_once
from pipegrad.errors import StepError
from pipegrad.gradients.grad_scaler import GradScaler
from pipegrad.gradients.loose import LooseLeaves
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.pipeline.activation_checkpoint import FirstForward, Recompute, compare
from pipegrad.pipeline.batch import joined, joined_tree
from pipegrad.pipeline.checks import warn_of_blind
from pipegrad.pipeline.loss_message import LossTerms, loss_parts
from pipegrad.pipeline.shares import Number, counted
from pipegrad.pipeline.split_backward import WeightProduct
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.trees import flattened, leaves_of, versions_of
from pipegrad.pipeline.values import Key, Values, check_plain
from pipegrad.pipeline.weight_gradients import WeightGradients
from pipegrad.pipeline.wiring import Loss
from pipegrad.schedules.program.program import Program
from pipegrad.schedules.schedule import Kind

Method = Callable[..., object]  # takes a stage, link or channel, and nearly always a microbatch


class Autocast:
    """The caller's autocast: a step runs its forwards and losses there, and nothing else.

    In one process autocast belongs to the forward, and a backward runs in the dtypes of its
    forward. A step also runs backwards, sums and codecs of gradients. Therefore it leaves the
    caller's autocast and enters it again for each forward.

    Attributes:
        forward: Enters the caller's autocast again, for a forward or a loss.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self.forward: Callable[[], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leaves the caller's autocast until the end of a step."""
        self.forward = nullcontext
        if not torch.is_autocast_enabled(self._kind):
            yield
            return
        dtype, caches = torch.get_autocast_dtype(self._kind), torch.is_autocast_cache_enabled()
        self.forward = partial(torch.autocast, self._kind, dtype, cache_enabled=caches)
        # Autocast may enclose the caller's whole loop. Then it still has casts of the parameters
        # before the optimizer's step, or casts without a graph, of an evaluation.
        torch.clear_autocast_cache()
        with torch.autocast(self._kind, enabled=False):
            yield


@dataclass(slots=True, eq=False)
class Cell:
    """A stage in one microbatch; see [Note: life of a cell].

    Attributes:
        outputs: The outputs that other stages read.
        losses: Losses, and the share of each.
        handed_on: Tensors for the next chunk, or for the loss over the batch; with their graph.
        leaves: The same tensors as leaves, which get the gradients.
        carried: Values for the next chunk, made of these leaves.
        first: State for the second forward, if the stage recomputes.
        products: The weights' gradients that I has left to W.
    """

    outputs: Sequence[Tensor] = ()
    losses: Sequence[tuple[Tensor, Number]] = ()
    handed_on: Sequence[Tensor] = ()
    leaves: Sequence[Tensor] = ()
    carried: Sequence[object] = ()
    first: FirstForward | None = None
    products: list[WeightProduct] = field(default_factory=list)


class Compute:
    """Runs the actions of one rank: F, B, I and W of its stages, and the loss.

    Args:
        program: The actions and transfers of all ranks.
        stages: The stages of this rank.
        values: Holds the inputs and outputs of actions.
        sync: The gradient layer; None in a forward-only program.
        weights: Computes the weights' gradients that I leaves to W.
        sharded: The stages whose parameters FSDP2 swaps.
        loose: Finds leaves that no stage holds.
        autocast: The caller's autocast, for forwards and losses.
        loss_fn: Takes the last stage's outputs and a microbatch's target.
        is_over_batch: Whether loss_fn takes all microbatches: see [Note: loss over a batch].
        unseen: Stages whose chunks were not compared with a whole sequence; a key for each warning.

    Attributes:
        outputs: The last stage's outputs, by microbatch, if the step keeps them.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        values: Values,
        *,
        sync: GradientSync | None,
        weights: WeightGradients,
        sharded: ShardedStages,
        loose: LooseLeaves,
        autocast: Autocast,
        loss_fn: Loss | None,
        is_over_batch: bool,
        unseen: dict[int, str],
    ) -> None:
        self._num_microbatches = program.schedule.num_microbatches
        self._is_over_batch = is_over_batch
        self._chunks, self._unseen = program.schedule.chunks, unseen
        self._stages = stages
        # After their outputs they return losses, or values for the next chunk.
        self._returning_more = {i for i, stage in stages.items() if stage.losses or stage.carry}
        self._values = values
        self._sync = sync
        self._loss_fn = loss_fn
        self._last = len(program.schedule.stage_to_rank) - 1
        self._weights = weights
        self._splits = sync is not None and program.schedule.splits_backward
        self._sharded = sharded
        self._loose = loose
        self._autocast = autocast
        self._is_trained = sync is not None and any(
            record.requires_grad for record in sync.manifest.parameters
        )
        self._recomputes = {
            index: Recompute(stage.module, sync.device)
            for index, stage in stages.items()
            if stage.recompute and sync is not None
        }
        self._scaler: GradScaler | None = None
        self.forget()

    def forget(self) -> None:
        """Drops all references of a step."""
        if self._scaler is not None:
            self._scaler.is_in_scheduler = False
        self._scaler = None
        self._cells = dict[Key, Cell]()  # by stage and microbatch
        self._targets: Sequence[object] | None = None
        self._leaves = dict[int, Sequence[Tensor]]()  # by microbatch, until the loss over all
        self._batch_loss: Tensor | None = None  # until the first backward
        self._parameters = dict[int, dict[int, nn.Parameter]]()  # of stages that had a backward
        self._ran_forward = set[int]()  # stages
        self.outputs = dict[int, tuple[Tensor, ...]]()

    def begin(
        self, targets: Sequence[object] | None, terms: LossTerms, *, keeps_outputs: bool
    ) -> None:
        """Stores the targets, losses and options of a step."""
        self._targets = targets
        self._terms = terms
        self._keeps_outputs = keeps_outputs
        self._scaler = None if self._sync is None else self._sync.scaler
        if self._scaler is not None:
            # On all ranks, whichever of them have the losses.
            self._scaler.is_scaled = self._scaler.is_in_scheduler = True
        if self._splits:
            self._weights.begin()

    def method_of(self, kind: Kind) -> Method:
        """Returns the method that computes an action."""
        methods: dict[Kind, Method] = {
            "F": self._forward,
            "B": self._backward,
            "I": partial(self._backward, splits=True),
            "W": self._compute_weights,
        }
        return methods[kind]

    # Forward.

    def _forward(self, stage: int, microbatch: int) -> None:
        with self._autocast.forward():
            self._cells[stage, microbatch] = self._first_forward(stage, microbatch)
        if self._sync is None:  # no backward will release the inputs of the stage
            self._values.release(stage, microbatch)
            self._cells.pop((stage, microbatch - 1), None)

    def _first_forward(self, stage: int, microbatch: int) -> Cell:
        cell, inputs = Cell(), self._values.inputs_of(stage, microbatch)
        if stage in self._returning_more:
            inputs += self._carried(stage, microbatch)
        # A module that changes its input in place does so in every microbatch. Therefore only the
        # first forward of a step walks through its inputs.
        shared, versions = list[object](), list[int]()
        if stage not in self._ran_forward:
            shared, versions = self._look(stage, microbatch, inputs)
        if stage in self._recomputes:
            forward = partial(self._stages[stage].forward, inputs)
            outputs, cell.first = self._recomputes[stage].first(inputs, forward)
        else:
            outputs = self._stages[stage].forward(inputs)
        if stage in self._returning_more:
            outputs = self._outputs_of(stage, microbatch, cell, outputs)
        if stage != self._last or self._keeps_outputs or self._is_over_batch:
            outputs = self._values.checked(stage, outputs)
        if shared and versions_of(shared) != versions:
            raise StepError(
                f"stage {stage}, microbatch {microbatch}: the stage has changed in place what "
                f"it was given, and other stages or microbatches read that too, but not the "
                f"change: let it work on a copy"
            )
        if stage != self._last:
            self._values.produce(stage, microbatch, outputs)
            cell.outputs = outputs
        else:
            self._end(microbatch, cell, outputs)
        if self._sync is None or cell.first is not None:
            # There is no backward, or its graph is made right before it.
            cell.outputs = cell.losses = cell.handed_on = ()
        return cell

    def _look(
        self, stage: int, microbatch: int, inputs: Sequence[object]
    ) -> tuple[list[object], list[int]]:
        """Returns the inputs that others also read, and the version of each."""
        self._ran_forward.add(stage)
        if self._chunks > 1 and microbatch == 0 and stage in self._unseen:
            warn_of_blind(self._stages[stage], inputs, self._unseen.pop(stage))
        shared = self._values.shared_inputs(stage, inputs)
        return shared, versions_of(shared)

    def _carried(self, stage: int, microbatch: int) -> Sequence[object]:
        """Returns the carried values of the chunk before; None for each in the first chunk."""
        if microbatch % self._chunks:
            return self._cells[stage, microbatch - 1].carried
        return [None] * len(self._stages[stage].carry)

    def _outputs_of(
        self,
        stage: int,
        microbatch: int,
        cell: Cell,
        returned: tuple[Any, ...],
        *,
        is_second: bool = False,
    ) -> tuple[Tensor, ...]:
        """Puts losses and carried values of a forward into its cell; returns the outputs."""
        names = self._stages[stage].losses
        num_outputs = len(self._stages[stage].outputs)
        end = num_outputs + len(names)
        losses: tuple[Tensor, ...] = returned[num_outputs:end]
        for name, loss in zip(names, losses, strict=True):
            what = f"stage {stage}, microbatch {microbatch}: the stage returned {name!r}"
            check_plain(loss, what)
            if loss.numel() != 1:
                raise StepError(
                    f"{what} of shape {tuple(loss.shape)}, expected one element, since it is among "
                    f"its losses"
                )
            if not is_second:  # it would be counted twice
                self._terms.add_auxiliary(name, loss, microbatch)
        cell.losses = [(loss, self._terms.share_of_rows(microbatch)) for loss in losses]
        if (microbatch + 1) % self._chunks:  # no chunk follows the last one
            self._carry(stage, cell, returned[end:], is_second=is_second)
        return returned[:num_outputs]

    @staticmethod
    def _carry(stage: int, cell: Cell, values: tuple[object, ...], *, is_second: bool) -> None:
        """Keeps values of a forward for the next chunk; see [Note: handed on in a stage]."""
        trees = [flattened(value) for value in values]
        every = [leaf for leaves, _ in trees for _, leaf in leaves]
        for leaf in every:
            hidden = {} if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {})
            if any(map(_has_gradient, leaves_of(hidden).values())):  # it would keep the graph
                raise StepError(
                    f"stage {stage} carries a {type(leaf).__name__}, which holds tensors with a "
                    f"gradient: carry these in dicts, lists or tuples, or make its class known by "
                    f"torch.utils._pytree.register_pytree_node"
                )
        cell.handed_on = list(filter(_has_gradient, every))
        if not is_second:
            cell.leaves = [root.detach().requires_grad_() for root in cell.handed_on]
            made = iter(cell.leaves)
            cell.carried = [
                rebuilt([next(made) if _has_gradient(x) else x for _, x in leaves])
                for leaves, rebuilt in trees
            ]

    def _second_forward(self, stage: int, microbatch: int, cell: Cell, first: FirstForward) -> None:
        """Makes the graph of a stage that recomputes."""
        inputs = [
            *self._values.inputs_of(stage, microbatch),
            *self._carried(stage, microbatch),
        ]
        # The second forward draws the same random numbers and reads the same buffers, because its
        # gradient must belong to the loss of the first one.
        with self._recomputes[stage].again(first, inputs):
            returned = self._stages[stage].forward(inputs)
        self._values.refuse_written(stage)
        self._terms.num_different = self._terms.num_different + compare(
            first, returned, f"stage {stage}, microbatch {microbatch}"
        )
        outputs = returned
        if stage in self._returning_more:
            outputs = self._outputs_of(stage, microbatch, cell, returned, is_second=True)
        if stage != self._last:
            cell.outputs = outputs
        else:
            self._set_roots(microbatch, cell, outputs)

    # Outputs and losses of the last stage.

    def _end(self, microbatch: int, cell: Cell, outputs: tuple[Tensor, ...]) -> None:
        """Keeps outputs of the last stage, for the caller or for a loss over the batch."""
        if self._keeps_outputs:
            self.outputs[microbatch] = tuple(
                self._values.handed_on(self._last, output) for output in outputs
            )
        if self._is_over_batch and self._targets is not None:
            self._gather(microbatch, cell, outputs, self._targets)
        if cell.first is None:
            self._set_roots(microbatch, cell, outputs)

    def _set_roots(self, microbatch: int, cell: Cell, outputs: tuple[Tensor, ...]) -> None:
        """Keeps the tensors where a backward of the last stage begins, such as its loss."""
        if self._is_over_batch:
            cell.handed_on = outputs
        elif self._targets is not None:
            # A loss may have side effects, such as adding to gradients. Therefore it runs once,
            # after the second forward if there is one.
            shares = self._terms.shares
            share = 1.0 if shares is None else shares[microbatch]
            loss = self._loss_of(outputs, self._targets[microbatch], [microbatch], share)
            cell.losses = [(loss, share), *cell.losses]

    def _gather(
        self,
        microbatch: int,
        cell: Cell,
        outputs: tuple[Tensor, ...],
        targets: Sequence[object],
    ) -> None:
        """Keeps the outputs of a microbatch; computes the loss of all after the last one.

        [Note: loss over a batch] The loss reads leaves, one for each output. The first backward of
        the last stage goes back from the loss to all leaves, and the backward of a microbatch
        begins with the gradients of its leaves. If the stage recomputes, only outputs must live
        until the last forward.
        """
        has_gradient = self._sync is not None
        cell.leaves = [
            x.detach().requires_grad_(has_gradient and (x.is_floating_point() or x.is_complex()))
            for x in outputs
        ]
        self._leaves[microbatch] = cell.leaves
        if len(self._leaves) == self._num_microbatches:
            together = joined([tuple(leaves) for _, leaves in sorted(self._leaves.items())])
            self._leaves.clear()
            self._batch_loss = self._loss_of(
                together, joined_tree(targets), range(self._num_microbatches)
            )

    def _loss_of(
        self,
        outputs: Sequence[object],
        target: object,
        microbatches: Sequence[int],
        share: Number = 1.0,
    ) -> Tensor:
        """Computes and counts the loss of some microbatches."""
        assert self._loss_fn is not None
        returned = self._loss_fn(*outputs, target)
        parts = loss_parts(returned, is_weighted=self._terms.is_weighted)
        if len(microbatches) > 1 and not self._terms.is_weighted:
            # Losses are divided by the number of microbatches, and this one belongs to all.
            parts = parts[0] * len(microbatches), *parts[1:]
        loss = parts[0]
        check_plain(loss, "loss_fn returned its loss")
        if self._sync is not None and loss.requires_grad:
            # A leaf that the first and the last microbatch share is in all of them.
            if microbatches[0] == 0 or microbatches[-1] == self._num_microbatches - 1:
                given = leaves_of({str(i): x for i, x in enumerate((*outputs, target))})
                self._loose.look(self._last, microbatches, [loss], given.values())
        elif self._is_trained:
            raise StepError(
                "the loss does not depend on anything that requires a gradient: loss_fn detaches "
                "it, or step() runs under no_grad"
            )
        elif self._sync is not None:
            warn_once(
                "a training step, and no parameter requires a gradient, so it trains nothing. "
                "PeftModel.from_pretrained() freezes the adapter that it reads: give it "
                "is_trainable=True",
                f"frozen {self._sync.name}",
            )
        self._terms.add(parts, share)
        return loss

    # Backward.

    def _backward(self, stage: int, microbatch: int, *, splits: bool = False) -> None:
        roots, gradients, leaves = self._begin_backward(stage, microbatch)
        if splits:
            products = self._weights.backward(stage, roots, gradients, self._parameters[stage])
            self._cells[stage, microbatch] = Cell(products=products)
        elif roots:
            torch.autograd.backward(roots, gradients)
        elif stage in self._sharded.stages:
            # No gradient came back, and no backward runs in which FSDP2 would reduce. Therefore it
            # reduces here the gradients that earlier backwards of the stage have accumulated.
            self._sharded.without_backward(stage)
        # Right after the backward, because new gradients that share memory must be separated before
        # the next backward adds to one of them.
        self._values.separate_gradients(stage, leaves)
        self._values.release(stage, microbatch)

    def _begin_backward(
        self, stage: int, microbatch: int
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Returns the roots of a backward, their gradients, and the leaves where it ends."""
        cell = self._cells[stage, microbatch]
        del self._cells[stage, microbatch]  # the table must not hold the graph any more
        if stage not in self._parameters:
            # Looked up in each step, because users may replace parameters between two steps.
            parameters = self._stages[stage].module.parameters()
            self._parameters[stage] = {id(p): p for p in parameters}
            self._values.begin_backward(stage, self._parameters[stage].values())
        if cell.first is not None:
            with self._autocast.forward():
                self._second_forward(stage, microbatch, cell, cell.first)
        if stage == self._last and self._batch_loss is not None:
            loss, self._batch_loss = self._batch_loss, None
            torch.autograd.backward(loss, self._loss_gradient(loss, 1.0))
        roots, gradients = self._values.gradients_of(stage, microbatch, cell.outputs)
        for loss, share in cell.losses:
            if loss.requires_grad:
                roots.append(loss)
                gradients.append(self._loss_gradient(loss, share))
        for root, leaf in zip(cell.handed_on, cell.leaves, strict=True):
            if root.requires_grad and leaf.grad is not None:
                roots.append(root)
                gradients.append(leaf.grad)
        leaves = self._values.leaves_of(stage, microbatch)
        if self._stages[stage].carry and microbatch % self._chunks:
            leaves += self._cells[stage, microbatch - 1].leaves
        if self._loose.is_looking:
            self._loose.look(stage, [microbatch], roots, leaves)
        return roots, gradients, leaves

    def _loss_gradient(self, loss: Tensor, share: Number) -> Tensor:
        """Returns the gradient that backward begins with: the share, times the GradScaler's scale.

        Raises:
            StepError: If the loss's dtype has no such number.
        """
        # Gradients are divided once, when they are complete, because an autograd function or a hook
        # of the user may add to them, and its part must be divided too.
        if self._scaler is None:
            return counted(torch.ones_like(loss), share).to(loss.dtype)
        return self._scaled_gradient(self._scaler, loss, share)

    def _scaled_gradient(self, scaler: GradScaler, loss: Tensor, share: Number) -> Tensor:
        # The scale is divided before backward, because float16 must not overflow earlier than in
        # one process.
        exact = 1.0 / self._terms.divisor
        info = torch.finfo(loss.dtype)
        if not info.smallest_normal <= exact <= info.max:
            raise StepError(
                f"the loss is {loss.dtype}, and its gradient, 1 / {self._terms.divisor:g} for the "
                f"number of microbatches or loss_divisor, is none of its numbers: return "
                f"loss.float(), and compute it of float32"
            )
        scale = scaler.begin_backward()
        # The host waits for nothing, because the scale stays on its device.
        scaled = scale.to(torch.promote_types(loss.dtype, scale.dtype)) / self._terms.divisor
        return counted(scaled, share).to(loss.device, loss.dtype).reshape(loss.shape)

    # Weights, in a split backward.

    def _compute_weights(self, stage: int, microbatch: int) -> None:
        self._weights.compute(stage, self._cells.pop((stage, microbatch)).products)

    def compute_shared(self, stage: int) -> None:
        """Computes the waiting products of parameters that other ranks also hold.

        It computes them for all microbatches, and before the other weights, because other ranks
        wait for these gradients.
        """
        waiting = [cell.products for (at, _), cell in self._cells.items() if at == stage]
        self._weights.compute_shared(stage, waiting)


def _has_gradient(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.requires_grad
