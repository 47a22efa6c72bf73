"""Tries options of transformers on a Llama that pipegrad.cut has cut, each beside one process.

pipegrad audit benchmarks/audit/transformers_options.py:options
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import pipegrad
from pipegrad.audit import Audit

STAGES, MICROBATCHES, ROWS, LENGTH, VOCABULARY, IGNORED = 2, 2, 8, 12, 64, -100


@dataclass(frozen=True)
class Options:
    """Options of a model, of its batches and of its loss.

    Attributes:
        config: Of the model.
        has_mask: Whether rows begin with padding, which attention leaves out.
        has_positions: Whether rows are two texts, whose positions begin at 0.
        label_smoothing: Of the loss.
        recompute: Whether layers compute their forward again.
    """

    config: tuple[tuple[str, Any], ...] = ()
    has_mask: bool = False
    has_positions: bool = False
    label_smoothing: float = 0.0
    recompute: bool = False


def options() -> Audit:
    """Options, in 2 stages x 2 replicas."""
    changes = {
        "attention mask": Options(has_mask=True),
        "position ids": Options(has_positions=True),
        "label smoothing": Options(label_smoothing=0.1),
        "attention dropout": Options(config=(("attention_dropout", 0.1),)),
        "gradient checkpointing": Options(recompute=True),
        "eager attention": Options(config=(("attn_implementation", "eager"),)),
        "tied embeddings": Options(config=(("tie_word_embeddings", True),)),
        "bias of attention": Options(config=(("attention_bias", True),)),
    }
    variants: dict[str, Callable[[], Audit]] = {
        name: partial(_audit, change) for name, change in changes.items()
    }
    return replace(_audit(Options()), variants=variants)


def _batches(own: Options) -> list[tuple[Mapping[str, Tensor], Tensor]]:
    result = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        inputs, target = {"input_ids": tokens[:, :-1]}, tokens[:, 1:]
        begins = torch.randint(LENGTH // 2, (ROWS, 1), generator=generator)
        if own.has_mask:
            inputs["attention_mask"] = (torch.arange(LENGTH) >= begins).long()
            target = target.masked_fill(torch.arange(LENGTH) < begins, IGNORED)
        if own.has_positions:
            inputs["position_ids"] = (torch.arange(LENGTH) - begins).remainder(LENGTH)
        result.append((inputs, target))
    return result


class _Logits(nn.Module):
    """A model whose output is its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(**inputs, use_cache=False).logits
        return logits


def _model(own: Options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=LENGTH, **dict(own.config),
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    if own.recompute:
        model.activation_checkpointing_enable()
    return model


def _loss(own: Options, logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), label_smoothing=own.label_smoothing
    )


def _sums(own: Options, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    number = (target != IGNORED).sum()
    return _loss(own, logits, target) * number, number


def _audit(own: Options) -> Audit:
    topology = pipegrad.Topology.create(pipeline=STAGES)
    cut = pipegrad.cut(_model(own), num_stages=STAGES)
    stages = cut.stages(topology.local_stages)
    scheduler = pipegrad.Scheduler(
        stages,
        topology,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=partial(_sums, own),
        loss_reduction="token_mean",
        tied=cut.tied,
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)

    def step(inputs: Mapping[str, Tensor], target: Tensor) -> Tensor:
        result = scheduler.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
        return result.loss

    uncut = _Logits(_model(own))
    there = {name for name, _ in uncut.named_parameters(remove_duplicate=False)}
    held = [n for stage in stages for n, _ in stage.module.named_parameters()]
    return Audit(
        step=step,
        modules=[stage.module for stage in stages],
        model=uncut,
        loss_fn=partial(_loss, own),
        batches=_batches(own),
        microbatches=MICROBATCHES,
        replica=topology.coordinate("dp"),
        num_replicas=topology.size("dp"),
        names={name: f"model.{name}" for name in held if f"model.{name}" in there},
    )
