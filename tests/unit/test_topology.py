"""The mesh as plain data, as every rank sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipegrad import Topology
from pipegrad.errors import TopologyError
from pipegrad.topology import mesh_axes

V = (0, 1, 2, 3, 3, 2, 1, 0)


def grid(rank: int = 0) -> Topology:
    """Pipeline of 4, data of 2: ranks 2p and 2p + 1 at pipeline coordinate p."""
    return Topology.build(axes=(("pp", 4), ("dp", 2)), rank=rank)


def test_a_topology_is_plain_data_seen_from_one_rank() -> None:
    topology = grid(rank=5)
    assert (topology.axes, topology.ranks) == ((("pp", 4), ("dp", 2)), tuple(range(8)))
    assert (topology.stage_to_rank, topology.num_stages) == ((0, 1, 2, 3), 4)
    assert (topology.coordinate("pp"), topology.coordinate("dp")) == (2, 1)
    assert (topology.size("pp"), topology.size("dp")) == (4, 2)
    assert topology.local_stages == (2,)
    assert topology.mesh is None
    assert topology.at(5) == topology != topology.at(4)
    assert topology.at(0).at(5) == topology
    assert [grid(r).ranks_along("dp") for r in (0, 1, 6)] == [(0, 1), (0, 1), (6, 7)]
    assert [grid(r).ranks_along("pp") for r in (0, 5)] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_stages_cross_ranks_if_they_are_on_several() -> None:
    v = Topology.build(axes=(("pp", 2), ("dp", 1)), rank=0, stage_to_rank=(0, 1, 1, 0))
    assert [v.crosses(stages) for stages in ((0, 3), (1, 2), (0,), ())] == [False] * 4
    assert v.crosses((0, 1))
    assert v.crosses((3, 2, 0))


def test_ranks_of_stages_are_those_of_this_pipeline_each_once_ascending() -> None:
    assert grid().ranks_of((0, 3)) == (0, 6)
    assert grid(3).ranks_of([3, 0, 3]) == (1, 7)
    assert grid().ranks_of(()) == ()
    v = grid(1).with_stages(V)
    assert v.ranks_of((0, 7)) == (1,)
    assert v.ranks_of((0, 3, 4, 7)) == (1, 7)
    v = grid().with_stages(V)
    assert v.num_stages == 8
    assert [v.at(2 * p).local_stages for p in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert v == grid().with_stages(dict(enumerate(V)))
    assert v.with_stages(range(4)) == grid()


def test_axes_name_a_group_alike_for_every_copy_of_it() -> None:
    def everywhere(select: Callable[[Topology], tuple[int, ...]]) -> set[str]:
        return {grid(r).axes_of(select(grid(r))) for r in range(8)}

    assert everywhere(lambda t: t.ranks_along("dp")) == {"dp"}
    assert everywhere(lambda t: t.ranks_along("pp")) == {"pp"}
    assert everywhere(lambda t: t.ranks_of((0, 3))) == {"pp[0,3]"}
    assert everywhere(lambda t: t.ranks) == {"pp+dp"}
    assert everywhere(lambda t: (t.rank,)) == {""}
    assert grid().axes_of((7, 0, 6, 1)) == "pp[0,3]+dp"
    assert grid().axes_of((0, 3)) == "ranks[0, 3]"  # a diagonal is no box


def test_ranks_may_lie_anywhere_in_the_mesh_and_a_third_dimension_is_held_fixed() -> None:
    topology = Topology.build(axes=(("pp", 2), ("dp", 2)), ranks=(7, 5, 3, 1), rank=3)
    assert topology.coordinate("pp") == 1
    assert topology.ranks_along("dp") == (1, 3)
    assert topology.ranks_along("pp") == (3, 7)
    assert topology.axes_of((3, 7)) == "pp"
    axes = (("replica", 2), ("stage", 2), ("tp", 2))
    topology = Topology.build(axes=axes, rank=5, pipeline="stage", data="replica")
    assert topology.ranks_along("replica") == (1, 5)
    assert topology.ranks_of((0, 1)) == (5, 7)
    assert topology.axes_of((4, 5, 6, 7)) == "stage+tp"


def test_several_dimensions_are_one_of_their_product_the_first_outermost() -> None:
    axes = (("pp", 2), ("dp", 2), ("ep", 3), ("tp", 2))
    topology = Topology.build(axes=axes, rank=23, data=("dp", "ep"))
    assert topology.data_axes == ("dp", "ep")
    assert topology.size(topology.data) == 6
    assert topology.ranks_along(topology.data) == (13, 15, 17, 19, 21, 23)
    assert [topology.at(r).coordinate(("dp", "ep")) for r in (13, 15, 17, 19, 21, 23)] == [
        *range(6)
    ]
    assert [topology.at(r).coordinate(("ep", "dp")) for r in (13, 15, 19)] == [0, 2, 1]
    assert topology.axes_of(topology.ranks_along(("ep", "dp"))) == "dp+ep"
    assert topology.ranks_along(()) == (23,)
    assert (topology.size(()), topology.coordinate(())) == (1, 0)
    assert Topology.build(axes=axes, data=["dp"]).data_axes == ("dp",)  # type: ignore[arg-type]
    assert Topology.build(axes=axes).data_axes == ("dp",)


def test_what_the_further_dimensions_leave_is_data_parallel() -> None:
    assert mesh_axes(16, 2, {"ep": 2, "tp": 2}) == tuple(
        (name, 2) for name in ("pp", "dp", "ep", "tp")
    )
    assert mesh_axes(4, 4, {}) == (("pp", 4), ("dp", 1))
    with pytest.raises(
        TopologyError, match=r"8 ranks cannot be cut into \{'pp': 2, 'tp': 3\}.* 6,"
    ):
        mesh_axes(8, 2, {"tp": 3})
    for name, size in (("dp", 2), ("pp", 1), ("tp", 0)):
        with pytest.raises(TopologyError, match=f"dimension '{name}' has size {size}: choose"):
            mesh_axes(8, 2, {name: size})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Topology.build(axes=(("pp", 2), ("dp", 2)), data=("dp", "ep")),
            r"no dimension 'ep', only \['pp', 'dp'\]",
        ),
        (lambda: Topology.build(axes=(("pp", 2), ("dp", 2)), data=("dp", "pp")), "none of them"),
        (lambda: Topology.build(axes=(("pp", 2), ("dp", 2)), data=()), "at least one dimension"),
        (lambda: Topology.build(axes=(("pp", 2), ("dp", 2), ("dp", 2))), "do not fill the mesh"),
        (lambda: Topology.build(axes=(("pp", 2), ("dp", 1)), ranks=(1, 1), rank=1), "once each"),
        (lambda: Topology.build(axes=(("pp", 2), ("dp", 1)), rank=2), "rank 2 is not in the mesh"),
        (lambda: grid().at(8), "rank 8 is not in the mesh"),
        (lambda: grid().ranks_along("tp"), r"no dimension 'tp', only \['pp', 'dp'\]"),
        (lambda: grid().with_stages((0, 1, 2, 4)), r"must use every pipeline coordinate 0\.\.3"),
        (
            lambda: grid().with_stages({0: 0, 1: 1, 2: 2, 4: 3}),
            r"without a gap, found \[0, 1, 2, 4",
        ),
        (lambda: grid().group_along("pp"), "no process groups"),
        (lambda: Topology.create(pipeline=2), "call torch.distributed.init_process_group"),
    ],
)
def test_what_does_not_fit_together_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        build()
