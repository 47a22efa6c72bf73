"""Simulates messages in pieces, the most urgent one first: where could that shorten a step?

python benchmarks/skips/pieces.py
"""

import heapq
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from pipegrad.schedules import build, lower
from pipegrad.schedules.program.program import (
    MICROBATCH_BITS,
    Link,
    Op,
    Program,
)
from pipegrad.simulation import simulator
from pipegrad.simulation.costs import CollectiveCosts, Costs, Network, StageCosts
from pipegrad.simulation.engine.flows import Process
from pipegrad.simulation.engine.transport import Key, Messages

sys.path += [str(Path(__file__).parents[1] / name) for name in ("network", "unet")]
from unet import CUTS

MIB, PIECE = 2**20, 2**18
RATE = 116e6  # what gloo gets through a NIC of 1 Gbit/s, in bytes a second
MICROBATCHES = 16
Row = tuple[str, Program, Costs]
Line = tuple[int, ...]


class Pieces(Messages):
    """Messages in pieces. Of those that wait on a line, the most urgent one has the next piece.

    A line is an edge, or a NIC with all edges that leave there.

    Attributes:
        needed_at: When each transfer is needed if the network takes no time.
        is_by_nic: Whether a line is a NIC.
    """

    needed_at: Mapping[int, float] = {}
    is_by_nic = False

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **options)
        self._left: dict[Key, float] = {}
        self._asking: defaultdict[Line, list[tuple[int, float, Key]]] = defaultdict(list)
        self._busy: set[Line] = set()

    def ready(self, now: float, key: Key) -> None:
        if key in self._ready:
            self._engine.events.at(max(now, self._ready.pop(key)), self._wait, key)
        else:
            self._ready[key] = now

    def _line(self, key: Key) -> Line:
        source, target = self._edge(key)
        return (self._engine.costs.network.host(source),) if self.is_by_nic else (source, target)

    def _edge(self, key: Key) -> tuple[int, int]:
        _, _, source, target = self._engine.program.channels[key[1] >> MICROBATCH_BITS]
        return source, target

    def _wait(self, now: float, key: Key) -> None:
        self._left[key] = float(self.crossings[key[1] >> MICROBATCH_BITS].num_bytes)
        line = self._line(key)
        heapq.heappush(self._asking[line], (key[0], self.needed_at[key[1]], key))
        self._next(now, line)

    def _next(self, now: float, line: Line) -> None:
        if line in self._busy or not self._asking[line]:
            return
        key = self._asking[line][0][-1]
        self._busy.add(line)
        piece = min(PIECE, self._left[key])
        self._left[key] -= piece
        if not self._left[key]:
            heapq.heappop(self._asking[line])
        self._engine.events.start(self._send_piece(now, key, piece))

    def _send_piece(self, now: float, key: Key, piece: float) -> Process:
        line, is_last = self._line(key), not self._left[key]
        now = yield self._engine.network.begin(now, *self._edge(key), piece)
        self._busy.remove(line)
        if is_last:
            there = now + self._engine.costs.network.link(*self._edge(key)).latency_seconds
            self._engine.events.at(there, self._arrive, key)
        self._next(now, line)


def needs(program: Program, costs: Costs) -> dict[int, float]:
    """Returns when each transfer is needed if the network takes no time."""
    timeline = simulator.simulate(program, replace(costs, network=Network())).timeline
    assert timeline is not None
    begins = {(s.stage, s.kind, s.microbatch): s.begin for s in timeline.spans}
    found: dict[int, float] = {}
    for rank in range(len(program.items)):
        waits: list[int] = []
        for item in program.decoded(rank):
            if item.op is Op.WAIT_RECEIVE:
                waits.append(item.which << MICROBATCH_BITS | item.microbatch)
            elif item.op is Op.COMPUTE:
                begin = begins[program.action(item)]
                found |= dict.fromkeys(waits, begin)
                waits.clear()
    return found


def seconds(program: Program, costs: Costs) -> float:
    """Returns the time of a step that follows another."""
    return simulator.simulate(program, costs, num_steps=2, records=False).step_seconds[-1]


def rows() -> Iterator[Row]:
    """Yields what is simulated: 30 ms of compute a rank and microbatch, NICs of 1 Gbit/s."""
    network = Network(nic_bytes_per_second=RATE, latency_seconds=1e-4)
    for x, skip in ((0.1, 4), (0.25, 0.5), (0.25, 1), (0.25, 2), (0.5, 2), (1, 1)):
        makes = [{"x": x, "skip": skip}, {"x": x}, {"x": x}, {}]
        links = [*chain(4), Link("skip", 0, (3,))]
        name = f"2 hosts, interleaved, x {x:g} MiB, skip {skip:g}"
        yield name, *pipeline("interleaved-1f1b", 2, makes, links, network)
    for skip in (0.5, 1, 2):
        makes = [{"x": 0.25, "skip": skip if stage < 3 else 0} for stage in range(8)]
        links = [*chain(8), *(Link("skip", stage, (stage + 5,)) for stage in range(3))]
        name = f"4 hosts, interleaved, x 0.25 MiB, skips {skip:g}"
        yield name, *pipeline("interleaved-1f1b", 4, makes, links, network)
    for hosts, parts in CUTS.items():
        makes = [{n: 320 * 4 * f / MIB for n, f in part.makes.items()} for part in parts]
        links = [
            Link(name, stage, (next(t for t in range(stage + 1, hosts) if name in parts[t].takes),))
            for stage in range(hosts - 1)
            for name in makes[stage]
        ]
        name = f"{hosts} hosts, the U-Net of 320 channels, eager-1f1b"
        yield name, *pipeline("eager-1f1b", hosts, makes, links, network)
    for name in ("1f1b", "eager-1f1b", "zb-h1", "zbv"):
        for mib in (1, 2):
            count = 8 if name == "zbv" else 4
            made = pipeline(name, 4, [{"x": mib}] * count, chain(count), network)
            yield f"4 hosts, {name}, x {mib} MiB", *made
    zigzag = replace(network, hosts=(0, 1, 0, 1))
    made = pipeline("eager-1f1b", 4, [{"x": m} for m in (2.5, 0.1, 2.5, 0)], chain(4), zigzag)
    yield "4 ranks on 2 hosts, all hops on one NIC, eager-1f1b, x 2.5, 0.1, 2.5 MiB", *made


def chain(num_stages: int) -> list[Link]:
    """Returns x, from each stage to the next."""
    return [Link("x", stage, (stage + 1,)) for stage in range(num_stages - 1)]


def pipeline(
    schedule: str,
    num_ranks: int,
    makes: Sequence[Mapping[str, float]],
    links: Sequence[Link],
    network: Network,
) -> tuple[Program, Costs]:
    """Returns a pipeline, given the MiB that each stage makes."""
    made = build(schedule, num_ranks=num_ranks, num_microbatches=MICROBATCHES)
    share = num_ranks / len(makes)
    stages = tuple(
        StageCosts(
            forward_seconds=0.010 * share,
            backward_seconds=0.020 * share,
            weight_seconds=0.010 * share,
            outputs={name: round(mib * MIB) for name, mib in each.items()},
        )
        for each in makes
    )
    return lower(made, links=links), Costs(stages, network)


def exchanges() -> Iterator[tuple[str, list[float]]]:
    """Yields steps with a tied weight: on NICs that are shared, and on a NIC of its own."""
    for mib in (0.0625, 1):
        for share in (0.3, 0.9, 2.0):
            costs = pipeline(
                "eager-1f1b", 4, [{"x": mib}] * 4, chain(4), Network(nic_bytes_per_second=RATE)
            )[1]
            schedule = build("eager-1f1b", num_ranks=4, num_microbatches=MICROBATCHES)
            program = lower(schedule)
            nbytes = round(share * 3 * 0.020 * RATE)
            alone = nbytes / RATE
            tied = {"stages": (0, 3), "readers": (0, 3)}
            ways = (
                CollectiveCosts(nbytes, 2, "send", nbytes, **tied),
                CollectiveCosts(0, 2, "send", 0, seconds=alone, sync_seconds=alone, **tied),
            )
            taken = [seconds(program, replace(costs, collectives={"tied": way})) for way in ways]
            yield f"x {mib:g} MiB, the exchange {share:g} of the drain", taken


def main() -> None:
    """Prints the README's tables."""
    print("| | one connection, ms | two | pieces of 256 KiB | one piece a NIC |")
    print("|---|---|---|---|---|")
    for name, program, costs in rows():
        with mock.patch.object(Program, "skips", frozenset()):
            one = seconds(program, costs)
            Pieces.needed_at = needs(program, costs)
            taken = []
            for is_by_nic in (False, True):
                Pieces.is_by_nic = is_by_nic
                with mock.patch.object(simulator, "Messages", Pieces):
                    taken.append(seconds(program, costs))
        # It is computed once for a Program.
        two = seconds(lower(program.schedule, links=program.links), costs)
        ratios = " | ".join(f"{each / one:.3f}" for each in (two, *taken))
        print(f"| {name} | {1e3 * one:.0f} | {ratios} |")
    print("\n| tied weight | shared NICs, ms | a NIC of its own |\n|---|---|---|")
    for name, (shared, own) in exchanges():
        print(f"| {name} | {1e3 * shared:.0f} | {own / shared:.3f} |")


if __name__ == "__main__":
    main()
