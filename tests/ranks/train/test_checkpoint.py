"""A run that goes on from a checkpoint is the run that was never stopped, in any cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.train.jobs import Trained, refusal, trained, trained_to, with_job

pytestmark = pytest.mark.ranks(2)
SETTINGS = [
    "model.dropout=0.25",
    "optimizer.lr=1e-2",
    "optimizer.schedule={name='StepLR', step_size=2, gamma=0.5}",
    "gradients.clip_norm=1",
    "train.steps=6",
]
STEADY = ["model.dropout=0"]
OWNED = "{name='pipeline-shared', placement='owner'}"
SHARDED = [*STEADY, "gradient_handlers=['pipeline-shared', 'sharded']", "parallel.data=2"]
OWNER = [*STEADY, f"gradient_handlers=[{OWNED}, 'sharded']"]
MUON_RATE, STEPS_OF_MUON = 0.01, 3
OF_MUON = [*STEADY, f"optimizer={{name='Muon', lr={MUON_RATE}, others={{name='AdamW', lr=1e-3}}}}"]
MUON = [*OF_MUON, "gradient_handlers=['pipeline-shared', 'owned']", "parallel.data=2"]
RUNS = {
    "plain": [],
    "steady": STEADY,
    "sharded": SHARDED,
    "owner": OWNER,
    # Coarser than what parameters are in.
    "stored": [*SHARDED, "gradients.master_dtype='bfloat16'"],
    "muon": MUON,
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("checkpoint")) / "small.toml"


@cache
def runs(job: Path, name: str) -> list[Trained]:
    """Trains a run; returns what is known after its half, which is saved, and in the end."""
    saves = {3: f"{name} half"}
    return trained_to(job, *SETTINGS, *RUNS[name], ends=(3, 6), saves=saves)


def from_half(job: Path, name: str, *settings: str) -> Trained:
    """Goes on from the half of a run."""
    runs(job, name)
    return trained(job, *SETTINGS, *settings, f"train.resume='{name} half'", until=6)


def bare(run: Trained) -> dict[str, torch.Tensor]:
    """Returns the tensors by their names in the model."""
    return {name.partition(".")[2]: tensor for name, tensor in run.values.items()}


@pytest.mark.parametrize("name", RUNS)
def test_going_on_is_never_having_stopped(job: Path, name: str) -> None:
    first, through = runs(job, name)
    through.goes_on(first, from_half(job, name, *RUNS[name]))


def test_what_a_forward_keeps_is_kept(job: Path) -> None:
    averaging = ["model={factory='factories:averaging'}", "parallel.boundaries=[2]"]
    averaging.append("optimizer={name='SGD', lr=0.1}")
    first = trained(job, *averaging, until=3, save="averaging")
    again = trained(job, *averaging, "train.resume=averaging", until=3)  # reads, no step
    assert (len(first.losses), again.losses) == (3, [])
    assert all(torch.equal(first.values[name], again.values[name]) for name in first.values)
    average = gathered(bare(again))[0]["1.average"]
    assert float(average) != 0


@pytest.mark.parametrize(
    ("name", "settings"),
    {
        "replicas": ("steady", [*STEADY, "parallel.data=2"]),
        "four stages": (
            "steady",
            [*STEADY, "parallel.schedule={name='interleaved-1f1b', stages_per_rank=2}"],
        ),
        "gpipe": ("steady", [*STEADY, "parallel.schedule=gpipe", "parallel.boundaries=[1]"]),
        "sharded to pipeline": ("sharded", STEADY),
        "sharded to owner": ("sharded", OWNER),
        "pipeline to sharded": ("steady", SHARDED),
        "owner to sharded": ("owner", SHARDED),
    }.values(),
)
def test_any_cut_goes_on_from_any_other(job: Path, name: str, settings: list[str]) -> None:
    whole, found = runs(job, "steady")[1], from_half(job, name, *settings)
    assert found.losses == pytest.approx(whole.losses[3:], rel=rounding(12 * 8 * 16))
    every = {name: tensor for rank in gathered(bare(whole)) for name, tensor in rank.items()}
    for key, tensor in bare(found).items():
        torch.testing.assert_close(tensor, every[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cut", [[], ["parallel.data=2"]])
def test_whole_matrices_are_found_by_name_wherever_they_are_stepped(
    job: Path, cut: list[str]
) -> None:
    """Muon's matrix products are in bf16: where gradients differ by a rounding, so may its steps.

    A step moves an element by at most its rate, here times the root of two, at 8 bits.
    """
    whole = bare(runs(job, "muon")[1])
    limit = STEPS_OF_MUON * MUON_RATE * 2**0.5 * 2.0**-8
    for name, tensor in bare(from_half(job, "muon", *OF_MUON, *cut)).items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=limit)


def test_what_was_stored_coarser_goes_on_finer(job: Path) -> None:
    stored = runs(job, "stored")[1].losses[3:]
    finer = from_half(job, "stored", *STEADY, "parallel.data=2").losses
    assert finer == pytest.approx(stored, rel=1e-2)
    assert finer != stored


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        (
            "steady",
            ["model.width=9"],
            "it is of another model: '0.weight' is (256, 9) here and (256, 8) there",
        ),
        (
            "steady",
            ["optimizer={name='SGD', momentum=0.9}"],
            "but the optimizer of the checkpoint kept ['exp_avg', 'exp_avg_sq'",
        ),
        (
            "muon",
            [*MUON, "optimizer={name='AdamW'}"],
            "but the optimizer of the checkpoint kept ['momentum_buffer']: choose",
        ),
        (
            "muon",
            [*MUON, "optimizer.others={name='SGD'}"],
            "optimizer.others = 'SGD': it keeps [] of '0.weight', but the",
        ),
        (
            "muon",
            [*MUON, "optimizer.name='SGD'"],
            "optimizer = {'name': 'SGD', 'lr': 0.01}: it keeps [] of '",
        ),
        (
            "steady",
            ["train.steps=3"],
            "train.steps = 3: the checkpoint is of step 3: nothing is left to do",
        ),
    ],
)
def test_what_cannot_be_gone_on_from(job: Path, name: str, settings: list[str], says: str) -> None:
    runs(job, name)
    assert says in refusal(job, *SETTINGS, *settings, f"train.resume='{name} half'")


def test_nowhere_cannot_be_gone_on_from(job: Path) -> None:
    said = refusal(job, "train.resume=nowhere")
    assert "train.resume = 'nowhere': there is no such folder, seen from the" in said
