"""Truth: what one process computes on the uncut model, whole and in parts, in float64.

[Note: what is right] The right gradient is that of the loss of the whole batch. If the loss is a
mean over targets that count differently, as with ``ignore_index``, microbatches and replicas have
different weights in it. The weights are solved from gradients: whole = sum of weight x part.

If no weights do that, samples depend on each other, as in BatchNorm. Then a microbatch is computed
by itself in any pipeline, and the mean over microbatches and replicas is right.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipegrad.errors import PlanError, in_words
from pipegrad.pipeline.batch.trees import flattened, is_cut

Batch = tuple[Any, Any]  # inputs and target
LossFn = Callable[[Any, Any], Any]

_SAMPLED = 16384  # elements of a gradient that are looked at part by part
_SOLVED_FROM = 4096  # elements of gradients suffice to solve the weights
_LOSS_SCALE = 1024.0  # of float16
_COUPLED = 1e-5  # of a gradient; float32 inside of a model leaves less


@dataclass(frozen=True)
class Truth:
    """One step of one process.

    Attributes:
        loss: Of the whole batch.
        losses: Of each replica and microbatch, ``(replicas, microbatches)``.
        gradients: Name -> gradient. A tied parameter has the first of its names.
        loss_error: Of one process that computes in the dtype of the pipeline, relative.
        noise: Name -> error of one process that computes in the dtype of the pipeline, relative.
        uses: First name of each parameter -> all its names.
        weights: Of each replica and microbatch in the whole, ``(replicas, microbatches)``.
        buffers: Of each replica, after its microbatches; those that the forward changes.
        is_coupled: Whether samples of a batch depend on each other.
        parts: Of first names, elements of their gradients (`sampled`) by replica, microbatch and
            use, ``(replicas, microbatches, uses, numel)``.
    """

    loss: float
    losses: Tensor
    gradients: dict[str, Tensor]
    noise: dict[str, float]
    uses: dict[str, tuple[str, ...]]
    weights: Tensor
    buffers: list[dict[str, Tensor]]
    is_coupled: bool
    parts: Callable[[Sequence[str]], dict[str, Tensor]]
    loss_error: float = 0.0


@dataclass(frozen=True)
class Data:
    """What a step computes with.

    Attributes:
        loss_fn: ``loss_fn(output, target)``, a mean.
        batches: Of each replica, its microbatches.
        whole: The whole batch.
    """

    loss_fn: LossFn
    batches: Sequence[Sequence[Batch]]
    whole: Batch


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
    found = []
    for _ in range(2):
        inputs, target = doubled(data.whole)
        with torch.no_grad():
            found.append(
                float(loss_of(data.loss_fn(output_of(copy.deepcopy(model), inputs), target)))
            )
    first, second = found
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
    """Returns what one process computes.

    Args:
        model: The uncut model, in float64. It is not changed.
        data: Of the step.
        dtypes: Of the pipeline's parameters, by name.
        autocast: In which the pipeline computes, if that is another dtype.
    """
    loss_fn, batches = data.loss_fn, data.batches
    uses = names_by_use(model)
    loose = _untied(model, uses)
    # A forward of the whole batch would change buffers, such as running means.
    loss, totals = _gradients(copy.deepcopy(loose), loss_fn, doubled(data.whole))
    gradients = {name: _sum(totals, names) for name, names in uses.items() if names[0] in totals}
    few = _few(gradients)
    losses, buffers, parts = [], [], []
    for of_replica in batches:
        own = copy.deepcopy(loose)
        first = {name: buffer.clone() for name, buffer in own.named_buffers()}
        found = [_gradients(own, loss_fn, doubled(one), few, uses) for one in of_replica]
        losses.append([value for value, _ in found])
        parts.append([torch.cat([sampled(_sum(g, uses[n])) for n in few]) for _, g in found])
        after = dict(own.named_buffers())
        buffers.append({n: b for n, b in after.items() if not torch.equal(b, first[n])})
    columns = torch.stack([torch.stack(row) for row in parts])
    columns = columns.nan_to_num(0.0)  # a microbatch without targets has a loss of 0 / 0
    right = torch.cat([sampled(gradients[name]) for name in few])
    weights = _weights(columns, right)
    rest = (weights[..., None] * columns).sum((0, 1)) - right
    is_coupled = float(rest.norm()) > _COUPLED * float(right.norm())
    if is_coupled:
        weights = _of_outputs(loose, data, weights.shape)
        gradients = _accumulated(loose, loss_fn, batches, weights, uses)
    each = torch.tensor(losses, dtype=torch.float64).nan_to_num(0.0)
    truth = Truth(
        loss=float((weights * each).sum()) if is_coupled else loss,
        losses=each,
        gradients=gradients,
        noise={},
        uses={first: names for first, names in uses.items() if first in gradients},
        weights=weights,
        buffers=buffers,
        is_coupled=is_coupled,
        parts=lambda names: _parts(loose, loss_fn, batches, names, uses),
    )
    noise, rounded = _noise(model, data, truth, dtypes, autocast)
    return replace(
        truth, noise=noise, loss_error=abs(rounded - truth.loss) / abs(truth.loss or 1.0)
    )


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


def doubled(batch: Batch) -> Batch:
    """Returns a batch on CPU in which every number is a float64."""
    return _each(batch[0], _double), _each(batch[1], _double)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - a tree
    leaves, rebuilt = flattened(value)
    return rebuilt([change(x) if isinstance(x, Tensor) else x for _, x in leaves])


def _double(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.double() if tensor.is_floating_point() else tensor


def output_of(model: nn.Module, inputs: Any) -> Any:  # noqa: ANN401 - as the model
    """Returns what a model makes of inputs: by name, by position, or one tensor."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _gradients(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    names: Sequence[str] | None = None,
    uses: Mapping[str, Sequence[str]] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss, and gradients by name; with `names`, of all uses of these alone."""
    wanted = None if names is None or uses is None else {x for n in names for x in uses[n]}
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (wanted is None or name in wanted)
    }
    with torch.enable_grad():
        loss = loss_of(loss_fn(output_of(model, batch[0]), batch[1]))
        found = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        values = [value.to_dense() if value.is_sparse else value for value in found]
    return float(loss.detach()), dict(zip(trained, values, strict=True))


def loss_of(result: Any) -> Tensor:  # noqa: ANN401 - of the caller
    """Returns the loss of what a loss function returns: it, or the first of a tuple."""
    loss = result[0] if isinstance(result, tuple | list) else result
    assert isinstance(loss, Tensor)
    return loss


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


def _of_outputs(model: nn.Module, data: Data, shape: torch.Size) -> Tensor:
    """Returns the weights that parts have in the loss of the whole, by gradients of the output.

    Samples that depend on each other do so inside of the model, and not in the loss.
    """
    equal = torch.full(shape, 1 / shape.numel(), dtype=torch.float64)
    inputs, target = doubled(data.whole)
    with torch.no_grad():
        output = output_of(copy.deepcopy(model), inputs)
    if not isinstance(output, Tensor) or not is_cut(output):
        return equal
    rows = output.detach().tensor_split(shape.numel())
    targets = leaves_cut(target, shape.numel())

    def gradient(values: Tensor, wanted: Any) -> Tensor:  # noqa: ANN401 - a tree
        leaf = values.clone().requires_grad_()
        with torch.enable_grad():
            loss = loss_of(data.loss_fn(leaf, wanted))
            return torch.autograd.grad(loss, leaf)[0].nan_to_num(0.0)

    whole = gradient(output.detach(), target).tensor_split(shape.numel())
    parts = [gradient(one, wanted) for one, wanted in zip(rows, targets, strict=True)]
    products = [
        (of_whole * part).sum() / part.square().sum().clamp_min(torch.finfo(part.dtype).tiny)
        for of_whole, part in zip(whole, parts, strict=True)
    ]
    return torch.stack(products).reshape(shape)


def _few(gradients: Mapping[str, Tensor]) -> list[str]:
    """Returns the smallest parameters that suffice to solve the weights, at least two."""
    few, numel = list[str](), 0
    for name, value in sorted(gradients.items(), key=lambda item: item[1].numel()):
        if numel >= _SOLVED_FROM and len(few) > 1:
            break
        few.append(name)
        numel += sampled(value).numel()
    return few


def _weights(columns: Tensor, right: Tensor) -> Tensor:
    """Returns the weights ``(replicas, microbatches)`` that make parts the whole."""
    flat = columns.flatten(0, 1)
    # The smallest correction of equal weights: parts may be alike, as in two equal microbatches.
    equal = torch.full((len(flat),), 1 / len(flat), dtype=flat.dtype)
    inverse = torch.linalg.pinv(flat.T, rtol=1e-9)
    solved: Tensor = equal + inverse @ (right - equal @ flat)
    return solved.reshape(columns.shape[:2])


def _accumulated(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Sequence[Batch]],
    weights: Tensor,
    uses: Mapping[str, Sequence[str]],
) -> dict[str, Tensor]:
    """Returns the weighted sum of the gradients of all microbatches."""
    total = dict[str, Tensor]()
    for replica, of_replica in enumerate(batches):
        own = copy.deepcopy(model)
        for index, one in enumerate(of_replica):
            _, found = _gradients(own, loss_fn, doubled(one))
            for first, names in uses.items():
                if names[0] in found:
                    part = weights[replica, index] * _sum(found, names)
                    total[first] = total[first] + part if first in total else part
    return total


def _parts(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Sequence[Batch]],
    names: Sequence[str],
    uses: Mapping[str, Sequence[str]],
) -> dict[str, Tensor]:
    """Returns gradients by replica, microbatch and use."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for of_replica in batches:
        own = copy.deepcopy(model)
        for one in of_replica:
            _, values = _gradients(own, loss_fn, doubled(one), names, uses)
            for name in names:
                # A use that cannot be untied is counted with the first one.
                zero = torch.zeros_like(values[name])
                every = [values.get(use, zero) for use in uses[name]]
                found[name].append(torch.stack([sampled(value) for value in every]))
    shape = len(batches), len(batches[0])
    return {name: torch.stack(rows).unflatten(0, shape) for name, rows in found.items()}


def _noise(
    model: nn.Module,
    data: Data,
    truth: Truth,
    dtypes: Mapping[str, torch.dtype],
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
    # Small gradients of float16 are 0 without a scale of the loss, which trainings have, too.
    scale = _LOSS_SCALE if torch.float16 in kinds else 1.0
    total = 0.0
    try:
        with _autocast(autocast):
            for replica, of_replica in enumerate(data.batches):
                for index, (inputs, target) in enumerate(of_replica):
                    weight = float(truth.weights[replica, index])
                    if not weight:
                        continue
                    loss = loss_of(
                        data.loss_fn(output_of(same, _cast(inputs, kind)), _cast(target, kind))
                    )
                    total += weight * float(loss.detach())
                    (loss * (weight * scale)).backward()
    except (RuntimeError, TypeError, ValueError):
        # It cannot compute in these dtypes as one process: nothing more than rounding is allowed.
        return {}, truth.loss
    parameters = dict(same.named_parameters())
    found = {}
    for name, right in truth.gradients.items():
        gradient = parameters[name].grad
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            found[name] = relative(dense.double() / scale - right, right)
    return found, total


def relative(difference: Tensor, right: Tensor) -> float:
    """Returns the norm of a difference by that of what is right."""
    tiny = torch.finfo(torch.float64).tiny
    return float(difference.norm() / right.norm().clamp_min(tiny))


def _cast(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401 - a tree
    return _each(value, lambda x: x.cpu().to(dtype) if x.is_floating_point() else x.cpu())


@contextlib.contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    if dtype is None:
        yield
        return
    with torch.autocast("cpu", dtype=dtype):
        yield
