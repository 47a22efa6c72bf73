"""Truth: the step of one process on the uncut model, at once and by microbatches, in float64.

[Note: what is right] The right gradient is the gradient of the loss of the whole batch, computed at
once. Its parts, one for each microbatch, output and use of a tied parameter, show which of them a
wrong gradient contains; see `hypotheses.py`. If the parts do not add up to the right gradient,
samples depend on each other, as in BatchNorm. A pipeline that computes each microbatch alone has
another gradient then. It counts as right only if the caller gives ``by_microbatch``.

[Note: parts of a loss] A loss is a function of the model's output for the whole batch. Therefore a
microbatch's part of a gradient flows through its rows of the output, however the loss weighs them.
An output without rows, such as a balance loss, is a mean over microbatches, which count alike or by
their targets. A pipeline may divide the loss differently: by the targets of each replica, or of
each microbatch. It may also use the targets of another microbatch. Each of these is a view.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pipegrad.errors import PlanError, in_words
from pipegrad.pipeline.trees import flattened, is_cut

Batch = tuple[Any, Any]  # inputs and target
LossFn = Callable[[Any, Any], Any]
Cell = tuple[int, int]  # replica and index of a microbatch
Flow = dict[Cell, list[Tensor | None]]  # gradients of a loss by the outputs of a microbatch

WHOLE, REPLICAS, MICROBATCHES = "whole", "replicas", "microbatches"
BEFORE, BEHIND = "targets before", "targets behind"
_IGNORED = -100  # by torch's losses, and Hugging Face's
_SAMPLED = 16384  # elements of a gradient that are compared part by part
_LOSS_SCALE = 1024.0  # of float16
_COUPLED = 1e-5  # of a gradient; float32 inside a model leaves less
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Data:
    """The inputs of one step.

    Attributes:
        loss_fn: ``loss_fn(output, target)``, a mean.
        batches: Microbatches of each replica.
        whole: The whole batch.
        by_microbatch: True if the model is to compute each microbatch alone, also where samples of
            a batch depend on each other.
    """

    loss_fn: LossFn
    batches: Sequence[Sequence[Batch]]
    whole: Batch
    by_microbatch: bool = False

    @property
    def targets(self) -> list[int]:
        """Number of elements of each microbatch's target that a loss counts, at least 1."""
        return [_counted(target) for of_replica in self.batches for _, target in of_replica]

    def cast(self, dtype: torch.dtype) -> Data:
        """Returns the same data in another dtype."""
        batches = [[cast(one, dtype) for one in of_replica] for of_replica in self.batches]
        return replace(self, batches=batches, whole=cast(self.whole, dtype))


@dataclass(frozen=True)
class Truth:
    """One step of one process.

    Attributes:
        loss: Loss of the whole batch.
        losses: Losses of the microbatches, ``(replicas, microbatches)``.
        own: Losses of the replicas, ``(replicas,)``.
        gradients: Name -> gradient. A tied parameter has the first of its names.
        uses: First name of each parameter -> all its names.
        terms: Paths of the outputs that the loss depends on.
        buffers: Buffers of each replica that the forward changes, after its microbatches.
        is_coupled: True if samples of a batch depend on each other. Then no parts make the
            gradient.
        parts: Returns, for first names, view -> elements of their gradients (`sampled`) by replica,
            microbatch, term and use, ``(replicas, microbatches, terms, uses, numel)``.
        noise: Name -> relative error of one process that computes in the dtype of the pipeline.
        loss_error: Relative error of the loss of this process.
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
    noise: dict[str, float] = field(default_factory=dict)
    loss_error: float = 0.0


def computed(
    model: nn.Module,
    data: Data,
    dtypes: Mapping[str, torch.dtype],
    autocast: torch.dtype | None = None,
) -> Truth:
    """Returns the step of one process from `compute`, or raises a `PlanError`.

    Raises:
        PlanError: As `compute`, or if the model cannot be computed in float64.
    """
    try:
        return compute(model, data, dtypes, autocast)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"one process cannot compute the uncut model and its loss in float64: "
            f"{in_words(error)}; take casts to fixed dtypes out of it, or audit a like model"
        ) from error


def compute(
    model: nn.Module,
    data: Data,
    dtypes: Mapping[str, torch.dtype],
    autocast: torch.dtype | None = None,
) -> Truth:
    """Returns the step of one process.

    Raises:
        PlanError: If the model draws random numbers, or has a loss that is not finite.
    """
    every, exact = names_by_use(model), data.cast(torch.float64)
    loose = _untied(model)
    loss, right, whole = _at_once(loose, exact)
    if not math.isfinite(loss):
        raise PlanError(f"the loss of one process is {loss}: look at the batch and the weights")
    if (again := _at_once(loose, exact)[0]) != loss:
        raise PlanError(
            f"two forwards of the uncut model on one batch differ, {loss:.6g} and {again:.6g}: "
            f"it draws random numbers (stochastic depth, noise, masks of its own). Switch them off "
            f"for the audit; dropout of torch is switched off already"
        )
    if not any(map(is_real, whole)):
        raise PlanError(
            f"the output of the uncut model, {[type(leaf).__name__ for leaf in whole]}, cannot be "
            f"taken apart: let it return tensors, or dicts, tuples and lists of them"
        )
    cells = Cells(loose, exact, whole)
    is_coupled = _misses(cells, right)
    if is_coupled and not data.by_microbatch:
        # Outputs without rows may be weighted by the targets of their microbatches.
        alike, targets = cells.weights, data.targets
        cells.weights = {c: n / sum(targets) for c, n in zip(cells.all, targets, strict=True)}
        is_coupled = _misses(cells, right)
        cells.weights = alike if is_coupled else cells.weights
    if is_coupled and data.by_microbatch:
        loss, right = cells.loss_and_gradients()
    trained = {first: [n for n in names if n in right] for first, names in every.items()}
    gradients = {
        first: torch.stack([right[name] for name in names]).sum(0)
        for first, names in trained.items()
        if names
    }
    uses = {first: every[first] for first in gradients}
    losses, _ = cells.flow(cells.by_microbatch)
    own, _ = cells.flow(cells.by_replica)
    truth = Truth(
        loss=loss,
        losses=losses.nan_to_num(0.0).reshape(len(data.batches), -1),
        own=own,
        gradients=gradients,
        uses=uses,
        terms=tuple(cells.paths[term] for term in cells.terms()),
        buffers=cells.buffers,
        is_coupled=is_coupled and not data.by_microbatch,
        parts=lambda names: cells.parts({name: uses[name] for name in names}),
    )
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        noise, rounded = _noise(model, data, cells, truth, dtypes)
    return replace(truth, noise=noise, loss_error=abs(rounded - loss) / abs(loss or 1.0))


def _at_once(model: nn.Module, data: Data) -> tuple[float, dict[str, Tensor], list[Any]]:
    """Returns loss and gradients of the whole batch, and the leaves of the model's output."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        # On a copy, because a forward changes buffers, such as running means.
        output = output_of(_sharing_parameters(model), data.whole[0])
        loss = loss_of(data.loss_fn(output, data.whole[1]))
        found = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    leaves = [leaf for _, leaf in flattened(output)[0]]
    return float(loss.detach()), dict(zip(trained, found, strict=True)), leaves


class Cells:
    """All microbatches, each computed alone with its own graph, and losses of their outputs.

    Args:
        model: The uncut model. Its buffers are not changed.
        data: The step, in the dtype of the model.
        whole: Leaves of the output for the whole batch.

    Attributes:
        whole: As in the arguments.
        weights: Weight of each microbatch in outputs that have no rows.
        paths: Path of each leaf of the output.
        buffers: Buffers of each replica that the forward changes, after its microbatches.
    """

    def __init__(self, model: nn.Module, data: Data, whole: Sequence[Any]) -> None:
        self._model, self._data, self.whole = model, data, whole
        self.buffers = list[dict[str, Tensor]]()
        self._graphs = dict[Cell, list[Any]]()
        before = dict(model.named_buffers())
        for replica, of_replica in enumerate(data.batches):
            own = _sharing_parameters(model)
            for index, (inputs, _) in enumerate(of_replica):
                with torch.enable_grad():
                    leaves, self._rebuilt = flattened(output_of(own, inputs))
                self.paths = [path for path, _ in leaves]
                self._graphs[replica, index] = [leaf for _, leaf in leaves]
            after = own.named_buffers()
            self.buffers.append({n: b for n, b in after if not torch.equal(b, before[n])})
        # A loss may use an output and also the outputs from which that one was computed.
        self._leaves = {
            cell: [x.detach().requires_grad_() if is_real(x) else x for x in leaves]
            for cell, leaves in self._graphs.items()
        }
        self.all = list(self._graphs)
        self.by_replica = [[c for c in self.all if c[0] == r] for r in range(len(data.batches))]
        self.by_microbatch = [[cell] for cell in self.all]
        self.weights = dict.fromkeys(self.all, 1 / len(self.all))
        self._dims = [
            _dim(own, there, len(self.all))
            for own, there in zip(self._graphs[0, 0], whole, strict=True)
        ]

    def flow(
        self, groups: Sequence[Sequence[Cell]], shift: int = 0, scale: float = 1.0
    ) -> tuple[Tensor, Flow]:
        """Returns the losses of groups of microbatches, and their mean's gradients by outputs."""
        losses, flow = list[Tensor](), Flow()
        for group in groups:
            with torch.enable_grad():
                loss = self._loss(group, shift)
                wanted = [x for cell in group for x in self._leaves[cell] if is_real(x)]
                found = torch.autograd.grad(
                    loss * scale / len(groups), wanted, allow_unused=True, retain_graph=True
                )
            losses.append(loss.detach().double())
            gathered = iter(found)
            for cell in group:
                own = [next(gathered) if is_real(x) else None for x in self._leaves[cell]]
                # 0 / 0 without targets
                flow[cell] = [None if g is None else g.nan_to_num(0.0) for g in own]
        return torch.stack(losses), flow

    def _loss(self, group: Sequence[Cell], shift: int) -> Tensor:
        each = zip(*(self._leaves[cell] for cell in group), strict=True)
        output = self._rebuilt([self._joined(n, group, own) for n, own in enumerate(each)])
        of_replica = [(self._data.batches[r], m - shift) for r, m in group]
        targets = [batches[m % len(batches)][1] for batches, m in of_replica]
        return loss_of(self._data.loss_fn(output, _side_by_side(targets, self._data.whole[1])))

    def _joined(self, leaf: int, group: Sequence[Cell], own: Sequence[Any]) -> Any:  # noqa: ANN401
        dim = self._dims[leaf]
        if dim is not None:
            return torch.cat(list(own), dim)
        if not is_real(own[0]):
            return own[0]
        weights = [self.weights[cell] for cell in group]
        # In a smaller group, the weights of its microbatches add up to 1.
        total = sum(weights) if len(group) < len(self.all) else 1.0
        return sum(w / total * x for w, x in zip(weights, own, strict=True))

    def loss_and_gradients(self, scale: float = 1.0) -> tuple[float, dict[str, Tensor]]:
        """Returns the loss of all microbatches together, and the sums of their gradients."""
        losses, flow = self.flow([self.all], scale=scale)
        return float(losses), self._gradients(flow)

    def _gradients(self, flow: Flow, only: tuple[Cell, int] | None = None) -> dict[str, Tensor]:
        """Returns parameters' gradients from outputs' gradients: all, or one cell and leaf."""
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        pairs = [
            (x, g)
            for cell, own in flow.items()
            for leaf, (x, g) in enumerate(zip(self._graphs[cell], own, strict=True))
            if g is not None and x.requires_grad and only in {None, (cell, leaf)}
        ]
        if not pairs:
            return {name: torch.zeros_like(p) for name, p in trained.items()}
        outputs, by_output = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            outputs, list(trained.values()), by_output, retain_graph=True, materialize_grads=True
        )
        return dict(zip(trained, found, strict=True))

    def terms(self) -> list[int]:
        """Returns the leaves of the output that the loss depends on."""
        _, flow = self.flow([self.all])
        every = zip(*flow.values(), strict=True)
        return [n for n, own in enumerate(every) if any(g is not None and g.any() for g in own)]

    def parts(self, uses: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Tensor]]:
        """Returns gradients by name, view, replica, microbatch, term and use."""
        views = {
            WHOLE: self.flow([self.all])[1],
            REPLICAS: self.flow(self.by_replica)[1],
            MICROBATCHES: self.flow(self.by_microbatch)[1],
        }
        for view, shift in ((BEFORE, 1), (BEHIND, -1)):
            # Targets may fit only their own inputs.
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                views[view] = self.flow([self.all], shift)[1]
        terms = self.terms()
        shape = len(self._data.batches), len(self._data.batches[0]), len(terms)
        result: dict[str, dict[str, Tensor]] = {name: {} for name in uses}
        for view, flow in views.items():
            every = [self._gradients(flow, only) for only in itertools.product(self.all, terms)]
            for name, names in uses.items():
                # A use that cannot be untied is counted with the first one.
                zero = torch.zeros_like(self._model.get_parameter(name))
                found = [sampled(own.get(use, zero)) for own in every for use in names]
                result[name][view] = torch.stack(found).unflatten(0, (*shape, len(names)))
        return result


def _misses(cells: Cells, right: Mapping[str, Tensor]) -> bool:
    _, own = cells.loss_and_gradients()
    rest = math.hypot(*(float((own[name] - value).norm()) for name, value in right.items()))
    return not rest <= _COUPLED * math.hypot(*(float(value.norm()) for value in right.values()))


def _noise(
    model: nn.Module,
    data: Data,
    cells: Cells,
    truth: Truth,
    dtypes: Mapping[str, torch.dtype],
) -> tuple[dict[str, float], float]:
    """Returns gradients' relative errors, and the loss, of one process in the pipeline's dtypes."""
    same, kinds = copy.deepcopy(model), set(dtypes.values())
    for name, parameter in same.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, torch.float64))
    [kind] = kinds if len(kinds) == 1 else [torch.float32]
    for buffer in same.buffers():
        buffer.data = buffer.data.to(kind) if buffer.is_floating_point() else buffer.data
    # Without a scale of the loss, which trainings have, too, small float16 gradients are 0.
    scale = _LOSS_SCALE if torch.float16 in kinds else 1.0
    try:
        if truth.is_coupled:
            scale = 1.0
            loss, own, _ = _at_once(same, data.cast(kind))
        else:
            rounded = Cells(same, data.cast(kind), cells.whole)
            rounded.weights = cells.weights
            loss, own = rounded.loss_and_gradients(scale)
    except (RuntimeError, TypeError, ValueError):
        # One process cannot compute in these dtypes. Then only rounding is allowed.
        return {}, truth.loss
    noise = {
        name: float((own[name].double() / scale - right).norm() / right.norm().clamp_min(_TINY))
        for name, right in truth.gradients.items()
    }
    return noise, loss


def sampled(gradient: Tensor) -> Tensor:
    """Returns a sample of elements that suffices to distinguish parts; all have the same places."""
    flat = gradient.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)]


def names_by_use(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the first name of each parameter -> all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: (first, *others) for first, *others in names.values()}


def _untied(model: nn.Module) -> nn.Module:
    """Returns a copy of a model in which each name of a module has a separate parameter.

    A module that is used twice has two names for one parameter, and cannot have two.
    """
    loose = copy.deepcopy(model)
    for module in loose.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(module, name, own)
    return loose


def _sharing_parameters(model: nn.Module) -> nn.Module:
    """Returns a copy of a model with separate buffers and the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def output_of(model: nn.Module, inputs: Any) -> Any:  # noqa: ANN401 - as the model
    """Returns a model's output; inputs are passed by name, by position, or as one tensor."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def loss_of(result: Any) -> Tensor:  # noqa: ANN401 - of the caller
    """Returns the loss from a loss function's result: the result, or the first of a tuple."""
    loss: Tensor = result[0] if isinstance(result, tuple | list) else result
    return loss


def is_real(leaf: object) -> TypeGuard[Tensor]:
    """Returns True if a leaf is a tensor of real numbers, which may have gradients."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def leaves_cut(value: Any, number: int) -> list[Any]:  # noqa: ANN401 - a tree
    """Returns a pytree of tensors as `number` pytrees, cut along their first dimension.

    Each of them has all of a tensor of one row, and of a value that is no tensor.
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
    """Returns a pytree on CPU whose tensors of real numbers have this dtype."""
    leaves, rebuilt = flattened(value)
    cpu = [x.detach().cpu() if isinstance(x, Tensor) else x for _, x in leaves]
    return rebuilt([x.to(dtype) if is_real(x) else x for x in cpu])


def _side_by_side(trees: Sequence[Any], whole: Any) -> Any:  # noqa: ANN401 - trees
    """Returns the targets of some microbatches together; leaves that `whole` has uncut stay."""
    leaves, rebuilt = flattened(whole)
    each: list[list[Any]] = [[leaf for _, leaf in flattened(tree)[0]] for tree in trees]
    return rebuilt(
        [
            torch.cat([own[n] for own in each])
            if is_cut(leaf) and each[0][n].shape != leaf.shape
            else each[0][n]
            for n, (_, leaf) in enumerate(leaves)
        ]
    )


def _counted(target: Any) -> int:  # noqa: ANN401 - a tree
    leaves = [leaf for _, leaf in flattened(target)[0] if isinstance(leaf, Tensor)]
    return max(1, sum(int((leaf != _IGNORED).sum()) for leaf in leaves))


def _dim(own: Any, whole: Any, number: int) -> int | None:  # noqa: ANN401 - leaves
    """Returns the dimension in which `number` microbatches make a whole; None if there is none."""
    if not isinstance(own, Tensor) or own.shape == whole.shape:
        return None
    dims = [d for d, (a, b) in enumerate(zip(own.shape, whole.shape, strict=True)) if a != b]
    if len(dims) > 1 or own.shape[dims[0]] * number != whole.shape[dims[0]]:
        raise ValueError(f"{number} outputs {tuple(own.shape)} do not make {tuple(whole.shape)}")
    return dims[0]
