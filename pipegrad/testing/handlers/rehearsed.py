"""Rehearsed: runs a handler for HandlerContract and compares what its ranks saw."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar
from unittest import SkipTest

import torch

from pipegrad import ParameterRecord, Topology, handlers
from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import GradientHandler
from pipegrad.plugins.registry import Registry
from pipegrad.testing.handlers import scenario
from pipegrad.testing.handlers.scenario import Piece, Seen, Specs
from pipegrad.testing.plugin_contract import PluginContract
from pipegrad.testing.ranks import run_ranks

T = TypeVar("T")
TIMEOUT_SECONDS = 120.0


class Rehearsed(PluginContract):
    """A handler, and what the scenario showed of it. Plans and steps are made once for each class.

    Attributes:
        handler: The handler, as a configuration lists it.
        beside: The other handlers of the run.
        relative_error: The largest accepted error of a gradient.
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
        """Returns the gradient with which a parameter has moved when a step has ended."""
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

    def _unstepped(self, rank: int, name: str) -> list[int]:
        """Returns the elements of a parameter that no holder steps."""
        whole = self._expected("first", rank, name)
        unstepped = set(range(0 if whole is None else whole.numel()))
        for other in scenario.holders(rank, name):
            piece = self._seen()[other].pieces["first"].get(name)
            unstepped -= set(range(piece.begin, piece.end) if piece else ())
        return sorted(unstepped)

    def _wrong(self, step: str) -> Iterator[str]:
        for _, rank, name, piece in self._pieces(step):
            gradient, own = piece.gradient, piece.of(scenario.gradient_of(step, rank, name))
            expected = piece.of(self._expected(step, rank, name))
            if expected is None:
                continue
            is_unreduced = (
                gradient is None and own is None
            )  # where a handler leaves it to this rank alone
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
