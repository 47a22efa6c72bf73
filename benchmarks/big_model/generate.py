"""Measures the seconds of a token that a cut generates, beside one process.

torchrun --nproc-per-node 4 benchmarks/big_model/generate.py [LAYERS]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import transformers

import pipegrad

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 8, "vocab_size": 8000, "pad_token_id": 0}
FEW, MANY, REPEATS = 2, 18, 5  # tokens; the first one reads the prompt, and does not count
PROMPT = (4, 32)  # rows, tokens


def seconds_a_token(generate: Callable[..., torch.Tensor]) -> float:
    """Returns the shortest time of a token behind the first ones."""
    prompt, times = torch.ones(PROMPT, dtype=torch.long), dict[int, list[float]]()
    for number in (FEW, MANY) * REPEATS:
        began = time.perf_counter()
        text = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=number,
            max_new_tokens=number,
            do_sample=False,
        )
        times.setdefault(number, []).append(time.perf_counter() - began)
        assert text.shape[1] == PROMPT[1] + number
    return (min(times[MANY]) - min(times[FEW])) / (MANY - FEW)


def main(layers: int) -> None:
    """Prints the times of one process and of stages on all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    alone = seconds_a_token(model.generate) if not dist.get_rank() else 0.0
    dist.barrier()
    world = dist.get_world_size()
    parts = pipegrad.cut(model, world)
    scheduler = pipegrad.Scheduler(
        parts, pipegrad.Topology.create(pipeline=world), schedule="1f1b", num_microbatches=2
    )
    found = seconds_a_token(parts.generate)
    if not dist.get_rank():
        print(
            f"{layers} layers, {sum(p.numel() for p in model.parameters()):,} parameters: one "
            f"process {alone * 1e3:.1f} ms a token, {world} stages {found * 1e3:.1f} ms, "
            f"{(found - alone) * 1e3 / (layers + 3):.2f} ms more for each layer"
        )
    scheduler.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
