"""What the audits share: a small model of layers, its loss, and batches. Not run by itself."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH, LAYERS = 64, 64, 10, 4
MICROBATCHES, ROWS = 6, 2  # of a step; of a microbatch
LEARNING_RATE = 0.5


class Embedding(nn.Module):
    """Tokens ``(rows, length)`` to ``(rows, length, width)``."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = WIDTH) -> None:
        super().__init__()
        # Large, so that the norm of the gradient is above 1, a usual clip norm.
        self.weight = nn.Parameter(0.3 * torch.randn(vocabulary, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)


class Block(nn.Module):
    """A feed-forward network with a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


def tied_layers() -> nn.Sequential:
    """Returns the uncut model. Its head's weight is the embedding's."""
    embedding, head = Embedding(), nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, *[Block() for _ in range(LAYERS)], head)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the mean cross entropy of the targets that are not -100."""
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def batches(
    *, num_replicas: int = 1, has_padding: bool = False, number: int = 3
) -> list[tuple[Tensor, Tensor]]:
    """Returns tokens and targets of some steps, for all replicas.

    Args:
        num_replicas: Of different data.
        has_padding: Whether rows end early: then microbatches have different numbers of targets.
        number: Of steps.
    """
    generator = torch.Generator().manual_seed(1234)
    shape = (num_replicas * MICROBATCHES * ROWS, LENGTH)
    found = []
    for _ in range(number):
        tokens, target = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
        if has_padding:
            lengths = torch.randint(1, LENGTH + 1, (shape[0], 1), generator=generator)
            target = target.masked_fill(torch.arange(LENGTH) >= lengths, -100)
        found.append((tokens, target))
    return found
