"""OrderChecker: what it finds, what it lets pass, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.cuda import _gpu_trace

from pipegrad.comm.comm_stream import CommStream
from pipegrad.errors import OrderError
from pipegrad.gradients.bucket_memory import RELEASED, RESET_FREE, WRITTEN, FlatBuffer
from pipegrad.testing import OrderChecker
from pipegrad.testing.ordering.clocks import Access, HappensBefore, Kind
from pipegrad.testing.ordering.trace import Memories, following, spans
from tests.support.ordering.producers import CPU
from tests.support.ordering.replay import Recording

# The races that others have shipped, on our primitives. Each is a function of a checker that takes
# the right turn, or, as it was shipped, the wrong one.


def halve(tensor: torch.Tensor) -> None:
    tensor.div_(2)


class Bucket:
    """A bucket of two slots, reduced in a comm stream; the host runs ahead of it."""

    def __init__(self, checker: OrderChecker) -> None:
        self.flat = FlatBuffer(torch.zeros(8))
        self.comm_stream = CommStream("reduction", CPU, threaded=False)
        self.sum = torch.zeros(8)
        self._checker = checker

    def write(self, slot: int, stream: str, *, wait: bool = True) -> torch.Event:
        with self._checker.on(stream):
            gradient = torch.full((4,), slot + 1.0)
            if wait:
                self.flat.acquire(RESET_FREE)
            self.flat.buffer[4 * slot : 4 * slot + 4].copy_(gradient)
            event = WRITTEN(self.flat.device)
        assert event is not None
        return event

    def reduce(self, after: list[torch.Event]) -> None:
        self.comm_stream.submit(lambda: halve(self.flat.buffer), after)

    def finish(self) -> None:
        self.comm_stream.wait(1)
        self.sum.add_(self.flat.buffer)
        self.flat.release(RELEASED)


def two_producers(checker: OrderChecker, right: bool) -> None:
    """DeepSpeed#8061, and Apex: the reduction waits for the stream that launches it alone."""
    bucket = Bucket(checker)
    first, last = bucket.write(0, "s1"), bucket.write(1, "s2")
    bucket.reduce([first, last] if right else [last])
    bucket.finish()


def refilled(checker: OrderChecker, right: bool) -> None:
    """DeepSpeed#5545, #8366: another producer refills the buffer while it is being reduced.

    As merged in #8080: the stream that launches waits for the reduction, the others do not.
    """
    bucket = Bucket(checker)
    bucket.reduce([bucket.write(0, "s1"), bucket.write(1, "s1")])
    with checker.on("s1"):
        bucket.comm_stream.wait(1)
        bucket.flat.release(RELEASED)
    bucket.reduce([bucket.write(0, "s1"), bucket.write(1, "s2", wait=right)])
    bucket.finish()


def extra_large(checker: OrderChecker, right: bool) -> None:
    """The race that #8080 opened: a gradient too large for the bucket has no producer."""
    bucket, large = Bucket(checker), torch.zeros(16)
    made = checker.record(CPU)
    written = [bucket.write(0, "s1")]
    with checker.on("s2"):
        checker.wait(made, CPU)
        large.add_(3)
        event = checker.record(CPU)
    with checker.on("s1"):  # a later hook flushes
        after = [*written, event] if right else written
        bucket.comm_stream.submit(lambda: halve(large), after)  # type: ignore[arg-type]
    bucket.comm_stream.wait(1)
    bucket.sum.add_(large[:8])


def dropped(checker: OrderChecker, right: bool) -> None:
    """DeepSpeed#7965: a gradient is dropped on the host right after its reduction is launched."""
    bucket = Bucket(checker)
    gradients = [torch.ones(16)]
    event = checker.record(CPU)

    def reduce() -> None:
        gradients[0].div_(2)
        if not right:
            gradients.clear()  # on the host: the comm stream may be still at it

    ticket = bucket.comm_stream.submit(reduce, [event])  # type: ignore[list-item]
    torch.ones(16)  # the next gradient, perhaps in the same memory
    ticket.wait(1)
    gradients.clear()


def lazily_zeroed(checker: OrderChecker, right: bool) -> None:
    """Apex: the first hook zeroes the bucket on its stream, another one adds to it on its own."""
    bucket = torch.empty(8)
    allocated = checker.record(CPU)
    with checker.on("s1"):
        checker.wait(allocated, CPU)
        bucket.zero_()
        zeroed = checker.record(CPU)
        bucket[:4].add_(1)
    with checker.on("s2"):
        checker.wait(zeroed if right else allocated, CPU)
        bucket[4:].add_(2)


def not_waited_for(checker: OrderChecker, right: bool) -> None:
    """The optimizer reads what a copy-back is still writing."""
    bucket = Bucket(checker)
    bucket.reduce([bucket.write(0, "s1"), bucket.write(1, "s2")])
    if right:
        bucket.comm_stream.wait(1)
    bucket.sum.add_(bucket.flat.buffer)


KNOWN: dict[Callable[[OrderChecker, bool], None], str] = {
    two_producers: "write not ordered after write",
    refilled: "write not ordered after write",
    extra_large: "write not ordered after write",
    dropped: "freed and used again while in flight",
    lazily_zeroed: "write not ordered after write",
    not_waited_for: "read not ordered after write",
}


@pytest.mark.parametrize("race", KNOWN, ids=lambda race: race.__name__)
def test_known_races_are_found_and_an_adversary_gets_wrong_numbers_out_of_them(
    race: Callable[[OrderChecker, bool], None],
) -> None:
    with OrderChecker() as checker:
        race(checker, True)
    assert checker.violations == []
    with OrderChecker() as checker:
        race(checker, False)
    assert KNOWN[race] in {violation.hazard for violation in checker.violations}
    if race is not dropped:
        orders, wrong_orders = drained(race, True)
        assert (orders > 0, wrong_orders) == (True, 0)
        orders, wrong_orders = drained(race, False)
        assert 0 < wrong_orders < orders  # luck decides


def drained(race: Callable[[OrderChecker, bool], None], right: bool) -> tuple[int, int]:
    with Recording() as recording:
        race(recording, right)
    return recording.differing(recording.orders())


# Bytes.


def test_neighbours_in_a_bucket_do_not_race_and_all_slots_are_seen() -> None:
    """Torch's sanitizer compares addresses: of four producers it sees the first slot's alone."""
    for racing in range(4):
        with OrderChecker() as checker:
            bucket = torch.zeros(8)
            made = checker.record(CPU)
            events = []
            for slot in range(4):
                with checker.on(f"s{slot}"):
                    checker.wait(made, CPU)
                    bucket[2 * slot : 2 * slot + 2].fill_(1)
                    events.append(checker.record(CPU))
            for slot, event in enumerate(events):
                if slot != racing:
                    checker.wait(event, CPU)
            bucket.mul_(2)
        assert [v.span for v in checker.violations] == [(8 * racing, 8 * racing + 8)]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda t: t, ((0, 96),)),
        (lambda t: t[1], ((24, 48),)),
        (lambda t: t.t(), ((0, 96),)),
        (lambda t: t[:, 1:3], ((4, 12), (28, 36), (52, 60), (76, 84))),
        (lambda t: t[::2], ((0, 24), (48, 72))),
        (lambda t: t[0, 0].expand(5), ((0, 4),)),
        (lambda t: t[:0], ()),
        (lambda t: t.as_strided((2, 3), (1, 1)), ((0, 16),)),
    ],
)
def test_spans_are_exact(
    view: Callable[[torch.Tensor], torch.Tensor], expected: tuple[tuple[int, int], ...]
) -> None:
    assert spans(view(torch.zeros(4, 6))) == expected


def test_spans_of_very_many_rows_are_their_bounds() -> None:
    assert spans(torch.zeros(2000, 2)[:, 0]) == ((0, 1999 * 8 + 4),)


# Edges.


def test_the_host_orders_what_it_has_waited_for() -> None:
    with OrderChecker() as checker:
        tensor = torch.zeros(2)
        tensor[0].item()
        with checker.on("side"):
            tensor.add_(1)
        assert checker.violations == []
        tensor.add_(1)
    assert [v.hazard for v in checker.violations] == [
        "write not ordered after write",  # add_ reads nothing that it does not write
    ]


def test_a_memory_that_is_used_again_is_a_new_one() -> None:
    with OrderChecker() as checker:
        for stream in ("a", "b"):
            with checker.on(stream):
                torch.zeros(1000).add_(1)
    assert checker.violations == []


def test_what_is_freed_may_be_in_use_until_somebody_gets_it() -> None:
    """A caching allocator gives it to the stream that had it, which may have waited meanwhile."""
    for waits in (True, False):
        with OrderChecker() as checker:
            comm_stream = CommStream("comm_stream", CPU, threaded=False)
            tensor = torch.ones(4)
            event = checker.record(CPU)
            comm_stream.submit(partial(halve, tensor), [event])  # type: ignore[list-item]
            del tensor
            if waits:
                comm_stream.wait(1)
            assert checker.violations == []
            torch.ones(4)
            comm_stream.close()
        assert len(checker.violations) == (not waits)


def test_an_access_forgets_only_what_it_stands_for() -> None:
    def access(strand: str, kind: Kind, start: int, end: int) -> Access:
        return Access(strand, before.tick(strand), kind, "", "", "m", ((start, end),))

    before = HappensBefore()
    assert before.access(access("a", Kind.WRITE, 0, 8)) == []
    assert before.access(access("a", Kind.WRITE, 0, 4)) == []
    found = before.access(access("b", Kind.READ, 4, 8))
    assert [(v.first.tick, v.span) for v in found] == [(1, (4, 8))]
    before.join("c", before.clock("a"))
    assert before.access(access("c", Kind.READ, 0, 8)) == []
    found = before.access(access("a", Kind.WRITE, 0, 8))
    assert sorted(v.first.strand for v in found) == ["b", "c"]


def test_a_violation_names_both_accesses_their_call_sites_and_the_wait() -> None:
    with OrderChecker(raises=True) as checker:
        bucket = torch.zeros(4)
        made = checker.record(CPU)
        with checker.on("producer"):
            checker.wait(made, CPU)
            bucket[2:].fill_(1)
        with pytest.raises(OrderError) as caught:
            bucket.mul_(2)
    told = str(caught.value)
    assert "write not ordered after write: bytes 8 to 16 of memory 1, met as float32 (4,)" in told
    assert told.count(f"{Path(__file__).name}:") == 2
    assert "aten.fill_.Scalar (write) on 'producer'" in told
    assert "aten.mul_.Tensor (write) on 'compute'" in told
    assert "'compute' must wait for an event that 'producer' records" in told


def test_real_events_of_cuda_are_followed() -> None:
    """Fires torch's callbacks by hand: they are what a device's events come by."""
    checker = OrderChecker(virtual_streams=False)

    def clock(stream: int) -> object:
        return checker.recorded(f"stream {stream:#x}")

    with following(checker):
        checker.waited("stream 0x10", {"x": 1})
        _gpu_trace.EventRecordCallbacks.fire_callbacks(7, 16)
        assert clock(32) == {}
        _gpu_trace.EventWaitCallbacks.fire_callbacks(7, 32)
        assert clock(32) == {"x": 1}
        assert clock(48) == {}
        _gpu_trace.EventSynchronizationCallbacks.fire_callbacks(7)
        assert clock(48) == {"x": 1}  # the host waited, so all that it launches is behind
        _gpu_trace.EventDeletionCallbacks.fire_callbacks(7)
    _gpu_trace.EventRecordCallbacks.fire_callbacks(7, 16)  # nobody listens any more


def test_memory_that_another_storage_has_already_is_another_one() -> None:
    """torch gives memory back before it says so: memory of a comm stream was a false alarm."""
    freed: list[str] = []
    memories, tensor = Memories(freed.append), torch.zeros(2)
    first = memories.name(tensor)
    other = torch.from_numpy(tensor.numpy())  # another storage at the same address
    assert other.data_ptr() == tensor.data_ptr()
    assert memories.name(other) != first == memories.name(tensor)
