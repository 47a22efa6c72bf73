"""Patterns: shell-style patterns of parameter names, as options of handlers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pipegrad import ParameterRecord


class Patterns:
    """Shell-style patterns of parameter names. They are case-sensitive.

    Args:
        option: Name of the option, for messages.
        patterns: The value of the option.

    Raises:
        ValueError: If the value is not a list of strings.
    """

    def __init__(self, option: str, patterns: Sequence[str]) -> None:
        is_list = isinstance(patterns, list | tuple)
        if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(
                f"{option} is {patterns!r}, expected a list of patterns, as in ['*norm*']"
            )
        self._option = option
        self._patterns = tuple(patterns)

    def match(self, record: ParameterRecord) -> bool:
        """True if a pattern matches the parameter's name on this stage, or in its key."""
        # A tied parameter has another name on each stage. Its key has the name at its lowest
        # holder, so a pattern of that name matches on all stages.
        names = (record.name, record.key.partition(".")[2])
        return any(fnmatchcase(name, pattern) for name in names for pattern in self._patterns)

    def check(self, parameters: Sequence[ParameterRecord]) -> None:
        """Checks that a parameter matches. An empty list of patterns is accepted.

        Args:
            parameters: All parameters of the model.

        Raises:
            ValueError: If no parameter matches.
        """
        if self._patterns and parameters and not any(map(self.match, parameters)):
            raise ValueError(
                f"{self._option} is {list(self._patterns)}, which matches none of the model's "
                f"{len(parameters)} parameters, such as {parameters[0].name!r}: write patterns of "
                f"their names, or [] for none"
            )
