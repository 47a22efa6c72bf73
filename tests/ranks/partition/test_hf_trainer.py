"""PipelineTrainer against transformers' Trainer in one process; examples/coming_from has more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pipegrad
from pipegrad.errors import ConfigError
from pipegrad.partition.cut_model import Cut
from tests.support.rounding import rounding
from tests.support.train.launched import Launched, torchrun

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCRIPT = """
import json, sys
import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

def rows(number, seed):
    tokens = torch.randint(97, (number, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]

class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(68, 3))

def run(made, name, train=rows(68, 1), **options):  # the last batch has four rows
    set_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes))
    args = TrainingArguments(
        name, per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=9,
        learning_rate=1e-2, adam_epsilon=1e-3, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", **options)
    trainer = made(model, args, train_dataset=train, eval_dataset=rows(20, 2))
    trainer.train()
    bare = [{"input_ids": row["input_ids"]} for row in rows(10, 4)]
    logits = trainer.predict(bare).predictions
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "norms": [line["grad_norm"] for line in trainer.state.log_history if "loss" in line],
        "held out": trainer.evaluate()["eval_loss"],
        "logits": torch.as_tensor(logits).double().norm().item(),
    }

def runs(made):
    return {
        "plain": run(made, "plain"),
        "sgd": run(made, "sgd", optim="sgd", max_grad_norm=0.5),
        "stream": run(made, "stream", train=Stream(), lr_scheduler_type="constant"),
        "bf16": run(made, "bf16", bf16=True),
    }
"""
PIPELINE = """
import pipegrad

def made(model, args, **others):
    topology = pipegrad.Topology.create(pipeline=2)
    cut = pipegrad.cut(model, 2)
    scheduler = pipegrad.Scheduler(cut, topology, schedule="1f1b", num_microbatches=4)
    return pipegrad.PipelineTrainer(cut, scheduler, args, **others)

found = runs(made)
if torch.distributed.get_rank() == 0:
    json.dump(found, open("found.json", "w"))
"""


def test_a_pipeline_has_the_losses_norms_and_predictions_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.py").write_text(SCRIPT + PIPELINE)
    ran = Launched(tmp_path, torchrun, "--nproc-per-node", "2", "pipeline.py")
    space: dict[str, Any] = {}
    exec(SCRIPT, space)
    expected = space["runs"](transformers.Trainer)
    assert ran.wait() == 0, ran.errors
    found = space["json"].loads((tmp_path / "found.json").read_text())
    for name, run in expected.items():
        for key, values in run.items():
            numbers = values if isinstance(values, list) else [values]
            mine = found[name][key] if isinstance(values, list) else [found[name][key]]
            for step, (number, other) in enumerate(zip(numbers, mine, strict=True), start=1):
                # What bf16 rounds in a step stays in the weights: errors of all steps add up.
                most = 2**-7 * step**0.5 if name == "bf16" else rounding(9 * 8 * 12)
                assert other == pytest.approx(number, rel=most), (name, key, step)
    # bf16 is another computation.
    assert found["bf16"]["norms"] != pytest.approx(found["plain"]["norms"], rel=1e-4)


@pytest.mark.parametrize(
    ("set_to", "others", "words"),
    [
        ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps=2 cannot work in a"),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1 cannot work in a pipe"),
        ({}, {"model": torch.nn.Linear(1, 1)}, "model cannot work in a pipeline"),
        ({}, {"optimizers": (None, None)}, "optimizers cannot work in a pipeline"),
    ],
)
def test_what_cannot_work_in_a_pipeline_is_refused(
    set_to: dict[str, Any], others: dict[str, Any], words: str, tmp_path: Path
) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    vars(args).update(set_to)
    with pytest.raises(ConfigError, match=words):
        trainer(cut(), args, **others)


def test_a_model_that_is_not_cut_is_refused(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    for other in (torch.nn.Linear(1, 1), pipegrad.cut(torch.nn.Sequential(*LINEAR), 2)):
        with pytest.raises(ConfigError, match="cut is not what pipegrad"):
            trainer(other, args)


def trainer(cut: Any, args: Any, **others: Any) -> pipegrad.PipelineTrainer:
    scheduler: Any = None  # what is refused needs none
    return pipegrad.PipelineTrainer(cut, scheduler, args, **others)


LINEAR = (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def cut() -> Cut:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=97, num_hidden_layers=2, **sizes)
    return pipegrad.cut(transformers.LlamaForCausalLM(config), 2)
