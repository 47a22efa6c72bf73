"""The parts that the job of the matrix names: model, handlers, batches. They say where they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.comm.sync_points import Work
from pipegrad.plugins.handler import FlatBucket, ReductionStep
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.faults import inject
from tests.faults.inject import strikes

TOKENS, WIDTH, LENGTH, ROWS = 64, 16, 8, 16


class Backward(torch.autograd.Function):
    """Passes a value and its gradient on; faults of a backward strike here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor | None:
        [gradient] = gradients
        fault = strikes("backward")
        if fault == "no gradient":
            return None
        return _changed(fault, gradient)


class Block(nn.Module):
    """Attention over earlier tokens, and a layer for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        fault = self._fault()
        queries, keys, values = self.mix(hidden).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        weight = self.weight.detach() if fault == "no gradient" else self.weight
        hidden = _changed(fault, hidden + functional.linear(attended, weight))
        result: Tensor = Backward.apply(hidden)  # type: ignore[no-untyped-call]
        return result

    def state_dict(self, *args: Any, **options: Any) -> Any:
        strikes("checkpoint")
        return super().state_dict(*args, **options)

    def _fault(self) -> str:
        if not self.training:
            return strikes("evaluation")
        return strikes("first step") or strikes("forward")


def _changed(fault: str, value: Tensor) -> Tensor:
    if fault == "shape":
        return value[:, :-1]
    return value * torch.nan if fault == "non-finite" else value


def model() -> nn.Sequential:
    inject.install()
    fault = strikes("construction")
    embedding, head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
    head.weight = embedding.weight
    blocks = [Block() for _ in range(4)]
    for block in blocks if fault else ():
        block.weight = nn.Parameter(_changed(fault, block.weight.detach()))
    return nn.Sequential(embedding, *blocks, head)


class Shared(PipelineShared):
    """Sums tied parameters; faults of a reduction strike here."""

    def __init__(self) -> None:
        strikes("handler")
        super().__init__(placement="owner")

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        fault = strikes("reduction")
        if fault == "non-finite":
            bucket.buffer.fill_(torch.nan)
        work = super().launch(bucket, reduction, group)
        return None if fault == "no gradient" else work  # type: ignore[return-value]


def batches(*, data_rank: int, num_data_ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(TOKENS, (8, ROWS, LENGTH + 1), generator=generator)
    return [batch.chunk(num_data_ranks)[data_rank] for batch in rows]
