"""The uncut model comes out of a checkpoint of any cut: `pipegrad.load` and `pipegrad export`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor

import pipegrad
from pipegrad.cli import main
from pipegrad.errors import WeightsError
from pipegrad.testing import run_ranks
from tests.support.train.factories import counting, tied
from tests.support.train.jobs import EXAMPLES, trainer_of, with_job

STEPS = 3
# Settings of a run on 4 ranks.
RUNS = {
    "pp 4": ["parallel.pipeline=4"],
    "pp 2 x dp 2": ["parallel.pipeline=2"],
    "pp 2 x dp 2, sharded": [
        "parallel.pipeline=2",
        "gradient_handlers=['pipeline-shared', 'sharded']",
    ],
    "a buffer": ["parallel.pipeline=2", "model.factory=factories:counting"],
}


def tokens() -> Tensor:
    return torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(1))


def run_all(folder: Path) -> dict[str, Tensor]:
    """Trains and saves each run; returns what the last stage makes of `tokens` after it."""
    os.chdir(folder)
    outputs = {}
    for name, settings in RUNS.items():
        trainer = trainer_of(folder / "small.toml", *settings)
        for number in range(1, STEPS + 1):
            trainer.step(number)
        for buffer in chain.from_iterable(m.buffers() for m in trainer._modules.values()):
            buffer.fill_(torch.nan)  # which equals nothing
        trainer.saving.write(Path(name) / f"checkpoint-{STEPS}", STEPS)
        if name == "pp 4":  # an older one
            trainer.saving.write(Path(name) / "checkpoint-2", 2)
        takes = trainer._topology.coordinate("pp") == 0
        result = trainer._scheduler.evaluate(tokens() if takes else None)
        if result.outputs:
            outputs[name] = torch.cat(list(result.outputs))
        trainer.close()
    trainer = trainer_of(EXAMPLES / "tensor_parallel.toml", "parallel.shards={}")
    trainer.saving.write("tensor", 0)
    trainer.close()
    return outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module", autouse=True)
def outputs(folder: Path) -> dict[str, Tensor]:
    """What the pipeline made of `tokens`, run by run; its checkpoints are in the folder."""
    *_, last = run_ranks(run_all, 4, folder)
    assert last.keys() == RUNS.keys()
    return last


def invoked(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["export", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def refused(*words: object) -> str:
    [line] = invoked(*words, code=1).splitlines()
    return line


@pytest.mark.parametrize("name", RUNS)
def test_the_uncut_model_takes_it_and_computes_what_the_pipeline_did(
    outputs: dict[str, Tensor], folder: Path, name: str
) -> None:
    model = (counting if name == "a buffer" else tied)().eval()
    state = pipegrad.load(folder / name)
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        found = model(tokens())
    # Stages compute microbatches of one row, and the model all four. The order of sums may differ.
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, outputs[name], rtol=64 * eps, atol=64 * eps)
    if name != "a buffer":  # all cuts have the same names, and tied names share a tensor
        assert state["4.weight"] is state["0.weight"]
        assert sorted(state) == sorted(pipegrad.load(folder / "pp 4"))


def test_safetensors_have_a_tied_weight_once(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert "8 names, 2,208 elements" in invoked(folder / "pp 4", "--output", path)
    state = pipegrad.load(folder / "pp 4")
    stored = load_file(path)
    assert sorted({*stored, "4.weight"}) == sorted(state)
    assert "4.weight" not in stored
    assert all(torch.equal(tensor, state[name]) for name, tensor in stored.items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "4.weight": "0.weight"}
    model = tied()
    assert load_model(model, path) == (set(), [])
    assert torch.equal(model.state_dict()["4.weight"], state["4.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_are_converted(folder: Path, tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "model.safetensors"
    invoked(folder / "pp 4", "--output", path, "--dtype", dtype)
    state, stored = pipegrad.load(folder / "pp 4"), load_file(path)
    for name, tensor in stored.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, state[name].to(tensor.dtype))


def test_the_newest_checkpoint_of_a_run_is_taken(folder: Path) -> None:
    printed = invoked(folder / "pp 2 x dp 2")
    path = folder / "pp 2 x dp 2" / "checkpoint-3.safetensors"
    assert printed.startswith(f"wrote {path}: ")
    assert "is there already: name another file" in refused(folder / "pp 2 x dp 2")
    assert "checkpoint-3: " not in invoked(folder / "pp 4", "--output", folder / "new.safetensors")
    assert sorted(p.name for p in folder.rglob("*.partial")) == []


def test_shards_are_refused_by_name(folder: Path) -> None:
    line = refused(folder / "tensor", "--output", folder / "tensor.safetensors")
    assert "has shards of " in line
    assert "[tp=0] and " in line
    assert "parallel.shards" in line
    assert not (folder / "tensor.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("checkpoint-3.partial", "is not a whole checkpoint: the run that wrote it did not"),
        ("checkpoint-100", "is the checkpoint of step 3 by what it has: give the folder"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(
    folder: Path, tmp_path: Path, name: str, says: str
) -> None:
    """They were exported."""
    shutil.copytree(folder / "pp 4" / "checkpoint-3", copy := tmp_path / name)
    line = refused(copy, "--output", tmp_path / "it.safetensors")
    assert line.startswith(f"Error: {copy} ")
    assert says in line
    assert not (tmp_path / "it.safetensors").exists()


def test_damage_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "pp 4" / "checkpoint-3", copy := tmp_path / "copy")
    file = copy / "rank-0.safetensors"
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    with pytest.raises(WeightsError, match=f"{file.name} has other bytes than were w"):
        pipegrad.load(copy)
    # Of a run the newest one counts, as for a resume: the one before it was loaded.
    copy.rename(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(WeightsError, match="checkpoint-4 is not a whole checkpoint of this v"):
        pipegrad.load(tmp_path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (str, "is not a whole checkpoint of this version of pipegrad: index.json: No such file"),
        (Path.touch, "index.json: Not a directory"),
        (Path.mkdir, "is not a whole checkpoint of this version of pipegrad: index.json: No such"),
    ],
)
def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, make: Callable[[Path], object], says: str
) -> None:
    make(tmp_path / "it")
    assert says in refused(tmp_path / "it")


def test_an_output_that_cannot_be_written(folder: Path) -> None:
    run = folder / "pp 4"
    nowhere = refused(run, "--output", folder / "no" / "where.safetensors")
    assert nowhere.endswith(f"cannot be written: there is no folder {folder / 'no'}")
    of_torch = refused(run, "--output", folder / "it.pt")
    assert f"torch.save(pipegrad.load('{run / 'checkpoint-3'}'), 'it.pt')" in of_torch
    (folder / "it.safetensors").mkdir()
    assert "is there already" in refused(run, "--output", folder / "it.safetensors")
    with pytest.raises(WeightsError, match=r"index\.json: embedded null"):
        pipegrad.load("a\0b")
