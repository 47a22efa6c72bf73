"""Timing: what a codec makes of the values of a hop, in bytes and in seconds, on this rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipegrad.comm import sync_points
from pipegrad.pipeline.coding.choice import Codec
from pipegrad.pipeline.coding.coding import Coding
from pipegrad.pipeline.coding.feedback import Feedback, Position
from pipegrad.pipeline.transfers.specs import Spec
from pipegrad.plugins.codec import Carried

_REPEATS = 3


class Coded(NamedTuple):
    """What a codec makes of the values that cross a hop in a microbatch.

    Attributes:
        value_bytes: Without the codec.
        message_bytes: With it.
        encode_seconds: Of all values together.
        decode_seconds: Likewise.
    """

    value_bytes: int
    message_bytes: int
    encode_seconds: float
    decode_seconds: float


def time_codec(
    codec: Codec, carried: Carried, specs: Sequence[Spec], device: torch.device
) -> Coded:
    """Returns what a codec makes of values that look like this, with random numbers.

    Sync: the host waits for the device.
    """
    feedback = Feedback()
    coding = Coding(codec, carried, feedback)
    value_bytes = message_bytes = 0
    encode = decode = 0.0
    # Numbers of its own: those of the caller stay as they are.
    generator = torch.Generator(device).manual_seed(0)
    for number, spec in enumerate(specs):
        wire = coding.on_wire(spec)
        value_bytes += spec.nbytes
        message_bytes += wire.nbytes
        if wire is not spec:
            drawn = torch.randn(spec.shape, dtype=torch.float32, device=device, generator=generator)
            value, position = drawn.to(spec.dtype), Position(number, 0)
            seconds = _seconds(coding, feedback, value, spec, position)
            encode, decode = encode + seconds[0], decode + seconds[1]
    return Coded(value_bytes, message_bytes, encode, decode)


def _seconds(
    coding: Coding, feedback: Feedback, value: Tensor, spec: Spec, position: Position
) -> tuple[float, float]:
    """Returns the shortest of some times: a longer one shows a machine that was busy."""
    decoded, stamps = torch.empty_like(value), list[tuple[float, float, float]]()
    for _ in range(_REPEATS + 1):
        sync_points.finish_device(value.device)
        begin = time.perf_counter()
        message = coding.encoded(value, spec, position)
        sync_points.finish_device(value.device)
        middle = time.perf_counter()
        coding.decode(message, decoded)
        sync_points.finish_device(value.device)
        stamps.append((begin, middle, time.perf_counter()))
        feedback.end(_never)
        feedback.settle()  # from now on an error is added, as in all steps but the first
    stamps = stamps[1:]  # the first one makes memory, and kernels
    return min(m - b for b, m, _ in stamps), min(e - m for _, m, e in stamps)


def _never() -> bool:
    return False
