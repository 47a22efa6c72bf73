"""A seed of its own on each rank: the stages of one pipeline start from several models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn

import pipegrad
from pipegrad import Scheduler, Stage, Topology
from pipegrad.partition.cut_model import Cut
from tests.support.gradients.cases import rank
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(4)
WORDS = "ranks {} and {} have cut models with different first values, as after another torch.manual"


def built(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))


def steps(
    source: Cut | list[Stage], topology: Topology, then: Callable[[], object] = int
) -> list[str]:
    """Returns what two steps warn of, on any rank, with what else the caller does before them."""
    scheduler = Scheduler(
        source, topology, schedule="1f1b", num_microbatches=2, loss_fn=nn.MSELoss()
    )
    x = torch.ones(4, 4)
    with closing(scheduler), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        then()
        for _ in range(2):
            scheduler.step(x, target=x)
            scheduler.sync.drop_gradients()
    return [str(w.message) for w in caught if "first values" in str(w.message)]


def load(cut: Cut, stage: int) -> None:
    """Loads a checkpoint, as it is written on one rank for each stage."""
    torch.manual_seed(7 + stage)
    state = {n: torch.randn_like(p) for n, p in cut.modules[stage].state_dict().items()}
    cut.modules[stage].load_state_dict(state)


@pytest.mark.parametrize(
    "how", ["another seed", "a replica", "one seed", "before", "after", "whole"]
)
def test_another_seed_on_each_rank_is_warned_of_once(how: str) -> None:
    """Stage 0 had the values of one model, and stage 1 those of another, without a word."""
    topology = Topology.create(pipeline=2)
    stage, replica = topology.coordinate("pp"), topology.coordinate("dp")
    seed = {"one seed": 3, "a replica": replica}.get(how, rank())
    whole = built(seed)
    if how == "whole":
        whole.load_state_dict(built(5).state_dict())
    cut = pipegrad.cut(whole, 2)
    if how == "before":
        load(cut, stage)
    said = gathered(steps(cut, topology, partial(load, cut, stage) if how == "after" else int))
    wanted = [WORDS.format(0, 2)] if how == "another seed" else []
    assert [len(each) for each in said] == [len(wanted), 0, 0, 0]
    assert not wanted or said[0][0].startswith(wanted[0])


def test_stages_that_each_rank_makes_alone_are_not_compared() -> None:
    topology = Topology.create(pipeline=2)
    torch.manual_seed(rank())
    stage = topology.coordinate("pp")
    assert steps([Stage(nn.Linear(4, 4), stage)], topology) == []
