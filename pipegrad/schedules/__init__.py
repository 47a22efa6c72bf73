"""Schedules as plain data: what every rank computes, in order. Imports no torch."""

from pipegrad.registry import Registry
from pipegrad.schedules.action import Action, Kind, Schedule, ScheduleGenerator

__all__ = ["Action", "Kind", "Schedule", "ScheduleGenerator", "build", "registry"]

# mypy takes type[T] for something to be called (python/mypy#4717); a base is only compared with.
registry = Registry("pipegrad.schedules", ScheduleGenerator)  # type: ignore[type-abstract]


def build(name: str, *, num_ranks: int, num_microbatches: int, **options: object) -> Schedule:
    """Returns the schedule called `name`, of a pipeline of `num_ranks`.

    Args:
        name: A name of the entry-point group ``pipegrad.schedules``, or ``module:attr``.
        num_ranks: Size of the pipeline, at least 1.
        num_microbatches: Microbatches of a step, at least 1.
        **options: The schedule's own.

    Raises:
        PluginError: If there is no such schedule, or not with these options.
        ScheduleError: If it is not defined for these numbers.
    """
    generator = registry.resolve({"name": name, **options}).plugin
    return generator.generate(num_ranks=num_ranks, num_microbatches=num_microbatches)
