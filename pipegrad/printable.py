"""printable: names and texts from outside, as a terminal and a picture may show them."""

from __future__ import annotations

import sys

_LONGEST = 10_000  # a line of a grid may be long


def printable(text: str) -> str:
    r"""Returns one line without control characters; they are shown as ``\x1b``, a tab as ``\t``.

    The name of a file, a plug-in or another rank may have an escape sequence that clears a
    terminal, a line feed that forges a line, or a mark that turns the direction of writing. An SVG
    with most of these characters is no XML.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shortened(text: str, most: int = 80) -> str:
    """Returns the first characters of a text; ``...`` replaces the rest."""
    return text if len(text) <= most else f"{text[:most]}..."


def printable_lines(text: str) -> str:
    """Returns several lines, each as `printable` does, and not longer than a screen."""
    return "\n".join(shortened(printable(line), _LONGEST) for line in text.split("\n"))


def say(words: str) -> None:
    """Prints lines on the standard error, at once."""
    print(printable_lines(words), file=sys.stderr, flush=True)  # noqa: T201
