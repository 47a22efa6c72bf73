"""Measures the seconds of a token that a cut generates, beside one process.

torchrun --nproc-per-node 4 benchmarks/big_model/generate.py [LAYERS]
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import transformers

import pipegrad

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 8, "vocab_size": 8000, "pad_token_id": 0}
FEW, MANY, REPEATS = 2, 18, 3  # tokens; the first one reads the prompt, and does not count
PROMPT = (4, 32)  # rows, tokens


def seconds_of(generate: Callable[..., torch.Tensor], number: int) -> float:
    """Returns how long a text of so many tokens takes."""
    prompt = torch.ones(PROMPT, dtype=torch.long)
    options = {"min_new_tokens": number, "max_new_tokens": number, "do_sample": False}
    dist.barrier()
    began = time.perf_counter()
    text = generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert text.shape[1] == PROMPT[1] + number
    return time.perf_counter() - began


def main(layers: int) -> None:
    """Prints the times of a token of one process and of stages on all ranks, in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers)
    model = transformers.LlamaForCausalLM(config).eval()
    whole, world, rank = copy.deepcopy(model), dist.get_world_size(), dist.get_rank()
    parts = pipegrad.cut(model, world)
    topology = pipegrad.Topology.create(pipeline=world)
    scheduler = pipegrad.Scheduler(parts, topology, schedule="1f1b", num_microbatches=2)
    ways = {"one process": whole.generate, f"{world} stages": parts.generate}
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(REPEATS):
        for way, generate in ways.items():
            for number in (FEW, MANY):
                if way == "one process" and rank:
                    dist.barrier()
                else:
                    times.setdefault((way, number), []).append(seconds_of(generate, number))
    if not rank:
        for way in ways:
            seconds = (min(times[way, MANY]) - min(times[way, FEW])) / (MANY - FEW)
            print(f"{layers} layers, {way}: {seconds * 1e3:.1f} ms a token")
    scheduler.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
