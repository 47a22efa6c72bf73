"""A checkpoint that is not what was written, or not of this model, is refused before any step."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from pipegrad.errors import PipegradError
from pipegrad.testing import run_ranks
from pipegrad.train.checkpoint.checksums import sealed
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


def without_pieces(folder: Path) -> None:
    checksums = json.loads((folder / "checksums.json").read_text())
    put_checksums(folder, checksums | {"pieces": []})


def put_checksums(folder: Path, content: dict[str, Any]) -> None:
    (folder / "checksums.json").write_text(json.dumps(sealed(content)))


def another_seed(folder: Path) -> None:
    path = folder / "checksums.json"
    path.write_text(path.read_text().replace('"train.seed": "0"', '"train.seed": "1"'))


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


class Malicious:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (EXECUTED,)


def put_metadata(folder: Path, content: object) -> None:
    """Replaces .metadata, with a checksum that is right."""
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    checksums = json.loads((folder / "checksums.json").read_text())
    checksums["metadata"] = zlib.crc32((folder / ".metadata").read_bytes())
    put_checksums(folder, checksums)


def changed_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    put_metadata(folder, metadata)


def outside(metadata: Metadata) -> None:
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index].relative_path = "../whole/__0_0.distcp"


def with_object(metadata: Metadata) -> None:
    """torch would read this entry with a pickle that may execute anything."""
    metadata.state_dict_metadata["step"] = BytesStorageMetadata()


def of_another_run(folder: Path) -> None:
    shutil.copy("other/checksums.json", folder)


def foreign(folder: Path) -> None:
    """A checkpoint as other programs write it with torch."""
    shutil.rmtree(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it writes in one process
        save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder, no_dist=True)


def no_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder)
    torch.save({"model": torch.ones(3)}, folder)


def unpickled_by(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Malicious()))
    (path / "checksums.json").unlink()


EXECUTED = "executed"
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
    "values of the run": (another_seed, f"{IS_DAMAGED}checksums.json is damaged"),
    "a file in the folder's place": (
        no_folder,
        "expected the folder of a checkpoint: ",
    ),
    "no .metadata": (
        lambda folder: (folder / ".metadata").unlink(),
        "is not a whole checkpoint: it has no .metadata",
    ),
    "an unfinished one.partial": (
        lambda _: None,
        "is not a whole checkpoint: the run that wrote it did not finish it",
    ),
    "a .metadata that executes": (
        lambda folder: put_metadata(folder, Malicious()),
        f"{IS_DAMAGED}.metadata names posix.mkdir, which no checkpoint needs, and to read it would",
    ),
    "a .metadata that executes, unverified": (unpickled_by, ".metadata names posix.mkdir, which"),
    "a .metadata of something else": (
        lambda folder: put_metadata(folder, ["no metadata"]),
        ".metadata is not the metadata of a checkpoint",
    ),
    "files outside of the folder": (
        lambda folder: changed_metadata(folder, outside),
        ".metadata names the file '../whole/__0_0.distcp', outside of it",
    ),
    "an object that would be unpickled": (
        lambda folder: changed_metadata(folder, with_object),
        f"{IS_DAMAGED}its 'step' is no tensor: another program wrote it",
    ),
    "checksums of another run": (of_another_run, "the bytes of .metadata are not those that were"),
    "checksums of nothing": (
        without_pieces,
        f"{IS_DAMAGED}checksums.json is of another checkpoint",
    ),
    "of another program": (foreign, "it is of another model: the checkpoint holds 'w', which"),
    "a file of torch.save": (no_checkpoint, "expected the folder of a checkpoint: "),
    "an empty folder": (emptied, "is not a whole checkpoint: it has no .metadata"),
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
    trained(["train.seed=7"], 1, "other")
    first = dist.get_rank() == 0
    found: dict[str, Any] = {}
    for name, (damage, _) in DAMAGES.items():
        if first:
            shutil.copytree("whole", name)
            damage(Path(name))
        dist.barrier()
        found[name] = refused([f"train.resume={name!r}"])  # in another cut
    found["executed"] = Path(EXECUTED).exists()
    found |= with_fallback(first=first)
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


def with_fallback(*, first: bool) -> dict[str, Any]:
    """A run of three checkpoints; the newest two are damaged, and one was never finished."""
    if first:
        for step in (1, 2, 3):
            shutil.copytree("whole", f"run/checkpoint-{step}")
        flip_piece(Path("run/checkpoint-3"), "model.0.weight")
        (Path("run/checkpoint-2") / ".metadata").unlink()
        shutil.copytree("whole", "run/checkpoint-4.partial")
        shutil.copytree("run", "run without")
        shutil.copytree("whole", "renamed/checkpoint-100")
        (Path("renamed") / "manifest.json").write_text("{}")
        shutil.rmtree("run without/checkpoint-1")
    dist.barrier()
    found: dict[str, Any] = {}
    for name, settings in FALLBACKS.items():
        try:
            trainer = trained(settings, 1)
            found[name] = str(trainer.checkpoint), trainer.notes
        except PipegradError as error:
            found[name] = str(error)
    with mock.patch.object(os, "pread", partial(unreadable, os.pread)):
        for name in ("a run", "a checkpoint"):
            found[f"{name} that cannot be read"] = refused(FALLBACKS[name])
    return {"fallback": found}


def unreadable(pread: Callable[..., bytes], *arguments: Any) -> bytes:
    """Is the disk of rank 1, which cannot be read."""
    if dist.get_rank() == 1:
        raise OSError(errno.EIO, "Input/output error")
    return pread(*arguments)


FALLBACKS = {
    "no": ["train.resume=run"],
    "a run": ["train.resume=run", "train.fallback=true", *SHARDED],
    "a checkpoint": ["train.resume=run/checkpoint-3", "train.fallback=true", *SHARDED],
    "renamed": ["train.resume='renamed'", "train.fallback=true", *SHARDED],
    "none left": ["train.resume='run without'", "train.fallback=true"],
    "auto": ["train.resume=auto", "train.output=run", "train.fallback=true", *SHARDED],
}


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


def test_reading_executes_nothing(replies: list[dict[str, Any]]) -> None:
    assert [reply["executed"] for reply in replies] == [False, False]


@pytest.mark.parametrize("name", ["a run", "a checkpoint", "auto"])
def test_a_damaged_checkpoint_falls_back(replies: list[dict[str, Any]], name: str) -> None:
    first, second = (reply["fallback"][name] for reply in replies)
    assert first == second
    checkpoint, (newest, older) = first
    assert checkpoint == "run/checkpoint-1"
    assert newest.startswith("train.resume: run/checkpoint-3 is damaged: ")
    assert newest.endswith("; this run goes on from run/checkpoint-2")
    assert older.startswith("train.resume: run/checkpoint-2 is not a whole checkpoint: ")
    assert older.endswith("; this run goes on from run/checkpoint-1")


@pytest.mark.parametrize("name", ["a run", "a checkpoint"])
def test_what_cannot_be_read_is_not_damaged(replies: list[dict[str, Any]], name: str) -> None:
    """It was renamed to checkpoint-3.damaged when a disk could not be read for a moment."""
    first, second = (reply["fallback"][f"{name} that cannot be read"] for reply in replies)
    assert first == second
    assert "run/checkpoint-3/__" in first
    assert " cannot be read: Input/output error: this says nothing of its bytes, so no " in first
    assert "\n" not in first


def test_nothing_falls_back_unasked(replies: list[dict[str, Any]]) -> None:
    first, second = (reply["fallback"]["no"] for reply in replies)
    assert first == second
    assert "train.resume = 'run': run/checkpoint-3: is damaged: " in first
    assert first.endswith("; or set train.fallback = true")
    assert "\n" not in first
    renamed = replies[0]["fallback"]["renamed"]
    assert "renamed/checkpoint-100: is the checkpoint of step 1 by what it has" in renamed
    assert renamed.endswith(": give the folder the name checkpoint-1 again")
    none_left = replies[0]["fallback"]["none left"]
    assert "'run without': run without/checkpoint-2: is not a whole checkpoint: " in none_left
