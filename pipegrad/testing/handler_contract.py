"""HandlerContract: the contract of gradient handlers, as a test class that authors subclass.

class TestMine(HandlerContract):
    handler = "mine"
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar, cast
from unittest import SkipTest

import torch

from pipegrad import ParameterRecord, Topology, handlers
from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import GradientHandler
from pipegrad.plugins.registry import Registry
from pipegrad.testing import handler_scenario as scenario
from pipegrad.testing.handler_scenario import STEPS, TOPOLOGIES, Piece, Seen, Specs
from pipegrad.testing.plugin_contract import PluginContract
from pipegrad.testing.ranks import run_ranks

T = TypeVar("T")
TIMEOUT_SECONDS = 120.0


class HandlerContract(PluginContract):
    """Checks a handler. Subclass it in a test module, as a class whose name begins with ``Test``.

    Plans are made for several topologies. Steps run on 4 gloo ranks, 2 stages by 2 data replicas,
    on a small model with tied, frozen, float32, bfloat16 and float64 parameters. The contract
    checks the tensors that the optimizer of each rank steps: parameters, shards of them, or nothing
    if another rank steps them. If replicas train alone with a handler, give it options by which
    they take their mean after each step. A check is skipped if it makes no sense because an earlier
    check has failed.

    Attributes:
        handler: The handler, as in a configuration: a name, a table of name and options, or a
            class.
        beside: The other handlers that a run would list with it.
        relative_error: Largest accepted error of a gradient, relative to its largest element. If
            the dtype of a parameter is coarser, twice the resolution of that dtype is accepted.
    """

    # The types are HandlerSpec and Sequence[HandlerSpec]. With Any a subclass needs no annotations.
    handler: ClassVar[Any]
    beside: ClassVar[Any] = ()
    relative_error: ClassVar[float] = 1e-6

    def expected(self, whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Returns the gradient that a rank must have after a step; override it if not `whole`.

        If a rank steps a shard of a parameter, only that shard is compared.

        Args:
            whole: The gradient of one process: the mean over data replicas of the sum over the
                stages that hold the parameter. In float64.
            own: The gradient of this rank before the reduction; zeros without one. In float64.
        """
        return whole

    # Its plans.

    def test_all_ranks_make_one_plan(self) -> None:
        plans = self._plans()
        self._check_ended(plans, "no plan")
        for mesh, every in self._planned().items():
            self._check(
                len({plan.digest for plan in every}) == 1,
                f"with {mesh} ranks' plans do not fit together; reductions() must depend on its "
                f"arguments alone:\n" + "\n".join(map(str, every)),
            )

    def test_a_plan_made_again_is_the_same(self) -> None:
        # A call must not depend on earlier calls, because pipegrad may plan several times with one
        # instance, also for other ranks.
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
        for mesh, topology in TOPOLOGIES.items():
            for view in map(topology.at, topology.ranks):
                records = scenario.records(view)
                orders = (records, records[::-1], records[1:] + records[:1])
                first, *others = (self._reductions(order, view) for order in orders)
                different = sorted(set().union(*(first ^ other for other in others)))
                self._check(
                    not different,
                    f"with {mesh}, rank {view.rank} reduces otherwise if its parameters come in "
                    f"another order; decide by what a record says: {different}",
                )

    def test_no_plan_depends_on_hash_seeds(self) -> None:
        self._planned()
        # Plans are made in other processes, because strings hash differently in each Python
        # process, and this order cannot be changed in a running process.
        made = _outcome(lambda: scenario.plans_under_seeds(self._specs(), "1", "4242"))
        self._check_ended(made, "a new process cannot plan; it must be importable there")
        first, second = cast("list[str]", made)
        pairs = zip(first.splitlines(), second.splitlines(), strict=False)
        different = [f"{line}\n{instead}" for line, instead in pairs if line != instead]
        self._check(
            first == second,
            "it plans otherwise under another PYTHONHASHSEED, which ranks need not share; do not "
            f"use hash(), and sort what comes out of a set:\n{''.join(different[:1])}",
        )

    # Its steps.

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
        for step, rank, name, piece in self._pieces(*STEPS):
            self._check(
                piece.gradient is None or self._expected(step, rank, name) is not None,
                f"no rank gave a gradient of {name!r}, and rank {rank} ended with "
                f"{few(piece.gradient)}; launch() must not make something of zeros",
            )

    def test_a_second_step_carries_nothing_over(self) -> None:
        for _, rank, name, piece in self._pieces("first"):
            first, again = piece.gradient, self._seen()[rank].pieces["again"][name].gradient
            self._check(
                self._close(again, first),
                f"rank {rank} gave the same gradient of {name!r} in two steps, and ended with "
                f"{few(first)}, then {few(again)}; launch() must keep nothing of a step",
            )

    def test_a_step_is_finished_once(self) -> None:
        for _, rank, name, last in self._pieces(STEPS[-1]):
            seen = self._seen()[rank]
            after = seen.after_second_finish[name].gradient
            self._check(
                seen.second_finish.startswith("StepError") and same_bits(last.gradient, after),
                f"after a second finish() on rank {rank}, which said: {seen.second_finish}, the "
                f"gradient of {name!r} is {few(after)} and was {few(last.gradient)}; the work "
                f"that launch() returns ends when all its writes are done",
            )

    def test_updated_parameters_are_those_of_one_process(self) -> None:
        self._need_values("first")
        for rank, seen in enumerate(self._seen()):
            for name, updated in seen.parameters["first"].items():
                expected = self._expected_step("first", rank, name)
                change = torch.zeros_like(updated) if expected is None else -expected
                self._check(
                    self._close(updated, change),
                    f"{name!r} on rank {rank} was zero, and the first step, which subtracts "
                    f"gradients, left it {few(updated)}, expected {few(change)}; what a rank does "
                    f"not step itself must come from one that does: look at ranks and placements "
                    f"of reductions()",
                )

    def test_updated_copies_have_the_same_bits(self) -> None:
        self._need_values("first")
        for number, step in enumerate(STEPS, 1):
            for rank, seen in enumerate(self._seen()):
                for name, updated in seen.parameters[step].items():
                    for other in scenario.holders(rank, name):
                        peer = self._seen()[other].parameters[step][name]
                        alike = self._joined_by() is not None or all(
                            self._alike(s, rank, other, name) for s in STEPS[:number]
                        )
                        self._check(
                            not alike or same_bits(updated, peer),
                            f"ranks {rank} and {other} hold {name!r} and have {few(updated)} and "
                            f"{few(peer)} after the step {step!r}; what they step must have the "
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

    # Inputs of the checks.

    @classmethod
    def _specs(cls) -> Specs:
        return [scenario.importable(spec) for spec in (cls.handler, *cls.beside)]

    # Plans and steps take seconds. They are made once for each class, and all checks share them.

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
        return _or_skip(self._plans(), "test_all_ranks_make_one_plan")

    def _seen(self) -> list[Seen]:
        self._planned()
        return _or_skip(self._ranks(), "test_a_step_ends_on_every_rank")

    def _pieces(self, *steps: str) -> Iterator[tuple[str, int, str, Piece]]:
        for step in steps:
            for rank, seen in enumerate(self._seen()):
                for name, piece in seen.pieces[step].items():
                    yield step, rank, name, piece

    def _reductions(
        self, order: Sequence[ParameterRecord], view: Topology
    ) -> set[tuple[str, str, tuple[int, ...], str, float, str]]:
        reductions = handlers.resolve(self.handler).plugin.reductions(order, view)
        return {
            (r.record.key, r.op, tuple(sorted(r.ranks)), r.placement.name, r.divisor, r.exchange)
            for r in reductions
        }

    def _expected(self, step: str, rank: int, name: str) -> torch.Tensor | None:
        whole = scenario.whole(step, rank, name, is_apart=self._joined_by() is not None)
        own = scenario.gradient_of(step, rank, name)
        if whole is None:
            return None
        return self.expected(whole, torch.zeros_like(whole) if own is None else own.double())

    def _expected_step(self, step: str, rank: int, name: str) -> torch.Tensor | None:
        """Returns the gradient by which a parameter has changed at the end of a step."""
        if (handler := self._joined_by()) is None:
            return self._expected(step, rank, name)
        if handler.equal_every != 1:
            raise SkipTest("replicas differ after this step: give the handler equal_every = 1")
        return scenario.whole(step, rank, name)

    @classmethod
    @functools.cache
    def _joined_by(cls) -> GradientHandler | None:
        """Returns the handler whose replicas train alone; None if they do not."""
        plugins = [handlers.resolve(spec).plugin for spec in cls._specs()]
        return next((p for p in plugins if p.independent_axes(scenario.LIVE)), None)

    def _alike(self, step: str, rank: int, other: int, name: str) -> bool:
        """True if two holders of a parameter must have the same gradient of it."""
        return same_bits(*(self._expected(step, r, name) for r in (rank, other)))

    def _wrong(self, step: str) -> Iterator[str]:
        for _, rank, name, piece in self._pieces(step):
            gradient, own = piece.gradient, piece.of(scenario.gradient_of(step, rank, name))
            expected = piece.of(self._expected(step, rank, name))
            if expected is None:
                continue
            is_unreduced = (
                gradient is None and own is None
            )  # if a handler leaves it to this rank alone
            if not self._close(torch.zeros_like(expected) if is_unreduced else gradient, expected):
                values = f"found {few(gradient)}, expected {few(expected)}, own {few(own)}"
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

    def _close(self, actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
        if actual is None or expected is None:
            return actual is expected
        allowed = max(self.relative_error, 2 * torch.finfo(actual.dtype).eps)
        error = (actual.double() - expected.double()).abs().max()
        return bool(error <= allowed * expected.double().abs().max())

    def _check_ended(self, outcome: object, complaint: str) -> None:
        error = outcome if isinstance(outcome, Exception) else None
        notes = "\n".join(getattr(error, "__notes__", ()))
        self._check(error is None, f"{complaint}: {type(error).__name__}: {error}\n{notes}")

    def _plugin(self) -> tuple[str, Registry[GradientHandler], Any]:
        return "handler", handlers, self.handler


def _outcome(function: Callable[[], T]) -> T | Exception:
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - one check reports it, the others are skipped
        return error


def _or_skip(outcome: T | Exception, check: str) -> T:
    if isinstance(outcome, Exception):
        raise SkipTest(f"nothing to look at: see {check}")
    return outcome


def same_bits(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """True if both have the same bits, or both are None."""
    # Bits, not values: NaN must equal NaN, and -0.0 must differ from 0.0.
    if first is None or second is None:
        return first is second
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def few(gradient: torch.Tensor | None) -> str:
    """Returns the first elements of a gradient as text."""
    if gradient is None:
        return "None"
    return f"[{', '.join(f'{x:.7g}' for x in gradient.flatten()[:3].tolist())}, ...]"
