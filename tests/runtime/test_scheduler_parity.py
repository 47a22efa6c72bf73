"""Scheduler against one process: losses and gradients, whatever the schedule and the wiring.

All cases of one number of ranks run in one spawn, and are asserted one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, find_shared
from pipegrad.testing import run_ranks
from tests.gradients.cases import on, outcome, replies
from tests.runtime.models import TOKENS, VOCAB, WIDTH, build
from tests.runtime.pipelines import loss_of
from tests.runtime.schedulers import (
    ROWS,
    Case,
    Part,
    Piece,
    Plain,
    Report,
    Wiring,
    cases,
    compare,
    cut,
    digest,
    error,
    most_buffers,
    named,
    run_case,
    run_each,
    run_wiring,
    share,
    topology,
    wrong,
)

MOST = 1e-6  # relative error of fp32, for sums in another order

# Every schedule.

WORLDS = {number: list(cases(number)) for number in (1, 2, 4)}
REPLICATED = [
    *(Case(schedule, 2, 4, data=2) for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "vee")),
    Case("1f1b", 2, 3, data=2),
    Case("1f1b", 1, 2, data=4),
]
UNSYNCED = Case("1f1b", 4, 4, handlers=("noop",))
WORLDS[4] += [*REPLICATED, UNSYNCED]
CASES = [case for world in WORLDS.values() for case in world if case is not UNSYNCED]


@functools.cache
def spawned(num_ranks: int) -> list[dict[str, Report]] | Exception:
    """Returns also a failure, which then is not run again for every case."""
    try:
        return run_ranks(run_each, num_ranks, run_case, WORLDS[num_ranks])
    except Exception as error:  # noqa: BLE001 - raised by trained
        return error


def trained(case: Case) -> list[Report]:
    """Returns what each rank found."""
    found = spawned(case.num_ranks)
    if isinstance(found, Exception):
        raise found
    return [reports[str(case)] for reports in found]


every = pytest.mark.parametrize("case", CASES, ids=str)


@every
def test_every_gradient_and_the_loss_are_those_of_one_process(case: Case) -> None:
    reports = trained(case)

    parameters = dict(build("tied").named_parameters(remove_duplicate=False))
    names = {f"step {step} {name}" for step in range(2) for name in (*parameters, "loss")}
    assert {name for report in reports for name in report.errors} == names
    for at, report in enumerate(reports):
        assert wrong(report.errors, MOST) == {}, f"{case}, rank {at}"


@every
def test_the_loss_is_the_same_on_all_ranks(case: Case) -> None:
    losses = {tuple(report.losses) for report in trained(case)}

    assert len(losses) == 1, case
    first, second = losses.pop()
    assert first != second, "a step that was not run again would not show"


@every
def test_tied_gradients_have_the_same_bits_wherever_they_are(case: Case) -> None:
    reports = trained(case)

    same = case.schedule == "vee" or case.pipeline == 1  # rank of the first and of the last stage
    for step in range(2):
        holders = [at for at, report in enumerate(reports) if report.bits[step]]
        assert len(holders) == case.data * (1 if same else 2)
        digests = set().union(*(report.bits[step] for report in reports))
        assert len(digests) == 1, f"{case}, step {step}: they differ"
        assert digests != {"None"}


@every
def test_no_more_buffers_are_made_than_proven(case: Case) -> None:
    for at, report in enumerate(trained(case)):
        assert report.buffers[-1] <= report.most_buffers, f"{case}, rank {at}"
        if case.pipeline > 1:
            assert report.buffers[-1] > 0


def test_without_a_handler_ties_are_wrong() -> None:
    """A control: these comparisons can fail."""
    reports = trained(UNSYNCED)

    found = {name for report in reports for name in wrong(report.errors, 0.01)}
    assert found == {
        f"step {step} {name}" for step in range(2) for name in ("0.weight", "7.weight")
    }
    assert len(set().union(*(report.bits[1] for report in reports))) == 2


# Wiring.

wirings: list[Wiring] = []
Parts = Callable[[], list[Part]]


def wired(*placements: Sequence[int], **options: Any) -> Callable[[Parts], Parts]:
    """Makes a function that returns stages a case of each of these placements."""

    def add(parts: Parts) -> Parts:
        name = parts.__name__
        wirings.extend(Wiring(name, parts, tuple(p), **options) for p in placements)
        return parts

    return add


def block() -> Piece:
    return Piece(lambda m, x: x + torch.tanh(m.linear(x)))


@wired((0, 1))
def several_tensors() -> list[Part]:
    return [
        (Piece(lambda m, x: (m.linear(x), x.sin(), m.linear(x)[:, 0])), "x", "a b c"),
        (Piece(lambda m, a, b, c: m.linear(a * b) + c[:, None]), "a b c", "x"),
    ]


@wired((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 1, 1), (0, 0, 0, 1), (0,) * 4)
def skips() -> list[Part]:
    """A value for three stages, and its gradients back: wherever those are."""
    return [
        (Piece(lambda m, x: (m.linear(x), x.cos() * m.linear(x))), "x", "x skip"),
        (Piece(lambda m, x, skip: (m.linear(x) + skip, x * 2)), "x skip", "x other"),
        (Piece(lambda m, x, skip: m.linear(x) * skip.sigmoid()), "x skip", "x"),
        (Piece(lambda m, x, skip, other: m.linear(x) + skip + other), "x skip other", "x"),
    ]


class Masked(Piece):
    """Takes a mask by keyword alone; behind it what passes whole."""

    keywords = ("attention_mask", "scale", "nothing")

    def __init__(self) -> None:
        super().__init__(lambda *_: None)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        *,
        attention_mask: Tensor,
        scale: float,
        nothing: object,
    ) -> Tensor:
        assert type(scale) is float
        assert nothing is None
        attention = (hidden @ hidden.mT * scale).masked_fill(~attention_mask[:, None], -1e9)
        attended: Tensor = self.linear(attention.softmax(-1) @ hidden)
        return hidden + attended


def masks(rows: int) -> dict[str, object]:
    mask = torch.rand(rows, TOKENS) < 0.7
    mask[:, 0] = True
    return {"attention_mask": mask, "scale": 0.3, "nothing": None, "whole": torch.tensor(2.0)}


@wired((0, 1, 2, 3), (0, 1, 1, 0), given=masks)
def named_inputs_of_middle_stages() -> list[Part]:
    return [
        (block(), "x", "x"),
        (Masked(), "x attention_mask scale nothing", "x"),
        (Masked(), "scale attention_mask x nothing", "x"),
        (Piece(lambda m, whole, x: m.linear(x) * whole), "whole x", "x"),
    ]


def tokens(rows: int) -> dict[str, object]:
    return {"x": torch.randint(VOCAB, (rows, TOKENS))}


@wired((0, 1, 2), (0, 1, 0), (0, 1, 1), given=tokens)
def integers_and_bools() -> list[Part]:
    """A stage that only sends what has no gradient, and one that sends both."""

    def first(m: Piece, x: Tensor) -> tuple[Tensor, ...]:
        return m.table[x], (x + 1) % VOCAB, x > VOCAB // 2  # type: ignore[index]

    def second(m: Piece, x: Tensor, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return (m.linear(x) + m.table[ids]) * keep[..., None], ids * 3 % VOCAB  # type: ignore[index]

    return [
        (Piece(first, table=(VOCAB, WIDTH)), "x", "x ids keep"),
        (Piece(second, table=(VOCAB, WIDTH)), "x ids keep", "x ids"),
        (
            Piece(
                lambda m, x, ids, keep: m.linear(x) + m.table[ids] * ~keep[..., None],
                table=(VOCAB, WIDTH),
            ),
            "x ids keep",
            "x",
        ),
    ]


@wired((0, 1, 2), given=tokens)
def nothing_but_integers() -> list[Part]:
    return [
        (Plain(lambda x: (x + 1) % VOCAB), "x", "x"),
        (Piece(lambda m, x: m.table[x], table=(VOCAB, WIDTH)), "x", "x"),
        (block(), "x", "x"),
    ]


@wired((0, 1, 2), (0, 1, 0), (0, 0, 1))
def frozen_first() -> list[Part]:
    return [
        (block().requires_grad_(requires_grad=False), "x", "x"),
        (block(), "x", "x"),
        (block(), "x", "x"),
    ]


@wired((0, 1, 2), (0, 1, 0))
def frozen_middle() -> list[Part]:
    return [
        (block(), "x", "x"),
        (block().requires_grad_(requires_grad=False), "x", "x"),
        (block(), "x", "x"),
    ]


@wired((0, 1, 2), (0, 1, 0))
def frozen_but_the_last() -> list[Part]:
    return [
        (block().requires_grad_(requires_grad=False), "x", "x"),
        (block().requires_grad_(requires_grad=False), "x", "x"),
        (block(), "x", "x"),
    ]


@wired((0, 1, 2), (0, 1, 0))
def frozen_last() -> list[Part]:
    return [
        (block(), "x", "x"),
        (block(), "x", "x"),
        (block().requires_grad_(requires_grad=False), "x", "x"),
    ]


@wired((0, 1, 2), (0, 1, 1), (0, 0, 1), (0, 0, 0), lenient=True)
def unused_by_consumers() -> list[Part]:
    """One value nobody computes with, one of two consumers does; one for one microbatch alone."""
    return [
        (Piece(lambda m, x: (m.linear(x), x * m.p, x * m.q), p=(), q=()), "x", "x none half"),
        (Piece(lambda m, x, none, half: m.linear(x)), "x none half", "x"),
        (Piece(lambda m, x, none, half: m.linear(x) * half), "x none half", "x"),
    ]


VIEWS: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x,
    lambda x: x.view_as(x),
    lambda x: x.transpose(1, 2),
    lambda x: x.transpose(1, 2).contiguous().flatten(1),
    lambda x: x.view(len(x), WIDTH, TOKENS).mT,
)


@wired((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 0, 0, 0), first="F")
@wired((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 0, 0, 0))
def views() -> list[Part]:
    """What leaves is what came in, in a buffer that is used again; and so back."""
    return [
        (Piece(lambda m, x: m.linear(x).mT), "x", "x"),
        (Plain(VIEWS[1]), "x", "x"),
        (Plain(VIEWS[2]), "x", "x"),
        (Plain(VIEWS[0]), "x", "x"),
    ]


@wired((0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1))
def views_that_others_take_too() -> list[Part]:
    return [
        (block(), "x", "x"),
        (Plain(lambda x: (x, x.view_as(x), x[:, 1:])), "x", "x y z"),
        (Plain(lambda x, y: (x.mT, y)), "x y", "x y"),
        (Piece(lambda m, x, y, z: m.linear(x.mT) + y * z.mean()), "x y z", "x"),
    ]


@wired((0, 1, 2), (0, 1, 0))
def outputs_in_a_mapping_and_in_sequences() -> list[Part]:
    return [
        (Piece(lambda m, x: {"b": m.linear(x), "more": None, "a": x.sin()}), "x", "a b"),
        (Piece(lambda m, a, b: [m.linear(a) - b]), "a b", "x"),
        (Piece(lambda m, x: (m.linear(x),)), "x", "x"),
    ]


@wired((0, 1, 2), (0, 1, 0))
def a_parameter_that_is_handed_on() -> list[Part]:
    return [
        (Piece(lambda m, x: (m.linear(x), m.p, m.p.view(WIDTH, 1)), p=(WIDTH,)), "x", "x p q"),
        (Piece(lambda m, x, p: m.linear(x) * p), "x p", "x"),
        (Piece(lambda m, x, p, q: m.linear(x) + p + x @ q), "x p q", "x"),
    ]


@wired((0, 1), (0, 0))
def scalars() -> list[Part]:
    return [
        (Piece(lambda m, x: (m.linear(x), m.linear(x).sum())), "x", "x total"),
        (Piece(lambda m, x, total: m.linear(x) * total), "x total", "x"),
    ]


def added(x: Tensor, p: Tensor) -> Tensor:
    """Returns a sum whose gradient, and that of p and that of x, torch leaves in one storage."""
    return (x.flatten() + p.flatten()).view(x.shape)


BATCH = ROWS, TOKENS, WIDTH


@wired((0, 1, 2), (0, 1, 0), options=(("handlers", ("noop",)),))
@wired((0, 1, 2), num_microbatches=1, options=(("handlers", ("noop",)),))
@wired((0, 1, 2), num_microbatches=1, options=(("reduce_dtype", torch.float64),))
def gradients_of_parameters_in_received_ones() -> list[Part]:
    """With one microbatch a parameter is final before its gradient can be copied."""
    return [
        (Piece(lambda m, x: x + m.p.view(x.shape), p=(ROWS * TOKENS * WIDTH,)), "x", "x"),
        (Piece(lambda m, x: added(x, m.p) + m.q.view(x.shape), p=BATCH, q=(160,)), "x", "x"),
        (Plain(lambda x: x * 2), "x", "x"),
    ]


class FromTheSecondOn(nn.Module):
    """Uses a parameter from the second microbatch of a step on."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(ROWS * TOKENS * WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 1.0 if self.calls % 6 == 1 else x + self.p.view(x.shape)


@wired((0, 1, 2), (0, 1, 0), first="F")
@wired((0, 1, 2), (0, 1, 0))
def a_parameter_that_the_first_microbatch_does_not_use() -> list[Part]:
    return [(block(), "x", "x"), (FromTheSecondOn(), "x", "x"), (Plain(lambda x: x * x), "x", "x")]


def square_of_sum() -> Piece:
    return Piece(lambda m, x: added(x, m.p) ** 2, p=BATCH)


@wired((0, 0), (0, 1), first="F")
def gradients_of_values_in_those_of_parameters() -> list[Part]:
    """The next microbatch adds to the parameter's, before the value's is read."""
    return [(block(), "x", "x"), (square_of_sum(), "x", "x")]


@wired((0, 0, 0), (0, 1, 1), (0, 1, 2))
def gradients_of_two_values_in_one_storage() -> list[Part]:
    """A stage before adds to one of them."""
    return [
        (Piece(lambda m, x: (m.linear(x), x * m.p), p=()), "x", "a b"),
        (Plain(torch.sin), "a", "c"),
        (Plain(lambda a, b, c: added(a, b) ** 2 * c), "a b c", "x"),
    ]


@wired((0, 0, 0, 1))
def gradients_of_two_values_in_one_storage_joined() -> list[Part]:
    """What another rank sends back is added to one of them."""
    return [
        (Piece(lambda m, x: (m.linear(x), x * m.p), p=()), "x", "a b"),
        (Plain(added), "a b", "c"),
        (Plain(lambda c: c * c), "c", "d"),
        (Plain(lambda d, a: d + a.sin()), "d a", "x"),
    ]


@wired((0, 1), (0, 0), loss=lambda loss, _: loss)
def losses_that_arrive() -> list[Part]:
    """The loss function hands on what a stage before the last has computed."""
    return [
        (Piece(lambda m, x: m.linear(x).square().mean()), "x", "x"),
        (Plain(lambda x: x), "x", "x"),
    ]


HUNG = {number: [w for w in wirings if w.num_ranks == number] for number in (1, 2, 3, 4)}


@functools.cache
def ran(num_ranks: int) -> list[dict[str, Report]] | Exception:
    try:
        return run_ranks(run_wirings, num_ranks, num_ranks)
    except Exception as error:  # noqa: BLE001 - raised by hung_together
        return error


def run_wirings(num_ranks: int) -> dict[str, Report]:
    return run_each(run_wiring, HUNG[num_ranks])


def hung_together(wiring: Wiring) -> list[Report]:
    """Returns what each rank found."""
    found = ran(wiring.num_ranks)
    if isinstance(found, Exception):
        raise found
    return [reports[str(wiring)] for reports in found]


every_wiring = pytest.mark.parametrize("wiring", wirings, ids=str)


@every_wiring
def test_a_wiring_computes_what_one_process_does(wiring: Wiring) -> None:
    reports = hung_together(wiring)

    for at, report in enumerate(reports):
        assert wrong(report.errors, MOST) == {}, f"{wiring}, rank {at}"
    parameters = [
        f"{stage}.{name}"
        for stage, (module, _, _) in enumerate(wiring.parts())
        for name, _ in module.named_parameters()
    ]
    steps = {f"step {step} {name}" for step in range(3) for name in (*parameters, "loss")}
    evaluations = {f"evaluation {step} {name}" for step in range(2) for name in ("loss", "out")}
    assert {name for report in reports for name in report.errors} == steps | evaluations


@every_wiring
def test_a_wiring_makes_no_more_buffers_in_later_steps(wiring: Wiring) -> None:
    for at, report in enumerate(hung_together(wiring)):
        learning, second, third = report.buffers
        assert learning <= second == third, f"{wiring}, rank {at}"


def crossing(name: str, places: Sequence[int]) -> set[Any]:
    (wiring,) = (w for w in wirings if (w.name, w.places) == (name, tuple(places)))
    (sent,) = {tuple(report.sent) for report in hung_together(wiring)}
    assert len(set(sent)) == len(sent)
    return set(sent)


def test_a_value_crosses_once_to_a_rank_however_many_of_its_stages_take_it() -> None:
    there = {("skip", "F", 0, 1), ("x", "F", 0, 1)}

    assert crossing("skips", (0, 1, 1, 1)) == there | {(n, "B", 1, 0) for n, *_ in there}
    assert crossing("skips", (0, 0, 0, 0)) == set()


def test_a_value_goes_straight_to_each_rank_that_takes_it() -> None:
    found = crossing("skips", (0, 1, 2, 3))

    forth = {(name, source, target) for name, kind, source, target in found if kind == "F"}
    back = {(name, target, source) for name, kind, source, target in found if kind == "B"}
    assert forth == back
    assert {target for name, source, target in forth if (name, source) == ("skip", 0)} == {1, 2, 3}
    assert {target for name, source, target in forth if name == "other"} == {3}
    assert {n for n, *_ in crossing("skips", (0, 1, 1, 0))} == {"x", "skip", "other"}


def test_what_has_no_gradient_sends_none_back() -> None:
    def back(name: str) -> set[Any]:
        return {(n, s, t) for n, kind, s, t in crossing(name, (0, 1, 2)) if kind == "B"}

    assert back("integers_and_bools") == {("x", 1, 0), ("x", 2, 1)}
    assert back("nothing_but_integers") == back("frozen_first") == {("x", 2, 1)}
    assert back("frozen_middle") == back("frozen_last") == {("x", 1, 0), ("x", 2, 1)}
    assert back("frozen_but_the_last") == set()


# What else a step is told, and what happens around it.

PIPELINE_2: list[Callable[[], Any]] = []
two = replies(2, PIPELINE_2)
DATA_2: list[Callable[[], Any]] = []
four = replies(4, DATA_2)
Replies = list[dict[str, Any]]


def trainer(
    model: nn.Sequential, num_microbatches: int = 4, *, schedule: Any = "1f1b", **options: Any
) -> tuple[Scheduler, list[Stage]]:
    """Returns a Scheduler over two ranks, a stage on each, of a model of eight layers."""
    at = topology(2)
    stages = cut(model, (0, 1), at)
    options.setdefault("loss_fn", loss_of)
    scheduler = Scheduler(
        stages,
        at,
        schedule=schedule,
        num_microbatches=num_microbatches,
        shared=find_shared(model),
        **options,
    )
    return scheduler, stages


def batch(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (2, rows, TOKENS), generator=generator)
    return tokens[0], tokens[1]


def sum_of_losses(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


@on(DATA_2)
def sums_over_tokens() -> dict[str, float]:
    """Half of the targets of one replica are ignored: a mean of means would be wrong."""
    model, true = build("tied"), build("tied")
    scheduler, stages = trainer(model, loss_fn=sum_of_losses)
    errors = dict[str, float]()
    for step in range(2):
        tokens, target = batch(step, rows=16)
        target[:6, 1:] = -100
        number = int((target >= 0).sum())
        at = topology(2)
        result = scheduler.step(
            share(tokens, at), target=share(target, at), loss_divisor=number / 2
        )
        loss = loss_of(true(tokens), target)
        loss.backward()
        errors[f"step {step} loss"] = error(result.loss, loss.detach())
        compare(errors, step, named(stages), true)
    scheduler.close()
    return errors


def test_losses_that_are_sums_are_divided_by_what_they_count(four: Replies) -> None:
    for at, found in enumerate(four):
        assert len(found["sums_over_tokens"]) > 2 * 12
        assert wrong(found["sums_over_tokens"], MOST) == {}, f"rank {at}"


def with_dropout() -> nn.Sequential:
    """Random in training, and some of its parts are in evaluation mode all the time."""
    model = build("tied")
    for layer in (2, 5):
        model[layer] = nn.Sequential(model[layer], nn.Dropout(0.5), nn.Dropout(0.5).eval())
    return model


def flags(model: nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


@on(PIPELINE_2)
def evaluation() -> dict[str, Any]:
    model, true, errors = with_dropout(), with_dropout().eval(), dict[str, float]()
    scheduler, stages = trainer(model)
    before = [flags(stage.module) for stage in stages]
    outputs = list[Tensor]()

    def evaluate(seed: int, *, rows: int = 12, told: bool = True) -> Tensor:
        tokens, target = batch(seed, rows)
        with torch.no_grad():
            out = true(tokens)
        result = scheduler.evaluate(tokens, target=target if told else None)
        outputs[:] = result.outputs
        if told:
            errors[f"loss {seed}"] = error(result.loss, loss_of(out, target))
        if result.outputs:
            errors[f"outputs {seed}"] = error(result.outputs[0], out)
        return result.loss

    evaluate(0)  # another size than in training, learned first
    tokens, target = batch(1)
    trained = scheduler.step(tokens, target=target).loss
    evaluate(2)
    scheduler.sync.clip_grad_norm_(float("inf"))
    gradients = {name: p.grad for name, p in named(stages).items()}
    bits = {name: digest(g) for name, g in gradients.items()}
    evaluate(3)
    untold = outcome(lambda: evaluate(4, told=False).item())
    kept = all(p.grad is gradients[name] for name, p in named(stages).items())
    after = {name: digest(p.grad) for name, p in named(stages).items()}
    with torch.no_grad():
        apart = error(trained, loss_of(true(tokens), target))
    scheduler.close()
    return {
        "errors": errors,
        "num outputs": len(outputs),
        "training is random": apart > 0.001,
        "flags kept": before == [flags(stage.module) for stage in stages],
        "flags differ": any(len(set(found)) == 2 for found in before),
        "gradients kept": kept and bits == after and "None" not in bits.values(),
        "untold": untold,
    }


def test_evaluation_has_the_loss_and_the_outputs_of_one_process(two: Replies) -> None:
    losses = {"loss 0", "loss 2", "loss 3"}
    first, last = (found["evaluation"]["errors"] for found in two)

    assert wrong(first, MOST) == wrong(last, MOST) == {}
    assert first.keys() == losses
    assert last.keys() - {"outputs 4"} == losses | {f"outputs {seed}" for seed in (0, 2, 3)}
    assert all(found["evaluation"]["training is random"] for found in two), "shows nothing"
    assert [found["evaluation"]["num outputs"] for found in two] == [0, 1]


def test_evaluation_leaves_gradients_and_training_flags(two: Replies) -> None:
    for found in two:
        assert found["evaluation"]["gradients kept"]
        assert found["evaluation"]["flags kept"]
        assert found["evaluation"]["flags differ"], "shows nothing"


def test_evaluation_without_a_target_has_no_loss(two: Replies) -> None:
    assert [found["evaluation"]["untold"] for found in two] == ["nan", "nan"]
    assert "outputs 4" in two[1]["evaluation"]["errors"]


@on(PIPELINE_2)
def accumulation() -> dict[str, float]:
    model, true, errors = build("tied"), build("tied"), dict[str, float]()
    scheduler, stages = trainer(model)
    for step in range(2):
        for part in range(3):
            tokens, target = batch(10 * step + part)
            if part < 2:
                with scheduler.sync.accumulate():
                    result = scheduler.step(tokens, target=target)
            else:
                result = scheduler.step(tokens, target=target)
            loss = loss_of(true(tokens), target)
            loss.backward()
            errors[f"step {step} loss {part}"] = error(result.loss, loss.detach())
        compare(errors, step, named(stages), true)
    scheduler.close()
    return errors


def halves(true: nn.Module, step: int, num_microbatches: int = 4) -> Tensor:
    """Runs one process with the microbatches of a step; returns the loss."""
    tokens, target = batch(step)
    total = torch.zeros(())
    for x, y in zip(tokens.chunk(num_microbatches), target.chunk(num_microbatches), strict=True):
        loss = loss_of(true(x), y) / num_microbatches
        loss.backward()
        total += loss.detach()
    return total


@on(PIPELINE_2)
def autocast() -> dict[str, Any]:
    model, true, errors = build("tied"), build("tied"), dict[str, float]()
    scheduler, stages = trainer(model)
    for step in range(2):
        tokens, target = batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = scheduler.step(tokens, target=target)
            loss = halves(true, step)
        errors[f"step {step} loss"] = error(result.loss, loss)
        compare(errors, step, named(stages), true)
    tokens, target = batch(0)
    scheduler.step(tokens, target=target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halves(true, 0)
    apart = dict[str, float]()
    compare(apart, 0, named(stages), true)
    scheduler.close()
    return {"errors": errors, "apart": max(apart.values())}


@on(PIPELINE_2)
def norms_of_batches() -> dict[str, Any]:
    """Batch normalization has seen each microbatch once."""

    def make() -> nn.Sequential:
        model = build("tied")
        for layer in (2, 6):
            model[layer] = nn.Sequential(model[layer], nn.BatchNorm1d(TOKENS))
        return model

    model, true, errors = make(), make(), dict[str, float]()
    scheduler, stages = trainer(model)
    counts = []
    for step in range(3):
        tokens, target = batch(step)
        result = scheduler.step(tokens, target=target)
        errors[f"step {step} loss"] = error(result.loss, halves(true, step))
        compare(errors, step, named(stages), true)
        scheduler.evaluate(tokens, target=target)
        buffers = {n: b for stage in stages for n, b in stage.module.named_buffers()}
        counts += [int(b) for name, b in buffers.items() if "num_batches" in name]
        truth = dict(true.named_buffers())
        for name, buffer in buffers.items():
            errors[f"step {step} {name}"] = error(buffer.float(), truth[name].float())
    scheduler.close()
    return {"errors": errors, "counts": counts}


@on(PIPELINE_2)
def clipping() -> dict[str, Any]:
    model, true, errors = build("tied"), build("tied"), dict[str, float]()
    scheduler, stages = trainer(model)
    norms = []
    for step in range(2):
        tokens, target = batch(step)
        scheduler.step(tokens, target=target)
        loss_of(true(tokens), target).backward()
        norms.append(scheduler.sync.clip_grad_norm_(0.1))
        true_norm = nn.utils.clip_grad_norm_(true.parameters(), 0.1)
        assert true_norm > 0.1
        errors[f"step {step} norm"] = error(norms[-1], true_norm)
        compare(errors, step, named(stages), true)
    scheduler.close()
    return {"errors": errors, "norms": [digest(norm) for norm in norms]}


@on(PIPELINE_2)
def adamw() -> dict[str, Any]:
    """Five steps, evaluation between them, and the loss gets less."""
    model, true, errors = build("tied"), build("tied"), dict[str, float]()
    scheduler, stages = trainer(model, schedule="eager-1f1b")
    optimizers = [
        torch.optim.AdamW(dict.fromkeys(parameters), lr=1e-2)
        for parameters in (named(stages).values(), true.parameters())
    ]
    losses, (tokens, target) = list[float](), batch(0)
    for step in range(5):
        result = scheduler.step(tokens, target=target)
        loss = loss_of(true(tokens), target)
        loss.backward()
        losses.append(result.loss.item())
        errors[f"step {step} loss"] = error(result.loss, loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    theirs = dict(true.named_parameters(remove_duplicate=False))
    for name, parameter in named(stages).items():
        errors[name] = error(parameter.detach(), theirs[name].detach())
    bits = [digest(p) for name, p in named(stages).items() if name in ("0.weight", "7.weight")]
    scheduler.sync.check_replicas()
    scheduler.close()
    return {"errors": errors, "losses": losses, "bits": bits}


@on(PIPELINE_2)
def doubles() -> dict[str, float]:
    """Three microbatches: a third is not exact, and in float32 far from it."""
    model, true, errors = build("tied").double(), build("tied").double(), dict[str, float]()
    scheduler, stages = trainer(model, 3)
    for step in range(2):
        tokens, target = batch(step, rows=6)
        scheduler.step(tokens, target=target)
        loss_of(true(tokens), target).backward()
        compare(errors, step, named(stages), true)
    scheduler.close()
    return errors


@on(PIPELINE_2)
def losses_of_one_dimension() -> str:
    scheduler, _ = trainer(build("tied"), loss_fn=lambda *a: loss_of(*a).reshape(1))
    tokens, target = batch(0)
    found = outcome(lambda: scheduler.step(tokens, target=target).loss.shape)
    scheduler.close()
    return found


def test_accumulated_steps_add_up(two: Replies) -> None:
    for at, found in enumerate(two):
        assert wrong(found["accumulation"], MOST) == {}, f"rank {at}"


def test_autocast_around_a_step_is_autocast_around_one_process(two: Replies) -> None:
    for at, found in enumerate(two):
        assert wrong(found["autocast"]["errors"], MOST) == {}, f"rank {at}"
        assert found["autocast"]["apart"] > 1e-3, "float32 is as good"


def test_batch_normalization_counts_the_microbatches_and_no_more(two: Replies) -> None:
    for at, found in enumerate(two):
        assert found["norms_of_batches"]["counts"] == [4, 8, 12], f"rank {at}"
        assert wrong(found["norms_of_batches"]["errors"], MOST) == {}, f"rank {at}"


def test_clipping_after_a_step_is_that_of_one_process(two: Replies) -> None:
    for at, found in enumerate(two):
        assert wrong(found["clipping"]["errors"], MOST) == {}, f"rank {at}"
    assert two[0]["clipping"]["norms"] == two[1]["clipping"]["norms"]


def test_five_steps_of_adamw_stay_with_one_process(two: Replies) -> None:
    for at, found in enumerate(two):
        # AdamW divides by the gradient: where that is tiny, so is what tells its rounding apart.
        assert wrong(found["adamw"]["errors"], 1e-4) == {}, f"rank {at}"
        assert found["adamw"]["losses"][-1] < 0.9 * found["adamw"]["losses"][0]
    assert two[0]["adamw"]["bits"] == two[1]["adamw"]["bits"]


def test_float64_is_not_divided_in_float32(two: Replies) -> None:
    for at, found in enumerate(two):
        assert wrong(found["doubles"], 1e-12) == {}, f"rank {at}"


def test_a_loss_of_one_element_may_have_a_dimension(two: Replies) -> None:
    assert [found["losses_of_one_dimension"] for found in two] == ["torch.Size([])"] * 2


@on(PIPELINE_2)
def buffers() -> list[tuple[int, int]]:
    """Steps of both kinds in turns."""
    found = []
    for schedule in ("gpipe", "1f1b", "eager-1f1b"):
        scheduler, stages = trainer(build("tied"), 8, schedule=schedule)
        for step in range(5):
            tokens, target = batch(step)
            scheduler.step(tokens, target=target)
            scheduler.evaluate(tokens, target=target)
            for parameter in named(stages).values():
                parameter.grad = None
            found.append((scheduler.receive_buffers, most_buffers(scheduler)))
        scheduler.close()
    return found


def test_buffers_are_made_once(two: Replies) -> None:
    for at, found in enumerate(two):
        told = found["buffers"]
        for start in range(0, 15, 5):
            (learning, most), *later = told[start : start + 5]
            assert 0 < learning <= most, f"rank {at}"
            assert later == [(later[0][0], most)] * 4, f"rank {at}"
            assert learning <= later[0][0] <= most, f"rank {at}"
