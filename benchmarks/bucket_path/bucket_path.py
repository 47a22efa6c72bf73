"""Times the way from backward to reduced gradients, pipegrad's and its peers', and counts memory.

python benchmarks/bucket_path/bucket_path.py [--repeats 40] [--microbatches 1]
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import pipegrad
from pipegrad.testing import run_ranks

RANKS, WORLDS, WARM_UP, MEMORY_STEPS = 4, 4, 3, 4
NUM_PARAMETERS, TOTAL_NUMEL = 200, 64 * 2**18
OURS, COLOSSALAI = "pipegrad", "ColossalAI, its own handler"
LOCAL, WIRE = "no reduction", "one flat all_reduce and nothing else"

QUANTITIES = ("step", "backward", "reduce", "cpu")
Figures = dict[tuple[str, str], list[float]]  # (quantity, way) -> seconds, one a repeat


class Sum(nn.Module):
    """200 parameters of 3 KiB to 1.6 MiB, 64 MiB in all; the gradient of each is its input."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.weights = nn.ParameterList([torch.zeros_like(x) for x in inputs])

    def forward(self) -> Tensor:
        """Returns a scalar."""
        pairs = zip(self.weights, self.inputs, strict=True)
        return torch.stack([(weight * x).sum() for weight, x in pairs]).sum()


def make_inputs() -> list[Tensor]:
    """Returns this rank's inputs: ten sizes in turns, each twice the one before."""
    unit = TOTAL_NUMEL // (NUM_PARAMETERS // 10 * 1023)
    sizes = [unit << (i % 10) for i in range(NUM_PARAMETERS)]
    sizes[-1] += TOTAL_NUMEL - sum(sizes)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(size, generator=generator) for size in sizes]


def nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Way:
    """One way to reduce the gradients of a module of its own.

    Attributes:
        module: Called without arguments for the loss.
        begin: Readies the gradients, before the first forward.
        watch: Right before the last backward.
        finish: Right after it; then every gradient is in place.
        accumulate: The context of all microbatches but the last.
        separable: Whether `finish` alone is the whole reduction.
    """

    module: nn.Module
    begin: Callable[[], object] = nothing
    watch: Callable[[], object] = nothing
    finish: Callable[[], object] = nothing
    accumulate: Callable[[], AbstractContextManager[object]] = nullcontext
    separable: bool = True

    def step(self, microbatches: int) -> dict[str, float]:
        """Runs one step; returns its seconds, those since its last backward, and those of CPU."""
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        self.begin()
        for _ in range(microbatches - 1):
            with self.accumulate():
                (self.module() / microbatches).backward()
        loss = self.module() / microbatches
        forward_seconds = time.perf_counter() - start
        dist.barrier()  # or a rank that is behind would be part of the others' backward
        start = time.perf_counter()
        self.watch()
        loss.backward()
        self.finish()
        seconds = time.perf_counter() - start
        dist.barrier()  # what gloo still sends for this step is this step's
        return {
            "step": forward_seconds + seconds,
            "backward": seconds,
            "cpu": time.process_time() - cpu,
        }

    def reduce(self, inputs: Sequence[Tensor]) -> dict[str, float]:
        """Reduces gradients that are there already; returns the seconds."""
        self.begin()
        for parameter, value in zip(self.module.parameters(), inputs, strict=False):
            if parameter.grad is None:
                parameter.grad = value.clone()
            else:
                parameter.grad.copy_(value)
        dist.barrier()
        start = time.perf_counter()
        self.finish()
        return {"reduce": time.perf_counter() - start}


def ours(inputs: Sequence[Tensor], *, early: bool) -> Way:
    """Returns pipegrad's; `early` lets gradients leave during backward, as `attach` does."""
    module = Sum(inputs)
    topology = pipegrad.Topology.create(pipeline=1)
    sync = pipegrad.GradientSync({0: module}, topology, handlers=["data-parallel"])

    def begin() -> None:
        module.zero_grad()
        sync.prepare()

    def finish() -> None:
        sync.stage_final(0)
        sync.finish()

    return Way(module, begin, partial(sync.stage_last_backward, 0) if early else nothing, finish)


def flatten(inputs: Sequence[Tensor]) -> Way:
    """Returns ColossalAI's algorithm in plain torch, which needs nothing installed."""
    module = Sum(inputs)

    def finish() -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        flat = _flatten_dense_tensors(gradients)
        flat /= RANKS
        dist.all_reduce(flat)
        reduced = _unflatten_dense_tensors(flat, gradients)
        for gradient, result in zip(gradients, reduced, strict=True):
            gradient.copy_(result)

    return Way(module, module.zero_grad, finish=finish)


def colossalai(inputs: Sequence[Tensor]) -> Way:
    """Returns ColossalAI's own code; its groups made by hand, its launch() fails on Python 3.11."""
    legacy = "colossalai.legacy"
    context = import_module(f"{legacy}.core").global_context
    mode = import_module(f"{legacy}.context.parallel_mode").ParallelMode.GLOBAL
    handlers = import_module(f"{legacy}.engine.gradient_handler")
    if not context.is_initialized(mode):
        rank, ranks, world = dist.get_rank(), list(range(RANKS)), dist.GroupMember.WORLD
        parallel = {"pipeline": 1, "tensor": {"size": 1, "mode": None}}
        context.load_config(import_module("colossalai.context").Config({"parallel": parallel}))
        context._register_dist(rank, RANKS, world, world, ranks, mode)
        context.add_global_rank(mode, rank)
        context.init_parallel_groups()
    module = Sum(inputs)
    handler = handlers.DataParallelGradientHandler(module, None)
    return Way(module, module.zero_grad, finish=handler.handle_gradient)


def ddp(inputs: Sequence[Tensor], *, view: bool, set_to_none: bool = True) -> Way:
    """Returns torch's own reducer."""
    module = DistributedDataParallel(Sum(inputs), gradient_as_bucket_view=view)
    zero = partial(module.zero_grad, set_to_none=set_to_none)
    return Way(module, zero, accumulate=module.no_sync, separable=False)


def local(inputs: Sequence[Tensor]) -> Way:
    """Returns backward alone."""
    module = Sum(inputs)
    return Way(module, module.zero_grad)


def wire(inputs: Sequence[Tensor]) -> Way:
    """Returns a collective of the same size, on a buffer that is nobody's gradient."""
    flat = torch.zeros(sum(x.numel() for x in inputs))
    return Way(nn.Module(), finish=partial(dist.all_reduce, flat))


WAYS: dict[str, Callable[[Sequence[Tensor]], Way]] = {
    OURS: partial(ours, early=True),
    "pipegrad, nothing leaves early": partial(ours, early=False),
    COLOSSALAI: colossalai,
    "flatten, all_reduce, unflatten, copy": flatten,
    "DDP, gradients are copies": partial(ddp, view=False),
    "DDP, gradients are views": partial(ddp, view=True),
    "DDP, views zeroed in place": partial(ddp, view=True, set_to_none=False),
    LOCAL: local,
    WIRE: wire,
}


def time_ways(names: Sequence[str], microbatches: int, repeats: int, seed: int) -> Figures:
    """Times the ways in turns, in random order. While warming up checks what they compute."""
    inputs = make_inputs()
    shuffled = random.Random(seed)  # the same on all ranks
    names = shuffled.sample(names, len(names))  # where memory comes from makes 5 % either way
    expected = [x / RANKS for x in inputs]
    for x in expected:
        dist.all_reduce(x)
    ways = {name: WAYS[name](inputs) for name in names}
    steps = [(n, partial(way.step, microbatches)) for n, way in ways.items() if n != WIRE]
    separable = [(n, way) for n, way in ways.items() if way.separable and n != LOCAL]
    turns = steps + [(n, partial(way.reduce, inputs)) for n, way in separable]
    figures: Figures = {}
    for repeat in range(-WARM_UP, repeats):
        for name, measure in shuffled.sample(turns, len(turns)):
            measured = measure()
            if repeat >= 0:
                for quantity, seconds in measured.items():
                    figures.setdefault((quantity, name), []).append(seconds)
            elif name not in (LOCAL, WIRE):
                found = [parameter.grad for parameter in ways[name].module.parameters()]
                torch.testing.assert_close(found, expected)
    return figures


def count_memory(name: str, microbatches: int) -> int:
    """Returns the bytes of tensors at the peak of a step in the steady state."""
    inputs = make_inputs()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        way = WAYS[name](inputs)
        for _ in range(MEMORY_STEPS):
            with record_function("step"):
                way.step(microbatches)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    steady = max(float(event["ts"]) for event in events if event["name"] == "step")
    changes = [e for e in events if e["name"] == "[memory]" and float(e["ts"]) >= steady]
    return max(int(event["args"]["Total Allocated"]) for event in changes)


def ratios(theirs: Sequence[float], mine: Sequence[float]) -> str:
    """Returns the median, and the 10th and 90th percentile, of the repeats' ratios."""
    deciles = statistics.quantiles([a / b for a, b in zip(theirs, mine, strict=True)], n=10)
    return f"**{deciles[4]:.2f}** ({deciles[0]:.2f}-{deciles[8]:.2f})"


def over_ranks(quantity: str, seconds: Sequence[Sequence[float]]) -> list[float]:
    """Returns one figure a repeat: a step ends when its slowest rank does; CPU seconds add up."""
    return [(sum if quantity == "cpu" else max)(x) for x in zip(*seconds, strict=True)]


def main() -> None:
    """Prints the README's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=1)
    arguments = parser.parse_args()
    repeats, microbatches = arguments.repeats, arguments.microbatches
    names = list(WAYS)
    if find_spec("colossalai") is None:
        names.remove(COLOSSALAI)
        print("ColossalAI is not installed, its row is left out: the README says how\n")
    # A block that one of gloo's threads frees counts as kept: the least over the ranks is right.
    peaks = {n: min(run_ranks(count_memory, RANKS, n, microbatches)) for n in names if n != WIRE}
    timed = partial(run_ranks, time_ways, RANKS, names, microbatches, -(-repeats // WORLDS))
    limit_seconds = 60 + 10.0 * microbatches * repeats
    worlds = [timed(seed, timeout_seconds=limit_seconds) for seed in range(WORLDS)]
    figures = {
        key: [x for ranks in worlds for x in over_ranks(key[0], [rank[key] for rank in ranks])]
        for key in worlds[0][0]
    }
    print(
        "| | whole step | from its last backward | reduction alone | CPU, whole step | extra MiB |"
    )
    print("|---|---|---|---|---|---|")
    for name in names:
        cells = [
            ratios(figures[quantity, name], figures[quantity, OURS])
            if (quantity, name) in figures
            else ""
            for quantity in QUANTITIES
        ]
        cells.append(f"{(peaks[name] - peaks[LOCAL]) / 2**20:.2f}" if name in peaks else "")
        print(f"| {name} | {' | '.join(cells)} |")
    medians = {q: round(1e3 * statistics.median(figures[q, OURS])) for q in QUANTITIES}
    print(f"\n{OURS}, ms: {medians}")


if __name__ == "__main__":
    main()
