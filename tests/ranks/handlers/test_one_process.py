"""The handlers of pipegrad on ranks: what comes out is what one process has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import GradientSync, Topology, find_tied
from tests.support.gradients.cases import rank
from tests.support.pipeline.schedulers import error
from tests.support.ranked import gathered
from tests.support.rounding import ADAM_EPS, rounding


@pytest.mark.ranks(3)
@pytest.mark.parametrize("handler", ["data-parallel", "sharded"])
def test_training_on_shares_is_training_on_the_batch(handler: str) -> None:
    """Three steps, two microbatches each, on this rank's third of the batch."""
    model, whole = (nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    inputs = torch.randn(12, 5)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01, eps=ADAM_EPS)
    for _ in range(3):
        whole(inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    sync = GradientSync({0: model}, Topology.create(pipeline=1), handlers=[handler])
    optimizer = torch.optim.AdamW(sync.optimizer_parameters(), lr=0.01, eps=ADAM_EPS)
    for _ in range(3):
        sync.prepare(divisor=2)
        sync.stage_first_use(0)
        for number, microbatch in enumerate(inputs.chunk(3)[rank()].chunk(2)):
            if number == 1:
                sync.stage_last_backward(0)
            model(microbatch).square().mean().backward()
        sync.stage_final(0)
        sync.finish()
        sync.clip_grad_norm_(0.5)
        optimizer.step()
        sync.publish()
        optimizer.zero_grad()
    sync.check_replicas()
    assert sync.statistics().early == 4
    sync.close()

    weights = [p.detach() for p in model.parameters()]
    for found, first, expected in zip(
        weights, gathered(weights)[0], whole.parameters(), strict=True
    ):
        assert torch.equal(found, first)
        assert error(found, expected.detach()) <= rounding(3 * 12)
    states = gathered(sum(s["exp_avg"].numel() for s in optimizer.state.values()))
    numel = sum(p.numel() for p in model.parameters())
    if handler == "sharded":
        assert sum(states) == numel
        assert max(states) < numel / 2
    else:
        assert states == [numel] * 3


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", ["replicate", "shard"])
def test_with_tensor_parallel_ranks_each_gradient_is_that_of_one_process(placement: str) -> None:
    """Ranks 0, 1 are one data rank and 2, 3 the other; 0, 2 have one shard of what is cut.

    Every rank's gradient of every parameter is a power of ten, so a sum says whose it is made of.
    """
    expected = {
        "experts_whole": [11 / 2, 11 / 2, 1100 / 2, 1100 / 2],
        "experts_cut": [1 / 2, 10 / 2, 100 / 2, 1000 / 2],
        "router_whole": [1111 / 2] * 4,
        "up_cut": [101 / 2, 1010 / 2, 101 / 2, 1010 / 2],
    }
    topology = Topology.create(pipeline=1, dimensions={"ep": 2, "tp": 2}, data=("dp", "ep"))
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(4)) for name in expected})
    chosen: list[dict[str, Any]] = [
        {"name": "sequence-parallel", "parameters": ["*whole"]},
        {"name": "expert-parallel", "placement": placement},
    ]
    sync = GradientSync(
        {0: module}, topology, handlers=chosen, bucket_bytes=0, allow_unsynced=["*cut"]
    )
    sync.optimizer_parameters()
    sync.prepare(divisor=2)
    for _ in range(2):
        sum(p.sum() * 10.0 ** rank() for p in module.values()).backward()
    sync.stage_final(0)
    sync.finish()
    stepped = dict[str, list[int]]()
    for one in sync.main_parameters():
        assert one.tensor.grad is not None
        name = one.record.name
        assert set(one.tensor.grad.flatten().tolist()) <= {expected[name][rank()]}
        stepped[name] = [*range(one.begin, one.begin + one.tensor.numel())]
    every = gathered(stepped)
    for name, values in expected.items():
        holders = [r for r in range(4) if values[r] == values[rank()]]
        assert {i for r in holders for i in every[r].get(name, ())} == {0, 1, 2, 3}
    once = [(11, 1100), (1, 10, 100, 1000), (1111,), (101, 1010)]
    norm = sum(4 * (x / 2) ** 2 for values in once for x in values) ** 0.5
    assert sync.clip_grad_norm_(1.0).item() == pytest.approx(norm, rel=rounding(16))
    sync.close()


@pytest.mark.ranks(4)
def test_noop_leaves_gradients_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken wire: collectives in the comm streams raise, gradients come through all the same."""
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("emb", "own")})
    topology = Topology.create(pipeline=2)
    stage = topology.local_stages[0]
    sync = GradientSync({stage: module}, topology, tied=[["emb"]], handlers=["noop"])
    with monkeypatch.context() as broken:
        broken.setattr(dist, "all_reduce", None)
        for _ in range(2):
            module.zero_grad()
            sync.prepare()
            (module["emb"] * (rank() + 1.0)).sum().backward()
            sync.stage_final(stage)
            sync.finish()
    assert module["emb"].grad is not None
    assert module["emb"].grad.tolist() == [rank() + 1.0] * 2
    assert module["own"].grad is None
    assert sync.statistics().collectives == 3
    assert sync.statistics().reduced_bytes == sync.plan.reduced_bytes > 0
    sync.close()


class Model(nn.Module):
    """Two ties: the table at both ends and in the middle, a bias of two layers."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(11, 6)
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.two.bias = self.one.bias
        if not tied:  # the same values, each in a parameter of its own
            for layer, name in ((self.head, "weight"), (self.two, "bias")):
                parameter = nn.Parameter(layer.get_parameter(name).detach().clone())
                setattr(layer, name, parameter)

    def stages(self) -> list[nn.Module]:
        return [
            nn.ModuleDict({"emb": self.emb}),
            nn.ModuleDict({"one": self.one}),
            nn.ModuleDict({"two": self.two, "head": self.head}),
        ]

    def loss(self) -> torch.Tensor:
        tokens = torch.arange(9)
        hidden = self.two(torch.tanh(self.one(self.emb(tokens))))
        return nn.functional.cross_entropy(self.head(torch.tanh(hidden)), tokens.roll(1))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["replicate", "owner"])
def test_every_holder_has_the_gradients_and_the_step_of_one_process(placement: str) -> None:
    """Each stage's copy gets only the gradient of its use, as it would in a pipeline."""
    whole, apart, ours = Model(tied=True), Model(tied=False), Model(tied=True)
    assert find_tied(whole) == [["emb.weight", "head.weight"], ["one.bias", "two.bias"]]
    whole.loss().backward()
    apart.loss().backward()
    stage, used = ours.stages()[rank()], dict(apart.stages()[rank()].named_parameters())
    sync = GradientSync(
        {rank(): stage},
        Topology.create(pipeline=3),
        tied=find_tied(ours),
        handlers=[{"name": "pipeline-shared", "placement": placement}],
    )
    # Before the first step, so that the owner of a tie is known.
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    sync.prepare()
    for name, parameter in stage.named_parameters():
        (parameter * used[name].grad).sum().backward()  # type: ignore[operator]
    sync.stage_final(rank())
    sync.finish()
    expected = dict(whole.named_parameters(remove_duplicate=False))
    if placement == "replicate":
        for name, parameter in stage.named_parameters():
            assert error(parameter.grad, expected[name].grad) <= rounding(9)
        assert sync.statistics().collectives == [1, 1, 2][rank()]
        assert "replicate-sum(pp[0,2]) over ranks [0, 2]" in str(sync.plan) or rank() == 1
    else:
        owners = [["emb.weight"], ["one.bias", "one.weight"], ["two.weight"]]
        assert sorted(one.record.name for one in sync.main_parameters()) == owners[rank()]
    optimizer.step()
    sync.publish()
    sync.stage_first_use(rank())
    torch.optim.SGD(whole.parameters(), lr=1.0).step()
    for name, parameter in stage.named_parameters():
        assert error(parameter.detach(), expected[name].detach()) <= rounding(9)
    first, middle, last = gathered({n: p.detach() for n, p in stage.named_parameters()})
    assert sorted(last) == ["head.weight", "two.bias", "two.weight"]
    assert torch.equal(first["emb.weight"], last["head.weight"])
    assert torch.equal(middle["one.bias"], last["two.bias"])
    sync.close()
