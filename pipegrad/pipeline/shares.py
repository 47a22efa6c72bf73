"""Shares: weights of microbatches, with which the sum of their means is the mean of one process.

With ``loss_reduction="mean"`` each microbatch has a loss that is a mean, and one process would take
the mean of the whole batch. Therefore a loss counts by its rows, if pipegrad has cut them, or by
the divisor of torch's own cross_entropy, or `chunked_cross_entropy`: its labels, or the weights of
their classes. The rank of the last stage has both, and no other rank needs them, because the mean
of all shares is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipegrad.comm.agreement import warn_once
from pipegrad.losses import chunked_cross_entropy
from pipegrad.pipeline.stage import Binding

Number = float | Tensor  # a tensor of one element
Shares = Sequence[Number]  # of microbatches
IGNORED = -100  # the label that torch's losses ignore by default
_FUNCTIONS = nn.functional.cross_entropy, nn.functional.nll_loss, chunked_cross_entropy
# Since torch 2.13 there is one that has the head, too.
_NEW = getattr(nn, "LinearCrossEntropyLoss", nn.NLLLoss)
_TORCHS = nn.CrossEntropyLoss, nn.NLLLoss, _NEW
_FORWARDS = [kind.forward for kind in _TORCHS]
_ASK = "make the Scheduler with loss_reduction='token_mean', and return (sum of losses, "


def counted(value: Tensor, share: Number) -> Tensor:
    """Returns a value times its share; 0 if the share is 0, because the value may be nan then."""
    if isinstance(share, Tensor):
        return torch.where(share == 0, 0.0, value * share)
    return value if share == 1 else value * share


class _Mean(NamedTuple):
    """The kind of mean that a loss computes.

    Attributes:
        is_torchs: Whether it is torch's own, with nothing around it: then `divisor` is right.
        reduction: The name of the reduction in torch.
        ignored: The label that does not count.
        weight: The weights of classes; None if there are none.
    """

    is_torchs: bool
    reduction: str
    ignored: int
    weight: Tensor | None

    def divisor(self, labels: Tensor) -> Tensor:
        """Returns the divisor of torch's loss for labels: a float64 scalar."""
        counts = labels != self.ignored
        if self.weight is None:
            return counts.sum(dtype=torch.float64)
        weights = self.weight.detach()[labels.masked_fill(~counts, 0)]
        return (weights * counts).sum(dtype=torch.float64)


def shares(
    loss_fn: object,
    targets: Sequence[object],
    rows: int | None,
    sizes: Sequence[float] = (),
    chunks: int = 1,
) -> tuple[Shares | None, Number]:
    """Returns the share of each microbatch, None if all are equal; and the weight of the batch.

    The weight of the batch is its rows, the divisor of torch's loss, or its microbatches.
    """
    mean, number = _mean_of(loss_fn), len(targets)
    if mean.reduction == "sum":
        # Sums are divided by the number of sequences, whatever the number of their chunks.
        return (None if chunks == 1 else [float(chunks)] * number), number // chunks
    labels = _labels(targets)
    if labels and mean.is_torchs:
        divisors = torch.stack([mean.divisor(x) for x in labels])
        total = divisors.sum()
        # If nothing counts the loss is nan, and gradients are zero, as in one process.
        parts = torch.where(total == 0, 1.0, divisors * number / total)
        is_alike = parts.is_cpu and bool((parts == 1).all())
        return None if is_alike else parts.unbind(), total
    is_alike = len(set(sizes)) < 2
    parts_of_rows = None if is_alike else [size * number / sum(sizes) for size in sizes]
    return parts_of_rows, rows or number // chunks


def _labels(targets: Sequence[object]) -> list[Tensor]:
    """Returns targets if all of them are labels of classes, else nothing."""
    labels = [x for x in targets if isinstance(x, Tensor) and x.dtype == torch.int64]
    return labels if len(labels) == len(targets) else []


def warn_of_labels(
    loss_fn: object, targets: Sequence[object], name: str, *, has_replicas: bool
) -> None:
    """Warns, once, of a mean over labels that differs from the mean of one process.

    Sync: on a device the host waits.
    """
    mean, labels = _mean_of(loss_fn), _labels(targets)
    if not labels or mean.reduction != "mean":
        return
    counts = [int((x != mean.ignored).sum()) for x in labels]
    if mean.is_torchs:
        is_uneven = has_replicas and len({mean.divisor(x).item() for x in labels}) > 1
        words = (
            "microbatches have other numbers of labels that count, so replicas may have, too. The "
            "mean over labels is that of one replica, and replicas weigh alike, so the loss is "
            f"not that of one process: {_ASK}number of labels)"
        )
    elif mean.weight is not None:
        is_uneven = True
        words = (
            f"loss_fn has weights of classes, and its mean divides by the weights of the labels of "
            f"a microbatch, which differ, so the loss is not that of one process: {_ASK}sum of the "
            f"weights of their labels). nn.CrossEntropyLoss(weight=...) alone as loss_fn is right, "
            f"too"
        )
    else:
        parts = {count / max(x.numel(), 1) for count, x in zip(counts, labels, strict=True)}
        is_uneven = len(parts) > 1
        most = f"{max(counts) / min(counts):.3g} times" if min(counts) else "infinitely"
        words = (
            f"targets have {mean.ignored}, which a loss ignores, and microbatches have "
            f"{min(counts)} to {max(counts)} labels that count. If loss_fn is a mean over them, a "
            f"label of one microbatch weighs {most} as much as one of another, and the loss is "
            f"not that of one process: {_ASK}number of labels)"
        )
    if is_uneven:
        warn_once(words, f"uneven labels {name}")


def _mean_of(loss_fn: object) -> _Mean:
    """Returns the mean that a loss, or torch's loss that its code names, computes."""
    loss_fn = loss_fn.function if isinstance(loss_fn, Binding) else loss_fn
    options: dict[str, Any] = getattr(loss_fn, "keywords", {})  # of functools.partial
    is_torchs = not getattr(loss_fn, "args", ())
    loss_fn = getattr(loss_fn, "func", loss_fn)
    # A subclass that overrides no forward computes the same as its parent.
    forward = getattr(getattr(loss_fn, "forward", None), "__func__", None)
    of = next((x for x in _named_by(loss_fn) if isinstance(x, _TORCHS)), loss_fn)
    weight = options.get("weight", getattr(of, "weight", None))
    ignored = options.get("ignore_index", getattr(of, "ignore_index", None))
    return _Mean(
        is_torchs and (loss_fn in _FUNCTIONS or forward in _FORWARDS),
        options.get("reduction", getattr(of, "reduction", "mean")),
        IGNORED if ignored is None else ignored,
        weight if isinstance(weight, Tensor) and (isinstance(of, _TORCHS) or options) else None,
    )


def _named_by(loss_fn: Any) -> Iterator[object]:  # noqa: ANN401 - any callable
    """Yields a loss, the modules in it, and the objects that its code names."""
    owner = getattr(loss_fn, "__self__", loss_fn)
    yield from owner.modules() if isinstance(owner, nn.Module) else (owner,)
    function = getattr(loss_fn, "__func__", loss_fn)
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is not set yet
            yield cell.cell_contents
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    yield from (function.__globals__[n] for n in names if n in function.__globals__)
