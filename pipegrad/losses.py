"""Chunked cross-entropy: the loss of hidden states under a head, never of all logits at once.

[Note: chunked loss] The logits of a vocabulary are the largest tensor of a step: as float32 they
take ``tokens * vocabulary * 4`` bytes, and autograd keeps some more of them. Here they exist for a
chunk at a time, and nothing of their size is kept:

- The forward walks over rows of tokens. It computes the losses of a chunk, and at once the gradient
  of its hidden states. This gradient takes the memory of the hidden states once more.
- The backward walks over rows of the head's weight, and computes their logits once more. A row of
  the weight's gradient is rounded once, as in one process, because it is one product over all
  tokens.

There are four products where torch has three, because the backward computes the logits again. Many
microbatches may be in flight, because the gradient of the weight exists in the backward alone.
Where a schedule splits backwards, this gradient waits for W.

Logits are rounded to the dtype of the hidden states, or of autocast, and all else is float32, as
with ``cross_entropy(head(hidden).float(), target)``. The largest logit of a token is subtracted
first, and not added to the logarithm of its sum, which would lose the small loss of a sure token.
In float16 small gradients vanish without a loss scale. The forward has its own scale, because it
runs before the backward's is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.errors import StepError
from pipegrad.interop.private import has_forward_hooks
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.wrappers import is_fsdp2

REDUCTIONS = ("mean", "sum", "none")
_CHUNK_BYTES = 2**28
_HALF_SCALE = 2.0**7  # of gradients in float16: small ones stay, and a label of weight 1 fits


def chunked_cross_entropy(
    hidden: Tensor,
    target: Tensor,
    head: nn.Module | Tensor,
    *,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Tensor:
    """Returns the cross-entropy of ``head(hidden)`` without making all logits.

    As the loss of a last stage that returns hidden states, and holds the head without calling it:
    ``loss_fn=functools.partial(chunked_cross_entropy, head=model.head)``. A mean counts its labels
    as ``nn.CrossEntropyLoss`` does. See [Note: chunked loss] for time and memory.

    Args:
        hidden: ``(..., width)``, a floating dtype.
        target: ``(...)``, classes as integers.
        head: An ``nn.Linear``, an ``nn.Embedding`` whose rows are the head's, or a weight
            ``(classes, width)``.
        bias: Bias of the head, ``(classes,)``, if the head is a weight.
        weight: Weights of classes, ``(classes,)``; they get no gradient.
        ignore_index: A label that has no loss.
        reduction: ``"mean"`` over labels, by their weights; ``"sum"``; or ``"none"``.
        label_smoothing: Part of each label that all classes share, from 0 to 1, for example 0.1.
        scale: Factor of the logits, applied first, as in Granite and Cohere.
        softcap: Limit of the logits, applied after `scale`, as in Gemma: logits become
            ``softcap * tanh(logits / softcap)``.
        chunk_bytes: Bytes of float32 logits that exist at a time. The peak is up to three times as
            much.

    Returns:
        A float32 scalar, of the shape of `target` for ``"none"``. float64 if `hidden` is.

    Raises:
        StepError: If shapes or dtypes do not fit, or if the head is none of these.
    """
    if isinstance(head, nn.Module):
        head, bias = _weight_of(head, bias)
    _check(hidden, target, head, reduction)
    device = hidden.device.type
    is_cast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if is_cast else hidden.dtype
    total = torch.float64 if dtype == torch.float64 else torch.float32
    labels = target.flatten().long()  # in 8 bits a label may equal ignore_index
    counts = labels != ignore_index
    labels = labels.masked_fill(~counts, 0)
    of_classes = None if weight is None else weight.detach().to(total)
    of_label = counts.to(total) if of_classes is None else of_classes[labels] * counts
    own, even = (1.0 - label_smoothing) * of_label, counts.to(total) * (label_smoothing / len(head))
    every = own + even * (len(head) if of_classes is None else of_classes.sum())
    losses: Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2),
        head,
        bias,
        _Options(
            labels=labels,
            counts=counts,
            own=own,
            even=even if label_smoothing else None,
            every=every,
            of_classes=of_classes,
            scale=scale,
            softcap=softcap,
            chunk=max(1, chunk_bytes // total.itemsize),
            dtype=dtype,
            total=total,
            is_trained=torch.is_grad_enabled(),
        ),
    )
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() / of_label.sum() if reduction == "mean" else losses.sum()


def _weight_of(head: nn.Module, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the weight and the bias of a head that is a module."""
    # A wrapper of FSDP2 or a parametrization has the forward of its class, an adapter another one.
    plain = (nn.Linear.forward, nn.Embedding.forward)
    # Hooks of the head would not run, because nothing calls it. Some hooks make its weight.
    is_hooked = has_forward_hooks(head) and not is_fsdp2(head)
    is_own = type(head).forward not in plain or "forward" in vars(head)
    if is_own or is_hooked or not isinstance(head.weight, Tensor):
        raise StepError(
            f"the head is {type(head).__module__}.{type(head).__name__}, which may do more than to "
            f"multiply: expected an nn.Linear, an nn.Embedding, or a weight. Let the stage call "
            f"it, and take cross_entropy of its logits"
        )
    own = getattr(head, "bias", None)
    return head.weight, own if bias is None else bias


def _check(hidden: Tensor, target: Tensor, weight: Tensor, reduction: str) -> None:
    if any(map(is_dtensor, (hidden, weight))):
        raise StepError(
            "the head's weight, or the hidden states, are a DTensor, of which a rank has a part: "
            "fully_shard() the module that holds the head without reshard_after_forward, or give "
            "the loss weight.full_tensor()"
        )
    if target.is_floating_point() or target.shape != hidden.shape[:-1]:
        raise StepError(
            f"the target is {target.dtype} {tuple(target.shape)}, expected classes as integers, "
            f"{tuple(hidden.shape[:-1])}, one for each hidden state of {tuple(hidden.shape)}"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise StepError(
            f"the head's weight is {tuple(weight.shape)}, expected (classes, {hidden.shape[-1]}) "
            f"for hidden states of {tuple(hidden.shape)}"
        )
    if reduction not in REDUCTIONS:
        raise StepError(f"reduction is {reduction!r}, expected one of {list(REDUCTIONS)}")


class _Options(NamedTuple):
    """All inputs of a loss, except hidden states and head.

    Attributes:
        labels: ``(tokens,)``, 0 where they do not count.
        counts: ``(tokens,)``, True where a label counts.
        own: ``(tokens,)``, weight of the label's logit, 0 where it does not count.
        even: ``(tokens,)``, weight that smoothing gives to each class; None without smoothing.
        every: ``(tokens,)``, the sum of these weights over all classes.
        of_classes: Weights of classes, ``(classes,)``; None if all are 1.
        scale: Factor of logits.
        softcap: Limit of logits, applied after `scale`.
        chunk: Number of logits that exist at a time.
        dtype: Dtype of products and of the gradients of logits.
        total: Dtype of logits, sums and losses.
        is_trained: True if gradients are enabled.
    """

    labels: Tensor
    counts: Tensor
    own: Tensor
    even: Tensor | None
    every: Tensor
    of_classes: Tensor | None
    scale: float
    softcap: float | None
    chunk: int
    dtype: torch.dtype
    total: torch.dtype
    is_trained: bool

    def slices(self, number: int, others: int) -> Iterator[slice]:
        """Yields slices of `number` tokens or classes, each of which has `others` logits."""
        most = max(1, self.chunk // max(others, 1))
        yield from (slice(i, min(i + most, number)) for i in range(0, number, most))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns logits ``(tokens, classes)``, in memory of their own."""
        logits = functional.linear(hidden, weight, bias).to(self.total)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def losses(self, logits: Tensor, rows: slice) -> Tensor:
        """Returns the losses of rows, less their part of the logarithms of sums, ``(rows,)``."""
        losses = -logits.gather(1, self.labels[rows, None]).squeeze(1) * self.own[rows]
        if self.even is not None:
            total = logits.sum(1) if self.of_classes is None else logits @ self.of_classes
            losses.addcmul_(self.even[rows], total, value=-1)
        return losses

    def slope(self, logits: Tensor) -> Tensor | None:
        """Returns the derivative of a soft cap, ``(rows, classes)``; None if there is none."""
        if self.softcap is None:
            return None
        return logits.div(self.softcap).square_().neg_().add_(1.0)

    def gradient(
        self,
        exps: Tensor,
        sums: Tensor,
        rows: slice,
        first: int,
        times: Tensor,
        *,
        slope: Tensor | None,
    ) -> Tensor:
        """Returns the gradient of the losses of rows by the head's output, in `dtype`.

        Sync: on the current stream. It writes into the memory of `exps`.
        """
        result = exps.mul_((self.every[rows] * times / sums)[:, None])
        at = (self.labels[rows] - first)[:, None]
        is_here = (at >= 0) & (at < exps.shape[1])
        own = (self.own[rows] * times)[:, None] * is_here
        result.scatter_add_(1, at.clamp(0, exps.shape[1] - 1), -own)
        if self.even is not None:
            even = (self.even[rows] * times)[:, None]
            if self.of_classes is not None:
                even = even * self.of_classes[first : first + exps.shape[1]]
            result.sub_(even)
        return (result if slope is None else result.mul_(slope)).to(self.dtype)


class HeadLoss(torch.autograd.Function):
    """The losses of tokens, ``(tokens,)``: see [Note: chunked loss]."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: _Options,
    ) -> Tensor:
        dtype, (tokens, classes) = options.dtype, (len(hidden), len(weight))
        needs_hidden = options.is_trained and ctx.needs_input_grad[0]
        scale: Tensor | float = 1.0
        if dtype == torch.float16 and tokens:
            scale = _HALF_SCALE / (options.every.amax() * abs(options.scale)).clamp(min=1.0)
        of_hidden = torch.empty_like(hidden, dtype=dtype) if needs_hidden else None
        memory = hidden.new_empty(3, tokens, dtype=options.total)
        losses, most, sums = memory
        times = memory.new_ones(1) * scale * options.scale
        with torch.autocast(hidden.device.type, enabled=False):
            near, cast = hidden.to(dtype), weight.to(dtype)
            shift = None if bias is None else bias.to(dtype)
            for rows in options.slices(tokens, classes):
                logits = options.logits(near[rows], cast, shift)
                slope = None if of_hidden is None else options.slope(logits)
                most[rows] = logits.amax(1)
                losses[rows] = options.losses(logits.sub_(most[rows, None]), rows)
                sums[rows] = logits.exp_().sum(1)
                if of_hidden is not None:
                    by = options.gradient(logits, sums[rows], rows, 0, times, slope=slope)
                    torch.mm(by, cast, out=of_hidden[rows])
                    del by
                del logits, slope  # before the next ones are made
            losses += options.every * sums.log()
            losses.masked_fill_(~options.counts, 0.0)  # whatever their states are
        ctx.options, ctx.scale = options, scale
        ctx.weight_waits = False  # set where a backward is split: see `split_backward`
        ctx.save_for_backward(hidden, weight, bias, memory[1:], of_hidden)
        return torch.clone(losses)

    @staticmethod
    def backward(ctx: Any, by_losses: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if torch.is_grad_enabled():
            raise StepError(
                "create_graph=True, and chunked_cross_entropy has no second derivative: take "
                "cross_entropy of the logits"
            )
        hidden, weight, bias, sums, of_hidden = ctx.saved_tensors
        options, counts = ctx.options, ctx.options.counts
        by_hidden = by_weight = by_bias = None
        if of_hidden is not None:
            # The gradient of a mean over no label is 1 / 0, and no label has one.
            times = torch.where(counts, by_losses / ctx.scale, 0.0)
            by_hidden = (of_hidden * times[:, None]).to(hidden.dtype)
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_bias or (needs_weight and not ctx.weight_waits):
            by_weight, by_bias = by_head(
                hidden, weight, by_losses, bias=bias, sums=sums, options=options
            )
        return by_hidden, by_weight if needs_weight else None, by_bias if needs_bias else None, None


def by_head(
    hidden: Tensor,
    weight: Tensor,
    by_losses: Tensor,
    *,
    bias: Tensor | None,
    sums: Tensor,
    options: _Options,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of a head's weight and bias.

    Args:
        hidden: ``(tokens, width)``.
        weight: ``(classes, width)``.
        by_losses: The gradients of the losses, ``(tokens,)``.
        bias: ``(classes,)``.
        sums: The largest logit of each token, and the sum of the exponentials of the others less
            that one: ``(2, tokens)``.
        options: The options of the forward.
    """
    dtype, (tokens, classes) = options.dtype, (len(hidden), len(weight))
    by_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    by_bias = None if bias is None else torch.empty_like(bias)
    every, near, (most, sums) = slice(0, tokens), hidden.to(dtype), sums
    times = torch.where(options.counts, by_losses, 0.0) * options.scale
    with torch.autocast(hidden.device.type, enabled=False):
        for part in options.slices(classes, tokens):
            shift = None if bias is None else bias[part].to(dtype)
            logits = options.logits(near, weight[part].to(dtype), shift)
            slope = options.slope(logits)
            exps = logits.sub_(most[:, None]).exp_()
            by = options.gradient(exps, sums, every, part.start, times, slope=slope)
            by_weight[part] = by.mT @ near
            if by_bias is not None:
                by_bias[part] = by.sum(0)
            del by, exps, logits, slope  # before the next ones are made
    return by_weight, by_bias
