"""Executor: one rank of a Program, item by item. It interprets, and decides nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from torch import Tensor
from torch.profiler import record_function

from pipegrad.comm.activity import Details, Recorder
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.interop.private import is_profiled
from pipegrad.pipeline.cells import Compute, Method
from pipegrad.pipeline.loss_message import LossTerms
from pipegrad.pipeline.programs import StepTimes
from pipegrad.pipeline.transfers import Transfers
from pipegrad.pipeline.values import Values
from pipegrad.pipeline.weight_gradients import WeightGradients
from pipegrad.schedules import Action
from pipegrad.schedules.program.program import Item, Op, Program
from pipegrad.topology import Topology

_Call = tuple[Method, tuple[int, ...]]  # and its arguments
_Keep = Callable[[object], object]  # of a point in time
_COLUMNS = 24  # of a grid
# An item that waits, and the end of its channel that it waits for.
_AWAITED: Mapping[Op, str] = {Op.WAIT_RECEIVE: "source", Op.RELEASE: "target"}


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
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: values.receive,
            Op.JOIN: values.join,
            Op.SEND: values.send,
            Op.RELEASE: transfers.release,
        }
        of_stages: dict[Op, Method] = {
            Op.FIRST_USE: sync.stage_first_use,
            Op.LAST_BACKWARD: sync.stage_last_backward,
            Op.FINAL: sync.stage_final,
            Op.INPUTS_FINAL: weights.inputs_are_final,
            Op.SHARED_WEIGHTS: compute.compute_shared,
        }
        self._calls = list[_Call]()  # of all items, so that a step looks nothing up
        items = list(program.decoded(self._rank))
        last = max((i for i, item in enumerate(items) if item.op is Op.COMPUTE), default=0)
        for index, item in enumerate(items):
            op, which, microbatch = item
            arguments: tuple[int, ...] = which, microbatch
            if op is Op.COMPUTE:
                stage, kind, _ = program.action(item)
                method, arguments = compute.method_of(kind), (stage, microbatch)
            elif op in methods:
                method = methods[op]
                if op is Op.RELEASE:  # behind the last action no receive proves anything
                    arguments = which, microbatch, index < last
            else:
                is_sharded = op is Op.LAST_BACKWARD and which in sharded.stages
                method = sharded.last_backward if is_sharded else of_stages[op]
                arguments = (which,)
            if times is not None:
                method = times.watched(item, method)
            self._calls.append((method, arguments))
        self._position = 0  # of the next call
        self.num_different: int | Tensor = 0  # second forwards of the last step: see `Recompute`

    @property
    def is_in_doubt(self) -> bool:
        """Whether an interrupt came while a transfer began; see [Note: interrupts]."""
        return self._transfers.is_in_doubt

    def rewind(self, step: int) -> None:
        """Goes back to the first item, for a step of a number.

        Called before anything of a step can fail: `finish_transfers` then makes all transfers of
        a step whose first item never ran.
        """
        self._position = 0
        self._transfers.begin(step)

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
        self.forget()
        self._values.begin(inputs, targets)
        self._compute.begin(targets, terms, keeps_outputs=keeps_outputs)
        # FSDP2 must know before the first backward that it is not the last, or it would reduce
        # there.
        if self._sharded.stages:
            self._sharded.begin(forward_only=self._program.forward_only)
        recorder = None if self._program.forward_only else self._sync.tape.recorder
        calls: Sequence[_Call] = self._calls
        try:
            if recorder is not None or is_profiled():
                calls = self._watched_calls(recorder)
            # The position moves behind a call: after an error, `finish_transfers` begins with the
            # item that failed, whose transfer others still wait for.
            for method, arguments in calls:
                method(*arguments)
                self._position += 1
        except BaseException as error:
            self._add_location(error)
            raise
        # A stage may take microbatches in any order.
        outputs = [output for _, output in sorted(self._compute.outputs.items())]
        self.num_different = self._compute.num_different
        self.forget()
        return outputs

    def _watched_calls(self, recorder: Recorder | None) -> Sequence[_Call]:
        """Returns the calls of a step, inside of what a profiler and a recorder want of each."""
        calls: Sequence[_Call] = self._calls
        if is_profiled():
            names = [
                f"pipegrad {self._program.action(item)}" if item.op is Op.COMPUTE else ""
                for item in self._items()
            ]
            calls = [
                (partial(_in_range, name, method), arguments) if name else (method, arguments)
                for name, (method, arguments) in zip(names, calls, strict=True)
            ]
        if recorder is not None:
            due, keep = recorder.items()
            calls = [
                (partial(_recorded, method, keep, recorder.now) if is_due else method, arguments)
                for is_due, (method, arguments) in zip(due, calls, strict=True)
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
        # A receive of gloo can be waited for once. What has ended before the error must not be
        # waited for again: see [Note: interrupts] in `transfers`.
        transfers.record_ended()
        # Transfers are made in the order of the program. It is proven that ranks which keep this
        # order never wait for each other in a circle.
        for op, which, microbatch in islice(self._items(), self._position, None):
            if op in methods:
                # Each transfer is tried, whatever another one raises: the peer of each waits for
                # that one.
                with contextlib.suppress(Exception):  # the first error is the one to raise
                    methods[op](which, microbatch)
        self.forget()

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._values.forget()
        self._compute.forget()

    # How far it is.

    def position(self) -> int:
        """Returns the number of the item that runs, of those that are called."""
        return self._position

    def details(self) -> Details:
        """Returns what this rank is at; any thread may call it."""
        # The position is read once: the thread that runs the step goes on meanwhile, and all words
        # must be of one item.
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
        return self._program.decoded(self._rank)

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


def _in_range(name: str, compute: Method, stage: int, microbatch: int) -> None:
    """Computes inside a range that profilers see: ``pipegrad 2F0``."""
    with record_function(name):
        compute(stage, microbatch)


def _recorded(method: Method, keep: _Keep, now: Callable[[], object], *arguments: int) -> None:
    """Runs an item, and keeps the time of its end."""
    method(*arguments)
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
    rows = enumerate(schedule.marked(actions, _COLUMNS).splitlines())
    grid = "\n".join(row.replace(f"rank {i} ", f"rank {ranks[i]} ", 1) for i, row in rows)
    return f"schedule {schedule.name}; >{Action(0, 'F', 0)}< is a rank's last action:\n{grid}"
