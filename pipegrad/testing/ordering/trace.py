"""Traces of torch: memory that operators read and write, their call sites, and CUDA events."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from pipegrad.interop.private import TorchDispatchMode, activate_gpu_trace, gpu_trace
from pipegrad.testing.ordering.clocks import Clock, Span

if TYPE_CHECKING:
    from pipegrad.testing.ordering.checker import OrderChecker


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_MAX_SPANS = 1024  # a tensor with more byte ranges counts as one range from first to last byte
_TORCH = Path(torch.__file__).parent
_WRAPPERS = tuple(map(str, (Path(__file__).parent, _TORCH / "_dynamo", _TORCH / "_compile.py")))
_SKIPPED_FILES = (str(_TORCH), str(Path(__file__).parent), "<frozen", "<eval_")
# Operators such as ones_like use only the shape of their argument.
_READS_NOTHING = re.compile(r"aten\.(new_\w+|\w+_like)\.")
_COPIES = ("aten._to_copy.default", "aten.copy_.default")
# Collectives whose results are their first argument. All others but sends write all their tensors.
_OUT_OF_PLACE = tuple(
    f"c10d.{name}"
    for name in ("_reduce_scatter", "_allgather", "reduce_scatter", "allgather", "alltoall")
)


@dataclass(frozen=True)
class Operation:
    """One call of an operator.

    Attributes:
        name: Name of the operator, as torch prints it.
        reads: Tensors whose values it uses.
        writes: Tensors that it changes or makes.
        group: Name of the process group of an asynchronous collective, else None.
        work: The Work that its caller waits for. It is the caller's object, kept alive until then.
        syncs_host: True if the host waits for its result.
    """

    name: str
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    group: str | None = None
    work: dist.Work | None = None
    syncs_host: bool = False


class Trace(TorchDispatchMode):
    """Passes every operator of the thread that enters it to a function, after the call."""

    def __init__(self, on_operation: Callable[[Operation], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._on_operation = on_operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile and torch.export work as if no trace were active."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch.ops' overloads have no type of their own
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Calls `func` and reports it, except for other kinds of tensors, such as fake tensors."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # Fake tensors have no memory. Wrappers such as DTensor call operators on their parts, and
        # the trace sees these calls.
        if all(t in _PLAIN for t in types):
            operation = _operation(func, args, kwargs, out)
            if operation is not None:
                self._on_operation(operation)
        return out


def spans(tensor: torch.Tensor) -> tuple[Span, ...]:
    """Returns the byte ranges of its storage that `tensor` covers, ascending and apart."""
    if tensor.numel() == 0:
        return ()
    size, start = tensor.itemsize, int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return ((start, start + tensor.numel() * size),)
    shape = zip(map(int, tensor.stride()), map(int, tensor.shape), strict=True)
    ranges = [(start, start + size)]
    # From the smallest stride: a dimension without gaps makes one range longer, others repeat all.
    for stride, length in sorted((stride, length) for stride, length in shape if length > 1):
        step, extent = stride * size, ranges[-1][1] - start
        last = step * (length - 1)
        is_dense = len(ranges) == 1 and step <= extent
        if is_dense or step < extent or len(ranges) * length > _MAX_SPANS:
            ranges = [(start, start + last + extent)]
        else:
            offsets = range(0, last + 1, step)
            ranges = [(begin + o, end + o) for o in offsets for begin, end in ranges]
    return tuple(ranges)


def call_site() -> str:
    """Returns the innermost line outside of torch and of this package."""
    frame = _caller(_SKIPPED_FILES)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def called_by_python() -> bool:
    """Returns True if a collective is called by torch.distributed, not by C++ code such as DDP's.

    C++ code waits in C++, where no Python function can observe it.
    """
    return _caller(_WRAPPERS).f_code.co_filename == c10d.__file__


def _caller(skipped_files: tuple[str, ...]) -> FrameType:
    """Returns the innermost frame outside of some files."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped_files):
        frame = frame.f_back
    return frame


_Address = tuple[int, int]  # of the memory, and of the storage


class Memories:
    """Names every storage, and notices when it is freed.

    Args:
        on_free: Called with the name, in the thread that drops the last reference.
    """

    def __init__(self, on_free: Callable[[str], None]) -> None:
        self._on_free = on_free
        self._names: dict[_Address, str] = {}
        self._numbers = itertools.count(1)

    def name(self, tensor: torch.Tensor) -> str:
        """Returns the name of the memory of `tensor`."""
        storage = tensor.untyped_storage()
        # Both addresses are needed. torch returns memory a little before the finalizer runs. Until
        # then another thread may have the same memory, in a storage of another address.
        address = storage.data_ptr(), storage._cdata
        if address not in self._names:
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            name = f"memory {next(self._numbers)}, met as {dtype} {shape}"
            self._names[address] = name
            weakref.finalize(storage, self._freed, address, name).atexit = False
        return self._names[address]

    def _freed(self, address: _Address, name: str) -> None:
        if self._names.get(address) == name:
            del self._names[address]
        self._on_free(name)


@functools.cache
def _schema(func: Any) -> tuple[list[str], list[str], bool]:  # noqa: ANN401
    """Returns an operator's arguments, the written ones, and True if its result is a view."""
    arguments, results = func._schema.arguments, func._schema.returns
    written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
    is_view = not written and any(r.alias_info is not None for r in results)
    return [a.name for a in arguments], written, is_view


def _operation(
    func: Any,  # noqa: ANN401
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    out: object,
) -> Operation | None:
    """Returns the operation of a call; None if it touched no memory, as a view does."""
    names, written, is_view = _schema(func)
    passed = {**dict(zip(names, args, strict=False)), **kwargs}
    arguments, name = _tensors([*passed.values()]), str(func)
    if func.namespace == "c10d":
        return _collective(name, passed, arguments, out) if arguments else None
    if is_view:
        return None
    writes = _tensors([passed.get(argument) for argument in written])
    if not writes:
        # New memory counts as written, because another stream may still use its earlier content.
        known = {tensor.untyped_storage().data_ptr() for tensor in arguments}
        writes = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in known]
    if not (arguments or writes):
        return None
    reads = [] if _READS_NOTHING.match(name) else _without(arguments, writes)
    syncs_host = name == "aten._local_scalar_dense.default"
    if name in _COPIES and not passed.get("non_blocking"):
        devices = {tensor.device.type for tensor in (*reads, *writes)}
        syncs_host = "cpu" in devices and len(devices) > 1
    return Operation(name, reads, writes, syncs_host=syncs_host)


def _collective(
    name: str, passed: Mapping[str, Any], tensors: list[torch.Tensor], out: object
) -> Operation:
    """Returns the operation of a collective. Its schema does not show reads and writes."""
    group = dist.ProcessGroup.unbox(passed["process_group"])
    is_root = passed.get("root_rank") == group.rank()
    reads, writes = list[torch.Tensor](), tensors  # in place, or written alone
    if name.startswith("c10d.send") or (name.startswith("c10d.broadcast") and is_root):
        reads, writes = tensors, []
    elif name.startswith(_OUT_OF_PLACE):
        writes = _tensors(next(iter(passed.values())))
        reads = _without(tensors, writes)
    if passed.get("async_op") is False:  # the call itself waits
        return Operation(name, reads, writes)
    results = out if isinstance(out, tuple | list) else (out,)
    works = [result for result in results if isinstance(result, torch.ScriptObject)]
    work = dist.Work.unbox(works[0]) if works else None
    return Operation(name, reads, writes, str(group.group_name), work)


def _without(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t in tensors if not any(t is other for other in others)]


def _tensors(tree: object) -> list[torch.Tensor]:
    """Returns the tensors with memory in the arguments or results of an operator, in order."""
    if isinstance(tree, list | tuple):
        return [tensor for branch in tree for tensor in _tensors(branch)]
    if type(tree) not in _PLAIN:
        return []
    tensor = cast("torch.Tensor", tree)
    return [tensor] if tensor.layout is torch.strided and tensor.device.type != "meta" else []


_following: list[_Events] = []  # only the last one gets callbacks
_CALLBACKS = (
    *("event_record", "event_wait", "event_deletion"),
    *("event_synchronization", "stream_synchronization", "device_synchronization"),
)


class _Events:
    """Passes events and waits of a CUDA device to a checker."""

    def __init__(self, checker: OrderChecker) -> None:
        self._checker = checker
        self._clocks: dict[int, Clock] = {}  # of events, by address

    def event_record(self, event: int, stream: int) -> None:
        self._clocks[event] = self._checker.recorded(_name(stream))

    def event_wait(self, event: int, stream: int) -> None:
        self._checker.waited(_name(stream), self._clocks.get(event, {}))

    def event_deletion(self, event: int) -> None:
        self._clocks.pop(event, None)

    def event_synchronization(self, event: int) -> None:
        self._checker.waited(None, self._clocks.get(event, {}))

    def stream_synchronization(self, stream: int) -> None:
        self._checker.waited(None, self._checker.recorded(_name(stream)))

    def device_synchronization(self) -> None:
        self._checker.waited(None, self._checker.everything())


def current_strand(device: torch.device) -> str:
    """Returns the name of the current stream of `device`."""
    with torch.cuda.device(device):
        return _name(torch.cuda.current_stream(device).cuda_stream)


@contextlib.contextmanager
def following(checker: OrderChecker) -> Iterator[None]:
    """Passes every event and synchronisation to `checker`, and to no other one during this time."""
    _listen()
    events = _Events(checker)
    _following.append(events)
    try:
        yield
    finally:
        _following.remove(events)


@functools.cache
def _listen() -> None:
    """Registers callbacks, once: torch cannot remove them. Source: torch/cuda/_sanitizer.py."""
    activate_gpu_trace()
    for name in _CALLBACKS:
        register = getattr(gpu_trace, f"register_callback_for_{name}")
        register(functools.partial(_call, name))


def _call(name: str, *args: int) -> None:
    if _following:
        getattr(_following[-1], name)(*args)


def _name(stream: int) -> str:
    # The address of a stream is unique in the process. Only default streams all have address 0.
    return f"stream {stream:#x}" if stream else f"default of cuda:{torch.cuda.current_device()}"
