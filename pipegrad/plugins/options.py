"""Options by name, for whatever a configuration selects: checked before anything is called."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable


def complaints_of(
    function: Callable[..., object], options: Collection[str], *, given: Collection[str] = ()
) -> str:
    """Returns what is wrong with the names of `options` for `function`; "" if nothing is.

    Args:
        function: A class or function; its signature is read, it is not called. Without one it
            takes anything.
        options: Names that are to be passed by keyword.
        given: Parameters that the caller passes by itself: neither missing nor allowed.
    """
    try:
        every = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C
        return ""
    by_name = [p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    allowed = [p.name for p in by_name if p.name not in given]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in every)
    unknown = [o for o in sorted(options) if o not in allowed and (o in given or not takes_any)]
    needed = [p.name for p in by_name if p.default is p.empty and p.name in allowed]
    missing = [name for name in needed if name not in options]
    if not unknown and not missing:
        return ""
    complaints = [f"has no option {option!r}" for option in unknown]
    complaints += [f"needs the option {option!r}" for option in missing]
    closest = closest_first((unknown + missing)[0], allowed)
    return f"{', '.join(complaints)}; allowed, closest first: {closest}"


def closest_first(word: str, known: Iterable[str]) -> str:
    """Returns the known names as one line: those close to `word`, then the others by name."""
    names = sorted(set(known))
    plain = {name.lower(): name for name in reversed(names)}
    close = [plain[found] for found in difflib.get_close_matches(word.lower(), plain)]
    return ", ".join(close + [name for name in names if name not in close]) or "none"
