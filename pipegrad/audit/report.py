"""Report: the result of an audit, as text and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pipegrad.printable import printable, printable_lines

_NAMES_SHOWN = 4
_NUMBERS = re.compile(r"(?<=[\s\[])[-+]?[0-9][-+.e0-9]*(?=[\s,\]:]|$)")  # not digits in names


@dataclass(frozen=True)
class Finding:
    """One cause, and its place.

    Attributes:
        cause: The defect and its reason, in words.
        advice: A way to fix it; "" if none is known.
        names: Parameters or buffers in the uncut model; empty if it concerns none.
        ranks: Ranks that have the defect.
        step: Number of the step in which it is first seen, from 1.
        details: Numbers of each rank, in words.
    """

    cause: str
    advice: str = ""
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    step: int = 1
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = {
            "ranks:": listed(self.ranks),
            "parameters:": printable(shown(self.names)),
            "found:": printable(shown(self.details, "; ", ";")),
            "what to do:": printable_lines(self.advice),
        }
        lines = [f"  {what:<11} {text}" for what, text in parts.items() if text]
        return "\n".join([printable_lines(self.cause), *lines])


@dataclass(frozen=True)
class Gradient:
    """The error of a gradient against the gradient of one process.

    Attributes:
        name: Name in the uncut model.
        ranks: Ranks that hold the gradient, or parts of it.
        error: Norm of the difference by the norm of the right gradient.
        allowed: The largest error that is right.
    """

    name: str
    ranks: tuple[int, ...]
    error: float
    allowed: float


@dataclass(frozen=True)
class Variant:
    """The change that one option makes; see `Audit.variants`.

    Attributes:
        name: Name of the variant.
        words: The result: ``"alike"``, ``"without effect in both"``, ``"lost in the
            pipeline"``, ``"refused: ..."`` and so on.
        what: The size that changes: ``"gradient"`` of the first step, ``"update"`` of parameters
            in all steps, or ``"dropout"``; "" if nothing does.
        one: Change in one process, relative to the size without the option; for dropout the change
            of probabilities; None if it is not known.
        pipeline: The same number for the pipeline.
    """

    name: str
    words: str
    what: str = ""
    one: float | None = 0.0
    pipeline: float = 0.0

    def __str__(self) -> str:
        one = "?" if self.one is None else f"{self.one:.2g}"
        sides = f": {self.what} {one} in one process, {self.pipeline:.2g} in the pipeline"
        return f"{printable_lines(self.words)}{sides if self.what else ''}"


@dataclass(frozen=True)
class Report:
    """The result of an audit, the same on all ranks.

    Attributes:
        findings: Defects; empty if everything is right.
        notes: Comparisons that were left out, and their reasons.
        gradients: Gradients of the last compared step.
        num_steps: Number of compared steps.
        num_ranks: Number of ranks of the job.
        seconds: Duration of the audit.
        variants: The change that each option makes.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    gradients: tuple[Gradient, ...]
    num_steps: int
    num_ranks: int
    seconds: float
    variants: tuple[Variant, ...] = ()

    @property
    def is_right(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    @property
    def summary(self) -> str:
        """One line: right or wrong, and the numbers of steps, ranks and gradients."""
        if not self.gradients:
            return f"{self._verdict}: {self.num_ranks} ranks, {self.seconds:.1f} s"
        worst = max(self.gradients, key=lambda gradient: gradient.error / gradient.allowed)
        steps = f"{self.num_steps} step{'s'[: self.num_steps != 1]}"
        return (
            f"{self._verdict}: {steps} on {self.num_ranks} ranks, "
            f"{len(self.gradients)} gradients in each, the worst is off by {worst.error:.2g} "
            f"(allowed: {worst.allowed:.2g}), {self.seconds:.1f} s"
        )

    @property
    def _verdict(self) -> str:
        number = len(self.findings)
        return "right" if self.is_right else f"wrong, {number} cause{'s'[: number != 1]}"

    def __str__(self) -> str:
        numbered = [
            f"{number}. step {finding.step}: " + str(finding).replace("\n", "\n   ")
            for number, finding in enumerate(self.findings, 1)
        ]
        width = max((len(printable(one.name)) for one in self.variants), default=0)
        varied = [f"{printable(one.name):{width}}  {one}" for one in self.variants]
        notes = [f"note: {printable_lines(note)}" for note in self.notes]
        return "\n".join([self.summary, *numbered, *varied, *notes])

    def as_json(self) -> str:
        """Returns the report as JSON."""
        text = json.dumps({"is_right": self.is_right, **asdict(self)})
        # JSON has no NaN and no infinity.
        return json.dumps(json.loads(text, parse_constant=str), indent=1)


def merged(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Returns one finding for each cause, with all its names and ranks."""
    by_cause: dict[str, Finding] = {}
    for finding in findings:
        known = by_cause.setdefault(finding.cause, finding)
        by_cause[finding.cause] = replace(
            known,
            names=tuple(dict.fromkeys([*known.names, *finding.names])),
            ranks=tuple(sorted({*known.ranks, *finding.ranks})),
            details=tuple(dict.fromkeys([*known.details, *finding.details])),
        )
    return tuple(by_cause.values())


def without_numbers(cause: str) -> str:
    """Returns a cause without its numbers, because these may differ between two audits."""
    return _NUMBERS.sub("", cause)


def shown(texts: Sequence[str], separator: str = ", ", last: str = "") -> str:
    """Returns the first texts and the number of others: ``a, b, c, d and 2 more``."""
    more = len(texts) - _NAMES_SHOWN
    return separator.join(texts[:_NAMES_SHOWN]) + (f"{last} and {more} more" if more > 0 else "")


def listed(ranks: Sequence[int]) -> str:
    """Returns ranks in words: ``0-3, 6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
