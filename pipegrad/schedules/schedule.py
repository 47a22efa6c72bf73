"""Actions, and the schedules made of them: plain data without torch, printable as a grid.

To add a schedule, write a `ScheduleGenerator` in schedules/builtin, whose docstring shows the grid
and names the source, and an entry point in pyproject.toml. tests/unit/schedules/test_schedules.py
compares the docstring with the grid, and tests/parity/test_scheduler_parity.py compares the
gradients with one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from pipegrad.errors import ScheduleError

Kind = Literal["F", "B", "I", "W"]
_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One compute: ``2F0`` is stage 2, forward, microbatch 0.

    Kinds: F is a forward, B a whole backward. A split backward has two parts: I computes the
    gradients of the stage's inputs, W the gradients of its weights.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The computes of every rank of a pipeline, in order.

    Attributes:
        name: Its name in messages.
        num_microbatches: Number of microbatches of a step.
        stage_to_rank: For each stage its pipeline rank.
        actions: For each pipeline rank its actions, in order.
        head_w_first: True if the weight gradients that other ranks wait for are computed first.
            This happens after the last I of a stage, for all microbatches.
        feeds: For each stage the earlier stages whose outputs are its inputs. None means a chain:
            each stage reads the output of the previous stage. `Scheduler` fills it in from its
            stages.
        chunks: Number of sequence chunks into which each sequence is cut. Then a microbatch is a
            chunk: microbatch m is chunk ``m % chunks`` of its sequence. On each stage the forward
            of a chunk needs the forward of the previous chunk, and the backward of the previous
            chunk needs the backward of this one.

    Raises:
        ScheduleError: If a value is not an action, a rank or a number. `ticks` and `verify` check
            that the schedule is complete and can be run.
    """

    name: str
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    head_w_first: bool = False
    feeds: tuple[tuple[int, ...], ...] | None = None
    chunks: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.head_w_first, bool):
            raise ScheduleError(f"head_w_first is {self.head_w_first!r}, expected true or false")
        if not is_number(self.num_microbatches) or self.num_microbatches < 1:
            raise ScheduleError(
                f"num_microbatches is {self.num_microbatches!r}, expected a whole number from 1"
            )
        if not is_number(self.chunks) or self.chunks < 1 or self.num_microbatches % self.chunks:
            raise ScheduleError(
                f"chunks is {self.chunks!r}, expected a whole number that divides the "
                f"{self.num_microbatches} microbatches"
            )
        self._check_cells()
        self._check_stages()

    def _check_cells(self) -> None:
        """Refuses anything that is not an action."""
        for rank, actions in enumerate(self.actions):
            for number, cell in enumerate(actions):
                if not _is_action(cell):
                    raise ScheduleError(
                        f"cell {number} of rank {rank} is {cell!r}, expected an Action of a stage, "
                        f"one of the kinds {list(_KINDS)} and a microbatch, such as "
                        f"Action(0, 'F', 0); leave idle cells out"
                    )

    def _check_stages(self) -> None:
        """Refuses stages on unknown ranks, and stages that take a value of a later stage."""
        ranks, stages = range(len(self.actions)), range(len(self.stage_to_rank))
        if not stages or any(not is_number(r) or r not in ranks for r in self.stage_to_rank):
            raise ScheduleError(
                f"stage_to_rank is {self.stage_to_rank!r}, expected for each stage its rank, one "
                f"of the {len(ranks)} from 0 on that actions are given for"
            )
        feeds = self._sources
        if len(feeds) != len(stages) or any(not set(feeds[s]) <= set(range(s)) for s in stages):
            raise ScheduleError(
                f"feeds is {feeds!r}, expected for each of {len(stages)} stages the earlier ones "
                f"that it takes something from"
            )

    @property
    def num_ranks(self) -> int:
        """Size of the pipeline."""
        return len(self.actions)

    @cached_property
    def num_sequences(self) -> int:
        """Number of microbatches of whole sequences in a step."""
        return self.num_microbatches // self.chunks

    @cached_property
    def ticks(self) -> dict[Action, int]:
        """Start time of each action, if an action takes one unit of time and a transfer takes none.

        Raises:
            ScheduleError: If an action is missing, doubled, on the wrong rank, or never possible.
        """
        self.check_complete()
        ticks: dict[Action, int] = {}
        heads, free = [0] * self.num_ranks, [0] * self.num_ranks
        ready = list(range(self.num_ranks))
        sleepers: dict[Action, list[int]] = {}
        # A rank goes on until an input of its next action is missing, and again when that input is
        # there. Ranks that have not ended then wait for each other.
        while ready:
            rank = ready.pop()
            for action in self.actions[rank][heads[rank] :]:
                needed = list(self._needs(action))
                missing = next((need for need in needed if need not in ticks), None)
                if missing is not None:
                    sleepers.setdefault(missing, []).append(rank)
                    break
                ticks[action] = max(free[rank], *(ticks[need] + 1 for need in needed), 0)
                free[rank] = ticks[action] + 1
                heads[rank] += 1
                ready += sleepers.pop(action, ())
        stuck = {
            r: actions[heads[r]]
            for r, actions in enumerate(self.actions)
            if heads[r] < len(actions)
        }
        if stuck:
            raise ScheduleError(
                f"schedule {self.name!r} cannot go on: ranks and the actions whose inputs never "
                f"come: { {r: str(a) for r, a in stuck.items()} }; order them after what they need"
                f"\n{self.marked(stuck.values())}"
            )
        return ticks

    @property
    def splits_backward(self) -> bool:
        """True if any backward is split into I and W."""
        return any(action.kind == "W" for actions in self.actions for action in actions)

    @property
    def stage_ticks(self) -> tuple[int, ...]:
        """For each stage the tick of its last backward, which makes its gradients final."""
        return self._last_ticks(("B", "W"))

    @property
    def shared_ticks(self) -> tuple[int, ...]:
        """For each stage the tick at which gradients of ties with other ranks are final."""
        return self._last_ticks(("B", "I")) if self.head_w_first else self.stage_ticks

    @property
    def grid(self) -> tuple[tuple[Action | None, ...], ...]:
        """For each rank its action at each tick; None if it is idle."""
        width = 1 + max(self.ticks.values())
        grid = [[None] * width for _ in self.actions]  # type: list[list[Action | None]]
        for cells, actions in zip(grid, self.actions, strict=True):
            for action in actions:
                cells[self.ticks[action]] = action
        return tuple(map(tuple, grid))

    def _rows(self) -> Sequence[Sequence[Action | None]]:
        """Returns the grid; without ticks, as in an evaluation, the actions in order."""
        try:
            return self.grid
        except ScheduleError:
            return self.actions

    def __str__(self) -> str:
        return _as_text(self._rows())

    def marked(self, actions: Iterable[Action], columns: int | None = None) -> str:
        """Returns the actions of every rank, in order, with ``>1B0<`` around some of them.

        Args:
            actions: The actions to mark.
            columns: If given, returns only so many columns of the grid, from shortly before the
                first mark.
        """
        marked = frozenset(actions)
        if columns is None:
            return _as_text(self.actions, marked)
        grid = self._rows()
        ticks = [t for cells in grid for t, action in enumerate(cells) if action in marked]
        begin = max(0, min(min(ticks, default=0) - 2, max(map(len, grid)) - columns))
        return _as_text([cells[begin : begin + columns] for cells in grid], marked)

    def check_complete(self, *, forward_only: bool = False) -> None:
        """Checks that each stage and microbatch has F and B, or F, I and W, once, on its rank.

        With `forward_only`, it has F alone.

        Raises:
            ScheduleError: If an action is missing, doubled or on the wrong rank. The message shows
                the grid, with the wrong actions marked.
        """
        # Collect all errors, and show the first five, because an author can then correct several
        # of them at once.
        counts = Counter(action for actions in self.actions for action in actions)
        wrong = {action: f"{action} {n} times" for action, n in counts.items() if n > 1}
        rank_of = dict(enumerate(self.stage_to_rank))
        for rank, actions in enumerate(self.actions):
            wrong |= {a: f"{a} on rank {rank}" for a in actions if rank_of.get(a.stage) != rank}
        expected = ({"F"},) if forward_only else ({"F", "B"}, {"F", "I", "W"})
        for stage in range(len(self.stage_to_rank)):
            for microbatch in range(self.num_microbatches):
                kinds = {k for k in _KINDS if (stage, k, microbatch) in counts}
                if kinds not in expected:
                    complaint = f"stage {stage} microbatch {microbatch} has {sorted(kinds)}"
                    present = [Action(stage, k, microbatch) for k in _KINDS if k in kinds]
                    wrong |= dict.fromkeys(present or [Action(stage, "F", microbatch)], complaint)
        extra = [a for a in counts if not 0 <= a.microbatch < self.num_microbatches]
        wrong |= {a: f"{a} of {self.num_microbatches} microbatches" for a in extra}
        if wrong:
            what = "F" if forward_only else "F and B (or F, I and W)"
            raise ScheduleError(
                f"schedule {self.name!r} is not complete: expected {what} of each "
                f"stage and microbatch once, on the stage's rank; found "
                f"{', '.join(list(dict.fromkeys(wrong.values()))[:5])}\n{self.marked(wrong)}"
            )

    def _last_ticks(self, kinds: Sequence[Kind]) -> tuple[int, ...]:
        last = [0] * len(self.stage_to_rank)
        for action, tick in self.ticks.items():
            if action.kind in kinds:
                last[action.stage] = max(last[action.stage], tick)
        return tuple(last)

    def _needs(self, action: Action) -> Iterator[Action]:
        """Yields the actions, of any rank, that must run before `action`."""
        stage, kind, microbatch = action
        # A forward needs the outputs of the stages that feed it. A backward needs its own forward,
        # and the input gradients of the stages that it feeds. W reads only results of I. The state
        # that a stage carries from chunk to chunk goes forward in time, its gradient back.
        if kind == "F" and microbatch % self.chunks:
            yield Action(stage, "F", microbatch - 1)
        if kind in ("B", "I") and (microbatch + 1) % self.chunks:
            yield self._input_gradient(stage, microbatch + 1)
        if kind == "F":
            for source in self._sources[stage]:
                yield Action(source, "F", microbatch)
        if kind == "W":
            yield Action(stage, "I", microbatch)
        if kind in ("B", "I"):
            yield Action(stage, "F", microbatch)
            for consumer in self._consumers[stage]:
                yield self._input_gradient(consumer, microbatch)

    def _input_gradient(self, stage: int, microbatch: int) -> Action:
        # A stage may split the backward of some microbatches only.
        full = Action(stage, "B", microbatch)
        return full if full in self._present else Action(stage, "I", microbatch)

    @cached_property
    def _sources(self) -> tuple[tuple[int, ...], ...]:
        if self.feeds is not None:
            return self.feeds
        return tuple((stage - 1,) if stage else () for stage in range(len(self.stage_to_rank)))

    @cached_property
    def _consumers(self) -> tuple[tuple[int, ...], ...]:
        consumers: list[list[int]] = [[] for _ in self.stage_to_rank]
        for stage, sources in enumerate(self._sources):
            for source in dict.fromkeys(sources):
                consumers[source].append(stage)
        return tuple(map(tuple, consumers))

    @cached_property
    def _present(self) -> frozenset[Action]:
        return frozenset(action for actions in self.actions for action in actions)


def _is_action(cell: object) -> bool:
    if not isinstance(cell, Action):
        return False
    return is_number(cell.stage) and cell.kind in _KINDS and is_number(cell.microbatch)


def is_number(value: object) -> bool:
    """Returns True if a value is a whole number."""
    # Not a bool, because that is a subclass of int, and a stage `True` is a mistake.
    return isinstance(value, int) and not isinstance(value, bool)


def _as_text(
    grid: Sequence[Sequence[Action | None]], marked: frozenset[Action] = frozenset()
) -> str:
    def cell(action: Action | None) -> str:
        if action is None:
            return ""
        return f">{action}<" if action in marked else str(action)

    width = max((len(cell(action)) for cells in grid for action in cells), default=1)
    lines = (
        f"rank {rank}  " + " ".join(cell(action).ljust(width) for action in cells)
        for rank, cells in enumerate(grid)
    )
    return "\n".join(line.rstrip() for line in lines)


class ScheduleGenerator(ABC):
    """Makes schedules: the contract of the entry-point group ``pipegrad.schedules``.

    The options of a schedule are keyword-only arguments of ``__init__``.
    """

    @abstractmethod
    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule of a pipeline.

        The function is pure: every rank makes the same schedule.

        Raises:
            ScheduleError: If the schedule is not defined for these numbers. The message must name
                the numbers for which it is.
        """

    def of_chunks(self, chunks: int) -> ScheduleGenerator:
        """Returns the generator of schedules whose sequences are cut into chunks of time.

        Its schedules have ``num_microbatches * chunks`` microbatches, because each chunk is one.

        Raises:
            ScheduleError: If it makes none.
        """
        if chunks == 1:
            return self
        raise ScheduleError(
            f"{type(self).__name__} makes no schedule of chunks of time: take 'chunked-1f1b' or "
            f"'chunked-zb-h1'"
        )
