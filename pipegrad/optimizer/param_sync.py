"""Parameter sync: updated parameters go to all ranks that hold them, under the next forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.profiler import record_function

from pipegrad.comm import sync_points
from pipegrad.comm.comm_stream import Ticket
from pipegrad.comm.process_groups import Groups
from pipegrad.errors import StepError
from pipegrad.optimizer.main_params import MainShard
from pipegrad.plan.buckets import Bucket
from pipegrad.plan.plan import Plan, Publish
from pipegrad.reduce.reducer import Reducer
from pipegrad.reduce.reductions import sync_parameters

UPDATED = sync_points.Record(
    "parameter-sync.updated", "it moves behind the optimizer's writes and all reads"
)


class ParameterBuffer:
    """The parameters of a bucket side by side, in the bucket's layout: what moves back.

    Args:
        bucket: Whose.
        device: Where.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        # Between the parameters nobody looks; a CPU gives memory as theirs comes, and goes.
        self.flat = torch.empty(bucket.payload_numel, dtype=bucket.parameter_dtype, device=device)
        self.views = {
            slot.key: self.flat.as_strided(slot.shape, slot.stride, slot.offset)
            for slot in bucket.slots
        }

    def adopt(self, key: str, parameter: nn.Parameter) -> None:
        """Makes a parameter a view of the buffer; its own memory is free then."""
        view = self.views[key]
        if parameter.data_ptr() != view.data_ptr():
            with torch.no_grad():
                view.copy_(parameter)
            parameter.data = view

    def shard(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Returns elements of a parameter, flat, as they lie in memory."""
        offset = self.views[key].storage_offset()
        return self.flat[offset + begin : offset + end]


def parameter_buffers(plan: Plan, device: torch.device) -> dict[int, ParameterBuffer]:
    """Returns memory for the parameters that may come from other ranks, by bucket."""
    return {b.index: ParameterBuffer(b, device) for b in plan.buckets if b.syncs_parameters}


class ParameterSync:
    """Sends what this rank's optimizer has stepped, and waits for what others have.

    A step makes it due, `publish` sends, and the first use of a stage waits. Where no parameter
    moves, on any rank, all of it does nothing.

    Args:
        plan: This rank's.
        buffers: Of `parameter_buffers`.
        reducer: Whose comm streams it uses.
        groups: The communicators.
        main_shards: Those of this rank.
        main_parameters: Returns what the optimizer steps of the parameters that move, by key.
        moves: Whether anything moves on any rank, or is copied from another dtype.
        device: Where the parameters live.

    Attributes:
        coming: Stages whose parameters may be on their way.
        is_due: Whether there are gradients that have not been published the update of.
        is_moving: Whether any rank has published what not all have waited for; alike on all.
        moves: As given.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        buffers: Mapping[int, ParameterBuffer],
        reducer: Reducer,
        groups: Groups,
        main_shards: Sequence[MainShard],
        main_parameters: Callable[[], Mapping[str, nn.Parameter]],
        moves: bool,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._buffers = buffers
        self._reducer = reducer
        self._groups = groups
        self._main_shards = main_shards
        self._main_parameters = main_parameters
        self._device = device
        self.moves = moves
        self.coming: dict[int, list[Ticket]] = {}
        self.is_due = False
        self.is_moving = False
        self._is_idle = False  # due, but no rank had stepped anything when all were asked
        self._is_taken = False  # whether somebody has asked for what the optimizer is to step
        self._blocked_seconds = 0.0
        self._versions: list[tuple[str, nn.Parameter, int]] = []

    @property
    def is_taken(self) -> bool:
        """Whether `take` was called."""
        return self._is_taken

    def take(self) -> None:
        """Notes that somebody has asked for what the optimizer of this rank is to step."""
        self._is_taken = True

    def publish(self) -> None:
        """Sends what was stepped on its way; returns at once.

        Nothing may change it until the next step's gradients are there.

        Sync: behind all that the current stream has done; on the comm streams.

        Raises:
            StepError: If something moves, and nobody has asked for what to step.
        """
        if self.moves and not self._is_taken:
            raise StepError(
                "some gradients live on other ranks, in shards or in another dtype, and nobody has "
                "asked for what this rank steps: give the optimizer sync.optimizer_parameters(), "
                "not module.parameters()"
            )
        for main_shard in self._main_shards:
            main_shard.give_back()
        self._note_versions()
        self.send()

    def publish_if_due(self) -> None:
        """Sends what was stepped and not sent yet.

        Sync: as `publish`.
        """
        if self.is_due:
            self.publish()

    def publish_if_stepped(self) -> None:
        """Sends what was stepped, if any rank has stepped anything as far as is known."""
        if self.is_due and not self._is_idle:
            self.publish()

    def ask(self) -> None:
        """Finds out whether any rank has stepped anything since there are gradients.

        Sync: on the current stream; one flag for all ranks, which must all call it.
        """
        main_parameters = self.is_due and any(
            t._version != version for _, t, version in self._versions
        )
        self._is_idle = not self._groups.is_anywhere(main_parameters)

    def send(self) -> None:
        """Sends this rank's part on its way, as it is; returns at once.

        Sync: as `publish`.
        """
        self.is_due = self._is_idle = False
        self.is_moving = self._plan.syncs_parameters
        if not self._plan.publishes:
            return
        event = UPDATED(self._device)
        after = [] if event is None else [event]
        for publish in self._plan.publishes:
            buffer = self._buffers[publish.bucket]
            ticket = self._reducer.submit(
                publish.comm_stream, partial(self._move, buffer, publish), after
            )
            for stage in publish.readers:
                self.coming.setdefault(stage, []).append(ticket)

    def expect(self) -> None:
        """Notes that gradients are there, with which the optimizer is going to step."""
        if self.moves:
            self.is_due, self._is_idle, self.is_moving = True, False, False
            self._note_versions()

    def check_published(self) -> None:
        """Refuses what was changed after it was published: others would not have it.

        Raises:
            StepError: Names it.
        """
        for key, tensor, version in self._versions:
            if tensor._version != version:
                raise StepError(
                    f"{key!r} was changed after publish(), so other ranks do not have it: call "
                    f"publish() after optimizer.step(), and step once behind finish()"
                )

    def first_use(self, stage: int) -> None:
        """Waits for the parameters of a stage.

        Sync: afterwards the current stream may read them; where collectives block the host, so
        does this.
        """
        if stage not in self.coming:
            return
        start = time.perf_counter()
        for ticket in self.coming[stage]:
            self._reducer.wait_for(ticket)
        del self.coming[stage]
        self._blocked_seconds += time.perf_counter() - start

    def wait(self) -> None:
        """Waits for all that is on its way, to this rank or from it.

        Sync: as `first_use`.
        """
        self._reducer.wait()
        self.coming.clear()
        self.is_moving = False

    def forget(self) -> None:
        """Notes that all ranks have the same parameters by now, whatever was stepped before."""
        self.is_due = False
        self._versions.clear()

    def take_blocked_seconds(self) -> float:
        """Returns how long first uses have blocked the host since the last call."""
        seconds, self._blocked_seconds = self._blocked_seconds, 0.0
        return seconds

    def _note_versions(self) -> None:
        self._versions = [
            (key, tensor, tensor._version) for key, tensor in self._main_parameters().items()
        ]

    def _move(self, buffer: ParameterBuffer, publish: Publish) -> None:
        """Moves one bucket back along one reduction. On a comm stream."""
        rank, step = self._plan.rank, buffer.bucket.route[publish.step]
        what = (
            f"parameters of bucket {buffer.bucket.index} ({buffer.bucket.names}) back along {step} "
            f"over ranks {list(step.ranks)}"
        )
        with self._reducer.reporting(what):
            region = buffer.bucket.region(rank, publish.step)
            group = self._groups.of(step.ranks, publish.comm_stream)
            with record_function(f"pipegrad bucket {buffer.bucket.index} back along {step}"):
                sync_parameters(buffer.flat[region.start : region.stop], step.placement, group)
