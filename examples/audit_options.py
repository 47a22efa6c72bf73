"""Twelve options of a training job: does the pipeline have each one as one process has it?

pipegrad audit examples/audit_options.py:right            (4 ranks: 2 stages x 2 replicas)
pipegrad audit examples/audit_options.py:three_lost --variant packing

`three_lost` forgets three of them in the pipeline, without a word. docs/audit.md has the report.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import pipegrad

STAGES, MICROBATCHES, ROWS, LENGTH, VOCABULARY, WIDTH, IGNORED = 2, 4, 16, 12, 64, 32, -100


@dataclass(frozen=True)
class Options:
    packing: bool = False
    padding: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    dropout: float = 0.0
    recompute: bool = False
    frozen_embedding: bool = False
    clip_norm: float = 1e9
    decays_vectors: bool = True
    muon: bool = False
    warm_up: int = 1


CHANGES: dict[str, dict[str, object]] = {
    "packing": {"packing": True},
    "padding": {"padding": True},
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-3},
    "soft cap": {"softcap": 2.0},
    "dropout": {"dropout": 0.1},
    "recompute": {"recompute": True},
    "frozen embedding": {"frozen_embedding": True},
    "clipping": {"clip_norm": 0.1},
    "decay groups": {"decays_vectors": False},
    "Muon": {"muon": True},
    "warm-up": {"warm_up": 4},
}
DROPPED = {"packing": False, "decays_vectors": True, "muon": False}  # by `three_lost`


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        mask = (document[:, :, None] == document[:, None]).tril()[:, None]
        heads = self.qkv(self.norms[0](x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, mask)
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block(options.dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.head.weight = self.embedding.weight  # tied
        self.place.requires_grad_(not options.frozen_embedding)
        self.softcap = options.softcap

    def forward(self, tokens: Tensor, document: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x, document)
        logits = self.head(x)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def summed(options: Options, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses of all targets, and their number."""
    logits, target = logits.flatten(0, 1), target.flatten()
    total = functional.cross_entropy(
        logits, target, reduction="sum", label_smoothing=options.label_smoothing
    )
    counted = target != IGNORED
    return total + options.z_loss * logits[counted].logsumexp(1).square().sum(), counted.sum()


def mean(options: Options, logits: Tensor, target: Tensor) -> Tensor:
    total, number = summed(options, logits, target)
    return total / number


def batches(options: Options) -> list[tuple[dict[str, Tensor], Tensor]]:
    result = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        ends = torch.randint(1, LENGTH, (ROWS, 1), generator=generator)
        is_behind = torch.arange(LENGTH) >= ends
        document = is_behind.long() if options.packing else torch.zeros_like(is_behind).long()
        target = tokens[:, 1:]
        if options.padding:
            target = target.masked_fill(is_behind, IGNORED)
        result.append(({"tokens": tokens[:, :-1], "document": document}, target))
    return result


def group_of(options: Options, _name: str, parameter: nn.Parameter) -> dict[str, float]:
    return {} if options.decays_vectors or parameter.ndim > 1 else {"weight_decay": 0.0}


class OneProcess:
    """What updates the uncut model: plain torch."""

    def __init__(self, options: Options, model: nn.Module) -> None:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        by_muon = [n for n, p in trained.items() if options.muon and p.ndim == 2 and "layers" in n]
        matrices = [trained[name] for name in by_muon]
        others = [
            {"params": [p], **group_of(options, name, p)}
            for name, p in trained.items()
            if name not in by_muon
        ]
        self.parameters, self.max_norm = list(trained.values()), options.clip_norm
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(others, **SGD)]
        if matrices:
            self.optimizers.append(torch.optim.Muon(matrices, lr=0.01))
        self.rates = [warm_up(options, optimizer) for optimizer in self.optimizers]

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        for part in (*self.optimizers, *self.rates):
            part.step()


SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


def warm_up(
    options: Options, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / options.warm_up)
    )


def audit(options: Options, *, loses: bool) -> pipegrad.Audit:
    own = replace(options, **DROPPED) if loses else options
    torch.manual_seed(0)
    model = Gpt(options)
    torch.manual_seed(0)
    topology = pipegrad.Topology.create(pipeline=STAGES)
    example = {name: value[:2] for name, value in batches(own)[0][0].items()}
    cut = pipegrad.cut(Gpt(own), num_stages=STAGES, example=example)
    stages = cut.stages(topology.local_stages, recompute=own.recompute)
    scheduler = pipegrad.Scheduler(
        stages,
        topology,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=partial(summed, own),
        loss_reduction="token_mean",
        tied=cut.tied,
    )
    sgd = partial(torch.optim.SGD, **SGD)
    made = scheduler.optimizer(
        torch.optim.Muon if own.muon else sgd,
        **({"lr": 0.01, "others": sgd} if own.muon else {}),
        group_of=partial(group_of, own),
    )
    rate = warm_up(own, made)

    def step(inputs: dict[str, Tensor], target: Tensor) -> Tensor:
        if not own.packing:
            inputs = inputs | {"document": torch.zeros_like(inputs["document"])}
        result = scheduler.step(inputs, target=target)
        scheduler.sync.clip_grad_norm_(own.clip_norm)
        made.step()
        made.zero_grad()
        rate.step()
        return result.loss

    return pipegrad.Audit(
        step=step,
        modules=[stage.module for stage in stages],
        model=model,
        loss_fn=partial(mean, options),
        batches=batches(options),
        microbatches=MICROBATCHES,
        replica=topology.coordinate("dp"),
        num_replicas=topology.size("dp"),
        optimizer=partial(OneProcess, options),
    )


def varied(*, loses: bool) -> pipegrad.Audit:
    return replace(
        audit(Options(), loses=loses),
        variants={
            name: partial(audit, Options(**change), loses=loses) for name, change in CHANGES.items()
        },
    )


def right() -> pipegrad.Audit:
    return varied(loses=False)


def three_lost() -> pipegrad.Audit:
    return varied(loses=True)
