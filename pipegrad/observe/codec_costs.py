"""What the codecs of hops cost: bytes on the wire, and the time to encode and to decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import torch

from pipegrad.pipeline.coding.choice import CodecChoice
from pipegrad.pipeline.coding.timing import Coded, time_codec
from pipegrad.pipeline.coding.worth import codec_costs, specs_of
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.pipeline.transfers.specs import Spec
from pipegrad.plugins.codec import CARRIED
from pipegrad.schedules import Program
from pipegrad.simulation.costs import CodecCosts, Costs

_ROW = 1024  # elements of a row of a value whose shape is not known


def measured_codecs(scheduler: Scheduler, specs: Mapping[int, Spec]) -> tuple[CodecCosts, ...]:
    """Returns what the codecs of a Scheduler cost, timed on this rank alone.

    Args:
        scheduler: Whose codecs.
        specs: What values look like, by link.
    """
    found = list[CodecCosts]()
    for (hop, carried), own in sorted(specs_of(scheduler.program, specs).items()):
        codec = scheduler.codecs.of(hop, carried)
        if codec is not None:
            coded = time_codec(codec, carried, own, scheduler.sync.device)
            if coded.value_bytes:
                found.append(codec_costs(hop, carried, codec.name, coded))
    return tuple(found)


def with_codecs(costs: Costs, choice: CodecChoice, program: Program) -> Costs:
    """Returns costs with the codecs of a job, and with no others.

    What the costs know of them stays. Of the others values are taken for float32 in rows of 1,024,
    and encoding takes no time: nothing is measured.

    Args:
        costs: Of a job.
        choice: Its codecs. If they are to be chosen in its second step, those of the costs stay.
        program: What its ranks do.
    """
    kept = [codec for codec in costs.codecs if choice.auto or _is_chosen(codec, choice)]
    known = {(codec.ranks, codec.carries) for codec in kept}
    crossed = {(min(c.source, c.target), max(c.source, c.target)) for c in program.channels}
    added = list[CodecCosts]()
    for hop, carried in product(sorted(crossed), CARRIED):
        codec = choice.of(hop, carried)
        if codec is not None and (hop, carried) not in known:
            value_bytes = _ROW * _ROW * torch.float32.itemsize
            message_bytes = codec.plugin.nbytes((_ROW, _ROW), torch.float32)
            coded = Coded(value_bytes, min(value_bytes, message_bytes), 0.0, 0.0)
            added.append(codec_costs(hop, carried, codec.name, coded))
    return replace(costs, codecs=(*kept, *added))


def _is_chosen(known: CodecCosts, choice: CodecChoice) -> bool:
    codec = choice.of(known.ranks, known.carries)
    return codec is not None and codec.name == known.codec
