"""Times the audit of a small GPT on four ranks: torch's Schedule1F1B and pipegrad.attach.

python benchmarks/audit/small_gpt.py
pipegrad audit benchmarks/audit/small_gpt.py:attached

The time is that of the whole command, imports and processes included.
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import pipegrad
from pipegrad.audit import Audit, of_torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from tied_gpt import tied_gpt

MICROBATCHES, ROWS, LENGTH, STEPS = 4, 16, 64, 3


def attached() -> Audit:
    """Right: the embedding and the head are one parameter, and pipegrad reduces it."""
    return _audit(is_attached=True)


def bare() -> Audit:
    """The same without pipegrad.attach."""
    return _audit(is_attached=False)


def clipped() -> Audit:
    """As `attached`; the norm is clipped to 0.5 by the GradientSync."""
    return _audit(is_attached=True, clip_norm=0.5)


def _loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _audit(*, is_attached: bool, clip_norm: float | None = None) -> Audit:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    uncut, model = tied_gpt(layers=4), tied_gpt(layers=4)
    model.load_state_dict(uncut.state_dict())
    cut = [index * len(model) // world for index in range(world + 1)]
    module = model[cut[rank] : cut[rank + 1]]
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, _loss_fn)
    before_step = None
    if is_attached:
        topology = pipegrad.Topology.create(pipeline=world)
        sync = pipegrad.attach(schedule, topology=topology, tied=pipegrad.find_tied(model))
        if clip_norm is not None:
            before_step = partial(sync.clip_grad_norm_, clip_norm)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    tokens = torch.randint(256, (STEPS, ROWS, LENGTH + 1))
    batches = [(batch[:, :-1].contiguous(), batch[:, 1:]) for batch in tokens]
    return of_torch(
        schedule,
        optimizer,
        model=uncut,
        batches=batches,
        before_step=before_step,
    )


if __name__ == "__main__":
    begin = time.monotonic()
    command = [sys.executable, "-m", "pipegrad", "audit", f"{__file__}:attached", "--ranks", "4"]
    code = subprocess.run(command, check=False).returncode
    print(f"exit code {code}, {time.monotonic() - begin:.1f} s in all")
