"""Discover: which parameters are one parameter, by identity, by declaration, or by suspicion."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipegrad.errors import PlanError
from pipegrad.gradients.shards import fsdp_modules

# Wrappers that add a path segment and nothing else: torch.compile, activation checkpointing, FSDP.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_TRACED_STAGE = re.compile(r"submod_pp_(\d+)")

Place = tuple[int, str]
"""A stage, and a parameter's name in that stage."""

Shared = Sequence[Sequence[str] | Mapping[int, str] | Mapping[str, str]]
"""Ties as the user declares them: names, stage -> name, or traced submodule -> name."""


@dataclass(frozen=True)
class Tie:
    """A declaration: these are one parameter, by name anywhere, or by stage and name.

    `traced` if it is torch's, see [Note: what the tracer tells].
    """

    names: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    traced: bool = False

    def __str__(self) -> str:
        return str(list(self.names) if self.names else dict(self.places))

    def claims(self, place: Place) -> bool:
        """Whether this declaration means the parameter at `place`."""
        return place[1] in self.names or place in self.places


def find_shared(model: nn.Module) -> list[list[str]]:
    """Returns the parameters that `model` holds under several names, as lists of those names.

    By identity, so it must see the model before it is cut or copied. Names are without wrapper
    prefixes, in the order of ``named_parameters``; lists in the order of their first name.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
    return [aliases for aliases in names.values() if len(aliases) > 1]


def plain_name(name: str) -> str:
    """Returns `name` without the segments that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def declared(shared: Shared) -> tuple[Tie, ...]:
    """Returns the declarations in one form, whatever form the user chose.

    Args:
        shared: For each tie a list of names (as `find_shared` gives), a mapping stage -> name, or
            an entry of ``torch.distributed.pipelining.Pipe.replicated_params``.

    Raises:
        PlanError: If an entry is none of these.
    """
    return tuple(_tie(entry) for entry in shared)


def _tie(entry: object) -> Tie:
    names = list(entry.values()) if isinstance(entry, Mapping) else entry
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise PlanError(
            f"a tie is a list of names or a mapping stage -> name, found {entry!r}; "
            f"shared= takes a list of ties"
        )
    if isinstance(entry, Mapping):
        places = sorted((_stage_index(stage), plain_name(name)) for stage, name in entry.items())
        return Tie(places=tuple(places), traced=any(isinstance(stage, str) for stage in entry))
    return Tie(names=tuple(plain_name(name) for name in names))


def _stage_index(stage: object) -> int:
    if isinstance(stage, int):
        return stage
    traced = _TRACED_STAGE.fullmatch(str(stage))
    if traced is None:
        raise PlanError(
            f"a tie names the stage {stage!r}: expected a number or 'submod_pp_<number>'"
        )
    return int(traced.group(1))


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside a DistributedDataParallel, or `module` itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def named(modules: Mapping[int, nn.Module]) -> Iterator[tuple[Place, str, nn.Parameter]]:
    """Yields place, full name and parameter of every name in every local stage, aliases too.

    Full names are those inside the `unwrapped` stage.
    """
    for stage in sorted(modules):
        inside = unwrapped(modules[stage])
        for full_name, parameter in inside.named_parameters(remove_duplicate=False):
            yield (stage, plain_name(full_name)), full_name, parameter


def link_local(modules: Mapping[int, nn.Module], ties: Sequence[Tie]) -> None:
    """Makes every tie within this rank one Parameter object: the one at its lowest place.

    A tracer copies them apart, a cut by deepcopy may too. One object is then scaled, reduced,
    clipped and stepped once, and costs no collective.

    Raises:
        PlanError: If their shapes, dtypes or requires_grad differ, or FSDP2 keeps them apart.
    """
    wrapped = {stage for stage, parts in fsdp_modules(modules).items() if parts}
    for tie in ties:
        found = list(named(modules))
        copies = [(place, full, p) for place, full, p in found if tie.claims(place)]
        copies += _leftovers(tie, found)
        for place, full_name, parameter in copies[1:]:
            first_place, _, first = copies[0]
            if parameter is first:
                continue
            if _traits(parameter) != _traits(first):
                raise PlanError(
                    f"tie {tie}: {first_place[1]!r} on stage {first_place[0]} is {_traits(first)}, "
                    f"{place[1]!r} on stage {place[0]} is {_traits(parameter)}; one parameter "
                    f"cannot be both"
                )
            if not wrapped.isdisjoint((place[0], first_place[0])):
                raise PlanError(
                    f"tie {tie}: {first_place[1]!r} on stage {first_place[0]} and {place[1]!r} on "
                    f"stage {place[0]} are on one rank, and fully_shard has made two parameters "
                    f"of them; place these stages on two ranks, or make them one stage, and one "
                    f"group: fully_shard([module_a, module_b])"
                )
            owner_name, _, attribute = full_name.rpartition(".")
            owner = unwrapped(modules[place[0]]).get_submodule(owner_name)
            setattr(owner, attribute, first)


# [Note: what the tracer tells] Where a stage holds a tied parameter under several names, Pipe
# copies and tells only the first of them. The others still are the original: uses of it in that
# stage, and names that nothing uses. Their bits give them away, unless a constant explains those.


def _leftovers(
    tie: Tie, found: Sequence[tuple[Place, str, nn.Parameter]]
) -> list[tuple[Place, str, nn.Parameter]]:
    """Returns what else is the parameter of a traced tie, in the stages that it names."""
    copies = {place[0]: p for place, _, p in found if tie.traced and tie.claims(place)}
    return [
        (place, full, p)
        for place, full, p in found
        if place[0] in copies and not tie.claims(place) and _same_bits(p, copies[place[0]])
    ]


def _same_bits(one: nn.Parameter, other: nn.Parameter) -> bool:
    if _traits(one) != _traits(other) or one.is_meta or other.is_meta or one.numel() < 2:
        return False
    return torch.equal(one, other) and not bool((one == one.flatten()[0]).all())


def _traits(parameter: nn.Parameter) -> str:
    trained = "trained" if parameter.requires_grad else "frozen"
    return f"{tuple(parameter.shape)} {parameter.dtype} {trained}"


def matches_any(patterns: Sequence[str], names: Iterable[str]) -> bool:
    """Whether one of `names` matches one of the shell-style `patterns`."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def likely_ties(
    fingerprints: Mapping[Place, str], groups: Sequence[frozenset[Place]]
) -> tuple[list[list[Place]], list[list[Place]]]:
    """Returns the undeclared groups of equal parameters on different stages: (likely, alike).

    Likely are groups that only a tie explains. Alike are those that a common seed explains: one of
    their stages equals another as a whole, or holds the same bits twice (cloned layers).

    Args:
        fingerprints: Digest of each parameter with non-constant bits, by canonical place.
        groups: The ties that are known, as sets of places.
    """
    by_print: dict[str, list[Place]] = {}
    for place in sorted(fingerprints):
        by_print.setdefault(fingerprints[place], []).append(place)
    stages = {stage for stage, _ in fingerprints}
    prints = {s: frozenset(f for (at, _), f in fingerprints.items() if at == s) for s in stages}
    likely: list[list[Place]] = []
    alike: list[list[Place]] = []
    for places in by_print.values():
        holders = {stage for stage, _ in places}
        known = any(holders <= {stage for stage, _ in g} and g & set(places) for g in groups)
        if len(holders) < 2 or known:
            continue
        cloned = len(places) > len(holders)
        whole = any(
            prints[a] <= prints[b] for a in sorted(holders) for b in sorted(holders) if a != b
        )
        (alike if cloned or whole else likely).append(places)
    return likely, alike


def refuse_likely_ties(
    fingerprints: Mapping[Place, str],
    ties: Sequence[Sequence[Place]],
    allow_unsynced: Sequence[str],
) -> None:
    """Refuses equal parameters that nobody declared tied; warns of those that a seed explains.

    Raises:
        PlanError: Lists them, with what to write.
    """
    likely, alike = likely_ties(fingerprints, [frozenset(tie) for tie in ties])
    likely = [
        places for places in likely if not matches_any(allow_unsynced, [n for _, n in places])
    ]
    if likely:
        lines = "\n".join(f"  {dict(places)}" for places in likely)
        raise PlanError(
            f"parameters on different stages start with the same bits, but nobody declared them "
            f"tied. Declare each as shared=[{{stage: name, ...}}], or name it in allow_unsynced if "
            f"they only look alike:\n{lines}"
        )
    if alike:
        warnings.warn(
            f"stages start with equal parameters, as from one seed on every rank, for example "
            f"{dict(alike[0])}: nothing is taken for tied",
            stacklevel=3,
        )
