"""A job trains as one process does, whatever the cut; and says what it did."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pipegrad.errors import StepError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.data import read_corpus
from pipegrad.train.job import Job
from pipegrad.train.metrics import StepMetrics
from pipegrad.train.trainer import Trainer
from tests.support.rounding import rounding
from tests.support.train.factories import tied
from tests.support.train.jobs import with_job

ROOT = Path(__file__).parents[3]
TIED_GPT = ROOT / "examples" / "tied_gpt.toml"
STEPS = 25


def one_process(path: Path, *settings: str) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step of the uncut model, trained by hand."""
    config = load(path, settings)
    corpus, model = read_corpus(config), Job(config, 1).model()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    undecayed = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}],
        lr=3e-3,
    )
    told = []
    for step in range(1, STEPS + 1):
        begin = 0.1 + 0.9 * min(step - 1, 20) / 20  # LinearLR, then the cosine of 180 steps
        turn = 0.5 * (1 + math.cos(math.pi * max(step - 21, 0) / 180))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * begin * turn
        tokens, target = corpus.batch(step, seed=0, size=16)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append((loss.item(), norm.item()))
    return told


V_SCHEDULE = """
from pipegrad.schedules import Action, Schedule, ScheduleGenerator
class V(ScheduleGenerator):
    def generate(self, *, num_ranks, num_microbatches):
        def row(stages):
            forwards = [Action(s, "F", m) for s in stages for m in range(num_microbatches)]
            backwards = [Action(s, "B", m) for s in stages[::-1] for m in range(num_microbatches)]
            return (*forwards, *backwards)
        last = 2 * num_ranks - 1
        rows = tuple(row([r, last - r]) for r in range(num_ranks))
        places = (*range(num_ranks), *reversed(range(num_ranks)))
        return Schedule("v", num_microbatches, places, rows)
"""

CUTS = {
    1: {"alone": []},
    2: {"pipeline 2": [], "data 2": ["parallel.data=2"]},
    4: {
        "pipeline 4": [],
        "2 x 2": ["parallel.pipeline=2"],
        "data 4": ["parallel.pipeline=1"],
        "gpipe": ["parallel.schedule=gpipe"],
        "interleaved, 2 x 2": ["parallel.pipeline=2", "parallel.schedule=interleaved-1f1b"],
        "zb-h1, recomputed": ["parallel.schedule=zb-h1", "train.recompute=true"],
        "zbv, 2 x 2": ["parallel.pipeline=2", "parallel.schedule=zbv"],
        "boundaries": ["parallel.pipeline=2", "parallel.boundaries=[1]", "parallel.microbatches=2"],
        "other buckets": ["gradients.bucket_bytes=4096", "gradients.comm_streams=3"],
    },
}


def losses(cuts: dict[str, list[str]]) -> dict[str, list[StepMetrics]]:
    """Trains the example in every cut, on a rank."""
    found = {}
    for name, settings in cuts.items():
        trainer = Trainer(partial(load, TIED_GPT, [*settings, "train.device=cpu"]))
        job, rank = trainer.job, dist.get_rank()
        offline = job.plans(job.manifest(job.cut(job.model("meta"))))
        assert offline[rank] == trainer.sync.plan
        found[name] = [trainer.step(number) for number in range(1, STEPS + 1)]
        trainer.sync.check_replicas()
        trainer.close()
    return found


@pytest.fixture(scope="module")
def truth() -> list[tuple[float, float]]:
    return one_process(TIED_GPT)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_cut_has_the_losses_of_one_process(
    num_ranks: int, truth: list[tuple[float, float]]
) -> None:
    first, *others = run_ranks(losses, num_ranks, CUTS[num_ranks])
    assert others == [first] * (num_ranks - 1)  # every rank knows all numbers
    for name, steps in first.items():
        assert [step.step for step in steps] == list(range(1, STEPS + 1))
        for step, (loss, norm) in zip(steps, truth, strict=True):
            most = rounding(step.step * 16 * 64)  # tokens of all batches so far
            assert step.loss == pytest.approx(loss, rel=most), name
            # Later AdamW has moved by a whole step what is nothing but rounding.
            most = most if step.step == 1 else 1e-3
            assert step.grad_norm == pytest.approx(norm, rel=most), name
        assert steps[-1].loss < 0.7 * steps[0].loss
    if num_ranks == 4:
        tied, replicated = first["pipeline 4"][0], first["data 4"][0]
        assert (tied.collectives, tied.bytes_reduced) == (2, 2 * 4 * (256 * 64 + 1))  # and one flag
        assert replicated.collectives == 4
        assert replicated.bytes_reduced > 4 * 4 * 216_000


def results(folder: str, cases: dict[str, list[str]]) -> dict[str, Any]:
    os.chdir(folder)
    return {name: result(settings) for name, settings in cases.items()}


def result(settings: list[str]) -> Any:
    trainer = Trainer(partial(load, Path("small.toml"), settings))
    buffers = [float(b.sum()) for m in trainer._modules.values() for b in m.buffers()]
    modes = [layer.training for m in trainer._modules.values() for layer in m.children()]
    try:
        steps = [dataclasses.astuple(trainer.step(number))[:3] for number in (1, 2, 3)]
    except StepError as error:
        finite = all(
            bool(p.isfinite().all()) for m in trainer._modules.values() for p in m.parameters()
        )
        return str(error), finite
    trainer.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("pipegrad comm stream")]
    return steps, buffers, modes


CASES = {
    "fp32": [],
    "bf16": ["train.precision=bf16"],
    "dropout": ["model.dropout=0.5"],
    "dropout, recomputed": ["model.dropout=0.5", "train.recompute=true"],
    "dropout, replicas": ["model.dropout=0.5", "parallel.data=2"],
    "a model that counts": ["model.factory=factories:counting", "parallel.boundaries=[1]"],
    "frozen layers first": ["model.factory=factories:frozen_start", "parallel.boundaries=[1]"],
    "sequence first": ["model.factory=factories:sequence_first", "parallel.boundaries=[2]"],
    "sequence first, alone": ["model.factory=factories:sequence_first", "parallel.data=2"],
    "channels first": ["model.factory=factories:channels_first", "parallel.boundaries=[2]"],
    "channels first back": ["model.factory=factories:channels_first", "parallel.boundaries=[1]"],
    "a V": ["parallel.schedule=v_schedule:V"],
    "decay": ["optimizer.weight_decay=10"],
    "less decay": ["optimizer.weight_decay=10", "optimizer.decay_norms_and_biases=false"],
    "a stage without parameters": ["model.factory=factories:bare", "parallel.boundaries=[2]"],
    "sgd by name": ["optimizer={name='SGD', lr=0.1, momentum=0.9}"],
    "half the wire": ["gradients.reduce_dtype=bfloat16"],
    "explodes": ["model.factory=factories:explodes"],
}


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = with_job(tmp_path_factory.mktemp("small"))
    (folder / "v_schedule.py").write_text(V_SCHEDULE)
    return run_ranks(results, 2, str(folder), CASES)


@pytest.mark.parametrize("name", [name for name in CASES if name != "explodes"])
def test_it_trains(replies: list[dict[str, Any]], name: str) -> None:
    (first, _, _), (second, _, _) = (reply[name] for reply in replies)
    assert first == second
    assert all(math.isfinite(loss) for _, loss, _ in first)
    assert len({loss for _, loss, _ in first}) == 3


def steps(replies: list[dict[str, Any]], name: str) -> list[tuple[int, float, float]]:
    return replies[0][name][0]  # type: ignore[no-any-return]


def test_options_change_what_they_say(replies: list[dict[str, Any]]) -> None:
    plain = steps(replies, "fp32")
    assert steps(replies, "dropout")[0] != plain[0]
    assert steps(replies, "dropout, replicas")[0] != steps(replies, "dropout")[0]
    for name in ("decay", "sgd by name"):  # the first step is the same, what it did is not
        assert steps(replies, name)[0] == plain[0]
        assert steps(replies, name)[2] != plain[2]
    assert steps(replies, "less decay")[2] not in (plain[2], steps(replies, "decay")[2])
    assert steps(replies, "half the wire")[0][1:] != plain[0][1:]
    assert steps(replies, "half the wire")[0] == pytest.approx(plain[0], rel=1e-2)
    assert steps(replies, "dropout, recomputed") == steps(replies, "dropout")
    for one, other in (("a V", "fp32"), ("sequence first", "sequence first, alone")):
        for found, expected in zip(steps(replies, one), steps(replies, other), strict=True):
            assert found == pytest.approx(expected, rel=rounding(8 * 16) if found[0] == 1 else 1e-4)


def test_trying_a_model_out_leaves_no_trace(replies: list[dict[str, Any]]) -> None:
    (_, first, _), (_, second, modes) = (reply["a model that counts"] for reply in replies)
    assert (first, second) == ([], [0.0])
    assert modes == [True, False, True]  # as the factory made them


def test_bf16_is_autocast_of_one_process(replies: list[dict[str, Any]]) -> None:
    config = load(TIED_GPT, ["data.sequence_length=16", "model.factory=factories:tied"])
    torch.manual_seed(0)
    model, corpus = tied(), read_corpus(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for number, loss, norm in steps(replies, "bf16"):
        tokens, target = corpus.batch(number, seed=0, size=8)
        losses = []
        for part, goal in zip(tokens.chunk(4), target.chunk(4), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(part)
            losses.append(functional.cross_entropy(logits.flatten(0, 1).float(), goal.flatten()))
            (losses[-1] / 4).backward()
        true_norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()
        most = rounding(number * 8 * 16)
        assert loss == pytest.approx(torch.stack(losses).mean().item(), rel=most)
        assert norm == pytest.approx(true_norm.item(), rel=1e-3)  # of bf16, rounded by 2**-8
    assert steps(replies, "bf16")[0][1] != steps(replies, "fp32")[0][1]


def fail_late(folder: str) -> str:
    os.chdir(folder)
    settings = ["model.factory=factories:late", "parallel.boundaries=[1]"]
    trainer = Trainer(partial(load, Path("small.toml"), settings))
    with pytest.raises((ValueError, StepError)) as caught:
        _ = [trainer.step(number) for number in (1, 2, 3)]
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_stage_that_fails_in_a_step_is_told_to_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    first, second = run_ranks(fail_late, 2, str(with_job(tmp_path)))
    assert first == (
        "StepError: a step failed on another rank: rank 1: ValueError: no more In 1F1 on pipeline "
        "rank 1."
    )
    assert second == "ValueError: no more"


def test_gradients_that_are_not_finite_end_the_run_and_spare_the_parameters(
    replies: list[dict[str, Any]],
) -> None:
    (first, finite), (second, also_finite) = (reply["explodes"] for reply in replies)
    assert first == second
    assert first.startswith("step 1: the norm of the gradients is nan")
    assert finite
    assert also_finite
