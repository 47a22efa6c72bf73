"""Inferred: the Program of a timeline, and its Costs. What-ifs need only a recorded run."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import median

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.lower import chain, lower
from pipegrad.schedules.program.program import Program
from pipegrad.schedules.schedule import Action, Schedule
from pipegrad.simulation.costs import (
    CollectiveCosts,
    Costs,
    HostCosts,
    LinkCosts,
    Network,
    StageCosts,
)
from pipegrad.simulation.explain.lookup import Lookup, name_of
from pipegrad.simulation.timeline import COMPUTE, ON_RANK, Span, Timeline

# Values get the bytes that they would have at this rate, because a timeline has times and no bytes,
# and what-ifs change sizes and rates.
_NOMINAL_RATE = 1e9
_SHARED = 1.15  # transfers that take so much longer during others share a NIC
_Value = tuple[str, int]  # a name, and the stage that makes it
_Way = tuple[_Value, int, int]  # a value, or its gradient, and the ranks at its ends


def program_of(lookup: Lookup, step: int) -> Program:
    """Returns the Program that a step of a timeline ran, as far as the timeline shows it.

    Raises:
        ScheduleError: If computes of the step are missing. No pipeline can have run it then.
    """
    timeline = lookup.timeline
    computes: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in sorted(lookup.spans, key=attrgetter("begin", "end")):
        if span.kind in COMPUTE and span.step == step:
            computes[span.rank].append(span)
    # Before anything is made for each microbatch: a file may name many, and have none.
    least = 2 * len(timeline.stage_to_rank) * timeline.num_microbatches
    if (num_computes := sum(map(len, computes))) < least:
        raise ScheduleError(
            f"step {step} was recorded in part: {num_computes:,} computes of at least {least:,}"
        )
    links = timeline.links or chain(len(timeline.stage_to_rank))
    feeds = [
        tuple(sorted({link.producer for link in links if stage in link.consumers}))
        for stage in range(len(timeline.stage_to_rank))
    ]
    actions = tuple(
        tuple(
            Action(s.stage, s.kind, s.microbatch) for s in spans if s.kind in ("F", "B", "I", "W")
        )
        for spans in computes
    )
    schedule = Schedule(
        timeline.name or "recorded",
        timeline.num_microbatches,
        timeline.stage_to_rank,
        actions,
        feeds=tuple(feeds),
    )
    _ = schedule.ticks  # raises if an action is missing
    return lower(schedule, links=links)


def costs_of(lookup: Lookup) -> Costs:
    """Returns costs with which a simulation gives the times of a timeline.

    Each time is the median of all steps. Bytes are not known: values have as many as they would
    have at 1 GB/s, and the link of each pair of ranks has the rate that gives their times. If
    transfers take longer during others of their ranks, NICs limit them. Memory is not known.
    """
    ways, is_shared = _way_seconds(lookup)
    sizes = dict[_Value, int]()
    for (value, _, _), time in ways.items():
        sizes.setdefault(value, max(1, round(time * _NOMINAL_RATE)))
    stages = tuple(_stages(lookup, sizes))
    seconds = _collective_seconds(lookup)
    collectives = {
        own.name: CollectiveCosts(
            num_bytes=round(seconds[own.name, "reduction"] * _NOMINAL_RATE),
            seconds=seconds[own.name, "reduction"],
            sync_seconds=seconds[own.name, "parameter sync"],
            stages=own.stages,
            comm_stream=own.comm_stream,
            readers=own.readers,
        )
        for own in lookup.timeline.collectives
    }
    links = tuple(_edges(ways, sizes))
    rate = max((link.bytes_per_second for link in links), default=math.inf)
    network = Network(nic_bytes_per_second=rate if is_shared else math.inf, links=links)
    return Costs(
        stages,
        network,
        collectives,
        host_costs(replace(lookup.timeline, spans=tuple(lookup.spans))),
        ranks_meet=_ranks_meet(lookup),
        meeting_seconds=_meeting_seconds(lookup),
    )


def _way_seconds(lookup: Lookup) -> tuple[dict[_Way, float], bool]:
    """Returns the time of each value over each link, and True if links share a NIC.

    They do if transfers take longer while another link of one of their ranks is in use.
    """
    transfers = [span for span in lookup.spans if span.kind == "transfer"]
    crowded = _crowded(transfers)
    tables = [defaultdict[_Way, list[float]](list) for _ in range(3)]
    for span in transfers:
        which = (span in crowded) if lookup.has_end(span) else 2
        name = span.label.removeprefix("gradient of ").rpartition(" of ")[0]
        way = (name, span.stage), span.rank, span.peer
        tables[which][way].append(lookup.transfer_seconds(span))
    alone, beside = ({way: median(own) for way, own in table.items()} for table in tables[:2])
    slower = [beside[way] / alone[way] for way in beside if alone.get(way, 0.0) > 0]
    ways = beside | alone
    # If no receiver ever waited, take the least measured time, because no transfer took longer. The
    # same bytes in the other direction may give a shorter time.
    for (value, source, target), own in tables[2].items():
        back = ways.get((value, target, source), min(own))
        ways.setdefault((value, source, target), min(*own, back))
    return ways, bool(slower) and median(slower) > _SHARED


def _crowded(transfers: Iterable[Span]) -> set[Span]:
    """Returns transfers that were on their way while another link of a NIC had one."""
    crowded = set[Span]()
    nics = defaultdict[tuple[str, int], list[Span]](list)
    for span in sorted(transfers, key=attrgetter("begin", "end")):
        for nic in (("out", span.rank), ("in", span.peer)):
            others = [other for other in nics[nic] if other.end > span.begin]
            for other in others:
                if (other.rank, other.peer) != (span.rank, span.peer):
                    crowded |= {span, other}
            nics[nic] = [*others, span]
    return crowded


def _edges(ways: Mapping[_Way, float], sizes: Mapping[_Value, int]) -> Iterator[LinkCosts]:
    totals = dict[tuple[int, int], tuple[float, int]]()
    for (value, source, target), time in ways.items():
        seconds, num_bytes = totals.get((source, target), (0.0, 0))
        totals[source, target] = seconds + time, num_bytes + sizes[value]
    for edge, (seconds, num_bytes) in totals.items():
        if seconds > 0:
            yield LinkCosts(*edge, bytes_per_second=num_bytes / seconds)


def _stages(lookup: Lookup, sizes: Mapping[tuple[str, int], int]) -> Iterator[StageCosts]:
    seconds = defaultdict[tuple[int, str], list[float]](list)
    steps = defaultdict[int, dict[int, float]](dict)
    for span in lookup.spans:
        if span.kind in COMPUTE:
            seconds[span.stage, span.kind].append(span.seconds)
        elif span.kind == "optimizer":
            steps[span.rank][span.step] = steps[span.rank].get(span.step, 0.0) + span.seconds
    ranks = lookup.timeline.stage_to_rank
    num_stages = Counter(ranks)
    outputs = defaultdict[int, dict[str, int]](dict)
    for (name, producer), size in sizes.items():
        outputs[producer][name] = size
    for stage, rank in enumerate(ranks):
        forward, whole, inputs, weights = (_median(seconds[stage, kind]) for kind in COMPUTE)
        yield StageCosts(
            forward_seconds=forward,
            backward_seconds=inputs + weights or whole,
            weight_seconds=weights,
            optimizer_seconds=_median(steps[rank].values()) / num_stages[rank],
            outputs=outputs[stage],
        )


def _median(seconds: Collection[float]) -> float:
    return median(seconds) if seconds else 0.0


def _collective_seconds(lookup: Lookup) -> Mapping[tuple[str, str], float]:
    """Returns the seconds of each reduction, and of each parameter sync, by name and kind."""
    result = defaultdict[tuple[str, str], list[float]](list)
    for kind in ("reduction", "parameter sync"):
        for step in range(len(lookup.timeline.step_ends)):
            for group in lookup.collectives(kind, step):
                end = max(span.end for span in group)
                begin = min(max(span.begin for span in group), end)
                result[name_of(group[0]), kind].append(end - begin)
    return defaultdict(float, {key: median(own) for key, own in result.items()})


def host_costs(timeline: Timeline) -> HostCosts:
    """Returns the time of hosts on top of computing, from a measured timeline.

    An action has the mean of the host time right before computes. A step has all other host time,
    on the rank that has least, because other ranks also wait in it for events without a span, such
    as the loss of the last stage.
    """
    before, actions, rests = 0.0, 0, list[float]()
    on_rank = (span for span in timeline.spans if span.kind in ON_RANK)
    in_order = sorted(on_rank, key=attrgetter("rank", "begin", "end"))
    for _, of_rank in groupby(in_order, key=attrgetter("rank")):
        spans = list(of_rank)
        host = sum(s.seconds for s in spans if s.kind == "host")
        own = sum(
            s.seconds for s, after in pairwise(spans) if s.kind == "host" and after.kind in COMPUTE
        )
        before += own
        actions += sum(s.kind in COMPUTE for s in spans)
        rests.append(host - own)
    return HostCosts(
        action_seconds=before / max(actions, 1),
        step_seconds=max(0.0, min(rests, default=0.0)) / max(len(timeline.step_ends), 1),
    )


def _meeting_seconds(lookup: Lookup) -> float:
    """Returns the time that the last rank waits for others: the time of their messages."""
    waits = defaultdict[int, dict[int, list[Span]]](dict)
    for span in lookup.spans:
        if span.kind == "wait for ranks" and lookup.timeline.num_ranks > 1:
            waits[span.step].setdefault(span.rank, []).append(span)
    lasts = (
        max(own.values(), key=lambda spans: spans[0].begin)
        for own in waits.values()
        if len(own) == lookup.timeline.num_ranks  # else the last one waits for nothing
    )
    return _median([sum(span.seconds for span in last) for last in lasts])


def _ranks_meet(lookup: Lookup) -> bool:
    """Returns True if no rank goes on after its last backward before all have ended theirs."""
    ended, went_on = defaultdict[int, float](float), dict[int, float]()
    for span in lookup.spans:
        if span.kind in COMPUTE:
            ended[span.step] = max(ended[span.step], span.end)
        if span.kind in COMPUTE or span.kind == "optimizer":
            step = span.step if span.kind == "optimizer" else span.step - 1
            went_on[step] = min(went_on.get(step, span.begin), span.begin)
    return all(went_on[step] >= ended[step] - lookup.tolerance for step in went_on)
