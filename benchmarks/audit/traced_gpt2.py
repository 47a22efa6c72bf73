"""Audits transformers' GPT-2, cut by the tracer of torch.distributed.pipelining.

pipegrad audit benchmarks/audit/traced_gpt2.py:tied --ranks 2
"""

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
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

import pipegrad
from pipegrad.audit import Audit, of_torch


def tied() -> Audit:
    """Embedding and head are one parameter, as in the released GPT-2."""
    return _audit()


def tied_attached() -> Audit:
    """The same, after pipegrad.attach."""
    return _audit(is_attached=True)


def untied() -> Audit:
    """Embedding and head are two parameters."""
    return _audit(is_tied=False)


def unscaled() -> Audit:
    """As `untied`, with scale_grads=False, although the loss is a mean."""
    return _audit(is_tied=False, scale_grads=False)


def dropout() -> Audit:
    """As `untied`, with dropout of 0.1."""
    return _audit(is_tied=False, dropout=0.1)


class _Logits(nn.Module):
    """GPT-2 from tokens to logits."""

    def __init__(self, is_tied: bool, dropout: float) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=4,
            n_positions=LENGTH,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=0.0,
            tie_word_embeddings=is_tied,
            attn_implementation="eager",
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        torch.manual_seed(0)
        self.lm = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm(tokens, use_cache=False).logits
        return logits


def _audit(
    *,
    is_tied: bool = True,
    is_attached: bool = False,
    scale_grads: bool = True,
    dropout: float = 0.0,
) -> Audit:
    rank, world = dist.get_rank(), dist.get_world_size()
    uncut, model = _Logits(is_tied, dropout), _Logits(is_tied, dropout)
    every = LAYERS // world
    cuts = [f"lm.transformer.h.{index * every}" for index in range(1, world)]
    traced = pipeline(
        model,
        mb_args=(torch.zeros(ROWS, LENGTH, dtype=torch.long),),
        split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING),
    )
    stage = traced.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=scale_grads)
    if is_attached:
        topology = pipegrad.Topology.create(pipeline=world)
        pipegrad.attach(schedule, topology=topology, tied=traced.replicated_params)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=LEARNING_RATE)
    return of_torch(schedule, optimizer, model=uncut, batches=batches())
