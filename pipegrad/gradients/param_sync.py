"""Parameter sync: sends updated parameters to all their holders, during the next forward.

Step 9 of the journey of a gradient in docs/internals.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.profiler import record_function

from pipegrad.comm import sync_points
from pipegrad.comm.comm_stream import Ticket, outside_of_graphs
from pipegrad.comm.process_groups import Groups
from pipegrad.errors import StepError
from pipegrad.gradients.parameter import Param, ParameterBuffer
from pipegrad.gradients.reducer import Reducer
from pipegrad.gradients.reductions import sync_parameters
from pipegrad.plan.plan import Plan, Publish

UPDATED = sync_points.Record(
    "parameter-sync.updated", "it moves behind the optimizer's writes and all reads"
)


class ParameterSync:
    """Sends the parameters that this rank has updated, and waits for parameters of other ranks.

    The end of a step makes it due, `publish` sends, and the first use of a stage waits. If no rank
    needs it, all of this does nothing.

    Attributes:
        before_publish: Called before parameters are sent: the step of an outer optimizer.
        coming: Stages whose parameters may still be in flight.
        is_due: Whether there are gradients whose updated parameters were not published.
        is_needed: Whether any rank needs parameter syncs.
        is_taken: Whether an optimizer has got the main parameters.
        blocked_seconds: Time that this rank has waited for parameters since the last step.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, Param],
        *,
        buffers: Mapping[int, ParameterBuffer],
        reducer: Reducer,
        groups: Groups,
        is_needed: bool,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._buffers = buffers
        self._reducer = reducer
        self._groups = groups
        self._parameters = parameters.values()
        self._device = device
        self.is_needed = is_needed
        self.before_publish: Callable[[], None] | None = None
        self.coming: dict[int, list[Ticket]] = {}
        self.is_due = self.is_taken = False
        self.blocked_seconds = 0.0
        # Versions show that a parameter was changed after it was published, because a version
        # counter changes with each write in place.
        self._versions: list[tuple[str, torch.Tensor, int]] = []

    @outside_of_graphs
    def publish(self) -> None:
        """Sends the parameters that this rank has updated; returns at once.

        Do not change them until the gradients of the next step are there. A second call after the
        same step does nothing, because other ranks count these messages.

        Sync: on the comm streams, after everything on the current stream. An outer optimizer steps
        before, on the current stream.

        Raises:
            StepError: If no optimizer has got the main parameters.
        """
        if not self.is_due:
            return
        self.refuse_untaken()
        if self.before_publish is not None:
            start = time.perf_counter()
            self.before_publish()
            self.blocked_seconds += time.perf_counter() - start
        self.send_copied()

    def send_copied(self) -> None:
        """Copies master copies into the parameters, and sends them.

        Sync: as `publish`.
        """
        for parameter in self._parameters:
            if parameter.main is not None:
                parameter.main.copy_back()
        # After the copies, because `check_published` must see only later writes.
        mains = [(p.record.key, p.main) for p in self._parameters if p.is_written_by_sync]
        self._versions = [(k, m.tensor, m.tensor._version) for k, m in mains if m is not None]
        self.send()

    def refuse_untaken(self) -> None:
        """Refuses to go on if no optimizer has got the main parameters, and one is needed.

        Raises:
            StepError: Names the parameters to give to the optimizer.
        """
        if self.is_needed and not self.is_taken:
            raise StepError(
                "some gradients live on other ranks, in shards or in another dtype, or replicas "
                "train alone, and nobody has asked for what this rank steps: give the optimizer "
                "sync.optimizer_parameters(), or make it by sync.optimizer(), not of "
                "module.parameters()"
            )

    def send(self) -> None:
        """Sends this rank's parameters as they are; returns at once.

        Sync: as `publish`.
        """
        # All ranks submit their part of one list, in the same order: see
        # [Note: order of publishes] in plan/plan.py. The comm streams wait for this event, because
        # the optimizer may still write on the current stream.
        self.is_due = False
        if not self._plan.publishes:
            return
        event = UPDATED(self._device)
        after = [] if event is None else [event]
        for publish in self._plan.publishes:
            buffer = self._buffers[publish.bucket]
            comm_stream = self._reducer.comm_streams[publish.comm_stream]
            ticket = comm_stream.submit(partial(self._sync, buffer, publish), after)
            for stage in publish.readers:
                self.coming.setdefault(stage, []).append(ticket)

    def expect(self) -> None:
        """Called when new gradients are there: the optimizer comes next."""
        self.is_due, self.blocked_seconds = True, 0.0
        self._versions.clear()

    def check_published(self) -> None:
        """Refuses parameters that were changed after `publish`, which other ranks do not have.

        Raises:
            StepError: If there are such parameters. It names one.
        """
        for key, tensor, version in self._versions:
            if tensor._version != version:
                raise StepError(
                    f"{key!r} was changed after publish(), so other ranks do not have it. If you "
                    f"copied values in, such as averaged weights: call synchronize_parameters() "
                    f"after each copy, on all ranks. If an optimizer wrote it: call publish() "
                    f"after optimizer.step(), once after each finish(). One of sync.optimizer() "
                    f"publishes by itself: change parameters before, in a hook of its "
                    f"register_step_post_hook()"
                )

    def first_use(self, stage: int) -> None:
        """Waits for the parameters of a stage that are `coming`.

        Sync: afterwards the current stream may read them. Blocks the host if collectives do.
        """
        start = time.perf_counter()
        for ticket in self.coming[stage]:
            self._reducer.wait_for(ticket)
        # Drop the tickets only after all waits, because a second call after a failed wait must wait
        # again, and not read old parameters.
        del self.coming[stage]
        self.blocked_seconds += time.perf_counter() - start

    def wait(self) -> None:
        """Waits for all parameter syncs, to this rank and from it.

        Sync: as `first_use`.
        """
        # On all comm streams, because this rank's sends must have ended too, before the caller
        # writes into the parameters.
        self._reducer.wait()
        self.coming.clear()

    def forget(self) -> None:
        """Clears the versions, because all ranks have the same parameters now."""
        self._versions.clear()

    def _sync(self, buffer: ParameterBuffer, publish: Publish) -> None:
        """Sends or receives one bucket, backwards along one reduction. On a comm stream."""
        rank, step = self._plan.rank, buffer.bucket.route[publish.step]
        description = (
            f"parameters of bucket {buffer.bucket.index} ({buffer.bucket.names}) back along {step} "
            f"over ranks {list(step.ranks)}"
        )
        tape = self._reducer.tape
        began = tape.now()
        with self._reducer.reporting(description, step.ranks):
            region = buffer.bucket.region(rank, publish.step)
            group = self._groups.of(step.ranks, publish.comm_stream)
            with record_function(f"pipegrad bucket {buffer.bucket.index} back along {step}"):
                sync_parameters(
                    buffer.flat[region.start : region.stop],
                    step.placement,
                    group,
                    scattered=buffer.bucket.scattered(publish.step, rank),
                )
        tape.note("parameter sync", (publish.bucket, publish.step), began)
