"""Spans of ranks: ``0-15``, and ``0-4080:16`` for every 16th rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int, int]  # first, last, step


def spans(ranks: Iterable[int]) -> list[Span]:
    """Returns ascending ranks as as few spans as a pass from the first to the last finds."""
    found: list[Span] = []
    for rank in ranks:
        first, last, step = found[-1] if found else (rank, rank, 0)
        if found and step in (0, rank - last):
            found[-1] = (first, rank, rank - last)
        else:
            found.append((rank, rank, 0))
    # Two ranks that are not neighbours are no row: each stands alone.
    pairs = (_apart(span) for span in found)
    return [(first, last, step or 1) for split in pairs for first, last, step in split]


def _apart(span: Span) -> list[Span]:
    first, last, step = span
    return [(first, first, 1), (last, last, 1)] if step > 1 and last == first + step else [span]


def in_words(found: Sequence[Sequence[int]]) -> str:
    """Returns spans as text: ``0-15``, and ``0-4080:16`` for every 16th rank."""
    return ", ".join(
        str(first) if first == last else f"{first}-{last}" + (f":{step}" if step > 1 else "")
        for first, last, step in found
    )
