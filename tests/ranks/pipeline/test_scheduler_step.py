"""What a step is told, and what happens around it, against one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from tests.support.gradients.cases import Case, Replies, on, outcome, replies
from tests.support.pipeline.models import TOKENS
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import (
    MOST,
    batch,
    compare,
    digest,
    error,
    most_buffers,
    named,
    share,
    topology,
    wrong,
)
from tests.support.pipeline.twins import Twins, tied
from tests.support.rounding import ADAM_EPS, rounding

PIPELINE: list[Case] = []
COPIES: list[Case] = []
pipeline = replies(2, PIPELINE)
copies = replies(4, COPIES)

# The divisor.


def sum_of_losses(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


@on(COPIES)
def sums_over_tokens() -> dict[str, float]:
    """Half of the targets of one replica are ignored: a mean of means would be wrong."""
    twins, at = Twins(loss_fn=sum_of_losses), topology(2)
    for step in range(2):
        tokens, target = batch(step, 16)
        target[:6, 1:] = -100
        number = int((target >= 0).sum())
        mine = share(tokens, at), share(target, at)
        result = twins.scheduler.step(mine[0], target=mine[1], loss_divisor=number / 2)
        twins.errors[f"loss {step}"] = error(result.loss, twins.alone(tokens, target))
        twins.compare(step)
    return twins.close()


def test_losses_that_are_sums_are_divided_by_what_they_count(copies: Replies) -> None:
    for at, found in enumerate(copies):
        assert len(found["sums_over_tokens"]) > 2 * 12
        assert wrong(found["sums_over_tokens"], MOST) == {}, f"rank {at}"


@on(PIPELINE)
def doubles() -> dict[str, float]:
    """Three microbatches: a third is not exact, and in float32 far from it."""
    twins = Twins(lambda: tied().double(), 3)
    for step in range(2):
        tokens, target = batch(step, 6)
        twins.scheduler.step(tokens, target=target)
        twins.alone(tokens, target)
        twins.compare(step)
    return twins.close()


def test_float64_is_not_divided_in_float32(pipeline: Replies) -> None:
    for at, found in enumerate(pipeline):
        assert wrong(found["doubles"], rounding(6 * TOKENS, dtype=torch.float64)) == {}, (
            f"rank {at}"
        )


@on(PIPELINE)
def losses_of_one_dimension() -> str:
    twins = Twins(loss_fn=lambda *given: loss_of(*given).reshape(1))
    tokens, target = batch(0, 8)
    found = outcome(lambda: twins.scheduler.step(tokens, target=target).loss.shape)
    twins.close()
    return found


def test_a_loss_of_one_element_may_have_a_dimension(pipeline: Replies) -> None:
    assert [found["losses_of_one_dimension"] for found in pipeline] == ["torch.Size([])"] * 2


# Around a step.


@on(PIPELINE)
def accumulation() -> dict[str, float]:
    twins = Twins()
    for step in range(2):
        for part in range(3):
            with twins.scheduler.sync.accumulate() if part < 2 else nullcontext():
                twins.step(10 * step + part)
        twins.compare(step)
    return twins.close()


def test_accumulated_steps_add_up(pipeline: Replies) -> None:
    for at, found in enumerate(pipeline):
        assert wrong(found["accumulation"], MOST) == {}, f"rank {at}"


@on(PIPELINE)
def autocast() -> dict[str, Any]:
    twins, bfloat16 = Twins(), torch.autocast("cpu", dtype=torch.bfloat16)
    for step in range(2):
        with bfloat16:
            twins.step(step, num_parts=4)
        twins.compare(step)
    tokens, target = batch(0, 8)
    twins.scheduler.step(tokens, target=target)
    with bfloat16:
        twins.alone(tokens, target, 4)
    apart = dict[str, float]()
    compare(apart, 0, named(twins.stages), twins.true)
    return {"errors": twins.close(), "apart": max(apart.values())}


def test_autocast_around_a_step_is_autocast_around_one_process(pipeline: Replies) -> None:
    for at, found in enumerate(pipeline):
        assert wrong(found["autocast"]["errors"], MOST) == {}, f"rank {at}"
        assert found["autocast"]["apart"] > 1e-3, "float32 is as good"


def with_norms() -> nn.Sequential:
    model = tied()
    for layer in (2, 6):
        model[layer] = nn.Sequential(model[layer], nn.BatchNorm1d(TOKENS))
    return model


@on(PIPELINE)
def norms_of_batches() -> dict[str, Any]:
    """Batch normalization has seen each microbatch once."""
    twins, counts = Twins(with_norms), list[int]()
    for step in range(3):
        twins.step(step, num_parts=4)
        twins.compare(step)
        tokens, target = batch(step, 8)
        twins.scheduler.evaluate(tokens, target=target)
        buffers = {n: b for stage in twins.stages for n, b in stage.module.named_buffers()}
        counts += [int(b) for name, b in buffers.items() if "num_batches" in name]
        truth = dict(twins.true.named_buffers())
        for name, buffer in buffers.items():
            twins.errors[f"step {step} {name}"] = error(buffer.float(), truth[name].float())
    return {"errors": twins.close(), "counts": counts}


def test_batch_normalization_counts_the_microbatches_and_no_more(pipeline: Replies) -> None:
    for at, found in enumerate(pipeline):
        assert found["norms_of_batches"]["counts"] == [4, 8, 12], f"rank {at}"
        assert wrong(found["norms_of_batches"]["errors"], MOST) == {}, f"rank {at}"


@on(PIPELINE)
def clipping() -> dict[str, Any]:
    twins, norms = Twins(), list[Tensor]()
    for step in range(2):
        twins.step(step)
        norms.append(twins.scheduler.sync.clip_grad_norm_(0.1))
        true_norm = nn.utils.clip_grad_norm_(twins.true.parameters(), 0.1)
        assert true_norm > 0.1
        twins.errors[f"step {step} norm"] = error(norms[-1], true_norm)
        twins.compare(step)
    return {"errors": twins.close(), "norms": [digest(norm) for norm in norms]}


def test_clipping_after_a_step_is_that_of_one_process(pipeline: Replies) -> None:
    for at, found in enumerate(pipeline):
        assert wrong(found["clipping"]["errors"], MOST) == {}, f"rank {at}"
    assert pipeline[0]["clipping"]["norms"] == pipeline[1]["clipping"]["norms"]


@on(PIPELINE)
def adamw() -> dict[str, Any]:
    """Five steps, and the loss gets less."""
    twins = Twins(schedule="eager-1f1b")
    mine = named(twins.stages)
    optimizers = [
        torch.optim.AdamW(dict.fromkeys(parameters), lr=1e-2, eps=ADAM_EPS)
        for parameters in (mine.values(), twins.true.parameters())
    ]
    losses = list[float]()
    for _ in range(5):
        losses.append(twins.step(0).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    theirs = dict(twins.true.named_parameters(remove_duplicate=False))
    for name, parameter in mine.items():
        twins.errors[name] = error(parameter.detach(), theirs[name].detach())
    bits = [digest(p) for name, p in mine.items() if name in ("0.weight", "7.weight")]
    twins.scheduler.sync.check_replicas()
    return {"errors": twins.close(), "losses": losses, "bits": bits}


def test_five_steps_of_adamw_stay_with_one_process(pipeline: Replies) -> None:
    for at, found in enumerate(pipeline):
        assert wrong(found["adamw"]["errors"], rounding(5 * 8 * TOKENS)) == {}, f"rank {at}"
        assert found["adamw"]["losses"][-1] < 0.9 * found["adamw"]["losses"][0]
    assert pipeline[0]["adamw"]["bits"] == pipeline[1]["adamw"]["bits"]


@on(PIPELINE)
def buffers() -> list[tuple[int, int]]:
    """Steps of both kinds in turns."""
    found = []
    for schedule in ("gpipe", "1f1b", "eager-1f1b"):
        twins = Twins(num_microbatches=8, schedule=schedule)
        for step in range(5):
            tokens, target = batch(step, 8)
            twins.scheduler.step(tokens, target=target)
            twins.scheduler.evaluate(tokens, target=target)
            for parameter in named(twins.stages).values():
                parameter.grad = None
            found.append((twins.scheduler.receive_buffers, most_buffers(twins.scheduler)))
        twins.close()
    return found


def test_buffers_are_made_once(pipeline: Replies) -> None:
    for at, found in enumerate(pipeline):
        told = found["buffers"]
        for start in range(0, 15, 5):
            (learning, most), *later = told[start : start + 5]
            assert 0 < learning <= most, f"rank {at}"
            assert later == [(later[0][0], most)] * 4, f"rank {at}"
            assert learning <= later[0][0] <= most, f"rank {at}"
