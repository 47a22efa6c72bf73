"""`pipegrad plan`, `schedule`, `simulate` and `verify`: show the work of ranks, but start none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from pipegrad.commands.command_options import (
    AS_JSON,
    Number,
    configured,
    draw,
    draws,
    explained,
    saving,
    sized,
    tell_if_long,
    usage_errors,
)
from pipegrad.errors import PipegradError
from pipegrad.limits import check_size
from pipegrad.printable import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pipegrad.model.manifest import Manifest
    from pipegrad.orders.verification import Communicators, Sends
    from pipegrad.partition.cut_model import Cut
    from pipegrad.schedules import Schedule, ScheduleGenerator
    from pipegrad.simulation.costs import Costs
    from pipegrad.simulation.explain.explanation import Explanation
    from pipegrad.simulation.simulator import Simulation
    from pipegrad.train.config import Config
    from pipegrad.train.job import Job

_MOST_RANKS = 2**20  # a topology lists its ranks
_UNREADABLE = 2  # the same code as in `pipegrad audit`


@click.command()
@configured
@click.option(
    "--ranks",
    type=click.IntRange(1, _MOST_RANKS),
    help="How many; by default as CONFIG says.",
)
@click.option("--rank", type=click.IntRange(min=0), help="Print all that this rank does.")
@click.option(
    "--costs",
    "costs_file",
    type=Path,
    metavar="FILE",
    help="A file of costs: times and memory are then simulated with them.",
)
@AS_JSON
@draws
def plan(
    pictures: Mapping[str, Path],
    loaded: Callable[[], Config],
    *,
    ranks: int | None,
    rank: int | None,
    costs_file: Path | None,
    as_json: bool,
) -> None:
    """Print the plan of the ranks of CONFIG, without starting any: one replica, and sums."""
    from pipegrad.simulation.costs import Costs
    from pipegrad.tables import make_console, print_parts
    from pipegrad.train.rendering import rendered_summary
    from pipegrad.train.summary import make_summary, predicted, rank_as_text, summarize_rank

    with usage_errors():
        costs = Costs.load(costs_file) if costs_file else None
        config = loaded()
        job, cut, manifest = _prepared(config, ranks, costs_file)
        if pictures:
            draw(pictures, [predicted(job, manifest, costs)])
        if rank is not None and as_json:
            click.echo(json.dumps(summarize_rank(job, manifest, rank), indent=2))
        elif rank is not None:
            click.echo(printable_lines(rank_as_text(job, manifest, rank)))
        elif as_json:
            click.echo(json.dumps(make_summary(job, cut, manifest, costs), indent=2))
        else:
            summary = make_summary(job, cut, manifest, costs)
            print_parts(make_console(), rendered_summary(summary, job.schedule))


def _prepared(config: Config, ranks: int | None, costs: Path | None) -> tuple[Job, Cut, Manifest]:
    from pipegrad.train.job import Job

    job = Job(config, ranks, costs)

    def on(device: str) -> tuple[Job, Cut, Manifest]:
        cut = job.cut(job.model(device))
        return job, cut, job.manifest(cut)

    try:
        return on("meta")
    # First without memory, because a plan of a large model then fits anywhere. A factory that reads
    # its own tensors fails on "meta", and needs real ones.
    except Exception:  # noqa: BLE001 - any error of the factory
        return on("cpu")


@click.command()
@click.argument("name")
@sized
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["text", "torch-csv"]),
    default="text",
    show_default=True,
    help="torch-csv is what torch's _PipelineScheduleRuntime loads.",
)
def schedule(
    name: str, ranks: int, microbatches: int, settings: Sequence[str], file_format: str
) -> None:
    """Print the computes of each rank, in order, by the schedule NAME.

    NAME is a name that `pipegrad schedules` lists, or module:attr.
    """
    from pipegrad.schedules import generate, registry
    from pipegrad.schedules.torch_csv import for_torch
    from pipegrad.train.config import parsed_setting

    with usage_errors():
        options = {".".join(key): value for key, value in map(parsed_setting, settings)}
        generator = registry.resolve({**options, "name": name})
        tell_if_long(ranks * microbatches, "makes the schedule")
        made = generate(generator, num_ranks=ranks, num_microbatches=microbatches)
        text = for_torch(made) if file_format == "torch-csv" else f"{made}\n"
    click.echo(text, nl=False)


# Modules for these commands are imported when they run, because the import takes time.

Command = TypeVar("Command", bound=Callable[..., None])
_MIB = 2**20
_ASSUMED = (  # the costs of `_uniform` in words
    "assumed: forward {forward_ms:g} ms, backward {backward_ms:g} ms (split: {weight_ms:g} ms in "
    "W) of a microbatch on each rank; {mib:g} MiB to the next stage; {gbit:g} Gbit/s, "
    "{latency_us:g} us a message"
)


def _amount(
    option: str, default: float | None, text: str, *, above_zero: bool = False
) -> Callable[[Command], Command]:
    kind = Number(min=0, min_open=above_zero)
    return click.option(option, type=kind, default=default, show_default=True, help=text)


@click.command()
@click.argument("schedule")
@sized
@click.option(
    "--costs",
    "costs_file",
    type=Path,
    metavar="FILE",
    help="Costs as JSON, in the place of the amounts below.",
)
@_amount("--forward-ms", 10, "Forward of a microbatch, on all stages of a rank together.")
@_amount("--backward-ms", 20, "Backward of a microbatch, likewise.")
@_amount(
    "--weight-ms", None, "The part of it that a split backward computes in W; by default half."
)
@_amount("--mib", 1, "What a stage sends to the next one, of each microbatch.")
@_amount("--gbit", 1, "Rate of each rank's NIC, in Gbit/s, each way.", above_zero=True)
@_amount("--latency-us", 50, "Time of an empty message.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--save", type=Path, metavar="FILE", help="Save the timeline, as JSON.")
@draws
def simulate(
    pictures: Mapping[str, Path],
    *,
    schedule: str,
    ranks: int,
    microbatches: int,
    settings: Sequence[str],
    costs_file: Path | None,
    as_json: bool,
    save: Path | None,
    **amounts: Any,  # noqa: ANN401 - numbers; None if W takes half of a backward
) -> None:
    """Print the time of a step of SCHEDULE, its parts, and changes that would make it shorter.

    SCHEDULE is a name that `pipegrad schedules` lists, or module:attr.
    """
    from pipegrad.schedules import lower
    from pipegrad.simulation.choose import chain_of
    from pipegrad.simulation.costs import Costs
    from pipegrad.simulation.explain.explanation import explain
    from pipegrad.simulation.simulator import simulate as simulated
    from pipegrad.train.config import parsed_setting

    def costs_of(made: Schedule) -> Costs:
        return Costs.load(costs_file) if costs_file else _uniform(made, **amounts)

    _refuse_both(costs_file)
    if amounts["weight_ms"] is None:
        amounts["weight_ms"] = amounts["backward_ms"] / 2
    with usage_errors():
        options = {".".join(key): value for key, value in map(parsed_setting, settings)}
        check_size(ranks, microbatches)
        num_cells = ranks * microbatches
        tell_if_long(num_cells, "makes the schedule")
        made, costs = _made({**options, "name": schedule}, ranks, microbatches, costs_of)
        check_size(len(made.stage_to_rank), microbatches)
        # The simulation refuses costs of more stages than the schedule has.
        own = replace(costs, stages=costs.stages[: len(made.stage_to_rank)])
        program = lower(made, links=chain_of(own))
        tell_if_long(num_cells, "simulates it")
        own = replace(costs, collectives={})
        simulation = simulated(program, own)
        assert simulation.timeline is not None
        tell_if_long(num_cells, "looks for what would make it shorter")
        explanation = explain(simulation.timeline, program=program, costs=own)
        basis = printable(str(costs_file)) if costs_file else _ASSUMED.format(**amounts)
        timeline = replace(simulation.timeline, notes={"costs": basis})
        if save:
            saving("--save", save, timeline.save)
        draw(pictures, [timeline])
    if as_json:
        seconds = {"step_seconds": simulation.step_seconds, "peak_bytes": simulation.peak_bytes}
        click.echo(json.dumps({"costs": basis, **seconds, **explanation.to_json()}, indent=2))
    else:
        doubts = costs.doubts() if costs_file else ()  # options name their units
        _show(made, simulation, costs, basis=basis, doubts=doubts, explained=explanation)


def _refuse_both(costs_file: Path | None) -> None:
    """Refuses amounts if a file of costs is given, too."""
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if isinstance(parameter.type, Number)
        and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    ]
    if costs_file and given:
        raise click.UsageError(
            f"{given[0]} and --costs: {costs_file} has all costs; change it there"
        )


def _made(
    options: Mapping[str, object],
    ranks: int,
    microbatches: int,
    costs_of: Callable[[Schedule], Costs],
) -> tuple[Schedule, Costs]:
    """Returns the schedule and its costs; schedules that measure steps get the costs."""
    from pipegrad.schedules import generate, registry
    from pipegrad.schedules.measured import MeasuredGenerator
    from pipegrad.simulation.auto import Auto
    from pipegrad.simulation.choose import times_of

    def made_by(spec: ScheduleGenerator | Mapping[str, object] | str) -> Schedule:
        return generate(registry.resolve(spec), num_ranks=ranks, num_microbatches=microbatches)

    generator = registry.resolve(options).plugin
    spec: ScheduleGenerator | Mapping[str, object] = options
    if isinstance(generator, MeasuredGenerator) and generator.wants_times:
        costs = costs_of(made_by("1f1b"))
        if isinstance(generator, Auto):
            spec = {**options, "costs": costs}
        else:
            spec = generator.planned(times_of(costs))
    made = made_by(spec)
    return made, costs_of(made)


def _uniform(
    schedule: Schedule,
    *,
    forward_ms: float,
    backward_ms: float,
    weight_ms: float,
    mib: float,
    gbit: float,
    latency_us: float,
) -> Costs:
    """Returns equal costs for all ranks."""
    from pipegrad.simulation.costs import Costs, Network, StageCosts

    # Divide, because schedules with several stages on a rank must be comparable with others.
    stages_per_rank = len(schedule.stage_to_rank) / schedule.num_ranks
    stage = StageCosts(
        forward_seconds=forward_ms / 1e3 / stages_per_rank,
        backward_seconds=backward_ms / 1e3 / stages_per_rank,
        weight_seconds=weight_ms / 1e3 / stages_per_rank,
        outputs={"x": round(mib * _MIB)},
    )
    network = Network(nic_bytes_per_second=gbit * 1e9 / 8, latency_seconds=latency_us / 1e6)
    meeting_seconds = 2 * network.latency_seconds if schedule.num_ranks > 1 else 0.0
    stages = (stage,) * len(schedule.stage_to_rank)
    return Costs(stages, network, meeting_seconds=meeting_seconds)


def _show(
    schedule: Schedule,
    simulation: Simulation,
    costs: Costs,
    *,
    basis: str,
    doubts: Iterable[str],
    explained: Explanation,
) -> None:
    from pipegrad.tables import make_console, print_parts
    from pipegrad.train.rendering import rendered_explanation

    chunks = f" of {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    numbers = (
        f"{schedule.num_ranks} ranks, {len(schedule.stage_to_rank)} stages, "
        f"{schedule.num_sequences} microbatches{chunks}"
    )
    parts: list[RenderableType] = [f"{schedule.name}: {numbers}, simulated", f"costs: {basis}"]
    parts += doubts
    if any(stage.held_bytes or stage.activation_bytes for stage in costs.stages):
        peak = max(simulation.peak_bytes)
        rank = simulation.peak_bytes.index(peak)
        parts.append(f"peak memory: {peak / _MIB:,.0f} MiB, on rank {rank}")
    if costs.collectives:
        parts.append(
            "the reductions of gradients in the costs are left out: they belong to the parameters "
            "of a job; pipegrad plan CONFIG --costs FILE simulates them"
        )
    print_parts(make_console(), [*parts, *rendered_explanation(explained)])


@click.command()
@click.argument("file", type=Path)
@click.option(
    "--sends",
    type=click.Choice(["rendezvous", "eager"]),
    default="rendezvous",
    show_default=True,
    help="When a send ends: when its receive has started, or at once.",
)
@click.option(
    "--communicators",
    type=click.Choice(["one", "pair", "edge"]),
    default="one",
    show_default=True,
    help="One for all transfers, for each two ranks, or for each direction between two ranks.",
)
@click.option(
    "--batched", is_flag=True, help="Transfers side by side start together, as in one group."
)
@AS_JSON
def verify(
    *,
    file: Path,
    sends: Sends,
    communicators: Communicators,
    batched: bool,
    as_json: bool,
) -> None:
    """Prove that the orders in FILE end, or show which ranks wait for each other.

    FILE is a CSV with a line for each rank. Its cells are actions of torch, with transfers or
    without, instructions of DeepSpeed, or functions of Megatron's schedule. Nothing in it is run.
    The exit code is 0 if everything is right, 1 if something is wrong, and 2 if FILE cannot be
    read.
    """
    from pipegrad.orders import verify as verified

    try:
        verdict = verified(file, sends=sends, communicators=communicators, batched=batched)
    except PipegradError as error:
        click.echo(printable_lines(f"Error: {explained(error)}"), err=True)
        raise SystemExit(_UNREADABLE) from error
    click.echo(verdict.as_json() if as_json else printable_lines(str(verdict)))
    raise SystemExit(0 if verdict.is_right else 1)
