"""Runs recorded operations again, in every order that their waits allow, and compares the bits.

`OrderChecker` decides by rules whether accesses conflict. This executor has no rules: it runs the
streams in all orders, also in unlikely ones, and compares numbers. So it checks the rules.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipegrad.comm.sync_points import Work
from pipegrad.testing.ordering.checker import Entry, OrderChecker
from pipegrad.testing.ordering.trace import _PLAIN, Operation, _tensors

_POISON = 0xFF  # every floating dtype reads these bytes as NaN


@dataclass
class _Collective:
    """Inputs and outputs of a collective. Its peers are missing, so it cannot run again."""

    home: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    """Operations that run as one. All but the last touch only memory of their own strand."""

    entry: Entry
    operations: tuple[int, ...]


class _Calls(TorchDispatchMode):
    """Gives a recording each operator, before the checker sees it."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if not all(t in _PLAIN for t in types):
            return call()
        tensors = _tensors([*args, *call.keywords.values()])
        self._recording.before(tensors)
        out = call()
        self._recording.called(call, tensors, out)
        return out


class Recording(OrderChecker):
    """An `OrderChecker` that keeps every operation, with its tensors, to run it again.

    Use it for small programs, because the number of orders grows very fast. Nothing is freed while
    it records. Operators must be deterministic. Collectives must be in place, like all-reduce. In a
    new order a collective returns its recorded outputs if its inputs have the same bits, else NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Entry, Operation]] = []
        self._calls: dict[int, Callable[[], object]] = {}
        self._current = threading.local()  # the operator that was called: its inputs, and again
        self._collectives: dict[int, _Collective] = {}
        self._storages: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def orders(self, at_most: int = 20_000) -> Iterator[tuple[int, ...]]:
        """Yields every order in which the streams may run what was recorded.

        Raises:
            ValueError: If there are more than `at_most`.
        """
        for count, order in enumerate(_shuffles(self._strands())):
            if count == at_most:
                raise ValueError(f"more than {at_most} orders: record a smaller program")
            yield order

    def priorities(self) -> Iterator[tuple[int, ...]]:
        """Yields one order for each ranking of the streams: the first stream that may run, runs.

        These are far fewer orders, and the extreme ones. Use it for programs with too many orders.
        """
        strands = self._strands()
        for ranking in permutations(strands):
            yield next(_shuffles({strand: strands[strand] for strand in ranking}))

    def differing(self, orders: Iterable[Sequence[int]]) -> tuple[int, int]:
        """Returns the number of these orders, and of those that end with different bits."""
        # The order of the recording is the one in which operators really ran. It is the reference.
        serial = self._run(range(len(self._operations)))
        results = [self._run(order) == serial for order in orders]
        return len(results), results.count(False)

    # What it records.

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps the bytes of each memory when it is first used."""
        with self._locked():
            for tensor in tensors:
                self._see(tensor, _bytes(tensor).clone())
        self._current.inputs = [t.clone() for t in tensors]

    def called(self, call: partial[Any], tensors: Sequence[torch.Tensor], out: Any) -> None:
        """Keeps how an operator is called again."""
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        fresh = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in known]

        def again() -> None:
            """Copies new results into the memory of the old ones."""
            for result, value in zip(_tensors(out), _tensors(call()), strict=True):
                if any(result is tensor for tensor in fresh):
                    result.copy_(value)

        self._current.again = again

    def after(self, operation: Operation) -> Entry:
        """Keeps the operation."""
        with self._locked(), _disable_current_modes():
            entry, number = super().after(operation), len(self._operations)
            for tensor in operation.writes:
                self._see(tensor, torch.full_like(_bytes(tensor), _POISON))
            if operation.name.startswith("c10d."):
                self._collectives[number] = _Collective(self._location, self._current.inputs)
            elif not operation.name.startswith(("aten.empty", "aten.new_empty")):
                self._calls[number] = self._current.again
            self._operations.append((entry, operation))
            return entry

    def wait_work(self, work: Work) -> None:
        """Keeps the outputs of the collective."""
        super().wait_work(work)
        with self._locked():
            self._keep_results(self._location)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        # The checker's trace is entered last, so it passes each operator to this one.
        calls = contextlib.nullcontext() if self._local.is_watched else _Calls(self)
        with calls, super()._watching():
            yield

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._keep_results("")

    @property
    def _location(self) -> str:
        return f"{self._thread}, {self.on_now}"

    def _keep_results(self, home: str) -> None:
        """Keeps the outputs of the collectives of a comm stream, or of all collectives."""
        for number, collective in self._collectives.items():
            if not collective.outputs and home in ("", collective.home):
                collective.outputs = [t.clone() for t in self._operations[number][1].writes]

    def _see(self, tensor: torch.Tensor, content: torch.Tensor) -> None:
        if tensor.numel():
            self._storages.setdefault(self._memories.name(tensor), (_bytes(tensor), content))

    # How it runs them again.

    def _run(self, order: Sequence[int] | range) -> list[bytes]:
        with torch.no_grad():
            for memory, content in self._storages.values():
                memory.copy_(content)
            for number in order:
                if number in self._collectives:
                    self._repeat(self._collectives[number], self._operations[number][1])
                elif number in self._calls:
                    self._calls[number]()
        return [bytes(memory.numpy()) for memory, _ in self._storages.values()]

    def _repeat(self, collective: _Collective, operation: Operation) -> None:
        # Other inputs mean that an operator ran too early or too late. What the peers would send is
        # then unknown, and NaN makes the difference visible.
        same = all(
            torch.equal(_bits(now), _bits(then))
            for now, then in zip(
                operation.reads or operation.writes, collective.inputs, strict=True
            )
        )
        for written, output in zip(operation.writes, collective.outputs, strict=True):
            if same:
                written.copy_(output)
            else:
                written.view(torch.uint8).fill_(_POISON)

    def _strands(self) -> dict[str, list[_Step]]:
        """Returns the steps of each strand, in order."""
        # An operation that touches only memory of its own strand is joined with the next one. Its
        # position changes nothing for other strands, and there are far fewer orders to run.
        users: dict[str, set[str]] = {}
        for entry, _ in self._operations:
            for access in entry.accesses:
                users.setdefault(access.memory, set()).add(entry.strand)
        strands: dict[str, list[_Step]] = {}
        waiting: dict[str, list[int]] = {}
        for number, (entry, _) in enumerate(self._operations):
            pending = waiting.setdefault(entry.strand, [])
            pending.append(number)
            if any(len(users[access.memory]) > 1 for access in entry.accesses):
                strands.setdefault(entry.strand, []).append(_Step(entry, tuple(pending)))
                pending.clear()
        for strand, pending in waiting.items():
            if pending:
                last = _Step(self._operations[pending[-1]][0], tuple(pending))
                strands.setdefault(strand, []).append(last)
        return strands


def _shuffles(strands: Mapping[str, Sequence[_Step]]) -> Iterator[tuple[int, ...]]:
    """Yields every order in which each step comes after all operations in its clock."""
    done = dict.fromkeys(strands, 0)  # of each strand: how many of its steps
    order: list[_Step] = []
    length = sum(map(len, strands.values()))

    def may_run(step: _Step) -> bool:
        return all(
            index >= len(strands[other])
            or strands[other][index].entry.tick > step.entry.clock.get(other, 0)
            for other, index in done.items()
            if other != step.entry.strand
        )

    def extend() -> Iterator[tuple[int, ...]]:
        if len(order) == length:
            yield tuple(operation for step in order for operation in step.operations)
            return
        for strand, steps in strands.items():
            if done[strand] < len(steps) and may_run(steps[done[strand]]):
                order.append(steps[done[strand]])
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
