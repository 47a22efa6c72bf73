"""An encoder and a decoder: every decoder stage takes the encoder's output by its name.

torchrun --nproc-per-node 4 examples/encoder_decoder.py
`memory` goes from stage 0 to three ranks, and the gradients that come back are summed there. The
head and the embeddings of both sides are one weight, on three stages, as in T5 (Raffel et al.,
2019, arXiv 1910.10683). The decoder learns to sort.
"""

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy

from pipegrad import Scheduler, Stage, Topology


class Decoder(nn.TransformerDecoderLayer):
    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.first, self.last = first, last

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        x = self.first(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.last(super().forward(x, memory, mask))


def stages() -> list[Stage]:
    embedding, head, same = nn.Embedding(32, 32), nn.Linear(32, 32, bias=False), nn.Identity()
    embedding.weight = head.weight  # as small as a head's at first
    layers = [nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2)]
    decoders = [Decoder(embedding, same), Decoder(same, same), Decoder(same, head)]
    return [
        Stage(nn.Sequential(embedding, *layers), 0, ["source"], ["memory"]),
        *(Stage(decoder, 1 + i, ["x", "memory"]) for i, decoder in enumerate(decoders)),
    ]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.mT, target)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    topology = Topology.create(pipeline=4)
    torch.manual_seed(0)  # every rank makes the same uncut model
    stage = stages()[topology.coordinate("pp")]
    options = {"loss_fn": loss_fn, "tied": [{0: "0.weight", 1: "first.weight", 3: "last.weight"}]}
    scheduler = Scheduler([stage], topology, schedule="1f1b", num_microbatches=8, **options)
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(1, 31):
        source = torch.randint(1, 32, (16, 8))  # the same on every rank
        answer = nn.functional.pad(source.sort().values, (1, 0))
        result = scheduler.step(source=source, x=answer[:, :-1], target=answer[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        if topology.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {result.loss:.4f}")
    distributed.destroy_process_group()
