"""Multi-token prediction: a module behind the last block predicts the token after the next one.

torchrun --nproc-per-node 4 examples/multi_token_prediction.py
It reads the last hidden state and the embedding of the next token. The embedding and the head are
one weight, on the first and the last stage (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2).
"""

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy, rms_norm

from pipegrad import Scheduler, Stage, Topology


class Block(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(32, 4, 64, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, mask)


class Last(Block):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.ahead = embedding, nn.Sequential(nn.Linear(64, 32), Block())

    def forward(self, x: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        both = torch.stack([hidden := super().forward(x), self.embedding(following)], -2)
        ahead = self.ahead(rms_norm(both, (32,)).flatten(-2))
        return hidden @ self.embedding.weight.T, ahead @ self.embedding.weight.T


def stages() -> list[Stage]:
    first = nn.Sequential(nn.Embedding.from_pretrained(torch.randn(32, 32) / 6, False), Block())
    last = Stage(Last(first[0]), 3, ["x", "following"], ["logits", "ahead"])
    return [Stage(first, 0), Stage(Block(), 1), Stage(Block(), 2), last]


def loss_fn(logits: Tensor, ahead: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.mT, target[:, :-1]) + 0.3 * cross_entropy(ahead.mT, target[:, 1:])


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    topology = Topology.create(pipeline=4)
    torch.manual_seed(0)  # every rank makes the same uncut model
    stage = stages()[topology.coordinate("pp")]
    options = {"loss_fn": loss_fn, "tied": [{0: "0.weight", 3: "embedding.weight"}]}
    scheduler = Scheduler([stage], topology, schedule="1f1b", num_microbatches=8, **options)
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(1, 31):
        text = torch.randint(1, 4, (16, 14)).cumsum(1) % 32  # the same on every rank
        result = scheduler.step(text[:, :-2], following=text[:, 1:-1], target=text[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        if topology.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {result.loss:.4f}")
    distributed.destroy_process_group()
