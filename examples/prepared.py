"""Stages whose parameters are DTensors, for `parallel.prepare` of a configuration.

`prepared.toml` says how to run them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipegrad import Topology


def fsdp2(stages: Sequence[nn.Module], topology: Topology) -> None:
    """Shards each layer over the data-parallel ranks, and then what is left of each stage."""
    assert topology.mesh is not None
    mesh = topology.mesh["dp"]
    if "fsdp" in dict(topology.axes):  # shards along it, of which ranks along dp have copies
        mesh = topology.mesh["dp", "fsdp"]
    for stage in stages:
        layers = [part for part in stage.children() if not isinstance(part, nn.ModuleList)]
        holders = Counter(p for layer in layers for p in layer.parameters())
        for layer in layers:
            held = list(layer.parameters())
            # Layers that share a parameter must be gathered together: they stay with the stage.
            if held and all(holders[p] == 1 for p in held):
                fully_shard(layer, mesh=mesh)
        fully_shard(stage, mesh=mesh)


def tensor_parallel(stages: Sequence[nn.Module], topology: Topology) -> None:
    """Cuts feed-forward networks along ``tp``. All else is whole on each rank, and computed there.

    Ranks may round differently there, so a handler averages the gradients of all else.
    """
    assert topology.mesh is not None
    styles = {"linear1": ColwiseParallel, "linear2": RowwiseParallel}
    for stage in stages:
        for name, layer in list(stage.named_modules()):
            if style := styles.get(name.rpartition(".")[2]):
                parallelize_module(layer, topology.mesh["tp"], style(), src_data_rank=None)
