"""GradScaler: loss scaling for fp16, with one decision for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import StepError, in_words
from pipegrad.gradients.sync import GradientSync
from pipegrad.model.dtensor import local


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for a model that is cut over ranks.

    This scaler decides once for all ranks: if a gradient overflows on any rank, all ranks skip the
    step, and all keep the same scale. torch's scaler would skip the step on one rank and make it on
    others, because each rank has only the gradients of its parameters, or shards of them. All ranks
    construct it, and step the same optimizers in the same order.

    A `Scheduler` scales automatically. `StepResult.loss` is not scaled, because the Scheduler
    begins backward with the scale. In its ``loss_fn`` ``scaler.scale(loss)`` returns the loss
    itself::

        optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-3)
        scaler = pipegrad.GradScaler(scheduler.sync)
        for x, t in data:
            result = scheduler.step(x, target=t)
            scheduler.sync.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    In your own loop call ``scaler.scale(loss).backward()``; with `attach` return
    ``scaler.scale(loss)`` from the schedule's loss. Call `finish` before the methods below.

    `GradientSync.clip_grad_norm_` calls `unscale_` first, with the optimizer that `sync.optimizer`
    made last, unless you have called it in this step. Call it yourself to read or change unscaled
    gradients before clipping. If you made your optimizers yourself, call it for each of them.
    Without clipping, `step` unscales.

    fp16 parameters need ``master_dtype=torch.float32``, because this scaler, like torch's, unscales
    no fp16 gradients. A GradientSync has one scaler, the last one that was made for it.

    Args:
        sync: The GradientSync with the gradients.
        **options: Options of torch's GradScaler: ``init_scale``, ``growth_factor``,
            ``backoff_factor``, ``growth_interval``, ``enabled``. The same on all ranks.

    Attributes:
        is_scaled: Whether a loss was scaled on this rank since `update`. Then the step of an
            optimizer without the scaler raises StepError.
        is_stepping: Whether `step` runs.
        is_in_scheduler: Whether a Scheduler runs a step, and scales.

    Sync: `unscale_`, or `step` without it, sends one all-reduce of a few numbers, on the current
    stream, for which the host waits.

    Raises:
        AgreementError: If options differ between ranks; on all ranks.
        StepError: In `unscale_`, `step` and clipping, on all ranks: if a rank cannot unscale its
            gradients, as before `finish`, if no rank has scaled a loss, or if scales differ.
    """

    def __init__(self, sync: GradientSync, **options: Any) -> None:  # noqa: ANN401 - torch's own
        options = {"device": sync.device.type, **options}
        ranks = sorted(sync.topology.ranks)
        replies = agree("GradScaler", lambda: repr(sorted(options.items())), ranks=ranks)
        same("the options of GradScaler", dict(zip(ranks, replies, strict=True)))
        super().__init__(**options)
        self._sync = sync
        self.is_scaled = False
        self.is_in_scheduler = False
        # For the gradients of one step: True if any rank has unscaled some of the sync's gradients,
        # and the ids of this rank's main parameters whose gradients are unscaled.
        self._is_unscaled = False
        self._unscaled: set[int] = set()
        self.is_stepping = False
        # Scale a dummy loss, because torch makes its scale tensor with the first loss, and most
        # ranks have no loss.
        super().scale(torch.zeros((), device=sync.device))
        sync.scale_by(self)

    # The loss.

    def scale(self, outputs: Any) -> Any:  # noqa: ANN401 - torch's signature
        """Multiplies a tensor, or several, by the scale.

        It returns them as they are if gradients are disabled, and in the steps of a Scheduler.
        """
        if self.is_in_scheduler or not torch.is_grad_enabled():
            return outputs
        self.is_scaled = True
        return super().scale(outputs)

    def begin_backward(self) -> torch.Tensor:
        """Returns the scale, a scalar on the device: a Scheduler begins a backward with it."""
        assert self._scale is not None
        return self._scale

    # The gradients.

    def expect(self) -> None:
        """Called when the gradients of a step are in place: they are scaled."""
        self._is_unscaled = False
        self._unscaled.clear()
        # Clear torch's states, because torch does so in `update` alone: gradients of a step that
        # was left out would count as unscaled in all later steps. Keep the states of optimizers
        # that have stepped, because torch then raises an error about a missing `update`.
        states = self._per_optimizer_states
        for key in [key for key, each in states.items() if each["stage"] != OptState.STEPPED]:
            del states[key]

    def unscale_to_clip(self, optimizer: torch.optim.Optimizer | None) -> None:
        """The first pass of clipping: `unscale_`, unless some optimizer of the sync is unscaled.

        Args:
            optimizer: The optimizer of the GradientSync. None raises StepError on all ranks.
        """
        if self._is_unscaled:
            return
        if optimizer is None:
            # As a message, because an optimizer may be garbage on some ranks only.
            error = StepError(
                "clip_grad_norm_() unscales an optimizer of sync.optimizer(), and there is none: "
                "call scaler.unscale_(optimizer) for each of yours before"
            )
            self._decide(torch.zeros((), device=self._sync.device), error, is_own=False)
        else:
            self.unscale_(optimizer)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,  # noqa: ANN401 - torch's signature
        **kwargs: Any,  # noqa: ANN401
    ) -> float | None:
        """Steps `optimizer`, unless a gradient overflows on any rank; unscales before, if needed.

        Raises:
            StepError: As `unscale_`.
        """
        self.is_stepping = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self.is_stepping = False
            # A step that fails leaves these. Remove them, because torch would multiply the next
            # scale by the old one.
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Sets the next scale: smaller after an overflow, larger after many steps without one."""
        super().update(new_scale)
        self.is_scaled = False

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscales, and returns a flag that is 1.0 if any rank has an overflow.

        torch then skips the step.
        """
        tensors = [t for group in optimizer.param_groups for t in group["params"]]
        own = {id(main.tensor) for main in self._sync.main_parameters()} & {*map(id, tensors)}
        # Only this rank's part of a DTensor, because torch would reduce overflows over its mesh.
        gradients = [local(t.grad) for t in tensors if t.grad is not None]
        overflow, error = torch.zeros((), device=self._sync.device), None
        # An error on one rank must not leave the others in a collective.
        try:
            self._refuse_unready(gradients, own, allow_fp16=allow_fp16)
            if not allow_fp16:
                self._unscaled |= own
            holders = [gradient.detach() for gradient in gradients]
            for holder, gradient in zip(holders, gradients, strict=True):
                holder.grad = gradient
            group: Any = SimpleNamespace(param_groups=[{"params": holders}])
            overflows = super()._unscale_grads_(group, inv_scale, found_inf, allow_fp16)
            for each in overflows.values():
                overflow = torch.maximum(overflow, each.to(overflow.device))
        except Exception as caught:  # noqa: BLE001 - all ranks raise it, below
            error = caught
        # Without `allow_fp16` torch unscales. With it, torch only looks for overflows, and a fused
        # optimizer unscales in its step.
        anywhere = self._decide(overflow, error, is_own=bool(own) and not allow_fp16)
        return {anywhere.device: anywhere}

    def _refuse_unready(
        self, gradients: Sequence[torch.Tensor], own: set[int], *, allow_fp16: bool
    ) -> None:
        """Refuses gradients that cannot be unscaled; `own` are ids of main parameters."""
        if self._sync.is_in_step:
            raise StepError("a step is not finished yet: call finish() first")
        if not self._unscaled.isdisjoint(own):
            raise StepError(
                "the gradients were unscaled for another optimizer, or before update(): call "
                "scaler.unscale_(optimizer) before clip_grad_norm_() for each optimizer that "
                "steps, and scaler.update() once, after all have stepped"
            )
        if not allow_fp16 and torch.float16 in {gradient.dtype for gradient in gradients}:
            raise StepError(
                "gradients are torch.float16: make the GradientSync with master_dtype=torch.float32"
            )

    # The ranks.

    def _decide(
        self, overflow: torch.Tensor, error: Exception | None, *, is_own: bool
    ) -> torch.Tensor:
        """Returns 1.0 if any rank has an overflow, else 0.0; raises an error on all ranks.

        Args:
            overflow: This rank's flag, a scalar.
            error: This rank's error.
            is_own: Whether this rank has unscaled gradients of the sync.

        Sync: on the current stream; one all-reduce. The host waits for it.
        """
        # All numbers are in one message. The scale is in it, because ranks whose scales differ
        # would silently train another model than one process.
        assert self._scale is not None
        flags = [error is not None, self.is_scaled, is_own]
        numbers = torch.stack([self._scale, overflow])
        rows = self._sync.gather(torch.cat([numbers.new_tensor(flags), numbers]))
        failed, scaled, own, scales, _ = zip(*rows.tolist(), strict=True)
        ranks = sorted(self._sync.topology.ranks)
        if any(failed):
            # Send texts through the store, because they do not fit into a message of a few numbers.
            message = "" if error is None else in_words(error)
            replies = agree("unscale_", lambda: message, ranks=ranks)
            words = {rank: text for rank, text in zip(ranks, replies, strict=True) if text}
            raise StepError(f"gradients cannot be unscaled on ranks {words}") from error
        if len(set(scales)) > 1:
            raise StepError(
                f"the scale differs between ranks: {dict(zip(ranks, scales, strict=True))}. Load "
                f"the same state, and call update() and step() alike, on all ranks"
            )
        if not any(scaled):
            raise StepError(
                "no rank has scaled a loss, so gradients must not be unscaled: call "
                "scaler.scale(loss) where the loss is computed, or use a Scheduler"
            )
        self._is_unscaled |= any(own)
        return rows[:, -1].max()
