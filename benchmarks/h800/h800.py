"""Compares steps that `simulate` predicts with those that PipeMorph's authors measured on H800s.

python benchmarks/h800/h800.py
"""

from __future__ import annotations

import json
import re
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipegrad.schedules import Action, Schedule, build, lower, verify
from pipegrad.schedules.builtin.adaptive import AdaptiveOneForwardOneBackward
from pipegrad.schedules.builtin.hop_aware import HopAwareOneForwardOneBackward
from pipegrad.schedules.builtin.hop_aware_zb_h1 import HopAwareZeroBubbleH1
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.program import Channel, Op, Program, action_index, encode
from pipegrad.simulation.choose import times_of
from pipegrad.simulation.costs import CodecCosts, Costs, LinkCosts, Network, StageCosts
from pipegrad.simulation.simulator import simulate

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "runs.json").read_text())
POLICIES = ("1F1B", "ZB", "ZB-CPU", "ZB-CPU-ReSchedule")
Delays = Mapping[tuple[int, int], float]  # from a stage, to a stage: seconds
Transfer = tuple[Channel, int]  # and its microbatch
Group = tuple[str, str, str]  # a set of runs, a model, and the program of its healthy iterations


@dataclass(frozen=True)
class Run:
    """One run of the artifact; fields are columns of ``runs.json``."""

    set: str
    model: str
    policy: str
    slow_hops: str
    delay_ms: float
    order: str
    healthy_ms: tuple[float, ...]
    slow_ms: tuple[float, ...]

    @property
    def group(self) -> Group:
        """Whose healthy iterations run the same program: transfers by the CPU begin with delays."""
        return self.set, self.model, "1F1B" if self.policy == "1F1B" else "ZB"

    @property
    def measured_ms(self) -> float:
        """The median of the last three iterations; before them not every rank knew the delay."""
        return statistics.median(self.slow_ms[-3:])

    @property
    def named(self) -> dict[tuple[int, int], float]:
        """The delay of each direction of the slow hops."""
        hops = [(int(hop[0]), int(hop[2])) for hop in self.slow_hops.split(",")]
        return dict.fromkeys([*hops, *(hop[::-1] for hop in hops)], self.delay_ms / 1e3)

    @property
    def delays(self) -> dict[tuple[int, int], float]:
        """The delay of each direction, as it was injected.

        The injector takes peer 1 for the next stage. In Megatron's batches a peer has the number of
        its stage. So what stage 2 sends to stage 1 is delayed if hop 2-3 is slow, not if 1-2 is.
        """
        slow = self.named
        if self.policy == "1F1B":
            slow.pop((2, 1), None)
            if (2, 3) in slow:
                slow[2, 1] = slow[2, 3]
        return slow


RUNS = [Run(*(tuple(x) if isinstance(x, list) else x for x in each)) for each in DATA["runs"]]


# What is run.


@cache
def schedule(name: str, model: str) -> Schedule:
    """Returns an order of the artifact; "" is 1f1b."""
    size = DATA["models"][model]
    if not name:
        return build("1f1b", num_ranks=size["stages"], num_microbatches=size["microbatches"])
    ranks = DATA["orders"][name].replace("B", "I").split()
    whole = [re.sub(r"(\d+)(.)", lambda match: int(match[1]) * match[2], each) for each in ranks]
    actions = tuple(
        tuple(Action(rank, kind, kinds[:i].count(kind)) for i, kind in enumerate(kinds))
        for rank, kinds in enumerate(whole)
    )
    return Schedule(name, size["microbatches"], tuple(range(size["stages"])), actions)


class Items:
    """The items of one rank, as they are written one after the other."""

    def __init__(self, program: Program, rank: int) -> None:
        self._numbers = {channel: number for number, channel in enumerate(program.channels)}
        self._rank = rank
        self._waits = dict[Transfer, Op]()  # for each transfer that is under way, what waits for it
        self.codes = array("q")

    def input_of(self, action: Action) -> Iterator[Transfer]:
        """Yields the transfer that an action reads, if there is one."""
        return self._transfers(action, "target")

    def output_of(self, action: Action) -> Iterator[Transfer]:
        """Yields the transfer that an action starts, if there is one."""
        return self._transfers(action, "source")

    def _transfers(self, action: Action, end: str) -> Iterator[Transfer]:
        kind = {"F": "F", "B": "B", "I": "B", "W": ""}[action.kind]
        for channel in self._numbers:
            if channel.kind == kind and getattr(channel, end) == self._rank:
                yield channel, action.microbatch

    def issue(self, transfers: Iterable[Transfer]) -> None:
        """Sends, or posts a receive."""
        for transfer in transfers:
            sends = transfer[0].source == self._rank
            self._add(Op.SEND if sends else Op.POST_RECEIVE, transfer)
            self._waits[transfer] = Op.RELEASE if sends else Op.WAIT_RECEIVE

    def wait(self, transfers: Iterable[Transfer]) -> None:
        """Waits until transfers have arrived, but not twice."""
        for transfer in transfers:
            if transfer in self._waits:
                self._add(self._waits.pop(transfer), transfer)

    def wait_for_all(self) -> None:
        """Waits for all that are under way."""
        self.wait([*self._waits])

    def compute(self, action: Action) -> None:
        """Computes."""
        self.codes.append(encode(Op.COMPUTE, action_index(action), action.microbatch))

    def _add(self, op: Op, transfer: Transfer) -> None:
        self.codes.append(encode(op, self._numbers[transfer[0]], transfer[1]))


def batched(order: Schedule) -> Program:
    """Returns a Program as Megatron runs 1F1B: it waits for each batch of transfers.

    Between a forward and a backward, what is sent and what is received are one batch.

    Source: Megatron-LM, megatron/core/pipeline_parallel/schedules.py.
    """
    program = lower(order)
    codes = []
    for rank, actions in enumerate(order.actions):
        items = Items(program, rank)
        for before, action in pairwise([None, *actions, None]):
            sent = list(items.output_of(before)) if before else []
            read = list(items.input_of(action)) if action else []
            together = before and action and before.kind != action.kind
            for batch in [sent + read] if together else [sent, read]:
                items.issue(batch)
                items.wait(batch)
            if action:
                items.compute(action)
        codes.append(items.codes)
    return replace(program, items=tuple(codes))


def queued(order: Schedule) -> Program:
    """Returns a Program whose transfers are kernels of one queue of the device, as in "ZB".

    Both directions of a hop are one stream. The next transfer of a stream begins when the one
    before has been matched. Until then nothing behind it in the queue begins, computes included.
    The two ranks of a hop issue its transfers in one order: that of the plan, in which each action
    takes as long. A receive is issued before the compute that the plan has at that time.

    Source: github.com/wutianyuan1/PipeMorph, zb_schedules_origin.py and failslow_injection.cu.
    """
    program = lower(order, depth=order.num_microbatches)
    planned = _planned(program)
    last = 2 * len(planned)  # behind all transfers that are planned for the same time
    issued: list[list[tuple[float, int, Action | Transfer]]] = [
        [(planned[action][0], last, action) for action in actions] for actions in order.actions
    ]
    channels = sorted(program.channels, key=lambda c: (c.source, c.kind == "B"))
    transfers = [(c, m) for c in channels for m in range(order.num_microbatches)]
    for number, (channel, microbatch) in enumerate(transfers):
        sender = Action(channel.source, "I" if channel.kind == "B" else "F", microbatch)
        for rank in (channel.source, channel.target):
            issued[rank].append((planned[sender][1], number, (channel, microbatch)))
    codes = []
    for rank, entries in enumerate(issued):
        entries.sort(key=lambda entry: entry[:2])
        for i, (time, _, what) in enumerate(entries[1:], start=1):
            before = entries[i - 1][2]
            receives = not isinstance(what, Action) and what[0].target == rank
            if receives and isinstance(before, Action) and time <= planned[before][1]:
                entries[i - 1 : i + 1] = entries[i], entries[i - 1]
        codes.append(_through_queue(Items(program, rank), [what for _, _, what in entries]))
    return replace(program, items=tuple(codes))


def _planned(program: Program) -> dict[Action, tuple[float, float]]:
    """Returns when each action begins and ends if all take 1000, and a transfer 1."""
    stage = StageCosts(1000.0, 2000.0, 1000.0)
    costs = Costs((stage,) * program.schedule.num_ranks, Network(latency_seconds=1.0))
    timeline = simulate(program, costs).timeline
    assert timeline is not None
    return {
        Action(span.stage, span.kind, span.microbatch): (span.begin, span.end)
        for span in timeline.spans
        if span.kind in ("F", "I", "W")
    }


def _through_queue(items: Items, issued: Iterable[Action | Transfer]) -> array[int]:
    before = dict[frozenset[int], Transfer]()  # the last transfer of each stream
    for what in issued:
        if isinstance(what, Action):
            items.wait(items.input_of(what))
            items.compute(what)
        else:
            stream = frozenset((what[0].source, what[0].target))
            if stream in before:
                items.wait([before[stream]])
            items.issue([what])
            before[stream] = what
    items.wait_for_all()
    return items.codes


def through_cpus(order: Schedule) -> Program:
    """Returns a Program whose transfers block nothing, and whose receives are all posted."""
    return lower(order, depth=order.num_microbatches)


@cache
def program(policy: str, order: str, model: str) -> Program:
    """Returns what a policy runs."""
    lowered = {"1F1B": batched, "ZB": queued}.get(policy, through_cpus)
    return lowered(schedule(order, model))


# What it costs.


def stages(set_: str, model: str, gap: float, *, whole: bool) -> tuple[StageCosts, ...]:
    """Returns the artifact's profile of its stages; `gap` ms of each action are beside it.

    Args:
        set_: Of runs.
        model: Its name.
        gap: What an action takes beside its kernels.
        whole: True if a backward is one action, False if it is split.
    """
    profile = DATA["profile_ms"][f"{set_} {model}"]
    return tuple(
        StageCosts(
            (forward + gap) / 1e3,
            (inputs + weights + (1 if whole else 2) * gap) / 1e3,
            (weights + gap) / 1e3,
            outputs={"x": 1},
        )
        for forward, inputs, weights in zip(*(profile[kind] for kind in "FBW"), strict=True)
    )


def on_device(costs: tuple[StageCosts, ...], delays: Delays) -> Costs:
    """Returns costs where a delay holds up the queue of the rank that sends."""
    codecs = [
        CodecCosts((min(hop), max(hop)), carries, "delay", encode_seconds_per_byte=seconds)
        for hop, seconds in delays.items()
        for carries in ["activations" if hop[0] < hop[1] else "gradients"]
    ]
    return Costs(costs, codecs=tuple(codecs))


def on_cpus(costs: tuple[StageCosts, ...], delays: Delays, message: float) -> Costs:
    """Returns costs where a message takes `message` ms, and its delay."""
    links = (LinkCosts(*hop, seconds + message / 1e3) for hop, seconds in delays.items())
    return Costs(costs, Network(latency_seconds=message / 1e3, links=tuple(links)))


def step_ms(lowered: Program, costs: Costs) -> float:
    """Returns the milliseconds of a step."""
    return 1e3 * simulate(lowered, costs, records=False).step_seconds[0]


# What is fitted, to healthy iterations alone.


def solved(predicted: Callable[[float], float], measured: float) -> float:
    """Returns where a rising, piecewise linear function of one number is `measured`."""
    low, high = 0.0, 20.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < measured else (low, middle)
    return low


@cache
def healthy_ms(group: Group) -> float:
    """Returns the median healthy iteration of a group."""
    return statistics.median(ms for run in RUNS if run.group == group for ms in run.healthy_ms)


@cache
def gap(group: Group) -> float:
    """Returns the ms that an action takes beside its kernels."""
    set_, model, policy = group
    lowered = program(policy, "" if policy == "1F1B" else f"ZB {model}", model)
    whole = policy == "1F1B"
    return solved(
        lambda ms: step_ms(lowered, on_device(stages(set_, model, ms, whole=whole), {})),
        healthy_ms(group),
    )


@cache
def message() -> float:
    """Returns the ms that a message of the CPUs takes: least squares over two healthy runs.

    It is one number, because messages of both models have 10 MiB.
    """

    def miss(ms: float) -> float:
        shares = (healthy_cpu_ms(m, ms) / measured_cpu_ms(m) for m in DATA["models"])
        return sum((share - 1) ** 2 for share in shares)

    return min((tenth / 10 for tenth in range(150)), key=miss)


def measured_cpu_ms(model: str) -> float:
    """Returns the healthy iteration of a model whose messages are the CPUs'."""
    return statistics.median(DATA["healthy_cpu_ms"][model])


def healthy_cpu_ms(model: str, message_ms: float) -> float:
    """Returns what such an iteration is predicted to take."""
    costs = stages("single", model, gap(("single", model, "ZB")), whole=False)
    return step_ms(program("ZB-CPU", f"ZB-CPU {model}", model), on_cpus(costs, {}, message_ms))


# What is predicted.


def predicted_ms(run: Run, *, delays: Delays | None = None, message_ms: float = -1.0) -> float:
    """Returns the milliseconds of a delayed step, by default with what was injected and fitted."""
    delays = run.delays if delays is None else delays
    costs = stages(run.set, run.model, gap(run.group), whole=run.policy == "1F1B")
    if run.policy in ("1F1B", "ZB"):
        with_delays = on_device(costs, delays)
    else:
        with_delays = on_cpus(costs, delays, message() if message_ms < 0 else message_ms)
    return step_ms(program(run.policy, run.order, run.model), with_delays)


def without_blocking_ms(run: Run) -> float:
    """Returns the milliseconds of a delayed step if no transfer blocked a device."""
    costs = stages(run.set, run.model, gap(run.group), whole=run.policy == "1F1B")
    return step_ms(
        program("", run.order, run.model),
        on_cpus(costs, run.delays, 0.0),
    )


def bound_ms(costs: Costs, num_microbatches: int) -> float:
    """Returns what no order with one stage a rank can beat.

    The first microbatch has to come to a stage, which then has everything to compute.
    """
    filled, least = 0.0, 0.0
    for number, stage in enumerate(costs.stages):
        compute = num_microbatches * (stage.forward_seconds + stage.backward_seconds)
        least = max(least, filled + compute)
        filled += stage.forward_seconds
        filled += costs.network.link(number, number + 1).latency_seconds
    return 1e3 * least


def ours(times: Times, sizes: dict[str, int]) -> Iterator[tuple[str, Schedule]]:
    """Yields schedules of pipegrad for what hops and computes take."""
    yield "1f1b", build("1f1b", **sizes)
    yield "zb-h1", build("zb-h1", **sizes)
    yield "hop-aware-1f1b", HopAwareOneForwardOneBackward().planned(times).generate(**sizes)
    for limit in (2 * sizes["num_ranks"], sizes["num_microbatches"]):
        adaptive = AdaptiveOneForwardOneBackward(max_live_activations=limit).planned(times)
        yield f"adaptive-1f1b, at most {limit}", adaptive.generate(**sizes)
        split = HopAwareZeroBubbleH1(max_live_activations=limit).planned(times)
        yield f"hop-aware-zb-h1, at most {limit}", split.generate(**sizes)


def beside_ours(run: Run) -> dict[str, str]:
    """Returns what the rescheduled run takes, and our orders with the same costs and transfers."""
    num_stages, num_microbatches = DATA["models"][run.model].values()
    sizes = {"num_ranks": num_stages, "num_microbatches": num_microbatches}
    split, whole = (
        on_cpus(stages(run.set, run.model, gap(run.group), whole=w), run.delays, message())
        for w in (False, True)
    )
    held = max(verify(lower(schedule(run.order, run.model))).live_activations)
    cells = {
        "rescheduled, measured": f"{run.measured_ms:.0f}",
        "rescheduled, predicted": f"{predicted_ms(run):.0f} ({held})",
    }
    for name, order in ours(times_of(split), sizes):
        costs = split if order.splits_backward else whole
        held = max(verify(lower(order)).live_activations)
        cells[name] = f"{step_ms(through_cpus(order), costs):.0f} ({held})"
        if name == f"hop-aware-zb-h1, at most {num_microbatches}":
            for depth in (2, 3, 4):
                ms = step_ms(lower(order, depth=depth), costs)
                cells[f"the same, depth={depth}"] = f"{ms:.0f} ({held})"
    return {**cells, "bound": f"{bound_ms(split, num_microbatches):.0f}"}


# Tables.


def error(run: Run, predicted: float) -> float:
    """Returns by which share a prediction is off."""
    return predicted / run.measured_ms - 1


def summary(errors: Iterable[float]) -> str:
    """Returns the median and the worst error."""
    sizes = sorted(map(abs, errors))
    return f"{statistics.median(sizes):.1%}, {sizes[-1]:.1%}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Prints a table."""
    print(f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for line in lines:
        print(f"| {' | '.join(line)} |", flush=True)


def main() -> None:
    """Prints the README's tables."""
    predicted = {run: predicted_ms(run) for run in RUNS}
    errors = {run: error(run, ms) for run, ms in predicted.items()}
    print_errors(errors)
    beside_six = (ms / statistics.median(run.slow_ms) - 1 for run, ms in predicted.items())
    print(f"\nbeside the median of all six delayed iterations: {summary(beside_six)}")
    print_fit()
    print_without(errors)
    rescheduled = [run for run in RUNS if run.policy == POLICIES[-1] and run.model == "14B"]
    scatter = (max(run.slow_ms) / min(run.slow_ms) - 1 for run in rescheduled)
    print(
        f"the longest of six iterations of a rescheduled run, over the shortest: {summary(scatter)}"
    )
    beside = [run for run in rescheduled if run.set == "increasing-delay"]
    columns = [beside_ours(run) for run in beside]
    table(
        ["14B, hop 6-7", *(f"{run.delay_ms} ms" for run in beside)],
        [[way, *(column[way] for column in columns)] for way in columns[0]],
    )


def print_errors(errors: Mapping[Run, float]) -> None:
    """Prints the errors of each policy, and of each run."""
    of_policy = defaultdict[tuple[str, str], list[float]](list)
    cells = defaultdict[tuple[str, ...], dict[str, str]](dict)
    for run, off in errors.items():
        of_policy[run.model, run.policy].append(off)
        setting = run.model, run.set, run.slow_hops, f"{run.delay_ms}"
        cells[setting][run.policy] = f"{run.measured_ms:.0f}, {off:+.1%}"
    table(
        ["model", *POLICIES],
        [[m, *(summary(of_policy[m, policy]) for policy in POLICIES)] for m in DATA["models"]],
    )
    print(f"\nall {len(errors)} runs: {summary(errors.values())}")
    table(
        ["model", "runs", "slow hops", "delay, ms", *POLICIES],
        [[*key, *(cell[policy] for policy in POLICIES)] for key, cell in sorted(cells.items())],
    )


def print_fit() -> None:
    """Prints what was fitted."""
    table(
        ["runs", "model", "program", "healthy, ms", "ms an action beside its kernels"],
        [
            [*group, f"{healthy_ms(group):.0f}", f"{gap(group):.2f}"]
            for group in sorted({run.group for run in RUNS})
        ],
    )
    print(f"\na message of the CPUs: {message():.1f} ms")
    by_cpus = [run for run in RUNS if run.policy.startswith("ZB-CPU")]
    for model in DATA["models"]:
        fitted, measured = healthy_cpu_ms(model, message()), measured_cpu_ms(model)
        alone = solved(partial(healthy_cpu_ms, model), measured)
        off = summary(error(run, predicted_ms(run, message_ms=alone)) for run in by_cpus)
        print(f"healthy {model}: {fitted:.0f} with it, {measured:.0f} measured", end="; ")
        print(f"alone it gives {alone:.1f} ms, and the runs of the CPUs are {off} off")


def print_without(errors: Mapping[Run, float]) -> None:
    """Prints the errors without what the artifact's code says of delays, and of transfers."""
    changed = [run for run in RUNS if run.delays != run.named]
    named = (error(run, predicted_ms(run, delays=run.named)) for run in changed)
    print(f"\n{len(changed)} runs, if the injector delayed what is named: {summary(named)}")
    print(f"as it does: {summary(errors[run] for run in changed)}")
    blocking = [run for run in RUNS if run.policy in ("1F1B", "ZB")]
    free = (error(run, without_blocking_ms(run)) for run in blocking)
    print(f"{len(blocking)} runs, if transfers of the device blocked nothing: {summary(free)}")
    print(f"as they do: {summary(errors[run] for run in blocking)}")


if __name__ == "__main__":
    main()
