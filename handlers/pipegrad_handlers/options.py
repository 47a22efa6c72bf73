"""Options of handlers: one of several words, or shell-style patterns of parameter names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipegrad import ParameterRecord
from pipegrad.plugins.handler import matches_any


def checked_word(option: str, word: str, expected: Collection[str]) -> str:
    """Returns the value of an option.

    Raises:
        ValueError: If it is none of those expected.
    """
    if word not in expected:
        raise ValueError(f"{option} is {word!r}, expected one of {list(expected)}")
    return word


def checked_patterns(option: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the value of an option.

    Raises:
        ValueError: If it is not a list of strings.
    """
    is_list = isinstance(patterns, list | tuple)
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{option} is {patterns!r}, expected a list of patterns, as in ['*norm*']")
    return tuple(patterns)


def refuse_unmatched(
    option: str, patterns: Sequence[str], parameters: Sequence[ParameterRecord]
) -> None:
    """Refuses patterns if none of them matches. An empty list of patterns is accepted.

    Raises:
        ValueError: If no parameter matches.
    """
    if patterns and parameters and not any(matches_any(patterns, p.names) for p in parameters):
        raise ValueError(
            f"{option} is {list(patterns)}, which matches none of the model's {len(parameters)} "
            f"parameters, such as {parameters[0].name!r}: write patterns of their names, or [] for "
            f"none"
        )
