"""Structural: a model cut between its layers, whose own code runs on every stage.

Shapes stay free: a stage computes masks, positions and whatever else stands between layers from the
batch that it is given. See [Note: flow] and [Note: stage modules].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from pipegrad.errors import TopologyError
from pipegrad.interop.private import tree_flatten
from pipegrad.partition.layers import Part
from pipegrad.partition.structural.calls import Call, Flow, Origin, Source, find
from pipegrad.partition.structural.shallow import as_kind, linked, shallow, without_memory
from pipegrad.partition.structural.stage_module import (
    Run,
    StageModule,
    own_layer,
    without_end_hooks,
)
from pipegrad.partition.structural.stand_ins import filled, other_layer


def parts_of(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    flow: Flow,
    starts: Sequence[int],
    returned: Mapping[str, Origin],
    *,
    losses: Mapping[str, Origin],
) -> list[Part]:
    """Returns the stages of a model.

    Args:
        model: The uncut model. Stages share its tensors.
        layers: Its layers, by name.
        flow: What it does.
        starts: The first call of each stage but the first.
        returned: What the last stage returns, by name.
        losses: What else it must be able to compute.

    Raises:
        TopologyError: If stages would draw different random numbers for one value, or if code
            outside of layers uses a parameter or a buffer inside of a layer of another stage.
    """
    calls, outputs_of_last = flow.calls, list(returned)
    returned = {**returned, **losses}
    edges = [0, *starts, len(calls)]
    needs = [_needs(calls, returned, a, b) for a, b in pairwise(edges)]
    _check_draws(calls, returned, edges)
    _check_hooks(model, flow)
    described = {name: _described(layer, name, calls) for name, layer in layers.items()}
    lost = {n: {x for call in calls if call.layer == n for x in call.lost} for n in layers}
    parts = list[Part]()
    for stage, (first, end) in enumerate(pairwise(edges)):
        later = {source for need in needs[stage + 1 :] for source in need}
        sent = sorted(source for source in later if first <= source.call < end)
        run = Run(flow, first, end, needs[stage], sent)
        own = {call.layer for call in calls[first:end]} | _uncalled(layers, calls, edges, stage)
        here = {
            id(layer): own_layer(layer, name, described[name], run)
            for name, layer in layers.items()
            if name in own
        }
        run.own = [*here.values()]
        replaced = dict[int, nn.Module]()
        for name in layers.keys() - own:
            replaced |= other_layer(layers[name], name, described[name], run, lost[name])
        for name in own:  # what is inside of them stays, also if other layers hold it
            for part in layers[name].modules():
                replaced.pop(id(part), None)
        replaced |= here
        for layer in here.values():
            linked(layer, replaced)
        module = as_kind(shallow(model, replaced), StageModule)
        vars(module)["_pipegrad_run"] = run
        if end < len(calls):
            without_end_hooks(module)
        outside = frozenset[str]().union(
            *(call.origin.parameters for call in calls[first:end]),
            *(part.parameters for part in returned.values() if end == len(calls)),
        )
        _refuse_buffers(model, own, layers, outside)
        _place_parameters(model, module, own, layers, outside)
        names = [calls[source.call].name_of(source.leaf) for source in needs[stage]]
        outputs = (
            [calls[source.call].name_of(source.leaf) for source in sent]
            if end < len(calls)
            else outputs_of_last
        )
        parts.append(Part(module, tuple(names), tuple(outputs)))
    return parts


def _described(layer: nn.Module, name: str, calls: Sequence[Call]) -> nn.Module:
    """Returns a layer without memory; it shares the containers into which the layer writes."""
    roots = {"modules": dict(layer.named_modules())}
    changes = (change for call in calls if call.layer == name for change in call.changes)
    paths = {change.path for change in changes if change.is_inside and len(change.path) > 2}
    found = (find(roots, path) for path in paths)
    result = without_memory(layer, [box for box in found if box is not None])
    for part in result.modules():
        part._forward_hooks.clear()  # they would hear runs that are no forwards
    return result


def returned_tensors(returned: object) -> dict[str, Origin]:
    """Returns the tensors among what a model returns, by name; see `Flow.returned`."""
    if isinstance(returned, Origin):
        return {"output": returned}
    if isinstance(returned, Mapping):
        return {name: value for name, value in returned.items() if isinstance(value, Origin)}
    leaves = tree_flatten(returned, lambda x: isinstance(x, Origin))[0]
    found = [leaf for leaf in leaves if isinstance(leaf, Origin)]
    return {f"output{number}": leaf for number, leaf in enumerate(found)}


def _needs(
    calls: Sequence[Call], returned: Mapping[str, Origin], first: int, end: int
) -> list[Source]:
    """Returns what the calls from `first` to `end` need of earlier stages, in order."""
    found = {source for call in calls[first:end] for source in call.origin.sources}
    if end == len(calls):
        found |= {source for part in returned.values() for source in part.sources}
    return sorted(source for source in found if source.call < first)


def _uncalled(
    layers: Mapping[str, nn.Module], calls: Sequence[Call], edges: Sequence[int], stage: int
) -> set[str]:
    """Returns the layers of a stage that the model does not call.

    One whose parameters called layers hold is another name for these: it is where they are. Any
    other one is on the first stage.
    """
    called = {call.layer for call in calls}
    own = {call.layer for call in calls[edges[stage] : edges[stage + 1]]}
    held = {id(p) for name in own for p in layers[name].parameters()}
    everywhere = {id(p) for name in called for p in layers[name].parameters()}
    found = set[str]()
    for name in layers.keys() - called:
        parameters = {id(p) for p in layers[name].parameters()}
        is_alias = bool(parameters) and parameters <= everywhere
        if (is_alias and parameters <= held) or (not is_alias and stage == 0):
            found.add(name)
    return found


def _check_draws(
    calls: Sequence[Call], returned: Mapping[str, Origin], edges: Sequence[int]
) -> None:
    """Refuses random numbers, drawn outside of layers, that two stages would draw for one value."""
    users: dict[int, set[int]] = {}
    last = len(edges) - 2
    for stage, (first, end) in enumerate(pairwise(edges)):
        for call in calls[first:end]:
            for draw in call.origin.draws:
                users.setdefault(draw, set()).add(stage)
    for part in returned.values():
        for draw in part.draws:
            users.setdefault(draw, set()).add(last)
    for draw, stages in sorted(users.items()):
        if len(stages) > 1:
            names = [calls[edges[stage]].name for stage in sorted(stages)]
            raise TopologyError(
                f"the model draws random numbers outside of its layers (number {draw}), and stages "
                f"{sorted(stages)}, which begin with {names}, need the result: each would draw "
                f"others. Put the dropout into an nn.Dropout, or choose other boundaries"
            )


def _check_hooks(model: nn.Module, flow: Flow) -> None:
    """Refuses hooks that hand on what they hear to a module: stages are copies of it."""
    for name, part in model.named_modules():
        for hook in part._forward_hooks.values() if flow.is_heard else ():
            if isinstance(getattr(hook, "__self__", None), nn.Module):
                raise TopologyError(
                    f"a hook of {name!r} is a method of a module, and code outside of layers uses "
                    f"what it hears: stages are copies of that module. Take a function that "
                    f"appends to a list, or use what layers return"
                )


def _refuse_buffers(
    model: nn.Module, own: set[str], layers: Mapping[str, nn.Module], outside: frozenset[str]
) -> None:
    """Refuses code outside of layers that uses a buffer of another stage's layer."""
    for name, _ in model.named_buffers():
        layer = next((n for n in layers if name.startswith(f"{n}.")), None)
        if name in outside and layer is not None and layer not in own:
            raise TopologyError(
                f"code outside of layers uses buffer {name}, which is inside of a layer of another "
                f"stage: choose boundaries that have both on one stage"
            )


def _place_parameters(
    model: nn.Module,
    module: nn.Module,
    own: set[str],
    layers: Mapping[str, nn.Module],
    outside: frozenset[str],
) -> None:
    """Gives a stage those parameters that belong to no layer of it.

    Args:
        model: The uncut model.
        module: The stage.
        own: Names of the layers of the stage.
        layers: The layers, by name.
        outside: Names of parameters that code outside of layers uses on this stage.
    """
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {id(parameter) for layer in own for parameter in layers[layer].parameters()}
    for path, name, parameter in _parameters_of(model):
        layer = next((n for n in layers if path == n or path.startswith(f"{n}.")), None)
        if layer in own:
            continue
        is_used = first_names[id(parameter)] in outside
        if layer not in (None, path):
            if is_used and id(parameter) not in held:
                raise TopologyError(
                    f"code outside of layers uses {path}.{name}, which is inside of a layer of "
                    f"another stage: choose boundaries that have both on one stage"
                )
        elif is_used:
            module.get_submodule(path)._parameters[name] = parameter
        elif layer is None:
            # The stage does not use it. Code may still ask for its shape.
            holder = module.get_submodule(path)
            del holder._parameters[name]
            device = "cpu" if parameter.is_meta else parameter.device
            vars(holder)[name] = filled(parameter.shape, parameter.dtype, torch.device(device))


def _parameters_of(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yields each module's parameters: its path, the parameter's name in it, the parameter."""
    for path, holder in model.named_modules():
        for name, parameter in holder._parameters.items():
            if parameter is not None:
                yield path, name, parameter
