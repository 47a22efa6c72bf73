"""Refusals: tables of what cannot be done, instead of branches."""

from __future__ import annotations

from collections.abc import Mapping

from pipegrad.errors import PipegradError


def refuse(error: type[PipegradError], reasons: Mapping[str, object]) -> None:
    """Raises an error with the first reason that holds.

    Args:
        error: The class of the error.
        reasons: Each with a value that is true if it holds.
    """
    for reason, holds in reasons.items():
        if holds:
            raise error(reason)
