"""Values that look different in each microbatch and in each step, against one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.comm import sync_points
from pipegrad.pipeline.transfers import edges, messages
from pipegrad.pipeline.transfers.messages import MARK
from tests.support.gradients.cases import Case, Replies, on, outcome, rank, replies
from tests.support.pipeline.codecs import Single
from tests.support.pipeline.layers import (
    NUM_MICROBATCHES,
    WIDTH,
    Layer,
    distance,
    make,
    normal,
    train,
)
from tests.support.pipeline.schedulers import error, wrong
from tests.support.rounding import rounding

PAIR: list[Case] = []
FOUR: list[Case] = []
pair = replies(2, PAIR)
four = replies(4, FOUR)
ROWS, LONGEST = 2, 400
MOST = rounding(NUM_MICROBATCHES * ROWS * LONGEST * WIDTH, dtype=torch.float64)
MOST_OF_LOSS = rounding(1)  # it travels in float32
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


def shorten(linear: nn.Module, x: Tensor, length: Tensor) -> Any:
    """What the next stage is given depends on numbers, not on shapes."""
    return linear(x[:, : int(length[0])]).tanh()


def total(x: Tensor, target: Tensor) -> Tensor:
    return x.square().sum() + target.sum()


def stages() -> list[nn.Module]:
    return [Layer(shorten), Layer()]


def batch(lengths: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
    x = normal(ROWS * NUM_MICROBATCHES, max(lengths) + step, WIDTH, seed=step)
    return x, torch.tensor(lengths).repeat_interleave(ROWS)


def one_process(modules: list[nn.Module], x: Tensor, length: Tensor) -> Tensor:
    parts = zip(x.chunk(NUM_MICROBATCHES), length.chunk(NUM_MICROBATCHES), strict=True)
    return torch.stack([total(modules[1](modules[0](a, b)), a) for a, b in parts]).mean()


def errors(schedule: str, **options: Any) -> dict[str, float]:
    """Returns errors above 1, in units of what rounding may do, of steps and of evaluations."""
    modules, twins, found = stages(), stages(), {}
    scheduler = make(*modules, names=NAMES, schedule=schedule, loss_fn=total, **options)
    for step, lengths in enumerate(STEPS):
        x, length = batch(lengths, step)
        for twin in twins:
            twin.zero_grad()
        true = one_process(twins, x, length)
        true.backward()
        loss = train(scheduler, x, length, target=x)
        mine, theirs = modules[rank()].parameters(), twins[rank()].parameters()
        found[f"{step} loss"] = abs(loss / true.item() - 1) / MOST_OF_LOSS
        for p, q in zip(mine, theirs, strict=True):
            found[f"{step} {len(found)}"] = error(p.grad, q.grad, lenient=True) / MOST
        x, length = batch(STEPS[-step], 10 + step)
        true = one_process(twins, x, length)
        evaluated = float(scheduler.evaluate(x, length, target=x).loss)
        found[f"{step} evaluated"] = abs(evaluated / true.item() - 1) / MOST_OF_LOSS
    scheduler.close()
    return wrong(found, 1.0)


@on(PAIR)
def lengths() -> Any:
    return {
        f"{schedule} {options}": {
            n: e for n, e in errors(schedule, **options).items() if not e <= MOST
        }
        for schedule in ("gpipe", "1f1b", "eager-1f1b", "zb-h1")
        for options in ({}, {"depth": 0}, {"recompute": True})
    }


def test_a_value_has_another_shape_in_each_microbatch(pair: Replies) -> None:
    for reply in pair:
        assert {name: wrong for name, wrong in reply["lengths"].items() if wrong} == {}


CODED = {"codecs": Single}
SINGLE = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps


@on(PAIR)
def coded_lengths() -> Any:
    return {
        schedule: {n: e for n, e in errors(schedule, **CODED).items() if not e <= SINGLE}
        for schedule in ("gpipe", "1f1b", "zb-h1")
    }


@on(PAIR)
def coded_without_tags() -> Any:
    with (
        mock.patch.object(edges, "has_tags", return_value=False),
        mock.patch.object(messages, "c_int64", None),
    ):
        found = errors("1f1b", **CODED)
    return {"1f1b": {n: e for n, e in found.items() if not e <= SINGLE}}


def test_values_with_codecs_have_other_shapes_in_each_microbatch(pair: Replies) -> None:
    for reply in pair:
        for case in ("coded_lengths", "coded_without_tags"):
            assert {name: wrong for name, wrong in reply[case].items() if wrong} == {}, case


@on(PAIR)
def without_tags() -> Any:
    """As between other devices than processors: messages fill receives, and headers go beside."""
    with (
        mock.patch.object(edges, "has_tags", return_value=False),
        mock.patch.object(messages, "c_int64", None),  # the host cannot read another device
    ):
        return {schedule: errors(schedule) for schedule in ("gpipe", "1f1b", "zb-h1")}


def test_headers_go_between_hosts_where_messages_have_no_tags(pair: Replies) -> None:
    for reply in pair:
        assert {name: wrong for name, wrong in reply["without_tags"].items() if wrong} == {}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Notes the bytes of each message that is sent."""
    sent, send = list[int](), sync_points.Backend.send

    def noted(self: Any, group: Any, tensor: Tensor, peer: int, tag: int) -> Any:
        sent.append(tensor.nbytes)
        return send(self, group, tensor, peer, tag)

    with mock.patch.object(sync_points.Backend, "send", noted):
        yield sent


@on(PAIR)
def sent_messages() -> Any:
    """How many messages a rank sends in each step, and of how many bytes."""
    scheduler, found = make(*stages(), names=NAMES, loss_fn=total), []
    for step, lengths in enumerate(STEPS):
        x, length = batch(lengths, step)
        with counted() as sent:
            train(scheduler, x, length, target=x)
        found.append(sent)
    scheduler.close()
    return found


def test_equal_shapes_need_no_more_messages_and_others_no_more_bytes(pair: Replies) -> None:
    """A header is in the message of its value. What is longer than ever needs a second message."""
    header, item = 128, ROWS * WIDTH * 8
    for reply, plain in zip(pair, (False, True), strict=True):
        for step, lengths in enumerate(STEPS):
            before = [*STEPS[step - 1][-1:], *lengths] if step else [lengths[0], *lengths]
            changed = [a != b for a, b in zip(before, lengths, strict=False)]
            sizes = [
                n * item + header * (c and not plain) for n, c in zip(lengths, changed, strict=True)
            ]
            sent = reply["sent_messages"][step]
            assert sum(sent) == sum(sizes)
            if step != 2:
                assert sent == sizes
            else:  # 40, 400 and 39 are longer than all of the steps before
                assert len(sent) == len(sizes) + 3


@on(PAIR)
def marked() -> Any:
    """Values and gradients that begin as a header does, and smaller ones behind them."""
    mark = torch.tensor([MARK]).view(torch.float64)

    class Marks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
            ctx.back = back
            return there.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return ctx.back.clone(), None, None

    kinds = [torch.full((3,), float("nan"), dtype=torch.float64), normal(1), normal(40), normal(0)]
    for values in kinds:
        values[:1] = mark[: len(values)]
    seen: list[Tensor] = []

    def give(linear: nn.Module, x: Tensor) -> Any:
        value = kinds[int(x[0, 0])]
        made: Tensor = Marks.apply(linear(x).sum().expand(1), value, normal(1))  # type: ignore[no-untyped-call]
        made.register_hook(lambda gradient: seen.append(gradient.clone()))
        return made

    def take(linear: nn.Module, x: Tensor) -> Any:
        seen.append(x.detach().clone())
        there = linear(normal(1, WIDTH)).sum()
        return Marks.apply(x, there, x.detach())  # type: ignore[no-untyped-call]

    scheduler = make(Layer(give), Layer(take), loss_fn=lambda x, target: x.sum() + 0 * target.sum())
    x = torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, WIDTH).contiguous()
    for _ in range(3):
        seen.clear()
        train(scheduler, x, target=x)
    scheduler.close()
    return [s.view(torch.int64).tolist() for s in seen], [
        k.view(torch.int64).tolist() for k in kinds
    ]


def test_a_value_may_begin_as_a_header_does(pair: Replies) -> None:
    for reply in pair:
        seen, kinds = reply["marked"]
        assert sorted(seen) == sorted(kinds)


@on(PAIR)
def kinds() -> Any:
    """Other dtypes and numbers of dimensions, and values without a gradient beside."""
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

    def modules() -> list[nn.Module]:
        return [Layer(give), Layer(take)]

    mine, twins = modules(), modules()
    scheduler = make(
        *mine,
        names={0: (("x",), ("x", "codes")), 1: (("x", "codes"), ("x",))},
        loss_fn=lambda x, target: x.square().sum() + target.sum(),
    )
    found = []
    for step in range(3):
        order = torch.randperm(4, generator=torch.Generator().manual_seed(step))
        x = order.double()[:, None].expand(4, WIDTH).contiguous()
        losses = [(twins[1](*twins[0](a)).square().sum() + a.sum()) for a in x.split(1)]
        for twin in twins:
            twin.zero_grad()
        torch.stack(losses).mean().backward()
        train(scheduler, x, target=x)
        pairs = zip(mine[rank()].parameters(), twins[rank()].parameters(), strict=True)
        found.append(max(distance(p.grad, q.grad) for p, q in pairs))
    scheduler.close()
    return found


def test_dtype_and_number_of_dimensions_may_change(pair: Replies) -> None:
    for reply in pair:
        assert all(e <= rounding(4 * WIDTH, dtype=torch.float64) for e in reply["kinds"])


class Fails(Layer):
    """Raises in one of its forwards of a step."""

    def __init__(self, function: Any = None) -> None:
        super().__init__(function)
        self.calls, self.fails_in = 0, -1

    def forward(self, *values: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails_in:
            raise ValueError("no more")
        return super().forward(*values)


GROWING = [(n, 2 * n, n, 3 * n) for n in (3, 9, 27, 40, 60, 90, 120)]


def behind_failures(which: int, steps: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns what is wrong in a run in which every third step fails on one rank."""
    modules, twins = [Fails(shorten), Fails()], stages()
    found: dict[str, Any] = {}
    scheduler = make(*modules, names=NAMES, loss_fn=total)
    for step, lengths in enumerate([*steps, *steps]):
        x, length = batch(lengths, step)
        module = modules[rank()]
        module.calls, module.fails_in = 0, -1
        if step % 3 == 1:
            module.fails_in = 1 + step % NUM_MICROBATCHES if rank() == which else -1
            words = outcome(partial(train, scheduler, x, length, target=x))
            if "no more" not in words:
                found[f"step {step}"] = words
            continue
        loss, true = train(scheduler, x, length, target=x), one_process(twins, x, length).item()
        if not abs(loss / true - 1) <= MOST_OF_LOSS:
            found[f"step {step}"] = loss, true
    scheduler.close()
    return found


@on(PAIR)
def flags() -> Any:
    """Conjugated and negated values and gradients, which torch makes by a flag."""
    found = []
    for pick in (lambda z: z.conj(), lambda z: z.conj().imag[:, :1], lambda z: z.conj().imag):

        def give(linear: nn.Module, x: Tensor, pick: Any = pick) -> Any:
            return pick(torch.complex(linear(x), x)[:, : WIDTH - int(x[0, 0] > 0)])

        def take(linear: nn.Module, x: Tensor) -> Any:
            made = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
            return made * linear.get_parameter("weight")[0, 0]

        def loss(x: Tensor, target: Tensor) -> Tensor:
            return (x * torch.arange(x.numel()).reshape(x.shape)).sum() + 0 * target.sum()

        mine, twins = [Layer(give), Layer(take)], [Layer(give), Layer(take)]
        scheduler = make(*mine, loss_fn=loss)
        for step in range(2):
            x = normal(4, WIDTH, seed=step)
            for twin in twins:
                twin.zero_grad()
            torch.stack([loss(twins[1](twins[0](a)), a) for a in x.split(1)]).mean().backward()
            train(scheduler, x, target=x)
            pairs = zip(mine[rank()].parameters(), twins[rank()].parameters(), strict=True)
            found.append(max(error(p.grad, q.grad, lenient=True) for p, q in pairs))
        scheduler.close()
    return found


def test_conjugated_and_negated_values_are_sent_as_they_are(pair: Replies) -> None:
    """A message with a header is made of bytes, which have no flag."""
    for reply in pair:
        assert all(e <= rounding(4 * 2 * WIDTH, dtype=torch.float64) for e in reply["flags"])


@on(PAIR)
def failures() -> Any:
    """Steps that fail in the middle of changing lengths, on each rank and in each microbatch."""
    found = {}
    for tags in (True, False):
        with mock.patch.object(edges, "has_tags", return_value=tags):
            for which in (0, 1):
                for name, steps in (("any", STEPS), ("growing", GROWING)):
                    found[f"tags {tags}, rank {which}, {name}"] = behind_failures(which, steps)
    return found


def test_the_step_behind_a_failed_one_is_right(pair: Replies) -> None:
    """Both ends of an edge must know the same of what crossed it, also behind a failure."""
    for reply in pair:
        assert {name: wrong for name, wrong in reply["failures"].items() if wrong} == {}


@on(PAIR)
def gradients_that_come_and_go() -> Any:
    """A value that has a gradient in some microbatches only."""

    def give(linear: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = linear(x)
        return made.detach() if x[0, 0] > 1 else made

    scheduler = make(Layer(give), Layer(), loss_fn=lambda x, target: x.sum() + target.sum())
    x = torch.zeros(4, WIDTH, dtype=torch.float64)
    train(scheduler, x, target=x)
    y = x.clone()
    y[2] = 2
    words = outcome(lambda: train(scheduler, y, target=x))
    right = train(scheduler, x, target=x)
    scheduler.close()
    return words, right


def test_a_value_has_a_gradient_always_or_never(pair: Replies) -> None:
    for reply in pair:
        words, right = reply["gradients_that_come_and_go"]
        assert "stage 0, microbatch 2: 'x' is float64 [1, 3] without gradient" in words
        assert "always or never has a gradient" in words
        assert abs(right) >= 0


@on(PAIR)
def too_many_dimensions() -> Any:
    def give(linear: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = linear(x)
        return made.reshape(*[1] * 14, WIDTH) if x[0, 0] > 1 else made

    scheduler = make(Layer(give), Layer(), loss_fn=lambda x, target: x.sum() + target.sum())
    x = torch.zeros(4, WIDTH, dtype=torch.float64)
    loss = train(scheduler, x, target=x)
    words = outcome(lambda: train(scheduler, x + 2, target=x))
    again = train(scheduler, x, target=x)
    scheduler.close()
    return words, loss == again


def test_a_value_that_no_header_describes_is_refused(pair: Replies) -> None:
    for reply in pair:
        words, right = reply["too_many_dimensions"]
        assert "at most 13 dimensions" in words
        assert right


@on(FOUR)
def four_stages() -> Any:
    """Sequences of another length in each microbatch, in 1F1B over four ranks."""
    modules, twins = [[Layer() for _ in range(4)] for _ in range(2)]
    scheduler = Scheduler(
        [Stage(modules[rank()], rank())],
        Topology.create(pipeline=4),
        schedule="1f1b",
        num_microbatches=8,
        loss_fn=total,
        handlers=["noop"],
    )
    found = []
    for step in range(6):
        lengths = torch.randint(1, LONGEST, (8,), generator=torch.Generator().manual_seed(step))
        parts = [normal(ROWS, n, WIDTH, seed=n) for n in lengths.tolist()]
        losses = []
        for part in parts:
            out = part
            for twin in twins:
                out = twin(out)
            losses.append(total(out, part))
        for module in (*modules, *twins):
            module.zero_grad()
        torch.stack(losses).mean().backward()
        scheduler.step(microbatches=[{"x": part, "target": part} for part in parts])
        pairs = zip(modules[rank()].parameters(), twins[rank()].parameters(), strict=True)
        found.append(max(distance(p.grad, q.grad) for p, q in pairs))
    scheduler.close()
    return found


def test_sequences_of_any_length_go_through_four_stages_in_time(four: Replies) -> None:
    """Megatron-LM issue 5100: variable lengths, four stages and 1F1B never ended there."""
    for reply in four:
        assert all(e <= 2 * MOST for e in reply["four_stages"])
        assert reply["four_stages seconds"] < 60


@on(PAIR)
def memory() -> Any:
    """Bytes of receive buffers after each step, whose values are longer than before."""
    scheduler, found = make(*stages(), names=NAMES, loss_fn=total), []
    for step, lengths in enumerate(GROWING):
        x, length = batch(lengths, step)
        train(scheduler, x, length, target=x)
        free = scheduler._context.pool._free
        found.append(sum(capacity * len(buffers) for capacity, buffers in free.items()))
    scheduler.close()
    return found


def test_receive_buffers_that_are_too_small_are_freed(pair: Replies) -> None:
    for reply in pair:
        largest = 128 + 3 * GROWING[-2][0] * ROWS * WIDTH * 8
        assert reply["memory"][-1] <= 2 * NUM_MICROBATCHES * largest
        assert reply["memory"][-1] > 0
