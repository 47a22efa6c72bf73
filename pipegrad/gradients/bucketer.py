"""Bucketer: many small sums in few large collectives, for code that calls for each sum itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrad.comm import collectives
from pipegrad.comm.comm_stream import outside_of_graphs
from pipegrad.errors import PlanError, ReduceError, StepError, in_words
from pipegrad.plugins.handler import BUCKET_BYTES

Callback = Callable[[Tensor], object]
Group = dist.ProcessGroup | None
Key = tuple[str, torch.dtype, torch.device, dist.ProcessGroup, int]  # elements of a row


class _Bucket:
    def __init__(self, num_rows: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(mode=False):  # its tensors cannot be written outside of it
            self.rows = torch.empty(num_rows, numel, dtype=dtype, device=device)
        self.numel = 0  # filled elements of a row
        self.calls: list[tuple[Tensor, Callback]] = []  # with the memory of a sum


class Bucketer:
    """Collects the inputs of many sums, and reduces them in few collectives.

    Inputs of one kind of sum, dtype, device and group share a bucket. It is sent when it is full,
    when the next input does not fit, or in `flush`; a larger input is sent at once, alone. All
    ranks of a group must make the same calls. Until `flush`, no other code may use a group.

    Callbacks run in your thread, in the order of buckets and of calls, in the call that sends their
    bucket. A callback may add inputs, equally many on all ranks. If it raises, its call raises, and
    the next call runs the callbacks after it. The bits of a reduce_scatter on gloo do not depend
    on the capacity; the bits of other sums may.

    Args:
        capacity_bytes: Bytes of a bucket, with its inputs for all ranks. With 0 every call is a
            collective. You may change the attribute between calls, in the same way on all ranks.

    Sync: you may change or free inputs after the call. All of it is on the current stream, which
    must be the same in all calls; on gloo the host waits. To compute meanwhile, make the calls on a
    side stream. Not thread-safe.
    """

    def __init__(self, *, capacity_bytes: int = BUCKET_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self._buckets: dict[Key, _Bucket] = {}
        self._sums = deque[tuple[Tensor, Callback]]()
        self._is_running = False  # callbacks
        self._broken = ""  # why this Bucketer is of no use any more

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buckets; 0 after `release`."""
        return sum(bucket.rows.nbytes for bucket in self._buckets.values())

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
            Exception: The error of a callback.
        """
        self._add("reduce_scatter", inputs, group, callback)

    @outside_of_graphs
    def all_reduce(self, tensor: Tensor, *, callback: Callback, group: Group = None) -> None:
        """Sums the tensors of all ranks, of one shape and dtype, like `reduce_scatter`."""
        self._add("all_reduce", [tensor], group, callback)

    @outside_of_graphs
    def flush(self) -> None:
        """Sends all open buckets, and runs all callbacks, also for inputs that these add.

        Raises:
            ReduceError: If a collective failed. Then this Bucketer can only be released.
            StepError: If a callback calls it.
            Exception: The error of a callback. Call `flush` again to run the callbacks after it.
        """
        self._refuse_broken()
        if self._is_running:
            raise StepError("flush() in a callback: whoever runs it sends what callbacks add")
        self._run_callbacks()
        while keys := [key for key, bucket in self._buckets.items() if bucket.calls]:
            for key in keys:
                self._send(key)
            self._run_callbacks()

    def release(self) -> None:
        """Frees all memory. You may add inputs again.

        Raises:
            StepError: If inputs or sums wait for `flush`. After a failure they are dropped.
        """
        num_open = sum(bool(bucket.calls) for bucket in self._buckets.values())
        if not self._broken and (num_open or self._sums or self._is_running):
            raise StepError(
                f"release() with {num_open} buckets queued and {len(self._sums)} callbacks not "
                f"run yet: flush() first"
            )
        self._buckets.clear()
        self._sums.clear()

    def _add(self, kind: str, inputs: Sequence[Tensor], group: Group, callback: Callback) -> None:
        self._refuse_broken()
        group = dist.group.WORLD if group is None else group
        if group is None or dist.get_rank(group) < 0:
            raise PlanError(f"{kind}: this rank is not in the group, only its ranks call")
        _check_inputs(kind, inputs, dist.get_process_group_ranks(group))
        shape, dtype, device = inputs[0].shape, inputs[0].dtype, inputs[0].device
        numel, room = shape.numel(), self.capacity_bytes // (len(inputs) * dtype.itemsize)
        key = kind, dtype, device, group, max(numel, room)
        if key in self._buckets and self._buckets[key].numel + numel > room:
            self._send(key)
        if key not in self._buckets:
            self._buckets[key] = _Bucket(len(inputs), max(numel, room), dtype, device)
        bucket = self._buckets[key]
        slots = bucket.rows[:, bucket.numel : bucket.numel + numel].view(len(inputs), *shape)
        with torch.no_grad():
            torch.stack(tuple(inputs), out=slots)
        mine = dist.get_rank(group) if kind == "reduce_scatter" else 0
        bucket.calls.append((slots[mine], callback))
        bucket.numel += numel
        if bucket.numel >= room:
            self._send(key)
        self._run_callbacks()

    def _send(self, key: Key) -> None:
        """Reduces a bucket, and reuses its memory; frees it if it exceeds the capacity."""
        kind, dtype, device, group, _ = key
        bucket = self._buckets[key]
        rows = bucket.rows[:, : bucket.numel].unbind()
        try:
            if bucket.numel and kind == "all_reduce":
                collectives.all_reduce(rows[0], group)
            elif bucket.numel:
                collectives.reduce_scatter(rows[dist.get_rank(group)], rows, group)
        except BaseException as error:
            # Also after an interrupt, because it is unknown which sums are complete.
            failed = (
                f"{kind} of {sum(row.nbytes for row in rows)} bytes of {dtype} on {device} over "
                f"ranks {dist.get_process_group_ranks(group)} failed: {in_words(error)}"
            )
            self._broken = (
                f"this Bucketer is of no use since a collective failed: release() it, make new "
                f"groups and a new Bucketer: {failed}"
            )
            if not isinstance(error, Exception):
                raise
            raise ReduceError(failed) from error
        self._sums += [(slot.clone(), callback) for slot, callback in bucket.calls]
        bucket.calls, bucket.numel = [], 0
        if bucket.rows.nbytes > self.capacity_bytes:
            del self._buckets[key]

    def _run_callbacks(self) -> None:
        if self._is_running:
            return  # a callback has added inputs: the loop that runs it goes on with them
        self._is_running = True
        try:
            while self._sums:
                total, callback = self._sums.popleft()
                callback(total)
        finally:
            self._is_running = False

    def _refuse_broken(self) -> None:
        if self._broken:
            raise ReduceError(self._broken)


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
