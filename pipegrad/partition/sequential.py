"""Sequential: an ordered nn.Sequential, each stage of which is some of its layers in order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from pipegrad.errors import TopologyError
from pipegrad.partition.part import Part


def is_sequential(model: object) -> bool:
    """Whether a model is an nn.Sequential with its own forward."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def only_layers(model: object) -> nn.Sequential:
    """Returns `model` if it is no more than its layers in order. Stages would lose the rest.

    Raises:
        TopologyError: If it is anything else.
    """
    if not isinstance(model, nn.Sequential) or not is_sequential(model):
        raise TopologyError(
            f"only an nn.Sequential, with its own forward, can be cut into its layers, found "
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


def sequential_layers(model: nn.Sequential, num_stages: int) -> list[tuple[str, nn.Module]]:
    """Returns the layers of a model, by name and in order.

    A layer may be there twice. If there are fewer than stages, those of Sequentials inside count.
    """
    named = _members(model)
    while len(named) < num_stages:
        deeper = [
            (f"{name}.{inner}", part)
            for name, layer in named
            for inner, part in (_members(layer) if _is_plain(layer) else [("", layer)])
        ]
        if len(deeper) == len(named):
            break
        named = [(name.removesuffix("."), layer) for name, layer in deeper]
    return named


def sequential_parts(
    model: nn.Sequential, named: Sequence[tuple[str, nn.Module]], starts: Sequence[int]
) -> list[Part]:
    """Returns the stages of a model. Nothing is copied: stages share its layers."""
    modules = [_nested(named[a:b], model) for a, b in pairwise([0, *starts, len(named)])]
    return [Part(module, ("x",), ("x",)) for module in modules]


def _members(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    # Layers are not taken as model[a:b], which would call the constructor of a subclass.
    return [(name, part) for name, part in layer._modules.items() if part is not None]


def _is_plain(layer: nn.Module) -> bool:
    return (
        is_sequential(layer)
        and len(_members(layer)) > 0
        and not [
            *layer.named_parameters(recurse=False),
            *layer.named_buffers(recurse=False),
        ]
    )


def _nested(named: Sequence[tuple[str, nn.Module]], model: nn.Module) -> nn.Sequential:
    """Returns layers under their names; those of a Sequential inside stay inside of one."""
    groups: OrderedDict[str, list[tuple[str, nn.Module]]] = OrderedDict()
    for name, layer in named:
        head, _, rest = name.partition(".")
        groups.setdefault(head, []).append((rest, layer))
    members = OrderedDict(
        (head, group[0][1] if not group[0][0] else _nested(group, model.get_submodule(head)))
        for head, group in groups.items()
    )
    result = nn.Sequential(members)
    result.training = model.training  # layers keep their own modes
    return result
