"""Tensor, sequence and expert parallelism: what one process computes, cut along further axes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn
from torch.nn import functional

from pipegrad import Scheduler, Stage, Topology
from pipegrad.plugins.handler import HandlerSpec
from pipegrad.train.config import load
from pipegrad.train.corpus import read_corpus
from pipegrad.train.job import Job
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.train.jobs import EXAMPLES

TOKENS = 16 * 64  # of a batch of the examples
WHOLE = ["embedding.*", "*norm*", "*.bias"]
OWNED = {"name": "pipeline-shared", "placement": "owner"}
SEQUENCE = {"name": "sequence-parallel", "parameters": WHOLE}
SHARDED_EXPERTS = {"name": "expert-parallel", "placement": "shard"}


class Case(NamedTuple):
    """One cut of an example over 4 ranks.

    Attributes:
        times: How often all ranks together step what is whole on each, what lives apart, and the
            tie once more.
    """

    pipeline: int
    handlers: list[HandlerSpec]
    times: tuple[int, int, int]
    inside: dict[str, int] = {"tp": 2}  # noqa: RUF012 - nobody changes it
    data: tuple[str, ...] = ("dp",)
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def path(self) -> Path:
        return (
            EXAMPLES / f"{'tensor_parallel' if 'tp' in self.inside else 'mixture_of_experts'}.toml"
        )


def of_experts(
    pipeline: int,
    handlers: list[HandlerSpec],
    times: tuple[int, int, int],
    data: tuple[str, str] = ("dp", "ep"),
    ep: int = 2,
    **options: Any,
) -> Case:
    return Case(pipeline, handlers, times, {"ep": ep}, data, options)


SHARED, DATA, EXPERTS = "pipeline-shared", "data-parallel", "expert-parallel"
CASES = {
    "pp 2 x tp 2": Case(2, [SHARED, DATA, SEQUENCE], (2, 1, 2)),
    "pp 2 x tp 2, an owner": Case(2, [OWNED, "sharded", SEQUENCE], (2, 1, 0)),
    "dp 2 x tp 2": Case(1, [DATA, SEQUENCE], (4, 2, 0), options={"bucket_bytes": 0}),
    "dp 2 x tp 2, in rows": Case(
        1, ["sharded", SEQUENCE], (2, 1, 0), options={"bucket_bytes": 4096}
    ),
    "pp 2 x dp 2, one tp rank": Case(2, [OWNED, "sharded", SEQUENCE], (1, 1, 0), {"tp": 1}),
    "tp 4": Case(1, [SEQUENCE], (4, 1, 0), {"tp": 4}),
    "pp 2 x ep 2": of_experts(2, [SHARED, EXPERTS], (2, 1, 2)),
    "pp 2 x ep 2, in rows": of_experts(2, [OWNED, SHARDED_EXPERTS], (1, 1, 0)),
    "dp 2 x ep 2": of_experts(1, [EXPERTS], (4, 2, 0), bucket_bytes=0),
    "dp 2 x ep 2, in rows": of_experts(1, [SHARDED_EXPERTS], (1, 1, 0), comm_streams=1),
    "ep 4": of_experts(1, [EXPERTS], (4, 1, 0), ep=4),
    "pp 2 x ep 2, the other way round": of_experts(
        2, [SHARED, EXPERTS], (2, 1, 2), data=("ep", "dp")
    ),
}


def shard_of(name: str, whole: Tensor, topology: Topology) -> Tensor:
    """Returns what the examples keep of a tensor on a rank."""
    kinds = {"heads_in.weight": -2, "up.weight": -2, "heads_out.weight": 1, "down.weight": 1}
    axis, dims = ("ep", {"up": 0, "down": 0}) if ".experts." in name else ("tp", kinds)
    dim = next((dim for end, dim in dims.items() if name.endswith(f".{end}")), None)
    if dim is None or axis not in dict(topology.axes):
        return whole
    return whole.chunk(topology.size(axis), dim)[topology.coordinate(axis)]


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@cache
def one_process(path: Path, setting: str) -> tuple[nn.Module, float, float]:
    """Returns the uncut model with the gradients of the first batch, its loss, and the norm."""
    config = load(path, [setting])
    model = Job(config, 1).model()
    tokens, target = read_corpus(config).batch(1, seed=0, size=config.data.batch_size)
    loss = loss_of(model(tokens), target)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return model, loss.item(), nn.utils.get_total_norm(gradients).item()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", CASES)
def test_gradients_loss_and_norm_are_those_of_one_process(name: str) -> None:
    case = CASES[name]
    [axis] = case.inside
    model, true_loss, true_norm = one_process(case.path, f"parallel.dimensions.{axis}=1")
    config = load(case.path, [f"parallel.dimensions.{axis}={case.inside[axis]}"])
    topology = Topology.create(pipeline=case.pipeline, dimensions=case.inside, data=case.data)
    whole = Job(config, 4).model(topology=topology)
    cut = Job(load(case.path, [f"parallel.pipeline={case.pipeline}"]), 4).cut(whole)
    scheduler = Scheduler(
        [Stage(cut.modules[stage], stage) for stage in topology.local_stages],
        topology,
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=loss_of,
        tied=cut.tied,
        handlers=case.handlers,
        **case.options,
    )
    sync = scheduler.sync
    sync.check_replicas()
    share, num_shares = topology.coordinate(case.data), topology.size(case.data)
    batch = read_corpus(config).batch(1, seed=0, size=16, share=share, num_shares=num_shares)
    first, last = (stage in topology.local_stages for stage in (0, topology.num_stages - 1))
    result = scheduler.step(batch[0] if first else None, target=batch[1] if last else None)
    true = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in true.values())
    elements = {}
    sync.optimizer_parameters()
    for one in sync.main_parameters():
        key = one.record.key.partition(".")[2]
        assert one.tensor.grad is not None
        found = one.tensor.grad.flatten()
        expected = shard_of(key, true[key], topology).flatten()
        expected = expected[one.begin : one.begin + found.numel()]
        assert float((found - expected).abs().max()) / largest < rounding(TOKENS)
        elements[key] = found.numel()
    norm = sync.clip_grad_norm_(1.0).item()
    assert gathered(norm) == [norm] * 4  # in all bits
    assert norm == pytest.approx(true_norm, rel=rounding(TOKENS))
    assert result.loss.item() == pytest.approx(true_loss, rel=rounding(TOKENS))
    scheduler.close()
    # Every element is stepped as often as it is there.
    everywhere = gathered(elements)
    halves = Topology.build(axes=(("pp", 1), ("dp", 1), (axis, 2)))
    of_whole, apart, tie = case.times
    for full, parameter in model.named_parameters():
        is_apart = shard_of(full, parameter, halves).numel() < parameter.numel()
        times = (apart if is_apart else of_whole) + (tie if full == "embedding.weight" else 0)
        stepped = sum(rank.get(full, 0) for rank in everywhere)
        assert stepped == times * parameter.numel(), full
