"""Data-parallel training steps of a small GPT with AdamW, sharded or not: pipegrad's and torch's.

What `step_time.py` and `peak_memory.py` measure; nothing here is run by itself.
"""

import argparse
import os
import pydoc_data.topics
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import pipegrad
from pipegrad.plugins.handler import BUCKET_BYTES

OURS, OURS_WHOLE = "pipegrad, sharded", "pipegrad, data-parallel"
LOCAL = "forward and backward alone"
LOSS_TOLERANCE, CHECKED_STEPS = 1e-4, 8


@dataclass(frozen=True)
class Shape:
    """What is trained, on what, and how; the same for all ways."""

    blocks: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    microbatches: int
    learning_rate: float
    fused: bool
    bucket_mib: int | None = None

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options that `of` reads."""
        parser.add_argument("--blocks", type=int, default=8)
        parser.add_argument("--width", type=int, default=512)
        parser.add_argument("--heads", type=int, default=8)
        parser.add_argument("--vocabulary", type=int, default=6144)
        parser.add_argument("--batch", type=int, default=2, help="of a microbatch on a rank")
        parser.add_argument("--length", type=int, default=32)
        parser.add_argument("--microbatches", type=int, default=1)
        parser.add_argument("--learning-rate", type=float, default=3e-4)
        parser.add_argument("--fused", action="store_true", help="AdamW(fused=True), for all")
        parser.add_argument(
            "--bucket-mib", type=int, default=None, help="of ours; else its default"
        )

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Shape":
        """Returns what the command line asks for."""
        return cls(**{name: getattr(arguments, name) for name in cls.__dataclass_fields__})


class Block(nn.Module):
    """GPT's, without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.out = nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns hidden states of the same shape, (batch, length, width)."""
        heads = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.mlp(hidden)
        return result


class Gpt(nn.Module):
    """Embedding, blocks, head (not tied); returns the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Parameter(torch.randn(shape.length, shape.width) * 0.02)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the mean loss of tokens (batch, length + 1), each told from those before it."""
        hidden = self.embedding(tokens[:, :-1]) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Text:
    """English words that Python carries, as hashes below the vocabulary's size."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        words = " ".join(pydoc_data.topics.topics.values()).split()
        self._tokens = torch.tensor([zlib.crc32(w.encode()) % shape.vocabulary for w in words])

    def step(self, number: int) -> list[Tensor]:
        """Returns this rank's microbatches of a step: tokens (batch, length + 1)."""
        shape, ranks = self._shape, dist.get_world_size()
        first = number * shape.microbatches
        return [
            self._rows(((first + i) * ranks + dist.get_rank()) * shape.batch)
            for i in range(shape.microbatches)
        ]

    def _rows(self, row: int) -> Tensor:
        length, last = self._shape.length, len(self._tokens) - self._shape.length - 1
        starts = [(row + i) * length % last for i in range(self._shape.batch)]
        return torch.stack([self._tokens[start : start + length + 1] for start in starts])


def nothing() -> None:
    """Does nothing."""


@dataclass
class Way:
    """One way to train a model of its own.

    Attributes:
        module: Given tokens, returns the loss.
        optimizer: Or None where nothing is updated.
        holder: The optimizer whose state this rank holds; where torch wraps one, that inside.
        divisor: What the loss is divided by before backward.
        keep_gradients: Whether gradients are zeroed in place after a step, instead of dropped.
        begin: Before the first forward.
        microbatch: The context of a microbatch, told whether it is the last one.
        before_backward: Right before the last backward.
        after_backward: Right after it.
        after_update: Right after the optimizer's step.
        settle: Ends what a step leaves under way.
    """

    module: nn.Module
    optimizer: Optimizer | None
    holder: Optimizer | None
    divisor: float
    keep_gradients: bool = False
    begin: Callable[[], object] = nothing
    microbatch: Callable[[bool], AbstractContextManager[object]] = nullcontext
    before_backward: Callable[[], object] = nothing
    after_backward: Callable[[], object] = nothing
    after_update: Callable[[], object] = nothing
    settle: Callable[[], object] = nothing
    close: Callable[[], object] = nothing
    num_steps: int = 0

    def step(self, microbatches: Sequence[Tensor]) -> Tensor:
        """Runs one training step; returns this rank's loss before it."""
        self.begin()
        losses = []
        for number, tokens in enumerate(microbatches, start=1):
            is_last = number == len(microbatches)
            with self.microbatch(is_last):
                loss = self.module(tokens)
                if is_last:
                    self.before_backward()
                (loss / self.divisor).backward()
            losses.append(loss.detach())
        self.after_backward()
        if self.optimizer is None:
            self.module.zero_grad()
        else:
            self.optimizer.step()
            self.after_update()
            self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
        self.num_steps += 1
        return torch.stack(losses).mean()

    def state_bytes(self) -> int:
        """Returns the bytes of the optimizer's state on this rank."""
        states = self.holder.state.values() if self.holder else ()
        values = [value for state in states for value in state.values()]
        local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
        return sum(value.nbytes for value in local if isinstance(value, Tensor))


def adamw(parameters: Iterable[Tensor] | Iterable[dict[str, Any]], shape: Shape) -> AdamW:
    """Returns the optimizer, with torch's defaults."""
    return AdamW(parameters, lr=shape.learning_rate, fused=shape.fused or None)


def ours(model: Gpt, shape: Shape, *, handler: str) -> Way:
    """Returns pipegrad's, as in docs/attach.md."""
    topology = pipegrad.Topology.create(pipeline=1)
    bucket_bytes = BUCKET_BYTES if shape.bucket_mib is None else shape.bucket_mib * 2**20
    sync = pipegrad.GradientSync(
        {0: model}, topology, handlers=[handler], bucket_bytes=bucket_bytes
    )
    sharded = handler == "sharded"
    optimizer = adamw(sync.optimizer_parameters() if sharded else model.parameters(), shape)

    def begin() -> None:
        sync.prepare(divisor=shape.microbatches)
        if sharded:
            sync.stage_first_use(0)

    def after_backward() -> None:
        sync.stage_final(0)
        sync.finish()

    return Way(
        model,
        optimizer,
        optimizer,
        divisor=1,
        begin=begin,
        before_backward=partial(sync.stage_last_backward, 0),
        after_backward=after_backward,
        after_update=sync.publish if sharded else nothing,
        settle=sync.wait_parameters if sharded else nothing,
        close=sync.close,
    )


def fsdp(model: Gpt, shape: Shape) -> Way:
    """Returns FSDP2, parameters gathered once a step, in forward, and kept until the last backward.

    Where microbatches accumulate they are kept from one to the next: by default each would gather
    them again.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    root: FSDPModule = fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = adamw(model.parameters(), shape)

    def microbatch(is_last: bool) -> AbstractContextManager[object]:
        root.set_requires_gradient_sync(is_last)
        root.set_reshard_after_backward(is_last)
        return nullcontext()

    return Way(model, optimizer, optimizer, shape.microbatches, microbatch=microbatch)


def ddp(model: Gpt, shape: Shape, *, zero: bool, view: bool = False) -> Way:
    """Returns DistributedDataParallel; `zero` divides the optimizer's state over the ranks.

    Gradients are views of its buckets, and zeroed in place only where that is better: where they
    accumulate, dropped ones would be made anew beside the buckets.
    """
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: Optimizer
    if zero:
        optimizer = sharding = ZeroRedundancyOptimizer(
            module.parameters(),
            AdamW,
            parameters_as_bucket_view=view,
            lr=shape.learning_rate,
            fused=shape.fused or None,
        )
        holder = sharding.optim
    else:
        optimizer = holder = adamw(module.parameters(), shape)
    return Way(
        module,
        optimizer,
        holder,
        divisor=shape.microbatches,
        keep_gradients=shape.microbatches > 1,
        microbatch=lambda is_last: nullcontext() if is_last else module.no_sync(),
    )


def local(model: Gpt, shape: Shape) -> Way:
    """Returns what all ways have in common: no reduction, no update."""
    return Way(model, None, None, shape.microbatches)


WAYS: dict[str, Callable[[Gpt, Shape], Way]] = {
    OURS: partial(ours, handler="sharded"),
    "FSDP2": fsdp,
    "DDP, ZeroRedundancyOptimizer": partial(ddp, zero=True),
    "DDP, ZeroRedundancyOptimizer, bucket view": partial(ddp, zero=True, view=True),
    OURS_WHOLE: partial(ours, handler="data-parallel"),
    "DDP": partial(ddp, zero=False),
    LOCAL: local,
}
SHORT = dict(
    zip(
        ("sharded", "fsdp", "zero", "zero-view", "data-parallel", "ddp", "local"), WAYS, strict=True
    )
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what both scripts ask for."""
    Shape.add_options(parser)
    parser.add_argument("--ways", nargs="+", choices=SHORT, default=list(SHORT))


def join() -> None:
    """Makes this process one of torchrun's ranks, with one thread."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def leave() -> NoReturn:
    """Ends this rank, once all others are as far."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch, left to itself, now and then aborts here when FSDP2's groups go


def construct(shape: Shape) -> Gpt:
    """Returns a model, with the same bits on every rank and for every way."""
    torch.manual_seed(0)
    return Gpt(shape)


def mean_losses(losses: Sequence[Tensor]) -> list[float]:
    """Returns each step's loss, the mean over the ranks."""
    mean = torch.stack(list(losses)).double()
    dist.all_reduce(mean)
    return [float(x) for x in mean / dist.get_world_size()]


def check_losses(losses: dict[str, list[float]]) -> str:
    """Asserts that all ways had the same losses in their first steps; returns what was found."""
    compared = {name: x for name, x in losses.items() if name != LOCAL}
    steps = min(map(len, compared.values()), default=0)
    apart = [max(x) - min(x) for x in zip(*compared.values(), strict=False)]
    checked = apart[:CHECKED_STEPS]
    assert max(checked, default=0.0) <= LOSS_TOLERANCE, (checked, compared)
    first = next(iter(compared.values()), [float("nan")])
    return (
        f"losses of {len(compared)} ways: {first[0]:.4f} in step 1, {first[steps - 1]:.4f} in step "
        f"{steps}; at most {max(checked, default=0.0):.1e} apart in the first {len(checked)} "
        f"steps, {max(apart, default=0.0):.1e} in all"
    )
