"""The options of a gradient layer: one frozen record, passed whole to all that need one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from pipegrad.errors import PlanError
from pipegrad.plugins.handler import BUCKET_BYTES
from pipegrad.plugins.options import complaints_of
from pipegrad.topology import Topology


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """How gradients travel. `GradientSync`, `Scheduler` and `attach` take each field by its name.

    All ranks give the same.

    Attributes:
        bucket_bytes: Wire bytes at which a bucket is closed. A larger gradient travels alone.
        reduce_dtype: dtype on the wire. None: each gradient's own, which saves all copies.
        master_dtype: dtype of what the optimizer steps, and of its state. float32 gives parameters
            of lower precision a master copy of what this rank steps of them. None: each
            parameter's own; then nothing is copied.
        comm_streams: Side streams (on CPU threads), each with communicators of its own. A bucket
            stays in comm stream ``index % comm_streams``.
        allow_unsynced: Shell-style patterns of names, or of keys of ties, that may drift apart.
        stage_ticks: For each stage when its gradients are final, in any unit; orders the
            collectives. None: from the last stage to the first, as in every 1F1B-like schedule.
        shared_ticks: The same for gradients that stages on several ranks hold. None:
            `stage_ticks`.
    """

    bucket_bytes: int = BUCKET_BYTES
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    comm_streams: int = 2
    allow_unsynced: Sequence[str] = ()
    stage_ticks: Sequence[int] | None = None
    shared_ticks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("allow_unsynced", "stage_ticks", "shared_ticks"):
            value: Any = getattr(self, name)
            if value is None and name != "allow_unsynced":
                continue
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise PlanError(f"{name} is {value!r}, expected a list")
            object.__setattr__(self, name, tuple(value))

    @classmethod
    def of(cls, options: Mapping[str, Any], *, taker: str = "GradientSync") -> GradientOptions:
        """Returns the options that a caller has passed by name.

        Args:
            options: Name -> value.
            taker: What the caller has passed them to, for the message.

        Raises:
            PlanError: If a name is unknown; it names the closest one that is known.
        """
        if complaints := complaints_of(cls, options):
            raise PlanError(f"{taker} {complaints}")
        return cls(**options)

    def check(self, topology: Topology) -> None:
        """Refuses values that are wrong on any model.

        Raises:
            PlanError: Names the option and its value.
        """
        if self.bucket_bytes < 0 or self.comm_streams < 1:
            raise PlanError(
                f"bucket_bytes={self.bucket_bytes} must be at least 0 and "
                f"comm_streams={self.comm_streams} at least 1"
            )
        for name in ("reduce_dtype", "master_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not getattr(dtype, "is_floating_point", False):
                raise PlanError(f"{name} is {dtype!r}, expected one of floats or None")
        for name in ("stage_ticks", "shared_ticks"):
            ticks = getattr(self, name)
            if ticks is not None and len(ticks) != topology.num_stages:
                raise PlanError(f"{name} has {len(ticks)} entries for {topology.num_stages} stages")

    def settings(self) -> dict[str, object]:
        """Returns every option by name, for the comparison between ranks."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


DEFAULT_OPTIONS = GradientOptions()
