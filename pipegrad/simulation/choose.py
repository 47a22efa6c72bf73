"""choose: finds the schedule that takes least time within a memory limit. Pure.

[Note: candidates] The candidates are all registered schedules, plug-ins too, except schedules of
sequence chunks, which need stages that carry a state. One that takes ``stages_per_rank`` is tried
with 1, 2, ... of them. hop-aware-1f1b and hop-aware-zb-h1 get the hops and computes of the costs,
with several thresholds. Then 1f1b is tried with more warm-up, as much at every hop. Each candidate
is lowered, proven and simulated, in this order, and refused where one of these fails. Where costs
are of more stages than a candidate has, they are taken for layers: neighbours become a stage, and
the cut is the one of its shortest step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

from pipegrad.errors import PipegradError, ScheduleError
from pipegrad.plugins.registry import ResolvedPlugin
from pipegrad.schedules import generate, lower, registry, verify
from pipegrad.schedules.builtin.hop_aware import HopAware
from pipegrad.schedules.builtin.one_f_one_b import in_turns
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.program import Link
from pipegrad.schedules.schedule import Schedule, ScheduleGenerator
from pipegrad.simulation.costs import Costs, StageCosts
from pipegrad.simulation.fastest_cut import EQUAL, balanced_seconds, fastest_cut
from pipegrad.simulation.simulator import simulate


@dataclass(frozen=True)
class Candidate:
    """A schedule, with its simulated time and memory.

    Attributes:
        name: The schedule and its options, in words.
        schedule: None if it is not defined for these numbers.
        step_seconds: Time of a step that follows another.
        bubble: The share of all ranks' time in which they do not compute.
        peak_bytes: The most that a rank holds.
        live_activations: Microbatches that each rank holds at most, over all its stages; with
            chunks of time whole sequences, rounded up.
        boundaries: Index of the first layer of every stage but the first, which
            ``pipegrad.cut(model, n, boundaries=...)`` takes; empty if costs were of its stages.
        refused: The reason why it cannot be chosen; "" if it can be.
    """

    name: str
    schedule: Schedule | None = None
    step_seconds: float = 0.0
    bubble: float = 0.0
    peak_bytes: int = 0
    live_activations: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    refused: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, without the schedule."""
        if self.schedule is None:
            return {"name": self.name, "refused": self.refused}
        return {
            "name": self.name,
            "step_seconds": self.step_seconds,
            "bubble": self.bubble,
            "peak_bytes": self.peak_bytes,
            "live_activations": list(self.live_activations),
            "boundaries": list(self.boundaries),
            "refused": self.refused,
        }


@dataclass(frozen=True)
class Choice:
    """The chosen schedule, and all other candidates.

    Attributes:
        candidates: The chosen one first; then by time; at last the refused ones.
    """

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[0]

    @property
    def schedule(self) -> Schedule:
        """The chosen schedule, for a `Scheduler`."""
        assert self.best.schedule is not None
        return self.best.schedule

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the candidates as plain data, in order."""
        return [candidate.to_json() for candidate in self.candidates]

    def __str__(self) -> str:
        from pipegrad.tables import as_text, table

        head, *rows = rows_of(self.to_json())
        return as_text([table(head, rows)])


def rows_of(candidates: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of a table of candidates, its head first, from `Choice.to_json`."""
    best = candidates[0]
    # A job with costs of its own stages is cut already.
    is_cut = any(each.get("boundaries") for each in candidates)
    cut = ["boundaries"] * is_cut
    yield "schedule", "step", "bubble", "peak MiB", "activations", *cut, "why"
    for each in candidates:
        cut = [", ".join(map(str, each.get("boundaries", ())))] * is_cut
        if "step_seconds" not in each:
            yield each["name"], "", "", "", "", *cut, each["refused"]
            continue
        quickest = best["step_seconds"]
        slower = each["step_seconds"] / quickest - 1 if quickest else 0.0
        why = f"{slower:+.1%}" if slower >= EQUAL else "as fast, holds more"
        yield (
            each["name"],
            f"{1e3 * each['step_seconds']:.1f} ms",
            f"{each['bubble']:.1%}",
            f"{each['peak_bytes'] / 2**20:.1f}",
            f"{sum(each['live_activations'])}",
            *cut,
            "chosen" if each is best else each["refused"] or why,
        )


Spec = str | Mapping[str, Any]  # a name, or a table of name and options

OF_CHUNKS = ("chunked-1f1b", "chunked-zb-h1")
_NO_CANDIDATES = ("auto", "adaptive-1f1b", *OF_CHUNKS)  # the first choose or change schedules
_THRESHOLDS = (0.0, 0.05, 0.2)  # of schedules that use hop times
_MOST_FORWARDS_A_HOP = 6
_MOST_STAGES_A_RANK = 4
_NUM_STEPS = 2  # the second begins while the first ends, as all that follow do


def choose(
    *,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    memory_limit_bytes: int | None = None,
    max_live_activations: int | None = None,
    schedules: Sequence[Spec] | None = None,
) -> Choice:
    """Returns the schedule that takes least time; see [Note: candidates].

    Reductions are left out, because buckets depend on how the model is cut.

    The function is pure: every rank that has the same costs chooses the same. Schedules whose steps
    differ by less than 0.5 % count as equally fast: the one that holds fewer bytes is taken, then
    the one with fewer activations, then the first name.

    Args:
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of microbatches a step.
        costs: Costs of as many stages as there are ranks, or of more: for example of each layer,
            with the embedding, the head and the loss. `Candidate.boundaries` is then the cut. A
            schedule of more stages is refused.
        memory_limit_bytes: The most that a rank may hold.
        max_live_activations: The most microbatches whose activations a rank may hold, in stages as
            large as a rank.
        schedules: Names, or tables of name and options, instead of all registered ones.

    Raises:
        ScheduleError: If no candidate fits, if a limit is no number above 0, or if the costs are
            of fewer stages than ranks.
    """
    if num_microbatches < 1 or not 1 <= num_ranks <= len(costs.stages):
        raise ScheduleError(
            f"there are costs of {len(costs.stages)} stages, for {num_ranks} ranks and "
            f"{num_microbatches} microbatches: expected costs of as many stages as ranks, or "
            f"of more, and at least one of each"
        )
    check_limit("memory_limit_bytes", memory_limit_bytes)
    check_limit("max_live_activations", max_live_activations)
    costs = replace(costs, collectives={})
    tried = dict[tuple[object, ...], None]()
    candidates = list[Candidate]()
    for name, made in _candidates(
        num_ranks, num_microbatches, costs, schedules, max_live_activations
    ):
        if isinstance(made, Schedule):
            # Names stand for one schedule if their warm-ups are equal.
            key = made.stage_to_rank, made.actions, made.head_w_first
            if key in tried:
                continue
            tried[key] = None
            limits = memory_limit_bytes, max_live_activations
            candidates.append(_tried(name, made, costs, limits))
        else:
            candidates.append(Candidate(name, refused=made))
    return Choice(_ordered(candidates))


def check_limit(name: str, limit: object) -> None:
    """Refuses a limit that is no number above 0; None is no limit.

    Raises:
        ScheduleError: If it is something else.
    """
    if limit is None:
        return
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0:
        raise ScheduleError(f"{name} is {limit!r}, expected a number above 0")


def _ordered(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    fitting = [each for each in candidates if not each.refused]
    refused = sorted((each for each in candidates if each.refused), key=lambda each: each.name)
    if not fitting:
        reasons = "\n".join(f"  {each.name}: {each.refused}" for each in refused) or "  of none"
        raise ScheduleError(f"no schedule fits:\n{reasons}")
    fastest = min(each.step_seconds for each in fitting)
    equal = [each for each in fitting if each.step_seconds <= fastest * (1 + EQUAL)]
    best = min(equal, key=lambda e: (e.peak_bytes, sum(e.live_activations), e.name))
    rest = sorted((e for e in fitting if e is not best), key=lambda e: (e.step_seconds, e.name))
    return best, *rest, *refused


def _candidates(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    specs: Sequence[Spec] | None,
    max_live_activations: int | None,
) -> Iterator[tuple[str, Schedule | str]]:
    """Yields the name of each candidate with its schedule, or with the reason that it has none."""
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    times = times_of(cut_at(costs, _balanced(costs, num_ranks)))
    names = [plugin.name for plugin in registry if plugin.name not in _NO_CANDIDATES]
    tables = [
        table
        for spec in (names if specs is None else specs)
        for table in _tables(spec, num_ranks, costs, max_live_activations)
    ]
    # Plain names come first, because the first of several names of one schedule counts.
    for table in sorted(tables, key=lambda table: "threshold" in table):
        try:
            yield _words(table), generate(knowing(registry.resolve(table), times), **sizes)
        except PipegradError as error:
            yield _words(table), str(error).partition("\n")[0]
    if specs is None:
        for forwards in range(3, _MOST_FORWARDS_A_HOP + 1):
            if (forwards - 1) * (num_ranks - 1) < num_microbatches:
                num_warmups = [forwards * (num_ranks - 1 - rank) for rank in range(num_ranks)]
                name = f"1f1b, {forwards} forwards a hop"
                yield name, in_turns(name, num_warmups, num_microbatches)


def _tables(
    spec: Spec, num_ranks: int, costs: Costs, max_live_activations: int | None
) -> Iterator[dict[str, Any]]:
    """Yields the tables of options with which a schedule is tried."""
    table = {"name": spec} if isinstance(spec, str) else dict(spec)
    try:
        kind = type(registry.resolve(table).plugin)
    except PipegradError:
        yield table  # is refused with the same error
        return
    if issubclass(kind, HopAware) and "hop_seconds" not in table:
        if _takes("max_live_activations", kind) and max_live_activations is not None:
            table = {"max_live_activations": int(max_live_activations), **table}
        thresholds = [table["threshold"]] if "threshold" in table else _THRESHOLDS
        yield from ({**table, "threshold": threshold} for threshold in thresholds)
    elif _takes("stages_per_rank", kind) and "stages_per_rank" not in table:
        numbers = range(1, min(_MOST_STAGES_A_RANK, len(costs.stages) // num_ranks) + 1)
        yield from ({**table, "stages_per_rank": number} for number in numbers)
    else:
        yield table


def knowing(
    resolved: ResolvedPlugin[ScheduleGenerator], times: Times
) -> ResolvedPlugin[ScheduleGenerator]:
    """Returns a schedule for these times, if it uses hop times and has none."""
    plugin = resolved.plugin
    if isinstance(plugin, HopAware) and plugin.wants_times:
        return replace(resolved, plugin=plugin.planned(times))
    return resolved


def _takes(option: str, kind: type[ScheduleGenerator]) -> bool:
    return option in inspect.signature(kind).parameters


def _words(table: Mapping[str, Any]) -> str:
    measured = ("name", "hop_seconds", "compute_seconds", "weight_seconds")
    options = (f", {key} {value}" for key, value in table.items() if key not in measured)
    return f"{table['name']}{''.join(options)}"


def _tried(
    name: str,
    schedule: Schedule,
    costs: Costs,
    limits: tuple[int | None, int | None],
) -> Candidate:
    """Lowers, proves and simulates a schedule."""
    num_stages = len(schedule.stage_to_rank)
    if len(costs.stages) < num_stages:
        words = f"it has {num_stages} stages, and costs are of {len(costs.stages)}"
        return Candidate(name, refused=f"{words}: give costs of as many, or of more")
    if schedule.splits_backward and not any(stage.weight_seconds for stage in costs.stages):
        return Candidate(name, refused="it splits backwards: weight_seconds of the costs are 0")
    begins: tuple[int, ...] = ()
    try:
        own = costs = costs.of_chunks(schedule.chunks)
        if is_cut := len(costs.stages) > num_stages:
            begins = _balanced(costs, num_stages)
            own = cut_at(costs, begins)
        program = lower(schedule, links=chain_of(own))
        proof = verify(program)
        if is_cut:
            begins = fastest_cut(
                program,
                partial(cut_at, costs),
                len(costs.stages),
                [begins],
                num_steps=_NUM_STEPS,
                memory_limit_bytes=limits[0],
            )
            own = cut_at(costs, begins)
        result = simulate(program, own, num_steps=_NUM_STEPS, records=False)
    except ScheduleError as error:
        return Candidate(name, refused=str(error).partition("\n")[0])
    seconds = result.step_seconds[-1]
    # Limits are of whole sequences, as microbatches of schedules without chunks are.
    live = tuple(-(-number // schedule.chunks) for number in proof.live_activations)
    computing = sum(own.compute_seconds(schedule))
    return Candidate(
        name,
        schedule,
        step_seconds=seconds,
        bubble=max(0.0, 1 - computing / (schedule.num_ranks * seconds)) if seconds else 0.0,
        peak_bytes=max(result.peak_bytes),
        live_activations=live,
        boundaries=begins,
        refused=_beyond(result.peak_bytes, live, num_stages, limits),
    )


def _beyond(
    peak_bytes: Sequence[int],
    live: Sequence[int],
    num_stages: int,
    limits: tuple[int | None, int | None],
) -> str:
    """Returns the reason if a schedule goes beyond a limit; else ""."""
    limit_bytes, limit_live = limits
    most = max(peak_bytes)
    if limit_bytes is not None and most > limit_bytes:
        rank = list(peak_bytes).index(most)
        return (
            f"rank {rank} holds {most / 2**20:.1f} MiB, the limit is {limit_bytes / 2**20:.1f} MiB"
        )
    if limit_live is not None and max(live) * len(live) > limit_live * num_stages:
        held = max(live) * len(live) / num_stages
        return (
            f"rank {live.index(max(live))} holds {held:g} microbatches, the limit is {limit_live}"
        )
    return ""


def chain_of(costs: Costs) -> list[Link]:
    """Returns links where each stage takes all outputs of the one before it."""
    return [
        Link(name, stage, (stage + 1,))
        for stage, each in enumerate(costs.stages[:-1])
        for name in each.outputs or ("x",)
    ]


def times_of(costs: Costs) -> Times:
    """Returns the times that steps would have on ranks with these costs, one stage on each."""
    hops = [
        (costs.hop_seconds(s, s + 1, "F") + costs.hop_seconds(s + 1, s, "B")) / 2
        for s in range(len(costs.stages) - 1)
    ]
    return Times(
        tuple(stage.forward_seconds for stage in costs.stages),
        tuple(stage.backward_seconds for stage in costs.stages),
        tuple(hops),
        tuple(stage.weight_seconds for stage in costs.stages),
    )


def _balanced(costs: Costs, num_stages: int) -> tuple[int, ...]:
    """Returns the cut whose longest stage is as short as can be."""
    seconds = (stage.forward_seconds + stage.backward_seconds for stage in costs.stages)
    return balanced_seconds(seconds, num_stages)


def cut_at(costs: Costs, begins: Sequence[int]) -> Costs:
    """Returns the costs of stages that are neighbouring layers each, from these begins on.

    If stages pass on more than one value, or values of several names, they count as one.
    """
    edges = pairwise([0, *begins, len(costs.stages)])
    stages = [merged_stages(costs.stages[begin:end]) for begin, end in edges]
    if len({name for stage in stages[:-1] for name in stage.outputs}) > 1:
        stages = [replace(own, outputs={"x": sum(own.outputs.values())}) for own in stages]
    return replace(costs, stages=tuple(stages))


def merged_stages(stages: Sequence[StageCosts]) -> StageCosts:
    """Returns the costs of neighbouring stages as one: sums, and the outputs of the last one."""
    names = (field.name for field in fields(StageCosts) if field.name != "outputs")
    sums: dict[str, Any] = {name: sum(getattr(s, name) for s in stages) for name in names}
    return StageCosts(**sums, outputs=stages[-1].outputs)
