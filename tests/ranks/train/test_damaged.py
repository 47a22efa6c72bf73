"""A checkpoint that is not what was written, or not of this model, is refused before any step."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

from pipegrad.train.checkpoint import storage
from tests.support.train.jobs import refusal, seal, trained, with_job

pytestmark = pytest.mark.ranks(2)
SHARDED = ["gradient_handlers=['pipeline-shared', 'sharded']", "parallel.data=2"]
IS_DAMAGED = "is damaged: "


def flip(path: Path, begin: int, count: int = 40) -> None:
    content = bytearray(path.read_bytes())
    content[begin : begin + count] = (byte ^ 0x55 for byte in content[begin : begin + count])
    path.write_bytes(content)


def flip_piece(folder: Path, key: str) -> None:
    """Flips bytes in the middle of a tensor as it lies in a file."""
    tensors = json.loads((folder / "checkpoint.json").read_text())["tensors"]
    tensor = next(tensor for name, tensor in tensors.items() if name.startswith(key))
    _, _, file, offset, length = tensor["pieces"][0]
    flip(folder / file, offset + length // 2)


def swap(folder: Path) -> None:
    first, second = folder / "__0_0.distcp", folder / "__1_0.distcp"
    first.rename(folder / "between")
    second.rename(first)
    (folder / "between").rename(second)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


def unverified(name: str, change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Returns a damage of a file that no checksum tells."""

    def damage(folder: Path) -> None:
        change(folder / name)
        seal(folder)

    return damage


def instead(write: Callable[[Path], object]) -> Callable[[Path], object]:
    """Returns a damage that puts something else in the place of the folder."""

    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        write(folder)

    return damage


def save_foreign(folder: Path) -> None:
    """A checkpoint as other programs write it with torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it writes in one process
        save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder, no_dist=True)


class Malicious:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (EXECUTED,)


def altered_version(path: Path) -> None:
    path.write_text(path.read_text().replace('"pipegrad":"', '"pipegrad":"9'))


EXECUTED, SHARD, INDEX = "executed", "__1_0.distcp", "checkpoint.json"
OTHER_BYTES = "has other bytes than were written"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "40 bytes of a weight": (
        lambda folder: flip_piece(folder, "model.0.weight"),
        f"_0.distcp {OTHER_BYTES}",
    ),
    "a rank's rows of sharded optimizer state": (
        lambda folder: flip_piece(folder, "optimizer."),
        f"_0.distcp {OTHER_BYTES}",
    ),
    "the step": (lambda folder: flip_piece(folder, "step"), f"_0.distcp {OTHER_BYTES}"),
    "a shard that was cut off": (
        lambda folder: truncate(folder / SHARD),
        f"{IS_DAMAGED}{SHARD} {OTHER_BYTES}",
    ),
    "a shard that is not there": (
        lambda folder: (folder / SHARD).unlink(),
        f"{IS_DAMAGED}there is no {SHARD}",
    ),
    "two shards in each other's place": (
        swap,
        f"{IS_DAMAGED}__0_0.distcp {OTHER_BYTES} (and 1 more)",
    ),
    "bytes of the index": (
        lambda folder: flip(folder / INDEX, 200),
        f"{IS_DAMAGED}{INDEX} {OTHER_BYTES}",
    ),
    "an index that was cut off, unverified": (
        unverified(INDEX, truncate),
        f"{IS_DAMAGED}{INDEX} is not what a run has written",
    ),
    "bytes of the checksums": (
        lambda folder: flip(folder / "checksums.json", 10),
        f"{IS_DAMAGED}checksums.json {OTHER_BYTES}",
    ),
    "no checksums": (
        lambda folder: (folder / "checksums.json").unlink(),
        "is not a whole checkpoint of this version of pipegrad: it has no checksums.json; torch.",
    ),
    "a value of the index": (
        lambda folder: altered_version(folder / INDEX),
        f"{IS_DAMAGED}{INDEX} {OTHER_BYTES}",
    ),
    "a file in the folder's place": (instead(Path.touch), "expected the folder of a checkpoint: "),
    "no index, as before this format": (
        lambda folder: (folder / INDEX).unlink(),
        "is not a whole checkpoint of this version of pipegrad: it has no checkpoint.json; torch.",
    ),
    "an unfinished one.partial": (
        str,
        "is not a whole checkpoint: the run that wrote it did not finish it",
    ),
    "a .metadata that executes": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Malicious())),
        f"{IS_DAMAGED}.metadata {OTHER_BYTES}",
    ),
    "a tensor that executes, unverified": (
        unverified(SHARD, lambda path: torch.save(Malicious(), path)),
        "cannot be read: rank ",
    ),
    "an index of something else": (
        unverified(INDEX, lambda path: path.write_text('["no index"]')),
        f"{IS_DAMAGED}{INDEX} is not what a run has written",
    ),
    "files outside of the folder": (
        unverified(
            INDEX,
            lambda path: path.write_text(
                path.read_text().replace("__0_0.distcp", "../whole/__0_0.distcp")
            ),
        ),
        f"{IS_DAMAGED}{INDEX} is not what a run has written",
    ),
    "checksums of another run": (
        lambda folder: shutil.copy(folder.with_name("other") / "checksums.json", folder),
        f"{IS_DAMAGED}{INDEX} {OTHER_BYTES}",
    ),
    "checksums of nothing": (
        lambda folder: (folder / "checksums.json").write_text("{}"),
        f"{IS_DAMAGED}{INDEX} {OTHER_BYTES}",
    ),
    "of another program": (
        instead(save_foreign),
        "is not a whole checkpoint of this version of pipegrad: it has no checkpoint.json; torch.",
    ),
    "a file of torch.save": (
        instead(lambda path: torch.save({"model": torch.ones(3)}, path)),
        "expected the folder of a checkpoint: ",
    ),
    "an empty folder": (
        instead(Path.mkdir),
        "is not a whole checkpoint of this version of pipegrad: it has no checkpoint.json; torch.",
    ),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_job(tmp_path_factory.mktemp("damaged"))
    (folder / "other.txt").write_text("other words " * 99)
    return folder / "small.toml"


@cache
def save_whole(job: Path) -> None:
    """Saves two checkpoints, of which none is damaged."""
    trained(job, *SHARDED, until=1, save="whole")
    trained(job, "train.seed=7", until=1, save="other")


def copied(job: Path, name: str, change: Callable[[Path], object]) -> Path:
    """Makes a copy of the whole checkpoint, with a change; returns its folder."""
    save_whole(job)
    folder = job.with_name(name)
    if dist.get_rank() == 0:
        shutil.copytree(job.with_name("whole"), folder)
        change(folder)
    dist.barrier()
    return folder


@pytest.mark.parametrize(("name", "damage", "says"), [(n, *row) for n, row in DAMAGES.items()])
def test_damage_is_refused(
    job: Path, name: str, damage: Callable[[Path], object], says: str
) -> None:
    """40 flipped bytes trained on with a loss of 29,760, and others were 200 lines of traceback."""
    folder = copied(job, name, damage)
    said = refusal(job, f"train.resume={folder.name!r}")  # in another cut
    assert says in said
    assert "\n" not in said
    assert not job.with_name(EXECUTED).exists()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "model.layers=1",
            "which the model does not have; the model has '2.bias', '2.weight', which the check",
        ),
        (
            "model.layers=4",
            "; the model has '3.0.bias', '3.0.weight', '4.0.bias', '4.0.weight' and 2 more, which",
        ),
        ("model.width=9", "it is of another model: '0.weight' is (256, 9) here and"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(job: Path, setting: str, says: str) -> None:
    """A checkpoint of two layers was read into a model of one: the loss was 8.83, not 7.05."""
    save_whole(job)
    assert says in refusal(job, setting, "train.resume=whole")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("data.files=['other.txt']", "data.files was text "),
        ("train.seed=1", "train.seed was 0, and is 1"),
        ("data.batch_size=16", "data.batch_size was 8, and is 16"),
        ("optimizer.name=Adam", "optimizer.name was 'AdamW', and is 'Adam'"),
    ],
)
def test_what_is_otherwise_is_noted(job: Path, setting: str, says: str) -> None:
    save_whole(job)
    run = trained(job, setting, "train.resume=whole", until=2)
    assert [step.step for step in run.steps] == [2]
    [note] = run.notes
    assert says in note


def test_the_same_run_has_no_notes(job: Path) -> None:
    assert trained(job, *SHARDED, "train.resume=whole", until=2).notes == ()


def test_a_full_disk_is_said_in_one_line(job: Path) -> None:
    """A save on a full disk ended in 196 lines that named neither the path nor the step."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if dist.get_rank():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        said = refusal(job, *SHARDED, save="full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "the checkpoint of step 1 cannot be written into full: rank 1: " in said
    assert "bytes are free there" in said
    assert "\n" not in said


@cache
def save_runs(job: Path) -> None:
    """Makes a run whose newest checkpoint is damaged, and runs with other faults."""
    save_whole(job)
    if dist.get_rank() == 0:
        folder = job.parent
        for path in (
            *(f"run/checkpoint-{n}" for n in (1, 3, "4.partial")),
            "run without/checkpoint-2",
            "renamed/checkpoint-100",
        ):
            shutil.copytree(folder / "whole", folder / path)
        flip_piece(folder / "run/checkpoint-3", "model.0.weight")
        (folder / "run without/checkpoint-2/checkpoint.json").unlink()
        (folder / "renamed/manifest.json").write_text("{}")
    dist.barrier()


@pytest.mark.parametrize("name", ["run", "run/checkpoint-3"])
def test_a_file_that_cannot_be_read_is_named(
    job: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save_runs(job)
    monkeypatch.setattr(storage, "_checksum", partial(unreadable, storage._checksum))
    said = refusal(job, *SHARDED, f"train.resume={name}")
    assert "run/checkpoint-3/__" in said
    assert " cannot be read: Input/output error" in said
    assert "\n" not in said


def unreadable(checksum: Callable[[Path], int], path: Path) -> int:
    """Is the disk of rank 1, which cannot be read."""
    if dist.get_rank() == 1:
        raise OSError(errno.EIO, "Input/output error")
    return checksum(path)


def test_the_newest_checkpoint_of_a_run_is_named_if_it_is_refused(job: Path) -> None:
    save_runs(job)
    said = refusal(job, "train.resume=run")
    assert "train.resume = 'run': run/checkpoint-3: is damaged: " in said
    assert said.endswith(": restore the files, or go on from another checkpoint")
    assert "\n" not in said
    renamed = refusal(job, "train.resume=renamed", *SHARDED)
    assert "renamed/checkpoint-100: is the checkpoint of step 1 by what it has" in renamed
    assert renamed.endswith(": give the folder the name checkpoint-1 again")
    unwhole = refusal(job, "train.resume='run without'")
    assert "'run without': run without/checkpoint-2: is not a whole checkpoint of " in unwhole
