"""The uncut model comes out of a checkpoint of any cut: `pipegrad.load` and `pipegrad export`."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import pipegrad
from pipegrad.cli import main
from pipegrad.errors import WeightsError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.trainer import Trainer
from tests.support.train.jobs import with_job

EXAMPLES = Path(__file__).parents[3] / "examples"
TENSOR = EXAMPLES / "tensor_parallel.toml"
STEPS = 3
# Settings of a run on 4 ranks.
RUNS = {
    "pp 4": ["parallel.pipeline=4"],
    "pp 2 x dp 2": ["parallel.pipeline=2"],
    "pp 2 x dp 2, sharded": [
        "parallel.pipeline=2",
        "gradient_handlers=['pipeline-shared', 'sharded']",
    ],
    "dp 4": ["parallel.pipeline=1", "parallel.microbatches=2"],
    "a buffer": ["parallel.pipeline=2", "model.factory=factories:counting"],
}


def trained(folder: str) -> dict[str, Tensor]:
    """Trains and saves each run; returns what the last stage makes of `tokens` after it."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    outputs = {}
    for name, settings in RUNS.items():
        trainer = Trainer(partial(load, Path("small.toml"), settings))
        for number in range(1, STEPS + 1):
            trainer.step(number)
        trainer.save(Path(name) / f"checkpoint-{STEPS}", STEPS)
        if name == "pp 4":  # an older one, and one that is not whole
            trainer.save(Path(name) / "checkpoint-2", 2)
            (Path(name) / "checkpoint-20").mkdir(exist_ok=True)
        takes = trainer._topology.coordinate("pp") == 0
        result = trainer._scheduler.evaluate(tokens() if takes else None)
        if result.outputs:
            outputs[name] = torch.cat(list(result.outputs))
        trainer.close()
    trainer = Trainer(partial(load, TENSOR, ["train.steps=1", "parallel.shards={}"]))
    trainer.save(Path("tensor"), 0)
    trainer.close()
    return outputs


def tokens() -> Tensor:
    return torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, Tensor]:
    """What the pipeline made of `tokens`, run by run; its checkpoints are in the folder."""
    *_, last = run_ranks(trained, 4, str(folder))
    assert last.keys() == RUNS.keys()
    return last


@pytest.fixture
def factories(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    space: dict[str, Any] = {"__name__": "factories"}
    monkeypatch.setitem(sys.modules, "factories", ModuleType("factories"))
    exec((folder / "factories.py").read_text(), space)
    return space


def uncut(factories: Any, name: str) -> nn.Module:
    model: nn.Module = factories["counting" if name == "a buffer" else "tied"]()
    return model.eval()


def invoked(*words: object) -> str:
    result = CliRunner().invoke(main, ["export", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: object) -> str:
    result = CliRunner().invoke(main, ["export", *map(str, words)])
    assert result.exit_code == 1, result.output
    [line] = result.output.splitlines()
    return line


@pytest.mark.parametrize("name", RUNS)
def test_the_uncut_model_takes_it_and_computes_what_the_pipeline_did(
    outputs: dict[str, Tensor], folder: Path, factories: Any, name: str
) -> None:
    model = uncut(factories, name)
    state = pipegrad.load(folder / name)
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        found = model(tokens())
    # Stages compute microbatches of one row, and the model all four. The order of sums may differ.
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, outputs[name], rtol=64 * eps, atol=64 * eps)


@pytest.mark.usefixtures("outputs")
def test_all_cuts_have_the_same_names_and_tied_names_share_a_tensor(folder: Path) -> None:
    states = {name: pipegrad.load(folder / name) for name in RUNS if name != "a buffer"}
    for state in states.values():
        assert state["4.weight"] is state["0.weight"]
        assert sorted(state) == sorted(states["pp 4"])


@pytest.mark.usefixtures("outputs")
def test_safetensors_have_a_tied_weight_once(folder: Path, factories: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert "8 names, 2,208 elements" in invoked(folder / "pp 4", "--output", path)
    state = pipegrad.load(folder / "pp 4")
    stored = load_file(path)
    assert sorted({*stored, "4.weight"}) == sorted(state)
    assert "4.weight" not in stored
    assert all(torch.equal(tensor, state[name]) for name, tensor in stored.items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "4.weight": "0.weight"}
    model = factories["tied"]()
    assert load_model(model, path) == (set(), [])
    assert torch.equal(model[4].weight, state["4.weight"])


@pytest.mark.usefixtures("outputs")
def test_a_file_of_torch_has_all_names(folder: Path, factories: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    invoked(folder / "pp 4" / "checkpoint-3", "--output", path)
    state = torch.load(path, weights_only=True)
    factories["tied"]().load_state_dict(state, strict=True)
    assert state["4.weight"].data_ptr() == state["0.weight"].data_ptr()


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floats_are_converted_and_other_numbers_are_not(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    path = tmp_path / "model.safetensors"
    invoked(folder / "pp 4", "--output", path, "--dtype", dtype)
    state, stored = pipegrad.load(folder / "pp 4"), load_file(path)
    for name, tensor in stored.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, state[name].to(tensor.dtype))


@pytest.mark.usefixtures("outputs")
def test_the_newest_whole_checkpoint_of_a_run_is_taken(folder: Path) -> None:
    printed = invoked(folder / "pp 2 x dp 2")
    path = folder / "pp 2 x dp 2" / "checkpoint-3.safetensors"
    assert printed.startswith(f"wrote {path}: ")
    assert "is there already: name another file" in refused(folder / "pp 2 x dp 2")
    assert "checkpoint-3: " not in invoked(folder / "pp 4", "--output", folder / "newest.pt")
    assert sorted(p.name for p in folder.rglob("*.partial")) == []


@pytest.mark.usefixtures("outputs")
def test_shards_are_refused_by_name(folder: Path) -> None:
    line = refused(folder / "tensor", "--output", folder / "tensor.pt")
    assert "has shards of " in line
    assert "[tp=0] and " in line
    assert "parallel.shards" in line
    assert not (folder / "tensor.pt").exists()


def altered(copy: Path, old: str, new: str) -> None:
    content = (copy / "checksums.json").read_text()
    assert old in content
    (copy / "checksums.json").write_text(content.replace(old, new))


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("checkpoint-3.partial", None, "is not a whole checkpoint: the run that wrote it did not"),
        ("checkpoint-100", None, "is the checkpoint of step 3 by what it has: give the folder"),
        ("a", lambda copy: (copy / "checksums.json").unlink(), "has no checksums.json, so nobody"),
        (
            "b",
            lambda copy: altered(copy, '\\"4.weight', '\\"5.weight'),
            "checksums.json is damaged",
        ),
        ("c", lambda copy: altered(copy, '"model.', '"modal.'), "checksums.json is damaged"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(
    folder: Path, tmp_path: Path, name: str, change: Any, says: str
) -> None:
    """They were exported, or ended in a traceback."""
    copy = tmp_path / name
    shutil.copytree(folder / "pp 4" / "checkpoint-3", copy)
    if change is not None:
        change(copy)
    line = refused(copy, "--output", tmp_path / "it.pt")
    assert line.startswith(f"Error: {copy} ")
    assert says in line
    assert not (tmp_path / "it.pt").exists()


@pytest.mark.usefixtures("outputs")
def test_damage_is_refused(folder: Path, tmp_path: Path) -> None:
    whole, copy = folder / "pp 4" / "checkpoint-3", tmp_path / "copy"
    shutil.copytree(whole, copy)
    pieces = json.loads((copy / "checksums.json").read_text())["pieces"]
    piece = next(piece for piece in pieces if piece["key"].startswith("model."))
    file = copy / piece["file"]
    content = bytearray(file.read_bytes())
    content[piece["offset"] + piece["length"] // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsError, match=f"has other bytes in '{piece['key']}' than were"):
        pipegrad.load(copy)
    file.unlink()
    with pytest.raises(WeightsError, match=f"there is no {file.name}"):
        pipegrad.load(copy)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def test_nothing_in_the_files_runs(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(WeightsError, match=r"\.metadata"):
        pipegrad.load(tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "No such file or directory: give the folder of a checkpoint"),
        (lambda path: path.write_text(""), "Not a directory: give the folder of a checkpoint"),
        (lambda path: path.mkdir(), "is neither a whole checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, make: Any, says: str) -> None:
    path = tmp_path / "it"
    make(path)
    assert says in refused(path)


@pytest.mark.usefixtures("outputs")
def test_an_output_that_cannot_be_written(folder: Path) -> None:
    run = folder / "pp 4"
    nowhere = refused(run, "--output", folder / "no" / "where.pt")
    assert nowhere.endswith(f"cannot be written: there is no folder {folder / 'no'}")
    odd = refused(run, "--output", folder / "it.onnx")
    assert "the suffix .onnx names no format: choose one of .safetensors, .pt" in odd
    invoked(run, "--output", folder / "it.onnx", "--format", "torch")
    assert torch.load(folder / "it.onnx", weights_only=True).keys() == pipegrad.load(run).keys()
    assert "is there already" in refused(run, "--output", folder)
    with pytest.raises(WeightsError, match=r"cannot be read: .*null"):
        pipegrad.load("a\0b")
