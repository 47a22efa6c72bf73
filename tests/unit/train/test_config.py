"""Configurations are read, changed from the command line, and written down for people."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from pipegrad.errors import ConfigError
from pipegrad.train.config import Config, load
from pipegrad.train.schema import Model, Named, Table

ROOT = Path(__file__).parents[3]
MINIMAL = '[model]\nfactory = "somewhere:model"\n'


def test_every_table_is_in_the_reference() -> None:
    tables = runpy.run_path(str(ROOT / "scripts" / "docs"))["TABLES"]
    assert {*Table.__subclasses__(), *Named.__subclasses__()} == {*tables.values(), Named}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "job.toml"
    made.write_text(MINIMAL)
    return made


def test_a_factory_is_all_that_is_needed(path: Path) -> None:
    path.write_text(MINIMAL, encoding="utf-8-sig")  # Windows writes a byte order mark
    config = load(path)
    assert config.flat() == Config(model=Model(factory="somewhere:model")).flat()
    assert [choice.name for choice in config.gradient_handlers] == [
        "pipeline-shared",
        "data-parallel",
    ]
    assert config.path == path


def test_names_tables_and_lists_of_them(path: Path) -> None:
    text = """
    gradient_handlers = ["noop", {name = "data-parallel", axis = "dp"}]
    [model]
    factory = "a.b:C.d"
    width = 3
    [parallel]
    schedule = {name = "interleaved-1f1b", stages_per_rank = 3}
    [optimizer]
    lr = 1
    betas = [0.9, 0.99]
    schedule = "ExponentialLR"
    [data]
    files = "one.txt"
    """
    path.write_text(text)
    config = load(path)
    assert config.gradient_handlers[1].spec == {"name": "data-parallel", "axis": "dp"}
    assert config.model.options == {"width": 3}
    assert config.parallel.schedule.options == {"stages_per_rank": 3}
    assert config.optimizer.options == {"lr": 1, "betas": [0.9, 0.99]}
    assert [part.name for part in config.optimizer.schedule] == ["ExponentialLR"]
    assert config.data.files == ["one.txt"]


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("train.steps=5", "train.steps", 5),
        ("train.output=runs/a b", "train.output", "runs/a b"),
        ("train.output='5'", "train.output", "5"),
        ("data.files=['a', 'b']", "data.files", ["a", "b"]),
        ("gradients.clip_norm=2", "gradients.clip_norm", 2.0),
        ("parallel . data = 2", "parallel.data", 2),
        ('train.output=a"b', "train.output", 'a"b'),
        ("model.note=", "model.note", ""),
        ("model.bias=false", "model.bias", False),
        ("model.note='false'", "model.note", "false"),
    ],
)
def test_settings_are_toml_or_else_strings(
    path: Path, setting: str, key: str, value: object
) -> None:
    config = load(path, [setting])
    assert {**config.flat(), **{f"model.{k}": v for k, v in config.model.options.items()}}[
        key
    ] == value


def test_a_setting_changes_one_key_of_a_table_and_a_table_replaces(path: Path) -> None:
    text = """[optimizer]
    lr = 3
    schedule = {name = "StepLR", step_size = 3}
    [parallel]
    schedule = "interleaved-1f1b"
    """
    path.write_text(MINIMAL + text)
    below = ["optimizer.schedule.step_size=4", "parallel.schedule.stages_per_rank=3"]
    config = load(path, ["model.width=2", *below])
    assert config.optimizer.schedule[0].spec == {"name": "StepLR", "step_size": 4}
    assert config.model.options == {"width": 2}
    assert config.optimizer.options == {"lr": 3}
    assert config.parallel.schedule.spec == {"name": "interleaved-1f1b", "stages_per_rank": 3}
    replaced = load(path, ["optimizer={name='SGD', weight_decay=1}"])
    assert replaced.optimizer.options == {"weight_decay": 1}
    replaced = load(path, below, handlers=["noop"], schedule="gpipe")
    assert replaced.parallel.schedule.spec == {"name": "gpipe"}
    assert [choice.spec for choice in replaced.gradient_handlers] == [{"name": "noop"}]


@pytest.mark.parametrize("word", ["no", "False", "TRUE", "None", "on"])
def test_words_that_look_like_truth_are_refused(path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word} is not TOML, and as a word it would count as"):
        load(path, [f"optimizer.amsgrad={word}"])


def test_a_refusal_names_key_and_value(path: Path) -> None:
    config = load(path, ["train.steps=4", "model.width=3", "train.steps=5"], schedule="gpipe")
    assert config.train.steps == 5
    told = {
        "train.steps": "train.steps = 5: no",
        "train.seed": "train.seed = 0: no",
        "parallel.data": "parallel.data = (default): no",
        "parallel.schedule": "parallel.schedule = 'gpipe': no",
        "model": "model = {'factory': 'somewhere:model', 'width': 3}: no",
        "gradient_handlers[1]": "gradient_handlers[1] = 'data-parallel': no",
    }
    for key, expected in told.items():
        with pytest.raises(ConfigError) as caught:
            config.refuse(key, "no")
        assert str(caught.value) == expected
