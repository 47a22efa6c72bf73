"""GradScaler: one decision for all ranks, and the scales and parameters of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pipegrad
from pipegrad import GradientSync
from tests.support.gradients.cases import (
    Case,
    give,
    on,
    outcome,
    rank,
    replicated,
    replies,
    stage,
    tied,
)
from tests.support.gradients.placements import OWNER, REPLICATE, SHARD, By, alone, compute

TWO: list[Case] = []

two = replies(2, TWO)

STEPS = 8
OPTIONS: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}
Optimizer = Callable[..., torch.optim.Optimizer]
INF = float("inf")


def gradients(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns those of "w" and of "v" in a step; of two steps one element overflows."""
    drawn = torch.Generator().manual_seed(step)
    w, v = torch.randn(12, generator=drawn), torch.randn(1, generator=drawn)
    if step == 1:
        w[2] = INF
    if step == 5:
        v[0] = float("nan")
    return w, v


def trained_by_torch(make: Optimizer, clip: float) -> tuple[list[float], list[list[float]]]:
    """One process: scales and parameters after each step."""
    module = stage(w=(12,), v=(1,))
    optimizer, scaler = make(module.parameters()), torch.amp.GradScaler("cpu", **OPTIONS)
    scales, values = [], []
    for step in range(STEPS):
        w, v = gradients(step)
        loss = (module.get_parameter("w") * w).sum() + (module.get_parameter("v") * v).sum()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        values.append([x for p in module.parameters() for x in p.tolist()])
    return scales, values


def trained(
    sync: GradientSync, module: nn.Module, make: Optimizer, clip: float
) -> tuple[list[float], list[list[float]]]:
    """The same on ranks, on whichever of them the parameters are."""
    optimizer = make(sync.optimizer_parameters())
    scaler = pipegrad.GradScaler(sync, **OPTIONS)
    scales, values = [], []
    for step in range(STEPS):
        given = dict(zip("wv", gradients(step), strict=True))
        own = {name: given[name] for name, _ in module.named_parameters() if name in given}

        def backward(own: dict[str, torch.Tensor] = own) -> None:
            terms = [(module.get_parameter(name) * g).sum() for name, g in own.items()]
            scaler.scale(torch.stack(terms).sum()).backward()

        compute(sync, backward)
        if clip:
            scaler.unscale_(optimizer)
            sync.clip_grad_norm_(clip)
        scaler.step(optimizer)
        scaler.update()
        sync.publish()
        optimizer.zero_grad()
        sync.wait_parameters()
        scales.append(scaler.get_scale())
        values.append([x for p in module.parameters() for x in p.tolist()])
    return scales, values


SGD: Optimizer = partial(torch.optim.SGD, lr=0.1)
FUSED: Optimizer = partial(torch.optim.SGD, lr=0.1, fused=True)
ADAM: Optimizer = partial(torch.optim.AdamW, lr=0.1)


@on(TWO)
def placed() -> Any:
    found = {}
    for name, placement in {"replicate": REPLICATE, "owner": OWNER, "sharded": SHARD}.items():
        for kind, make in {"sgd": SGD, "fused": FUSED, "adam": ADAM}.items():
            module = stage(w=(12,), v=(1,))
            sync = alone(module, By("dp", placement, "mean"))
            found[name, kind] = trained(sync, module, make, 0.0)
    module = stage(w=(12,), v=(1,))
    found["sharded", "clip"] = trained(alone(module, By("dp", SHARD, "mean")), module, SGD, 0.5)
    return found


@on(TWO)
def stored() -> Any:
    """fp16 parameters, stepped as fp32 copies: only the decisions are one process's."""
    module = stage(w=torch.zeros(12, dtype=torch.float16), v=torch.zeros(1, dtype=torch.float16))
    sync = alone(module, By("dp", SHARD, "mean"), master_dtype=torch.float32)
    return trained(sync, module, SGD, 0.0)[0]


@on(TWO)
def stages() -> Any:
    """Two stages with a parameter each: an overflow is on one rank alone."""
    module = stage(**{"wv"[rank()]: (12,) if rank() == 0 else (1,)})
    return trained(tied(module), module, SGD, 0.0)


@pytest.mark.parametrize("placement", ["replicate", "owner", "sharded"])
@pytest.mark.parametrize(("kind", "make"), [("sgd", SGD), ("fused", FUSED), ("adam", ADAM)])
def test_scales_and_parameters_are_those_of_one_process(
    two: list[dict[str, Any]], placement: str, kind: str, make: Optimizer
) -> None:
    """Issue 16, point 5. With rows, ranks without an overflow stepped, and scales went apart."""
    scales, values = trained_by_torch(make, 0.0)
    assert scales[:3] == [8.0, 4.0, 4.0]  # the second step overflows
    assert values[0] == values[1] != values[2]
    for reply in two:
        assert reply["placed"][placement, kind] == (scales, values)


def test_clipping_comes_between_unscaling_and_the_step(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 5."""
    scales, values = trained_by_torch(SGD, 0.5)
    for reply in two:
        got_scales, got = reply["placed"]["sharded", "clip"]
        assert got_scales == scales
        # Both norms add up 13 squares, in another order; a step adds one rounding more.
        most = 4 * STEPS * torch.finfo(torch.float32).eps * 13**0.5
        assert torch.tensor(got).sub(torch.tensor(values)).abs().max() <= most


def test_an_overflow_on_one_stage_skips_the_step_on_all(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 5. The stage with the overflow skipped, the other one stepped."""
    scales, values = trained_by_torch(SGD, 0.0)
    assert two[0]["stages"] == (scales, [each[:12] for each in values])
    assert two[1]["stages"] == (scales, [each[12:] for each in values])


def test_copies_in_another_dtype_are_unscaled(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 5."""
    assert [reply["stored"] for reply in two] == [trained_by_torch(SGD, 0.0)[0]] * 2


# --- several optimizers, state, mistakes


@on(TWO)
def two_optimizers() -> Any:
    """Each has its own decision, and the scale looks at both; on each rank one is empty."""
    module = stage(**{"wv"[rank()]: (4,)})
    sync = tied(module)
    groups = sync.optimizer_parameters(lambda record: {"name": record.name})
    optimizers = [torch.optim.SGD([group], lr=1.0) for group in groups]
    scaler = pipegrad.GradScaler(sync, init_scale=4.0)
    loss = scaler.scale(module.get_parameter("wv"[rank()]).sum())
    compute(sync, (loss * (INF if rank() == 0 else 1.0)).backward)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return module.get_parameter("wv"[rank()]).tolist(), scaler.get_scale()


def test_each_optimizer_has_its_decision(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 5. A rank on which an optimizer has nothing ended in an AssertionError."""
    assert two[0]["two_optimizers"] == ([0.0] * 4, 2.0)
    assert two[1]["two_optimizers"] == ([-1.0] * 4, 2.0)


@on(TWO)
def state() -> Any:
    module = stage(w=(4,))
    sync = replicated(module)
    scaler = pipegrad.GradScaler(sync, **OPTIONS)
    before = scaler.state_dict()
    scaler.load_state_dict({**before, "scale": 2.0, "_growth_tracker": 1})
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    compute(sync, lambda: scaler.scale(module.get_parameter("w").sum()).backward())
    scaler.step(optimizer)
    scaler.update()
    off = pipegrad.GradScaler(sync, enabled=False)
    loss = torch.ones(())
    with torch.no_grad():
        evaluated = scaler.scale(torch.ones(())).item()
    return before, scaler.state_dict(), off.scale(loss) is loss, off.state_dict(), evaluated


def test_state_options_and_evaluation(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 5. The interface is that of torch, also of a scaler that is off."""
    for reply in two:
        before, after, same, off, evaluated = reply["state"]
        assert before == torch.amp.GradScaler("cpu", **OPTIONS).state_dict()
        assert (after["scale"], after["_growth_tracker"]) == (4.0, 0)
        assert (same, off, evaluated) == (True, {}, 1.0)


@on(TWO)
def mistakes() -> Any:
    found = {}
    module = stage(w=(4,))
    sync = replicated(module)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    found["options"] = outcome(lambda: pipegrad.GradScaler(sync, init_scale=2.0 + rank()))
    scaler = pipegrad.GradScaler(sync, init_scale=2.0)
    sync.prepare()
    found["inside"] = outcome(lambda: scaler.unscale_(optimizer))
    scaler = pipegrad.GradScaler(sync, init_scale=2.0)
    give(module, w=1.0)
    sync.stage_final(0)
    sync.finish()
    found["unscaled"] = outcome(lambda: scaler.step(optimizer))
    scaler = pipegrad.GradScaler(sync, init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.update(2.0 + rank())
    found["scales"] = outcome(lambda: scaler.step(optimizer))
    half = stage(w=torch.zeros(4, dtype=torch.float16 if rank() == 0 else torch.float32))
    split = tied(half)
    scaler = pipegrad.GradScaler(split, init_scale=2.0)
    compute(split, lambda: scaler.scale(half.get_parameter("w").sum()).backward())
    optimizer = torch.optim.SGD(split.optimizer_parameters(), lr=1.0)
    found["half"] = outcome(lambda: scaler.step(optimizer))
    return found


@pytest.mark.parametrize(
    ("mistake", "words"),
    {
        "options": "AgreementError: ranks disagree on the options of GradScaler",
        "inside": "StepError: gradients cannot be unscaled on ranks {0: 'a step is not",
        "unscaled": "StepError: no rank has scaled a loss",
        "scales": "StepError: the scale differs between ranks: {0: 2.0, 1: 3.0}",
        "half": "StepError: gradients cannot be unscaled on ranks {0: 'gradients are torch.float16",
    }.items(),
)
def test_mistakes_are_told_on_all_ranks(
    two: list[dict[str, Any]], mistake: str, words: str
) -> None:
    """Issue 16, point 5. Also what one rank alone does wrong."""
    assert [reply["mistakes"][mistake][: len(words)] for reply in two] == [words] * 2
