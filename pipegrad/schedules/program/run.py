"""Run: a Program without tensors. Each rank goes as far as it can, and each item is checked.

A send ends when its receive is posted. The first send to a rank meets the first receive from it,
because a message carries no name. If one run ends, all runs end, because no item of a rank depends
on time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import NoReturn

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import (
    KIND_BITS,
    KIND_MASK,
    MICROBATCH_BITS,
    MICROBATCH_MASK,
    OP_BITS,
    OP_MASK,
    Op,
    Program,
    action_index,
    decode,
)
from pipegrad.schedules.schedule import Action

_FORWARD, _FULL, _INPUT, _WEIGHT = range(4)  # kinds, as COMPUTE encodes them
_COMPUTE, _SEND, _WAIT = (int(op) for op in (Op.COMPUTE, Op.SEND, Op.WAIT_RECEIVE))
_STARTS = (int(Op.POST_RECEIVE), _SEND)
# A wait -> the op that starts its transfer, and the complaint if that op is missing.
_WAITS = {
    _WAIT: (int(Op.POST_RECEIVE), "waits for a receive that is not posted"),
    int(Op.RELEASE): (_SEND, "releases what is not being sent"),
}
# Most items prepare the action after them. These belong to the action before them.
_BEHIND = {int(op) for op in (Op.SEND, Op.FINAL, Op.INPUTS_FINAL, Op.SHARED_WEIGHTS)}
# Items that announce the state of a stage's gradients -> the possible last announcement before.
_BEFORE: dict[Op, tuple[Op | None, ...]] = {
    Op.LAST_BACKWARD: (None,),
    Op.INPUTS_FINAL: (None,),
    Op.SHARED_WEIGHTS: (Op.INPUTS_FINAL,),
    Op.FINAL: (Op.LAST_BACKWARD, Op.INPUTS_FINAL, Op.SHARED_WEIGHTS),
}
# Resources of a rank: live activations, live graphs, receive buffers, receives that are posted.
LIVE, GRAPHS, BUFFERS, IN_FLIGHT = range(4)
_LIVE_BY_KIND, _GRAPHS_BY_KIND = (1, -1, 0, -1), (1, -1, -1, 0)


class RankRun:
    """The items that one rank has done in a run; checks the next one.

    Attributes:
        rank: The pipeline rank.
        items: Its items.
        position: Position of its next item.
        done: The items before that position, encoded.
        newest: Stage -> the microbatch of its last forward.
        most: Maxima of `LIVE`, `GRAPHS`, `BUFFERS` and `IN_FLIGHT`.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.rank, self.items, self.position = rank, program.items[rank], 0
        self.done = set[int]()
        self.newest: dict[int, int] = {}
        self.most = [0, 0, 0, 0]
        self._held = [0, 0, 0, 0]
        self._program, self._links = program, program.rank_links[rank]
        schedule = program.schedule
        self._stages = [s for s, holder in enumerate(schedule.stage_to_rank) if holder == rank]
        # The computes to come, as items encode them, from the last one to the next.
        actions = schedule.actions[rank]
        self._due = [action_index(a) << MICROBATCH_BITS | a.microbatch for a in reversed(actions)]
        self._num_under_way = 0  # transfers that have started, and were not waited for
        self._readers: dict[tuple[int, int], int] = {}  # actions that still read a received value
        self._inputs_left = dict.fromkeys(self._stages, schedule.num_microbatches)
        self._weights_left = dict.fromkeys(self._stages, schedule.num_microbatches)
        self._announced: dict[int, Op] = {}
        self._checks: dict[int, Callable[[int], None]] = {
            _STARTS[0]: self._post,
            _WAIT: self._receive,
            _COMPUTE: self._compute,
            _SEND: self._send,
        }

    def refuse(self, why: str) -> NoReturn:
        """Raises an ItemError of the item at `position`."""
        raise ItemError(self._program, self.rank, min(self.position, len(self.items) - 1), why)

    def do(self, op: int, rest: int) -> None:
        """Does the next item.

        Raises:
            ItemError: If it is wrong.
        """
        code = rest << OP_BITS | op
        if op in _BEFORE:
            self._announce(Op(op), rest >> MICROBATCH_BITS)
        elif code in self.done:
            self.refuse("it comes twice")
        if op in _WAITS:
            start, complaint = _WAITS[op]
            if not self.has(start, rest):
                self.refuse(complaint)
        if op in self._checks:
            self._checks[op](rest)
        self._num_under_way += (op in _STARTS) - (op in _WAITS)
        self.done.add(code)

    def has(self, op: int, rest: int) -> bool:
        """Returns True if the rank has done an item."""
        return rest << OP_BITS | op in self.done

    def _hold(self, what: int, by: int) -> None:
        self._held[what] += by
        self.most[what] = max(self.most[what], self._held[what])

    # Transfers.

    def _post(self, transfer: int) -> None:
        if self._program.channels[transfer >> MICROBATCH_BITS].target != self.rank:
            self.refuse("a transfer of another rank")
        self._hold(BUFFERS, 1)
        self._hold(IN_FLIGHT, 1)

    def _receive(self, transfer: int) -> None:
        self._hold(IN_FLIGHT, -1)
        # A value stays in its buffer until the last backward of this rank has read it. A gradient
        # needs no count, because it has one reader.
        link, kind, _, _ = self._program.channels[transfer >> MICROBATCH_BITS]
        if kind == "F":
            self._readers[link, transfer & MICROBATCH_MASK] = len(self._links.consumers[link])

    def _send(self, transfer: int) -> None:
        microbatch = transfer & MICROBATCH_MASK
        link, kind, rank, _ = self._program.channels[transfer >> MICROBATCH_BITS]
        if rank != self.rank:
            self.refuse("a transfer of another rank")
        # A value must be computed by its producer, a gradient by all consumers on this rank.
        is_value, producer = kind == "F", self._program.links[link].producer
        kinds = (_FORWARD,) if is_value else (_FULL, _INPUT)
        for stage in [producer] if is_value else self._links.consumers[link]:
            if not self._has_computed(stage, microbatch, *kinds):
                self.refuse(f"sent before stage {stage} has computed it")

    # Compute.

    def _compute(self, code: int) -> None:
        index, microbatch = code >> MICROBATCH_BITS, code & MICROBATCH_MASK
        stage, kind = index >> KIND_BITS, index & KIND_MASK
        if not self._due or code != self._due.pop():
            self.refuse("the schedule of this rank has another action here")
        if kind == _FORWARD:
            self._check_forward(stage, microbatch)
            self.newest[stage] = microbatch
        elif kind == _WEIGHT and not self._has_computed(stage, microbatch, _INPUT):
            self.refuse("the input's gradient, I, comes first")
        elif kind != _WEIGHT:
            self._check_backward(stage, microbatch)
        if not self._program.forward_only:
            self._hold(LIVE, _LIVE_BY_KIND[kind])
            self._hold(GRAPHS, _GRAPHS_BY_KIND[kind])
        self._inputs_left[stage] -= kind in (_FULL, _INPUT)
        self._weights_left[stage] -= kind in (_FULL, _WEIGHT)
        self._free_buffers(stage, kind, microbatch)

    def _check_forward(self, stage: int, microbatch: int) -> None:
        if stage in self._program.synced and not self.has(Op.FIRST_USE, stage << MICROBATCH_BITS):
            self.refuse(f"nobody has waited for the parameters of stage {stage}")
        for link in self._links.taken[stage]:
            if link in self._links.values:
                is_there = self._has_received(self._links.values[link], microbatch)
            else:
                producer = self._program.links[link].producer
                is_there = self._has_computed(producer, microbatch, _FORWARD)
            if not is_there:
                self._refuse_missing(link)
        is_later = microbatch % self._program.schedule.chunks > 0
        if is_later and not self._has_computed(stage, microbatch - 1, _FORWARD):
            self.refuse("it needs what the chunk before carries to it")

    def _check_backward(self, stage: int, microbatch: int) -> None:
        if not self._has_computed(stage, microbatch, _FORWARD):
            self.refuse("its forward comes first")
        is_earlier = (microbatch + 1) % self._program.schedule.chunks > 0
        if is_earlier and not self._has_computed(stage, microbatch + 1, _FULL, _INPUT):
            self.refuse("it needs the gradient of what it carries to the chunk behind it")
        for link in self._links.made[stage]:
            channels, consumers = self._links.gradients[link], self._links.consumers[link]
            if self._program.links[link].differentiable and not (
                all(self._has_received(channel, microbatch) for channel in channels.values())
                and all(self._has_computed(stage, microbatch, _FULL, _INPUT) for stage in consumers)
            ):
                self._refuse_missing(link)

    def _refuse_missing(self, link: int) -> NoReturn:
        self.refuse(f"it needs {self._program.links[link].name!r}, which has not arrived")

    def _has_computed(self, stage: int, microbatch: int, *kinds: int) -> bool:
        """Returns True if this rank has computed one of some kinds."""
        codes = ((stage << KIND_BITS | kind) << MICROBATCH_BITS | microbatch for kind in kinds)
        return any(code << OP_BITS | _COMPUTE in self.done for code in codes)

    def _has_received(self, channel: int, microbatch: int) -> bool:
        return self.has(_WAIT, channel << MICROBATCH_BITS | microbatch)

    def _free_buffers(self, stage: int, kind: int, microbatch: int) -> None:
        """Frees the buffers that no later action reads."""
        # A backward, or its W, reads the inputs of its forward and the gradients of its outputs
        # again. In evaluation the forward is the last reader, because there is no backward.
        if kind == _INPUT or (kind == _FORWARD and not self._program.forward_only):
            return
        for link in self._links.taken[stage]:
            if link in self._links.values:
                self._readers[link, microbatch] -= 1
                self._hold(BUFFERS, -(self._readers[link, microbatch] == 0))
        if kind != _FORWARD:
            for link in self._links.made[stage]:
                self._hold(BUFFERS, -len(self._links.gradients[link]))

    # Stages.

    def _announce(self, op: Op, stage: int) -> None:
        left = self._weights_left if op is Op.FINAL else self._inputs_left
        expected = 1 if op is Op.LAST_BACKWARD else 0
        before = self._announced.get(stage)
        if before is Op.FINAL:
            self.refuse(f"the gradients of stage {stage} are final already")
        if left[stage] != expected:
            self.refuse(f"the gradients of stage {stage} are not final: it has backwards left")
        if before not in _BEFORE[op]:
            self.refuse(
                f"it comes twice, or nothing has announced the last backward of stage {stage}"
            )
        self._announced[stage] = op

    def check_end(self) -> None:
        """Refuses transfers, actions and stages that are not complete when all items are done."""
        if self._num_under_way:
            self.refuse("transfers are under way at the end of the step")
        if self._due:
            self.refuse("the schedule of this rank has more actions")
        final = [s for s in self._stages if self._announced.get(s) is Op.FINAL]
        if not self._program.forward_only and final != self._stages:
            self.refuse(f"of stages {self._stages}, only {final} become final")


class Run:
    """One run of a Program.

    Attributes:
        program: The Program.
        ranks: For each rank its state.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranks = [RankRun(program, rank) for rank in range(len(program.items))]
        self._ready = list(range(len(self.ranks)))
        self._sleepers = defaultdict[int, list[int]](list)  # transfer -> ranks that wait for it
        # (source, target) -> the posted transfers, and the sent ones, each with its position.
        self._ends = defaultdict[tuple[int, int], tuple[list[tuple[int, int]], ...]](
            lambda: ([], [])
        )
        self._arrived = set[int]()

    def go(self) -> None:
        """Lets all ranks go on until all have ended, or wait for each other.

        Raises:
            ItemError: If an item is wrong.
        """
        # A rank runs as far as it can, and runs again only when the awaited transfer has ended,
        # because the work must grow with the number of items, not with ranks times items.
        while self._ready:
            self._advance(self.ranks[self._ready.pop()])

    @property
    def stuck(self) -> dict[int, int]:
        """Rank -> the position of the item that it waits at for good; empty if all ranks end."""
        return {x.rank: x.position for x in self.ranks if x.position < len(x.items)}

    def _advance(self, rank: RankRun) -> None:
        while rank.position < len(rank.items):
            code = rank.items[rank.position]
            op, rest = code & OP_MASK, code >> OP_BITS
            if op in _WAITS:
                missing = self._missing(rank, op, rest)
                if missing is not None:
                    self._sleepers[missing].append(rank.rank)
                    return
            self._do(rank, op, rest)
            if op in _STARTS:
                self._start(rank, op, rest)
            rank.position += 1

    def _missing(self, rank: RankRun, op: int, transfer: int) -> int | None:
        """Returns the transfer of a wait; None if it has ended, or if the wait is wrong."""
        is_there = transfer in self._arrived or not rank.has(_WAITS[op][0], transfer)
        return None if is_there else transfer

    def _do(self, rank: RankRun, op: int, rest: int) -> None:
        rank.do(op, rest)

    def _start(self, rank: RankRun, op: int, transfer: int) -> None:
        """Lets a transfer end if both of its ends have started."""
        link, kind, source, target = self.program.channels[transfer >> MICROBATCH_BITS]
        is_send = op == _SEND
        # Refuse older outputs, because the executor keeps only the last output of a stage.
        producer = self.program.links[link].producer
        if is_send and kind == "F" and rank.newest[producer] != transfer & MICROBATCH_MASK:
            rank.refuse(f"sent after stage {producer} has computed another one")
        ends = self._ends[source, target]
        ends[is_send].append((transfer, rank.position))
        index = len(ends[is_send]) - 1
        if index < len(ends[not is_send]):
            (posted, posted_at), (sent, sent_at) = ends[0][index], ends[1][index]
            if sent != posted:
                other = self.program.words(decode(self.program.items[target][posted_at]))
                why = f"rank {target} expects another transfer of the edge here: {other}"
                raise ItemError(self.program, source, sent_at, why)
            self._arrived.add(transfer)
            self._ready += self._sleepers.pop(transfer, ())


class ItemError(ScheduleError):
    """An item is wrong. The message shows the grid, with the cell of the item marked.

    Attributes:
        rank: Its rank.
        position: Its position among the items of the rank.
        why: The mistake, in words.
    """

    def __init__(self, program: Program, rank: int, position: int, why: str) -> None:
        cell = cell_of(program, rank, position)
        item = decode(program.items[rank][position])
        super().__init__(
            f"schedule {program.schedule.name!r}, rank {rank}, {cell}: {program.words(item)}: "
            f"{why}\n{program.schedule.marked([cell])}"
        )
        self.rank, self.position, self.why = rank, position, why


def cell_of(program: Program, rank: int, position: int) -> Action:
    """Returns the action that an item belongs to.

    For COMPUTE this is the item's action, otherwise the action that it prepares or follows.
    """
    items = program.items[rank]
    steps = count(position, -1) if items[position] & OP_MASK in _BEHIND else count(position)
    for index in steps:
        if not 0 <= index < len(items):
            break
        if items[index] & OP_MASK == Op.COMPUTE:
            return program.action(decode(items[index]))
    actions = program.schedule.actions[rank]
    return actions[-1] if actions else Action(0, "F", 0)
