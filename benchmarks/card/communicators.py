"""Shows which calls of a new communicator make the host wait for the peer, and what memory it has.

python benchmarks/card/communicators.py [--eager]

Two ranks share card 0, and NCCL talks through sockets: times of messages mean nothing.
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipegrad.testing import share_one_card

RANKS, LATE_SECONDS, MIB = [0, 1], 1.0, 2**18  # MIB in floats
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29801"}


class Pair:
    """Two ranks: rank 1 is late for each call, rank 0 prints."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.host = rank, dist.new_group(RANKS, backend="gloo")
        self.x = {numel: torch.ones(numel, device=device) for numel in (4, MIB, 64 * MIB)}

    def used_mib(self) -> float:
        """Returns the memory of the card that is in use, whoever uses it."""
        torch.cuda.synchronize()
        dist.barrier(self.host)
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20

    def say(self, name: str, figure: str) -> None:
        """Prints a line, once."""
        if self.rank == 0:
            print(f"{name:44}{figure}", flush=True)

    def memory(self, name: str, before: float) -> None:
        """Prints how much more memory both ranks use than before."""
        self.say(name, f"{self.used_mib() - before:8.0f} MiB")

    def late(self, name: str, call: Callable[[], object]) -> None:
        """Prints how long a call takes the host of rank 0 when rank 1 is late."""
        torch.cuda.synchronize()
        dist.barrier(self.host)
        if self.rank == 1:
            time.sleep(LATE_SECONDS)
        began = time.perf_counter()
        call()
        taken = time.perf_counter() - began
        torch.cuda.synchronize()
        self.say(name, f"{1e3 * taken:8.1f} ms{' WAITS' if taken > 0.6 * LATE_SECONDS else ''}")

    def message(self, name: str, numel: int, group: dist.ProcessGroup, source: int = 0) -> None:
        """Prints how long its part of a message, to or from `source`, takes the host of rank 0."""
        call, peer = dist.send if self.rank == source else dist.recv, 1 - self.rank
        self.late(name, lambda: call(self.x[numel], peer, group=group))


def collectives(pair: Pair) -> None:
    """Prints collectives of a new group."""
    before, g = pair.used_mib(), dist.new_group(RANKS)
    small, one, large = pair.x.values()
    half, most = one[: MIB // 2], large[: 32 * MIB]
    pair.late("all-reduce of 4 floats, first", lambda: dist.all_reduce(small, group=g))
    pair.memory("memory of the group", before)
    for name, call in {
        "all-reduce of 4 floats, again": lambda: dist.all_reduce(small, group=g),
        "all-reduce of 1 MiB, first": lambda: dist.all_reduce(one, group=g),
        "all-reduce of 64 MiB, first": lambda: dist.all_reduce(large, group=g),
        "all-reduce of 64 MiB, again": lambda: dist.all_reduce(large, group=g),
        "all-reduce of 64 MiB cast to bf16": lambda: dist.all_reduce(large.bfloat16(), group=g),
        "reduce-scatter of 1 MiB": lambda: dist.reduce_scatter_tensor(half, one, group=g),
        "reduce-scatter of 64 MiB": lambda: dist.reduce_scatter_tensor(most, large, group=g),
        "all-gather of 64 MiB": lambda: dist.all_gather_into_tensor(large, most.clone(), group=g),
        "all-gather of 1 MiB": lambda: dist.all_gather_into_tensor(one, half.clone(), group=g),
        "broadcast of 1 MiB": lambda: dist.broadcast(one, 0, group=g),
    }.items():
        pair.late(name, call)
    pair.memory("memory of the group after all of them", before)


def messages(pair: Pair) -> None:
    """Prints messages of a group that has done an all-reduce, and of one that has not."""
    group, before = dist.new_group(RANKS), pair.used_mib()
    dist.all_reduce(pair.x[4], group=group)
    pair.memory("memory of the all-reduce of another", before)
    pair.message("4 floats behind it, first", 4, group)
    pair.memory("memory of that group then", before)
    for name, numel in (("1 MiB", MIB), ("64 MiB", 64 * MIB), ("64 MiB, again", 64 * MIB)):
        pair.message(name, numel, group)
    group, before = dist.new_group(RANKS), pair.used_mib()
    pair.message("4 floats without an all-reduce, first", 4, group)
    pair.memory("memory of that group", before)
    pair.message("4 floats, again", 4, group)
    pair.message("64 MiB", 64 * MIB, group)
    pair.message("4 floats the other way, first", 4, group, source=1)
    pair.message("4 floats the other way, again", 4, group, source=1)


def run(rank: int, eager: bool) -> None:
    """Runs on both ranks."""
    os.environ.update(ADDRESS)
    share_one_card(rank)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(0)
    torch.zeros(1, device=device)
    bound, limit = device if eager else None, timedelta(seconds=40)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", rank=rank, world_size=len(RANKS), timeout=limit, device_id=bound
    )
    pair = Pair(rank, device)
    pair.say("eager" if eager else "lazy", f"NCCL {torch.cuda.nccl.version()}")
    collectives(pair)
    messages(pair)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, ("--eager" in sys.argv,), nprocs=len(RANKS))
