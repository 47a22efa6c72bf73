"""Communication hooks: averages buckets with torch's DDP communication hooks, chosen by name.

torch's hooks are written for DistributedDataParallel: functions of a state and a bucket that return
a future of the mean. Here each bucket has its own state, so comm streams share nothing. The
contributed flags never go through a hook.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from pipegrad import FlatBucket, LateWork, ReductionStep, Work, errors
from pipegrad.plugins.handler import closest_first, complaints_of
from pipegrad_handlers.power_sgd import PowerSGD

Function = Callable[..., Any]
_Key = tuple[int, tuple[int, ...]]  # bucket and ranks

_HOOKS: dict[str, Function] = {
    "allreduce_hook": default_hooks.allreduce_hook,
    "bf16_compress_hook": default_hooks.bf16_compress_hook,
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
}
_POWER_SGD = ("powerSGD_hook", "batched_powerSGD_hook")
_WRAPPERS: dict[str, Function] = {
    "bf16_compress_wrapper": default_hooks.bf16_compress_wrapper,
    "fp16_compress_wrapper": default_hooks.fp16_compress_wrapper,
}


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
        spec: A name, ``module:attr``, or a table of ``name`` and options.

    Raises:
        PluginError: If there is no such hook, or it has no such options.
    """

    def __init__(self, spec: str | Mapping[str, object]) -> None:
        if not isinstance(spec, str | Mapping):
            raise errors.PluginOptionError(f"the hook {spec!r} should be a name or a table")
        self._table: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
        options = dict(self._table)
        if not isinstance(name := options.pop("name", None), str):
            raise errors.PluginOptionError(f"the hook {spec!r} lacks 'name': which one it is")
        wrapper = options.pop("wrapper", None)
        wrap = None if wrapper is None else _resolve("wrapper", wrapper, _WRAPPERS)
        self._make: Callable[[dist.ProcessGroup], _Plain | PowerSGD]
        if name in _POWER_SGD:
            PowerSGD.check(name, options)
            batched = name == "batched_powerSGD_hook"
            self._make = partial(PowerSGD, options=options, batched=batched, wrapper=wrap)
        else:
            function = _resolve("hook", name, _HOOKS, *_POWER_SGD)
            self._make = _plain(name, function, options, wrap)
        self._hooks: dict[_Key, tuple[dist.ProcessGroup, _Plain | PowerSGD]] = {}
        self._loaded: dict[_Key, Mapping[str, Any]] = {}

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        """Averages a bucket over `group`; see `GradientHandler.launch`.

        Sync: on a comm stream. A separate all-reduce sums the flags exactly. If the flags decide
        whether the hook starts, the wait for the work blocks the host, on devices too.
        """
        # A hook's callbacks may start collectives in threads of the backend. The comm stream waits
        # for the work before its next task, so no other collective of this group runs beside them.
        hook = self._of((bucket.index, reduction.ranks), group)
        bucket.is_mean = True
        running = _Running(hook, TorchBucket(bucket), group)
        # If the host reads the flags, it waits: late, unless in a thread.
        return LateWork(running.wait, in_threads=False) if hook.sums_flags_first else running

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the hooks of this rank's buckets; {} if there are none."""
        states = {key: dict(state) for key, state in self._loaded.items()}
        states |= {key: hook.state_dict() for key, (_, hook) in self._hooks.items()}
        buckets = {key: state for key, state in states.items() if state}
        return {"hook": dict(self._table), "buckets": buckets} if buckets else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a result of `state_dict`; starts anew if it is empty.

        Raises:
            ValueError: If it is the state of another hook, or of other options.
        """
        if state and state.get("hook") != self._table:
            raise ValueError(
                f"what is to be loaded is of the hook {state.get('hook')}, this one is "
                f"{self._table!r}: load it with the same hook and options"
            )
        self._hooks.clear()
        self._loaded = dict(state.get("buckets", {}))

    def _of(self, key: _Key, group: dist.ProcessGroup) -> _Plain | PowerSGD:
        """Returns the hook of a bucket, with its state."""
        if key not in self._hooks:
            self._hooks[key] = group, self._make(group)
            if key in self._loaded:
                self._hooks[key][1].load_state_dict(self._loaded.pop(key))
        first_group, hook = self._hooks[key]
        if first_group is not group:
            raise ValueError(
                "a handler with a communication hook belongs to one GradientSync, and was given to "
                "two: give each an instance of its own, or a table of name and options"
            )
        return hook


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


class _Running:
    """A hook at work. After `wait`, the mean and the summed flags are in the bucket."""

    def __init__(
        self, hook: _Plain | PowerSGD, bucket: TorchBucket, group: dist.ProcessGroup
    ) -> None:
        self._hook, self._bucket = hook, bucket
        self._flags: Work = dist.all_reduce(bucket.flat.flags, group=group, async_op=True)
        self._future = None if hook.sums_flags_first else self._start()

    def wait(self) -> None:
        self._flags.wait()
        if self._future is None:
            if not bool(self._bucket.flat.flags.any()):
                return
            self._future = self._start()
        self._bucket.take(self._future.wait())
        self._hook.end(self._bucket)

    def _start(self) -> Any:  # noqa: ANN401 - a user's hook may return anything
        future = self._hook.start(self._bucket)
        if not hasattr(future, "wait"):
            raise TypeError(f"a communication hook returned {future!r}, expected a Future")
        return future


class _Plain:
    """A hook of one bucket, without a state, or with a state of the user."""

    sums_flags_first = False

    def __init__(
        self, group: dist.ProcessGroup, *, function: Function, state: Function | None
    ) -> None:
        self._function = function
        self._state: Any = group if state is None else state(process_group=group)
        self._saves = state is not None and hasattr(self._state, "state_dict")

    def start(self, bucket: TorchBucket) -> Any:  # noqa: ANN401 - a user's hook may return anything
        return self._function(self._state, bucket)

    def end(self, bucket: TorchBucket) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state.state_dict()) if self._saves else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.load_state_dict(state)


def _plain(
    name: str, function: Function, options: dict[str, Any], wrap: Function | None
) -> Callable[[dist.ProcessGroup], _Plain]:
    """Returns a function that makes the hook of a bucket, after a check of its options."""
    state, takes, positional = None, function, _first_two(function)
    if (factory := options.pop("state", None)) is not None:
        state = _resolve("state of a hook", factory, {})
        takes, positional = state, ["process_group"]
    if complaints := complaints_of(takes, options, given=positional):
        raise errors.PluginOptionError(f"hook {name!r} {complaints}")
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


def _resolve(kind: str, name: object, known: Mapping[str, Function], *others: str) -> Function:
    """Returns a function by name or as ``module:attr``; `others` are names for the message."""
    if isinstance(name, str) and name in known:
        return known[name]
    if not isinstance(name, str) or ":" not in name:
        raise errors.PluginNotFoundError(
            f"no {kind} is called {name!r}; known, closest first: "
            f"{closest_first(str(name), [*known, *others])}; or give it as 'module:attr'"
        )
    try:
        function: Any = pkgutil.resolve_name(name)
    except Exception as error:
        raise errors.PluginLoadError(
            f"the {kind} {name!r} cannot be imported: {error!r}"
        ) from error
    if not callable(function):
        raise errors.PluginLoadError(f"the {kind} {name!r} is {function!r}, expected a function")
    return function  # type: ignore[no-any-return]  # of any class, but callable


def _in_memory(gradient: torch.Tensor) -> torch.Size:
    """Returns the shape of a gradient, dimensions in the order of memory; ``(1,)`` for a scalar."""
    strides = gradient.stride()
    dims = sorted(range(gradient.ndim), key=lambda dim: -strides[dim])
    return torch.Size([gradient.shape[dim] for dim in dims] or [1])
