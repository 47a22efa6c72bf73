"""What CUDA's own events order, autograd's included: told by torch's GPU trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.cuda import _gpu_trace  # where torch's own sanitizer listens too

if TYPE_CHECKING:
    from pipegrad.testing.clocks import Clock
    from pipegrad.testing.order import OrderChecker

_following: list[OrderChecker] = []  # one for the process: torch's callbacks cannot be taken back
_events: dict[int, Clock] = {}


def strand(device: torch.device) -> str:
    """Returns the name of the current stream of `device`."""
    return _name(torch.cuda.current_stream(device).cuda_stream)


def follow(checker: OrderChecker) -> None:
    """Tells `checker`, instead of the one before, of every event and synchronisation from now on.

    Source: the callbacks of torch/cuda/_sanitizer.py.
    """
    if not _following:
        torch._C._activate_gpu_trace()
        _gpu_trace.register_callback_for_event_record(_recorded)
        _gpu_trace.register_callback_for_event_wait(_waited)
        _gpu_trace.register_callback_for_event_deletion(_deleted)
        _gpu_trace.register_callback_for_event_synchronization(_synchronized_event)
        _gpu_trace.register_callback_for_stream_synchronization(_synchronized_stream)
        _gpu_trace.register_callback_for_device_synchronization(_synchronized_device)
    _following[:] = [checker]
    _events.clear()


def _name(stream: int) -> str:
    return f"stream {stream:#x}" if stream else "default stream"


def _recorded(event: int, stream: int) -> None:
    _events[event] = _following[0].recorded(_name(stream))


def _waited(event: int, stream: int) -> None:
    _following[0].waited(_name(stream), _events.get(event, {}))


def _deleted(event: int) -> None:
    _events.pop(event, None)


def _synchronized_event(event: int) -> None:
    _following[0].waited(None, _events.get(event, {}))


def _synchronized_stream(stream: int) -> None:
    _following[0].waited(None, _following[0].recorded(_name(stream)))


def _synchronized_device() -> None:
    _following[0].waited(None, _following[0].everything())
