"""Attention residuals: every stage reads what every earlier stage has made.

torchrun --nproc-per-node 4 examples/attention_residuals.py
The input of a block is not a running sum. It is a softmax over all earlier outputs, with a learned
query (Kimi Team, "Attention Residuals", 2026, arXiv 2603.15031). So each output is an edge to all
later stages, and the gradients that come back are summed where it was made.
"""

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy

from pipegrad import Scheduler, Stage, Topology


class Block(nn.TransformerEncoderLayer):
    def __init__(self, head: nn.Module) -> None:
        super().__init__(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.query, self.key, self.head = nn.Parameter(torch.zeros(32)), nn.RMSNorm(32), head

    def forward(self, *earlier: Tensor) -> Tensor:  # type: ignore[override]
        values = torch.stack(earlier)  # (depth, batch, sequence, width)
        weights = (self.key(values) @ self.query).softmax(0)
        mask = nn.Transformer.generate_square_subsequent_mask(values.shape[2], dtype=values.dtype)
        return self.head(super().forward((weights[..., None] * values).sum(0), mask))


def stages() -> list[Stage]:
    first, last = nn.Sequential(nn.Embedding(32, 32), Block(nn.Identity())), nn.Linear(32, 32)
    return [
        Stage(first, 0, ["tokens"], ["h0"]),
        Stage(Block(nn.Identity()), 1, ["h0"], ["h1"]),
        Stage(Block(nn.Identity()), 2, ["h0", "h1"], ["h2"]),
        Stage(Block(last), 3, ["h0", "h1", "h2"], ["logits"]),
    ]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.mT, target)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    topology = Topology.create(pipeline=4)
    torch.manual_seed(0)  # every rank makes the same uncut model
    stage = stages()[topology.coordinate("pp")]
    scheduler = Scheduler([stage], topology, schedule="1f1b", num_microbatches=8, loss_fn=loss_fn)
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(1, 31):
        text = torch.randint(1, 4, (16, 13)).cumsum(1) % 32  # the same on every rank
        result = scheduler.step(text[:, :-1], target=text[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        if topology.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {result.loss:.4f}")
    distributed.destroy_process_group()
