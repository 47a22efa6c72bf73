"""``.metadata`` of a checkpoint is read as data: whatever it says, nothing is called or changed."""

from __future__ import annotations

import builtins
import os
import pathlib
import pickle
import resource
import struct
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save

from pipegrad.train.checkpoint.checksums import DamageError
from pipegrad.train.checkpoint.metadata import read_pickled_metadata

STATE = {
    "model": {"weight": torch.ones(3, 4), "empty": torch.zeros(0, 3)},
    "step": torch.tensor(2**40),
    "half": torch.ones(70000, dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint, whose name is no UTF-8."""
    folder = tmp_path_factory.mktemp("metadata") / os.fsdecode(b"caf\xe9")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it writes in one process
        save(STATE, checkpoint_id=folder, no_dist=True)
    return folder


def test_it_is_what_torch_reads(folder: Path) -> None:
    found = read_pickled_metadata(folder / ".metadata")
    expected = FileSystemReader(folder).read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert len(found.storage_data) == len(found.state_dict_metadata) == 4


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


def program(code: bytes) -> bytes:
    return b"\x80\x04" + code + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, of: str) -> bytes:
    return text(module) + text(of) + b"\x93"


INDEX = name("torch.distributed.checkpoint.metadata", "MetadataIndex")
PATH = name("pathlib", "PosixPath")
STRING = text("touch executed")
PROGRAMS: dict[str, bytes] = {
    **{
        function.__qualname__: pickle.dumps(Calls(function, *arguments))
        for function, *arguments in (
            (os.system, "touch executed"),
            (os.mkdir, "executed"),
            (builtins.eval, "open('executed', 'w')"),
            (builtins.exec, "open('executed', 'w')"),
            (builtins.getattr, os.system, "__self__"),
            (builtins.__import__, "antigravity"),
            (subprocess.Popen, ["touch", "executed"]),
            (Path.touch, Path("executed")),
            (torch.load, "executed"),
            (torch.hub.download_url_to_file, "file:///etc/passwd", "executed"),
        )
    },
    "GLOBAL": program(b"cos\nsystem\n(" + STRING + b"tR"),
    "INST": program(b"(" + STRING + b"ios\nsystem\n"),
    "OBJ": program(b"(" + name("os", "system") + STRING + b"o"),
    "NEWOBJ_EX": program(name("os", "system") + b"(" + STRING + b"t}\x92"),
    "EXT": program(b"\x82\x01" + STRING + b"\x85R"),
    "PERSID": b"\x80\x04Pexecuted\n.",
    "BINPERSID": program(STRING + b"Q"),
    "a dotted name": program(name("pathlib", "PosixPath.touch") + PATH + STRING + b"\x85R\x85R"),
    "a lazy module of torch": program(name("torch", "_dynamo")),
    "BUILD on a class": program(PATH + b"}" + text("name") + text("x") + b"s\x86b"),
    "BUILD of slots on a class": program(PATH + b"N}" + text("name") + text("x") + b"s\x86b"),
    "BUILD on the class of an index": program(INDEX + b"N}" + text("__hash__") + PATH + b"s\x86b"),
    "BUILD on a function": program(
        name("torch.serialization", "_get_layout") + b"}" + text("x") + b"Nsb"
    ),
    "BUILD twice": program(INDEX + b")\x81}b}b"),
    "a call of what a call made": program(PATH + b")R)R"),
    "keys that take for ever": program(
        b")\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(90)) + b"}h\x5aNs"
    ),
    "a key that is a list": program(b"}]Ns"),
    "a far index of the memo": program(b"Nr\xff\xff\xff\x7f"),
    "a far index that is read": program(b"j\xff\xff\xff\x7f"),
    "a memo of text": program(b"Np99999999999\n"),
    "an integer of a gigabyte": program(b"\x8b\xff\xff\xff\x3f" + b"\xff" * 99),
    "an integer of 255 bytes": program(b"\x8a\xff" + b"\xff" * 255),
    "an integer in words": program(b"L" + b"9" * 100_000 + b"L\n"),
    "a text of 4 GB": program(b"X\xff\xff\xff\xffshort"),
    "bytes": program(b"C\x04abcd"),
    "an array of bytes": program(b"\x96" + struct.pack("<Q", 2**40)),
    "a buffer from elsewhere": program(b"\x97"),
    "a deep list": program(b"]" * 200_000 + b"a" * 199_999),
    "a deep tuple": program(b")" + b"\x85" * 200_000),
    "a list of itself": program(b"]\x94h\x00a"),
    "no value": program(b""),
    "a mark too few": program(b"u"),
    "a mark too many": program(b"N("),
    "two values": program(b"NN"),
    "another protocol": b"\x80\x02N.",
    "an old protocol": b"N.",
    "bytes after the end": program(b"N") + b"N",
}


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(vars(pathlib.PurePosixPath)), dict(vars(MetadataIndex))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(".metadata").write_bytes(code)
    with pytest.raises(DamageError, match=r"^\.metadata ") as caught:
        read_pickled_metadata(Path(".metadata"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not Path("executed").exists()
    assert before == (dict(vars(pathlib.PurePosixPath)), dict(vars(MetadataIndex)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
    assert grown < 2**18  # in KiB


def test_each_cut_and_each_changed_byte_is_damage_or_metadata(folder: Path) -> None:
    content, path = (folder / ".metadata").read_bytes(), folder / "changed"
    changed = [content[:end] for end in range(len(content))]
    for at, byte in enumerate(content):
        other = bytes([byte ^ (1 + at % 255)])
        changed += [content[:at] + other + content[at + 1 :]]
    refused = []
    for each in changed:
        path.write_bytes(each)
        try:
            read_pickled_metadata(path)
        except DamageError as error:
            refused.append(str(error))
    assert not [message for message in refused if "\n" in message]
    assert len(content) < len(refused) < len(changed)


def put(attribute: str, value: Any) -> Callable[[Metadata], object]:
    """Returns what sets an attribute of where the first tensor is stored."""

    def change(found: Metadata) -> None:
        setattr(next(iter(found.storage_data.values())), attribute, value)

    return change


def put_size(*size: int) -> Callable[[Metadata], object]:
    return lambda found: setattr(
        found.state_dict_metadata["model.weight"], "size", torch.Size(size)
    )


def share_chunks(found: Metadata) -> None:
    """One list of chunks, of many tensors."""
    tensor: Any = found.state_dict_metadata["model.weight"]
    tensor.chunks *= 1000
    found.state_dict_metadata |= {f"model.{i}": tensor for i in range(1000)}


CHANGES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    **{
        repr(path): (put("relative_path", path), f"names the file {path!r}, outside of it")
        for path in ("../whole", "..", ".", "", "a/b", "/etc/passwd", "a\0b")
    },
    "a path that is a path": (put("relative_path", Path("x")), "is not the metadata"),
    "a path that is an integer": (put("relative_path", 3), "is not the metadata"),
    "an offset below 0": (put("offset", -1), "is not the metadata"),
    "a length that is no integer": (put("length", True), "is not the metadata"),
    "bytes that are changed": (put("transform_descriptors", ["zstd"]), "is not the metadata"),
    "a tensor of petabytes": (
        put_size(2**40, 2**20),
        "says that 'model.weight' has 4611686018427387904 bytes, and its pieces have ",
    ),
    "many dimensions": (put_size(*[1] * 65), "is not the metadata"),
    "shared chunks": (share_chunks, "is not the metadata"),
    "another name": (
        lambda found: found.state_dict_metadata.update(x=of_torch.BytesStorageMetadata()),
        "its 'x' is no tensor: another program wrote it",
    ),
    "no tensors": (lambda found: setattr(found, "state_dict_metadata", None), "is not the meta"),
    "properties": (
        lambda found: found.state_dict_metadata.update(x=TensorProperties()),  # type: ignore[call-overload]
        "is not the metadata",
    ),
}


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_values_of_another_kind_are_refused(
    folder: Path, change: Callable[[Metadata], object], says: str
) -> None:
    found = FileSystemReader(folder).read_metadata()
    change(found)
    (folder / "changed").write_bytes(pickle.dumps(found, protocol=4))
    with pytest.raises(DamageError) as caught:
        read_pickled_metadata(folder / "changed")
    assert says in str(caught.value)
