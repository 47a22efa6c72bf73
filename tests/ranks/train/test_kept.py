"""What handlers keep is in checkpoints: a run goes on to the bit, or says that it starts afresh."""

from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pipegrad.errors import PlanError
from pipegrad.pipeline.step_times import Layout
from pipegrad.schedules.measured import Times
from pipegrad.testing import run_ranks
from pipegrad.train.checkpoint import checkpoint
from pipegrad.train.config import load
from pipegrad.train.trainer import Trainer
from tests.support.train.jobs import with_job

SETTINGS = ["model.dropout=0.25", "optimizer.lr=1e-2", "train.steps=6"]
CODED = ["parallel.codecs={gradients='topk', activations='int8'}"]
REPLICAS = ["parallel.data=2"]
RANK_1 = "{name='powerSGD_hook', start_powerSGD_iter=2, matrix_approximation_rank=1}"
RANK_2 = "{name='powerSGD_hook', start_powerSGD_iter=2, matrix_approximation_rank=2}"


def averaged(hook: str) -> list[str]:
    chosen = f"['pipeline-shared', {{name='data-parallel', hook={hook}}}]"
    return [*REPLICAS, f"gradient_handlers={chosen}"]


def trained(settings: list[str], until: int, saved: str = "") -> Any:
    """Trains a job until a step, saves it there; returns losses, parameters and notes."""
    trainer = Trainer(partial(load, Path("small.toml"), [*SETTINGS, *settings]))
    losses = [trainer.step(number).loss for number in range(trainer.first_step, until + 1)]
    if saved:
        trainer.save(Path(saved), until)
    held = {name: tensor.clone() for name, tensor in trainer._state.tensors().items()}
    trainer.close()
    return losses, held, trainer.notes


def notes_of_steps(settings: list[str]) -> list[str | None]:
    """Returns what a job notes in its first steps, whose hops are said to be slow."""
    trainer = Trainer(partial(load, Path("small.toml"), [*SETTINGS, *settings]))
    times = Times((0.01,) * 2, (0.02,) * 2, (0.5,))
    with mock.patch.object(Layout, "times", return_value=times):
        notes = [trainer.step(number).note for number in range(1, 5)]
    trainer.close()
    return notes


ODD_HOOK = """
from fractions import Fraction
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
class Keeps:
    def __init__(self, process_group):
        self.process_group = process_group
    def state_dict(self):
        return {"scale": Fraction(1, 2)}
    def load_state_dict(self, state):
        pass
def averaged(state, bucket):
    return allreduce_hook(state.process_group, bucket)
"""
ODD = averaged("{name='odd_hook:averaged', state='odd_hook:Keeps'}")


def kept_in(folder: str) -> list[str]:
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    return sorted(key for key in keys if key.startswith("kept."))


def histories(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    feedback, half = averaged(RANK_2), "train.resume=half"
    found: dict[str, Any] = {
        "through": trained(feedback, 6),
        "first half": trained(feedback, 4, "half"),
        "second half": trained([*feedback, half], 6),
        "plain": trained(averaged("'bf16_compress_hook'"), 2, "plain"),
    }
    found |= {
        "coded through": trained(CODED, 6),
        "coded first half": trained(CODED, 4, "coded"),
        "coded second half": trained([*CODED, "train.resume=coded"], 6),
        "no codecs": trained(["train.resume=coded"], 5),
        "other replicas": trained([*CODED, *REPLICAS, "train.resume=coded"], 5),
        "other cut": trained([*CODED, "parallel.boundaries=[1]", "train.resume=coded"], 5),
    }
    found["kept"], found["nothing"] = kept_in("half"), kept_in("plain")
    found["kept of codecs"] = kept_in("coded")
    found["auto"] = notes_of_steps(["parallel.codecs=auto"])
    for name, settings in {
        "buckets": [*feedback, half, "gradients.bucket_bytes=2048"],
        "rank 1": [*averaged(RANK_1), half],
        "no hook": [*REPLICAS, half],
        "pipeline": [half],
        "begun": [*feedback, "train.resume=plain"],
    }.items():
        found[name] = trained(settings, 5)
    try:
        trained(ODD, 1, "odd")
    except PlanError as error:
        found["odd"] = str(error), Path("odd").exists()
    with mock.patch.object(checkpoint, "pack", packed_unseen):
        trained(ODD, 1, "unreadable")
    found["unreadable"] = trained([*ODD, "train.resume=unreadable"], 2)
    return found


def packed_unseen(kept: dict[str, Any]) -> torch.Tensor:
    """As an older version packed it."""
    torch.save(kept, file := io.BytesIO())
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = with_job(tmp_path_factory.mktemp("kept"))
    (folder / "odd_hook.py").write_text(ODD_HOOK)
    return run_ranks(histories, 2, str(folder))


def test_error_feedback_goes_on_to_the_bit(replies: list[dict[str, Any]]) -> None:
    for found in replies:
        (whole, held, _), (first, _, _), (second, then, notes) = (
            found[name] for name in ("through", "first half", "second half")
        )
        assert first + second == whole
        assert held.keys() == then.keys()
        assert all(torch.equal(held[name], then[name]) for name in held)
        assert notes == ()


def test_errors_of_codecs_go_on_to_the_bit(replies: list[dict[str, Any]]) -> None:
    for found in replies:
        (whole, held, _), (first, _, _), (second, then, notes) = (
            found[f"coded {name}"] for name in ("through", "first half", "second half")
        )
        assert first + second == whole
        assert all(torch.equal(held[name], then[name]) for name in held)
        assert notes == ()
        # The first stage sends no gradient, so its rank has no errors.
        assert found["kept of codecs"] == ["kept.1"]


def test_a_run_with_other_codecs_or_ranks_says_what_is_another(
    replies: list[dict[str, Any]],
) -> None:
    for found in replies:
        assert "parallel.codecs was" in found["no codecs"][2][0]
        for name, words in {"other replicas": "of another plan", "other cut": "cut"}.items():
            (note,) = found[name][2]
            assert "error feedback starts afresh" in note
            assert words in note


def test_the_step_that_chooses_codecs_says_so(replies: list[dict[str, Any]]) -> None:
    words = "codecs from here on: 0-1: activations int8, gradients int8"
    assert [found["auto"] for found in replies] == [[None, None, words, None]] * 2


def test_each_rank_keeps_its_own_and_others_keep_nothing(replies: list[dict[str, Any]]) -> None:
    assert (replies[0]["kept"], replies[0]["nothing"]) == (["kept.0", "kept.1"], [])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("buckets", "error feedback starts afresh: what handlers kept is of another plan"),
        ("rank 1", 'cannot go on: ValueError("what is to be loaded was kept by the hook'),
        ("no hook", "it has no communication hook, and takes nothing that one kept"),
        ("pipeline", "error feedback starts afresh: what handlers kept is of another plan"),
        ("unreadable", "error feedback starts afresh: what handlers kept cannot be read again: "),
    ],
)
def test_another_run_starts_afresh_and_says_so(
    replies: list[dict[str, Any]], name: str, says: str
) -> None:
    for found in replies:
        losses, _, notes = found[name]
        assert (len(losses), len(notes)) == (1, 1)
        assert notes[0].startswith("train.resume: error feedback starts afresh: ")
        assert says in notes[0]
    assert replies[0][name][2] == replies[1][name][2]


def test_what_could_not_be_read_again_is_not_written(replies: list[dict[str, Any]]) -> None:
    (said, is_written), other = (found["odd"] for found in replies)
    assert (said, is_written) == other
    assert said.startswith("no checkpoint can be written: what handlers ['data-parallel'] keep ")
    assert "fractions.Fraction" in said
    assert not is_written


def test_what_was_never_kept_is_not_missed(replies: list[dict[str, Any]]) -> None:
    for found in replies:
        losses, _, notes = found["begun"]
        assert (len(losses), notes) == (3, ())
