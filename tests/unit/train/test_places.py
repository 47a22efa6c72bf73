"""What lives apart along the mesh, by the dimensions that no reduction spans."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegrad import Topology
from pipegrad.errors import ConfigError
from pipegrad.optimizer.names import Locations
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import make_plans
from pipegrad.train.checkpoint.layout import check_locations
from pipegrad.train.config import Config
from pipegrad.train.schema import Model
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.expert_parallel import ExpertParallel
from pipegrad_handlers.sequence_parallel import SequenceParallel
from tests.support.gradients.plans import Handlers
from tests.support.plan.manifests import manifest

MODEL = manifest(["whole", "cut", "experts", "experts.whole"])
WHOLE = ("sequence-parallel", SequenceParallel(parameters=["*whole"]))


def places(
    axes: tuple[tuple[str, int], ...], rank: int, handlers: Handlers, data: tuple[str, ...]
) -> list[str]:
    """Returns the place of each parameter, and of buffers."""
    view = Topology.build(axes=axes, rank=rank, data=data)
    plan = make_plans(MODEL, view, handlers, GradientOptions(bucket_bytes=0), ranks=[rank])[rank]
    found = Locations(view, plan)
    return [found.of(record.key) for record in MODEL.records(view)] + [found.of()]


def test_a_place_names_the_dimensions_along_which_copies_differ() -> None:
    axes = (("pp", 1), ("dp", 2), ("ep", 2), ("tp", 2))
    handlers = [("expert-parallel", ExpertParallel()), WHOLE]
    for rank, (ep, tp) in {1: (0, 1), 6: (1, 0)}.items():
        assert places(axes, rank, handlers, ("dp", "ep")) == [
            "",
            f"[tp={tp}]",
            f"[ep={ep},tp={tp}]",
            f"[ep={ep}]",
            f"[ep={ep},tp={tp}]",
        ]


def test_replicas_have_no_place_though_nobody_reduces_them_but_experts_have() -> None:
    axes = (("pp", 1), ("dp", 2))
    assert places(axes, 1, [], ("dp",)) == [""] * 5
    assert places(axes, 1, [("data-parallel", DataParallel())], ("dp",)) == [""] * 5
    along = [("expert-parallel", ExpertParallel(axis="dp"))]
    assert places(axes, 1, along, ("dp",)) == ["", "", "[dp=1]", "[dp=1]", ""]


def test_dimensions_of_size_one_are_no_place() -> None:
    axes = (("pp", 1), ("dp", 1), ("ep", 1), ("tp", 1))
    handlers = [("expert-parallel", ExpertParallel()), WHOLE]
    assert places(axes, 0, handlers, ("dp", "ep")) == [""] * 5


def test_other_places_are_refused_and_other_keys_are_not_its_business() -> None:
    config = Config(model=Model(factory="a:b"))
    config._path = Path("job.toml")
    there = {"model.a[tp=0]", "model.a[tp=1]", "model.b", "optimizer.a[tp=0].step", "step"}
    check_locations(config, there, {"model.a[tp=1]", "model.a[tp=0]", "model.b", "model.new[tp=0]"})
    for here, said in {
        "model.a": "'a' is there in the places [tp=0] [tp=1], and here in (everywhere the same)",
        "model.a[tp=0]": "places [tp=0] [tp=1], and here in [tp=0]: choose the parallel.dimensions",
        "model.b[ep=1]": "'b' is there in the places (everywhere the same), and here in [ep=1]",
    }.items():
        with pytest.raises(ConfigError) as caught:
            check_locations(config, there, {here})
        assert said in str(caught.value)
