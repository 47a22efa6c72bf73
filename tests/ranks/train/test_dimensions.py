"""Tensor, sequence and expert parallelism: gradients of one process, sizes and seeds of jobs."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pipegrad import Scheduler, Stage, Topology
from pipegrad.errors import ConfigError, PlanError
from pipegrad.plugins.handler import HandlerSpec
from pipegrad.testing import run_ranks
from pipegrad.train.config import Config, load
from pipegrad.train.corpus import mixed, read_corpus
from pipegrad.train.job import Job
from pipegrad.train.rendering import rendered_summary
from pipegrad.train.summary import make_summary, rank_as_text
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.train.jobs import (
    EXAMPLES,
    command,
    trained,
)

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


# --- jobs

ALONE = {
    "tensor_parallel.toml": "parallel.dimensions.tp=1",
    "mixture_of_experts.toml": "parallel.dimensions.ep=1",
}
STEPS = ["train.steps=4", "optimizer.lr=1e-2", "optimizer.schedule={name='StepLR', step_size=2}"]


@pytest.fixture(scope="module")
def true() -> dict[str, list[float]]:
    """The loss of each step in one process."""
    return {name: run_ranks(losses_alone, 1, name)[0] for name in ALONE}


def losses_alone(name: str) -> list[float]:
    return trained(EXAMPLES / name, *STEPS, ALONE[name], until=4).losses


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ALONE)
def test_along_tp_dropout_drops_the_same_of_what_each_rank_has_whole(name: str) -> None:
    trained(EXAMPLES / name, until=1)
    rank = dist.get_rank()
    assert torch.initial_seed() == mixed(0, 1, rank // 2 if "tensor" in name else rank)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ALONE)
def test_an_example_runs_as_its_first_lines_say(
    name: str, true: dict[str, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = EXAMPLES / name
    assert f"torchrun --nproc-per-node 4 -m pipegrad train examples/{name}" in path.read_text()
    assert f"--set {ALONE[name]}" in path.read_text()
    monkeypatch.chdir(tmp_path)
    settings = [word for one in [*STEPS, "train.log_every=1"] for word in ("--set", one)]
    code, printed = command("train", str(path), *settings)
    assert not code, printed
    if dist.get_rank() == 0:
        losses = [float(loss) for loss in re.findall(r"step +\d+ +loss (\S+)", printed)]
        assert losses == pytest.approx(true[name], abs=1e-4)  # as printed
        assert "equal, bit by bit" in printed


# --- without ranks

FACTORY = """
import torch
from torch import nn

def placed(*, topology, width=4):
    at = {axis: (topology.coordinate(axis), topology.size(axis)) for axis, _ in topology.axes}
    assert topology.mesh is None, "offline"
    layers = nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))
    layers[0].register_buffer("at", torch.tensor(list(at.values())))
    return layers

def no_tp(*, topology):
    topology.size("tp")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "placed.py").write_text(FACTORY)
    made = tmp_path / "job.toml"
    made.write_text('[model]\nfactory = "placed:placed"\n')
    return made


def config(path: Path, *settings: str) -> Config:
    return load(path, settings)


TWICE = "parallel.dimensions={ep=2, tp=3}"


@pytest.mark.parametrize(
    ("settings", "num_ranks", "sizes"),
    [
        ([TWICE], None, (6, 1, 1, 1)),
        ([TWICE], 24, (24, 4, 1, 1)),
        ([TWICE, "parallel.data=2"], None, (12, 1, 2, 2)),
        ([TWICE, "parallel.data=2"], 24, (24, 2, 2, 2)),
        ([TWICE, "parallel.pipeline=2"], 24, (24, 2, 2, 2)),
        (
            [TWICE, "parallel.pipeline=2", "parallel.data_dimensions=['dp', 'ep']"],
            24,
            (24, 2, 2, 4),
        ),
        ([TWICE, "parallel.data_dimensions=['ep']"], 12, (12, 2, 1, 2)),
    ],
)
def test_pipeline_and_data_share_what_further_dimensions_leave(
    path: Path, settings: list[str], num_ranks: int | None, sizes: tuple[int, ...]
) -> None:
    job = Job(config(path, *settings), num_ranks)
    assert (job.num_ranks, job.pipeline, job.data, job.num_shares) == sizes
    axes = (("pp", job.pipeline), ("dp", job.data), ("ep", 2), ("tp", 3))
    assert job.topology().axes == axes
    assert job.topology().size(job.topology().data) == job.num_shares


@pytest.mark.parametrize(
    ("settings", "num_ranks", "said"),
    [
        (
            ["parallel.dimensions={ep=2, tp=4}"],
            4,
            "parallel.dimensions = {'ep': 2, 'tp': 4}: ep 2 x tp 4 are 8 ranks, but there are 4",
        ),
        (
            [TWICE, "parallel.pipeline=2", "parallel.data=1"],
            24,
            "pipeline 2 x data 1 x ep 2 x tp 3 are 12 ranks, but there are 24: start that many",
        ),
        (
            [TWICE, "parallel.pipeline=4"],
            12,
            "= 4: pipeline 4 x ep 2 x tp 3 are 24 ranks, but there are 12: start a multiple",
        ),
        (
            [TWICE, "parallel.data_dimensions=['dp', 'cp']"],
            6,
            "parallel.data_dimensions = ['dp', 'cp']: expected of ['dp', 'ep', 'tp'], once each",
        ),
        (
            [TWICE, "parallel.data_dimensions=['dp', 'ep']", "data.batch_size=6"],
            6,
            "= 6: 2 replicas x 4 microbatches do not divide it: choose a multiple of 8",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    path: Path, settings: list[str], num_ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Job(config(path, *settings), num_ranks)
    assert said in str(caught.value)


def placed(job: Job, rank: int | None = None) -> object:
    """Returns coordinate and size along each axis, as the factory was given them."""
    view = None if rank is None else job.topology(rank)
    return dict(job.model(topology=view).named_buffers())["0.at"].tolist()


def test_a_factory_with_that_parameter_is_given_the_topology(path: Path) -> None:
    job = Job(config(path, TWICE), 12)
    assert placed(job) == [[0, 2], [0, 1], [0, 2], [0, 3]]
    assert placed(job, 11) == [[1, 2], [0, 1], [1, 2], [2, 3]]
    with pytest.raises(ConfigError, match=r"the factory has no option 'topology'; allowed.* width"):
        Job(config(path, "model.topology='ring'"), 1).model()
    with pytest.raises(ConfigError, match=r"the factory fails: .*no dimension 'tp', only \['pp'"):
        Job(config(path, "model.factory='placed:no_tp'"), 1).model()


EXPERT = "gradient_handlers=[{name='expert-parallel', experts=['0.*']}]"
BOTH = ["parallel.dimensions.ep=2", "parallel.data_dimensions=['dp', 'ep']"]


@pytest.mark.parametrize(
    ("handlers", "bare"),
    {
        "all of it": ("gradient_handlers=['data-parallel']", None),
        "experts": (EXPERT, None),
        "one after the other": (
            "gradient_handlers=[{name='sharded', axis='dp'}, {name='data-parallel', axis='ep'}]",
            None,
        ),
        "half of it": ("gradient_handlers=[{name='data-parallel', axis='dp'}]", "0.0.weight"),
        "the other half": ("gradient_handlers=[{name='data-parallel', axis='ep'}]", "0.0.weight"),
        "nothing": ("gradient_handlers=['pipeline-shared']", "0.0.weight"),
    }.values(),
)
def test_each_data_dimension_needs_a_reduction_or_a_divisor_that_stands_for_it(
    path: Path, handlers: str, bare: str | None
) -> None:
    job = Job(config(path, *BOTH, handlers, "parallel.pipeline=2"), 8)
    manifest = job.manifest(job.cut(job.model()))
    if bare is None:
        assert len(job.plans(manifest)) == 8
        return
    with pytest.raises(PlanError, match=f"no handler reduces the gradients of '{bare}' and 1 more"):
        job.plans(manifest)


def test_what_is_printed_names_dimensions_and_divisors(path: Path) -> None:
    job = Job(config(path, *BOTH, EXPERT, "parallel.pipeline=2"), 8)
    cut = job.cut(job.model("meta"))
    manifest = job.manifest(cut)
    told = make_summary(job, cut, manifest)
    assert told["dimensions"] == {"ep": 2}
    lines = [line for line in rendered_summary(told, job.schedule) if isinstance(line, str)]
    assert lines[0].startswith("8 ranks: pipeline 2 x data 2 x ep 2, 4 microbatches by 1f1b")
    shown = rank_as_text(job, manifest, 0)
    assert re.search(r"\ndivided by 2 before they leave: .*0\.0\.weight", shown), shown
    assert {way["route"]: way["parameters"] for way in told["routes"]} == {
        "replicate-mean(dp)": 2,
        "replicate-mean(dp+ep)": 2,
    }
