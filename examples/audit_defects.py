"""Six defects that real pipelines had while the loss looked fine, and an audit of each.

pipegrad audit examples/audit_defects.py:times_tokens     (or any other function below; 4 ranks)

`right` is a pipeline by hand: torch's 1F1B, 2 stages x 2 replicas, a tied GPT, texts of different
lengths, clipped gradients. Each defect changes one method of it. docs/audit.md has the reports.
"""

import copy

import torch
import torch.distributed as dist
from tied_gpt import tied_gpt
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import pipegrad

STAGES, REPLICAS, MICROBATCHES = 2, 2, 4
ROWS, LENGTH, VOCABULARY, IGNORED = 16, 12, 64, -100
MAX_NORM = 0.5


def uncut_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all targets of a step, as one process has it."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


class Right:
    def __init__(self) -> None:
        topology = pipegrad.Topology.create(pipeline=STAGES)
        self.pipeline, self.data = topology.group_along("pp"), topology.group_along("dp")
        self.stage, self.replica = dist.get_rank(self.pipeline), dist.get_rank(self.data)
        self.is_last = self.stage == STAGES - 1
        torch.manual_seed(0)
        self.model = tied_gpt(layers=4, width=32, context=LENGTH, vocabulary=VOCABULARY)
        half = len(self.model) // 2
        layers = slice(half) if self.stage == 0 else slice(half, None)
        self.module = copy.deepcopy(self.model)[layers]
        self.tied = (self.module[-1] if self.is_last else self.module[0]).weight
        stage = PipelineStage(
            self.staged(), self.stage, STAGES, torch.device("cpu"), group=self.pipeline
        )
        self.schedule = Schedule1F1B(stage, MICROBATCHES, self.loss, scale_grads=False)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        self.tokens = 1.0

    def staged(self) -> nn.Module:
        return self.module

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Of a microbatch: its sum, by the number of targets of all microbatches and replicas."""
        return uncut_loss(logits, target) * (target != IGNORED).sum() / self.tokens

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        counted = (target != IGNORED).sum().float()
        dist.all_reduce(counted, group=self.data)
        self.tokens = float(counted)
        self.run(inputs, target)
        self.reduce()
        self.clip()
        self.optimizer.step()

    def run(self, inputs: Tensor, target: Tensor) -> None:
        if self.is_last:
            self.schedule.step(target=target)
        else:
            self.schedule.step(inputs)

    def reduce(self) -> None:
        dist.all_reduce(self.tied.grad, group=self.pipeline)
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self.data)

    def clip(self) -> None:
        counted = [p for p in self.module.parameters() if not (self.is_last and p is self.tied)]
        squares = nn.utils.get_total_norm([p.grad for p in counted]) ** 2
        dist.all_reduce(squares, group=self.pipeline)
        nn.utils.clip_grads_with_norm_(self.module.parameters(), MAX_NORM, squares.sqrt())


class TimesTokens(Right):
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return uncut_loss(logits, target) * (target != IGNORED).sum()  # divided for the log alone


class ScaledByEachStage(Right):
    def staged(self) -> nn.Module:
        def scale(_module: nn.Module, _args: object, output: Tensor) -> None:
            if not self.is_last:
                output.register_hook(lambda gradient: gradient / MICROBATCHES)

        self.module.register_forward_hook(scale)
        return self.module


class LastMicrobatches(Right):
    def run(self, inputs: Tensor, target: Tensor) -> None:
        for x, y in zip(inputs.chunk(2), target.chunk(2), strict=True):
            self.optimizer.zero_grad()  # as a runtime that begins anew for each call
            super().run(x, y)


class TieApart(Right):
    def reduce(self) -> None:
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self.data)


class LocalNorm(Right):
    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), MAX_NORM)


class MeanOfMeans(Right):
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return uncut_loss(logits, target) / MICROBATCHES / REPLICAS


def audit(pipeline: Right, microbatches: int = MICROBATCHES) -> pipegrad.Audit:
    batches = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
        target = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)
        batches.append((tokens[:, :-1], target))
    return pipegrad.Audit(
        step=pipeline.step,
        modules=pipeline.module,
        model=pipeline.model,
        loss_fn=uncut_loss,
        batches=batches,
        microbatches=microbatches,
        replica=pipeline.replica,
        num_replicas=REPLICAS,
    )


def right() -> pipegrad.Audit:
    return audit(Right())


def times_tokens() -> pipegrad.Audit:
    return audit(TimesTokens())


def scaled_by_each_stage() -> pipegrad.Audit:
    return audit(ScaledByEachStage())


def last_microbatches() -> pipegrad.Audit:
    return audit(LastMicrobatches(), microbatches=2 * MICROBATCHES)


def tie_apart() -> pipegrad.Audit:
    return audit(TieApart())


def local_norm() -> pipegrad.Audit:
    return audit(LocalNorm())


def mean_of_means() -> pipegrad.Audit:
    return audit(MeanOfMeans())
