"""Bucketer: many small sums in few large collectives, for code that calls for each sum itself."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrad.comm import collectives
from pipegrad.comm.comm_stream import CommStream, Ticket, outside_of_graphs
from pipegrad.comm.ending import Ending
from pipegrad.comm.sync_points import Record, Wait
from pipegrad.comm.waits import look
from pipegrad.errors import PlanError, ReduceError, StepError
from pipegrad.gradients.bucket_memory import FlatBuffer
from pipegrad.plugins.handler import BUCKET_BYTES

FILL_FREE = Wait("staging.fill-free", "it may be zeroed, or read, on another stream still")
WRITTEN = Record("staging.written", "a collective must not read before inputs are copied")
RELEASED = Record("bucketer.released", "what is read must not be overwritten or given away")
HOME = Wait("bucketer.home", "memory goes back to the stream that asked for it, if another")
Callback = Callable[[Tensor], object]
Group = dist.ProcessGroup | None
Key = tuple[str, torch.dtype, torch.device, dist.ProcessGroup, bool]  # larger than the capacity


@dataclass
class _Bucket:
    staging: FlatBuffer
    rows: Tensor  # row j has the inputs for rank j; or one row for all
    numel: int = 0  # filled elements of a row
    written: list[torch.Event] = field(default_factory=list)
    calls: list[tuple[Tensor, Callback]] = field(default_factory=list)  # with the memory of a sum


class Bucketer:
    """Collects the inputs of many sums, and reduces them in few collectives during the compute.

    Inputs of one kind of sum, dtype, device and group share a bucket. It is sent when it is full,
    when the next input does not fit, or in `flush`; a larger input at once, alone. All ranks of a
    group must make the same calls. Until `flush`, no other code may use a group.

    Callbacks run in your thread, in the order of buckets and of calls: in `flush`, or in a call
    that would leave three buckets in flight. A callback may add inputs, equally many on all ranks.
    The bits of a reduce_scatter on gloo do not depend on the capacity; those of other sums may.

    Args:
        capacity_bytes: Bytes of a bucket, with its inputs for all ranks. With 0 every call is a
            collective. You may change the attribute between calls, in the same way on all ranks.

    Sync: you may change or free inputs after the call. Collectives run on a side stream, with gloo
    in a thread. The current stream waits for them before callbacks. Not thread-safe.
    """

    def __init__(self, *, capacity_bytes: int = BUCKET_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self._open: dict[Key, _Bucket] = {}
        self._in_flight = deque[tuple[_Bucket, Ticket]]()
        self._pool: list[FlatBuffer] = []
        self._comm_streams: dict[tuple[torch.device, bool], CommStream] = {}
        self._used = weakref.WeakSet[dist.ProcessGroup]()  # cut at exit if a thread waits there
        self._errors: list[Exception] = []
        self._is_running = False  # callbacks
        self._broken = ""  # why this Bucketer is of no use any more
        Ending(self, threads=self._comm_streams.values(), used=self._used)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buckets; 0 after `release`."""
        buckets = (*self._open.values(), *(bucket for bucket, _ in self._in_flight))
        return sum(x.buffer.nbytes for x in (*self._pool, *(b.staging for b in buckets)))

    @outside_of_graphs
    def reduce_scatter(
        self, inputs: Sequence[Tensor], *, callback: Callback, group: Group = None
    ) -> None:
        """Sums the inputs of all ranks for this rank, and calls `callback` once with the sum.

        Args:
            inputs: A tensor for each rank of the group, of one shape, dtype and device.
            callback: A function of the sum, contiguous and in new memory, with an input's shape.
            group: The default group if None.

        Raises:
            PlanError: If the inputs cannot be summed, or this rank is not in the group.
            ReduceError: As in `flush`.
        """
        self._add("reduce_scatter", inputs, group, callback)

    @outside_of_graphs
    def all_reduce(self, tensor: Tensor, *, callback: Callback, group: Group = None) -> None:
        """Sums the tensors of all ranks, of one shape and dtype, like `reduce_scatter`."""
        self._add("all_reduce", [tensor], group, callback)

    @outside_of_graphs
    def flush(self) -> None:
        """Sends all open buckets, waits, and runs all callbacks, also for inputs that these add.

        Raises:
            ReduceError: If a collective failed. Then this Bucketer can only be released.
            StepError: If a callback calls it.
            Exception: The first error of a callback since the last flush; its notes have the rest.
        """
        if self._broken:
            raise ReduceError(self._broken)
        if self._is_running:
            raise StepError("flush() in a callback: whoever runs it sends what callbacks add")
        while self._open or self._in_flight:
            for key in list(self._open):
                self._send(key)
            self._finish()
        self._raise_errors()

    def release(self) -> None:
        """Frees all memory, on the current stream, and ends the threads. You may add inputs again.

        Raises:
            StepError: If inputs or errors wait for `flush`. After a failure they are dropped.
        """
        if not self._broken and (self._open or self._in_flight or self._errors or self._is_running):
            raise StepError(
                f"release() with {len(self._open)} buckets queued, {len(self._in_flight)} in "
                f"flight and {len(self._errors)} callbacks' errors not raised yet: flush() first"
            )
        for stream in self._comm_streams.values():
            stream.close()
        for kept in (self._open, self._in_flight, self._errors, self._pool, self._comm_streams):
            kept.clear()

    def _add(self, kind: str, inputs: Sequence[Tensor], group: Group, callback: Callback) -> None:
        if self._broken:
            raise ReduceError(self._broken)
        group = dist.group.WORLD if group is None else group
        if group is None or dist.get_rank(group) < 0:
            raise PlanError(f"{kind}: this rank is not in the group, only its ranks call")
        _check_inputs(kind, inputs, dist.get_process_group_ranks(group))
        shape, dtype, device = inputs[0].shape, inputs[0].dtype, inputs[0].device
        numel, room = shape.numel(), self.capacity_bytes // (len(inputs) * dtype.itemsize)
        key = kind, dtype, device, group, numel > room
        bucket = self._open.get(key)
        if bucket and (bucket.numel + numel > room or bucket.rows.shape[1] != room):
            self._send(key)
        if key not in self._open:
            self._open[key] = self._empty(len(inputs), max(numel, room), dtype, device)
        bucket = self._open[key]
        bucket.staging.acquire(FILL_FREE)
        slots = bucket.rows[:, bucket.numel : bucket.numel + numel].view(len(inputs), *shape)
        with torch.no_grad():
            torch.stack(tuple(inputs), out=slots)
        if (event := WRITTEN(device)) is not None:
            bucket.written.append(event)
        mine = dist.get_rank(group) if kind == "reduce_scatter" else 0
        bucket.calls.append((slots[mine], callback))
        bucket.numel += numel
        if bucket.numel >= room:
            self._send(key)
        self._finish(at_most=2)

    @torch.inference_mode(mode=False)  # its tensors cannot be written outside of it
    def _empty(self, num_rows: int, room: int, dtype: torch.dtype, device: torch.device) -> _Bucket:
        num_used = num_rows * room * dtype.itemsize
        nbytes = max(num_used, self.capacity_bytes)
        fits = (x for x in self._pool if (x.buffer.nbytes, x.device) == (nbytes, device))
        if staging := next(fits, None):
            self._pool.remove(staging)
        else:
            staging = FlatBuffer(torch.empty(nbytes, dtype=torch.uint8, device=device))
        return _Bucket(staging, staging.buffer[:num_used].view(dtype).view(num_rows, room))

    def _send(self, key: Key) -> None:
        bucket, (kind, dtype, device, group, _) = self._open.pop(key), key
        rows = bucket.rows[:, : bucket.numel].unbind()

        def reduce() -> None:
            try:
                if bucket.numel and kind == "all_reduce":
                    dist.all_reduce(rows[0], group=group)
                elif bucket.numel:
                    collectives.reduce_scatter(rows[dist.get_rank(group)], rows, group)
            except Exception as error:
                raise ReduceError(
                    f"{kind} of {sum(row.nbytes for row in rows)} bytes of {dtype} on {device} "
                    f"over ranks {dist.get_process_group_ranks(group)} failed: {error}"
                ) from error

        where = device, collectives.blocks_host(group, device)
        if where not in self._comm_streams:
            self._comm_streams[where] = CommStream("pipegrad bucketer", device, threaded=where[1])
        if collectives.backend_of(group, device) == "gloo":
            self._used.add(group)
        self._in_flight.append((bucket, self._comm_streams[where].submit(reduce, bucket.written)))

    def _finish(self, at_most: int = 0) -> None:
        """Runs the callbacks of the oldest buckets, until at most so many are in flight."""
        if self._is_running:
            return  # a callback has added inputs: the loop that runs it goes on with them
        self._is_running = True
        try:
            while len(self._in_flight) > at_most:
                while not self._in_flight[0][1].wait(60.0):
                    look()
                bucket, _ = self._in_flight.popleft()
                for slot, callback in bucket.calls:
                    try:
                        callback(slot.clone())
                    except Exception as error:  # noqa: BLE001 - `flush` raises it after all others
                        self._errors.append(error)
                bucket.staging.release(RELEASED)
                bucket.staging.return_home(HOME)
                flats = (*self._pool, bucket.staging)
                self._pool = [flat for flat in flats if flat.buffer.nbytes == self.capacity_bytes]
        except ReduceError as error:
            self._broken = (
                f"this Bucketer is of no use since a collective failed: release() it, make new "
                f"groups and a new Bucketer: {error}"
            )
            self._errors.insert(0, error)
            self._raise_errors()
        finally:
            self._is_running = False

    def _raise_errors(self) -> None:
        errors, self._errors = self._errors, []
        for other in errors[1:]:
            errors[0].add_note(f"A callback also raised {type(other).__name__}: {other}")
        if errors:
            raise errors[0]


def _check_inputs(kind: str, inputs: Sequence[Tensor], ranks: list[int]) -> None:
    traits = {(tuple(x.shape), x.dtype, x.device, x.layout): None for x in inputs}
    if kind == "reduce_scatter" and len(inputs) != len(ranks):
        wrong = f"{len(inputs)} inputs, expected {len(ranks)}: one for each of the ranks {ranks}"
    elif len(traits) > 1:
        listing = "; ".join(" ".join(map(str, each)) for each in traits)
        wrong = f"expected inputs of one shape, dtype and device, found {listing}"
    elif (layout := inputs[0].layout) is not torch.strided:
        wrong = f"inputs are {layout}, expected torch.strided: use to_dense()"
    elif inputs[0].dtype is torch.bool:
        wrong = "inputs are torch.bool, which has no sum: use an integer dtype"
    else:
        return
    raise PlanError(f"{kind}: {wrong}")
