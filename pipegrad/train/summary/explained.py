"""An explanation of a step, as parts that rich prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from pipegrad.simulation.explain.breakdown import Breakdown, RankBreakdown
from pipegrad.simulation.explain.explanation import Explanation
from pipegrad.simulation.timeline import in_percent, in_time
from pipegrad.train.tables import table

_LEGEND = (
    "receive, send, reduction, parameters and ranks are waits; bubble: all but compute; "
    "exposed: waits while something is on its way"
)
# A terminal shows this many ranks, peers and reductions. JSON has all ranks.
_MOST_RANKS, _MOST_PEERS, _MOST_REDUCTIONS = 32, 3, 16


def rendered(explanation: Explanation) -> Iterator[RenderableType]:
    """Yields where a step went, why, and what would help."""
    breakdown = explanation.breakdown
    yield from rendered_breakdown(breakdown, f"step {breakdown.step}")
    yield f"critical path: {explanation.path}"
    if explanation.waits:
        yield "longest waits:"
        yield from (f"  {wait}" for wait in explanation.waits)
    if explanation.advice:
        yield "what would help, as simulated:"
        yield from (f"  {advice}" for advice in explanation.advice)
    yield from explanation.notes


def rendered_breakdown(breakdown: Breakdown, title: str) -> Iterator[RenderableType]:
    """Yields where a step went; `title` says which one it is."""
    yield (
        f"{title}: {in_time(breakdown.seconds)}, "
        f"bubble {in_percent(breakdown.bubble)} (the mean of {len(breakdown.ranks)} ranks)"
    )
    shown = _shown(breakdown)
    yield table(breakdown.columns(), breakdown.rows(shown))
    yield _LEGEND
    if len(shown) < len(breakdown.ranks):
        yield f"the {len(shown)} ranks of {len(breakdown.ranks)} with the largest bubbles"
    waits = [[rank, *_waits(breakdown.ranks[rank])] for rank in shown]
    if any(cells for _, *cells in waits if cells[0]):
        yield table(["rank", "waits for", "most of all for what these make"], waits)
    if breakdown.reductions:
        yield table(
            ["reduction", "takes", "hidden", "longest wait for it"],
            (
                [r.name, in_time(r.seconds), in_percent(r.hidden), in_time(r.exposed_seconds)]
                for r in breakdown.reductions[:_MOST_REDUCTIONS]
            ),
        )
    if any(own.overlap_seconds > 0.01 * breakdown.seconds for own in breakdown.ranks):
        yield "spans of a rank overlap by more than 1 % of a step: its parts are not exact"


def _shown(breakdown: Breakdown) -> Sequence[int]:
    ranks = range(len(breakdown.ranks))
    if len(ranks) <= _MOST_RANKS:
        return ranks
    worst = sorted(ranks, key=lambda rank: (-breakdown.ranks[rank].bubble, rank))
    return sorted(worst[:_MOST_RANKS])


def _waits(own: RankBreakdown) -> tuple[str, str]:
    """Returns which ranks and which actions a rank waited for."""
    peers = list(own.peers.items())[:_MOST_PEERS]
    return (
        ", ".join(f"rank {peer} {in_time(seconds)}" for peer, seconds in peers),
        ", ".join(f"{w.action} {in_time(w.seconds)}" for w in own.receives[:_MOST_PEERS]),
    )
