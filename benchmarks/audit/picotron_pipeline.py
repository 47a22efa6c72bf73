"""Audits the pipeline of Hugging Face's picotron: its PipelineParallel and its two schedules.

export PICOTRON=/path/to/picotron
pipegrad audit benchmarks/audit/picotron_pipeline.py:one_f_one_b --ranks 2

PICOTRON is a checkout of huggingface/picotron. Its model needs a GPU, so the model here is a small
one with the same names of modules. Its process groups are replaced by the numbers that are read.
"""

import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from shared import (
    LAYERS,
    LEARNING_RATE,
    LENGTH,
    MICROBATCHES,
    ROWS,
    VOCABULARY,
    WIDTH,
    batches,
    loss_fn,
)
from torch import Tensor, nn

from pipegrad.audit import Audit

sys.path.append(os.environ["PICOTRON"])
torch.cuda.synchronize = lambda *_: None  # picotron calls it after each message


def one_f_one_b() -> Audit:
    """Its 1F1B."""
    return _audit("train_step_pipeline_1f1b")


def all_forward_all_backward() -> Audit:
    """Its AFAB: all forwards, then all backwards."""
    return _audit("train_step_pipeline_afab")


class _Mlp(nn.Sequential):
    """A feed-forward network that can be initialised again, as picotron does it."""

    def reset_parameters(self) -> None:
        self[0].reset_parameters()
        self[2].reset_parameters()


class _Layer(nn.Module):
    """A layer under picotron's names. Its attention is one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.mlp = _Mlp(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, hidden: Tensor, position_ids: Tensor | None = None) -> Tensor:
        hidden = hidden + self.attention(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Model(nn.Module):
    """The uncut model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder_layers = nn.ModuleList([_Layer() for _ in range(LAYERS)])
        self.final_norm = nn.LayerNorm(WIDTH)
        self.final_proj = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.decoder_layers:
            hidden = layer(hidden)
        logits: Tensor = self.final_proj(self.final_norm(hidden))
        return logits


class _Loader:
    """A step's microbatches, as picotron's data loader gives them."""

    grad_acc_steps = MICROBATCHES

    def __init__(self, inputs: Tensor, target: Tensor) -> None:
        self._cut = zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)

    def __next__(self) -> dict[str, Tensor]:
        tokens, target = next(self._cut)
        return {"input_ids": tokens, "target_ids": target, "position_ids": torch.zeros(1)}


def _audit(schedule: str) -> Audit:
    manager = importlib.import_module("picotron.process_group_manager")
    pipelines: Any = importlib.import_module("picotron.pipeline_parallel.pipeline_parallel")
    rank, world = dist.get_rank(), dist.get_world_size()
    is_last = rank == world - 1
    manager.process_group_manager = SimpleNamespace(
        pp_rank=rank,
        pp_world_size=world,
        pp_is_first_stage=rank == 0,
        pp_is_last_stage=is_last,
        pp_prev_rank=rank - 1,
        pp_next_rank=rank + 1,
        cp_dp_world_size=1,
    )
    stage = pipelines.PipelineParallel(_Model(), SimpleNamespace(num_hidden_layers=LAYERS))
    optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE)
    shape, device = (ROWS, LENGTH, WIDTH), torch.device("cpu")

    def step(inputs: Tensor, target: Tensor) -> float | None:
        optimizer.zero_grad()
        loader = _Loader(inputs, target)
        loss = getattr(pipelines, schedule)(stage, loader, shape, device, torch.float32)
        optimizer.step()
        return float(loss) if is_last else None

    return Audit(
        step=step,
        modules=stage,
        model=_Model(),
        loss_fn=loss_fn,
        batches=batches(),
        microbatches=MICROBATCHES,
    )
