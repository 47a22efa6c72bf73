"""Launch and finish: one way for each bucket onto its comm stream, and one wait for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.profiler import record_function

from pipegrad.comm import collectives, sync_points
from pipegrad.comm.comm_stream import CommStream, Task, Ticket
from pipegrad.comm.failures import FAILED_ELSEWHERE, FailureNotice
from pipegrad.comm.process_groups import Groups
from pipegrad.comm.work import LateWork, Work
from pipegrad.errors import ReduceError, ends_in_words
from pipegrad.plan.plan import Launch, Plan, second_communicator
from pipegrad.plugins.handler import GradientHandler
from pipegrad.reduce.bucket_buffer import BucketBuffer, FlatBuffer
from pipegrad.reduce.pair_exchange import PairSum, rows_of
from pipegrad.reduce.reductions import StepBucket

_POLL_SECONDS = 0.2
_REFUSED_SECONDS = 5.0  # for a rank that was refused a verb to try it again

INBOX_FREE = sync_points.Wait(
    "reduce.inbox-free", "fresh memory may still be in use on its own stream"
)
COLLECTIVE = sync_points.WaitWork(
    "reduce.collective", "the mean and the next reduction read what it writes"
)


class Reducer:
    """Takes gradients as they become final and launches collectives in the planned order.

    Args:
        plan: This rank's buckets and collectives.
        comm_streams: How many comm streams.
        groups: The communicators.
        handlers: Handler by name.
        notice: Where a failure is told to the other ranks, and theirs are read.
        device: Where gradients live.

    Attributes:
        comm_streams: Where collectives run.
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
        self.buffers = {bucket.index: BucketBuffer(bucket, device) for bucket in plan.buckets}
        self.buffer_of = {s.key: self.buffers[b.index] for b in plan.buckets for s in b.slots}
        self._queues = [
            [x for x in plan.launches if x.comm_stream == comm_stream]
            for comm_stream in range(comm_streams)
        ]
        threaded = groups.block_host(device)
        self.comm_streams = [
            CommStream(f"pipegrad comm stream {comm_stream}", device, threaded=threaded)
            for comm_stream in range(comm_streams)
        ]
        self._groups = groups
        self._handlers = handlers
        self._rank = plan.rank
        self._device = device
        self.notice = notice
        self._lock = threading.Lock()
        self._flat = {launch: self._step_bucket(launch) for launch in plan.launches}
        # Owners have memory for what comes from behind, and post its receive before it is needed.
        self._expecting = [x for x in plan.launches if self._is_behind(x)]
        self._inboxes = {
            launch: FlatBuffer(torch.empty_like(self._flat[launch].buffer))
            for launch in self._expecting
        }
        self._complete: set[int] = set()
        self._ending: set[int] = set()  # buckets of which a reduction was put off
        self._next = [0] * comm_streams
        self.num_launched = 0
        self._is_in_doubt = False  # whether an interrupt may have lost a collective
        self._given_up = False  # whether the step has failed, and this rank knows
        self._refusal: str | None = None  # what another rank said
        self._refused_since = 0.0

    def begin(self) -> None:
        """Starts a step.

        Raises:
            ReduceError: If a comm stream has failed since the last one; other ranks are told.
        """
        self.reset()
        for comm_stream in self.comm_streams:
            if comm_stream.error is not None:
                raise ReduceError(self.notice.post(str(comm_stream.error))) from comm_stream.error

    def reset(self) -> None:
        """Says that nothing is complete, nothing launched."""
        self._ending.clear()
        self._complete.clear()
        self._next = [0] * len(self.comm_streams)
        self.num_launched = 0
        self._given_up = False
        self._refusal = None

    @property
    def has_failed(self) -> bool:
        """Whether a collective failed here, or was never launched: others may wait for it."""
        with self._lock:  # autograd's threads may be announcing
            return self._is_in_doubt or any(
                comm_stream.error is not None for comm_stream in self.comm_streams
            )

    def give_up(self) -> None:
        """Launches what is left of a step that failed, so that it ends on all ranks.

        Slots that this rank had nothing for are zero. Nobody reads what comes of it.
        """
        self._given_up = True
        for buffer in self.buffers.values():
            for key in buffer.missing:
                self.announce(key, None, contributed=False)
        # Other ranks wait for it in their `finish`, while this one may never wait again.
        for comm_stream in self.comm_streams:
            comm_stream.submit(comm_stream.run_late, ())

    def expect(self) -> None:
        """Posts the receives of what comes from behind in this step."""
        for launch in self._expecting:
            self.comm_streams[launch.comm_stream].submit(partial(self._expect, launch), ())

    def announce(self, key: str, gradient: torch.Tensor | None, *, contributed: bool) -> None:
        """Takes a final gradient, and launches whatever is due because of it.

        Sync: the slot is written and its event recorded on the current stream; collectives run on
        the comm streams. May be called from autograd's threads.
        """
        with self._lock:
            buffer = self.buffer_of[key]
            self._is_in_doubt = True
            try:
                if buffer.fill(key, gradient, contributed=contributed):
                    self._complete.add(buffer.bucket.index)
                    for comm_stream in range(len(self.comm_streams)):
                        self._launch_due(comm_stream)
            except Exception:
                self._is_in_doubt = False
                raise
            # Not behind Ctrl-C: it may have come between two lines that belong together.
            self._is_in_doubt = False

    def _launch_due(self, comm_stream: int) -> None:
        """Submits the next collectives of a comm stream, in order, while buckets are complete."""
        queue = self._queues[comm_stream]
        while (
            self._next[comm_stream] < len(queue)
            and queue[self._next[comm_stream]].bucket in self._complete
        ):
            launch = queue[self._next[comm_stream]]
            buffer = self.buffers[launch.bucket]
            self._next[comm_stream] += 1
            self.num_launched += 1
            self.comm_streams[comm_stream].submit(partial(self._reduce, launch), buffer.producers())

    def _is_behind(self, launch: Launch) -> bool:
        """Whether another rank passes its part of a sum to this one."""
        step = self.buffers[launch.bucket].bucket.route[launch.step]
        return step.is_point_to_point and self._rank != step.tail

    def _step_bucket(self, launch: Launch) -> StepBucket:
        buffer = self.buffers[launch.bucket]
        bucket, part = buffer.bucket, buffer.part(self._rank, launch.step)
        step, pair_sum = bucket.route[launch.step], None
        if step.exchange != "all-reduce":
            region = bucket.region(self._rank, launch.step)
            rows = rows_of(bucket, region) if step.exchange == "asymmetric" else ()
            pair_sum = PairSum(
                part,
                rows,
                back=self._groups.of(step.ranks, second_communicator(launch.comm_stream)),
            )
        return StepBucket(
            part,
            len(buffer.views),
            index=launch.bucket,
            slots=bucket.pieces(self._rank, launch.step),
            pair_sum=pair_sum,
        )

    def _expect(self, launch: Launch) -> None:
        """Posts the receive of what comes from behind, unless it still is. On a comm stream."""
        bucket, flat = self.buffers[launch.bucket].bucket, self._flat[launch]
        if flat.arriving is None:
            step, inbox = bucket.route[launch.step], self._inboxes[launch]
            with self.reporting(f"bucket {bucket.index}: expecting its {step}"):
                inbox.acquire(INBOX_FREE)
                group = self._groups.of(step.ranks, launch.comm_stream)
                flat.arriving = collectives.expect_reduce_chain(inbox.buffer, group)

    def _reduce(self, launch: Launch) -> None:
        """Runs one collective, or puts it off behind what it goes on from. On a comm stream."""
        comm_stream = self.comm_streams[launch.comm_stream]
        if launch.bucket in self._ending:
            comm_stream.put_off(partial(self._reduce, launch))
            return
        buffer, flat = self.buffers[launch.bucket], self._flat[launch]
        step = buffer.bucket.route[launch.step]
        what = (
            f"bucket {buffer.bucket.index} ({buffer.bucket.names}): {step} over ranks "
            f"{list(step.ranks)} by handler {step.handler!r}"
        )
        with self.reporting(what):
            group = self._groups.of(step.ranks, launch.comm_stream)
            flat.is_mean = False
            with record_function(f"pipegrad bucket {buffer.bucket.index} {step}"):
                work = self._handlers[step.handler].launch(flat, step, group)
            if not callable(getattr(work, "wait", None)):
                raise TypeError(f"launch() returned {work!r}, expected a Work, with a wait()")
        end = partial(self._end, launch, work, what)
        if isinstance(work, LateWork) and (work.in_threads or not comm_stream.is_threaded):
            self._ending.add(launch.bucket)
            comm_stream.put_off(end)
        else:
            end()

    def _end(self, launch: Launch, work: Work, what: str) -> None:
        """Waits for a collective. On a comm stream."""
        buffer = self.buffers[launch.bucket]
        step = buffer.bucket.route[launch.step]
        with self.reporting(what):
            COLLECTIVE(work)
            self._ending.discard(launch.bucket)
            flat = self._flat[launch]
            flat.arriving = None
            rest = buffer.cut(self._rank, launch.step + 1)
            if step.op == "mean" and not flat.is_mean:
                rest.div_(len(step.ranks))

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Tells the other ranks of what fails inside, and raises it as a ReduceError."""
        try:
            yield
        except BaseException as error:
            said = error if isinstance(error, Exception) else repr(error)
            told = self.notice.post(f"{what} failed: {said}", final=True)
            if not ends_in_words(error):
                raise
            cause = self.notice.cause()  # a rank that failed may have ended connections to this one
            words = told if cause is None else f"{FAILED_ELSEWHERE}: {cause}"
            raise ReduceError(words) from error

    def close(self) -> None:
        """Ends the comm streams' threads."""
        for comm_stream in self.comm_streams:
            comm_stream.close()

    def wait(self) -> float:
        """Waits for all that was launched; returns the seconds the host was blocked.

        Sync: afterwards the current stream may read every buffer.

        Raises:
            ReduceError: If a collective failed here, or a peer said that it failed.
        """
        start = time.perf_counter()
        self._wait_for_comm_streams()
        late = [comm_stream for comm_stream in self.comm_streams if comm_stream.has_late]
        for comm_stream in late:
            comm_stream.submit(comm_stream.run_late, ())
        if late:
            self._wait_for_comm_streams()
        return time.perf_counter() - start

    def _wait_for_comm_streams(self) -> None:
        for comm_stream in self.comm_streams:
            while not comm_stream.wait(_POLL_SECONDS):
                self._raise_peer_failure()

    def let_leave(self) -> list[Ticket]:
        """Has comm streams wait for messages that still leave, although their sum is here."""
        return [
            self.submit(launch.comm_stream, flat.pair_sum.settle, ())
            for launch, flat in self._flat.items()
            if flat.pair_sum is not None
        ]

    def settle(self) -> None:
        """Waits until all has left.

        Raises:
            ReduceError: As `wait` does.
        """
        for ticket in self.let_leave():
            self.wait_for(ticket)

    def submit(self, comm_stream: int, task: Task, after: Sequence[torch.Event]) -> Ticket:
        """Has a comm stream do something, behind all that it has to do; as `CommStream.submit`."""
        return self.comm_streams[comm_stream].submit(task, after)

    def wait_for(self, ticket: Ticket) -> None:
        """Waits for one thing that was submitted.

        Sync: as `wait`.

        Raises:
            ReduceError: As `wait` does.
        """
        while not ticket.wait(_POLL_SECONDS):
            self._raise_peer_failure()

    def meet(self) -> Ticket:
        """Has a comm stream wait for all ranks to come here, those that have failed as well."""

        def meeting() -> None:
            assert self._groups.world is not None
            with self.reporting("meeting of all ranks"):
                dist.all_reduce(torch.zeros(1, device=self._device), group=self._groups.world)

        return self.submit(0, meeting, ())

    def refuse_failed(self) -> None:
        """Raises if a rank has told that this step failed: what was reduced may be of no use.

        Raises:
            ReduceError: With its words.
        """
        self.notice.refuse_failed()

    def _raise_refusal(self) -> None:
        """Raises if another rank was refused a verb some time ago, and is not going on."""
        message = self.notice.read_refusal()
        now = time.monotonic()
        if message is None or message != self._refusal:
            self._refusal, self._refused_since = message, now
        elif now - self._refused_since > _REFUSED_SECONDS:
            raise ReduceError(f"this rank waits for one that does not go on: {message}")

    def _raise_peer_failure(self) -> None:
        # Of a step that failed every rank launches everything, unless one says that it cannot.
        message = self.notice.read_final() if self._given_up else self.notice.read()
        if message is None and not self._given_up:
            self._raise_refusal()
        if message is not None:
            raise ReduceError(f"{FAILED_ELSEWHERE}, so its collectives never end: {message}")
