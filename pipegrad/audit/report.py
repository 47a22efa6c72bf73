"""Report: what an audit has found, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_NAMES_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """One cause, and where it is.

    Attributes:
        cause: In words, with what to do.
        names: Parameters in the uncut model; empty if it concerns none.
        ranks: That have it.
        step: Number of the step in which it is first seen, from 1.
    """

    cause: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    step: int

    def __str__(self) -> str:
        more = (
            f" and {len(self.names) - _NAMES_SHOWN} more" if len(self.names) > _NAMES_SHOWN else ""
        )
        names = f" {', '.join(self.names[:_NAMES_SHOWN])}{more}:" if self.names else ""
        return f"step {self.step}, ranks {list(self.ranks)}:{names} {self.cause}"


@dataclass(frozen=True)
class Report:
    """What an audit has found. The same on all ranks.

    Attributes:
        findings: None if everything is right.
        num_compared: Number of gradients that were compared, all ranks counted.
        worst: The largest relative error of a gradient.
        tolerance: What was allowed.
        seconds: How long it took.
    """

    findings: Sequence[Finding]
    num_compared: int
    worst: float
    tolerance: float
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        summary = (
            f"{self.num_compared} gradients compared with one process, largest error "
            f"{self.worst:.2g} of {self.tolerance:.2g} allowed, {self.seconds:.1f} s"
        )
        if self.is_right:
            return f"right: {summary}"
        return "\n".join(["wrong:", *(f"  {finding}" for finding in self.findings), summary])

    def as_json(self) -> str:
        """Returns it as JSON."""
        return json.dumps(asdict(self), indent=1)
