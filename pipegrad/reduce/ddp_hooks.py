"""Communication hooks: torch's ways to send the gradients of data parallelism, chosen by name.

torch's hooks are written for DistributedDataParallel: functions of a state and a bucket that return
a future of the mean. Here each bucket has a state of its own, so comm streams share nothing; and
flags, which say who contributed, never go through a hook.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.agreement import agree, same
from pipegrad.comm.work import LateWork, Work
from pipegrad.errors import (
    AgreementError,
    PlanError,
    PluginLoadError,
    PluginNotFoundError,
    PluginOptionError,
    in_words,
)
from pipegrad.plugins.handler import FlatBucket, GradientHandler, ReductionStep
from pipegrad.plugins.options import closest_first, complaints_of
from pipegrad.plugins.registry import ResolvedPlugin
from pipegrad.reduce.power_sgd import PowerSGD

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
    """A hook of one bucket, and what it keeps from step to step."""

    sums_flags_first: bool

    def start(self, bucket: TorchBucket) -> Any:  # noqa: ANN401 - a future, if it is a good hook
        """Returns the future of the mean."""

    def end(self, bucket: TorchBucket) -> None:
        """Called when the mean is in the bucket."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what it keeps; {} if nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from that."""


class CommunicationHook:
    """Averages buckets as one of torch's DDP communication hooks does.

    A handler has it as its `hook`. Names are torch's own: ``allreduce_hook``,
    ``bf16_compress_hook``, ``fp16_compress_hook``, ``powerSGD_hook``, ``batched_powerSGD_hook``; or
    ``module:attr``, a function ``(state, bucket) -> Future``. In a table all further keys are its
    own options (those of ``PowerSGDState``; keyword arguments of the function), but for two:

    - ``wrapper``: ``bf16_compress_wrapper``, ``fp16_compress_wrapper`` or ``module:attr``.
    - ``state``: ``module:attr``, called as ``state(process_group=..., **options)`` for each bucket;
      without it the state is the process group. What it keeps is saved if it has ``state_dict`` and
      ``load_state_dict``.

    A hook may change what `TorchBucket.buffer` gives it, but not its size, and starts no collective
    that its future does not wait for. It sends gradients in a comm stream, beside the compute; what
    it computes in torch's own threads no `OrderChecker` sees.

    Args:
        spec: Which.

    Raises:
        PluginError: If there is no such hook, or it has no such options.
    """

    def __init__(self, spec: HookSpec) -> None:
        if not isinstance(spec, str | Mapping):
            raise PluginOptionError(f"the hook {spec!r} should be a name or a table")
        self._told: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
        options = dict(self._told)
        if not isinstance(name := options.pop("name", None), str):
            raise PluginOptionError(f"the hook {spec!r} lacks 'name': which one it is")
        wrapper = options.pop("wrapper", None)
        wrap = None if wrapper is None else _found("wrapper", wrapper, _WRAPPERS)
        self._make: Callable[[dist.ProcessGroup], HookState]
        if name in _POWER_SGD:
            batched = _POWER_SGD[name]
            self._make = partial(PowerSGD, options=options, batched=batched, wrapper=wrap)
            PowerSGD.check(name, options)
        else:
            function = _found("hook", name, {**_HOOKS, **dict.fromkeys(_POWER_SGD, "")})
            self._make = _plain(name, function, options, wrap)
        self._running: dict[Key, tuple[dist.ProcessGroup, HookState]] = {}
        self._loaded: dict[Key, Mapping[str, Any]] = {}

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        """Averages a bucket over `group`; what `GradientHandler.launch` does.

        Sync: on a comm stream. Flags are summed by an all-reduce of their own, exactly. One bucket
            is
        with one comm stream only, which waits for the work before it goes on: a hook's callbacks
        may start collectives in the backend's threads, they meet no others of this group. Where the
        flags decide whether the hook starts, waiting for the work blocks the host, on devices too.
        """
        hook_state = self._of((bucket.index, reduction.ranks), group)
        given = TorchBucket(bucket)
        bucket.is_mean = True
        flags: Work = dist.all_reduce(bucket.flags, group=group, async_op=True)
        if hook_state.sums_flags_first:
            # The host reads the flags, so it waits: late, unless in a thread.
            return LateWork(_FlagsFirst(flags, given, hook_state).wait, in_threads=False)
        return _Hooked(flags, _started(hook_state, given), given, hook_state)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the hooks of this rank's buckets keep; {} if nothing."""
        buckets = {key: dict(state) for key, state in self._loaded.items()}
        buckets.update(
            (key, hook_state.state_dict()) for key, (_, hook_state) in self._running.items()
        )
        buckets = {key: state for key, state in buckets.items() if state}
        return {"hook": dict(self._told), "buckets": buckets} if buckets else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned; afresh if it is empty.

        Raises:
            ValueError: If it is of another hook, or of other options.
        """
        if state and state.get("hook") != self._told:
            raise ValueError(
                f"what is to be loaded was kept by the hook {state.get('hook')}, this one is "
                f"{self._told!r}: load it with the same hook and options"
            )
        self._running.clear()
        self._loaded = dict(state.get("buckets", {}))

    def _of(self, key: Key, group: dist.ProcessGroup) -> HookState:
        if key not in self._running:
            hook_state = self._make(group)
            if key in self._loaded:
                hook_state.load_state_dict(self._loaded.pop(key))
            self._running[key] = group, hook_state
        of, hook_state = self._running[key]
        if of is not group:
            raise ValueError(
                "a handler with a communication hook belongs to one GradientSync, and was given to "
                "two: give each an instance of its own, or a table of name and options"
            )
        return hook_state


class TorchBucket:
    """A bucket as torch's hooks see it: the methods of ``torch.distributed.GradBucket``.

    Args:
        bucket: What it is of.
    """

    def __init__(self, bucket: FlatBucket) -> None:
        self.flat = bucket
        self._buffer = bucket.payload
        start = int(bucket.payload.storage_offset())
        self.pieces = [(int(g.storage_offset()) - start, _in_memory(g)) for g in bucket.gradients]

    def index(self) -> int:
        """Returns its number."""
        return self.flat.index

    def is_last(self) -> bool:
        """Returns True: a hook that counts its last buckets counts steps."""
        return True

    def buffer(self) -> torch.Tensor:
        """Returns what is to be averaged, ``(numel,)``; zeros in the gaps between gradients."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Puts another tensor in its place."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Returns views of the buffer, contiguous: dimensions come as they lie in memory."""
        return [
            self._buffer[begin : begin + shape.numel()].view(shape)
            for begin, shape in self.pieces
            if shape.numel()
        ]

    def parameters(self) -> NoReturn:
        """Refuses: parameters are their optimizer's, and a hook that steps them is none."""
        raise NotImplementedError(
            "a communication hook has gradients(), not parameters(): hooks that step parameters "
            "(optimizer overlap, ZeRO) cannot be used; handler 'sharded' does what those are for"
        )

    def take(self, result: object) -> None:
        """Brings the mean to where it belongs, unless it is there.

        Raises:
            TypeError: If it is no such tensor.
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


def _started(hook_state: HookState, bucket: TorchBucket) -> Any:  # noqa: ANN401 - as Kept
    with sync_points.in_use.trusting():
        future = hook_state.start(bucket)
    if not hasattr(future, "wait"):
        raise TypeError(f"a communication hook returned {future!r}, expected a Future")
    return future


@dataclass(frozen=True)
class _Hooked:
    """A hook on its way. When it has been waited for, the mean and summed flags are there."""

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
    """A hook that starts when its flags are summed, unless all are zero: so on all ranks alike."""

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
    """A hook that keeps nothing, or keeps it in a state of its own."""

    sums_flags_first = False

    def __init__(
        self, group: dist.ProcessGroup, *, function: Function, state: Function | None
    ) -> None:
        self._function = function
        self._own: Any = None if state is None else state(process_group=group)
        self._state = group if state is None else self._own

    def start(self, bucket: TorchBucket) -> Any:  # noqa: ANN401 - as Kept
        return self._function(self._state, bucket)

    def end(self, bucket: TorchBucket) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self._own.state_dict()) if hasattr(self._own, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._own is not None:
            self._own.load_state_dict(state)


def load_hook_states(
    state: Mapping[str, Any],
    handlers: Mapping[str, ResolvedPlugin[GradientHandler]],
    digest: str,
    *,
    launching: Collection[str],
    ranks: Sequence[int],
) -> None:
    """Gives handlers what they kept; see `GradientSync.load_state_dict`.

    Args:
        state: What they kept on this rank.
        handlers: All of them, by name.
        digest: The plan's.
        launching: Those that launch something on this rank; others keep nothing here.
        ranks: All that call it, ascending.
    """
    hook_state = dict(state.get("handlers", {}))

    def load() -> dict[str, str]:
        if state and state.get("plan") != digest:
            raise PlanError(
                "what handlers kept is of another plan: of another model, other handlers, buckets "
                "or ranks; error feedback fits into its own plan alone"
            )
        if unknown := sorted(hook_state.keys() - handlers.keys()):
            raise PlanError(f"what is to be loaded was kept by handlers {unknown}, not in use here")
        for name, found in handlers.items():
            try:
                found.plugin.load_state_dict(hook_state.get(name, {}))
            except Exception as error:
                raise PlanError(f"handler {name!r} cannot go on: {in_words(error)}") from error
        return {name: "what it kept" if hook_state.get(name) else "nothing" for name in launching}

    try:
        told = dict(zip(ranks, agree("load_state_dict", load, ranks=ranks), strict=True))
        for name in handlers:
            said = {rank: begins[name] for rank, begins in told.items() if name in begins}
            same(f"what handler {name!r} goes on from", said)
    except (PlanError, AgreementError) as error:
        for found in handlers.values():
            found.plugin.load_state_dict({})
        if isinstance(error, PlanError):
            raise
        raise PlanError(str(error)) from error


def _plain(
    name: str, function: Function, options: dict[str, Any], wrap: Function | None
) -> Callable[[dist.ProcessGroup], HookState]:
    """Returns what makes a bucket's hook of a function, its options checked."""
    state, takes, given = None, function, _first_two(function)
    if (told := options.pop("state", None)) is not None:
        state = _found("state of a hook", told, {})
        takes, given = state, ["process_group"]
    if complaints := complaints_of(takes, options, given=given):
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


def _found(kind: str, name: object, known: Mapping[str, str]) -> Function:
    """Returns a function by name or as ``module:attr``."""
    if not isinstance(name, str) or not (name in known or ":" in name):
        raise PluginNotFoundError(
            f"no {kind} is called {name!r}; known, closest first: "
            f"{closest_first(str(name), known)}; or give it as 'module:attr'"
        )
    value = known.get(name, name)
    try:
        found: Any = pkgutil.resolve_name(value)
    except Exception as error:
        raise PluginLoadError(f"the {kind} {name!r} cannot be imported: {error!r}") from error
    if not callable(found):
        raise PluginLoadError(f"the {kind} {name!r} is {found!r}, expected a function")
    return found  # type: ignore[no-any-return]  # whatever it is, it can be called


def _in_memory(gradient: torch.Tensor) -> torch.Size:
    """Returns the shape of a gradient with its dimensions as they lie; of a scalar ``(1,)``."""
    strides = gradient.stride()
    dims = sorted(range(gradient.ndim), key=lambda dim: -strides[dim])
    return torch.Size([gradient.shape[dim] for dim in dims] or [1])
