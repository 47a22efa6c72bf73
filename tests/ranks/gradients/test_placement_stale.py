"""Nobody reads or overwrites parameters that are on their way, whatever is forgotten."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import GradientSync, Topology
from pipegrad.optimizer import param_sync
from pipegrad.reduce.reductions import sync_parameters
from tests.support.gradients.cases import Case, on, outcome, replies

TWO: list[Case] = []
two = replies(2, TWO)

HANDLERS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "sharded": (["sharded"], {}),
    "stored": (["data-parallel"], {"master_dtype": torch.float64}),
    "owner": ([{"name": "pipeline-shared", "placement": "owner"}], {"tied": [["w"]]}),
}


class Trained:
    """One parameter, which a step of each kind moves by -2."""

    def __init__(self, kind: str) -> None:
        self.module = nn.Module()
        self.module.w = nn.Parameter(torch.zeros(40))
        handlers, options = HANDLERS[kind]
        pipeline = 2 if kind == "owner" else 1
        topology = Topology.create(pipeline=pipeline)
        self.stage = topology.local_stages[0]
        self.sync = GradientSync({self.stage: self.module}, topology, handlers=handlers, **options)
        self.optimizer = torch.optim.SGD(self.sync.optimizer_parameters(), lr=1.0)
        self.gradient = 1.0 if kind == "owner" else 2.0

    def step(self) -> None:
        self.sync.prepare()
        self.sync.stage_first_use(self.stage)
        self.module.w.grad = torch.full((40,), self.gradient)
        self.sync.stage_final(self.stage)
        self.sync.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def load(self, value: float) -> None:
        self.module.load_state_dict({"w": torch.full((40,), value)})

    @property
    def values(self) -> list[float]:
        return [float(x) for x in torch.unique(self.module.get_parameter("w").detach())]


@on(TWO)
def forgotten_publish() -> Any:
    """An evaluation behind a step reads what was stepped."""
    found = []
    for kind in HANDLERS:
        trained = Trained(kind)
        trained.step()
        trained.sync.stage_first_use(trained.stage)
        found.append(trained.values)
        trained.sync.close()
    return found


def test_a_first_use_publishes_what_was_forgotten(two: list[dict[str, Any]]) -> None:
    assert [reply["forgotten_publish"] for reply in two] == [[[-2.0]] * 3] * 2


@on(TWO)
def loaded() -> Any:
    """What is on its way would mix with what is loaded meanwhile."""
    found = []
    for kind in ("sharded", "owner"):
        trained = Trained(kind)
        trained.step()
        trained.sync.publish()
        said = outcome(trained.sync.synchronize_parameters)
        trained.sync.wait_parameters()
        trained.load(5.0)
        trained.sync.synchronize_parameters()
        trained.step()
        trained.sync.wait_parameters()
        found.append((said, trained.values))
        trained.sync.close()
    return found


def test_parameters_are_not_made_equal_while_some_are_on_their_way(
    two: list[dict[str, Any]],
) -> None:
    for reply in two:
        for said, values in reply["loaded"]:
            assert said.startswith("StepError: synchronize_parameters() while what other ranks")
            assert values == [3.0]


@on(TWO)
def changed() -> Any:
    """A stored copy does not know of what is loaded into its parameter, and would undo it."""
    trained = Trained("stored")
    trained.step()
    trained.sync.publish()
    trained.load(100.0)
    said = outcome(trained.sync.prepare)
    trained.sync.wait_parameters()
    trained.sync.synchronize_parameters()
    trained.step()
    trained.sync.wait_parameters()
    values = trained.values
    trained.sync.close()
    return said, values


def test_a_change_behind_a_stored_copy_is_noticed(two: list[dict[str, Any]]) -> None:
    for reply in two:
        said, values = reply["changed"]
        assert said.startswith("StepError: '0.w' was changed, and its stored copy")
        assert values == [98.0]


@on(TWO)
def dtypes() -> Any:
    topology, module = Topology.create(pipeline=1), nn.Module()
    module.w = nn.Parameter(torch.zeros(2))
    make = partial(GradientSync, {0: module}, topology, handlers=["sharded"])
    wrong: list[Any] = [torch.int32, "float32"]
    return [outcome(partial(make, master_dtype=dtype)) for dtype in wrong]


@pytest.mark.parametrize(("case", "shown"), [(0, "torch.int32"), (1, "'float32'")])
def test_a_stored_dtype_that_is_none_is_refused(
    two: list[dict[str, Any]], case: int, shown: str
) -> None:
    expected = (
        f"PlanError: master_dtype is {shown}, expected one of floats of at least 16 bits, or None"
    )
    assert [reply["dtypes"][case] for reply in two] == [expected] * 2


@on(TWO)
def owner_cannot_send() -> Any:
    """An owner waits for nobody: its next step tells what failed, or the others would wait."""
    trained = Trained("owner")
    trained.step()
    refuse = mock.Mock(side_effect=OSError("no route to host"))
    with mock.patch.object(
        param_sync, "sync_parameters", refuse if dist.get_rank() == 0 else sync_parameters
    ):
        trained.sync.publish()
        began = time.monotonic()
        time.sleep(0.5 * (dist.get_rank() == 0))  # the comm stream has failed by then
        said = [outcome(trained.sync.prepare)]
        said.append(outcome(partial(trained.sync.stage_first_use, trained.stage)))
        seconds = time.monotonic() - began
    return said, seconds


def test_an_owner_that_cannot_send_is_every_ranks_error(two: list[dict[str, Any]]) -> None:
    for rank, reply in enumerate(two):
        said, seconds = reply["owner_cannot_send"]
        assert "ReduceError: " in said[rank], said
        assert "no route to host" in said[rank]
        assert seconds < 20
