"""Executor: one rank of a Program, item by item. It interprets, and decides nothing.

[Note: times of a step] Clocks of two ranks differ, and no clock is read on both ends of a message.
Still a hop can be measured without a message of its own. Rank s sends a value at t1, and rank s+1
has it at t2. Rank s+1 sends the gradient back at t3, and rank s has it at t4. What both transfers
took is::

    (t4 - t1) - (t3 - t2)

Each bracket has times of one clock. So rank s adds its own to a number that all ranks sum anyway,
beside the loss, and rank s+1 subtracts its own. A message that waits, for the one before it or for
a rank that still computes, makes the difference larger, but nothing makes it smaller. So a hop
takes what the smallest difference of the first microbatches says: rank s+1 is idle before the
first of them, and rank s before its gradient.

Where the device has streams, times are those of events on the current stream, and the host waits
for the device at the end of a step.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.profiler import record_function

from pipegrad.comm import sync_points
from pipegrad.comm.activity import Details
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.interop.private import is_profiled
from pipegrad.pipeline.compute import Compute, Method
from pipegrad.pipeline.loss import LossTerms
from pipegrad.pipeline.split_backward.weights import WeightGradients
from pipegrad.pipeline.transfers.transfers import Transfers
from pipegrad.pipeline.values import Values
from pipegrad.schedules import Action
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.program import Item, Op, Program
from pipegrad.schedules.schedule import Kind
from pipegrad.topology import Topology

_Call = tuple[Method, int, int]  # and its arguments: what the item means, and a microbatch
_Keep = Callable[[object], object]  # of a point in time
_COLUMNS = 24  # of a grid
# An item that waits, and the end of its channel that it waits for.
_AWAITED: Mapping[Op, str] = {Op.WAIT_RECEIVE: "source", Op.RELEASE: "target"}
_SAMPLES = 3  # microbatches that measure hops
_Stamp = float | torch.Event
_FORWARD, _BACKWARD, _WEIGHTS = _ROWS = 0, 1, 2  # of a rank's computes; W is a part of a backward


class Executor:
    """Runs the items of one rank.

    Args:
        program: What all ranks do.
        topology: As this rank sees it; its pipelines run the Program.
        values: Receives, sends and sums values and gradients.
        compute: Runs forwards and backwards.
        transfers: Posts receives, and frees what was sent.
        sync: The gradient layer. It learns of first uses, last backwards and final stages.
        weights: The weights' gradients that I leaves to W.
        sharded: The stages whose parameters FSDP2 swaps. It learns of last backwards.
        times: Watches what takes time; None if nothing does.
    """

    def __init__(
        self,
        program: Program,
        topology: Topology,
        *,
        values: Values,
        compute: Compute,
        transfers: Transfers,
        sync: GradientSync,
        weights: WeightGradients,
        sharded: ShardedStages,
        times: StepTimes | None = None,
    ) -> None:
        self._program = program
        self._topology = topology
        self._rank = topology.coordinate(topology.pipeline)
        self._values = values
        self._compute = compute
        self._transfers = transfers
        self._sync = sync
        self._sharded = sharded
        # None of these is a method of this object. It would hold itself, and the threads of a
        # Scheduler that nobody holds any more would wait for the garbage collector.
        methods: dict[Op, Method] = {
            Op.FIRST_USE: partial(_first_use, sync),
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: values.receive,
            Op.JOIN: values.join,
            Op.LAST_BACKWARD: partial(_last_backward, sync, sharded),
            Op.SEND: values.send,
            Op.RELEASE: transfers.release,
            Op.FINAL: partial(_become_final, sync),
            Op.INPUTS_FINAL: weights.inputs_are_final,
            Op.SHARED_WEIGHTS: weights.compute_shared,
        }
        self._calls = list[_Call]()  # of all items, so that a step looks nothing up
        for item in program.called(self._rank):
            which = item.which
            if item.op is Op.COMPUTE:
                which, kind, _ = program.action(item)
                method = compute.method_of(which, kind)
            else:
                method = methods[item.op]
            if times is not None:
                method = times.watched(item, method)
            self._calls.append((method, which, item.microbatch))
        self._position = 0  # of the next call
        self.num_different: int | Tensor = 0  # second forwards of the last step: see `Recompute`

    @property
    def is_in_doubt(self) -> bool:
        """Whether an interrupt came while a transfer began; see [Note: interrupts]."""
        return self._transfers.is_in_doubt

    def rewind(self) -> None:
        """Goes back to the first item.

        Called before anything of a step can fail: `finish_transfers` then makes all transfers of
        a step whose first item never ran.
        """
        self._position = 0
        self._transfers.ends.grow()

    def run(
        self,
        inputs: Mapping[str, Sequence[object]],
        targets: Sequence[object] | None,
        terms: LossTerms,
        *,
        keeps_outputs: bool,
    ) -> list[tuple[Tensor, ...]]:
        """Runs all items; returns the outputs of the last stage, if they are kept.

        If it raises, call `finish_transfers`.

        Args:
            inputs: External name -> its value for each microbatch.
            targets: For each microbatch, on the rank of the last stage.
            terms: Collects the losses of this rank.
            keeps_outputs: Whether to keep what the last stage makes.

        Sync: all on the current stream.
        """
        # An interrupt may have come while the last step was cleared up. So tables are emptied when
        # a step begins, too.
        self._forget()
        self._values.begin(inputs, targets)
        self._compute.begin(targets, terms, keeps_outputs=keeps_outputs)
        if self._program.forward_only:
            self._sharded.begin_evaluation()
        else:
            self._sharded.begin()
        try:
            for method, which, microbatch in self._watched_calls():
                method(which, microbatch)
                self._position += 1
        except BaseException as error:
            self._add_location(error)
            raise
        # The list is taken first: `forget` makes a new one.
        outputs = self._compute.outputs
        self.num_different = self._compute.num_different
        self._forget()
        return outputs

    def _watched_calls(self) -> Sequence[_Call]:
        """Returns the calls of a step, inside of what a profiler and a recorder want of each."""
        calls: Sequence[_Call] = self._calls
        if is_profiled():
            names = [
                f"pipegrad {self._program.action(item)}" if item.op is Op.COMPUTE else ""
                for item in self._items()
            ]
            calls = [
                (partial(_ranged, name, call[0]), *call[1:]) if name else call
                for name, call in zip(names, calls, strict=True)
            ]
        recorder = None if self._program.forward_only else self._sync.tape.recorder
        if recorder is not None:
            is_kept, keep = recorder.items()
            calls = [
                (partial(_recorded, call[0], keep, recorder.now), *call[1:]) if kept else call
                for kept, call in zip(is_kept, calls, strict=True)
            ]
            keep(recorder.now())
        return calls

    def finish_transfers(self) -> None:
        """Makes the transfers that are left of a failed step, without values.

        Other ranks still wait for messages of this rank, and send their own. After this, each of
        these transfers ends on any backend, and the next step begins with the same messages on
        both ends of every edge.
        """
        transfers, values = self._transfers, self._values
        methods: dict[Op, Method] = {
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: values.receive_and_drop,
            Op.SEND: transfers.send_failed,
            Op.RELEASE: transfers.release,
        }
        transfers.note_ended()
        # Transfers are made in the order of the program. It is proven that ranks which keep this
        # order never wait for each other in a circle.
        for op, which, microbatch in islice(self._items(), self._position, None):
            if op in methods:
                with contextlib.suppress(Exception):  # the first error is the one to raise
                    methods[op](which, microbatch)
        # The buffers of the failed step were neither read nor released.
        values.give_back_buffers()
        self._forget()

    def _forget(self) -> None:
        """Lets go of everything of a step."""
        self._values.forget()
        self._compute.forget()
        self._transfers.forget()

    # How far it is.

    def position(self) -> int:
        """Returns the number of the item that runs, of those that are called."""
        return self._position

    def details(self) -> Details:
        """Returns what this rank is at; any thread may call it."""
        topology, position = self._topology, self._position
        begun = list(islice(self._items(), position + 1))
        actions = [self._program.action(item) for item in begun if item.op is Op.COMPUTE]
        item = begun[position] if position < len(begun) else None
        number = next(i for i, ranks in enumerate(topology.pipelines) if topology.rank in ranks)
        return Details(
            "all items of the step are done" if item is None else self._words(item),
            self._waits_for(item),
            (number, self._rank),
            str(actions[-1]) if actions else "",
        )

    def _items(self) -> Iterator[Item]:
        """Yields what the calls were made of."""
        return self._program.called(self._rank)

    def _words(self, item: Item) -> str:
        """Returns an item as text, with global ranks; a Program has ranks of a pipeline."""
        words = " ".join(self._program.words(item).split())
        return re.sub(
            r"(?<=(?:om|to) rank )\d+$", lambda rank: str(self._global(int(rank[0]))), words
        )

    def _waits_for(self, item: Item | None) -> tuple[int, ...]:
        if item is None or item.op not in _AWAITED:
            return ()
        channel = self._program.channels[item.which]
        return (self._global(getattr(channel, _AWAITED[item.op])),)

    def _global(self, rank: int) -> int:
        """Returns the global rank of a rank of this pipeline."""
        return self._topology.ranks_along(self._topology.pipeline)[rank]

    def _add_location(self, error: BaseException) -> None:
        """Adds the failed action and this rank to an error's notes."""
        for item in islice(self._items(), self._position, self._position + 1):
            if item.op is Op.COMPUTE:
                error.add_note(f"In {self._program.action(item)} on pipeline rank {self._rank}.")
            elif item.op is Op.SHARED_WEIGHTS:
                where = f"shared weights of stage {item.which}"
                error.add_note(f"In {where} on pipeline rank {self._rank}.")


def _first_use(sync: GradientSync, stage: int, _microbatch: int) -> None:
    sync.stage_first_use(stage)


def _last_backward(
    sync: GradientSync, sharded: ShardedStages, stage: int, _microbatch: int
) -> None:
    sync.stage_last_backward(stage)
    sharded.last_backward(stage)


def _become_final(sync: GradientSync, stage: int, _microbatch: int) -> None:
    sync.stage_final(stage)


def _ranged(name: str, compute: Method, stage: int, microbatch: int) -> None:
    """Computes inside a range that profilers see: ``pipegrad 2F0``."""
    with record_function(name):
        compute(stage, microbatch)


def _recorded(
    method: Method, keep: _Keep, now: Callable[[], object], which: int, microbatch: int
) -> None:
    """Runs an item, and keeps the time of its end."""
    method(which, microbatch)
    keep(now())


def drawn(program: Program, topology: Topology, pipeline: int, marks: Mapping[int, str]) -> str:
    """Returns the grid of a pipeline, with the last action of each rank marked.

    Args:
        program: What its ranks do.
        topology: Of all ranks.
        pipeline: Its number in the topology; rows have the global ranks of this one.
        marks: The action of a pipeline rank as text; "" if it has not begun one.
    """
    schedule, words = program.schedule, {mark for mark in marks.values() if mark}
    actions = [a for actions in schedule.actions for a in actions if str(a) in words]
    ranks = topology.pipelines[pipeline]
    rows = enumerate(schedule.around(actions, _COLUMNS).splitlines())
    grid = "\n".join(row.replace(f"rank {i} ", f"rank {ranks[i]} ", 1) for i, row in rows)
    return f"schedule {schedule.name}; >{Action(0, 'F', 0)}< is a rank's last action:\n{grid}"


class StepTimes:
    """How long the computes of a rank take, and the transfers between neighbours.

    Each rank has a place for its numbers among those that all ranks sum.

    Args:
        program: What all ranks do.
        topology: As this rank sees it.
        device: Where the rank computes.

    Attributes:
        num_samples: Microbatches that measure hops.
        size: How many numbers there are of all ranks.
    """

    def __init__(self, program: Program, topology: Topology, device: torch.device) -> None:
        self._program = program
        self._device = device
        self._rank = topology.coordinate(topology.pipeline)
        self._num_ranks = topology.size(topology.pipeline)
        self.num_samples = min(_SAMPLES, program.schedule.num_microbatches)
        self._of_pipeline = len(_ROWS) * self._num_ranks + self.num_samples * (self._num_ranks - 1)
        pipelines = topology.pipelines
        self.size = len(pipelines) * self._of_pipeline
        ranks = topology.ranks_along(topology.pipeline)
        self._first = pipelines.index(ranks) * self._of_pipeline  # place of this pipeline
        self.begin()

    def begin(self) -> None:
        """Forgets what was seen; called when a step begins."""
        self._computes = defaultdict[tuple[int, Kind], list[tuple[_Stamp, _Stamp]]](list)
        # By the direction in which a transfer goes, whether this rank sends it, and microbatch.
        self._transfers: dict[tuple[str, bool, int], _Stamp] = {}

    def watched(self, item: Item, method: Method) -> Method:
        """Returns the method of an item, watched if it says something of time."""
        if item.op is Op.COMPUTE:
            stage, kind, _ = self._program.action(item)
            return partial(self._compute, method, (stage, kind))
        if item.microbatch < self.num_samples and item.op in (Op.SEND, Op.WAIT_RECEIVE):
            channel = self._program.channels[item.which]
            if channel.target - channel.source == (1 if channel.kind == "F" else -1):
                watch = self._send if item.op is Op.SEND else self._receive
                return partial(watch, method, channel.kind)
        return method

    def _compute(
        self, method: Method, action: tuple[int, Kind], which: int, microbatch: int
    ) -> None:
        begin = self._now()
        method(which, microbatch)
        self._computes[action].append((begin, self._now()))

    def _send(self, method: Method, kind: str, which: int, microbatch: int) -> None:
        # Several values may go to the neighbour. They take from the first send to the last arrival.
        self._transfers.setdefault((kind, True, microbatch), self._now())
        method(which, microbatch)

    def _receive(self, method: Method, kind: str, which: int, microbatch: int) -> None:
        method(which, microbatch)
        self._transfers[kind, False, microbatch] = self._now()

    def _now(self) -> _Stamp:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = sync_points.timing_event(self._device)
        sync_points.record_time(event, self._device)
        return event

    def numbers(self) -> list[float]:
        """Returns what this rank adds to the numbers of all ranks.

        Sync: the host waits for the device.
        """
        sync_points.finish_device(self._device)
        numbers = [0.0] * self.size
        for (_, kind), stamps in self._computes.items():
            row = _FORWARD if kind == "F" else _BACKWARD
            median = statistics.median(_seconds(begin, end) for begin, end in stamps)
            numbers[self.place_of_compute(row)] += median
            if kind == "W":
                numbers[self.place_of_compute(_WEIGHTS)] += median
        marks = self._transfers
        for microbatch in range(self.num_samples):
            out, back = ("F", True, microbatch), ("B", False, microbatch)
            if out in marks and back in marks:  # t1 and t4
                seconds = _seconds(marks[out], marks[back])
                numbers[self.place_of_hop(microbatch, self._rank)] = seconds
            out, back = ("F", False, microbatch), ("B", True, microbatch)
            if out in marks and back in marks:  # t2 and t3
                seconds = _seconds(marks[out], marks[back])
                numbers[self.place_of_hop(microbatch, self._rank - 1)] = -seconds
        return numbers

    def place_of_compute(self, row: int) -> int:
        """Returns where this rank has its forwards, backwards or W."""
        return self._first + row * self._num_ranks + self._rank

    def place_of_hop(self, microbatch: int, hop: int) -> int:
        """Returns where a hop of this pipeline has a microbatch."""
        hops = self._first + len(_ROWS) * self._num_ranks
        return hops + microbatch * (self._num_ranks - 1) + hop

    def times(self, numbers: Sequence[float]) -> Times:
        """Returns what the sums of all ranks say, the same on every rank."""
        size, hops = self._num_ranks, self._num_ranks - 1
        pipelines = list[list[Sequence[float]]]()
        for begin in range(0, self.size, self._of_pipeline):
            own = numbers[begin : begin + self._of_pipeline]
            computes = [own[row * size : (row + 1) * size] for row in _ROWS]
            both_ways = own[len(_ROWS) * size :]
            # A clock that is read twice at once may go backwards by a rounding error.
            hop_seconds = [max(0.0, min(both_ways[hop::hops]) / 2) for hop in range(hops)]
            pipelines.append([*computes, hop_seconds])
        forwards, backwards, weights, slowest_hops = (
            tuple(map(max, zip(*column, strict=True))) for column in zip(*pipelines, strict=True)
        )
        return Times(forwards, backwards, slowest_hops, weights)


def _seconds(begin: _Stamp, end: _Stamp) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3
