"""States: what is compared beside gradients: losses, copies, buffers, modes of modules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipegrad.audit.causes import Cause
from pipegrad.audit.placed import Entry
from pipegrad.audit.report import Finding
from pipegrad.audit.seen import Seen
from pipegrad.audit.truth import Truth

_STARTS = Cause(
    "copies of the parameter start with different values",
    "load or broadcast one value on all ranks that hold it, before the first step",
)
_FROZEN = Cause(
    "the parameter is frozen, and in the uncut model it is trained",
    "call requires_grad_(True) for it in the stage, or requires_grad_(False) in the uncut model",
)
_TRAINS = Cause(
    "the parameter is trained, and in the uncut model it is frozen",
    "call requires_grad_(False) for it in the stage, before the optimizer is made",
)
_FORWARD = "look at the forward first: inputs, targets, loss function, order of layers"
_CLOSE = 1e-4  # of a loss or a buffer in float32


def starts(seen: Sequence[Seen], model: nn.Module, first: Mapping[str, str]) -> Iterator[Finding]:
    """Yields what does not begin alike: copies and buffers.

    Args:
        seen: By each rank, in the first step.
        model: The uncut model.
        first: Name of a parameter -> the first of its names.
    """
    yield from copies(
        seen,
        [of_rank.before for of_rank in seen],
        first,
        _STARTS,
    )
    there = dict(model.named_buffers(remove_duplicate=False))
    for of_rank in seen:
        for name, value in of_rank.buffers[0].items():
            if not _is_close(value, there[name], _CLOSE):
                yield Finding(
                    "the buffer starts with other values than in the uncut model",
                    "load the same buffers into the stages and the uncut model",
                    (name,),
                    (of_rank.rank,),
                )


def copies(
    seen: Sequence[Seen],
    values: Sequence[Mapping[str, Tensor]],
    first: Mapping[str, str],
    cause: Cause,
    explained: frozenset[str] | set[str] = frozenset(),
) -> Iterator[Finding]:
    """Yields parameters whose copies are not equal bit by bit.

    Args:
        seen: By each rank.
        values: Of each rank, by name.
        first: Name of a parameter -> the first of its names.
        cause: What is wrong with them.
        explained: First names that are wrong for a cause that is known.
    """
    known: dict[str, tuple[int, Tensor]] = {}
    for of_rank, held in zip(seen, values, strict=True):
        for name, value in held.items():
            other, there = known.setdefault(first[name], (of_rank.rank, value))
            if first[name] not in explained and not torch.equal(value, there.to(value.dtype)):
                yield Finding(*cause, (first[name],), (other, of_rank.rank))


def frozen(seen: Sequence[Seen], first: Mapping[str, str]) -> dict[str, set[int]]:
    """Returns first names of parameters, and the ranks on which they require no gradient."""
    found: dict[str, set[int]] = {}
    for of_rank in seen:
        for name in of_rank.frozen:
            found.setdefault(first[name], set()).add(of_rank.rank)
    return found


def trained(
    entries: Sequence[Entry], truth: Truth, is_frozen: Mapping[str, set[int]]
) -> Iterator[Finding]:
    """Yields parameters that train in the pipeline alone, or in the uncut model alone."""
    for entry in entries:
        here = not set(entry.ranks) & is_frozen.get(entry.name, set())
        there = entry.name in truth.gradients
        if there and not here and bool(truth.gradients[entry.name].any()):
            yield Finding(*_FROZEN, (entry.name,), entry.ranks)
        elif here and not there and entry.gradient is not None and bool(entry.gradient.any()):
            yield Finding(*_TRAINS, (entry.name,), entry.ranks)


def losses(seen: Sequence[Seen], truth: Truth) -> Iterator[Finding]:
    """Yields losses that are neither that of one process, nor that of the rank's own replica."""
    close = _CLOSE + 4 * truth.loss_error
    for of_rank in seen:
        own, values = float(truth.own[of_rank.replica]), truth.losses[of_rank.replica]
        # Ranks without the last stage often return 0 or -1.
        said = [loss for loss in of_rank.losses if loss not in {0.0, -1.0}]
        if not said or any(
            math.isclose(loss, right, rel_tol=close) for loss in said for right in (truth.loss, own)
        ):
            continue
        known = {
            "the sum over microbatches": float(values.sum()),
            "multiplied by the number of microbatches": truth.loss * len(values),
            "the sum over microbatches and replicas": float(truth.losses.sum()),
            "that of the last microbatch": float(values[-1]),
            "that of the first microbatch": float(values[0]),
            "divided by the number of microbatches twice": own / len(values),
            "a mean of means: microbatches count alike": float(values.mean()),
        }
        [loss, *_] = said
        words = next((w for w, x in known.items() if math.isclose(loss, x, rel_tol=close)), "")
        detail = f"rank {of_rank.rank} has {loss:.6g}, right is {truth.loss:.6g}"
        yield Finding(
            f"the loss is {words or 'not that of one process'}",
            "return the mean over the targets of the step" if words else _FORWARD,
            ranks=(of_rank.rank,),
            details=(detail,),
        )


def buffers(seen: Sequence[Seen], truth: Truth) -> Iterator[Finding]:
    """Yields buffers that are not those of one process after the same microbatches."""
    for of_rank in seen:
        # DistributedDataParallel gives all replicas the buffers of the first one.
        if of_rank.replica != 0:
            continue
        before, after = of_rank.buffers
        for name, value in after.items():
            expected = truth.buffers[0].get(name, before[name])
            if not _is_close(value, expected, 10 * _CLOSE):
                yield Finding(
                    "the buffer differs after the step from that of one process on the same "
                    "microbatches",
                    "run each microbatch through the stage once, in training mode",
                    (name,),
                    (of_rank.rank,),
                )


def _is_close(a: Tensor, b: Tensor, close: float) -> bool:
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a.cpu(), b.cpu().to(a.dtype))
    close = max(close, 4 * torch.finfo(a.dtype).eps)
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    # Masks have infinities.
    return torch.allclose(
        a,
        b,
        rtol=close,
        atol=close * float(b.nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0,
        equal_nan=True,
    )
