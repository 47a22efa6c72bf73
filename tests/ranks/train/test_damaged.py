"""A checkpoint that is not what was written is refused on all ranks, whoever of them sees it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch.distributed as dist

from pipegrad import run_files
from tests.support.checkpoints import index_of
from tests.support.train.jobs import refusal, trained, with_job

pytestmark = pytest.mark.ranks(2)
SHARDED = ["gradient_handlers=['pipeline-shared', 'sharded']", "parallel.data=2"]
IS_DAMAGED = "is damaged: "


def flip(path: Path, begin: int, count: int = 40) -> None:
    content = bytearray(path.read_bytes())
    content[begin : begin + count] = (byte ^ 0x55 for byte in content[begin : begin + count])
    path.write_bytes(content)


def flip_piece(folder: Path, key: str) -> None:
    """Flips bytes in the middle of a tensor as it lies in a file."""
    (*_, begin, end), file, at = index_of(folder)["tensors"][key]["slices"][0]
    flip(folder / file, at + (end - begin) * 2)


def swap(folder: Path) -> None:
    first, second = folder / "rank-0.safetensors", folder / "rank-1.safetensors"
    first.rename(folder / "between")
    second.rename(first)
    (folder / "between").rename(second)


def put_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


OTHER_BYTES = "has other bytes than were written"
# Each changed byte, each value of another kind, and pickles: tests/unit/checkpoint/test_files.py.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "40 bytes of a weight": (
        lambda folder: flip_piece(folder, "model.0.weight"),
        f".safetensors {OTHER_BYTES}",
    ),
    "two shards in each other's place": (
        swap,
        f"{IS_DAMAGED}rank-0.safetensors {OTHER_BYTES}",
    ),
    "a file in the folder's place": (
        put_file,
        ": index.json: Not a directory: ",
    ),
    "an unfinished one.partial": (
        str,
        "is not a whole checkpoint: the run that wrote it did not finish it",
    ),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("damaged")) / "small.toml"


@cache
def save_whole(job: Path) -> None:
    """Saves a checkpoint that is not damaged."""
    trained(job, *SHARDED, until=1, save="whole")


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


@cache
def save_runs(job: Path) -> None:
    """Makes a run whose newest checkpoint is damaged, and runs with other faults."""
    save_whole(job)
    if dist.get_rank() == 0:
        folder = job.parent
        for path in (
            *(f"run/checkpoint-{n}" for n in (0, 1, "4.partial")),
            "run without/checkpoint-2",
            "renamed/checkpoint-100",
        ):
            shutil.copytree(folder / "whole", folder / path)
        flip_piece(folder / "run/checkpoint-1", "model.0.weight")
        (folder / "run without/checkpoint-2/index.json").unlink()
        (folder / "renamed/manifest.json").write_text("{}")
    dist.barrier()


def test_a_file_that_cannot_be_read_is_named(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_whole(job)
    monkeypatch.setattr(run_files, "opened", partial(unreadable, run_files.opened))
    said = refusal(job, *SHARDED, "train.resume=whole")
    assert "is damaged: rank-1.safetensors cannot be read: Input/output error" in said
    assert "\n" not in said


def unreadable(opened: Callable[[Path], object], path: Path) -> object:
    """Is the disk of rank 1, which cannot be read."""
    if dist.get_rank() == 1 and path.suffix == ".safetensors":
        raise OSError(errno.EIO, "Input/output error")
    return opened(path)


def test_the_newest_checkpoint_of_a_run_is_named_if_it_is_refused(job: Path) -> None:
    save_runs(job)
    said = refusal(job, "train.resume=run")
    assert "train.resume = 'run': run/checkpoint-1 is damaged: " in said
    assert said.endswith(": restore the files, or take another checkpoint")
    assert "\n" not in said
    renamed = refusal(job, "train.resume=renamed", *SHARDED)
    assert "renamed/checkpoint-100 is the checkpoint of step 1 by what it has" in renamed
    assert renamed.endswith(": give the folder the name checkpoint-1 again")
    unwhole = refusal(job, "train.resume='run without'")
    assert "'run without': run without/checkpoint-2 is not a whole checkpoint of " in unwhole
