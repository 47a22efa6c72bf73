"""Reasons: why a rank waited, in words."""

from __future__ import annotations

from operator import attrgetter

from pipegrad.simulation.explain.lookup import Lookup, Piece, name_of
from pipegrad.simulation.explain.words import in_list, in_time
from pipegrad.simulation.timeline import COMPUTE, WAITS, Span

# A part of a wait that is shorter than this share of it is not worth a word.
_NEGLIGIBLE = 0.02


def reason(lookup: Lookup, wait: Span) -> str:
    """Returns why a rank waited.

    For example: ``rank 1 waits 12.3 ms for x of 0F3 from rank 0, which computes 0F2 and 0F3 until
    2.10 ms before the end, and then sends it``.

    Args:
        lookup: The timeline.
        wait: A span of the timeline, one of the kinds `WAITS`.
    """
    head = f"rank {wait.rank} waits {in_time(wait.seconds)} for "
    if wait.kind == "wait for receive":
        value = wait.label or "a value"
        return f"{head}{value} from rank {wait.peer}{_receive(lookup, wait)}"
    if wait.kind == "wait for send":
        return f"{head}{wait.label or 'a value'} to arrive on rank {wait.peer}"
    if wait.kind == "wait for ranks":
        return f"{head}the other ranks{_ranks(lookup, wait)}"
    return f"{head}{_collective(lookup, wait)}"


def longest_waits(lookup: Lookup, step: int, number: int) -> list[str]:
    """Returns the reasons of the longest waits of a step, the longest first."""
    begin, end = lookup.step(step)
    waits = [
        piece.span
        for rank in range(lookup.timeline.num_ranks)
        for piece in lookup.between(rank, begin, end)
        if piece.span is not None and piece.span.kind in WAITS
    ]
    waits.sort(key=lambda wait: (-wait.seconds, wait.rank, wait.begin))
    return [reason(lookup, wait) for wait in waits[:number]]


def _receive(lookup: Lookup, wait: Span) -> str:
    transfer = lookup.transfer_of(wait)
    maker = lookup.maker(transfer) if transfer else lookup.maker(wait, by=wait.end)
    sent = transfer.begin if transfer else maker.end if maker else None
    if sent is None:
        return ""
    travels = min(wait.end - sent, wait.seconds)
    if travels >= (1 - _NEGLIGIBLE) * wait.seconds:
        took = f", which took {in_time(transfer.seconds)}" if transfer else ""
        return f": it is on its way{took}"
    peer = _peer(lookup, wait, sent)
    if travels <= _NEGLIGIBLE * wait.seconds:
        return f", which {peer} until then"
    return f", which {peer} until {in_time(travels)} before the end, and then sends it"


def _peer(lookup: Lookup, wait: Span, sent: float) -> str:
    """Returns what the sender did while a rank waited."""
    pieces = [p for p in lookup.between(wait.peer, wait.begin, sent) if _counts(p, lookup)]
    actions = [p.span.action for p in pieces if p.span is not None and p.span.kind in COMPUTE]
    waits = [p.span for p in pieces if p.span is not None and p.span.kind in WAITS]
    words = [f"computes {in_list(actions)}"] if actions else []
    if waits:
        longest = max(waits, key=attrgetter("seconds"))
        origin = f" from rank {longest.peer}" if longest.kind == "wait for receive" else ""
        words.insert(0, f"itself waits for {longest.label or longest.kind[9:]}{origin}")
    return " and ".join(words) or "does nothing that is in the timeline"


def _counts(piece: Piece, lookup: Lookup) -> bool:
    return piece.seconds > lookup.tolerance


def _collective(lookup: Lookup, wait: Span) -> str:
    spans = lookup.beside(wait, by=wait.end)
    is_sync = wait.kind == "wait for parameters"
    name = name_of(spans[0] if spans else wait)
    name = f"the parameter sync of {name}" if is_sync else name
    if not spans:
        return name
    last = max(spans, key=attrgetter("begin"))
    own = [s for s in spans if s.rank == wait.rank] or spans
    took = f"{name}: it takes {in_time(own[-1].end - last.begin)} and begins"
    begun = f"{in_time(wait.begin - last.begin)} before" if last.begin < wait.begin else "then"
    if len(spans) > 1:
        begun = f"{begun}, last on rank {last.rank}"
    return f"{took} {begun}{_during(lookup, last)}"


def _during(lookup: Lookup, collective: Span) -> str:
    """Returns what a rank computed when it began a reduction."""
    piece = lookup.before(collective.rank, collective.begin)
    if piece is None or piece.span is None or piece.span.kind not in COMPUTE:
        return ""
    is_over = piece.end <= collective.begin + lookup.tolerance
    return f", {'after' if is_over else 'in'} {piece.span.action}"


def _ranks(lookup: Lookup, wait: Span) -> str:
    """Returns which rank the others waited for at the end of a step."""
    last, until = -1, wait.begin
    for rank in range(lookup.timeline.num_ranks):
        piece = lookup.before(rank, wait.end)
        if piece is not None and piece.span is not None and piece.span.kind == "wait for ranks":
            busy = piece.begin
        else:
            busy = wait.end
        if busy > until + lookup.tolerance:
            last, until = rank, busy
    return f": rank {last} is the last to end" if last >= 0 else ""
