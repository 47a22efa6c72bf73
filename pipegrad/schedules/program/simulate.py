"""One rank of a Program in a run that `verify` simulates: it refuses a wrong item."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NoReturn

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import (
    KIND_BITS,
    KIND_MASK,
    KINDS,
    MICROBATCH_BITS,
    MICROBATCH_MASK,
    OP_BITS,
    OP_MASK,
    Op,
    Program,
    RankLinks,
    action_index,
    decode,
)
from pipegrad.schedules.schedule import Action

_FORWARD, _FULL, _INPUT, _WEIGHT = range(4)  # kinds, as COMPUTE encodes them
Key = tuple[int, int]  # a channel, link or stage, and a microbatch
# Most items prepare the action after them. These belong to the action before them.
_BEHIND = {  # ops that belong to the action before them
    int(op) for op in (Op.SEND, Op.FINAL, Op.LAUNCH, Op.PUBLISH, Op.INPUTS_FINAL, Op.SHARED_WEIGHTS)
}


class SimulatedRank:
    """One rank of the simulated run."""

    def __init__(self, program: Program, rank: int) -> None:
        self.rank = rank
        self.items = program.items[rank]
        self.position = 0
        self._program = program
        self._rank_of = program.schedule.stage_to_rank
        self._done = set[tuple[int, int]]()  # (stage and kind, microbatch)
        self._due = {(action_index(a), a.microbatch) for a in program.schedule.actions[rank]}
        self._posted = set[Key]()
        self._waited = set[Key]()
        self._unreleased = set[Key]()
        self._joined = set[Key]()
        # (link, microbatch) -> how many backwards still read the receive buffer.
        self._readers_left: dict[Key, int] = {}
        self.launched: list[int] = []
        self.published: list[int] = []
        self._final = set[int]()
        self._announced = set[int]()
        self._inputs_are_final = set[int]()
        self._shared_are_first = set[int]()
        self._unused = {stage for collective in program.collectives for stage in collective.readers}
        self._live = self._graphs = self._buffers = self._flying = 0
        self.most_live = self.most_graphs = self.most_buffers = self.most_in_flight = 0
        links = RankLinks.of(program, rank)
        self._values_taken, self._values_produced = links.taken, links.produced
        self._num_readers, self._incoming = links.num_readers, links.incoming
        self._num_microbatches = program.schedule.num_microbatches
        self._chunks = program.schedule.chunks
        self._methods: dict[int, Callable[[int, int], None]] = {
            int(Op.FIRST_USE): self._first_use,
            int(Op.POST_RECEIVE): self._post,
            int(Op.JOIN): self._join,
            int(Op.LAST_BACKWARD): self._last_backward,
            int(Op.COMPUTE): self._compute,
            int(Op.FINAL): self._become_final,
            int(Op.LAUNCH): self._launch,
            int(Op.PUBLISH): self._publish,
            int(Op.INPUTS_FINAL): self._become_final_but_weights,
            int(Op.SHARED_WEIGHTS): self._compute_shared,
        }
        self._transfers: dict[int, Callable[[int], None]] = {
            int(Op.WAIT_RECEIVE): self._wait,
            int(Op.SEND): self._send,
            int(Op.RELEASE): self._release,
        }

    def run(self, stuck_at: int | None = None) -> None:
        """Does all items, or those before the one that the rank is stuck at.

        Raises:
            ItemError: If one of them is wrong.
        """
        methods, transfers = self._methods, self._transfers
        for position, code in enumerate(self.items):
            self.position = position
            op, rest = code & OP_MASK, code >> OP_BITS
            if position == stuck_at:
                return
            if op in transfers:
                transfers[op](rest)
            else:
                methods[op](rest >> MICROBATCH_BITS, rest & MICROBATCH_MASK)
        self._check_end()

    def refuse(self, why: str) -> NoReturn:
        """Raises an ItemError that shows the grid, with the cell of the current item marked."""
        raise ItemError(self._program, self.rank, self.position, why)

    # Transfers.

    def _post(self, channel: int, microbatch: int) -> None:
        if (channel, microbatch) in self._posted:
            self.refuse("posted twice")
        self._posted.add((channel, microbatch))
        self._buffers += 1
        self._flying += 1
        self.most_buffers = max(self.most_buffers, self._buffers)
        self.most_in_flight = max(self.most_in_flight, self._flying)

    def _wait(self, transfer: int) -> None:
        key = transfer >> MICROBATCH_BITS, transfer & MICROBATCH_MASK
        if key not in self._posted:
            self.refuse("waits for a receive that is not posted")
        if key in self._waited:
            self.refuse("waits twice for one receive")
        self._waited.add(key)
        self._flying -= 1
        # A value stays in its buffer until the last backward of this rank has read it. A gradient
        # has one reader, so it needs no count.
        link, kind, _, _ = self._program.channels[key[0]]
        if kind == "F":
            self._readers_left[link, key[1]] = self._num_readers[link]

    def _send(self, transfer: int) -> None:
        channel, microbatch = key = transfer >> MICROBATCH_BITS, transfer & MICROBATCH_MASK
        link, kind, _, _ = self._program.channels[channel]
        stages = (
            [self._program.links[link].producer]
            if kind == "F"
            else [c for c in self._program.links[link].consumers if self._rank_of[c] == self.rank]
        )
        # A value must be computed by its producer, a gradient by all consumers on this rank.
        for stage in stages:
            if not (
                (stage * 4 + _FORWARD, microbatch) in self._done
                if kind == "F"
                else self._input_gradient(stage, microbatch)
            ):
                self.refuse(f"sent before stage {stage} has computed it")
        self._unreleased.add(key)

    def _release(self, transfer: int) -> None:
        key = transfer >> MICROBATCH_BITS, transfer & MICROBATCH_MASK
        if key not in self._unreleased:
            self.refuse("releases what is not being sent")
        self._unreleased.remove(key)

    # Compute.

    def _compute(self, index: int, microbatch: int) -> None:
        stage, kind = index >> KIND_BITS, index & KIND_MASK
        if (index, microbatch) not in self._due:
            self.refuse("computed twice, or not in the schedule of this rank")
        self._due.remove((index, microbatch))
        if kind == _FORWARD:
            if stage in self._unused:
                self.refuse(f"nobody has waited for the parameters of stage {stage}")
            for link, remote, source in self._values_taken[stage]:
                if not (
                    (self._incoming[link], microbatch) in self._waited
                    if remote
                    else (source * 4 + _FORWARD, microbatch) in self._done
                ):
                    self._missing(link)
            earlier = (stage * 4 + _FORWARD, microbatch - 1)
            if microbatch % self._chunks and earlier not in self._done:
                self.refuse("it needs what the chunk before carries to it")
            self._live += not self._program.forward_only
            self._graphs += not self._program.forward_only
            self.most_live = max(self.most_live, self._live)
            self.most_graphs = max(self.most_graphs, self._graphs)
        # I ends the graph of autograd, but the factors of weight gradients stay until W. So B frees
        # both counts, I only the graph, and W only the activation.
        elif kind == _WEIGHT:
            if (stage * 4 + _INPUT, microbatch) not in self._done:
                self.refuse("the input's gradient, I, comes first")
            self._live -= 1
        else:
            self._check_backward(stage, microbatch)
            self._live -= kind == _FULL
            self._graphs -= 1
        self._done.add((index, microbatch))
        if kind != _INPUT:
            self._free_buffers(stage, kind, microbatch)

    def _check_backward(self, stage: int, microbatch: int) -> None:
        if (stage * 4 + _FORWARD, microbatch) not in self._done:
            self.refuse("its forward comes first")
        if stage in self._final or stage in self._inputs_are_final:
            self.refuse(f"the gradients of stage {stage} are final already")
        if (microbatch + 1) % self._chunks and not self._input_gradient(stage, microbatch + 1):
            self.refuse("it needs the gradient of what it carries to the chunk behind it")
        for link, channels, local, joined in self._values_produced[stage]:
            for channel in channels:
                if (channel, microbatch) not in self._waited:
                    self._missing(link)
            for consumer in local:
                if not self._input_gradient(consumer, microbatch):
                    self._missing(link)
            if joined and (link, microbatch) not in self._joined:
                self.refuse(f"the gradients of {self._program.links[link].name!r} are not summed")

    def _missing(self, link: int) -> NoReturn:
        self.refuse(f"it needs {self._program.links[link].name!r}, which has not arrived")

    def _input_gradient(self, stage: int, microbatch: int) -> bool:
        done = self._done
        return (stage * 4 + _FULL, microbatch) in done or (stage * 4 + _INPUT, microbatch) in done

    def _free_buffers(self, stage: int, kind: int, microbatch: int) -> None:
        """Frees the buffers that no later backward reads."""
        # Backwards read the inputs of their forward again. In evaluation there is no backward, so
        # the forward is the last reader.
        if kind == _FORWARD and not self._program.forward_only:
            return
        for link, remote, _ in self._values_taken[stage]:
            if remote:
                self._readers_left[link, microbatch] -= 1
                if self._readers_left[link, microbatch] == 0:
                    self._buffers -= 1
                    del self._readers_left[link, microbatch]
        # The gradients of outputs are factors of weight gradients, so W reads them too.
        if kind != _FORWARD:
            for _, channels, _, _ in self._values_produced[stage]:
                self._buffers -= len(channels)

    def _join(self, link: int, microbatch: int) -> None:
        if (link, microbatch) in self._joined:
            self.refuse("summed twice")
        for number, channels, local, _ in self._values_produced[self._program.links[link].producer]:
            arrived = all((channel, microbatch) in self._waited for channel in channels)
            done = all(self._input_gradient(consumer, microbatch) for consumer in local)
            if number == link and not (arrived and done):
                self._missing(link)
        self._joined.add((link, microbatch))

    # Gradients.

    def _first_use(self, stage: int, _microbatch: int) -> None:
        if stage not in self._unused:
            self.refuse("waited for twice, or nothing is on its way")
        self._unused.remove(stage)

    def _last_backward(self, stage: int, _microbatch: int) -> None:
        done = sum(self._input_gradient(stage, m) for m in range(self._num_microbatches))
        if done != self._num_microbatches - 1 or stage in self._announced:
            self.refuse(f"stage {stage} has not exactly one backward left, or this comes twice")
        self._announced.add(stage)

    def _become_final(self, stage: int, _microbatch: int) -> None:
        # Gradients of weights come from B, or from W if the backward is split.
        for microbatch in range(self._num_microbatches):
            kinds = (_FULL, _WEIGHT)
            if not any((stage * 4 + kind, microbatch) in self._done for kind in kinds):
                self.refuse(f"the gradients of stage {stage} are not final: it has backwards left")
        if stage in self._final:
            self.refuse(f"the gradients of stage {stage} are final already")
        if stage not in self._announced and stage not in self._inputs_are_final:
            self.refuse(f"the last backward of stage {stage} was not announced")
        self._final.add(stage)

    def _become_final_but_weights(self, stage: int, _microbatch: int) -> None:
        if not all(self._input_gradient(stage, m) for m in range(self._num_microbatches)):
            self.refuse(f"stage {stage} has gradients of inputs left")
        if stage in self._announced or stage in self._inputs_are_final or stage in self._final:
            self.refuse(f"the inputs of stage {stage} are final already")
        self._inputs_are_final.add(stage)

    def _compute_shared(self, stage: int, _microbatch: int) -> None:
        if stage not in self._inputs_are_final - self._final - self._shared_are_first:
            self.refuse(f"stage {stage} has gradients of inputs left, or this is done twice")
        self._shared_are_first.add(stage)

    def _launch(self, number: int, _microbatch: int) -> None:
        # Each rank checks its own stages. Stages of other ranks are checked on their ranks.
        collective = self._program.collectives[number]
        local = {s for s in collective.stages if self._rank_of[s] == self.rank}
        if self.rank not in collective.ranks or number in self.launched:
            self.refuse("launched twice, or on a rank that has no part in it")
        if not local <= self._final:
            self.refuse(f"launched before stages {sorted(local - self._final)} are final")
        self.launched.append(number)

    def _publish(self, number: int, _microbatch: int) -> None:
        if number not in self.launched or number in self.published:
            self.refuse("published twice, or before it is reduced")
        self.published.append(number)

    def _check_end(self) -> None:
        program = self._program
        if self._unreleased or self._flying:
            self.refuse("transfers are under way at the end of the step")
        if self._due:
            left = sorted(Action(i >> KIND_BITS, KINDS[i & KIND_MASK], m) for i, m in self._due)
            shown = ", ".join(map(str, left[:5]))
            raise ScheduleError(f"never computed: {shown}\n{program.schedule.marked(left)}")
        awaited = {n for n in self.launched if program.collectives[n].readers}
        if awaited != set(self.published):
            names = [program.collectives[n].name for n in sorted(awaited - {*self.published})]
            self.refuse(f"never published: {names}")
        local = {s for s, rank in enumerate(self._rank_of) if rank == self.rank}
        if not program.forward_only and self._final != local:
            self.refuse(f"stages {sorted(local - self._final)} never become final")


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
