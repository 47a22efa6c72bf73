"""Hyper-connections: four residual streams go over every hop, and each block learns to mix them.

torchrun --nproc-per-node 4 examples/hyper_connections.py
A block reads a weighted sum of the streams, and adds its output to each with a weight. A matrix
mixes the streams (Zhu et al., 2024, arXiv 2409.19606). Each stream is an edge of its own.
"""

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy

from pipegrad import Scheduler, Stage, Topology


class Block(nn.TransformerEncoderLayer):
    def __init__(self, number: int, head: nn.Module | None = None) -> None:
        super().__init__(32, 4, 64, 0.0, batch_first=True)
        self.read = nn.Parameter(torch.eye(4)[number])  # at first one stream
        self.mix, self.write = nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(4))
        self.head = head

    def forward(self, *streams: Tensor) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        wide = torch.stack(streams * (4 // len(streams)), -1)  # (batch, sequence, width, 4)
        mask = nn.Transformer.generate_square_subsequent_mask(wide.shape[1], dtype=wide.dtype)
        added = super().forward(wide @ self.read, mask) - wide @ self.read
        wide = wide @ self.mix + added[..., None] * self.write
        return self.head(wide.sum(-1)) if self.head else wide.unbind(-1)


def stages() -> list[Stage]:
    first, names = nn.Sequential(nn.Embedding(32, 32), Block(0)), ["a", "b", "c", "d"]
    return [
        Stage(first, 0, ["tokens"], names),
        Stage(Block(1), 1, names, names),
        Stage(Block(2), 2, names, names),
        Stage(Block(3, nn.Linear(32, 32)), 3, names, ["logits"]),
    ]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.mT, target)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    topology = Topology.create(pipeline=4)
    torch.manual_seed(0)  # every rank makes the same uncut model
    stage = stages()[topology.coordinate("pp")]
    options = {"loss_fn": loss_fn, "allow_unsynced": ["*mix"]}  # they start equal, but are not tied
    scheduler = Scheduler([stage], topology, schedule="1f1b", num_microbatches=8, **options)
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(1, 31):
        text = torch.randint(1, 4, (16, 13)).cumsum(1) % 32  # the same on every rank
        result = scheduler.step(text[:, :-1], target=text[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        if topology.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {result.loss:.4f}")
    distributed.destroy_process_group()
