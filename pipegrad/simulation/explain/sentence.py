"""Sentence: the time of a step, its main cause, and a remedy for the user.

[Note: what is worth a sentence] Each cause has a weight: the share of the step that its best remedy
saves. Data, the optimizer, Python and the time between steps are not simulated: their share counts,
or half of it if nobody can save all of it. A cause below the noise does not count. The noise is the
difference between steps, in time or in computing of a rank, and at least 2 %. For a simulated cause
it is also the error of the simulation of the present step. If steps differ much, no simulated cause
is worth a sentence, and the largest measured cause is named without a remedy.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from pipegrad.simulation.timeline import BATCH, COMPUTE, in_percent, in_time

if TYPE_CHECKING:
    from pipegrad.simulation.explain.explanation import Advice, Explanation

_LEAST_NOISE, _LEAST_SHARE = 0.02, 0.05
TOO_NOISY = 0.2  # steps that differ by more hide the effect of most changes
_ALL_CORES = 0.9  # processes that use so much of all cores leave none to a rank that waits
_KEY = re.compile(r"\b(?:parallel|gradients|optimizer)\.(\w+) = ")


class _Clause(NamedTuple):
    """A cause of a long step.

    Attributes:
        weight: See [Note: what is worth a sentence].
        words: The cause and its remedy.
    """

    weight: float
    words: str


def sentence(explanation: Explanation) -> str:
    """Returns the time of a step, its main cause, and a remedy, in one sentence."""
    seconds = explanation.timeline.noted("step_seconds", explanation.breakdown.seconds)
    noise = noise_of(explanation)
    rough = max(noise, explanation.error)
    shares = [c for c in _shares(explanation) if c.weight >= _LEAST_SHARE]
    clauses = [c for c in shares if c.weight >= noise]
    timeline = explanation.timeline
    if timeline.noted("busy_cores") >= _ALL_CORES and timeline.num_ranks > 1:
        # Ranks that wait are no slack then: another cut or schedule changes little.
        cores = f"the ranks of a machine use all of its {timeline.noted('cores'):.0f} cores"
        words = f"{cores}: only more cores, or less to compute, would help"
        clauses.append(_Clause(1 / 2, words))
    elif noise <= TOO_NOISY:
        clauses += [c for c in _simulated(explanation, rough) if c.weight >= rough]
    limit = f"the noise, {in_percent(rough)}"
    if explanation.error > noise:
        limit = f"the {in_percent(rough)} that the simulation of this step is off by"
    words = f"nothing stands out: no change is simulated to save more than {limit}"
    if clauses:
        words = max(clauses, key=lambda clause: clause.weight).words
    elif noise > TOO_NOISY:
        words = (
            f"steps differ too much from each other, by {in_percent(noise)}, to say what would "
            "help: repeat the run while nothing else runs on its machines"
        )
        if shares:  # these were measured, however much other steps took
            largest = max(shares, key=lambda clause: clause.weight)
            words += f"; {largest.words.partition('; ')[0]}"
    elif not explanation.advice and explanation.notes:
        words = explanation.notes[0]
    return f"a step takes {in_time(seconds)}; {words}"


def as_arguments(words: str) -> str:
    """Returns a sentence with arguments of Python instead of keys of a configuration."""
    words = words.replace("parallel.microbatches = ", "num_microbatches=")
    return _KEY.sub(r"\1=", words).replace("=true", "=True")


def noise_of(explanation: Explanation) -> float:
    """Returns the share of a step below which a gain has no meaning."""
    timeline = explanation.timeline
    if timeline.source == "predicted":
        return _LEAST_NOISE
    ends = timeline.step_ends
    steps = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    computing = defaultdict[int, dict[int, float]](lambda: defaultdict(float))
    for span in timeline.spans:
        if span.kind in COMPUTE and 0 <= span.seconds < math.inf:
            computing[span.rank][span.step] += span.seconds
    # Another process slows one rank after another: steps may take alike, and ranks not.
    each = [steps, *(list(own.values()) for own in computing.values())]
    differ = max(max(seconds) - min(seconds) for seconds in each) / 2
    return max(_LEAST_NOISE, timeline.noted("noise"), differ / (median(steps) or 1.0))


def _simulated(explanation: Explanation, noise: float) -> Iterator[_Clause]:
    """Yields the simulated causes, with the changes that save more than the noise."""
    real = [a for a in explanation.advice if not a.is_bound and a.gain >= noise]
    bounds = {a.cause: a.gain for a in explanation.advice if a.is_bound}
    by_cause = {cause: [a for a in real if a.cause == cause] for cause in bounds | {"pipeline": 0}}
    ranks = explanation.breakdown.ranks
    most = max(ranks, key=lambda own: (own.computing, -own.rank)).rank
    slowest = f"rank {most} holds everyone up"
    if "ranks" in bounds and not by_cause["ranks"]:
        saved = f"at most {in_percent(bounds['ranks'])} less"
        alike = f"move layers from it, so that all ranks compute alike: {saved}"
        yield _Clause(bounds["ranks"] / 2, f"{slowest}; {alike}")
    yield from _against(by_cause.get("ranks", []), slowest)
    order = by_cause["pipeline"]
    # A schedule hides transfers, too.
    if bounds.get("links", 0.0) > max((a.gain for a in order), default=0.0) / 2:
        both = sorted([*by_cause["links"], *order], key=lambda a: -a.gain)
        yield from _against(both, _slow_link(explanation))
    else:
        idle = 1 - sum(own.computing for own in ranks) / len(ranks)
        words = f"ranks compute nothing in {in_percent(idle)} of it, mostly at its begin and end"
        yield from _against(order, words)
    waits = "ranks wait for reductions of gradients"
    yield from _against(by_cause.get("reductions", []), waits)


def _against(remedies: Sequence[Advice], cause: str) -> Iterator[_Clause]:
    if remedies:
        best = {a.change.partition(" = ")[0]: a for a in reversed(remedies)}  # of each key
        shown = sorted(best.values(), key=lambda a: -a.gain)
        about = ("at most" if a.is_at_most else "about" for a in shown)
        words = (
            f"{a.change}: {n} {in_percent(a.gain)} less" for n, a in zip(about, shown, strict=True)
        )
        yield _Clause(remedies[0].gain, f"{cause}; {', or '.join(words)}")


def _shares(explanation: Explanation) -> Iterator[_Clause]:
    """Yields the other causes: data, the optimizer, Python, and the time between steps."""
    path, notes = explanation.path, explanation.timeline.notes
    total = path.seconds or 1.0
    data = path.seconds_of("host", BATCH) / total
    host = sum(path.shares.get("host", {}).values()) / total - data
    optimizer = sum(path.shares.get("optimizer", {}).values()) / total
    meeting = sum(path.shares.get("meeting", {}).values()) / total
    between = explanation.timeline.noted("between_steps")
    for share, saved, cause, remedy in (
        (data, 1.0, "the next batch", notes.get("batch", "load it in other processes")),
        (optimizer, 0.5, "the optimizer", notes.get("optimizer", "try optimizer.fused = true")),
        (meeting, 0.5, "the exchange of loss and norm", "read the loss a step later"),
        (host, 0.5, "Python beside the model", "more rows a step make its share smaller"),
    ):
        words = f"{cause} takes {in_percent(share)} of it; {remedy}: at most as much less"
        yield _Clause(saved * share, words)
    what = notes.get("between", "what is between steps takes")
    yield _Clause(between, f"{what} {in_percent(between)} of the run")


def _slow_link(explanation: Explanation) -> str:
    """Returns a text with the link that takes most of the critical path, and its share."""
    seconds = explanation.path.shares.get("transfer", {})
    if not seconds:
        return "ranks wait for the network"
    total = explanation.path.seconds or 1.0
    link, longest = next(iter(seconds.items()))
    if longest > sum(seconds.values()) / 2:
        return f"the {link} takes {in_percent(longest / total)} of it"
    return f"links take {in_percent(sum(seconds.values()) / total)} of it, most of all the {link}"
