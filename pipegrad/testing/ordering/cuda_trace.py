"""What CUDA's own events order, autograd's included: told by torch's GPU trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pipegrad.interop.private import activate_gpu_trace, gpu_trace
from pipegrad.testing.ordering.clocks import Clock

if TYPE_CHECKING:
    from pipegrad.testing.ordering.checker import OrderChecker

_following: list[tuple[OrderChecker, dict[int, Clock]]] = []  # who is told, and events by address


def strand(device: torch.device) -> str:
    """Returns the name of the current stream of `device`."""
    with torch.cuda.device(device):
        return _name(torch.cuda.current_stream(device).cuda_stream)


@contextlib.contextmanager
def following(checker: OrderChecker) -> Iterator[None]:
    """Tells `checker`, and nobody else meanwhile, of every event and synchronisation."""
    _listen()
    told = (checker, dict[int, "Clock"]())
    _following.append(told)
    try:
        yield
    finally:
        _following.remove(told)


@functools.cache
def _listen() -> None:
    """Registers callbacks, for good: torch takes none back.

    Source: torch/cuda/_sanitizer.py.
    """
    activate_gpu_trace()
    gpu_trace.register_callback_for_event_record(_recorded)
    gpu_trace.register_callback_for_event_wait(_waited)
    gpu_trace.register_callback_for_event_deletion(_deleted)
    gpu_trace.register_callback_for_event_synchronization(_synchronized_event)
    gpu_trace.register_callback_for_stream_synchronization(_synchronized_stream)
    gpu_trace.register_callback_for_device_synchronization(_synchronized_device)


def _name(stream: int) -> str:
    # An address is one in the process; each device has a default stream, at 0.
    return f"stream {stream:#x}" if stream else f"default of cuda:{torch.cuda.current_device()}"


def _recorded(event: int, stream: int) -> None:
    for checker, events in _following[-1:]:
        events[event] = checker.recorded(_name(stream))


def _waited(event: int, stream: int) -> None:
    for checker, events in _following[-1:]:
        checker.waited(_name(stream), events.get(event, {}))


def _deleted(event: int) -> None:
    for _, events in _following[-1:]:
        events.pop(event, None)


def _synchronized_event(event: int) -> None:
    for checker, events in _following[-1:]:
        checker.waited(None, events.get(event, {}))


def _synchronized_stream(stream: int) -> None:
    for checker, _ in _following[-1:]:
        checker.waited(None, checker.recorded(_name(stream)))


def _synchronized_device() -> None:
    for checker, _ in _following[-1:]:
        checker.waited(None, checker.everything())
