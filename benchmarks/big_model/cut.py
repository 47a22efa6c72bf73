"""Cuts a 70B configuration on the meta device, and counts the bytes that ranks read of a directory.

python benchmarks/big_model/cut.py                                                    # the cut
torchrun --nproc-per-node 4 benchmarks/big_model/cut.py FOLDER                        # the reading

FOLDER gets a model of about 1 GB in bfloat16, in files of 60 MB. Its pages leave the cache before
ranks read, so that the kernel counts them in /proc/self/io.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import pipegrad

BIG = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
BIG |= {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
SMALL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000}
GIB = 2**30


def cut_big() -> None:
    """Prints time and peak memory of a cut of 70 billion parameters."""
    config = transformers.LlamaConfig(**BIG)
    config.architectures = ["LlamaForCausalLM"]
    began, cpu = time.perf_counter(), time.process_time()
    cut = pipegrad.cut.from_config(config, 8, seed=0, dtype=torch.bfloat16)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(cut.report())
    print(f"cut in {seconds:.1f} s, {cpu:.1f} s of CPU; peak memory {peak:.2f} GiB")


def bytes_read() -> int:
    """Returns what this process has read of disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def read_stages(folder: Path) -> None:
    """Prints for each rank what it has read, what its stage holds, and its peak memory."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if not rank and not (folder / "config.json").exists():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).bfloat16()
        model.save_pretrained(folder, max_shard_size="60MB")
    dist.barrier()
    topology = pipegrad.Topology.create(pipeline=world)
    for dtype in (torch.bfloat16, torch.float32):
        dist.barrier()
        cut = pipegrad.cut.from_pretrained(folder, world, dtype=dtype)
        if not rank:
            for file in folder.iterdir():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()
        before, began = bytes_read(), time.perf_counter()
        cut.load(topology.local_stages)
        seconds, read = time.perf_counter() - began, bytes_read() - before
        held = sum(p.numel() for p in cut.modules[rank].parameters())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"rank {rank}, {dtype}: read {read / GIB:.2f} GiB of files, where its stage has "
            f"{2 * held / GIB:.2f}; {seconds:.1f} s; peak memory {peak:.2f} GiB",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    read_stages(Path(sys.argv[1])) if len(sys.argv) > 1 else cut_big()
