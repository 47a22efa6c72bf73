"""A checkpoint that is not what was written, or not of this model, is refused before any step."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipegrad.errors import PipegradError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.trainer import Trainer
from tests.support.train.jobs import with_job

SHARDED = ["gradient_handlers=['pipeline-shared', 'sharded']", "parallel.data=2"]
IS_DAMAGED = "is damaged: "


def flip(path: Path, begin: int, count: int = 40) -> None:
    content = bytearray(path.read_bytes())
    content[begin : begin + count] = (byte ^ 0x55 for byte in content[begin : begin + count])
    path.write_bytes(content)


def flip_piece(folder: Path, key: str) -> None:
    """Flips bytes at the end of a tensor as it lies in a file."""
    pieces = json.loads((folder / "checksums.json").read_text())["pieces"]
    piece = next(piece for piece in pieces if piece["key"].startswith(key))
    flip(folder / piece["file"], piece["offset"] + piece["length"] // 2)


def swap(folder: Path) -> None:
    first, second = folder / "__0_0.distcp", folder / "__1_0.distcp"
    first.rename(folder / "between")
    second.rename(first)
    (folder / "between").rename(second)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


def cut_unverified(folder: Path) -> None:
    truncate(folder / ".metadata")
    (folder / "checksums.json").unlink()


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "40 bytes of a weight": (
        lambda folder: flip_piece(folder, "model.0.weight"),
        "_0.distcp has other bytes in 'model.0.weight' than were written",
    ),
    "a rank's rows of sharded optimizer state": (
        lambda folder: flip_piece(folder, "optimizer."),
        "has other bytes in 'optimizer.",
    ),
    "the step": (lambda folder: flip_piece(folder, "step"), "in 'step' than were written"),
    "a shard that was cut off": (
        lambda folder: truncate(folder / "__1_0.distcp"),
        f"{IS_DAMAGED}__1_0.distcp has ",
    ),
    "a shard that is not there": (
        lambda folder: (folder / "__1_0.distcp").unlink(),
        f"{IS_DAMAGED}there is no __1_0.distcp",
    ),
    "two shards in each other's place": (swap, f"{IS_DAMAGED}__0_0.distcp has "),
    "bytes of .metadata": (
        lambda folder: flip(folder / ".metadata", 200),
        f"{IS_DAMAGED}the bytes of .metadata are not those that were written",
    ),
    "a .metadata that was cut off, unverified": (
        cut_unverified,
        f"{IS_DAMAGED}.metadata cannot be read: ",
    ),
    "bytes of the checksums": (
        lambda folder: flip(folder / "checksums.json", 10),
        f"{IS_DAMAGED}checksums.json ",
    ),
    "a file in the folder's place": (
        no_folder,
        "expected the folder of a checkpoint: ",
    ),
    "no .metadata": (
        lambda folder: (folder / ".metadata").unlink(),
        "is not a whole checkpoint: it has no .metadata",
    ),
}
OF_ANOTHER_MODEL = {
    "fewer layers here": (
        ["model.layers=1"],
        "which the model does not have; the model has '2.bias', '2.weight', which the checkpoint",
    ),
    "more layers here": (
        ["model.layers=4"],
        "; the model has '3.0.bias', '3.0.weight', '4.0.bias', '4.0.weight' and 2 more, which the",
    ),
    "wider here": (["model.width=9"], "it is of another model: '0.weight' is (256, 9) here and"),
}
OTHERWISE = {
    "another text": (["data.files=['other.txt']"], "data.files was text "),
    "another seed": (["train.seed=1"], "train.seed was 0, and is 1"),
    "another batch": (["data.batch_size=16"], "data.batch_size was 8, and is 16"),
    "another optimizer": (["optimizer.name=Adam"], "optimizer.name was 'AdamW', and is 'Adam'"),
    "no checksums": ([], "has no checksums.json, so its bytes were not verified"),
}


def trained(settings: list[str], until: int, saved: str = "") -> Trainer:
    trainer = Trainer(partial(load, Path("small.toml"), settings))
    for number in range(trainer.first_step, until + 1):
        trainer.step(number)
    if saved:
        trainer.save(Path(saved), until)
    trainer.close()
    return trainer


def refused(settings: list[str]) -> str:
    try:
        trained(settings, 1)
    except PipegradError as error:
        return str(error)
    return "went on"


def histories(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    trained(SHARDED, 1, "whole")
    first = dist.get_rank() == 0
    found: dict[str, Any] = {}
    for name, (damage, _) in DAMAGES.items():
        if first:
            shutil.copytree("whole", name)
            damage(Path(name))
        dist.barrier()
        found[name] = refused([f"train.resume={name!r}"])  # in another cut
    for name, (settings, _) in OF_ANOTHER_MODEL.items():
        found[name] = refused([*settings, "train.resume=whole"])
    if first:
        shutil.copytree("whole", "no checksums")
        Path("no checksums/checksums.json").unlink()
        Path("other.txt").write_text("other words " * 99)
    dist.barrier()
    for name, (settings, _) in OTHERWISE.items():
        resumed = "no checksums" if name == "no checksums" else "whole"
        trainer = trained([*settings, f"train.resume={resumed!r}"], 2)
        found[name] = trainer.first_step, trainer.notes
    found["the same run"] = trained([*SHARDED, "train.resume=whole"], 2).notes
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not first:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        trained(SHARDED, 1, "full")
    except PipegradError as error:
        found["full"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = with_job(tmp_path_factory.mktemp("damaged"))
    return run_ranks(histories, 2, str(folder))


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused(replies: list[dict[str, Any]], name: str) -> None:
    """Issue 16, point 8.

    Forty flipped bytes in a shard trained on with a loss of 29,760. A truncated, swapped or deleted
    shard ended in 200 lines of traceback, and a damaged .metadata was called absent.
    """
    first, second = (reply[name] for reply in replies)
    assert first == second
    assert DAMAGES[name][1] in first
    assert "\n" not in first


@pytest.mark.parametrize("name", OF_ANOTHER_MODEL)
def test_a_checkpoint_of_another_model_is_refused(replies: list[dict[str, Any]], name: str) -> None:
    """Issue 16, point 8.

    A checkpoint of two layers was read into a model of one: the loss was 8.83 instead of 7.05.
    """
    first, second = (reply[name] for reply in replies)
    assert first == second
    assert OF_ANOTHER_MODEL[name][1] in first


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_otherwise_is_noted(replies: list[dict[str, Any]], name: str) -> None:
    """Issue 16, point 8.

    Another text, seed, batch size or optimizer than the checkpoint's run had was taken silently.
    """
    for reply in replies:
        first_step, notes = reply[name]
        assert first_step == 2
        assert len(notes) == 1
        assert OTHERWISE[name][1] in notes[0]
        assert reply["the same run"] == ()


def test_a_full_disk_is_said_in_one_line(replies: list[dict[str, Any]]) -> None:
    """Issue 16, point 18.

    A save on a full disk ended in 196 lines that named neither the path nor the step.
    """
    first, second = (reply["full"] for reply in replies)
    assert first == second
    assert "the checkpoint of step 1 cannot be written into full: rank 1: " in first
    assert "bytes are free there" in first
    assert "\n" not in first
