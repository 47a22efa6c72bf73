"""A job whose model is one of transformers trains as that model does in one process."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.cli import main
from pipegrad.errors import ConfigError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.data import read_corpus
from pipegrad.train.metrics import StepMetrics
from pipegrad.train.trainer import Trainer
from tests.support.rounding import ADAM_EPS, rounding
from tests.support.train.transformers_jobs import (
    HERE,
    SEED,
    make_tokenizer,
    masked_batch,
    uncut,
    with_config,
)

transformers = pytest.importorskip("transformers")

STEPS, TOKENS = 6, 8 * 16
OWNER = "gradient_handlers=[{name='pipeline-shared', placement='owner'}, 'sharded']"
MASKED = [f"data={{dataset='{HERE}:masked'}}", "train.loss_reduction='token_mean'"]
CUTS: dict[int, dict[str, list[str]]] = {
    2: {
        "pipeline 2": [],
        "data 2": ["parallel.data=2"],
        "interleaved, recomputed": [
            "parallel.schedule={name='interleaved-1f1b', stages_per_rank=2}",
            "train.recompute=true",
        ],
        "masked, a token mean": MASKED,
    },
    4: {
        "pipeline 4": [],
        "2 x 2": ["parallel.pipeline=2", "parallel.boundaries=['model.layers.1']"],
        "eager-1f1b": ["parallel.schedule=eager-1f1b", "train.loss_reduction=token_mean"],
        "zbv, 2 x 2": ["parallel.pipeline=2", "parallel.schedule=zbv"],
        "owner, sharded": ["parallel.pipeline=2", OWNER],
        "measured beside": ["eval.every=3", "eval.files='held_out.txt'", "eval.sample_every=6"],
        "masked, replicas of unlike many tokens": [*MASKED, "parallel.pipeline=2"],
    },
}


def one_process(path: Path, loss_of: Callable[[Any, int], Tensor]) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step of the uncut model, trained by hand."""
    model = uncut(path.with_name("config.json"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPS, weight_decay=0.0)
    found = []
    for step in range(1, STEPS + 1):
        loss = loss_of(model, step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def loss_of_text(path: Path, model: Any, step: int) -> Tensor:
    tokens, target = read_corpus(load(path)).batch(step, seed=SEED, size=8)
    return functional.cross_entropy(model(tokens).logits.flatten(0, 1), target.flatten())


def loss_of_masked(model: Any, step: int) -> Tensor:
    loss: Tensor = model(**masked_batch(step)).loss  # the model's own, which shifts labels
    return loss


def trained(path: Path, settings: Sequence[str], until: int = STEPS, save: str = "") -> Any:
    """Trains a job; returns the metrics of its steps, and the parameters of this rank."""
    trainer = Trainer(partial(load, path, settings))
    job, rank = trainer.job, dist.get_rank()
    offline = job.plans(job.manifest(job.cut(job.model("meta"))))
    assert offline[rank] == trainer.sync.plan
    steps = [trainer.step(number) for number in range(trainer.first_step, until + 1)]
    trainer.sync.check_replicas()
    if save:
        trainer.save(path.with_name(save), until)
        trainer.save_model(path.with_name(f"{save} model"))
    held = {name: x.clone() for name, x in trainer._state.tensors().items()}
    trainer.close()
    return steps, held, trainer.notes


def runs(folder: str, cuts: dict[str, list[str]]) -> dict[str, list[StepMetrics]]:
    path = Path(folder) / "job.toml"
    return {name: trained(path, settings)[0] for name, settings in cuts.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers")
    with_config(folder)
    (folder / "held_out.txt").write_text("A sentence that nobody has trained on. " * 20)
    return folder


@pytest.mark.parametrize("num_ranks", CUTS)
def test_any_cut_trains_as_one_process(
    folder: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    path = folder / "job.toml"
    truths = {
        False: one_process(path, partial(loss_of_text, path)),
        True: one_process(path, loss_of_masked),
    }
    assert truths[False] != truths[True]
    replies = run_ranks(runs, num_ranks, str(folder), CUTS[num_ranks])
    for name, steps in replies[0].items():
        truth = truths["masked" in name]
        assert all([s.loss for s in reply[name]] == [s.loss for s in steps] for reply in replies)
        # A loss is a mean of cross-entropies, each a sum over the vocabulary; a norm is a sum of
        # squares of gradients, and so are the parameters that all steps have made.
        most = rounding(STEPS * TOKENS)
        assert [s.loss for s in steps] == pytest.approx([loss for loss, _ in truth], rel=most), name
        assert [s.grad_norm for s in steps] == pytest.approx(
            [norm for _, norm in truth], rel=most
        ), name
    if num_ranks == 4:
        *_, last = replies[0]["measured beside"]
        assert (last.perplexity or 0) == pytest.approx(math.exp(last.held_out_loss or 0))
        assert (last.sample or "").startswith("The ")


def histories(folder: str) -> dict[str, Any]:
    path = Path(folder) / "job.toml"
    half = ["parallel.data=2", f"train.resume='{path.with_name('half')}'"]
    resumed = [f"train.resume='{path.with_name('half')}'"]
    saved = ["model={pretrained='half model'}"]
    low = ["model={pretrained='half model', dtype='bfloat16'}", "gradients.master_dtype='float32'"]
    return {
        "through": trained(path, []),
        "first half": trained(path, [], 3, "half"),
        "second half": trained(path, resumed),
        "another cut": trained(path, half),
        "pretrained": trained(path, saved, 3),
        "bfloat16": trained(path, low, 3, "low"),
        "autocast": trained(path, [*saved, "train.precision='bf16'"], 3),
    }


@pytest.fixture(scope="module")
def replies(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(histories, 2, str(folder))


def losses(run: Any) -> list[float]:
    return [step.loss for step in run[0]]


def test_a_resumed_run_is_the_run_that_was_never_stopped(replies: list[dict[str, Any]]) -> None:
    for found in replies:
        through, first, second = (found[k] for k in ("through", "first half", "second half"))
        assert losses(through) == losses(first) + losses(second)
        assert through[1].keys() == second[1].keys()
        assert all(torch.equal(through[1][name], x) for name, x in second[1].items())
        most = rounding(STEPS * TOKENS)
        assert losses(found["another cut"]) == pytest.approx(losses(through)[3:], rel=most)
        assert second[2] == ()


def test_transformers_reads_what_a_run_has_saved(
    replies: list[dict[str, Any]], folder: Path
) -> None:
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "half model")
    state = dict(saved.named_parameters())  # a tied one once
    held = {name: x for found in replies for name, x in found["first half"][1].items()}
    assert {f"model.{name}" for name in state} == held.keys()
    assert all(torch.equal(held[f"model.{name}"], x) for name, x in state.items())
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    # A job that goes on from the folder starts where the run has ended. A new run draws the
    # batches of a new run.
    with torch.no_grad():
        first = loss_of_text(folder / "job.toml", saved, 1).item()
    for name, most in {
        "pretrained": rounding(TOKENS),
        "bfloat16": 2**-8,
        "autocast": 2**-8,
    }.items():
        found = losses(replies[0][name])
        assert found[0] == pytest.approx(first, rel=most), name
        assert found == pytest.approx(losses(replies[0]["pretrained"]), rel=most), name
    half = transformers.AutoModelForCausalLM.from_pretrained(folder / "low model")
    assert half.dtype == torch.bfloat16


def test_a_plan_needs_no_ranks(folder: Path) -> None:
    arguments = ["plan", str(folder / "job.toml"), "--ranks", "4", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)
    assert [stage["layers"][0] for stage in plan["stages"]] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.2",
        "lm_head",
    ]
    [tie] = plan["ties"]
    assert tie["places"] == [[0, "model.embed_tokens.weight"], [3, "lm_head.weight"]]


def test_the_command_leaves_a_folder_for_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, ["train", "job.toml", "--set", "train.steps=1"])
    assert result.exit_code == 0, result.output
    assert "manifest.json, checkpoint-1, model" in result.output
    read = transformers.AutoModelForCausalLM.from_pretrained("runs/run/model")
    start = uncut(Path("config.json"))
    moved = read.lm_head.weight - start.lm_head.weight
    assert 0 < float(moved.detach().abs().max()) <= 1.001e-2  # by one step of AdamW


def with_tokenizer(folder: Path) -> Path:
    """Makes a job of a saved model with a tokenizer beside it; returns the job."""
    path = with_config(folder)
    uncut(folder / "config.json").save_pretrained(folder / "saved")
    make_tokenizer(folder / "saved" / "tokenizer.json", 96)
    path.write_text(path.read_text().replace('config = "config.json"', 'pretrained = "saved"'))
    (folder / "text.txt").write_text("One line after the other. " * 40)
    return path


def with_text(folder: str) -> list[float]:
    path = Path(folder) / "job.toml"
    trainer = Trainer(partial(load, path, [f"data.files='{path.with_name('text.txt')}'"]))
    loss = trainer.step(1).loss
    trainer.save_model(path.with_name("result"))
    trainer.close()
    return [loss]


def test_the_tokenizer_of_a_directory_makes_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bytes, which the model has too, it would be trained on other tokens without a word."""
    path = with_tokenizer(tmp_path)
    [[loss], _] = run_ranks(with_text, 2, str(tmp_path))
    config = load(path, [f"data.files='{tmp_path / 'text.txt'}'"])
    tokens, target = read_corpus(config).batch(1, seed=SEED, size=8)
    assert int(tokens.max()) < 96
    logits = uncut(tmp_path / "config.json")(tokens).logits
    truth = functional.cross_entropy(logits.flatten(0, 1), target.flatten()).item()
    assert loss == pytest.approx(truth, rel=rounding(TOKENS))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "result")
    assert read("One line")["input_ids"] == [ord(letter) - 32 for letter in "One line"]


CASES = {
    "nowhere": (
        ["model={pretrained='nowhere'}"],
        "model.pretrained = 'nowhere': there is no .*nowh",
    ),
    "no config": (
        ["model.config=nowhere.json"],
        "model.config = 'nowhere.json': there is no .*now",
    ),
    "no weights": (["model={pretrained='.'}"], "has neither model.safetensors nor model.saf"),
    "no causal model": (
        ["model.config=classifier.json"],
        "it is a Qwen3ForSequenceClassification, and the trainer trains causal language models",
    ),
    "an encoder": (["model.config=bert.json"], "BertForMaskedLM, and the trainer trains causal"),
    "an encoder as a decoder": (
        ["model.config=roberta.json"],
        "it is a RobertaForCausalLM with is_decoder = false, and the trainer trains causal",
    ),
    "an encoder-decoder": (["model.config=t5.json"], "AutoModelForCausalLM cannot be made of it"),
    "no configuration": (["model.config=job.toml"], "is no configuration of transformers"),
    "long sequences": (
        ["data.sequence_length=33"],
        "sequence_length = 33: the model has positions for 32 tokens .max_position_embeddings.",
    ),
    "long batches": (
        [f"data={{dataset='{HERE}:too_long'}}"],
        "too_long': the model has positions for 32 tokens .* sequences have 40: choose shorter",
    ),
    "weights of another shape": (
        ["model={pretrained='wider'}"],
        r"pretrained = 'wider': rank 0: .*_proj.weight has shape .*, and .* \(load the stages: 2",
    ),
    "values of all layers": (
        ["model.config=hidden.json"],
        "model = .*hidden.json.*sets .'output_hidden_states'., which collects",
    ),
    "few tokens": (
        ["data.tokenizer=large.json"],
        "it has a vocabulary of 256 tokens, and the tokenizer .*large.json. has 300: choose",
    ),
    "an unknown option": (["model.width=3"], "model of transformers has no option 'width'; allow"),
    "an unknown dtype": (["model.dtype=int8"], "model.dtype = 'int8': expected one of .'float32'"),
    "two models": (
        ["model.factory=a:b"],
        "should have one of the keys factory, ",
    ),
    "a name that the model does not take": (
        [f"data={{dataset='{HERE}:unknown_name'}}"],
        r"its batches have \['length'\], which Qwen3ForCausalLM does not take",
    ),
    "a batch without tokens": (
        [f"data={{dataset='{HERE}:without_tokens'}}"],
        "it has the names .*: expected input_ids, and labels or target",
    ),
    "many stages": (
        ["parallel.schedule={name='interleaved-1f1b', stages_per_rank=99}"],
        "fewer than 198 stages",
    ),
}


def refused(folder: str) -> dict[str, str]:
    path, found = Path(folder) / "job.toml", {}
    for name, (settings, _) in CASES.items():
        try:
            Trainer(partial(load, path, settings)).close()
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_what_cannot_be_trained_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(with_config(tmp_path).parent)
    sizes = json.loads((tmp_path / "config.json").read_text())
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    others = {
        "classifier": sizes | {"architectures": ["Qwen3ForSequenceClassification"]},
        "bert": bert,
        "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        "hidden": sizes | {"output_hidden_states": True},
        "roberta": {"model_type": "roberta", "num_hidden_layers": 2},
    }
    for name, values in others.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    make_tokenizer(tmp_path / "large.json", 300)
    uncut(tmp_path / "config.json").save_pretrained(tmp_path / "wider")
    (tmp_path / "wider" / "config.json").write_text(json.dumps(sizes | {"intermediate_size": 30}))
    first, second = run_ranks(refused, 2, str(tmp_path))
    assert first == second
    for name, (_, says) in CASES.items():
        assert name in first, name
        assert re.search(says, first[name]), first[name]
