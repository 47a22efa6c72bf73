"""GradScaler: one decision for all ranks, and the scales and parameters of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
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

STEPS = 50
OPTIONS: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}
CLIPS = ("", "unscale_", "clip", "measure")  # what comes before scaler.step()
Optimizer = Callable[..., torch.optim.Optimizer]
INF, MAX_NORM = float("inf"), 0.5


def gradients(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns those of "w" and of "v" in a step; in some steps one element overflows."""
    drawn = torch.Generator().manual_seed(step)
    w, v = torch.randn(12, generator=drawn), torch.randn(1, generator=drawn)
    if step % 9 == 1:
        w[2] = INF
    if step % 9 == 5:
        v[0] = float("nan")
    return w, v


def trained_by_torch(make: Optimizer, clip: str) -> tuple[list[float], list[list[float]]]:
    """One process: scales and parameters after each step."""
    module = stage(w=(12,), v=(1,))
    optimizer, scaler = make(module.parameters()), torch.amp.GradScaler("cpu", **OPTIONS)
    scales, values = [], []
    for step in range(STEPS):
        w, v = gradients(step)
        loss = (module.get_parameter("w") * w).sum() + (module.get_parameter("v") * v).sum()
        scaler.scale(loss).backward()
        if clip in ("unscale_", "clip"):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        values.append([x for p in module.parameters() for x in p.tolist()])
    return scales, values


def trained(
    sync: GradientSync, module: nn.Module, make: Optimizer, clip: str
) -> tuple[list[float], list[list[float]]]:
    """The same on ranks, on whichever of them the parameters are."""
    optimizer = sync.optimizer(make)
    scaler = pipegrad.GradScaler(sync, **OPTIONS)
    scales, values = [], []
    for step in range(STEPS):
        given = dict(zip("wv", gradients(step), strict=True))
        own = {name: given[name] for name, _ in module.named_parameters() if name in given}

        def backward(own: dict[str, torch.Tensor] = own) -> None:
            terms = [(module.get_parameter(name) * g).sum() for name, g in own.items()]
            scaler.scale(torch.stack(terms).sum()).backward()

        compute(sync, backward)
        if clip == "unscale_":
            scaler.unscale_(optimizer)
        if clip:
            sync.clip_grad_norm_(INF if clip == "measure" else MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
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
            for clip in CLIPS:
                module = stage(w=(12,), v=(1,))
                sync = alone(module, By("dp", placement, "mean"))
                found[name, kind, clip] = trained(sync, module, make, clip)
                sync.close()
    return found


@on(TWO)
def stored() -> Any:
    """fp16 parameters, stepped as fp32 copies: only the decisions are one process's."""
    module = stage(w=torch.zeros(12, dtype=torch.float16), v=torch.zeros(1, dtype=torch.float16))
    sync = alone(module, By("dp", SHARD, "mean"), master_dtype=torch.float32)
    return trained(sync, module, SGD, "")[0]


@on(TWO)
def stages() -> Any:
    """Two stages with a parameter each: an overflow is on one rank alone."""
    found = {}
    for clip in CLIPS:
        module = stage(**{"wv"[rank()]: (12,) if rank() == 0 else (1,)})
        found[clip] = trained(tied(module), module, SGD, clip)
    return found


@pytest.mark.parametrize("placement", ["replicate", "owner", "sharded"])
@pytest.mark.parametrize(("kind", "make"), [("sgd", SGD), ("fused", FUSED), ("adam", ADAM)])
def test_scales_and_parameters_are_those_of_one_process(
    two: list[dict[str, Any]], placement: str, kind: str, make: Optimizer
) -> None:
    """Issue 16, point 5. With rows, ranks without an overflow stepped, and scales went apart."""
    scales, values = trained_by_torch(make, "")
    assert scales[:3] == [8.0, 4.0, 4.0]  # the second step overflows
    assert values[0] == values[1] != values[2]
    assert sum(after < before for before, after in pairwise(scales)) == 11
    for reply in two:
        assert reply["placed"][placement, kind, ""] == (scales, values)
        # With an infinite max_norm it is unscaled by the norm's pass, and nothing is clipped.
        assert reply["placed"][placement, kind, "measure"] == (scales, values)


@pytest.mark.parametrize("placement", ["replicate", "owner", "sharded"])
@pytest.mark.parametrize(("kind", "make"), [("sgd", SGD), ("fused", FUSED)])
@pytest.mark.parametrize("clip", ["unscale_", "clip"])
def test_clipping_comes_between_unscaling_and_the_step(
    two: list[dict[str, Any]], placement: str, kind: str, make: Optimizer, clip: str
) -> None:
    """Issue 16, point 5; issue 18, point 4: clipping unscales by itself."""
    scales, values = trained_by_torch(make, clip)
    for reply in two:
        got_scales, got = reply["placed"][placement, kind, clip]
        assert got_scales == scales
        # Both norms add up 13 squares, in another order; a step adds one rounding more.
        most = 4 * STEPS * torch.finfo(torch.float32).eps * 13**0.5
        assert torch.tensor(got).sub(torch.tensor(values)).abs().max() <= most


@pytest.mark.parametrize("clip", CLIPS)
def test_an_overflow_on_one_stage_skips_the_step_on_all(
    two: list[dict[str, Any]], clip: str
) -> None:
    """Issue 16, point 5. The stage with the overflow skipped, the other one stepped."""
    scales, values = trained_by_torch(SGD, clip)
    most = 4 * STEPS * torch.finfo(torch.float32).eps * 13**0.5 if "c" in clip else 0.0
    for reply, own in zip(two, (slice(0, 12), slice(12, 13)), strict=True):
        got_scales, got = reply["stages"][clip]
        assert got_scales == scales
        expected = torch.tensor([each[own] for each in values])
        assert torch.tensor(got).sub(expected).abs().max() <= most


@on(TWO)
def one_pass() -> Any:
    """Counts the writes to a gradient, and the messages, from `finish` to the optimizer's step."""
    found = {}
    for clip in CLIPS:
        module = stage(w=(4096,))  # so that each rank has a shard
        sync = alone(module, By("dp", SHARD, "mean"))
        optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
        scaler = pipegrad.GradScaler(sync, init_scale=4.0)
        compute(sync, partial(give, module, w=scaler.get_scale()))
        [main] = sync.main_parameters()
        assert main.tensor.grad is not None
        before = main.tensor.grad._version
        unscale = torch._amp_foreach_non_finite_check_and_unscale_  # counts as no write
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent,
            mock.patch.object(torch, unscale.__name__, wraps=unscale) as unscaled,
        ):
            if clip == "unscale_":
                scaler.unscale_(optimizer)
            norm = sync.clip_grad_norm_(INF if clip == "measure" else MAX_NORM) if clip else None
            scaler.step(optimizer)
        writes = main.tensor.grad._version - before + unscaled.call_count
        found[clip] = (writes, sent.call_count, None if norm is None else norm.item())
    return found


def test_unscaling_and_clipping_are_one_pass_and_one_message(two: list[dict[str, Any]]) -> None:
    """Issue 18, point 4."""
    norm = pytest.approx(64.0)
    for reply in two:
        assert reply["one_pass"] == {
            "": (1, 1, None),
            "unscale_": (2, 2, norm),
            "clip": (1, 1, norm),
            "measure": (1, 1, norm),
        }


@on(TWO)
def divided() -> Any:
    """A divisor that is known at the end: gradients are divided where they are unscaled."""
    found = {}
    sgd, fused = torch.optim.SGD, partial(torch.optim.SGD, fused=True)
    # torch's fused SGD changes no parameter of bfloat16 on a CPU.
    kinds: dict[str, tuple[Optimizer, torch.dtype]] = {
        "sgd": (sgd, torch.float32), "bf16": (sgd, torch.bfloat16), "fused": (fused, torch.float32)
    }  # fmt: skip
    for kind, (make, dtype) in kinds.items():
        for clip in CLIPS:
            module = stage(w=torch.zeros(4096, dtype=dtype))
            sync = alone(module, By("dp", SHARD, "mean"))
            optimizer = sync.optimizer(make, lr=1.0)
            scaler = pipegrad.GradScaler(sync, init_scale=8.0)
            sync.prepare(divisor=None)
            sync.stage_first_use(0)
            scaler.scale(3.0 * module.get_parameter("w").sum()).backward()
            sync.stage_final(0)
            with mock.patch("pipegrad.gradients.step.divide_") as divide:
                sync.finish(divisor=torch.tensor(12.0, dtype=torch.float64))
            if clip == "unscale_":
                scaler.unscale_(optimizer)
            norm = sync.clip_grad_norm_(INF).item() if clip else 16.0
            scaler.step(optimizer)
            scaler.update()
            sync.wait_parameters()
            values = module.get_parameter("w").unique().tolist()
            found[kind, clip] = (divide.call_count, norm, values)
            sync.close()
    return found


def test_a_division_at_the_end_is_in_the_pass_that_unscales(two: list[dict[str, Any]]) -> None:
    """Issue 18, point 4. The mean over tokens needs no pass of its own."""
    for reply in two:
        for case, (passes, norm, values) in reply["divided"].items():
            # One rounding of 1 / (8 * 12) in float32, and one of the product.
            assert (passes, values) == (0, [pytest.approx(-0.25, rel=2**-22)]), case
            assert norm == pytest.approx(16.0, rel=2**-22), case


@on(TWO)
def huge() -> Any:
    """Squares of the scaled gradients are more than float32 has, the gradients are not."""
    module = stage(w=(2,))
    sync = replicated(module)
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    scaler = pipegrad.GradScaler(sync, init_scale=2.0**100)
    compute(sync, lambda: scaler.scale((module.get_parameter("w") * 3.0).sum()).backward())
    norms = [sync.clip_grad_norm_(INF, 2.0).item()]
    scaler.step(optimizer)
    scaler.update()
    return norms, module.get_parameter("w").tolist(), scaler.get_scale()


def test_a_norm_that_overflows_float32_is_no_overflow(two: list[dict[str, Any]]) -> None:
    """torch looks at elements: the norm of finite ones skipped the step."""
    norm = pytest.approx(18**0.5)
    assert [reply["huge"] for reply in two] == [([norm], [-3.0] * 2, 2.0**100)] * 2


@on(TWO)
def given_up() -> Any:
    """A step that is clipped and then left out, with an overflow, and no update()."""
    module = stage(w=(2,))
    sync = replicated(module)
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    scaler = pipegrad.GradScaler(sync, init_scale=4.0)
    norms = []
    for gradient in (INF, 1.0):
        loss = (module.get_parameter("w") * gradient).sum()
        compute(sync, scaler.scale(loss).backward)
        norms.append(sync.clip_grad_norm_(INF).item())
        if gradient == INF:
            optimizer.zero_grad()
    scaler.step(optimizer)
    scaler.update()
    return norms, module.get_parameter("w").tolist(), scaler.get_scale()


def test_a_step_that_was_left_out_says_nothing_of_the_next(two: list[dict[str, Any]]) -> None:
    """Its overflow skipped the next step, and the next gradients stayed scaled."""
    norms = pytest.approx([INF, 2**0.5])
    assert [reply["given_up"] for reply in two] == [(norms, [-1.0] * 2, 4.0)] * 2


@on(TWO)
def failed() -> Any:
    """A step that fails on all ranks, or on one, or ends behind `unscale_`; then a good one."""
    found = {}
    for make in (torch.optim.SGD, partial(torch.optim.SGD, fused=True)):
        for ranks in ([0, 1], [0], []):
            name = "wv"[rank()]
            module = stage(**{name: (2,)})
            sync = tied(module)
            optimizer = sync.optimizer(make, lr=1.0)
            scaler = pipegrad.GradScaler(sync, init_scale=4.0)
            scaled = partial(scaler.scale, module.get_parameter(name))
            compute(sync, lambda scaled=scaled: scaled().sum().backward())  # type: ignore[misc]
            if not ranks:
                scaler.unscale_(optimizer)
            elif rank() in ranks:
                hook = optimizer.register_step_pre_hook(_fail)
                outcome(partial(scaler.step, optimizer))
                hook.remove()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            compute(sync, lambda scaled=scaled: scaled().sum().backward())  # type: ignore[misc]
            scaler.step(optimizer)
            scaler.update()
            key = "fused" if isinstance(make, partial) else "plain"
            found[key, len(ranks)] = module.get_parameter(name).tolist()
            sync.close()
    return found


def _fail(*_: object) -> None:
    raise ValueError("a hook of the user")


def test_a_step_that_failed_says_nothing_of_the_next(two: list[dict[str, Any]]) -> None:
    """The next gradients stayed scaled; if one rank had failed, the other one hung."""
    for number, reply in enumerate(two):
        steps = {2: 1, 1: 1 + number, 0: 1}  # by the number of ranks that failed
        assert reply["failed"] == {
            (kind, ranks): [-float(steps[ranks])] * 2
            for kind in ("plain", "fused")
            for ranks in steps
        }


@on(TWO)
def measured_behind() -> Any:
    """The norm behind update(), and another optimizer stepped behind it."""
    found = []
    for is_manual in (False, True):
        module = stage(w=(2,), v=(2,))
        sync = replicated(module)
        groups = sync.optimizer_parameters(lambda record: {"name": record.name})
        one, other = (torch.optim.SGD([group], lr=1.0) for group in groups)
        scaler = pipegrad.GradScaler(sync, init_scale=4.0)
        if is_manual:
            scaler.get_scale()
        compute(sync, partial(_scaled, scaler, module))
        norms = [sync.clip_grad_norm_(INF).item()]
        scaler.step(one)
        scaler.update()
        norms.append(sync.clip_grad_norm_(INF).item())
        scaler.step(other)
        scaler.update()
        norms.append(sync.clip_grad_norm_(INF).item())
        found.append((norms, [p.tolist() for p in module.parameters()]))
        sync.close()
    return found


def _scaled(scaler: pipegrad.GradScaler, module: nn.Module) -> None:
    scaler.scale(torch.stack([p.sum() for p in module.parameters()]).sum()).backward()


def test_gradients_are_unscaled_once_also_behind_update(two: list[dict[str, Any]]) -> None:
    """The norm was refused, or the gradients were divided by the scale again."""
    for reply in two:
        for norms, stepped in reply["measured_behind"]:
            assert norms == pytest.approx([2.0] * 3)
            assert stepped == [[-1.0] * 2] * 2


@on(TWO)
def largest() -> Any:
    """The infinity norm, with a nan on one stage alone."""
    found = []
    for bad in (1.0, float("nan")):
        name = "wv"[rank()]
        module = stage(**{name: (2,)})
        sync = tied(module)
        optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
        scaler = pipegrad.GradScaler(sync, init_scale=4.0)
        loss = (module.get_parameter(name) * (bad if rank() == 0 else 2.0)).sum()
        compute(sync, scaler.scale(loss).backward)
        norm = sync.clip_grad_norm_(1.0, INF).item()
        scaler.step(optimizer)
        scaler.update()
        found.append((str(norm), module.get_parameter(name).tolist(), scaler.get_scale()))
    return found


def test_the_infinity_norm_sees_a_nan_of_another_rank(two: list[dict[str, Any]]) -> None:
    """A maximum of gloo may drop a nan."""
    for number, reply in enumerate(two):
        (norm, values, scale), (bad, skipped, backed_off) = reply["largest"]
        assert (norm, scale) == ("2.0", 4.0)
        assert values == pytest.approx([-0.5 - 0.5 * number] * 2)
        assert (bad, skipped, backed_off) == ("nan", [0.0] * 2, 2.0)


def test_copies_in_another_dtype_are_unscaled(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 5."""
    assert [reply["stored"] for reply in two] == [trained_by_torch(SGD, "")[0]] * 2


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
    half = stage(w=torch.zeros(4, dtype=torch.float16 if rank() == 0 else torch.float32))
    split = tied(half)
    scaler = pipegrad.GradScaler(split, init_scale=2.0)
    compute(split, lambda: scaler.scale(half.get_parameter("w").sum()).backward())
    found["half clip"] = outcome(lambda: split.clip_grad_norm_(1.0))
    plain = stage(w=(4,))
    sync = replicated(plain)
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    scaler = pipegrad.GradScaler(sync, init_scale=2.0)
    for name in ("not stepped by it", "clipped and not stepped by it"):
        compute(sync, lambda: scaler.scale(plain.get_parameter("w").sum()).backward())
        if name.startswith("clipped"):
            sync.clip_grad_norm_(1.0)
        found[name] = outcome(optimizer.step)
    compute(sync, lambda: give(plain, w=1.0))
    scaler.update(2.0)  # another step was given up: its loss was scaled, this one's is not
    found["no longer scaled"] = outcome(lambda: sync.clip_grad_norm_(1.0))
    optimizer.zero_grad()
    scaler = pipegrad.GradScaler(sync, init_scale=2.0)
    compute(sync, lambda: scaler.scale(plain.get_parameter("w").sum()).backward())
    sync.clip_grad_norm_(1.0)
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    found["of others"] = outcome(lambda: scaler.step(torch.optim.SGD([other])))
    optimizer.zero_grad()
    return found, plain.get_parameter("w").tolist()


@pytest.mark.parametrize(
    ("mistake", "words"),
    {
        "options": "AgreementError: ranks disagree on the options of GradScaler",
        "inside": "StepError: gradients cannot be unscaled on ranks {0: 'a step is not",
        "unscaled": "StepError: no rank has scaled a loss",
        "scales": "StepError: the scale differs between ranks: {0: 2.0, 1: 3.0}",
        "half": "StepError: gradients cannot be unscaled on ranks {0: 'gradients are torch.float16",
        "half clip": "StepError: gradients cannot be unscaled on ranks {0: 'gradients are torch.fl",
        "not stepped by it": "StepError: optimizer.step() of gradients that a GradScaler has",
        "clipped and not stepped by it": "StepError: optimizer.step() of gradients that a GradSca",
        "no longer scaled": "StepError: no rank has scaled a loss",
        "of others": "StepError: clip_grad_norm_() has unscaled the gradients of its GradientSync",
    }.items(),
)
def test_mistakes_are_told_on_all_ranks(
    two: list[dict[str, Any]], mistake: str, words: str
) -> None:
    """Issue 16, point 5. Also what one rank alone does wrong."""
    said = [reply["mistakes"][0] for reply in two]
    assert [each[mistake][: len(words)] for each in said] == [words] * 2
    assert [reply["mistakes"][1] for reply in two] == [[0.0] * 4] * 2
