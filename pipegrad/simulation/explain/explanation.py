"""Explanation: where a step went, and what would make it shorter.

Of a simulated or a recorded run. A change that may help is a `WhatIf`: another Program, or other
costs. Each of them is simulated, and what then takes less time is an `Advice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from pipegrad.errors import PipegradError, ScheduleError
from pipegrad.plugins.registry import Plugin
from pipegrad.schedules import generate, registry
from pipegrad.schedules.builtin.one_f_one_b import in_turns
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Program
from pipegrad.schedules.schedule import Action, Schedule
from pipegrad.simulation.choose import knowing, times_of
from pipegrad.simulation.costs import Costs, HostCosts, Network, StageCosts
from pipegrad.simulation.explain.breakdown import Breakdown, break_down, longest_waits, typical_step
from pipegrad.simulation.explain.critical_path import CriticalPath, PathKind, Segment, critical_path
from pipegrad.simulation.explain.inferred import costs_of, program_of
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.simulator import simulate
from pipegrad.simulation.timeline import Timeline, in_percent, in_time

_MOST_WAITS = 5
_ROUGH = 0.1  # what a simulation may be off before advice says so
_ALL_TRIED = 50  # there are never more changes than so many in two steps
_LEAST_GAIN = 0.005
# Items of all simulations together, which then take some seconds.
_MOST_ITEMS = 250_000
_FASTER = 1.1  # how much faster a rank computes in a what-if
_UNEVEN = 1.05  # of the mean; what is below is as even as layers allow
_MOST_SUSPECTS = 3  # ranks and hops on the critical path that are tried


@dataclass(frozen=True)
class Explanation:
    """What is known of one step.

    Attributes:
        breakdown: Where the time of each rank went.
        path: What decided when the step ended.
        waits: The longest waits, with their reasons in words.
        advice: What would make it shorter.
        notes: What could not be found out.
    """

    breakdown: Breakdown
    path: CriticalPath
    waits: Sequence[str]
    advice: Sequence[Advice]
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "breakdown": self.breakdown.to_json(),
            "critical_path": self.path.to_json(),
            "waits": list(self.waits),
            "advice": [advice.to_json() for advice in self.advice],
            "notes": list(self.notes),
        }


def explain(
    timeline: Timeline,
    *,
    step: int | None = None,
    program: Program | None = None,
    costs: Costs | None = None,
) -> Explanation:
    """Returns where a step of a timeline went, why, and what would help.

    Args:
        timeline: A simulated or a recorded run.
        step: Number of the step, from 0; by default the one of median time.
        program: What was run. By default it is inferred from the timeline.
        costs: What it takes. By default they are inferred from the timeline.

    Raises:
        ScheduleError: If the timeline has no such step.
    """
    num_steps = len(timeline.step_ends)
    step = typical_step(timeline) if step is None else step
    if not 0 <= step < num_steps:
        known = f"steps 0 to {num_steps - 1}" if num_steps else "no step that has ended"
        raise ScheduleError(f"step {step} of timeline {timeline.name!r}, which has {known}")
    lookup = Lookup(timeline)
    breakdown = break_down(lookup, step)
    advice, notes = list[Advice](), list[str]()
    try:
        program = program or program_of(lookup, step)
        costs = costs or costs_of(lookup)
        advice.extend(advise(program, costs, step_seconds=breakdown.seconds))
        if advice and timeline.source == "measured":
            steps = simulate(program, costs, num_steps=_num_steps(program, costs), records=False)
            expected = steps.step_seconds[-1]
            if abs(expected - breakdown.seconds) > _ROUGH * breakdown.seconds:
                simulated = f"a simulation of this step takes {in_time(expected)}"
                notes.append(f"{simulated}: expected gains are rough")
        if _most_tried(program) < _ALL_TRIED:
            notes.append("the schedule is large: not all changes were simulated")
    except ScheduleError as error:  # the step was recorded in part
        notes.append(f"no advice: {str(error).partition(chr(10))[0]}")
    waits = longest_waits(lookup, step, _MOST_WAITS)
    return Explanation(breakdown, critical_path(lookup, step), waits, advice, notes)


@dataclass(frozen=True)
class Advice:
    """A change, and what the simulator expects.

    Attributes:
        change: In words.
        step_seconds: Expected time of a step.
        gain: The share of the present step time that it saves.
        is_bound: True if nobody can do that, as with a network that takes no time. The gain is then
            the most that any change of this sort can bring.
        peak_bytes: The most that a rank holds with this change; 0 if memory is not known.
    """

    change: str
    step_seconds: float
    gain: float
    is_bound: bool = False
    peak_bytes: int = 0

    def __str__(self) -> str:
        at_most = "at most " if self.is_bound else ""
        memory = f", {self.peak_bytes / 2**20:,.0f} MiB at peak" if self.peak_bytes else ""
        expected = f"{at_most}{in_percent(self.gain)} less, {in_time(self.step_seconds)} a step"
        return f"{self.change}: {expected}{memory}"

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return asdict(self)


def advise(
    program: Program, costs: Costs, *, step_seconds: float | None = None
) -> tuple[Advice, ...]:
    """Returns changes that make a step shorter: first real ones, then bounds, each by its gain.

    Args:
        program: What is run now.
        costs: What it takes.
        step_seconds: The time of a step that was measured. Expected times are then this time,
            shorter by the gain that the simulator sees. By default the simulated time.

    Raises:
        ScheduleError: If the costs are not those of the program's stages.
    """
    num_steps = _num_steps(program, costs)
    present = simulate(program, costs, num_steps=num_steps)
    base = present.step_seconds[-1]
    if present.timeline is None or base <= 0:
        return ()
    path = critical_path(Lookup(present.timeline), num_steps - 1)
    knows_memory = any(stage.held_bytes or stage.activation_bytes for stage in costs.stages)
    most = _most_tried(program) // num_steps
    result = []
    for _, what_if in zip(range(max(1, most)), what_ifs(program, costs, path), strict=False):
        simulated = simulate(what_if.program, what_if.costs, num_steps=num_steps, records=False)
        gain = 1 - simulated.step_seconds[-1] / base
        if gain >= _LEAST_GAIN:
            expected = (step_seconds or base) * (1 - gain)
            peak = max(simulated.peak_bytes) if knows_memory else 0
            result.append(Advice(what_if.change, expected, gain, what_if.is_bound, peak))
    return tuple(sorted(result, key=lambda advice: (advice.is_bound, -advice.gain, advice.change)))


def _num_steps(program: Program, costs: Costs) -> int:
    # Parameters that return under the next step's forwards need two steps to be seen.
    return 2 if not costs.ranks_meet or any(c.readers for c in program.collectives) else 1


def _most_tried(program: Program) -> int:
    """Returns how many changes are simulated at most: many of a small program, few of a large."""
    return max(1, _MOST_ITEMS // max(1, program.num_items))


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
    # Values of no bytes and a network without latency: only computes, hosts and waits for the order
    # of actions are left.
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
    stages = list[StageCosts]()
    for stage, rank in zip(costs.stages, ranks, strict=True):
        factor = factors.get(rank, 1.0)
        scaled = replace(
            stage,
            forward_seconds=stage.forward_seconds * factor,
            backward_seconds=stage.backward_seconds * factor,
            weight_seconds=stage.weight_seconds * factor,
        )
        stages.append(scaled)
    return replace(costs, stages=tuple(stages))


# Sending.


def _faster_hops(program: Program, costs: Costs, path: CriticalPath) -> Iterator[WhatIf]:
    hops = (tuple(sorted((s.rank, s.peer))) for s in _longest(path, "transfer"))
    for first, second in list(dict.fromkeys(hops))[:_MOST_SUSPECTS]:
        stages = list(costs.stages)
        links = (program.links[c.link] for c in program.channels if {*c[2:]} == {first, second})
        for producer, name in dict.fromkeys((link.producer, link.name) for link in links):
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
            f"{c.name}, {half} half": replace(
                own := costs.collectives[c.name],
                num_bytes=own.num_bytes // 2,
                seconds=own.seconds / 2,
                sync_bytes=own.sync_bytes // 2,
                sync_seconds=own.sync_seconds / 2,
            )
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


def _longest(path: CriticalPath, kind: PathKind) -> list[Segment]:
    """Returns segments of a kind; those whose ranks take most of the path come first."""
    seconds = path.shares.get(kind, {})
    own = [segment for segment in path.segments if segment.kind == kind]
    return sorted(own, key=lambda s: (-seconds[s.source], s.rank, s.peer))


# Schedules.


def _other_schedules(program: Program, costs: Costs) -> Iterator[WhatIf]:
    now = program.schedule
    # Some names stand for one schedule, such as hop-aware-1f1b where hops take no time.
    tried = {now.actions}
    splits = all(stage.weight_seconds > 0 for stage in costs.stages)
    # Schedules that know hops have one stage on each rank; others would need another cut.
    times = times_of(costs) if now.stage_to_rank == tuple(range(now.num_ranks)) else None
    for plugin in registry:
        schedule = _generated(plugin, now, times)
        if schedule is None or schedule.stage_to_rank != now.stage_to_rank:
            continue
        # Without the time of W nothing is known of a split backward.
        known = splits or all(
            action.kind in ("F", "B") for own in schedule.actions for action in own
        )
        if known and schedule.actions not in tried:
            tried.add(schedule.actions)
            change = f"schedule {schedule.name}{_activations(schedule, now)}"
            yield WhatIf(change, _lowered(program, schedule), costs)


def _generated(plugin: Plugin, now: Schedule, times: Times | None) -> Schedule | None:
    try:
        resolved = registry.resolve({"name": plugin.name})
        return generate(
            knowing(resolved, times) if times else resolved,
            num_ranks=now.num_ranks,
            num_microbatches=now.num_microbatches,
        )
    except PipegradError:  # not installed in full, not defined for these numbers, or needs options
        return None


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
    hops = dict(enumerate(times_of(costs).hop_seconds))
    for hop in sorted(hops, key=lambda hop: -hops[hop])[:_MOST_SUSPECTS]:
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
