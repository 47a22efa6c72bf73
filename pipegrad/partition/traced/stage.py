"""TracedStage: the module of a stage whose code is a part of a traced graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipegrad.errors import StepError
from pipegrad.interop.private import flat
from pipegrad.partition.traced.export_graph import ExportGraph, Region
from pipegrad.partition.traced.export_guards import STRUCTURAL


@dataclass(frozen=True, eq=False)
class StageCode:
    """What a stage runs.

    Attributes:
        traced: The graph of the model.
        nodes: The nodes of the stage, in order.
        edges: Nodes of other stages whose values it is given.
        outputs: What it returns: nodes, and constants that are no tensors.
        copied: Edges and inputs that its nodes change in place.
        is_last: Whether it returns what the model returns.
        training: The mode of the model when it was traced.
        has_evaluation: Whether the nodes also say what they do in evaluation mode.
    """

    traced: ExportGraph
    nodes: Sequence[fx.Node]
    edges: Sequence[fx.Node]
    outputs: Sequence[object]
    copied: frozenset[fx.Node]
    is_last: bool
    training: bool
    has_evaluation: bool
    needed: frozenset[int] = field(init=False)  # positions of leaves of the example
    _functions: dict[object, Callable[..., Any]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        used = {x for node in self.nodes for x in node.all_input_nodes} | set(self.outputs)
        inputs = self.traced.inputs
        object.__setattr__(self, "needed", frozenset(inputs[x] for x in inputs if x in used))

    def __deepcopy__(self, memo: object) -> StageCode:
        return self  # a copy of the module has the same code

    def function(self, device: torch.device, *, training: bool) -> Callable[..., Any]:
        """Returns a function of the module, edges and needed leaves, for tensors on `device`."""
        key = device, training
        if key not in self._functions:
            if training != self.training and (training or not self.has_evaluation):
                modes = ("evaluation", "training")
                raise StepError(
                    f"the model was traced in {modes[self.training]} mode, and runs other code in "
                    f"{modes[training]} mode: trace it in the mode that you use. {STRUCTURAL}"
                )
            self._functions[key] = _Compiler(self, device, training=training).run()
        return self._functions[key]


class TracedStage(nn.Module):
    """A stage of a traced model. It holds parameters under the names of the uncut model.

    In evaluation mode, dropout and batch norm do what they do in the model. Its shapes are those of
    the example that the model was traced with.

    Args:
        code: What it runs.
        states: Name in the uncut model -> the tensor itself, and whether state_dict has it.
    """

    def __init__(self, code: StageCode, states: Mapping[str, tuple[Tensor, bool]]) -> None:
        super().__init__()
        self._code = code
        for name, (tensor, is_persistent) in states.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for step in path:
                if step not in owner._modules:
                    owner.add_module(step, nn.Module())
                owner = owner.get_submodule(step)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(last, tensor)
            else:
                owner.register_buffer(last, tensor, persistent=is_persistent)
        for module in self.modules():
            module.training = code.training

    def forward(self, *edges: Tensor, **batch: object) -> Any:  # noqa: ANN401 - what the model returns
        """Returns the stage's outputs: a tensor or a tuple; of the last stage what the model does.

        Args:
            edges: Values that earlier stages make, in the order of the part's inputs.
            batch: Arguments of the model, of the shapes and dtypes of the example. Those that the
                stage does not need may be missing.

        Raises:
            StepError: If an argument is missing, or looks unlike that of the example.
        """
        code = self._code
        if len(edges) != len(code.edges):
            raise StepError(f"the stage takes {len(code.edges)} edges, found {len(edges)}")
        leaves = _leaves(code, batch)
        given = next((x for x in (*edges, *leaves) if isinstance(x, Tensor)), None)
        device = given.device if given is not None else next(self.parameters()).device
        values = code.function(device, training=self.training)(self, *edges, *leaves)
        if code.is_last:
            return code.traced.rebuild(list(values))
        return values[0] if len(values) == 1 else tuple(values)


def _leaves(code: StageCode, batch: Mapping[str, object]) -> list[object]:
    """Returns the needed leaves of a batch, after a look at all of them."""
    paths = {path: position for position, (path, _) in enumerate(code.traced.leaves)}
    found: dict[int, object] = {}
    for name, value in batch.items():
        own = [("", value)] if isinstance(value, Tensor) else flat(value)[0]
        for path, leaf in own:
            position = paths.get(name + path)
            if position is not None:
                _check_leaf(name + path, leaf, code.traced.leaves[position][1])
                found[position] = leaf
            elif leaf is not None:
                raise StepError(
                    f"the model was traced without the input {name + path!r}, and would ignore it: "
                    f"give it in the example. {STRUCTURAL}"
                )
    for position in sorted(code.needed):
        if position not in found:
            raise StepError(
                f"the input {code.traced.leaves[position][0]!r} is missing: the model was traced "
                f"with it"
            )
    return [found[position] for position in sorted(code.needed)]


def _check_leaf(path: str, leaf: object, example: object) -> None:
    if isinstance(leaf, Tensor) and isinstance(example, Tensor):
        if leaf.shape == example.shape and leaf.dtype == example.dtype:
            return
    elif type(leaf) is type(example) and leaf == example:
        return
    raise StepError(
        f"the input {path!r} is {_described(leaf)}, and in the example that the model was traced "
        f"with {_described(example)}. A traced stage takes nothing else: give microbatches like "
        f"the example, or cut with how='structural', which takes any shape"
    )


def _described(leaf: object) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)


class _Compiler:
    """Makes a function of the nodes of a stage; see [Note: regions]."""

    def __init__(self, code: StageCode, device: torch.device, *, training: bool) -> None:
        self._code = code
        self._device = device
        self._is_other_mode = training != code.training
        self._outputs = {x for x in code.outputs if isinstance(x, fx.Node)}

    def run(self) -> Callable[..., Any]:
        code, traced = self._code, self._code.traced
        used = {x for node in code.nodes for x in node.all_input_nodes} | self._outputs
        states = [(node, state) for node, state in traced.states.items() if node in used]
        constants = [(node, x) for node, x in traced.constants.items() if node in used]
        inputs = {position: node for node, position in traced.inputs.items()}
        given = [*code.edges, *(inputs[position] for position in sorted(code.needed))]
        graph = fx.Graph()
        taken = [*(node for node, _ in states), *given, *(node for node, _ in constants)]
        values = {node: graph.placeholder(node.name) for node in taken}
        for node in taken:
            if node in code.copied:
                values[node] = graph.call_function(torch.ops.aten.clone.default, (values[node],))
        self._add(graph, code.nodes, values, depth=0)
        outputs: Any = tuple(values[x] if isinstance(x, fx.Node) else x for x in code.outputs)
        graph.output(outputs)
        compute = fx.GraphModule({}, graph).forward
        # Parameters are looked up in each forward, because FSDP2 exchanges them.
        lookups = [attrgetter(state.name) for _, state in states]
        tensors = [x.to(self._device) for _, x in constants]

        def function(stage: nn.Module, *given: object) -> Any:  # noqa: ANN401
            return compute(*[lookup(stage) for lookup in lookups], *given, *tensors)

        return function

    def _add(
        self, graph: fx.Graph, nodes: Sequence[fx.Node], values: dict[fx.Node, fx.Node], depth: int
    ) -> None:
        """Adds nodes to a graph, and makes one call of what is in one region."""
        for region, group in groupby(nodes, lambda node: node.meta["regions"][depth : depth + 1]):
            run = list(group)
            if region:
                self._add_region(graph, region[0], run, values, depth)
                continue
            for node in run:
                self._call(graph, node, values)

    def _add_region(
        self,
        graph: fx.Graph,
        region: Region,
        nodes: Sequence[fx.Node],
        values: dict[fx.Node, fx.Node],
        depth: int,
    ) -> None:
        inside = set(nodes)
        taken = dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside)
        made = [n for n in nodes if n in self._outputs or not inside.issuperset(n.users)]
        inner = fx.Graph()
        inner_values = {x: inner.placeholder(x.name) for x in taken}
        self._add(inner, nodes, inner_values, depth + 1)
        inner.output(tuple(inner_values[n] for n in made))
        call = graph.call_function(_within(region, inner), tuple(values[x] for x in taken))
        for position, node in enumerate(made):
            values[node] = graph.call_function(operator.getitem, (call, position))

    def _call(self, graph: fx.Graph, node: fx.Node, values: dict[fx.Node, fx.Node]) -> None:
        """Adds the call of a node, on this device and in this mode."""
        call = node.meta["evaluation"] if self._is_other_mode else (node.args, node.kwargs)
        if call is None:  # it runs in training only
            return

        def placed(x: Any) -> Any:  # noqa: ANN401 - whatever an operator takes
            if isinstance(x, fx.Node):
                return values[x]
            return self._device if x == self._code.traced.device else x

        args, kwargs = fx.node.map_aggregate(call, placed)
        values[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]


def _within(region: Region, graph: fx.Graph) -> Callable[..., Any]:
    """Returns a function that runs a graph in a region."""
    compute = fx.GraphModule({}, graph).forward

    def within(*arguments: object) -> Any:  # noqa: ANN401
        with region.context():
            return compute(*arguments)

    return within
