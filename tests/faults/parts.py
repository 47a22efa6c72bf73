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
from tests.faults.cell import LAYOUTS, MICROBATCHES, SIZES, Cell
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
    """Attention over earlier tokens, and a layer for each token. What it returns is padded."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.padding = padding
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        fault, hidden = self._fault(), hidden[..., :WIDTH]
        queries, keys, values = self.mix(hidden).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        weight = self.weight.detach() if fault == "no gradient" else self.weight
        hidden = _changed(fault, hidden + functional.linear(attended, weight))
        result: Tensor = Backward.apply(hidden)  # type: ignore[no-untyped-call]
        return functional.pad(result, (0, self.padding)) if self.padding else result

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
    padding = _padding()
    blocks = [Block(padding), Block(padding), Block(padding), Block(0)]
    for block in blocks if fault else ():
        block.weight = nn.Parameter(_changed(fault, block.weight.detach()))
    return nn.Sequential(embedding, *blocks, head)


def _padding() -> int:
    """Returns the columns with which a value of a microbatch has the size of the cell."""
    if (cell := Cell.here()) is None:
        return 0
    rows = ROWS // LAYOUTS[cell.layout][1] // MICROBATCHES
    return SIZES[cell.size] // (4 * rows * LENGTH)


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
