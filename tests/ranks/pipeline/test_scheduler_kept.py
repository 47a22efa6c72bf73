"""What a stage keeps of its inputs and outputs, what it may return, and what a step tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.layers import (
    NUM_MICROBATCHES,
    WIDTH,
    Layer,
    distance,
    farthest,
    make,
    mean_square,
    normal,
    train,
)
from tests.support.pipeline.scales import ELSEWHERE
from tests.support.pipeline.schedulers import MOST

pytestmark = pytest.mark.ranks(2)

ROWS = 8


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(ROWS, WIDTH, seed=seed), normal(ROWS, WIDTH, seed=seed + 1)


def sum_of_squares(x: Tensor, target: Tensor) -> Tensor:
    return (x - target).square().sum()


class Remembers(Layer):
    """Adds what it was given for the microbatch before, as Transformer-XL does."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before, self.memory = self.memory, x.detach()
        out: Tensor = self.linear(x).tanh()
        return out if before is None else out + before


class Returns(Layer):
    """Returns the same memory each time, as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.empty(ROWS // NUM_MICROBATCHES, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x).tanh()
        return made if torch.is_grad_enabled() and made.requires_grad else self.out.copy_(made)


def one_process(modules: list[Layer], x: Tensor, y: Tensor) -> Tensor:
    losses = [
        mean_square(modules[1](modules[0](part)), target)
        for part, target in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True)
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_stage_may_keep_what_it_was_given(schedule: str) -> None:
    """Issue 16, point 10 (runtime 6): the receive buffer was used again: gradients off by 0.74."""
    modules, twins = [[Layer(), Remembers()] for _ in range(2)]
    with closing(make(*modules, schedule=schedule)) as scheduler:
        for step in range(4):
            x, y = batch(step)
            loss = train(scheduler, x, target=y)
            for twin in twins:
                twin.zero_grad()
            true = one_process(twins, x, y)
            true.backward()
            assert abs(loss - float(true)) <= MOST
            assert farthest(modules[rank()], twins[rank()]) <= MOST
        x, y = batch(9)
        evaluated = float(scheduler.evaluate(x, target=y).loss)
        assert abs(evaluated - float(one_process(twins, x, y))) <= MOST


def test_hooks_may_collect_and_results_print() -> None:
    modules, kept, (x, y) = [Layer(), Layer()], list[Tensor](), batch()
    with closing(make(*modules, num_microbatches=ROWS)) as scheduler:
        for _ in range(3):
            train(scheduler, x, target=y)
        module = modules[rank()]
        hook = module.register_forward_pre_hook(lambda _, args: kept.append(args[0].detach()))
        train(scheduler, x, target=y)
        hook.remove()
        first = Layer()(x) if rank() else x
        assert all(distance(k, w) < MOST for k, w in zip(kept, first.split(1), strict=True))
    # A result prints its loss once it has arrived. Issue 16, point 10 (runtime): a result printed
    # as an address; printing waits for nothing.
    x, y = batch()
    with closing(make(Layer(), Layer())) as scheduler:
        trained, evaluated = scheduler.step(x, target=y), scheduler.evaluate(x, target=y)
        early = repr(trained)
        arrived = f"StepResult(loss {trained.loss:g}, outputs [])"
        assert early in (arrived, "StepResult(loss is on its way, outputs [])")
        assert repr(trained) == arrived
        assert float(evaluated.loss) > 0
        assert repr(evaluated).endswith("outputs [(8, 3)])" if rank() else "outputs [])")


@pytest.mark.parametrize("which", [0, 1])
def test_a_stage_may_return_the_same_memory_each_time(which: int) -> None:
    """Issue 16, point 10 (runtime 6): in evaluation the loss was off by 0.064."""
    modules, (x, y) = [Layer(), Layer()], batch()
    modules[which] = Returns()
    true = Layer()(Layer()(x))
    loss = float(mean_square(true, y))
    with closing(make(*modules)) as scheduler:
        result = [scheduler.evaluate(x, target=y) for _ in range(2)][1]
        assert abs(float(result.loss) - loss) <= MOST
        assert not rank() or distance(result.outputs[0], true) <= MOST
    modules[which].requires_grad_(False)
    # Weights are equal, and one of them is frozen.
    with closing(make(*modules, allow_unsynced=["linear.*"])) as frozen:
        for _ in range(2):
            assert abs(train(frozen, x, target=y) - loss) <= MOST


class Overwrites(Layer):
    """Returns one piece of memory again and again, with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.empty(ROWS // NUM_MICROBATCHES, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.out = self.out.detach()
        return self.out.copy_(self.linear(x).tanh())


class MovesOn(Layer):
    """Adds a running mean of what it has returned, which it keeps there."""

    mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).tanh()
        if self.mean is not None:
            out = out + self.mean.mul_(0.5)
        self.mean = out.detach()
        return out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", [Overwrites, MovesOn])
def test_a_stage_may_not_write_into_what_it_has_returned(kind: Any, schedule: str) -> None:
    """It was sent late, with the values of a later microbatch, and without a word."""
    x, y = batch()
    for recompute in (False, True):
        modules = [kind(), Layer()]
        with closing(make(*modules, schedule=schedule, recompute=recompute)) as scheduler:
            said = outcome(partial(train, scheduler, x, target=y))
        assert said.startswith(f"StepError: {ELSEWHERE[11:]}" if rank() else "StepError: ")
        assert "return a clone of it" in said


class AddsTo(Layer):
    """Changes its mask in place."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask += 1
        out: Tensor = self.linear(x) + mask
        return out


class Masks(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + mask
        return out


@pytest.mark.parametrize("way", ["other stages", "other microbatches", "nobody else"])
def test_a_stage_may_change_what_it_alone_was_given(way: str) -> None:
    """Gradients were off by 0.74: each rank has its own copy of a batch."""
    (x, y), is_whole = batch(), way == "other microbatches"
    mask = torch.ones(1 if is_whole else ROWS, WIDTH, dtype=torch.float64)
    last = Masks() if way == "other stages" else Layer()
    names = {0: (["x", "mask"],), **({1: (["x", "mask"],)} if way == "other stages" else {})}
    options: Any = {"whole": ("mask",)} if is_whole else {}
    with closing(make(AddsTo(), last, names=names, **options)) as scheduler:
        said = outcome(partial(train, scheduler, x, mask=mask.clone(), target=y))
    if way == "nobody else":
        true = mean_square(Layer()(Layer().linear(x) + 2), y)
        assert abs(float(said) - float(true)) <= MOST
    else:
        assert "stage 0, microbatch 0: the stage has changed in place what it was given" in said


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_may_add_to_gradients_itself(schedule: str, *, recompute: bool) -> None:
    """torchtitan#4182 of 2026. With recompute it ran twice, and the head's gradient was doubled."""
    head, calls, (x, y) = Layer(), list[int](), batch()

    class InPieces(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor, target: Tensor) -> Tensor:
            calls.append(1)
            with torch.enable_grad():
                leaf = out.detach().requires_grad_()
                loss = mean_square(head(leaf), target)
            loss.backward()
            ctx.gradient = leaf.grad
            return loss.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return ctx.gradient * gradient, None

    modules, twins, true_head = [Layer(), Layer()], [Layer(), Layer()], Layer()
    modules[1].head = head
    options: Any = {"loss_fn": InPieces.apply, "recompute": recompute, "allow_unsynced": ["*"]}
    with closing(make(*modules, schedule=schedule, **options)) as scheduler:
        loss = train(scheduler, x, target=y)
    true = mean_square(true_head(twins[1](twins[0](x))), y)
    true.backward()
    assert abs(loss - float(true)) <= MOST
    assert len(calls) == rank() * NUM_MICROBATCHES
    assert farthest(modules[rank()].linear, twins[rank()].linear) <= MOST
    assert not rank() or farthest(head, true_head) <= MOST


def test_gradients_side_by_side_in_one_memory_stay_there() -> None:
    """So do slots of a bucket: each new gradient was copied out of its own, and back at the end."""
    (x, y), modules, twins, moves = batch(), [Layer(), Layer()], [Layer(), Layer()], list[int]()
    parameters = list(modules[rank()].parameters())
    sizes = [p.numel() for p in parameters]
    slots = dict[Tensor, Tensor](zip(parameters, y.new_zeros(sum(sizes)).split(sizes), strict=True))

    def move(moved: Tensor) -> None:
        assert moved.grad is not None
        if moved.grad.data_ptr() != slots[moved].data_ptr():
            moved.grad = slots[moved].view_as(moved).copy_(moved.grad)
            moves.append(1)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(move)
    with closing(make(*modules)) as scheduler:
        train(scheduler, x, target=y)
    mean_square(twins[1](twins[0](x)), y).backward()
    assert len(moves) == len(parameters)
    assert farthest(modules[rank()].linear, twins[rank()].linear) <= MOST


def as_dtensor(x: Tensor) -> Tensor:
    mesh = DeviceMesh("cpu", [rank()], _init_backend=False)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (as_dtensor, "output.full_tensor()"),
        (lambda x: x.to_sparse(), "to_dense()"),
        (lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged), "a torch.Tensor"),
    ],
    ids=["DTensor", "sparse", "jagged"],
)
def test_what_cannot_be_sent_is_refused(change: Callable[[Tensor], Tensor], advice: str) -> None:
    """Issue 16, point 14: a DTensor as an output ended in "invalid python storage"."""
    x, y = batch()
    with closing(make(Layer(lambda linear, x: change(linear(x))), Layer())) as scheduler:
        said = outcome(partial(train, scheduler, x, target=y))
    assert said.startswith(ELSEWHERE if rank() else "StepError: stage 0 returned 'x' as a ")
    assert advice in said


def test_a_divisor_is_needed_where_the_loss_is() -> None:
    """Issue 16, point 10 (runtime 12): right gradients, and "gradients are wrong" on all ranks."""
    x, y = batch()
    true = float(sum_of_squares(Layer()(Layer()(x)), y)) / 7.0
    divisor = {"loss_divisor": 7.0}
    with closing(make(Layer(), Layer(), loss_fn=sum_of_squares)) as scheduler:
        for who in ([1], [0, 1], [1]):
            loss = train(scheduler, x, target=y, **(divisor if rank() in who else {}))
            assert abs(loss - true) / true <= MOST
        said = outcome(partial(train, scheduler, x, target=y, **({} if rank() else divisor)))
    assert "loss_divisor differs between the 2 ranks that compute a loss or gave one" in said


def test_a_divisor_that_a_loss_of_half_precision_cannot_take_divides_gradients() -> None:
    """3e7 doubled all gradients, 1e8 made them zero: backward began with 1 / divisor."""
    x, y = (value.half() for value in batch())
    found = list[list[Tensor]]()
    for divisor in (1.0, 64.0, 3e7, 1e8):
        halves = [Layer().half(), Layer().half()]
        with closing(make(*halves, loss_fn=sum_of_squares)) as scheduler:
            train(scheduler, x, target=y, loss_divisor=divisor)
            grads = [p.grad for p in halves[rank()].parameters()]
            found.append([grad for grad in grads if grad is not None])
        assert [g.tolist() for g in found[-1]] == [(g / divisor).tolist() for g in found[0]]
    assert all(bool(g.any()) for g in found[2])


# What users do by mistake, and modules do by habit: right numbers, or an error on all ranks.


LARGE = 200_000
ONES = torch.ones(4, WIDTH, dtype=torch.float64)


class Counts(nn.Module):
    """Returns a buffer that it changes in place, while what it returned is still to be sent."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("n", torch.zeros(1, LARGE))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.n += 1
        return x * self.weight, self.n


def test_buffers_empty_tensors_and_inference_mode_are_handed_on() -> None:
    names = {0: (["x"], ["x", "n"]), 1: (["x", "n"], ["x"])}
    options: Any = {"schedule": "gpipe", "loss_fn": lambda out, target: (out * target).sum()}
    scheduler = make(Counts(), Layer(lambda _, x, n: x * n[:, :WIDTH]), names=names, **options)
    # Microbatches of a row of three, counted 1 to 4, then 5 to 8.
    losses = [train(scheduler, ONES, target=ONES, loss_divisor=1.0) for _ in range(2)]
    assert losses == [30.0, 78.0]
    scheduler.close()
    scheduler.close()

    # Empty tensors cross.
    def take(linear: nn.Module, x: Tensor, nothing: Tensor) -> Any:
        assert nothing.numel() == 0
        return linear(x).tanh()

    give: Any = lambda linear, x: (linear(x).tanh(), torch.empty(0))  # noqa: E731
    names = {0: (["x"], ["x", "nothing"]), 1: (["x", "nothing"], ["x"])}
    loss = float(mean_square(Layer()(Layer()(ONES)), ONES))
    with closing(make(Layer(give), Layer(take), names=names)) as scheduler:
        for _ in range(3):
            assert abs(train(scheduler, ONES, target=ONES) - loss) < 1e-6  # it is float32
    # Evaluation in inference mode spoils no step.
    with closing(make(Layer(), Layer())) as scheduler:
        for _ in range(2):
            with torch.inference_mode():
                evaluated = float(scheduler.evaluate(ONES, target=ONES).loss)
            assert train(scheduler, ONES, target=ONES) == evaluated > 0


def test_what_differs_or_has_no_graph_is_told_to_all() -> None:
    says = "the loss does not depend on anything that requires a gradient"
    detached: Any = lambda out, target: mean_square(out.detach(), target)  # noqa: E731
    with closing(make(Layer(), Layer(), loss_fn=detached)) as scheduler:
        assert says in outcome(partial(train, scheduler, ONES, target=ONES))
    with closing(make(Layer(), Layer())) as scheduler, torch.no_grad():
        assert says in outcome(partial(train, scheduler, ONES, target=ONES))
    # What differs between ranks is told to all.
    step, divisor = partial(train, target=ONES), {"loss_divisor": 1.0 + rank()}
    mean: Any = lambda out, target: (out.mean() - target).square().sum()  # noqa: E731
    with closing(make(Layer(), Layer(), loss_fn=mean)) as scheduler:
        said = outcome(partial(step, scheduler, torch.cat([ONES, ONES])))
        assert "ranks disagree on how many rows their tensors have" in said
    with closing(make(Layer(), Layer())) as scheduler:
        said = outcome(partial(step, scheduler, ONES, **divisor))
        assert "ranks disagree on loss_divisor" in said
    with closing(make(Layer(), Layer())) as scheduler:
        assert step(scheduler, ONES) > 0
        said = outcome(partial(step, scheduler, ONES, **divisor))
        assert "loss_divisor differs between the 2 ranks" in said
    with closing(make(Layer(), Layer())) as scheduler:
        said = outcome(partial(step, scheduler, ONES, loss_divisor="x" if rank() else 1.0))
        assert "could not convert string to float: 'x'" in said
    # Losses may have any shape of one element.
    shapes = [(), (1,), (1, 1), ()] * 2
    shaped: Any = lambda *given: mean_square(*given).reshape(shapes.pop(0))  # noqa: E731
    found = []
    for loss_fn in (mean_square, shaped):
        with closing(make(Layer(), Layer(), loss_fn=loss_fn)) as scheduler:
            found.append([train(scheduler, ONES, target=ONES) for _ in range(2)])
    assert found[0] == found[1]


def test_a_refusal_behind_an_accumulated_step_is_told() -> None:
    """Rank 1 is refused alone, while rank 0 waits for its bucket: no rank of its pipeline helps."""
    with closing(make(Layer())) as scheduler:
        with scheduler.sync.accumulate():
            assert train(scheduler, ONES, target=ONES) > 0
        time.sleep(0.5 * rank())
        given = ONES[:1] if rank() else ONES
        said = outcome(partial(train, scheduler, given, target=given))
        assert said.startswith("StepError: tensors of") or rank() == 0
        assert "StepError: tensors of" in said
        assert "rank 1: " in said or rank() == 1
