"""Rendering: turns a job or a step into parts that rich prints.

A plan is one replica in about a screen. An explanation has the time of each rank in a step, the
critical path, and advice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from pipegrad.schedules import Schedule
from pipegrad.simulation.choose import rows_of
from pipegrad.simulation.explain.explanation import Explanation
from pipegrad.simulation.explain.sentence import TOO_NOISY, noise_of, sentence
from pipegrad.simulation.timeline import in_time
from pipegrad.tables import ends_of, table
from pipegrad.train.summary import UNIT_COSTS_IN_WORDS

_MIB = 2**20
_ROWS, _WIDTH = 16, 96  # of long tables, and of the grid
_GRID_LEGEND = (
    "F forward, B backward, I and W the two parts of a split backward: 2F0 is stage 2, forward, "
    "microbatch 0. A column is one action; an empty cell is idle."
)


def rendered_summary(summary: Mapping[str, Any], schedule: Schedule) -> Iterator[RenderableType]:
    """Yields a summary as parts that rich prints."""
    yield (
        f"{summary['ranks']} ranks: pipeline {summary['pipeline']} x data {summary['data']}"
        f"{''.join(f' x {name} {size}' for name, size in summary['dimensions'].items())}, "
        f"{summary['microbatches']} microbatches by {_source(summary['schedule'])}"
    )
    yield "handlers: " + (", ".join(map(_source, summary["handlers"])) or "none")
    if summary["codecs"] != "none":
        yield f"codecs: {summary['codecs']}"
    yield ""
    if summary["choice"]:
        head, *rows = rows_of(summary["choice"])
        yield table(head, rows)
    if summary["is_measured"]:
        yield "the schedule to begin with; it may change when steps have been measured:"
    yield f"One replica of {summary['replicas']}. {_GRID_LEGEND}"
    yield from _grid(schedule)
    yield ""
    yield from _stages(summary)
    yield from _ranks(summary)
    yield from _links(summary["links"])
    for tie in summary["ties"]:
        locations = " and ".join(f"{name!r} on stage {stage}" for stage, name in tie["places"])
        yield (
            f"one parameter {tuple(tie['shape'])}: {locations}, over ranks {tie['ranks']} and alike"
        )
    yield table(
        ["reduction", "parameters", "elements"],
        ([way["route"], way["parameters"], f"{way['elements']:,}"] for way in summary["routes"]),
    )
    yield (
        f"all ranks: {summary['collectives']} collectives, "
        f"{summary['reduced_bytes'] / _MIB:.2f} MiB a step, each rank's part counted; "
        f"--rank R prints what one rank does"
    )


def _grid(schedule: Schedule) -> list[str]:
    """Returns the grid, without the middle of a large one."""
    lines, shown = f"{schedule}".split("\n"), list[str]()
    width = max(map(len, lines))  # so that a column is the same time in all rows
    for line in lines:
        kept = ends_of([*line.ljust(width)], _WIDTH, lambda _: " ... ")
        shown.append("".join(kept).rstrip())
    return ends_of(shown, _ROWS, lambda number: f"... {number} ranks ...")


def _stages(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield table(
        ["stage", "ranks", "layers", "parameters", "elements", "MiB"],
        (
            [
                stage["stage"],
                ranks_in_words(stage["ranks"]),
                " .. ".join(dict.fromkeys((stage["layers"][0], stage["layers"][-1]))),
                stage["parameters"],
                f"{stage['elements']:,}",
                f"{stage['bytes'] / _MIB:.2f}",
            ]
            for stage in summary["stages"]
        ),
        _ROWS,
    )


def _ranks(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield table(
        [
            "rank", "stages", "parameter MiB", "gradient", "live", "buffers",
            "bubble", "collectives", "reduced", "synced",
        ],
        (
            [
                rank["pipeline_rank"],
                ", ".join(map(str, rank["stages"])),
                *(_mib(rank[f"{name}_bytes"]) for name in ("parameter", "gradient")),
                rank["live_activations"],
                rank["receive_buffers"],
                f"{rank['bubble']:.1%}",
                rank["collectives"],
                _mib(rank["reduced_bytes"]),
                _mib(rank["published_bytes"]),
            ]
            for rank in summary["pipeline_ranks"]
        ),
        _ROWS,
    )  # fmt: skip
    schedule = summary["schedule"]
    unit = schedule["time_unit"]
    basis = "the costs given" if unit == "seconds" else UNIT_COSTS_IN_WORDS
    yield (
        f"live: microbatches whose activations a rank holds at most. buffers: for values that it "
        f"receives. bubble: idle share of a step of {schedule['step_time']:g} {unit}, with "
        f"{basis}."
    )
    if schedule["peak_bytes"]:
        yield f"peak memory by simulation: {_mib(max(schedule['peak_bytes']))} MiB on a rank"


def _links(links: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    if not links:
        return
    most = max(link["messages"] for link in links)
    sizes = [link["bytes"] for link in links if link["bytes"] is not None]
    if len(sizes) < len(links):
        nbytes = "bytes unknown without costs"
    else:
        nbytes = f"at most {_mib(max(sizes))} MiB"
    yield f"{len(links)} links: at most {most} messages a step and direction, {nbytes}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:.2f}"


def _source(identity: Mapping[str, Any]) -> str:
    where = f"{identity['distribution']} {identity['version']}".strip() or identity["value"]
    options = "".join(f", {name} = {value}" for name, value in identity["options"].items())
    return f"{identity['name']} ({where}{options})"


def ranks_in_words(spans: Sequence[Sequence[int]]) -> str:
    """Returns spans as text: ``0-15``, and ``0-4080:16`` for every 16th rank."""
    return ", ".join(
        str(first) if first == last else f"{first}-{last}" + (f":{step}" if step > 1 else "")
        for first, last, step in spans
    )


def rendered_explanation(explanation: Explanation) -> Iterator[RenderableType]:
    """Yields the time of each rank in a step, the critical path, and advice."""
    breakdown = explanation.breakdown
    yield sentence(explanation)
    yield table(breakdown.columns(), breakdown.rows(), _ROWS)
    if len(breakdown.ranks) > _ROWS:
        yield f"{_ROWS} of {len(breakdown.ranks)} ranks; --json prints all"
    yield (
        f"step {breakdown.step} took {in_time(breakdown.seconds)}. What decided when it ended: "
        f"{explanation.path}"
    )
    if explanation.advice and noise_of(explanation) <= TOO_NOISY:
        yield "what would help, as simulated:"
        yield from (f"  {each}" for each in explanation.advice)
    yield from explanation.notes
