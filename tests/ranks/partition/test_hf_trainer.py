"""PipelineTrainer against transformers' Trainer in one process; examples/coming_from has more."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipegrad
from pipegrad.errors import ConfigError
from pipegrad.partition.cut_model import Cut
from pipegrad.partition.hf_trainer import _NOT_CALLED
from tests.support.checkpoints import differences
from tests.support.rounding import rounding
from tests.support.train.launched import Launched, torchrun

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCRIPT = """
import json, sys
import torch
from torch.utils.data import IterableDataset
from transformers import (
    LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments,
    set_seed)

def rows(number, seed):
    tokens = torch.randint(97, (number, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]

class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(68, 3))

def run(made, name, train=rows(68, 1), size=8, **options):  # the last batch has four rows
    set_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes))
    args = TrainingArguments(
        name, per_device_train_batch_size=size, per_device_eval_batch_size=size, max_steps=9,
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
        "streamed": trainer.evaluate(Stream())["eval_loss"],
        "rows": len(trainer.predict(Stream()).predictions),
        "operations": trainer.state.total_flos,
        "logits": torch.as_tensor(logits).double().norm().item(),
    }

def encoded(made):  # the encoder's states stand behind the logits
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    set_seed(0)
    args = TrainingArguments("t5", report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = made(T5ForConditionalGeneration(T5Config(vocab_size=97, **sizes)), args)
    ignored = ["past_key_values", "encoder_last_hidden_state"]
    alone = trainer.predict(rows(10, 4), ignore_keys=ignored).predictions
    found = [trainer.predict(rows(10, 4)).predictions[0], alone]
    return {"logits": [torch.as_tensor(x).double().norm().item() for x in found]}

def runs(made, replicated, size):
    return {
        "encoder-decoder": encoded(made),
        "unclipped": run(made, "unclipped", max_grad_norm=0.0),
        "sharded": run(replicated, "sharded", rows(64, 1), size, max_grad_norm=0.0),
        "plain": run(made, "plain"),
        "sgd": run(made, "sgd", optim="sgd", max_grad_norm=0.5),
        "stream": run(made, "stream", train=Stream(), lr_scheduler_type="constant"),
        "bf16": run(made, "bf16", bf16=True),
    }
"""
PIPELINE = """
from functools import partial
import pipegrad

def made(model, args, stages=2, **others):
    topology = pipegrad.Topology.create(pipeline=stages)
    cut = pipegrad.cut(model, stages)
    options = {"handlers": ["sharded"]} if stages == 1 else {}
    scheduler = pipegrad.Scheduler(cut, topology, schedule="1f1b", num_microbatches=4, **options)
    return pipegrad.PipelineTrainer(cut, scheduler, args, **others)

def of_no_stage(*args, **others):  # on one rank
    trainer = made(*args, **others)
    stepped = trainer._stages if torch.distributed.get_rank() else trainer.model
    trainer.optimizer = torch.optim.SGD(stepped.parameters(), lr=1e-2)
    return trainer

found = runs(made, partial(made, stages=1), 4)
try:
    run(of_no_stage, "refused")
except pipegrad.errors.PipegradError as error:
    found["refused"] = str(error)
json.dump(found, open(f"found-{torch.distributed.get_rank()}.json", "w"))
"""


def test_a_pipeline_has_the_losses_norms_and_predictions_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.py").write_text(SCRIPT + PIPELINE)
    ran = Launched(tmp_path, torchrun, "--nproc-per-node", "2", "pipeline.py")
    space: dict[str, Any] = {}
    exec(SCRIPT, space)
    expected = space["runs"](transformers.Trainer, transformers.Trainer, 8)
    assert ran.wait() == 0, ran.errors
    texts = [(tmp_path / f"found-{rank}.json").read_text() for rank in range(2)]
    assert texts[0] == texts[1]  # norms and refusals, too
    found = space["json"].loads(texts[0])
    assert "rank 0: ConfigError: SGD would train nothing" in found["refused"]
    for key in ("held out", "streamed"):  # rows of other batches fill up the last one
        del expected["sharded"][key]
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


STOPPED = """
world = torch.distributed.get_world_size
def go_on(name, resume=None):
    set_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes))
    args = TrainingArguments(
        name, per_device_train_batch_size=8, max_steps=6, save_steps=3, learning_rate=1e-2,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = made(model, args, stages=world(), train_dataset=rows(64, 1))
    trainer.train(resume_from_checkpoint=resume)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]

whole = sys.argv[1:] == ["whole"]
found = go_on("whole") if whole else go_on(sys.argv[1], "whole/checkpoint-3")
json.dump(found, open(f"{sys.argv[1]}-{torch.distributed.get_rank()}.json", "w"))
"""


def test_a_pipeline_of_4_ranks_goes_on_at_4_2_and_1(tmp_path: Path) -> None:
    made, _, _ = PIPELINE.partition("def of_no_stage")
    init = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    (tmp_path / "stopped.py").write_text(init + SCRIPT + made + STOPPED)

    def run(num_ranks: int, name: str) -> tuple[list[float], Path]:
        words = ["--nproc-per-node", str(num_ranks), "stopped.py", name]
        ran = Launched(tmp_path, torchrun, *words)
        assert ran.wait() == 0, ran.errors
        return json.loads((tmp_path / f"{name}-0.json").read_text()), tmp_path / name

    expected, whole = run(4, "whole")
    assert len(expected) == 6
    again, folder = run(4, "at 4")
    assert again == expected
    states = [each / "checkpoint-6" / "pipeline" for each in (whole, folder)]
    assert differences(*states) == []
    for num_ranks in (2, 1):
        found, _ = run(num_ranks, f"at {num_ranks}")
        assert found[:3] == expected[:3]  # as the checkpoint says
        assert found == pytest.approx(expected, rel=rounding(6 * 8 * 12))


@pytest.mark.parametrize(
    ("set_to", "others", "words"),
    [
        ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps=2 cannot work in a"),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1 cannot work in a pipe"),
        ({"train_sampling_strategy": "batch_rebalance"}, {}, "gives each rank other rows"),
        ({"accelerator_config": SimpleNamespace(split_batches=True)}, {}, "split_batches=True has"),
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


def test_an_override_that_the_loop_does_not_call_is_refused(tmp_path: Path) -> None:
    args, model = transformers.TrainingArguments(str(tmp_path), use_cpu=True), cut()
    methods = {n for n, x in vars(transformers.Trainer).items() if inspect.isfunction(x)}
    refused = set[str]()
    for name in methods - {"__init__"}:
        kind = type("Mine", (pipegrad.PipelineTrainer,), {name: lambda *_args, **_named: None})
        with pytest.raises((ConfigError, AttributeError)) as raised:
            trainer(model, args, kind=kind)
        if raised.type is ConfigError:  # else of the scheduler that there is not
            assert f"Mine overrides {name}, which has no effect" in str(raised.value)
            refused.add(name)
    assert refused == {*_NOT_CALLED}
    behind = type("Mine", (pipegrad.PipelineTrainer, type("Old", (transformers.Trainer,), {})), {})
    with pytest.raises(ConfigError, match="hides methods of Old"):
        trainer(model, args, kind=behind)


def test_a_model_that_is_not_cut_is_refused(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    for other in (torch.nn.Linear(1, 1), pipegrad.cut(torch.nn.Sequential(*LINEAR), 2)):
        with pytest.raises(ConfigError, match="cut is not what pipegrad"):
            trainer(other, args)


def trainer(cut: Any, args: Any, kind: Any = pipegrad.PipelineTrainer, **others: Any) -> Any:
    scheduler: Any = None  # what is refused needs none
    return kind(cut, scheduler, args, **others)


LINEAR = (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def cut() -> Cut:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=97, num_hidden_layers=2, **sizes)
    return pipegrad.cut(transformers.LlamaForCausalLM(config), 2)
