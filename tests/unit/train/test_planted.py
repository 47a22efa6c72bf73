"""What another user has put into the folder of a run changes nothing elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pipegrad
from pipegrad.checkpoint import exporting
from pipegrad.checkpoint.files import Files
from pipegrad.errors import ConfigError, PipegradError
from pipegrad.picture.figure import write_figure
from pipegrad.picture.html_page import write_html
from pipegrad.run_files import replace
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.timeline import Timeline
from pipegrad.train.config import Config
from pipegrad.train.process import _write_text
from pipegrad.train.reporters.jsonl import JsonLines
from pipegrad.train.run_folder import (
    Origin,
    RunLock,
    continue_run_folder,
    cut_rows,
    find_origin,
)
from pipegrad.train.schema import Model, Train
from pipegrad.train.stages import _copy_tokenizer
from tests.support.checkpoints import save_together, written
from tests.support.picture.timelines import SMALL

CONFIG = Config(model=Model(factory="a:b"))
TENSORS = {"weight": torch.ones(3)}
Write = Callable[[Path], object]


def save_in(run: Path) -> None:
    folder = run / "checkpoint-3"
    save_together(folder, TENSORS, step=3)
    assert torch.equal(Files(folder).whole("weight"), TENSORS["weight"])


def go_on(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n')
    continue_run_folder(CONFIG, run, 3, lambda _: replace(run / "manifest.json", b"{}"))
    assert (run / "metrics.jsonl").read_text() == '{"step": 3}\n'


def open_metrics(run: Path) -> None:
    JsonLines().open(run, CONFIG)


def go_on_and_save(run: Path) -> None:
    go_on(run)
    save_in(run)


def write_failure(run: Path) -> None:
    _write_text(run / "failure.txt", "failed")


def copy_tokenizer(run: Path) -> None:
    tokenizer = run.with_name("tokenizer.json")
    tokenizer.write_text("{}")
    tokenizer.with_name("tokenizer_config.json").write_text("{}")
    _copy_tokenizer(tokenizer, run)


def save_timeline(run: Path) -> None:
    SMALL.save(run / "timeline.json")


def save_costs(run: Path) -> None:
    Costs(()).save(run / "costs.json")


def export(run: Path) -> None:
    checkpoint = written(run.with_name("whole"), {"model.weight": TENSORS["weight"]})
    exporting.export(checkpoint, run / "out.safetensors")


def draw(write: Callable[[list[Timeline], Path], None], name: str) -> Write:
    return lambda run: write([SMALL], run / name)


NO_FILE = " is a symbolic link, expected a file: remove it"
# Name of a link, who writes there, and what it is refused with; "" if it is in nobody's way.
LINKS: list[tuple[str, Write, str]] = [
    ("lock", RunLock, NO_FILE),
    ("metrics.jsonl", open_metrics, NO_FILE),
    ("manifest.json.tmp", go_on, ""),
    ("metrics.jsonl.tmp", go_on, ""),
    ("checkpoint-3.partial", go_on_and_save, ""),
    ("checkpoint-3.partial", save_in, ""),
    ("checkpoint-3.old.partial", save_in, ""),
    ("checkpoint-3", save_in, ""),
    ("failure.txt", write_failure, NO_FILE),
    ("tokenizer.json", copy_tokenizer, NO_FILE),
    ("tokenizer_config.json", copy_tokenizer, NO_FILE),
    ("timeline.json.partial", save_timeline, ""),
    ("timeline.json", save_timeline, NO_FILE),
    ("costs.json", save_costs, NO_FILE),
    ("out.html", draw(write_html, "out.html"), NO_FILE),
    ("out.svg", draw(write_figure, "out.svg"), NO_FILE),
    ("out.safetensors.partial", export, ""),
    (
        "out.safetensors",
        export,
        "out.safetensors is there already: name another file",
    ),
]


@pytest.mark.parametrize("target", ["folder", "folder/file", "nowhere"])
@pytest.mark.parametrize(("name", "write", "says"), LINKS)
def test_a_link_is_not_followed(
    tmp_path: Path, name: str, write: Write, says: str, target: str
) -> None:
    """A resume removed all files of the folder that ``checkpoint-3.partial`` named."""
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("precious")
    (run / name).symlink_to(tmp_path / target)
    if says:
        with pytest.raises(PipegradError) as e:
            write(run)
        assert says in str(e.value)
        assert str(run) in str(e.value)
    else:
        write(run)
    files = {path.name: path.read_text() for path in (tmp_path / "folder").iterdir()}
    assert files == {"file": "precious"}
    assert not (tmp_path / "nowhere").exists()
    assert not [path for path in run.iterdir() if ".partial" in path.name and path.name != name]


def cut_metrics(run: Path) -> None:
    continue_run_folder(CONFIG, run, 3, lambda _: None)


PIPES: list[tuple[str, Write]] = [
    ("lock", RunLock),
    ("metrics.jsonl", open_metrics),
    ("metrics.jsonl", cut_metrics),
    ("timeline.json", save_timeline),
    ("timeline.json", lambda run: Timeline.load(run / "timeline.json")),
    ("costs.json", lambda run: Costs.load(run / "costs.json")),
    ("index.json", Files),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "use"), PIPES)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str, use: Write) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((PipegradError, ValueError, OSError), match="is a named pipe, expected a f"):
        use(tmp_path)


@pytest.mark.parametrize("value", [b"[" * 10**5, b'{"step": []}'])
def test_rows_that_no_run_has_written_are_cut_off(tmp_path: Path, value: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + value + b"\n")
    cut_rows(path, 3)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_file_with_another_name_is_replaced_under_one(tmp_path: Path) -> None:
    save_costs(tmp_path)
    before = (tmp_path / "costs.json").read_bytes()
    (tmp_path / "backup").hardlink_to(tmp_path / "costs.json")
    Costs((), ranks_meet=False).save(tmp_path / "costs.json")
    assert (tmp_path / "backup").read_bytes() == before


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    save_costs(tmp_path)
    (tmp_path / "costs.json").chmod(0o640)
    save_costs(tmp_path)
    assert (tmp_path / "costs.json").stat().st_mode & 0o777 == 0o640


def run_in(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir(parents=True)
    return folder


def found(run: Path, resume: str) -> Origin:
    train = Train(output=str(run.parent / "run"), resume=resume)
    return find_origin(Config(model=Model(factory="a:b"), train=train))


def refused(run: Path, resume: str) -> str:
    with pytest.raises(ConfigError) as caught:
        found(run, resume)
    return str(caught.value)


def test_a_checkpoint_that_is_a_link_is_taken_only_by_its_name(tmp_path: Path) -> None:
    run, elsewhere = run_in(tmp_path / "run", 1, 2), run_in(tmp_path / "elsewhere", 3)
    (run / "checkpoint-3").symlink_to(elsewhere / "checkpoint-3")
    link = f"{run / 'checkpoint-3'} is a symbolic link, expected a folder: remove it, or give it as"
    assert refused(run, "auto").endswith(f": {link} the checkpoint")
    assert refused(run, str(run)).endswith(f": {link} the checkpoint")
    (run / "checkpoint-3" / "index.json").touch()
    with pytest.raises(PipegradError, match=r"is a symbolic link, .* or give it as the ch"):
        pipegrad.load(run)
    assert found(run, str(run / "checkpoint-3")) == (None, run / "checkpoint-3")
