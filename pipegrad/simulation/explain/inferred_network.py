"""The network of a timeline: how large values are for their links, and whether ranks share NICs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import attrgetter
from statistics import median

from pipegrad.simulation.costs import LinkCosts, Network
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.timeline import Span

# A timeline has times and no bytes. Values get the bytes that they would have at this rate, so that
# what-ifs can change sizes and rates.
NOMINAL_RATE = 1e9
GRADIENT = "gradient of "
_SHARED = 1.15  # if transfers take longer than this beside others, they share a NIC
Value = tuple[str, int]  # a name, and the stage that makes it
_Way = tuple[Value, int, int]  # a value, or its gradient, and the ranks at its ends


def value_of(label: str) -> Value:
    """Returns the name and the producer of ``x of 0F3``, or of ``gradient of x of 0F3``.

    The producer is -1 if the label is something else.
    """
    name, _, action = label.removeprefix(GRADIENT).rpartition(" of ")
    stage = action.partition("F")[0]
    return name, int(stage) if stage.isdecimal() else -1


def network_of(lookup: Lookup) -> tuple[dict[Value, int], Network]:
    """Returns the bytes of each value, and a network on which they take the times of a timeline."""
    alone, beside = _seconds(lookup)
    seconds = {way: alone.get(way, own) for way, own in {**beside, **alone}.items()}
    sizes: dict[Value, int] = {}
    for (value, _, _), time in seconds.items():
        sizes.setdefault(value, max(1, round(time * NOMINAL_RATE)))
    links = tuple(_links(seconds, sizes))
    slower = [beside[way] / alone[way] for way in beside if alone.get(way, 0.0) > 0]
    is_shared = bool(slower) and median(slower) > _SHARED
    rate = max((link.bytes_per_second for link in links), default=math.inf)
    return sizes, Network(nic_bytes_per_second=rate if is_shared else math.inf, links=links)


def _links(seconds: dict[_Way, float], sizes: dict[Value, int]) -> Iterator[LinkCosts]:
    times, num_bytes = (
        defaultdict[tuple[int, int], float](float),
        defaultdict[tuple[int, int], int](int),
    )
    for (value, source, target), time in seconds.items():
        times[source, target] += time
        num_bytes[source, target] += sizes[value]
    for edge, time in times.items():
        if time > 0:
            yield LinkCosts(*edge, bytes_per_second=num_bytes[edge] / time)


def _seconds(lookup: Lookup) -> tuple[dict[_Way, float], dict[_Way, float]]:
    """Returns the times of transfers that were alone on their NICs, and of those beside others."""
    transfers = [span for span in lookup.spans if span.kind == "transfer"]
    crowded = _crowded(transfers)
    known: tuple[dict[_Way, list[float]], ...] = (defaultdict(list), defaultdict(list))
    longest = defaultdict[_Way, list[float]](list)
    for span in transfers:
        way = value_of(span.label), span.rank, span.peer
        kept = known[span in crowded] if lookup.has_end(span) else longest
        kept[way].append(lookup.transfer_seconds(span))
    alone, beside = ({way: median(own) for way, own in each.items()} for each in known)
    # Where no receiver ever waited, all that is known is that no transfer took longer, and what
    # takes the same bytes the other way.
    shortest = {way: min(own) for way, own in longest.items() if way not in {*alone, *beside}}
    for way, time in shortest.items():
        value, source, target = way
        back = value, target, source
        alone[way] = min(time, alone.get(back, beside.get(back, time)))
    return alone, beside


def _crowded(transfers: Iterable[Span]) -> set[Span]:
    """Returns transfers that were on their way while another edge of a NIC had one."""
    crowded = set[Span]()
    nics = defaultdict[tuple[str, int], list[Span]](list)
    for span in sorted(transfers, key=attrgetter("begin", "end")):
        for nic, edge_end in ((("out", span.rank), span.peer), (("in", span.peer), span.rank)):
            others = [o for o in nics[nic] if o.end > span.begin]
            for other in others:
                if edge_end != (other.peer if nic[0] == "out" else other.rank):
                    crowded |= {span, other}
            nics[nic] = [*others, span]
    return crowded
