"""What the codecs of hops cost: bytes on the wire, and the time to encode and to decode."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from pipegrad.comm import sync_points
from pipegrad.pipeline.codings import Codec, CodecChoice, Coding, Feedback, Hop, Position
from pipegrad.pipeline.edges import Spec
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.plugins.codec import CARRIED, Carried
from pipegrad.schedules import Program
from pipegrad.simulation.costs import CodecCosts, Costs

_ROW = 1024  # elements of a row of a value whose shape is not known
_REPEATS = 3


def measured_codecs(scheduler: Scheduler, specs: Mapping[int, Spec]) -> tuple[CodecCosts, ...]:
    """Returns what the codecs of a Scheduler cost, timed on this rank alone.

    Args:
        scheduler: Whose codecs.
        specs: What values look like, by link.
    """
    crossing = dict[tuple[Hop, Carried], list[Spec]]()
    for link, kind, source, target in scheduler.program.channels:
        carried: Carried = "activations" if kind == "F" else "gradients"
        hop = min(source, target), max(source, target)
        crossing.setdefault((hop, carried), []).append(specs[link])
    found = list[CodecCosts]()
    for (hop, carried), values in sorted(crossing.items()):
        codec = scheduler.codecs.of(hop, carried)
        if codec is not None and any(spec.nbytes > 0 for spec in values):
            found.append(_measured(hop, carried, codec, values, scheduler.sync.device))
    return tuple(found)


def with_codecs(costs: Costs, choice: CodecChoice, program: Program) -> Costs:
    """Returns costs with the codecs of a job, and with no others.

    What the costs know of them stays. Of the others values are taken for float32 in rows of 1,024,
    and encoding takes no time: nothing is measured.

    Args:
        costs: Of a job.
        choice: Its codecs.
        program: What its ranks do.
    """
    kept = [codec for codec in costs.codecs if _is_chosen(codec, choice)]
    known = {(codec.ranks, codec.carries) for codec in kept}
    crossed = {(min(c.source, c.target), max(c.source, c.target)) for c in program.channels}
    added = list[CodecCosts]()
    for hop, carried in product(sorted(crossed), CARRIED):
        codec = choice.of(hop, carried)
        if codec is not None and (hop, carried) not in known:
            value_bytes = _ROW * _ROW * torch.float32.itemsize
            share = min(1.0, codec.plugin.nbytes((_ROW, _ROW), torch.float32) / value_bytes)
            added.append(CodecCosts(hop, carried, codec.name, share))
    return replace(costs, codecs=(*kept, *added))


def _is_chosen(known: CodecCosts, choice: CodecChoice) -> bool:
    codec = choice.of(known.ranks, known.carries)
    return codec is not None and codec.name == known.codec


def _measured(
    hop: Hop, carried: Carried, codec: Codec, specs: Sequence[Spec], device: torch.device
) -> CodecCosts:
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
            seconds = _seconds(coding, feedback, drawn.to(spec.dtype), spec, Position(number, 0))
            encode, decode = encode + seconds[0], decode + seconds[1]
    share = message_bytes / value_bytes
    return CodecCosts(hop, carried, codec.name, share, encode / value_bytes, decode / value_bytes)


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
        feedback.decide()  # from now on an error is added, as in all steps but the first
    stamps = stamps[1:]  # the first one makes memory, and kernels
    return min(m - b for b, m, _ in stamps), min(e - m for _, m, e in stamps)


def _never() -> bool:
    return False
