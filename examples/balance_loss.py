"""A mixture of experts: every stage adds the balance loss of its own router.

torchrun --nproc-per-node 4 examples/balance_loss.py
A stage returns its balance loss behind its output, and names it. The losses of all stages are added
to the loss of the last one, and the backward of each starts on its own stage. A loss is the mean of
those of sequences (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv 2412.19437, 2.1.2).
"""

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy, one_hot

from pipegrad import Scheduler, Stage, Topology


class Experts(nn.Module):
    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.router = first, last, nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)  # (batch, sequence, width)
        scores = self.router(x).softmax(-1)
        best, choice = scores.max(-1)
        out = x.clone()
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            out[chosen] += best[chosen][:, None] * expert(x[chosen])
        share = one_hot(choice, 4).to(x.dtype).mean(1)  # of a sequence's tokens, for each expert
        return self.last(out), 0.04 * (share * scores.mean(1)).sum(-1).mean()


def stages() -> list[Stage]:
    same = nn.Identity()
    ends = [(nn.Embedding(32, 32), same), (same, same), (same, same), (same, nn.Linear(32, 32))]
    return [Stage(Experts(*pair), i, losses=["balance"]) for i, pair in enumerate(ends)]


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
            print(f"step {step}  loss {result.loss:.4f}  balance {result.metrics['balance']:.4f}")
    distributed.destroy_process_group()
