"""Local shards: what a rank has of a DTensor parameter, and how all of it lies over ranks.

A DTensor's ranks reduce among themselves: FSDP2 over its mesh, tensor parallelism in its own
computes. What is left to pipegrad are other dimensions, along which ranks of one coordinate hold
the same part. So everything here is about parts, and nothing communicates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipegrad.model.wrappers import is_imported_kind

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_PLAIN = (torch.Tensor, nn.Parameter, type(None))


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether a tensor is a DTensor. Where nobody has imported DTensor, which is slow, none is."""
    if type(tensor) in _PLAIN:  # asked some times for each gradient and step
        return False
    return is_imported_kind(tensor, "torch.distributed.tensor", "DTensor")


@dataclass(frozen=True)
class Layout:
    """How a DTensor lies over ranks: the same on each of them, and on whatever is tied to it.

    Attributes:
        shape: Of the whole.
        mesh: Its mesh dimensions, name and size.
        placements: Of the whole along each of them, in torch's words.
        replicated: Along which of them it is the same everywhere.
    """

    shape: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    placements: tuple[str, ...]
    replicated: tuple[bool, ...]

    def __str__(self) -> str:
        dims = zip(self.placements, self.mesh, strict=True)
        return f"{self.shape} by " + ", ".join(
            f"{placement} over {name or 'a dimension'} of {size}"
            for placement, (name, size) in dims
        )


@dataclass(frozen=True)
class Shard:
    """What one rank has of a DTensor.

    Attributes:
        shape: Of its part; the last ranks may have less than others, or nothing.
        coordinate: Where the rank is in the DTensor's mesh.
        members: Global ranks of that mesh.
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    members: tuple[int, ...]

    def is_counted(self, layout: Layout) -> bool:
        """Whether this is the part that counts, of those that are the same."""
        here = zip(self.coordinate, layout.replicated, strict=True)
        return not any(at for at, replicated in here if replicated)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor, its memory; any other tensor is its own."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def layout_of(parameter: torch.Tensor) -> Layout | None:
    """Returns how a parameter lies over ranks; None if it is not a DTensor."""
    if not is_dtensor(parameter):
        return None
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return Layout(
        shape=tuple(parameter.shape),
        mesh=tuple(zip(names, mesh.shape, strict=True)),
        placements=tuple(map(repr, parameter.placements)),
        replicated=tuple(placement.is_replicate() for placement in parameter.placements),
    )


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Returns what this rank has of a parameter; None if it is not a DTensor."""
    if not is_dtensor(parameter):
        return None
    mesh = parameter.device_mesh
    return Shard(
        shape=tuple(local(parameter).shape),
        coordinate=tuple(mesh.get_coordinate() or ()),
        members=tuple(mesh.mesh.flatten().tolist()),
    )


def largest(shards: Iterable[Shard]) -> tuple[int, ...]:
    """Returns the shape of which every part is the beginning."""
    return tuple(map(max, zip(*(shard.shape for shard in shards), strict=True)))


def has_terms(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient is a DTensor that its mesh has not summed yet.

    Backward leaves it so where there was no gradient to add to.
    """
    return is_dtensor(gradient) and any(p.is_partial() for p in gradient.placements)


def sum_terms(parameter: torch.Tensor) -> None:
    """Sums the gradient of a DTensor over its mesh, so that it lies as its parameter does.

    Sync: on the current stream; all ranks of the mesh do so, in the order of their parameters.
    """
    assert is_dtensor(parameter)
    assert is_dtensor(parameter.grad)
    pairs = zip(parameter.grad.placements, parameter.placements, strict=True)
    wanted = [meant if found.is_partial() else found for found, meant in pairs]
    with torch.no_grad():
        parameter.grad = parameter.grad.redistribute(placements=wanted)
