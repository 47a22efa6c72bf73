"""What a run under any placement is made of, as a table of factors, and the model it trains."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import GradientHandler, schedules
from pipegrad.plugins.handler import handlers as registry
from pipegrad.schedules import Schedule
from tests.support.gradients.placements import WHOLE, By
from tests.support.pipeline.models import LAYERS, TOKENS, WIDTH, Block, Lookup, matrix, tied
from tests.support.pipeline.schedulers import ROWS, batch
from tests.support.rounding import ADAM_EPS, rounding

HANDLERS: dict[str, list[Any]] = {
    "replicate": ["pipeline-shared", "data-parallel"],
    "sharded": ["pipeline-shared", "sharded"],
    "owner": [{"name": "pipeline-shared", "placement": "owner"}, "data-parallel"],
    "owner+sharded": [{"name": "pipeline-shared", "placement": "owner"}, "sharded"],
    "whole": [{"name": "pipeline-shared", "placement": "owner"}, By("dp", WHOLE, "mean")],
    "pairwise": [{"name": "pipeline-shared", "exchange": "pairwise"}, "data-parallel"],
    "asym+sharded": [{"name": "pipeline-shared", "exchange": "asymmetric"}, "sharded"],
    "noop": ["noop"],
}
SCHEDULES: dict[str, Any] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "eager": "eager-1f1b",
    "interleaved": "interleaved-1f1b",
    "zb-h1": "zb-h1",
    "zb-h1-head": {"name": "zb-h1", "head_w_first": True},
    "zbv": "zbv",
}
PRECISIONS: dict[str, dict[str, Any]] = {  # of parameters, and on the wire if that differs
    "fp32": {},
    "fp32-bf16": {"reduce_dtype": torch.bfloat16},
    "bf16": {"master_dtype": torch.float32},
    "bf16-fp32": {"master_dtype": torch.float32, "reduce_dtype": torch.float32},
}
FACTORS: dict[str, tuple[str, ...]] = {
    "handlers": (
        "replicate",
        "sharded",
        "owner",
        "owner+sharded",
        "whole",
        "pairwise",
        "asym+sharded",
    ),
    "schedule": tuple(SCHEDULES),
    "mesh": ("1x2", "1x3", "2x1", "2x2", "2x3", "3x2", "4x1"),  # pipeline x data
    "precision": tuple(PRECISIONS),
    "recompute": ("keep", "again"),
    "optimizer": ("SGD", "AdamW"),
    "clip": ("free", "clip"),
    "parts": ("1", "2"),  # batches that a step of the optimizer accumulates
    "ways": ("2", "4"),  # layers that hold the vocabulary
    "buckets": ("small", "one"),
    "after": ("publish", "forget", "publish+eval", "eval", "read"),  # every step
    "end": ("wait", "close"),
    "zeroed": ("none", "zero"),  # what gradients become
}

CROSSED = ("handlers", "schedule", "mesh", "precision", "recompute")  # by the script
CASES_A_SPAWN = 100

MAX_NORM = 0.3
LEARNING_RATES = {"SGD": 0.05, "AdamW": 0.01}
ROUNDING = 2.0**-8  # of bfloat16, whose significand has 8 bits, to the nearest


@dataclass(frozen=True)
class Case:
    """A way to train: a level of each factor."""

    handlers: str
    schedule: str
    mesh: str
    precision: str
    recompute: str
    optimizer: str
    clip: str
    parts: str
    ways: str
    buckets: str
    after: str
    end: str
    zeroed: str
    steps: int = 3

    @classmethod
    def of(cls, levels: Sequence[str], steps: int = 3) -> Case:
        """Returns a case of a level of each factor, in order."""
        named: dict[str, Any] = dict(zip(FACTORS, levels, strict=True))
        return cls(**named, steps=steps)

    def __str__(self) -> str:
        levels = " ".join(getattr(self, name) for name in FACTORS)
        return levels if self.steps == 3 else f"{levels} {self.steps} steps"

    @property
    def pipeline(self) -> int:
        return int(self.mesh[0])

    @property
    def data(self) -> int:
        return int(self.mesh[2])

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data

    @property
    def num_microbatches(self) -> int:
        return 2 * self.pipeline

    @property
    def is_owned(self) -> bool:
        return self.handlers.startswith(("owner", "whole"))

    @property
    def is_whole(self) -> bool:
        """Whether each parameter is on one rank of those that share all of them."""
        return self.handlers == "whole"

    @property
    def is_sharded(self) -> bool:
        return self.handlers.endswith("sharded") or self.is_whole

    @property
    def is_placed(self) -> bool:
        """Whether its ranks are enough for all that its handlers can do."""
        meets = self.handlers.startswith(("owner", "pairwise", "asym"))
        return (self.pipeline > 1 or not meets) and (self.data > 1 or not self.is_sharded)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is of lower precision than fp32."""
        return self.precision == "fp32"

    def exact(self, *, steps: int = 1) -> float:
        """Returns the relative error of fp32 after some steps, for sums in another order."""
        rows = ROWS * self.num_microbatches * self.data
        return rounding(rows * TOKENS * int(self.parts) * steps)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision.startswith("bf16") else torch.float32

    @property
    def made(self) -> Schedule:
        return make_schedule(self.schedule, self.pipeline, self.num_microbatches)

    def batch(self, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Returns tokens and targets, over all data ranks."""
        return batch(200 + 2 * step + part, ROWS * self.num_microbatches * self.data)

    def make_optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        lr = LEARNING_RATES[self.optimizer]
        if self.optimizer == "SGD":
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.1)
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1, eps=ADAM_EPS)


@functools.cache
def make_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    generator = schedules.registry.resolve(SCHEDULES[name])
    return schedules.generate(generator, num_ranks=num_ranks, num_microbatches=num_microbatches)


@functools.cache
def make_handlers(name: str) -> list[GradientHandler]:
    """Returns them found by name once: in hundreds of cases looking for them is what takes time."""
    return [found.plugin for found in registry.resolve_all(HANDLERS[name]).values()]


# The model.


class Odd(Block):
    """Holds a scalar, a matrix that lies by columns, a frozen parameter and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.low = nn.Parameter(torch.randn(3, WIDTH).t() * 0.3)
        self.high = matrix(3)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = matrix(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.frozen) + self.gain * (x @ self.low @ self.high)


def build(case: Case) -> nn.Sequential:
    """Returns the uncut model: the same bits in every process.

    Beside the vocabulary it ties two matrices, what the first alone of two layers uses, and what
    the last alone does.
    """
    torch.manual_seed(7)
    model: Any = tied()
    model[1] = Odd()
    if case.ways == "4":
        model[3], model[5] = Lookup(model[0].weight), Lookup(model[0].weight)
    model[6].linear.weight = model[2].linear.weight
    model[6].kept = model[1].high
    model[1].kept = model[6].norm.weight
    built: nn.Sequential = model.to(case.dtype)
    return built


def boundaries(num_stages: int) -> list[int]:
    return [round(LAYERS * stage / num_stages) for stage in range(1, num_stages)]


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
