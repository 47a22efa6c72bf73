"""What lies in a checkpoint: each changed byte is damage, and whatever it says, nothing is run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import pipegrad
from pipegrad.errors import WeightsError
from pipegrad.train.checkpoint.storage import (
    CheckpointWriter,
    DamageError,
    damaged,
    read_contents,
)
from tests.support.train.jobs import seal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {
    "model.weight": torch.arange(12.0).view(3, 4),
    "model.empty": torch.zeros(0, 3),
    "step": torch.tensor(7),
    "half": torch.ones(70000, dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose folder is no UTF-8."""
    folder = tmp_path_factory.mktemp("storage") / os.fsdecode(b"caf\xe9")
    save(dict(STATE), storage_writer=CheckpointWriter(folder, {"seed": "1"}), no_dist=True)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_it_is_what_torch_reads(whole: Path) -> None:
    contents, expected = read_contents(whole), FileSystemReader(whole).read_metadata()
    assert contents.run == {"seed": "1"}
    assert contents.tensors.keys() == expected.state_dict_metadata.keys() == STATE.keys()
    for key, saved in expected.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        assert contents.tensors[key].size == saved.size
        assert contents.tensors[key].chunks == saved.chunks
        assert contents.empty(key).dtype == saved.properties.dtype
    state = {key: torch.empty_like(tensor) for key, tensor in STATE.items()}
    load(state, checkpoint_id=whole, no_dist=True)  # other programs of torch read it, too
    assert all(torch.equal(state[key], tensor) for key, tensor in STATE.items())


@pytest.mark.parametrize("name", ["checkpoint.json", "checksums.json"])
def test_each_cut_and_each_changed_byte_is_damage(folder: Path, name: str) -> None:
    path, before = folder / name, read_contents(folder)
    content, says = path.read_bytes(), list[str]()
    changed = [content[:end] for end in range(len(content))]
    for at, byte in enumerate(content):
        changed.append(content[:at] + bytes([byte ^ (1 + at % 255)]) + content[at + 1 :])
    for each in changed:
        path.write_bytes(each)
        try:
            contents = read_contents(folder)
        except DamageError as error:
            says.append(str(error))
            continue
        # A space may have become another one.
        assert contents == before or damaged(folder, contents.checksums.items())
    assert says
    assert not [message for message in says if "\n" in message]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_each_changed_byte_of_another_file_names_it(folder: Path, name: str) -> None:
    path, checksums = folder / name, read_contents(folder).checksums
    content = bytearray(path.read_bytes())
    for at in range(0, len(content), 997):
        content[at] ^= 1
        path.write_bytes(content)
        assert damaged(folder, checksums.items()) == [f"{name} has other bytes than were written"]
        content[at] ^= 1
    path.write_bytes(content[:-1])
    assert damaged(folder, checksums.items()) == [f"{name} has other bytes than were written"]
    path.unlink()
    assert damaged(folder, checksums.items()) == [f"there is no {name}"]


class Calls:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_a_pickle_beside_the_tensors_is_not_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / ".metadata").write_bytes(pickle.dumps(Calls()))
    seal(folder)
    assert torch.equal(pipegrad.load(folder)["weight"], STATE["model.weight"])
    assert not Path("executed").exists()


def test_a_pickle_in_the_place_of_a_tensor_is_not_executed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    torch.save(Calls(), folder / "__0_0.distcp")
    nbytes = (folder / "__0_0.distcp").stat().st_size
    index = json.loads((folder / "checkpoint.json").read_text())
    del index["tensors"]["half"], index["tensors"]["model.empty"]
    for tensor in index["tensors"].values():
        tensor["pieces"][0][3:] = [0, nbytes]
    (folder / "checkpoint.json").write_text(json.dumps(index))
    seal(folder)
    with pytest.raises(WeightsError, match=r"cannot be read: .*weights_only") as caught:
        pipegrad.load(folder)
    assert "\n" not in str(caught.value)
    assert not Path("executed").exists()


def put(at: int, value: object) -> Callable[[dict[str, Any]], object]:
    """Returns what sets a field of a piece: offsets, sizes, file, offset, length."""
    return lambda tensors: tensors["half"]["pieces"][0].__setitem__(at, value)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    **{
        repr(path): put(2, path)
        for path in ("../whole", "..", ".", "", "a/b", "/etc/passwd", "a\0b", "__0_0.distcp\n")
    },
    "a file that is an integer": put(2, 3),
    "an offset below 0": put(3, -1),
    "a length that is no integer": put(4, 0.5),
    "sizes that are none": put(1, {}),
    "a tensor of petabytes": lambda tensors: tensors["half"].update(size=[2**40, 2**20]),
    "a size beyond integers": lambda tensors: tensors["model.empty"].update(size=[0, 2**70]),
    "another dtype": lambda tensors: tensors["half"].update(dtype="Tensor"),
    "no pieces": lambda tensors: tensors["half"].update(pieces=None),
    "no tensor": lambda tensors: tensors.update(x="y"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_values_of_another_kind_are_refused(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    path = folder / "checkpoint.json"
    index = json.loads(path.read_text())
    change(index["tensors"])
    path.write_text(json.dumps(index))
    seal(folder)
    with pytest.raises(DamageError, match=r"^is damaged: checkpoint\.json is not what a run has"):
        read_contents(folder)


def test_a_file_without_a_checksum_is_damage(folder: Path) -> None:
    path = folder / "checksums.json"
    checksums = json.loads(path.read_text())
    del checksums["__0_0.distcp"]
    path.write_text(json.dumps(checksums))
    with pytest.raises(DamageError, match=r"checksums\.json has no checksum of __0_0\.distcp"):
        read_contents(folder)


@pytest.mark.parametrize("name", ["../__0_0.distcp", "..", "/etc/passwd", "a/b"])
def test_a_checksum_of_a_file_elsewhere_is_damage_and_no_file_is_opened(
    folder: Path, name: str
) -> None:
    path = folder / "checksums.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: 1}))
    with pytest.raises(DamageError, match=rf"checksums\.json names '{name}'"):
        read_contents(folder)


def test_a_later_format_is_refused_with_the_version_that_wrote_it(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2, "pipegrad": "9.9"}))
    seal(folder)
    with pytest.raises(DamageError, match=r"has format 2, .*: take pipegrad 9\.9"):
        read_contents(folder)


def test_the_format_before_this_one_is_refused_in_a_sentence(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()
    with pytest.raises(DamageError, match=r"of this version of pipegrad: it has no checkpoint\.j"):
        read_contents(folder)
