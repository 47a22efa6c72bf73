"""pipeline-shared: what it says, and that the result is what one process has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import (
    GradientSync,
    ParameterRecord,
    Placement,
    Reduction,
    Topology,
    find_tied,
    handlers,
)
from pipegrad.errors import PluginOptionError
from pipegrad.testing import HandlerContract, run_ranks
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding


@pytest.mark.smoke
class TestPipelineShared(HandlerContract):
    handler = "pipeline-shared"
    beside = ("data-parallel",)


class TestOwned(HandlerContract):
    handler = {"name": "pipeline-shared", "placement": "owner"}  # noqa: RUF012 - as in a table
    beside = ("data-parallel",)


class TestPairwise(HandlerContract):
    handler = {"name": "pipeline-shared", "exchange": "pairwise"}  # noqa: RUF012 - as in a table
    beside = ("data-parallel",)


class TestAsymmetric(HandlerContract):
    handler = {"name": "pipeline-shared", "exchange": "asymmetric"}  # noqa: RUF012 - as in a table
    beside = ("data-parallel",)


def record(name: str, stage: int, holders: tuple[int, ...]) -> ParameterRecord:
    return ParameterRecord(f"{holders[0]}.w", name, stage, (2,), torch.float32, True, holders, 0)


def test_a_shared_parameter_is_summed_over_its_holders() -> None:
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)), rank=1)
    emb, own = record("emb", 0, (0, 3)), record("w", 0, (0,))
    assert PipelineShared().reductions([own, emb], topology) == [Reduction(emb, (1, 7), "sum")]
    three = record("emb", 2, (0, 2, 3))
    assert PipelineShared().reductions([three], topology.at(4)) == [Reduction(three, (0, 4, 6))]


def test_where_one_rank_holds_all_it_is_a_reduction_over_one() -> None:
    v = Topology.build(axes=(("pp", 2), ("dp", 2)), stage_to_rank=(0, 1, 1, 0), rank=3)
    tie = record("w", 1, (1, 2))
    assert PipelineShared().reductions([tie], v) == [Reduction(tie, (3,))]


def test_the_sum_may_be_given_to_the_lowest_holder() -> None:
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)), rank=1)
    emb, own = record("emb", 0, (0, 3)), record("w", 0, (0,))
    owned = Reduction(emb, (1, 7), "sum", Placement.OWNER)
    assert PipelineShared(placement="owner").reductions([own, emb], topology) == [owned]


@pytest.mark.parametrize("placement", ["shard", "OWNER", 0])
def test_another_placement_is_refused(placement: object) -> None:
    with pytest.raises(PluginOptionError) as caught:
        handlers.resolve({"name": "pipeline-shared", "placement": placement})
    assert f"placement is {placement!r}, expected one of ['replicate', 'owner']" in str(
        caught.value
    )


@pytest.mark.parametrize("exchange", ["pairwise", "asymmetric"])
def test_two_ranks_may_exchange_and_more_all_reduce(exchange: Any) -> None:
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)), rank=1)
    two, three = record("emb", 0, (0, 3)), record("w", 0, (0, 2, 3))
    assert PipelineShared(exchange=exchange).reductions([two, three], topology) == [
        Reduction(two, (1, 7), exchange=exchange),
        Reduction(three, (1, 5, 7)),
    ]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"exchange": "sparse"}, "exchange is 'sparse', expected one of ['all-reduce', 'pairwise'"),
        ({"exchange": 2}, "exchange is 2, expected one of"),
        (
            {"placement": "owner", "exchange": "pairwise"},
            "placement 'owner' has no exchange 'pairwise': drop one",
        ),
    ],
)
def test_another_exchange_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PluginOptionError) as caught:
        handlers.resolve({"name": "pipeline-shared", **options})
    assert complaint in str(caught.value)


class Model(nn.Module):
    """Two ties: the table at both ends and in the middle, a bias of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.two.bias = self.one.bias

    def stages(self) -> list[nn.Module]:
        return [
            nn.ModuleDict({"emb": self.emb}),
            nn.ModuleDict({"one": self.one}),
            nn.ModuleDict({"two": self.two, "head": self.head}),
        ]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.two(torch.tanh(self.one(self.emb(tokens))))
        logits = self.head(torch.tanh(hidden))
        return nn.functional.cross_entropy(logits, tokens.roll(1))


def model() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(3)
    return Model(), torch.arange(9)


def backward_on_three_ranks(placement: str) -> tuple[int, nn.Module, GradientSync]:
    """Each stage's copy gets only the gradient of its own use, as it would in a pipeline."""
    whole, tokens = model()
    topology = Topology.create(pipeline=3)
    here = dist.get_rank()
    mine = whole.stages()[here]
    apart = _untied(model()[0])
    sync = GradientSync(
        {here: mine},
        topology,
        tied=find_tied(whole),
        handlers=[{"name": "pipeline-shared", "placement": placement}],
    )
    sync.prepare()
    apart(tokens).backward()
    own = dict(apart.stages()[here].named_parameters())
    for name, parameter in mine.named_parameters():
        gradient = own[name].grad
        assert gradient is not None
        (parameter * gradient).sum().backward()
    sync.stage_final(here)
    sync.finish()
    return here, mine, sync


def step_on_three_ranks() -> tuple[dict[str, torch.Tensor], int, str]:
    _, mine, sync = backward_on_three_ranks("replicate")
    found = {n: p.grad.clone() for n, p in mine.named_parameters() if p.grad is not None}
    return found, sync.statistics().collectives, str(sync.plan)


def owners_step_on_three_ranks() -> tuple[list[str], dict[str, torch.Tensor]]:
    """Returns what this rank's optimizer steps, and what its stage's parameters are then."""
    here, mine, sync = backward_on_three_ranks("owner")
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    optimizer.step()
    sync.publish()
    sync.stage_first_use(here)
    found = {name: p.detach().clone() for name, p in mine.named_parameters()}
    stepped = [one.record.name for one in sync.main_parameters()]
    sync.close()
    return stepped, found


def _untied(tied: Model) -> Model:
    """Returns the model with a parameter of its own wherever one is shared."""
    for layer, name in ((tied.head, "weight"), (tied.two, "bias")):
        setattr(layer, name, nn.Parameter(layer.get_parameter(name).detach().clone()))
    return tied


def test_every_holder_has_the_gradient_of_one_process() -> None:
    whole, tokens = model()
    assert find_tied(whole) == [["emb.weight", "head.weight"], ["one.bias", "two.bias"]]
    whole(tokens).backward()
    expected = {n: p.grad for n, p in whole.named_parameters(remove_duplicate=False)}
    replies = run_ranks(step_on_three_ranks, 3)
    for found, *_ in replies:
        for name, gradient in found.items():
            assert error(gradient, expected[name]) <= rounding(9)
    first, middle, last = (found for found, *_ in replies)
    assert sorted(last) == ["head.weight", "two.bias", "two.weight"]
    assert torch.equal(first["emb.weight"], last["head.weight"])
    assert torch.equal(middle["one.bias"], last["two.bias"])
    assert [collectives for _, collectives, _ in replies] == [1, 1, 2]
    assert "replicate-sum(pp[0,2]) over ranks [0, 2]" in replies[0][2]


def test_an_owner_steps_alone_and_every_holder_has_the_parameters_of_one_process() -> None:
    whole, tokens = model()
    whole(tokens).backward()
    torch.optim.SGD(whole.parameters(), lr=1.0).step()
    expected = dict(whole.named_parameters(remove_duplicate=False))
    replies = run_ranks(owners_step_on_three_ranks, 3)
    assert [sorted(stepped) for stepped, _ in replies] == [
        ["emb.weight"],
        ["one.bias", "one.weight"],
        ["two.weight"],
    ]
    for _, found in replies:
        for name, parameter in found.items():
            assert error(parameter, expected[name].detach()) <= rounding(9)
    first, middle, last = (found for _, found in replies)
    assert sorted(last) == ["head.weight", "two.bias", "two.weight"]
    assert torch.equal(first["emb.weight"], last["head.weight"])
    assert torch.equal(middle["one.bias"], last["two.bias"])
