"""Codecs of hops: bytes as promised, failures that all ranks see, errors that are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology, codecs, measure_costs, simulate
from pipegrad.comm import sync_points
from pipegrad.interop.private import storage_holders
from pipegrad.pipeline.coding import worth
from pipegrad.pipeline.coding.latency import latency_shares
from pipegrad.pipeline.step import StepKind
from pipegrad.pipeline.step_times import Layout
from pipegrad.pipeline.transfers import ends
from pipegrad.pipeline.transfers.buffers import OWN_HOLDERS
from pipegrad.pipeline.transfers.messages import MARK
from pipegrad.schedules.measured import Times
from pipegrad.simulation.auto import Auto
from pipegrad.testing import OrderChecker
from tests.support.gradients.cases import Case, Replies, on, outcome, rank, replies
from tests.support.pipeline.codecs import Fails, Holds, Marked, RefusesOdd, Single

TRIO: list[Case] = []
trio = replies(3, TRIO)
RANKS, WIDTH, ROWS, MICROBATCHES = 3, 32, 2, 4
SHAPE = (ROWS, WIDTH)


def layers(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Tanh()) for _ in range(RANKS)]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).float().square().mean()


def made(spec: Any, *, module: nn.Module | None = None, **options: Any) -> Scheduler:
    stage = Stage(module or layers()[rank()], rank())
    options = {"schedule": "1f1b", "num_microbatches": MICROBATCHES, "loss_fn": loss_of, **options}
    options = {"handlers": ["data-parallel"], **options}
    return Scheduler([stage], Topology.create(pipeline=RANKS), codecs=spec, **options)


def batch(seed: int = 0, rows: int = ROWS * MICROBATCHES) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, target


def train(scheduler: Scheduler, seed: int = 0) -> list[int]:
    """Takes a step from gradients of None; returns the bits of this rank's gradients."""
    for record in scheduler.sync.records():
        scheduler.sync.parameter(record).grad = None
    x, target = batch(seed)
    scheduler.step(x, target=target)
    return bits(scheduler)


def bits(scheduler: Scheduler) -> list[int]:
    gradients = [scheduler.sync.parameter(r).grad for r in scheduler.sync.records()]
    return [x for g in gradients if g is not None for x in g.reshape(-1).view(torch.int32).tolist()]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Notes the bytes of each message that is sent."""
    sent, send = list[int](), sync_points.Backend.send

    def noted(self: Any, group: Any, tensor: Tensor, peer: int, tag: int) -> Any:
        sent.append(tensor.nbytes)
        return send(self, group, tensor, peer, tag)

    with mock.patch.object(sync_points.Backend, "send", noted):
        yield sent


# Bytes.

SPECS: dict[str, Any] = {
    **{name: name for name in ("bf16", "fp8", "int8", "topk")},
    "both": {"activations": "int8", "gradients": "topk"},
    "one hop": {"0-1": "int8"},
    "swapped": {"1-0": {"gradients": "bf16"}},
    "none": {"1-2": None, (0, 1): "none"},
}


@on(TRIO)
def sent_bytes() -> Any:
    found = {}
    for name, spec in SPECS.items():
        scheduler = made(spec)
        train(scheduler)
        with counted() as sent:
            train(scheduler)
        found[name] = sorted(sent)
        scheduler.close()
    return found


def size(name: str | None) -> int:
    plain = ROWS * WIDTH * 4
    return plain if name is None else codecs.resolve(name).plugin.nbytes(SHAPE, torch.float32)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # For each rank what it sends to the next one, and to the one before.
        *((name, [[name], [name, name], [name]]) for name in ("bf16", "fp8", "int8")),
        ("topk", [[None], [None, "topk"], ["topk"]]),
        ("both", [["int8"], ["int8", "topk"], ["topk"]]),
        ("one hop", [["int8"], [None, "int8"], [None]]),
        ("swapped", [[None], [None, "bf16"], [None]]),
        ("none", [[None], [None, None], [None]]),
    ],
)
def test_messages_have_the_bytes_that_codecs_promise(
    trio: Replies, name: str, expected: list[list[str | None]]
) -> None:
    for reply, own in zip(trio, expected, strict=True):
        assert reply["sent_bytes"][name] == sorted([size(codec) for codec in own] * MICROBATCHES)


@on(TRIO)
def beside() -> Any:
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
    stage = Stage(Rest(), rank(), inputs, ["x"]) if rank() else Stage(First(), 0, ["x"], inputs)
    scheduler = Scheduler(
        [stage],
        Topology.create(pipeline=RANKS),
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=loss_of,
        handlers=["noop"],
        codecs="int8",
    )
    x, target = batch()
    for _ in range(2):
        scheduler.step(x, target=target)
    scheduler.close()
    parts = [part for _ in range(2) for part in x.chunk(MICROBATCHES)]
    return seen == [
        ((p[:, 0] > 0).tolist(), list(range(ROWS)), float(p[:, 0].mean())) for p in parts
    ]


def test_what_is_not_of_floats_or_would_not_be_shorter_crosses_as_it_is(trio: Replies) -> None:
    assert [reply["beside"] for reply in trio] == [False, True, True]


@on(TRIO)
def at_once() -> Any:
    """Two Schedulers with other codecs, in turns, are what each is alone."""
    alone, together = [], []
    for spec in ("int8", "topk"):
        scheduler = made(spec)
        alone.append([train(scheduler, seed) for seed in range(3)])
        scheduler.close()
    both = made("int8"), made("topk")
    found = [[train(scheduler, seed) for scheduler in both] for seed in range(3)]
    together = [list(column) for column in zip(*found, strict=True)]
    for scheduler in both:
        scheduler.close()
    return alone == together


def test_schedulers_keep_their_own_errors(trio: Replies) -> None:
    assert all(reply["at_once"] for reply in trio)


# Values that are not finite.


@on(TRIO)
def not_finite() -> Any:
    found = {}
    for name in ("bf16", "fp8", "int8", "topk"):
        for odd in (float("nan"), float("inf")):
            scheduler = made({"gradients": name})
            seen = []
            x, target = batch()
            spoilt = target.clone()
            spoilt[ROWS * 2, 3] = odd
            for given in (target, spoilt, target):
                train_on(scheduler, x, given)
                gradients = [scheduler.sync.parameter(r).grad for r in scheduler.sync.records()]
                seen.append(all(bool(g.isfinite().all()) for g in gradients if g is not None))
            found[f"{name} {odd}"] = seen
            scheduler.close()
    return found


def train_on(scheduler: Scheduler, x: Tensor, target: Tensor) -> None:
    for record in scheduler.sync.records():
        scheduler.sync.parameter(record).grad = None
    scheduler.step(x, target=target)


def test_an_overflow_reaches_all_ranks_and_only_its_own_step(trio: Replies) -> None:
    for reply in trio:
        assert {tuple(seen) for seen in reply["not_finite"].values()} == {(True, False, True)}


# Failures.

FAILING = [
    *(
        (f"{method} {carried}", at)
        for method in ("encode", "decode")
        for carried in ("activations", "gradients")
        for at in (0, 1, 2)
    ),
]


@on(TRIO)
def failing() -> Any:
    """For each method of a codec and each rank: a step that fails, and one that does not."""
    found = {}
    double = layers(torch.float64)
    x, target = (t.double() for t in batch())
    for method, at in FAILING:
        scheduler = made(Fails, module=double[rank()])
        train_on(scheduler, x, target)
        if rank() == at:
            Fails.told[method] = 2  # in the second microbatch
        words = outcome(partial(train_on, scheduler, x, target))
        Fails.told.clear()
        train_on(scheduler, x, target)
        found[f"{method} {at}"] = words, bits(scheduler)
        scheduler.close()
    fresh = made(Fails, module=double[rank()])
    train_on(fresh, x, target)
    expected = bits(fresh)
    fresh.close()
    return {name: (words, after == expected) for name, (words, after) in found.items()}


def test_a_codec_that_fails_is_an_error_on_all_ranks_and_the_next_step_is_right(
    trio: Replies,
) -> None:
    silent = {"encode activations": 2, "decode activations": 0}
    silent |= {"encode gradients": 0, "decode gradients": 2}
    for method, at in FAILING:
        for reply in trio:
            words, is_right = reply["failing"][f"{method} {at}"]
            assert is_right, (method, at)
            assert (f"no {method}" in words) is (silent[method] != at), (method, at, words)


@on(TRIO)
def refusing_shapes() -> Any:
    """Three steps, of which the second has values that the codec of gradients refuses."""
    double, found = layers(torch.float64), {}
    odd = [t.double() for t in batch(rows=(ROWS + 1) * MICROBATCHES)]
    even = [t.double() for t in batch()]
    for carried in ("activations", "gradients"):
        scheduler = made({carried: RefusesOdd}, module=double[rank()])
        words = []
        for x, target in (even, odd, even):
            words.append(outcome(partial(train_on, scheduler, x, target)))
        after = bits(scheduler)
        scheduler.close()
        fresh = made({carried: RefusesOdd}, module=double[rank()])
        train_on(fresh, *even)
        found[carried] = words, after == bits(fresh)
        fresh.close()
    return found


def test_a_codec_may_refuse_a_shape_of_a_later_step(trio: Replies) -> None:
    """It was asked for the gradient when the value had perhaps left, so no rank could go on."""
    for reply in trio:
        for (first, second, third), is_right in reply["refusing_shapes"].values():
            assert (first, third, is_right) == ("None", "None", True)
            assert "no odd rows" in second


def lossy(scheduler: Scheduler, x: Tensor, target: Tensor) -> float:
    return float(scheduler.step(x, target=target, loss_divisor=1.0 + rank()).loss)


@on(TRIO)
def disagreeing() -> Any:
    """Replicas that divide by different numbers, in a first step and in a later one."""
    found = {}
    expected = made("int8")
    steps = [train(expected, seed) for seed in (0, 2)]
    expected.close()
    for later in (False, True):
        scheduler = made("int8")
        own = [train(scheduler, 0)] if later else []
        x, target = batch(1)
        words = outcome(partial(lossy, scheduler, x, target))
        dropped = not bits(scheduler)
        own += [train(scheduler, seed) for seed in ((2,) if later else (0, 2))]
        found[later] = words, dropped, own == steps
        scheduler.close()
    return found


def test_errors_of_a_step_that_ranks_refuse_are_dropped(trio: Replies) -> None:
    """They were added to the gradients of the next step, after an error on all ranks."""
    for reply in trio:
        words, dropped, is_same = reply["disagreeing"][False]
        assert "ranks disagree on loss_divisor" in words
        assert (dropped, is_same) == (True, True)
        words, _, is_same = reply["disagreeing"][True]
        assert "loss_divisor differs" in words
        assert is_same


class FailsBackward(nn.Module):
    """Raises in one of its backwards, counted down."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.told = 0

    def forward(self, x: Tensor) -> Any:
        out = self.module(x)
        if out.requires_grad:
            out.register_hook(self._count)
        return out

    def _count(self, _: Tensor) -> None:
        self.told -= 1
        if self.told == 0:
            raise ValueError("no backward")


@on(TRIO)
def failed_errors() -> Any:
    """A step fails in a last microbatch; later steps are compared with those of another one."""
    never = made("topk")
    train(never, 0)
    expected = [train(never, seed) for seed in (2, 3)]
    kept = never.state_dict()["codecs"] if rank() else {}
    never.close()
    found = {}
    for at in range(RANKS):
        module = FailsBackward(layers()[rank()])
        scheduler = made("topk", module=module)
        train(scheduler, 0)
        module.told = MICROBATCHES if rank() == at else 0
        words = outcome(partial(read, scheduler, 1))
        module.told = 0
        steps = [train(scheduler, seed) for seed in (2, 3)]
        errors = scheduler.state_dict()["codecs"]["errors"] if rank() else {}
        scheduler.close()
        same = all(torch.equal(error, kept["errors"][key]) for key, error in errors.items())
        found[at] = words, steps == expected, same and len(errors) == len(kept.get("errors", {}))
    return found


def read(scheduler: Scheduler, seed: int) -> float:
    x, target = batch(seed)
    return float(scheduler.step(x, target=target).loss)


def test_errors_of_a_failed_step_are_dropped_on_all_ranks(trio: Replies) -> None:
    """They were added to the gradients of the next step, in place of those of the step before."""
    for at in range(RANKS):
        for reply in trio:
            words, is_same, keeps = reply["failed_errors"][at]
            assert "no backward" in words
            assert is_same
            assert keeps


@on(TRIO)
def wrong_sizes() -> Any:
    found = []
    for size in (-1, 3.5, None):
        Fails.size = size
        scheduler = made(Fails, module=layers(torch.float64)[rank()])
        x, target = (t.double() for t in batch())
        found.append(outcome(partial(train_on, scheduler, x, target)))
        scheduler.close()
    Fails.size = None
    return found


def test_a_size_that_is_none_is_refused_on_all_ranks(trio: Replies) -> None:
    for reply in trio:
        negative, half, right = reply["wrong_sizes"]
        assert "nbytes() of" in negative
        assert "is -1, expected a number of bytes" in negative
        assert "is 3.5, expected" in half
        assert right == "None"


@on(TRIO)
def refused() -> Any:
    specs: list[Any] = [
        "int8" if rank() else "fp8",
        {"name": "topk", "fraction": 0.1 * (1 + rank())},
        {"0-3": "int8"},
        {"0-2": "int8"},
        {"activations": "topk"},
        "int9",
        {"name": "int8", "feedbak": True},
        {"name": "topk", "fraction": 2},
        {"0-1": "int8", (1, 0): "fp8"},
        {"auto": "int8", "0-1": "int8"},
        {"activation": "int8"},
        3,
        ["int8"],
    ]
    return [outcome(partial(made, spec)) for spec in specs]


def test_what_does_not_fit_is_refused_in_words_on_all_ranks(trio: Replies) -> None:
    assert all(reply["refused"] == trio[0]["refused"] for reply in trio)
    words = [
        "ranks disagree on codecs",
        "ranks disagree on codecs",
        "the hops 0-3, which nothing crosses: expected pairs of pipeline ranks out of 0-1, 1-2",
        "the hops 0-2, which nothing crosses",
        "given for activations, and is for gradients alone",
        "closest first: int8",
        "has no option 'feedbak'",
        "fraction is 2, expected a number above 0, at most 1",
        "name the hop 0-1 twice",
        "'auto' beside ['0-1']",
        "the key 'activation': expected 'activations' and 'gradients', or hops",
        "expected a concrete subclass of pipegrad.plugins.codec:EdgeCodec",
        "expected a concrete subclass",
    ]
    for found, expected in zip(trio[0]["refused"], words, strict=True):
        assert expected in found


# Errors of gradients.


@on(TRIO)
def resumed() -> Any:
    """A Scheduler that goes on from a state, and one that was never interrupted."""
    whole = made("topk")
    found = [train(whole, seed) for seed in range(4)]
    whole.close()
    first = made("topk")
    for seed in range(2):
        train(first, seed)
    x, target = batch(9)
    first.evaluate(x, target=target)
    state = first.state_dict()
    first.close()
    second, fresh = made("topk"), made("topk")
    second.load_state_dict(state)
    again = [train(second, seed) for seed in (2, 3)]
    anew = [train(fresh, seed) for seed in (2, 3)]
    codecs_kept = state.get("codecs", {})
    odd = [{**codecs_kept, "errors": {"x": 1}}, {**codecs_kept, "cut": "another"}]
    refusals = [
        outcome(partial(second.load_state_dict, {"plan": "of another", "codecs": {}})),
        *(
            outcome(partial(second.load_state_dict, {**state, "codecs": each if rank() else {}}))
            for each in odd
        ),
    ]
    after = second.state_dict()
    plain = made(None)
    train(plain)
    empty = plain.state_dict()
    for scheduler in (second, fresh, plain):
        scheduler.close()
    kept = sorted(codecs_kept.get("errors", {}))
    return found[2:] == again, found[2:] == anew, kept, refusals, after, empty


def test_a_resumed_scheduler_adds_the_errors_that_were_kept(trio: Replies) -> None:
    for reply, links in zip(trio, ([], [0], [1]), strict=True):
        is_same, is_fresh, kept, refusals, after, empty = reply["resumed"]
        assert is_same
        # The last stage's own gradients see no codec of gradients.
        assert is_fresh is (reply is trio[2])
        assert kept == [f"{link} of {m}" for link in links for m in range(MICROBATCHES)]
        assert "of another plan" in refusals[0]
        assert "'x' is no error of a codec" in refusals[1]
        assert "what codecs kept is of another cut" in refusals[2]
        assert after == empty == {}


@on(TRIO)
def other_shapes() -> Any:
    """Batches of other sizes in between: their errors do not fit, and nothing of them is added."""
    scheduler, found = made("topk"), []
    for rows in (8, 12, 8, 4, 8):
        x, target = batch(rows, rows)
        train_on(scheduler, x, target)
        found.append(bits(scheduler))
    x, target = batch(1, 12)
    scheduler.step(x, target=target, num_microbatches=6)
    scheduler.close()
    fresh = made("topk")
    x, target = batch(8, 8)
    train_on(fresh, x, target)
    same = bits(fresh)
    fresh.close()
    return [row == same for row in found]


def test_errors_of_another_shape_are_dropped(trio: Replies) -> None:
    for reply in trio:
        assert reply["other_shapes"] == [True, False, True, False, True]


@on(TRIO)
def held() -> Any:
    """A codec that keeps messages gets others: no message is overwritten while it is held."""
    found = []
    # What is held adds holders. A guard that lets any number of them pass is no guard.
    for holders in (storage_holders, lambda _: OWN_HOLDERS):
        Holds.held.clear()
        scheduler = made(Holds, module=layers(torch.float64)[rank()])
        with mock.patch.object(ends, "storage_holders", holders):
            for seed in range(3):
                x, target = (t.double() for t in batch(seed))
                train_on(scheduler, x, target)
        scheduler.close()
        found.append([torch.equal(held, copy) for held, copy in Holds.held])
    return found


def test_a_message_that_a_codec_holds_is_not_overwritten(trio: Replies) -> None:
    for reply, num_channels in zip(trio, (1, 2, 1), strict=True):
        guarded, unguarded = reply["held"]
        assert guarded == [True] * 3 * num_channels * MICROBATCHES
        assert False in unguarded  # so the test would see it


class Keeps(nn.Module):
    """Keeps its inputs, and a copy of each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inputs: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Any:
        self.inputs.append((x.detach(), x.detach().clone()))
        return self.linear(x)


@on(TRIO)
def kept_inputs() -> Any:
    found = []
    for spec in (None, "int8", {"gradients": "topk"}):
        torch.manual_seed(rank())
        module = Keeps()
        scheduler = made(spec, module=module)
        for seed in range(3):
            train(scheduler, seed)
        scheduler.close()
        found.append([torch.equal(x, copy) for x, copy in module.inputs])
    return found


def test_an_input_that_a_stage_keeps_is_not_overwritten(trio: Replies) -> None:
    """The first eight bytes of a decoded value were erased when its buffer came back."""
    for reply in trio:
        assert reply["kept_inputs"] == [[True] * 3 * MICROBATCHES] * 3


@on(TRIO)
def marked() -> Any:
    """Messages that begin as a header does."""
    found = []
    for spec in (Single, Marked):
        Marked.mark = MARK
        scheduler = made(spec, module=layers(torch.float64)[rank()])
        x, target = (t.double() for t in batch())
        for _ in range(2):
            train_on(scheduler, x, target)
        gradients = [scheduler.sync.parameter(r).grad for r in scheduler.sync.records()]
        found.append([g.tolist() for g in gradients if g is not None])
        scheduler.close()
    return found[0] == found[1]


def test_a_message_may_begin_as_a_header_does(trio: Replies) -> None:
    assert all(reply["marked"] for reply in trio)


# Order.


@on(TRIO)
def ordered() -> Any:
    found = []
    for virtual_streams in (False, True):
        with OrderChecker(virtual_streams=virtual_streams) as checker:
            scheduler = made({"activations": "int8", "gradients": "topk"})
            for seed in range(3):
                train(scheduler, seed)
            x, target = batch()
            scheduler.evaluate(x, target=target)
            scheduler.close()
        found += list(map(str, checker.violations))
    return found


def test_no_access_is_left_to_luck(trio: Replies) -> None:
    assert [reply["ordered"] for reply in trio] == [[], [], []]


# Hops that are chosen.


@contextmanager
def measured(*times: Times) -> Iterator[None]:
    """Gives these times to steps, of which all is that of bytes."""
    told = {"return_value": times[0]} if len(times) == 1 else {"side_effect": times}
    with (
        mock.patch.object(Layout, "times", **told),
        mock.patch.object(worth, "latency_shares", return_value={}),
    ):
        yield


def chosen(spec: Any, hops: tuple[float, float], **options: Any) -> tuple[str, list[int]]:
    """Returns what was chosen by the times of a step, and the bytes that are sent then."""
    scheduler = made(spec, **options)
    times = Times((0.010,) * RANKS, (0.020,) * RANKS, hops)
    with measured(times):
        for seed in range(3):
            train(scheduler, seed)
    with counted() as sent:
        train(scheduler, 3)
    x, target = batch()
    with counted() as evaluated:
        scheduler.evaluate(x, target=target)
    words = str(scheduler.codecs)
    assert not scheduler._wants_times
    scheduler.close()
    return words, sorted(set(sent + evaluated))


@on(TRIO)
def auto() -> Any:
    return [
        chosen("auto", (0.5, 0.0)),
        chosen("auto", (0.0, 0.5), schedule="gpipe"),
        chosen("auto", (0.0, 0.0)),
        chosen("auto", (0.5, 0.5), schedule="auto"),
        chosen({"auto": {"gradients": "topk"}}, (0.0, 0.5)),
        outcome(partial(made, "auto", schedule="zbv")),
    ]


@on(TRIO)
def not_made() -> Any:
    """One rank alone cannot make the kinds of step with codecs."""
    scheduler, fresh = made("auto"), made("int8")
    times = Times((0.010,) * RANKS, (0.020,) * RANKS, (0.5, 0.5))
    with measured(times):
        plain = [train(scheduler) for _ in range(2)]
        error = MemoryError("too large")
        method = mock.Mock(side_effect=error) if rank() == 1 else StepKind.with_schedule
        with mock.patch.object(StepKind, "with_schedule", method):
            words = outcome(lambda: train(scheduler))
        before = str(scheduler.codecs)
        # The next step is measured once more, without codecs.
        plain.append(train(scheduler))
        coded = [train(scheduler) for _ in range(2)]
    expected = [train(fresh) for _ in range(2)]
    buffers = scheduler.receive_buffers, fresh.receive_buffers
    scheduler.close()
    fresh.close()
    return words, before, plain == plain[:1] * 3, coded == expected, buffers


def test_codecs_are_taken_on_all_ranks_or_on_none(trio: Replies) -> None:
    """The other ranks sent coded values to one that expected plain ones, and it was aborted."""
    for reply in trio:
        words, before, is_plain, is_coded, *_ = reply["not_made"]
        assert "rank 1: MemoryError: too large" in words
        assert before == "hops where it saves time: activations int8, gradients int8"
        assert is_plain
        assert is_coded


def test_buffers_of_plain_messages_are_freed_when_codecs_are_chosen(trio: Replies) -> None:
    for reply in trio:
        *_, (num_made, num_of_fresh) = reply["not_made"]
        assert num_made <= num_of_fresh


@on(TRIO)
def remeasured() -> Any:
    """The schedule is made of the times of a step with the codecs."""
    scheduler, read = made("auto", schedule="auto"), list[tuple[str, Times]]()
    planned = Auto.planned

    def noted(self: Auto, times: Times) -> Auto:
        read.append((str(scheduler.codecs), times))
        return planned(self, times)

    slow = Times((0.010,) * RANKS, (0.020,) * RANKS, (0.5, 0.5))
    fast = Times((0.010,) * RANKS, (0.020,) * RANKS, (0.1, 0.1))
    with measured(slow, fast), mock.patch.object(Auto, "planned", noted):
        for seed in range(4):
            train(scheduler, seed)
    scheduler.close()
    return [(codecs, times == fast) for codecs, times in read]


def test_a_measured_schedule_is_made_of_a_step_with_the_codecs(trio: Replies) -> None:
    """It was made of times that were computed, and that no step had shown."""
    both = "activations int8, gradients int8"
    for reply in trio:
        assert reply["remeasured"] == [(f"0-1: {both}; 1-2: {both}", True)]


@on(TRIO)
def shares() -> Any:
    scheduler = made(None)
    train(scheduler)
    edges = scheduler._context.edges
    sizes = {(0, 1): 2**20, (1, 2): 8}
    found = latency_shares(sizes, rank(), edges, torch.device("cpu"))
    train(scheduler)
    scheduler.close()
    return found


def test_the_lower_rank_of_a_hop_times_its_messages(trio: Replies) -> None:
    found = [reply["shares"] for reply in trio]
    assert [sorted(each) for each in found] == [[(0, 1)], [(1, 2)], []]
    assert all(0 < share <= 1 for each in found for share in each.values())


def test_codecs_are_chosen_for_the_hops_where_they_save_time(trio: Replies) -> None:
    plain, coded, few = size(None), size("int8"), size("topk")
    both = "activations int8, gradients int8"
    sent = [
        ([coded], [coded, plain], [plain]),
        ([plain], [coded, plain], [coded]),
        ([plain], [plain], [plain]),
        ([coded], [coded], [coded]),
        ([plain], [plain], [few]),
    ]
    words = [f"0-1: {both}", f"1-2: {both}", "none", f"0-1: {both}; 1-2: {both}"]
    words += ["1-2: gradients topk"]
    for at, reply in enumerate(trio):
        *found, refusal = reply["auto"]
        assert [name for name, _ in found] == words
        assert [sizes for _, sizes in found] == [row[at] for row in sent]
        assert "one stage on each rank" in refusal


# Costs.


@on(TRIO)
def costs() -> Any:
    x, target = batch()
    scheduler = made({"0-1": "int8", "1-2": {"gradients": "topk"}})
    found = measure_costs(scheduler, x, target=target, links=False, repeats=1)
    program = scheduler.program
    crossing = {
        (c.kind, c.source, c.target): found.crossing(program.links[c.link], c).num_bytes
        for c in program.channels
    }
    seconds = simulate(program, found).step_seconds
    scheduler.close()
    return crossing, found.to_json() == type(found).from_json(found.to_json()).to_json(), seconds


def test_measured_costs_have_the_bytes_of_messages(trio: Replies) -> None:
    for reply in trio:
        crossing, is_saved, seconds = reply["costs"]
        assert crossing == {
            ("F", 0, 1): size("int8"),
            ("B", 1, 0): size("int8"),
            ("F", 1, 2): size(None),
            ("B", 2, 1): size("topk"),
        }
        assert is_saved
        assert seconds[0] > 0
