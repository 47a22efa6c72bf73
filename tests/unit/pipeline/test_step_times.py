"""The times of a step: two clocks that differ, and the slowest of several pipelines."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pipegrad import Topology
from pipegrad.pipeline import programs
from pipegrad.pipeline.programs import StepTimes
from pipegrad.schedules import build, lower
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.program import Item, Op, Program

CPU = torch.device("cpu")


def topology(rank: int, pipeline: int = 2, data: int = 1) -> Topology:
    return Topology.build(
        axes=(("pp", pipeline), ("dp", data)), rank=rank, stage_to_rank=tuple(range(pipeline))
    )


def program(num_ranks: int = 2, num_microbatches: int = 2) -> Program:
    return lower(build("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches))


class Clock:
    """A clock that shows what it is set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def run(times: StepTimes, made: Program, rank: int, script: dict[str, tuple[float, float]]) -> None:
    """Runs the items of a rank; the script has when those that it names begin and end."""
    clock = Clock()

    def take(item: Item) -> None:
        words = " ".join(made.words(item).split()).removeprefix("compute ")
        begin, end = script.get(words, (clock.now, clock.now))

        def method(_which: int, _microbatch: int) -> None:
            clock.now = float(end)

        clock.now = float(begin)
        times.watched(item, method)(item.which, item.microbatch)

    with mock.patch.object(programs, "time", clock):
        for item in made.decoded(rank):
            take(item)


def test_a_hop_is_what_two_clocks_say_together() -> None:
    made = program()
    sender, receiver = (StepTimes(made, topology(rank), CPU) for rank in range(2))
    # Values take 5 there and 7 back. The receiver's clock is 1000 ahead.
    run(sender, made, 0, {
        "send x of 0F0 to rank 1": (10, 10),
        "wait-receive gradient of x of 0F0 from rank 1": (11, 40),
        "send x of 0F1 to rank 1": (12, 12),
        "wait-receive gradient of x of 0F1 from rank 1": (50, 90),
    })  # fmt: skip
    run(receiver, made, 1, {
        "wait-receive x of 0F0 from rank 0": (1001, 1015),
        "send gradient of x of 0F0 to rank 0": (1033, 1033),
        # The second value waited for the compute of the first one: that is no transfer.
        "wait-receive x of 0F1 from rank 0": (1034, 1034),
        "send gradient of x of 0F1 to rank 0": (1060, 1060),
    })  # fmt: skip
    sums = [a + b for a, b in zip(sender.numbers(), receiver.numbers(), strict=True)]
    assert sender.times(sums).hop_seconds == (6.0,)


def test_computes_are_medians_and_belong_to_their_rank() -> None:
    made = program(num_microbatches=3)
    times = StepTimes(made, topology(1), CPU)
    run(times, made, 1, {"1F0": (0, 99)})
    times.begin()  # with nothing of the step before
    assert times.numbers() == [0.0] * times.size
    script = {f"1F{m}": (10.0 * m, 10.0 * m + s) for m, s in enumerate((9, 2, 3))}
    script |= {f"1B{m}": (10.0 * m + 5, 10.0 * m + 5 + s) for m, s in enumerate((8, 4, 1))}
    run(times, made, 1, script)
    assert times.times(times.numbers()) == Times((0, 3), (0, 4), (0,), (0, 0))


def test_the_weights_part_of_a_backward_has_a_time_of_its_own() -> None:
    made = lower(build("zb-h1", num_ranks=2, num_microbatches=3))
    times = StepTimes(made, topology(0), CPU)
    script = {f"0F{m}": (10.0 * m, 10.0 * m + s) for m, s in enumerate((9, 2, 3))}
    script |= {f"0I{m}": (10.0 * m + 5, 10.0 * m + 5 + s) for m, s in enumerate((8, 4, 1))}
    script |= {f"0W{m}": (10.0 * m + 5, 10.0 * m + 5 + s) for m, s in enumerate((7, 6, 2))}

    run(times, made, 0, script)

    assert times.times(times.numbers()) == Times((3, 0), (4 + 6, 0), (0,), (6, 0))


def test_ranks_write_numbers_of_their_own_and_the_slowest_pipeline_counts() -> None:
    made = program(num_ranks=3, num_microbatches=8)
    layouts = [StepTimes(made, topology(rank, 3, 2), CPU) for rank in range(6)]
    found = list[list[float]]()
    for global_rank, times in enumerate(layouts):
        rank, pipeline = divmod(global_rank, 2)
        forward, backward, hop = 2.0 + rank - pipeline, 4.0 - rank + 2 * pipeline, 5.0 + pipeline
        script = dict[str, tuple[float, float]]()
        for m in range(8):
            script[f"{rank}F{m}"], script[f"{rank}B{m}"] = (0, forward), (0, backward)
            there, back = f"x of {rank}F{m}", f"gradient of x of {rank}F{m}"
            script[f"send {there} to rank {rank + 1}"] = (0, 0)
            script[f"wait-receive {back} from rank {rank + 1}"] = (1, 2 * hop + 7)
            there, back = f"x of {rank - 1}F{m}", f"gradient of x of {rank - 1}F{m}"
            script[f"wait-receive {there} from rank {rank - 1}"] = (100, 101)
            script[f"send {back} to rank {rank - 1}"] = (108, 108)
        run(times, made, rank, script)
        found.append(times.numbers())
    written = [sum(bool(rank[i]) for rank in found) for i in range(layouts[0].size)]
    # A forward and a backward of six ranks, no W. Two ranks write the hops of three microbatches.
    assert [written.count(n) for n in (1, 2)] == [12, 2 * 3 * 2]
    sums = [sum(column) for column in zip(*found, strict=True)]
    slowest = Times((2, 3, 4), (6, 5, 4), (6, 6), (0, 0, 0))
    assert {layout.times(sums) for layout in layouts} == {slowest}


@pytest.mark.parametrize(("num_microbatches", "expected"), [(1, 1), (2, 2), (64, 3)])
def test_few_microbatches_measure_hops(num_microbatches: int, expected: int) -> None:
    layout = StepTimes(program(num_microbatches=num_microbatches), topology(0), CPU)
    assert layout.shape == (1, 3 + expected, 2)
    one = program(num_ranks=1, num_microbatches=num_microbatches)
    alone = StepTimes(one, topology(0, pipeline=1), CPU)  # one rank has no hops
    numbers = [1.0, 2.0, 0.5] + [0.0] * expected
    assert alone.times(numbers) == Times((1.0,), (2.0,), (), (0.5,))


def test_other_items_are_left_as_they_are() -> None:
    made = program(num_ranks=3, num_microbatches=6)
    times = StepTimes(made, topology(1, pipeline=3), CPU)

    def method(_which: int, _microbatch: int) -> None: ...

    for item in made.decoded(1):
        crosses = item.op in (Op.SEND, Op.WAIT_RECEIVE) and item.microbatch < 3
        is_watched = times.watched(item, method) is not method
        assert is_watched is (item.op is Op.COMPUTE or crosses), made.words(item)
