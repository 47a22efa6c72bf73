"""Batches of functions, held-out data and samples are those of one process, on any ranks."""

from __future__ import annotations

import io
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.errors import PipegradError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.data import read_corpus
from pipegrad.train.job import Job
from pipegrad.train.metrics import StepMetrics
from pipegrad.train.reporters.report import Report
from pipegrad.train.trainer import Trainer
from tests.support.pages import file_of
from tests.support.rounding import rounding
from tests.support.train import data_functions
from tests.support.train.factories import tied
from tests.support.train.jobs import with_job

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


def one_process(loss: Any = None, *, is_ragged: bool = False) -> list[float]:
    """Returns losses of the uncut model on five batches, epoch after epoch, by hand."""
    torch.manual_seed(0)
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(12):
        if is_ragged:
            # Row by row, without padding: each target counts alike.
            rows = data_functions.ragged_batch(step % 5)
            logits = torch.cat([model(row[None, :-1]) for row in rows], dim=1)
            target = torch.cat([row[1:] for row in rows])[None]
        else:
            whole = data_functions.rows_of(step % 5)
            logits, target = model(whole[:, :-1]), whole[:, 1:]
        found = (loss or data_functions.smoothed)(logits, target)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    return losses


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
    "a loss": [
        dataset("listed"),
        "train.loss={name = 'data_functions:smoothed', smoothing = 0.2}",
    ],
    "deterministic": [
        dataset("listed"),
        "train.loss='data_functions:checks_algorithms'",
        "train.deterministic=true",
    ],
}


def trained(folder: str, cases: dict[str, list[str]]) -> dict[str, list[StepMetrics]]:
    os.chdir(folder)
    found = {}
    for name, settings in cases.items():
        trainer = Trainer(partial(load, Path("job.toml"), settings))
        found[name] = [trainer.step(number) for number in range(1, 13)]
        trainer.close()
        assert not torch.are_deterministic_algorithms_enabled()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = with_job(tmp_path_factory.mktemp("data"), "job.toml", JOB)
    (made / "data_functions.py").write_text(Path(data_functions.__file__).read_text())
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[StepMetrics]]:
    first, second = run_ranks(trained, 2, str(folder), CASES)
    for name, steps in first.items():
        assert [step.loss for step in steps] == [step.loss for step in second[name]]
    return first


def check_losses(steps: list[StepMetrics], expected: list[float]) -> None:
    for step, loss in zip(steps, expected, strict=True):
        assert step.loss == pytest.approx(loss, rel=rounding(step.step * TOKENS))


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_process(found: dict[str, list[StepMetrics]], name: str) -> None:
    steps = found[name]
    if "ragged" in name:
        check_losses(steps, one_process(is_ragged=True))
        return
    assert [step.tokens_seen for step in steps] == [n * TOKENS for n in range(1, 13)]
    assert all(math.isfinite(step.loss) for step in steps)
    if name == "a loss":
        check_losses(steps, one_process(partial(data_functions.smoothed, smoothing=0.2)))
    elif "told" in name:
        assert len({step.loss for step in steps}) == 12
    elif "drawn" not in name and "loader" not in name and "uneven" not in name:
        check_losses(steps, one_process())


def test_four_ranks_have_the_losses_of_one_process(folder: Path) -> None:
    cases = {"2 x 2": [dataset("listed"), "parallel.pipeline=2"], "4": [dataset("generated")]}
    cases["4"].append("model.layers=3")
    first = run_ranks(trained, 4, str(folder), {"2 x 2": cases["2 x 2"]})[0]
    check_losses(first["2 x 2"], one_process())


def test_what_the_page_shows_trains(folder: Path) -> None:
    for name in ("my_data.py", "my_loss.py", "my_reporter.py"):
        (folder / name).write_text(file_of("docs/trainer.md", name))
    settings = [
        "data.dataset={name='my_data:batches', folder='corpus', rows=8}",
        "train.loss={name='my_loss:smoothed', smoothing=0.2}",
    ]
    cases = {"alone": settings, "replicas": [*settings, "parallel.data=2"]}
    first = run_ranks(trained, 2, str(folder), cases)[0]
    assert [step.tokens_seen for step in first["alone"][:2]] == [8 * 64, 2 * 8 * 64]
    assert first["replicas"][0].tokens_seen == 2 * 8 * 64
    steps = first["alone"]
    reporters = "train.reporters=['jsonl', 'my_reporter:Table']"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        job = Job(load(Path("job.toml"), [reporters]))
        assert [*job.reporters] == ["jsonl", "my_reporter:Table"]
        report = Report(Console(file=io.StringIO()), job)
        report.begin(folder, {})
        with report.running():
            report.step(steps[0])
    assert (folder / "losses.csv").read_text() == f"1,{steps[0].loss}\n"


# --- going on


def gone_on(folder: str, case: str) -> tuple[list[float], list[float], tuple[str, ...], list[int]]:
    """Trains through; and until step 7, in the second epoch, and from there."""
    os.chdir(folder)
    load_with = partial(load, Path("job.toml"))
    settings, saved = CASES[case], f"saved {case}"
    through = Trainer(partial(load_with, settings))
    losses = [through.step(number).loss for number in range(1, 13)]
    through.close()
    until = Trainer(partial(load_with, settings))
    for number in range(1, 8):
        until.step(number)
    until.save(Path(saved), 7)
    until.close()
    behind = Trainer(partial(load_with, [*settings, f"train.resume='{saved}'"]))
    steps = [behind.step(number) for number in range(behind.first_step, 13)]
    behind.close()
    return losses[7:], [s.loss for s in steps], behind.notes, [s.tokens_seen for s in steps]


@pytest.mark.parametrize("case", ["a generator", "replicas, a loader", "replicas, drawn"])
def test_a_run_goes_on_in_the_middle_of_an_epoch(folder: Path, case: str) -> None:
    for whole, behind, notes, seen in run_ranks(gone_on, 2, str(folder), case):
        assert behind == whole  # to the bit
        assert notes == ()
        assert seen == [n * TOKENS for n in range(8, 13)]


def noted(folder: str) -> list[tuple[str, ...]]:
    os.chdir(folder)
    found = []
    for name in ("alike", "drawn"):
        settings = [dataset(name), "parallel.data=2"]
        trainer = Trainer(partial(load, Path("job.toml"), settings))
        found.append(trainer.notes)
        trainer.close()
    return found


def test_data_ranks_with_the_same_batch_are_noted(folder: Path) -> None:
    for [note], nothing in run_ranks(noted, 2, str(folder)):
        assert note.startswith("data.dataset: all data ranks have the same first batch: if that")
        assert nothing == ()


# --- what goes wrong behind the first batch

LATE = {
    "fails_on_one": (3, r"rank 1: ConfigError: .*fails at batch 3: OSError\('no such shard'\)"),
    "ends_once": (3, "has no batch in epoch 2 after 2 batches: return an iterable that begins"),
    "none_later": (2, "batch 2: it is None: expected a tensor of tokens"),
    "last_smaller": (2, r"batch 2 has 1 rows \(inputs int64 \(1, 16\)\), fewer than"),
    "by_rank_later": (3, "batch 3 of data.dataset is another one on rank 1 than on rank 0"),
}


def ended(folder: str) -> dict[str, tuple[int, str, bool]]:
    os.chdir(folder)
    return {name: ended_one(name) for name in LATE}


def ended_one(name: str) -> tuple[int, str, bool]:
    trainer = Trainer(partial(load, Path("job.toml"), [dataset(name)]))
    parameters = [p for m in trainer._modules.values() for p in m.parameters()]
    for number in range(1, 13):
        before = [p.detach().clone() for p in parameters]
        try:
            trainer.step(number)
        except PipegradError as error:
            trainer.close()
            return number, str(error), all(map(torch.equal, before, parameters))
    raise AssertionError(name)


def test_what_goes_wrong_later_ends_the_run_on_all_ranks_before_its_step(folder: Path) -> None:
    first, second = run_ranks(ended, 2, str(folder))
    assert first == second
    for name, (step, says) in LATE.items():
        number, said, unchanged = first[name]
        assert (number, unchanged) == (step, True)
        assert re.search(says, said), said


# --- held-out data and samples

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


def evaluated(folder: str, cases: dict[str, list[str]]) -> dict[str, Any]:
    os.chdir(folder)
    found: dict[str, Any] = {}
    for name, settings in cases.items():
        trainer = Trainer(partial(load, Path("job.toml"), [*HELD_OUT, *settings]))
        steps = [trainer.step(number) for number in range(1, 13)]
        states = [m.state_dict() for m in trainer._modules.values()]
        found[name] = steps, {key: value for state in states for key, value in state.items()}
        trainer.close()
    return found


def continued(model: nn.Sequential, tokens: list[int], number: int) -> list[int]:
    for _ in range(number):
        logits = model(torch.tensor([tokens[-16:]]))[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("replicas", [1, 2])
def test_held_out_loss_and_sample_are_those_of_one_process(folder: Path, replicas: int) -> None:
    text = bytes(ord("a") + (n * n) % 26 for n in range(8 * 16 * 3 + 50))
    (folder / "held out.txt").write_bytes(text)
    settings = [f"parallel.data={replicas}"]
    cases = {
        "with": ["eval.files='held out.txt'", *settings],
        "with a limit": ["eval.files='held out.txt'", "eval.batches=2", *settings],
        "hot": ["eval.files='held out.txt'", "eval.temperature=2.0", *settings],
    }
    both = run_ranks(evaluated, 2, str(folder), cases)
    steps = both[0]["with"][0]
    for name in cases:
        assert [s.sample for s in both[0][name][0]] == [s.sample for s in both[1][name][0]]
    assert [s.step for s in steps if s.held_out_loss is not None] == [5, 10, 12]
    assert [s.step for s in steps if s.sample is not None] == [12]

    model = tied(dropout=0.5).eval()
    model.load_state_dict({key: v for rank in both for key, v in rank["with"][1].items()})
    with torch.no_grad():
        for name, num_batches in {"with": 3, "with a limit": 2}.items():
            rows = [torch.tensor([*text[i * 16 : i * 16 + 17]]) for i in range(num_batches * 8)]
            tokens = torch.stack(rows)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = functional.cross_entropy(logits, tokens[:, 1:].flatten()).item()
            found = both[0][name][0][-1]
            assert found.held_out_loss == pytest.approx(loss, rel=rounding(len(tokens) * 16))
            assert found.perplexity == pytest.approx(math.exp(found.held_out_loss))
        prompt = [*b"fox"]
        expected = continued(model, list(prompt), 20)
    assert steps[-1].sample == bytes(expected).decode(errors="replace")
    hot = both[0]["hot"][0][-1].sample
    assert hot.startswith("fox")
    assert hot != steps[-1].sample


def test_evaluation_does_not_change_the_training(folder: Path) -> None:
    (folder / "held out.txt").write_bytes(bytes(97 + n % 26 for n in range(1000)))
    cases = {
        "with": ["eval.files='held out.txt'"],
        "without": ["eval={}"],
    }
    first, second = run_ranks(evaluated, 2, str(folder), cases)
    for rank in (first, second):
        assert [s.loss for s in rank["with"][0]] == [s.loss for s in rank["without"][0]]
        with_, without = rank["with"][1], rank["without"][1]
        assert all(torch.equal(with_[key], without[key]) for key in with_)


def test_held_out_batches_of_a_function(folder: Path) -> None:
    settings = [dataset("listed"), "parallel.data=2", "eval.every=12"]
    settings.append("eval.dataset={name='data_functions:listed', num_batches=2}")
    first, _ = run_ranks(trained, 2, str(folder), {"both": settings})
    found = first["both"][-1].held_out_loss
    torch.manual_seed(0)
    assert found is not None
    assert found < first["both"][0].loss


def test_a_measurement_ends_before_a_batch_with_too_few_rows(folder: Path) -> None:
    """It ended the run. The second batch of `last_smaller` has one row, for four microbatches."""
    held_out = {"one": "listed', num_batches=1", "smaller": "last_smaller'"}
    cases = {
        name: [dataset("listed"), "eval.every=6", f"eval.dataset={{name='data_functions:{words}}}"]
        for name, words in held_out.items()
    }
    for found in run_ranks(trained, 2, str(folder), cases):
        losses = {name: [step.held_out_loss for step in steps] for name, steps in found.items()}
        assert losses["smaller"] == losses["one"]
        assert losses["smaller"][5] is not None


# --- memory


def held(folder: str, settings: list[str]) -> tuple[int, dict[str, Tensor]]:
    """Returns bytes of the model in memory on this rank, and its parameters."""
    os.chdir(folder)
    trainer = Trainer(partial(load, Path("job.toml"), settings))
    modules = trainer._modules.values()
    values = {name: p.detach().clone() for m in modules for name, p in m.named_parameters()}
    trainer.close()
    return sum(value.nbytes for value in values.values()), values


@pytest.mark.parametrize("factory", ["tied", "averaging", "reads_its_start"])
def test_each_rank_has_the_initial_values_of_one_process(folder: Path, factory: str) -> None:
    settings = [f"model.factory='factories:{factory}'", "data.sequence_length=16"]
    whole = Job(load(folder / "job.toml", settings), 1).model()
    expected = dict(whole.named_parameters(remove_duplicate=False))
    replies = run_ranks(held, 2, str(folder), settings)
    assert {name for _, values in replies for name in values} <= {*expected}
    for _, values in replies:
        assert all(torch.equal(value, expected[name]) for name, value in values.items())


def rank_of_text(folder: str) -> tuple[str, int]:
    """Reads one text on two ranks of a machine; only the first one may write."""
    os.chdir(folder)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    settings = ["data.files='a text.txt'", "data.cache='cache'", "data.sequence_length=16"]
    trainer = Trainer(partial(load, Path("job.toml"), settings))
    trainer.step(1)
    corpus = trainer._texts.training
    trainer.close()
    assert corpus is not None
    return corpus._tokens.filename, len(list(Path("cache").iterdir()))  # type: ignore[attr-defined]


def text_refused(folder: str) -> str:
    os.chdir(folder)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    with pytest.raises(PipegradError) as caught:
        Trainer(partial(load, Path("job.toml"), ["data.files='nowhere.txt'"]))
    return str(caught.value)


def test_what_one_rank_reads_is_refused_by_all_in_one_line(folder: Path) -> None:
    first, second = run_ranks(text_refused, 2, str(folder))
    assert first == second
    assert first.startswith(
        "--set data.files='nowhere.txt': data.files = ['nowhere.txt']: there is"
    )


def test_ranks_of_a_machine_map_one_file(folder: Path) -> None:
    (folder / "a text.txt").write_text("abcdefgh" * 99)
    (first, number), second = run_ranks(rank_of_text, 2, str(folder))
    assert second == (first, number)
    assert number == 2  # tokens, and their record
    config = load(folder / "job.toml", [f"data.files={str(folder / 'a text.txt')!r}"])
    assert len(read_corpus(config)) == 8 * 99
