"""Layers: the modules of a model that are never cut; each of them is on one stage as a whole.

[Note: layers] A module in an ``nn.ModuleList`` or ``nn.Sequential`` is a layer, and also a module
that transformers must not split. Modules inside of a layer are no layers. Any other module with
parameters, with saved buffers or with dropout is a layer, too: embeddings, norms, heads. All other
code of the model is glue, and runs on every stage that needs its results. Glue must not hold
tensors of a checkpoint, and must not draw random numbers for several stages.

The layers of an ``nn.Sequential`` are known without a run, because it has no glue. A stage is again
an ``nn.Sequential``, of some of these layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

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


@dataclass(frozen=True)
class Part:
    """A stage of a cut: a module and the names of its inputs and outputs.

    Attributes:
        module: The stage's module; accepts the values of `inputs` by position, and the batch of a
            step by name.
        inputs: Names of values from earlier stages.
        outputs: Names of values for later stages; on the last stage, names of the model's outputs.
        used: Names of parameters and buffers that code between layers uses here.
        beside: On the last stage, names of further outputs: losses, and router logits from which a
            loss is computed.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    used: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()


def layers_of(model: nn.Module, num_stages: int) -> dict[str, nn.Module]:
    """Returns the layers of a model by name, each module once, in the order of ``named_modules``.

    If there are fewer layers than stages, lists inside of layers count, too.

    Raises:
        TopologyError: If there are fewer layers than stages.
    """
    unsplittable = frozenset[str]().union(
        *(getattr(module, "_no_split_modules", None) or () for module in model.modules())
    )
    layers: dict[str, nn.Module] = {}
    for depth in count(1):
        before, layers = layers, dict(_layers_in(model, "", depth, unsplittable, set()))
        if sum(map(has_state, layers.values())) >= num_stages:
            break
        if before.keys() == layers.keys():
            raise TopologyError(
                f"{type(model).__name__} has {len(layers)} layers that a stage can begin with, "
                f"fewer than {num_stages} stages: {[*layers][:8]}. Layers are the members of "
                f"nn.ModuleList and nn.Sequential, and modules with parameters beside them"
            )
    return layers


def _layers_in(
    module: nn.Module, name: str, depth: int, unsplittable: Collection[str], seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers inside of a module, by name; `name` is the module's own name.

    Layers are `depth` lists deep. A module that is `seen` counts only under its first name.
    """
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if id(child) in seen:
            continue
        seen.add(id(child))
        has_forward = _has_forward(child)
        is_member = isinstance(module, _LISTS)
        is_named = type(child).__name__ in unsplittable
        is_whole = depth <= 1 and has_forward and (is_member or is_named)
        holds_layers = any(
            (isinstance(part, _LISTS) and len(part)) or type(part).__name__ in unsplittable
            for part in child.modules()
        )
        if not is_whole and (holds_layers or not has_forward):
            inner = depth - (is_member and has_forward)
            yield from _layers_in(child, path, inner, unsplittable, seen)
        elif is_whole or is_weighty(child):
            yield path, child


def _has_forward(module: nn.Module) -> bool:
    """True if a module can be called, or holds tensors; otherwise it only contains modules."""
    if isinstance(module, _WITHOUT_FORWARD):
        return False
    return type(module).forward is not nn.Module.forward or bool(_own_tensors(module))


def is_weighty(module: nn.Module) -> bool:
    """True if glue must not hold a module: it has parameters, saved buffers, or dropout."""
    return has_state(module) or any(isinstance(part, _DROPOUTS) for part in module.modules())


def has_state(module: nn.Module) -> bool:
    """True if a module has parameters, or buffers that are saved."""
    # No call of state_dict(), because the layers of an earlier cut raise there.
    return next(module.parameters(), None) is not None or any(
        buffer is not None and name not in part._non_persistent_buffers_set
        for part in module.modules()
        for name, buffer in part._buffers.items()
    )


def is_sequential(model: object) -> bool:
    """True if a model is an nn.Sequential with its own forward."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def sequential_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the layers of an nn.Sequential, by name and in order. A layer may be there twice.

    Raises:
        TopologyError: If it is no nn.Sequential, or if it also holds tensors itself, because stages
            would lose them.
    """
    if not is_sequential(model):
        raise TopologyError(
            f"only an nn.Sequential, with its own forward, can be cut into its layers, found "
            f"{type(model).__name__}: return the model's layers in order, each taking what the "
            f"one before returns"
        )
    if names := _own_tensors(model):
        raise TopologyError(
            f"the model holds {names} beside its layers, which belong to no stage: put them into a "
            f"layer"
        )
    return [(name, part) for name, part in model._modules.items() if part is not None]


def sequential_parts(
    model: nn.Module, named: Sequence[tuple[str, nn.Module]], starts: Sequence[int]
) -> list[Part]:
    """Returns the stages of an nn.Sequential. Nothing is copied: stages share its layers."""
    parts = list[Part]()
    for start, end in pairwise([0, *starts, len(named)]):
        # Not model[start:end], because this would call the constructor of a subclass.
        module = nn.Sequential(OrderedDict(named[start:end]))
        module.training = model.training  # layers keep their own modes
        parts.append(Part(module, ("x",), ("x",)))
    return parts


def _own_tensors(module: nn.Module) -> list[str]:
    """Returns the names of the tensors that a module holds itself."""
    parameters = module.named_parameters(recurse=False)
    return [name for name, _ in (*parameters, *module.named_buffers(recurse=False))]
