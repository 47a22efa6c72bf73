"""Runs what was recorded again, in every order that its waits allow, and compares the bits.

The other half of the proof: `OrderChecker` decides by rules which accesses conflict; this executor
knows no rules. It drains the streams as an adversary would, and looks at the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pipegrad.handler import Work
from pipegrad.testing.order import Entry, OrderChecker
from pipegrad.testing.trace import Operation

_POISON = 0x7F  # a NaN of every floating dtype that is not fp8


@dataclass
class _Collective:
    """What a collective made of what it was given: its peers are not here to do it again."""

    given: list[torch.Tensor]
    made: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    """Operations that run as one: all but the last touch only what their strand alone touches."""

    entry: Entry
    operations: tuple[int, ...]


class Recording(OrderChecker):
    """An `OrderChecker` that keeps every operation, with its tensors, to run it again.

    For small programs: the number of orders grows like that of shuffles of a deck. Nothing is freed
    while it records. Operators must be deterministic; collectives must be in place, as all-reduce
    is, and give what they gave if they are given the same bits, else NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Entry, Operation]] = []
        self._collectives: dict[int, _Collective] = {}
        self._storages: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._given: list[torch.Tensor] = []

    def orders(self, at_most: int = 20_000) -> Iterator[tuple[int, ...]]:
        """Yields every order in which the streams may run what was recorded.

        Raises:
            ValueError: If there are more than `at_most`.
        """
        steps = self._steps()
        strands: dict[str, list[int]] = {}
        for number, step in enumerate(steps):
            strands.setdefault(step.entry.strand, []).append(number)
        for count, order in enumerate(_shuffles(steps, strands)):
            if count == at_most:
                raise ValueError(f"more than {at_most} orders: record a smaller program")
            yield tuple(op for number in order for op in steps[number].operations)

    def differing(self, at_most: int = 20_000) -> tuple[int, int]:
        """Returns how many orders there are, and in how many any bit ends up differently."""
        serial = self._run(range(len(self._operations)))
        results = [self._run(order) == serial for order in self.orders(at_most)]
        return len(results), results.count(False)

    # What it adds to checking.

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps the bytes that a memory held when it was first met."""
        with self._locked():
            for tensor in tensors:
                self._meet(tensor, _bytes(tensor).clone())
        self._local.given = [t.clone() for t in tensors]

    def after(self, operation: Operation) -> Entry:
        """Keeps the operation."""
        with self._locked():
            entry = super().after(operation)
            for tensor in operation.writes:
                self._meet(tensor, torch.full_like(_bytes(tensor), _POISON))
            if operation.name.startswith("c10d."):
                self._collectives[len(self._operations)] = _Collective(self._local.given)
            self._operations.append((entry, operation))
            return entry

    def wait_work(self, work: Work) -> None:
        """Keeps what the collective made."""
        super().wait_work(work)
        with self._locked():
            self._keep_results()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._keep_results()

    def _keep_results(self) -> None:
        for number, collective in self._collectives.items():
            if not collective.made:
                collective.made = [t.clone() for t in self._operations[number][1].writes]

    def _meet(self, tensor: torch.Tensor, content: torch.Tensor) -> None:
        if tensor.numel():
            self._storages.setdefault(self._memories.name(tensor), (_bytes(tensor), content))

    # Running it again.

    def _run(self, order: Sequence[int] | range) -> list[bytes]:
        with torch.no_grad():
            for there, content in self._storages.values():
                there.copy_(content)
            for number in order:
                if number in self._collectives:
                    self._repeat(self._collectives[number], self._operations[number][1])
                else:
                    self._operations[number][1].run()
        return [bytes(there.numpy()) for there, _ in self._storages.values()]

    def _repeat(self, collective: _Collective, operation: Operation) -> None:
        same = all(
            torch.equal(_bits(now), _bits(then))
            for now, then in zip(operation.writes, collective.given, strict=True)
        )
        for there, made in zip(operation.writes, collective.made, strict=True):
            if same:
                there.copy_(made)
            else:
                there.fill_(float("nan"))

    def _steps(self) -> list[_Step]:
        """Joins an operation that touches only its strand's own memory to the one behind it."""
        users: dict[str, set[str]] = {}
        for entry, _ in self._operations:
            for access in entry.accesses:
                users.setdefault(access.memory, set()).add(entry.strand)
        steps: list[_Step] = []
        waiting: dict[str, list[int]] = {}
        for number, (entry, _) in enumerate(self._operations):
            mine = waiting.setdefault(entry.strand, [])
            mine.append(number)
            if any(len(users[access.memory]) > 1 for access in entry.accesses):
                steps.append(_Step(entry, tuple(mine)))
                mine.clear()
        rest = [tuple(mine) for mine in waiting.values() if mine]
        return steps + [_Step(self._operations[mine[-1]][0], mine) for mine in rest]


def _shuffles(steps: Sequence[_Step], strands: dict[str, list[int]]) -> Iterator[list[int]]:
    """Yields every order of steps in which each comes behind all that its clock knows."""
    done = dict.fromkeys(strands, 0)  # per strand: how many of its steps
    order: list[int] = []

    def may_run(step: _Step) -> bool:
        return all(
            next_index >= len(strands[strand])
            or steps[strands[strand][next_index]].entry.tick > step.entry.clock.get(strand, 0)
            for strand, next_index in done.items()
            if strand != step.entry.strand
        )

    def extend() -> Iterator[list[int]]:
        if len(order) == len(steps):
            yield list(order)
            return
        for strand, numbers in strands.items():
            if done[strand] < len(numbers) and may_run(steps[numbers[done[strand]]]):
                order.append(numbers[done[strand]])
                done[strand] += 1
                yield from extend()
                done[strand] -= 1
                order.pop()

    return extend()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of a tensor's memory, ``(nbytes,)``."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
