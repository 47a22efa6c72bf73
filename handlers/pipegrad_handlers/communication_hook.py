"""Communication hooks: averages buckets with torch's DDP communication hooks, chosen by name.

torch's hooks are written for DistributedDataParallel: functions of a state and a bucket that return
a future of the mean. Here the state is the process group. The contributed flags never go through a
hook.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from pipegrad import FlatBucket, GradientHandler, ReductionStep, Work, errors
from pipegrad.plugins.handler import closest_first, complaints_of

Function = Callable[..., Any]

_HOOKS: dict[str, Function] = {
    "allreduce_hook": default_hooks.allreduce_hook,
    "bf16_compress_hook": default_hooks.bf16_compress_hook,
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
}


class CommunicationHook(GradientHandler):
    """Averages buckets with one of torch's DDP communication hooks, if it has one.

    Derive a handler from it. The names are torch's: ``allreduce_hook``, ``bf16_compress_hook``,
    ``fp16_compress_hook``. Or give ``module:attr``, a function ``(process_group, bucket) ->
    Future``. In a table, all further keys are its keyword arguments. Nothing is kept from step to
    step.

    A hook may change the tensor of `TorchBucket.buffer`, but not its size. Its future must wait for
    every collective that it starts. It runs on a comm stream, in parallel with the compute. An
    `OrderChecker` does not see computations of the hook in torch's own threads.

    Args:
        hook: A name, ``module:attr``, or a table of ``name`` and options. None for no hook.

    Raises:
        PluginError: If there is no such hook, or it has no such options.
    """

    def __init__(self, hook: str | Mapping[str, object] | None) -> None:
        if hook is not None:
            self._hook = _resolved(hook)
            self.leaves = "mean"
            # Without a hook, pipegrad may divide gradients before it sums them: see `launch`.
            self.launch = self._average  # type: ignore[method-assign]

    def _average(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        """Averages a bucket over `group`; see `GradientHandler.launch`.

        Sync: on a comm stream. A separate all-reduce sums the flags exactly.
        """
        # A hook's callbacks may start collectives in threads of the backend. No other collective
        # of this group runs during them, because the comm stream waits for the work before its
        # next task.
        flags: Work = dist.all_reduce(bucket.flags, group=group, async_op=True)
        of_torch = TorchBucket(bucket)
        future = self._hook(group, of_torch)
        if not hasattr(future, "wait"):
            raise TypeError(f"a communication hook returned {future!r}, expected a Future")
        return _Running(flags, future, of_torch)


class TorchBucket:
    """A bucket for torch's hooks, with the methods of ``torch.distributed.GradBucket``.

    Args:
        bucket: The bucket of pipegrad.
    """

    def __init__(self, bucket: FlatBucket) -> None:
        self.flat = bucket
        self._buffer = bucket.payload
        start = int(bucket.payload.storage_offset())
        self.pieces = [(int(g.storage_offset()) - start, _in_memory(g)) for g in bucket.gradients]

    def index(self) -> int:
        """Returns the number of the bucket."""
        return self.flat.index

    def is_last(self) -> bool:
        """Returns True, since each state has one bucket: hooks count steps by last buckets."""
        return True

    def buffer(self) -> torch.Tensor:
        """Returns the payload to average, ``(numel,)``; zeros in the gaps between gradients."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor of `buffer`."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Returns contiguous views of the buffer, with dimensions in the order of memory."""
        return [
            self._buffer[begin : begin + shape.numel()].view(shape)
            for begin, shape in self.pieces
            if shape.numel()
        ]

    def parameters(self) -> NoReturn:
        """Raises an error: a hook may not step parameters."""
        raise NotImplementedError(
            "a communication hook has gradients(), not parameters(): hooks that step parameters "
            "(optimizer overlap, ZeRO) cannot be used; handler 'sharded' does what those are for"
        )

    def take(self, result: object) -> None:
        """Copies the mean into the bucket, unless it is already there.

        Raises:
            TypeError: If `result` is not a tensor of the bucket's size.
        """
        payload = self.flat.payload
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        if not isinstance(result, torch.Tensor) or result.numel() != payload.numel():
            shape = getattr(result, "shape", type(result).__name__)
            raise TypeError(
                f"the future of a communication hook gave {shape}, expected a tensor of "
                f"{payload.numel()} elements: the mean of bucket.buffer()"
            )
        if result.data_ptr() != payload.data_ptr():
            payload.copy_(result.reshape(-1))


@dataclass(frozen=True)
class _Running:
    """A hook at work. After `wait`, the mean and the summed flags are in the bucket."""

    flags: Work
    future: Work
    bucket: TorchBucket

    def wait(self) -> None:
        self.flags.wait()
        self.bucket.take(self.future.wait())


def _resolved(hook: str | Mapping[str, object]) -> Function:
    """Returns a hook, with its options."""
    options: dict[str, Any] = dict(hook) if isinstance(hook, Mapping) else {"name": hook}
    if not isinstance(name := options.pop("name", None), str):
        raise errors.PluginOptionError(f"the hook {hook!r} lacks 'name': which one it is")
    if name not in _HOOKS and ":" not in name:
        raise errors.PluginNotFoundError(
            f"no hook is called {name!r}; known, closest first: {closest_first(name, _HOOKS)}; "
            f"or give it as 'module:attr'"
        )
    try:
        function = _HOOKS.get(name) or pkgutil.resolve_name(name)
    except Exception as error:
        raise errors.PluginError(f"the hook {name!r} cannot be imported: {error!r}") from error
    if not callable(function):
        raise errors.PluginError(f"the hook {name!r} is {function!r}, expected a function")
    if complaints := complaints_of(partial(function, None, None), options):
        raise errors.PluginOptionError(f"hook {name!r} {complaints}")
    return partial(function, **options)


def _in_memory(gradient: torch.Tensor) -> torch.Size:
    """Returns the shape of a gradient, dimensions in the order of memory; ``(1,)`` for a scalar."""
    strides = gradient.stride()
    dims = sorted(range(gradient.ndim), key=lambda dim: -strides[dim])
    return torch.Size([gradient.shape[dim] for dim in dims] or [1])
