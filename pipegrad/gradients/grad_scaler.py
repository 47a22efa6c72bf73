"""GradScaler: loss scaling for fp16, with one decision for all ranks."""

from __future__ import annotations

from typing import Any

import torch

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import StepError, in_words
from pipegrad.gradients.sync import GradientSync


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for a model that is cut over ranks.

    Each rank has the gradients of its own parameters, or shards of them. An overflow may be in the
    gradients of only one rank. torch's scaler would skip the step on that rank, and make it on
    others. This scaler reduces a flag over all ranks: if a gradient of an optimizer overflows
    anywhere, all ranks skip the step of that optimizer. So the scale is the same on all ranks, too.

    All ranks construct it, and step the same optimizers in the same order. An optimizer that has
    no parameters on a rank is stepped there as well. The loss is scaled where it is computed, on
    the ranks of the last stage. With a Scheduler that is in `loss_fn`::

        scheduler = pipegrad.Scheduler(..., loss_fn=lambda y, t: scaler.scale(loss(y, t)))
        scaler = pipegrad.GradScaler(scheduler.sync)
        optimizer = torch.optim.AdamW(scheduler.sync.optimizer_parameters())
        for x, t in data:
            result = scheduler.step(x, target=t)
            print(result.loss.item() / scaler.get_scale())  # the loss that step reports is scaled
            scaler.unscale_(optimizer)                      # only to clip
            scheduler.sync.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.sync.publish()
            optimizer.zero_grad()

    In `Scheduler.evaluate` `scale` changes nothing, so the loss there is the loss itself. With
    `attach` it is the same: the schedule gets that `loss_fn`, and its losses are scaled. In a loop
    of your own call ``scaler.scale(loss).backward()``, and `finish` before `unscale_` and `step`.

    fp16 parameters need ``master_dtype=torch.float32``: as torch's, it unscales no fp16 gradients.

    Args:
        sync: Whose gradients are scaled.
        **options: Those of torch's GradScaler: ``init_scale``, ``growth_factor``,
            ``backoff_factor``, ``growth_interval``, ``enabled``. The same on all ranks.

    Raises:
        PlanError: If options differ between ranks; on all ranks.
    """

    def __init__(self, sync: GradientSync, **options: Any) -> None:  # noqa: ANN401 - torch's own
        options = {"device": sync.device.type, **options}
        ranks = sorted(sync.topology.ranks)
        replies = agree("GradScaler", lambda: repr(sorted(options.items())), ranks=ranks)
        same("the options of GradScaler", dict(zip(ranks, replies, strict=True)))
        super().__init__(**options)
        self._sync = sync
        self._is_used = False
        self._first = sync.statistics().steps
        # torch makes its scale tensor with the first loss, and most ranks have no loss.
        super().scale(torch.zeros((), device=sync.device))

    def scale(self, outputs: Any) -> Any:  # noqa: ANN401 - torch's signature
        """Multiplies a tensor, or several, by the scale, unless gradients are disabled."""
        if not torch.is_grad_enabled():
            return outputs
        self._is_used = True
        return super().scale(outputs)

    def get_scale(self) -> float:
        """Returns the scale, the same on all ranks; 1.0 if disabled."""
        # A caller before the end of the first step may multiply the loss with the scale itself.
        if self._sync.statistics().steps == self._first:
            self._is_used = True
        return super().get_scale()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of `optimizer` by the scale, and reduces a flag for overflows.

        Call it after the step's last backward and `finish`, once for each optimizer, on all ranks.

        Sync: on the current stream; one all-reduce of a few numbers. The host waits for it.

        Raises:
            StepError: On all ranks, if a rank cannot unscale its gradients, if no rank has scaled a
                loss, or if scales differ.
        """
        super().unscale_(optimizer)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscales, and returns whether any rank has an overflow. torch then skips the step."""
        # An error on one rank must not leave the others in a collective. So it is caught, and sent
        # as one number of the same all-reduce as the flag for overflows.
        error: Exception | None = None
        overflow = torch.zeros((), device=self._sync.device)
        try:
            self._check(optimizer, allow_fp16=allow_fp16)
            by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            for each in by_device.values():
                overflow = torch.maximum(overflow, each.to(overflow.device))
        except Exception as caught:  # noqa: BLE001 - all ranks raise it, below
            error = caught
        # The scale is sent with both signs: the maximum gives the largest and the smallest scale.
        scale = super().get_scale()
        values = torch.tensor(
            [0.0, error is not None, self._is_used, scale, -scale], device=overflow.device
        )
        values[0] = overflow
        self._sync.take_largest(values)
        _, failed, used, largest, smallest = values.tolist()
        if failed or not used or largest != -smallest:
            self._refuse(error, used=bool(used))
        return {overflow.device: values[0]}

    def _check(self, optimizer: torch.optim.Optimizer, *, allow_fp16: bool) -> None:
        """Raises an error if this rank cannot unscale."""
        if self._sync.is_in_step:
            raise StepError("a step is not finished yet: call finish() first")
        gradients = [t.grad for group in optimizer.param_groups for t in group["params"]]
        if not allow_fp16 and any(g is not None and g.dtype == torch.float16 for g in gradients):
            raise StepError(
                "gradients are torch.float16: make the GradientSync with master_dtype=torch.float32"
            )

    def _refuse(self, error: Exception | None, *, used: bool) -> None:
        """Raises the same error on all ranks, with the messages of ranks that have an error."""
        message = "" if error is None else in_words(error)
        ranks = sorted(self._sync.topology.ranks)
        get_scale = super().get_scale
        replies = agree("unscale_", lambda: (message, get_scale()), ranks=ranks)
        failed = {rank: text for rank, (text, _) in zip(ranks, replies, strict=True) if text}
        if failed:
            raise StepError(f"gradients cannot be unscaled on ranks {failed}") from error
        if not used:
            raise StepError(
                "no rank has scaled a loss, so gradients must not be unscaled: call "
                "scaler.scale(loss) where the loss is computed, with a Scheduler in its loss_fn"
            )
        scales = {rank: scale for rank, (_, scale) in zip(ranks, replies, strict=True)}
        raise StepError(
            f"the scale differs between ranks: {scales}. Load the same state, and call update() "
            f"and step() alike, on all ranks"
        )
