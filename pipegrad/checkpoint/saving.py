"""Saving: all ranks write a checkpoint together, and the training goes on meanwhile.

[Note: a save beside the steps] All ranks call `Saver.save` after the same step. Each copies its
values to CPU memory, and a thread writes the copies while the training goes on. The threads
coordinate over a separate group, because their messages must not meet the collectives of the
training. A rank that cannot even collect its state brings the error into the save, because ranks
must not wait for each other outside of the save.

[Note: how long a save may take] As long as it writes. A slow disk ends no run. But where the
training waits for a save, and the thread of this rank has written nothing for the timeout of a
step, the watch ends the job and names this rank. The time in which a thread waits for other ranks
does not count: their own watches look at them.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from pipegrad import run_files
from pipegrad.checkpoint.files import Index, Part, write
from pipegrad.checkpoint.folders import INDEX, prune, publish, unfinished
from pipegrad.checkpoint.state import State
from pipegrad.comm import plain, sync_points
from pipegrad.comm.activity import Activity
from pipegrad.comm.comm_stream import CommStream, Ticket
from pipegrad.comm.ending import Ending
from pipegrad.comm.waits import look
from pipegrad.errors import CheckpointError, PipegradError

_LOOK_SECONDS = 0.25
_NO_LIMIT = timedelta(days=7)  # of gloo, which needs one
T = TypeVar("T")
Moves = Callable[[float], object]


class Saver:
    """Writes checkpoints, one at a time. All ranks make it, and call it, together.

    For example, ``Saver(state, "runs/first", keep_last=2).save(step)`` after every 100th step.

    Args:
        state: The state of this rank.
        folder: The run's folder, made if it is not there: `save` writes ``checkpoint-N`` into it.
        keep_last: Number of the newest checkpoints that are kept; all by default.
        keep_every: Steps between older checkpoints that are kept, too; else none.
        run: Values that describe the run, by name, as text. `resume` returns them.
        note: Called on rank 0 with a line of text, if the training waits for a save, or goes on
            without a checkpoint that failed; a warning by default.
    """

    def __init__(
        self,
        state: State,
        folder: str | Path | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        run: Mapping[str, str] | None = None,
        note: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.state, self.folder, self.note = state, folder, note
        self._keep_last, self._keep_every, self._run = keep_last, keep_every, dict(run or {})
        if folder is not None:
            run_files.make_folder(Path(folder))
        self._pending: tuple[Path, Ticket] | None = None
        self._failure: BaseException | None = None
        self._moved = 0.0  # when the thread has last gone on; infinite while it waits for ranks

    def save(self, step: int, *, wait: bool = False) -> Path:
        """Saves the state after a number of steps; returns the folder of the checkpoint.

        It returns when the values are copied, and a thread writes them. With `wait` nothing is
        copied, and the checkpoint is whole when it returns. It waits for the save before it.

        Sync: blocks the host until values are copied. Every rank must call it, between two steps.

        Raises:
            CheckpointError: If `step` is no number of steps. With `wait`, if a rank cannot write
                it; on all ranks.
        """
        folder = Path(self.folder or ".") / f"checkpoint-{step}"
        if self.is_writing and not wait:
            self._say(
                f"step {step}: the checkpoint before this one is still being written, and the "
                f"training waits for it: save less often"
            )
        self._begin(folder, step, is_copied=not wait)
        if wait:
            self._finish()
        return folder

    def write(self, folder: str | Path, step: int) -> None:
        """Writes a checkpoint into a folder of any name, and returns when it is whole.

        Raises:
            CheckpointError: If a rank cannot write it; on all ranks.
        """
        self._begin(Path(folder), step, is_copied=False)
        self._finish()

    @property
    def is_writing(self) -> bool:
        """True if a save that was begun has not ended."""
        return self._pending is not None and not self._pending[1].done.done()

    def wait(self) -> None:
        """Waits for a save that was begun. If it failed, `note` gets the reason."""
        try:
            self._finish()
        except CheckpointError as error:
            self._say(f"{error}: the run goes on without this checkpoint")

    def close(self) -> None:
        """Waits for a save, and ends its thread and process group; every rank must call it."""
        self.wait()
        if "_background" in self.__dict__:
            self._background[2].end()

    @cached_property
    def _background(self) -> tuple[CommStream, dist.ProcessGroup, Ending]:
        """A thread, the group of the ranks' threads, and their end. The first save makes them."""
        made = dist.new_group(timeout=_NO_LIMIT, backend="gloo", group_desc="pipegrad checkpoint")
        group = cast("dist.ProcessGroup", made)
        thread = CommStream("pipegrad checkpoint", torch.device("cpu"), threaded=True)
        # A thread that waits for a rank that is gone ends with the process; see
        # [Note: how threads end].
        return thread, group, Ending(self, threads=[thread], groups=[group])

    def _begin(self, folder: Path, step: int, *, is_copied: bool) -> None:
        """Lets the thread write the present state of this rank."""
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step is {step!r}, expected a whole number, 0 or more")
        self.wait()
        error: Exception | None = None
        parts: dict[str, Part] = {}
        try:
            if self._is_of_run(folder) and not folder.parent.is_dir():
                raise CheckpointError("the run's folder was removed or renamed while it ran")
            parts = self.state.parts()
            for key, part in parts.items() if is_copied else ():
                values = part.values.to("cpu", non_blocking=True, copy=True)
                parts[key] = part._replace(values=values)
        except Exception as caught:  # noqa: BLE001 - all ranks get it in the save
            error = caught
        sync_points.finish_device(self.state.sync.device)

        def collected() -> Mapping[str, Part]:
            if error is not None:
                raise error
            return parts

        def run() -> None:
            try:
                self._write(folder, step, collected)
            except BaseException as failure:  # noqa: BLE001 - `_finish` raises it
                self._failure = failure

        self._moved = time.monotonic()
        self._pending = folder, self._background[0].submit(run, [])

    def _write(self, folder: Path, step: int, collect: Callable[[], Mapping[str, Part]]) -> None:
        head = {"step": step, "layout": self.state.layout, "tied": self.state.tied}
        moves = partial(setattr, self, "_moved")
        try:
            group = self._background[1]
            write_checkpoint(folder, collect, {**head, "run": self._run}, group, moves)
        except CheckpointError as error:
            complaint = f"the checkpoint of step {step} cannot be written into {folder}: {error}"
            raise CheckpointError(complaint) from error
        if dist.get_rank() == 0 and self._is_of_run(folder):
            prune(folder.parent, keep_last=self._keep_last, keep_every=self._keep_every)

    def _finish(self) -> None:
        """Waits for a save that was begun, and raises its error; see the note above."""
        if self._pending is None:
            return
        (folder, ticket), self._pending = self._pending, None
        with self.state.sync.bounded(f"the checkpoint {folder}") as activity:
            while not ticket.wait(_LOOK_SECONDS):
                look()
                activity.since = max(activity.since, min(self._moved, time.monotonic()))
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _is_of_run(self, folder: Path) -> bool:
        return self.folder is not None and folder.parent == Path(self.folder)

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            self.note(text)


# All ranks write one checkpoint together, each slice once. They exchange plain data three times:
# the slices of each rank, the file of each rank, and that the index is there. If one of them fails,
# all get the error in the next exchange, and nothing stays.


def write_checkpoint(
    folder: Path,
    collect: Callable[[], Mapping[str, Part]],
    head: Mapping[str, Any],
    group: dist.ProcessGroup,
    moves: Moves,
) -> None:
    """Writes a checkpoint into a folder, which appears when it is whole. All ranks call it.

    Raises:
        CheckpointError: If a rank fails; on all ranks. Nothing of the checkpoint stays.
    """
    begun, is_first = unfinished(folder), group.rank() == 0
    together = partial(_together, group, moves)

    def prepare() -> tuple[Mapping[str, Part], dict[str, Any]]:
        parts = collect()
        if is_first:  # no rank writes before all have come here
            run_files.remove(begun)
            begun.mkdir(parents=True)
        described = {
            key: (part.values.dtype, part.shape, tuple(part.range)) for key, part in parts.items()
        }
        return parts, described

    def finish() -> tuple[None, None]:
        if is_first:
            run_files.replace(begun / INDEX, _index(tables, written, head).sealed())
            publish(folder)
        return None, None

    try:
        parts, tables = together(prepare)
        mine = _shared_out(tables)[group.rank()]
        path = begun / f"rank-{group.rank()}.safetensors"
        _, written = together(lambda: (None, _write_slices(path, parts, mine, moves)))
        together(finish)
    except BaseException:
        # Remove the files, because the disk may be full. No rank writes any more, because an error
        # is raised after all ranks have replied.
        if is_first:
            run_files.remove(begun)
        raise


def _shared_out(tables: Sequence[Mapping[str, Any]]) -> list[set[tuple[str, Any]]]:
    """Returns the slices that each rank writes: each slice once, by a rank that has it.

    Raises:
        CheckpointError: If ranks disagree on a tensor.
    """
    holders: dict[tuple[str, Any], list[int]] = {}
    kinds: dict[str, Any] = {}
    for rank, table in enumerate(tables):
        for key, (*kind, each) in table.items():
            if kinds.setdefault(key, kind) != kind:
                raise CheckpointError(f"ranks have {key!r} as {kinds[key]} and {kind}")
            holders.setdefault((key, each), []).append(rank)
    num_bytes, mine = [0] * len(tables), [set[tuple[str, Any]]() for _ in tables]
    for (key, each), ranks in holders.items():
        rank = min(ranks, key=num_bytes.__getitem__)
        num_bytes[rank] += (each[3] - each[2]) * kinds[key][0].itemsize
        mine[rank].add((key, each))
    return mine


def _write_slices(
    path: Path, parts: Mapping[str, Part], mine: set[tuple[str, Any]], moves: Moves
) -> tuple[Any, ...]:
    """Writes slices of this rank; returns file, size and checksum, and each slice's position."""
    if not path.parent.is_dir():
        raise CheckpointError(
            f"{path.parent} is not there, although the first rank has made its folder: save the "
            f"same step on all ranks, into one folder that all of them see"
        )
    slices, values = {}, {}
    for key, part in parts.items():
        if (key, part.range) in mine:
            is_whole = part.values.numel() == math.prod(part.shape)
            name = key if is_whole else f"{key} {[*part.range]}"
            values[name] = part.values.view(part.shape) if is_whole else part.values
            slices[name] = key, part.range
    file, begins = write(path, values, None, lambda: moves(time.monotonic()))
    return (
        path.name,
        file,
        [(key, tuple(each), begins[name]) for name, (key, each) in slices.items()],
    )


def _index(
    tables: Sequence[Mapping[str, Any]], written: Sequence[Any], head: Mapping[str, Any]
) -> Index:
    tensors: dict[str, Any] = {}
    for table in tables:
        for key, (dtype, shape, _) in table.items():
            tensors[key] = {
                "dtype": str(dtype).removeprefix("torch."),
                "shape": shape,
                "slices": [],
            }
    for name, _, slices in written:
        for key, each, begin in slices:
            tensors[key]["slices"].append((each, name, begin))
    index = Index(**head, files={name: file for name, file, _ in written}, tensors=tensors)
    try:
        index.check()
    except ValueError as error:
        raise CheckpointError(
            f"{error}: a rank has no state of its piece: give an expert without a token a gradient "
            f"of zeros"
        ) from error
    return index


def _together(
    group: dist.ProcessGroup, moves: Moves, function: Callable[[], tuple[T, Any]]
) -> tuple[T, list[Any]]:
    """Calls a function on all ranks; returns this rank's result, and the replies of all.

    Raises:
        CheckpointError: If a rank failed; on all ranks. It names the first one.
    """
    kept, words, cause = None, "", None
    try:
        kept, reply = function()
    except BaseException as error:  # noqa: BLE001 - all ranks learn it first
        cause, reply = error, None
        is_ours = isinstance(error, PipegradError)
        words = str(error) if is_ours else run_files.why_not_written(error)
    moves(math.inf)
    with Activity("the checkpoint", range(group.size())):
        replies = _gathered((words, reply), group)
    moves(time.monotonic())
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    for rank, (complaint, _) in enumerate(replies):
        if complaint:
            raise CheckpointError(f"rank {rank}: {complaint}") from cause
    return kept, [reply for _, reply in replies]  # type: ignore[return-value]  # none without it


def _gathered(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Returns the plain data of all ranks of a gloo group, by rank."""
    content = torch.frombuffer(bytearray(plain.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([content.numel()])]).wait()
    rows = [torch.empty(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    padded = rows[0].new_zeros(rows[0].shape)
    padded[: content.numel()] = content
    group.allgather([rows], [padded]).wait()
    both = zip(rows, sizes, strict=True)
    return [plain.loads(row[: int(size)].numpy().tobytes()) for row, size in both]
