"""What an audit sees of a loop beside its sums: clipping, low precision, buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipegrad.audit import Audit, Report, before_clipping
from pipegrad.audit.truth import Batch

MICROBATCHES, IGNORED = 2, -100

After = Callable[[nn.Module, torch.optim.Optimizer], object]
MicroLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def uncut() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def batches(number: int = 2, ignored: slice = slice(0)) -> list[Batch]:
    torch.manual_seed(3)
    found = [(torch.randn(16, 6), torch.randint(5, (16,))) for _ in range(number)]
    for _, target in found:
        target[ignored] = IGNORED
    return found


def mean(output: Tensor, target: Tensor, _whole: Tensor) -> Tensor:
    return functional.cross_entropy(output, target) / MICROBATCHES


def token_mean(output: Tensor, target: Tensor, whole: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum") / (whole != IGNORED).sum()


def step_alone(_module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def loop(
    after: After = step_alone,
    *,
    model: nn.Module | None = None,
    data: Sequence[Batch] | None = None,
    loss: MicroLoss = mean,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    spoil: Callable[[Any], object] = bool,
    zeroes: bool = True,
    **options: Any,
) -> Report:
    model = model or uncut()
    module = copy.deepcopy(model).to(dtype)
    spoil(module)
    stepped = optimizer(module.parameters(), lr=0.1)

    def step(inputs: Tensor, target: Tensor) -> None:
        if zeroes:
            stepped.zero_grad()
        cut = zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        for x, y in cut:
            loss(module(x.to(dtype)).float(), y, target).backward()
        after(module, stepped)

    return Audit(
        step=step,
        modules=module,
        model=model,
        loss_fn=lambda output, y: functional.cross_entropy(
            output if output.dtype == torch.float64 else output.float(), y
        ),
        batches=data or batches(),
        microbatches=MICROBATCHES,
        **options,
    ).run()


def gradients(module: nn.Module) -> Iterable[Tensor]:
    return (p.grad for p in module.parameters() if p.grad is not None)


def stepping(before: Callable[[nn.Module], object]) -> After:
    """Does something to the gradients of a module, and then steps."""

    def after(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before(module)
        optimizer.step()

    return after


def clip(module: nn.Module, *norms: float, **options: Any) -> None:
    for norm in norms:
        nn.utils.clip_grad_norm_(module.parameters(), norm, **options)


def clip_and_change(module: nn.Module) -> None:
    clip(module, 0.01)
    next(iter(gradients(module))).zero_()


def clip_apart(module: nn.Module) -> None:
    before_clipping()
    for gradient in gradients(module):
        gradient.mul_(0.01 / gradient.norm())


def clip_by_value(module: nn.Module) -> None:
    for part in (part for part in module.children() if isinstance(part, nn.Linear)):
        nn.utils.clip_grad_value_(part.parameters(), 0.01)


def scaled_weights(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    for parameter in module.parameters():
        parameter.data *= 0.5


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))


def with_scaler() -> Report:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def scaled(output: Tensor, target: Tensor, whole: Tensor) -> Tensor:
        return scaler.scale(mean(output, target, whole))

    def finish(_module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler.step(optimizer)
        scaler.update()

    def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    return loop(finish, loss=scaled, optimizer=fused)


def half(module: nn.Module) -> None:
    clip(module, 0.01)
    for gradient in gradients(module):
        gradient.div_(2)


def clip_each(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.utils.clip_grad_norm_([parameter], 0.01)


def unscaled_late() -> Report:
    def scaled(output: Tensor, target: Tensor, whole: Tensor) -> Tensor:
        return 64 * mean(output, target, whole)

    def finish(module: nn.Module) -> None:
        clip(module, 0.01)
        for gradient in gradients(module):
            gradient.div_(64)

    return loop(stepping(finish), loss=scaled)


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.layer, x[:, None], use_reentrant=False)[:, 0])
        return out


CHANGED = "the gradient changes between clipping and the optimizer's step"
CASES: dict[str, tuple[Callable[[], Report], list[str]]] = {
    "changed after clipping": (lambda: loop(stepping(clip_and_change)), [CHANGED]),
    "clipped one by one": (lambda: loop(stepping(clip_apart)), [CHANGED]),
    "clipped by the sum": (lambda: loop(stepping(lambda m: clip(m, 0.1, norm_type=1))), []),
    "clipped by value, part by part": (lambda: loop(stepping(clip_by_value)), []),
    "weights scaled in bfloat16": (
        lambda: loop(scaled_weights, dtype=torch.bfloat16),
        ["the optimizer's step is not that of one process"],
    ),
    "fused AdamW and GradScaler": (with_scaler, []),
    "halved after clipping": (
        lambda: loop(stepping(half)),
        ["gradients are multiplied by 0.5 between clipping and the optimizer's step"],
    ),
    "clipped in parts": (
        lambda: loop(stepping(clip_each)),
        ["the gradient norm is not that of all parameters"],
    ),
    "a loss scale in the norm": (
        unscaled_late,
        ["the gradient is multiplied by 64", "gradients are multiplied by 0.01562 between clip"],
    ),
    "BatchNorm and uneven targets": (
        lambda: loop(
            model=normed(), data=batches(2, slice(2, 8)), loss=token_mean, by_microbatch=True
        ),
        [],
    ),
    "BatchNorm of microbatches": (
        lambda: loop(model=normed()),
        ["each microbatch is computed by itself, and that is not the gradient of the batch"],
    ),
    "a microbatch without targets": (
        lambda: loop(data=batches(2, slice(0, 8)), loss=token_mean),
        [],
    ),
    "another buffer": (
        lambda: loop(model=normed(), spoil=lambda m: m[1].running_mean.add_(1), by_microbatch=True),
        ["the buffer starts with other values than in the uncut model"],
    ),
    "a forward of its own": (
        lambda: loop(stepping(lambda m: m(torch.ones(2, 6))), model=normed(), by_microbatch=True),
        ["the buffer differs after the step"],
    ),
    "a factor, in a model that recomputes with dropout": (
        lambda: loop(model=Recomputing(), loss=lambda *batch: 3 * mean(*batch)),
        ["the gradient is multiplied by 3"],
    ),
    "stale, with one batch": (
        lambda: loop(data=batches(1), zeroes=False),
        ["the gradient is stale"],
    ),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("run", "words"), CASES.values(), ids=CASES)
def test_a_loop_has_these_causes_alone(run: Callable[[], Report], words: list[str]) -> None:
    report = run()
    causes = [finding.cause for finding in report.findings]
    assert len(causes) == len(words), str(report)
    assert all(cause.startswith(word) for cause, word in zip(causes, words, strict=True)), causes


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x.unflatten(1, (2, 3)))[0][:, -1])
        return out


@pytest.mark.ranks(1)
def test_a_right_loop_over_an_lstm_that_drops_has_no_finding() -> None:
    """Dropout between its layers is no function of torch; an audit is without it, too."""
    every, model = list[Any](), Recurrent()
    report = loop(model=model, spoil=every.append)
    assert report.is_right, str(report)
    assert "dropout was 0 while numbers were compared" in report.notes
    assert every[0].layers.dropout == model.layers.dropout == 0.5
