"""TracedModel: the graph of torch.export, cut into stages."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count, pairwise

import torch
from torch import Tensor, fx, nn

from pipegrad.errors import TopologyError
from pipegrad.interop.private import flat
from pipegrad.partition.part import Part
from pipegrad.partition.traced.export_graph import (
    State,
    calls_of,
    export_graph,
    states_of,
)
from pipegrad.partition.traced.export_guards import STRUCTURAL
from pipegrad.partition.traced.graph_memory import GraphMemory
from pipegrad.partition.traced.modes import add_evaluation, evaluating
from pipegrad.partition.traced.stage import StageCode, TracedStage
from pipegrad.pipeline.stage import fields_of


class TracedModel:
    """A model as the graph of its forward for one example, which can be cut at calls of its layers.

    The cut is made of operators, not of modules. So any model can be cut that torch.export can
    trace, with any skips. Its price is that shapes, dtypes and whatever else the example contains
    are fixed. A stage takes one microbatch, so the example is one microbatch.

    Args:
        model: In the mode in which it is used, on any device. It may be on the meta device. It is
            only looked at: its stages hold its own parameters and buffers.
        example: Arguments of its forward by name: one microbatch. Values of tensors are not read.
        layers: Paths of the modules at whose calls stages may begin, such as
            ``"model.layers.0"``.

    Attributes:
        calls: Calls of `layers` in the order in which the forward begins them. A module that is
            called again is ``"shared#1"``, ``"shared#2"``.

    Raises:
        TopologyError: If a layer is not in the model, or torch.export cannot trace the model.
    """

    def __init__(
        self, model: nn.Module, example: Mapping[str, object], layers: Sequence[str]
    ) -> None:
        paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
        if unknown := [path for path in layers if path not in paths]:
            raise TopologyError(f"{type(model).__name__} has no modules {unknown}")
        self._model = model
        self._example = example
        self._graph = export_graph(model, example)
        self._has_evaluation = model.training and self._traced_evaluation()
        self._memory = GraphMemory(self._graph)
        self._position = {node: i for i, node in enumerate(self._graph.nodes)}
        self._starts, self._call_of = self._walk(set(layers))
        self.calls = tuple(self._starts)

    def parts(self, boundaries: Sequence[int]) -> list[Part]:
        """Returns the stages. They share the model's parameters, and nothing is copied.

        Args:
            boundaries: For stages 1, 2, ... the index into `calls` of their first call.

        Raises:
            TopologyError: If there is no such call, if a stage would have nothing to do, or if two
                stages would change the same memory.
        """
        edges = [0, *boundaries, len(self.calls)]
        if any(a >= b for a, b in pairwise(edges)):
            raise TopologyError(
                f"boundaries {list(boundaries)} do not cut {len(self.calls)} calls of layers: give "
                f"ascending indices from 1 to {len(self.calls) - 1}"
            )
        starts = list(self._starts.values())
        return _Cut(self, [starts[index] for index in boundaries]).parts()

    def _traced_evaluation(self) -> bool:
        try:
            with evaluating(self._model):
                evaluation = export_graph(self._model, self._example)
        except TopologyError:
            return False
        return add_evaluation(self._graph, evaluation)

    def _walk(self, layers: set[str]) -> tuple[dict[str, int], dict[fx.Node, str]]:
        """Returns where each call of a layer starts, and for nodes the innermost call."""
        names = dict[tuple[str, ...], str]()
        starts, call_of, times = dict[str, int](), dict[fx.Node, str](), Counter[str]()
        for node in self._graph.nodes:
            stack = calls_of(node)
            for depth, (_, path) in enumerate(stack, 1):
                if path not in layers:
                    continue
                call = tuple(key for key, _ in stack[:depth])
                if call not in names:
                    names[call] = f"{path}#{times[path]}" if times[path] else path
                    times[path] += 1
                    starts[names[call]] = self._position[node]
                call_of[node] = names[call]
        return starts, call_of


class _Cut:
    """Makes the stages of one choice of boundaries.

    Args:
        model: The model.
        starts: Positions of the first nodes of stages 1, 2, ...
    """

    def __init__(self, model: TracedModel, starts: Sequence[int]) -> None:
        self._model = model
        self._graph = model._graph
        self._memory = model._memory
        self._starts = starts
        self._last = len(starts)
        self._nodes = [node for node in self._graph.nodes if node in self._memory.sent]
        self._stage_of = dict[fx.Node, int]()
        for node in self._nodes:
            self._stage_of[node] = self._chosen_stage(node)
        self._takers = {node: self._stages_that_take(node) for node in self._nodes}

    def _chosen_stage(self, node: fx.Node) -> int:
        """Returns the stage of a node: by its place in the graph, with two exceptions."""
        read = [self._stage_of[x] for x in node.all_input_nodes if x in self._stage_of]
        # A list of tensors cannot be sent, but its elements can.
        is_element = node.target is operator.getitem
        # torch.export writes buffers at the end of the graph.
        is_copy = node.target is torch.ops.aten.copy_.default
        is_buffer_write = is_copy and node.args[0] in self._graph.states
        if read and (is_element or is_buffer_write):
            return max(read)
        return bisect_right(self._starts, self._model._position[node])

    def _stages_that_take(self, node: fx.Node) -> list[int]:
        """Returns the later stages that read a node's value."""
        takers = {self._stage_of[user] for user in node.users if user in self._stage_of}
        takers |= {self._last} if node in self._graph.outputs else set()
        return sorted(takers - {self._stage_of[node]})

    def parts(self) -> list[Part]:
        names = self._edge_names()
        states = self._states()
        parts = list[Part]()
        for stage in range(self._last + 1):
            edges = [node for node in self._nodes if stage in self._takers[node]]
            made = [n for n in self._nodes if self._stage_of[n] == stage and self._takers[n]]
            outputs = made if stage < self._last else self._graph.outputs
            if (not made and stage < self._last) or stage not in self._stage_of.values():
                raise TopologyError(
                    f"stage {stage} makes nothing that a later stage takes: choose other "
                    f"boundaries among {dict(enumerate(self._model.calls))}"
                )
            code = StageCode(
                self._graph,
                self._nodes_of(stage),
                edges,
                outputs,
                copied=self._copied(stage, edges),
                is_last=stage == self._last,
                training=self._model._model.training,
                has_evaluation=self._model._has_evaluation,
            )
            returned = self._names_of_returned() if code.is_last else [names[x] for x in made]
            parts.append(
                Part(
                    TracedStage(code, states[stage]),
                    tuple(names[x] for x in edges),
                    tuple(returned),
                )
            )
        return parts

    def _nodes_of(self, stage: int) -> list[fx.Node]:
        """Returns the nodes of a stage in order, with those that it recomputes."""
        own = {node for node in self._nodes if self._stage_of[node] == stage}
        read = {x for node in own for x in node.all_input_nodes}
        if stage == self._last:
            read |= {x for x in self._graph.outputs if isinstance(x, fx.Node)}
        position = self._model._position
        nodes = own | {x for x in self._memory.with_causes(read) if x in position}
        return sorted(nodes, key=position.__getitem__)

    def _edge_names(self) -> dict[fx.Node, str]:
        """Returns a name for each value that is sent, after the layer that makes it."""
        taken = {path.partition("[")[0] for path, _ in self._graph.leaves}
        names, path = dict[fx.Node, str](), ""
        for node in self._graph.nodes:
            # Between two modules a value has the name of the one before it.
            path = [path, *(path for _, path in calls_of(node) if path)][-1]
            if not self._takers.get(node):
                continue
            if not isinstance(node.meta.get("val"), Tensor):
                raise TopologyError(
                    f"stage {self._stage_of[node]} makes {node.name!r}, which stages "
                    f"{self._takers[node]} take, and it is no tensor. {STRUCTURAL}"
                )
            name = base = self._model._call_of.get(node) or path or node.name
            for number in count(2):
                if name not in taken:
                    break
                name = f"{base}:{number}"
            taken.add(name)
            names[node] = name
        return names

    def _names_of_returned(self) -> list[str]:
        values = [x.meta["val"] if isinstance(x, fx.Node) else x for x in self._graph.outputs]
        returned = self._graph.rebuild(values)
        named = fields_of(returned)
        if named is None and isinstance(returned, tuple | list):
            named = {str(number): value for number, value in enumerate(returned)}
        named = {"output": returned} if named is None else named
        return [
            str(name)
            for name, value in named.items()
            if any(isinstance(leaf, Tensor) for _, leaf in flat(value)[0])
        ]

    def _copied(self, stage: int, edges: Sequence[fx.Node]) -> frozenset[fx.Node]:
        """Returns the edges and inputs that a stage changes in place, so that it changes a copy.

        Raises:
            TopologyError: If another stage, or another view, would have to see the change.
        """
        memory, copied = self._memory, set[fx.Node]()
        writes = [(n, key) for n in self._nodes_of(stage) for key in memory.written(n)]
        for node, key in writes:
            copied |= {x for x in self._graph.inputs if key in memory.of(x)}
            entering = [x for x in edges if key in memory.of(x)]
            later = [
                x
                for x in self._nodes
                if self._stage_of[x] < stage < max(self._takers[x], default=0)
                and key in memory.of(x)
            ]
            if later or len(entering) > 1:
                place = [path for _, path in calls_of(node)][-1:]
                raise TopologyError(
                    f"stage {stage} changes a value of an earlier stage in place ({node.target} in "
                    f"{place}), and others read it too: write x = x + y in place of x += y, or "
                    f"choose other boundaries. {STRUCTURAL}"
                )
            copied |= set(entering)
        return frozenset(copied)

    def _states(self) -> list[dict[str, tuple[Tensor, bool]]]:
        """Returns for each stage the parameters and buffers that it holds, by name."""
        read = [
            [x for node in self._nodes_of(stage) for x in node.all_input_nodes]
            for stage in range(self._last + 1)
        ]
        read[-1] += [x for x in self._graph.outputs if isinstance(x, fx.Node)]
        states = self._graph.states
        held = [{states[x].name for x in nodes if x in states} for nodes in read]
        everything = states_of(self._model._model)
        self._check_written(held, everything)
        self._add_unread(held, everything)
        return [
            {n: (s.tensor, s.is_persistent) for n, s in everything.items() if n in names}
            for names in held
        ]

    def _add_unread(self, held: Sequence[set[str]], everything: Mapping[str, State]) -> None:
        """Adds the names that no node reads, so that all stages together have all names.

        Another name of a tied tensor goes to the first stage that holds it, and a tensor that no
        node reads to the stage that first runs its module.
        """
        first = dict[int, int]()  # tensor -> the first stage that holds it
        home = dict[str, int]()  # path of a module -> the stage that first runs it
        for stage, names in enumerate(held):
            for name in names:
                first.setdefault(id(everything[name].tensor), stage)
            for node in self._nodes_of(stage):
                for _, path in calls_of(node):
                    home.setdefault(path, stage)
        read = set[str]().union(*held)
        for name, state in everything.items():
            if name in read or not state.is_persistent:
                continue
            path = name.rpartition(".")[0]
            while path and path not in home:
                path = path.rpartition(".")[0]
            held[first.get(id(state.tensor), home.get(path, 0))].add(name)

    def _check_written(self, held: Sequence[set[str]], everything: Mapping[str, State]) -> None:
        """Refuses a buffer that the forward changes, and that several stages use."""
        for node, state in self._graph.states.items():
            memory = self._memory.of(node)
            if self._memory.writers.keys().isdisjoint(memory):
                continue
            stages = {
                stage
                for stage, names in enumerate(held)
                if any(everything[name].tensor is state.tensor for name in names)
            }
            writers = [writer for key in memory for writer in self._memory.writers.get(key, ())]
            stages |= {self._stage_of[writer] for writer in writers}
            if len(stages) > 1:
                raise TopologyError(
                    f"the forward changes {state.name!r}, and stages {sorted(stages)} use it, so "
                    f"their copies would differ: choose boundaries such that one stage uses it"
                )
