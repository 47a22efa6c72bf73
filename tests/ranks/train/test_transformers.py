"""A job whose model is one of transformers trains as that model does in one process."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.cli import main
from pipegrad.train.config import load
from pipegrad.train.corpus import read_corpus
from tests.support.ranked import gathered
from tests.support.rounding import ADAM_EPS, rounding
from tests.support.train.jobs import by_hand, refusal, trained, trainer_of
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
CUTS: dict[str, tuple[int, list[str]]] = {
    "pipeline 2": (2, []),
    "data 2": (2, ["parallel.data=2"]),
    "interleaved, recomputed": (
        2,
        ["parallel.schedule={name='interleaved-1f1b', stages_per_rank=2}", "train.recompute=true"],
    ),
    "masked, a token mean": (2, MASKED),
    "pipeline 4": (4, []),
    "2 x 2": (4, ["parallel.pipeline=2", "parallel.boundaries=['model.layers.1']"]),
    "eager-1f1b": (4, ["parallel.schedule=eager-1f1b", "train.loss_reduction=token_mean"]),
    "zbv, 2 x 2": (4, ["parallel.pipeline=2", "parallel.schedule=zbv"]),
    "owner, sharded": (4, ["parallel.pipeline=2", OWNER]),
    "measured beside": (4, ["eval.every=3", "eval.files='held_out.txt'", "eval.sample_every=6"]),
    "masked, replicas of unlike many tokens": (4, [*MASKED, "parallel.pipeline=2"]),
}
Truth = list[tuple[float, float]]


def loss_of(model: nn.Module, path: Path, step: int, *, masked: bool = False) -> Tensor:
    """Returns the loss of the uncut model; of masked batches its own, which shifts labels."""
    if masked:
        return model(**masked_batch(step)).loss  # type: ignore[no-any-return]
    tokens, target = read_corpus(load(path)).batch(step, seed=SEED, size=8)
    return functional.cross_entropy(model(tokens).logits.flatten(0, 1), target.flatten())


def one_process(path: Path, *, masked: bool) -> Truth:
    """Returns loss and gradient norm of each step of the uncut model, trained by hand."""
    model = uncut(path.with_name("config.json"))
    return by_hand(
        range(1, STEPS + 1),
        lambda step: loss_of(model, path, step, masked=masked),
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPS, weight_decay=0.0),
        clip=1.0,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers")
    (folder / "held_out.txt").write_text("A sentence that nobody has trained on. " * 20)
    return with_config(folder)


@pytest.fixture(scope="module")
def truths(path: Path) -> dict[bool, Truth]:
    """Loss and norm of each step of one process, with text and with masked batches."""
    with contextlib.chdir(path.parent):
        truths = {masked: one_process(path, masked=masked) for masked in (False, True)}
    assert truths[False] != truths[True]
    return truths


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, marks=pytest.mark.ranks(num_ranks), id=name)
        for name, (num_ranks, settings) in CUTS.items()
    ],
)
def test_any_cut_trains_as_one_process(
    path: Path,
    truths: dict[bool, Truth],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: list[str],
) -> None:
    monkeypatch.chdir(path.parent)
    trainer = trainer_of(path, *settings)
    job = trainer.job
    offline = job.plans(job.manifest(job.cut(job.model("meta"))))
    assert offline[dist.get_rank()] == trainer.sync.plan
    steps = [trainer.step(number) for number in range(1, STEPS + 1)]
    trainer.sync.check_replicas()
    trainer.close()
    losses = [step.loss for step in steps]
    assert all(others == losses for others in gathered(losses))
    # A loss is a mean of cross-entropies, each a sum over the vocabulary; a norm is a sum of
    # squares of gradients, and so are the parameters that all steps have made.
    most, truth = rounding(STEPS * TOKENS), truths["masked" in name]
    assert losses == pytest.approx([loss for loss, _ in truth], rel=most)
    assert [s.grad_norm for s in steps] == pytest.approx([norm for _, norm in truth], rel=most)
    if name == "measured beside":
        assert (steps[-1].perplexity or 0) == pytest.approx(math.exp(steps[-1].held_out_loss or 0))
        assert (steps[-1].sample or "").startswith("The ")


@pytest.mark.ranks(2)
def test_transformers_reads_what_a_run_has_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = trained(path, until=3, save="half")
    monkeypatch.chdir(path.parent)
    trainer = trainer_of(path, "train.resume=half")
    trainer.save_model(path.with_name("half model"))
    trainer.close()
    saved = transformers.AutoModelForCausalLM.from_pretrained(path.with_name("half model"))
    state = dict(saved.named_parameters())  # a tied one once
    held = {name: x for values in gathered(half.values) for name, x in values.items()}
    assert {f"model.{name}" for name in state} == held.keys()
    assert all(torch.equal(held[f"model.{name}"], x) for name, x in state.items())
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    # A job that goes on from the folder starts where the run has ended. A new run draws the
    # batches of a new run.
    with torch.no_grad():
        first = loss_of(saved, path, 1).item()
    again = "model={pretrained='half model'}"
    plain = trained(path, again, until=3).losses
    assert plain[0] == pytest.approx(first, rel=rounding(TOKENS))
    low = "model={pretrained='half model', dtype='bfloat16'}"
    trainer = trainer_of(path, low, "gradients.master_dtype='float32'")
    in_low = [trainer.step(number).loss for number in (1, 2, 3)]
    trainer.save_model(path.with_name("low model"))
    trainer.close()
    for losses in (in_low, trained(path, again, "train.precision='bf16'", until=3).losses):
        assert losses[0] == pytest.approx(first, rel=2**-8)
        assert losses == pytest.approx(plain, rel=2**-8)
    read = transformers.AutoModelForCausalLM.from_pretrained(path.with_name("low model"))
    assert read.dtype == torch.bfloat16


def test_a_plan_needs_no_ranks(path: Path) -> None:
    arguments = ["plan", str(path), "--ranks", "4", "--json"]
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
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    result = CliRunner().invoke(main, ["train", "job.toml", "--set", "train.steps=1"])
    assert result.exit_code == 0, result.output
    assert "manifest.json, checkpoint-1, model" in result.output
    read = transformers.AutoModelForCausalLM.from_pretrained("runs/run/model")
    start = uncut(Path("config.json"))
    moved = read.lm_head.weight - start.lm_head.weight
    assert 0 < float(moved.detach().abs().max()) <= 1.001e-2  # by one step of AdamW


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    """A job of a saved model with a tokenizer beside it."""
    path = with_config(tmp_path)
    uncut(tmp_path / "config.json").save_pretrained(tmp_path / "saved")
    make_tokenizer(tmp_path / "saved" / "tokenizer.json", 96)
    path.write_text(path.read_text().replace('config = "config.json"', 'pretrained = "saved"'))
    (tmp_path / "text.txt").write_text("One line after the other. " * 40)
    return path


@pytest.mark.ranks(2)
def test_the_tokenizer_of_a_directory_makes_the_tokens(
    with_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bytes, which the model has too, it would be trained on other tokens without a word."""
    path, setting = with_tokenizer, "data.files='text.txt'"
    monkeypatch.chdir(path.parent)
    trainer = trainer_of(path, setting)
    loss = trainer.step(1).loss
    trainer.save_model(Path("result"))
    trainer.close()
    tokens, target = read_corpus(load(path, [setting])).batch(1, seed=SEED, size=8)
    assert int(tokens.max()) < 96
    logits = uncut(path.with_name("config.json"))(tokens).logits
    truth = functional.cross_entropy(logits.flatten(0, 1), target.flatten()).item()
    assert loss == pytest.approx(truth, rel=rounding(TOKENS))
    # Of a function nothing says how long a sample may be, but the 32 positions of the model.
    trainer = trainer_of(path, MASKED[0], "eval.sample_every=1", "eval.sample_tokens=40")
    assert len(trainer.step(1).sample or "") > 40
    trainer.close()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    read = transformers.AutoTokenizer.from_pretrained("result")
    assert read("One line")["input_ids"] == [ord(letter) - 32 for letter in "One line"]


CASES = {
    "model={pretrained='nowhere'}": "model.pretrained = 'nowhere': there is no .*nowh",
    "model={pretrained='.'}": "has neither model.safetensors nor model.saf",
    "model.config=classifier.json": (
        "it is a Qwen3ForSequenceClassification, and the trainer trains causal language models"
    ),
    "model.config=roberta.json": (
        "it is a RobertaForCausalLM with is_decoder = false, and the trainer trains causal"
    ),
    "model.config=t5.json": "AutoModelForCausalLM cannot be made of it",
    "data.sequence_length=33": (
        "sequence_length = 33: the model has positions for 32 tokens .max_position_embeddings."
    ),
    f"data={{dataset='{HERE}:too_long'}}": (
        "too_long': the model has positions for 32 tokens .* sequences have 40: choose shorter"
    ),
    "model={pretrained='wider'}": (
        r"pretrained = 'wider': rank 0: .*_proj.weight has shape .*, expected .*load the stages: 2"
    ),
    "model.config=hidden.json": (
        "model = .*hidden.json.*sets .'output_hidden_states'., which collects"
    ),
    "data.tokenizer=large.json": (
        "it has a vocabulary of 256 tokens, and the tokenizer .*large.json. has 300: choose"
    ),
    "model.width=3": "model of transformers has no option 'width'; allow",
    "model.dtype=int8": "model.dtype = 'int8': expected one of .'float32'",
    f"data={{dataset='{HERE}:unknown_name'}}": (
        r"its batches have \['length'\], which Qwen3ForCausalLM does not take"
    ),
    f"data={{dataset='{HERE}:without_tokens'}}": (
        "it has the names .*: expected input_ids, and labels or target"
    ),
    "parallel.schedule={name='interleaved-1f1b', stages_per_rank=99}": "fewer than 198 stages",
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job beside configurations that cannot be trained; returns the job."""
    path = with_config(tmp_path_factory.mktemp("others"))
    sizes = json.loads(path.with_name("config.json").read_text())
    configs = {
        "classifier": sizes | {"architectures": ["Qwen3ForSequenceClassification"]},
        "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        "hidden": sizes | {"output_hidden_states": True},
        "roberta": {"model_type": "roberta", "num_hidden_layers": 2},
    }
    for name, values in configs.items():
        path.with_name(f"{name}.json").write_text(json.dumps(values))
    make_tokenizer(path.with_name("large.json"), 300)
    wider = path.with_name("wider")
    uncut(path.with_name("config.json")).save_pretrained(wider)
    (wider / "config.json").write_text(json.dumps(sizes | {"intermediate_size": 30}))
    return path


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("setting", "says"), CASES.items())
def test_what_cannot_be_trained_is_refused_in_words(others: Path, setting: str, says: str) -> None:
    said = refusal(others, setting)
    assert re.search(says, said), said
