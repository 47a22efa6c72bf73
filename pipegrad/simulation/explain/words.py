"""Words: times, shares and actions as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def in_time(seconds: float) -> str:
    """Returns a time with three digits: ``1.23 s``, ``12.3 ms`` or ``85.0 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * size:  # what is rounded up to a unit is said in it
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def in_percent(share: float) -> str:
    """Returns a share of 1 in percent, with one digit behind the point below ten percent."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def in_list(names: Sequence[str]) -> str:
    """Returns ``0F2``, ``0F2 and 0F3``, or ``5 actions from 0F2 to 0F6``."""
    if len(names) > 3:
        return f"{len(names)} actions from {names[0]} to {names[-1]}"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _three_digits(number: float) -> str:
    if abs(number) >= 1e6:
        return f"{number:.2e}"
    if abs(number) >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
