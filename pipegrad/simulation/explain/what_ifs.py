"""WhatIf: a change of a Program or of its costs, to be simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipegrad.errors import PipegradError
from pipegrad.plugins.registry import Plugin
from pipegrad.schedules import generate, registry
from pipegrad.schedules.builtin.one_f_one_b import in_turns
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Program
from pipegrad.schedules.schedule import Action, Schedule
from pipegrad.simulation.choose import knowing, merged_stages
from pipegrad.simulation.costs import CollectiveCosts, Costs, HostCosts, Network, StageCosts
from pipegrad.simulation.explain.critical_path import CriticalPath, PathKind, Segment
from pipegrad.simulation.explain.words import in_percent

_FASTER = 1.1  # how much faster a rank computes in a what-if
_UNEVEN = 1.05  # of the mean; what is below is as even as layers allow
_MOST_SUSPECTS = 3  # ranks and hops on the critical path that are tried


@dataclass(frozen=True)
class WhatIf:
    """A change that may make a step shorter.

    Attributes:
        change: In words.
        program: What would be run.
        costs: What that would cost.
        is_bound: True if nobody can do that, as with a network that takes no time.
    """

    change: str
    program: Program
    costs: Costs
    is_bound: bool = False


def what_ifs(program: Program, costs: Costs, path: CriticalPath) -> Iterator[WhatIf]:
    """Yields what is tried, the most telling first: a large program leaves no time for all."""
    yield from _bounds(program, costs)
    yield from _evened(program, costs)
    yield from _other_schedules(program, costs)
    yield from _longer_warm_ups(program, costs)
    yield from _smaller_buckets(program, costs)
    yield from _faster_hops(program, costs, path)
    yield from _faster_ranks(program, costs, path)


# Bounds.


def _bounds(program: Program, costs: Costs) -> Iterator[WhatIf]:
    silent = tuple(replace(stage, outputs={}) for stage in costs.stages)
    network = Network(hosts=costs.network.hosts)
    free = replace(costs, stages=silent, network=network, collectives={})
    yield WhatIf("no communication at all", program, free, is_bound=True)
    if costs.collectives:
        reduced = replace(costs, collectives={})
        yield WhatIf("reductions that take no time", program, reduced, is_bound=True)
    if costs.host != HostCosts():
        hostless = replace(costs, host=HostCosts())
        yield WhatIf("hosts that take no time", program, hostless, is_bound=True)


# Computing.


def _compute_seconds(program: Program, costs: Costs) -> list[float]:
    """Returns for each rank what it computes in a step."""
    kinds = (costs.stages[a.stage].seconds(a.kind) for own in program.schedule.actions for a in own)
    return [sum(next(kinds) for _ in own) for own in program.schedule.actions]


def _evened(program: Program, costs: Costs) -> Iterator[WhatIf]:
    seconds = _compute_seconds(program, costs)
    mean = sum(seconds) / len(seconds)
    slowest = max(range(len(seconds)), key=lambda rank: (seconds[rank], -rank))
    if mean > 0 and seconds[slowest] > _UNEVEN * mean:
        factors = {rank: mean / own for rank, own in enumerate(seconds) if own > 0}
        change = (
            f"layers moved so that all ranks compute alike (rank {slowest} computes "
            f"{seconds[slowest] / mean:.2f} times the mean)"
        )
        yield WhatIf(change, program, _scaled(program, costs, factors))


def _faster_ranks(program: Program, costs: Costs, path: CriticalPath) -> Iterator[WhatIf]:
    ranks = (segment.rank for segment in _longest(path, "compute"))
    for rank in list(dict.fromkeys(ranks))[:_MOST_SUSPECTS]:
        faster = _scaled(program, costs, {rank: 1 / _FASTER})
        yield WhatIf(f"rank {rank} computes {in_percent(_FASTER - 1)} faster", program, faster)


def _scaled(program: Program, costs: Costs, factors: Mapping[int, float]) -> Costs:
    ranks = program.schedule.stage_to_rank
    stages = tuple(
        _scaled_stage(stage, factors.get(rank, 1.0))
        for stage, rank in zip(costs.stages, ranks, strict=True)
    )
    return replace(costs, stages=stages)


def _scaled_stage(stage: StageCosts, factor: float) -> StageCosts:
    return replace(
        stage,
        forward_seconds=stage.forward_seconds * factor,
        backward_seconds=stage.backward_seconds * factor,
        weight_seconds=stage.weight_seconds * factor,
    )


# Sending.


def _faster_hops(program: Program, costs: Costs, path: CriticalPath) -> Iterator[WhatIf]:
    hops = (tuple(sorted((s.rank, s.peer))) for s in _longest(path, "transfer"))
    for first, second in list(dict.fromkeys(hops))[:_MOST_SUSPECTS]:
        stages = list(costs.stages)
        for producer, name in _values(program, {first, second}):
            outputs = dict(stages[producer].outputs)
            outputs[name] = outputs.get(name, 0) // 2
            stages[producer] = replace(stages[producer], outputs=outputs)
        # Half the bytes are sent in the time of twice the rate. Hops may share a NIC, so the rate
        # of one of them cannot be changed alone.
        change = f"hop {first}-{second} at twice the rate, or half the bytes over it"
        yield WhatIf(change, program, replace(costs, stages=tuple(stages)))


def _smaller_buckets(program: Program, costs: Costs) -> Iterator[WhatIf]:
    """Yields each reduction in two halves; the first one leaves earlier."""
    known = [c for c in program.collectives if c.name in costs.collectives]
    if known:
        halves = [(c, half) for c in program.collectives for half in ("first", "second")]
        collectives = {
            f"{c.name}, {half} half": _halved(costs.collectives[c.name])
            for c, half in halves
            if c in known
        }
        program = lower(
            program.schedule,
            links=program.links,
            collectives=[c._replace(name=f"{c.name}, {half} half") for c, half in halves],
        )
        change = "buckets of half the size, if parameters are small enough"
        yield WhatIf(change, program, replace(costs, collectives=collectives))


def _halved(costs: CollectiveCosts) -> CollectiveCosts:
    return replace(
        costs,
        num_bytes=costs.num_bytes // 2,
        seconds=costs.seconds / 2,
        sync_bytes=costs.sync_bytes // 2,
        sync_seconds=costs.sync_seconds / 2,
    )


def _values(program: Program, ranks: set[int]) -> dict[tuple[int, str], None]:
    """Returns the values that go between two ranks: the stage that makes each, and its name."""
    links = (program.links[c.link] for c in program.channels if {c.source, c.target} == ranks)
    return dict.fromkeys((link.producer, link.name) for link in links)


def _longest(path: CriticalPath, kind: PathKind) -> list[Segment]:
    """Returns segments of a kind; those whose ranks take most of the path come first."""
    seconds = path.shares.get(kind, {})
    own = [segment for segment in path.segments if segment.kind == kind]
    return sorted(own, key=lambda s: (-seconds[s.source], s.rank, s.peer))


# Schedules.


def _other_schedules(program: Program, costs: Costs) -> Iterator[WhatIf]:
    now = program.schedule
    tried = {now.actions}  # some names stand for one schedule
    splits = all(stage.weight_seconds > 0 for stage in costs.stages)
    for plugin in registry:
        schedule = _generated(plugin, program, costs)
        if schedule is None or schedule.stage_to_rank != now.stage_to_rank:
            continue  # other stages would need another cut
        # Without the time of W nothing is known of a split backward.
        known = splits or all(
            action.kind in ("F", "B") for own in schedule.actions for action in own
        )
        if known and schedule.actions not in tried:
            tried.add(schedule.actions)
            change = f"schedule {schedule.name}{_activations(schedule, now)}"
            yield WhatIf(change, _lowered(program, schedule), costs)


def _generated(plugin: Plugin, program: Program, costs: Costs) -> Schedule | None:
    try:
        return generate(
            knowing(registry.resolve({"name": plugin.name}), _times(program, costs)),
            num_ranks=program.schedule.num_ranks,
            num_microbatches=program.schedule.num_microbatches,
        )
    except PipegradError:  # not installed in full, not defined for these numbers, or needs options
        return None


def _times(program: Program, costs: Costs) -> Times:
    """Returns what a microbatch takes on each rank of a Program, and on each hop."""
    size, ranks = program.schedule.num_ranks, program.schedule.stage_to_rank
    by_rank = [
        [s for s, its_rank in zip(costs.stages, ranks, strict=True) if its_rank == r]
        for r in range(size)
    ]
    stages = [merged_stages(own) if own else StageCosts() for own in by_rank]
    return Times(
        forward_seconds=tuple(stage.forward_seconds for stage in stages),
        backward_seconds=tuple(stage.backward_seconds for stage in stages),
        hop_seconds=tuple(_hop_seconds(program, costs, hop) for hop in range(size - 1)),
        weight_seconds=tuple(stage.weight_seconds for stage in stages),
    )


def _hop_seconds(program: Program, costs: Costs, hop: int) -> float:
    """Returns the time of a microbatch's values between neighbouring ranks, in one direction."""
    total = 0.0
    for way in (("F", hop, hop + 1), ("B", hop + 1, hop)):
        channels = [channel for channel in program.channels if channel[1:] == way]
        crossings = [costs.crossing(program.links[c.link], c) for c in channels]
        total += costs.crossing_seconds(crossings, *way[1:])
    return total / 2  # as a step measures a hop


def _longer_warm_ups(program: Program, costs: Costs) -> Iterator[WhatIf]:
    schedule = program.schedule
    if schedule.stage_to_rank != tuple(range(schedule.num_ranks)):
        return
    kinds = [[action.kind for action in own] for own in schedule.actions]
    if any({*own} != {"F", "B"} for own in kinds):
        return
    warm_ups = [own.index("B") - 1 for own in kinds]
    most = schedule.num_microbatches
    if in_turns(schedule.name, warm_ups, most).actions != schedule.actions:
        return
    hops = range(schedule.num_ranks - 1)
    for hop in sorted(hops, key=lambda h: -_hop_seconds(program, costs, h))[:_MOST_SUSPECTS]:
        longer = [n + (rank <= hop) for rank, n in enumerate(warm_ups)]
        longer_schedule = in_turns(schedule.name, longer, most)
        if longer_schedule.actions != schedule.actions:
            ranks = "rank 0" if hop == 0 else f"ranks 0 to {hop}"
            held = _activations(longer_schedule, schedule)
            change = f"one more forward in the warm-up of {ranks}{held}"
            yield WhatIf(change, _lowered(program, longer_schedule), costs)


def _activations(schedule: Schedule, now: Schedule) -> str:
    """Returns in words what a schedule holds, if it holds more than the present one."""
    most, before = (max(map(_live, each.actions)) for each in (schedule, now))
    return f" (a rank holds {most} activations, now {before})" if most > before else ""


def _live(actions: Sequence[Action]) -> int:
    """Returns the most microbatches of a rank, over its stages, that wait for their backward."""
    changes = (1 if a.kind == "F" else -1 if a.kind in ("B", "W") else 0 for a in actions)
    return max(accumulate(changes), default=0)


def _lowered(program: Program, schedule: Schedule) -> Program:
    """Returns the Program of another schedule for the same stages."""
    return lower(
        replace(schedule, feeds=program.schedule.feeds),
        links=program.links,
        collectives=program.collectives,
    )
