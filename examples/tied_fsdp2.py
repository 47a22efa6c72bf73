"""Trains tied Llama 3.2 and Qwen3 models, cut as torchtitan cuts them: pipeline x FSDP2, exactly.

torchrun --nproc-per-node 4 examples/tied_fsdp2.py --compare [--model qwen3-debug] [--scheduler]
torchtitan says "Weight tying is not supported with Pipeline Parallel" of these models. Here the
embedding is on the first stage, the output on the last, both sharded by FSDP2 over the replicas of
their stage; pipegrad sums the gradients of their shards. Without --scheduler torch's Schedule1F1B
runs, by attach. llama-3.2-1b and qwen3-0.6b have their true widths; --layers cuts their depth.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import pipegrad

BATCH, CONTEXT, MICROBATCHES, LEARNING_RATE = 16, 16, 4, 3e-3


@dataclass(frozen=True)
class Config:
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    rope_theta: float
    qk_norm: bool


MODELS = {
    "llama-3.2-1b": Config(2048, 16, 32, 8, 64, 8192, 128256, 500_000.0, qk_norm=False),
    "qwen3-0.6b": Config(1024, 28, 16, 8, 128, 3072, 151936, 1_000_000.0, qk_norm=True),
    "llama3-debug": Config(32, 4, 4, 2, 8, 64, 97, 500_000.0, qk_norm=False),
    "qwen3-debug": Config(32, 4, 4, 2, 16, 64, 97, 1_000_000.0, qk_norm=True),
}


def rotated(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of `x`, (batch, head, position, head_dim)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, heads, size = config, config.num_heads, config.head_dim
        self.wq = nn.Linear(config.dim, heads * size, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * size, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * size, bias=False)
        self.wo = nn.Linear(heads * size, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(size, eps=1e-6) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(size, eps=1e-6) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        size, theta = self.config.head_dim, self.config.rope_theta
        q, k, v = (
            made.unflatten(-1, (-1, size)).transpose(1, 2)
            for made in (self.wq(x), self.wk(x), self.wv(x))
        )
        q, k = rotated(self.q_norm(q), theta), rotated(self.k_norm(k), theta)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(found.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Runs with any of its children missing, so that a stage is a copy without the others'."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(config) for i in range(config.num_layers)}
        )
        self.norm: nn.Module | None = nn.RMSNorm(config.dim, eps=1e-5)
        self.output: nn.Module | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        self.tok_embeddings.weight = self.output.weight  # enable_weight_tying

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)


def stage_of(model: Transformer, stage: int, num_stages: int) -> Transformer:
    """Returns a copy with a stage's children alone, under their names, as torchtitan does."""
    part = copy.deepcopy(model)
    count = len(model.layers)
    for index, name in enumerate(model.layers):
        if index * num_stages // count != stage:
            del part.layers[name]
    if stage > 0:
        part.tok_embeddings = None
    if stage < num_stages - 1:
        part.norm = part.output = None
    return part


def sharded(part: Transformer, mesh: DeviceMesh) -> Transformer:
    """Shards every block, and what is left; microbatches find them gathered, as in torchtitan."""
    for layer in part.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(part, mesh=mesh, reshard_after_forward=False)
    return part


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Returns tokens, and what they must become: something that can be learned."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(97, (BATCH, CONTEXT), generator=generator)
    return tokens, (5 * tokens + 3) % 97


def compared(model: Transformer) -> Callable[[Tensor, Tensor], str]:
    """Returns what trains the uncut model, a step at a time, and tells its loss and norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(tokens: Tensor, target: Tensor) -> str:
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return f"  one process: loss {loss:.6f}  norm {norm:.6f}"

    return step


def main(asked: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    topology = pipegrad.Topology.create(pipeline=asked.pipeline)
    assert topology.mesh is not None
    stage, replicas = topology.local_stages[0], topology.size("dp")
    torch.manual_seed(0)
    config = MODELS[asked.model]
    whole = Transformer(replace(config, num_layers=asked.layers or config.num_layers))
    shared = pipegrad.find_tied(whole)  # [["tok_embeddings.weight", "output.weight"]]
    part = sharded(stage_of(whole, stage, topology.num_stages), topology.mesh["dp"])
    is_first = dist.get_rank() == 0
    say = print if is_first else lambda _: None
    say(f"{asked.model}: {sum(p.numel() for p in whole.parameters()):,} parameters, tied {shared}")
    reference = whole if asked.compare and is_first else None  # one process, to compare with
    del whole
    # FSDP2 reduces over the replicas; what is left is the tie.
    options = {"topology": topology, "tied": shared, "handlers": ["pipeline-shared"]}
    if asked.scheduler:
        options |= {"schedule": "eager-1f1b", "num_microbatches": MICROBATCHES, "loss_fn": loss_fn}
        ours = pipegrad.Scheduler([pipegrad.Stage(part, stage)], **options)
        sync = ours.sync
    else:
        group = topology.group_along("pp")
        torchs = PipelineStage(part, stage, asked.pipeline, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(torchs, MICROBATCHES, loss_fn)
        sync = pipegrad.attach(schedule, **options)
    optimizer = sync.optimizer(torch.optim.AdamW, lr=LEARNING_RATE)
    true_step = compared(reference) if reference else lambda *_: ""

    def step(tokens: Tensor, target: Tensor) -> Tensor:
        """Forward and backward of this replica's share; returns the loss of the whole batch."""
        tokens, target = (t.chunk(replicas)[topology.coordinate("dp")] for t in (tokens, target))
        if asked.scheduler:
            return ours.step(tokens, target=target).loss
        losses: list[Tensor] = []
        inputs = [tokens] if torchs.is_first else []
        schedule.step(*inputs, target=target if torchs.is_last else None, losses=losses)
        loss = sum(losses).detach() / len(losses) / replicas if losses else torch.zeros(())
        dist.all_reduce(loss)
        return loss

    for number in range(1, asked.steps + 1):
        tokens, target = batch(number)
        line = f"step {number:4}  loss {step(tokens, target):.6f}"
        line += f"  norm {sync.clip_grad_norm_(1.0):.6f}"
        optimizer.step()
        optimizer.zero_grad()
        say(line + true_step(tokens, target))
    sync.check_replicas()
    say("the tied shards have the same bits on both stages")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="llama3-debug")
    parser.add_argument("--layers", type=int, help="as many as the model has by default")
    parser.add_argument("--pipeline", type=int, default=2, help="number of stages")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--scheduler", action="store_true", help="pipegrad's, not torch's")
    parser.add_argument("--compare", action="store_true", help="with one process, on rank 0")
    main(parser.parse_args())
