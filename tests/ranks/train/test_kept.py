"""What handlers keep is in checkpoints: a run goes on to the bit, or says that it starts afresh."""

from __future__ import annotations

import io
import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pipegrad.train.checkpoint import training_state
from tests.support.ranked import gathered
from tests.support.train.jobs import Trained, refusal, trained, trained_to, with_job

pytestmark = pytest.mark.ranks(2)
SETTINGS = ["model.dropout=0.25", "optimizer.lr=1e-2", "train.steps=6"]
REPLICAS = ["parallel.data=2"]
POWER = "{{name='powerSGD_hook', start_powerSGD_iter=2, matrix_approximation_rank={}}}"
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


def averaged(hook: str) -> list[str]:
    chosen = f"['pipeline-shared', {{name='data-parallel', hook={hook}}}]"
    return [*REPLICAS, f"gradient_handlers={chosen}"]


RUNS = {
    "feedback": averaged(POWER.format(2)),
    "coded": ["parallel.codecs={gradients='topk', activations='int8'}"],
    "plain": averaged("'bf16_compress_hook'"),
}
ODD = averaged("{name='odd_hook:averaged', state='odd_hook:Keeps'}")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_job(tmp_path_factory.mktemp("kept"))
    (folder / "odd_hook.py").write_text(ODD_HOOK)
    return folder / "small.toml"


@cache
def runs(job: Path, name: str) -> list[Trained]:
    """Trains a run; returns what is known after step 4, where it is saved, and in the end."""
    return trained_to(job, *SETTINGS, *RUNS[name], ends=(4, 6), saves={4: name})


def from_saved(job: Path, name: str, *settings: str, until: int = 5) -> Trained:
    runs(job, name)
    return trained(job, *SETTINGS, *settings, f"train.resume={name}", until=until)


# The first stage sends no gradient, so its rank has no errors of codecs.
@pytest.mark.parametrize(
    ("name", "kept"), [("feedback", ["handlers.0", "handlers.1"]), ("coded", ["handlers.1"])]
)
def test_errors_go_on_to_the_bit(job: Path, name: str, kept: list[str]) -> None:
    first, through = runs(job, name)
    second = from_saved(job, name, *RUNS[name], until=6)
    through.goes_on(first, second)
    assert second.notes == ()
    keys = FileSystemReader(job.with_name(name)).read_metadata().state_dict_metadata
    assert sorted(key for key in keys if key.startswith("handlers.")) == kept


def test_what_was_never_kept_is_not_missed(job: Path) -> None:
    begun = from_saved(job, "plain", *RUNS["feedback"])
    keys = FileSystemReader(job.with_name("plain")).read_metadata().state_dict_metadata
    assert not any(key.startswith("handlers.") for key in keys)
    assert (len(begun.losses), begun.notes) == (1, ())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([*RUNS["coded"], *REPLICAS], "error feedback starts afresh: .*of another plan"),
        ([*RUNS["coded"], "parallel.boundaries=[1]"], "error feedback starts afresh: .*cut"),
    ],
)
def test_a_run_with_other_codecs_or_ranks_says_what_is_another(
    job: Path, settings: list[str], says: str
) -> None:
    notes = from_saved(job, "coded", *settings).notes
    assert len(notes) == 1
    assert re.search(says, notes[0])


def afresh(run: Trained, says: str) -> None:
    [note] = run.notes
    assert len(run.losses) == 1
    assert note.startswith("train.resume: error feedback starts afresh: ")
    assert says in note
    assert gathered(note) == [note] * 2


OF_ANOTHER_PLAN = "error feedback starts afresh: the state of handlers is of another plan"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([*RUNS["feedback"], "gradients.bucket_bytes=2048"], OF_ANOTHER_PLAN),
        (
            averaged(POWER.format(1)),
            'cannot go on: ValueError("what is to be loaded is of the hook',
        ),
        (REPLICAS, "it has no communication hook, and takes nothing that one kept"),
        ([], OF_ANOTHER_PLAN),
    ],
)
def test_another_run_starts_afresh_and_says_so(job: Path, settings: list[str], says: str) -> None:
    afresh(from_saved(job, "feedback", *settings), says)


def test_what_could_not_be_read_again_is_not_written(job: Path) -> None:
    said = refusal(job, *ODD, save="odd")
    assert said.startswith("no checkpoint can be written: what handlers ['data-parallel'] keep ")
    assert "fractions.Fraction" in said
    assert not job.with_name("odd").exists()


def test_what_an_older_version_wrote_and_cannot_be_read_is_said(job: Path) -> None:
    with mock.patch.object(training_state, "pack", packed_unseen):
        trained(job, *ODD, until=1, save="unreadable")
    run = trained(job, *ODD, "train.resume=unreadable", until=2)
    afresh(run, "error feedback starts afresh: the state of handlers cannot be read again: ")


def packed_unseen(kept: dict[str, Any]) -> torch.Tensor:
    torch.save(kept, file := io.BytesIO())
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
