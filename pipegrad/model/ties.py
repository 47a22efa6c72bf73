"""Discover: which parameters are one parameter, by identity, by declaration, or by suspicion."""

from __future__ import annotations

import re
import warnings
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from pipegrad.errors import PlanError
from pipegrad.model.memory import memory_of, refuse_partly_shared
from pipegrad.model.suspects import Location, Start, fingerprint, likely_ties, same_bits
from pipegrad.model.wrappers import fsdp_modules, unwrapped

# Wrappers that add a path segment and nothing else: torch.compile, activation checkpointing, FSDP.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_TRACED_STAGE = re.compile(r"submod_pp_(\d+)")

Tied = Sequence[Sequence[str] | Mapping[int, str] | Mapping[str, str]]
"""Ties as the user declares them: names, stage -> name, or traced submodule -> name."""


class Origin(NamedTuple):
    """A parameter of the uncut model: recognised later, in stages, under whatever name.

    Attributes:
        parameter: Weak; a stage that was sliced out of the model still holds it.
        digest: Of its bits, for copies of it; None if no bits tell it from all others.
    """

    parameter: weakref.ref[nn.Parameter]
    digest: str | None


class SharedNames(list[str]):
    """The names of one parameter in the uncut model, and how to recognise it; else a list."""

    origin: Origin | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # what another process gets are names


@dataclass(frozen=True)
class Tie:
    """A declaration: these are one parameter, by name anywhere, or by stage and name.

    `traced` if it is torch's, see [Note: what the tracer tells]; `origin` if `find_tied` has seen
    the parameter in this process.
    """

    names: tuple[str, ...] = ()
    locations: tuple[Location, ...] = ()
    traced: bool = False
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return str(list(self.names) if self.names else dict(self.locations))

    def claims(self, location: Location) -> bool:
        """Whether this declaration means the parameter at `place`."""
        return location[1] in self.names or location in self.locations


def find_tied(model: nn.Module) -> list[list[str]]:
    """Returns the parameters that `model` holds under several names, as lists of those names.

    By identity, so it must see the model before it is cut or copied. Names are without wrapper
    prefixes, in the order of ``named_parameters``; lists in the order of their first name.

    In this process the lists also recognise the parameters themselves, so stages may have other
    names for them. Sent to another process, or copied, they are names and nothing else.

    Raises:
        PlanError: If two parameters are different views of the same memory.
    """
    names: dict[Hashable, list[str]] = {}
    parameters: dict[Hashable, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = memory_of(parameter)
        names.setdefault(key, []).append(plain_name(name))
        parameters.setdefault(key, parameter)
    refuse_partly_shared((names[key][0], parameter) for key, parameter in parameters.items())
    tied = {key: p for key, p in parameters.items() if len(names[key]) > 1}
    shapes = {parameter.shape for parameter in tied.values()}
    digests = {k: fingerprint(p)[0] for k, p in parameters.items() if p.shape in shapes}
    times = Counter(digests.values())
    found: list[list[str]] = []
    for key, parameter in tied.items():
        aliases = SharedNames(names[key])
        is_unique = times[digests[key]] == 1
        aliases.origin = Origin(weakref.ref(parameter), digests[key] if is_unique else None)
        found.append(aliases)
    return found


def plain_name(name: str) -> str:
    """Returns `name` without the segments that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def declared(tied: Tied) -> tuple[Tie, ...]:
    """Returns the declarations in one form, whatever form the user chose.

    Args:
        tied: For each tie a list of names (as `find_tied` gives), a mapping stage -> name, or
            an entry of ``torch.distributed.pipelining.Pipe.replicated_params``.

    Raises:
        PlanError: If an entry is none of these.
    """
    return tuple(_tie(entry) for entry in tied)


def _tie(entry: object) -> Tie:
    names = list(entry.values()) if isinstance(entry, Mapping) else entry
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise PlanError(
            f"a tie is a list of names or a mapping stage -> name, found {entry!r}; "
            f"shared= takes a list of ties"
        )
    if isinstance(entry, Mapping):
        locations = sorted((_stage_index(stage), plain_name(name)) for stage, name in entry.items())
        return Tie(
            locations=tuple(locations), traced=any(isinstance(stage, str) for stage in entry)
        )
    origin = entry.origin if isinstance(entry, SharedNames) else None
    return Tie(names=tuple(plain_name(name) for name in names), origin=origin)


def _stage_index(stage: object) -> int:
    if isinstance(stage, int):
        return stage
    traced = _TRACED_STAGE.fullmatch(str(stage))
    if traced is None:
        raise PlanError(
            f"a tie names the stage {stage!r}: expected a number or 'submod_pp_<number>'"
        )
    return int(traced.group(1))


def named(modules: Mapping[int, nn.Module]) -> Iterator[tuple[Location, str, nn.Parameter]]:
    """Yields place, full name and parameter of every name in every local stage, aliases too.

    Full names are those inside the `unwrapped` stage.
    """
    for stage in sorted(modules):
        inside = unwrapped(modules[stage])
        for full_name, parameter in inside.named_parameters(remove_duplicate=False):
            yield (stage, plain_name(full_name)), full_name, parameter


LocalName = tuple[Location, str, nn.Parameter]
"""Place, full name and parameter, as `named` yields them."""


def held(modules: Mapping[int, nn.Module], ties: Sequence[Tie]) -> list[list[Location]]:
    """Returns for each tie the places on this rank that hold its `Origin`, or a copy of it."""
    if not any(tie.origin for tie in ties):
        return [[] for _ in ties]
    by_object: dict[int, list[Location]] = {}
    by_digest: dict[str | None, list[Location]] = {}
    for location, _, parameter in named(modules):
        by_object.setdefault(id(parameter), []).append(location)
    digests = {id(p): fingerprint(p)[0] for _, _, p in named(modules)}
    for key, locations in by_object.items():
        by_digest.setdefault(digests[key], []).extend(locations)
    found: list[list[Location]] = []
    for origin in (tie.origin for tie in ties):
        locations = by_object.get(id(origin.parameter()), []) if origin else []
        copies = by_digest.get(origin.digest, []) if origin and origin.digest else []
        found.append(list(dict.fromkeys([*locations, *copies])))
    return found


def link_local(modules: Mapping[int, nn.Module], ties: Sequence[Tie]) -> None:
    """Makes every tie within this rank one Parameter object: the one at its lowest place.

    A tracer copies them apart, a cut by deepcopy may too. One object is then scaled, reduced,
    clipped and stepped once, and costs no collective.

    Raises:
        PlanError: If their shapes, dtypes, requires_grad or bits differ, or FSDP2 keeps them apart.
    """
    found = {location: (location, full, p) for location, full, p in named(modules)}
    refuse_partly_shared(
        {memory_of(p): (f"{full} of stage {at[0]}", p) for at, full, p in found.values()}.values()
    )
    by_name: dict[str, list[Location]] = {}
    by_memory: dict[Hashable, list[Location]] = {}
    for location, _, parameter in found.values():
        by_name.setdefault(location[1], []).append(location)
        by_memory.setdefault((memory_of(parameter), parameter.requires_grad), []).append(location)
    tie_of: dict[Location, Tie] = {}
    groups = list(by_memory.values())
    for tie, same in zip(ties, held(modules, ties), strict=True):
        locations = [location for name in tie.names for location in by_name.get(name, ())]
        locations += [location for location in tie.locations if location in found]
        locations += _leftovers(tie, found) if tie.traced else []
        groups.append([*locations, *same])
        tie_of.update(dict.fromkeys(groups[-1], tie))
    wrapped = {stage for stage, parts in fsdp_modules(modules).items() if parts}
    order = {location: index for index, location in enumerate(found)}
    for group in united(groups):
        first, *others = (found[location] for location in sorted(group, key=order.__getitem__))
        for other in others:
            if other[2] is not first[2]:
                _check_link(tie_of.get(other[0], "by memory"), first, other, wrapped)
                owner_name, _, attribute = other[1].rpartition(".")
                owner = unwrapped(modules[other[0][0]]).get_submodule(owner_name)
                setattr(owner, attribute, first[2])


def _check_link(tie: object, first: LocalName, other: LocalName, wrapped: set[int]) -> None:
    """Refuses copies on one rank that cannot become one parameter, or should not."""
    (first_place, _, one), (location, _, two) = first, other
    if _traits(two) != _traits(one):
        raise PlanError(
            f"tie {tie}: {first_place[1]!r} on stage {first_place[0]} is {_traits(one)}, "
            f"{location[1]!r} on stage {location[0]} is {_traits(two)}; one parameter "
            f"cannot be both"
        )
    if not wrapped.isdisjoint((location[0], first_place[0])):
        raise PlanError(
            f"tie {tie}: {first_place[1]!r} on stage {first_place[0]} and {location[1]!r} on "
            f"stage {location[0]} are on one rank, and fully_shard has made two parameters "
            f"of them; place these stages on two ranks, or make them one stage, and one "
            f"group: fully_shard([module_a, module_b])"
        )
    if not same_bits(one, two) and bool(two.detach().count_nonzero()):
        raise PlanError(different_starts(tie, first_place, location))


def different_starts(tie: object, first: Location, other: Location) -> str:
    """Returns what to say of two places of a tie that start with different bits."""
    return (
        f"tie {tie}: {first[1]!r} on stage {first[0]} and {other[1]!r} on stage {other[0]} start "
        f"with different bits, so one of them would be overwritten. If they are two parameters, "
        f"correct the tie: {{stage: name, ...}} names exactly what is tied, also where stages "
        f"number their layers anew. If they are one parameter, give both the same start: make "
        f"the model after the same torch.manual_seed on every rank, or load the same checkpoint; "
        f"or fill the copy on stage {other[0]} with zeros, then it takes the bits of stage "
        f"{first[0]}"
    )


# [Note: what the tracer tells] Where a stage holds a tied parameter under several names, Pipe
# copies and tells only the first of them. The others still are the original: uses of it in that
# stage, and names that nothing uses. Their bits give them away, unless a constant explains those.


def _leftovers(tie: Tie, found: Mapping[Location, LocalName]) -> list[Location]:
    """Returns what else is the parameter of a traced tie, in the stages that it names."""
    copies = {location[0]: found[location][2] for location in tie.locations if location in found}
    return [
        location
        for location, _, p in found.values()
        if location[0] in copies and not tie.claims(location) and _is_copy(p, copies[location[0]])
    ]


def _is_copy(one: nn.Parameter, other: nn.Parameter) -> bool:
    if _traits(one) != _traits(other) or one.is_meta or other.is_meta or one.numel() < 2:
        return False
    return same_bits(one, other) and fingerprint(one)[0] is not None


def _traits(parameter: nn.Parameter) -> str:
    trained = "trained" if parameter.requires_grad else "frozen"
    return f"{tuple(parameter.shape)} {parameter.dtype} {trained}"


def united(groups: Iterable[Iterable[Location]]) -> list[list[Location]]:
    """Returns the groups of more than one place, those that have a place in common as one."""
    root: dict[Location, Location] = {}

    def find(location: Location) -> Location:
        while (above := root.setdefault(location, location)) != location:
            root[location] = root[above]
            location = above
        return location

    for group in groups:
        locations = list(group)
        for location in locations:
            root[find(location)] = find(locations[0])
    members: dict[Location, list[Location]] = {}
    for location in root:
        members.setdefault(find(location), []).append(location)
    return [locations for locations in members.values() if len(locations) > 1]


def matches_any(patterns: Sequence[str], names: Iterable[str]) -> bool:
    """Whether one of `names` matches one of the shell-style `patterns`."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def refuse_likely_ties(
    starts: Mapping[Location, Start],
    ties: Sequence[Sequence[Location]],
    allow_unsynced: Sequence[str],
) -> None:
    """Refuses equal parameters that nobody declared tied; warns of those that a seed explains.

    Raises:
        PlanError: Lists them, with what to write.
    """
    likely, alike = likely_ties(starts, ties)
    likely = [
        locations
        for locations in likely
        if not matches_any(allow_unsynced, [n for _, n in locations])
    ]
    if likely:
        lines = "\n".join(f"  {dict(locations)}" for locations in likely)
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
