"""Trains a byte-level GPT with tied embeddings over pipeline stages, as exactly as one process.

torchrun --nproc-per-node 4 examples/torch_pipelining.py [--pipeline 2: 2 stages x 2 replicas]
An ordinary torch.distributed.pipelining script; what pipegrad adds is the call of attach.
"""

import argparse
import copy
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import pipegrad
from pipegrad.comm.agreement import agree

WIDTH, CONTEXT, BATCH, MICROBATCHES = 64, 64, 16, 4


class Block(nn.TransformerEncoderLayer):
    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return super().forward(hidden, mask, is_causal=True)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main(pipeline: int | None, steps: int, text: Path | None) -> None:
    dist.init_process_group("gloo")
    topology = pipegrad.Topology.create(pipeline=pipeline or dist.get_world_size())
    num_stages, (place,), replicas = topology.num_stages, topology.local_stages, topology.size("dp")
    prose = "".join(body for _, body in sorted(pydoc_data.topics.topics.items())).encode()
    [data, *_] = agree("reading the text", lambda: text.read_bytes() if text else prose)
    corpus = torch.tensor(list(data))

    torch.manual_seed(0)
    embedding = nn.Embedding(256, WIDTH)
    nn.init.normal_(embedding.weight, std=0.02)
    blocks = [Block(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True) for _ in range(4)]
    head = nn.Linear(WIDTH, 256, bias=False)
    head.weight = embedding.weight  # tied: one parameter, on the first and on the last stage
    model = nn.Sequential(embedding, *blocks, nn.LayerNorm(WIDTH), head)
    reference = copy.deepcopy(model)  # one process, to compare with
    module = model[place * len(model) // num_stages : (place + 1) * len(model) // num_stages]
    group = topology.group_along("pp")
    stage = PipelineStage(module, place, num_stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (module, reference)]

    def step(number: int) -> tuple[Tensor, Tensor]:
        """Forward and backward, by the pipeline and by one process: returns both losses."""
        torch.manual_seed(number)  # every rank draws the same batch
        starts = torch.randint(len(corpus) - CONTEXT, (BATCH,))
        batch = torch.stack([corpus[s : s + CONTEXT + 1] for s in starts])
        share, losses = batch.chunk(replicas)[topology.coordinate("dp")], list[Tensor]()
        inputs = [share[:, :-1].contiguous()] if stage.is_first else []
        schedule.step(*inputs, target=share[:, 1:] if stage.is_last else None, losses=losses)
        loss = sum(losses).detach() / len(losses) / replicas if losses else torch.zeros(())
        dist.all_reduce(loss)
        true_loss = loss_fn(reference(batch[:, :-1]), batch[:, 1:])
        true_loss.backward()
        return loss, true_loss

    def gradient_error() -> float:
        """Largest error of a gradient on any rank, relative to the largest gradient."""
        step(0)
        true = {n: p.grad for n, p in reference.named_parameters(remove_duplicate=False)}
        error = max((p.grad - true[n]).abs().max() for n, p in module.named_parameters())
        dist.all_reduce(error, dist.ReduceOp.MAX)
        largest = max(p.grad.abs().max() for p in reference.parameters())
        module.zero_grad()
        reference.zero_grad()
        return (error / largest).item()

    say = print if dist.get_rank() == 0 else lambda _: None
    say(f"gradient error without attach {gradient_error():.1e}")
    pipegrad.attach(schedule, topology=topology, tied=pipegrad.find_tied(model))
    say(f"gradient error with attach    {gradient_error():.1e}")
    for number in range(1, steps + 1):
        loss, true_loss = step(number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if number == 1 or number % 10 == 0:
            say(f"step {number:4}  loss {loss:.6f}  one process {true_loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", type=int, help="number of stages; all ranks by default")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", type=Path, help="a file; Python's own help by default")
    main(**vars(parser.parse_args()))
