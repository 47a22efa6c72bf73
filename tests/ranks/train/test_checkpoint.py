"""A run that goes on from a checkpoint is the run that was never stopped, in any cut."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipegrad.errors import ConfigError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.trainer import Trainer
from tests.support.rounding import rounding
from tests.support.train.jobs import with_job

SETTINGS = [
    "model.dropout=0.25",
    "optimizer.lr=1e-2",
    "optimizer.schedule={name='StepLR', step_size=2, gamma=0.5}",
    "gradients.clip_norm=1",
    "train.steps=6",
]
AVERAGING = [
    "model={factory='factories:averaging'}",
    "parallel.boundaries=[2]",
    "optimizer={name='SGD', lr=0.1}",
]
WIDER = ["model.width=9"]
STEADY = ["model.dropout=0"]
OWNED = "{name='pipeline-shared', placement='owner'}"
SHARDED = [*STEADY, "gradient_handlers=['pipeline-shared', 'sharded']", "parallel.data=2"]
OWNER = [*STEADY, f"gradient_handlers=[{OWNED}, 'sharded']"]
STORED = [*SHARDED, "gradients.master_dtype='bfloat16'"]  # coarser than what parameters are in
MUON_RATE, STEPS_OF_MUON = 0.01, 3
OF_MUON = [
    *STEADY,
    f"optimizer={{name='Muon', lr={MUON_RATE}, others={{name='AdamW', lr=1e-3}}}}",
]
MUON = [*OF_MUON, "gradient_handlers=['pipeline-shared', 'owned']", "parallel.data=2"]
VEE = ["parallel.schedule={name='interleaved-1f1b', stages_per_rank=2}"]


def trained(settings: list[str], until: int, saved: str = "") -> tuple[list[float], dict[str, Any]]:
    """Trains a job until a step, saves it there; returns losses and this rank's parameters."""
    trainer = Trainer(partial(load, Path("small.toml"), [*SETTINGS, *settings]))
    steps = range(trainer.first_step, until + 1)
    losses = [trainer.step(number).loss for number in steps]
    if saved:
        trainer.save(Path(saved), until)
    trainer.sync.wait_parameters()
    held = {
        name.partition(".")[2]: tensor.clone() for name, tensor in trainer._state.tensors().items()
    }
    trainer.close()
    return losses, held


def histories(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    halfway, steady = "resume=halfway", "train.resume=steady"
    found: dict[str, Any] = {
        "through": trained([], 6),
        "first half": trained([], 3, "halfway"),
        "second half": trained([f"train.{halfway}"], 6),
        "steady": trained(STEADY, 6),
        "steady half": trained(STEADY, 3, "steady"),
        "averaging": trained(AVERAGING, 3, "averaging"),
        "averaging again": trained([*AVERAGING, "train.resume=averaging"], 3),  # reads, no step
    }
    every = {"sharded": SHARDED, "owner": OWNER, "stored": STORED, "muon": MUON}
    for name, placed in every.items():
        found[f"{name} through"] = trained(placed, 6)
        found[f"{name} first half"] = trained(placed, 3, f"{name} half")
        found[f"{name} second half"] = trained([*placed, f"train.resume='{name} half'"], 6)
    for name, cut in {
        "replicas": ["parallel.data=2"],
        "four stages": VEE,
        "gpipe": ["parallel.schedule=gpipe", "parallel.boundaries=[1]"],
    }.items():
        found[name] = trained([*STEADY, steady, *cut], 6)
    for name, cut in {
        "sharded to pipeline": [*STEADY, "train.resume='sharded half'"],
        "sharded to owner": [*OWNER, "train.resume='sharded half'"],
        "pipeline to sharded": [*SHARDED, steady],
        "owner to sharded": [*SHARDED, "train.resume='owner half'"],
        "stored to replicas": [*STEADY, "train.resume='stored half'", "parallel.data=2"],
        "muon to pipeline": [*OF_MUON, "train.resume='muon half'"],
        "muon to replicas": [*OF_MUON, "train.resume='muon half'", "parallel.data=2"],
    }.items():
        found[name] = trained(cut, 6)
    for name, settings in {
        "wider": [steady, *WIDER],
        "nowhere": ["train.resume=nowhere"],
        "over": [steady, "train.steps=3"],
        "another optimizer": [steady, "optimizer={name='SGD', momentum=0.9}"],
        "others alone": [*MUON, "train.resume='muon half'", "optimizer={name='AdamW'}"],
        "other others": [*MUON, "train.resume='muon half'", "optimizer.others={name='SGD'}"],
        "others for matrices": [*MUON, "train.resume='muon half'", "optimizer.name='SGD'"],
    }.items():
        try:
            trained(settings, 6)
        except Exception as error:  # noqa: BLE001 - is asserted
            found[name] = str(error), isinstance(error, ConfigError)
    return found


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = with_job(tmp_path_factory.mktemp("checkpoint"))
    return run_ranks(histories, 2, str(folder))


@pytest.mark.parametrize("placed", ["", "sharded ", "owner ", "stored ", "muon "])
def test_going_on_is_never_having_stopped(replies: list[dict[str, Any]], placed: str) -> None:
    for found in replies:
        (whole, held), (first, _), (second, held_then) = (
            found[placed + name] for name in ("through", "first half", "second half")
        )
        assert first + second == whole
        assert held.keys() == held_then.keys()
        assert all(torch.equal(held[name], held_then[name]) for name in held)


def test_what_a_forward_keeps_is_kept(replies: list[dict[str, Any]]) -> None:
    (losses, kept), (none, again) = (replies[0][n] for n in ("averaging", "averaging again"))
    assert (len(losses), none) == (3, [])
    assert float(kept["1.average"]) == float(again["1.average"]) != 0
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize(
    "cut",
    [
        "replicas",
        "four stages",
        "gpipe",
        "sharded to pipeline",
        "sharded to owner",
        "pipeline to sharded",
        "owner to sharded",
    ],
)
def test_any_cut_goes_on_from_any_other(replies: list[dict[str, Any]], cut: str) -> None:
    whole, _ = replies[0]["steady"]
    assert replies[0][cut][0] == pytest.approx(whole[3:], rel=rounding(12 * 8 * 16))
    every = {name: tensor for found in replies for name, tensor in found["steady"][1].items()}
    for found in replies:
        for name, tensor in found[cut][1].items():
            torch.testing.assert_close(tensor, every[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cut", ["muon to pipeline", "muon to replicas"])
def test_whole_matrices_are_found_by_name_wherever_they_are_stepped(
    replies: list[dict[str, Any]], cut: str
) -> None:
    """Muon's matrix products are in bf16: where gradients differ by a rounding, so may its steps.

    A step moves an element by at most its rate, here times the root of two, at 8 bits.
    """
    _, whole = replies[0]["muon through"]
    limit = STEPS_OF_MUON * MUON_RATE * 2**0.5 * 2.0**-8
    for found in replies:
        for name, tensor in found[cut][1].items():
            torch.testing.assert_close(tensor, whole[name], rtol=0, atol=limit)


def test_what_was_stored_coarser_goes_on_finer(replies: list[dict[str, Any]]) -> None:
    stored, finer = replies[0]["stored through"][0], replies[0]["stored to replicas"][0]
    assert finer == pytest.approx(stored[3:], rel=1e-2)
    assert finer != stored[3:]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wider", "it is of another model: '0.weight' is (256, 9) here and (256, 8) there"),
        ("another optimizer", "but the optimizer of the checkpoint kept ['exp_avg', 'exp_avg_sq'"),
        ("others alone", "but the optimizer of the checkpoint kept ['momentum_buffer']: choose"),
        ("other others", "optimizer.others = 'SGD': it keeps [] of '0.weight', but the"),
        ("others for matrices", "optimizer = {'name': 'SGD', 'lr': 0.01}: it keeps [] of '"),
        ("nowhere", "train.resume = 'nowhere': there is no such folder, seen from the"),
        ("over", "train.steps = 3: the checkpoint is of step 3: nothing is left to do"),
    ],
)
def test_what_cannot_be_gone_on_from(
    replies: list[dict[str, Any]], name: str, message: str
) -> None:
    said = [found[name] for found in replies]
    assert said[0][0] == said[1][0]
    assert message in said[0][0]
