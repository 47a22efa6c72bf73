"""GraphMemory: which nodes of a graph share memory, and which are computed again in each stage.

[Note: recomputed] A mask, a position or a table of cosines depends on what a step is given, on
constants and on buffers that nobody changes. Each stage that needs it computes it again, because
every stage is given the batch anyway. What depends on a parameter or on random numbers is computed
once, and sent. A tensor that is written in place is recomputed with all writes, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from pipegrad.errors import TopologyError
from pipegrad.interop.private import arguments_of, storage_key
from pipegrad.partition.traced.export_graph import ExportGraph
from pipegrad.partition.traced.export_guards import STRUCTURAL

_STATISTICS = {"running_mean", "running_var"}  # batch norm writes them, which its schema hides


class GraphMemory:
    """Memory of the nodes of a graph.

    Attributes:
        writers: Memory -> nodes that write it, in order.
        sent: Nodes that are computed once; see [Note: recomputed]. Parameters are among them.
    """

    def __init__(self, graph: ExportGraph) -> None:
        self._graph = graph
        self.writers = dict[int, list[fx.Node]]()
        for node in graph.nodes:
            for memory in self.written(node):
                self.writers.setdefault(memory, []).append(node)
        self.sent = self._sent()

    @staticmethod
    def of(node: fx.Node) -> frozenset[int]:
        """Returns the memory in which the value of a node lies: several of a list of tensors."""
        # Values of nodes are fake tensors. Views of one tensor share a fake storage, and all values
        # are alive, so a key belongs to one storage.
        value = node.meta.get("val")
        values = value if isinstance(value, tuple | list) else [value]
        return frozenset(
            storage_key(x.untyped_storage())
            for x in values
            if isinstance(x, Tensor) and x.layout is torch.strided
        )

    def written(self, node: fx.Node) -> frozenset[int]:
        """Returns the memory that a node writes."""
        if node.target is torch.ops.aten.detach_.default:  # changes no element
            return frozenset()
        arguments = arguments_of(node.target)
        given = dict(zip((name for name, _ in arguments), node.args, strict=False)) | node.kwargs
        uses_batch = bool(given.get("training", given.get("use_input_stats")))
        changed = {name for name, is_written in arguments if is_written}
        changed |= _STATISTICS if uses_batch else set()
        targets = [x for name in changed for x in _nodes_in(given.get(name))]
        return frozenset(memory for x in targets for memory in self.of(x))

    def _sent(self) -> set[fx.Node]:
        graph = self._graph
        sent = {
            node
            for node, state in graph.states.items()
            if isinstance(state.tensor, torch.nn.Parameter)
            or not self.writers.keys().isdisjoint(self.of(node))
        }
        memory = {key for node in sent for key in self.of(node)}
        size = -1
        # A write may come after a use of the memory that it makes part of a stage.
        while size != len(sent) + len(memory):
            size = len(sent) + len(memory)
            for node in graph.nodes:
                is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
                depends = any(x in sent for x in node.all_input_nodes)
                if is_random or depends or not memory.isdisjoint(self.of(node)):
                    sent.add(node)
                    memory |= self.written(node)
        self._check_given(memory)
        return sent

    def _check_given(self, sent_memory: set[int]) -> None:
        """Refuses writes into what every stage is given."""
        graph = self._graph
        for node, position in graph.inputs.items():
            if not sent_memory.isdisjoint(self.of(node)):
                raise TopologyError(
                    f"the model changes its input {graph.leaves[position][0]!r} in place, and "
                    f"other stages could not see that: change a copy of it. {STRUCTURAL}"
                )
        for node in graph.constants:
            # What the model makes by torch.tensor() is copied in each forward.
            is_copied = all(x.target is torch.ops.aten.lift_fresh_copy.default for x in node.users)
            if not is_copied and not self.writers.keys().isdisjoint(self.of(node)):
                raise TopologyError(
                    f"the model changes its tensor {node.name!r} in place, which is neither a "
                    f"parameter nor a buffer: register it as a buffer. {STRUCTURAL}"
                )

    def with_causes(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Returns what is recomputed for nodes: they, what they read, and who writes that."""
        found, rest = set[fx.Node](), [x for x in nodes if x not in self.sent]
        while rest:
            node = rest.pop()
            if node in found:
                continue
            found.add(node)
            causes = [*node.all_input_nodes]
            causes += [w for memory in self.of(node) for w in self.writers.get(memory, ())]
            rest += [x for x in causes if x not in self.sent]
        return found


def _nodes_in(argument: object) -> list[fx.Node]:
    values = argument if isinstance(argument, tuple | list) else [argument]
    return [x for x in values if isinstance(x, fx.Node)]
