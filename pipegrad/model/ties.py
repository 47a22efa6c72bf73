"""Ties: finds them by identity, reads their declarations, and refuses likely undeclared ties.

This is "Discover" in the set-up of docs/internals.md.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipegrad.errors import PlanError
from pipegrad.model.dtensor import local
from pipegrad.model.manifest import Location, ParameterEntry
from pipegrad.model.suspects import fingerprint, likely_ties, same_bits
from pipegrad.model.wrappers import fsdp_modules, unwrapped
from pipegrad.plugins.handler import matches_any

# Wrappers that add a path segment and nothing else: torch.compile, activation checkpointing, FSDP.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_TRACED_STAGE = re.compile(r"submod_pp_(\d+)")

Tied = Sequence[Sequence[str] | Mapping[int, str] | Mapping[str, str]]
"""Ties as the user declares them: names, stage -> name, or traced submodule -> name."""


class AllTies(list[Any]):
    """All ties of a model that was complete; its other parameters may start alike."""


class SharedNames(list[str]):
    """The names of one parameter in the uncut model; stages recognise it under any name.

    Attributes:
        parameter: A weak reference. A stage that was sliced out of the model holds the parameter.
        digest: Digest of its bits, to recognise copies; None if another parameter has these bits.
    """

    parameter: weakref.ref[nn.Parameter]
    digest: str | None

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # in another process it is a list of names


@dataclass(frozen=True)
class Tie:
    """A declared tie: names on any stages, or pairs of stage and name, are one parameter.

    `traced` is True for a tie of torch's tracer; see [Note: ties of the tracer]. `found` is set if
    `find_tied` has seen the parameter in this process.
    """

    names: tuple[str, ...] = ()
    locations: tuple[Location, ...] = ()
    traced: bool = False
    found: SharedNames | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return str(list(self.names) if self.names else dict(self.locations))


def find_tied(model: nn.Module) -> list[list[str]]:
    """Returns the parameters that `model` holds under several names, as lists of those names.

    Call it before the model is cut or copied, because it compares identities. Names are without
    wrapper prefixes, in the order of ``named_parameters``. Lists are in the order of their first
    name.

    In this process, stages may have other names for the parameters, because the lists also
    recognise the parameters themselves. In another process, or copied, they are only lists of
    names.

    Raises:
        PlanError: If two parameters are different views of the same memory.
    """
    named = [(plain_name(n), p) for n, p in model.named_parameters(remove_duplicate=False)]
    refuse_partly_shared(named)
    groups: dict[Hashable, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in named:
        groups[memory_of(parameter)].append((name, parameter))
    tied = [group for group in groups.values() if len(group) > 1]
    # A digest recognises a copy only if no other parameter of the model has the same bits. Read
    # only parameters of the shape of a tied parameter, because no others can have its bits.
    shapes = {group[0][1].shape for group in tied}
    first = (group[0][1] for group in groups.values())
    times = Counter(fingerprint(parameter)[0] for parameter in first if parameter.shape in shapes)
    ties: list[list[str]] = []
    for group in tied:
        parameter, digest = group[0][1], fingerprint(group[0][1])[0]
        aliases = SharedNames(name for name, _ in group)
        aliases.parameter = weakref.ref(parameter)
        aliases.digest = digest if times[digest] == 1 else None
        ties.append(aliases)
    return ties


def plain_name(name: str) -> str:
    """Returns `name` without the segments that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def declared(tied: Tied) -> tuple[Tie, ...]:
    """Returns the declared ties in one form.

    Args:
        tied: For each tie a list of names (a result of `find_tied`), a mapping stage -> name, or an
            entry of ``torch.distributed.pipelining.Pipe.replicated_params``.

    Raises:
        PlanError: If an entry is none of these.
    """
    return tuple(_tie(entry) for entry in tied)


def _tie(entry: object) -> Tie:
    names = list(entry.values()) if isinstance(entry, Mapping) else entry
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise PlanError(
            f"a tie is a list of names or a mapping stage -> name, found {entry!r}; "
            f"tied= takes a list of ties"
        )
    if isinstance(entry, Mapping):
        locations = sorted((_stage_index(stage), plain_name(name)) for stage, name in entry.items())
        return Tie(
            locations=tuple(locations), traced=any(isinstance(stage, str) for stage in entry)
        )
    found = entry if isinstance(entry, SharedNames) else None
    return Tie(names=tuple(plain_name(name) for name in names), found=found)


def _stage_index(stage: object) -> int:
    if isinstance(stage, int):
        return stage
    if traced := _TRACED_STAGE.fullmatch(str(stage)):
        return int(traced[1])
    raise PlanError(f"a tie names the stage {stage!r}: expected a number or 'submod_pp_<number>'")


def named(modules: Mapping[int, nn.Module]) -> Iterator[tuple[Location, str, nn.Parameter]]:
    """Yields location, full name and parameter for every name in every local stage, aliases too.

    Full names are names inside the `unwrapped` stage.
    """
    for stage in sorted(modules):
        inside = unwrapped(modules[stage])
        for full_name, parameter in inside.named_parameters(remove_duplicate=False):
            yield (stage, plain_name(full_name)), full_name, parameter


LocalName = tuple[Location, str, nn.Parameter]
"""Location, full name and parameter, as `named` yields them."""


def held(modules: Mapping[int, nn.Module], ties: Sequence[Tie]) -> list[set[Location]]:
    """Returns, for each tie, the locations on this rank that hold its parameter, or a copy."""
    known: dict[object, set[Location]] = defaultdict(set)  # by identity, and by digest
    for location, _, parameter in named(modules) if any(tie.found for tie in ties) else ():
        known[id(parameter)].add(location)
        known[fingerprint(parameter)[0]].add(location)
    known.pop(None, None)
    marks = [(id(t.found.parameter()), t.found.digest) if t.found else () for t in ties]
    return [{location for mark in of_tie for location in known.get(mark, ())} for of_tie in marks]


def declared_locations(tie: Tie, by_name: Mapping[str, Sequence[Location]]) -> set[Location]:
    """Returns the locations that a tie declares, of those in `by_name`."""
    by_stage = {
        (stage, name) for stage, name in tie.locations if (stage, name) in by_name.get(name, ())
    }
    return by_stage.union(*(by_name.get(name, ()) for name in tie.names))


def link_local(modules: Mapping[int, nn.Module], ties: Sequence[Tie]) -> None:
    """Makes every tie within this rank one Parameter object, the one at its lowest location.

    A tracer or a deepcopy may have made several objects. The one object is then scaled, reduced,
    clipped and updated once, and needs no collective.

    Raises:
        PlanError: If shapes, dtypes, requires_grad or bits differ, or if FSDP2 wraps one of them.
    """
    by_location = {name[0]: name for name in named(modules)}
    names = by_location.values()
    refuse_partly_shared((f"{full_name} of stage {at[0]}", p) for at, full_name, p in names)
    by_name: dict[str, list[Location]] = defaultdict(list)
    by_memory: dict[Hashable, list[Location]] = defaultdict(list)
    for location, _, parameter in names:
        by_name[location[1]].append(location)
        by_memory[memory_of(parameter), parameter.requires_grad].append(location)
    pairs = zip(ties, held(modules, ties), strict=True)
    claims = [declared_locations(tie, by_name) | same for tie, same in pairs]
    tie_of: dict[Location, Tie] = {}
    for tie, claim in zip(ties, claims, strict=True):
        if tie.traced:
            claim.update(_unlisted_names([by_location[location] for location in claim], names))
        tie_of.update(dict.fromkeys(claim, tie))
    wrapped = {stage for stage, parts in fsdp_modules(modules).items() if parts}
    # Unite all groups before anything is replaced, because a tie by name and a tie by memory may
    # have a location in common, and must then become one object.
    order = {location: index for index, location in enumerate(by_location)}
    for group in united([*by_memory.values(), *claims]):
        first, *others = (by_location[at] for at in sorted(group, key=order.__getitem__))
        for other in others:
            if other[2] is not first[2]:
                _check_link(tie_of.get(other[0], "by memory"), first, other, wrapped)
                owner_name, _, attribute = other[1].rpartition(".")
                owner = unwrapped(modules[other[0][0]]).get_submodule(owner_name)
                setattr(owner, attribute, first[2])


def _check_link(tie: object, first: LocalName, other: LocalName, wrapped: set[int]) -> None:
    """Refuses copies on one rank that cannot become one parameter."""
    (first_location, _, parameter), (location, _, copy) = first, other
    if _traits(copy) != _traits(parameter):
        raise PlanError(
            f"tie {tie}: {first_location[1]!r} on stage {first_location[0]} is "
            f"{_traits(parameter)}, "
            f"{location[1]!r} on stage {location[0]} is {_traits(copy)}; one parameter "
            f"cannot be both"
        )
    if not wrapped.isdisjoint((location[0], first_location[0])):
        raise PlanError(
            f"tie {tie}: {first_location[1]!r} on stage {first_location[0]} and {location[1]!r} on "
            f"stage {location[0]} are on one rank, and fully_shard has made two parameters "
            f"of them; place these stages on two ranks, or make them one stage, and one "
            f"group: fully_shard([module_a, module_b])"
        )
    if not same_bits(parameter, copy) and bool(copy.detach().count_nonzero()):
        raise PlanError(different_starts(tie, first_location, location))


def different_starts(tie: object, first: Location, other: Location) -> str:
    """Returns the message for two locations of a tie that start with different bits."""
    return (
        f"tie {tie}: {first[1]!r} on stage {first[0]} and {other[1]!r} on stage {other[0]} start "
        f"with different bits, so one of them would be overwritten. If they are two parameters, "
        f"correct the tie: {{stage: name, ...}} names exactly what is tied, also where stages "
        f"number their layers anew. If they are one parameter, give both the same start: make "
        f"the model after the same torch.manual_seed on every rank, or load the same checkpoint; "
        f"or fill the copy on stage {other[0]} with zeros, then it takes the bits of stage "
        f"{first[0]}"
    )


# [Note: ties of the tracer] A stage may hold a tied parameter under several names. torch's Pipe
# copies only the parameter of the first name, and lists only that name. The other names still mean
# the original parameter. Some are used in that stage, and some are not. They are recognised by
# their bits, unless all elements are equal.


def _unlisted_names(listed: Iterable[LocalName], names: Iterable[LocalName]) -> set[Location]:
    """Returns the copies of a traced tie's parameter, in the stages that the tie names."""
    originals = {location[0]: parameter for location, _, parameter in listed}
    return {
        location
        for location, _, parameter in names
        if (original := originals.get(location[0])) is not None
        and parameter.requires_grad == original.requires_grad
        and same_bits(parameter, original)
        and fingerprint(parameter)[0] is not None
    }


def _traits(parameter: nn.Parameter) -> str:
    trained = "trained" if parameter.requires_grad else "frozen"
    return f"{tuple(parameter.shape)} {parameter.dtype} {trained}"


def united(groups: Iterable[Iterable[Location]]) -> list[list[Location]]:
    """Returns groups of at least two locations; groups with a common location become one."""
    group_of: dict[Location, list[Location]] = {}
    for group in groups:
        merged = list(dict.fromkeys(x for at in group for x in group_of.get(at, [at])))
        group_of.update(dict.fromkeys(merged, merged))
    return [group for group in {id(g): g for g in group_of.values()}.values() if len(group) > 1]


def refuse_likely_ties(
    stages: Sequence[Sequence[ParameterEntry]],
    ties: Sequence[Sequence[Location]],
    allow_unsynced: Sequence[str],
) -> None:
    """Refuses equal parameters without a declared tie; only warns if a seed explains them.

    Raises:
        PlanError: If there are such parameters. It lists them, with the declaration to write.
    """
    # A likely tie stops the job, because a missing one makes the copies drift apart without any
    # error. If a seed explains the equal values, most likely nothing is tied.
    likely, alike = likely_ties(stages, ties)
    likely = [
        locations
        for locations in likely
        if not matches_any(allow_unsynced, [n for _, n in locations])
    ]
    if likely:
        lines = "\n".join(f"  {dict(locations)}" for locations in likely)
        raise PlanError(
            f"parameters on different stages start with the same bits, but nobody declared them "
            f"tied. Declare each as tied=[{{stage: name, ...}}], or name it in allow_unsynced if "
            f"they only look alike:\n{lines}"
        )
    if alike:
        warnings.warn(
            f"stages start with equal parameters, as from one seed on every rank, for example "
            f"{dict(alike[0])}: nothing is taken for tied",
            stacklevel=3,
        )


def memory_of(parameter: nn.Parameter) -> Hashable:
    """Returns a key that is equal for two parameters if they are the same view of one memory.

    Without memory (meta device, no elements), only the object itself has the key.
    """
    tensor = local(parameter)
    layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return (tensor.device, address, layout) if (address := _address(tensor)) else id(parameter)


def refuse_partly_shared(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters that are different views of the same memory, as a transpose or a chunk.

    Raises:
        PlanError: If there are such parameters. It names two of them.
    """
    different = {memory_of(parameter): (name, parameter) for name, parameter in parameters}
    views = [(n, view) for n, p in different.values() if _address(view := local(p).detach())]
    # Visit views by their first byte, because few pairs are then compared byte by byte: only views
    # that have not ended yet can overlap the next view.
    open_views: list[tuple[str, torch.Tensor]] = []
    for name, view in sorted(views, key=lambda v: (str(v[1].device), v[1].data_ptr())):
        open_views = [
            (n, v) for n, v in open_views if v.device == view.device and _end(v) > view.data_ptr()
        ]
        for other_name, other in open_views:
            if _overlap(other, view):
                raise PlanError(
                    f"parameters {other_name!r} {tuple(other.shape)} and {name!r} "
                    f"{tuple(view.shape)} are different views of the same memory, as a "
                    f"transpose or a chunk is: they cannot be tied across stages. Make them "
                    f"one nn.Parameter, and take the view in forward()"
                )
        open_views.append((name, view))


def _overlap(first: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two different views have a byte in common."""
    # Draw both views on a mask of bytes, because two ranges of bytes may overlap without a common
    # byte, for example two columns of a matrix.
    begin = min(first.data_ptr(), other.data_ptr())
    touched = torch.zeros(max(_end(first), _end(other)) - begin, dtype=torch.bool)
    masks = [
        touched.as_strided(
            (*view.shape, view.itemsize),
            (*(stride * view.itemsize for stride in view.stride()), 1),
            view.data_ptr() - begin,
        )
        for view in (first, other)
    ]
    masks[0].fill_(True)
    return bool(masks[1].any())


def _end(view: torch.Tensor) -> int:
    """Returns the address after the last byte of a view."""
    reach = sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
    return view.data_ptr() + int(reach + 1) * view.itemsize


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of the first byte; 0 without memory."""
    try:  # a view of memory that was freed has an address, but its storage has none
        return tensor.data_ptr() if tensor.untyped_storage().data_ptr() else 0
    except RuntimeError:  # some kinds of tensors have no storage
        return 0
