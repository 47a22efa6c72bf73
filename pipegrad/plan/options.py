"""The options of the gradient layer: one frozen record, always passed as a whole.

To add an option, add a field with its docstring and its limits in `check`; ranks compare it then,
and every entry accepts it by name. Use it in one place. Its key for a TOML file is in
train/schema.py, and wrong values are rows of tests/ranks/gradients/test_sync_failures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from pipegrad.errors import PlanError
from pipegrad.plugins.handler import BUCKET_BYTES
from pipegrad.plugins.registry import complaints_of
from pipegrad.topology import Topology

STEP_SECONDS = 600.0
# Comparing copies costs less than 0.1 % of a step then: benchmarks/overhead.
CHECK_EVERY = 500

# Names of options, a check of a value, and a description of the valid values.
_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("bucket_bytes", "check_every"),
        lambda x: type(x) is int and x >= 0,
        "a whole number of at least 0",
    ),
    (("comm_streams",), lambda x: type(x) is int and x >= 1, "a whole number of at least 1"),
    (
        ("step_timeout_seconds",),
        lambda x: isinstance(x, int | float) and x is not True and x > 0,
        "a number above 0",
    ),
    (
        ("reduce_dtype", "sum_dtype", "master_dtype"),
        # At least 16 bits, because torch adds no numbers of eight bits.
        lambda x: x is None or (getattr(x, "is_floating_point", False) and x.itemsize > 1),
        "one of floats of at least 16 bits, or None",
    ),
)


class GradientKeywords(TypedDict, total=False):
    """The fields of `GradientOptions` that a `Scheduler` takes by name, for type checkers."""

    bucket_bytes: int
    reduce_dtype: torch.dtype | None
    sum_dtype: torch.dtype | None
    master_dtype: torch.dtype | None
    comm_streams: int
    allow_unsynced: Sequence[str]
    step_timeout_seconds: float
    check_every: int


class SyncKeywords(GradientKeywords, total=False):
    """All fields of `GradientOptions`. A `Scheduler` takes no ticks, as its schedule has them."""

    stage_ticks: Sequence[int] | None
    shared_ticks: Sequence[int] | None


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """Options of the gradient layer, for `GradientSync`, `Scheduler` and `attach`, by name.

    All options must be the same on all ranks.

    Attributes:
        bucket_bytes: Wire bytes at which a bucket is closed. A larger gradient has its own bucket.
        reduce_dtype: dtype on the wire. None: the dtype of each gradient, which needs no copy.
        sum_dtype: dtype in which the parts of ranks are added, if it is wider than the dtype on the
            wire. The sum is rounded once. None: the dtype on the wire.
        master_dtype: dtype of the main parameters, and of the optimizer's state. With float32, each
            parameter of lower precision has a master copy of the part that this rank steps. None:
            the dtype of each parameter, which needs no copy.
        comm_streams: Number of side streams (on CPU, threads), each with its own communicators. A
            bucket uses comm stream ``index % comm_streams``.
        allow_unsynced: Shell-style patterns of names, or of keys of ties, that may drift apart.
        stage_ticks: For each stage, the time when its gradients are final, in any unit. It orders
            the collectives. None: from the last stage to the first, as in all schedules like 1F1B.
        shared_ticks: For each stage, the time for gradients that stages on several ranks hold.
            None: `stage_ticks`.
        step_timeout_seconds: Time limit of a step, or of another verb, on a rank. If it takes
            longer, the job ends on all ranks with a report: `pipegrad.errors.StallError`. Infinity
            waits for ever.
        check_every: Steps between comparisons of the copies of each parameter; the first ones are
            in steps 2, 4, 8 and so on. 0: never.
    """

    bucket_bytes: int = BUCKET_BYTES
    reduce_dtype: torch.dtype | None = None
    sum_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    comm_streams: int = 2
    allow_unsynced: Sequence[str] = ()
    stage_ticks: Sequence[int] | None = None
    shared_ticks: Sequence[int] | None = None
    step_timeout_seconds: float = STEP_SECONDS
    check_every: int = CHECK_EVERY

    def __post_init__(self) -> None:
        for name in ("allow_unsynced", "stage_ticks", "shared_ticks"):
            value: Any = getattr(self, name)
            if value is None and name != "allow_unsynced":
                continue
            # Refuse sets, because their elements have another order on each rank.
            if isinstance(value, str | Set | Mapping) or not isinstance(value, Iterable):
                raise PlanError(f"{name} is {value!r}, expected a list")
            object.__setattr__(self, name, tuple(value))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> GradientOptions:
        """Returns options that were passed by name.

        Args:
            options: Name -> value.

        Raises:
            PlanError: If a name is unknown. It lists the known names, the closest first.
        """
        if complaints := complaints_of(cls, options):
            raise PlanError(f"GradientSync {complaints}")
        return cls(**options)

    def check(self, topology: Topology) -> None:
        """Refuses values that are wrong for any model.

        Raises:
            PlanError: If a value is wrong. It names the option and its value.
        """
        for names, is_right, expected in _RULES:
            for name in names:
                if not is_right(value := getattr(self, name)):
                    raise PlanError(f"{name} is {value!r}, expected {expected}")
        for name in ("stage_ticks", "shared_ticks"):
            ticks = getattr(self, name)
            if ticks is not None and len(ticks) != topology.num_stages:
                raise PlanError(f"{name} has {len(ticks)} entries for {topology.num_stages} stages")


DEFAULT_OPTIONS = GradientOptions()
