"""FSDP2 and tensor parallelism by the configuration: losses of one process, and checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from pipegrad.errors import ConfigError
from pipegrad.model.dtensor import layout_of
from pipegrad.testing import run_ranks
from pipegrad.train.checkpoint.uncut import load as load_whole
from pipegrad.train.config import load
from pipegrad.train.job import Job
from tests.support.rounding import rounding
from tests.support.train.jobs import Trained, refusal, trained, trained_to, trainer_of, with_job

pytestmark = [
    pytest.mark.ranks(4),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # of a linear layer at the end
]

PLAN = """
from fnmatch import fnmatchcase
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def plan(stage, mesh):
    styles = {"1.0": ColwiseParallel(), "2.0": RowwiseParallel()}
    for name, module in stage.named_modules():
        if name in styles:
            parallelize_module(module, mesh, styles[name], src_data_rank=None)
"""
TABLE = (
    "parallel.tensor_plan={'0'='rowwise', '1.0'='colwise', '2.0'='rowwise', "
    "'4'='colwise_gather_output'}"
)
NET = (
    "parallel.tensor_plan={'embedding'='rowwise', 'layers.*'='colwise_gather_output', "
    "'head'='colwise_gather_output'}"
)
SEQUENCE = "{name='sequence-parallel', op='mean', parameters=['0.*', '3.*', '4.*']}"
COMMON = ["gradients.clip_norm=1", "parallel.microbatches=2"]
RUNS = {
    "pp 2 x fsdp 2": ["parallel.pipeline=2", "parallel.data_shard=2"],
    "pp 2 x fsdp 2, token mean": [
        "parallel.pipeline=2",
        "parallel.data_shard=2",
        "train.loss_reduction=token_mean",
        "parallel.schedule=interleaved-1f1b",
        "parallel.boundaries=[1, 2, 3]",
        "train.recompute=true",
    ],
    "pp 2 x tp 2": ["parallel.pipeline=2", "parallel.tensor=2", TABLE],
    "pp 2 x tp 2, by a function": [
        "parallel.pipeline=2",
        "parallel.tensor=2",
        "parallel.tensor_plan='plan:plan'",
        f"gradient_handlers=['pipeline-shared', 'data-parallel', {SEQUENCE}]",
    ],
    "copies 2 x fsdp 2": ["parallel.pipeline=1", "parallel.data_shard=2"],
    "fsdp 2 x tp 2": ["parallel.pipeline=1", "parallel.data_shard=2", "parallel.tensor=2", TABLE],
    "dp 2 x tp 2": ["parallel.pipeline=1", "parallel.data=2", "parallel.tensor=2", TABLE],
    "pp 2 x fsdp 2, of a module": [
        "model.factory=factories:Net",
        "parallel.pipeline=2",
        "parallel.data_shard=2",
    ],
    "pp 2 x tp 2, of a module": [
        "model.factory=factories:Net",
        "parallel.pipeline=2",
        "parallel.tensor=2",
        NET,
    ],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_job(tmp_path_factory.mktemp("sharded"))
    (folder / "plan.py").write_text(PLAN)
    return folder / "small.toml"


@pytest.fixture(scope="module")
def true(job: Path) -> dict[bool, Trained]:
    """One process; with the model that is no nn.Sequential, or without."""
    settings = {False: COMMON, True: [*COMMON, "model.factory=factories:Net"]}
    return {is_net: run_ranks(alone, 1, job, own)[0] for is_net, own in settings.items()}


def alone(job: Path, settings: list[str]) -> Trained:
    return trained(job, *settings, until=4)


@cache
def parts(job: Path, name: str) -> tuple[Trained, Trained]:
    half, whole = trained_to(job, *COMMON, *RUNS[name], ends=(2, 4), saves={2: name})
    return half, whole


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_process_also_if_it_was_stopped(
    job: Path, true: dict[bool, Trained], name: str
) -> None:
    half, through = parts(job, name)
    for ours, one in zip(through.steps, true["module" in name].steps, strict=True):
        assert (ours.loss, ours.grad_norm) == pytest.approx(
            (one.loss, one.grad_norm), rel=rounding(4 * 8 * 16)
        )
    through.goes_on(half, trained(job, *COMMON, *RUNS[name], f"train.resume='{name}'", until=4))


@pytest.mark.parametrize("name", [name for name in RUNS if "function" not in name])
def test_a_checkpoint_has_whole_tensors_that_other_cuts_read(
    job: Path, true: dict[bool, Trained], name: str
) -> None:
    parts(job, name)
    whole = load_whole(job.parent / name)
    assert not any("[" in key for key in whole)
    factory = [setting for setting in RUNS[name] if setting.startswith("model")]
    mean = [setting for setting in RUNS[name] if setting.startswith("train.loss")]
    settings = [*COMMON, *factory, *mean, f"train.resume='{name}'", "parallel.pipeline=2"]
    run = trained(job, *settings, until=4)
    for ours, one in zip(run.steps, true["module" in name].steps[2:], strict=True):
        assert ours.loss == pytest.approx(one.loss, rel=rounding(4 * 8 * 16))


@pytest.mark.parametrize(
    ("name", "other"), [("pp 2 x fsdp 2", "fsdp 2 x tp 2"), ("pp 2 x tp 2", "copies 2 x fsdp 2")]
)
def test_a_run_goes_on_with_another_way_to_shard(
    job: Path, true: dict[bool, Trained], name: str, other: str
) -> None:
    parts(job, name)
    run = trained(job, *COMMON, *RUNS[other], f"train.resume='{name}'", until=4)
    for ours, one in zip(run.steps, true[False].steps[2:], strict=True):
        assert ours.loss == pytest.approx(one.loss, rel=rounding(4 * 8 * 16))


@pytest.mark.parametrize("name", ["pp 2 x fsdp 2", "copies 2 x fsdp 2"])
def test_a_run_goes_on_from_a_checkpoint_without_dtensors(
    job: Path, true: dict[bool, Trained], name: str
) -> None:
    trained(job, *COMMON, "parallel.pipeline=2", until=2, save="plain")
    run = trained(job, *COMMON, *RUNS[name], "train.resume=plain", until=4)
    for ours, one in zip(run.steps, true[False].steps[2:], strict=True):
        assert (ours.loss, ours.grad_norm) == pytest.approx(
            (one.loss, one.grad_norm), rel=rounding(4 * 8 * 16)
        )


def test_tensor_parallel_ranks_refuse_the_flat_state_of_a_run_without_dtensors(job: Path) -> None:
    trained(job, *COMMON, "parallel.pipeline=2", until=2, save="flat")
    said = refusal(job, *COMMON, *RUNS["pp 2 x tp 2"], "train.resume=flat")
    assert "weight.exp_avg' is not kept for each element of the whole tensor" in said


@pytest.mark.parametrize("name", ["pp 2 x fsdp 2", "pp 2 x tp 2", "fsdp 2 x tp 2"])
def test_each_rank_holds_its_part(job: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    trainer = trainer_of(job, *COMMON, *RUNS[name])
    layouts = {r.name: layout_of(trainer.sync.parameter(r)) for r in trainer.sync.records()}
    trainer.close()
    assert None not in layouts.values()
    found = layouts["4.weight" if "4.weight" in layouts else "0.weight"]
    assert found is not None
    assert found.shape == (256, 8)
    assert found.replicated == (False,) * (2 if "fsdp 2 x tp" in name else 1)
    if name == "pp 2 x tp 2" and "3.weight" in layouts:
        norm = layouts["3.weight"]
        assert norm is not None
        assert norm.replicated == (True,)


FSDP = ["parallel.pipeline=2", "parallel.data_shard=2"]
TENSOR = ["parallel.pipeline=2", "parallel.tensor=2"]
REFUSED = {
    "a divisor": (["parallel.data_shard=3"], "expected a divisor of the 1 data-parallel ranks"),
    "no plan": (TENSOR, "should have tensor and tensor_plan, or neither"),
    "no tensor": (["parallel.tensor_plan='plan:plan'"], "tensor and tensor_plan, or neither"),
    "a style": ([*TENSOR, "parallel.tensor_plan={'0'='rows'}"], "'rows': should be 'colwise'"),
    "no module": ([*TENSOR, "parallel.tensor_plan={'9'='rowwise'}"], "'9' matches no module"),
    "a norm": ([*TENSOR, "parallel.tensor_plan={'3'='rowwise'}"], "nn.Linear and nn.Embedding"),
    "two ways": (
        [
            "parallel.pipeline=1",
            "parallel.tensor=4",
            "parallel.tensor_plan={'0'='colwise_gather_output', '4'='colwise_gather_output'}",
        ],
        "Embedding and Linear have one tied parameter, and the plan cuts it in two ways",
    ),
    "splits": ([*FSDP, "parallel.schedule=zb-h1"], "splits backward"),
    "sharded": ([*FSDP, "gradient_handlers=['pipeline-shared', 'sharded']"], "it is a DTensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_alike(job: Path, name: str) -> None:
    settings, says = REFUSED[name]
    assert says in refusal(job, *COMMON, *settings)


@pytest.mark.parametrize("settings", [FSDP, [*TENSOR, TABLE]])
def test_a_plan_without_ranks_is_refused(job: Path, settings: list[str]) -> None:
    offline = Job(load(job, settings), 4)
    with pytest.raises(ConfigError, match="what ranks then hold is not known without them"):
        offline.manifest(offline.cut(offline.model("meta")))
