"""Initial values: digests of their bits, and the equal ones that a common seed explains."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import torch
from torch import nn

from pipegrad.model.dtensor import is_dtensor, local
from pipegrad.model.manifest import Location, ParameterEntry

_SAMPLE_NUMEL = 1024
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def fingerprint(parameter: torch.Tensor) -> tuple[str | None, str | None]:
    """Returns a digest of a sample of the bits, as a pair (varying, constant).

    If all elements are equal, `varying` is None, and otherwise `constant` is. Both are None on the
    meta device, and without elements. A single element is a constant.
    """
    # Constants are separate, because they prove nothing: for example, all biases start with zeros.
    # Only drawn values can show a tie.
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
    """Returns a digest of the initial values of a module; another seed gives another digest.

    It is "" if a parameter has no values, or is a part of one.
    """
    parameters = list(module.parameters())
    if any(parameter.is_meta or is_dtensor(parameter) for parameter in parameters):
        return ""
    return hashlib.sha256(repr([*map(fingerprint, parameters)]).encode()).hexdigest()[:16]


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have the same shape, dtype and bits: nan is nan, and 0.0 is not -0.0."""
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    if tensor.is_meta or other.is_meta:
        return tensor is other
    a, b = (local(t).detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other))
    return torch.equal(a, b)


def likely_ties(
    stages: Sequence[Sequence[ParameterEntry]], ties: Sequence[Sequence[Location]]
) -> tuple[list[list[Location]], list[list[Location]]]:
    """Returns the undeclared groups of equal parameters on different stages: (likely, alike).

    Only a tie explains a likely group. A common seed explains an alike group (see
    `_from_one_seed`), or cloned layers do: a stage holds the bits twice, under names that differ
    only in a number. Frozen parameters are in neither, because they cannot drift apart.

    Args:
        stages: For each stage its parameters, in the order of ``named_parameters``.
        ties: The declared ties, and the ties by identity.
    """
    stages_of = {location: {stage for stage, _ in tie} for tie in ties for location in tie}
    by_digest: dict[str, list[tuple[int, ParameterEntry]]] = defaultdict(list)
    for stage, entries in enumerate(stages):
        for entry in entries:
            if entry.digest is not None:
                by_digest[entry.digest].append((stage, entry))

    @cache  # because a stage has many parameters
    def are_from_one_seed(first: int, other: int) -> bool:
        untied = [[e for e in stages[s] if (s, e.name) not in stages_of] for s in (first, other)]
        return _from_one_seed(*untied)

    likely: list[list[Location]] = []
    alike: list[list[Location]] = []
    for equal in by_digest.values():
        holders = sorted({stage for stage, _ in equal})
        locations = sorted((stage, entry.name) for stage, entry in equal)
        is_tied = any(stages_of.get(location, set()).issuperset(holders) for location in locations)
        if len(holders) < 2 or is_tied or not any(entry.requires_grad for _, entry in equal):
            continue
        names = {(entry.kind, _NUMBER.sub("#", entry.name)) for _, entry in equal}
        is_cloned = len(equal) > len(holders) and len(names) == 1
        # The whole group is harmless if one pair of stages looks like two draws from one seed.
        is_seeded = any(are_from_one_seed(*pair) for pair in combinations(holders, 2))
        (alike if is_cloned or is_seeded else likely).append(locations)
    return sorted(likely), sorted(alike)


def _from_one_seed(first: Sequence[ParameterEntry], other: Sequence[ParameterEntry]) -> bool:
    """True if two stages are equal because both were made after the same ``manual_seed``.

    Then both stages draw the same parameters in the same order, until the shorter stage ends. Their
    names are equal except for numbers. The classes of their modules, their shapes and their
    constants are equal too. Under adapters, only the trained parameters need to be equal, because
    frozen ones are loaded. A single drawn parameter is no proof, unless its name is also equal.
    """

    def draw(entry: ParameterEntry) -> tuple[object, ...]:
        return _NUMBER.sub("#", entry.name), entry.kind, entry.shape, entry.digest

    def is_prefix(first: Sequence[ParameterEntry], other: Sequence[ParameterEntry]) -> bool:
        pairs = list(zip(first, other, strict=False))
        drawn = [(a.name, b.name) for a, b in pairs if a.digest is not None]
        is_proof = len(drawn) > 1 or any(a == b for a, b in drawn)
        return is_proof and all(draw(a) == draw(b) for a, b in pairs)

    trained = [[e for e in entries if e.requires_grad] for entries in (first, other)]
    return is_prefix(first, other) or is_prefix(*trained)
