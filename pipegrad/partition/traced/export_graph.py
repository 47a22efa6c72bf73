"""ExportGraph: what a model computes, as one flat list of operators, by torch.export.

[Note: regions] torch.export puts what runs under ``torch.no_grad()`` or ``torch.autocast`` into a
graph of its own, which an operator of the outer graph calls. A boundary may lie inside of it. So
the graphs are made one flat list here, and each node has its regions in ``meta["regions"]``, the
outermost first. Each stage makes regions of its own from them.
"""

from __future__ import annotations

import contextlib
import io
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipegrad.errors import PipegradError, TopologyError, root_of
from pipegrad.interop.private import fake_tensors, flat, storage_key
from pipegrad.partition.traced.export_guards import STRUCTURAL, refuses_what_export_loses


@dataclass(frozen=True, eq=False)
class Region:
    """A context in which some nodes run: ``torch.no_grad()`` or ``torch.autocast``."""

    context: Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class State:
    """A parameter or a buffer, under one of its names in the uncut model."""

    name: str
    tensor: Tensor
    is_persistent: bool = True


@dataclass
class ExportGraph:
    """What a model computes for one example.

    Attributes:
        leaves: The leaves of the example behind their paths.
        device: Where the graph makes new tensors.
        nodes: All calls of operators, in order. They also read the nodes of the next three tables.
        states: Parameters and buffers. A tied one has a node for each name under which it is used.
        inputs: Positions among the leaves of the example.
        constants: Tensors that the model makes or holds, and that are not its state.
        outputs: What the model returns, leaf by leaf: nodes, and constants that are no tensors.
        rebuild: Makes what the model returns of its leaves.
    """

    leaves: list[tuple[str, object]]
    device: torch.device
    nodes: list[fx.Node] = field(default_factory=list)
    states: dict[fx.Node, State] = field(default_factory=dict)
    inputs: dict[fx.Node, int] = field(default_factory=dict)
    constants: dict[fx.Node, Tensor] = field(default_factory=dict)
    outputs: list[object] = field(default_factory=list)
    rebuild: Callable[[list[object]], object] = list


def export_graph(model: nn.Module, example: Mapping[str, object]) -> ExportGraph:
    """Returns what `model` computes for `example`, in the mode that the model is in.

    Args:
        model: May be on the meta device, all of it or some parameters.
        example: Arguments by name. Tensors are read for their shapes, dtypes and devices alone.
            Whatever else the example contains is a constant of the graph.

    Raises:
        TopologyError: If torch.export cannot trace the model, or would lose a part of it.
    """
    leaves = [(f"{name}{path}", leaf) for name, x in example.items() for path, leaf in flat(x)[0]]
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    held = [*model.parameters(), *model.buffers(), *tensors]
    device = next((x.device for x in held if not x.is_meta), torch.device("cpu"))
    with _without_meta(model, device), refuses_what_export_loses(), torch.enable_grad():
        # Two names of one tensor, such as input_ids and labels, are two inputs of the graph only if
        # they are two tensors.
        own = {name: _new_tensors(value, device) for name, value in example.items()}
        printed = io.StringIO()
        try:
            # If it fails, torch prints the whole graph beside its error.
            with contextlib.redirect_stderr(printed):
                program = torch.export.export(model, (), own)
        except PipegradError:
            raise
        except Exception as error:
            cause = root_of(error)
            line = str(cause).strip().partition("\n")[0] or repr(cause)
            raise TopologyError(
                f"torch.export cannot trace {type(model).__name__}: {line}. {STRUCTURAL}"
            ) from error
    sys.stderr.write(printed.getvalue())
    return _Flattening(model, program).run(ExportGraph(leaves, device))


class _Flattening:
    """Makes one flat list of the graphs of an exported program; see [Note: regions]."""

    def __init__(self, model: nn.Module, program: torch.export.ExportedProgram) -> None:
        self._program = program
        self._graph = fx.Graph()
        self._states = states_of(model)
        self._aliases = dict[int, list[State]]()
        for state in self._states.values():
            self._aliases.setdefault(id(state.tensor), []).append(state)
        self._nodes = dict[str, fx.Node]()  # of states, by name
        self._examples = dict[State, Tensor]()

    def run(self, result: ExportGraph) -> ExportGraph:
        signature = self._program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        constants = dict(signature.inputs_to_lifted_tensor_constants)
        self._result = result
        sources = list[object]()
        for node in self._program.graph.find_nodes(op="placeholder"):
            if node.name in names:
                state = self._states[names[node.name]]
                self._examples[state] = node.meta["val"]
                sources.append(state)
                continue
            source = self._source(node.name, node.meta.get("val"))
            sources.append(source)
            if node.name in constants:
                result.constants[source] = self._constant(constants[node.name])
            else:
                result.inputs[source] = len(result.inputs)
        outputs = self._inline(self._program.graph_module, sources, ())
        result.outputs = [self._resolved(value, ()) for value in outputs]
        result.rebuild = self._program.call_spec.out_spec.unflatten
        return result

    def _source(self, name: str, example: object) -> fx.Node:
        node = self._graph.placeholder(name)
        node.meta["val"] = example
        return node

    def _constant(self, name: str) -> Tensor:
        constant = self._program.constants[name]
        if not isinstance(constant, Tensor) or constant.is_meta:
            raise TopologyError(
                f"the model holds {name!r}, a {type(constant).__name__} on the meta device, which "
                f"is neither a parameter nor a buffer: register it as a buffer"
            )
        return constant

    def _inline(
        self, module: nn.Module, arguments: Sequence[object], regions: tuple[Region, ...]
    ) -> list[object]:
        """Adds the nodes of a graph; returns what the graph returns."""
        graph: fx.Graph = module.graph  # type: ignore[assignment]
        values: dict[fx.Node, Any] = {}
        operands = iter(arguments)
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(operands)
            elif node.op == "get_attr":
                values[node] = module.get_submodule(node.target)
            elif node.op == "output":
                return [values.get(x, x) if isinstance(x, fx.Node) else x for x in node.args[0]]
            elif (region := _region_of(node)) is not None:
                inner, *rest = (values.get(x, x) for x in node.args if isinstance(x, fx.Node))
                values[node] = self._inline(inner, rest, (*regions, region))
            elif node.target is operator.getitem and isinstance(values[node.args[0]], list):
                values[node] = values[node.args[0]][node.args[1]]
            elif not _is_empty(node):
                values[node] = self._copied(node, values, regions)
        return []

    def _copied(
        self, node: fx.Node, values: Mapping[fx.Node, object], regions: tuple[Region, ...]
    ) -> fx.Node:
        if any(isinstance(values[x], nn.Module) for x in node.all_input_nodes):
            raise TopologyError(
                f"the graph of torch.export has {node.name!r}, an operator that calls a graph of "
                f"its own, and a traced cut knows only no_grad and autocast. {STRUCTURAL}"
            )
        paths = _paths(node)
        copy = self._graph.node_copy(node, lambda x: self._resolved(values[x], paths))  # type: ignore[arg-type,return-value]
        copy.meta["regions"] = regions
        self._result.nodes.append(copy)
        return copy

    def _resolved(self, value: object, paths: Sequence[str]) -> object:
        """Returns the node of a state, under the name by which this use knows it."""
        # torch.export uses one name of a tied parameter everywhere. A stage holds the name under
        # which its own modules use it.
        if not isinstance(value, State):
            return value
        aliases = self._aliases[id(value.tensor)]
        within = [a for a in aliases if a.name.rpartition(".")[0] in paths]
        state = max(within, key=lambda a: a.name.count("."), default=aliases[0])
        if state.name not in self._nodes:
            self._nodes[state.name] = self._source(state.name, self._examples[value])
            self._result.states[self._nodes[state.name]] = state
        return self._nodes[state.name]


def states_of(model: nn.Module) -> dict[str, State]:
    """Returns parameters and buffers by their names, tied ones under each of their names."""
    states = {n: State(n, p) for n, p in model.named_parameters(remove_duplicate=False)}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}" if path else name
            is_persistent = name not in module._non_persistent_buffers_set
            states[full] = State(full, tensor, is_persistent)
    return states


def calls_of(node: fx.Node) -> list[tuple[str, str]]:
    """Returns a key and the path of each module call that a node is in, the outermost first."""
    stack: Mapping[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    return [(key, path) for key, (path, _) in stack.items()]


def _is_empty(node: fx.Node) -> bool:
    """Returns whether a node does nothing for the model."""
    if node.target is torch.ops.aten.copy_.default:
        # After `self.count += 1` torch.export copies the buffer onto itself. Autograd would take
        # this for a change of a value that a backward needs.
        values: Sequence[Tensor] = [x.meta["val"] for x in node.all_input_nodes]
        places = {(storage_key(x.untyped_storage()), x.storage_offset()) for x in values}
        return len(places) == 1 and len({x.stride() for x in values}) == 1
    # The assertion repeats what the fixed shapes and dtypes of inputs say, and it names the device
    # of the trace.
    return str(node.target) == "aten._assert_tensor_metadata.default"


def _paths(node: fx.Node) -> list[str]:
    return [path for _, path in calls_of(node)]


def _region_of(node: fx.Node) -> Region | None:
    """Returns the region that this node calls the graph of."""
    arguments: Sequence[Any] = node.args
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return Region(partial(torch.set_grad_enabled, arguments[0]))
    if node.target is torch.ops.higher_order.wrap_with_autocast:
        device_type, dtype, is_enabled, is_cached = arguments[:4]
        options = {"dtype": dtype, "enabled": is_enabled, "cache_enabled": is_cached}
        return Region(partial(torch.autocast, device_type, **options))
    return None


def _new_tensors(value: object, device: torch.device) -> object:
    leaves, rebuilt = flat(value)
    return rebuilt(
        [
            torch.empty_like(leaf, device=device if leaf.is_meta else leaf.device)
            if isinstance(leaf, Tensor)
            else leaf
            for _, leaf in leaves
        ]
    )


@contextlib.contextmanager
def _without_meta(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts fake tensors into the place of a model's own, if one of these is on the meta device."""
    # A tensor that the model makes without a device is on the CPU, and torch refuses to mix it with
    # meta tensors. Fake ones have no memory, either, but they say that they are on the CPU.
    before: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [
        (module, dict(module._parameters), dict(module._buffers)) for module in model.modules()
    ]
    tables: list[dict[str, Any]] = [table for _, *both in before for table in both]
    held: dict[int, Tensor] = {
        id(x): x for table in tables for x in table.values() if x is not None
    }
    if not any(x.is_meta for x in held.values()):
        yield
        return
    with fake_tensors():
        fakes: dict[int, Any] = {key: _like(x, device) for key, x in held.items()}
    try:
        for module, parameters, buffers in before:
            module._parameters |= {n: fakes.get(id(x)) for n, x in parameters.items()}
            module._buffers |= {n: fakes.get(id(x)) for n, x in buffers.items()}
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters |= parameters
            module._buffers |= buffers


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
