"""Codecs of hops: bytes as promised, failures that all ranks see, errors that are kept."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, codecs, measure_costs, simulate
from pipegrad.pipeline.codings import CODECS
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.codecs import Fails, Holds, RefusesOdd
from tests.support.pipeline.layers import counted, one_stage_each
from tests.support.ranked import gathered

RANKS, WIDTH, ROWS, MICROBATCHES = 3, 32, 2, 4
SHAPE, DOUBLE = (ROWS, WIDTH), torch.float64
INT8, TOPK = "activations int8, gradients int8", {"gradients": "topk"}
pytestmark = pytest.mark.ranks(RANKS)


def layer(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(rank())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Tanh())


def made(spec: Any, *, module: nn.Module | None = None, **options: Any) -> Scheduler:
    options |= {"loss_fn": lambda out, target: (out - target).float().square().mean()}
    modules = [module or layer()] * RANKS
    return one_stage_each(*modules, codecs=spec, **{"handlers": ["data-parallel"], **options})


def batch(seed: int = 0, rows: int = ROWS * MICROBATCHES) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, target


def gradients(scheduler: Scheduler) -> list[Tensor]:
    found = [scheduler.sync.parameter(r).grad for r in scheduler.sync.records()]
    return [gradient for gradient in found if gradient is not None]


def bits(scheduler: Scheduler) -> list[int]:
    return [x for g in gradients(scheduler) for x in g.reshape(-1).view(torch.int32).tolist()]


def train(
    scheduler: Scheduler,
    seed: int = 0,
    *,
    rows: int = ROWS * MICROBATCHES,
    spoilt: float = 0.0,
    **options: Any,
) -> list[int]:
    """Takes a step from gradients of None; returns the bits of this rank's gradients."""
    parameters = [scheduler.sync.parameter(record) for record in scheduler.sync.records()]
    for parameter in parameters:
        parameter.grad = None
    x, target = (t.to(parameters[0].dtype) for t in batch(seed, rows))
    target[ROWS, 3] += spoilt
    float(scheduler.step(x, target=target, **options).loss)
    return bits(scheduler)


def train_new(spec: Any, *seeds: int, **options: Any) -> list[list[int]]:
    """Returns what steps of a new Scheduler find."""
    with closing(made(spec, **options)) as scheduler:
        return [train(scheduler, seed) for seed in seeds]


def size(name: str | None) -> int:
    plain = ROWS * WIDTH * 4
    return plain if name is None else codecs.resolve(name).plugin.nbytes(SHAPE, torch.float32)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # For each rank what it sends to the next one, and to the one before.
        *((name, [[name], [name, name], [name]]) for name in ("bf16", "fp8", "int8")),
        ("topk", [[None], [None, "topk"], ["topk"]]),
        ({"activations": "int8", "gradients": "topk"}, [["int8"], ["int8", "topk"], ["topk"]]),
        ({"0-1": "int8"}, [["int8"], [None, "int8"], [None]]),
        ({"1-0": {"gradients": "bf16"}}, [[None], [None, "bf16"], [None]]),
        ({"1-2": None, (0, 1): "none"}, [[None], [None, None], [None]]),
    ],
    ids=str,
)
def test_messages_have_the_promised_bytes(spec: Any, expected: list[list[str | None]]) -> None:
    with closing(made(spec)) as scheduler:
        train(scheduler)
        with counted() as sent:
            train(scheduler)
    assert sorted(sent) == sorted([size(codec) for codec in expected[rank()]] * MICROBATCHES)


def test_what_is_not_of_floats_or_would_not_be_shorter_crosses_as_it_is() -> None:
    """Numbers of samples and masks cross with codecs beside values, and so do frozen stages'."""
    seen = []

    class First(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.sin(), (x[:, 0] > 0), torch.arange(len(x)), x[:, 0].mean()

    class Rest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor, ids: Tensor, scalar: Tensor) -> Any:
            seen.append((mask.tolist(), ids.tolist(), float(scalar)))
            return self.linear(x) * mask[:, None] + ids[:, None] + scalar

    inputs = ["x", "mask", "ids", "scalar"]
    rest = {"inputs": inputs, "outputs": ["x"]}
    names = [{"inputs": ["x"], "outputs": inputs}, rest, rest]
    module, (x, target) = Rest() if rank() else First(), batch()
    with closing(made("int8", module=module, of_stage=names, handlers=["noop"])) as scheduler:
        for _ in range(2):
            scheduler.step(x, target=target)
    parts = [part for _ in range(2) for part in x.chunk(MICROBATCHES)] if rank() else []
    assert seen == [
        ((p[:, 0] > 0).tolist(), list(range(ROWS)), float(p[:, 0].mean())) for p in parts
    ]


def test_errors_are_those_of_one_scheduler_and_shape_and_can_be_saved() -> None:
    alone = [train_new(spec, 0, 1, 2) for spec in ("int8", "topk")]
    with closing(made("int8")) as one, closing(made("topk")) as other:
        together = [[train(scheduler, seed) for scheduler in (one, other)] for seed in range(3)]
    assert alone == [list(column) for column in zip(*together, strict=True)]
    # A resumed scheduler adds the errors that were kept.
    whole = train_new("topk", 0, 1, 2, 3)
    with closing(made("topk")) as first:
        assert [train(first, seed) for seed in range(2)] == whole[:2]
        x, target = batch(9)
        first.evaluate(x, target=target)
        state = first.state_dict()
    kept = state.get("handlers", {}).get(CODECS, {})
    links = [[], [0], [1]][rank()]
    assert sorted(kept.get("errors", {})) == [
        f"{link} of {m}" for link in links for m in range(MICROBATCHES)
    ]
    with closing(made("topk")) as second:
        second.load_state_dict(state)
        assert [train(second, seed) for seed in (2, 3)] == whole[2:]
        for refused, words in (
            ({"plan": "of another", "handlers": {}}, "of another plan"),
            ({**kept, "errors": {"x": 1}}, "'x' is no error of a codec"),
            ({**kept, "cut": "another"}, "the state of codecs is of another cut"),
        ):
            wrong = {**state, "handlers": {CODECS: refused}} if rank() else state
            given = refused if "plan" in refused else wrong
            assert words in outcome(partial(second.load_state_dict, given))
        assert second.state_dict() == {}
    # The last stage's own gradients see no codec of gradients.
    assert (train_new("topk", 2, 3) == whole[2:]) is (rank() == 2)
    with closing(made(None)) as plain:
        train(plain)
        assert plain.state_dict() == {}
    # Errors of another shape are dropped. Batches of other sizes in between: their errors do not
    # fit, and nothing of them is added.
    (expected,) = train_new("topk", 8)
    with closing(made("topk")) as scheduler:
        found = [train(scheduler, rows, rows=rows) for rows in (8, 12, 8, 4, 8)]
        train(scheduler, 1, rows=12, num_microbatches=6)
    assert [each == expected for each in found] == [True, False, True, False, True]


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8", "topk"])
def test_an_overflow_reaches_all_ranks_and_only_its_own_step(name: str) -> None:
    for odd in (float("nan"), float("inf")):
        with closing(made({"gradients": name})) as scheduler:
            for spoilt in (0.0, odd, 0.0):
                train(scheduler, spoilt=spoilt)
                is_finite = all(bool(g.isfinite().all()) for g in gradients(scheduler))
                assert is_finite is (spoilt == 0.0)


def test_what_does_not_fit_is_refused_in_words_on_all_ranks() -> None:
    specs: list[tuple[Any, str]] = [
        ("int8" if rank() else "fp8", "ranks disagree on codecs"),
        ({"name": "topk", "fraction": 0.1 * (1 + rank())}, "ranks disagree on codecs"),
        ({"0-3": "int8"}, "the hops 0-3, which nothing crosses: expected pairs of pipeline ranks"),
        ({"activations": "topk"}, "given for activations, and is for gradients alone"),
    ]
    found = [outcome(partial(made, spec)) for spec, _ in specs]
    assert [words for said, (_, words) in zip(found, specs, strict=True) if words not in said] == []
    assert gathered(found) == [found] * RANKS


@pytest.mark.parametrize("carried", ["activations", "gradients"])
def test_a_codec_may_refuse_a_shape_of_a_later_step(carried: str) -> None:
    """It was asked for the gradient when the value had perhaps left, so no rank could go on."""
    (expected,) = train_new({carried: RefusesOdd}, 0, module=layer(DOUBLE))
    with closing(made({carried: RefusesOdd}, module=layer(DOUBLE))) as scheduler:
        train(scheduler)
        odd = partial(train, scheduler, rows=(ROWS + 1) * MICROBATCHES)
        assert "no odd rows" in outcome(odd)
        assert train(scheduler) == expected


def test_errors_of_a_refused_or_failed_step_are_dropped_on_all_ranks() -> None:
    """They were added to the gradients of the next step, after an error on all ranks."""
    expected = train_new("int8", 0, 2)
    refused: Any = {"loss_divisor": 1.0 + rank()}
    with closing(made("int8")) as scheduler:
        said = outcome(partial(train, scheduler, 1, **refused))
        assert "ranks disagree on loss_divisor" in said
        assert not bits(scheduler)
        assert [train(scheduler, seed) for seed in (0, 2)] == expected
    with closing(made("int8")) as scheduler:
        first = train(scheduler)
        assert "disagree on loss_divisor" in outcome(partial(train, scheduler, 1, **refused))
        assert [first, train(scheduler, 2)] == expected

    # Errors of a failed step are dropped on all ranks. They were added to the gradients of the next
    # step, in place of those of the step before.
    def kept(scheduler: Scheduler) -> dict[str, list[float]]:
        errors = scheduler.state_dict().get("handlers", {}).get(CODECS, {}).get("errors", {})
        return {name: error.tolist() for name, error in errors.items()}

    with closing(made("topk")) as never:
        expected = [train(never, seed) for seed in (0, 2, 3)]
        wanted = kept(never)
    assert bool(wanted) is (rank() > 0)
    for at in range(RANKS):
        module, left = layer(), [0]

        def fail(_: Tensor, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise ValueError("no backward")

        def watch(_module: nn.Module, _inputs: object, out: Tensor, fail: Any = fail) -> None:
            if out.requires_grad:
                out.register_hook(fail)

        module.register_forward_hook(watch)
        with closing(made("topk", module=module)) as scheduler:
            first = train(scheduler)
            left[0] = MICROBATCHES if rank() == at else 0
            assert "no backward" in outcome(partial(train, scheduler, 1))
            left[0] = 0
            assert [first, *(train(scheduler, seed) for seed in (2, 3))] == expected
            assert kept(scheduler) == wanted


@pytest.mark.parametrize(
    ("size", "says"),
    [(-1, "is -1, expected a number of bytes"), (3.5, "is 3.5, expected"), (None, "[")],
)
def test_a_size_that_is_none_is_refused_on_all_ranks(
    size: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fails, "size", size)
    with closing(made(Fails, module=layer(DOUBLE))) as scheduler:
        said = outcome(partial(train, scheduler))
    assert says in said
    assert ("nbytes() of" in said) is (size is not None)


def test_a_message_that_a_codec_holds_is_not_overwritten() -> None:
    Holds.held.clear()
    with closing(made(Holds, module=layer(DOUBLE))) as scheduler:
        for seed in range(3):
            train(scheduler, seed)
    same = [torch.equal(held, copy) for held, copy in Holds.held]
    num_channels = (1, 2, 1)[rank()]
    assert len(same) == 3 * num_channels * MICROBATCHES
    assert all(same)


@pytest.mark.parametrize("spec", [None, "int8", {"gradients": "topk"}], ids=str)
def test_an_input_that_a_stage_keeps_is_not_overwritten(spec: Any) -> None:
    """The first eight bytes of a decoded value were erased when its buffer came back."""
    module, kept = layer(), list[tuple[Tensor, Tensor]]()

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        kept.append((inputs[0].detach(), inputs[0].detach().clone()))

    module.register_forward_pre_hook(keep)
    train_new(spec, 0, 1, 2, module=module)
    assert [torch.equal(x, copy) for x, copy in kept] == [True] * 3 * MICROBATCHES


def test_measured_costs_have_the_bytes_and_times_of_messages() -> None:
    x, target = batch()
    with closing(made({"0-1": "int8", "1-2": {"gradients": "topk"}})) as scheduler:
        costs = measure_costs(scheduler, x, target=target, links=False, repeats=1)
        program = scheduler.program
    found = {
        (c.kind, c.source, c.target): costs.crossing(program.links[c.link], c).num_bytes
        for c in program.channels
    }
    expected = {("F", 0, 1): "int8", ("B", 1, 0): "int8", ("F", 1, 2): None, ("B", 2, 1): "topk"}
    assert found == {crossing: size(name) for crossing, name in expected.items()}
    assert costs.to_json() == type(costs).from_json(costs.to_json()).to_json()
    assert simulate(program, costs).step_seconds[0] > 0
