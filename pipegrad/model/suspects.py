"""What parameters start with: digests of their bits, and which of them one seed explains."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pipegrad.model.dtensor import local

_SAMPLE_NUMEL = 1024
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Location = tuple[int, str]
"""A stage, and a parameter's name in that stage."""


@dataclass(frozen=True)
class Start:
    """How a parameter of a stage starts.

    Attributes:
        kind: Class name of the module that holds it.
        shape: Its shape.
        trained: Whether it requires a gradient.
        digest: Of a sample of its bits; None if they are constant, or not known.
    """

    kind: str
    shape: tuple[int, ...]
    trained: bool
    digest: str | None

    @property
    def drawn(self) -> tuple[str, tuple[int, ...], str | None]:
        """What a seed decides: all but whether it is trained."""
        return self.kind, self.shape, self.digest


def fingerprint(parameter: torch.Tensor) -> tuple[str | None, str | None]:
    """Returns a digest of a sample of the bits: (varying, constant), of which one is None.

    Both are None on the meta device, and for no elements: there is nothing to compare. One element
    counts as a constant.
    """
    parameter = local(parameter).detach()
    if parameter.is_meta or parameter.numel() == 0:
        return None, None
    flat = parameter.reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLE_NUMEL)][:_SAMPLE_NUMEL].contiguous().cpu()
    rows = sample.view(torch.uint8).view(sample.numel(), -1)
    if bool((rows == rows[0]).all()):
        return None, bytes(rows[0].tolist()).hex()
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16], None


def is_zero(constant: str | None) -> bool:
    """Whether the constant of a `fingerprint` is zero."""
    return constant is not None and not constant.strip("0")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits."""
    if one.is_meta or other.is_meta:
        return one is other
    a, b = (local(t).detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(a, b)


def likely_ties(
    starts: Mapping[Location, Start], ties: Sequence[Sequence[Location]]
) -> tuple[list[list[Location]], list[list[Location]]]:
    """Returns the undeclared groups of equal parameters on different stages: (likely, alike).

    Likely are groups that only a tie explains. Alike are groups that a common seed explains (see
    `_from_one_seed`), or cloned layers: one stage holds the bits twice, under names that differ in
    a number only. Frozen parameters are in neither group: they cannot drift apart.

    Args:
        starts: Place -> how it starts, in each stage in the order of ``named_parameters``.
        ties: The ties that are known.
    """
    stages_of = {location: {stage for stage, _ in tie} for tie in ties for location in tie}
    by_digest: dict[str, list[Location]] = {}
    for location, start in starts.items():
        if start.digest is not None:
            by_digest.setdefault(start.digest, []).append(location)
    drawn: dict[int, list[tuple[str, Start]]] = {}
    for (stage, name), start in starts.items():
        if (stage, name) not in stages_of:
            drawn.setdefault(stage, []).append((name, start))
    likely: list[list[Location]] = []
    alike: list[list[Location]] = []
    seeded: dict[tuple[int, int], bool] = {}
    for locations in by_digest.values():
        holders = {stage for stage, _ in locations}
        known = any(holders <= stages_of.get(location, set()) for location in locations)
        if len(holders) < 2 or known or not any(starts[location].trained for location in locations):
            continue
        explained = _is_cloned(locations, starts)
        for a, b in ((a, b) for a in holders for b in holders if a < b):
            if (a, b) not in seeded:
                seeded[a, b] = _from_one_seed(drawn.get(a, []), drawn.get(b, []))
            explained = explained or seeded[a, b]
        (alike if explained else likely).append(sorted(locations))
    return sorted(likely), sorted(alike)


def _is_cloned(locations: Sequence[Location], starts: Mapping[Location, Start]) -> bool:
    num_stages = len({stage for stage, _ in locations})
    kinds = {(starts[location].kind, _NUMBER.sub("#", location[1])) for location in locations}
    return len(locations) > num_stages and len(kinds) == 1


def _from_one_seed(one: Sequence[tuple[str, Start]], other: Sequence[tuple[str, Start]]) -> bool:
    """Whether ranks that make these stages after the same ``manual_seed`` explains equal bits.

    Then both stages draw the same parameters in the same order, until the shorter one ends: with
    the same names but for numbers, in modules of the same class, of the same shapes, constants
    included. If frozen parameters are loaded, as under adapters, only the trained ones are drawn.
    One drawn parameter alone explains nothing, unless its name is the same too.
    """

    def is_prefix(one: Sequence[tuple[str, Start]], other: Sequence[tuple[str, Start]]) -> bool:
        pairs = list(zip(one, other, strict=False))
        alike = all(
            _NUMBER.sub("#", a) == _NUMBER.sub("#", b) and at.drawn == bt.drawn
            for (a, at), (b, bt) in pairs
        )
        drawn = [(a, b) for (a, at), (b, _) in pairs if at.digest is not None]
        return alike and (len(drawn) > 1 or any(a == b for a, b in drawn))

    trained = [[item for item in items if item[1].trained] for items in (one, other)]
    return is_prefix(one, other) or is_prefix(*trained)
