"""The mesh as torch's DeviceMesh makes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipegrad import Topology
from pipegrad.errors import TopologyError
from pipegrad.testing import run_ranks


def topologies() -> tuple[object, ...]:
    created = Topology.create(pipeline=2)
    placed = Topology.create(pipeline=2, stage_to_rank=[0, 1, 1, 0], device_type="cpu")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "stage", "tp"))
    deep = Topology.from_mesh(mesh, pipeline="stage", data="replica")
    cube = Topology.create(pipeline=1, dimensions={"ep": 2, "tp": 2}, data=("dp", "ep"))
    assert (cube.axes, cube.data) == ((("pp", 1), ("dp", 1), ("ep", 2), ("tp", 2)), ("dp", "ep"))
    assert dist.get_process_group_ranks(cube.group_along("ep")) == [*cube.ranks_along("ep")]
    assert cube.ranks_along(cube.data) == cube.ranks_along("ep")
    wrongs: list[Callable[[], Topology]] = [
        lambda: Topology.create(pipeline=3),
        lambda: Topology.create(pipeline=0),
        lambda: Topology.from_mesh(mesh),
        lambda: Topology.from_mesh(init_device_mesh("cpu", (4,))),
    ]
    messages = []
    for wrong in wrongs:
        with pytest.raises(TopologyError) as caught:
            wrong()
        messages.append(str(caught.value))
    return (
        created == Topology.build(axes=(("pp", 2), ("dp", 2)), rank=dist.get_rank()),
        [dist.get_process_group_ranks(created.group_along(axis)) for axis in ("pp", "dp")],
        placed.local_stages,
        (deep.axes, deep.ranks_along("replica"), deep.ranks_along("tp"), deep.local_stages),
        deep.mesh is mesh,
        messages,
    )


def test_of_a_device_mesh() -> None:
    axes = (("replica", 2), ("stage", 1), ("tp", 2))
    sizes = (
        "a world of 4 ranks cannot be cut into pipelines of {0}: "
        "choose a pipeline size that divides 4"
    )
    names = (
        "the mesh has no dimension 'pp', only {0}: "
        "name its dimensions, or say which ones are pipeline= and data="
    )
    messages = [
        sizes.format(3),
        sizes.format(0),
        names.format(["replica", "stage", "tp"]),
        names.format([]),
    ]
    assert run_ranks(topologies, 4) == [
        (True, [pp, dp], stages, (axes, replica, tp, (0,)), True, messages)
        for pp, dp, stages, replica, tp in (
            ([0, 2], [0, 1], (0, 3), (0, 2), (0, 1)),
            ([1, 3], [0, 1], (0, 3), (1, 3), (0, 1)),
            ([0, 2], [2, 3], (1, 2), (0, 2), (2, 3)),
            ([1, 3], [2, 3], (1, 2), (1, 3), (2, 3)),
        )
    ]
