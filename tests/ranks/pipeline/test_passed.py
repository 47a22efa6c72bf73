"""Ranks of a pipeline that are given different batches, and replicas that are given the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Topology, cut
from pipegrad.errors import AgreementError, PipegradError, StepError
from pipegrad.pipeline.loss_message import LossTerms, StepResult
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.layers import one_stage_each
from tests.support.ranked import gathered

WORDS = (
    "ranks {} and {} were given different tensors as {!r}, but are ranks of one pipeline, which "
    "trains on one batch. A sampler must divide the data along 'dp' alone: DistributedSampler("
    "dataset, num_replicas=topology.size('dp'), rank=topology.coordinate('dp'))"
)
AUGMENTED = (
    "ranks {} and {} were given different tensors as {!r}, but are ranks of one pipeline, which "
    "trains on one batch. Their targets are equal, so the samples are the same, and their random "
    "augmentation is not: seed it by topology.coordinate('dp'), not by the rank"
)
pytestmark = pytest.mark.ranks(4)


def normal(*seed: int) -> Tensor:
    number = sum(s * 100**i for i, s in enumerate(seed))
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


class Job:
    """Two stages, two replicas: ranks 0 and 2 are a pipeline, 1 and 3 another one."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        modules = [nn.Linear(4, 4) for _ in range(2)]
        self.scheduler = one_stage_each(*modules, num_microbatches=2, **options)
        at = self.scheduler.topology
        self.stage, self.replica = at.coordinate("pp"), at.coordinate("dp")
        self.optimizer = self.scheduler.optimizer(torch.optim.SGD, lr=0.1)

    def step(self, x: object, y: object, **more: Any) -> StepResult:
        result = self.scheduler.step(x, target=y, **more)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result

    def right(self, number: int) -> StepResult:
        return self.step(normal(number, self.replica), normal(number, self.replica, 1))


def refused(kind: type[PipegradError], call: Callable[[], object]) -> str:
    """Returns the words of an error, which are the same on all ranks."""
    with pytest.raises(kind) as caught:
        call()
    (words,) = set(gathered(str(caught.value)))
    return words


def test_a_first_step_or_evaluation_with_a_batch_a_rank_is_refused_and_the_next_one_is_right() -> (
    None
):
    job = Job()
    # The first rank takes x alone and the last one the target alone: no rank takes both twice.
    own = normal(0, rank())
    assert refused(AgreementError, lambda: job.step(own, own)) == WORDS.format(0, 2, "x")
    shared = normal(0, job.replica)
    words = refused(AgreementError, lambda: job.step(shared, own))
    assert words == WORDS.format(0, 2, "target")
    assert job.right(0).loss > 0
    words = refused(AgreementError, lambda: job.scheduler.evaluate(own, target=shared))
    assert words.startswith(AUGMENTED.format(0, 2, "x"))
    assert job.scheduler.evaluate(shared, target=shared).loss > 0
    job.scheduler.close()


def test_ranks_compare_in_powers_of_two_and_every_so_many_steps_and_evaluations() -> None:
    job = Job(check_every=6)
    own, shared = normal(2, rank()), normal(2, job.replica)
    assert job.scheduler.evaluate(shared, target=shared).loss > 0
    job.right(1)
    compared = list[int]()
    for number in range(2, 14):
        said = outcome(partial(job.step, shared, own))
        if said == f"AgreementError: {WORDS.format(0, 2, 'target')}":
            compared.append(number)
    assert gathered(compared) == [[2, 4, 6, 8, 12]] * 4
    words = refused(AgreementError, lambda: job.scheduler.evaluate(own, target=shared))
    assert words.startswith(AUGMENTED.format(0, 2, "x"))
    job.scheduler.close()


def test_ready_microbatches_and_trees_are_compared_whole() -> None:
    job = Job()
    x, y = normal(0, job.replica), normal(1, job.replica)

    def ready(own: Tensor) -> StepResult:
        parts = [{"x": x[:4], "target": y[:4]}, {"x": own, "target": y[4:]}]
        result = job.scheduler.step(microbatches=parts)
        job.optimizer.zero_grad()
        return result

    words = refused(AgreementError, lambda: ready(normal(2, rank())[:4]))
    assert words.startswith(AUGMENTED.format(0, 2, "x"))
    ready(x[4:])
    job.scheduler.close()

    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output, target["a"])

    job = Job(loss_fn=loss_fn)
    job.step(x, {"a": y, "b": [y]})
    words = refused(AgreementError, lambda: job.step(x, {"a": y, "b": [normal(2, rank())]}))
    assert words.startswith(WORDS.format(0, 2, "target"))
    job.scheduler.close()


def test_what_a_rank_was_not_given_is_not_compared() -> None:
    job = Job()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            x, y = normal(number, job.replica), normal(number, job.replica, 1)
            inputs = (x,) if job.stage == 0 or number == 2 else ()
            more: dict[str, Any] = {"target": y} if job.stage or number == 3 else {}
            result = job.scheduler.step(*inputs, **more)
            job.optimizer.zero_grad()
            assert result.loss > 0
    # Each rank has made it by itself, and only the first stage takes it.
    encoded = normal(4, rank()).requires_grad_() * 2
    y = normal(4, job.replica)
    assert job.step(encoded, y).loss > 0
    job.scheduler.close()


def test_replicas_with_one_batch_in_three_comparisons_are_warned_of_once() -> None:
    job = Job()
    said = list[str]()
    for same in (False, *[True] * 8):
        x, y = (normal(0, 0 if same else job.replica, seed) for seed in (0, 1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert job.step(x, y).loss > 0
        said.append(" ".join(str(warning.message) for warning in caught))
    words = (
        "ranks [0, 2] and [1, 3] are replicas, and were given the same batch in 3 steps, so one of "
        "them does nothing new. A sampler divides the data: DistributedSampler(dataset, "
        "num_replicas=topology.size('dp'), rank=topology.coordinate('dp'))"
    )
    assert said == [*[""] * 7, words, ""]  # of the steps 2, 4 and 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):  # held-out data is often not divided
            result = job.scheduler.evaluate(normal(0), target=normal(0), outputs=False)
            assert result.loss > 0
    job.scheduler.close()


def test_second_forwards_that_differ_on_a_device_are_an_error_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job()
    job.right(0)
    counted = property(lambda _: torch.tensor(2 if rank() == 1 else 0), lambda *_: None)
    monkeypatch.setattr(LossTerms, "num_different", counted, raising=False)
    result = job.right(1)
    words = refused(StepError, lambda: result.loss)
    assert words.startswith("2 times in the step a stage with recompute=True returned something")
    job.scheduler.close()


class Masked(nn.Module):
    """Each of its layers takes the mask of the batch, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * mask
        return x


def test_texts_that_each_rank_has_padded_to_another_length_are_refused_in_these_words() -> None:
    """A stage failed first: "The size of tensor a (60) must match the size of tensor b (43)"."""
    torch.manual_seed(0)
    example = {"x": torch.ones(2, 6, 4), "mask": torch.ones(2, 6, 1)}
    scheduler = Scheduler(
        cut(Masked(), 2, example=example),
        Topology.create(pipeline=2),
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=nn.functional.mse_loss,
    )
    stage, replica = (scheduler.topology.coordinate(name) for name in ("pp", "dp"))

    def run(length: int, *, evaluates: bool = False) -> StepResult:
        x, mask = torch.ones(4, length, 4), torch.ones(4, length, 1)
        verb = scheduler.evaluate if evaluates else scheduler.step
        return verb(x, mask=mask, target=x)

    for evaluates in (False, True, False):
        # The replica of ranks 1 and 3 is right, and fails with the other one.
        length = 6 if replica else 6 + stage
        words = refused(AgreementError, partial(run, length, evaluates=evaluates))
        assert words == WORDS.format(0, 2, "x")
    assert run(6).loss.isfinite()
    scheduler.close()
