"""Local shards: the part of a DTensor parameter that a rank holds, and the layout of the whole.

The ranks of a DTensor's mesh reduce among themselves: FSDP2 over its mesh, tensor parallelism in
its own computes. This file only looks at local parts, because pipegrad reduces along the other
dimensions, along which ranks of the same coordinate hold the same part. Only
`redistribute_gradient` communicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipegrad.model.wrappers import is_imported_kind

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

PLAIN = (torch.Tensor, nn.Parameter, type(None))


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """True if a tensor is a DTensor. It does not import DTensor, because that is slow."""
    if type(tensor) in PLAIN:  # a short cut: this runs several times for each gradient and step
        return False
    return is_imported_kind(tensor, "torch.distributed.tensor", "DTensor")


@dataclass(frozen=True)
class Layout:
    """The layout of a DTensor over ranks, equal on all its ranks, and on its ties.

    Attributes:
        shape: Shape of the whole tensor.
        mesh: Name and size of each mesh dimension.
        placements: torch's placement along each mesh dimension, as text.
        replicated: For each mesh dimension, True if all ranks along it hold the same part.
    """

    shape: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    placements: tuple[str, ...]
    replicated: tuple[bool, ...]

    def __str__(self) -> str:
        return f"{self.shape} by " + ", ".join(
            f"{placement} over {name or 'a dimension'} of {size}"
            for placement, (name, size) in zip(self.placements, self.mesh, strict=True)
        )


@dataclass(frozen=True)
class Shard:
    """The part of a DTensor that one rank holds.

    Attributes:
        shape: Shape of the part. The last ranks may hold less than others, or nothing.
        coordinate: Coordinate of the rank in the DTensor's mesh.
        members: Global ranks of that mesh.
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    members: tuple[int, ...]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor, without a copy; any other tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def described(parameter: torch.Tensor) -> tuple[Layout, Shard] | tuple[None, None]:
    """Returns the layout of a DTensor, and this rank's part of it; Nones for other tensors."""
    if not is_dtensor(parameter):
        return None, None
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    layout = Layout(
        shape=tuple(parameter.shape),
        mesh=tuple(zip(names, mesh.shape, strict=True)),
        placements=tuple(map(repr, parameter.placements)),
        replicated=tuple(placement.is_replicate() for placement in parameter.placements),
    )
    return layout, Shard(
        shape=tuple(local(parameter).shape),
        coordinate=tuple(mesh.get_coordinate() or ()),
        members=tuple(mesh.mesh.flatten().tolist()),
    )


def as_dtensor(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor with the layout of a parameter, which holds this rank's part itself."""
    assert is_dtensor(parameter)
    from torch.distributed.tensor import DTensor  # the parameter is one: no slow import

    with torch.no_grad():
        return DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def redistribute_gradient(parameter: torch.Tensor) -> None:
    """Gives the gradient of a DTensor the placements of the DTensor; sums terms over its mesh.

    Sync: a collective on the current stream, if the placements differ. All ranks of the mesh must
    call it for the same parameters, in the same order.
    """
    # A backward leaves such a gradient if there was no gradient to add to.
    gradient = parameter.grad
    if (
        is_dtensor(parameter)
        and is_dtensor(gradient)
        and gradient.placements != parameter.placements
    ):
        with torch.no_grad():
            parameter.grad = gradient.redistribute(placements=parameter.placements)
