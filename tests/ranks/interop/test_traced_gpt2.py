"""The tied GPT-2 of transformers, cut by torch's tracer: `attach` makes its gradients right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import pipegrad
from pipegrad.testing import run_ranks
from tests.support.rounding import rounding

LAYERS, VOCAB, CONTEXT, BATCH, MICROBATCHES = 4, 97, 16, 8, 4
TIED = ["transformer.wte.weight", "lm_head.weight"]


@dataclass
class Errors:
    """Of one rank, or of all. Of gradients relative to the largest element of all true ones."""

    gradients: dict[str, float] = field(default_factory=dict)  # by name in the uncut model
    losses: list[float] = field(default_factory=list)  # relative to the true loss; last stage


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=32,
        n_head=2,
        n_positions=CONTEXT,
        vocab_size=VOCAB,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def steps() -> tuple[Errors, Errors]:
    """Runs torch's Schedule1F1B on the traced model: without `attach`, and with it."""
    topology = pipegrad.Topology.create(pipeline=dist.get_world_size())
    size, rank = topology.size("pp"), topology.coordinate("pp")
    model, tokens = gpt2(), torch.randint(VOCAB, (BATCH, CONTEXT))
    loss = loss_of(model(tokens).logits, tokens)
    loss.backward()
    true = {
        n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None
    }
    model.zero_grad()

    starts = [f"transformer.h.{LAYERS * part // size}" for part in range(1, size)]
    split_spec = dict.fromkeys(starts, SplitPoint.BEGINNING)
    pipe = pipeline(model, (tokens[: BATCH // MICROBATCHES],), split_spec=split_spec)
    stage = pipe.build_stage(rank, torch.device("cpu"), topology.group_along("pp"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_of)

    def step() -> Errors:
        losses, inputs = list[Tensor](), [tokens] if stage.is_first else []
        schedule.step(*inputs, target=tokens if stage.is_last else None, losses=losses)
        largest = max(gradient.abs().max() for gradient in true.values())
        errors = Errors(
            losses=[abs(torch.stack(losses).mean() / loss - 1).item()] if losses else []
        )
        for name, parameter in stage.submod.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:  # a tracer leaves parameters that other stages use
                error = (parameter.grad - true[name]).abs().max() / largest
                errors.gradients[name] = error.item()
        stage.submod.zero_grad()
        return errors

    without = step()
    pipegrad.attach(schedule, topology=topology, tied=pipegrad.find_tied(model))
    return without, step()


def merged(ranks: Sequence[Errors]) -> Errors:
    whole = Errors()
    for errors in ranks:
        for name, error in errors.gradients.items():
            whole.gradients[name] = max(error, whole.gradients.get(name, 0.0))
        whole.losses += errors.losses
    return whole


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_attach_makes_the_gradients_of_a_traced_gpt2_those_of_one_process(num_ranks: int) -> None:
    most = rounding(BATCH * (CONTEXT - 1))
    without, attached = map(merged, zip(*run_ranks(steps, num_ranks), strict=True))

    assert all(without.gradients[name] > 0.1 for name in TIED)
    assert max(error for name, error in without.gradients.items() if name not in TIED) <= most
    assert set(attached.gradients) == {name for name, _ in gpt2().named_parameters()} | set(TIED)
    assert max(attached.gradients.values()) <= most
    assert max(without.losses + attached.losses) <= most
