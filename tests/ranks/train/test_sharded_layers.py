"""FSDP2 and tensor parallelism by the configuration: what a rank holds, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegrad.errors import ConfigError
from pipegrad.model.dtensor import layout_of
from pipegrad.train.config import load
from pipegrad.train.job import Job
from tests.support.train.jobs import refusal, trainer_of, with_job

pytestmark = [
    pytest.mark.ranks(4),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # of a linear layer at the end
]

TABLE = (
    "parallel.tensor_plan={'0'='rowwise', '1.0'='colwise', '2.0'='rowwise', "
    "'4'='colwise_gather_output'}"
)
COMMON = ["gradients.clip_norm=1", "parallel.microbatches=2"]
RUNS = {
    "pp 2 x fsdp 2": ["parallel.pipeline=2", "parallel.data_shard=2"],
    "pp 2 x tp 2": ["parallel.pipeline=2", "parallel.tensor=2", TABLE],
    "fsdp 2 x tp 2": ["parallel.pipeline=1", "parallel.data_shard=2", "parallel.tensor=2", TABLE],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("sharded")) / "small.toml"


@pytest.mark.parametrize("name", RUNS)
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
