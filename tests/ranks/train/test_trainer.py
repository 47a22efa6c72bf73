"""A job trains as one process does, whatever the cut; and says what it did."""

from __future__ import annotations

import contextlib
import math
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pipegrad.errors import StepError
from pipegrad.train.config import load
from pipegrad.train.corpus import read_corpus
from pipegrad.train.job import Job
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.train.factories import tied
from tests.support.train.jobs import (
    EXAMPLES,
    Trained,
    by_hand,
    cross_entropy,
    started,
    trained,
    trainer_of,
    with_job,
)

TIED_GPT = EXAMPLES / "tied_gpt.toml"
STEPS = 25


@pytest.fixture(scope="module")
def truth() -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of the uncut model, trained by hand."""
    config = load(TIED_GPT)
    corpus, model = read_corpus(config), Job(config, 1).model()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    undecayed = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}],
        lr=3e-3,
    )

    def factor(done: int) -> float:
        begin = 0.1 + 0.9 * min(done, 20) / 20  # LinearLR, then the cosine of 180 steps
        return begin * 0.5 * (1 + math.cos(math.pi * max(done - 20, 0) / 180))

    return by_hand(
        (corpus.batch(step, seed=0, size=16) for step in range(1, STEPS + 1)),
        lambda batch: cross_entropy(model(batch[0]), batch[1]),
        optimizer,
        clip=1.0,
        schedule=LambdaLR(optimizer, factor),
    )


CUTS = {  # ranks, steps, settings
    "alone": (1, STEPS, []),
    "pipeline 2": (2, 8, []),
    "data 2": (2, 8, ["parallel.data=2"]),
    "pipeline 4": (4, 8, []),
    "2 x 2": (4, STEPS, ["parallel.pipeline=2"]),
    "data 4": (4, 8, ["parallel.pipeline=1"]),
    "gpipe": (4, 8, ["parallel.schedule=gpipe"]),
    "interleaved, 2 x 2": (4, 8, ["parallel.pipeline=2", "parallel.schedule=interleaved-1f1b"]),
    "zb-h1, recomputed": (4, 8, ["parallel.schedule=zb-h1", "train.recompute=true"]),
    "zbv, 2 x 2": (4, 8, ["parallel.pipeline=2", "parallel.schedule=zbv"]),
    "boundaries": (
        4,
        8,
        ["parallel.pipeline=2", "parallel.boundaries=[1]", "parallel.microbatches=2"],
    ),
    "other buckets": (4, 8, ["gradients.bucket_bytes=4096", "gradients.comm_streams=3"]),
}


@pytest.mark.parametrize(
    ("name", "steps", "settings"),
    [
        pytest.param(name, *case, marks=pytest.mark.ranks(num_ranks), id=name)
        for name, (num_ranks, *case) in CUTS.items()
    ],
)
def test_every_cut_has_the_losses_of_one_process(
    name: str, steps: int, settings: list[str], truth: list[tuple[float, float]]
) -> None:
    trainer = trainer_of(TIED_GPT, *settings, "train.device=cpu")
    job = trainer.job
    offline = job.plans(job.manifest(job.cut(job.model("meta"))))
    assert offline[dist.get_rank()] == trainer.sync.plan
    found = [trainer.step(number) for number in range(1, steps + 1)]
    trainer.sync.check_replicas()
    trainer.close()
    everywhere = gathered(found)
    assert everywhere == [found] * len(everywhere)  # every rank knows all numbers
    assert [step.step for step in found] == list(range(1, steps + 1))
    for step, (loss, norm) in zip(found, truth, strict=False):
        most = rounding(step.step * 16 * 64)  # tokens of all batches so far
        assert step.loss == pytest.approx(loss, rel=most)
        # Later AdamW has moved by a whole step what is nothing but rounding.
        assert step.grad_norm == pytest.approx(norm, rel=most if step.step == 1 else 1e-3)
    if steps == STEPS:
        assert found[-1].loss < 0.7 * found[0].loss
    if name == "pipeline 4":
        assert found[0].collectives == 2
        assert found[0].bytes_reduced == 2 * 4 * (256 * 64 + 1)  # and one flag
    if name == "data 4":
        assert found[0].collectives == 4
        assert found[0].bytes_reduced > 4 * 4 * 216_000


NET = ["model.factory=factories:Net", "optimizer={name='SGD', lr=0.1}", "gradients.clip_norm=1"]
MODULES = {  # ranks, settings
    "alone": (1, []),
    "pipeline 2": (2, ["eval.every=2", "eval.sample_every=2", "eval.files='held_out.txt'"]),
    "2 x 2, zb-h1": (4, ["parallel.pipeline=2", "parallel.schedule=zb-h1"]),
    "interleaved, recomputed": (
        2,
        ["parallel.schedule=interleaved-1f1b", "train.recompute=true"],
    ),
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, marks=pytest.mark.ranks(num_ranks), id=name)
        for name, (num_ranks, settings) in MODULES.items()
    ],
)
def test_a_module_that_is_no_sequential_trains_as_one_process(
    settings: list[str], job: Path
) -> None:
    """It is cut in its own code, which reads the tokens on each stage."""
    (job.parent / "held_out.txt").write_text("to be or not to be " * 40)
    config = load(job, NET)
    corpus, model = read_corpus(config), Job(config, 1).model()
    assert type(model).__name__ == "Net"
    truth = by_hand(
        (corpus.batch(number, seed=0, size=8) for number in (1, 2, 3)),
        lambda batch: cross_entropy(model(batch[0]), batch[1]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        clip=1.0,
    )
    run = trained(job, *NET, *settings, until=3)
    for step, true in zip(run.steps, truth, strict=True):
        most = rounding(step.step * 8 * 16)
        assert (step.loss, step.grad_norm) == pytest.approx(true, rel=most)
    if "eval.every=2" in settings:
        assert run.steps[1].held_out_loss is not None
        assert run.steps[1].sample


CASES = {
    "fp32": [],
    "bf16": ["train.precision=bf16"],
    "fp16": ["train.precision=fp16"],
    "dropout": ["model.dropout=0.5"],
    "dropout, recomputed": ["model.dropout=0.5", "train.recompute=true"],
    "dropout, replicas": ["model.dropout=0.5", "parallel.data=2"],
    "frozen layers first": ["model.factory=factories:frozen_start", "parallel.boundaries=[1]"],
    "sequence first": ["model.factory=factories:sequence_first", "parallel.boundaries=[2]"],
    "sequence first, alone": ["model.factory=factories:sequence_first", "parallel.data=2"],
    "channels first": ["model.factory=factories:channels_first", "parallel.boundaries=[2]"],
    "channels first back": ["model.factory=factories:channels_first", "parallel.boundaries=[1]"],
    "decay": ["optimizer.weight_decay=10"],
    "less decay": ["optimizer.weight_decay=10", "optimizer.decay_norms_and_biases=false"],
    "a stage without parameters": ["model.factory=factories:bare", "parallel.boundaries=[2]"],
    "sgd by name": ["optimizer={name='SGD', lr=0.1, momentum=0.9}"],
    "half the wire": ["gradients.reduce_dtype=bfloat16"],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("small")) / "small.toml"


@cache
def run(job: Path, name: str) -> Trained:
    return trained(job, *CASES[name], until=3)


def steps(job: Path, name: str) -> list[tuple[int, float, float]]:
    return [(step.step, step.loss, step.grad_norm) for step in run(job, name).steps]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_it_trains(job: Path, name: str) -> None:
    losses = run(job, name).losses
    assert gathered(losses) == [losses] * 2
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == 3
    assert not [t for t in threading.enumerate() if t.name.startswith("pipegrad comm stream")]


@pytest.mark.ranks(2)
def test_options_change_what_they_say(job: Path) -> None:
    plain = steps(job, "fp32")
    assert steps(job, "dropout")[0] != plain[0]
    assert steps(job, "dropout, replicas")[0] != steps(job, "dropout")[0]
    for name in ("decay", "sgd by name"):  # the first step is the same, what it did is not
        assert steps(job, name)[0] == plain[0]
        assert steps(job, name)[2] != plain[2]
    assert steps(job, "less decay")[2] not in (plain[2], steps(job, "decay")[2])
    assert steps(job, "half the wire")[0][1:] != plain[0][1:]
    assert steps(job, "half the wire")[0] == pytest.approx(plain[0], rel=1e-2)
    assert steps(job, "dropout, recomputed") == steps(job, "dropout")
    one, other = (steps(job, name) for name in ("sequence first", "sequence first, alone"))
    for found, expected in zip(one, other, strict=True):
        assert found == pytest.approx(expected, rel=rounding(8 * 16) if found[0] == 1 else 1e-4)


@pytest.mark.ranks(2)
def test_trying_a_model_out_leaves_no_trace(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    trainer = trainer_of(job, "model.factory=factories:counting", "parallel.boundaries=[1]")
    [module] = trainer._modules.values()
    first = dist.get_rank() == 0
    assert [float(b.sum()) for b in module.buffers()] == ([] if first else [0.0])
    modes = [layer.training for layer in module.children()]
    assert modes == ([True] if first else [True, False, True])  # as the factory made them
    losses = [trainer.step(number).loss for number in (1, 2, 3)]
    trainer.close()
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_autocast_of_one_process(job: Path, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    found = steps(job, precision)
    model, corpus = started(tied), read_corpus(load(job))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for number, loss, norm in found:
        tokens, target = corpus.batch(number, seed=0, size=8)
        losses = []
        for part, goal in zip(tokens.chunk(4), target.chunk(4), strict=True):
            with torch.autocast("cpu", dtype=dtype):
                logits = model(part)
            losses.append(cross_entropy(logits.float(), goal))
            scaler.scale(losses[-1] / 4).backward()
        scaler.unscale_(optimizer)
        true_norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        most = rounding(number * 8 * 16) if number == 1 or precision == "bf16" else 1e-3
        assert loss == pytest.approx(torch.stack(losses).mean().item(), rel=most)
        assert norm == pytest.approx(true_norm.item(), rel=1e-3)  # rounded by 2**-8 or 2**-11
    assert found[0][1] != steps(job, "fp32")[0][1]


@pytest.mark.ranks(2)
def test_gradients_that_are_not_finite_end_the_run_and_spare_the_parameters(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    trainer = trainer_of(job, "model.factory=factories:explodes")
    with pytest.raises(StepError, match=r"^step 1: the norm of the gradients is nan") as caught:
        trainer.step(1)
    assert gathered(str(caught.value)) == [str(caught.value)] * 2
    assert all(bool(tensor.isfinite().all()) for tensor in trainer._state.tensors().values())


@pytest.mark.ranks(1)
def test_a_closed_trainer_leaves_torch_with_the_algorithms_that_it_found(tmp_path: Path) -> None:
    job = with_job(tmp_path) / "small.toml"
    with contextlib.chdir(tmp_path):
        for before in (False, True):
            torch.use_deterministic_algorithms(before)
            try:
                trainer = trainer_of(job, f"train.deterministic={str(not before).lower()}")
                during = torch.are_deterministic_algorithms_enabled()
                trainer.close()
                after = torch.are_deterministic_algorithms_enabled()
            finally:
                torch.use_deterministic_algorithms(False)
            assert (during, after) == (not before, before)
