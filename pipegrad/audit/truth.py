"""Truth: what one process computes on the uncut model, whole and in parts, in float64.

[Note: what is right] The right gradient is that of the loss of the whole batch, computed at once.
Its parts, one for each microbatch, say what a wrong gradient is made of; see `parts.py`. If no
parts make the whole, samples depend on each other, as in BatchNorm. A pipeline that computes each
microbatch by itself has another gradient then. Only the caller may say that it is right
nevertheless, by ``by_microbatch``.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipegrad.audit.loss_parts import (
    WHOLE,
    Data,
    Outputs,
    is_real,
    loss_of,
    output_of,
    views_of,
)
from pipegrad.errors import PlanError, in_words
from pipegrad.pipeline.trees import flattened, is_cut

_SAMPLED = 16384  # elements of a gradient that are looked at part by part
_SOLVED_FROM = 4096  # elements of gradients suffice to solve the weights
_LOSS_SCALE = 1024.0  # of float16
_COUPLED = 1e-5  # of a gradient; float32 inside of a model leaves less


_Uses = Mapping[str, Sequence[str]]  # first name of a parameter -> all its names


@dataclass(frozen=True)
class Truth:
    """One step of one process.

    Attributes:
        loss: Of the whole batch.
        losses: Of each replica and microbatch, ``(replicas, microbatches)``.
        own: Of the rows of each replica, ``(replicas,)``.
        gradients: Name -> gradient. A tied parameter has the first of its names.
        uses: First name of each parameter -> all its names.
        terms: Of the output's tensors that the loss depends on, their paths.
        buffers: Of each replica, after its microbatches; those that the forward changes.
        is_coupled: Whether samples of a batch depend on each other, so that no parts make the
            gradient.
        parts: Of first names, view -> elements of their gradients (`sampled`) by replica,
            microbatch, term and use, ``(replicas, microbatches, terms, uses, numel)``.
        noise: Name -> error of one process that computes in the dtype of the pipeline, relative.
        loss_error: The same of the loss.
    """

    loss: float
    losses: Tensor
    own: Tensor
    gradients: dict[str, Tensor]
    uses: dict[str, tuple[str, ...]]
    terms: tuple[str, ...]
    buffers: list[dict[str, Tensor]]
    is_coupled: bool
    parts: Callable[[Sequence[str]], dict[str, dict[str, Tensor]]]
    noise: dict[str, float]
    loss_error: float = 0.0


def computed(
    model: nn.Module,
    data: Data,
    dtypes: Mapping[str, torch.dtype],
    autocast: torch.dtype | None = None,
) -> Truth:
    """Returns what one process computes, as `compute` does; refuses what it cannot compare with.

    Raises:
        PlanError: If the model cannot be computed in float64, draws random numbers, or has a loss
            that is not finite.
    """
    try:
        _check_random(model, data)
        return compute(model, data, dtypes, autocast)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"one process cannot compute the uncut model and its loss in float64: "
            f"{in_words(error)}; take casts to fixed dtypes out of it, or audit a like model"
        ) from error


def _check_random(model: nn.Module, data: Data) -> None:
    """Checks that two forwards have one loss, and that it is finite."""
    inputs, target = cast(data.whole, torch.float64)
    with torch.no_grad():
        first, second = (
            float(loss_of(data.loss_fn(output_of(copy.deepcopy(model), inputs), target)))
            for _ in range(2)
        )
    if not math.isfinite(first):
        raise PlanError(f"the loss of one process is {first}: look at the batch and the weights")
    if first != second:
        raise PlanError(
            f"two forwards of the uncut model on one batch differ, {first:.6g} and {second:.6g}: "
            f"it draws random numbers (stochastic depth, noise, masks of its own). Switch them off "
            f"for the audit; dropout of torch is switched off already"
        )


def compute(
    model: nn.Module,
    data: Data,
    dtypes: Mapping[str, torch.dtype],
    autocast: torch.dtype | None = None,
) -> Truth:
    """Returns what one process computes."""
    uses = names_by_use(model)
    loose, exact = _untied(model, uses), _data_in(data, torch.float64)
    # A forward of the whole batch would change buffers, such as running means.
    loss, totals = _gradients(copy.deepcopy(loose), exact)
    gradients = {name: _sum(totals, names) for name, names in uses.items() if names[0] in totals}
    uses = {first: names for first, names in uses.items() if first in gradients}
    split, is_coupled = _split(loose, exact, gradients, uses)
    views = split.views
    if is_coupled and data.by_microbatch:
        loss, gradients = views.loss, split.accumulated(uses)
    truth = Truth(
        loss=loss,
        losses=views.losses,
        own=views.own,
        gradients=gradients,
        uses=uses,
        terms=tuple(split.outputs.paths[leaf] for leaf in views.terms),
        buffers=split.outputs.buffers,
        is_coupled=is_coupled and not data.by_microbatch,
        parts=lambda names: split.parts({n: uses[n] for n in names}),
        noise={},
    )
    noise, rounded = _noise(model, data, split.outputs, truth, dtypes, autocast=autocast)
    return replace(
        truth, noise=noise, loss_error=abs(rounded - truth.loss) / abs(truth.loss or 1.0)
    )


class _Split:
    """A step microbatch by microbatch: what each one adds to a gradient, in each view.

    Args:
        model: With a parameter for each use of a tied one. It is not changed.
        data: Of the step.
        outputs: Of its microbatches.
    """

    def __init__(self, model: nn.Module, data: Data, outputs: Outputs) -> None:
        self._model, self._data, self.outputs = model, data, outputs
        self.views = views_of(outputs, data)

    def parts(self, uses: _Uses, *, only: str | None = None) -> dict[str, dict[str, Tensor]]:
        """Returns gradients by name, view, replica, microbatch, term and use."""
        names = list(self.views.by_name) if only is None else [only]
        stacks = {name: {view: list[Tensor]() for view in names} for name in uses}
        for view, by_term in self._flowed(uses, names, sampled):
            for name, every in uses.items():
                # A use that cannot be untied is counted with the first one.
                zero = torch.zeros_like(by_term[0][name])
                rows = [torch.stack([term.get(use, zero) for use in every]) for term in by_term]
                stacks[name][view].append(torch.stack(rows))
        shape = len(self._data.batches), len(self._data.batches[0])
        return {
            name: {view: torch.stack(rows).unflatten(0, shape) for view, rows in of_name.items()}
            for name, of_name in stacks.items()
        }

    def accumulated(self, uses: _Uses) -> dict[str, Tensor]:
        """Returns the sums of all parts of the whole."""
        total = dict[str, Tensor]()
        for _, by_term in self._flowed(uses, [WHOLE], lambda gradient: gradient):
            for of_term, (first, every) in itertools.product(by_term, uses.items()):
                part = _sum(of_term, every)
                total[first] = total[first] + part if first in total else part
        return total

    def _flowed(
        self, uses: _Uses, views: Sequence[str], take: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, list[dict[str, Tensor]]]]:
        """Yields view and, by term, gradients of the parameters: for each microbatch."""
        wanted = {use for every in uses.values() for use in every}
        for replica, of_replica in enumerate(self._data.batches):
            model = copy.deepcopy(self._model)
            trained = {n: p for n, p in model.named_parameters() if n in wanted}
            for index, one in enumerate(of_replica):
                with torch.enable_grad():
                    leaves = self.outputs.run(model, one)
                for view in views:
                    cotangents = self.views.by_name[view][replica, index]
                    by_term = []
                    for term in self.views.terms:
                        cotangent, leaf = cotangents[term], leaves[term]
                        if cotangent is None or not leaf.requires_grad:
                            grads = [torch.zeros_like(p) for p in trained.values()]
                        else:
                            grads = list(
                                torch.autograd.grad(
                                    leaf, list(trained.values()), cotangent,
                                    retain_graph=True, materialize_grads=True,
                                )
                            )  # fmt: skip
                        by_term.append(
                            {n: take(_dense(g)) for n, g in zip(trained, grads, strict=True)}
                        )
                    yield view, by_term


def _split(
    model: nn.Module, data: Data, gradients: Mapping[str, Tensor], uses: _Uses
) -> tuple[_Split, bool]:
    """Returns a step by microbatches, and whether their parts miss the gradient of the whole."""
    few = {name: uses[name] for name in _few(gradients)}
    right = torch.cat([sampled(gradients[name]) for name in few])
    first: _Split | None = None
    for is_opaque in (False, True):
        try:
            split = _Split(model, data, Outputs(model, data, is_opaque=is_opaque))
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
            if is_opaque and first is None:
                raise
            continue  # the loss function needs more than tensors, or they have no rows
        first = first or split
        for _ in range(2):
            parts, outputs, terms = split.parts(few, only=WHOLE), split.outputs, split.views.terms
            columns = torch.cat([parts[name][WHOLE].sum(-2) for name in few], -1)
            rest = right - columns.sum((0, 1, 2))
            if float(rest.norm()) <= _COUPLED * float(right.norm()):
                return split, False
            # By microbatches means are even, also where other weights make the whole.
            if data.by_microbatch or all(outputs.dims[leaf] is not None for leaf in terms):
                break
            split = _Split(model, data, outputs.weighed(terms, columns, rest))
    assert first is not None
    return first, True


def names_by_use(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the first name of each parameter -> all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: (first, *others) for first, *others in names.values()}


def leaves_cut(value: Any, number: int) -> list[Any]:  # noqa: ANN401 - a tree
    """Returns a tree of tensors as so many trees, cut along their first dimension.

    Tensors of one row, and what is no tensor, go whole into each.
    """
    leaves, rebuilt = flattened(value)
    most = max((leaf.shape[0] for _, leaf in leaves if is_cut(leaf)), default=1)
    cut = [
        [*leaf.tensor_split(number)]
        if is_cut(leaf) and leaf.shape[0] == most > 1
        else [leaf] * number
        for _, leaf in leaves
    ]
    return [rebuilt([of_leaf[index] for of_leaf in cut]) for index in range(number)]


def cast(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401 - a tree
    """Returns a tree on CPU in which every real number of a tensor has a dtype."""
    leaves, rebuilt = flattened(value)
    cpu = [x.detach().cpu() if isinstance(x, Tensor) else x for _, x in leaves]
    return rebuilt([x.to(dtype) if is_real(x) else x for x in cpu])


def _data_in(data: Data, dtype: torch.dtype) -> Data:
    batches = [[cast(one, dtype) for one in of_replica] for of_replica in data.batches]
    return replace(data, batches=batches, whole=cast(data.whole, dtype))


def _gradients(model: nn.Module, data: Data) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss of the whole batch, and gradients by name."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        inputs, target = data.whole
        loss = loss_of(data.loss_fn(output_of(model, inputs), target))
        result = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    return float(loss.detach()), dict(zip(trained, map(_dense, result), strict=True))


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _untied(model: nn.Module, uses: Mapping[str, Sequence[str]]) -> nn.Module:
    """Returns a copy of a model in which each name has a parameter of its own."""
    loose = copy.deepcopy(model)
    for first, *others in uses.values():
        for name in others:
            home, _, own = name.rpartition(".")
            parameter = loose.get_parameter(first)
            again = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            # A module that is used twice has two names for one parameter, and cannot have two.
            if loose.get_parameter(name) is parameter:
                setattr(loose.get_submodule(home), own, again)
    return loose


def _sum(gradients: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.stack([gradients[name] for name in names if name in gradients]).sum(0)


def sampled(gradient: Tensor) -> Tensor:
    """Returns about so many elements as suffice to tell parts apart, the same ones of each part."""
    flat = gradient.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)]


def _few(gradients: Mapping[str, Tensor]) -> list[str]:
    """Returns the smallest parameters that suffice to solve the weights, at least two."""
    few, numel = list[str](), 0
    for name, value in sorted(gradients.items(), key=lambda item: item[1].numel()):
        if numel >= _SOLVED_FROM and len(few) > 1:
            break
        few.append(name)
        numel += sampled(value).numel()
    return few


def _noise(
    model: nn.Module,
    data: Data,
    outputs: Outputs,
    truth: Truth,
    dtypes: Mapping[str, torch.dtype],
    *,
    autocast: torch.dtype | None,
) -> tuple[dict[str, float], float]:
    """Returns relative errors of one process that computes as the pipeline does, and its loss."""
    same = copy.deepcopy(model)
    kinds = set(dtypes.values())
    for name, parameter in same.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, torch.float64))
    [kind] = kinds if len(kinds) == 1 else [torch.float32]
    for buffer in same.buffers():
        buffer.data = buffer.data.to(kind) if buffer.is_floating_point() else buffer.data
    rounded = _data_in(data, kind)
    # Small gradients of float16 are 0 without a scale of the loss, which trainings have, too.
    scale = _LOSS_SCALE if torch.float16 in kinds else 1.0
    try:
        is_cast = autocast is not None
        with torch.autocast("cpu", autocast, enabled=is_cast), torch.enable_grad():
            loss = math.nan
            for of_part in _losses(same, rounded, outputs, truth):
                loss = float(of_part.detach())
                (of_part * scale).backward()
    except (RuntimeError, TypeError, ValueError):
        # It cannot compute in these dtypes as one process: nothing more than rounding is allowed.
        return {}, truth.loss
    parameters = dict(same.named_parameters())
    result = {}
    for name, right in truth.gradients.items():
        gradient = parameters[name].grad
        if gradient is not None:
            result[name] = relative(_dense(gradient).double() / scale - right, right)
    return result, loss


def _losses(model: nn.Module, data: Data, outputs: Outputs, truth: Truth) -> Iterator[Tensor]:
    """Yields the loss of the whole batch for each microbatch, whose rows alone have gradients."""
    if truth.is_coupled:
        inputs, target = data.whole
        yield loss_of(data.loss_fn(output_of(model, inputs), target))
        return
    own = outputs.like(model, data)
    for cell, one in zip(own.cells, itertools.chain(*data.batches), strict=True):
        yield own.loss(own.cells, data.whole[1], {cell: own.run(model, one)})


def relative(difference: Tensor, right: Tensor) -> float:
    """Returns the norm of a difference by that of what is right."""
    tiny = torch.finfo(torch.float64).tiny
    return float(difference.norm() / right.norm().clamp_min(tiny))
