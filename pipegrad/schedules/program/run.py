"""Run: a Program without tensors. Each rank goes as far as it can, and each item is checked.

A send ends when its receive is posted. The first send to a rank meets the first receive from it,
because a message carries no name. Nothing that a rank does depends on time. So if one run ends, all
runs end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
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
_COMPUTE, _SEND = int(Op.COMPUTE), int(Op.SEND)
_STARTS = (int(Op.POST_RECEIVE), _SEND)
_WAITS = (int(Op.WAIT_RECEIVE), int(Op.RELEASE))
# Most items prepare the action after them. These belong to the action before them.
_BEHIND = {int(op) for op in (Op.SEND, Op.FINAL, Op.INPUTS_FINAL, Op.SHARED_WEIGHTS)}
# What comes before an item that says how far the gradients of a stage are, as the last such item.
_BEFORE: dict[Op, tuple[Op | None, ...]] = {
    Op.LAST_BACKWARD: (None,),
    Op.INPUTS_FINAL: (None,),
    Op.SHARED_WEIGHTS: (Op.INPUTS_FINAL,),
    Op.FINAL: (Op.LAST_BACKWARD, Op.INPUTS_FINAL, Op.SHARED_WEIGHTS),
}
# What a rank holds: live activations, live graphs, receive buffers, receives that are posted.
LIVE, GRAPHS, BUFFERS, IN_FLIGHT = range(4)
_LIVE_BY_KIND, _GRAPHS_BY_KIND = (1, -1, 0, -1), (1, -1, -1, 0)


class RankRun:
    """What one rank has done in a run, and whether its next item is right.

    Attributes:
        rank: The pipeline rank.
        items: Its items.
        position: Of its next item.
        under_way: Its transfers that have started, and were not waited for.
        newest: Stage -> the microbatch of its last forward.
        most: The most that it has held: `LIVE`, `GRAPHS`, `BUFFERS`, `IN_FLIGHT`.
        do: Op -> what does the next item, given the rest of it, or raises an ItemError.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.rank, self.items, self.position = rank, program.items[rank], 0
        self.under_way = set[int]()
        self.newest: dict[int, int] = {}
        self.most = [0, 0, 0, 0]
        self._held = [0, 0, 0, 0]
        self._program, self._links = program, program.rank_links[rank]
        schedule = program.schedule
        self._stages = [s for s, holder in enumerate(schedule.stage_to_rank) if holder == rank]
        # The computes to come, as items encode them, and a number that no item has.
        actions = schedule.actions[rank]
        self._due = [*(action_index(a) << MICROBATCH_BITS | a.microbatch for a in actions), -1]
        self._done = set[int]()
        self._started = set[int]()
        self._received = set[int]()
        self._joined = set[int]()
        self._readers: dict[tuple[int, int], int] = {}  # actions that still read a received value
        self._unused = program.synced.intersection(self._stages)
        self._inputs_left = dict.fromkeys(self._stages, schedule.num_microbatches)
        self._weights_left = dict.fromkeys(self._stages, schedule.num_microbatches)
        self._announced: dict[int, Op] = {}
        self.do: dict[int, Callable[[int], None]] = {
            int(Op.FIRST_USE): self._first_use,
            int(Op.POST_RECEIVE): self._post,
            int(Op.WAIT_RECEIVE): self._receive,
            int(Op.JOIN): self._join,
            int(Op.LAST_BACKWARD): self._announce,
            int(Op.COMPUTE): self._compute,
            int(Op.SEND): self._send,
            int(Op.RELEASE): partial(self._end, "releases what is not being sent"),
            int(Op.FINAL): self._announce,
            int(Op.INPUTS_FINAL): self._announce,
            int(Op.SHARED_WEIGHTS): self._announce,
        }

    def refuse(self, why: str) -> NoReturn:
        """Raises an ItemError of the item at `position`."""
        raise ItemError(self._program, self.rank, min(self.position, len(self.items) - 1), why)

    def _hold(self, what: int, by: int) -> None:
        self._held[what] += by
        self.most[what] = max(self.most[what], self._held[what])

    # Transfers.

    def _begin(self, transfer: int) -> None:
        if transfer in self._started:
            self.refuse("sent or received twice")
        self._started.add(transfer)
        self.under_way.add(transfer)

    def _post(self, transfer: int) -> None:
        self._begin(transfer)
        self._hold(BUFFERS, 1)
        self._hold(IN_FLIGHT, 1)

    def _receive(self, transfer: int) -> None:
        self._end("waits for a receive that is not posted", transfer)
        self._received.add(transfer)
        self._hold(IN_FLIGHT, -1)
        # A value stays in its buffer until the last backward of this rank has read it. A gradient
        # has one reader, so it needs no count.
        link, kind, _, _ = self._program.channels[transfer >> MICROBATCH_BITS]
        if kind == "F":
            self._readers[link, transfer & MICROBATCH_MASK] = len(self._links.consumers[link])

    def _send(self, transfer: int) -> None:
        microbatch = transfer & MICROBATCH_MASK
        link, kind, _, _ = self._program.channels[transfer >> MICROBATCH_BITS]
        # A value must be computed by its producer, a gradient by all consumers on this rank.
        is_value, producer = kind == "F", self._program.links[link].producer
        kinds = (_FORWARD,) if is_value else (_FULL, _INPUT)
        for stage in [producer] if is_value else self._links.consumers[link]:
            if not self._has(stage, microbatch, *kinds):
                self.refuse(f"sent before stage {stage} has computed it")
        self._begin(transfer)

    def _end(self, why: str, transfer: int) -> None:
        if transfer not in self.under_way:
            self.refuse(why)
        self.under_way.remove(transfer)

    # Compute.

    def _compute(self, code: int) -> None:
        index, microbatch = code >> MICROBATCH_BITS, code & MICROBATCH_MASK
        stage, kind = index >> KIND_BITS, index & KIND_MASK
        if code != self._due[len(self._done)]:
            self.refuse("the schedule of this rank has another action here")
        if kind == _FORWARD:
            self._check_forward(stage, microbatch)
            self.newest[stage] = microbatch
        elif kind == _WEIGHT and not self._has(stage, microbatch, _INPUT):
            self.refuse("the input's gradient, I, comes first")
        elif kind != _WEIGHT:
            self._check_backward(stage, microbatch)
        self._done.add(code)
        if not self._program.forward_only:
            self._hold(LIVE, _LIVE_BY_KIND[kind])
            self._hold(GRAPHS, _GRAPHS_BY_KIND[kind])
        self._inputs_left[stage] -= kind in (_FULL, _INPUT)
        self._weights_left[stage] -= kind in (_FULL, _WEIGHT)
        self._free_buffers(stage, kind, microbatch)

    def _check_forward(self, stage: int, microbatch: int) -> None:
        if stage in self._unused:
            self.refuse(f"nobody has waited for the parameters of stage {stage}")
        for link in self._links.taken[stage]:
            if link in self._links.values:
                is_there = self._has_received(self._links.values[link], microbatch)
            else:
                is_there = self._has(self._program.links[link].producer, microbatch, _FORWARD)
            if not is_there:
                self._refuse_missing(link)
        is_later = microbatch % self._program.schedule.chunks > 0
        if is_later and not self._has(stage, microbatch - 1, _FORWARD):
            self.refuse("it needs what the chunk before carries to it")

    def _check_backward(self, stage: int, microbatch: int) -> None:
        if not self._has(stage, microbatch, _FORWARD):
            self.refuse("its forward comes first")
        is_earlier = (microbatch + 1) % self._program.schedule.chunks > 0
        if is_earlier and not self._has(stage, microbatch + 1, _FULL, _INPUT):
            self.refuse("it needs the gradient of what it carries to the chunk behind it")
        for link in self._links.made[stage]:
            if not self._links.is_joined(link):
                self._check_gradients(link, microbatch)
            elif link << MICROBATCH_BITS | microbatch not in self._joined:
                self.refuse(f"the gradients of {self._program.links[link].name!r} are not summed")

    def _check_gradients(self, link: int, microbatch: int) -> None:
        """Refuses a backward, or a sum, before the gradients of a value are there."""
        if self._program.links[link].differentiable:
            channels, consumers = self._links.gradients[link], self._links.consumers[link]
            if not (
                all(self._has_received(channel, microbatch) for channel in channels.values())
                and all(self._has(stage, microbatch, _FULL, _INPUT) for stage in consumers)
            ):
                self._refuse_missing(link)

    def _refuse_missing(self, link: int) -> NoReturn:
        self.refuse(f"it needs {self._program.links[link].name!r}, which has not arrived")

    def _has(self, stage: int, microbatch: int, *kinds: int) -> bool:
        """Returns whether this rank has computed one of some kinds."""
        codes = ((stage << KIND_BITS | kind) << MICROBATCH_BITS | microbatch for kind in kinds)
        return any(code in self._done for code in codes)

    def _has_received(self, channel: int, microbatch: int) -> bool:
        return channel << MICROBATCH_BITS | microbatch in self._received

    def _free_buffers(self, stage: int, kind: int, microbatch: int) -> None:
        """Frees the buffers that no later action reads."""
        # A backward, or its W, reads the inputs of its forward and the gradients of its outputs
        # again. In evaluation there is no backward, so the forward is the last reader.
        if kind == _INPUT or (kind == _FORWARD and not self._program.forward_only):
            return
        for link in self._links.taken[stage]:
            if link in self._links.values:
                self._readers[link, microbatch] -= 1
                self._hold(BUFFERS, -(self._readers[link, microbatch] == 0))
        if kind != _FORWARD:
            for link in self._links.made[stage]:
                self._hold(BUFFERS, -len(self._links.gradients[link]))

    def _join(self, rest: int) -> None:
        if rest in self._joined:
            self.refuse("summed twice")
        self._check_gradients(rest >> MICROBATCH_BITS, rest & MICROBATCH_MASK)
        self._joined.add(rest)

    # Stages.

    def _first_use(self, rest: int) -> None:
        stage = rest >> MICROBATCH_BITS
        if stage not in self._unused:
            self.refuse("waited for twice, or nothing is on its way")
        self._unused -= {stage}

    def _announce(self, rest: int) -> None:
        stage = rest >> MICROBATCH_BITS
        op = Op(self.items[self.position] & OP_MASK)
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
        """Refuses what is left when all items are done."""
        if self.under_way:
            self.refuse("transfers are under way at the end of the step")
        if len(self._done) + 1 < len(self._due):
            self.refuse("the schedule of this rank has more actions")
        final = [s for s in self._stages if self._announced.get(s) is Op.FINAL]
        if not self._program.forward_only and final != self._stages:
            self.refuse(f"of stages {self._stages}, only {final} become final")


class Run:
    """One run of a Program.

    Attributes:
        program: The Program.
        ranks: For each rank what it has done.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranks = [RankRun(program, rank) for rank in range(len(program.items))]
        self._ready = list(range(len(self.ranks)))
        self._sleepers = defaultdict[int, list[int]](list)  # what ranks wait for -> ranks
        # By source and target: the transfers that were posted, and those that were sent, each with
        # its position.
        self._ends = defaultdict[tuple[int, int], tuple[list[tuple[int, int]], ...]](
            lambda: ([], [])
        )
        self._arrived = set[int]()

    def go(self) -> None:
        """Lets all ranks go on until all have ended, or wait for each other.

        Raises:
            ItemError: If an item is wrong.
        """
        # A rank runs as far as it can, and is run again only when what it waits for has ended. So
        # the work grows with the number of items, not with the number of ranks times items.
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

    def _missing(self, rank: RankRun, _op: int, transfer: int) -> int | None:
        """Returns what a wait waits for; None if it has ended, or if the wait is wrong."""
        is_there = transfer in self._arrived or transfer not in rank.under_way
        return None if is_there else transfer

    def _do(self, rank: RankRun, op: int, rest: int) -> None:
        rank.do[op](rest)

    def _start(self, rank: RankRun, op: int, transfer: int) -> None:
        """Lets a transfer end if both of its ends have started."""
        link, kind, source, target = self.program.channels[transfer >> MICROBATCH_BITS]
        is_send = op == _SEND
        if rank.rank != (source if is_send else target):
            rank.refuse("a transfer of another rank")
        # The executor keeps only what a stage computed last.
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
        why: What is wrong.
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

    This is the item's own action for COMPUTE, else the action that it prepares or follows.
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
