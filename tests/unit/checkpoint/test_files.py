"""What lies in a checkpoint: each changed byte is damage, and whatever it says, nothing is run."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from pipegrad.checkpoint import files
from pipegrad.checkpoint.files import Files, Index, Range
from pipegrad.checkpoint.folders import INDEX
from pipegrad.checkpoint.state import Place
from pipegrad.errors import CheckpointError
from tests.support.checkpoints import RANK_0, index_of, reseal, written

STATE = {
    "model.weight": torch.arange(12.0).view(3, 4),
    "model.empty": torch.zeros(0, 3),
    "model.scale": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.ones(7000, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose folder is no UTF-8."""
    folder = tmp_path_factory.mktemp("files") / os.fsdecode(b"caf\xe9")
    return written(folder, STATE, run={"seed": "1"})


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_the_library_reads_it_too(folder: Path) -> None:
    found = Files(folder)
    found.verify()
    assert (found.index.step, found.index.run) == (7, {"seed": "1"})
    of_library = load_file(folder / RANK_0)
    assert of_library.keys() == STATE.keys()
    for key, tensor in STATE.items():
        for each in (found.whole(key), of_library[key]):
            assert (each.dtype, each.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(each, tensor)


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(SHAPES, st.data())
def test_any_layout_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], data: st.DataObject
) -> None:
    """Each cuts the tensor along a dimension, and each piece into two flat ranges."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    def layout() -> list[tuple[Place, int, Tensor]]:
        dim, found, begin = data.draw(st.integers(0, len(shape) - 1)), [], 0
        for piece in whole.tensor_split(data.draw(st.integers(1, 4)), dim):
            offsets = tuple(begin if d == dim else 0 for d in range(len(shape)))
            begin += piece.shape[dim]
            if not piece.numel():
                continue
            place, flat = Place(tuple(shape), offsets, tuple(piece.shape)), piece.reshape(-1)
            middle = data.draw(st.integers(0, flat.numel()))
            found += [(place, 0, flat[:middle]), (place, middle, flat[middle:])]
        return found

    folder = tmp_path_factory.mktemp("layout")
    parts = [place.part(flat, first) for place, first, flat in layout()]
    file, begins = files.write(folder / RANK_0, {str(i): p.values for i, p in enumerate(parts)})
    slices = [(part.range, RANK_0, begins[str(i)]) for i, part in enumerate(parts)]
    tensor: Any = {"dtype": "int64", "shape": tuple(shape), "slices": slices}
    head: dict[str, Any] = {"step": 1, "layout": [], "run": {}, "tied": {}}
    index = Index(**head, files={RANK_0: file}, tensors={"key": tensor})
    (folder / INDEX).write_bytes(index.sealed())
    found = Files(folder)
    for place, first, flat in layout():
        assert torch.equal(found.read("key", place.part(flat, first).range), flat)


def test_each_cut_and_each_changed_byte_of_the_index_is_damage(folder: Path) -> None:
    path = folder / INDEX
    content = path.read_bytes()
    changed = [content[:end] for end in range(len(content))]
    for at, byte in enumerate(content):
        changed.append(content[:at] + bytes([byte ^ (1 + at % 255)]) + content[at + 1 :])
    for each in changed:
        path.write_bytes(each)
        with pytest.raises(CheckpointError, match=r"^is damaged: index\.json ") as caught:
            Files(folder)
        assert "\n" not in str(caught.value)


def test_each_changed_byte_of_a_file_names_it(folder: Path) -> None:
    path, found = folder / RANK_0, Files(folder)
    content = bytearray(path.read_bytes())
    for at in range(0, len(content), 997):
        content[at] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{RANK_0} has other bytes than were written"):
            found.verify()
        content[at] ^= 1
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{RANK_0} has other bytes than were written"):
        found.verify()
    with pytest.raises(CheckpointError, match=f"{RANK_0} is too short"):
        [found.whole(key) for key in STATE]
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{RANK_0} cannot be read: No such file"):
        found.verify()


class Calls:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_a_pickle_in_the_place_of_a_file_is_not_executed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / RANK_0).write_bytes(pickle.dumps(Calls()).ljust((folder / RANK_0).stat().st_size))
    reseal(folder)
    found = Files(folder)
    found.verify()
    assert found.whole("model.weight").shape == (3, 4)
    assert not Path("executed").exists()


def of_half(at: int, value: object) -> Callable[[dict[str, Any]], object]:
    """Returns what sets a field of a slice: range, file, first byte."""
    return lambda index: index["tensors"]["half"]["slices"][0].__setitem__(at, value)


def of_tensor(key: str, **fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["tensors"][key].update(fields)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    **{
        repr(path): of_half(1, path)
        for path in (
            "../whole",
            "..",
            "",
            "/etc/passwd",
            "a\0b",
            f"{RANK_0}\n",
            "rank-1.safetensors",
        )
    },
    "a file that is an integer": of_half(1, 3),
    "a first byte below 0": of_half(2, -1),
    "a first byte that is no integer": of_half(2, 0.5),
    "bytes behind the end": of_half(2, 2**40),
    "a range that is none": of_half(0, {}),
    "a gap": of_half(0, [[0], [7000], 0, 6999]),
    "a range backwards": of_half(0, [[0], [7000], 7000, 0]),
    "a box outside": of_half(0, [[1], [7000], 0, 7000]),
    "a box of other dimensions": of_half(0, [[0, 0], [7000, 1], 0, 7000]),
    "twice the bytes": lambda index: index["tensors"].update(
        more=index["tensors"]["half"], most=index["tensors"]["half"]
    ),
    "a tensor of petabytes": of_tensor("half", shape=[2**40, 2**20]),
    "a size beyond integers": of_tensor("model.empty", shape=[0, 2**70]),
    "another dtype": of_tensor("half", dtype="Tensor"),
    "no slices": of_tensor("half", slices=[]),
    "slices that are none": of_tensor("half", slices=None),
    "no tensor": lambda index: index["tensors"].update(x="y"),
    "a file elsewhere": lambda index: index["files"].update({"../x": [1, 1]}),
    "no version": lambda index: index.pop("version"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_values_of_another_kind_are_refused(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    reseal(folder, change)
    with pytest.raises(CheckpointError, match=r"^is damaged: index\.json is not what a run has"):
        Files(folder)


def test_another_version_is_refused_with_the_one_that_wrote_it(folder: Path) -> None:
    index = index_of(folder) | {"version": 2, "pipegrad": "9.9", "tensors": "of tomorrow"}
    reseal(folder, lambda found: found.update(index))
    with pytest.raises(CheckpointError, match=r"^has version 2, .*: take pipegrad 9\.9, which"):
        Files(folder)


def test_a_checkpoint_of_an_earlier_version_is_refused_in_a_sentence(folder: Path) -> None:
    (folder / INDEX).rename(folder / "checkpoint.json")
    with pytest.raises(CheckpointError, match=r"^is not a whole checkpoint of this version of pip"):
        Files(folder)


def test_a_dtype_without_a_name_is_refused_and_empty_ranges_are_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"torch\.complex128, for which safetensors has no"):
        files.write(tmp_path / RANK_0, {"x": torch.zeros(2, dtype=torch.complex128)})
    folder = written(tmp_path / "checkpoint-7", STATE)
    assert Files(folder).read("model.weight", Range((0, 0), (3, 4), 5, 5)).numel() == 0
    folder.rename(tmp_path / "checkpoint-8")
    with pytest.raises(CheckpointError, match="is the checkpoint of step 7 by what it has"):
        Files(tmp_path / "checkpoint-8")
