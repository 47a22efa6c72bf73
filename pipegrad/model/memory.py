"""Parameters that share memory: all of it, as a tie does, or a part of it, which is refused."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import nn

from pipegrad.errors import PlanError
from pipegrad.model.dtensor import local


def memory_of(parameter: nn.Parameter) -> Hashable:
    """Returns a key that is equal for two parameters if they are the same view of one memory.

    Without memory (meta device, no elements), only the object itself has the key.
    """
    tensor = local(parameter)
    if _address(tensor) == 0:
        return id(parameter)
    layout = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return _address(tensor), tensor.device, layout


def refuse_partly_shared(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters that are different views of the same memory, as a transpose or a chunk.

    Raises:
        PlanError: If there are such parameters. It names two of them.
    """
    by_storage: dict[Hashable, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, parameter in parameters:
        tensor = local(parameter).detach()
        if _address(tensor):
            begin = int(tensor.storage_offset()) * tensor.itemsize
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            end = begin + int(reach + 1) * tensor.itemsize
            key = (_address(tensor), tensor.device)
            by_storage.setdefault(key, []).append((begin, end, name, tensor))
    # Views of a storage are visited by their first byte. Only views that have not ended yet can
    # overlap the next view, so few pairs are compared byte by byte.
    for views in by_storage.values():
        views.sort(key=lambda view: view[:2])
        open_views: list[tuple[int, int, str, torch.Tensor]] = []
        for view in views:
            open_views = [other for other in open_views if other[1] > view[0]]
            for other in open_views:
                if _overlap(other, view):
                    raise PlanError(
                        f"parameters {other[2]!r} {tuple(other[3].shape)} and {view[2]!r} "
                        f"{tuple(view[3].shape)} are different views of the same memory, as a "
                        f"transpose or a chunk is: they cannot be tied across stages. Make them "
                        f"one nn.Parameter, and take the view in forward()"
                    )
            open_views.append(view)


def _overlap(
    view: tuple[int, int, str, torch.Tensor], other: tuple[int, int, str, torch.Tensor]
) -> bool:
    """Whether two different views have a byte in common."""
    # Two ranges of bytes may overlap although no byte is shared, as for two columns of a matrix. So
    # both views are drawn on a mask of bytes.
    base, end = min(view[0], other[0]), max(view[1], other[1])
    touched = torch.zeros(end - base, dtype=torch.bool)
    masks = []
    for begin, _, _, tensor in (view, other):
        shape = (*tensor.shape, tensor.itemsize)
        stride = (*(s * tensor.itemsize for s in tensor.stride()), 1)
        masks.append(touched.as_strided(shape, stride, begin - base))
    masks[0].fill_(True)
    return bool(masks[1].any())


def _address(tensor: torch.Tensor) -> int:
    if tensor.is_meta or tensor.numel() == 0:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # some kinds of tensors have no storage
        return 0
