"""CUDA events and synchronisations, also those of autograd, from torch's GPU trace."""

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

# Checkers, and the clocks of their events by address. Only the last checker gets callbacks.
_following: list[tuple[OrderChecker, dict[int, Clock]]] = []


def strand(device: torch.device) -> str:
    """Returns the name of the current stream of `device`."""
    with torch.cuda.device(device):
        return _name(torch.cuda.current_stream(device).cuda_stream)


@contextlib.contextmanager
def following(checker: OrderChecker) -> Iterator[None]:
    """Passes every event and synchronisation to `checker`, and to no other checker meanwhile."""
    _listen()
    entry = (checker, dict[int, "Clock"]())
    _following.append(entry)
    try:
        yield
    finally:
        _following.remove(entry)


@functools.cache
def _listen() -> None:
    """Registers callbacks, once: torch cannot remove them.

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
    # The address of a stream is unique in the process. Only default streams all have address 0.
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
