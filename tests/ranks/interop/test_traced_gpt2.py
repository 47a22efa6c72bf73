"""The tied GPT-2 of transformers, cut by torch's tracer: `attach` makes its gradients right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import pipegrad
from tests.support.gradients.cases import rank
from tests.support.ranked import gathered
from tests.support.rounding import rounding

LAYERS, VOCAB, CONTEXT, BATCH, MICROBATCHES = 4, 97, 16, 8, 4
TIED = ["transformer.wte.weight", "lm_head.weight"]


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


@pytest.mark.ranks(2)
def test_attach_makes_the_gradients_of_a_traced_gpt2_those_of_one_process() -> None:
    """Runs torch's Schedule1F1B on the traced model: without `attach`, and with it."""
    most, size = rounding(BATCH * (CONTEXT - 1)), 2
    topology = pipegrad.Topology.create(pipeline=size)
    model, tokens = gpt2(), torch.randint(VOCAB, (BATCH, CONTEXT))
    loss = loss_of(model(tokens).logits, tokens)
    loss.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    true = {name: p.grad for name, p in named.items() if p.grad is not None}
    largest = max(gradient.abs().max() for gradient in true.values())
    model.zero_grad()

    starts = [f"transformer.h.{LAYERS * part // size}" for part in range(1, size)]
    split_spec = dict.fromkeys(starts, SplitPoint.BEGINNING)
    pipe = pipeline(model, (tokens[: BATCH // MICROBATCHES],), split_spec=split_spec)
    stage = pipe.build_stage(rank(), torch.device("cpu"), topology.group_along("pp"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_of)

    def errors() -> dict[str, float]:
        """Returns the largest error of all ranks, by name, relative to all true gradients."""
        losses, inputs = list[Tensor](), [tokens] if stage.is_first else []
        schedule.step(*inputs, target=tokens if stage.is_last else None, losses=losses)
        assert not losses or abs(torch.stack(losses).mean() / loss - 1) <= most
        found = {
            name: ((p.grad - true[name]).abs().max() / largest).item()
            for name, p in stage.submod.named_parameters(remove_duplicate=False)
            if p.grad is not None  # a tracer leaves parameters that other stages use
        }
        stage.submod.zero_grad()
        every = gathered(found)
        return {n: max(there.get(n, 0.0) for there in every) for there in every for n in there}

    without = errors()
    assert all(without[name] > 0.1 for name in TIED)
    assert max(error for name, error in without.items() if name not in TIED) <= most
    pipegrad.attach(schedule, topology=topology, tied=pipegrad.find_tied(model))
    attached = errors()
    assert set(attached) == set(named) - {"lm_head.weight"} | set(TIED)
    assert max(attached.values()) <= most
