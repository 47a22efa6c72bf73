"""Measures what memory for each receive costs, and a copy of what is handed on without a graph.

python benchmarks/overhead/received.py [--rounds 60]

Two gloo ranks of one machine. A rank receives four messages, reads a byte of each page, and
answers. Memory that is used again, and new memory for each, take turns in one run.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from pipegrad.comm.sync_points import Backend
from pipegrad.testing import run_ranks

MIB = (0.0625, 0.25, 1, 4, 16, 48)
MESSAGES = 4


def measured(num_bytes: int, rounds: int) -> dict[str, float]:
    """Returns the seconds of a message, by way, and of a copy of it; on rank 0."""
    torch.set_num_threads(1)
    world, backend, me = dist.group.WORLD, Backend(), dist.get_rank()
    assert world is not None
    sent, answer = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(1)
    kept = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2)]
    seconds: dict[str, list[float]] = {"used again": [], "new": [], "copy": []}
    for _ in range(rounds + 1):  # the first one connects
        for way in ("used again", "new"):
            dist.barrier()
            begin = time.perf_counter()
            for number in range(MESSAGES):
                if me == 0:
                    backend.send(world, sent, 1, number).wait()
                    continue
                memory = kept[number % 2] if way == "used again" else torch.empty_like(sent)
                backend.receive(world, memory, 0, number).wait()
                memory[::4096].sum()
                del memory
            (backend.receive if me == 0 else backend.send)(world, answer, 1 - me, 99).wait()
            seconds[way].append((time.perf_counter() - begin) / MESSAGES)
        begin = time.perf_counter()
        sent.clone()
        seconds["copy"].append(time.perf_counter() - begin)
    return {way: statistics.median(each[1:]) for way, each in seconds.items()}


def main() -> None:
    """Prints a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    print(
        "| MiB | used again, us | new, by used again | a copy, by used again |\n|---|---|---|---|"
    )
    for size in MIB:
        rounds = given.rounds if size < 16 else given.rounds // 4
        found = run_ranks(measured, 2, int(size * 2**20), rounds, timeout_seconds=300)[0]
        again = found["used again"]
        shares = " | ".join(f"{found[way] / again:.2f}" for way in ("new", "copy"))
        print(f"| {size:g} | {1e6 * again:.0f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
