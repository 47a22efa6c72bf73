"""Sharded layers: FSDP2 and tensor parallelism of a rank's stages, as ``[parallel]`` says.

Stages are made whole, and tried out, and then their parameters become DTensors. Tensor parallelism
is first: FSDP2 cuts what it has left. The gradient layer knows DTensors, and sums the tied ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pipegrad.interop.private import unflattened
from pipegrad.model.dtensor import is_dtensor
from pipegrad.partition.cut_model import Cut
from pipegrad.topology import Topology
from pipegrad.train.config import Config
from pipegrad.train.functions import imported

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_stages(config: Config, topology: Topology, cut: Cut) -> None:
    """Makes the parameters of this rank's stages DTensors. Local.

    Raises:
        ConfigError: If torch refuses it, a pattern matches no layer, or tied layers differ.
    """
    parallel, mesh = config.parallel, topology.mesh
    assert mesh is not None
    stages = {index: cut.modules[index] for index in topology.local_stages}
    if parallel.tensor_plan is not None:
        places = _places_of(stages.values())
        try:
            if isinstance(parallel.tensor_plan, str):
                function = imported(config, "parallel.tensor_plan", parallel.tensor_plan)
                for module in stages.values():
                    function(module, mesh["tp"])
            else:
                _check_patterns(config, cut, parallel.tensor_plan)
                for module in stages.values():
                    _parallelize(module, mesh["tp"], parallel.tensor_plan)
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            config.refuse("parallel.tensor_plan", str(error), cause=error)
        _tie_again(config, places)
    if parallel.data_shard > 1:
        replicas = topology.size("dp") // parallel.data_shard
        data = mesh["dp"]
        if replicas > 1:  # HSDP: it also averages over the copies
            data = unflattened(mesh, "dp", {"copies": replicas, "shards": parallel.data_shard})
        try:
            _fully_shard(cut, stages, data)
        except (ValueError, NotImplementedError) as error:
            config.refuse("parallel.data_shard", str(error), cause=error)


def _places_of(modules: Any) -> dict[int, list[tuple[nn.Module, str]]]:  # noqa: ANN401
    """Returns the modules and attributes that hold each parameter, by its id."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in {id(part): part for module in modules for part in module.modules()}.values():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((part, name))
    return places


def _check_patterns(config: Config, cut: Cut, plan: Mapping[str, str]) -> None:
    names = [name for module in cut.modules.values() for name, _ in module.named_modules()]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            config.refuse("parallel.tensor_plan", f"{pattern!r} matches no module")


def _parallelize(stage: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Cuts the modules that a plan names, and makes all other parameters equal on all ranks.

    Between modules a tensor is the same on all ranks of the mesh, or what each has of the features.
    """
    # Imported late: it takes as long as all of pipegrad's.
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel,
    }

    def enter(_: nn.Module, args: Any) -> Any:  # noqa: ANN401 - a forward's
        return tuple(
            DTensor.from_local(x, mesh, [Replicate()], run_check=False) if _is_plain(x) else x
            for x in args
        )

    def leave(_: nn.Module, __: object, output: Any) -> Any:  # noqa: ANN401 - a forward's
        return output.to_local() if is_dtensor(output) else output

    for name, module in list(stage.named_modules()):
        style = next((s for pattern, s in plan.items() if fnmatchcase(name, pattern)), None)
        if style is not None:
            is_table = style == "rowwise" and isinstance(module, nn.Embedding)
            made = RowwiseParallel(input_layouts=Replicate()) if is_table else styles[style]()
            parallelize_module(module, mesh, made, src_data_rank=None)
    # A copy that is no DTensor would be taken for one that nobody reduces.
    for module in list(stage.modules()):
        own = [(n, p) for n, p in module._parameters.items() if p is not None and _is_plain(p)]
        for name, parameter in own:
            whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
        if own:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not is_dtensor(value)


def _tie_again(config: Config, places: Mapping[int, Sequence[tuple[nn.Module, str]]]) -> None:
    """Makes parameters that were one on this rank one again."""
    for (first, name), *others in places.values():
        parameter = getattr(first, name)
        for module, other in others:
            if getattr(getattr(module, other), "placements", None) != parameter.placements:
                config.refuse(
                    "parallel.tensor_plan",
                    f"{type(first).__name__} and {type(module).__name__} have one tied parameter, "
                    f"and the plan cuts it in two ways: rowwise of an embedding fits to "
                    f"colwise_gather_output of a head",
                )
            setattr(module, other, parameter)


def _fully_shard(cut: Cut, stages: Mapping[int, nn.Module], mesh: DeviceMesh) -> None:
    """Shards each layer, and then what is left of each stage."""
    from torch.distributed.fsdp import fully_shard

    for index, stage in stages.items():
        holders: dict[int, set[str]] = {}
        for name in cut.layers_of(index):
            for parameter in stage.get_submodule(name).parameters():
                holders.setdefault(id(parameter), set()).add(name)
        # Layers that share a parameter must be gathered together, so they stay with the stage.
        shared = set[str]().union(*(names for names in holders.values() if len(names) > 1))
        for name in cut.layers_of(index):
            layer = stage.get_submodule(name)
            if name not in shared and any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(stage, mesh=mesh)
