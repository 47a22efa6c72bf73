"""Times a step's reduction on cards, pipegrad's and the one by flattening, with CUDA's own events.

torchrun --nproc-per-node 8 benchmarks/bucket_path/on_cards.py              # a card for each rank
torchrun --nproc-per-node 2 benchmarks/bucket_path/on_cards.py --one-card   # all ranks on card 0

With --one-card ranks take turns on the card and talk through sockets: that it runs, and that its
results are right, is all that it shows then; the times mean nothing.
"""

import argparse
import os
import random
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

import pipegrad
from pipegrad.testing import share_one_card

Step = Callable[[Callable[[], None]], None]  # is given the backward
NUM_PARAMETERS, WARM_UP = 200, 5
OURS, LATE = "pipegrad", "pipegrad, nothing leaves early"
FLATTEN, LOCAL = "flatten, all_reduce, unflatten, copy", "no reduction"


class Sum(nn.Module):
    """200 parameters, ten sizes in turns, each twice the one before; its input is the gradient."""

    def __init__(self, total_numel: int, device: torch.device) -> None:
        super().__init__()
        unit = total_numel // (NUM_PARAMETERS // 10 * 1023)
        sizes = [unit << (i % 10) for i in range(NUM_PARAMETERS)]
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        self.inputs = [torch.randn(n, device=device, generator=generator) for n in sizes]
        self.weights = nn.ParameterList([torch.zeros_like(x) for x in self.inputs])

    def forward(self) -> Tensor:
        """Returns a scalar."""
        pairs = zip(self.weights, self.inputs, strict=True)
        return torch.stack([(weight * x).sum() for weight, x in pairs]).sum()


def ours(module: Sum, early: bool) -> Step:
    """Returns a step of pipegrad; `early` lets gradients leave during backward."""
    topology = pipegrad.Topology.create(pipeline=1)
    handler = "pipegrad_handlers.data_parallel:DataParallel"
    sync = pipegrad.GradientSync({0: module}, topology, handlers=[handler])

    def step(backward: Callable[[], None]) -> None:
        sync.prepare()
        if early:
            sync.stage_last_backward(0)
        backward()
        sync.stage_final(0)
        sync.finish()

    return step


def flatten(module: Sum, backward: Callable[[], None]) -> None:
    """Is a step of the usual way: one collective once all gradients are there."""
    backward()
    gradients = [p.grad for p in module.weights if p.grad is not None]
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for gradient, result in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(result)


def timed(module: Sum, step: Step) -> float:
    """Returns a step's milliseconds from before zeroing to after the last gradient, by events."""
    module.zero_grad()
    loss = module()
    torch.cuda.synchronize()
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step(loss.backward)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def check(module: Sum) -> None:
    """Compares with means that are computed one by one."""
    for weight, given in zip(module.weights, module.inputs, strict=True):
        mean = given / dist.get_world_size()
        dist.all_reduce(mean)
        torch.testing.assert_close(weight.grad, mean)


def main() -> None:
    """Prints a table of ratios, each of one repeat's times on rank 0, all in one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--one-card", action="store_true")
    arguments = parser.parse_args()
    if arguments.one_card:
        share_one_card(int(os.environ["RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    modules = [Sum(arguments.mebibytes * 2**18, device) for _ in range(4)]
    ways: dict[str, tuple[Sum, Step]] = {
        OURS: (modules[0], ours(modules[0], early=True)),
        LATE: (modules[1], ours(modules[1], early=False)),
        FLATTEN: (modules[2], partial(flatten, modules[2])),
        LOCAL: (modules[3], lambda backward: backward()),
    }
    shuffled = random.Random(0)  # the same on all ranks
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(-WARM_UP, arguments.repeats):
        for name in shuffled.sample(list(ways), len(ways)):
            milliseconds = timed(*ways[name])
            if repeat >= 0:
                found[name].append(milliseconds)
            elif name != LOCAL:
                check(ways[name][0])
    if dist.get_rank() == 0:
        if arguments.one_card:
            print("All ranks on one card: the times mean nothing.\n")
        print(f"{torch.cuda.get_device_name()}, {dist.get_world_size()} ranks, step by CUDA events")
        for name, theirs in found.items():
            ratios = [a / b for a, b in zip(theirs, found[OURS], strict=True)]
            low, *_, high = deciles = statistics.quantiles(ratios, n=10)
            milliseconds = statistics.median(theirs)
            print(f"{name:40}{deciles[4]:.2f} ({low:.2f}-{high:.2f}) {milliseconds:9.3f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
