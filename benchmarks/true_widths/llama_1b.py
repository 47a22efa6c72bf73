"""Cuts a tied model of the widths of Llama-3.2-1B, and runs one layer a stage of it.

Usage::

    python benchmarks/true_widths/llama_1b.py    # on the meta device
    torchrun --nproc-per-node 4 benchmarks/true_widths/llama_1b.py    # one layer a stage, for real

"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import pipegrad

STAGES = 4
GIB = 2**30


def configuration(num_layers: int) -> LlamaConfig:
    """Returns a configuration of Llama-3.2-1B with so many layers."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )


def peak() -> float:
    """Returns the largest resident memory of this process so far, in GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(x.split()[1]) for x in lines if x.startswith("VmHWM:")) * 1024 / GIB


def on_meta() -> None:
    """Prints how long the cut and the plan of the whole model take, and the memory of ranks."""
    before = peak()
    began = time.perf_counter()
    with torch.device("meta"):
        model = LlamaForCausalLM(configuration(16))
    print(f"model on the meta device: {time.perf_counter() - began:.1f} s")
    for by in ("parameters", "time", "memory"):
        began = time.perf_counter()
        cut = pipegrad.cut(model, STAGES, by=by)
        print(f"\ncut by {by}: {time.perf_counter() - began:.1f} s\n{cut.report()}")
        began = time.perf_counter()
        topology = pipegrad.Topology.build(
            axes=(("pp", STAGES), ("dp", 1)), rank=0, stage_to_rank=tuple(range(STAGES))
        )
        manifest = pipegrad.make_manifest(cut.modules, topology, tied=cut.tied)
        handlers = [(n, pipegrad.handlers.resolve(n).plugin) for n in ("pipeline-shared",)]
        plan = pipegrad.make_plan(manifest, topology, handlers, pipegrad.GradientOptions())
        print(f"plan: {time.perf_counter() - began:.1f} s; {str(plan).splitlines()[0]}")
        for stage, module in cut.modules.items():
            trained = sum(p.numel() for p in module.parameters())
            print(f"stage {stage}: {16 * trained / GIB:.2f} GiB with gradients and AdamW's moments")
    print(f"\nmemory of this process: {peak() - before:.2f} GiB more than before")


def for_real() -> None:
    """Runs a step and an optimizer's step of one layer a stage; prints times and memory."""
    dist.init_process_group("gloo")
    rank, before = dist.get_rank(), peak()
    began = time.perf_counter()
    topology = pipegrad.Topology.create(pipeline=STAGES)
    cut = pipegrad.cut.from_config(
        configuration(STAGES), STAGES, seed=0, boundaries=[f"model.layers.{i}" for i in (1, 2, 3)]
    )
    scheduler = pipegrad.Scheduler(cut, topology, schedule="1f1b", num_microbatches=4)
    made, ready = time.perf_counter() - began, peak()
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=1e-2)
    ids = torch.randint(128_256, (4, 64), generator=torch.Generator().manual_seed(0))
    losses, seconds = [], []
    for _ in range(3):
        began = time.perf_counter()
        losses.append(float(scheduler.step(input_ids=ids, labels=ids).loss))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    held = sum(p.nbytes for p in cut.modules[rank].parameters()) / GIB
    tied = [p for n, p in cut.modules[rank].named_parameters() if "embed" in n or "lm_head" in n]
    bits = [p.detach().view(torch.int32).sum().item() for p in tied]
    print(
        f"rank {rank}: made in {made:.1f} s with {ready - before:.2f} GiB for {held:.2f} GiB of "
        f"parameters; losses {[round(loss, 4) for loss in losses]}, steps of "
        f"{[round(s, 1) for s in seconds]} s, peak {peak() - before:.2f} GiB; tied {bits}",
        flush=True,
    )
    scheduler.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    for_real() if "RANK" in os.environ else on_meta()
