"""Communication hooks: averages buckets with torch's DDP communication hooks, chosen by name.

torch's hooks are written for DistributedDataParallel: functions of a state and a bucket that return
a future of the mean. Here each bucket has its own state, so comm streams share nothing. The
contributed flags never go through a hook.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from pipegrad.comm.work import LateWork, Work
from pipegrad.errors import (
    PluginLoadError,
    PluginNotFoundError,
    PluginOptionError,
)
from pipegrad.gradients.power_sgd import PowerSGD
from pipegrad.plugins.handler import FlatBucket, ReductionStep
from pipegrad.plugins.options import closest_first, complaints_of

HookSpec = str | Mapping[str, object]
"""A name, ``module:attr``, or a table of ``name`` and options."""

_TORCHS = "torch.distributed.algorithms.ddp_comm_hooks"
_HOOKS = {
    "allreduce_hook": f"{_TORCHS}.default_hooks:allreduce_hook",
    "bf16_compress_hook": f"{_TORCHS}.default_hooks:bf16_compress_hook",
    "fp16_compress_hook": f"{_TORCHS}.default_hooks:fp16_compress_hook",
}
_POWER_SGD = {"powerSGD_hook": False, "batched_powerSGD_hook": True}
_WRAPPERS = {
    "bf16_compress_wrapper": f"{_TORCHS}.default_hooks:bf16_compress_wrapper",
    "fp16_compress_wrapper": f"{_TORCHS}.default_hooks:fp16_compress_wrapper",
}

Key = tuple[int, tuple[int, ...]]  # bucket and ranks
Function = Callable[..., Any]


class HookState(Protocol):
    """A hook for one bucket, with its state from step to step."""

    sums_flags_first: bool

    def start(self, bucket: TorchBucket) -> Any:  # noqa: ANN401 - a user's hook may return anything
        """Returns the future of the mean."""

    def end(self, bucket: TorchBucket) -> None:
        """Called when the mean is in the bucket."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; {} if there is none."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a result of `state_dict`."""


class CommunicationHook:
    """Averages buckets with one of torch's DDP communication hooks.

    A handler has it as its `hook`. Names are those of torch: ``allreduce_hook``,
    ``bf16_compress_hook``, ``fp16_compress_hook``, ``powerSGD_hook``, ``batched_powerSGD_hook``. Or
    give ``module:attr``, a function ``(state, bucket) -> Future``. In a table, all further keys are
    options of the hook (of ``PowerSGDState``, or keyword arguments of the function), except two:

    - ``wrapper``: ``bf16_compress_wrapper``, ``fp16_compress_wrapper`` or ``module:attr``.
    - ``state``: ``module:attr``, called as ``state(process_group=..., **options)`` for each bucket.
      Without it, the state is the process group. The state is saved if it has ``state_dict`` and
      ``load_state_dict``.

    A hook may change the tensor of `TorchBucket.buffer`, but not its size. Its future must wait for
    every collective that it starts. It runs on a comm stream, beside the compute. An `OrderChecker`
    does not see what the hook computes in torch's own threads.

    Args:
        spec: The hook.

    Raises:
        PluginError: If there is no such hook, or it has no such options.
    """

    def __init__(self, spec: HookSpec) -> None:
        if not isinstance(spec, str | Mapping):
            raise PluginOptionError(f"the hook {spec!r} should be a name or a table")
        self._table: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
        options = dict(self._table)
        if not isinstance(name := options.pop("name", None), str):
            raise PluginOptionError(f"the hook {spec!r} lacks 'name': which one it is")
        wrapper = options.pop("wrapper", None)
        wrap = None if wrapper is None else _resolve("wrapper", wrapper, _WRAPPERS)
        self._make: Callable[[dist.ProcessGroup], HookState]
        if name in _POWER_SGD:
            batched = _POWER_SGD[name]
            self._make = partial(PowerSGD, options=options, batched=batched, wrapper=wrap)
            PowerSGD.check(name, options)
        else:
            function = _resolve("hook", name, {**_HOOKS, **dict.fromkeys(_POWER_SGD, "")})
            self._make = _plain(name, function, options, wrap)
        self._running: dict[Key, tuple[dist.ProcessGroup, HookState]] = {}
        self._loaded: dict[Key, Mapping[str, Any]] = {}

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        """Averages a bucket over `group`; see `GradientHandler.launch`.

        Sync: on a comm stream. A separate all-reduce sums the flags exactly. If the flags decide
        whether the hook starts, the wait for the work blocks the host, on devices too.
        """
        # A hook's callbacks may start collectives in threads of the backend. The comm stream waits
        # for the work before its next task, so they meet no other collective of this group.
        hook_state = self._of((bucket.index, reduction.ranks), group)
        torch_bucket = TorchBucket(bucket)
        bucket.is_mean = True
        flags: Work = dist.all_reduce(bucket.flags, group=group, async_op=True)
        if hook_state.sums_flags_first:
            # The host reads the flags, so it waits: late, unless in a thread.
            return LateWork(_FlagsFirst(flags, torch_bucket, hook_state).wait, in_threads=False)
        return _Hooked(flags, _started(hook_state, torch_bucket), torch_bucket, hook_state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the hooks of this rank's buckets; {} if there are none."""
        buckets = {key: dict(state) for key, state in self._loaded.items()}
        buckets.update(
            (key, hook_state.state_dict()) for key, (_, hook_state) in self._running.items()
        )
        buckets = {key: state for key, state in buckets.items() if state}
        return {"hook": dict(self._table), "buckets": buckets} if buckets else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a result of `state_dict`; starts anew if it is empty.

        Raises:
            ValueError: If it is the state of another hook, or of other options.
        """
        if state and state.get("hook") != self._table:
            raise ValueError(
                f"what is to be loaded was kept by the hook {state.get('hook')}, this one is "
                f"{self._table!r}: load it with the same hook and options"
            )
        self._running.clear()
        self._loaded = dict(state.get("buckets", {}))

    def _of(self, key: Key, group: dist.ProcessGroup) -> HookState:
        if key not in self._running:
            hook_state = self._make(group)
            if key in self._loaded:
                hook_state.load_state_dict(self._loaded.pop(key))
            self._running[key] = group, hook_state
        own_group, hook_state = self._running[key]
        if own_group is not group:
            raise ValueError(
                "a handler with a communication hook belongs to one GradientSync, and was given to "
                "two: give each an instance of its own, or a table of name and options"
            )
        return hook_state


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


def _started(hook_state: HookState, bucket: TorchBucket) -> Any:  # noqa: ANN401 - as HookState
    future = hook_state.start(bucket)
    if not hasattr(future, "wait"):
        raise TypeError(f"a communication hook returned {future!r}, expected a Future")
    return future


@dataclass(frozen=True)
class _Hooked:
    """A running hook. After `wait`, the mean and the summed flags are in the bucket."""

    flags: Work
    future: Any
    bucket: TorchBucket
    hook_state: HookState

    def wait(self) -> None:
        self.flags.wait()
        self.bucket.take(self.future.wait())
        self.hook_state.end(self.bucket)


@dataclass(frozen=True)
class _FlagsFirst:
    """A hook that starts after its flags were summed, and only if one of them is not zero."""

    flags: Work
    bucket: TorchBucket
    hook_state: HookState

    def wait(self) -> None:
        self.flags.wait()
        if bool(self.bucket.flat.flags.any()):
            _Hooked(
                self.flags, _started(self.hook_state, self.bucket), self.bucket, self.hook_state
            ).wait()


class _Plain:
    """A hook without a state, or with a state of the user."""

    sums_flags_first = False

    def __init__(
        self, group: dist.ProcessGroup, *, function: Function, state: Function | None
    ) -> None:
        self._function = function
        self._own: Any = None if state is None else state(process_group=group)
        self._state = group if state is None else self._own

    def start(self, bucket: TorchBucket) -> Any:  # noqa: ANN401 - as HookState
        return self._function(self._state, bucket)

    def end(self, bucket: TorchBucket) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self._own.state_dict()) if hasattr(self._own, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._own is not None:
            self._own.load_state_dict(state)


def _plain(
    name: str, function: Function, options: dict[str, Any], wrap: Function | None
) -> Callable[[dist.ProcessGroup], HookState]:
    """Returns a function that makes the hook of a bucket, after a check of its options."""
    state, takes, positional = None, function, _first_two(function)
    if (factory := options.pop("state", None)) is not None:
        state = _resolve("state of a hook", factory, {})
        takes, positional = state, ["process_group"]
    if complaints := complaints_of(takes, options, given=positional):
        raise PluginOptionError(f"hook {name!r} {complaints}")
    if state is None:
        function = partial(function, **options)
    else:
        state = partial(state, **options)
    return partial(_Plain, function=function if wrap is None else wrap(function), state=state)


def _first_two(function: Function) -> list[str]:
    """Returns the names of the parameters for state and bucket."""
    try:
        return list(inspect.signature(function).parameters)[:2]
    except ValueError:  # some functions written in C
        return []


def _resolve(kind: str, name: object, known: Mapping[str, str]) -> Function:
    """Returns a function by name or as ``module:attr``."""
    if not isinstance(name, str) or not (name in known or ":" in name):
        raise PluginNotFoundError(
            f"no {kind} is called {name!r}; known, closest first: "
            f"{closest_first(str(name), known)}; or give it as 'module:attr'"
        )
    value = known.get(name, name)
    try:
        function: Any = pkgutil.resolve_name(value)
    except Exception as error:
        raise PluginLoadError(f"the {kind} {name!r} cannot be imported: {error!r}") from error
    if not callable(function):
        raise PluginLoadError(f"the {kind} {name!r} is {function!r}, expected a function")
    return function  # type: ignore[no-any-return]  # of any class, but callable


def _in_memory(gradient: torch.Tensor) -> torch.Size:
    """Returns the shape of a gradient, dimensions in the order of memory; ``(1,)`` for a scalar."""
    strides = gradient.stride()
    dims = sorted(range(gradient.ndim), key=lambda dim: -strides[dim])
    return torch.Size([gradient.shape[dim] for dim in dims] or [1])
