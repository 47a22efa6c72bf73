"""Explanation: the time of a step by cause, and changes that would make it shorter.

The run is simulated or recorded. A change that may help is a `WhatIf`: another Program, or other
costs. Each of them is simulated, and becomes an `Advice` if its step takes less time. An advice
names a key of a configuration, or is a bound that nobody can reach, such as a network that takes no
time.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, islice, pairwise
from typing import Any, Literal, NamedTuple

from pipegrad.errors import PipegradError, ScheduleError
from pipegrad.plugins.registry import Plugin
from pipegrad.schedules import generate, registry
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Program
from pipegrad.schedules.schedule import Schedule
from pipegrad.simulation.choose import OF_CHUNKS, knowing, times_of
from pipegrad.simulation.costs import Costs, HostCosts, Network, StageCosts
from pipegrad.simulation.explain.critical_path import (
    Breakdown,
    CriticalPath,
    break_down,
    critical_path,
    typical_step,
)
from pipegrad.simulation.explain.inferred import costs_of, program_of
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.explain.sentence import as_arguments, sentence
from pipegrad.simulation.fastest_cut import balanced_seconds, fastest_cut
from pipegrad.simulation.simulator import Simulation, simulate
from pipegrad.simulation.timeline import BATCH, Timeline, in_percent, in_time

_ROUGH = 0.1  # a larger error of a simulation gets a note
_ALL_TRIED = 50  # there are never more changes than so many in two steps
_LEAST_GAIN = 0.005
# Items of all simulations together, which then take some seconds.
_MOST_ITEMS = 250_000
_UNEVEN = 1.05  # of the mean; ranks below it are as even as layers allow

Cause = Literal["ranks", "links", "pipeline", "reductions", "host"]


@dataclass(frozen=True)
class Explanation:
    """The time of one step, its causes, and advice.

    Attributes:
        timeline: The run that it is a step of.
        breakdown: The time of each rank by part.
        path: The critical path, which decided when the step ended.
        advice: Changes that would make it shorter.
        error: The share by which a simulation of this step is off.
        notes: Lines about the limits of this explanation.
    """

    timeline: Timeline
    breakdown: Breakdown
    path: CriticalPath
    advice: Sequence[Advice]
    error: float = 0.0
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        """The sentence, with the arguments that Python has for keys of a configuration."""
        return as_arguments(sentence(self))

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "sentence": sentence(self),
            "breakdown": asdict(self.breakdown),
            "critical_path": self.path.to_json(),
            "advice": [asdict(advice) for advice in self.advice],
            "notes": list(self.notes),
        }


def explain(
    timeline: Timeline,
    *,
    step: int | None = None,
    program: Program | None = None,
    costs: Costs | None = None,
) -> Explanation:
    """Returns the time of a step of a timeline, its causes, and advice.

    For example, ``print(explain(Timeline.load(path)))`` prints them as one sentence.

    Args:
        timeline: A simulated or a recorded run.
        step: Number of the step, from 0; by default the one of median time.
        program: The Program that was run; by default it is inferred from the timeline.
        costs: Its costs; by default they are inferred from the timeline.

    Raises:
        ScheduleError: If the timeline has no such step.
    """
    num_steps = len(timeline.step_ends)
    step = typical_step(timeline) if step is None else step
    if not 0 <= step < num_steps:
        known = f"steps 0 to {num_steps - 1}" if num_steps else "no step that has ended"
        raise ScheduleError(f"step {step} of timeline {timeline.name!r}, which has {known}")
    lookup = Lookup(timeline)
    breakdown, path = break_down(lookup, step), critical_path(lookup, step)
    advice, notes, error = list[Advice](), list[str](), 0.0
    try:
        program = program or program_of(lookup, step)
        costs = costs or costs_of(lookup)
        advice.extend(advise(program, costs, step_seconds=breakdown.seconds, of=timeline))
        if advice and timeline.source == "measured":
            expected = _last_step(program, costs).step_seconds[-1]
            # Waiting for data is measured, and is no error of the simulation.
            without = breakdown.seconds - path.seconds_of("host", BATCH)
            error = abs(expected - without) / breakdown.seconds if breakdown.seconds else 0.0
            if error > _ROUGH:
                notes.append(
                    f"a simulation of this step takes {in_time(expected)}: a gain may be wrong by "
                    f"{in_percent(error)} of a step"
                )
        is_split = any(stage.weight_seconds for stage in costs.stages)
        if timeline.source == "predicted" and not is_split and timeline.num_ranks > 1:
            notes.append(
                "weight_seconds of the costs are 0, so nothing is known of schedules that split "
                "backwards: measure_costs of a Scheduler with such a schedule, as zb-h1, has them"
            )
        if _MOST_ITEMS // max(1, program.num_items) < _ALL_TRIED:
            notes.append("the schedule is large: not all changes were simulated")
    except ScheduleError as refusal:  # the step was recorded in part
        notes.append(f"no advice: {str(refusal).partition(chr(10))[0]}")
    return Explanation(timeline, breakdown, path, advice, error, notes)


@dataclass(frozen=True)
class Advice:
    """A change, and its simulated effect.

    Attributes:
        cause: The cause of time that it reduces.
        change: A text for the user.
        step_seconds: Expected time of a step.
        gain: The share of the present step time that it saves.
        is_bound: True if nobody can do that, as with a network that takes no time. The gain is then
            the most that any change of this sort can bring.
        peak_bytes: The most that a rank holds with this change; 0 if memory is not known.
    """

    cause: Cause
    change: str
    step_seconds: float
    gain: float
    is_bound: bool = False
    peak_bytes: int = 0

    @property
    def is_at_most(self) -> bool:
        """True if a run gains less than this, or as much."""
        # Half the rows take half the time at best: kernels and messages have a cost of their own.
        return self.is_bound or "microbatches = " in self.change

    def __str__(self) -> str:
        at_most = "at most " if self.is_at_most else ""
        memory = f", {self.peak_bytes / 2**20:,.0f} MiB at peak" if self.peak_bytes else ""
        expected = f"{at_most}{in_percent(self.gain)} less, {in_time(self.step_seconds)} a step"
        coding = ", if encoding takes no time" if "parallel.codecs" in self.change else ""
        return f"{self.change}: {expected}{coding}{memory}"


def advise(
    program: Program,
    costs: Costs,
    *,
    step_seconds: float | None = None,
    of: Timeline | None = None,
) -> tuple[Advice, ...]:
    """Returns changes that make a step shorter: first real ones, then bounds, each by its gain.

    Raises:
        ScheduleError: If the costs do not fit the program's stages.
    """
    base = _last_step(program, costs).step_seconds[-1]
    if base <= 0:
        return ()
    # Use the longer time, because time outside of the simulation, such as waiting for data, is not
    # saved either.
    now = max(base, step_seconds or 0.0)
    knows_memory = any(stage.held_bytes or stage.activation_bytes for stage in costs.stages)
    # Many changes of a small program are simulated, and few of a large one.
    most = max(1, _MOST_ITEMS // max(1, program.num_items) // _num_steps(costs))
    result = list[Advice]()
    for what_if in islice(what_ifs(program, costs, of), most):
        simulated = _last_step(what_if.program, what_if.costs, _num_steps(costs))
        gain = (base - simulated.step_seconds[-1]) / now
        if gain >= _LEAST_GAIN:
            expected = (step_seconds or base) * (1 - gain)
            peak = max(simulated.peak_bytes) if knows_memory else 0
            own = what_if.cause, what_if.change, expected, gain, what_if.is_bound, peak
            result.append(Advice(*own))
    return tuple(sorted(result, key=lambda advice: (advice.is_bound, -advice.gain, advice.change)))


def _num_steps(costs: Costs) -> int:
    # Parameters that return under the next step's forwards need two steps to be seen.
    return 2 if not costs.ranks_meet or any(c.readers for c in costs.collectives.values()) else 1


def _last_step(program: Program, costs: Costs, num_steps: int = 0) -> Simulation:
    return simulate(program, costs, num_steps=num_steps or _num_steps(costs), records=False)


class WhatIf(NamedTuple):
    """A change that may make a step shorter.

    Attributes:
        cause: The cause of time that it reduces.
        change: A text for the user.
        program: The Program with this change.
        costs: The costs with this change.
        is_bound: True if nobody can do that, as with a network that takes no time.
    """

    cause: Cause
    change: str
    program: Program
    costs: Costs
    is_bound: bool = False


def what_ifs(program: Program, costs: Costs, of: Timeline | None = None) -> Iterator[WhatIf]:
    """Yields changes to try, the most telling first, as a large program leaves no time for all."""
    yield from _bounds(program, costs)
    yield from _evened(program, costs)
    yield from _recut(program, costs, of.layers if of else ())
    yield from _codecs(program, costs, of)
    yield from _more_microbatches(program, costs, of)
    yield from _other_schedules(program, costs)
    yield from _narrow_reductions(program, costs, of)


# Bounds.


def _bounds(program: Program, costs: Costs) -> Iterator[WhatIf]:
    # Values of no bytes and a network without latency.
    silent = tuple(replace(stage, outputs={}) for stage in costs.stages)
    alike = Network(hosts=costs.network.hosts)
    free = replace(costs, stages=silent, network=alike, meeting_seconds=0.0)
    yield WhatIf("links", "links that take no time", program, free, is_bound=True)
    if costs.collectives:
        reduced = replace(costs, collectives={})
        yield WhatIf("reductions", "reductions that take no time", program, reduced, is_bound=True)
    if costs.host != HostCosts():
        hostless = replace(costs, host=HostCosts())
        yield WhatIf("host", "hosts that take no time", program, hostless, is_bound=True)


# Computing.


def _evened(program: Program, costs: Costs) -> Iterator[WhatIf]:
    seconds, ranks = costs.compute_seconds(program.schedule), program.schedule.stage_to_rank
    if not _are_uneven(seconds):
        return
    mean = sum(seconds) / len(seconds)
    factors = [mean / seconds[rank] if seconds[rank] else 1.0 for rank in ranks]
    stages = tuple(_times(each, factor) for each, factor in zip(costs.stages, factors, strict=True))
    change = "layers moved so that all ranks compute alike"
    yield WhatIf("ranks", change, program, replace(costs, stages=stages), is_bound=True)


def _recut(
    program: Program, costs: Costs, layers: Sequence[Mapping[str, float]]
) -> Iterator[WhatIf]:
    """Yields the cut with the shortest simulated step, if layers are known."""
    if len(layers) != len(costs.stages) or not all(layers):
        return
    each = [
        _times(stage, part / sum(own.values()))
        for stage, own in zip(costs.stages, layers, strict=True)
        for part in own.values()
    ]
    begins = tuple(accumulate(map(len, layers)))[:-1]
    balanced = balanced_seconds((own.seconds("F") + own.seconds("B") for own in each), len(layers))
    better = fastest_cut(
        program,
        lambda cut: replace(costs, stages=_cut_at(costs, each, cut)),
        len(each),
        [begins, balanced],
        num_steps=_num_steps(costs),
    )
    if better != begins:
        ranks = program.schedule.stage_to_rank
        is_uneven = _are_uneven(costs.compute_seconds(program.schedule))
        cause: Cause = "ranks" if is_uneven else "pipeline"
        moved = replace(costs, stages=_cut_at(costs, each, better))
        yield WhatIf(cause, _in_words(ranks, layers, begins, better), program, moved)


def _are_uneven(seconds: Sequence[float]) -> bool:
    return max(seconds) > _UNEVEN * sum(seconds) / len(seconds)


def _times(stage: StageCosts, factor: float) -> StageCosts:
    return replace(
        stage,
        forward_seconds=stage.forward_seconds * factor,
        backward_seconds=stage.backward_seconds * factor,
        weight_seconds=stage.weight_seconds * factor,
    )


def _cut_at(
    costs: Costs, layers: Sequence[StageCosts], begins: Sequence[int]
) -> tuple[StageCosts, ...]:
    """Returns the stages, each with the times of the layers from its begin on."""
    names = ("forward_seconds", "backward_seconds", "weight_seconds")
    edges = pairwise([0, *begins, len(layers)])
    return tuple(
        replace(stage, **{name: sum(getattr(own, name) for own in layers[a:b]) for name in names})
        for stage, (a, b) in zip(costs.stages, edges, strict=True)
    )


def _in_words(
    ranks: Sequence[int],
    layers: Sequence[Mapping[str, float]],
    before: Sequence[int],
    after: Sequence[int],
) -> str:
    """Returns a text with the layers that move to each rank, and the key that moves them."""
    names, moves = list(chain.from_iterable(layers)), dict[int, list[str]]()
    for number, name in enumerate(names):
        if (stage := bisect_right(after, number)) != bisect_right(before, number):
            moves.setdefault(ranks[stage], []).append(name)
    words = (
        f"layer{'s' * (len(own) > 1)} {' and '.join(own)} to rank {rank}"
        for rank, own in sorted(moves.items())
    )
    keys = (names[begin] if names[begin].isdigit() else json.dumps(names[begin]) for begin in after)
    return f"move {', '.join(words)} (parallel.boundaries = [{', '.join(keys)}])"


# Sending.


def _codecs(program: Program, costs: Costs, of: Timeline | None) -> Iterator[WhatIf]:
    """Yields the values in eight bits, without the time of coding, because it is not known."""
    has_some = costs.codecs or (of and of.notes.get("codecs"))
    if has_some or not any(stage.outputs for stage in costs.stages):
        return
    share = 1 / max(1.0, of.noted("value_bytes", 4.0) if of else 4.0)
    stages = tuple(
        replace(stage, outputs={n: round(share * b) for n, b in stage.outputs.items()})
        for stage in costs.stages
    )
    yield WhatIf("links", 'parallel.codecs = "int8"', program, replace(costs, stages=stages))


def _narrow_reductions(program: Program, costs: Costs, of: Timeline | None) -> Iterator[WhatIf]:
    if costs.collectives and not (of and of.notes.get("reduce_dtype")):
        halves = {
            name: replace(own, num_bytes=own.num_bytes // 2, seconds=own.seconds / 2)
            for name, own in costs.collectives.items()
        }
        change = 'gradients.reduce_dtype = "bfloat16"'
        yield WhatIf("reductions", change, program, replace(costs, collectives=halves))


# Schedules.


def _more_microbatches(program: Program, costs: Costs, of: Timeline | None) -> Iterator[WhatIf]:
    """Yields twice as many microbatches of half the size, which take half the time."""
    now = program.schedule
    number = 2 * now.num_microbatches
    if of and number > of.noted("rows", number):  # each needs a row
        return
    plugin = next((plugin for plugin in registry if plugin.name == now.name), None)
    same, more = (
        plugin and _generated(plugin, replace(now, num_microbatches=m), None)
        for m in (now.num_microbatches, number)
    )
    if same and more and same.actions == now.actions and more.stage_to_rank == now.stage_to_rank:
        # A microbatch of half the rows costs as much as one of two chunks of a sequence.
        halved = replace(costs, stages=tuple(stage.of_chunk(2) for stage in costs.stages))
        change = f"parallel.microbatches = {number}, if half the rows take half the time"
        yield WhatIf("pipeline", change, _lowered(program, more), halved)


def _other_schedules(program: Program, costs: Costs) -> Iterator[WhatIf]:
    now = program.schedule
    # Some names stand for one schedule, such as hop-aware-1f1b where hops take no time.
    tried = {now.actions}
    splits = all(stage.weight_seconds > 0 for stage in costs.stages)
    # Schedules that use hop times have one stage on each rank; others would need another cut.
    times = times_of(costs) if now.stage_to_rank == tuple(range(now.num_ranks)) else None
    # No other schedule takes a chunk for a microbatch, because a chunk needs the one before it.
    plugins = () if now.name in OF_CHUNKS else registry
    for plugin in (plugin for plugin in plugins if plugin.name not in OF_CHUNKS):
        schedule = _generated(plugin, now, times)
        if schedule is None or (schedule.stage_to_rank, schedule.chunks) != (
            now.stage_to_rank,
            now.chunks,
        ):
            continue
        # Without the time of W nothing is known of a split backward.
        known = splits or all(
            action.kind in ("F", "B") for own in schedule.actions for action in own
        )
        if known and schedule.actions not in tried:
            tried.add(schedule.actions)
            change = f'parallel.schedule = "{schedule.name}"{_activations(schedule, now)}'
            yield WhatIf("pipeline", change, _lowered(program, schedule), costs)


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


def _activations(schedule: Schedule, now: Schedule) -> str:
    """Returns a text on the activations of a schedule, if it holds more than the present one."""
    changes = {"F": 1, "B": -1, "I": 0, "W": -1}
    most, before = (
        max(max(accumulate(changes[a.kind] for a in own), default=0) for own in each.actions)
        for each in (schedule, now)
    )
    return f" (a rank holds {most} activations, now {before})" if most > before else ""


def _lowered(program: Program, schedule: Schedule) -> Program:
    """Returns the Program of another schedule for the same stages."""
    return lower(replace(schedule, feeds=program.schedule.feeds), links=program.links)
