"""State of an optimizer is found by name and location."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipegrad import ParameterRecord, Topology, make_plan
from pipegrad.gradients.main_params import Locations, MainParameter
from pipegrad.gradients.named_optimizer import NamedState
from pipegrad.plugins.handler import GradientHandler
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.diloco import DiLoCo
from tests.support.plan.manifests import manifest

MESH = Topology.build(axes=(("pp", 1), ("dp", 2), ("out", 2), ("tp", 2)), data=("dp", "out"))


@pytest.mark.parametrize(
    ("handlers", "location", "joined"),
    [
        ([DataParallel()], "[tp=1]", "[tp=1]"),
        ([DiLoCo(every=2)], "[dp=1,out=1,tp=1]", "[tp=1]"),
        ([DataParallel(axis="dp"), DiLoCo(every=2, axis="out")], "[out=1,tp=1]", "[tp=1]"),
    ],
)
def test_replicas_that_train_alone_have_locations(
    handlers: list[GradientHandler], location: str, joined: str
) -> None:
    plan = make_plan(manifest(("a",)), MESH.at(7), [(str(i), h) for i, h in enumerate(handlers)])
    locations = Locations(MESH.at(7), plan)
    assert (locations.of("0.a"), locations.joined("0.a")) == (location, joined)


@pytest.mark.parametrize(
    ("name", "joined", "saved", "is_found"),
    [
        ("w[tp=1]", "w[tp=1]", "w[tp=1]", True),
        ("w[tp=1]", "w[tp=1]", "w", False),
        ("w[dp=0]", "w", "w", True),
        ("w[dp=0,tp=1]", "w[tp=1]", "w[tp=1]", True),
        ("w[dp=0,tp=1]", "w[tp=1]", "w", False),
    ],
)
def test_state_of_another_location_is_left_out(
    name: str, joined: str, saved: str, *, is_found: bool
) -> None:
    """Whole state of a run without TP was loaded for a shard, and the next step failed."""
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    record = ParameterRecord("0.w", "w", 0, (2, 3), torch.float32, True, (0,), 0)
    NamedState(
        optimizer,
        {name: MainParameter(record, parameter)},
        [["w"]],
        strides={"0.w": (3, 1)},
        joined={name: joined},
    )
    state = optimizer.state_dict()
    state["state"] = {saved: {"momentum_buffer": torch.ones(2 if is_found else 4, 3)}}
    optimizer.load_state_dict(state)
    assert bool(optimizer.state) == is_found
