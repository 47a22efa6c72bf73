"""Compute: forwards and backwards of one rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pipegrad.comm.agreement import warn_once
from pipegrad.errors import StepError
from pipegrad.gradients.loose import LooseLeaves
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.pipeline.activation_checkpoint import Recompute
from pipegrad.pipeline.autocast import Autocast
from pipegrad.pipeline.batch import joined, joined_tree
from pipegrad.pipeline.carried import warn_of_blind
from pipegrad.pipeline.loss_message import LossTerms, loss_parts
from pipegrad.pipeline.shares import Number, counted
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.trees import leaves_of, versions_of
from pipegrad.pipeline.values import Key, Values, check_plain
from pipegrad.pipeline.weight_gradients import WeightGradients
from pipegrad.pipeline.wiring import Loss
from pipegrad.schedules.program.program import Program
from pipegrad.schedules.schedule import Kind

Method = Callable[..., object]  # takes a stage, link or channel, and nearly always a microbatch


class Compute:
    """Runs the actions of one rank: F, B, I and W of its stages, and the loss.

    Args:
        program: What all ranks do.
        stages: The stages of this rank.
        values: Where actions take their inputs from, and put their outputs.
        sync: The gradient layer; None in a forward-only program.
        weights: The weights' gradients that I leaves to W.
        sharded: The stages whose parameters FSDP2 swaps.
        loose: Finds leaves that no stage holds.
        autocast: That of the caller, for forwards and losses.
        loss_fn: Takes the last stage's outputs and a microbatch's target.
        is_over_batch: Whether it takes those of all microbatches: see [Note: loss over a batch].
        unseen: Stages whose chunks of time were not compared with a whole sequence, and a key.

    Attributes:
        outputs: What the last stage made, by microbatch, if the step keeps it.
        num_different: How many second forwards of the step differ from the first, of those on a
            device that the host does not wait for.
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
        self._has_chunks, self._unseen = program.schedule.chunks > 1, unseen
        self._stages = stages
        self._values = values
        self._sync = sync
        self._loss_fn = loss_fn
        self._last = len(program.schedule.stage_to_rank) - 1
        self._carried = values.carried
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
        self._with_losses = {index for index, stage in stages.items() if stage.losses}
        self.forget()

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._targets: Sequence[object] | None = None
        self._terms: LossTerms | None = None
        self._keeps_outputs = False
        self._roots = dict[Key, tuple[Tensor, ...]]()  # by stage and microbatch
        self._losses = dict[Key, tuple[Tensor, ...]]()  # the same, of stages that make losses
        self._leaves = dict[int, tuple[Tensor, ...]]()  # by microbatch: what a loss over all reads
        self._loss: tuple[Tensor, ...] = ()  # that one, until the first backward
        for recompute in self._recomputes.values():
            recompute.forget()
        self.num_different: int | Tensor = 0
        self._parameters = dict[int, list[nn.Parameter]]()  # by stage, at its first backward
        self._ran_forward = set[int]()  # stages
        self.outputs = dict[int, tuple[Tensor, ...]]()
        if self._splits:
            self._weights.forget()

    def begin(
        self, targets: Sequence[object] | None, terms: LossTerms, *, keeps_outputs: bool
    ) -> None:
        """Takes what belongs to a step.

        Args:
            targets: For each microbatch, on the rank of the last stage.
            terms: Collects losses.
            keeps_outputs: Whether to keep what the last stage makes.
        """
        self._targets = targets
        self._terms = terms
        self._keeps_outputs = keeps_outputs
        if self._sync is not None:
            if self._sync.scaler is not None:
                # On all ranks, whichever of them have the losses.
                self._sync.scaler.is_scaled = True
            if self._splits:
                self._weights.begin()

    def method_of(self, kind: Kind) -> Method:
        """Returns what computes an action."""
        methods: dict[Kind, Method] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._weights.compute,
        }
        return methods[kind]

    # Forward.

    def _forward(self, stage: int, microbatch: int) -> None:
        with self._autocast.forward():
            self._compute_forward(stage, microbatch)

    def _compute_forward(self, stage: int, microbatch: int) -> None:
        values = self._values.inputs_of(stage, microbatch)
        # A module that changes its input in place does so in every microbatch. So the first one of
        # a step is enough, and the others do not walk through what they were given.
        is_first = stage not in self._ran_forward
        shared = self._values.shared_inputs(stage, values) if is_first else []
        versions = versions_of(shared) if shared else []
        if self._has_chunks and microbatch == 0 and stage in self._unseen:
            warn_of_blind(self._stages[stage], values, self._unseen.pop(stage))
        if stage in self._recomputes:
            forward = partial(self._stages[stage].forward, values)
            outputs = self._recomputes[stage].first(microbatch, values, forward)
        else:
            outputs = self._stages[stage].forward(values)
        if stage in self._carried.stages:
            is_kept = self._sync is not None and stage not in self._recomputes
            outputs = self._carried.take(stage, microbatch, outputs, has_backward=is_kept)
        if stage in self._with_losses:
            outputs = self._part_losses(stage, microbatch, outputs)
        if stage != self._last or self._keeps_outputs or self._is_over_batch:
            outputs = self._values.checked(stage, outputs)
        if is_first:
            if shared and versions_of(shared) != versions:
                raise StepError(
                    f"stage {stage}, microbatch {microbatch}: the stage has changed in place what "
                    f"it was given, and other stages or microbatches read that too, but not the "
                    f"change: let it work on a copy"
                )
            self._ran_forward.add(stage)
        if stage == self._last:
            outputs = self._end(microbatch, outputs)
        else:
            self._values.produce(stage, microbatch, outputs)
        if self._sync is None:  # no backward will let go of what the stage took
            self._values.release(stage, microbatch)
        else:
            # A stage that recomputes makes its graph right before its backward.
            self._roots[stage, microbatch] = () if stage in self._recomputes else outputs

    def _end(self, microbatch: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Computes the loss of the last stage; returns the roots of its backward."""
        if self._keeps_outputs:
            kept = list[Tensor]()
            for name, output in zip(self._stages[self._last].outputs, outputs, strict=True):
                check_plain(output, f"stage {self._last} returned {name!r}")
                kept.append(self._values.handed_on(self._last, output))
            self.outputs[microbatch] = tuple(kept)
        if self._targets is None:
            return ()
        if self._is_over_batch:
            self._gather(microbatch, outputs)
            return outputs
        # A loss may do more than return, such as add to gradients. So it runs once: behind the
        # second forward, if there is one.
        if self._sync is not None and self._last in self._recomputes:
            return ()
        return self._with_own_loss(microbatch, outputs)

    def _gather(self, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        """Takes the outputs of a microbatch; computes the loss of all when the last one is there.

        [Note: loss over a batch] It reads leaves, one for each output. The first backward of the
        last stage goes back from the loss to all leaves, and that of a microbatch begins with their
        gradients. So nothing but outputs must live until the last forward, if the stage recomputes.
        """
        has_gradient = self._sync is not None
        self._leaves[microbatch] = tuple(
            x.detach().requires_grad_(has_gradient and (x.is_floating_point() or x.is_complex()))
            for x in outputs
        )
        if len(self._leaves) < self._num_microbatches:
            return
        assert self._targets is not None
        self._loss = self._with_loss(
            joined([leaves for _, leaves in sorted(self._leaves.items())]),
            joined_tree(self._targets),
            range(self._num_microbatches),
        )

    def _with_own_loss(self, microbatch: int, outputs: Sequence[object]) -> tuple[Tensor, ...]:
        """Computes the loss of a microbatch."""
        assert self._targets is not None
        assert self._terms is not None
        share = self._terms.share(microbatch)
        return self._with_loss(outputs, self._targets[microbatch], [microbatch], share)

    def _with_loss(
        self,
        outputs: Sequence[object],
        target: object,
        microbatches: Sequence[int],
        share: Number = 1.0,
    ) -> tuple[Tensor, ...]:
        """Computes the loss of some microbatches; returns the root of its backward."""
        assert self._loss_fn is not None
        assert self._terms is not None
        returned = self._loss_fn(*outputs, target)
        parts = loss_parts(returned, is_weighted=self._terms.is_weighted)
        if len(microbatches) > 1 and not self._terms.is_weighted:
            # Losses are divided by the number of microbatches, and this one belongs to all.
            parts = parts[0] * len(microbatches), *parts[1:]
        loss = parts[0]
        if type(loss) is not Tensor or loss.layout is not torch.strided:
            check_plain(loss, "loss_fn returned its loss")
        if self._sync is not None and not loss.requires_grad and self._is_trained:
            raise StepError(
                "the loss does not depend on anything that requires a gradient: loss_fn detaches "
                "it, or step() runs under no_grad"
            )
        if self._sync is not None and not loss.requires_grad:
            warn_once(
                "a training step, and no parameter requires a gradient, so it trains nothing. "
                "PeftModel.from_pretrained() freezes the adapter that it reads: give it "
                "is_trainable=True",
                f"frozen {self._sync.name}",
            )
        # What the first and the last microbatch share, all of them have.
        is_end = microbatches[0] == 0 or microbatches[-1] == self._num_microbatches - 1
        if self._sync is not None and loss.requires_grad and is_end:
            given = leaves_of({str(i): x for i, x in enumerate((*outputs, target))})
            self._loose.look(self._last, microbatches, [loss], given.values())
        self._terms.add(parts, share)
        return parts[:1]

    def _part_losses(
        self, stage: int, microbatch: int, returned: tuple[Tensor, ...], *, again: bool = False
    ) -> tuple[Tensor, ...]:
        """Takes the losses that a stage returned behind its outputs; returns the outputs.

        Args:
            stage: The stage.
            microbatch: The microbatch.
            returned: What it returned.
            again: Whether the forward ran a second time: its losses are counted already.
        """
        names, number = self._stages[stage].losses, len(self._stages[stage].outputs)
        losses = returned[number:]
        for name, loss in zip(names, losses, strict=True):
            what = f"stage {stage}, microbatch {microbatch}: the stage returned {name!r}"
            check_plain(loss, what)
            if loss.numel() != 1:
                raise StepError(
                    f"{what} of shape {tuple(loss.shape)}, expected one element, since it is among "
                    f"its losses"
                )
            if not again:
                assert self._terms is not None
                self._terms.add_auxiliary(name, loss, microbatch)
        if self._sync is not None and (again or stage not in self._recomputes):
            self._losses[stage, microbatch] = losses
        return returned[:number]

    # Backward.

    def _backward(self, stage: int, microbatch: int) -> None:
        roots, gradients = self._begin_backward(stage, microbatch)
        # No root: no gradient came back. FSDP2 then reduces here what earlier backwards of the
        # stage have accumulated, which it would have done in this one.
        if roots:
            torch.autograd.backward(roots, gradients)
        elif stage in self._sharded.stages:
            self._sharded.without_backward(stage)
        self._values.take_gradients(stage, microbatch)

    def _backward_inputs(self, stage: int, microbatch: int) -> None:
        roots, gradients = self._begin_backward(stage, microbatch)
        self._weights.backward(
            stage, microbatch, roots, gradients, parameters=self._parameters[stage]
        )
        # Right behind the backward: new gradients that share memory must be apart before the next
        # backward adds to one of them. See [Note: shared memory] in `values`.
        self._values.take_gradients(stage, microbatch)

    def _roots_of(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        """Returns the roots of a backward, of the second forward if the stage recomputes."""
        # The table must not hold the graph any more when the backward has run.
        outputs = self._roots.pop((stage, microbatch))
        if stage not in self._recomputes:
            return outputs
        with self._autocast.forward():
            return self._second_forward(stage, microbatch)

    def _second_forward(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        """Returns the roots of the backward of a stage that recomputes."""
        values = self._values.inputs_of(stage, microbatch)
        # The second forward draws the same random numbers and reads the same buffers: otherwise the
        # gradient would not be that of the loss.
        with self._recomputes[stage].again(microbatch, values):
            outputs = self._stages[stage].forward(values)
            self._values.refuse_written(stage)
            what = f"stage {stage}, microbatch {microbatch}"
            differs = self._recomputes[stage].compare(microbatch, outputs, what)
            self.num_different = self.num_different + differs
            if stage in self._carried.stages:
                outputs = self._carried.take(stage, microbatch, outputs, hands_over=False)
            if stage in self._with_losses:
                outputs = self._part_losses(stage, microbatch, outputs, again=True)
        if stage != self._last or self._is_over_batch:
            return outputs
        return self._with_own_loss(microbatch, outputs)

    def _begin_backward(
        self, stage: int, microbatch: int
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns the roots of a backward, and their gradients."""
        if stage not in self._parameters:
            # Looked up in each step: between two steps the user may replace parameters.
            self._parameters[stage] = list(self._stages[stage].module.parameters())
            self._values.begin_backward(stage, self._parameters[stage])
        outputs = self._roots_of(stage, microbatch)
        roots, gradients = list[Tensor](), list[Tensor | None]()
        losses = list[tuple[Tensor, Number]]()
        if stage != self._last:
            roots, gradients = self._values.gradients_of(stage, microbatch, outputs)
        elif self._is_over_batch:
            roots, gradients = self._gathered(microbatch, outputs)
        elif outputs:
            assert self._terms is not None
            losses = [(outputs[0], self._terms.share(microbatch))]
        if stage in self._with_losses:
            assert self._terms is not None
            rows = self._terms.share_of_rows(microbatch)
            losses += [(loss, rows) for loss in self._losses.pop((stage, microbatch))]
        for loss, share in losses:
            if loss.requires_grad:
                roots += (loss,)
                gradients += (self._loss_gradient(loss, share),)
        if stage in self._carried.stages:
            self._carried.begin_backward(stage, microbatch, roots, gradients)
        if self._loose.is_looking:
            self._loose.look(stage, [microbatch], roots, self._values.leaves_of(stage, microbatch))
        return roots, gradients

    def _gathered(
        self, microbatch: int, outputs: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns the outputs of a microbatch that have a gradient of the loss of all, and it."""
        for loss in self._loss:
            torch.autograd.backward((loss,), (self._loss_gradient(loss, 1.0),))
        self._loss = ()
        roots, gradients = list[Tensor](), list[Tensor | None]()
        for output, leaf in zip(outputs, self._leaves.pop(microbatch), strict=True):
            if output.requires_grad and leaf.grad is not None:
                roots.append(output)
                gradients.append(leaf.grad)
        return roots, gradients

    def _loss_gradient(self, loss: Tensor, share: Number) -> Tensor:
        """Returns the gradient that backward begins with: the share, times the GradScaler's scale.

        Raises:
            StepError: If the loss's dtype has no such number.
        """
        # Complete gradients are divided, once. So what an autograd function or a hook of the user's
        # adds to a gradient is divided as all the rest is.
        assert self._sync is not None
        assert self._terms is not None
        if self._sync.scaler is None:
            return counted(torch.ones_like(loss), share).to(loss.dtype)
        # The scale is divided before backward: float16 must not overflow earlier than in one
        # process.
        exact = 1.0 / self._terms.divisor
        info = torch.finfo(loss.dtype)
        if not info.smallest_normal <= exact <= info.max:
            raise StepError(
                f"the loss is {loss.dtype}, and its gradient, 1 / {self._terms.divisor:g} for the "
                f"number of microbatches or loss_divisor, is none of its numbers: return "
                f"loss.float(), and compute it of float32"
            )
        scale = self._sync.scaler.begin_backward()
        if scale is None and self._with_losses:
            raise StepError(
                "loss_fn has called scaler.scale(), which does not scale the losses that a stage "
                "beside it makes: return the loss itself, and the Scheduler scales all of them"
            )
        if scale is None:
            return counted(torch.full_like(loss, exact), share).to(loss.dtype)
        # The scale stays on its device, so the host waits for nothing.
        scaled = scale.to(torch.promote_types(loss.dtype, scale.dtype)) / self._terms.divisor
        return counted(scaled, share).to(loss.device, loss.dtype).reshape(loss.shape)
