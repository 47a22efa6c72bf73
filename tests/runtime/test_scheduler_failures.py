"""What fails on one rank of a pipeline is every rank's error, soon, and names where it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import Scheduler, Stage, StepError, Topology
from pipegrad.agreement import Board
from pipegrad.schedules import Schedule
from pipegrad.testing import run_ranks
from tests.gradients.cases import DATA, Case, on, outcome, rank, replies
from tests.schedules.programs import rows

NUM_STAGES, NUM_MICROBATCHES, WIDTH = 4, 4, 2
ENDED = timedelta(seconds=8)  # for ranks to end by themselves
SECONDS = 20.0  # nothing may take longer; each takes a fraction of one
ELSEWHERE, TOO_LATE = "StepError: a step failed on another rank: ", "loss: StepError: "

Tensor = torch.Tensor
Trick = Callable[[Tensor], Tensor]

PIPELINE: list[Case] = []
COPIES: list[Case] = []
LATE: list[Case] = []  # refused before anything is computed
pipeline = replies(4, PIPELINE)
copies = replies(4, COPIES)
late = replies(4, LATE)


class Scale(nn.Module):
    """Multiplies by the number of its stage; may play a trick on the output of a microbatch."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), stage + 1.0))
        self.trick: tuple[int, Trick] | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.weight
        microbatch = self.calls % NUM_MICROBATCHES
        self.calls += 1
        if self.trick is not None and self.trick[0] == microbatch:
            return self.trick[1](out)
        return out


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise OSError("no space left")


def fails_in_forward(_out: Tensor) -> Tensor:
    raise OSError("no space left")


def fails_in_backward(out: Tensor) -> Tensor:
    failing: Tensor = FailsInBackward.apply(out)  # type: ignore[no-untyped-call]
    return failing


class Training:
    """One rank of a pipeline of `Scale`s, and the steps it takes."""

    def __init__(self, topology: Topology, **options: Any) -> None:
        self.topology = topology
        self.stage = topology.coordinate("pp")
        self.module = Scale(self.stage)
        self.loss_trick: Callable[[Tensor], object] = torch.sum
        options = {"schedule": "1f1b", "handlers": ["noop"], "loss_fn": self.loss, **options}
        stages = [Stage(self.module, self.stage)]
        self.scheduler = Scheduler(stages, topology, num_microbatches=NUM_MICROBATCHES, **options)

    def loss(self, out: Tensor, _target: object) -> object:
        return self.loss_trick(out)

    def step(self, *, rows: int = 8, **given: Any) -> str:
        """Takes a step; returns what it raised, with its notes, or its loss."""
        x = torch.arange(WIDTH * rows).float().reshape(rows, WIDTH)
        return self.said(lambda: self.scheduler.step(x, target=x, loss_divisor=1.0, **given))

    def said(self, step: Callable[[], Any]) -> str:
        """Returns what a step raised, with its notes, or its loss, in time."""
        self.module.calls = 0
        self.module.weight.grad = None
        began = time.monotonic()
        try:
            result = step()
        except Exception as error:  # noqa: BLE001 - whatever it is, is asserted
            text = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        else:
            said = outcome(lambda: float(result.loss))
            text = f"loss: {said}"
        seconds = time.monotonic() - began
        return text if seconds < SECONDS else f"{seconds:.0f} s: {text}"

    def trick(self, stage: int, microbatch: int, trick: Trick) -> str:
        """Takes a step in which the output of a stage is not as ever."""
        self.module.trick = (microbatch, trick) if self.stage == stage else None
        said = self.step()
        self.module.trick = None
        return said

    def is_right(self) -> bool:
        """Takes a good step; returns whether loss and gradient are what one process computes."""
        said = self.step()
        x = torch.arange(WIDTH * 8).float().reshape(8, WIDTH)
        product = float(torch.arange(1, self.topology.num_stages + 1).prod())
        wanted = x.sum(0) * product / (self.stage + 1)
        gradient = self.module.weight.grad
        loss = f"loss: {float(x.sum()) * product}"
        return said == loss and gradient is not None and torch.equal(gradient, wanted)


def chain(**options: Any) -> Training:
    return Training(Topology.create(pipeline=NUM_STAGES), **options)


def warm(training: Training) -> Training:
    """Takes two good steps: one in which shapes are learned, and one like all others."""
    assert [training.is_right(), training.is_right()] == [True, True]
    return training


def told(replies: Sequence[dict[str, Any]], case: str) -> list[Any]:
    """Returns what the ranks said of a case, each in time."""
    assert [reply[f"{case} seconds"] > 2 * SECONDS for reply in replies] == [False] * len(replies)
    return [reply[case] for reply in replies]


# Values that are not what they were.

CHANGES: dict[str, Trick] = {
    "shape": lambda out: out[:1],
    "dtype": torch.Tensor.double,
    "requires_grad": torch.Tensor.detach,
}
NOW = {
    "shape": "'x' is float32 [1, 2] with gradient, and was float32 [2, 2] with gradient",
    "dtype": "'x' is float64 [2, 2] with gradient, and was float32 [2, 2] with gradient",
    "requires_grad": "'x' is float32 [2, 2] without gradient, and was float32 [2, 2] with gradient",
}


@on(PIPELINE)
def changes_at_first() -> Any:
    """No step ends well before the last, so each is the first, in which shapes are learned."""
    training = chain()
    said = {name: training.trick(1, 2, change) for name, change in CHANGES.items()}
    right_afterwards = training.is_right()
    return {name: (words, right_afterwards) for name, words in said.items()}


@on(PIPELINE)
def changes_later() -> Any:
    training = warm(chain())
    return {
        name: (training.trick(1, 2, change), training.is_right())
        for name, change in CHANGES.items()
    }


@on(PIPELINE)
def another_batch_size() -> Any:
    training = chain()
    return [training.is_right(), training.step(rows=12), training.is_right()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", ["changes_at_first", "changes_later"])
def test_a_value_that_changes_is_refused_by_name_on_all_ranks(
    case: str, change: str, pipeline: list[dict[str, Any]]
) -> None:
    why = f"StepError: stage 1, microbatch 2: {NOW[change]}"
    for place, answers in enumerate(told(pipeline, case)):
        said, right_afterwards = answers[change]
        assert said.startswith(why if place == 1 else f"{ELSEWHERE}rank 1: {why}")
        assert said.endswith("In 1F2 on pipeline rank 1.")
        assert right_afterwards


def test_another_batch_size_is_refused_by_name_on_all_ranks(pipeline: list[dict[str, Any]]) -> None:
    for place, (before, said, afterwards) in enumerate(told(pipeline, "another_batch_size")):
        name = "x" if place == 0 else "target"
        why = f"tensors of {{'{name}': 12}} rows, and of {{'{name}': 8}} in the first step"
        assert before
        if place in (0, 3):
            assert said.startswith(f"StepError: {why}")
        else:
            assert said.startswith(ELSEWHERE)
            assert " rows, and of " in said
        assert afterwards


# Stages that raise.

FAILURES = {
    f"{stage}{kind}{microbatch}": (stage, microbatch, trick)
    for stage in (0, 2, 3)
    for kind, microbatch, trick in (
        ("F", 0, fails_in_forward),
        ("F", 2, fails_in_forward),
        ("B", 1, fails_in_backward),
        ("B", 3, fails_in_backward),
    )
}


def bad_loss(_out: Tensor) -> object:
    raise OSError("no space left")


def failures(training: Training, *, recovers: bool) -> dict[str, tuple[str, bool]]:
    found = {}
    for action, (stage, microbatch, trick) in FAILURES.items():
        said = training.trick(stage, microbatch, trick)
        found[action] = said, not recovers or training.is_right()
    training.loss_trick = bad_loss
    said = training.step()
    training.loss_trick = torch.sum
    found["loss"] = said, training.is_right()
    return found


@on(PIPELINE)
def raise_at_first() -> Any:
    return failures(chain(), recovers=False)


@on(PIPELINE)
def raise_later() -> Any:
    return failures(warm(chain()), recovers=True)


@pytest.mark.parametrize("action", [*FAILURES, "loss"])
@pytest.mark.parametrize("case", ["raise_at_first", "raise_later"])
def test_what_a_stage_raises_the_others_tell_with_rank_and_action(
    case: str, action: str, pipeline: list[dict[str, Any]]
) -> None:
    stage = 3 if action == "loss" else int(action[0])
    place = "3F0" if action == "loss" else action
    why = f"OSError: no space left In {place} on pipeline rank {stage}."
    for here, found in enumerate(told(pipeline, case)):
        said, right_afterwards = found[action]
        if here == stage:
            assert said == why
        elif said.startswith(TOO_LATE):  # may have ended before a backward of a stage before it
            assert case == "raise_later"  # nobody ends a first step before all have
            assert "B" in action
            assert here > stage
        else:
            assert said == f"{ELSEWHERE}rank {stage}: {why}"
        assert right_afterwards


@on(PIPELINE)
def ended_before() -> Any:
    """Stage 0 is slow to fail in its last backward: all others have ended their step by then."""
    training = warm(chain())
    last = training.trick(0, 3, SlowToFail.apply)
    return last, training.is_right()


class SlowToFail(FailsInBackward):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.5)
        raise OSError("no space left")


def test_the_loss_raises_where_the_step_had_ended_before_it_failed(
    pipeline: list[dict[str, Any]],
) -> None:
    answers = told(pipeline, "ended_before")
    late = f"{TOO_LATE}the step failed on another rank after this one had ended it"
    own = "OSError: no space left In 0B3 on pipeline rank 0."
    assert answers == [(own, True), (late, True), (late, True), (late, True)]


# Parameters that are not what they were.


@on(LATE)
def parameters() -> Any:
    training = warm(chain())
    weight = training.module.weight
    weight.requires_grad_(rank() != 2)
    answers: list[Any] = [training.step()]
    weight.requires_grad_()
    answers += [training.is_right()]
    if rank() == 2:
        training.module.weight = nn.Parameter(torch.full((1,), 3.0))
    answers += [training.step()]
    training.module.weight = nn.Parameter(weight.detach().clone())  # as good as the one before
    return [*answers, training.is_right()]


def test_a_parameter_that_changed_is_refused_by_name_one_alike_is_taken(
    late: list[dict[str, Any]],
) -> None:
    for place, answers in enumerate(told(late, "parameters")):
        frozen, thawed, other, alike = answers
        assert (thawed, alike) == (True, True)
        for said, now in ((frozen, "requires_grad=False"), (other, "now it is (1,)")):
            why = "StepError: '2.weight' was (2,)"
            assert said.startswith(why if place == 2 else f"{ELSEWHERE}rank 2: {why}")
            assert now in said


# What a step is given.


def inputs(training: Training, *, recovers: bool) -> dict[str, tuple[str, bool]]:
    step, x = training.scheduler.step, torch.ones(8, WIDTH)
    calls = {
        "missing": lambda: step(target=x),
        "doubled": lambda: step(x, x=x, target=x),
        "unknown": lambda: step(x, z=x, target=x),
        "too many": lambda: step(x, x, target=x),
        "undivisible": lambda: step(x[:6], target=x),
        "undivisible target": lambda: step(x, target=x[:6]),
        "empty": lambda: step(x[:0], target=x),
        "no target": lambda: step(x),
    }
    return {
        name: (training.said(call), not recovers or training.is_right())
        for name, call in calls.items()
    }


@on(PIPELINE)
def inputs_at_first() -> Any:
    training = chain()
    return inputs(training, recovers=False), training.is_right()


@on(LATE)
def inputs_later() -> Any:
    return inputs(warm(chain()), recovers=True)


INPUTS = {  # the rank that says so, -1 for all
    "missing": (0, "inputs ['x'] are missing, which stages of this rank take"),
    "doubled": (-1, "inputs ['x'] are given twice, by position and by name"),
    "unknown": (-1, "no stage takes ['z']; from outside they take ['x']"),
    "too many": (-1, "2 inputs, expected at most ['x']"),
    "undivisible": (0, "tensors of {'x': 6} rows cannot be cut into 4 microbatches"),
    "undivisible target": (3, "tensors of {'target': 6} rows cannot be cut into 4 microbatches"),
    "empty": (0, "tensors of {'x': 0} rows cannot be cut into 4 microbatches"),
    "no target": (3, "the last stage's rank needs target= and a Scheduler with loss_fn="),
}


def assert_refused(name: str, answers: Sequence[dict[str, tuple[str, bool]]]) -> None:
    source, why = INPUTS[name]
    for place, found in enumerate(answers):
        said, right_afterwards = found[name]
        own = source < 0 or place == source
        start = f"StepError: {why}" if own else f"{ELSEWHERE}rank {source}: StepError: {why}"
        assert said.startswith(start)
        assert right_afterwards


@pytest.mark.parametrize("name", INPUTS)
def test_wrong_inputs_of_a_first_step(name: str, pipeline: list[dict[str, Any]]) -> None:
    assert_refused(name, [found for found, _ in told(pipeline, "inputs_at_first")])
    assert [right for _, right in told(pipeline, "inputs_at_first")] == [True] * 4


@pytest.mark.parametrize("name", INPUTS)
def test_wrong_inputs_of_a_later_step(name: str, late: list[dict[str, Any]]) -> None:
    assert_refused(name, told(late, "inputs_later"))


@on(PIPELINE)
def losses() -> Any:
    without, training = chain(loss_fn=None), chain()
    said = [without.step()]
    for trick in (lambda out: out, lambda out: None, lambda out: 1.0):
        training.loss_trick = trick
        said.append(training.step())
    training.loss_trick = torch.sum
    right = training.is_right()
    training.loss_trick = lambda out: out
    later = training.step()
    training.loss_trick = torch.sum
    return said, right, later, training.is_right()


def test_a_loss_must_be_there_and_have_one_element(pipeline: list[dict[str, Any]]) -> None:
    found = [
        "the last stage's rank needs target= and a Scheduler with loss_fn=",
        *(f"loss_fn returned {what}" for what in ("tensor(", "None", "1.0", "tensor(")),
    ]
    for place, (said, right, later, right_afterwards) in enumerate(told(pipeline, "losses")):
        start = "StepError: " if place == 3 else f"{ELSEWHERE}rank 3: StepError: "
        for text, why in zip([*said, later], found, strict=True):
            assert text.startswith(f"{start}{why}")
        assert (right, right_afterwards) == (True, True)


@on(PIPELINE)
def evaluations() -> Any:
    """Wrong in the first evaluation and in a later one; steps in between are right."""
    training = chain()
    evaluate, x = training.scheduler.evaluate, torch.ones(4, WIDTH)
    answers: list[Any] = [training.is_right()]
    for _ in range(2):
        if training.stage == 2:
            training.module.trick = 3, fails_in_forward
        answers += [training.said(lambda: evaluate(x, target=x))]
        training.module.trick = None
        answers += [training.said(lambda: evaluate(target=x))]
        answers += [training.said(lambda: evaluate(x, target=x, loss_divisor=1.0))]
        answers += [training.module.training, training.is_right()]
    return answers


def test_an_evaluation_that_fails_leaves_everything_in_place(
    pipeline: list[dict[str, Any]],
) -> None:
    for place, answers in enumerate(told(pipeline, "evaluations")):
        assert answers.pop(0)
        for raised, missing, *ends in (answers[:5], answers[5:]):
            why = "OSError: no space left In 2F3 on pipeline rank 2."
            if place == 2:
                assert raised == why
            else:  # nobody sends back: those before it may have ended by then
                assert raised == f"{ELSEWHERE}rank 2: {why}" or (
                    place < 2 and raised.startswith(TOO_LATE)
                )
            why = "StepError: inputs ['x'] are missing"
            assert missing.startswith(why if place == 0 else f"{ELSEWHERE}rank 0: {why}")
            assert ends == ["loss: 192.0", True, True]


# Construction.


def schedule(*texts: str, num_microbatches: int = 1) -> Schedule:
    return rows(*texts, stages=(0, 1, 2, 3), num_microbatches=num_microbatches)


CYCLE = schedule(
    "0F0 0B0 0F1 0B1",
    "1F0 1F1 1B0 1B1",
    "2F0 2F1 2B0 2B1",
    "3F0 3F1 3B0 3B1",
    num_microbatches=2,
)
WRONG: dict[str, tuple[Schedule, list[str], list[str]]] = {  # what is said, what is marked
    "cycle": (CYCLE, ["cannot go on: ranks wait for each other"], [">0B0<", ">1F1<"]),
    "missing backward": (
        schedule("0F0 0B0", "1F0 1B0", "2F0", "3F0 3B0"),
        ["is not complete", "stage 2 microbatch 0 has ['F']"],
        [">2F0<"],
    ),
    "doubled": (
        schedule("0F0 0B0", "1F0 1B0 1B0", "2F0 2B0", "3F0 3B0"),
        ["is not complete", "1B0 2 times"],
        [">1B0<"],
    ),
    "backward first": (
        schedule("0F0 0B0", "1F0 1B0", "2F0 2B0", "3B0 3F0"),
        ["rank 3, 3B0: ", "its forward comes first"],
        [">3B0<"],
    ),
    "elsewhere": (
        schedule("0F0 0B0 1F0", "1B0", "2F0 2B0", "3F0 3B0"),
        ["is not complete", "1F0 on rank 0"],
        [">1F0<"],
    ),
    "split": (
        schedule("0F0 0I0 0W0", "1F0 1B0", "2F0 2B0", "3F0 3B0"),
        ["splits backward, which can be planned but not run yet"],
        [">0I0<", ">0W0<"],
    ),
}


class Refusals:
    """Constructs what is refused; counts process groups that were made for it."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def __call__(self, *stages: Stage, **options: Any) -> tuple[str, int, bool]:
        own = self.topology.coordinate("pp")
        given = list(stages) or [Stage(Scale(own), own)]
        options = {"schedule": "1f1b", "handlers": ["noop"], **options}
        if not isinstance(options["schedule"], Schedule):
            options = {"num_microbatches": NUM_MICROBATCHES, **options}
        began = time.monotonic()
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
            said = outcome(partial(Scheduler, given, self.topology, **options))
        return said, made.call_count, time.monotonic() - began < SECONDS


@on(PIPELINE)
def constructions() -> Any:
    here = rank()
    refused = Refusals(Topology.create(pipeline=NUM_STAGES))

    def stage(inputs: Sequence[str] = ("x",), outputs: Sequence[str] = ("x",)) -> Stage:
        return Stage(Scale(here), here, inputs, outputs)

    def special(at: int, special: Stage) -> tuple[Stage, ...]:
        return (special,) if here == at else ()

    other_stage = (here + 1) % NUM_STAGES
    found = {
        "misplaced": refused(Stage(Scale(other_stage), other_stage)),
        "one misplaced": refused(*special(1, Stage(Scale(2), 2))),
        "doubled stage": refused(stage(), stage()),
        "schedules": refused(schedule="1f1b" if here else "gpipe"),
        "num_microbatches": refused(num_microbatches=4 + (here == 2)),
        "no num_microbatches": refused(num_microbatches=None),
        "depth": refused(depth=2 + (here == 3)),
        "unknown schedule": refused(schedule="2f2b"),
        "other size": refused(schedule=rows("0F0 0B0", "1F0 1B0")),
        "no edge": refused(stage(["xyyx"[here]], ["xyxx"[here]])),
        "doubled input": refused(*special(2, stage(["x", "x"]))),
        "doubled output": refused(*special(1, stage(["x"], ["x", "x"]))),
        "no input": refused(*special(1, stage([]))),
        "wasted": refused(*special(1, stage(["x"], ["x", "side"]))),
        **{name: refused(schedule=wrong) for name, (wrong, _, _) in WRONG.items()},
    }
    return found, chain().is_right()


REFUSED = {
    "misplaced": ["rank 1: TopologyError: schedule '1f1b' places stages [1] on this rank", "[2]"],
    "one misplaced": ["rank 1: TopologyError: schedule '1f1b' places stages [1] on this rank"],
    "doubled stage": ["TopologyError: schedule '1f1b' places stages [0]", "which has [0, 0]"],
    "schedules": ["AgreementError: ranks disagree on the schedule", "ranks [0]", "ranks [1, 2, 3]"],
    "num_microbatches": ["AgreementError: ranks disagree on the schedule", "ranks [2]"],
    "no num_microbatches": ["ScheduleError: num_microbatches is missing"],
    "depth": ["AgreementError: ranks disagree on the schedule", "depth 2", "depth 3"],
    "unknown schedule": ["PluginNotFoundError: ", "'2f2b'", "1f1b"],
    "other size": ["ScheduleError: schedule 'mine' is of 2 ranks", "asked for are 4"],
    "no edge": ["ScheduleError: stage 0 makes ['x'], which no later stage takes"],
    "doubled input": ["ScheduleError: stage 2 has the inputs ['x', 'x']"],
    "doubled output": ["ScheduleError: stage 1 has the outputs ['x', 'x']"],
    "no input": ["ScheduleError: stage 1 has the inputs []"],
    "wasted": ["ScheduleError: stage 1 makes ['side'], which no later stage takes"],
    **{name: ["ScheduleError: schedule 'mine'", *said] for name, (_, said, _) in WRONG.items()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_on_all_ranks_alike_before_any_group_is_made(
    name: str, pipeline: list[dict[str, Any]]
) -> None:
    answers = [found[name] for found, _ in told(pipeline, "constructions")]
    said, num_groups, in_time = answers[0]
    assert answers == [answers[0]] * 4
    assert [part for part in REFUSED[name] if part not in said] == []
    assert num_groups == 0
    assert in_time
    if name in WRONG:
        grid = said[said.index("\nrank 0  ") :]
        assert len(grid.strip().splitlines()) >= NUM_STAGES
        assert [cell for cell in WRONG[name][2] if cell not in grid] == []


def test_ranks_that_were_refused_can_construct_a_good_one(pipeline: list[dict[str, Any]]) -> None:
    assert [right for _, right in told(pipeline, "constructions")] == [True] * 4


# Two copies of two stages: ranks 0 and 1 have stage 0, ranks 2 and 3 stage 1.


def two_by_two(**options: Any) -> Training:
    return Training(Topology.create(pipeline=2), handlers=[DATA], **options)


@on(COPIES)
def names_differ() -> Any:
    refused = Refusals(Topology.create(pipeline=2))
    stage = refused.topology.coordinate("pp")
    named = [("x",), ("x",), ("x",), ("x", "side")][rank()]
    return refused(Stage(Scale(stage), stage, named))


def test_copies_of_a_stage_take_the_same(copies: list[dict[str, Any]]) -> None:
    answers = told(copies, "names_differ")
    assert answers == [answers[0]] * 4
    said, num_groups, in_time = answers[0]
    assert said.startswith("AgreementError: ranks disagree on inputs and outputs of stage 1")
    assert (num_groups, in_time) == (0, True)


@on(COPIES)
def after_a_launch() -> Any:
    """Rank 0 fails in the last backward; the bucket of stage 1 has been launched long ago."""
    training = warm(two_by_two())
    if rank() == 0:
        training.module.trick = 3, fails_in_backward
    failed = training.step()
    training.module.trick = None
    return failed, training.step(), training.step()


def test_a_failure_behind_a_launch_is_an_error_now_and_ever_after(
    copies: list[dict[str, Any]],
) -> None:
    why = "OSError: no space left In 0B3 on pipeline rank 0."
    for place, (failed, *afterwards) in enumerate(told(copies, "after_a_launch")):
        if place == 0:
            assert failed == why
        elif failed.startswith(TOO_LATE):
            assert place in (2, 3)
        else:
            assert failed == f"{ELSEWHERE}rank 0: {why}"
        for said in afterwards:
            assert "Error: " in said
        if place == 1:  # which waits for a collective that never ends; the others hear of it
            assert all("no space left" in said for said in afterwards)


@on(COPIES)
def refused_everywhere() -> Any:
    """All ranks refuse two steps; nothing is launched, so nothing is out of step."""
    training = warm(two_by_two())
    x = torch.ones(8, WIDTH)
    unknown = training.said(lambda: training.scheduler.step(x, z=x, target=x))
    after_unknown = training.step()
    again = outcome(lambda: training.scheduler.step(x, target=x))
    return unknown, after_unknown, again, training.step()


def test_a_step_that_all_ranks_refuse_breaks_nothing(copies: list[dict[str, Any]]) -> None:
    for unknown, after_unknown, again, after_again in told(copies, "refused_everywhere"):
        assert unknown.startswith("StepError: no stage takes ['z']")
        assert after_unknown == "loss: 240.0"
        assert again.startswith("StepError: the gradient of ")
        assert "call optimizer.zero_grad()" in again
        assert after_again == "loss: 240.0"


def refused_late(
    harm: Callable[[Training], str], *, pipeline: int = 2
) -> tuple[str, list[str], str]:
    """Rank 1 refuses its step when the others have computed theirs, and wait for its bucket."""
    training = warm(Training(Topology.create(pipeline=pipeline), handlers=[DATA]))
    board = Board(f"{harm.__name__} {pipeline}")
    if rank() == 1:
        time.sleep(0.5)
        said = harm(training)
        ended = [outcome(lambda r=r: board.wait(f"{r}", ENDED)) for r in (0, 2, 3)]  # type: ignore[misc]
    else:
        said, ended = training.step(), []
        board.post(f"{rank()}", b"ended")
    return said, ended, training.step()


def freezes(training: Training) -> str:
    training.module.weight.requires_grad_(False)
    said = training.step()
    training.module.weight.requires_grad_()
    return said


def cuts_badly(training: Training) -> str:
    return training.step(rows=6)


@on(LATE)
def parameter_late() -> Any:
    return refused_late(freezes)


@on(LATE)
def input_late() -> Any:
    return refused_late(cuts_badly)


@on(LATE)
def parameter_late_without_pipeline() -> Any:
    """No rank of its pipeline can tell the others in its place."""
    return refused_late(freezes, pipeline=1)


REFUSED_LATE = {
    "parameter_late": "StepError: '0.weight' was",
    "parameter_late_without_pipeline": "StepError: '0.weight' was",
    "input_late": "StepError: tensors of {'x': 6} rows",
}


@pytest.mark.parametrize("case", REFUSED_LATE)
def test_a_rank_that_refuses_late_ends_those_that_wait_for_its_bucket(
    case: str, late: list[dict[str, Any]]
) -> None:
    """By itself: not by taking its next step, which it may never do."""
    for place, (said, ended, again) in enumerate(told(late, case)):
        if place == 1:
            assert said.startswith(REFUSED_LATE[case])
            assert ended == [repr(b"ended")] * 3
        else:
            assert said.startswith(TOO_LATE) or f"rank 1: {REFUSED_LATE[case]}" in said
        assert "Error: " in again


# A rank that is gone.


def one_is_killed() -> None:
    """The others raise, or the test fails: they would be killed by and by."""
    training = warm(chain())
    raise StepError(training.trick(1, 2, lambda out: os._exit(9)))


def test_a_rank_that_is_killed_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 ended without a result: exit code 9") as caught:
        run_ranks(one_is_killed, NUM_STAGES)
    notes = "\n".join(caught.value.__notes__)
    assert time.monotonic() - began < SECONDS
    assert [r for r in (0, 2, 3) if f"Then on rank {r}: " not in notes] == []
    assert "Killed" not in notes
    assert "loss: " not in notes
