"""What a stage may change and return, what a loss may do, and divisors; habits: test_aliasing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.layers import (
    NUM_MICROBATCHES,
    WIDTH,
    Layer,
    batch,
    farthest,
    make,
    mean_square,
    train,
)
from tests.support.pipeline.scales import ELSEWHERE
from tests.support.pipeline.schedulers import MOST

pytestmark = pytest.mark.ranks(2)

ROWS = 8


def sum_of_squares(x: Tensor, target: Tensor) -> Tensor:
    return (x - target).square().sum()


def test_a_result_prints_its_loss_once_it_has_arrived() -> None:
    """Issue 16, point 10 (runtime): a result printed as an address; printing waits for nothing."""
    x, y = batch(ROWS)
    with closing(make(Layer(), Layer())) as scheduler:
        trained, evaluated = scheduler.step(x, target=y), scheduler.evaluate(x, target=y)
        early = repr(trained)
        arrived = f"StepResult(loss {trained.loss:g}, outputs [])"
        assert early in (arrived, "StepResult(loss is on its way, outputs [])")
        assert repr(trained) == arrived
        assert float(evaluated.loss) > 0
        assert repr(evaluated).endswith("outputs [(8, 3)])" if rank() else "outputs [])")


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


@pytest.mark.parametrize("way", ["other stages", "other microbatches"])
def test_a_stage_may_change_what_it_alone_was_given(way: str) -> None:
    """Gradients were off by 0.74: each rank has its own copy. What it may: test_aliasing."""
    (x, y), is_whole = batch(ROWS), way == "other microbatches"
    mask = torch.ones(1 if is_whole else ROWS, WIDTH, dtype=torch.float64)
    last = Masks() if way == "other stages" else Layer()
    names = {0: (["x", "mask"],), **({1: (["x", "mask"],)} if way == "other stages" else {})}
    options: Any = {"whole": ("mask",)} if is_whole else {}
    with closing(make(AddsTo(), last, names=names, **options)) as scheduler:
        said = outcome(partial(train, scheduler, x, mask=mask.clone(), target=y))
    assert "stage 0, microbatch 0: the stage has changed in place what it was given" in said


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_may_add_to_gradients_itself(schedule: str, *, recompute: bool) -> None:
    """torchtitan#4182 of 2026. With recompute it ran twice, and the head's gradient was doubled."""
    head, calls, (x, y) = Layer(), list[int](), batch(ROWS)

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
    (x, y), modules, twins, moves = batch(ROWS), [Layer(), Layer()], [Layer(), Layer()], list[int]()
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
    x, y = batch(ROWS)
    with closing(make(Layer(lambda linear, x: change(linear(x))), Layer())) as scheduler:
        said = outcome(partial(train, scheduler, x, target=y))
    assert said.startswith(ELSEWHERE if rank() else "StepError: stage 0 returned 'x' as a ")
    assert advice in said


def test_a_divisor_is_given_on_all_ranks() -> None:
    """Given where the loss is, it divided the gradients of that rank alone, without a word."""
    (x, y), divisor = batch(ROWS), {"loss_divisor": 7.0}
    true, own = [Layer(), Layer()], [Layer(), Layer()]
    loss = sum_of_squares(true[1](true[0](x)), y) / 7.0
    loss.backward()
    with closing(make(*own, loss_fn=sum_of_squares)) as scheduler:
        for who in range(2):
            alone = divisor if rank() == who else {}
            said = outcome(partial(train, scheduler, x, target=y, **alone))
            assert "ranks disagree on loss_divisor: " in said
        found = train(scheduler, x, target=y, **divisor)
        assert abs(found - float(loss)) / float(loss) <= MOST
        assert farthest(own[rank()], true[rank()]) <= MOST


def test_a_divisor_that_a_loss_of_half_precision_cannot_take_divides_gradients() -> None:
    """3e7 doubled all gradients, 1e8 made them zero: backward began with 1 / divisor."""
    x, y = (value.half() for value in batch(ROWS))
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


ONES = torch.ones(4, WIDTH, dtype=torch.float64)


def test_an_evaluation_in_inference_mode_spoils_no_step() -> None:
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
        said = outcome(partial(step, scheduler, ONES, loss_divisor="x" if rank() else 1.0))
        assert "could not convert string to float: 'x'" in said
