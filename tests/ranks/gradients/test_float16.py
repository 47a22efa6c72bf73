"""float16: means that are finite stay finite, as those of DistributedDataParallel do."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from pipegrad import Placement
from tests.support.gradients.cases import give, grads, rank, stage
from tests.support.gradients.placements import OWNER, REPLICATE, SHARD, By, alone, compute, stepped
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(2)
LARGE = 4e4  # two of them are more than float16 has


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


@pytest.mark.parametrize("placement", [REPLICATE, OWNER, SHARD])
def test_means_do_not_overflow(placement: Placement) -> None:
    module = stage(w=half(40), unused=half(3))
    sync = alone(module, By("dp", placement, "mean"))
    compute(sync, lambda: give(module, w=LARGE))
    gradients = {key: gradient for key, (_, gradient) in stepped(sync).items()}
    assert "0.w" not in gradients or (gradients["0.w"] == LARGE).all()
    assert gradients.get("0.unused") is None
    assert {key for keys in gathered(list(gradients)) for key in keys} == {"0.w", "0.unused"}


def test_means_have_the_bits_of_ddp() -> None:
    drawn = torch.Generator().manual_seed(rank())
    gradient = torch.randn(64, generator=drawn).half() * torch.logspace(-7, 4, 64).half()
    ours, theirs = stage(w=half(64)), stage(w=half(64))
    theirs.forward = lambda g: (theirs.get_parameter("w") * g).sum()
    compute(alone(ours, By("dp", REPLICATE, "mean")), lambda: give(ours, w=gradient))
    wrapped = DistributedDataParallel(theirs)  # which reduces while it is there
    wrapped(gradient).backward()
    assert grads(ours) == grads(theirs)
