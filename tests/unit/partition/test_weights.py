"""Weights are read by name from safetensors files, and damaged directories are refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipegrad.errors import ConfigError, WeightsError
from pipegrad.partition.hf.files import INDEX, SINGLE, Weights, extra, listed, write_shard

TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.ones(4, dtype=torch.bfloat16),
    "c.count": torch.tensor(3),
    "d.empty": torch.zeros(0, 2),
}
FILES = {"a.weight": "1.safetensors", "b.weight": "1.safetensors"}
FILES |= {"c.count": "2.safetensors", "d.empty": "2.safetensors"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with two files and an index."""
    for file in set(FILES.values()):
        write_shard(tmp_path / file, {n: t for n, t in TENSORS.items() if FILES[n] == file})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": FILES}))
    return tmp_path


def test_several_files_are_read_by_name(folder: Path) -> None:
    weights = Weights(folder)
    assert sorted(weights.files) == sorted(TENSORS)
    for name in [*TENSORS, *TENSORS]:
        assert torch.equal(weights.read(name), TENSORS[name])
        assert weights.read(name).dtype == TENSORS[name].dtype
        assert weights.entry(name).get_shape() == [*TENSORS[name].shape]
        assert weights.files[name] == folder / FILES[name]
    assert weights.entry("b.weight").get_dtype() == "BF16"
    # As in transformers a single file counts more than an index.
    write_shard(folder / SINGLE, {"other": torch.ones(1)})
    assert [*Weights(folder).files] == ["other"]
    assert listed("cab") == "a, b, c"
    assert listed("fedcba") == "a, b, c, d and 2 more"


def test_a_tensor_stays_when_its_file_is_written_again(tmp_path: Path) -> None:
    write_shard(tmp_path / SINGLE, {"x": torch.ones(1000)})
    weights = Weights(tmp_path)
    tensor = weights.read("x")
    del weights
    (tmp_path / SINGLE).write_bytes(bytes(4096))
    assert torch.equal(tensor, torch.ones(1000))
    tensor += 1  # in memory of its own


def shard(folder: Path) -> Path:
    return folder / "1.safetensors"


def index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(text)


def only(file: str) -> Callable[[Path], object]:
    """Has another file instead of an index."""
    return lambda folder: (folder / INDEX).rename(folder / file)


NOT_WHOLE = ["1.safetensors is not a whole safetensors file"]
HARMS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "cut short": (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-1]), NOT_WHOLE),
    "empty": (lambda f: shard(f).write_bytes(b""), NOT_WHOLE),
    "header": (
        lambda f: shard(f).write_bytes(shard(f).read_bytes().replace(b"a.wei", b"a.w\xffi")),
        NOT_WHOLE,
    ),
    "exchanged": (
        lambda f: write_shard(shard(f), {"other": torch.ones(1)}),
        ["1.safetensors has no tensor a.weight"],
    ),
    "lost": (
        lambda f: shard(f).unlink(),
        ["there is no file", "1.safetensors", "its index lists it"],
    ),
    "index": (index("{"), [INDEX, "is no index"]),
    "another index": (index('{"weight_map": ["a.weight"]}'), [INDEX, "is no index"]),
    "leaves": (
        index('{"weight_map": {"a.weight": "../secret.safetensors"}}'),
        [INDEX, "outside of its directory: ../secret.safetensors"],
    ),
    "pickled": (only("pytorch_model.bin"), ["pytorch_model.bin", "save_pretrained"]),
    "adapter": (only("adapter_config.json"), ["adapter of peft"]),
    "half": (only("else"), ["neither", SINGLE, INDEX, "the writer did not end"]),
}


@pytest.mark.parametrize(("harm", "words"), HARMS.values(), ids=HARMS)
def test_a_damaged_directory_is_refused(
    folder: Path, harm: Callable[[Path], object], words: list[str]
) -> None:
    harm(folder)
    for read in (Weights.entry, Weights.read):
        with pytest.raises(WeightsError) as caught:
            read(Weights(folder), "a.weight")
        assert [word for word in words if word not in str(caught.value)] == []
        assert str(folder) in str(caught.value)


def test_a_missing_directory_is_no_name_of_a_hub(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no directory meta/llama.*nothing is downloaded"):
        Weights(Path("meta/llama"))
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="no directory"):
        Weights(tmp_path / "file")
    with pytest.raises(WeightsError, match=r"missing/1.safetensors cannot be written"):
        write_shard(tmp_path / "missing" / "1.safetensors", TENSORS)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("pipegrad.partition.hf.files.importlib.import_module", lacks)
    with pytest.raises(ConfigError, match=r"library safetensors: pip install 'pipegrad\[hf\]'"):
        extra("safetensors.torch")
