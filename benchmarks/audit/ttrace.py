"""Audits of silent bugs of Megatron, each rebuilt from its thread: a table of README.md.

python benchmarks/audit/ttrace.py                all of them, a line for each
python benchmarks/audit/ttrace.py 1446 1464      some of them

The bugs of pipeline and data parallelism change the pipeline of examples/audit_defects.py, and
those of sequence and context parallelism the layers of other_axes.py. Megatron itself is not run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from other_axes import Axis, ContextParallel, SequenceParallel
from torch import Tensor, nn

from pipegrad.audit.report import shown
from pipegrad.errors import PlanError
from pipegrad.testing import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import audit_defects
from audit_defects import Right


class OwnInput(nn.Sequential):
    """A recomputed chunk: each of its layers gets the input of the chunk."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            made = layer(x)
        return made


class Recomputed(Right):
    """#290: the layers of a recomputed chunk all get its input."""

    def staged(self) -> nn.Module:
        if self.is_last:
            return self.module
        return nn.Sequential(self.module[:-2], OwnInput(*self.module[-2:]))

    def reduce(self) -> None:
        for parameter in self.module.parameters():  # a buffer of gradients has zeros
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        super().reduce()


class DroppedLayer(Right):
    """#1304: the number of layers of a stage is rounded down, so some are nowhere."""

    def staged(self) -> nn.Module:
        if not self.is_last:
            del self.module[-1]
        return self.module


class OldParameters(Right):
    """#950: a forward takes a layer's parameters of the step before: their gather is late."""

    def run(self, inputs: Tensor, target: Tensor) -> None:
        block = [*self.module[1].parameters()]
        new, self.old = [p.detach().clone() for p in block], getattr(self, "old", block)
        for parameter, value in zip(block, self.old, strict=True):
            parameter.data.copy_(value)
        super().run(inputs, target)
        for parameter, value in zip(block, new, strict=True):
            parameter.data.copy_(value)
        self.old = new


class Untied(Right):
    """#656: the head does not get the new values of the weight that it shares."""

    def step(self, inputs: Tensor, target: Tensor) -> None:
        old = self.tied.detach().clone()
        super().step(inputs, target)
        if self.is_last:
            self.tied.data.copy_(old)


class NeverStepped(Right):
    """#565: gradients of a layer lie in buffers that the distributed optimizer does not have."""

    def __init__(self) -> None:
        super().__init__()
        held = [p for name, p in self.module.named_parameters() if not name.startswith("1.")]
        self.optimizer = torch.optim.AdamW(held, lr=1e-3)

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.module.zero_grad()
        super().step(inputs, target)


class Gate(nn.Linear):
    """Stands for a router of experts."""

    def forward(self, x: Tensor) -> Tensor:
        return x * super().forward(x).softmax(-1)


class Norms(SequenceParallel):
    """#599 and #1446: gradients of a router, and of a norm, stay those of a slice of a sequence."""

    def uncut(self) -> nn.Sequential:
        embedding, split, attention, back, _, head = super().uncut()
        width = head.in_features
        return nn.Sequential(
            embedding, split, attention, Gate(width, width), nn.LayerNorm(width), back, head
        )

    def reduce(self) -> None:
        for bug, layer in (("599", "3."), ("1446", "4.")):
            if bug not in self.defects:
                self.sum_over(self.inner, layer)
        super().reduce()


class OwnGradient(Axis):
    """Loses what other ranks add to the gradient of a slice."""

    def gather(self, x: Tensor, dim: int, *, alike: bool = False) -> Tensor:
        return super().gather(x, dim, alike=True)


class Context(ContextParallel):
    """#1464: gradients of keys and values are wrong. #906: all are scaled by the ranks of context.

    In #1464 the backward of a kernel is wrong in an unknown way; here it forgets other ranks.
    """

    def share(self) -> None:
        super().share()
        if "1464" in self.defects:
            self.parts()[0].context = OwnGradient(self.inner.group)

    def reduce(self) -> None:
        super().reduce()
        if "906" in self.defects:
            for parameter in self.module.parameters():
                parameter.grad.mul_(self.inner.size)


PLAIN = {
    "290": Recomputed,
    "1304": DroppedLayer,
    "950": OldParameters,
    "656": Untied,
    "565": NeverStepped,
    "right": Right,
}
BESIDE = {
    "599": Norms,
    "1446": Norms,
    "906": Context,
    "1464": Context,
    "right, norms": Norms,
    "right, context": Context,
}


def audited(name: str) -> list[str]:
    """Returns what the audit of a bug says, with its number; runs on each rank."""
    try:
        if name in PLAIN:
            report = audit_defects.audit(PLAIN[name]()).run()
        else:
            report = BESIDE[name]((name,)).audit().run()
    except PlanError as error:
        return [f"refused: {error}"]
    return [f"step {f.step}: {f.cause} ({shown(f.names)})" for f in report.findings]


if __name__ == "__main__":
    for name in sys.argv[1:] or [*PLAIN, *BESIDE]:
        print(name, *run_ranks(audited, 4, name)[0] or ["no finding"], sep="\n  ", flush=True)
