"""Times what splitting the backward of a stage of two GPT blocks costs, and counts what is kept.

python benchmarks/split_backward/gpt_blocks.py [--rounds 20] [--threads 2] 2> /dev/null
"""

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as pipelining
from torch.utils.checkpoint import checkpoint

from pipegrad.pipeline.weight_gradients import WeightGradients

BLOCKS, HEAD_WIDTH, VOCABULARY, MICROBATCHES = 2, 64, 4096, 4


class Case(NamedTuple):
    """A stage of a pipeline; the first one takes tokens."""

    width: int
    shape: tuple[int, int]  # batch, length
    is_first: bool = False
    is_checkpointed: bool = False

    def microbatch(self) -> Tensor:
        """Returns what the stage is given."""
        if self.is_first:
            return torch.randint(VOCABULARY, self.shape)
        return torch.randn(*self.shape, self.width, requires_grad=True)


CASES = {
    "64, 2 x 32": Case(64, (2, 32)),
    "256, 2 x 128": Case(256, (2, 128)),
    "512, 2 x 256": Case(512, (2, 256)),
    "768, 1 x 512": Case(768, (1, 512)),
    "256, 2 x 128, checkpointed": Case(256, (2, 128), is_checkpointed=True),
    "256, 2 x 128, first stage": Case(256, (2, 128), is_first=True),
}


class Block(nn.Module):
    """GPT's, without dropout; counts the forwards of all."""

    num_forwards = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.out = nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what has the shape of `x`: (batch, length, width)."""
        Block.num_forwards += 1
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD_WIDTH)).transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x.add(self.mlp(x))


class Stage(nn.Module):
    """Blocks; in the first stage an embedding before them. Gradients are views of `flat`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embedding = nn.Embedding(VOCABULARY, case.width) if case.is_first else nn.Identity()
        self.blocks = nn.ModuleList(Block(case.width) for _ in range(BLOCKS))
        self.sizes = [parameter.numel() for parameter in self.parameters()]
        self.flat = torch.zeros(sum(self.sizes))
        for p, part in zip(self.parameters(), self.flat.split(self.sizes), strict=True):
            p.grad = part.view_as(p)
        self.weights = WeightGradients(None)  # type: ignore[arg-type] # nothing is final
        self.ways = [name for name in WAYS if "recompute" not in name or case.is_checkpointed]

    def forward(self, x: Tensor) -> Tensor:
        """Returns hidden states: (batch, length, width)."""
        x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.case.is_checkpointed else block(x)
        return x


def full(_stage: Stage, _x: Tensor, y: Tensor, gradient: Tensor) -> Callable[[], object]:
    """Runs I, given a stage, its input, its output and the output's gradient; returns W."""
    torch.autograd.backward(y, gradient)
    return lambda: None


def ours(stage: Stage, _x: Tensor, y: Tensor, gradient: Tensor) -> Callable[[], object]:
    """Does what the executor does."""
    parameters = {id(p): p for p in stage.parameters()}
    products = stage.weights.backward(0, [y], [gradient], parameters)
    return lambda: stage.weights.compute(0, products)


def recomputed(stage: Stage, x: Tensor, _y: Tensor, gradient: Tensor) -> Callable[[], object]:
    """Does what the executor does where a `pipegrad.Stage` has ``recompute=True``."""
    return ours(stage, x, nn.Sequential(*stage.blocks)(x), gradient)


def torchs(stage: Stage, x: Tensor, y: Tensor, gradient: Tensor) -> Callable[[], object]:
    """Does what `PipelineStage` does: in the first stage all is W."""
    if stage.case.is_first:
        return lambda: pipelining.stage_backward([y], [gradient], [x])
    _, groups = pipelining.stage_backward_input([y], [gradient], [x], stage.parameters())
    return lambda: pipelining.stage_backward_weight(stage.parameters(), groups)


WAYS = {"full": full, "pipegrad": ours, "pipegrad, recompute": recomputed, "torch": torchs}


def take_turn(name: str, stage: Stage) -> tuple[float, float, list[Tensor]]:
    """Returns the seconds of I, those of W, and the gradients of the inputs."""
    stage.flat.zero_()
    stage.weights.begin()
    inputs = [stage.case.microbatch() for _ in range(MICROBATCHES)]
    made = deque((x, y, torch.randn_like(y)) for x, y in [(x, stage(x)) for x in inputs])
    waiting, start = deque[Callable[[], object]](), time.perf_counter()
    while made:
        waiting.append(WAYS[name](stage, *made.popleft()))  # frees graphs as a step does
    middle = time.perf_counter()
    while waiting:
        waiting.popleft()()
    end = time.perf_counter()
    return middle - start, end - middle, [x.grad for x in inputs if x.grad is not None]


def check(stage: Stage) -> dict[str, float]:
    """Fails unless all ways give the same gradients; returns forwards a block and microbatch."""
    expected, forwards = list[Tensor](), dict[str, float]()
    for name in stage.ways:
        torch.manual_seed(0)
        Block.num_forwards = 0
        found = [*take_turn(name, stage)[-1], *stage.flat.clone().split(stage.sizes)]
        forwards[name] = Block.num_forwards / BLOCKS / MICROBATCHES
        expected = expected or found
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm() > 0
    return forwards


def kept_bytes(name: str, stage: Stage) -> int:
    """Returns the bytes that wait after I; of `full`, after a forward."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        x = stage.case.microbatch()
        kept = stage(x)
        if name != "full":
            kept = WAYS[name](stage, x, kept, torch.randn_like(kept))
        x.grad = None  # it is on its way to the stage before
        del x
    run: Any = profiler.profiler
    return sum(e.nbytes() for e in run.kineto_results.events() if e.name() == "[memory]")


def print_rows(case: str, rounds: int) -> None:
    """Measures and prints a stage's rows of the README's table."""
    stage, shuffled = Stage(CASES[case]), random.Random(0)
    forwards, times = check(stage), {name: list[tuple[float, float]]() for name in stage.ways}
    kept = {name: kept_bytes(name, stage) / 2**20 for name in stage.ways}
    for _ in range(rounds * (1024 // CASES[case].width)):
        for name in shuffled.sample(stage.ways, len(stage.ways)):
            times[name].append(take_turn(name, stage)[:2])
    for name, found in times.items():
        ratios = [(i / b, w / b) for (i, w), (b, _) in zip(found, times["full"], strict=True)]
        deciles = statistics.quantiles([i + w for i, w in ratios], n=10)
        cells = [f"**{deciles[4]:.2f}** ({deciles[0]:.2f}-{deciles[8]:.2f})"]
        parts = zip(*[(i, w, i / (i + w)) for i, w in ratios], strict=True)
        cells += ["" if name == "full" else f"{statistics.median(part):.2f}" for part in parts]
        cells += [f"{1e3 / MICROBATCHES * statistics.median(i + w for i, w in found):.1f}"]
        cells += [f"{forwards[name]:.0f}", f"{kept[name] / kept['full']:.2f}", f"{kept[name]:.1f}"]
        print(f"| {case} | {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints the README's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| stage | backward | I + W | I | W | I of I + W | ms | forwards | kept | MiB |")
    print("|" + "---|" * 10)
    for case in CASES:
        print_rows(case, arguments.rounds)


if __name__ == "__main__":
    main()
