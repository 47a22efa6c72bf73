"""Values that look different in each microbatch and in each step, against one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipegrad.pipeline import edges, transfers
from pipegrad.pipeline.edges import Spec
from tests.support.gradients.cases import outcome, rank
from tests.support.pairwise import pairwise
from tests.support.pipeline.codecs import Single
from tests.support.pipeline.layers import (
    NUM_MICROBATCHES,
    WIDTH,
    Layer,
    counted,
    farthest,
    make,
    normal,
    train,
)
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

ROWS, LONGEST = 2, 400
MOST = rounding(NUM_MICROBATCHES * ROWS * LONGEST * WIDTH, dtype=torch.float64)
MOST_OF_LOSS = rounding(1)  # it travels in float32
SINGLE = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
NAMES = {0: (("x", "length"), ("x",)), 1: (("x",), ("x",))}
# For each step the lengths of its microbatches: alike, longer, shorter, none, each another one.
STEPS = [
    (5, 5, 5, 5),
    (5, 5, 5, 5),
    (40, 5, 400, 39),
    (1, 0, 3, 0),
    (0, 0, 0, 0),
    (7, 400, 7, 399),
    (5, 5, 5, 5),
]
GROWING = [(n, 2 * n, n, 3 * n) for n in (3, 9, 27, 40, 60, 90, 120)]
pytestmark = pytest.mark.ranks(2)


def shorten(linear: nn.Module, x: Tensor, length: Tensor) -> Any:
    """What the next stage is given depends on numbers, not on shapes."""
    return linear(x[:, : int(length[0])]).tanh()


def total(x: Tensor, target: Tensor) -> Tensor:
    return x.square().sum() + target.sum()


def batch(lengths: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
    x = normal(ROWS * NUM_MICROBATCHES, max(lengths) + step, WIDTH, seed=step)
    return x, torch.tensor(lengths).repeat_interleave(ROWS)


def one_process(modules: Sequence[nn.Module], x: Tensor, length: Tensor) -> Tensor:
    parts = zip(x.chunk(NUM_MICROBATCHES), length.chunk(NUM_MICROBATCHES), strict=True)
    return torch.stack([total(modules[1](modules[0](a, b)), a) for a, b in parts]).mean()


@contextmanager
def transport(*, tags: bool) -> Iterator[None]:
    """Has messages go as between other devices: these fill receives, and each has a header."""
    with mock.patch.object(edges, "has_tags", return_value=tags):
        yield


def assert_right(schedule: str, units: float = 1.0, **options: Any) -> None:
    """Compares steps and evaluations; gradients may be off by some units of rounding."""
    modules, twins = [Layer(shorten), Layer()], [Layer(shorten), Layer()]
    scheduler = make(*modules, names=NAMES, schedule=schedule, loss_fn=total, **options)
    for step, lengths in enumerate(STEPS):
        x, length = batch(lengths, step)
        for twin in twins:
            twin.zero_grad()
        true = one_process(twins, x, length)
        true.backward()
        loss = train(scheduler, x, length, target=x)
        assert abs(loss / true.item() - 1) <= units * MOST_OF_LOSS, step
        pairs = zip(modules[rank()].parameters(), twins[rank()].parameters(), strict=True)
        assert all(error(p.grad, q.grad, lenient=True) <= units * MOST for p, q in pairs), step
        x, length = batch(STEPS[-step], 10 + step)
        true = one_process(twins, x, length)
        evaluated = float(scheduler.evaluate(x, length, target=x).loss)
        assert abs(evaluated / true.item() - 1) <= units * MOST_OF_LOSS, step
    scheduler.close()


# Without tags headers go between hosts. tests/fuzz/test_wirings draws schedules and recompute.
WAYS: list[tuple[str, dict[str, Any], bool]] = [
    ("gpipe", {"recompute": True}, True),
    ("eager-1f1b", {"depth": 0}, True),
    ("zb-h1", {"codecs": Single}, True),
    ("1f1b", {}, False),
    ("1f1b", {"codecs": Single}, False),
]


@pytest.mark.parametrize(("schedule", "options", "tags"), WAYS)
def test_a_value_has_another_shape_in_each_microbatch(
    schedule: str, options: dict[str, Any], tags: bool
) -> None:
    with transport(tags=tags):
        assert_right(schedule, SINGLE if "codecs" in options else 1.0, **options)


def test_equal_shapes_need_no_more_messages_and_others_no_more_bytes() -> None:
    """Before a value of another shape, or the first, goes a header, before a longer one nothing."""
    header, item, posted, headers = 8 * edges.WORDS, ROWS * WIDTH * 8, list[int](), 0
    with closing(make(Layer(shorten), Layer(), names=NAMES, loss_fn=total)) as scheduler:
        for step, lengths in enumerate(STEPS):
            x, length = batch(lengths, step)
            with counted() as sent, counted("receive") as received:
                train(scheduler, x, length, target=x)
            posted.append(received.count(header))
            before = [STEPS[step - 1][-1] if step else None, *lengths]
            changed = [a != b for a, b in zip(before, lengths, strict=False)]
            headers += sum(changed)
            longest = max((0, *(n for before in STEPS[:step] for n in before)))
            assert sent == [
                part
                for n, c in zip(lengths, changed, strict=True)
                for part in (
                    *([header] if c and rank() == 0 else []),
                    *([0] if n > longest else []),
                    n * item,
                )
            ]
    # At most three are on their way at a time, and what these do not need serves later ones.
    assert sum(posted) == 3 + rank() * headers


def test_dtype_and_number_of_dimensions_may_change() -> None:
    """And values without a gradient beside."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

    def give(linear: nn.Module, x: Tensor) -> Any:
        number = int(x[0, 0])
        value = linear(x).to(dtypes[number])
        shape = [(WIDTH,), (1, WIDTH), (1, 1, WIDTH, 1), (WIDTH, 1)][number]
        codes = torch.arange(number + 1).to(
            [torch.int32, torch.bool, torch.uint8, torch.int64][number]
        )
        return value.reshape(shape), codes

    def take(linear: nn.Module, x: Tensor, codes: Tensor) -> Any:
        assert x.dim() == [1, 2, 4, 2][len(codes) - 1]
        return linear(x.reshape(-1).double()) * (codes.double().sum() + 1) * x.element_size()

    mine, twins = [[Layer(give), Layer(take)] for _ in range(2)]
    names = {0: (("x",), ("x", "codes")), 1: (("x", "codes"), ("x",))}
    with closing(make(*mine, names=names, loss_fn=total)) as scheduler:
        for step in range(3):
            order = torch.randperm(4, generator=torch.Generator().manual_seed(step))
            x = order.double()[:, None].expand(4, WIDTH).contiguous()
            for twin in twins:
                twin.zero_grad()
            torch.stack([total(twins[1](*twins[0](a)), a) for a in x.split(1)]).mean().backward()
            train(scheduler, x, target=x)
            most = rounding(4 * WIDTH, dtype=torch.float64)
            assert farthest(mine[rank()], twins[rank()]) <= most


@pytest.mark.parametrize(
    "pick", [lambda z: z.conj(), lambda z: z.conj().imag[:, :1], lambda z: z.conj().imag]
)
def test_conjugated_and_negated_values_are_sent_as_they_are(pick: Callable[..., Any]) -> None:
    """Torch makes them by a flag, which a message with a header, made of bytes, does not have."""

    def give(linear: nn.Module, x: Tensor) -> Any:
        return pick(torch.complex(linear(x), x)[:, : WIDTH - int(x[0, 0] > 0)])

    def take(linear: nn.Module, x: Tensor) -> Any:
        made = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        return made * linear.get_parameter("weight")[0, 0]

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return (x * torch.arange(x.numel()).reshape(x.shape)).sum() + 0 * target.sum()

    mine, twins = [[Layer(give), Layer(take)] for _ in range(2)]
    with closing(make(*mine, loss_fn=loss)) as scheduler:
        for step in range(2):
            x = normal(4, WIDTH, seed=step)
            for twin in twins:
                twin.zero_grad()
            torch.stack([loss(twins[1](twins[0](a)), a) for a in x.split(1)]).mean().backward()
            train(scheduler, x, target=x)
            pairs = zip(mine[rank()].parameters(), twins[rank()].parameters(), strict=True)
            most = rounding(4 * 2 * WIDTH, dtype=torch.float64)
            assert all(error(p.grad, q.grad, lenient=True) <= most for p, q in pairs)


class Fails(Layer):
    """Raises in one of its forwards of a step."""

    calls, fails_in = 0, -1

    def forward(self, *values: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails_in:
            raise ValueError("no more")
        return super().forward(*values)


@pytest.mark.parametrize(
    ("tags", "which", "steps"), pairwise((True, False), (0, 1), (tuple(STEPS), tuple(GROWING)))
)
def test_the_step_behind_a_failed_one_is_right(
    tags: bool, which: int, steps: Sequence[Sequence[int]]
) -> None:
    """Both ends of an edge must know the same of what crossed it, also behind a failure.

    Every third step fails on one rank, in each microbatch in turn, while lengths change.
    """
    modules, twins = [Fails(shorten), Fails()], [Layer(shorten), Layer()]
    module = modules[rank()]
    with transport(tags=tags):
        scheduler = make(*modules, names=NAMES, loss_fn=total)
        for step, lengths in enumerate([*steps, *steps]):
            x, length = batch(lengths, step)
            module.calls, module.fails_in = 0, -1
            if step % 3 == 1:
                module.fails_in = 1 + step % NUM_MICROBATCHES if rank() == which else -1
                said = outcome(partial(train, scheduler, x, length, target=x))
                assert "no more" in said, step
                continue
            loss, true = train(scheduler, x, length, target=x), one_process(twins, x, length).item()
            assert abs(loss / true - 1) <= MOST_OF_LOSS, step
        scheduler.close()


def test_a_value_has_a_gradient_always_or_never_and_a_header_describes_it() -> None:
    def detached(linear: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = linear(x)
        return made.detach() if x[0, 0] > 1 else made

    def deep(linear: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = linear(x)
        return made.reshape(*[1] * 14, WIDTH) if x[0, 0] > 1 else made

    x = torch.zeros(4, WIDTH, dtype=torch.float64)
    y = x.clone()
    y[2] = 2
    without = "stage 0, microbatch 2: 'x' is float64 [1, 3] without gradient"
    for give, words in (
        (detached, (without, "always or never has a gradient")),
        (deep, ("at most 13 dimensions",)),
    ):
        with closing(make(Layer(give), Layer(), loss_fn=total)) as scheduler:
            loss = train(scheduler, x, target=x)
            said = outcome(partial(train, scheduler, y, target=x))
            assert [part for part in words if part not in said] == []
            assert train(scheduler, x, target=x) == loss


class Slow(Layer):
    """Lets the rank before it go on, which is a step ahead then."""

    def forward(self, *inputs: Any) -> Any:
        time.sleep(0.05)
        return super().forward(*inputs)


@pytest.mark.parametrize("tags", [True, False])
def test_a_rank_that_is_a_step_ahead_has_other_shapes(*, tags: bool) -> None:
    """A header of the next evaluation was taken for that of a microbatch of this one."""
    modules, twins = [Layer(), Slow()], [Layer(), Layer()]
    rows = [8, 8, 7, 8, 5, 8, 7, 7, 8, 6]
    kinds = [False, True, True, True, True, False, True, True, True, False]
    true = list[float]()
    with transport(tags=tags), closing(make(*modules, loss_fn=total)) as scheduler:
        results = list[Any]()
        for step, (number, evaluates) in enumerate(zip(rows, kinds, strict=True)):
            x = normal(number, 3, WIDTH, seed=step)
            parts = [total(nn.Sequential(*twins)(part), part) for part in x.tensor_split(4)]
            # By their rows, as a mean counts them.
            shares = [len(part) / number for part in x.tensor_split(4)]
            true.append(sum(p.item() * s for p, s in zip(parts, shares, strict=True)))
            verb = scheduler.evaluate if evaluates else scheduler.step
            results.append(verb(x, target=x))
        found = [result.loss.item() for result in results]
    assert found == [pytest.approx(loss, rel=1e-6) for loss in true]


def test_a_header_of_another_rank_makes_no_memory() -> None:
    """Any number of bytes was allocated, and then waited for."""
    huge, header = Spec((2**33,), torch.uint8, differentiable=True), edges.header
    scheduler = make(Layer(shorten), Layer(), names=NAMES, schedule="gpipe", loss_fn=total)
    train(scheduler, *batch(STEPS[0], 0), target=batch(STEPS[0], 0)[0])
    x, length = batch(STEPS[2], 2)
    forged = mock.patch.object(transfers, "header", lambda step, key, _: header(step, key, huge))
    with forged if rank() == 0 else nullcontext():
        found = outcome(lambda: train(scheduler, x, length, target=x))
    assert f"a value is uint8 [{2**33}] with gradient, {2**33} bytes, and those before" in found
    assert "Error: " in outcome(lambda: train(scheduler, x, length, target=x))  # for good
