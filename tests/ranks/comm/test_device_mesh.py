"""The mesh as torch's DeviceMesh makes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipegrad import Topology
from tests.support.gradients.cases import outcome, rank


@pytest.mark.ranks(4)
def test_of_a_device_mesh() -> None:
    pp, dp, stages, replica, tp = (
        ([0, 2], [0, 1], (0, 3), (0, 2), (0, 1)),
        ([1, 3], [0, 1], (0, 3), (1, 3), (0, 1)),
        ([0, 2], [2, 3], (1, 2), (0, 2), (2, 3)),
        ([1, 3], [2, 3], (1, 2), (1, 3), (2, 3)),
    )[rank()]
    created = Topology.create(pipeline=2)
    assert created == Topology.build(axes=(("pp", 2), ("dp", 2)), rank=rank())
    assert dist.get_process_group_ranks(created.group_along("pp")) == pp
    assert dist.get_process_group_ranks(created.group_along("dp")) == dp
    placed = Topology.create(pipeline=2, stage_to_rank=[0, 1, 1, 0], device_type="cpu")
    assert placed.local_stages == stages
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "stage", "tp"))
    deep = Topology.from_mesh(mesh, pipeline="stage", data="replica")
    assert deep.mesh is mesh
    assert (deep.axes, deep.local_stages) == ((("replica", 2), ("stage", 1), ("tp", 2)), (0,))
    assert (deep.ranks_along("replica"), deep.ranks_along("tp")) == (replica, tp)
    cube = Topology.create(pipeline=1, dimensions={"ep": 2, "tp": 2}, data=("dp", "ep"))
    assert (cube.axes, cube.data) == ((("pp", 1), ("dp", 1), ("ep", 2), ("tp", 2)), ("dp", "ep"))
    assert dist.get_process_group_ranks(cube.group_along("ep")) == [*cube.ranks_along("ep")]
    assert cube.ranks_along(cube.data) == cube.ranks_along("ep")


WRONGS: list[tuple[Callable[[], Topology], str]] = [
    (lambda: Topology.create(pipeline=3), "a world of 4 ranks cannot be cut into {'pp': 3}: "),
    (lambda: Topology.create(pipeline=0), "a world of 4 ranks cannot be cut into {'pp': 0}: "),
    (
        lambda: Topology.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "tp"))),
        "the mesh has no dimension 'pp', only ['a', 'tp']: ",
    ),
    (
        lambda: Topology.from_mesh(init_device_mesh("cpu", (4,))),
        "the mesh has no dimension 'pp', only []: ",
    ),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("make", "message"), WRONGS)
def test_a_mesh_that_does_not_fit_is_refused(make: Callable[[], Topology], message: str) -> None:
    assert outcome(make).startswith(f"TopologyError: {message}")
