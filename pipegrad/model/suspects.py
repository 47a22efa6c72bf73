"""Initial values: digests of their bits, and the equal ones that a common seed explains."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipegrad.model.dtensor import is_dtensor, local

_SAMPLE_NUMEL, _BEGIN_NUMEL = 1024, 64
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
        digest: Of a sample of its bits; None if all elements are equal, or unknown.
    """

    kind: str
    shape: tuple[int, ...]
    trained: bool
    digest: str | None

    @property
    def drawn(self) -> tuple[str, tuple[int, ...], str | None]:
        """All that follows from the code and the seed: everything but whether it is trained."""
        return self.kind, self.shape, self.digest


def fingerprint(parameter: torch.Tensor) -> tuple[str | None, str | None]:
    """Returns a digest of a sample of the bits, as a pair (varying, constant).

    If all elements are equal, `varying` is None, and otherwise `constant` is. Both are None on the
    meta device, and without elements. A single element is a constant.
    """
    # Constants are apart because they prove nothing: all biases start with zeros. Only drawn values
    # can show a tie.
    parameter = local(parameter).detach()
    if parameter.is_meta or parameter.numel() == 0:
        return None, None
    flat = parameter.reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLE_NUMEL)][:_SAMPLE_NUMEL].contiguous().cpu()
    elements = sample.view(torch.uint8).view(sample.numel(), -1)
    if bool((elements == elements[0]).all()):
        return None, bytes(elements[0].tolist()).hex()
    return hashlib.sha256(elements.numpy().tobytes()).hexdigest()[:16], None


def begin_of(module: nn.Module) -> str:
    """Returns a digest of how each parameter of a module begins: another seed has another one.

    It is "" if a parameter has no values, or is a part of one.
    """
    digest = hashlib.sha256()
    for parameter in module.parameters():
        if parameter.is_meta or is_dtensor(parameter):
            return ""
        row = parameter.detach()
        while row.dim() > 1 and row.numel():  # a reshape might copy all of it
            row = row[0]
        begin = row.reshape(-1)[:_BEGIN_NUMEL].contiguous().cpu()
        digest.update(begin.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def is_zero(constant: str | None) -> bool:
    """Whether the constant of a `fingerprint` is zero."""
    return constant is not None and not constant.strip("0")


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits: nan is nan, and 0.0 is not -0.0."""
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    if tensor.is_meta or other.is_meta:
        return tensor is other
    a, b = (local(t).detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other))
    return torch.equal(a, b)


def likely_ties(
    starts: Mapping[Location, Start], ties: Sequence[Sequence[Location]]
) -> tuple[list[list[Location]], list[list[Location]]]:
    """Returns the undeclared groups of equal parameters on different stages: (likely, alike).

    Only a tie explains a likely group. A common seed explains an alike group (see
    `_from_one_seed`), or cloned layers do: a stage holds the bits twice, under names that differ
    only in a number. Frozen parameters are in neither, since they cannot drift apart.

    Args:
        starts: Location -> how it starts, in each stage in the order of ``named_parameters``.
        ties: The declared ties, and those by identity.
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
        is_tied = any(holders <= stages_of.get(location, set()) for location in locations)
        is_trained = any(starts[location].trained for location in locations)
        if len(holders) < 2 or is_tied or not is_trained:
            continue
        # If one pair of stages looks like two draws from one seed, the whole group is harmless.
        # Each pair is compared once, since a stage has many parameters.
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


def _from_one_seed(first: Sequence[tuple[str, Start]], other: Sequence[tuple[str, Start]]) -> bool:
    """Whether two stages are equal because both were made after the same ``manual_seed``.

    Then both stages draw the same parameters in the same order, until the shorter stage ends. Their
    names are equal except for numbers. The classes of their modules, their shapes and their
    constants are equal too. Under adapters, frozen parameters are loaded, so only the trained ones
    need to be equal. A single drawn parameter is no proof, unless its name is also equal.
    """

    def is_prefix(first: Sequence[tuple[str, Start]], other: Sequence[tuple[str, Start]]) -> bool:
        pairs = list(zip(first, other, strict=False))
        alike = all(
            _NUMBER.sub("#", a) == _NUMBER.sub("#", b) and at.drawn == bt.drawn
            for (a, at), (b, bt) in pairs
        )
        drawn = [(a, b) for (a, at), (b, _) in pairs if at.digest is not None]
        return alike and (len(drawn) > 1 or any(a == b for a, b in drawn))

    trained = [[item for item in items if item[1].trained] for items in (first, other)]
    return is_prefix(first, other) or is_prefix(*trained)
