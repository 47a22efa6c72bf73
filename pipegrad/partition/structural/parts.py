"""Structural: a model cut between its layers, whose own code runs on every stage.

Shapes stay free: a stage computes masks, positions and whatever else stands between layers from the
batch that it is given. See [Note: flow] and [Note: stage modules].
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_

import torch
from torch import nn

from pipegrad.errors import TopologyError
from pipegrad.interop.private import tree_flatten
from pipegrad.partition.layers import Part
from pipegrad.partition.structural.calls import Call, Flow, Origin, Source, find
from pipegrad.partition.structural.shallow import as_kind, relink, shallow, twin, without_memory
from pipegrad.partition.structural.stage_module import OwnLayer, Run, StageModule
from pipegrad.partition.structural.stand_ins import filled, other_layer

Edges = Sequence[tuple[int, int]]  # of each stage: its first call, and the call behind its last one


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
    calls, edges = flow.calls, [*pairwise([0, *starts, len(flow.calls)])]
    origins = [_union(call.origin for call in calls[a:b]) for a, b in edges]
    origins[-1] |= _union([*returned.values(), *losses.values()])
    _check_draws(calls, edges, origins)
    _check_hooks(model, flow)
    described = {name: _described(layer, name, calls) for name, layer in layers.items()}
    needs = [
        sorted(s for s in x.sources if s.call < a) for x, (a, _) in zip(origins, edges, strict=True)
    ]

    def names_of(sources: Iterable[Source]) -> tuple[str, ...]:
        return tuple(calls[source.call].name_of(source.leaf) for source in sources)

    parts = list[Part]()
    for stage, (first, end) in enumerate(edges):
        later = {source for need in needs[stage + 1 :] for source in need}
        sent = sorted(source for source in later if first <= source.call < end)
        here = {call.layer for call in calls[first:end]} | _uncalled(layers, calls, edges, stage)
        held = {name: layer for name, layer in layers.items() if name in here}
        run = Run(flow, first, end, inputs=needs[stage], outputs=sent, layers=held)
        module = _stage_module(model, layers, described, here, run)
        _place_parameters(model, module, here, layers, origins[stage].parameters)
        outputs = names_of(sent) if not run.is_last else tuple(returned)
        beside = tuple(losses) if run.is_last else ()
        used = origins[stage].parameters
        parts.append(Part(module, names_of(needs[stage]), outputs, used, beside))
    return parts


def _union(origins: Iterable[Origin]) -> Origin:
    return reduce(or_, origins, Origin())


def _stage_module(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    described: Mapping[str, nn.Module],
    here: Collection[str],
    run: Run,
) -> nn.Module:
    """Returns the model with the layers `here`, and with stand-ins for the others."""
    replaced = dict[int, nn.Module]()
    for name in layers.keys() - here:
        lost = {x for call in run.flow.calls if call.layer == name for x in call.lost}
        replaced |= other_layer(layers[name], name, described[name], run, lost)
    for name in here:  # what is inside of them stays, also if other layers hold it
        for part in layers[name].modules():
            replaced.pop(id(part), None)
    # A twin has its tensors in the same tables as the layer of the model.
    twins = {n: as_kind(twin(layer), OwnLayer) for n, layer in layers.items() if n in here}
    for name, layer in twins.items():
        vars(layer)["_pipegrad_run"] = run, name, described[name]
        replaced[id(layers[name])] = layer
    for layer in twins.values():
        relink(layer, replaced)
    module = as_kind(shallow(model, replaced), StageModule)
    vars(module)["_pipegrad_run"] = run
    if not run.is_last:  # hooks of the model see what it returns, which only the last stage has
        for table in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            vars(module)[table] = OrderedDict[int, object]()
    return module


def _described(layer: nn.Module, name: str, calls: Sequence[Call]) -> nn.Module:
    """Returns a layer without memory; it shares the containers into which the layer writes."""
    roots = {"modules": dict(layer.named_modules())}
    changes = (change for call in calls if call.layer == name for change in call.changes)
    paths = {change.path for change in changes if change.is_inside and len(change.path) > 2}
    boxes = (find(roots, path) for path in paths)
    result = without_memory(layer, [box for box in boxes if box is not None])
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
    tensors = [leaf for leaf in leaves if isinstance(leaf, Origin)]
    return {f"output{number}": leaf for number, leaf in enumerate(tensors)}


def returned_beside(returned: object, endings: tuple[str, ...]) -> dict[str, Origin]:
    """Returns what has such a name among what a model returns, also if it is several tensors."""
    found = dict[str, Origin]()
    for name, value in returned.items() if isinstance(returned, Mapping) else ():
        leaves = tree_flatten(value, lambda x: isinstance(x, Origin))[0]
        origins = [leaf for leaf in leaves if isinstance(leaf, Origin)]
        if name.endswith(endings) and origins:
            found[name] = _union(origins)
    return found


def _uncalled(
    layers: Mapping[str, nn.Module], calls: Sequence[Call], edges: Edges, stage: int
) -> set[str]:
    """Returns the layers of a stage that the model does not call.

    One whose parameters called layers hold is another name for these: it is where they are. Any
    other one is on the first stage.
    """
    called = {call.layer for call in calls}
    here = {call.layer for call in calls[slice(*edges[stage])]}
    held = {id(p) for name in here for p in layers[name].parameters()}
    everywhere = {id(p) for name in called for p in layers[name].parameters()}
    uncalled = set[str]()
    for name in layers.keys() - called:
        parameters = {id(p) for p in layers[name].parameters()}
        is_alias = bool(parameters) and parameters <= everywhere
        if (is_alias and parameters <= held) or (not is_alias and stage == 0):
            uncalled.add(name)
    return uncalled


def _check_draws(calls: Sequence[Call], edges: Edges, origins: Sequence[Origin]) -> None:
    """Refuses random numbers, drawn outside of layers, that two stages would draw for one value."""
    for draw in sorted(_union(origins).draws):
        stages = [stage for stage, origin in enumerate(origins) if draw in origin.draws]
        if len(stages) > 1:
            names = [calls[edges[stage][0]].name for stage in stages]
            raise TopologyError(
                f"the model draws random numbers outside of its layers (number {draw}), and stages "
                f"{stages}, which begin with {names}, need the result: each would draw "
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


def _layer_of(path: str, layers: Iterable[str]) -> str | None:
    """Returns the layer that a module is, or that it is inside of."""
    return next((name for name in layers if path == name or path.startswith(f"{name}.")), None)


def _refuse_inside(
    model: nn.Module, here: Collection[str], layers: Mapping[str, nn.Module], used: Collection[str]
) -> None:
    """Refuses code outside of layers that uses what is inside of a layer of another stage.

    A parameter of the layer itself can be on several stages, and so can a tied one.
    """
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {id(parameter) for layer in here for parameter in layers[layer].parameters()}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *model.named_buffers()):
        is_parameter = id(tensor) in first_names
        path = name.rpartition(".")[0]
        layer = _layer_of(path, layers)
        if (
            layer is None
            or layer in here
            or (is_parameter and (layer == path or id(tensor) in held))
        ):
            continue
        if first_names.get(id(tensor), name) in used:
            raise TopologyError(
                f"code outside of layers uses {'' if is_parameter else 'buffer '}{name}, which is "
                f"inside of a layer of another stage: choose boundaries that have both on one stage"
            )


def _place_parameters(
    model: nn.Module,
    module: nn.Module,
    here: Collection[str],
    layers: Mapping[str, nn.Module],
    used: Collection[str],
) -> None:
    """Gives a stage those parameters that belong to no layer of it.

    Args:
        model: The uncut model.
        module: The stage.
        here: Names of the layers of the stage.
        layers: The layers, by name.
        used: Names of parameters and buffers that code outside of layers uses on this stage.
    """
    _refuse_inside(model, here, layers, used)
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, holder in model.named_modules():
        layer = _layer_of(path, layers)
        if layer in here or layer not in (None, path):
            continue
        part = module.get_submodule(path)
        for name, parameter in holder._parameters.items():
            if parameter is None:
                continue
            if first_names[id(parameter)] in used:
                part._parameters[name] = parameter
            elif layer is None:
                # The stage does not use it. Code may still ask for its shape.
                del part._parameters[name]
                device = torch.device("cpu" if parameter.is_meta else parameter.device)
                vars(part)[name] = filled(parameter.shape, parameter.dtype, device)
