"""Options by name, for functions and classes of a configuration. They are checked before a call."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable


def complaints_of(
    function: Callable[..., object], options: Collection[str], *, given: Collection[str] = ()
) -> str:
    """Returns the mistakes in the names of `options` for `function`; "" if there are none.

    Args:
        function: A class or function. It is not called; its signature is read. If it has no
            signature, all options are allowed.
        options: Names that will be passed by keyword.
        given: Parameters that the caller passes itself. They are neither missing nor allowed.
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
    # The first mistake decides the order of the names: one suggestion is enough for a message.
    closest = closest_first((unknown + missing)[0], allowed)
    return f"{', '.join(complaints)}; allowed, closest first: {closest}"


def closest_first(name: str, known: Iterable[str]) -> str:
    """Returns the known names as one line: first those close to `name`, then the others, sorted."""
    names = sorted(set(known))
    plain = {name.lower(): name for name in reversed(names)}
    close = [plain[match] for match in difflib.get_close_matches(name.lower(), plain)]
    return ", ".join(close + [name for name in names if name not in close]) or "none"
