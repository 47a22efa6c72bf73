"""Measures by how much training steps raise a rank's memory: each way in processes of its own.

python benchmarks/sharded/peak_memory.py [--ranks 4] [--microbatches 4]
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from ways import (
    SHORT,
    WAYS,
    Shape,
    Text,
    add_options,
    check_losses,
    construct,
    join,
    leave,
    mean_losses,
)

WAY, RESULT = "PIPEGRAD_BENCHMARK_WAY", "PIPEGRAD_BENCHMARK_RESULT"  # what a rank is told
TIMEOUT_SECONDS, EARLY_STEPS = 300, 3
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # glibc: what is freed is the system's at once


@dataclass(frozen=True)
class Memory:
    """What one way takes on one rank.

    All bytes are more than there were right after the model's construction.

    Attributes:
        early_bytes: Most at any moment until the third step has ended.
        later_bytes: Most at any moment from then on.
        between_bytes: After the last step, with nothing under way.
        state_bytes: Of the optimizer's state.
        losses: Of all steps, the mean over the ranks.
    """

    early_bytes: int
    later_bytes: int
    between_bytes: int
    state_bytes: int
    losses: list[float]

    @property
    def peak_bytes(self) -> int:
        """Most at any moment."""
        return max(self.early_bytes, self.later_bytes)


def status(field: str) -> int:
    """Returns the bytes of a field of this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this script needs Linux")


def reset_peak() -> int:
    """Makes what the process holds now its peak; returns it."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def measure(name: str, shape: Shape, steps: int) -> Memory:
    """Runs one way; called on every rank."""
    text = Text(shape)
    dist.barrier()  # gloo's connections are there
    model = construct(shape)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what construction freed is nobody's reserve
    before = reset_peak()
    way = WAYS[name](model, shape)
    losses: list[Tensor] = [way.step(text.step(number)) for number in range(EARLY_STEPS)]
    early = status("VmHWM") - before
    reset_peak()
    losses += [way.step(text.step(number)) for number in range(EARLY_STEPS, steps)]
    way.settle()
    later, between = status("VmHWM") - before, status("VmRSS") - before
    memory = Memory(early, later, between, way.state_bytes(), mean_losses(losses))
    way.close()
    return memory


def rank_main(name: str, shape: Shape, steps: int) -> None:
    """Is what torchrun's ranks run."""
    join()
    own = measure(name, shape, steps)
    told: list[Memory | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    if dist.get_rank() == 0:
        Path(os.environ[RESULT]).write_text(json.dumps([asdict(x) for x in told if x]))
    leave()


def launch(name: str, ranks: int, allocator: dict[str, str]) -> list[Memory]:
    """Returns what one way takes, rank by rank, of a run with this process's own options."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *sys.argv]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        told = {WAY: name, RESULT: str(result), "OMP_NUM_THREADS": "1"}
        environment = os.environ | told | allocator
        process = subprocess.Popen(command, env=environment)
        try:
            code = process.wait(TIMEOUT_SECONDS)
        finally:
            process.terminate()  # torchrun then ends its ranks; nothing if it is gone
        if code:
            raise RuntimeError(f"{name}: torchrun ended with exit code {code}")
        return [Memory(**found) for found in json.loads(result.read_text())]


def main() -> None:
    """Prints a table, in MiB: of the rank that takes most."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    shape = Shape.of(arguments)
    if WAY in os.environ:
        rank_main(os.environ[WAY], shape, arguments.steps)
        return
    names = [SHORT[short] for short in arguments.ways]
    found = {name: launch(name, arguments.ranks, GIVES_BACK) for name in names}
    default = {name: launch(name, arguments.ranks, {}) for name in names}
    model_bytes = sum(p.nbytes for p in construct(shape).parameters())
    print(f"{model_bytes / 2**20:.0f} MiB of parameters, {arguments.ranks} ranks, {shape}")
    print(check_losses({name: ranks[0].losses for name, ranks in found.items()}), end="\n\n")
    print("| | peak | from step 4 on | between steps | peak, glibc as it is | optimizer's state |")
    print("|---|---|---|---|---|---|")
    for name in names:
        cells = [f"**{most(found[name], 'peak_bytes'):.0f}**"]
        cells += [f"{most(found[name], x):.0f}" for x in ("later_bytes", "between_bytes")]
        cells += [f"{most(default[name], 'peak_bytes'):.0f}"]
        cells += [f"{most(found[name], 'state_bytes'):.1f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def most(ranks: Sequence[Memory], field: str) -> float:
    """Returns the MiB of the rank that has most."""
    bytes_of_rank: list[int] = [getattr(memory, field) for memory in ranks]
    return max(bytes_of_rank) / 2**20


if __name__ == "__main__":
    main()
