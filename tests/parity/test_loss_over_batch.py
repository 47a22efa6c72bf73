"""One loss of all microbatches, such as a contrastive one, against one process."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

import pipegrad
from pipegrad import Scheduler, Stage, Topology
from pipegrad.errors import ScheduleError, StepError
from pipegrad.schedules import Action, Schedule
from tests.support.rounding import rounding

WIDTH, ROWS = 6, 12
gather: Any = getattr(functional, "all_gather_single_autograd", None)
gather = gather or functional.all_gather_tensor_autograd  # its name before torch 2.13
MOST = rounding(ROWS * WIDTH, dtype=torch.float64)
MOST_OF_LOSS = rounding(1, dtype=torch.float32) * 4  # a result has a loss in float32, of about 4


class Towers(nn.Module):
    """Two towers, one on the first half of the stages, and what scales their product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.image = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(3)))
        self.text = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(3)))
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, pixels: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        image, text = self.image(pixels).tanh(), self.text(words).tanh()
        return F.normalize(image, dim=-1) * self.scale.exp(), F.normalize(text, dim=-1)


def true_loss(true: nn.Module, given: dict[str, Any]) -> Tensor:
    image, text = true(**given)
    return contrastive(image, text, torch.arange(len(image)))


def contrastive(image: Tensor, text: Tensor, target: Tensor) -> Tensor:
    products = image @ text.T
    assert len(products) == len(target)
    return F.cross_entropy(products, target) + F.cross_entropy(products.T, target)


def summed(image: Tensor, text: Tensor, target: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    best = (image @ text.T).argmax(1) == target
    loss = contrastive(image, text, target) * len(target)
    return loss, torch.tensor(len(target)), {"right": best.double().mean()}


def batch(seed: int = 1, rows: int = ROWS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"pixels": (rows, WIDTH), "words": (rows, WIDTH)}
    return {
        n: torch.randn(*size, generator=generator, dtype=torch.float64) for n, size in sizes.items()
    }


def scheduler_of(parts: Any, **options: Any) -> Scheduler:
    defaults: dict[str, Any] = {"schedule": "gpipe", "num_microbatches": 4, "loss_over": "batch"}
    return Scheduler(parts, Topology.create(pipeline=2), **{**defaults, **options})


class Twins:
    """The towers over two ranks, and in one process."""

    def __init__(self, **options: Any) -> None:
        self.parts, self.true = pipegrad.cut(Towers(), 2, example=batch(rows=2)), Towers()
        self.scheduler = scheduler_of(self.parts, **options)
        self.step, self.evaluate = self.scheduler.step, self.scheduler.evaluate
        (stage,) = self.scheduler.topology.local_stages
        self.held = dict(self.parts.modules[stage].named_parameters())

    def compare(self, loss: object, expected: Tensor) -> None:
        """Compares a step with one process, whose loss this is; forgets the gradients of both."""
        expected.backward()
        assert close(loss, expected)
        theirs = dict(self.true.named_parameters())
        found = {n: p.grad for n, p in self.held.items() if p.grad is not None}
        assert found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, theirs[name].grad, rtol=0, atol=MOST)
        for parameter in (*self.held.values(), *theirs.values()):
            parameter.grad = None


def close(loss: object, expected: Tensor) -> bool:
    return abs(float(loss) - float(expected.detach())) <= MOST_OF_LOSS  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [1, 3, 4])
@pytest.mark.parametrize("reduction", ["mean", "token_mean"])
def test_its_gradients_are_those_of_one_process(number: int, reduction: str) -> None:
    """Three microbatches have four rows each, and five have not the same number."""
    twins = Twins(
        num_microbatches=number,
        loss_fn=contrastive if reduction == "mean" else summed,
        loss_reduction=reduction,
    )
    target = torch.arange(ROWS)
    for seed in (1, 2):
        result = twins.step(**batch(seed), target=target)
        image, text = twins.true(**batch(seed))
        twins.compare(result.loss, contrastive(image, text, target))
        if reduction == "token_mean":
            right = ((image @ text.T).argmax(1) == target).double().mean()
            assert result.metrics == {"right": pytest.approx(float(right))}
    assert close(twins.evaluate(**batch(2), target=target).loss, true_loss(twins.true, batch(2)))
    assert twins.evaluate(**batch(2)).loss.isnan()
    uneven = twins.step(**batch(3, 11), target=target[:11], num_microbatches=5)
    twins.compare(uneven.loss, true_loss(twins.true, batch(3, 11)))
    twins.scheduler.close()


@pytest.mark.ranks(2)
def test_the_last_stage_may_keep_its_outputs_alone() -> None:
    """As in gradient caching: forwards without a graph, then each again with its backward."""
    forwards = list[Any]()  # references to what the last stage returned
    alive = list[int]()  # when the loss is computed
    true, own = Towers(), Towers()
    stage = dist.get_rank()
    module = own.image if stage == 0 else Text(own)
    module.register_forward_hook(lambda *a: forwards.append(weakref.ref(a[2][0])))

    def loss_fn(image: Tensor, text: Tensor, target: Tensor) -> Tensor:
        alive.append(sum(reference() is not None for reference in forwards))
        return contrastive(image, text, target)

    names = ["words", "image"], ["image", "text"]
    one = (
        Stage(module, 1, *names, recompute=True)
        if stage
        else Stage(module, 0, ["pixels"], ["image"])
    )
    scheduler = scheduler_of([one], loss_fn=loss_fn)
    target = torch.arange(ROWS)
    loss = scheduler.step(**batch(), target=target).loss
    expected = true_loss(true, batch())
    expected.backward()
    assert close(loss, expected)
    assert len(forwards) == (8 if stage else 4)
    assert alive == ([1] if stage else [])  # the last one, whose forward has not returned
    mine = dict(own.named_parameters())
    wanted = {n: p for n, p in true.named_parameters() if n.startswith("image") == (stage == 0)}
    for name, parameter in wanted.items():
        torch.testing.assert_close(mine[name].grad, parameter.grad, rtol=0, atol=MOST)
    scheduler.close()


class Text(nn.Module):
    def __init__(self, towers: Towers) -> None:
        super().__init__()
        self.text, self.scale = towers.text, towers.scale

    def forward(self, words: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        image = F.normalize(image.tanh(), dim=-1) * self.scale.exp()
        return image, F.normalize(self.text(words).tanh(), dim=-1)


@pytest.mark.ranks(4)
def test_a_loss_may_gather_the_rows_of_all_replicas() -> None:
    topology = Topology.create(pipeline=2)
    group = topology.group_along("dp")
    first = topology.coordinate("dp") * ROWS // 2

    def loss_fn(image: Tensor, text: Tensor, target: Tensor) -> Tensor:
        images, texts = (gather(x, 0, group) for x in (image, text))
        targets = gather(target.double(), 0, group)
        return contrastive(images, texts, targets.long())

    twins = Twins(num_microbatches=3, loss_fn=loss_fn)
    mine = {n: x[first : first + ROWS // 2] for n, x in batch().items()}
    result = twins.step(**mine, target=torch.arange(ROWS)[first : first + ROWS // 2])
    twins.compare(result.loss, true_loss(twins.true, batch()))
    twins.scheduler.close()


@pytest.mark.ranks(2)
def test_targets_get_gradients_of_one_process() -> None:
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    own, others = weights.clone().requires_grad_(), weights.clone().requires_grad_()

    def loss_fn(image: Tensor, text: Tensor, target: Tensor) -> Tensor:
        products = 0.3 * image @ text.T
        return (F.cross_entropy(products, torch.arange(ROWS), reduction="none") * target).mean()

    twins = Twins(loss_fn=loss_fn)
    for _ in range(2):
        loss = twins.step(**batch(), target=own).loss
        image, text = twins.true(**batch())
        twins.compare(loss, loss_fn(image, text, others))
        if dist.get_rank() == 1:
            torch.testing.assert_close(own.grad, others.grad, rtol=0, atol=MOST)
        own.grad = others.grad = None
    twins.scheduler.close()


@pytest.mark.ranks(4)
def test_a_tensor_of_the_loss_that_nobody_reduces_is_refused() -> None:
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def loss_fn(image: Tensor, text: Tensor, target: Tensor) -> Tensor:
        return contrastive(scale * image, text, target)

    twins = Twins(loss_fn=loss_fn)
    with pytest.raises(StepError, match="make it a parameter"):
        twins.step(**batch(), target=torch.arange(ROWS))
    twins.scheduler.close()


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused_in_words() -> None:
    for schedule, early in (("1f1b", "1B0"), ("zb-h1", "1I0"), ("eager-1f1b", "1B0")):
        with pytest.raises(ScheduleError, match=rf"has the backward {early}.*Take 'gpipe'"):
            Twins(schedule=schedule, loss_fn=contrastive)
    with pytest.raises(ScheduleError, match="loss_over is 'step', expected one of"):
        Twins(loss_over="step", loss_fn=contrastive)
    twins = Twins(loss_fn=contrastive)
    with pytest.raises(StepError, match="let loss_fn divide it"):
        twins.step(**batch(), target=torch.arange(ROWS), loss_divisor=2.0)
    twins.scheduler.close()


@pytest.mark.ranks(2)
def test_a_last_stage_of_split_backwards_may_begin_behind_all_forwards() -> None:
    own = [Action(1, "F", i) for i in range(3)]
    own += [Action(1, kind, i) for i in range(3) for kind in ("I", "W")]
    first = [Action(0, "F", i) for i in range(3)] + [Action(0, "B", i) for i in range(3)]
    schedule = Schedule("mine", 3, (0, 1), (tuple(first), tuple(own)))
    twins = Twins(schedule=schedule, num_microbatches=3, loss_fn=contrastive)
    loss = twins.step(**batch(), target=torch.arange(ROWS)).loss
    twins.compare(loss, true_loss(twins.true, batch()))
    twins.scheduler.close()
