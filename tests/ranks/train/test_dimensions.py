"""Tensor, sequence and expert parallelism: what one process computes, cut along further axes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

from pipegrad import Scheduler, Stage, Topology
from pipegrad.plugins.handler import HandlerSpec
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.data import read_corpus
from pipegrad.train.job import Job
from tests.support.rounding import rounding

EXAMPLES = Path(__file__).parents[3] / "examples"
TENSOR, EXPERTS = EXAMPLES / "tensor_parallel.toml", EXAMPLES / "mixture_of_experts.toml"
TOKENS = 16 * 64  # of a batch of the examples
WHOLE = ["embedding.*", "*norm*", "*.bias"]
OWNED = {"name": "pipeline-shared", "placement": "owner"}
SEQUENCE = {"name": "sequence-parallel", "parameters": WHOLE}
SHARDED_EXPERTS = {"name": "expert-parallel", "placement": "shard"}


@dataclass(frozen=True)
class Case:
    """One cut of an example over 4 ranks."""

    path: Path
    pipeline: int
    handlers: list[HandlerSpec]
    inside: dict[str, int] = field(default_factory=lambda: {"tp": 2})
    data: tuple[str, ...] = ("dp",)
    options: dict[str, Any] = field(default_factory=dict)


expert_case = partial(Case, EXPERTS, inside={"ep": 2}, data=("dp", "ep"))

CASES = {
    "pp 2 x tp 2": Case(TENSOR, 2, ["pipeline-shared", "data-parallel", SEQUENCE]),
    "pp 2 x tp 2, an owner": Case(TENSOR, 2, [OWNED, "sharded", SEQUENCE]),
    "dp 2 x tp 2": Case(TENSOR, 1, ["data-parallel", SEQUENCE], options={"bucket_bytes": 0}),
    "dp 2 x tp 2, in rows": Case(TENSOR, 1, ["sharded", SEQUENCE], options={"bucket_bytes": 4096}),
    "pp 2 x dp 2, one tp rank": Case(TENSOR, 2, [OWNED, "sharded", SEQUENCE], {"tp": 1}),
    "tp 4": Case(TENSOR, 1, [SEQUENCE], {"tp": 4}),
    "pp 2 x ep 2": expert_case(2, ["pipeline-shared", "expert-parallel"]),
    "pp 2 x ep 2, in rows": expert_case(2, [OWNED, SHARDED_EXPERTS]),
    "dp 2 x ep 2": expert_case(1, ["expert-parallel"], options={"bucket_bytes": 0}),
    "dp 2 x ep 2, in rows": expert_case(1, [SHARDED_EXPERTS], options={"comm_streams": 1}),
    "ep 4": expert_case(1, ["expert-parallel"], inside={"ep": 4}),
    "pp 2 x ep 2, the other way round": expert_case(
        2, ["pipeline-shared", "expert-parallel"], data=("ep", "dp")
    ),
}


@dataclass(frozen=True)
class Seen:
    """What a rank found in one step, beside what one process has.

    Attributes:
        error: Largest error of a gradient, relative to the largest gradient of the model.
        loss: Of the step, and of one process.
        norm: The global norm, and that of one process.
        elements: Name -> how many of its elements this rank steps.
    """

    error: float
    loss: tuple[float, float]
    norm: tuple[float, float]
    elements: dict[str, int]


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


def one_process(path: Path, settings: list[str]) -> tuple[nn.Module, Tensor, float]:
    """Returns the uncut model with the gradients of the first batch, its loss, and the norm."""
    config = load(path, settings)
    model = Job(config, 1).model()
    tokens, target = read_corpus(config).batch(1, seed=0, size=config.data.batch_size)
    loss = loss_of(model(tokens), target)
    loss.backward()
    return model, loss, nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()  # type: ignore[misc]


def stepped_once(case: Case) -> Seen:
    [axis] = case.inside
    model, true_loss, true_norm = one_process(case.path, [f"parallel.dimensions.{axis}=1"])
    config = load(case.path, [f"parallel.dimensions.{axis}={case.inside[axis]}"])
    topology = Topology.create(pipeline=case.pipeline, dimensions=case.inside, data=case.data)
    job = Job(config, 4)
    whole = job.model(topology=topology)
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
    true = {name: p.grad for name, p in model.named_parameters()}
    largest = max(float(g.abs().max()) for g in true.values() if g is not None)
    error, elements = 0.0, {}
    sync.optimizer_parameters()
    for one in sync.main_parameters():
        name = one.record.key.partition(".")[2]
        expected = true[name]
        assert expected is not None
        assert one.tensor.grad is not None
        flat = shard_of(name, expected, topology).flatten()
        found = one.tensor.grad.flatten()
        expected = flat[one.begin : one.begin + found.numel()]
        error = max(error, float((found - expected).abs().max()) / largest)
        elements[name] = found.numel()
    norm = sync.clip_grad_norm_(1.0).item()
    loss = result.loss.item()
    scheduler.close()
    return Seen(error, (loss, true_loss.item()), (norm, true_norm), elements)


def stepped_in_all_cases() -> dict[str, Seen]:
    return {name: stepped_once(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Seen]]:
    return run_ranks(stepped_in_all_cases, 4, timeout_seconds=400)


@pytest.mark.parametrize("name", CASES)
def test_gradients_loss_and_norm_are_those_of_one_process(
    seen: list[dict[str, Seen]], name: str
) -> None:
    for found in (rank[name] for rank in seen):
        assert found.error < rounding(TOKENS)
        assert found.loss[0] == pytest.approx(found.loss[1], rel=rounding(TOKENS))
        assert found.norm[0] == pytest.approx(found.norm[1], rel=rounding(TOKENS))
        assert found.norm[0] == seen[0][name].norm[0]  # in all bits


# How often all ranks together step what is whole on each, what lives apart, and the tie once more.
TIMES = {
    "pp 2 x tp 2": (2, 1, 2),
    "pp 2 x tp 2, an owner": (2, 1, 0),
    "dp 2 x tp 2": (4, 2, 0),
    "dp 2 x tp 2, in rows": (2, 1, 0),
    "pp 2 x dp 2, one tp rank": (1, 1, 0),
    "tp 4": (4, 1, 0),
    "pp 2 x ep 2": (2, 1, 2),
    "pp 2 x ep 2, in rows": (1, 1, 0),
    "dp 2 x ep 2": (4, 2, 0),
    "dp 2 x ep 2, in rows": (1, 1, 0),
    "ep 4": (4, 1, 0),
    "pp 2 x ep 2, the other way round": (2, 1, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_every_element_is_stepped_as_often_as_it_is_there(
    seen: list[dict[str, Seen]], name: str
) -> None:
    [axis] = CASES[name].inside
    model = Job(load(CASES[name].path, [f"parallel.dimensions.{axis}=1"]), 1).model()
    halves = Topology.build(axes=(("pp", 1), ("dp", 1), (axis, 2)))
    whole, apart, tie = TIMES[name]
    for full, parameter in model.named_parameters():
        is_apart = shard_of(full, parameter, halves).numel() < parameter.numel()
        times = (apart if is_apart else whole) + (tie if full == "embedding.weight" else 0)
        stepped = sum(rank[name].elements.get(full, 0) for rank in seen)
        assert stepped == times * parameter.numel(), full
