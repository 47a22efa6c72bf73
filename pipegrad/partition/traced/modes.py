"""What a graph that was traced in training mode does in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from pipegrad.partition.traced.export_graph import ExportGraph


def add_evaluation(graph: ExportGraph, evaluation: ExportGraph) -> bool:
    """Adds to each node its arguments in evaluation mode: ``meta["evaluation"]``, None of no call.

    Args:
        graph: The model in training mode.
        evaluation: The same model in evaluation mode.

    Returns:
        Whether it could: the graphs are the same, but for arguments that are no tensors, such as
        those of dropout, and nodes of which nobody reads the result, such as counters.
    """
    same = _same_sources(graph, evaluation)
    rest = iter(graph.nodes)
    for node in evaluation.nodes:
        if any(x not in same for x in node.all_input_nodes):
            return False
        wanted = node.target, [_plain(same[x]) for x in node.all_input_nodes]
        for other in rest:
            if (other.target, [_plain(x) for x in other.all_input_nodes]) == wanted:
                break
            if not _is_left_out(other):
                return False
        else:
            return False
        if len(other.meta["regions"]) != len(node.meta["regions"]):
            return False
        same[node] = other
        # Where training reads a contiguous copy, which another stage may have sent, so does this.
        read = dict(zip(node.all_input_nodes, other.all_input_nodes, strict=True))
        other.meta["evaluation"] = _with_nodes((node.args, node.kwargs), read)
    outputs = [same.get(x) if isinstance(x, fx.Node) else x for x in evaluation.outputs]
    return all(map(_is_left_out, rest)) and outputs == graph.outputs


def _with_nodes(arguments: Any, nodes: Mapping[fx.Node, fx.Node]) -> Any:  # noqa: ANN401
    return fx.node.map_aggregate(arguments, lambda x: nodes[x] if isinstance(x, fx.Node) else x)


def _is_left_out(node: fx.Node) -> bool:
    """Returns whether evaluation can do without a node of training; notes what becomes of it."""
    is_copy = node.target is torch.ops.aten.contiguous.default
    node.meta["evaluation"] = (node.args, node.kwargs) if is_copy else None
    return is_copy or not node.users


def _plain(node: fx.Node) -> fx.Node:
    """Returns the node whose value this is, in whatever layout."""
    # An operator may return another layout in training, and contiguous() is a node only if it does
    # something.
    while node.target is torch.ops.aten.contiguous.default:
        node = node.all_input_nodes[0]
    return node


def _same_sources(graph: ExportGraph, evaluation: ExportGraph) -> dict[fx.Node, fx.Node]:
    names = {state.name: node for node, state in graph.states.items()}
    same = {x: names[s.name] for x, s in evaluation.states.items() if s.name in names}
    same |= dict(zip(evaluation.inputs, graph.inputs, strict=True))
    constants = list(graph.constants.items())
    for (node, constant), (other, value) in zip(
        evaluation.constants.items(), constants, strict=False
    ):
        if constant.shape == value.shape and constant.equal(value):
            same[node] = other
    return same


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and then each module back into its own mode."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
