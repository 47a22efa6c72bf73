"""Losses people have: metrics, weights, losses of stages, outputs; and what goes wrong with them.

Numbers under all schedules and placements are in tests/parity/test_losses.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology, schedules
from tests.support.gradients.cases import Case, Replies, on, outcome, rank, replies
from tests.support.pipeline.scales import ELSEWHERE
from tests.support.pipeline.schedulers import error, wrong
from tests.support.rounding import rounding

TWO: list[Case] = []
FOUR: list[Case] = []
two = replies(2, TWO)
four = replies(4, FOUR)
WIDTH, ROWS, MICROBATCHES = 3, 4, 2


class Scale(nn.Module):
    """A stage of one weight; returns what a function makes of its product."""

    def __init__(self, function: Callable[[Tensor], Any] = lambda x: x, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), start))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.weight)


def mean(x: Tensor, target: Tensor) -> Tensor:
    return (x - target).square().mean()


def counted(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sum over the rows whose target is not negative, and their number."""
    valid = target >= 0
    return ((x - target).square() * valid).sum(), valid.sum()


def make(*modules: nn.Module, **options: Any) -> Scheduler:
    """Returns a pipeline of two stages, over two or four ranks."""
    topology = Topology.create(pipeline=2)
    here = topology.coordinate("pp")
    of_stage = options.pop("stages", ({}, {}))[here]
    stages = modules or (Scale(), Scale())
    return Scheduler(
        [Stage(stages[here], here, **of_stage)],
        topology,
        **{"schedule": "1f1b", "num_microbatches": MICROBATCHES, "loss_fn": mean, **options},
    )


def batch(rows: int = ROWS) -> dict[str, Any]:
    x = torch.arange(float(rows * WIDTH)).reshape(rows, WIDTH) / 4
    return {"x": x, "target": x.flip(0)}


def share(values: Mapping[str, Tensor], scheduler: Scheduler) -> dict[str, Any]:
    at = scheduler.topology.coordinate("dp")
    return {name: value.chunk(2)[at] for name, value in values.items()}


def weight_of(scheduler: Scheduler) -> nn.Parameter:
    (record,) = scheduler.sync.records()
    return scheduler.sync.parameter(record)


def train(scheduler: Scheduler, values: Mapping[str, Any], **options: Any) -> str:
    """Takes a step from gradients of None; returns the loss and the metrics, or the error."""
    weight_of(scheduler).grad = None

    def step() -> Any:
        result = scheduler.step(**values, **options)
        return round(result.loss.item(), 4), result.metrics

    return outcome(step)


# Metrics.


@on(TWO)
def names_that_change() -> Any:
    metrics: dict[str, Any] = {"b": 1, "a": 2.5}
    scheduler = make(loss_fn=lambda x, target: (mean(x, target), metrics))
    found = [train(scheduler, batch())]
    metrics["c"] = 3
    found.append(train(scheduler, batch()))
    metrics.clear()
    found.append(train(scheduler, batch()))
    metrics |= {"a": 1, "b": 0}
    found.append(train(scheduler, batch()))
    scheduler.close()
    return found


def test_names_of_metrics_that_change_are_an_error_on_all_ranks(two: Replies) -> None:
    for place, reply in enumerate(two):
        first, more, less, again = reply["names_that_change"]
        assert first.endswith("{'a': 2.5, 'b': 1.0})")
        for said, names in ((more, ["a", "b", "c"]), (less, [])):
            assert said.startswith("StepError")
            assert f"returned the metrics {names}, expected ['a', 'b']" in said
            assert (ELSEWHERE in said) == (place == 0)
        assert again.endswith("{'a': 1.0, 'b': 0.0})")


@on(TWO)
def names_within_a_step() -> Any:
    calls = list[int]()

    def loss(x: Tensor, target: Tensor) -> Any:
        calls.append(0)
        return mean(x, target), {f"metric {len(calls)}": 1}

    scheduler = make(loss_fn=loss)
    found = train(scheduler, batch())
    scheduler.close()
    return found


def test_names_that_change_within_the_first_step_are_refused(two: Replies) -> None:
    for reply in two:
        said = reply["names_within_a_step"]
        assert "returned the metrics ['metric 2'], expected ['metric 1']" in said


@on(FOUR)
def names_of_replicas() -> Any:
    at = rank() % 2
    scheduler = make(loss_fn=lambda x, target: (mean(x, target), {f"metric {at}": at}))
    found = train(scheduler, share(batch(8), scheduler))
    scheduler.close()
    return found


def test_replicas_with_other_metrics_are_refused(four: Replies) -> None:
    for reply in four:
        said = reply["names_of_replicas"]
        assert said.startswith("AgreementError")
        assert "the metrics of loss_fn" in said


@on(TWO)
def evaluations() -> Any:
    """Evaluations have names of their own, learned from the first one that computes a loss."""

    def loss(x: Tensor, target: Tensor) -> Any:
        name = "training" if torch.is_grad_enabled() else "evaluation"
        return mean(x, target), {name: 7, "rows": len(target)}

    scheduler, values = make(loss_fn=loss), batch()
    found = [
        sorted(scheduler.evaluate(**values).metrics.items()),
        sorted(scheduler.step(**values).metrics.items()),
        scheduler.evaluate(x=values["x"]).metrics,
        sorted(scheduler.evaluate(**values).metrics.items()),
    ]
    scheduler.close()
    return repr(found)


def test_an_evaluation_has_metrics_of_its_own(two: Replies) -> None:
    nothing = {"evaluation": math.nan, "rows": math.nan}
    names = [("evaluation", 7.0), ("rows", 2.0)]
    wanted = [names, [("rows", 2.0), ("training", 7.0)], nothing, names]
    assert [reply["evaluations"] for reply in two] == [repr(wanted)] * 2


@on(TWO)
def evaluations_without_a_target() -> Any:
    """The first evaluation knows no names: those of training, or none, are expected."""
    scheduler, values = make(loss_fn=lambda x, y: (mean(x, y), {"a": 1})), batch()
    found = [repr(scheduler.evaluate(x=values["x"]).metrics)]
    found.append(outcome(lambda: scheduler.evaluate(**values).metrics))
    scheduler.close()
    scheduler = make(loss_fn=lambda x, y: (mean(x, y), {"a": 1}))
    scheduler.step(**values)
    found.append(repr(scheduler.evaluate(x=values["x"]).metrics))
    found.append(repr(scheduler.evaluate(**values).metrics))
    scheduler.close()
    return found


def test_an_evaluation_without_a_target_expects_the_names_of_training(two: Replies) -> None:
    for reply in two:
        none, refused, *others = reply["evaluations_without_a_target"]
        assert none == "{}"
        assert "expected [], which all ranks know from earlier" in refused
        assert "If the first evaluation has no target" in refused
        assert others == ["{'a': nan}", "{'a': 1.0}"]


# Weights.


@on(FOUR)
def nothing_counts() -> Any:
    """All is ignored: the loss is nan, and gradients are zero, as those of cross_entropy."""
    scheduler = make(loss_fn=counted, loss_reduction="token_mean")
    values = share(batch(8), scheduler)
    found = [train(scheduler, {**values, "target": values["target"] - 1000})]
    gradient = weight_of(scheduler).grad
    found.append(repr(None if gradient is None else gradient.tolist()))
    found.append(train(scheduler, values))
    scheduler.close()
    return found


def test_if_all_is_ignored_the_loss_is_nan_and_gradients_are_zero(four: Replies) -> None:
    logits = torch.ones(2, 3, requires_grad=True)
    F.cross_entropy(logits, torch.full((2,), -100)).backward()
    assert logits.grad is not None
    for reply in four:
        lost, gradient, later = reply["nothing_counts"]
        assert lost == "(nan, {})"
        assert gradient == repr([0.0] * WIDTH) == repr(logits.grad[0].tolist())
        assert "nan" not in later


@on(FOUR)
def refused_weights() -> Any:
    found = {}
    for name, weight in {
        "number": -1,
        "none": None,
        "tensor": torch.tensor(-1.0),
        "nan": torch.tensor(math.nan),
    }.items():
        scheduler = make(
            loss_fn=lambda x, y, weight=weight: (mean(x, y), weight), loss_reduction="token_mean"
        )
        found[name] = train(scheduler, share(batch(8), scheduler))
        scheduler.close()
    scheduler = make(loss_fn=counted, loss_reduction="token_mean")
    found["divisor"] = train(scheduler, share(batch(8), scheduler), loss_divisor=3)
    found["then"] = train(scheduler, share(batch(8), scheduler))
    scheduler.close()
    scheduler = make(loss_fn=counted)
    found["forgotten"] = train(scheduler, share(batch(8), scheduler))
    scheduler.close()
    return found


def test_weights_that_are_none_are_refused_on_all_ranks(four: Replies) -> None:
    for reply in four:
        found = reply["refused_weights"]
        assert "returned the weight -1, expected a number from 0 on" in found["number"]
        assert "returned ['Tensor', 'NoneType'], expected (sum of losses, weight)" in found["none"]
        assert "gave on a data rank sum to -2, expected" in found["tensor"]
        assert "sum to nan" in found["nan"]
        assert "loss_divisor is 3, and with loss_reduction='token_mean'" in found["divisor"]
        assert "StepError" not in found["then"]
        assert "make the Scheduler with loss_reduction='token_mean'" in found["forgotten"]


@on(FOUR)
def stages_that_fail() -> Any:
    """The step of a failed rank must send a weight, too: the next steps are right then."""
    found, at = {}, Topology.create(pipeline=2)
    for where in range(4):
        module = Scale()
        scheduler = make(module, module, loss_fn=counted, loss_reduction="token_mean")
        values = share(batch(8), scheduler)
        first = train(scheduler, {} if rank() == where else values)  # it would have learned
        before = train(scheduler, values)
        module.function = _fails if rank() == where else module.function
        failed = train(scheduler, values)
        module.function = lambda x: x
        refused = train(scheduler, {} if rank() == where else values)
        found[where] = first, before, failed, refused, train(scheduler, values)
        scheduler.close()
    return at.coordinate("pp"), found


def _fails(_: Tensor) -> Tensor:
    raise ValueError("enough")


def test_steps_after_a_failed_one_have_the_right_weights(four: Replies) -> None:
    for reply in four:
        _, found = reply["stages_that_fail"]
        for first, before, failed, refused, after in found.values():
            assert "enough" in failed
            assert "StepError" in refused
            assert "StepError" in first
            assert before == after
            assert "Error" not in after


@on(TWO)
def gradients_that_are_there() -> Any:
    """They would be divided too, so they are refused, unless they are zero."""
    scheduler = make(loss_fn=counted, loss_reduction="token_mean")
    values, weight = batch(), weight_of(scheduler)
    found = [train(scheduler, values), outcome(partial(scheduler.step, **values))]
    weight.grad = torch.ones(WIDTH) if rank() == 0 else None
    found.append(outcome(partial(scheduler.step, **values)))
    gradients = []
    for start in (torch.zeros(WIDTH), None):
        weight.grad = start
        scheduler.step(**values)
        gradients.append(repr(weight.grad))
    found.append(str(gradients[0] == gradients[1]))
    scheduler.close()
    return found


def test_a_gradient_that_is_left_over_is_refused_on_all_ranks(two: Replies) -> None:
    for reply in two:
        fine, left_over, own, zeroed = reply["gradients_that_are_there"]
        assert "Error" not in fine
        assert "has a gradient already, and the divisor of this step is known only" in left_over
        assert "has a gradient already" in own
        assert zeroed == "True"


@on(TWO)
def dropped_accumulation() -> Any:
    """An accumulated batch that is dropped counts no more, and an evaluation does not count."""
    scheduler = make(loss_fn=counted, loss_reduction="token_mean")
    weight, found = weight_of(scheduler), []
    for drops, evaluates in ((False, False), (True, False), (False, True)):
        weight.grad = None
        if drops:
            with scheduler.sync.accumulate():
                scheduler.step(**batch())
            scheduler.sync.drop_gradients()
        with scheduler.sync.accumulate():
            scheduler.step(**batch())
        if evaluates:
            scheduler.evaluate(**batch())
        scheduler.step(**batch())
        found.append(repr(weight.grad))
    scheduler.close()
    return found


def test_accumulated_weights_are_those_of_the_accumulated_gradients(two: Replies) -> None:
    for reply in two:
        plain, dropped, evaluated = reply["dropped_accumulation"]
        assert plain == dropped == evaluated != "None"


# Losses of stages.


class Head(nn.Module):
    """A stage with a loss alone, as a head for another token is; its matrix waits in a split."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).square().sum()
        return loss


HEAD: dict[str, Any] = {"outputs": (), "losses": ("next",)}


def four_stages() -> list[nn.Module]:
    """Stages of which the second one makes a loss alone; the third takes what the first made."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), Head(), nn.Linear(WIDTH, WIDTH), Scale()]


def losses_of_one_process(
    stages: list[nn.Module], loss_reduction: str, values: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the loss, and the part of it that the second stage makes."""
    hidden, rows = stages[0](values["x"]), ROWS // MICROBATCHES
    out = stages[3](stages[2](hidden))
    extra = torch.stack([stages[1](part) for part in hidden.split(rows)]).sum()
    loss, number = counted(out, values["target"])
    if loss_reduction == "mean":
        loss, number = mean(out, values["target"]), torch.tensor(1)
        extra = extra / MICROBATCHES
    return (loss + extra) / number, extra / number


def with_a_head(schedule: str, loss_reduction: str, *, recompute: bool) -> float:
    """Returns the largest error of two steps and an evaluation."""
    own, true = four_stages(), four_stages()
    made = schedules.build(schedule, num_ranks=2, num_microbatches=MICROBATCHES)
    here = Topology.create(pipeline=2).with_stages(made.stage_to_rank).local_stages
    scheduler = Scheduler(
        [Stage(own[i], i, recompute=recompute, **(HEAD if i == 1 else {})) for i in here],
        Topology.create(pipeline=2),
        schedule=made,
        loss_fn=mean if loss_reduction == "mean" else counted,
        loss_reduction=loss_reduction,
    )
    errors = list[float]()
    for verb in ("step", "step", "evaluate"):
        result = getattr(scheduler, verb)(**batch())
        loss, extra = losses_of_one_process(true, loss_reduction, batch())
        errors.append(error(result.loss, loss.detach()))
        errors.append(abs(result.metrics["next"] / extra.item() - 1))
        if verb == "step":
            loss.backward()
            for i in here:
                for p, q in zip(own[i].parameters(), true[i].parameters(), strict=True):
                    errors.append(error(p.grad, q.grad))
            for module in (*own, *true):
                module.zero_grad()
    scheduler.close()
    return max(errors)


@on(TWO)
def heads() -> dict[str, float]:
    return {
        f"{schedule} {reduction} {recompute}": with_a_head(schedule, reduction, recompute=recompute)
        for schedule in ("interleaved-1f1b", "zbv")
        for reduction in ("mean", "token_mean")
        for recompute in (False, True)
    }


def test_a_stage_with_a_loss_alone_trains_whole_split_and_recomputed(two: Replies) -> None:
    for reply in two:
        assert len(reply["heads"]) == 8
        assert wrong(reply["heads"], rounding(ROWS * WIDTH)) == {}


def with_loss(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.square().sum() / 8


AUX: dict[str, Any] = {"losses": ("aux",)}
WAYS: dict[str, Callable[[Tensor], Any]] = {
    "a tuple": with_loss,
    "a list": lambda x: list(with_loss(x)),
    "a mapping": lambda x: {"aux": with_loss(x)[1], "other": None, "x": x},
    "of two dimensions": lambda x: (x, with_loss(x)[1].reshape(1, 1)),
    "detached": lambda x: (x, with_loss(x)[1].detach()),
    "nothing": lambda x: x,
}


@on(TWO)
def ways_to_return() -> Any:
    """For both stages: the loss and the metrics, and the gradient."""
    found = {}
    for name, function in WAYS.items():
        options = {} if name == "nothing" else AUX
        scheduler = make(Scale(function), Scale(function), stages=(options, options))
        said = train(scheduler, batch())
        gradient = weight_of(scheduler).grad
        assert gradient is not None
        found[name] = said, gradient.tolist()
        scheduler.close()
    return found


def test_a_stage_returns_its_losses_as_it_returns_outputs(two: Replies) -> None:
    """Losses of one name are summed over stages; one that is detached counts in the loss alone."""
    whole = sum(2 * with_loss(x)[1].item() for x in batch()["x"].split(2)) / MICROBATCHES
    for reply in two:
        found = reply["ways_to_return"]
        said, gradient = found["a tuple"]
        assert said.endswith(f"{{'aux': {whole}}})")
        for way in ("a list", "a mapping", "of two dimensions"):
            assert found[way] == (said, gradient), way
        assert found["detached"][0] == said
        assert found["detached"][1] == found["nothing"][1] != gradient


@on(TWO)
def frozen_outputs() -> Any:
    """A stage whose only gradient is that of its loss: nothing comes back to its outputs."""
    found = {}
    for schedule in ("1f1b", "zb-h1"):
        first = Scale(lambda x: (x.detach(), x.square().sum()))
        scheduler = make(first, Scale(), stages=(AUX, {}), schedule=schedule)
        for _ in range(2):
            train(scheduler, batch())
        gradient = weight_of(scheduler).grad
        assert gradient is not None
        found[schedule] = gradient.tolist()
        scheduler.close()
    return found


def test_a_loss_may_be_all_that_gives_a_stage_its_gradient(two: Replies) -> None:
    x = batch()["x"]
    wanted = (2 * x.square().sum(0) / MICROBATCHES).tolist()
    assert two[0]["frozen_outputs"] == {"1f1b": wanted, "zb-h1": wanted}
    assert two[1]["frozen_outputs"]["1f1b"] != [0.0] * WIDTH


@on(TWO)
def divisors() -> list[str]:
    """The rank of a stage with a loss needs the divisor, too; then all is divided by it."""
    found = []
    for everywhere in (True, False):
        scheduler = make(Scale(with_loss), Scale(), stages=(AUX, {}))
        options = {"loss_divisor": 8} if everywhere or rank() == 1 else {}
        found.append(train(scheduler, batch(), **options))
        scheduler.close()
    return found


def test_a_divisor_divides_losses_of_stages_too(two: Replies) -> None:
    whole = sum(with_loss(x)[1].item() for x in batch()["x"].split(2)) / 8
    for reply in two:
        fine, differs = reply["divisors"]
        assert fine.endswith(f"{{'aux': {whole}}})")
        assert differs.startswith("AgreementError")
        assert "loss_divisor" in differs


@on(TWO)
def mistakes() -> Any:
    found = {}
    for name, function in {
        "missing": lambda x: x,
        "missing by name": lambda x: {"x": x},
        "no tensor": lambda x: (x, 1.0),
        "too large": lambda x: (x, x),
        "too many": lambda x: (*with_loss(x), x),
    }.items():
        scheduler = make(Scale(function), Scale(), stages=(AUX, {}))
        found[name] = train(scheduler, batch())
        scheduler.close()
    scheduler = make(
        Scale(with_loss),
        Scale(),
        stages=(AUX, {}),
        loss_fn=lambda x, y: (mean(x, y), {"aux": 1}),
    )
    found["taken"] = train(scheduler, batch())
    scheduler.close()
    for name, stages in {
        "doubled": ({"losses": ("a", "a")}, {}),
        "an output": ({"losses": ("x",)}, {}),
        "last alone": ({}, {"outputs": (), "losses": ("a",)}),
        "nothing": ({"outputs": ()}, {}),
    }.items():
        found[name] = outcome(lambda stages=stages: make(stages=stages))  # type: ignore[misc]
    found["unknown"] = outcome(lambda: make(loss_reduction="tokens"))
    found["differs"] = outcome(lambda: make(loss_reduction=("mean", "token_mean")[rank()]))
    return found


def test_mistakes_with_losses_of_stages_are_refused_in_words(two: Replies) -> None:
    """On all ranks: also where no stage makes one."""
    words = {
        "missing": "stage 0 returned ['Tensor'], expected a tensor for each of its outputs ['x'] "
        "and its losses ['aux']",
        "missing by name": "stage 0 returned {'x': 'Tensor'}, expected",
        "no tensor": "stage 0 returned ['Tensor', 'float'], expected",
        "too large": "stage 0, microbatch 0: the stage returned 'aux' of shape (2, 3), expected "
        "one element",
        "too many": "stage 0 returned ['Tensor', 'Tensor', 'Tensor'], expected",
        "taken": "loss_fn returned the metrics ['aux'], which are names of losses of stages",
        "doubled": "stage 0 has the outputs and losses ['x', 'a', 'a']: expected one or more, each",
        "an output": "stage 0 has the outputs and losses ['x', 'x']",
        "last alone": "stage 1 has the outputs []: expected one or more",
        "nothing": "stage 0 has the outputs []: expected one or more",
        "unknown": "loss_reduction is 'tokens', expected one of ['mean', 'token_mean']",
        "differs": "ranks disagree on the schedule",
    }
    for reply in two:
        assert reply["mistakes"].keys() == words.keys()
        for name, fragment in words.items():
            assert fragment in reply["mistakes"][name], name


# Outputs, and how a result prints.


@on(TWO)
def outputs() -> Any:
    """On request in training; in evaluation unless it is not wanted."""
    options: Any = {"loss_fn": lambda x, total, target: mean(x, target) + 0 * total}
    scheduler = make(Scale(), Scale(lambda x: (x, x.sum())), stages=OUTPUTS, **options)
    values = batch()
    scheduler.step(**values)
    weight_of(scheduler).grad = None
    results = {
        "step": scheduler.step(**values, outputs=True),
        "evaluate": scheduler.evaluate(**values),
        "neither": scheduler.evaluate(**values, outputs=False),
    }
    weight_of(scheduler).grad = None
    results["nothing"] = scheduler.step(**values)
    scheduler.close()
    return {
        name: ([out.tolist() for out in result.outputs], [o.requires_grad for o in result.outputs])
        for name, result in results.items()
    }


OUTPUTS: Any = ({}, {"outputs": ("x", "total")})


def test_outputs_of_the_last_stage_come_on_request(two: Replies) -> None:
    x = batch()["x"]
    wanted = [x.tolist(), [part.sum().item() for part in x.split(2)]], [False, False]
    empty: Any = ([], [])
    assert set(map(repr, two[0]["outputs"].values())) == {repr(empty)}
    found = two[1]["outputs"]
    assert found["step"] == found["evaluate"] == wanted
    assert found["neither"] == found["nothing"] == empty


@on(TWO)
def prints() -> list[str]:
    scheduler = make(
        Scale(with_loss),
        Scale(),
        stages=(AUX, {}),
        loss_fn=lambda x, y: (mean(x, y), {"b": 1, "a": 2}),
    )
    found = []
    for _ in range(2):
        weight_of(scheduler).grad = None
        result = scheduler.step(**batch(), outputs=True)
        loss = f"{result.loss:g}"
        found.append(repr(result).replace(loss, "LOSS"))
        assert list(result.metrics) == ["aux", "a", "b"]
    scheduler.close()
    return found


def test_a_result_prints_the_names_of_its_metrics(two: Replies) -> None:
    for reply, shapes in zip(two, ("[]", "[(4, 3)]"), strict=True):
        wanted = f"StepResult(loss LOSS, metrics ['aux', 'a', 'b'], outputs {shapes})"
        assert reply["prints"] == [wanted, wanted]


@on(TWO)
def outer() -> Any:
    """The gradient of an encoder ahead of the pipeline, whose loss has weights."""
    encoder, found = nn.Linear(2, WIDTH), {}
    x, y = torch.arange(8.0).reshape(4, 2) / 8, batch()["target"] - 1
    sums, weight = counted(encoder(x), y)
    (true,) = torch.autograd.grad(sums / weight, encoder.weight)
    scheduler = make(loss_fn=counted, loss_reduction="token_mean")
    for step in range(2):
        encoder.zero_grad()
        for stage in scheduler._stages.values():
            stage.module.zero_grad()
        scheduler.step(encoder(x), target=y)
        found[f"step {step}"] = error(encoder.weight.grad, true) if not rank() else 0.0
    with scheduler.sync.accumulate():
        refused = outcome(lambda: scheduler.step(encoder(x), target=y))
    for stage in scheduler._stages.values():
        stage.module.zero_grad()
    scheduler.step(encoder(x), target=y)
    scheduler.close()
    return found, refused


def test_a_graph_of_the_callers_gets_the_gradient_of_the_mean(two: Replies) -> None:
    """It was that of the sum: too large by the total weight."""
    for at, reply in enumerate(two):
        found, refused = reply["outer"]
        assert wrong(found, rounding(ROWS * WIDTH)) == {}
        assert ("comes from a graph of yours" in refused) or at


class Counts(Scale):
    """Returns a tensor that it keeps and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Any:
        self.count[0] += 1
        return x * self.weight, self.count[0]


@on(TWO)
def changed_outputs() -> Any:
    scheduler = make(
        Scale(),
        Counts(),
        stages=({}, {"outputs": ("x", "count")}),
        loss_fn=lambda x, count, target: mean(x, target) + 0 * count.sum(),
    )
    outputs = scheduler.step(**batch(), outputs=True).outputs
    scheduler.close()
    return [out.tolist() for out in outputs[1:]]


def test_outputs_of_a_step_are_those_of_each_microbatch(two: Replies) -> None:
    """A tensor that the module keeps was the last microbatch's in all of them."""
    assert two[0]["changed_outputs"] == []
    assert two[1]["changed_outputs"] == [[1.0, 2.0]]


@on(TWO)
def predicts_first() -> Any:
    """An evaluation without a target, training with metrics, an evaluation with a target."""
    scheduler = make(loss_fn=lambda x, target: (mean(x, target), {"largest": x.max()}))
    scheduler.evaluate(batch()["x"])
    scheduler.step(**batch())
    found = outcome(lambda: sorted(scheduler.evaluate(**batch()).metrics))
    scheduler.close()
    return found


def test_metrics_may_come_after_an_evaluation_without_a_target(two: Replies) -> None:
    for reply in two:
        assert reply["predicts_first"] == "['largest']"
