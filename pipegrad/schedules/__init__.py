"""Schedules as plain data: the computes of every rank, in order. Nothing here needs torch."""

from pipegrad.errors import ScheduleError
from pipegrad.limits import check_size
from pipegrad.plugins.registry import Registry, ResolvedPlugin
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Link, Program
from pipegrad.schedules.program.verify import Proof, verify
from pipegrad.schedules.schedule import Action, Kind, Schedule, ScheduleGenerator
from pipegrad.schedules.torch_csv import read_csv, write_csv

__all__ = [
    "Action",
    "Kind",
    "Link",
    "Program",
    "Proof",
    "Schedule",
    "ScheduleGenerator",
    "build",
    "generate",
    "lower",
    "read_csv",
    "registry",
    "verify",
    "write_csv",
]

# mypy refuses an abstract class as type[T], because it could be called (python/mypy#4717). The
# registry only compares with it.
registry = Registry("pipegrad.schedules", ScheduleGenerator)  # type: ignore[type-abstract]


def build(name: str, *, num_ranks: int, num_microbatches: int, **options: object) -> Schedule:
    """Returns the schedule called `name`, of a pipeline of `num_ranks`.

    Args:
        name: A name of the entry-point group ``pipegrad.schedules``, or ``module:attr``.
        num_ranks: Size of the pipeline, at least 1.
        num_microbatches: Microbatches of a step, at least 1.
        **options: Options of the schedule.

    Raises:
        PluginError: If there is no such schedule, or it does not take these options.
        ScheduleError: If the schedule is not defined for these numbers.
    """
    generator = registry.resolve({"name": name, **options})
    return generate(generator, num_ranks=num_ranks, num_microbatches=num_microbatches)


def generate(
    generator: ResolvedPlugin[ScheduleGenerator], *, num_ranks: int, num_microbatches: int
) -> Schedule:
    """Returns the generator's schedule, checked: it has the requested size and can be run.

    Raises:
        ScheduleError: If the schedule has another size or can never be run, if the generator is
            not defined for these numbers, or if they are too large; see `limits`.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"a schedule has at least 1 rank and 1 microbatch, not {num_ranks} and "
            f"{num_microbatches}"
        )
    check_size(num_ranks, num_microbatches)
    # Check the size here, because a generator is a plug-in: a schedule of another size would fail
    # much later, in a message that names no plug-in.
    schedule = generator.plugin.generate(num_ranks=num_ranks, num_microbatches=num_microbatches)
    expected = (num_microbatches, num_ranks, set(range(num_ranks)))
    if (schedule.num_sequences, schedule.num_ranks, set(schedule.stage_to_rank)) != expected:
        raise ScheduleError(
            f"plug-in {generator} was asked for {num_ranks} ranks and {num_microbatches} "
            f"microbatches, and made a schedule of {schedule.num_ranks} ranks and "
            f"{schedule.num_microbatches} microbatches, with stages on ranks "
            f"{schedule.stage_to_rank}"
        )
    _ = schedule.ticks  # raises if it can never be run
    return schedule
