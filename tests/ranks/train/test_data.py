"""Batches of functions, held-out data and samples are those of one process, on any ranks."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn import functional

from pipegrad.errors import PipegradError
from pipegrad.train import corpus
from pipegrad.train.config import Config, load
from pipegrad.train.corpus import read_corpus
from pipegrad.train.job import Job
from pipegrad.train.report import Report
from tests.support.pages import file_of
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.train import data_functions
from tests.support.train.factories import Masked, tied
from tests.support.train.jobs import (
    Trained,
    by_hand,
    cross_entropy,
    refusal,
    started,
    trained,
    trainer_of,
    with_job,
)

pytestmark = pytest.mark.ranks(2)
JOB = """
[model]
factory = "factories:tied"
[train]
device = "cpu"
steps = 12
"""
TOKENS = data_functions.ROWS * data_functions.LENGTH


def dataset(name: str, **options: object) -> str:
    words = "".join(f", {key} = {value!r}" for key, value in options.items())
    return f"data.dataset={{name = 'data_functions:{name}'{words}}}"


@cache
def one_process(smoothing: float = 0.0, *, is_ragged: bool = False) -> list[float]:
    """Returns losses of the uncut model on five batches, epoch after epoch, by hand."""
    model = started(tied)

    def loss_of(step: int) -> torch.Tensor:
        if is_ragged:
            # Row by row, without padding: each target counts alike.
            rows = data_functions.ragged_batch(step % 5)
            logits = torch.cat([model(row[None, :-1]) for row in rows], dim=1)
            target = torch.cat([row[1:] for row in rows])[None]
        else:
            whole = data_functions.rows_of(step % 5)
            logits, target = model(whole[:, :-1]), whole[:, 1:]
        return data_functions.smoothed(logits, target, smoothing)

    return [loss for loss, _ in by_hand(range(12), loss_of, torch.optim.AdamW(model.parameters()))]


CASES = {
    "a list": [dataset("listed")],
    "pairs": [dataset("listed", kind="pair")],
    "tables": [dataset("listed", kind="table")],
    "a generator": [dataset("generated")],
    "replicas": [dataset("listed"), "parallel.data=2"],
    "replicas, a generator": [dataset("generated"), "parallel.data=2"],
    "a loader": [dataset("loaded")],
    "replicas, a loader": [dataset("loaded"), "parallel.data=2"],
    "drawn": [dataset("drawn")],
    "replicas, drawn": [dataset("drawn"), "parallel.data=2"],
    "told": [dataset("told"), "train.seed=7"],
    "told another seed": [dataset("told", seed=9), "parallel.data=2", "train.seed=7"],
    "replicas, uneven": [dataset("uneven"), "parallel.data=2"],
    "ragged": [dataset("ragged"), "train.loss_reduction=token_mean"],
    "replicas, ragged": [
        dataset("ragged"),
        "parallel.data=2",
        "parallel.pipeline=1",
        "parallel.microbatches=3",
        "train.loss_reduction=token_mean",
    ],
    "interleaved": [dataset("listed"), "parallel.schedule=interleaved-1f1b"],
    "a loss": [dataset("listed"), "train.loss={name = 'data_functions:smoothed', smoothing = 0.2}"],
    "deterministic": [
        dataset("listed"),
        "train.loss='data_functions:checks_algorithms'",
        "train.deterministic=true",
    ],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_job(tmp_path_factory.mktemp("data"), "job.toml", JOB)
    for name in ("my_data.py", "my_loss.py", "my_reporter.py"):
        (folder / name).write_text(file_of("docs/trainer.md", name))
    (folder / "a text.txt").write_text("abcdefgh" * 99)
    (folder / "held out.txt").write_bytes(TEXT)
    return folder / "job.toml"


def checked(job: Path, *settings: str, until: int = 12) -> Trained:
    """Trains a job through; all ranks must know the same losses."""
    run = trained(job, *settings, until=until)
    assert all(losses == run.losses for losses in gathered(run.losses))
    return run


def check_losses(run: Trained, expected: list[float]) -> None:
    for step, loss in zip(run.steps, expected, strict=True):
        assert step.loss == pytest.approx(loss, rel=rounding(step.step * TOKENS))


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_process(job: Path, name: str) -> None:
    run = checked(job, *CASES[name])
    assert not torch.are_deterministic_algorithms_enabled()
    if "ragged" in name:
        check_losses(run, one_process(is_ragged=True))
        return
    assert [step.tokens_seen for step in run.steps] == [n * TOKENS for n in range(1, 13)]
    assert all(map(math.isfinite, run.losses))
    if "told" in name:
        assert len(set(run.losses)) == 12
    elif "drawn" not in name and "loader" not in name and "uneven" not in name:
        check_losses(run, one_process(0.2 if name == "a loss" else 0.0))


@pytest.mark.ranks(4)
def test_four_ranks_have_the_losses_of_one_process(job: Path) -> None:
    check_losses(checked(job, dataset("listed"), "parallel.pipeline=2"), one_process())


def test_what_the_page_shows_trains(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["data.dataset={name='my_data:batches', folder='corpus', rows=8}"]
    settings.append("train.loss={name='my_loss:smoothed', smoothing=0.2}")
    alone = trained(job, *settings, until=2)
    assert [step.tokens_seen for step in alone.steps] == [8 * 64, 2 * 8 * 64]
    replicas = trained(job, *settings, "parallel.data=2", until=1)
    assert replicas.steps[0].tokens_seen == 2 * 8 * 64
    if dist.get_rank() == 0:
        monkeypatch.chdir(tmp_path)
        reporting = Job(load(job, ["train.reporters=['jsonl', 'my_reporter:Table']"]), 1)
        assert [*reporting.reporters] == ["jsonl", "my_reporter:Table"]
        report = Report(Console(file=io.StringIO()), reporting)
        report.begin(tmp_path, {})
        with report.running:
            report.step(alone.steps[0])
        assert Path("losses.csv").read_text() == f"1,{alone.losses[0]}\n"


# --- what goes wrong behind the first batch

LATE = {
    "fails_on_one": (3, r"rank 1: ConfigError: .*fails at batch 3: OSError\('no such shard'\)"),
    "ends_once": (3, "has no batch in epoch 2 after 2 batches: return an iterable that begins"),
    "none_later": (2, "batch 2: it is NoneType: expected a tensor of tokens"),
    "last_smaller": (2, r"batch 2 has 1 rows \(inputs int64 \(1, 16\)\), fewer than"),
    "by_rank_later": (4, "ranks 0 and 1 were given different tensors as 'x'"),
}


@pytest.mark.parametrize(("name", "step", "says"), [(name, *row) for name, row in LATE.items()])
def test_what_goes_wrong_later_ends_the_run_on_all_ranks_before_its_step(
    job: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: int, says: str
) -> None:
    monkeypatch.chdir(job.parent)
    trainer = trainer_of(job, dataset(name))
    for number in range(1, step):
        trainer.step(number)
    parameters = [p for m in trainer._modules.values() for p in m.parameters()]
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(PipegradError) as caught:
        trainer.step(step)
    trainer.close()
    assert all(map(torch.equal, before, parameters))
    said = str(caught.value)
    assert gathered(said) == [said] * 2
    assert re.search(says, said), said


# --- held-out data and samples

TEXT = bytes(ord("a") + (n * n) % 26 for n in range(8 * 16 * 3 + 50))
HELD_OUT = [
    "eval.every=5",
    "eval.sample_every=12",
    "eval.sample_tokens=20",
    "eval.prompt='fox'",
    "data.batch_size=8",
    "data.sequence_length=16",
    "model.dropout=0.5",
    "optimizer.lr=0.01",
]


@cache
def evaluated(job: Path, *settings: str) -> Trained:
    return trained(job, *HELD_OUT, *settings, until=12)


def continued(model: nn.Sequential, tokens: list[int], number: int) -> list[int]:
    for _ in range(number):
        logits = model(torch.tensor([tokens[-16:]]))[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("replicas", [1, 2])
def test_held_out_loss_and_sample_are_those_of_one_process(job: Path, replicas: int) -> None:
    settings = [f"parallel.data={replicas}", "eval.files='held out.txt'"]
    run, limited, hot = (
        evaluated(job, *settings, *others)
        for others in ([], ["eval.batches=2"], ["eval.temperature=2.0"])
    )
    samples = [[step.sample for step in each.steps] for each in (run, limited, hot)]
    assert gathered(samples) == [samples] * 2
    assert [s.step for s in run.steps if s.held_out_loss is not None] == [5, 10, 12]
    assert [s.step for s in run.steps if s.sample is not None] == [12]

    model = tied(dropout=0.5).eval()
    of_all = [item for values in gathered(run.values) for item in values.items()]
    names = dict(model.named_parameters(remove_duplicate=False))
    for name, value in of_all:
        names[name.partition(".")[2]].data.copy_(value)
    with torch.no_grad():
        for each, num_batches in ((run, 3), (limited, 2)):
            rows = [torch.tensor([*TEXT[i * 16 : i * 16 + 17]]) for i in range(num_batches * 8)]
            tokens = torch.stack(rows)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = functional.cross_entropy(logits, tokens[:, 1:].flatten()).item()
            found = each.steps[-1]
            assert found.held_out_loss == pytest.approx(loss, rel=rounding(len(tokens) * 16))
            assert found.perplexity == pytest.approx(math.exp(found.held_out_loss or 0))
        expected = continued(model, [*b"fox"], 20)
    assert run.steps[-1].sample == bytes(expected).decode(errors="replace")
    assert str(hot.steps[-1].sample).startswith("fox")
    assert hot.steps[-1].sample != run.steps[-1].sample


def test_evaluation_does_not_change_the_training(job: Path) -> None:
    with_, without = (evaluated(job, s) for s in ("eval.files='held out.txt'", "eval={}"))
    assert with_.losses == without.losses
    assert all(torch.equal(with_.values[key], without.values[key]) for key in without.values)


def test_held_out_batches_of_a_function(job: Path) -> None:
    settings = [dataset("listed"), "parallel.data=2", "eval.every=12"]
    settings.append("eval.dataset={name='data_functions:listed', num_batches=2}")
    run = trained(job, *settings, until=12)
    assert (run.steps[-1].held_out_loss or 99) < run.losses[0]


@pytest.mark.parametrize("settings", [[], ["parallel.data=2"]])
def test_batches_of_named_inputs_are_those_of_one_process(job: Path, settings: list[str]) -> None:
    settings = [dataset("named"), "model.factory=factories:Masked", *settings]
    run, model = checked(job, *settings, until=3), started(Masked)
    batches = data_functions.named()

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(batch["tokens"], batch["mask"]), batch["target"])

    truth = by_hand(batches, loss_of, torch.optim.AdamW(model.parameters()))
    check_losses(run, [loss for loss, _ in truth])
    said = refusal(job, dataset("named"))
    assert "no stage takes ['tokens', 'mask']" in said


def test_metrics_of_a_loss_are_those_of_all_rows(job: Path) -> None:
    settings = [dataset("listed"), "parallel.data=2", "train.loss=data_functions:with_accuracy"]
    settings += ["eval.every=1", "eval.dataset={name='data_functions:listed', num_batches=2}"]
    run, model = trained(job, *settings, until=1), started(tied)
    batches = [data_functions.rows_of(number) for number in (0, 1)]
    with torch.no_grad():
        hits = model(batches[0][:, :-1]).argmax(-1) == batches[0][:, 1:]
    [step] = run.steps
    assert step.metrics == {"accuracy": pytest.approx(hits.float().mean().item())}
    assert step.known()["accuracy"] == step.metrics["accuracy"]
    assert 0 <= step.held_out_metrics["accuracy"] <= 1
    assert {"held_out_accuracy", "held_out_loss"} <= step.known().keys()


def test_a_measurement_ends_before_a_batch_with_too_few_rows(job: Path) -> None:
    """It ended the run. The second batch of `last_smaller` has one row, for four microbatches."""
    settings = [dataset("listed"), "eval.every=6"]
    one, smaller = (
        trained(job, *settings, f"eval.dataset={{name='data_functions:{words}}}", until=12)
        for words in ("listed', num_batches=1", "last_smaller'")
    )
    losses = [step.held_out_loss for step in smaller.steps]
    assert losses == [step.held_out_loss for step in one.steps]
    assert losses[5] is not None


# --- memory


@pytest.mark.parametrize("factory", ["tied", "averaging", "reads_its_start"])
def test_each_rank_has_the_initial_values_of_one_process(job: Path, factory: str) -> None:
    settings = [f"model.factory='factories:{factory}'", "data.sequence_length=16"]
    whole = Job(load(job, settings), 1).model()
    expected = whole.state_dict()
    values = trained(job, *settings, until=0).values
    assert values
    for name, value in values.items():
        assert torch.equal(value, expected[name.removeprefix("model.")])


def test_ranks_of_a_machine_map_one_file_that_one_of_them_writes(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets, writes, pieces = pytest.importorskip("datasets"), list[str](), corpus._pieces

    def counted(config: Config, key: str, *others: Any) -> Iterator[object]:
        writes.append(key)
        yield from pieces(config, key, *others)

    monkeypatch.chdir(job.parent)
    monkeypatch.setattr(corpus, "_pieces", counted)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(job.parent / "cache"))
    trainer = trainer_of(job, "data.files='a text.txt'", "data.sequence_length=16")
    [file] = Path("cache").rglob("*.arrow")
    assert str(file.resolve()) in Path("/proc/self/maps").read_text()
    trainer.step(1)
    trainer.close()
    assert sum(map(len, gathered(writes))) == 1
    assert len(read_corpus(load(job, ["data.files='a text.txt'"]))) == 8 * 99


def test_what_one_rank_reads_is_refused_by_all_in_one_line(job: Path) -> None:
    (job.parent / "bad.jsonl").write_text('{"text": "one"}\n{"text": 3}\n')
    for name, says in {
        "nowhere.txt": "no file matches nowhere.txt",
        "bad.jsonl": "bad.jsonl has a value of int in the column 'text'",
    }.items():
        said = refusal(job, f"data.files='{name}'")
        assert said.startswith(f"data.files = ['{name}']: {says}")
