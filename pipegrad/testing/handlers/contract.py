"""HandlerContract: what every gradient handler promises, as a test class that authors subclass.

class TestMine(HandlerContract):
    handler = "mine"
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar
from unittest import SkipTest

import torch

from pipegrad import ParameterRecord, Topology, handlers
from pipegrad.errors import PluginOptionError
from pipegrad.plan.plan import Plan
from pipegrad.testing.handlers import hash_seeds, scenario
from pipegrad.testing.handlers.scenario import STEPS, TOPOLOGIES, Piece, Seen, Specs
from pipegrad.testing.ranks import run_ranks

T = TypeVar("T")
TIMEOUT_SECONDS = 120.0


class HandlerContract:
    """Checks a handler. Subclass it in a test module, as a class whose name begins with ``Test``.

    Plans are made for several topologies. Steps are run on 4 gloo ranks, 2 stages by 2 data
    replicas, on a small model with tied, frozen, float32, bfloat16 and float64 parameters. A rank
    is judged by what its optimizer steps: parameters, rows of them, or nothing where another rank
    does. A check that makes no sense because another one has failed is skipped.

    Attributes:
        handler: As a configuration lists it: a name, a table of name and options, or a class.
        beside: The other handlers that a run would list with it.
        relative_error: How far a gradient may be off, relative to its largest element. Where a
            parameter's own dtype is coarser, twice that one's resolution counts.
    """

    # HandlerSpec and Sequence[HandlerSpec]; Any, or a subclass would have to annotate them too.
    handler: ClassVar[Any]
    beside: ClassVar[Any] = ()
    relative_error: ClassVar[float] = 1e-6

    def expected(self, whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Returns the gradient that a rank must have after a step; override it if not `whole`.

        Where a rank steps rows of a parameter, the same rows of it are compared.

        Args:
            whole: What one process would have: the mean over data replicas of the sum over the
                stages that hold the parameter. In float64.
            own: What this rank had before; zeros if it had none. In float64.
        """
        return whole

    # What it is.

    def test_it_is_found_and_says_where_it_comes_from(self) -> None:
        found = handlers.resolve(self.handler)
        there = handlers.resolve(pickle.loads(pickle.dumps(self.handler)))
        self._check(
            pickle.loads(pickle.dumps(found.identity)) == there.identity,
            f"its identity is {found.identity}, on another rank {there.identity}: use options "
            f"whose repr() tells their value",
        )
        self._check(
            found.name == found.value or bool(found.distribution and found.version),
            "it is registered in this process alone, and other ranks do not know its name: install "
            "it with an entry point, or give the class itself",
        )

    def test_its_options_are_keywords(self) -> None:
        cls = type(handlers.resolve(self.handler).plugin)
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL
        wrong = [p.name for p in inspect.signature(cls).parameters.values() if p.kind in kinds]
        self._check(
            not wrong,
            f"its constructor takes {wrong} by position, but configurations give options by name: "
            f"make them keywords, def __init__(self, *, ...)",
        )

    def test_an_unknown_option_is_refused_by_name(self) -> None:
        table = self.handler if isinstance(self.handler, Mapping) else {"name": self.handler}
        said = "nothing, it was accepted"
        try:
            handlers.resolve({**table, "no_such_option": 1})
        except PluginOptionError as error:
            said = str(error)
        self._check(
            "has no option 'no_such_option'" in said and "allowed" in said,
            f"given an option 'no_such_option', it said: {said}; expected a refusal that lists "
            f"what is allowed: name all options in __init__, without **",
        )

    # What it plans.

    def test_all_ranks_make_one_plan(self) -> None:
        plans = self._plans()
        self._check_ended(plans, "no plan")
        for where, every in self._planned().items():
            self._check(
                len({plan.digest for plan in every}) == 1,
                f"with {where} ranks' plans do not fit together; reductions() must depend on its "
                f"arguments alone:\n" + "\n".join(map(str, every)),
            )

    def test_a_plan_made_again_is_the_same(self) -> None:
        for where, every in self._planned().items():
            for first in every:
                view, used = TOPOLOGIES[where].at(first.rank), scenario.instances(self._specs())
                again = [scenario.plan(view, used) for _ in range(2)][-1]
                self._check(
                    first == again,
                    f"with {where}, reductions() of one instance said another thing when it was "
                    f"called again; it must be pure:\n{first}\n{again}",
                )

    def test_the_order_of_parameters_changes_nothing(self) -> None:
        self._planned()
        for where, topology in TOPOLOGIES.items():
            for view in map(topology.at, topology.ranks):
                records = scenario.records(view)
                orders = (records, records[::-1], records[1:] + records[:1])
                first, *others = (self._reductions(order, view) for order in orders)
                different = sorted(set().union(*(first ^ other for other in others)))
                self._check(
                    not different,
                    f"with {where}, rank {view.rank} reduces otherwise if its parameters come in "
                    f"another order; decide by what a record says: {different}",
                )

    def test_no_plan_depends_on_hash_seeds(self) -> None:
        self._planned()
        one, other = hash_seeds.plans_under_seeds(self._specs(), "1", "4242")
        for process in (one, other):
            self._check(
                process.returncode == 0,
                f"a new process cannot plan; it must be importable there:\n{process.stderr}",
            )
        pairs = zip(one.stdout.splitlines(), other.stdout.splitlines(), strict=False)
        different = [f"{line}\n{instead}" for line, instead in pairs if line != instead]
        self._check(
            one.stdout == other.stdout,
            "it plans otherwise under another PYTHONHASHSEED, which ranks need not share; do not "
            f"use hash(), and sort what comes out of a set:\n{''.join(different[:1])}",
        )

    # What it does.

    def test_a_step_ends_on_every_rank(self) -> None:
        self._planned()
        self._check_ended(self._ranks(), "4 ranks failed")

    def test_ranks_plan_what_is_planned_offline(self) -> None:
        offline = self._planned()["pp 2 x dp 2"][0].digest
        for rank, seen in enumerate(self._seen()):
            self._check(
                seen.digest == offline,
                f"rank {rank} planned {seen.digest[:8]}, this process planned {offline[:8]} for "
                f"it; reductions() must not look at the process it runs in",
            )

    def test_gradients_are_those_of_one_process(self) -> None:
        self._check_values("first")

    def test_a_missing_gradient_counts_as_zeros(self) -> None:
        self._need_values("first")
        self._check_values("missing")

    def test_a_gradient_that_nobody_has_stays_none(self) -> None:
        for step, rank, name, found in self._found(*STEPS):
            self._check(
                found.gradient is None or self._expected(step, rank, name) is not None,
                f"no rank gave a gradient of {name!r}, and rank {rank} ended with "
                f"{_few(found.gradient)}; launch() must not make something of zeros",
            )

    def test_a_second_step_carries_nothing_over(self) -> None:
        for _, rank, name, found in self._found("first"):
            first, again = found.gradient, self._seen()[rank].pieces["again"][name].gradient
            self._check(
                self._close(again, first),
                f"rank {rank} gave the same gradient of {name!r} in two steps, and ended with "
                f"{_few(first)}, then {_few(again)}; launch() must keep nothing of a step",
            )

    def test_a_step_is_finished_once(self) -> None:
        for _, rank, name, last in self._found(STEPS[-1]):
            seen = self._seen()[rank]
            after = seen.after_second_finish[name].gradient
            self._check(
                seen.second_finish.startswith("StepError") and _same(last.gradient, after),
                f"after a second finish() on rank {rank}, which said: {seen.second_finish}, the "
                f"gradient of {name!r} is {_few(after)} and was {_few(last.gradient)}; the work "
                f"that launch() returns ends when all its writes are done",
            )

    def test_copies_have_the_same_bits(self) -> None:
        self._need_values("first")
        for step, rank, name, found in self._found(*STEPS):
            for other in scenario.holders(rank, name):
                there = self._seen()[other].pieces[step].get(name)
                if there is None or there.begin != found.begin:
                    continue  # it steps other rows, or nothing
                self._check(
                    not self._alike(step, rank, other, name)
                    or _same(found.gradient, there.gradient),
                    f"ranks {rank} and {other} hold {name!r} and ended with "
                    f"{_few(found.gradient)} and {_few(there.gradient)}; what they make of a sum "
                    f"must have the same bits",
                )

    def test_every_element_is_stepped(self) -> None:
        for rank, seen in enumerate(self._seen()):
            for name in seen.parameters["first"]:
                lost = self._lost(rank, name)
                self._check(
                    not lost,
                    f"no rank steps elements {lost} of rank {rank}'s {name!r}, so they stay what "
                    f"they were; its reductions leave them on none of the ranks that hold it",
                )

    def test_updated_parameters_are_those_of_one_process(self) -> None:
        self._need_values("first")
        for rank, seen in enumerate(self._seen()):
            for name, found in seen.parameters["first"].items():
                expected = self._expected("first", rank, name)
                stepped = torch.zeros_like(found) if expected is None else -expected
                self._check(
                    self._close(found, stepped),
                    f"{name!r} on rank {rank} was zero, and the first step, which subtracts "
                    f"gradients, left it {_few(found)}, expected {_few(stepped)}; what a rank does "
                    f"not step itself must come from one that does: look at ranks and placements "
                    f"of reductions()",
                )

    def test_updated_copies_have_the_same_bits(self) -> None:
        self._need_values("first")
        for number, step in enumerate(STEPS, 1):
            for rank, seen in enumerate(self._seen()):
                for name, found in seen.parameters[step].items():
                    for other in scenario.holders(rank, name):
                        there = self._seen()[other].parameters[step][name]
                        alike = all(self._alike(s, rank, other, name) for s in STEPS[:number])
                        self._check(
                            not alike or _same(found, there),
                            f"ranks {rank} and {other} hold {name!r} and have {_few(found)} and "
                            f"{_few(there)} after the step {step!r}; what they step must have the "
                            f"same bits, or come from one of them",
                        )

    def test_every_access_is_ordered(self) -> None:
        for rank, seen in enumerate(self._seen()):
            self._check(
                not seen.violations,
                f"{len(seen.violations)} accesses on rank {rank} are left to luck; a collective "
                f"whose result launch() itself reads is called without async_op, and the work that "
                f"it returns waits for all others. The first:\n{''.join(seen.violations[:1])}",
            )

    # How it is found out.

    @classmethod
    def _specs(cls) -> Specs:
        return [scenario.importable(spec) for spec in (cls.handler, *cls.beside)]

    @classmethod
    @functools.cache
    def _plans(cls) -> dict[str, list[Plan]] | Exception:
        return _outcome(lambda: scenario.plans(cls._specs()))

    @classmethod
    @functools.cache
    def _ranks(cls) -> list[Seen] | Exception:
        steps, seconds = scenario.steps, TIMEOUT_SECONDS
        return _outcome(lambda: run_ranks(steps, 4, cls._specs(), timeout_seconds=seconds))

    def _planned(self) -> dict[str, list[Plan]]:
        return _good(self._plans(), "test_all_ranks_make_one_plan")

    def _seen(self) -> list[Seen]:
        self._planned()
        return _good(self._ranks(), "test_a_step_ends_on_every_rank")

    def _found(self, *steps: str) -> Iterator[tuple[str, int, str, Piece]]:
        for step in steps:
            for rank, seen in enumerate(self._seen()):
                for name, found in seen.pieces[step].items():
                    yield step, rank, name, found

    def _reductions(
        self, order: Sequence[ParameterRecord], view: Topology
    ) -> set[tuple[str, str, tuple[int, ...], str, float, str]]:
        asked = handlers.resolve(self.handler).plugin.reductions(order, view)
        return {
            (r.record.key, r.op, tuple(sorted(r.ranks)), r.placement.name, r.divisor, r.exchange)
            for r in asked
        }

    def _expected(self, step: str, rank: int, name: str) -> torch.Tensor | None:
        whole, own = scenario.whole(step, rank, name), scenario.given(step, rank, name)
        if whole is None:
            return None
        return self.expected(whole, torch.zeros_like(whole) if own is None else own.double())

    def _alike(self, step: str, rank: int, other: int, name: str) -> bool:
        """Whether two ranks that hold a parameter must have the same gradient of it."""
        return _same(*(self._expected(step, r, name) for r in (rank, other)))

    def _lost(self, rank: int, name: str) -> list[int]:
        """Returns the elements of a parameter that none of its holders steps."""
        whole = self._expected("first", rank, name)
        lost = set(range(0 if whole is None else whole.numel()))
        for other in scenario.holders(rank, name):
            piece = self._seen()[other].pieces["first"].get(name)
            lost -= set(range(piece.begin, piece.end) if piece else ())
        return sorted(lost)

    def _wrong(self, step: str) -> Iterator[str]:
        for _, rank, name, piece in self._found(step):
            found, own = piece.gradient, piece.of(scenario.given(step, rank, name))
            expected = piece.of(self._expected(step, rank, name))
            if expected is None:
                continue
            none = found is None and own is None  # where a handler leaves it to this rank alone
            if not self._close(torch.zeros_like(expected) if none else found, expected):
                values = f"found {_few(found)}, expected {_few(expected)}, own {_few(own)}"
                yield f"{name!r} on rank {rank}: {values}"

    def _check_values(self, step: str) -> None:
        wrong = list(self._wrong(step))
        self._check(
            not wrong,
            f"{len(wrong)} gradients are wrong by more than relative_error "
            f"{self.relative_error:g}. Look at ops and ranks of reductions(), and whether the work "
            f"of launch() ends before the sum is there; it leaves OWNER and SHARD to super(); "
            f"handlers that belong to it are listed in beside; if it means something else, "
            f"override expected(). The first:\n" + "\n".join(wrong[:5]),
        )

    def _need_values(self, step: str) -> None:
        if any(self._wrong(step)):
            raise SkipTest("nothing to look at: see test_gradients_are_those_of_one_process")

    def _close(self, found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
        if found is None or expected is None:
            return found is expected
        allowed = max(self.relative_error, 2 * torch.finfo(found.dtype).eps)
        error = (found.double() - expected.double()).abs().max()
        return bool(error <= allowed * expected.double().abs().max())

    def _check_ended(self, outcome: object, what: str) -> None:
        error = outcome if isinstance(outcome, Exception) else None
        notes = "\n".join(getattr(error, "__notes__", ()))
        self._check(error is None, f"{what}: {type(error).__name__}: {error}\n{notes}")

    def _check(self, good: bool, told: str) -> None:
        __tracebackhide__ = True  # of pytest
        if not good:
            raise AssertionError(f"handler {handlers.resolve(self.handler)}: {told}")


def _outcome(function: Callable[[], T]) -> T | Exception:
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - one check tells of it, others are skipped
        return error


def _good(outcome: T | Exception, check: str) -> T:
    if isinstance(outcome, Exception):
        raise SkipTest(f"nothing to look at: see {check}")
    return outcome


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both have the same bits, or are None."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _few(gradient: torch.Tensor | None) -> str:
    if gradient is None:
        return "None"
    return f"[{', '.join(f'{x:.7g}' for x in gradient.flatten()[:3].tolist())}, ...]"
