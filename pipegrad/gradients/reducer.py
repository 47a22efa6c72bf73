"""The reducer launches complete buckets and waits for them: steps 4 to 7 of the journey."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch.profiler import record_function

from pipegrad.comm import sync_points
from pipegrad.comm.activity import Activity, Tape
from pipegrad.comm.collectives import expect_reduce_chain
from pipegrad.comm.comm_stream import CommStream, Ticket
from pipegrad.comm.failures import FailureNotice, elsewhere, told
from pipegrad.comm.process_groups import Groups
from pipegrad.comm.sync_points import LateWork, Work
from pipegrad.comm.waits import look
from pipegrad.errors import ReduceError, ends_in_words
from pipegrad.gradients.bucket_memory import BucketMemory, FlatBuffer
from pipegrad.gradients.reductions import StepBucket
from pipegrad.gradients.tie_exchange import PairSum, rows_of
from pipegrad.plan.buckets import Bucket
from pipegrad.plan.plan import Launch, Plan, second_communicator
from pipegrad.plugins.handler import GradientHandler, ReductionStep

_POLL_SECONDS = 0.2
_HOST_POLL_SECONDS = 5e-5

INBOX_FREE = sync_points.Wait(
    "reduce.inbox-free", "fresh memory may still be in use on its own stream"
)
COLLECTIVE = sync_points.WaitWork(
    "reduce.collective", "the mean and the next reduction read what it writes"
)


@dataclass
class _Step:
    """The state of one step.

    Attributes:
        queues: For each comm stream, the remaining collectives.
        complete: Buckets that are complete.
        ending: Buckets with a reduction whose wait was put off.
        has_given_up: Whether the step has failed on this rank.
    """

    queues: list[deque[StepBucket]]
    complete: set[int] = field(default_factory=set)
    ending: set[int] = field(default_factory=set)
    has_given_up: bool = False


class Reducer:
    """Launches collectives for complete buckets, in the order of the plan.

    Args:
        plan: This rank's buckets and collectives.
        comm_streams: Number of comm streams.
        groups: The communicators.
        handlers: Handlers by name.
        notice: The board for failures of this rank and of others.
        device: Device of the gradients.

    Attributes:
        memories: The memory of each bucket, by its number.
        notice: The board.
        needs_barrier: Whether a step needs a barrier to find failed ranks, because no wait blocks
            the host.
        comm_streams: They run the collectives.
        tape: Records collectives.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        comm_streams: int,
        groups: Groups,
        handlers: Mapping[str, GradientHandler],
        notice: FailureNotice,
        device: torch.device,
    ) -> None:
        self._handlers = handlers
        self._rank = plan.rank
        self._device = device
        self.memories = {
            b.index: BucketMemory(b, device, rank=plan.rank, mean=self._mean_of(b))
            for b in plan.buckets
        }
        threaded = groups.block_host(device)
        self.comm_streams = [
            CommStream(f"pipegrad comm stream {comm_stream}", device, threaded=threaded)
            for comm_stream in range(comm_streams)
        ]
        self._groups = groups
        self.needs_barrier = groups.host is not None
        self.notice = notice
        self.tape = Tape()
        self._lock = threading.Lock()
        self._flat = list(map(self._step_bucket, plan.launches))
        # Computed once for all steps: the collectives of each comm stream, in order.
        self._queues = [
            [flat for flat in self._flat if flat.launch.comm_stream == stream]
            for stream in range(comm_streams)
        ]
        self._step = _Step([])
        self._is_in_doubt = False  # whether an interrupt may have lost a collective

    @property
    def num_launched(self) -> int:
        """Count of the collectives that were launched in this step."""
        return len(self._flat) - sum(map(len, self._step.queues))

    def begin(self) -> None:
        """Starts a step.

        Raises:
            ReduceError: If a comm stream has failed since the last step. It is posted, too.
        """
        self._step = _Step([*map(deque, self._queues)])
        for comm_stream in self.comm_streams:
            if comm_stream.error is not None:
                raise ReduceError(self.notice.post(str(comm_stream.error))) from comm_stream.error

    @property
    def has_failed(self) -> bool:
        """True if a collective failed on this rank, or was perhaps never launched."""
        with self._lock:  # threads of autograd may be in `leave`
            return self._is_in_doubt or any(
                comm_stream.error is not None for comm_stream in self.comm_streams
            )

    def give_up(self) -> None:
        """Marks the step as failed on this rank; call it before the buckets leave as zeros.

        No rank reads the results. See [Note: failed steps].
        """
        self._step.has_given_up = True

    def run_late(self) -> None:
        """Submits the tasks that were put off."""
        # Other ranks need them in their `finish`, and this rank may never call `finish` for a step
        # that has failed.
        for comm_stream in self.comm_streams:
            comm_stream.submit(comm_stream.run_late, ())

    def expect(self) -> None:
        """Posts the receives of this step's reduce chains and pair exchanges, on gloo.

        Other backends post each receive with its own launch, because NCCL's receive is a kernel
        that runs until the message is there. When a kernel is used for the first time, it is
        loaded, and the host waits for all running kernels: a forward after such a receive would
        wait for a gradient that waits for this forward.
        """
        for flat in self._flat:
            comm_stream = self.comm_streams[flat.launch.comm_stream]
            if flat.inbox is not None and comm_stream.is_threaded:
                comm_stream.submit(partial(self._expect, flat), ())

    def leave(self, bucket: int, fill: Callable[[], None]) -> None:
        """Fills a bucket that is complete, and launches the collectives due now.

        Sync: `fill` runs on the current stream, collectives on the comm streams. May be called from
        autograd's threads.
        """
        # Lock, because threads of autograd may complete two buckets at a time. A later launch could
        # overtake an earlier one, and two ranks would wait for each other in different collectives.
        with self._lock:
            if bucket in self._step.complete:
                return
            self._is_in_doubt = True
            try:
                fill()
                self._step.complete.add(bucket)
                for queue in self._step.queues:
                    # A bucket that is complete before its turn waits here, because all ranks must
                    # launch in the order of the plan. See [Note: order of collectives].
                    while queue and queue[0].index in self._step.complete:
                        flat = queue.popleft()
                        # The comm stream waits for the writes, not the host: backward goes on.
                        after = [] if flat.memory.event is None else [flat.memory.event]
                        comm_stream = self.comm_streams[flat.launch.comm_stream]
                        comm_stream.submit(partial(self._reduce, flat), after)
            except Exception:
                self._is_in_doubt = False
                raise
            # After Ctrl-C the flag stays, because it may have come between `fill` and the launch.
            self._is_in_doubt = False

    def _mean_of(self, bucket: Bucket) -> int:
        """Returns the divisor of gradients before all reductions, for their means."""
        means = (step for step in bucket.route if self._divides_first(bucket, step))
        return math.prod(len(step.ranks) for step in means)

    def _divides_first(self, bucket: Bucket, step: ReductionStep) -> bool:
        """True if gradients are divided for a mean before all reductions, in one pass.

        False if the handler overrides `launch`, because that must get undivided gradients. False
        for a wide sum, because it is divided before it is rounded.
        """
        is_plain = bucket.sum_dtype == bucket.wire_dtype and step.op == "mean"
        launch = getattr(self._handlers[step.handler].launch, "__func__", None)
        return is_plain and launch is GradientHandler.launch

    def _step_bucket(self, launch: Launch) -> StepBucket:
        memory = self.memories[launch.bucket]
        bucket = memory.bucket
        step, region = bucket.route[launch.step], bucket.region(self._rank, launch.step)
        pair_sum = inbox = None
        if step.is_pair:
            back = self._groups.of(step.ranks, second_communicator(launch.comm_stream))
            pair_sum = PairSum(rows_of(memory.part(launch.step), bucket, region), back=back)
        # Make the memory for the next rank's sum now; `expect` posts the receive in each step.
        if step.is_point_to_point and self._rank != step.ranks[-1]:
            inbox = FlatBuffer(torch.empty_like(memory.part(launch.step)))
        is_divided = self._divides_first(bucket, step)
        return StepBucket(memory, launch, pair_sum=pair_sum, is_divided=is_divided, inbox=inbox)

    def _expect(self, flat: StepBucket) -> None:
        """Posts the receive of a partial sum, unless it is posted already. On a comm stream."""
        if flat.inbox is not None and flat.arriving is None:
            step = flat.reduction
            with self.reporting(f"bucket {flat.index}: expecting its {step}", ()):
                # One memory serves all steps. The sum of the last step was read before this task,
                # because a task of this comm stream has added it.
                flat.inbox.acquire(INBOX_FREE)
                group = self._groups.of(step.ranks, flat.launch.comm_stream)
                flat.arriving = expect_reduce_chain(flat.inbox.buffer, group)

    def _reduce(self, flat: StepBucket) -> None:
        """Runs one collective, or puts it off after the one before it. On a comm stream."""
        launch, step = flat.launch, flat.reduction
        comm_stream = self.comm_streams[launch.comm_stream]
        # The reduction before it on the route is not complete. Put this one off, because it would
        # send incomplete sums. Other buckets go on.
        if flat.index in self._step.ending:
            comm_stream.put_off(partial(self._reduce, flat))
            return
        began = self.tape.now()
        with self.reporting(flat.description, step.ranks):
            group = self._groups.of(step.ranks, launch.comm_stream)
            self._expect(flat)
            # Here and not in `fill`, because the comm stream divides while backward goes on.
            if launch.step == 0:
                flat.memory.divide()
            flat.is_mean = flat.is_divided
            with record_function(f"pipegrad {flat.name}"):
                work = self._handlers[step.handler].launch(flat, step, group)
            if not callable(getattr(work, "wait", None)):
                raise TypeError(f"launch() returned {work!r}, expected a Work, with a wait()")
        end = partial(self._end, flat, work, began)
        if isinstance(work, LateWork) and (work.in_threads or not comm_stream.is_threaded):
            self._step.ending.add(flat.index)
            comm_stream.put_off(end)
        else:
            end()

    def _end(self, flat: StepBucket, work: Work, began: object) -> None:
        """Waits for a collective. On a comm stream."""
        step = flat.reduction
        with self.reporting(flat.description, step.ranks):
            self._step.ending.discard(flat.index)
            COLLECTIVE(work)
            flat.arriving = None
            is_mean = flat.is_mean or self._handlers[step.handler].leaves == "mean"
            if step.op == "mean" and not is_mean:
                flat.memory.part(flat.launch.step + 1).div_(len(step.ranks))
        self.tape.note("reduction", (flat.index, flat.launch.step), began)

    @contextmanager
    def reporting(self, description: str, ranks: Sequence[int]) -> Iterator[None]:
        """Posts an error that is raised inside for the other ranks; raises it as a ReduceError."""
        try:
            with Activity(description, ranks):
                yield
        except BaseException as error:
            reason = told(error) if isinstance(error, Exception) else repr(error)
            # Post it before it is raised, because other ranks wait for this one in the same
            # collective, and read the board then: they fail within a second, with this reason, not
            # after a timeout.
            message = self.notice.post(f"{description} failed: {reason}", final=True)
            if not ends_in_words(error):
                raise
            # If another rank failed first, it may have closed the connections to this rank.
            if (cause := self.notice.cause()) is not None:
                raise elsewhere(ReduceError, cause) from error
            raise ReduceError(message) from error

    def wait(self) -> float:
        """Waits for all collectives; returns the seconds for which the host was blocked.

        Sync: afterwards the current stream may read every buffer.

        Raises:
            ReduceError: If a collective failed on this rank, or another rank posted a failure.
        """
        start, began = time.perf_counter(), self.tape.now()
        self._wait_for_comm_streams()
        # Tasks that were put off come last, because they wait for a rank that answers at the end of
        # its own step: see [Note: pair exchange]. No other collective waits after them.
        if any(comm_stream.has_late for comm_stream in self.comm_streams):
            self.run_late()
            self._wait_for_comm_streams()
        self.tape.note("wait for reduction", "", began)
        return time.perf_counter() - start

    def _wait_for_comm_streams(self) -> None:
        # Each wait is short, because this rank reads the failures of others between two waits. In
        # one long wait, only the timeout of the backend would end it.
        with Activity(""):
            for comm_stream in self.comm_streams:
                while not comm_stream.wait(_POLL_SECONDS):
                    self._raise_peer_failure()

    def submit_send_waits(self) -> list[Ticket]:
        """Submits the waits for pair exchanges' sends, which may end after the sum is complete."""
        return [
            self.comm_streams[flat.launch.comm_stream].submit(flat.pair_sum.wait_sent, ())
            for flat in self._flat
            if flat.pair_sum is not None
        ]

    def wait_for(self, ticket: Ticket) -> None:
        """Waits for one submitted task.

        Sync: as `wait`.

        Raises:
            ReduceError: As `wait` does.
        """
        with Activity(""):
            while not ticket.wait(_POLL_SECONDS):
                self._raise_peer_failure()

    def barrier(self) -> Callable[[], None]:
        """Starts a collective of all ranks; ranks that have failed take part, too.

        Returns:
            A function that waits until all ranks have started it. The host waits, not the device.
        """
        what, ranks = "barrier of all ranks", dist.get_process_group_ranks(None)
        host = self._groups.host
        if host is not None:
            # Without a thread, and not on a comm stream, because the device may still run backward,
            # and the host waits only until all ranks have come.
            with self.reporting(what, ranks):
                work = dist.all_reduce(torch.zeros(1), group=host, async_op=True)
            return partial(self._wait_on_host, work, what, ranks)

        def on_comm_stream() -> None:
            assert self._groups.world is not None
            with self.reporting(what, ranks):
                dist.all_reduce(torch.zeros(1, device=self._device), group=self._groups.world)

        return partial(self.wait_for, self.comm_streams[0].submit(on_comm_stream, ()))

    def _wait_on_host(self, work: dist.Work, what: str, ranks: Sequence[int]) -> None:
        began = time.monotonic()
        while not work.is_completed():
            time.sleep(_HOST_POLL_SECONDS)
            if time.monotonic() - began > _POLL_SECONDS:
                self._raise_peer_failure()
                began = time.monotonic()
        with self.reporting(what, ranks):
            work.wait()  # raises its error

    def _raise_peer_failure(self) -> None:
        """Raises an error if another rank has failed."""
        look()
        # After a failure on this rank, only a final failure is a reason to stop waiting: waits end
        # because all ranks launch everything that is left.
        gave_up = self._step.has_given_up
        if (message := self.notice.read_final() if gave_up else self.notice.read()) is not None:
            raise elsewhere(ReduceError, message)
