"""Compares the vocabulary over all ranks with a tie of the first and the last stage.

torchrun --nproc-per-node 4 benchmarks/head/vocabulary.py [--steps 5]
"""

import argparse
import contextlib
import runpy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode

from pipegrad import Scheduler, Stage, Topology

EXAMPLE = Path(__file__).parents[2] / "examples" / "vocabulary_over_ranks.py"
MICROBATCHES, ROWS, TOKENS, WIDTH, CLASSES = 8, 2, 64, 64, 8192
MIB = 2**20


class Ends(nn.Module):
    """A stage whose block may have the whole embedding before it, or the head behind it."""

    def __init__(self, block: nn.Module, weight: nn.Parameter | None, *, is_first: bool) -> None:
        super().__init__()
        self.block, self.weight, self.is_first = block, weight, is_first

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return self.block(x)
        if self.is_first:
            return self.block(embedding(x, self.weight))
        return self.block(x) @ self.weight.T


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss of all logits."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Largest(TorchDispatchMode):
    """Sees the most bytes of a tensor that is made inside with rows of a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 3 and out.shape[-1] >= CLASSES // 4:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


def main() -> None:
    """Prints a line for each way, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    topology = Topology.create(pipeline=4)
    here = topology.coordinate("pp")
    example = runpy.run_path(str(EXAMPLE))
    vars_of = example["uncut"].__globals__
    vars_of["WIDTH"], vars_of["VOCABULARY"] = WIDTH, CLASSES
    weight, blocks = example["uncut"](4)
    whole = Ends(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True), None,
                 is_first=False)  # fmt: skip
    whole.block.load_state_dict(blocks[here].state_dict())
    if here in (0, 3):
        whole.weight, whole.is_first = nn.Parameter(weight.detach().clone()), here == 0
    ways = {
        "all of it on the ends": Scheduler(
            [Stage(whole, here)], topology, schedule="1f1b", num_microbatches=MICROBATCHES,
            loss_fn=loss_of, tied=[{0: "weight", 3: "weight"}],
        ),
        "a part on each rank": example["scheduler"](topology, MICROBATCHES),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(CLASSES, (ROWS * MICROBATCHES, TOKENS + 1), generator=draw)
    tokens, labels = text[:, :-1], text[:, 1:]
    if here == 0:
        print("| vocabulary | busy | parameters, MiB | logits at a time, MiB |")
        print("|---|---|---|---|")
    base = 0.0
    for name, scheduler in ways.items():
        named = {"tokens": tokens, "labels": labels} if "part" in name else {"x": tokens}
        seconds = list[float]()
        for step in range(options.steps + 2):
            begin, seen = time.process_time(), Largest()
            with seen if step == 1 else contextlib.nullcontext():
                scheduler.step(**named, target=labels)
            if step == 1:
                nbytes = seen.nbytes
            elif step > 1:
                seconds.append(time.process_time() - begin)
            for record in scheduler.sync.records():
                scheduler.sync.parameter(record).grad = None
        held = {id(p): p for s in scheduler.steps.pipeline.stages for p in s.module.parameters()}
        mine = (
            statistics.median(seconds),
            sum(p.nbytes for p in held.values()) / MIB,
            nbytes / MIB,
        )
        every: list[Any] = [None] * 4
        distributed.all_gather_object(every, mine)
        base = base or max(time for time, *_ in every)
        if here == 0:
            cells = [", ".join(f"{time / base:.2f}" for time, *_ in every)]
            cells += [", ".join(f"{x[i]:.1f}" for x in every) for i in (1, 2)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
