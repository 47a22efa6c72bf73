"""Topology: the ranks as a named mesh, and the rank of each stage. Plain data, for one rank."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipegrad.comm.agreement import keep_timeout
from pipegrad.comm.process_groups import together
from pipegrad.comm.uncaught import report_uncaught
from pipegrad.errors import TopologyError

_Mesh = tuple[str, tuple[tuple[str, int], ...]]  # device type, names and sizes
_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[_Mesh, DeviceMesh]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Topology:
    """A mesh of global ranks with the stages along its pipeline dimension, as one rank sees it.

    Attributes:
        axes: Mesh dimensions, outermost first: ``(("pp", 4), ("dp", 2))``.
        ranks: Global ranks of the mesh, flat, last dimension fastest.
        stage_to_rank: For each stage its coordinate along the pipeline dimension.
        rank: The global rank whose view this is.
        pipeline: Name of the pipeline dimension.
        data: The dimension, or dimensions, along which ranks see different data.
        mesh: The DeviceMesh that it was made from; None for plain data.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    stage_to_rank: tuple[int, ...]
    rank: int
    pipeline: str = "pp"
    data: str | tuple[str, ...] = "dp"
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    # Ranks of each group. All views of one topology share them, because a group is looked up once
    # for each of its ranks, and it may have thousands.
    _groups: dict[tuple[Sequence[int], ...], tuple[int, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @classmethod
    def create(
        cls,
        *,
        pipeline: int,
        dimensions: Mapping[str, int] | None = None,
        data: str | tuple[str, ...] = "dp",
        stage_to_rank: Mapping[int, int] | Sequence[int] | None = None,
        device_type: str | None = None,
    ) -> Topology:
        """Returns the topology of this job. The pipeline is outermost, the rest is data parallel.

        For example, ``Topology.create(pipeline=4, dimensions={"tp": 2})`` on 16 ranks has the mesh
        ``(("pp", 4), ("dp", 2), ("tp", 2))``.

        Args:
            pipeline: Size of the pipeline dimension, ``"pp"``.
            dimensions: Names and sizes of dimensions inside of ``"dp"``, outermost first, as in
                ``{"tp": 2}``. All remaining ranks are the size of ``"dp"``.
            data: The dimension, or dimensions, along which ranks see different data.
            stage_to_rank: Stage -> pipeline coordinate. By default one stage per coordinate.
            device_type: Device type of the DeviceMesh. By default the accelerator if the backend
                supports it, else "cpu".

        Raises:
            TopologyError: If the sizes do not divide or a coordinate holds no stage.
        """
        if not dist.is_initialized():
            raise TopologyError(
                "there is no default process group: call torch.distributed.init_process_group()"
            )
        report_uncaught()
        axes = mesh_axes(dist.get_world_size(), pipeline, dimensions or {})
        mesh = _mesh_of(device_type or _device_type(), axes)
        return cls.from_mesh(mesh, data=data, stage_to_rank=stage_to_rank)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        pipeline: str = "pp",
        data: str | tuple[str, ...] = "dp",
        stage_to_rank: Mapping[int, int] | Sequence[int] | None = None,
    ) -> Topology:
        """Returns the topology of a DeviceMesh with named dimensions.

        Raises:
            TopologyError: If a named dimension is missing.
        """
        report_uncaught()
        # Ranks agree over the default group. With a mesh of only some ranks, the others would wait.
        if mesh.mesh.numel() != dist.get_world_size():
            raise TopologyError(
                f"the mesh has ranks {mesh.mesh.flatten().tolist()}, the default process group "
                f"{dist.get_world_size()}: give a mesh of all ranks, with further dimensions if "
                f"need be. To train several models, start a job, or a default group, for each"
            )
        plain = cls.build(
            axes=zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False),
            ranks=mesh.mesh.flatten().tolist(),
            rank=dist.get_rank(),
            stage_to_rank=stage_to_rank,
            pipeline=pipeline,
            data=data,
        )
        return dataclasses.replace(plain, mesh=mesh)

    @classmethod
    def build(
        cls,
        *,
        axes: Iterable[tuple[str, int]],
        rank: int = 0,
        ranks: Sequence[int] | None = None,
        stage_to_rank: Mapping[int, int] | Sequence[int] | None = None,
        pipeline: str = "pp",
        data: str | tuple[str, ...] = "dp",
    ) -> Topology:
        """Returns a topology from plain data. Plans work offline: it needs no process group.

        Raises:
            TopologyError: If sizes, ranks and stages do not fit together.
        """
        axes = tuple((str(name), int(size)) for name, size in axes)
        sizes = dict(axes)
        num_ranks = math.prod(sizes.values())
        members = tuple(range(num_ranks)) if ranks is None else tuple(int(r) for r in ranks)
        data = data if isinstance(data, str) else tuple(data)
        plain = cls(axes, members, (), rank, pipeline, data)
        plain.size((pipeline, *_names(data)))  # raises an error if one of them is missing
        if len(sizes) != len(axes) or len(members) != num_ranks or len(set(members)) != num_ranks:
            raise TopologyError(f"ranks {members} do not fill the mesh {axes} once each")
        if not data or len({pipeline, *_names(data)}) <= len(_names(data)):
            raise TopologyError(
                f"data={data!r} and pipeline={pipeline!r}: expected at least one dimension of "
                f"data, each once, none of them that of the pipeline"
            )
        return plain.at(rank).with_stages(stage_to_rank)

    def with_stages(self, stage_to_rank: Mapping[int, int] | Sequence[int] | None) -> Topology:
        """Returns this topology with another map stage -> pipeline coordinate.

        Raises:
            TopologyError: If a coordinate holds no stage, or a stage is missing.
        """
        size = self.size(self.pipeline)
        places = range(size) if stage_to_rank is None else stage_to_rank
        if isinstance(places, Mapping):
            if sorted(places) != list(range(len(places))):
                raise TopologyError(f"stages must be 0..n-1 without a gap, found {sorted(places)}")
            places = [places[stage] for stage in range(len(places))]
        if set(places) != set(range(size)):
            raise TopologyError(
                f"stages {list(places)} must use every pipeline coordinate 0..{size - 1}"
            )
        return dataclasses.replace(self, stage_to_rank=tuple(int(place) for place in places))

    def at(self, rank: int) -> Topology:
        """Returns this topology as `rank` sees it.

        Raises:
            TopologyError: If the rank is not in the mesh.
        """
        if rank not in self._coordinates:
            raise TopologyError(f"rank {rank} is not in the mesh of ranks {self.ranks}")
        view = copy.copy(self)  # plans make many views: they share the tables
        vars(view)["rank"] = rank
        return view

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole model."""
        return len(self.stage_to_rank)

    @property
    def local_stages(self) -> tuple[int, ...]:
        """Stages that this rank holds, ascending."""
        here = self.coordinate(self.pipeline)
        return tuple(stage for stage, at in enumerate(self.stage_to_rank) if at == here)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """`data` as a tuple of names."""
        return _names(self.data)

    def coordinate(self, axis: str | tuple[str, ...]) -> int:
        """Returns this rank's index along a mesh dimension, or several with the first outermost."""
        index = 0
        for name in _names(axis):
            index = index * self.size(name) + self._coordinates[self.rank][self._axis(name)]
        return index

    def size(self, axis: str | tuple[str, ...]) -> int:
        """Returns the size of a mesh dimension, or of several together."""
        return math.prod(self.axes[self._axis(name)][1] for name in _names(axis))

    def group_along(self, axis: str) -> dist.ProcessGroup:
        """Returns the DeviceMesh's process group of `ranks_along`, for example for torch's stages.

        Raises:
            TopologyError: If this topology is plain data, without process groups.
        """
        if self.mesh is None:
            raise TopologyError("a topology from plain data has no process groups: use create()")
        return self.mesh.get_group(axis)

    def ranks_along(self, axis: str | tuple[str, ...]) -> tuple[int, ...]:
        """Returns the global ranks that differ from this rank only in `axis`, with this rank.

        Several dimensions span a box. An empty tuple gives only this rank.
        """
        return self._select({name: range(self.size(name)) for name in _names(axis)})

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of every pipeline of the mesh, the same for every rank."""
        pipelines = {self.at(rank).ranks_along(self.pipeline) for rank in self.ranks}
        return tuple(sorted(pipelines))

    @property
    def one_replica(self) -> tuple[int, ...]:
        """The global ranks of the first pipeline, by pipeline coordinate."""
        ranks = self.at(self.ranks[0]).ranks_along(self.pipeline)
        return tuple(sorted(ranks, key=lambda rank: self.at(rank).coordinate(self.pipeline)))

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Returns the global ranks of this pipeline that hold `stages`, each once, ascending."""
        coordinates = sorted({self.stage_to_rank[stage] for stage in stages})
        return self._select({self.pipeline: tuple(coordinates)})

    def crosses(self, stages: Iterable[int]) -> bool:
        """True if stages are on more than one rank of a pipeline."""
        return len({self.stage_to_rank[stage] for stage in stages}) > 1

    def axes_of(self, ranks: Sequence[int]) -> str:
        """Returns the mesh dimensions that `ranks` span, as text: ``"dp"``, ``"pp[0,3]"``.

        The text can name a reduction, because it is equal for all these ranks and for every
        parallel copy of the group. Ranks that do not form a box are listed one by one.
        """
        coordinates = [self._coordinates[rank] for rank in ranks]
        # Ranks form a box if they are all combinations of their coordinates.
        spans = [sorted(set(column)) for column in zip(*coordinates, strict=True)]
        if sorted(coordinates) != list(itertools.product(*spans)):
            return f"ranks{list(ranks)}"
        return "+".join(
            name if len(span) == size else f"{name}[{','.join(map(str, span))}]"
            for (name, size), span in zip(self.axes, spans, strict=True)
            if len(span) > 1
        )

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        coordinates = itertools.product(*(range(size) for _, size in self.axes))
        return dict(zip(self.ranks, coordinates, strict=True))

    def _axis(self, name: str) -> int:
        names = [axis for axis, _ in self.axes]
        if name not in names:
            raise TopologyError(
                f"the mesh has no dimension {name!r}, only {names}: choose one of these, or give a "
                f"mesh that has it"
            )
        return names.index(name)

    def _select(self, selected: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """Returns the ranks at the selected coordinates; other axes keep this rank's own."""
        here = self._coordinates[self.rank]
        spans = tuple(
            selected.get(name, (index,)) for (name, _), index in zip(self.axes, here, strict=True)
        )
        if spans not in self._groups:
            places = [0]
            for (_, size), span in zip(self.axes, spans, strict=True):
                places = [place * size + index for place in places for index in span]
            self._groups[spans] = tuple(sorted(self.ranks[place] for place in places))
        return self._groups[spans]


def _names(axis: str | Sequence[str]) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis)


def mesh_axes(
    world: int, pipeline: int, dimensions: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """Returns names and sizes of the mesh that `Topology.create` makes of `world` ranks.

    Raises:
        TopologyError: If the sizes do not divide, or a name is reserved.
    """
    for name, size in dimensions.items():
        if name in ("pp", "dp") or size < 1:
            raise TopologyError(
                f"the further dimension {name!r} has size {size}: choose a size of at least 1, "
                f"and a name other than 'pp' and 'dp'"
            )
    inside = math.prod((pipeline, *dimensions.values()))
    if inside < 1 or world % inside:
        sizes = {"pp": pipeline, **dimensions}
        raise TopologyError(
            f"a world of {world} ranks cannot be cut into {sizes}: choose sizes whose product, "
            f"{inside}, divides {world}"
        )
    return (("pp", pipeline), ("dp", world // inside), *dimensions.items())


def _mesh_of(device_type: str, axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """Returns the mesh of these dimensions, made once for each default process group."""
    # Make one mesh of the same ranks, because torch keeps the groups of a mesh, with their threads
    # and connections, until the default process group is destroyed. The table is weak, because a
    # new default group needs a new mesh.
    assert dist.group.WORLD is not None
    meshes = _meshes.setdefault(dist.group.WORLD, {})
    if (device_type, axes) not in meshes:
        names, sizes = zip(*axes, strict=True)
        mesh = together(
            "Topology.create()",
            lambda: init_device_mesh(device_type, sizes, mesh_dim_names=names),
            torch.device(device_type),
        )
        for group in mesh.get_all_groups():
            keep_timeout(group, torch.device(device_type))
        meshes[device_type, axes] = mesh
    return meshes[device_type, axes]


def _device_type() -> str:
    # gloo moves tensors of the CPU. An accelerator on the machine does not change that.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_backend() == dist.Backend.GLOO:
        return "cpu"
    return accelerator.type
