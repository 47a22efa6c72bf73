"""Losses people have: metrics, weights, losses of stages, outputs; and what goes wrong with them.

Numbers under all schedules and placements are in tests/parity/test_losses.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology, schedules
from tests.support.gradients.cases import outcome, rank
from tests.support.pairwise import pairwise
from tests.support.pipeline.layers import one_stage_each
from tests.support.pipeline.scales import ELSEWHERE
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

WIDTH, ROWS, MICROBATCHES = 3, 4, 2
MOST = rounding(ROWS * WIDTH)
pytestmark = pytest.mark.ranks(2)


class Scale(nn.Module):
    """A stage of one weight; returns what a function makes of its product."""

    def __init__(self, function: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
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
    options = {"num_microbatches": MICROBATCHES, "loss_fn": mean, **options}
    return one_stage_each(*(modules or (Scale(), Scale())), **options)


def weighted(*modules: nn.Module) -> Scheduler:
    return make(*modules, loss_fn=counted, loss_reduction="token_mean")


def batch(rows: int = ROWS) -> dict[str, Any]:
    x = torch.arange(float(rows * WIDTH)).reshape(rows, WIDTH) / 4
    return {"x": x, "target": x.flip(0)}


def share() -> dict[str, Any]:
    """Returns this replica's part of a batch."""
    at = Topology.create(pipeline=2).coordinate("dp")
    return {name: value.chunk(2)[at] for name, value in batch(8).items()}


def weight_of(scheduler: Scheduler) -> nn.Parameter:
    (record,) = scheduler.sync.records()
    return scheduler.sync.parameter(record)


def gradient_of(scheduler: Scheduler) -> Any:
    gradient = weight_of(scheduler).grad
    return None if gradient is None else gradient.tolist()


def train(scheduler: Scheduler, values: Mapping[str, Any] | None = None, **options: Any) -> str:
    """Takes a step from gradients of None; returns the loss and the metrics, or the error."""
    weight_of(scheduler).grad = None

    def step() -> Any:
        result = scheduler.step(**(batch() if values is None else values), **options)
        return round(result.loss.item(), 4), result.metrics

    return outcome(step)


def test_names_of_metrics_that_change_are_an_error_on_all_ranks() -> None:
    metrics: dict[str, Any] = {"b": 1, "a": 2.5}
    with closing(make(loss_fn=lambda x, target: (mean(x, target), metrics))) as scheduler:
        assert train(scheduler).endswith("{'a': 2.5, 'b': 1.0})")
        for changed in ({"a": 1, "b": 2, "c": 3}, {}):
            metrics.clear()
            metrics |= changed
            said = train(scheduler)
            assert said.startswith("StepError")
            assert f"returned the metrics {[*changed]}, expected ['a', 'b']" in said
            assert (ELSEWHERE in said) == (rank() == 0)
        metrics |= {"a": 1, "b": 0}
        assert train(scheduler).endswith("{'a': 1.0, 'b': 0.0})")


@pytest.mark.ranks(4)
def test_metrics_and_weights_are_those_of_all_replicas() -> None:
    metrics = {f"metric {rank() % 2}": 1}
    with closing(make(loss_fn=lambda x, target: (mean(x, target), metrics))) as scheduler:
        said = train(scheduler, share())
    assert said.startswith("AgreementError")
    assert "the metrics of loss_fn" in said
    # Weights go with their reduction alone.
    with closing(weighted()) as scheduler:
        said = train(scheduler, share(), loss_divisor=3)
        assert "loss_divisor is 3, and with loss_reduction='token_mean'" in said
        assert "Error" not in train(scheduler, share())
    # If all is ignored the loss is nan and gradients are zero.
    logits = torch.ones(2, 3, requires_grad=True)
    F.cross_entropy(logits, torch.full((2,), -100)).backward()
    assert logits.grad is not None
    values = share()
    with closing(weighted()) as scheduler:
        assert train(scheduler, values | {"target": values["target"] - 1000}) == "(nan, {})"
        assert gradient_of(scheduler) == [0.0] * WIDTH == logits.grad[0].tolist()
        assert "nan" not in train(scheduler, values)


def test_an_evaluation_has_metrics_of_its_own() -> None:
    """Its names are learned from the first evaluation that computes a loss."""

    def loss(x: Tensor, target: Tensor) -> Any:
        name = "training" if torch.is_grad_enabled() else "evaluation"
        return mean(x, target), {name: 7, "rows": len(target)}

    values = batch()
    with closing(make(loss_fn=loss)) as scheduler:
        evaluated = {"evaluation": 7.0, "rows": 2.0}
        assert scheduler.evaluate(**values).metrics == evaluated
        trained = scheduler.step(**values)
        assert trained.metrics == {"training": 7.0, "rows": 2.0}
        assert "metrics ['rows', 'training'], outputs [" in repr(trained)
        untold = scheduler.evaluate(x=values["x"]).metrics
        assert repr(untold) == repr(dict.fromkeys(evaluated, math.nan))
        assert scheduler.evaluate(**values).metrics == evaluated


def test_evaluations_without_a_target_expect_the_names_of_training() -> None:
    values, loss = batch(), lambda x, y: (mean(x, y), {"a": 1})
    with closing(make(loss_fn=loss)) as scheduler:
        assert scheduler.evaluate(x=values["x"]).metrics == {}
        refused = outcome(lambda: scheduler.evaluate(**values).metrics)
        assert "expected [], which all ranks know from earlier" in refused
        assert "If the first evaluation has no target" in refused
        # Training may come in between.
        train(scheduler)
        assert scheduler.evaluate(**values).metrics == {"a": 1.0}
    with closing(make(loss_fn=loss)) as scheduler:
        scheduler.step(**values)
        assert repr(scheduler.evaluate(x=values["x"]).metrics) == "{'a': nan}"
        assert scheduler.evaluate(**values).metrics == {"a": 1.0}


def _fails(_: Tensor) -> Tensor:
    raise ValueError("enough")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("where", range(4))
def test_steps_after_a_failed_one_have_the_right_weights(where: int) -> None:
    """The step of a failed rank must send a weight, too: the next steps are right then."""
    module, values = Scale(), share()
    missing = {} if rank() == where else values
    with closing(weighted(module, module)) as scheduler:
        assert "StepError" in train(scheduler, missing)  # it would have learned
        before = train(scheduler, values)
        assert "Error" not in before
        function, module.function = module.function, _fails if rank() == where else module.function
        assert "enough" in train(scheduler, values)
        module.function = function
        assert "StepError" in train(scheduler, missing)
        assert train(scheduler, values) == before


def test_left_over_and_accumulated_gradients_have_the_right_weights() -> None:
    """It would be divided too, unless it is zero."""
    with closing(weighted()) as scheduler:
        weight, step = weight_of(scheduler), partial(scheduler.step, **batch())
        assert "Error" not in train(scheduler)
        said = outcome(step)
        assert "has a gradient already, and the divisor of this step is known only" in said
        weight.grad = torch.ones(WIDTH) if rank() == 0 else None
        assert "has a gradient already" in outcome(step)
        gradients = []
        for weight.grad in (torch.zeros(WIDTH), None):
            step()
            gradients.append(gradient_of(scheduler))
    assert gradients[0] == gradients[1]
    # Accumulated weights are those of the accumulated gradients. An accumulated batch that is
    # dropped counts no more, and an evaluation does not count.
    found = []
    with closing(weighted()) as scheduler:
        for drops, evaluates in ((False, False), (True, False), (False, True)):
            weight_of(scheduler).grad = None
            if drops:
                with scheduler.sync.accumulate():
                    scheduler.step(**batch())
                scheduler.sync.drop_gradients()
            with scheduler.sync.accumulate():
                scheduler.step(**batch())
            if evaluates:
                scheduler.evaluate(**batch())
            scheduler.step(**batch())
            found.append(gradient_of(scheduler))
    assert found[0] == found[1] == found[2] is not None


def over_labels(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits, target, reduction="sum"), (target != -100).sum()


CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 1.7])
# A loss of one process, and that of a Scheduler if it is another one.
JOINED: dict[str, tuple[Any, Any]] = {
    "rows": (F.mse_loss, None),
    "labels": (nn.CrossEntropyLoss(), None),
    "classes": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), None),
    "sums": (nn.CrossEntropyLoss(), over_labels),
}


@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        *(pytest.param("sums", verb, marks=pytest.mark.ranks(4)) for verb in ("step", "evaluate")),
        *((kind, "evaluate") for kind in ("rows", "labels", "classes")),
    ],
)
def test_losses_of_batches_of_other_sizes_join_by_their_weights(kind: str, verb: str) -> None:
    """Their mean is not the loss of one process: labels that are ignored are spread unevenly."""
    torch.manual_seed(0)
    module, rows = nn.Linear(WIDTH, WIDTH), torch.randn(24, WIDTH)
    targets = torch.randn(24, WIDTH) if kind == "rows" else torch.randint(WIDTH, (24,))
    if kind != "rows":
        targets[2:9] = targets[13:15] = -100
    loss_of_all, loss_fn = JOINED[kind]
    expected = loss_of_all(module(module(rows)), targets).item()
    topology = Topology.create(pipeline=2)
    at, number = topology.coordinate("dp"), topology.size("dp")
    batches = [
        {"x": x.chunk(number)[at], "target": y.chunk(number)[at]}
        for x, y in zip(rows.split([4, 12, 8]), targets.split([4, 12, 8]), strict=True)
    ]
    stages = [copy.deepcopy(module) for _ in range(2)]
    options = {"loss_fn": loss_fn or loss_of_all}
    options |= {"loss_reduction": "token_mean"} if kind == "sums" else {}
    with closing(make(*stages, **options)) as scheduler:
        call = getattr(scheduler, verb)
        with scheduler.sync.accumulate() if verb == "step" else nullcontext():
            results = [call(**each) for each in batches[:-1]]
        results.append(call(**batches[-1]))
    if kind == "sums":
        weights = [result.weight.item() for result in results]
        assert weights == [(y != -100).sum().item() / 2 for y in targets.split([4, 12, 8])]
    joined = sum(r.loss * r.weight for r in results) / sum(r.weight for r in results)
    most = rounding(24 * WIDTH) * expected
    assert float(joined) == pytest.approx(expected, abs=most)
    assert abs(sum(r.loss.item() for r in results) / 3 - expected) > 10 * most


def test_a_weight_is_of_rows_or_what_the_caller_divides_by() -> None:
    with closing(make()) as scheduler:
        results = [scheduler.step(**batch()), scheduler.evaluate(**batch(), num_microbatches=4)]
        divided = scheduler.step(**batch(), loss_divisor=2.5)
    assert [r.weight.item() for r in (*results, divided)] == [ROWS, ROWS, 2.5]


class Head(nn.Module):
    """A stage with a loss alone, as a head for another token is; its matrix waits in a split."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).square().sum()
        return loss


def four_stages() -> list[nn.Module]:
    """Stages of which the second one makes a loss alone; the third takes what the first made."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), Head(), nn.Linear(WIDTH, WIDTH), Scale()]


def losses_of_one_process(stages: list[nn.Module], reduction: str) -> tuple[Tensor, Tensor]:
    """Returns the loss, and the part of it that the second stage makes."""
    values, rows = batch(), ROWS // MICROBATCHES
    hidden = stages[0](values["x"])
    out = stages[3](stages[2](hidden))
    extra = torch.stack([stages[1](part) for part in hidden.split(rows)]).sum()
    loss, number = counted(out, values["target"])
    if reduction == "mean":
        loss, number = mean(out, values["target"]), torch.tensor(1)
        extra = extra / MICROBATCHES
    return (loss + extra) / number, extra / number


@pytest.mark.parametrize(
    ("schedule", "loss_reduction", "recompute"),
    pairwise(("interleaved-1f1b", "zbv"), ("mean", "token_mean"), (False, True)),
)
def test_a_stage_with_a_loss_alone_trains_whole_split_and_recomputed(
    schedule: str, loss_reduction: str, recompute: bool
) -> None:
    own, true = four_stages(), four_stages()
    built = schedules.build(schedule, num_ranks=2, num_microbatches=MICROBATCHES)
    here = Topology.create(pipeline=2).with_stages(built.stage_to_rank).local_stages
    head: Any = {1: {"outputs": (), "losses": ("next",)}}
    scheduler = Scheduler(
        [Stage(own[i], i, recompute=recompute, **head.get(i, {})) for i in here],
        Topology.create(pipeline=2),
        schedule=built,
        loss_fn=mean if loss_reduction == "mean" else counted,
        loss_reduction=loss_reduction,
    )
    for verb in ("step", "step", "evaluate"):
        result = getattr(scheduler, verb)(**batch())
        loss, extra = losses_of_one_process(true, loss_reduction)
        assert error(result.loss, loss.detach()) <= MOST
        assert abs(result.metrics["next"] / extra.item() - 1) <= MOST
        if verb == "step":
            loss.backward()
            for i in here:
                for p, q in zip(own[i].parameters(), true[i].parameters(), strict=True):
                    assert error(p.grad, q.grad) <= MOST
            for module in (*own, *true):
                module.zero_grad()
    scheduler.close()


def with_loss(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.square().sum() / 8


def loss_of_stage() -> float:
    """Returns the sum of what `with_loss` makes of the microbatches."""
    return sum(with_loss(x)[1].item() for x in batch()["x"].split(2))


AUX: dict[str, Any] = {"losses": ("aux",)}


def test_a_stage_returns_its_losses_and_a_divisor_divides_them() -> None:
    """Losses of one name are summed over stages; one that is detached counts in the loss alone."""

    def trained(function: Callable[[Tensor], Any], options: Any = AUX) -> tuple[str, Any]:
        with closing(make(*[Scale(function)] * 2, of_stage=(options, options))) as scheduler:
            return train(scheduler), gradient_of(scheduler)

    said, gradient = trained(with_loss)
    assert said.endswith(f"{{'aux': {2 * loss_of_stage() / MICROBATCHES}}})")
    ways: list[Callable[[Tensor], Any]] = [
        lambda x: list(with_loss(x)),
        lambda x: {"aux": with_loss(x)[1], "other": None, "x": x},
        lambda x: (x, with_loss(x)[1].reshape(1, 1)),
    ]
    for way in ways:
        assert trained(way) == (said, gradient)
    _, without = trained(lambda x: x, {})
    assert trained(lambda x: (x, with_loss(x)[1].detach())) == (said, without)
    assert without != gradient
    # A divisor divides losses of stages too. The rank of a stage with a loss needs the divisor,
    # too; then all is divided by it.
    with closing(make(Scale(with_loss), Scale(), of_stage=(AUX, {}))) as scheduler:
        assert train(scheduler, loss_divisor=8).endswith(f"{{'aux': {loss_of_stage() / 8}}})")
    with closing(make(Scale(with_loss), Scale(), of_stage=(AUX, {}))) as scheduler:
        options: Any = {"loss_divisor": 8} if rank() == 1 else {}
        said = train(scheduler, **options)
    assert said.startswith("AgreementError")
    assert "loss_divisor" in said


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_loss_may_be_all_that_gives_a_stage_its_gradient(schedule: str) -> None:
    """Nothing comes back to its outputs."""
    first = Scale(lambda x: (x.detach(), x.square().sum()))
    with closing(make(first, Scale(), of_stage=(AUX, {}), schedule=schedule)) as scheduler:
        for _ in range(2):
            train(scheduler)
        gradient = gradient_of(scheduler)
    if rank() == 0:
        assert gradient == (2 * batch()["x"].square().sum(0) / MICROBATCHES).tolist()
    else:
        assert gradient != [0.0] * WIDTH


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: (x, 1.0), "stage 0 returned ['Tensor', 'float'], expected a tensor for each"),
        (
            lambda x: (x, x),
            "returned 'aux' of shape (2, 3), expected one element",
        ),
    ],
)
def test_a_stage_that_does_not_return_its_losses_is_refused_on_all_ranks(
    function: Callable[[Tensor], Any], words: str
) -> None:
    with closing(make(Scale(function), Scale(), of_stage=(AUX, {}))) as scheduler:
        assert words in train(scheduler)


def test_outputs_come_on_request_of_each_microbatch() -> None:
    """In evaluation unless they are not wanted."""
    scheduler = make(
        Scale(),
        Scale(lambda x: (x, x.sum())),
        of_stage=({}, {"outputs": ("x", "total")}),
        loss_fn=lambda x, total, target: mean(x, target) + 0 * total,
    )
    values = batch()
    wanted: Any = [values["x"].tolist(), [part.sum().item() for part in values["x"].split(2)]]
    for verb, options, comes in (
        ("step", {}, False),
        ("step", {"outputs": True}, True),
        ("evaluate", {}, True),
        ("evaluate", {"outputs": False}, False),
        ("step", {}, False),
    ):
        outputs = getattr(scheduler, verb)(**values, **options).outputs
        assert [out.tolist() for out in outputs] == (wanted if comes and rank() else [])
        assert [out for out in outputs if out.requires_grad] == []
        weight_of(scheduler).grad = None
    scheduler.close()
    # Outputs of a step are those of each microbatch. A tensor that the module keeps was the last
    # microbatch's in all of them.
    number = torch.zeros(1)
    scheduler = make(
        Scale(),
        Scale(lambda x: (x, number.add_(1))),
        of_stage=({}, {"outputs": ("x", "count")}),
        loss_fn=lambda x, count, target: mean(x, target) + 0 * count.sum(),
    )
    outputs = scheduler.step(**batch(), outputs=True).outputs
    scheduler.close()
    assert [out.tolist() for out in outputs[1:]] == ([[1.0, 2.0]] if rank() else [])


def test_a_loss_may_be_all_of_a_stage_or_come_of_the_callers_graph() -> None:
    """It was that of the sum: too large by the total weight."""
    encoder, scheduler = nn.Linear(2, WIDTH), weighted()
    x, y = torch.arange(8.0).reshape(4, 2) / 8, batch()["target"] - 1
    sums, weight = counted(encoder(x), y)
    (true,) = torch.autograd.grad(sums / weight, encoder.weight)
    for _ in range(2):
        encoder.zero_grad()
        weight_of(scheduler).grad = None
        scheduler.step(encoder(x), target=y)
        assert rank() or error(encoder.weight.grad, true) <= MOST
    with scheduler.sync.accumulate():
        refused = outcome(lambda: scheduler.step(encoder(x), target=y))
    assert ("comes from a graph of yours" in refused) or rank()
    weight_of(scheduler).grad = None
    scheduler.step(encoder(x), target=y)
    scheduler.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"of_stage": ({"losses": ("x",)}, {})}, "stage 0 has the outputs and losses ['x', 'x']"),
        ({"of_stage": ({"outputs": ()}, {})}, "stage 0 has the outputs []: expected one or more"),
        ({"of_stage": ({}, {"outputs": (), "losses": ("a",)})}, "stage 1 has the outputs []"),
        ({"loss_reduction": "tokens"}, "loss_reduction is 'tokens', expected one of ['mean'"),
    ],
)
def test_losses_of_stages_and_reductions_that_do_not_fit_are_refused(
    options: dict[str, Any], words: str
) -> None:
    assert words in outcome(partial(make, **options))
