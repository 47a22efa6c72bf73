"""What a trainer leaves behind, and a checkpoint whose bytes are right and whose content is not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from pipegrad.train.optimizer import Update
from tests.support.train.jobs import refusal, trained, trainer_of, with_job

pytestmark = pytest.mark.ranks(1)


def test_a_closed_trainer_leaves_torch_with_the_algorithms_that_it_found(tmp_path: Path) -> None:
    job = with_job(tmp_path) / "small.toml"
    with contextlib.chdir(tmp_path):
        for before in (False, True):
            torch.use_deterministic_algorithms(before)
            try:
                trainer = trainer_of(job, f"train.deterministic={str(not before).lower()}")
                during = torch.are_deterministic_algorithms_enabled()
                trainer.close()
                after = torch.are_deterministic_algorithms_enabled()
            finally:
                torch.use_deterministic_algorithms(False)
            assert (during, after) == (not before, before)


def test_state_of_another_version_is_refused_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_job(tmp_path) / "small.toml"
    with monkeypatch.context() as patched:
        patched.setattr(Update, "state_dict", lambda _: {"of": "tomorrow"})
        trained(job, until=1, save="checkpoint-1")
    said = refusal(job, "train.resume=checkpoint-1", until=2)
    assert "train.resume = 'checkpoint-1': is damaged: its 'common' is of another version" in said
    assert said.endswith("restore the files, or go on from another checkpoint")
