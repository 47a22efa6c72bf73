"""Parts: what of a loss, and of a gradient, comes from each microbatch.

[Note: parts of a loss] A loss is a function of the model's output for the whole batch. So the part
of a microbatch in a gradient is what flows through its rows of the output, however the loss weighs
them: its terms may have different denominators. A tensor of the output without rows, such as a
balance loss, is a mean over microbatches; if they weigh otherwise in it, the weights are solved
from gradients.

A pipeline may divide the loss otherwise: by the targets of each replica, or of each microbatch; or
compare with the targets of another microbatch. Each of these is a view, with parts of its own.

[Note: a gradient by its parts] The right gradient is a sum of parts: one for each replica,
microbatch, term of the loss and use of a tied parameter. A wrong gradient is fitted by them. The
ratios are a fingerprint of what went wrong: all of them twice as large, zero for all microbatches
but the last, zero for the other replicas, zero for the other use of a tie.

Many ratios fit a small gradient, and parts may be alike. So ratios are free along few dimensions
first: one for all parts, one for each replica, one for each microbatch, and so on, of each view.
All that fit are returned, and the cheapest explanation is taken; see `causes.py`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pipegrad.pipeline.trees import flattened, is_cut

Batch = tuple[Any, Any]  # inputs and target
LossFn = Callable[[Any, Any], Any]
Leaves = list[Any]  # of a model's output
Cell = tuple[int, int]  # replica and index of a microbatch
Cotangents = dict[Cell, Leaves]  # gradients of the loss by an output; None where there is none

WHOLE, REPLICAS, MICROBATCHES = "whole", "replicas", "microbatches"
BEFORE, BEHIND = "targets before", "targets behind"
_IGNORED = -100  # by torch's losses, and Hugging Face's
_SAME = 1e-9  # of the gradients of two views that are one
_KNOWN = 4.0  # factor of what is allowed, for the ratios of another gradient
_MARGIN = 8.0  # of what is allowed over what rounding makes: smaller parts are not distinguished
_LEAST = 1e-9  # of a gradient, below which nothing is distinguished


@dataclass(frozen=True)
class Data:
    """What a step computes with.

    Attributes:
        loss_fn: ``loss_fn(output, target)``, a mean.
        batches: Of each replica, its microbatches.
        whole: The whole batch.
        by_microbatch: Whether the model is to compute each microbatch by itself, also where samples
            of a batch depend on each other.
    """

    loss_fn: LossFn
    batches: Sequence[Sequence[Batch]]
    whole: Batch
    by_microbatch: bool = False

    @property
    def targets(self) -> list[int]:
        """How many elements of each microbatch's target a loss counts, at least 1."""
        return [_counted(target) for of_replica in self.batches for _, target in of_replica]


class Outputs:
    """The outputs of all microbatches, and how the loss depends on them.

    Args:
        model: It is not changed.
        data: Of the step, in the dtypes of the model.
        is_opaque: Whether the loss of a microbatch is taken for its output, because the output
            cannot be taken apart.

    Attributes:
        cells: All microbatches, by replica.
        dims: Of each leaf, the dimension in which microbatches lie side by side, or None.
        weights: Of each leaf, what a microbatch weighs in it if it has no such dimension.
        paths: Of each leaf.
        buffers: Of each replica, after its microbatches; those that the forward changes.
    """

    def __init__(self, model: nn.Module, data: Data, *, is_opaque: bool) -> None:
        self._data, self._is_opaque = data, is_opaque
        self.paths = list[str]()
        self.buffers = list[dict[str, Tensor]]()
        self._rebuilt: Callable[[Leaves], Any]
        self._each = dict[Cell, Leaves]()
        for replica, of_replica in enumerate(data.batches):
            own = copy.deepcopy(model)
            first = {name: buffer.clone() for name, buffer in own.named_buffers()}
            for index, one in enumerate(of_replica):
                leaves = self.run(own, one)
                self._each[replica, index] = [x.detach() if is_real(x) else x for x in leaves]
            buffers = own.named_buffers()
            self.buffers.append({n: b for n, b in buffers if not torch.equal(b, first[n])})
        self.cells = [*self._each]
        whole = self.run(copy.deepcopy(model), data.whole)
        pairs = zip(self._each[0, 0], whole, strict=True)
        self.dims = [_dim(own, there, len(self.cells)) for own, there in pairs]
        self.weights = [dict.fromkeys(self.cells, 1 / len(self.cells)) for _ in whole]

    def run(self, model: nn.Module, batch: Batch) -> Leaves:
        """Returns the leaves of a model's output for a batch."""
        output = output_of(model, batch[0])
        if self._is_opaque:
            output = loss_of(self._data.loss_fn(output, batch[1]))
        leaves, self._rebuilt = flattened(output)
        self.paths = [path for path, _ in leaves]
        return [leaf for _, leaf in leaves]

    def loss(self, cells: Sequence[Cell], target: Any, live: Mapping[Cell, Leaves]) -> Tensor:  # noqa: ANN401
        """Returns the loss of some microbatches together, with `live` leaves if there are some."""
        each = [live.get(cell, self._each[cell]) for cell in cells]
        output = self._rebuilt(
            [self._joined(n, cells, own) for n, own in enumerate(zip(*each, strict=True))]
        )
        return output if self._is_opaque else loss_of(self._data.loss_fn(output, target))

    def _joined(self, leaf: int, cells: Sequence[Cell], own: Sequence[Any]) -> Any:  # noqa: ANN401
        dim = self.dims[leaf]
        if dim is not None:
            return torch.cat(list(own), dim)
        if not is_real(own[0]):
            return own[0]
        weights = [self.weights[leaf][cell] for cell in cells]
        # Among themselves, microbatches weigh as in the whole.
        total = sum(weights) if len(cells) < len(self.cells) else 1.0
        return sum(w / total * x for w, x in zip(weights, own, strict=True))

    def flow(self, cells: Sequence[Cell], target: Any) -> tuple[float, Cotangents]:  # noqa: ANN401
        """Returns the loss of some microbatches together, and its gradients by their outputs."""
        live = {
            cell: [x.detach().requires_grad_() if is_real(x) else x for x in self._each[cell]]
            for cell in cells
        }
        wanted = [x for cell in cells for x in live[cell] if is_real(x)]
        with torch.enable_grad():
            loss = self.loss(cells, target, live)
            gathered = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        cotangents = {
            cell: [next(gathered) if is_real(x) else None for x in live[cell]] for cell in cells
        }
        for own in cotangents.values():  # 0 / 0 where there are no targets
            own[:] = [None if g is None else g.nan_to_num(0.0) for g in own]
        return float(loss.detach()), cotangents

    def weighed(self, terms: Sequence[int], columns: Tensor, rest: Tensor) -> Outputs:
        """Returns the outputs with solved weights of microbatches in leaves that have no rows.

        Args:
            terms: Leaves that the loss depends on.
            columns: Parts of gradients, ``(replicas, microbatches, terms, numel)``.
            rest: What is missing to the gradients of the whole batch.
        """
        gathered = copy.copy(self)
        gathered.weights = list(self.weights)
        free = [at for at, leaf in enumerate(terms) if self.dims[leaf] is None]
        # The smallest correction: parts may be alike, as in two equal microbatches.
        flat = columns[:, :, free].flatten(0, 2)
        factors = 1 + (torch.linalg.pinv(flat.T, rtol=1e-9) @ rest).reshape(-1, len(free))
        for at, column in zip(free, factors.T.tolist(), strict=True):
            own = zip(self.cells, column, strict=True)
            gathered.weights[terms[at]] = {c: self.weights[terms[at]][c] * f for c, f in own}
        return gathered

    def like(self, model: nn.Module, data: Data) -> Outputs:
        """Returns outputs of the same weights, of a model and a step in other dtypes."""
        like = Outputs(model, data, is_opaque=self._is_opaque)
        like.weights = self.weights
        return like


@dataclass(frozen=True)
class Views:
    """Ways to divide the loss among microbatches.

    Attributes:
        by_name: Name -> gradients of the loss by the outputs of microbatches. `WHOLE` is the right
            one. Others are there if they differ from it, and from each other.
        terms: Leaves of the output that the loss depends on.
        losses: Of each replica and microbatch, ``(replicas, microbatches)``.
        own: Of the rows of each replica, ``(replicas,)``.
        loss: Of all.
    """

    by_name: dict[str, Cotangents]
    terms: list[int]
    losses: Tensor
    own: Tensor
    loss: float


def views_of(outputs: Outputs, data: Data) -> Views:
    """Returns the ways to divide a loss."""
    cells, shape = outputs.cells, (len(data.batches), len(data.batches[0]))
    by_replica = [[cell for cell in cells if cell[0] == r] for r in range(shape[0])]

    def divided(groups: Sequence[Sequence[Cell]], by: int = 0) -> tuple[list[float], Cotangents]:
        """Returns losses of groups and the gradients of their mean; `by` shifts the targets."""
        losses, every = list[float](), Cotangents()
        for group in groups:
            wanted = [data.batches[r][(m - by) % shape[1]][1] for r, m in group]
            loss, gathered = outputs.flow(group, _side_by_side(wanted, data.whole[1]))
            losses.append(loss)
            every |= {
                c: [g if g is None else g / len(groups) for g in own] for c, own in gathered.items()
            }
        return losses, every

    [loss], whole = divided([cells])
    own, replicas = divided(by_replica)
    losses, microbatches = divided([[cell] for cell in cells])
    every = {WHOLE: whole, REPLICAS: replicas, MICROBATCHES: microbatches}
    for name, by in ((BEFORE, 1), (BEHIND, -1)):
        try:
            every[name] = divided([cells], by)[1]
        except (RuntimeError, TypeError, ValueError):  # targets that fit their own inputs alone
            continue
    by_name = dict[str, Cotangents]()
    for name, view in every.items():
        if not any(_is_same(view, other) for other in by_name.values()):
            by_name[name] = view
    terms = [
        leaf
        for leaf in range(len(outputs.dims))
        if any(own[leaf] is not None and bool(own[leaf].any()) for own in whole.values())
    ]
    return Views(
        by_name=by_name,
        terms=terms,
        losses=torch.tensor(losses, dtype=torch.float64).reshape(shape).nan_to_num(0.0),
        own=torch.tensor(own, dtype=torch.float64),
        loss=loss,
    )


def _counted(target: Any) -> int:  # noqa: ANN401 - a tree
    leaves = [leaf for _, leaf in flattened(target)[0] if isinstance(leaf, Tensor)]
    return max(1, sum(int((leaf != _IGNORED).sum()) for leaf in leaves))


def output_of(model: nn.Module, inputs: Any) -> Any:  # noqa: ANN401 - as the model
    """Returns what a model makes of inputs: by name, by position, or one tensor."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def loss_of(result: Any) -> Tensor:  # noqa: ANN401 - of the caller
    """Returns the loss of what a loss function returns: it, or the first of a tuple."""
    loss = result[0] if isinstance(result, tuple | list) else result
    assert isinstance(loss, Tensor)
    return loss


def is_real(leaf: object) -> TypeGuard[Tensor]:
    """Returns whether a leaf is a tensor of real numbers, which may have gradients."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _dim(own: Any, whole: Any, number: int) -> int | None:  # noqa: ANN401 - leaves
    """Returns the dimension in which so many microbatches make a whole; None if there is none."""
    if not isinstance(own, Tensor) or own.shape == whole.shape:
        return None
    dims = [d for d, (a, b) in enumerate(zip(own.shape, whole.shape, strict=True)) if a != b]
    if len(dims) > 1 or own.shape[dims[0]] * number != whole.shape[dims[0]]:
        raise ValueError(f"{number} outputs {tuple(own.shape)} do not make {tuple(whole.shape)}")
    return dims[0]


def _side_by_side(trees: Sequence[Any], whole: Any) -> Any:  # noqa: ANN401 - trees
    """Returns the targets of some microbatches together; what is not cut in `whole` stays."""
    leaves, rebuilt = flattened(whole)
    each: list[Leaves] = [[leaf for _, leaf in flattened(tree)[0]] for tree in trees]
    return rebuilt(
        [
            torch.cat([own[n] for own in each])
            if is_cut(leaf) and each[0][n].shape != leaf.shape
            else each[0][n]
            for n, (_, leaf) in enumerate(leaves)
        ]
    )


def _is_same(view: Cotangents, other: Cotangents) -> bool:
    pairs = [
        (a, b)
        for cell, own in view.items()
        for a, b in zip(own, other[cell], strict=True)
        if a is not None and b is not None
    ]
    squares = sum(float((a - b).square().sum()) for a, b in pairs)
    return squares <= _SAME**2 * sum(float(b.square().sum()) for _, b in pairs)


@dataclass(frozen=True)
class Fit:
    """A gradient as a sum of parts.

    Attributes:
        view: Whose parts.
        ratios: Of parts, ``(replicas, microbatches, terms, uses)``. 1 is right; NaN where the
            gradient has no share of a part.
        before: Ratio of the gradient of the step before. 0 is right.
        num_free: How many numbers were solved.
        is_sure: Whether fewer numbers were solved than the gradient has elements. Else any gradient
            would fit.
    """

    view: str
    ratios: Tensor
    before: float = 0.0
    num_free: int = 1
    is_sure: bool = True


def fits(
    gradient: Tensor,
    parts: Mapping[str, Tensor],
    allowed: float,
    before: Tensor | None = None,
    known: Sequence[Fit] = (),
) -> list[Fit]:
    """Returns sums of parts that make a gradient.

    Args:
        gradient: Of the pipeline, of any dtype.
        parts: View -> parts, ``(replicas, microbatches, terms, uses, numel)``.
        allowed: Norm of the rounding of the gradient.
        before: The gradient that this rank had in the step before, if there was one.
        known: Of other gradients of the rank. If one of them makes this one, too, it is taken.
    """
    actual = gradient.double().reshape(-1)
    solved = {view: _Solved(actual, of_view, before) for view, of_view in parts.items()}
    allowed = max(allowed, _LEAST * float(actual.norm()))
    shared = [
        replace(fit, ratios=fit.ratios.expand(parts[fit.view].shape[:4]), num_free=0)
        for fit in known
        if fit.view in parts
        and fit.ratios.shape[3] in {1, parts[fit.view].shape[3]}
        and (before is not None or not fit.before)
        and solved[fit.view].rest_of(fit) <= _KNOWN * allowed
    ]
    return shared or [fit for view, one in solved.items() for fit in one.fits(view, allowed)]


class _Solved:
    """A gradient beside the parts of a view, in as few numbers as they have directions.

    Args:
        actual: The gradient, ``(numel,)``.
        parts: ``(replicas, microbatches, terms, uses, numel)``.
        before: The gradient of the step before.
    """

    def __init__(self, actual: Tensor, parts: Tensor, before: Tensor | None) -> None:
        self._shape = parts.shape[:4]
        columns = parts.double().flatten(0, 3)
        self._numel = int(columns.any(0).sum())
        more = [] if before is None else [before.double().reshape(-1)]
        every = torch.stack([*columns, *more, actual], -1)
        self._reduced = reduced = torch.linalg.qr(every, mode="r").R
        self._columns = reduced[:, : len(columns)]
        self._before = None if before is None else reduced[:, -2]
        self._actual = reduced[:, -1]

    def rest_of(self, fit: Fit) -> float:
        """Returns the norm of what the ratios of another gradient leave."""
        ratios = fit.ratios.nan_to_num(1.0).expand(self._shape).reshape(-1)
        rest = self._actual - self._columns @ ratios
        if fit.before and self._before is not None:
            rest = rest - fit.before * self._before
        return float(rest.norm())

    def fits(self, view: str, allowed: float) -> Iterator[Fit]:
        """Yields ratios that leave no more than what is allowed."""
        wide = [dim for dim, size in enumerate(self._shape) if size > 1]
        stale = (False, True) if self._before is not None else (False,)
        # What all numbers together do not make, no fewer ones do.
        every = self._reduced[:, :-1]
        rest = self._actual - every @ (torch.linalg.pinv(every, rtol=_LEAST) @ self._actual)
        if float(rest.norm()) > allowed:
            return
        free = [s for number in range(len(wide) + 1) for s in itertools.combinations(wide, number)]
        known = list[tuple[set[int], bool]]()
        for dims, is_stale in itertools.product(free, stale):
            # More numbers than suffice say the same.
            if any(fewer <= set(dims) and was_stale <= is_stale for fewer, was_stale in known):
                continue
            fit = self._solved(view, dims, allowed, is_stale=is_stale)
            if fit is not None:
                known.append((set(dims), is_stale))
                yield fit

    def _solved(
        self, view: str, dims: Sequence[int], allowed: float, *, is_stale: bool
    ) -> Fit | None:
        """Returns ratios that differ along these dimensions alone, if they make the gradient."""
        others = [dim for dim in range(4) if dim not in dims]
        columns = self._columns.unflatten(1, self._shape)
        if others:
            columns = columns.sum([dim + 1 for dim in others], keepdim=True)
        shape, columns = columns.shape[1:], columns.flatten(1)
        number = shape.numel()
        alike = columns.sum(1, keepdim=True)
        if is_stale and self._before is not None:
            columns = torch.cat([columns, self._before[:, None]], 1)
            alike = torch.cat([alike, self._before[:, None]], 1)
        # One scale for all comes first. The pseudoinverse gives the smallest correction of it, and
        # none of a part without a share.
        first = torch.linalg.pinv(alike, rtol=_LEAST) @ self._actual
        ratios = torch.cat([first[:1].expand(number), first[1:]])
        least = allowed / _MARGIN
        inverse = torch.linalg.pinv(columns, atol=least, rtol=0.0)
        ratios = ratios + inverse @ (self._actual - columns @ ratios)
        if float((self._actual - columns @ ratios).norm()) > allowed:
            return None
        has_share = columns[:, :number].norm(dim=0) > least
        return Fit(
            view,
            ratios[:number].where(has_share, torch.nan).reshape(shape).expand(self._shape),
            float(ratios[-1]) if is_stale else 0.0,
            columns.shape[1],
            columns.shape[1] < self._numel,
        )
