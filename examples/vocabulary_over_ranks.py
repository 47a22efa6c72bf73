"""The vocabulary over all ranks: each holds a part of the embedding, which is the head too.

torchrun --nproc-per-node 4 examples/vocabulary_over_ranks.py
Otherwise the first and the last stage hold all of it, are heavier than the others, and exchange its
gradient in each step (Yeung et al., 2024, arXiv 2411.05288). A rank has a stage that looks its
tokens up, a stage of layers, and a stage that computes its part of the logits: of them the next
stages need a number for each token and part, so no rank ever has all logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import embedding

from pipegrad import Scheduler, Stage, Topology
from pipegrad.schedules import Action, Schedule

WIDTH, VOCABULARY, IGNORED = 32, 128, -100


class Block(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, mask)


class First(Block):
    """Adds what all ranks have looked up: each token is in one part."""

    def forward(self, *parts: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.stack(parts).sum(0))


class Part(nn.Module):
    """Rows of the embedding, from `first` on."""

    def __init__(self, weight: nn.Parameter, first: int) -> None:
        super().__init__()
        self.weight, self.first = weight, first

    def here(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        at = tokens - self.first
        is_here = (at >= 0) & (at < len(self.weight))
        return torch.where(is_here, at, 0), is_here


class LookUp(Part):
    def forward(self, tokens: Tensor) -> Tensor:
        at, is_here = self.here(tokens)
        return embedding(at, self.weight) * is_here[..., None]


class Score(Part):
    """Returns of its logits the logarithm of the sum of exponentials, and the label's, if here."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        at, is_here = self.here(labels)
        logits = x @ self.weight.T
        own = logits.gather(-1, at[..., None]).squeeze(-1)
        return logits.logsumexp(-1), torch.where(is_here, own, 0.0)


class Losses(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        sums, own = parts[: len(parts) // 2], parts[len(parts) // 2 :]
        return torch.stack(sums).logsumexp(0) - torch.stack(own).sum(0)


def mean(losses: Tensor, target: Tensor) -> Tensor:
    return losses[target != IGNORED].mean()


def uncut(num_ranks: int) -> tuple[nn.Parameter, list[Block]]:
    torch.manual_seed(0)  # every rank makes the same uncut model
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 6)
    return weight, [First(), *(Block() for _ in range(num_ranks - 1))]


def stages(weight: Tensor, blocks: Sequence[Block], rank: int) -> list[Stage]:
    """Returns the stages of a rank. In all: look-ups, blocks, scores, losses."""
    size = len(blocks)
    first = rank * (len(weight) // size)
    part = nn.Parameter(weight.detach()[first : first + len(weight) // size].clone())
    found = [f"found {i}" for i in range(size)]
    sums, own = [f"sum {i}" for i in range(size)], [f"own {i}" for i in range(size)]
    mine = [
        Stage(LookUp(part, first), rank, ["tokens"], [found[rank]]),
        Stage(blocks[rank], size + rank, ["x"] if rank else found, ["x"]),
        Stage(Score(part, first), 2 * size + rank, ["x", "labels"], [sums[rank], own[rank]]),
    ]
    is_last = rank == size - 1
    return [*mine, Stage(Losses(), 3 * size, [*sums, *own], ["losses"])] if is_last else mine


def schedule(size: int, num_microbatches: int) -> Schedule:
    """Returns an order: each rank does the first thing that it can, backwards first.

    As in 1f1b, later ranks have fewer microbatches in flight; two more than there, since a loss
    comes back after the scores of all ranks.
    """
    looks, blocks = tuple(range(size)), tuple(range(size, 2 * size))
    scores = tuple(range(2 * size, 3 * size))
    feeds = (*[()] * size, looks, *((b,) for b in blocks[:-1]), *[blocks[-1:]] * size, scores)
    ranks = (*range(size), *range(size), *range(size), size - 1)
    users = [[u for u, sources in enumerate(feeds) if s in sources] for s in range(len(ranks))]

    def is_possible(action: Action, done: set[Action]) -> bool:
        stage, kind, m = action
        if kind == "B":
            needed = {Action(stage, "F", m), *(Action(user, "B", m) for user in users[stage])}
        else:
            behind = m - (size - ranks[stage] + 2)
            late = {Action(stage, "B", behind)} if behind >= 0 else set()
            needed = late | {Action(source, "F", m) for source in feeds[stage]}
        return needed <= done

    def turn(action: Action) -> tuple[bool, int, int]:
        return action.kind == "F", action.microbatch, -action.stage

    numbers = range(num_microbatches)
    left = [Action(s, kind, m) for s in range(len(ranks)) for kind in ("B", "F") for m in numbers]
    left.sort(key=turn)
    rows, done = [list[Action]() for _ in range(size)], set[Action]()
    while left:
        now = dict[int, Action]()
        for action in left:
            if ranks[action.stage] not in now and is_possible(action, done):
                now[ranks[action.stage]] = action
        for rank, action in now.items():
            rows[rank].append(action)
        done |= {*now.values()}
        left = [action for action in left if action not in done]
    return Schedule("vocabulary", num_microbatches, ranks, tuple(map(tuple, rows)), feeds=feeds)


def scheduler(topology: Topology, num_microbatches: int) -> Scheduler:
    size = topology.size("pp")
    weight, blocks = uncut(size)
    return Scheduler(
        stages(weight, blocks, topology.coordinate("pp")),
        topology,
        schedule=schedule(size, num_microbatches),
        loss_fn=mean,
        tied=[{i: "weight", 2 * size + i: "weight"} for i in range(size)],
    )


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    topology = Topology.create(pipeline=4)
    training = scheduler(topology, num_microbatches=8)
    optimizer = training.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(1, 31):
        text = torch.randint(1, 4, (16, 14)).cumsum(1) % VOCABULARY  # the same on every rank
        tokens, labels = text[:, :-1], text[:, 1:]
        result = training.step(tokens=tokens, labels=labels, target=labels)
        optimizer.step()
        optimizer.zero_grad()
        if topology.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {result.loss:.4f}")
    distributed.destroy_process_group()
