"""Times losses of a head, and measures the most memory that they take at a time.

python benchmarks/head/losses.py [--rounds 10] 2> /dev/null
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.losses import chunked_cross_entropy
from pipegrad.pipeline.split_backward import accumulate, backward_inputs, by_parameter

MICROBATCHES = 4
MIB = 2**20


class Case(NamedTuple):
    """The last stage's head, and the tokens of a microbatch."""

    tokens: int
    width: int
    classes: int


CASES = {"256 x 256, 32k": Case(256, 256, 32_000), "128 x 1024, 32k": Case(128, 1024, 32_000)}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(hidden: Tensor, target: Tensor, head: Tensor) -> Tensor:
    """Makes all logits, as models do."""
    return functional.cross_entropy(functional.linear(hidden, head).float(), target)


def of_torch(hidden: Tensor, target: Tensor, head: Tensor) -> Tensor:
    """Is torch's own, since 2.13; its choice is chunks of a token or two here."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=max(1, 16 * MIB // 4 // len(head)))
    return functional.linear_cross_entropy(hidden, head, target, options=options)


WAYS: dict[str, Loss] = {"all logits": whole}
if hasattr(nn, "LinearCrossEntropyOptions"):
    WAYS["torch's chunks of 16 MiB"] = of_torch
for mebibytes in (16, 4):
    WAYS[f"chunks of {mebibytes} MiB"] = partial(chunked_cross_entropy, chunk_bytes=mebibytes * MIB)


class Head:
    """A head and microbatches, the same for all ways."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(case.classes, case.width) * 0.02)
        shape = (MICROBATCHES, case.tokens, case.width)
        self.hidden = torch.randn(shape)
        self.target = torch.randint(case.classes, shape[:2])

    def forward(self, loss: Loss, microbatch: int) -> tuple[Tensor, Tensor]:
        """Returns the hidden states as a leaf, and their loss."""
        hidden = self.hidden[microbatch].requires_grad_()
        return hidden, loss(hidden, self.target[microbatch], self.weight)

    def run(self, loss: Loss, in_flight: int) -> tuple[float, Tensor]:
        """Runs all microbatches, so many at a time; returns a sum of losses, and a gradient."""
        total = 0.0
        for first in range(0, MICROBATCHES, in_flight):
            waiting = [self.forward(loss, m) for m in range(first, first + in_flight)]
            for _, value in waiting:
                total += value.item()
                value.backward()
        return total, waiting[-1][0].grad

    def seconds(self, loss: Loss) -> tuple[float, float, float]:
        """Returns the times of forwards, of I and of W, without those of other processes."""
        times = [0.0, 0.0, 0.0]
        for m in range(MICROBATCHES):
            begin = time.process_time()
            _, value = self.forward(loss, m)
            times[0] += (now := time.process_time()) - begin
            waiting = backward_inputs([value], [None], {id(self.weight)})
            times[1] += (later := time.process_time()) - now
            accumulate(by_parameter(waiting.products).values())
            times[2] += time.process_time() - later
        return times[0], times[1], times[2]


def peak_bytes(run: Callable[[], object]) -> int:
    """Returns the most bytes that were allocated at a time, beside those from before."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        run()
    allocator: Any = profiler.profiler
    events = [e for e in allocator.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def main() -> None:
    """Prints a line for each way and case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| head | loss | time | F | I | W | ms | MiB, 1 in flight | MiB, 4 in flight |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, case in CASES.items():
        head = Head(case)
        memory = dict[str, list[int]]()
        true: tuple[float, Tensor, Tensor] | None = None
        for way, loss in WAYS.items():
            memory[way] = []
            for in_flight in (1, MICROBATCHES):
                head.weight.grad = torch.zeros_like(head.weight)
                memory[way].append(peak_bytes(partial(head.run, loss, in_flight)))
            head.weight.grad.zero_()
            found = (*head.run(loss, 1), head.weight.grad.clone())
            true = true or found
            for pair in zip(found, true, strict=True):
                mine, wanted = map(torch.as_tensor, pair)
                assert (mine - wanted).abs().max() <= 1e-4 * wanted.abs().max(), (name, way)
        times = {way: list[tuple[float, float, float]]() for way in WAYS}
        for _ in range(options.rounds):
            for way in random.sample([*WAYS], len(WAYS)):
                times[way].append(head.seconds(WAYS[way]))
        for way in WAYS:
            pairs = zip(times[way], times["all logits"], strict=True)
            ratios = [sum(mine) / sum(those) for mine, those in pairs]
            parts = [statistics.median(column) for column in zip(*times[way], strict=True)]
            base = statistics.median(map(sum, times["all logits"]))
            cells = [f"**{statistics.median(ratios):.2f}**", *(f"{p / base:.2f}" for p in parts)]
            cells += [f"{sum(parts) / MICROBATCHES * 1000:.0f}"]
            cells += [f"{nbytes / MIB:.0f}" for nbytes in memory[way]]
            print(f"| {name} | {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
