"""GradScaler: one decision for all ranks, and the scales and parameters of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pipegrad
from pipegrad import GradientSync
from tests.support.gradients.cases import outcome, rank, replicated, stage, tied
from tests.support.gradients.placements import OWNER, REPLICATE, SHARD, By, alone, compute
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.ranks(2)
STEPS = 20
OPTIONS: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}
CLIPS = ("", "unscale_", "clip", "measure")  # what comes before scaler.step()
CLIPPED = CLIPS[1:3]
INF, MAX_NORM = float("inf"), 0.5
Optimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "fused": partial(torch.optim.SGD, lr=0.1, fused=True),
    "adam": partial(torch.optim.AdamW, lr=0.1),
}
Trained = tuple[list[float], torch.Tensor]  # scales and parameters after each step


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Returns those of a step; in some steps one element overflows."""
    drawn = torch.Generator().manual_seed(step)
    w, v = torch.randn(12, generator=drawn), torch.randn(1, generator=drawn)
    if step % 9 == 1:
        w[2] = INF
    if step % 9 == 5:
        v[0] = float("nan")
    return {"w": w, "v": v}


def whole(dtype: torch.dtype = torch.float32) -> nn.Module:
    return stage(w=torch.zeros(12, dtype=dtype), v=torch.zeros(1, dtype=dtype))


def backward(scaler: Any, module: nn.Module, step: int) -> None:
    named = gradients(step)
    terms = [(p * named[name]).sum() for name, p in module.named_parameters()]
    scaler.scale(torch.stack(terms).sum()).backward()


def trained(
    make: Optimizer, clip: str, sync: GradientSync | None = None, module: nn.Module | None = None
) -> Trained:
    """On ranks, on whichever of them the parameters are; without a sync in one process."""
    module = module or whole()
    optimizer = sync.optimizer(make) if sync else make(module.parameters())
    scaler: Any = (
        pipegrad.GradScaler(sync, **OPTIONS) if sync else torch.amp.GradScaler("cpu", **OPTIONS)
    )
    scales, values = [], []
    for step in range(STEPS):
        run = partial(backward, scaler, module, step)
        if sync:
            compute(sync, run)
        else:
            run()
        if clip == "unscale_" or (clip == "clip" and not sync):
            scaler.unscale_(optimizer)
        if sync and clip:
            sync.clip_grad_norm_(INF if clip == "measure" else MAX_NORM)
        elif clip in CLIPPED:
            nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if sync:
            sync.wait_parameters()
        scales.append(scaler.get_scale())
        values.append(torch.cat([p.detach() for p in module.parameters()]))
    if sync:
        sync.close()
    return scales, torch.stack(values)


def far(found: torch.Tensor, right: torch.Tensor, clip: str) -> bool:
    # Both norms add up 13 squares, in another order; a step adds one rounding more.
    most = 4 * STEPS * torch.finfo(torch.float32).eps * 13**0.5 if clip in CLIPPED else 0.0
    return float((found - right).abs().max()) > most


@pytest.mark.parametrize(
    ("placement", "kind", "clip"),
    pairwise(
        (REPLICATE, OWNER, SHARD),
        OPTIMIZERS,
        CLIPS,
        allowed=lambda _, kind, clip: kind != "adam" or clip not in CLIPPED,
    ),
)
def test_scales_and_values_are_those_of_one_process(placement: Any, kind: str, clip: str) -> None:
    """Issue 18, point 4. Clipping unscales by itself, also if it clips nothing ("measure")."""
    make = OPTIMIZERS[kind]
    scales, values = trained(make, clip)
    assert scales[:3] == [8.0, 4.0, 4.0]  # the second step overflows
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[1], values[2])
    assert sum(after < before for before, after in itertools.pairwise(scales)) == 5
    module = whole()
    found, got = trained(make, clip, alone(module, By("dp", placement, "mean")), module)
    assert found == scales
    assert not far(got, values, clip)


def test_copies_in_another_dtype_are_unscaled() -> None:
    """Issue 16, point 5. fp16 parameters, stepped as fp32 copies: the decisions are the same."""
    module, make = whole(torch.float16), OPTIMIZERS["sgd"]
    sync = alone(module, By("dp", SHARD, "mean"), master_dtype=torch.float32)
    assert trained(make, "", sync, module)[0] == trained(make, "")[0]


@pytest.mark.parametrize("clips", [False, True])
def test_a_dtensor_beside_other_gradients_is_unscaled(*, clips: bool) -> None:
    """Without clipping torch refused both together."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(module[0], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    topology = pipegrad.Topology.create(pipeline=1)
    sync = GradientSync({0: module}, topology, handlers=[], allow_unsynced=["0.1.weight"])
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    scaler = pipegrad.GradScaler(sync, init_scale=4.0)
    for bad, scale in ((1.0, 4.0), (INF if rank() else 1.0, 2.0)):
        compute(sync, lambda: scaler.scale(module(torch.ones(1, 4)).sum()).backward())
        scaled: Any = [*sync._main_gradients().values()]
        scaled[0][0] *= bad  # of one rank's rows
        expected = [gradient / 4.0 for gradient in scaled]
        if clips:
            assert sync.clip_grad_norm_(INF).isfinite() == (scale == 4.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        found: Any = [*sync._main_gradients().values()]
        assert all(map(torch.equal, found, expected))
        optimizer.zero_grad()
    sync.close()


@pytest.mark.parametrize(
    ("clip", "passes", "messages"),
    [("", 1, 1), ("unscale_", 2, 2), ("clip", 2, 2), ("measure", 1, 2)],
)
def test_unscaling_and_clipping_are_a_pass_and_a_message_each(
    clip: str, passes: int, messages: int
) -> None:
    """Issue 18, point 4. From `finish` to the optimizer's step."""
    module = stage(w=(4096,))  # so that each rank has a shard
    sync = alone(module, By("dp", SHARD, "mean"))
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    scaler = pipegrad.GradScaler(sync, init_scale=4.0)
    compute(sync, lambda: scaler.scale(module.get_parameter("w").sum()).backward())
    [main] = sync.main_parameters()
    assert main.tensor.grad is not None
    before = main.tensor.grad._version
    unscale = torch._amp_foreach_non_finite_check_and_unscale_  # counts as no write
    with (
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed,
        mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent,
        mock.patch.object(torch, unscale.__name__, wraps=unscale) as unscaled,
    ):
        if clip == "unscale_":
            scaler.unscale_(optimizer)
        if clip:
            norm = sync.clip_grad_norm_(INF if clip == "measure" else MAX_NORM)
            assert norm.item() == pytest.approx(64.0)
        scaler.step(optimizer)
    assert main.tensor.grad._version - before + unscaled.call_count == passes
    assert sent.call_count + summed.call_count == messages


@pytest.mark.parametrize("clip", CLIPS)
# torch's fused SGD changes no parameter of bfloat16 on a CPU.
@pytest.mark.parametrize("kind", [("sgd", "float32"), ("sgd", "bfloat16"), ("fused", "float32")])
def test_who_holds_a_gradient_divides_it(kind: tuple[str, str], clip: str) -> None:
    """The scaler divided what no stage holds, too; and nothing if no loss was scaled."""
    module = stage(w=torch.zeros(4096, dtype=getattr(torch, kind[1])))
    sync = alone(module, By("dp", SHARD, "mean"))
    optimizer = sync.optimizer(partial(torch.optim.SGD, fused=kind[0] == "fused"), lr=1.0)
    scaler = pipegrad.GradScaler(sync, init_scale=8.0)
    outside = nn.Parameter(torch.zeros(2))
    for scales in (False, True):
        module.zero_grad()
        optimizer.zero_grad()
        sync.prepare(divisor=None)
        sync.stage_first_use(0)
        loss = 3.0 * module.get_parameter("w").sum() + outside.sum()
        (scaler.scale(loss) if scales else loss).backward()
        sync.stage_final(0)
        sync.finish(divisor=torch.tensor(12.0, dtype=torch.float64))
        [main] = sync.main_parameters()
        assert main.tensor.grad is not None
        assert main.tensor.grad.unique().tolist() == [2.0 if scales else 0.25]
    outside.grad = torch.full((2,), 8.0)
    scaler.step(torch.optim.SGD([outside], lr=1.0))  # clipping took all for unscaled then
    assert outside.tolist() == [-1.0] * 2
    if clip == "unscale_":
        scaler.unscale_(optimizer)
    if clip:
        assert sync.clip_grad_norm_(INF).item() == pytest.approx(16.0, rel=2**-22)
    scaler.step(optimizer)
    scaler.update()
    sync.wait_parameters()
    values = module.get_parameter("w").unique().tolist()
    assert values == [pytest.approx(-0.25, rel=2**-22)]
    sync.close()


def ready(
    make: Optimizer = torch.optim.SGD, scale: float = 4.0, *, is_split: bool = False
) -> tuple[Any, ...]:
    """A parameter of two elements, of both ranks or of each its own, an optimizer and a scaler."""
    w = nn.Parameter(torch.zeros(2))
    sync = tied(stage(**{"wv"[rank()]: w})) if is_split else replicated(stage(w=w))
    return w, sync, sync.optimizer(make, lr=1.0), pipegrad.GradScaler(sync, init_scale=scale)


def test_what_is_no_overflow_skips_no_step() -> None:
    """torch looks at elements: the norm of finite ones skipped the step."""
    w, sync, optimizer, scaler = ready(scale=2.0**100)  # its squares are too large
    compute(sync, lambda: scaler.scale((w * 3.0).sum()).backward())
    assert sync.clip_grad_norm_(INF, 2.0).item() == pytest.approx(18**0.5)
    scaler.step(optimizer)
    scaler.update()
    assert (w.tolist(), scaler.get_scale()) == ([-3.0] * 2, 2.0**100)
    # A step that was left out says nothing of the next. Its overflow skipped the next step, and the
    # next gradients stayed scaled.
    w, sync, optimizer, scaler = ready()
    for gradient, norm in ((INF, INF), (1.0, 2**0.5)):
        compute(sync, lambda g=gradient: scaler.scale((w * g).sum()).backward())  # type: ignore[misc]
        assert sync.clip_grad_norm_(INF).item() == pytest.approx(norm)
        if gradient == INF:
            optimizer.zero_grad()  # and no update()
    scaler.step(optimizer)
    scaler.update()
    assert (w.tolist(), scaler.get_scale()) == ([-1.0] * 2, 4.0)
    # Nor does one that clipping has measured, but for the scale: that ended in torch's assertion.
    for gradient, scale in ((INF, 2.0), (1.0, 2.0)):
        optimizer.zero_grad()
        compute(sync, lambda g=gradient: scaler.scale((w * g).sum()).backward())  # type: ignore[misc]
        sync.clip_grad_norm_(1.0)
        scaler.update()
        assert scaler.get_scale() == scale


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("failing", [(0, 1), (0,), ()], ids=str)
def test_a_failed_step_says_nothing_of_the_next(failing: tuple[int, ...], *, fused: bool) -> None:
    """The next gradients stayed scaled; if one rank had failed, the other one hung."""

    def fail(*_: object) -> None:
        raise ValueError("a hook of the user")

    w, sync, optimizer, scaler = ready(partial(torch.optim.SGD, fused=fused), is_split=True)
    compute(sync, lambda: scaler.scale(w).sum().backward())
    if not failing:
        scaler.unscale_(optimizer)  # and the step ends
    elif rank() in failing:
        hook = optimizer.register_step_pre_hook(fail)
        assert outcome(lambda: scaler.step(optimizer)) == "ValueError: a hook of the user"
        hook.remove()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    compute(sync, lambda: scaler.scale(w).sum().backward())
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [-2.0 if failing == (0,) and rank() == 1 else -1.0] * 2
    sync.close()


def test_gradients_are_unscaled_once_also_behind_update() -> None:
    """The norm was refused, or the gradients were divided by the scale again."""
    module = stage(w=(2,), v=(2,))
    sync = replicated(module)
    groups = sync.optimizer_parameters(lambda record: {"name": record.name})
    optimizers = [torch.optim.SGD([group], lr=1.0) for group in groups]
    scaler = pipegrad.GradScaler(sync, init_scale=4.0)

    def begin() -> None:
        module.zero_grad()
        compute(sync, lambda: scaler.scale(sum(p.sum() for p in module.parameters())).backward())

    begin()
    refused = outcome(lambda: sync.clip_grad_norm_(INF))  # whose gradients are they?
    assert refused.startswith("StepError: gradients cannot be unscaled on ranks {0: 'clip_grad_no")
    assert "call scaler.unscale_(optimizer) for each of yours before" in refused
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        assert sync.clip_grad_norm_(INF).item() == pytest.approx(2.0)
        scaler.step(optimizer)
    scaler.update()
    assert sync.clip_grad_norm_(INF).item() == pytest.approx(2.0)
    assert [p.tolist() for p in module.parameters()] == [[-1.0] * 2] * 2
    # Each has its own pass. Clipping has unscaled one of all parameters, and another one steps.
    others = "StepError: gradients cannot be unscaled on ranks {0: 'the gradients were unscaled for"
    everything = sync.optimizer(torch.optim.SGD, lr=1.0)
    begin()
    assert sync.clip_grad_norm_(INF).item() == pytest.approx(2.0)
    assert outcome(lambda: scaler.step(optimizers[0])).startswith(others)
    scaler.step(everything)
    scaler.update()
    scaler.scale(torch.ones(()))
    assert outcome(lambda: scaler.step(everything)).startswith(others)
    assert [p.tolist() for p in module.parameters()] == [[-2.0] * 2] * 2
    sync.close()


def test_an_overflow_counts_on_all_ranks_and_for_its_optimizer() -> None:
    """A maximum of gloo may drop a nan."""
    for bad, expected in ((1.0, "2.0"), (float("nan"), "nan")):
        w, sync, optimizer, scaler = ready(is_split=True)
        compute(sync, lambda: scaler.scale((w * (2.0 if rank() else bad)).sum()).backward())  # noqa: B023
        assert str(sync.clip_grad_norm_(1.0, INF).item()) == expected
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if expected == "nan" else 4.0)
        moved = 0.0 if expected == "nan" else -0.5 - 0.5 * rank()
        assert w.tolist() == pytest.approx([moved] * 2)
    # Each optimizer has its decision. Issue 16, point 5. A rank on which an optimizer has nothing
    # ended in an AssertionError.
    w, sync, _, scaler = ready(is_split=True)
    groups = sync.optimizer_parameters(lambda record: {"name": record.name})
    optimizers = [torch.optim.SGD([group], lr=1.0) for group in groups]
    loss = scaler.scale(w.sum()) * (1.0 if rank() else INF)
    compute(sync, loss.backward)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    # The scale looks at both.
    assert (w.tolist(), scaler.get_scale()) == ([-1.0 * rank()] * 2, 2.0)


def test_options_are_those_of_torch_and_the_same_on_all_ranks() -> None:
    """Issue 16, point 5. The interface is that of torch, also of a scaler that is off."""
    w, sync, optimizer, _ = ready()
    scaler = pipegrad.GradScaler(sync, **OPTIONS)
    before = scaler.state_dict()
    assert before == torch.amp.GradScaler("cpu", **OPTIONS).state_dict()
    scaler.load_state_dict({**before, "scale": 2.0, "_growth_tracker": 1})
    compute(sync, lambda: scaler.scale(w.sum()).backward())
    scaler.step(optimizer)
    scaler.update()
    after = scaler.state_dict()
    assert (after["scale"], after["_growth_tracker"]) == (4.0, 0)
    off, loss = pipegrad.GradScaler(sync, enabled=False), torch.ones(())
    assert off.scale(loss) is loss
    assert off.state_dict() == {}
    with torch.no_grad():
        assert scaler.scale(torch.ones(())).item() == 1.0
    # What differs between ranks is refused on all. Issue 16, point 5.
    w, sync, optimizer, _ = ready()
    refused = outcome(lambda: pipegrad.GradScaler(sync, init_scale=2.0 + rank()))
    assert refused.startswith("AgreementError: ranks disagree on the options of GradScaler")
    scaler = pipegrad.GradScaler(sync, init_scale=2.0)
    compute(sync, w.sum().backward)
    scaler.scale(torch.ones(()))
    scaler.update(2.0 + rank())
    refused = outcome(lambda: scaler.step(optimizer))
    assert refused.startswith("StepError: the scale differs between ranks: {0: 2.0, 1: 3.0}")
    assert w.tolist() == [0.0] * 2


def test_gradients_at_a_wrong_time_are_refused() -> None:
    w, sync, optimizer, scaler = ready()
    sync.prepare()
    refused = outcome(lambda: scaler.unscale_(optimizer))
    inside = "StepError: gradients cannot be unscaled on ranks {0: 'a step is not"
    assert refused.startswith(inside)
    scaler = pipegrad.GradScaler(sync, init_scale=2.0)
    assert scaler.get_scale() == 2.0  # for a log line: then nothing was refused any more
    w.sum().backward()
    sync.stage_final(0)
    sync.finish()
    unscaled = "StepError: no rank has scaled a loss"
    assert outcome(lambda: scaler.step(optimizer)).startswith(unscaled)

    w, sync, optimizer, scaler = ready()
    unknown = "StepError: optimizer.step() of gradients that a GradScaler has"
    for clips in (False, True):  # they are not stepped by it
        compute(sync, lambda: scaler.scale(w.sum()).backward())
        if clips:
            sync.clip_grad_norm_(1.0)
        assert outcome(optimizer.step).startswith(unknown)
    compute(sync, w.sum().backward)
    scaler.update(2.0)  # another step was given up: its loss was scaled, this one's is not
    assert outcome(lambda: sync.clip_grad_norm_(1.0)).startswith(unscaled)
    optimizer.zero_grad()
    scaler = pipegrad.GradScaler(sync, init_scale=2.0)
    compute(sync, lambda: scaler.scale(w.sum()).backward())
    sync.clip_grad_norm_(1.0)
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    scaler.step(torch.optim.SGD([other], lr=1.0))  # gradients of no sync have a pass of their own
    assert other.tolist() == [-0.5] * 2
    assert w.tolist() == [0.0] * 2


@pytest.mark.parametrize("clips", [False, True])
def test_float16_on_one_rank_alone_is_refused_on_all(*, clips: bool) -> None:
    half = stage(w=torch.zeros(4, dtype=torch.float16 if rank() == 0 else torch.float32))
    sync = tied(half)
    scaler = pipegrad.GradScaler(sync, init_scale=2.0)
    compute(sync, lambda: scaler.scale(half.get_parameter("w").sum()).backward())
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    refused = outcome(lambda: sync.clip_grad_norm_(1.0) if clips else scaler.step(optimizer))
    words = "StepError: gradients cannot be unscaled on ranks {0: 'gradients are torch.float16"
    assert refused.startswith(words)
