"""Structural: a model cut between its layers, whose own code runs on every stage.

Batches may have any shape, because each stage computes masks, positions and all other values
between layers from its own batch. See [Note: flow] and [Note: stage modules].
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import pairwise
from operator import or_
from typing import Any

import torch
from torch import nn

from pipegrad.errors import TopologyError
from pipegrad.interop.private import WrappedHook
from pipegrad.partition.cutting.calls import Call, Flow, Origin, Source, find
from pipegrad.partition.cutting.copies import leaves_of, with_class, with_tensors, without_memory
from pipegrad.partition.cutting.layers import Part
from pipegrad.partition.cutting.stage_module import OwnLayer, Run, StageModule
from pipegrad.partition.cutting.stand_ins import filled, other_layer

_COPIED = (nn.Module, partial, WrappedHook)
Edges = Sequence[tuple[int, int]]  # for each stage: its first call, and the call after its last one


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

    Raises:
        TopologyError: If stages would draw different random numbers for one value, or if code
            outside of layers uses a parameter or a buffer inside of a layer of another stage.
    """
    calls, edges = flow.calls, [*pairwise([0, *starts, len(flow.calls)])]
    origins = [_union(call.origin for call in calls[a:b]) for a, b in edges]
    origins[-1] |= _union([*returned.values(), *losses.values()])
    _check_draws(calls, edges, origins)
    _check_forwards(model)
    written = _written(layers, calls)
    described = {name: _described(layer, written) for name, layer in layers.items()}
    # Stages copy modules, and methods and hooks that hold modules. They share all other objects.
    held = {
        id(x): x for x in leaves_of(model) if not isinstance(getattr(x, "__self__", x), _COPIED)
    }
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
        run = Run(flow, first, end, inputs=needs[stage], outputs=sent)
        module = _stage_module(model, layers, described, here, run, shared=held | written)
        _place_parameters(model, module, here, layers, origins[stage].parameters)
        outputs = names_of(sent) if not run.is_last else tuple(returned)
        beside = tuple(losses) if run.is_last else ()
        used = origins[stage].parameters
        parts.append(Part(module, names_of(needs[stage]), outputs, used, beside))
    return parts


def _union(origins: Iterable[Origin]) -> Origin:
    return reduce(or_, origins, Origin())


def _written(layers: Mapping[str, nn.Module], calls: Sequence[Call]) -> dict[int, object]:
    """Returns by id the objects into which layers write; all stages share them."""
    written = dict[int, object]()
    for call in calls:
        roots = {"modules": dict(layers[call.layer].named_modules())}
        paths = (x.path for x in call.changes if x.is_inside and len(x.path) > 2)
        written |= {id(box): box for box in (find(roots, path) for path in paths)}
    return written


def _stage_module(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    described: Mapping[str, nn.Module],
    here: Collection[str],
    run: Run,
    *,
    shared: Mapping[int, object],
) -> nn.Module:
    """Returns a copy of the model with the layers `here`, and placeholders of the others.

    Its layers share their tables of tensors with the model's layers, because a tensor that FSDP2
    puts there must be in both.
    """
    memo, standing = dict(shared), list[tuple[nn.Module, nn.Module]]()
    for name in [name for name in layers if name not in here]:
        lost = {x for call in run.flow.calls if call.layer == name for x in call.lost}
        parts = dict(layers[name].named_modules())
        others = other_layer(name, described[name], run, lost)
        standing += [(parts[path], other) for path, other in others.items()]
    memo |= {id(part): other for part, other in standing}
    for name in here:  # keep all modules inside of them, also if other layers hold them
        for part in layers[name].modules():
            memo.pop(id(part), None)
            memo |= {id(table): table for table in (part._parameters, part._buffers)}
    module = with_class(with_tensors(model, lambda x: x, memo), StageModule)
    own = [name for name in layers if name in here]
    run.layers = {name: with_class(module.get_submodule(name), OwnLayer) for name in own}
    for part, other in standing:
        for table in ("_forward_hooks", "_forward_hooks_with_kwargs"):
            vars(other)[table] = copy.deepcopy(vars(part)[table], memo)
    for name, layer in run.layers.items():
        vars(layer)["_pipegrad_run"] = run, name, described[name]
    vars(module)["_pipegrad_run"] = run
    if not run.is_last:  # hooks of the model need its result, which only the last stage has
        for table in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            vars(module)[table] = OrderedDict[int, object]()
    return module


def _described(layer: nn.Module, written: Mapping[int, object]) -> nn.Module:
    """Returns a layer without memory."""
    result = without_memory(layer, dict(written))
    for part in result.modules():
        part._forward_hooks.clear()  # because this layer runs outside of forwards, too
    return result


def _uncalled(
    layers: Mapping[str, nn.Module], calls: Sequence[Call], edges: Edges, stage: int
) -> set[str]:
    """Returns the layers of a stage that the model does not call.

    If called layers hold all parameters of such a layer, it is on the stages with these parameters.
    Otherwise it is on the first stage.
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


def _check_forwards(model: nn.Module) -> None:
    """Refuses modules whose forward would run code of the uncut model in a copy."""
    for part in model.modules():
        forward = vars(part).get("forward")  # peft may set it to a method of the inner model
        is_copied = isinstance(getattr(forward, "__self__", forward), _COPIED)
        if (forward and not is_copied) or hasattr(part, "_orig_mod"):
            raise TopologyError(
                f"the forward of a {type(part).__name__} was exchanged, as torch.compile and "
                f"accelerate do: cut the model first, and compile or wrap its stages"
            )


def _place_parameters(
    model: nn.Module,
    module: nn.Module,
    here: Collection[str],
    layers: Mapping[str, nn.Module],
    used: Collection[str],
) -> None:
    """Gives a stage the used parameters that are in none of its layers.

    Code outside of layers may use a layer's direct parameter on several stages.

    Raises:
        TopologyError: If it uses a buffer or an inner parameter of another stage's layer.
    """
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {id(parameter) for layer in here for parameter in layers[layer].parameters()}
    for path, holder in model.named_modules():
        layer = next((n for n in layers if path == n or path.startswith(f"{n}.")), None)
        if layer in here:
            continue
        is_inside = layer not in (None, path)
        buffers = {f"buffer {path}.{n}": x for n, x in _held(holder._buffers) if layer is not None}
        of = _held(holder._parameters)
        inside = {f"{path}.{n}": x for n, x in of if is_inside and id(x) not in held}
        for name, tensor in (buffers | inside).items():
            if first_names.get(id(tensor), name.removeprefix("buffer ")) in used:
                raise TopologyError(
                    f"code outside of layers uses {name}, which is inside of a layer of another "
                    f"stage: choose boundaries that have both on one stage"
                )
        for name, parameter in () if is_inside else of:
            part = module.get_submodule(path)
            if first_names[id(parameter)] in used:
                part._parameters[name] = parameter
            elif layer is None:
                # The stage does not use its values. Code may still read its shape.
                del part._parameters[name]
                device = torch.device("cpu" if parameter.is_meta else parameter.device)
                vars(part)[name] = filled(parameter.shape, parameter.dtype, device)


def _held(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, tensor) for name, tensor in table.items() if tensor is not None]
