"""Layers: the modules of a model that are never cut, each of which is on a stage as a whole.

[Note: layers] A module that stands in an ``nn.ModuleList`` or ``nn.Sequential`` is a layer, and so
is one that transformers must not split. What is inside of a layer does not count. Beside layers,
any module with parameters, with buffers that are saved, or with dropout is a layer: embeddings,
norms, heads. All other code of the model is glue, and runs on every stage that needs its results.
Glue must not hold what a checkpoint has, and must not draw random numbers for several stages.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

from torch import nn

from pipegrad.errors import TopologyError

_LISTS = (nn.ModuleList, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def layers_of(model: nn.Module, num_stages: int) -> dict[str, nn.Module]:
    """Returns the layers of a model by name, each module once, in the order of ``named_modules``.

    If there are fewer layers than stages, lists inside of layers count, too.

    Args:
        model: The uncut model.
        num_stages: How many stages it is for.

    Raises:
        TopologyError: If there are fewer layers than stages.
    """
    unsplittable = frozenset[str]().union(
        *(getattr(module, "_no_split_modules", None) or () for module in model.modules())
    )
    layers: dict[str, nn.Module] = {}
    for depth in count(1):
        before, layers = layers, {}
        _Collector(unsplittable, layers).collect(model, "", depth)
        if sum(map(has_state, layers.values())) >= num_stages:
            break
        if before.keys() == layers.keys():
            raise TopologyError(
                f"{type(model).__name__} has {len(layers)} layers that a stage can begin with, "
                f"fewer than {num_stages} stages: {[*layers][:8]}. Layers are the members of "
                f"nn.ModuleList and nn.Sequential, and modules with parameters beside them"
            )
    return layers


class _Collector:
    """Collects the layers of a model."""

    def __init__(self, unsplittable: Collection[str], layers: dict[str, nn.Module]) -> None:
        self._unsplittable = unsplittable
        self._layers = layers
        self._seen = set[int]()

    def collect(self, module: nn.Module, name: str, depth: int) -> None:
        """Adds the layers inside of a module, which is not a layer itself.

        Args:
            module: The module.
            name: Of the module; "" of the model.
            depth: How many lists deep layers are.
        """
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if id(child) in self._seen:
                continue
            self._seen.add(id(child))
            has_forward = not isinstance(child, _WITHOUT_FORWARD)
            is_member = isinstance(module, _LISTS)
            is_named = type(child).__name__ in self._unsplittable
            is_whole = depth <= 1 and has_forward and (is_member or is_named)
            is_open = not has_forward or _holds_layers(child, self._unsplittable)
            if is_open and not is_whole:
                self.collect(child, path, depth - (is_member and has_forward))
            elif is_whole or is_weighty(child):
                self._layers[path] = child


def _holds_layers(module: nn.Module, unsplittable: Collection[str]) -> bool:
    return any(
        (isinstance(part, _LISTS) and len(part)) or type(part).__name__ in unsplittable
        for part in module.modules()
    )


def is_weighty(module: nn.Module) -> bool:
    """Whether glue must not hold a module: it has parameters, saved buffers, or dropout."""
    return has_state(module) or any(isinstance(part, _DROPOUTS) for part in module.modules())


def has_state(module: nn.Module) -> bool:
    """Whether a module has parameters, or buffers that are saved."""
    return bool([*module.parameters(), *module.state_dict()])
