"""The mirror movement: updated parameters go back to those who hold them, under the next step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import nn
from torch.profiler import record_function

from pipegrad.comm import sync_points
from pipegrad.comm.comm_stream import Ticket
from pipegrad.comm.process_groups import Groups
from pipegrad.errors import StepError
from pipegrad.optimizer.main_params import StandIn
from pipegrad.plan.buckets import Bucket
from pipegrad.plan.plan import Plan, Publish
from pipegrad.reduce.reducer import Reducer
from pipegrad.reduce.reductions import bring_back

STEPPED = sync_points.Record(
    "mirror.stepped", "it moves behind the optimizer's writes and all reads"
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

    def row(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Returns elements of a parameter, flat, as they lie in memory."""
        offset = self.views[key].storage_offset()
        return self.flat[offset + begin : offset + end]


class Mirror:
    """Publishes what this rank's optimizer has stepped, and waits for what others have.

    Args:
        plan: This rank's.
        reducer: Whose comm streams it uses.
        groups: The communicators.
        device: Where the parameters live.

    Attributes:
        buffers: By bucket.
        coming: Stages whose parameters may be on their way.
        is_due: Whether there are gradients that have not been published the update of.
        can_wait: Whether it is due, but no rank had stepped anything when all were asked.
        is_moving: Whether any rank has published what not all have waited for; alike on all.
        blocked_seconds: How long first uses have blocked the host since somebody set it to 0.
    """

    def __init__(
        self, plan: Plan, *, reducer: Reducer, groups: Groups, device: torch.device
    ) -> None:
        self._plan = plan
        self._reducer = reducer
        self._groups = groups
        self._device = device
        self.buffers = {b.index: ParameterBuffer(b, device) for b in plan.buckets if b.mirrored}
        self.buffer_of = {key: b for b in self.buffers.values() for key in b.views}
        self.coming: dict[int, list[Ticket]] = {}
        self.is_due = False
        self.can_wait = False
        self.is_moving = False
        self.blocked_seconds = 0.0
        self._versions: list[tuple[str, nn.Parameter, int]] = []

    def publish(self, stand_ins: Iterable[StandIn], stepped: Mapping[str, nn.Parameter]) -> None:
        """Sends what was stepped on its way; returns at once.

        Args:
            stand_ins: Those of this rank, which first give back what they have.
            stepped: What the optimizer has stepped, by key: nothing may change it any more.

        Sync: behind all that the current stream has done; on the comm streams.
        """
        for stand_in in stand_ins:
            stand_in.give_back()
        self._versions = [(key, tensor, tensor._version) for key, tensor in stepped.items()]
        self.send()

    def send(self) -> None:
        """Sends this rank's part on its way, as it is; returns at once.

        Sync: as `publish`.
        """
        self.is_due = self.can_wait = False
        self.is_moving = self._plan.moves
        if not self._plan.publishes:
            return
        event = STEPPED(self._device)
        after = [] if event is None else [event]
        for publish in self._plan.publishes:
            buffer = self.buffers[publish.bucket]
            ticket = self._reducer.submit(
                publish.comm_stream, partial(self._move, buffer, publish), after
            )
            for stage in publish.readers:
                self.coming.setdefault(stage, []).append(ticket)

    def expect(self, stepped: Mapping[str, nn.Parameter]) -> None:
        """Says that there are gradients, with which the optimizer is going to step `stepped`."""
        self.is_due, self.can_wait, self.is_moving = True, False, False
        self._versions = [(key, tensor, tensor._version) for key, tensor in stepped.items()]

    def ask(self) -> None:
        """Finds out whether any rank has stepped anything since there are gradients.

        Sync: on the current stream; one flag for all ranks, which must all call it.
        """
        stepped = self.is_due and any(t._version != version for _, t, version in self._versions)
        self.can_wait = not self._groups.is_anywhere(stepped)

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
        self.blocked_seconds += time.perf_counter() - start

    def wait(self) -> None:
        """Waits for all that is on its way, to this rank or from it.

        Sync: as `first_use`.
        """
        self._reducer.wait()
        self.coming.clear()
        self.is_moving = False

    def forget(self) -> None:
        """Says that all ranks have the same parameters by now, whatever was stepped before."""
        self.is_due = False
        self._versions.clear()

    def _move(self, buffer: ParameterBuffer, publish: Publish) -> None:
        """Moves one bucket back along one hop. On a comm stream."""
        rank, hop = self._plan.rank, buffer.bucket.route[publish.hop]
        what = (
            f"parameters of bucket {buffer.bucket.index} ({buffer.bucket.names}) back along {hop} "
            f"over ranks {list(hop.ranks)}"
        )
        with self._reducer.telling(what):
            region = buffer.bucket.region(rank, publish.hop)
            group = self._groups.of(hop.ranks, publish.comm_stream)
            with record_function(f"pipegrad bucket {buffer.bucket.index} back along {hop}"):
                bring_back(buffer.flat[region.start : region.stop], hop.placement, group)
