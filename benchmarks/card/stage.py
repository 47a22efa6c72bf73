"""Times a step of a stage of GPT blocks under `Scheduler`, beside plain autograd, on one card.

python benchmarks/card/stage.py

Fails if a call in a step, the clipping or the update makes the host wait for the card.
"""

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import pipegrad

WIDTH, HEADS, BLOCKS, LENGTH, MICROBATCHES = 1024, 16, 12, 256, 8
WARM_UP, REPEATS = 4, 10
DEVICE = torch.device("cuda", 0)


class Block(nn.Module):
    """GPT's, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.between = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns `(batch, length, width)`."""
        heads = self.qkv(self.before(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def loss_of(output: Tensor, _: Tensor) -> Tensor:
    """Returns a mean of squares."""
    return output.float().square().mean()


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Returns the milliseconds until the host is back, and until the card is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e3 * host, 1e3 * (time.perf_counter() - began)


def cuda_calls(step: Callable[[], None]) -> dict[str, int]:
    """Returns how often a step, and a wait for its end, call each function of CUDA."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    counts = Counter(event.name for event in profiled.events())
    return {name: count for name, count in counts.items() if name.startswith(("cuda", "cuL"))}


def measure(schedule: str) -> None:
    """Prints times and calls of plain autograd and of a schedule, which take turns."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(DEVICE)
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(model, 0)],
        pipegrad.Topology.create(pipeline=1),
        schedule=schedule,
        num_microbatches=MICROBATCHES,
        loss_fn=loss_of,
    )
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-4, foreach=True)
    twin = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(DEVICE)
    twins = torch.optim.AdamW(twin.parameters(), lr=1e-4, foreach=True)
    x = torch.randn(MICROBATCHES, LENGTH, WIDTH, device=DEVICE)

    def ours() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            scheduler.step(x, target=x)
        scheduler.sync.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    def plain() -> None:
        for part in x.chunk(MICROBATCHES):
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(twin(part), part) / MICROBATCHES
            loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        twins.step()
        twins.zero_grad()

    steps = {"plain": plain, schedule: ours}
    rounds = [{name: timed(step) for name, step in steps.items()} for _ in range(WARM_UP + REPEATS)]
    for name in steps:
        times = zip(*(turns[name] for turns in rounds[WARM_UP:]), strict=True)
        host, card = (statistics.median_high(values) for values in times)
        print(f"{name:8}host {host:.1f} ms, card {card:.1f} ms", flush=True)
    for name, step in steps.items():
        print(f"{name:8}{cuda_calls(step)}", flush=True)
    torch.cuda.set_sync_debug_mode("error")
    ours()
    torch.cuda.set_sync_debug_mode("default")
    print(f"{schedule}: no call in a step, the clipping and the update makes the host wait")
    scheduler.close()


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29777")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    for schedule in ("1f1b", "zb-h1"):
        measure(schedule)
    dist.destroy_process_group()
