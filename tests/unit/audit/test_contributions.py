"""Weights of parts, and the causes that they say; single ones and pairs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pipegrad.audit.compare.causes import Place, causes
from pipegrad.audit.compare.contributions import fit

REPLICAS, MICROBATCHES, USES = 2, 4, 2
COUNTS = {"microbatches": MICROBATCHES, "replicas": REPLICAS, "tokens": 640}
WEIGHTS = torch.full((REPLICAS, MICROBATCHES), 1 / (REPLICAS * MICROBATCHES), dtype=torch.float64)
PLACE = Place(replicas=[1], uses=[0], holders=2, counts=COUNTS, weights=WEIGHTS)
ONES = torch.ones(REPLICAS, MICROBATCHES, USES, dtype=torch.float64)


def only(dim: int, index: int) -> Tensor:
    found = torch.zeros_like(ONES)
    found.select(dim, index).fill_(1)
    return found


def twice_own_use() -> Tensor:
    found = ONES.clone()
    found[:, :, 0] = 2
    return found


DEFECTS: dict[str, tuple[Tensor, str]] = {
    "times M": (ONES * MICROBATCHES, "multiplied by the number of microbatches, 4"),
    "divided by M": (ONES / MICROBATCHES, "divided by the number of microbatches, 4"),
    "times tokens": (ONES * 640, "multiplied by the number of tokens, 640"),
    "sum over replicas": (ONES * REPLICAS, "multiplied by the number of replicas, 2"),
    "last microbatch": (only(1, MICROBATCHES - 1), "only the last microbatch of 4"),
    "replicas apart": (only(0, 1), "not reduced over the 2 replicas"),
    "tie apart": (only(2, 0), "the tie is not reduced"),
    "tie twice": (twice_own_use(), "one is counted twice"),
}


def found_in(ratios: Tensor, noise: float = 1e-6) -> list[str]:
    torch.manual_seed(0)
    parts = torch.randn(REPLICAS, MICROBATCHES, USES, 5, 7, dtype=torch.float64)
    gradient = (parts * (WEIGHTS[..., None] * ratios)[..., None, None]).sum((0, 1, 2))
    gradient = (gradient + noise * torch.randn_like(gradient)).float()
    return [cause.words for cause in causes(fit(gradient, parts, WEIGHTS), PLACE, tolerance=1e-4)]


def test_a_right_gradient_has_no_cause() -> None:
    assert found_in(ONES) == []


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_has_its_cause(name: str) -> None:
    ratios, says = DEFECTS[name]
    [cause] = found_in(ratios)
    assert says in cause


@pytest.mark.parametrize("pair", list(itertools.combinations(DEFECTS, 2)), ids=" and ".join)
def test_pairs_of_defects_have_both_causes(pair: tuple[str, str]) -> None:
    (first, says), (second, also) = (DEFECTS[name] for name in pair)
    ratios = first * second
    words = "; ".join(found_in(ratios))
    if torch.equal(ratios, ONES):  # times M, and divided by M
        assert words == ""
        return
    for said in (says, also):
        assert all(part in words for part in said.split(" by the number of ")), words
