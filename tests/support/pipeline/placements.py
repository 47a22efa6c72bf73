# ruff: noqa: T201 - a script prints
"""Compares one model trained under every placement, on ranks, with one process.

As a script it trains a whole product of what a run may be made of, some hundreds of cases in each
spawn, and prints the worst errors: ``python tests/support/pipeline/placements.py --share 1/4``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # its ranks import it by this name too
    sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from torch import Tensor, nn

from pipegrad import find_tied
from pipegrad.testing import run_ranks
from tests.support.pipeline.placement_cases import (
    CASES_A_SPAWN,
    CROSSED,
    FACTORS,
    LEARNING_RATES,
    ROUNDING,
    Case,
    boundaries,
    build,
)
from tests.support.pipeline.placement_runs import Piece, Seen, run_cases, truth
from tests.support.pipeline.schedulers import digest, error
from tests.support.rounding import ADAM_EPS

# What is compared.


@dataclass(frozen=True)
class Distance:
    """How far something is from what it must be, and how far it may be."""

    error: float
    limit: float

    @property
    def is_miss(self) -> bool:
        return not self.error <= self.limit  # nor is nan


Distances = dict[str, Distance]


class Comparison:
    """What all ranks saw of a case, and one process. Each aspect of it tells distances by name.

    Args:
        case: What was trained.
        seen: By rank.
    """

    def __init__(self, case: Case, seen: Sequence[Seen]) -> None:
        self.case, self.seen, self.true = case, seen, truth(case)
        model = build(case)
        self.named = dict(model.named_parameters(remove_duplicate=False))
        self.ties = {name: [name] for name in self.named}
        self.ties |= {name: list(tie) for tie in find_tied(model) for name in tie}
        self.roots = {name: tie[0] for name, tie in self.ties.items()}
        self.trained = [
            name for name, p in self.named.items() if p.requires_grad and self.roots[name] == name
        ]
        self.exact = case.exact()
        # Of a lower precision it is a unit in the last place.
        self.loss_limit = case.exact(steps=case.steps) if case.is_exact else 2 * ROUNDING

    @property
    def aspects(self) -> dict[str, Distances]:
        return {name: getattr(self, name)() for name in ASPECTS}

    def losses(self) -> Distances:
        return self._numbers([seen.losses for seen in self.seen], self.true.losses)

    def evaluated(self) -> Distances:
        """Tells that of losses right after a step."""
        if not self.case.after.endswith("eval"):
            return {}
        return self._numbers([seen.evaluated for seen in self.seen], self.true.evaluated)

    def norms(self) -> Distances:
        return self._numbers([seen.norms for seen in self.seen], self.true.norms)

    def gradients(self) -> Distances:
        """Tells that of the first step's, wherever they are stepped."""
        found = self._wholes([seen.first for seen in self.seen])
        return {
            f"{root} of ranks {ranks}": self._gradient(root, gradient)
            for (root, ranks), gradient in found.items()
        }

    def parameters(self) -> Distances:
        """Tells that of each rank's."""
        found = {}
        for rank, seen in enumerate(self.seen):
            for when, mine, true in (
                ("in the end", seen.parameters, self.true.parameters),
                ("after a step", seen.read, self.true.read),
            ):
                for name, parameter in mine.items():
                    value = error(parameter.float(), true[name].to(self.case.dtype).float())
                    limit = self._parameter_limit(self.roots[name])
                    found[f"{name} of rank {rank} {when}"] = Distance(value, limit)
        return found

    def replayed(self) -> Distances:
        """Tells that of what was stepped from what one optimizer makes of the same gradients."""
        number = len(self.seen[0].clipped)
        steps = [self._wholes([seen.clipped[i] for seen in self.seen]) for i in range(number)]
        if not steps:
            return {}
        replayed = {it: nn.Parameter(self.named[it[0]].detach().float().clone()) for it in steps[0]}
        optimizer = self.case.make_optimizer(replayed.values())
        for gradients in steps:
            for it, parameter in replayed.items():
                parameter.grad = gradients[it]
            optimizer.step()
        found = self._wholes([seen.stepped for seen in self.seen])
        return {
            f"{root} of ranks {ranks}": Distance(error(found[root, ranks], p.detach()), self.exact)
            for (root, ranks), p in replayed.items()
        }

    def copies(self) -> Distances:
        """Tells how many others there are of the bits of a parameter; what is stepped is one."""
        found = defaultdict[str, set[str]](set)
        for seen in self.seen:
            for name, parameter in seen.parameters.items():
                found[self.roots[name]].add(digest(parameter))
            for name, parameter in seen.read.items():
                found[f"{self.roots[name]} after a step"].add(digest(parameter))
        for (root, _), stepped in self._wholes([seen.stepped for seen in self.seen]).items():
            found[root].add(digest(None if stepped is None else stepped.to(self.case.dtype)))
        return {name: Distance(len(digests) - 1, 0) for name, digests in found.items()}

    def states(self) -> Distances:
        """Tells that of the number of elements that a rank steps, and has state of."""
        found = {}
        for rank, seen in enumerate(self.seen):
            mine = [r for r in self.trained if any(rank in ranks for ranks in self.steppers(r))]
            held = {self.roots[piece.name]: piece.numel for piece in seen.stepped}
            # A rank has its part of what is padded; that no element is missing `gradients` tells.
            excess = sum(held.values()) * (self.case.data if self.case.is_sharded else 1)
            excess -= sum(self.named[root].numel() for root in mine)
            # One rank may have more whole parameters than another, by the largest of them.
            most = max((self.named[root].numel() for root in mine), default=0)
            allowed = most * self.case.data if self.case.is_whole else seen.padding
            found[f"all of rank {rank}"] = Distance(max(0, excess), allowed)
            found[f"others' of rank {rank}"] = Distance(len(held.keys() - {*mine}), 0)
            found[f"idle of rank {rank}"] = Distance(len(seen.idle), 0)
            for name, size in seen.state.items():
                root = self.roots[name]
                used = 0 if self.true.gradients[root] is None else held[root]
                found[f"{name} of rank {rank}"] = Distance(abs(size - used), 0)
        return found

    # Where things must be.

    def holders(self, root: str) -> list[int]:
        """Returns who holds a parameter, along the pipeline."""
        places = self.case.made.stage_to_rank
        starts = [0, *boundaries(len(places))]
        layers = {int(name.partition(".")[0]) for name in self.ties[root]}
        stages = {sum(start <= layer for start in starts) - 1 for layer in layers}
        return sorted({places[stage] for stage in stages})

    def steppers(self, root: str) -> list[tuple[int, ...]]:
        """Returns the ranks that together step a parameter, in the order of their rows."""
        holders, data = self.holders(root), self.case.data
        if self.case.is_owned:
            holders = holders[:1]
        rows = [tuple(range(place * data, (place + 1) * data)) for place in holders]
        return rows if self.case.is_sharded else [(rank,) for row in rows for rank in row]

    def _wholes(
        self, pieces: Sequence[Sequence[Piece]]
    ) -> dict[tuple[str, tuple[int, ...]], Tensor | None]:
        """Returns what the ranks' pieces are of, by name and ranks; of what is missing nan."""
        by_rank = [{self.roots[piece.name]: piece for piece in mine} for mine in pieces]
        return {
            (root, ranks): joined(
                [by_rank[rank][root] for rank in ranks if root in by_rank[rank]], self.named[root]
            )
            for root in self.trained
            for ranks in self.steppers(root)
        }

    # How far they may be.

    def _numbers(self, found: Sequence[Sequence[float]], true: Sequence[float]) -> Distances:
        """Compares numbers that all ranks have, in the same bits."""
        return {
            f"{number}": Distance(
                abs(one - mine[0]) / abs(one) if len({*mine}) == 1 else math.inf, self.loss_limit
            )
            for number, (one, *mine) in enumerate(zip(true, *found, strict=True))
        }

    def _parameter_limit(self, root: str) -> float:
        if self.case.is_exact:
            return self.loss_limit + self._moved_by_rounding(root)
        # What began with zeros is a sum of gradients; a bit less of a cast makes a unit.
        limit = (self._num_roundings(root) + 2) * ROUNDING
        if self.case.optimizer == "AdamW":  # whichever sign rounding has left a gradient
            moved = LEARNING_RATES["AdamW"] * self.case.steps
            limit += 2 * moved / self.true.parameters[root].abs().max().item()
        return limit

    def _moved_by_rounding(self, root: str) -> float:
        """Returns how far AdamW moves a parameter for what rounding adds to its gradient."""
        gradient = self.true.gradients[root]
        if self.case.optimizer != "AdamW" or gradient is None:
            return 0.0
        added = self.exact * gradient.abs().max()
        moved = LEARNING_RATES["AdamW"] / ADAM_EPS * added * self.case.steps
        return (moved / self.true.parameters[root].abs().max()).item()

    def _gradient(self, root: str, found: Tensor | None) -> Distance:
        true = self.true.gradients[root]
        value = error(found, true)
        if self.case.is_exact or found is None or true is None:
            return Distance(value, self.exact)
        # An element is rounded with each addend on its way, by at most so much of all of them.
        terms = sum(self.true.terms.get(name, torch.zeros(())) for name in self.ties[root])
        limits = self._num_roundings(root) * ROUNDING * terms + self.exact * true.abs().max()
        used = ((found - true).abs() / limits).max().item()
        return Distance(value, value / used if used else self.exact)

    def _num_roundings(self, root: str) -> int:
        """Returns how often a gradient is rounded to bf16: into a bucket, by each sum and mean."""
        number = len(self.holders(root)) + self.case.data
        if self.case.dtype == torch.bfloat16:
            number += self.case.num_microbatches * int(self.case.parts) * len(self.ties[root])
        return number


ASPECTS = (
    "losses",
    "evaluated",
    "norms",
    "gradients",
    "parameters",
    "replayed",
    "copies",
    "states",
)


def joined(pieces: Sequence[Piece], like: Tensor) -> Tensor | None:
    """Returns what pieces are of, which lies in memory like a parameter; of what is missing nan."""
    if pieces and all(piece.tensor is None for piece in pieces):
        return None
    if len(pieces) == 1 and (only := pieces[0].tensor) is not None and only.shape == like.shape:
        return only.float()
    flat, end = torch.full((like.numel(),), math.nan), 0
    for piece in pieces:
        if piece.tensor is not None and piece.tensor.dim() == 1 and piece.begin == end:
            end += piece.numel
            flat[piece.begin : end] = piece.tensor
    return flat.as_strided(like.shape, like.stride())


def compared(cases: Sequence[Case]) -> list[Comparison]:
    """Trains cases of one number of ranks, in one spawn."""
    ranks = run_ranks(run_cases, cases[0].num_ranks, cases)
    return [Comparison(case, seen) for case, *seen in zip(cases, *ranks, strict=True)]


# The product, as a script.


def product(crossed: Sequence[str]) -> list[Case]:
    """Returns every case of some factors, shuffled; of other factors a random level."""
    chance, found = random.Random(7), []
    for levels in itertools.product(*(FACTORS[name] for name in crossed)):
        named = {name: chance.choice(known) for name, known in FACTORS.items()}
        named |= zip(crossed, levels, strict=True)
        found.append(Case.of([*named.values()]))
    chance.shuffle(found)
    return found


def run_product(cases: Sequence[Case]) -> int:
    """Trains them, some in a spawn, and prints the worst errors; returns how many miss a limit."""
    worst: dict[tuple[str, str], dict[str, float]] = {}
    begin, num_misses, num_done = time.monotonic(), 0, 0
    for num_ranks in sorted({case.num_ranks for case in cases}):
        all_mine = [case for case in cases if case.num_ranks == num_ranks]
        for start in range(0, len(all_mine), CASES_A_SPAWN):
            mine = all_mine[start : start + CASES_A_SPAWN]
            for comparison in compared(mine):
                num_misses += tell(comparison, worst)
            num_done += len(mine)
            seconds = time.monotonic() - begin
            print(f"{num_done} of {len(cases)} cases, {seconds:.0f} s", file=sys.stderr)
    print(f"{'handlers':15}{'precision':11}" + "".join(f"{name:>12}" for name in ASPECTS))
    for (handlers, precision), errors in sorted(worst.items()):
        told = "".join(f"{errors[name]:12.1e}" for name in ASPECTS)
        print(f"{handlers:15}{precision:11}{told}")
    print(f"{len(cases)} cases, {num_misses} with a miss")
    return num_misses


def tell(comparison: Comparison, worst: dict[tuple[str, str], dict[str, float]]) -> bool:
    """Adds to the worst errors, and prints what misses; returns whether anything does."""
    case, misses = comparison.case, list[str]()
    known = worst.setdefault((case.handlers, case.precision), dict.fromkeys(ASPECTS, 0.0))
    for aspect, distances in comparison.aspects.items():
        errors = [distance.error for distance in distances.values()]
        known[aspect] = max([known[aspect], *errors])
        misses += [f"{aspect}: {name}: {d}" for name, d in distances.items() if d.is_miss]
    if misses:
        print(f"MISS {case}: {len(misses)}, the first: {misses[0]}")
    return bool(misses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cross", nargs="+", choices=list(FACTORS), default=CROSSED)
    parser.add_argument("--share", default="1/1", help="of the product: 2/8 is the second eighth")
    asked = parser.parse_args()
    part, parts = map(int, asked.share.split("/"))
    return int(run_product(product(asked.cross)[part - 1 :: parts]) > 0)


if __name__ == "__main__":
    from tests.support.pipeline import placements  # what its ranks find when they unpickle

    sys.exit(placements.main())
