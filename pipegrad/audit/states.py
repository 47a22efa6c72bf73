"""States: compares losses, copies, buffers and updates of all ranks with one process."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipegrad.audit.causes import Cause
from pipegrad.audit.report import Finding
from pipegrad.audit.seen import Seen
from pipegrad.audit.truth import Truth
from pipegrad.errors import PlanError, in_words

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
_ONE_PROCESS = "`optimizer` is to make an optimizer of the uncut model, which it gets"
_FORWARD = "look at the forward first: inputs, targets, loss function, order of layers"
_CLOSE = 1e-4  # of a loss or a buffer in float32


First = Mapping[str, str]  # name of a parameter -> the first of its names
Key = tuple[str, tuple[int, ...]]  # first name of a parameter, and ranks


class Steps(Protocol):
    """An object that updates parameters: an optimizer, or a wrapper that clips first."""

    def step(self) -> object:
        """Updates the parameters."""


Stepper = Callable[[nn.Module], Steps]


@dataclass(frozen=True, eq=False)
class Entry:
    """A gradient that some ranks hold together.

    Attributes:
        name: First name of the parameter in the uncut model.
        ranks: Ranks that hold the gradient, or parts of it.
        replicas: Replicas whose data these ranks got.
        uses: Names of the parameter on these ranks.
        gradient: The gradient; None if these ranks have none.
        is_frozen: True if one of these ranks does not train the parameter.
    """

    name: str
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    uses: tuple[str, ...]
    gradient: Tensor | None
    is_frozen: bool = False

    @property
    def key(self) -> Key:
        """Its name and ranks."""
        return self.name, self.ranks


def entries_of(
    seen: Sequence[Seen], gradients: Sequence[Mapping[str, Tensor | None]], first: First
) -> list[Entry]:
    """Returns gradients once for each group of ranks that holds them, with pieces added up."""
    replicas = {of_rank.rank: of_rank.replica for of_rank in seen}
    of_name: dict[str, list[Entry]] = {}
    for of_rank, held in zip(seen, gradients, strict=True):
        for parameter, name in {first[name]: name for name in held}.items():
            known = of_name.setdefault(parameter, [])
            ranks, uses, pieces = {*of_rank.groups[name]}, of_rank.uses[name], [held[name]]
            is_frozen = name in of_rank.frozen
            for other in [entry for entry in known if ranks & {*entry.ranks}]:
                known.remove(other)
                ranks, uses, pieces = ranks | {*other.ranks}, other.uses, [other.gradient, *pieces]
                is_frozen |= other.is_frozen
            there = [piece for piece in pieces if piece is not None]
            gradient = torch.stack(there).sum(0) if len(there) > 1 else next(iter(there), None)
            of_ranks = tuple(sorted(ranks)), tuple(sorted({replicas[rank] for rank in ranks}))
            known.append(Entry(parameter, *of_ranks, uses, gradient, is_frozen))
    return [entry for known in of_name.values() for entry in known]


def starts(seen: Sequence[Seen], model: nn.Module, first: First) -> Iterator[Finding]:
    """Yields copies and buffers that differ before the first step."""
    yield from copies(held(seen, "before", first), _STARTS)
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


_Held = tuple[str, int, Tensor]  # first name, rank and value


def held(seen: Sequence[Seen], what: str, first: First) -> Iterator[_Held]:
    """Yields the parameters of all ranks, "before" or "after" the step."""
    for of_rank in seen:
        values: Mapping[str, Tensor] = getattr(of_rank, what)
        for name, value in values.items():
            yield first[name], of_rank.rank, value


def copies(
    values: Iterable[_Held], cause: Cause, explained: frozenset[str] | set[str] = frozenset()
) -> Iterator[Finding]:
    """Yields parameters whose copies differ in a bit, except the explained ones."""
    known: dict[str, tuple[int, Tensor]] = {}
    for name, rank, value in values:
        other, there = known.setdefault(name, (rank, value))
        if name not in explained and not torch.equal(value, there.to(value.dtype)):
            yield Finding(*cause, (name,), (other, rank))


def trained(entries: Sequence[Entry], truth: Truth) -> Iterator[Finding]:
    """Yields parameters that train in the pipeline alone, or in the uncut model alone."""
    for entry in entries:
        right = truth.gradients.get(entry.name)
        if entry.is_frozen and right is not None and bool(right.any()):
            yield Finding(*_FROZEN, (entry.name,), entry.ranks)
        elif right is None and entry.gradient is not None and bool(entry.gradient.any()):
            yield Finding(*_TRAINS, (entry.name,), entry.ranks)


def losses(seen: Sequence[Seen], truth: Truth) -> Iterator[Finding]:
    """Yields losses that differ from one process, and from one process on the rank's replica."""
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
    """Yields buffers that differ from one process after the same microbatches."""
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


def several(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Yields ranks that stepped an optimizer or clipped several times in one step."""
    for of_rank in seen:
        for update in of_rank.updates:
            if update.times > 1:
                yield Finding(
                    f"the optimizer stepped {update.times} times in one step",
                    "step it once, after the last microbatch",
                    ranks=(of_rank.rank,),
                )
        clipped = Counter(name for clip in of_rank.clips for name in clip.names)
        if (number := max(clipped.values(), default=0)) > 1:
            yield Finding(
                f"gradients are clipped {number} times in one step",
                "clip them once, after the last microbatch and all reductions",
                ranks=(of_rank.rank,),
            )


class Stepped:
    """The optimizer of one process. It gets the gradients that the pipeline's optimizers got.

    It gets no gradients of one process, because Adam would magnify differences of rounding.

    Args:
        model: The uncut model. It is not changed.
        make: Creates the optimizer.
        dtypes: First name of a parameter -> its dtype in the pipeline.
    """

    def __init__(self, model: nn.Module, make: Stepper, dtypes: Mapping[str, torch.dtype]) -> None:
        own = copy.deepcopy(model).cpu()
        self._parameters = dict(own.named_parameters())
        for name, parameter in self._parameters.items():
            parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
        try:
            self._optimizer = make(own)
        except Exception as error:
            raise PlanError(f"{_ONE_PROCESS}: {in_words(error)}") from error
        if not callable(getattr(self._optimizer, "step", None)):
            raise PlanError(f"{_ONE_PROCESS}: it returned {type(self._optimizer).__name__}")

    def updates(self, seen: Sequence[Seen], first: First) -> dict[str, Tensor]:
        """Steps from the values that the ranks had before; returns updates by first names."""
        before: dict[str, Tensor] = {}
        for name, _, value in held(seen, "before", first):
            before.setdefault(name, value)
        gradients = {
            entry.name: entry.gradient
            for entry in reversed(entries_of(seen, [s.gradients for s in seen], first))
        }
        for name, parameter in self._parameters.items():
            if name in before:
                parameter.data.copy_(before[name])
            gradient = gradients.get(name)
            # A copy, because some optimizers change gradients.
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)
        self._optimizer.step()
        return {
            name: parameter.detach().double() - before[name].double()
            for name, parameter in self._parameters.items()
            if name in before
        }


def updated(seen: Sequence[Seen], first: First) -> dict[Key, Tensor]:
    """Returns the change of each of the pipeline's parameters, by first name and rank."""
    before = {(name, rank): value for name, rank, value in held(seen, "before", first)}
    return {
        (name, (rank,)): value.double() - before[name, rank].double()
        for name, rank, value in held(seen, "after", first)
    }


def other_updates(
    actual: Mapping[Key, Tensor],
    right: Mapping[str, Tensor],
    allowed: Mapping[Key, float],
    explained: set[str],
) -> Iterator[Finding]:
    """Yields updates that differ from one process's optimizer on the same gradients."""
    if _change(actual) and not _change(right):
        yield Finding(
            "one process's optimizer changes no parameter of the uncut model, and the pipeline's "
            "do",
            "make it of the parameters of the model that `optimizer` gets, with the same learning "
            "rate",
        )
        return
    for (name, ranks), update in actual.items():
        norm = max(float(right[name].norm()), float(update.norm()))
        error = float((update - right[name]).norm())
        if name in explained or not error > allowed[name, ranks] * norm:
            continue
        ratio = float((update * right[name]).sum() / right[name].square().sum())
        is_scaled = float((update - ratio * right[name]).norm()) <= allowed[name, ranks] * norm
        words = f"is {ratio:.3g} times as large" if is_scaled else f"differs by {error / norm:.2g}"
        yield Finding(
            "the update is not that of one process's optimizer on the same gradient",
            "give both the same optimizer, options, groups of parameters and learning rate",
            (name,),
            ranks,
            details=(f"that of {name} {words}",),
        )


def _change(updates: Mapping[Any, Tensor]) -> bool:
    return any(bool(update.any()) for update in updates.values())


def why_not_updated(seen: Sequence[Seen]) -> str:
    """Returns why the optimizers' parameters are not known; "" if they are known."""
    updates = [update for of_rank in seen for update in of_rank.updates]
    if not updates:
        return "no optimizer of torch.optim has stepped"
    if any(update.num_unknown for update in updates):
        return "they step tensors that are no parameters of the modules, such as main parameters"
    return ""


def updates(seen: Sequence[Seen], first: First, explained: set[str]) -> Iterator[Finding]:
    """Yields parameters that are wrong after the optimizer's step; adds them to `explained`."""
    for of_rank in seen:
        trained = [n for n, g in of_rank.gradients.items() if g is not None and bool(g.any())]
        if (
            any(update.rate > 0 for update in of_rank.updates)
            and any(first[name] not in explained for name in trained)
            and all(torch.equal(of_rank.before[name], of_rank.after[name]) for name in trained)
        ):
            yield Finding(
                "no parameter of the rank changed in the optimizer's step",
                "give the optimizer the parameters that the stages have now",
                ranks=(of_rank.rank,),
            )
    for of_rank in () if why_not_updated(seen) else seen:
        known = {name for update in of_rank.updates for name in update.names}
        for name, gradient in of_rank.gradients.items():
            has_one = not known.isdisjoint(of_rank.uses[name])
            if gradient is not None and not has_one and first[name] not in explained:
                explained.add(first[name])
                yield Finding(
                    "no optimizer steps the parameter, although it has a gradient",
                    "give the optimizer all parameters that the stages have now",
                    (first[name],),
                    of_rank.groups[name],
                )
    held = dict.fromkeys((first[n], of_rank.groups[n]) for of_rank in seen for n in of_rank.uses)
    changed = {(first[n], of_rank.groups[n]) for of_rank in seen for n in of_rank.changed}
    for name in dict.fromkeys(name for name, _ in held):
        groups = [group for other, group in held if other == name]
        # If only some copies changed, then copies differ, which is a cause of its own.
        if name not in explained and changed.issuperset((name, group) for group in groups):
            explained.add(name)
            yield Finding(
                "the optimizer's step is not that of one process on the same gradient: other code "
                "changes the parameter behind it",
                "look for what changes parameters behind the optimizer",
                (name,),
                tuple(sorted({rank for group in groups for rank in group})),
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
