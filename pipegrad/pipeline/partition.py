"""split: an uncut model, an ordered Sequential, into the stages of a pipeline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from pipegrad.errors import TopologyError
from pipegrad.model.ties import find_tied


@dataclass(frozen=True)
class Cut:
    """A model in stages. Stages hold the model's own layers, under their own names.

    Attributes:
        modules: Stage -> its layers, in order.
        tied: Parameters that the uncut model holds several times, by name: what `GradientSync`
            and `attach` take as ``tied``.
        boundaries: Index of the first layer of every stage but the first.
    """

    modules: dict[int, nn.Module]
    tied: list[list[str]]
    boundaries: tuple[int, ...]


def split(model: nn.Module, num_stages: int, *, boundaries: Sequence[int] | None = None) -> Cut:
    """Returns `model` cut into stages whose largest has as few parameters as possible.

    A parameter counts once in every stage that holds it. If several cuts are equally good, the most
    even of them is taken, always the same. Nothing is copied: stages share the model's tensors.

    Args:
        model: An ``nn.Sequential``: each layer takes what the one before returns.
        num_stages: How many stages, each of at least one layer.
        boundaries: Index of the first layer of stages 1, 2, ...; by parameter count if None.

    Raises:
        TopologyError: If the model is more than a Sequential of layers, has fewer layers than
            there are stages, or the boundaries do not cut it into `num_stages` stages.
    """
    model = only_layers(model)
    # A layer may be there twice, and then belongs to both stages. Layers are not taken as
    # model[a:b], which would call the constructor of a subclass.
    named = [
        (name, layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if name and "." not in name
    ]
    layers = [layer for _, layer in named]
    if not 1 <= num_stages <= len(layers):
        raise TopologyError(
            f"a model of {len(layers)} layers cannot be cut into {num_stages} stages: choose 1 to "
            f"{len(layers)}"
        )
    starts = _balanced(layers, num_stages) if boundaries is None else list(boundaries)
    edges = [0, *starts, len(layers)]
    if len(starts) != num_stages - 1 or any(a >= b for a, b in pairwise(edges)):
        raise TopologyError(
            f"boundaries {starts} do not cut {len(layers)} layers into {num_stages} stages: give "
            f"{num_stages - 1} ascending indices from 1 to {len(layers) - 1}"
        )
    modules = [nn.Sequential(OrderedDict(named[a:b])) for a, b in pairwise(edges)]
    for module in modules:
        module.training = model.training  # layers keep their own modes
    return Cut(dict(enumerate(modules)), find_tied(model), tuple(starts))


def only_layers(model: object) -> nn.Sequential:
    """Returns `model` if it is no more than its layers in order. Stages would lose the rest.

    Raises:
        TopologyError: If it is anything else.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise TopologyError(
            f"only an nn.Sequential, with its own forward, can be cut into stages, found "
            f"{type(model).__name__}: return the model's layers in order, each taking what the "
            f"one before returns"
        )
    own = [
        name for name, _ in [*model.named_parameters(), *model.named_buffers()] if "." not in name
    ]
    if own:
        raise TopologyError(
            f"the model holds {own} beside its layers, which belong to no stage: put them into a "
            f"layer"
        )
    return model


def _balanced(layers: Sequence[nn.Module], num_stages: int) -> list[int]:
    """Returns boundaries that make the largest stage small, and then the others even."""
    size = _sizes(layers)
    # best[end]: cost of cutting the first `end` layers into the stages so far, and the boundaries.
    # Costs are compared by the largest stage, then by the sum of squares: an even cut.
    best: dict[int, tuple[tuple[int, int], list[int]]] = {
        end: ((size[0][end], size[0][end] ** 2), []) for end in range(1, len(layers) + 1)
    }
    for stage in range(1, num_stages):
        best = {
            end: min(
                (
                    (max(largest, size[start][end]), squares + size[start][end] ** 2),
                    [*starts, start],
                )
                for start, ((largest, squares), starts) in best.items()
                if start < end
            )
            for end in range(stage + 1, len(layers) + 1)
        }
    return best[len(layers)][1]


def _sizes(layers: Sequence[nn.Module]) -> list[dict[int, int]]:
    """Returns for each start, and each end, how many elements the layers between them hold."""
    held = [{id(p): p.numel() for p in layer.parameters()} for layer in layers]
    sizes: list[dict[int, int]] = []
    for start in range(len(layers)):
        seen: set[int] = set()
        total = 0
        sizes.append({})
        for end in range(start + 1, len(layers) + 1):
            total += sum(numel for key, numel in held[end - 1].items() if key not in seen)
            seen |= held[end - 1].keys()
            sizes[start][end] = total
    return sizes
