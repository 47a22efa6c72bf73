"""The examples of models of Hugging Face train as transformers does, and write what it reads."""

from __future__ import annotations

import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.metrics import StepMetrics
from pipegrad.train.trainer import Trainer
from tests.ranks.examples.test_examples import run_example
from tests.support.rounding import rounding

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "finetune_hf.py"
STEPS, TOKENS = 10, 16 * 64


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "qwen3"
    runpy.run_path(str(EXAMPLE.with_name("make_hf.py")))["make"](str(folder))
    return folder


def losses_of_one_process(base: Path) -> tuple[float, float]:
    """Returns the loss of the last step, and the perplexity that follows."""
    text = runpy.run_path(str(EXAMPLE.with_name("make_hf.py")))["TEXT"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = tokenizer(text, return_tensors="pt")["input_ids"][0].unfold(0, 64, 64)
    torch.manual_seed(0)
    held_out, *batches = rows[torch.randperm(len(rows))].split(16)
    loss = torch.tensor(0.0)
    for ids in batches[:STEPS]:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        held = model(input_ids=held_out, labels=held_out).loss
    return loss.item(), held.exp().item()


def tuned(base: Path) -> str:
    """Runs the example, which compares the logits of transformers itself."""
    sys.path.insert(0, str(EXAMPLE.parent))
    return run_example([str(base), str(base.with_name("tuned")), str(STEPS)], EXAMPLE)


def test_the_script_trains_as_transformers_does(base: Path) -> None:
    *others, printed = run_ranks(tuned, 4, base)
    assert others == [""] * 3
    found = re.search(r"step 10  loss (\S+)\nperplexity (\S+)  '(.*)'", printed)
    assert found is not None, printed
    loss, perplexity = losses_of_one_process(base)
    # As printed; and AdamW moves what has next to no gradient by the learning rate.
    assert float(found[1]) == pytest.approx(loss, abs=1e-3)
    assert float(found[2]) == pytest.approx(perplexity, rel=1e-3)
    assert perplexity < 0.75 * 512
    assert len(found[3]) > 32


def test_the_script_has_forty_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def trained(base: Path) -> tuple[list[StepMetrics], float]:
    """Trains the job, and returns the held-out loss of what it has saved, by transformers."""
    settings = [
        f"model.pretrained='{base}'",
        f"eval.files='{ROOT}/docs/*.md'",
        "eval.every=4",
        "eval.batches=1",
        "eval.sample_every=4",
        "train.steps=4",
        "train.device=cpu",
    ]
    trainer = Trainer(partial(load, EXAMPLE.with_suffix(".toml"), settings))
    steps = [trainer.step(number) for number in range(1, 5)]
    result = base.with_name("result")
    trainer.save_model(result)
    held_out = trainer._texts.held_out
    assert held_out is not None
    batch = held_out.sequences(1, size=16)
    assert batch is not None
    trainer.close()
    if dist.get_rank():
        return steps, 0.0
    model = transformers.AutoModelForCausalLM.from_pretrained(result)
    with torch.no_grad():
        logits = model(batch[0]).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    assert transformers.AutoTokenizer.from_pretrained(result)("text")["input_ids"]
    return steps, loss.item()


def test_the_job_writes_what_it_has_measured(base: Path) -> None:
    (steps, loss), *_ = run_ranks(trained, 4, base)
    *_, last = steps
    assert last.held_out_loss == pytest.approx(loss, rel=rounding(TOKENS))
    assert (last.held_out_loss or 0) < 0.97 * steps[0].loss
    assert (last.sample or "").startswith("The value of")
