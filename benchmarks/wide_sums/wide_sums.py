"""Measures bytes, errors and times of gradients of bf16, added in three ways.

benchmarks/network/cluster.sh -n 4 -r 1gbit benchmarks/wide_sums/wide_sums.py
"""

import argparse
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import pipegrad

WAYS = {
    "bf16": {},
    "reduce_dtype=float32": {"reduce_dtype": torch.float32},
    "sum_dtype=float32": {"sum_dtype": torch.float32},
}
HANDLERS = ("data-parallel", "sharded")


def sent_bytes() -> int:
    """Returns the bytes that this host's NIC has sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


class Way:
    """One stage whose gradient is given, and reduced in one way."""

    def __init__(self, handler: str, numel: int, options: dict[str, torch.dtype]) -> None:
        self.parameter = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
        module = nn.ParameterList([self.parameter])
        topology = pipegrad.Topology.create(pipeline=1)
        self.sync = pipegrad.GradientSync(
            {0: module}, topology, handlers=["pipeline-shared", handler], **options
        )
        self.optimizer = torch.optim.SGD(self.sync.optimizer_parameters(), lr=0.0)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.gradient = torch.randn(numel, generator=generator).bfloat16()
        self.seconds: list[float] = []
        self.nbytes = 0

    def reduce(self) -> float:
        """Reduces the gradient once; returns the relative error of this rank's part."""
        self.sync.prepare()
        self.sync.stage_first_use(0)
        (self.parameter * self.gradient).sum().backward()
        dist.barrier()
        before, began = sent_bytes(), time.perf_counter()
        self.sync.stage_final(0)
        self.sync.finish()
        self.seconds.append(time.perf_counter() - began)
        dist.barrier()
        self.nbytes = sent_bytes() - before
        error = self.error()
        self.optimizer.step()
        self.sync.publish()
        self.optimizer.zero_grad()
        self.sync.wait_parameters()
        return error

    def error(self) -> float:
        """Returns the distance from the mean in float64, relative to its norm."""
        mean = torch.zeros(len(self.gradient), dtype=torch.float64)
        for rank in range(dist.get_world_size()):
            generator = torch.Generator().manual_seed(rank)
            mean += torch.randn(len(mean), generator=generator).bfloat16()
        mean /= dist.get_world_size()
        off = size = 0.0
        for one in self.sync.main_parameters():
            right = mean[one.begin : one.begin + one.tensor.numel()]
            off += float((one.tensor.grad.double() - right).square().sum())
            size += float(right.square().sum())
        return (off / size) ** 0.5


def main() -> None:
    """Prints the README's table, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=8.0, help="of the gradient in bf16")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    numel = int(given.mib * 2**20) // 2
    for handler in HANDLERS:
        ways = {name: Way(handler, numel, options) for name, options in WAYS.items()}
        errors = dict.fromkeys(ways, 0.0)
        for _ in range(given.rounds + 1):
            for name, way in ways.items():
                errors[name] = way.reduce()
        base = ways["reduce_dtype=float32"]
        for name, way in ways.items():
            ratios = sorted(a / b for a, b in zip(way.seconds[1:], base.seconds[1:], strict=True))
            if dist.get_rank() == 0:
                print(
                    f"| `{handler}` | {name} | {way.nbytes / 2**20:.1f} | {errors[name]:.1e} | "
                    f"{statistics.median(way.seconds[1:]) * 1e3:.0f} | "
                    f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) |"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
