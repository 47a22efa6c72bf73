"""Bucketer: many small sums in few large collectives, for code that calls for each sum itself."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipegrad.comm import collectives, sync_points
from pipegrad.comm.comm_stream import CommStream, Ticket, outside_of_graphs
from pipegrad.comm.ending import Ending
from pipegrad.comm.waits import look
from pipegrad.errors import PlanError, ReduceError, StepError
from pipegrad.gradients.bucket_memory import FlatBuffer
from pipegrad.plugins.handler import BUCKET_BYTES

Callback = Callable[[torch.Tensor], object]

FILL_FREE = sync_points.Wait(
    "staging.fill-free", "it may be zeroed, or read, on another stream still"
)
WRITTEN = sync_points.Record(
    "staging.written", "a collective must not read before inputs are copied"
)
RESULT = sync_points.Record(
    "bucketer.result", "fresh memory may still be in use on the launching stream"
)
HELD = sync_points.Hold(
    "bucketer.held", "memory of a bucket in flight must not be given to another"
)
RELEASED = sync_points.Record(
    "bucketer.released", "what is read must not be overwritten or given away"
)
HOME = sync_points.Wait(
    "bucketer.home", "memory goes back to the stream that asked for it, if another"
)

IN_FLIGHT = 2  # with more buckets in flight, a call waits for the oldest
_POLL_SECONDS = 60.0


class _Key(NamedTuple):
    """The properties that inputs must share to lie in one bucket.

    Two groups with the same ranks are different: they have different communicators.
    """

    kind: str  # reduce_scatter or all_reduce
    num_rows: int  # tensors in an input: one for each rank, or with an all-reduce 1
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup

    @property
    def in_place(self) -> bool:
        """Whether the sum is in the memory of the inputs."""
        return self.kind == "all_reduce"

    def room(self, capacity_bytes: int) -> int:
        """Returns the number of elements in each row, if all rows together fill the capacity."""
        return capacity_bytes // (self.num_rows * self.dtype.itemsize)

    def fresh(self, numel: int) -> FlatBuffer:
        """Returns new memory."""
        return FlatBuffer(torch.empty(numel, dtype=self.dtype, device=self.device))


@dataclass(eq=False)
class _Bucket:
    """The inputs of many sums, copied side by side for one collective, and then their sums."""

    # Row j of the matrix holds the inputs for rank j, side by side. So a row is a shard of one
    # reduce-scatter, however many inputs it holds.

    key: _Key
    flat: FlatBuffer | None  # memory of num_rows * room elements
    room: int  # elements of a row that fit
    result: FlatBuffer  # with an all-reduce the same memory
    numel: int = 0  # elements of a row that are filled
    written: list[torch.Event | None] = field(default_factory=list)  # for which a reader must wait
    calls: list[tuple[int, torch.Size, Callback]] = field(default_factory=list)  # by offset
    ticket: Ticket | None = None  # of the collective; a bucket without elements has none

    def rows(self) -> torch.Tensor:
        """The inputs that were added, ``(num_rows, numel)``."""
        assert self.flat is not None
        return self.flat.buffer.view(self.key.num_rows, self.room)[:, : self.numel]

    def add(self, inputs: Sequence[torch.Tensor], callback: Callback) -> None:
        """Copies one tensor to the end of each row.

        Sync: writes on the current stream, after the buffer's last use.
        """
        # The inputs are copied at once, so the caller may change or free them after the call.
        assert self.flat is not None
        begin, shape = self.numel, inputs[0].shape
        self.numel += shape.numel()
        slots = self.rows()[:, begin:].view(len(inputs), *shape)
        self.flat.acquire(FILL_FREE)
        with torch.no_grad():
            torch.stack(tuple(inputs), out=slots)
        self.written.append(self.flat.written(WRITTEN))
        self.calls.append((begin, shape, callback))

    def call_back(self) -> list[Exception]:
        """Calls each callback with its part of the sum; returns the errors of callbacks."""
        errors = []
        for offset, shape, callback in self.calls:
            try:
                callback(self.result.buffer[offset : offset + shape.numel()].view(shape))
            except Exception as error:  # noqa: BLE001 - `flush` raises it after all callbacks
                errors.append(error)
        return errors


class Bucketer:
    """Collects the inputs of many sums and reduces them together, beside the compute.

    Each kind of collective, dtype, device and group has an open bucket. A bucket is sent when it is
    full, when the next input does not fit, or in `flush`. An input larger than the capacity is sent
    at once, alone. So the order of collectives depends only on the calls. All ranks of a group must
    make the same calls. Groups that share ranks must be called in the same order. Until `flush`, no
    other code may use a group.

    Callbacks get a view of the sum, with the shape of the input. They run in the caller's thread,
    in the order of buckets and of calls: in `flush`, in `poll` if their bucket has ended, or in a
    later call when more than two buckets are in flight. A callback may add inputs, except in
    `poll`; then all ranks must make equally many calls, each to its own groups. An error of a
    callback is raised by `flush`, after all others have run.

    A view keeps the result of its whole bucket alive; for an all_reduce that is up to the capacity.
    On gloo, the bits of a reduce_scatter's sum do not depend on the capacity. On other backends,
    and with an all_reduce of more than two ranks, the order of terms may depend on it.

    Sync: calls return at once, except for the wait above. Then inputs may be changed, or freed on
    the stream that was current. Collectives wait for every stream that added to their bucket. They
    run on a side stream, with gloo in a thread. For callbacks, the current stream waits for them.
    If you keep a view after the callback: the result of a reduce_scatter is memory of the stream
    whose call sent the bucket; that of an all_reduce, of the stream that began the bucket. Not
    thread-safe.

    Args:
        capacity_bytes: Of the inputs in a bucket, with those for all ranks. It is also the memory
            of a bucket. With 0 every call is a collective.

    Attributes:
        capacity_bytes: You may change it at any time, in the same way on all ranks.
    """

    def __init__(self, *, capacity_bytes: int = BUCKET_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self._open: dict[_Key, _Bucket] = {}
        self._in_flight: deque[_Bucket] = deque()
        self._pool: defaultdict[tuple[object, ...], list[FlatBuffer]] = defaultdict(list)
        self._pool_capacity_bytes = capacity_bytes
        self._comm_streams: dict[tuple[torch.device, bool], CommStream] = {}
        self._used: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._ending: Ending | None = None
        self._errors: list[Exception] = []
        self._in_callback = False
        self._is_polling = False
        self._broken = ""
        self._check_usable()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of staging, and of results before their callbacks; 0 after `release`."""
        flats = [flat for pooled in self._pool.values() for flat in pooled]
        for bucket in (*self._open.values(), *self._in_flight):
            flats += [flat for flat in (bucket.flat, bucket.result) if flat]
        storages = [flat.buffer.untyped_storage() for flat in flats]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @outside_of_graphs
    def reduce_scatter(
        self,
        inputs: Sequence[torch.Tensor],
        *,
        callback: Callback,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Sums the inputs of all ranks for this rank, and calls `callback` with the sum.

        Args:
            inputs: A tensor for each rank of the group, in the order of its ranks, all with the
                same shape, dtype and device. Only read.
            callback: Called once with the sum.
            group: The default group if None.

        Raises:
            PlanError: If the inputs cannot be summed, or this rank is not in the group.
            ReduceError: If a collective has failed, here or in an earlier call.

        Sync: see the class.
        """
        self._add("reduce_scatter", inputs, group, callback)

    @outside_of_graphs
    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        callback: Callback,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Sums the tensors of all ranks, and calls `callback` with the sum.

        Args:
            tensor: Of the same shape and dtype on every rank. Only read.
            callback: Called once with the sum.
            group: The default group if None.

        Raises:
            PlanError: If the tensor cannot be summed, or this rank is not in the group.
            ReduceError: If a collective has failed, here or in an earlier call.

        Sync: see the class.
        """
        self._add("all_reduce", [tensor], group, callback)

    @outside_of_graphs
    def flush(self) -> None:
        """Sends all open buckets, waits, and runs all callbacks, also for inputs that these add.

        Raises:
            ReduceError: If a collective failed. Then this Bucketer cannot be used any more.
            StepError: If a callback calls it.
            Exception: The first error of a callback since the last flush. Its notes have the rest.

        Sync: the current stream waits for all collectives.
        """
        self._check_usable()
        if self._in_callback:
            raise StepError("flush() in a callback: whoever runs it sends what callbacks add")
        while self._open or self._in_flight:
            with torch.inference_mode(mode=False):  # as in `_add`
                for key in list(self._open):
                    self._send(self._open.pop(key))
            self._finish(at_most=0)
        errors, self._errors = self._errors, []
        if errors:
            _add_notes(errors[0], errors[1:])
            raise errors[0]

    @outside_of_graphs
    def poll(self) -> None:
        """Runs the callbacks of buckets that have ended, in order, and returns at once.

        So results need not wait for `flush`, for example with a capacity of 0. On a device with a
        side stream, every bucket that was sent counts as ended: the current stream waits for it.
        Ranks may poll at different times, so a callback that adds inputs is refused here: leave it
        to `flush`. Errors of callbacks are raised by `flush`.

        Raises:
            ReduceError: If a collective failed. Then this Bucketer cannot be used any more.
            StepError: If a callback calls it.
        """
        self._check_usable()
        if self._in_callback:
            raise StepError("poll() in a callback: whoever runs it runs the others too")
        self._is_polling = True
        try:
            self._finish(at_most=0, seconds=0.0)
        finally:
            self._is_polling = False

    def release(self) -> None:
        """Frees all memory and ends the threads. The next call allocates what it needs.

        Raises:
            StepError: If inputs, or errors of callbacks, wait for `flush`. After a failed
                collective they are dropped instead.

        Sync: memory is freed on the current stream, after all collectives.
        """
        waiting = self._open or self._in_flight or self._in_callback or self._errors
        if waiting and not self._broken:
            raise StepError(
                f"release() with {len(self._open)} buckets queued, {len(self._in_flight)} in "
                f"flight and {len(self._errors)} callbacks' errors not raised yet: flush() first"
            )
        for comm_stream in self._comm_streams.values():
            comm_stream.close()
        if self._ending is not None:
            self._ending.end()
            self._ending = None
        self._comm_streams.clear()
        self._open.clear()
        self._in_flight.clear()
        self._errors.clear()
        self._pool.clear()

    def _add(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
        callback: Callback,
    ) -> None:
        self._check_usable()
        if self._is_polling:
            raise StepError(
                f"{kind}() in a callback that poll() runs: other ranks run it at other times, and "
                f"would send in another order. Leave callbacks that add inputs to flush()"
            )
        key = _checked(kind, inputs, group, callback)
        with torch.inference_mode(mode=False):  # its tensors cannot be written outside of it
            self._stage(key, inputs, callback)
        self._finish(at_most=IN_FLIGHT)

    def _stage(self, key: _Key, inputs: Sequence[torch.Tensor], callback: Callback) -> None:
        """Adds the inputs of a call to a bucket; sends full buckets."""
        numel, room = inputs[0].numel(), key.room(self.capacity_bytes)
        if numel > room:
            single = self._empty(key, numel)
            single.add(inputs, callback)
            self._send(single)
            return
        bucket = self._open.get(key)
        if bucket and bucket.numel + numel > min(room, bucket.room):
            self._send(self._open.pop(key))
        bucket = self._open.get(key) or self._empty(key, room)
        self._open[key] = bucket
        bucket.add(inputs, callback)
        if bucket.numel == min(room, bucket.room):
            self._send(self._open.pop(key))

    def _empty(self, key: _Key, room: int) -> _Bucket:
        """Returns an empty bucket, if possible in the memory of an earlier one."""
        if self._pool_capacity_bytes != self.capacity_bytes:
            # The user may change the capacity between two calls. Memory of another size fits no
            # bucket any more.
            self._pool.clear()
            self._pool_capacity_bytes = self.capacity_bytes
        numel = key.num_rows * room
        pooled = self._pool[numel, key.dtype, key.device]
        flat = key.fresh(numel) if key.in_place or not pooled else pooled.pop()
        return _Bucket(key, flat, room, flat)

    def _send(self, bucket: _Bucket) -> None:
        """Sends a bucket, after all buckets that were sent before."""
        key, events = bucket.key, list(bucket.written)
        if bucket.numel:
            # The allocator gave the result's memory to the current stream, whose earlier kernels
            # may still use it. So the comm stream waits for this stream, too.
            if not key.in_place:
                bucket.result = key.fresh(bucket.numel)
                events.append(bucket.result.written(RESULT))
            kind = key.device, collectives.blocks_host(key.group, key.device)
            if kind not in self._comm_streams:
                stream = CommStream("pipegrad bucketer", key.device, threaded=kind[1])
                self._comm_streams[kind] = stream
            if self._ending is None:
                self._ending = Ending(self, threads=self._comm_streams.values(), used=self._used)
            if collectives.backend_of(key.group, key.device) == "gloo":
                # The group is the user's and is not destroyed. But at exit, if a thread still waits
                # there, its connections are cut, since only that ends the wait.
                self._used.add(key.group)
            task = partial(_reduce, key, bucket.result.buffer[: bucket.numel], bucket.rows())
            after = [event for event in events if event is not None]
            bucket.ticket = self._comm_streams[kind].submit(task, after)
        bucket.flat = HELD(bucket.flat)
        self._in_flight.append(bucket)

    def _finish(self, at_most: int, *, seconds: float = math.inf) -> None:
        """Waits for the oldest buckets and runs their callbacks, until few are in flight.

        It also returns if a bucket takes longer than `seconds`.
        """
        # A callback has added inputs. The loop that runs it, further up, goes on with them.
        if self._in_callback:
            return
        self._in_callback = True
        try:
            while len(self._in_flight) > at_most:
                if not self._wait(self._in_flight[0].ticket, seconds):
                    return
                bucket = self._in_flight.popleft()
                self._errors += bucket.call_back()
                # Behind the callbacks, which get views of this memory.
                self._reclaim(bucket)
        finally:
            self._in_callback = False

    def _wait(self, ticket: Ticket | None, seconds: float) -> bool:
        """Makes the current stream wait for a bucket; returns whether it has ended in time."""
        try:
            while ticket is not None and not ticket.wait(min(seconds, _POLL_SECONDS)):
                if seconds < _POLL_SECONDS:
                    return False  # without a limit, the timeout of the group ends the wait
                look()
            return True
        except ReduceError as error:
            self._broken = str(error)
            _add_notes(error, self._errors)
            raise

    def _reclaim(self, bucket: _Bucket) -> None:
        """Returns the memory of a bucket to the pool, or to the stream of its allocation."""
        key, flat = bucket.key, bucket.flat
        for buffer in dict.fromkeys((flat, bucket.result)):
            if buffer is not None:
                buffer.release(RELEASED)
                buffer.return_home(HOME)
        if flat and not key.in_place and bucket.room == key.room(self.capacity_bytes):
            self._pool[flat.buffer.numel(), key.dtype, key.device].append(flat)

    def _check_usable(self) -> None:
        if self._broken:
            raise ReduceError(
                "this Bucketer is of no use since a collective failed, its groups are out of step; "
                f"release() it, then make new groups and a new Bucketer: {self._broken}"
            )
        capacity_bytes: object = self.capacity_bytes
        if not isinstance(capacity_bytes, int) or capacity_bytes < 0:
            raise PlanError(f"capacity_bytes is {capacity_bytes!r}, expected an int from 0 on")


def _checked(
    kind: str,
    inputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    callback: Callback,
) -> _Key:
    """Returns the key of inputs, after a check that they can be summed. Changes nothing.

    Raises:
        PlanError: If they cannot be summed, or this rank is not in the group.
    """
    group = dist.group.WORLD if group is None else group
    if group is None or dist.get_rank(group) < 0:
        raise PlanError(f"{kind}: this rank is not in the group, only its ranks call")
    expected = 1 if kind == "all_reduce" else dist.get_world_size(group)
    if len(inputs) != expected:
        raise PlanError(
            f"{kind}: {len(inputs)} inputs, expected {expected}: one for each of the ranks "
            f"{dist.get_process_group_ranks(group)}"
        )
    traits = {(tuple(x.shape), x.dtype, x.device, x.layout): None for x in inputs}
    if len(traits) > 1:
        listing = "; ".join(" ".join(map(str, each)) for each in traits)
        raise PlanError(f"{kind}: expected inputs of one shape, dtype and device, found {listing}")
    (_, dtype, device, layout), *_ = traits
    if layout is not torch.strided:
        raise PlanError(f"{kind}: inputs are {layout}, expected torch.strided: use to_dense()")
    if dtype is torch.bool:
        raise PlanError(f"{kind}: inputs are {dtype}, which has no sum: use an integer dtype")
    if not callable(callback):
        raise PlanError(f"{kind}: callback is {callback!r}, expected a function of the sum")
    return _Key(kind, len(inputs), dtype, device, group)


def _reduce(key: _Key, result: torch.Tensor, rows: torch.Tensor) -> None:
    """Runs a collective. On a comm stream."""
    try:
        if key.in_place:
            dist.all_reduce(result, group=key.group)
        else:
            collectives.reduce_scatter(result, rows.unbind(), key.group)
    except Exception as error:
        raise ReduceError(
            f"{key.kind} of {rows.nbytes} bytes of {key.dtype} on {key.device} over ranks "
            f"{dist.get_process_group_ranks(key.group)} failed: {error}"
        ) from error


def _add_notes(error: Exception, others: Sequence[Exception]) -> None:
    for other in others:
        error.add_note(f"A callback also raised {type(other).__name__}: {other}")
