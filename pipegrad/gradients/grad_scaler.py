"""GradScaler: loss scaling for fp16, with one decision for all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch.amp.grad_scaler import OptState

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import StepError, in_words
from pipegrad.gradients.norm import GlobalNorm
from pipegrad.gradients.sync import GradientSync


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for a model that is cut over ranks.

    Each rank has the gradients of its own parameters, or shards of them. An overflow may be in the
    gradients of only one rank. torch's scaler would skip the step on that rank, and make it on
    others. This scaler decides once for all ranks: if a gradient overflows anywhere, all ranks skip
    the step. So the scale is the same on all ranks, too. All ranks construct it, and step the same
    optimizers in the same order.

    A `Scheduler` scales by itself: it begins backward with the scale. So `StepResult.loss` is the
    loss itself. A ``loss_fn`` that returns ``scaler.scale(loss)`` is not scaled once more::

        optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-3)
        scaler = pipegrad.GradScaler(scheduler.sync)
        for x, t in data:
            result = scheduler.step(x, target=t)
            scheduler.sync.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    In a loop of your own call ``scaler.scale(loss).backward()``; with `attach` return
    ``scaler.scale(loss)`` from the schedule's loss. Call `finish` before the verbs below.

    `GradientSync.clip_grad_norm_` multiplies each gradient once, by the inverse of the scale and by
    the factor of clipping. It finds overflows by the norm that it measures, so no other message is
    sent. Without clipping, `step` does so. `unscale_` is for whoever reads or changes unscaled
    gradients before that; then clipping multiplies once more. Call it for every optimizer.

    fp16 parameters need ``master_dtype=torch.float32``: as torch's, it unscales no fp16 gradients.
    A GradientSync has one scaler, the last one that was made for it.

    Args:
        sync: Whose gradients are scaled.
        **options: Those of torch's GradScaler: ``init_scale``, ``growth_factor``,
            ``backoff_factor``, ``growth_interval``, ``enabled``. The same on all ranks.

    Attributes:
        is_stepping: Whether `step` runs.

    Raises:
        AgreementError: If options differ between ranks; on all ranks.
    """

    def __init__(self, sync: GradientSync, **options: Any) -> None:  # noqa: ANN401 - torch's own
        options = {"device": sync.device.type, **options}
        ranks = sorted(sync.topology.ranks)
        replies = agree("GradScaler", lambda: repr(sorted(options.items())), ranks=ranks)
        same("the options of GradScaler", dict(zip(ranks, replies, strict=True)))
        super().__init__(**options)
        self._sync = sync
        self._has_scaled = False  # whether this rank has scaled since `update`
        self._is_scaled = False  # whether any rank has, as far as this one knows
        self._has_caller_scaled = False  # whether that was by `scale`, inside of a step
        self.is_stepping = False
        # What is known of the gradients of one step: whether any rank has an overflow, if clipping
        # has unscaled all of them, and for which optimizers `unscale_` was called.
        self._round = sync.statistics().steps
        self._overflow: torch.Tensor | None = None
        self._unscaled: set[int] = set()
        # torch makes its scale tensor with the first loss, and most ranks have no loss.
        super().scale(torch.zeros((), device=sync.device))
        sync.scale_by(self)

    # The loss.

    def scale(self, outputs: Any) -> Any:  # noqa: ANN401 - torch's signature
        """Multiplies a tensor, or several, by the scale, unless gradients are disabled."""
        if not torch.is_grad_enabled():
            return outputs
        self._has_scaled = self._is_scaled = True
        self._has_caller_scaled |= self._sync.is_in_step
        return super().scale(outputs)

    def begin_backward(self) -> torch.Tensor | None:
        """Returns the scale, a scalar on the device: a Scheduler begins a backward with it.

        None if gradients are not scaled, or if `scale` was called in this step.
        """
        if not self.is_enabled() or self._has_caller_scaled:
            return None
        self._has_scaled = self._is_scaled = True
        return self._scale

    def note_scaled(self) -> None:
        """Marks the losses of a step as scaled, on whichever ranks they are."""
        self._is_scaled = True

    # The gradients.

    @property
    def is_due(self) -> bool:
        """Whether clipping must unscale the gradients: it is enabled, and they are scaled."""
        self._begin_round()
        return self.is_enabled() and self._overflow is None and not self._unscaled

    def measure(
        self, norm: GlobalNorm, gradients: dict[str, torch.Tensor], norm_type: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Measures scaled gradients, and notes whether any rank has an overflow.

        The caller multiplies them by the second result.

        Args:
            norm: Measures.
            gradients: Of this rank, by key; scaled.
            norm_type: As for `GradientSync.clip_grad_norm_`.

        Returns:
            The norm of the unscaled gradients, and the inverse of the scale, on all ranks.

        Sync: on the current stream; one all-reduce of a few numbers. The host waits for it.

        Raises:
            StepError: As `unscale_`.
        """
        # Not raised here: the other ranks come to the all-reduce below and would wait for this one.
        # It goes there as a flag, and all ranks raise.
        error = self._complaint(gradients.values(), allow_fp16=False)
        # In float64 no square of a float32 overflows. So the norm is infinite exactly if an element
        # is, as in torch's decision.
        wide, device = torch.float64, self._sync.device
        term = norm.term(gradients, norm_type, device=device, dtype=wide, least=wide)
        terms = self._gather(term, error)
        assert self._scale is not None
        inverse = self._scale.double().reciprocal()
        self._overflow = (~terms.isfinite()).any().float()
        return norm.total(terms, norm_type, factor=inverse), inverse.float()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of `optimizer` by the scale, and looks for overflows on all ranks.

        Call it after the step's last backward and `finish`, once for each optimizer, on all ranks.
        After `GradientSync.clip_grad_norm_` it does nothing more.

        Sync: on the current stream; one all-reduce of a few numbers. The host waits for it.

        Raises:
            StepError: On all ranks, if a rank cannot unscale its gradients, if no rank has scaled a
                loss, or if scales differ.
        """
        self._begin_round()
        super().unscale_(optimizer)
        self._unscaled.add(id(optimizer))

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
        self._begin_round()
        # A fused optimizer unscales by itself, and does not know of what clipping has done.
        if self._overflow is not None and id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        self.is_stepping = True
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:
            # torch leaves these behind, and multiplies the next scale by the old one.
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)
            raise
        finally:
            self.is_stepping = False

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Sets the next scale: smaller after an overflow, larger after many steps without one."""
        if (
            self._is_scaled
            and (found := self._overflow) is not None
            and not any(x["found_inf_per_device"] for x in self._per_optimizer_states.values())
        ):
            # Clipping has looked for overflows, and no optimizer has stepped.
            self._per_optimizer_states[id(self)]["found_inf_per_device"] = {found.device: found}
        super().update(new_scale)
        # The gradients stay unscaled until the next step, so what is known of them stays.
        self._has_scaled = self._is_scaled = self._has_caller_scaled = False

    def refusal(self) -> str | None:
        """Returns why an optimizer may not step now; None if it may."""
        if self.is_stepping or not (self.is_enabled() and self._is_scaled):
            return None
        return (
            "optimizer.step() of gradients that a GradScaler has scaled, perhaps with overflows: "
            "call scaler.step(optimizer), then scaler.update()"
        )

    def _begin_round(self) -> None:
        """Forgets what was known of the gradients of an earlier step."""
        number = self._sync.statistics().steps
        if number == self._round or not self.is_enabled():
            return
        self._round, self._overflow = number, None
        self._unscaled.clear()
        # torch forgets in `update` alone, so gradients of a step that was left out would count as
        # unscaled in all later steps. It remembers who has made a step: then `update` was
        # forgotten, and it says so.
        states = self._per_optimizer_states
        for key in [key for key, each in states.items() if each["stage"] != OptState.STEPPED]:
            del states[key]

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscales, and returns whether any rank has an overflow. torch then skips the step."""
        self._begin_round()
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if self._overflow is not None:
            self._check_unscaled(tensors)
            return {self._overflow.device: self._overflow}
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        error = self._complaint(gradients, allow_fp16=allow_fp16)
        overflow = torch.zeros((), device=self._sync.device)
        if error is None:
            # An error on one rank must not leave the others in a collective.
            try:
                overflows = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
                self._sync.note_results()
                for each in overflows.values():
                    overflow = torch.maximum(overflow, each.to(overflow.device))
            except Exception as caught:  # noqa: BLE001 - all ranks raise it, below
                error = caught
        anywhere = self._gather(overflow, error).max().float()
        return {anywhere.device: anywhere}

    def _check_unscaled(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuses an optimizer of gradients that clipping has not unscaled."""
        known = {id(main.tensor) for main in self._sync.main_parameters()}
        if any(tensor.grad is not None and id(tensor) not in known for tensor in tensors):
            error = StepError(
                "clip_grad_norm_() has unscaled the gradients of its GradientSync, and this "
                "optimizer has others: call scaler.unscale_() for every optimizer before clipping"
            )
            self._sync.abort(error, begun=False)
            raise error

    def _complaint(
        self, gradients: Iterable[torch.Tensor], *, allow_fp16: bool
    ) -> Exception | None:
        """Returns the error if this rank cannot unscale."""
        if self._sync.is_in_step:
            return StepError("a step is not finished yet: call finish() first")
        if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
            return StepError(
                "gradients are torch.float16: make the GradientSync with master_dtype=torch.float32"
            )
        return None

    # The ranks.

    def _gather(self, term: torch.Tensor, error: Exception | None) -> torch.Tensor:
        """Returns the terms of all ranks, float64 ``(ranks,)``.

        Args:
            term: Of this rank, a scalar.
            error: Of this rank; it is raised on all ranks.

        Sync: on the current stream; one all-reduce. The host waits for it.
        """
        # Everything travels in one message. The scale is in it, because ranks whose scales differ
        # would train another model than one process, and nobody would notice.
        assert self._scale is not None
        flags = torch.tensor([error is not None, self._has_scaled], device=self._sync.device)
        row = torch.cat([flags.double(), torch.stack([self._scale.double(), term.double()])])
        rows = self._sync.gather(row)
        failed, used, scales = rows[:, :3].unbind(1)
        if bool(failed.any() | ~used.any() | (scales != scales[0]).any()):
            self._refuse(error)
        return rows[:, 3]

    def _refuse(self, error: Exception | None) -> NoReturn:
        """Raises the same error on all ranks, with the messages of ranks that have an error."""
        # All ranks have read the same flags, so all come here. Words do not fit into a message of a
        # few numbers: they go through the store.
        message = "" if error is None else in_words(error)
        ranks = sorted(self._sync.topology.ranks)
        replies = agree("unscale_", lambda: (message, self.get_scale()), ranks=ranks)
        failed = {rank: text for rank, (text, _) in zip(ranks, replies, strict=True) if text}
        if failed:
            raise StepError(f"gradients cannot be unscaled on ranks {failed}") from error
        scales = {rank: scale for rank, (_, scale) in zip(ranks, replies, strict=True)}
        if len(set(scales.values())) > 1:
            raise StepError(
                f"the scale differs between ranks: {scales}. Load the same state, and call "
                f"update() and step() alike, on all ranks"
            )
        raise StepError(
            "no rank has scaled a loss, so gradients must not be unscaled: call "
            "scaler.scale(loss) where the loss is computed, or use a Scheduler"
        )
