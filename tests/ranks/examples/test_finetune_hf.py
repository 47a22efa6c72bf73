"""The examples of models of Hugging Face train as transformers does, and write what it reads."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks.examples.test_examples import run_example
from tests.support import with_transformers  # noqa: F401
from tests.support.rounding import rounding
from tests.support.train.jobs import EXAMPLES, trainer_of

transformers = pytest.importorskip("transformers")

EXAMPLE = EXAMPLES / "finetune_hf.py"
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


@pytest.mark.ranks(4)
def test_the_script_trains_as_transformers_does(base: Path) -> None:
    """It compares the logits of transformers itself."""
    words = [str(base), str(base.with_name("tuned")), str(STEPS)]
    printed = run_example(*words, example=EXAMPLE, speaker=-1)
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


@pytest.mark.ranks(4)
def test_the_job_writes_what_it_has_measured(base: Path) -> None:
    settings = [f"model.pretrained='{base}'", f"eval.files='{EXAMPLES.parent}/docs/*.md'"]
    settings += ["eval.every=4", "eval.batches=1", "eval.sample_every=4"]
    trainer = trainer_of(
        EXAMPLE.with_suffix(".toml"), *settings, "train.steps=4", "train.device=cpu"
    )
    first, *_, last = [trainer.step(number) for number in range(1, 5)]
    result = base.with_name("result")
    trainer.save_model(result)
    held_out = trainer._texts.held_out
    assert held_out is not None
    batch = held_out.sequences(1, size=16)
    assert batch is not None
    trainer.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(result)
    with torch.no_grad():
        logits = model(batch[0]).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    assert transformers.AutoTokenizer.from_pretrained(result)("text")["input_ids"]
    assert last.held_out_loss == pytest.approx(loss.item(), rel=rounding(TOKENS))
    assert (last.held_out_loss or 0) < 0.97 * first.loss
    assert (last.sample or "").startswith("The value of")
