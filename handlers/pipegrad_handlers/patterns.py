"""Which parameters an option means: shell-style patterns, as handlers take them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pipegrad import ParameterRecord


class Patterns:
    """Shell-style patterns of parameters; upper and lower case are different.

    Args:
        option: Which option they are of.
        patterns: As a user gave them.

    Raises:
        ValueError: If they are not a list of strings.
    """

    def __init__(self, option: str, patterns: Sequence[str]) -> None:
        listed = isinstance(patterns, list | tuple)
        if not listed or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(
                f"{option} is {patterns!r}, expected a list of patterns, as in ['*norm*']"
            )
        self._option = option
        self._patterns = tuple(patterns)

    def match(self, record: ParameterRecord) -> bool:
        """Whether one matches a parameter's name here, or that at its key's stage."""
        names = (record.name, record.key.partition(".")[2])
        return any(fnmatchcase(name, pattern) for name in names for pattern in self._patterns)

    def check(self, parameters: Sequence[ParameterRecord]) -> None:
        """Does nothing if a parameter matches, or if there are no patterns.

        Args:
            parameters: All of the model.

        Raises:
            ValueError: If none matches.
        """
        if self._patterns and parameters and not any(map(self.match, parameters)):
            raise ValueError(
                f"{self._option} is {list(self._patterns)}, which matches none of the model's "
                f"{len(parameters)} parameters, such as {parameters[0].name!r}: write patterns of "
                f"their names, or [] for none"
            )
