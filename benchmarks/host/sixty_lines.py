"""Sixty lines of plain Python that reduce the gradients of replicas: what is in reach for a host.

No ties, no flags, no checks, no failures. It shows what a parameter has to cost at least.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

CAPACITY_NUMEL = 25 * 2**18  # of a bucket: 25 MiB of fp32
LARGE_NUMEL = 2**14  # such a gradient is copied while it is hot, others with those of their bucket


class Bucket:
    """Gradients that one all-reduce averages."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._flat = parameters[0].new_zeros(sum(p.numel() for p in parameters)).detach()
        pieces = self._flat.split([p.numel() for p in parameters])
        views = [piece.view_as(p) for p, piece in zip(parameters, pieces, strict=True)]
        pairs = list(zip(parameters, views, strict=True))
        self._small = [(p, view) for p, view in pairs if p.numel() < LARGE_NUMEL]
        self._number = len(parameters)
        for p, view in pairs:
            hook = self._count if p.numel() < LARGE_NUMEL else self._copy_into(view)
            p.register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        """Begins a step."""
        self._left = self._number

    def wait(self) -> None:
        """Waits until the gradients are in place."""
        self._work.wait()

    def _copy_into(self, view: Tensor) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            torch.div(parameter.grad, dist.get_world_size(), out=view)
            parameter.grad = view
            self._count(parameter)

        return hook

    def _count(self, _: Tensor) -> None:
        self._left -= 1
        if not self._left:
            self._launch()

    def _launch(self) -> None:
        gradients, views = [p.grad for p, _ in self._small], [view for _, view in self._small]
        if gradients:
            torch._foreach_div_(gradients, dist.get_world_size())
            torch._foreach_copy_(views, gradients)
        for p, view in self._small:
            p.grad = view
        self._work = dist.all_reduce(self._flat, async_op=True)


def buckets_of(parameters: Iterable[nn.Parameter]) -> list[Bucket]:
    """Returns buckets, in the order in which backward completes gradients."""
    groups, numel = list[list[nn.Parameter]]([[]]), 0
    for parameter in reversed(list(parameters)):
        if numel >= CAPACITY_NUMEL:
            groups, numel = [*groups, []], 0
        groups[-1].append(parameter)
        numel += parameter.numel()
    return [Bucket(group) for group in groups]
