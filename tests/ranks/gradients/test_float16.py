"""float16: means that are finite stay finite, as those of DistributedDataParallel do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.gradients.cases import Case, give, grads, on, rank, replies, stage
from tests.support.gradients.placements import OWNER, REPLICATE, SHARD, By, alone, compute, stepped

TWO: list[Case] = []

two = replies(2, TWO)

PLACEMENTS = {"replicate": REPLICATE, "owner": OWNER, "sharded": SHARD}
LARGE = 4e4  # two of them are more than float16 has


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


@on(TWO)
def large() -> Any:
    found = {}
    for name, placement in PLACEMENTS.items():
        module = stage(w=half(40), unused=half(3))
        sync = alone(module, By("dp", placement, "mean"))
        compute(sync, lambda module=module: give(module, w=LARGE))  # type: ignore[misc]
        found[name] = {
            key: None if gradient is None else sorted(set(gradient.tolist()))
            for key, (_, gradient) in stepped(sync).items()
        }
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_means_do_not_overflow(two: list[dict[str, Any]], placement: str) -> None:
    """Issue 16, point 10 (1.10). Summed first and divided then, they were infinite."""
    on_ranks = [reply["large"][placement] for reply in two]
    assert {key for found in on_ranks for key in found} == {"0.w", "0.unused"}
    for found in on_ranks:
        assert found.get("0.w", [LARGE]) == [LARGE]
        assert found.get("0.unused") is None


@on(TWO)
def beside_ddp() -> Any:
    drawn = torch.Generator().manual_seed(rank())
    gradient = torch.randn(64, generator=drawn).half() * torch.logspace(-7, 4, 64).half()
    ours, theirs = stage(w=half(64)), stage(w=half(64))
    theirs.forward = lambda g: (theirs.get_parameter("w") * g).sum()
    compute(alone(ours, By("dp", REPLICATE, "mean")), lambda: give(ours, w=gradient))
    wrapped = DistributedDataParallel(theirs)  # which reduces while it is there
    wrapped(gradient).backward()
    return [grads(module)["w"] for module in (ours, theirs)]


def test_means_have_the_bits_of_ddp(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 10 (1.10)."""
    for reply in two:
        ours, theirs = reply["beside_ddp"]
        assert ours == theirs
