"""Jobs that name a model of transformers: keys, batches, and what needs no model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipegrad.errors import ConfigError
from pipegrad.train.config import beside, load
from pipegrad.train.corpus import TOKENIZER, tokenizer_file
from pipegrad.train.dataset import pair_of
from pipegrad.train.stages import ends_of, uncut_model
from tests.support.train.transformers_jobs import SIZES

IDS = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
NEXT = torch.tensor([[6, 7, -100, -100], [9, -100, -100, -100]])  # the targets that count


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "jobs" / "job.toml"
    made.parent.mkdir()
    made.write_text("[model]\npretrained = '../saved'\n")
    return made


@pytest.mark.parametrize(
    "model",
    ["{}", "{dtype='float32'}", "{factory='a:b', config='c'}", "{pretrained='p', config='c'}"],
)
def test_one_of_three_keys_names_the_model(path: Path, model: str) -> None:
    config = load(path)
    assert config.model.is_transformers
    assert config.model.pretrained is not None
    assert beside(config, config.model.pretrained) == path.parent / "../saved"
    assert not load(path, ["model={factory='a:b'}"]).model.is_transformers
    with pytest.raises(ConfigError, match=r"model = \{.*\}: should have one of the keys fac"):
        load(path, [f"model={model}"])


def test_without_the_extra_the_command_that_installs_it_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"model.pretrained = '../saved': .*'pipegrad\[hf\]'"):
        uncut_model(load(path))


def test_the_tokenizer_of_the_directory_is_used_if_none_is_named(path: Path) -> None:
    saved = path.parent.parent / "saved"
    saved.mkdir()
    assert tokenizer_file(load(path)) is None  # bytes
    (saved / TOKENIZER).write_text("{}")
    found = tokenizer_file(load(path))
    assert found is not None
    assert found.resolve() == saved / TOKENIZER
    assert tokenizer_file(load(path, ["data.tokenizer=other.json"])) == Path("other.json")
    assert tokenizer_file(load(path, ["model={config='config.json'}"])) is None


@pytest.mark.parametrize(
    ("ends", "of_generation", "expected"),
    [(None, None, [None]), (2, None, [2]), (2, {}, [None]), (2, {"eos_token_id": [3, 4]}, [3, 4])],
)
def test_a_sample_ends_where_generate_of_the_directory_does(
    path: Path, ends: int | None, of_generation: object, expected: list[int | None]
) -> None:
    saved = path.parent.parent / "saved"
    saved.mkdir()
    (saved / "config.json").write_text(json.dumps(SIZES | {"eos_token_id": ends}))
    if of_generation is not None:
        (saved / "generation_config.json").write_text(json.dumps(of_generation))
    settings = ["data.sequence_length=16", "model.dtype='float32'"]
    assert ends_of(uncut_model(load(path, settings))) == expected


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"input_ids": IDS, "attention_mask": MASK, "labels": IDS.where(MASK == 1, -100)}, 2),
        ({"input_ids": IDS, "attention_mask": MASK}, 2),
        ({"input_ids": IDS.numpy(), "labels": IDS.where(MASK == 1, -100)}, 1),
        ({"input_ids": IDS.to(torch.int32), "attention_mask": MASK, "target": NEXT}, 2),
        ((IDS, NEXT), 1),
    ],
    ids=["labels", "no labels", "arrays", "a target", "a pair"],
)
def test_labels_are_shifted_and_targets_are_not(batch: object, names: int) -> None:
    inputs: Any
    inputs, target = pair_of(batch, is_named=True)
    assert len(inputs) == names
    assert torch.equal(inputs["input_ids"], IDS)
    assert torch.equal(target, NEXT)
    assert inputs["input_ids"].dtype == target.dtype == torch.int64
    for alone in (IDS, {"input_ids": IDS}, [IDS]):
        inputs, target = pair_of(alone, is_named=True)
        assert torch.equal(inputs["input_ids"], IDS[:, :-1])
        assert torch.equal(target, IDS[:, 1:])


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"attention_mask": MASK, "labels": IDS}, "expected input_ids, and labels or target"),
        ({"input_ids": IDS, "labels": IDS, "target": IDS}, "expected input_ids, and labels or"),
        (
            {"input_ids": IDS, "labels": IDS[:, 1:]},
            r"input_ids are int64 \(2, 4\) and labels int64",
        ),
    ],
)
def test_a_batch_that_is_none_is_refused(batch: object, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        pair_of(batch, is_named=True)
