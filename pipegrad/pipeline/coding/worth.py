"""Worth: over which hops a codec saves time, by what a step took without it.

[Note: codecs that are chosen] All ranks must choose alike, and both ranks of a hop at once:

1. The second step is measured, without codecs: [Note: times of a step].
2. Before the next training step, all ranks meet. Each has timed the codecs on values that look like
   those of its hops. They meet again, and time messages of that size and almost empty ones: a
   codec saves nothing of an empty one's time. All ranks get all of these times.
3. Each rank simulates steps: first with the codecs on every hop where encoding, sending and
   decoding takes less time than sending alone. Then it leaves out hops, the least useful first,
   where a step is as short without. So a hop that is hidden behind computing has no codec.
4. All ranks have the same numbers, so they find the same hops. They meet once more, and each makes
   its kinds of step anew. Then they take the codecs for all steps that follow.
5. A schedule that is made of measured times is made after a further step, which is measured with
   the codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from pipegrad.comm.agreement import agree
from pipegrad.errors import ScheduleError
from pipegrad.pipeline.coding.choice import Both, CodecChoice, Hop
from pipegrad.pipeline.coding.coding import Codings
from pipegrad.pipeline.coding.latency import latency_shares
from pipegrad.pipeline.coding.timing import Coded, time_codec
from pipegrad.pipeline.transfers.edges import Edges
from pipegrad.pipeline.transfers.specs import Spec
from pipegrad.plugins.codec import Carried
from pipegrad.schedules import Schedule, lower
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.program import Program
from pipegrad.simulation.auto import costs_of
from pipegrad.simulation.choose import times_of
from pipegrad.simulation.costs import CodecCosts, Costs
from pipegrad.simulation.simulator import simulate
from pipegrad.topology import Topology

_NUM_STEPS = 2  # the second begins while the first ends, as all that follow do
_EQUAL = 0.002  # steps that differ by less take equally long

Found = dict[tuple[Hop, Carried], Coded]


class HopsChooser:
    """Decides over which hops the codecs of ``{"auto": ...}`` carry.

    Args:
        codings: Of this rank.
        edges: The communicators of the pipeline.
        topology: As this rank sees it.
        device: Where values are.
        name: Of the meeting; no other Scheduler has it.
        timeout_seconds: How long a meeting waits for the slowest rank.
    """

    def __init__(
        self,
        codings: Codings,
        edges: Edges,
        topology: Topology,
        device: torch.device,
        *,
        name: str,
        timeout_seconds: float,
    ) -> None:
        self._codings = codings
        self._edges = edges
        self._topology = topology
        self._device = device
        self._name = name
        self._timeout_seconds = timeout_seconds

    @property
    def wants_times(self) -> bool:
        """Whether hops are still to be chosen."""
        return bool(self._codings.choice.auto)

    def decide(
        self, times: Times, program: Program, specs: Mapping[int, Spec | None], step: int
    ) -> CodecChoice:
        """Returns the choice that the times of a step lead to, the same on all ranks.

        Args:
            times: Of a step without codecs, the same on all ranks.
            program: Of that step.
            specs: What its values look like, by link.
            step: Which step begins now, counted alike on all ranks.

        Raises:
            PipegradError: If a rank does not come, or a codec fails; on all ranks alike.
        """
        auto = self._codings.choice.auto
        own = self._topology.coordinate(self._topology.pipeline)

        def measure() -> Found:
            hops = specs_of(program, specs)
            return {
                (hop, carried): time_codec(codec, carried, hops[hop, carried], self._device)
                for hop, carried in hops
                # Times are of hops between neighbours; the others stay without.
                if hop[1] - hop[0] == 1 and own in hop
                if (codec := auto.get(carried)) is not None
            }

        met = partial(
            agree, ranks=sorted(self._topology.ranks), timeout_seconds=self._timeout_seconds
        )
        replies: list[Found] = met(
            "which hops codecs save time on", measure, meeting=f"{self._name}/codecs/{step}"
        )
        found = slowest(replies)
        num_bytes = dict[Hop, int]()
        for (hop, _), coded in found.items():
            num_bytes[hop] = max(coded.value_bytes, num_bytes.get(hop, 1))
        # Ranks wait for each other's messages here. All of them are in a meeting by now.
        shares: list[dict[Hop, float]] = met(
            "how long empty messages take",
            lambda: latency_shares(num_bytes, own, self._edges, self._device),
            meeting=f"{self._name}/latency/{step}",
        )
        latencies = [
            seconds * max((reply.get((hop, hop + 1), 0.0) for reply in shares), default=0.0)
            for hop, seconds in enumerate(times.hop_seconds)
        ]
        taken = worth_of(program.schedule, times, found, auto, latency_seconds=latencies)
        return self._codings.choice.decided(taken)


def check_auto(schedule: Schedule) -> None:
    """Refuses a schedule of which hops cannot be measured.

    Raises:
        ScheduleError: If it has several stages on a rank, or in another order.
    """
    places = list(schedule.stage_to_rank)
    if places != list(range(schedule.num_ranks)):
        raise ScheduleError(
            f"codecs are 'auto', and schedule {schedule.name!r} has stages on the ranks {places}: "
            f"hops are measured with one stage on each rank, in order. Name the hops, such as "
            f"codecs={{'0-1': 'int8'}}, or take another schedule"
        )


def specs_of(
    program: Program, specs: Mapping[int, Spec | None]
) -> dict[tuple[Hop, Carried], list[Spec]]:
    """Returns what the values look like that cross each hop."""
    found = dict[tuple[Hop, Carried], list[Spec]]()
    for link, kind, source, target in program.channels:
        spec, hop = specs[link], (min(source, target), max(source, target))
        if spec is not None:
            carried: Carried = "activations" if kind == "F" else "gradients"
            found.setdefault((hop, carried), []).append(spec)
    return found


def slowest(replies: Sequence[Found]) -> Found:
    """Returns the largest numbers of all ranks: both ends of a hop, and all replicas, have some."""
    found = Found()
    for reply in replies:
        for key, coded in reply.items():
            other = found.get(key, coded)
            found[key] = Coded(
                max(coded.value_bytes, other.value_bytes),
                max(coded.message_bytes, other.message_bytes),
                max(coded.encode_seconds, other.encode_seconds),
                max(coded.decode_seconds, other.decode_seconds),
            )
    return found


def worth_of(
    schedule: Schedule,
    times: Times,
    found: Found,
    auto: Both,
    *,
    latency_seconds: Sequence[float] = (),
) -> tuple[Hop, ...]:
    """Returns over which hops codecs save time. It is pure: every rank finds the same.

    Args:
        schedule: What every rank computes.
        times: Of a step without codecs.
        found: What codecs make of the values of each hop.
        auto: The codecs, by what they carry.
        latency_seconds: What an empty message takes on each hop; by default nothing.
    """
    plain = costs_of(times, latency_seconds)

    def costs(hops: Sequence[Hop]) -> Costs:
        codecs = (
            codec_costs(hop, carried, auto[carried].name, coded, plain)
            for (hop, carried), coded in sorted(found.items())
            if hop in hops and coded.value_bytes
        )
        return replace(plain, codecs=tuple(codecs))

    chain = replace(schedule, feeds=None)
    program = lower(chain)

    def seconds(hops: Sequence[Hop]) -> float:
        done = simulate(program, costs(hops), num_steps=_NUM_STEPS, records=False)
        return done.step_seconds[-1]

    every = sorted({hop for hop, _ in found})
    saved = _saved(times, costs(every))
    hops = sorted((hop for hop in every if saved[hop[0]] > 0), key=lambda hop: (saved[hop[0]], hop))
    return tuple(sorted(_needed(hops, seconds)))


def codec_costs(
    hop: Hop, carried: Carried, name: str, coded: Coded, plain: Costs | None = None
) -> CodecCosts:
    """Returns what a codec costs on a hop.

    Args:
        hop: The hop.
        carried: What it encodes.
        name: Its name.
        coded: What was measured.
        plain: Costs whose bytes stand for those of the values; by default bytes are real ones.
    """
    num_bytes = coded.value_bytes
    if plain is not None:
        num_bytes = sum(plain.stages[hop[0]].outputs.values())
    return CodecCosts(
        hop,
        carried,
        name,
        coded.message_bytes / coded.value_bytes,
        coded.encode_seconds / num_bytes,
        coded.decode_seconds / num_bytes,
    )


def _saved(times: Times, coded: Costs) -> list[float]:
    """Returns for each hop how much sooner values are there with codecs."""
    after = times_of(coded).hop_seconds
    return [a - b for a, b in zip(times.hop_seconds, after, strict=True)]


def _needed(hops: Sequence[Hop], seconds: Callable[[Sequence[Hop]], float]) -> list[Hop]:
    """Returns hops without those where a codec makes no step shorter; the first are tried first."""
    # Hops that are equally slow must all have a codec before a step becomes shorter. So hops are
    # left out of all, and not added to none.
    taken, best = list(hops), seconds(hops)
    if best >= seconds(()) * (1 - _EQUAL):
        return []
    for hop in hops:
        fewer = [each for each in taken if each != hop]
        without = seconds(fewer)
        if without <= best * (1 + _EQUAL):
            taken, best = fewer, min(best, without)
    return taken
