"""Measures what comparing copies costs: a comparison beside a step, and in every N-th step.

python benchmarks/overhead/checksums.py [--steps 12] [--comparisons 40] [--models 10M 100M]

Four ranks of gloo: two stages, two replicas, the first weight tied to the last stage. Transformer
layers, 4 microbatches of 128 tokens a replica. A comparison begins with all ranks together, and
counts until the last of them has ended. Medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.gradients.drift import checksum
from pipegrad.plan.options import CHECK_EVERY
from pipegrad.testing import run_ranks

MICROBATCHES, TOKENS, MOST = 4, 128, 1e-3
# Name -> width, and layers of each stage.
MODELS = {"smallest": (8, 1), "1M": (144, 2), "10M": (448, 2), "100M": (1024, 4)}


class WithTied(nn.Module):
    """Layers, and a matrix that both stages hold."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tied = nn.Parameter(torch.eye(width))
        layer = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        ]
        self.layers = nn.Sequential(*layer)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layers' output times the matrix."""
        output: Tensor = self.layers(x) @ self.tied
        return output


def together(function: Callable[[], object]) -> float:
    """Returns the seconds from a common start until the last rank has ended."""
    dist.barrier()
    began = time.perf_counter()
    function()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def measured(model: str, steps: int, comparisons: int) -> dict[str, float]:
    """Returns medians of seconds, and the parameters of this rank."""
    torch.set_num_threads(1)
    topology = Topology.create(pipeline=2)
    stage = topology.coordinate("pp")
    torch.manual_seed(stage)
    width, layers = MODELS[model]
    module = WithTied(width, layers)
    scheduler = Scheduler(
        [Stage(module, stage)],
        topology,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=lambda out, target: (out - target).square().mean(),
        tied=[["tied"]],
        check_every=0,
    )
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-4)
    replica = scheduler.topology.coordinate(scheduler.topology.data)  # which is given one batch
    one = torch.Generator().manual_seed(replica)
    sync, batch = scheduler.sync, torch.randn(MICROBATCHES, TOKENS, width, generator=one)

    def step() -> None:
        result = scheduler.step(batch, target=batch)
        sync.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.loss.item()

    def compare() -> None:
        # What `finish` does in a step that compares: a barrier, and then they compare.
        reducer = sync._reducer
        reducer.barrier()()
        sync._drift.look()

    def sums() -> None:
        for parameter in module.parameters():
            checksum(parameter)

    found = {
        name: statistics.median([together(function) for _ in range(number + 2)][2:])
        for name, function, number in (
            ("step", step, steps),
            ("comparison", compare, comparisons),
            ("sums", sums, comparisons),
            ("check_replicas", sync.check_replicas, 5),
        )
    }
    scheduler.close()
    return {**found, "numel": float(sum(p.numel() for p in module.parameters()))}


def main() -> None:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--comparisons", type=int, default=40)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    arguments = parser.parse_args()
    for model in arguments.models:
        replies = run_ranks(measured, 4, model, arguments.steps, arguments.comparisons)
        m = replies[0]
        share = m["comparison"] / m["step"]
        print(
            f"{model}, {2 * m['numel'] / 1e6:.1f}M parameters: a step {m['step'] * 1e3:,.0f} ms, a "
            f"comparison {m['comparison'] * 1e3:.2f} ms (checksums {m['sums'] * 1e3:.2f} ms), "
            f"check_replicas {m['check_replicas'] * 1e3:.1f} ms; every {CHECK_EVERY} steps "
            f"{share / CHECK_EVERY:.5%} of a step; below {MOST:.1%} from every "
            f"{int(share / MOST) + 1} steps on"
        )


if __name__ == "__main__":
    main()
