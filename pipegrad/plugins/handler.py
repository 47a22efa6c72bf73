"""What a gradient handler sees, says and may override: the contract plug-ins implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import Parameter, Signature
from typing import Any, Literal, Protocol, Self

import torch
import torch.distributed as dist

from pipegrad.comm.work import Work
from pipegrad.plugins.registry import HANDLERS, Registry
from pipegrad.plugins.written import written
from pipegrad.topology import Topology

DEFAULT_HANDLERS = ("pipeline-shared", "data-parallel")
BUCKET_BYTES = 25 * 2**20  # at which a bucket is closed, as DistributedDataParallel's

Op = Literal["sum", "mean"]
Exchange = Literal["all-reduce", "pairwise", "asymmetric"]


class Placement(Enum):
    """Where the result of a reduction lives: fixes the collective, and the parameter sync."""

    OWNER = "owner"
    SHARD = "shard"
    REPLICATE = "replicate"


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter as the ranks agreed on it: plain data, the same on every rank.

    A parameter that several stages of one rank hold has one record there, at its lowest stage.

    Attributes:
        key: Stage and name at the lowest holder, for example ``"0.embed.weight"``: its identity.
        name: Name inside `stage`'s module, wrapper prefixes such as ``_orig_mod.`` stripped.
        stage: The stage this record looks at the parameter from.
        shape: Shape of the parameter (and of its gradient).
        dtype: dtype of the parameter; its gradient may have another.
        requires_grad: Whether it is trained. Untrained parameters are never reduced.
        holders: Every stage that holds it, ascending.
        position: Index in the order of ``named_parameters`` of the lowest holder.
    """

    key: str
    name: str
    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    holders: tuple[int, ...]
    position: int

    @property
    def shared(self) -> bool:
        """Whether several stages hold it."""
        return len(self.holders) > 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Reduction:
    """This gradient is summed (or averaged) over these global ranks, and the result lives there.

    Attributes:
        record: Whose gradient.
        ranks: Global ranks, each once, in any order.
        op: Sum or mean.
        placement: Where the result lives.
        divisor: What each rank's gradient is divided by before it leaves, besides a mean's own.
            Counts over a single rank as well: of what lives there alone.
        exchange: With REPLICATE over two ranks, how: ``pairwise``, by one message each way, the
            higher rank's as soon as its gradient is final; ``asymmetric``, the same, but the lower
            rank gives the rows alone that its gradient is not zero in. All give the same bits.
    """

    record: ParameterRecord
    ranks: tuple[int, ...]
    op: Op = "sum"
    placement: Placement = Placement.REPLICATE
    divisor: float = 1.0
    exchange: Exchange = "all-reduce"


@dataclass(frozen=True)
class ReductionStep:
    """One reduction of a route, over the ranks of one copy: what `GradientHandler.launch` gets.

    Attributes:
        axes: The mesh dimensions that it spans (``"dp"``, ``"pp[0,3]"``): the same on every copy.
        ranks: Global ranks of this copy, ascending.
        op: ``"mean"`` is launched as a sum. pipegrad divides afterwards; in float16 before.
        placement: Where the result lives.
        handler: Name of the handler that asked for it.
        exchange: How the result gets there.
    """

    axes: str
    ranks: tuple[int, ...]
    op: Op
    placement: Placement
    handler: str
    exchange: Exchange = "all-reduce"

    @property
    def owner(self) -> int:
        """The lowest rank. With OWNER it has the result; of equal results its own counts."""
        return self.ranks[0]

    @property
    def tail(self) -> int:
        """The highest rank: where a reduce chain begins and a broadcast chain ends."""
        return self.ranks[-1]

    @property
    def signature(self) -> tuple[str, ...]:
        """What it is, without its ranks: the same on every copy."""
        return (self.axes, self.op, self.placement.value, self.handler, self.exchange)

    @property
    def syncs_parameters(self) -> bool:
        """Whether updated parameters come back along it after the optimizer's step."""
        return self.placement is not Placement.REPLICATE

    @property
    def is_point_to_point(self) -> bool:
        """True if each rank sends its partial sum to the previous rank.

        The previous rank has posted the receive at the beginning of the step.
        """
        return self.placement is Placement.OWNER or self.exchange != "all-reduce"

    def spans(self, axis: str) -> bool:
        """Whether it goes along this mesh dimension; unknown, so False, for ``"ranks[..]"``."""
        return axis in {part.partition("[")[0] for part in self.axes.split("+")}

    def __str__(self) -> str:
        exchange = "" if self.exchange == "all-reduce" else f"{self.exchange}-"
        return f"{exchange}{self.placement.value}-{self.op}({self.axes})"


class FlatBucket(Protocol):
    """The gradients that travel together, as a handler's `launch` sees them.

    Attributes:
        is_mean: Set by a `launch` that leaves the mean already: then pipegrad does not divide.
    """

    is_mean: bool

    @property
    def index(self) -> int:
        """Its number: the same on all ranks, and in every step."""

    @property
    def payload(self) -> torch.Tensor:
        """The gradients of `buffer` alone, with the gaps between them, flat."""

    @property
    def flags(self) -> torch.Tensor:
        """The rest of it, one element a gradient, 1 where this rank contributed: to be summed."""

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Views of `payload`, one a flag, in the parameters' shapes.

        Behind a SHARD: what this rank's shard has of each, flat; empty where that is nothing.
        """

    @property
    def buffer(self) -> torch.Tensor:
        """Flat tensor ``(numel,)`` to be reduced in place; zero where nobody contributed."""

    def reduce(self, reduction: ReductionStep, group: dist.ProcessGroup) -> Work:
        """Sums over `group` as the reduction's placement says: what `launch` does by itself.

        A mean of float16 is divided before, so that its sum does not overflow; `is_mean` is set.
        """


class Averaging(Protocol):
    """What averages in the place of an all-reduce: `pipegrad.CommunicationHook` does.

    Its verbs are those of the handler that has it.
    """

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        """As `GradientHandler.launch`; it sets ``bucket.is_mean``."""

    def state_dict(self) -> dict[str, Any]:
        """As `GradientHandler.state_dict`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `GradientHandler.load_state_dict`."""


class GradientHandler(ABC):
    """Says which gradients take which reduction. Nothing else is its business.

    Options are keyword-only arguments of ``__init__``. Subclasses import only ``pipegrad``'s
    public names.

    Attributes:
        hook: Set in ``__init__``, how `launch` averages: then every reduction must be a mean that
            lives on all ranks.
        keeps_equal: False in one that sends nothing, for measuring: copies drift apart then, and
            `GradientSync.finish` does not compare them.
        made_with: The arguments it was constructed with, in words.
    """

    hook: Averaging | None = None
    keeps_equal: bool = True
    made_with: tuple[tuple[str, str], ...]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Notes what the handler is made with, so that ranks can compare instances."""
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        made = super().__new__(cls)
        given = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        made.made_with = tuple((name, written(given[name])) for name in sorted(given))
        return made

    @abstractmethod
    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns the reductions of the parameters that ``topology.rank`` holds.

        Pure: called once for every rank (``topology.at(rank)``), on every rank, so that any
        rank's plan can be computed anywhere. Reductions over a single rank are free and dropped,
        but for their divisors.
        """

    def check(  # noqa: B027 - need not be overridden
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> None:
        """Raises, in words, if the handler's options do not fit the model; by default never.

        Called once on every rank, with the parameters of all stages. Pure, as `reductions`.
        """

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        """Sums ``bucket.buffer`` in place over `group`, or averages it as `hook` does.

        Overridden for another way to send it: with REPLICATE all of the sum must be there
        afterwards, on every rank. Leave other placements and exchanges to ``super().launch``.

        Sync: runs on a comm stream, never on the compute stream: on CPU in the comm stream's
            thread, on devices
        with the comm stream's side stream current, after every producer of the bucket. The buffer
        is held until the returned work is done.
        """
        if self.hook is not None:
            return self.hook.launch(bucket, reduction, group)
        return bucket.reduce(reduction, group)

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank keeps from step to step: numbers, strings and CPU tensors.

        Overridden where `launch` keeps something of its own; by default what `hook` keeps.
        """
        return {} if self.hook is None else self.hook.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned on the same rank; afresh if it is empty.

        Raises:
            ValueError: If it is of something else.
        """
        if self.hook is not None:
            self.hook.load_state_dict(state)
        elif state:
            raise ValueError("it has no communication hook, and takes nothing that one kept")


def keeps_state(handler: GradientHandler) -> bool:
    """Whether a handler may keep something from step to step that the next one depends on."""
    overridden = type(handler).state_dict is not GradientHandler.state_dict
    return handler.hook is not None or overridden


# What a handler takes is what its __init__ takes, and nothing without one.
GradientHandler.__new__.__signature__ = Signature(  # type: ignore[attr-defined]
    [Parameter("cls", Parameter.POSITIONAL_ONLY)]
)


HandlerSpec = GradientHandler | type[GradientHandler] | str | Mapping[str, object]
"""How a handler is chosen: an instance, a class, a name, or a table of name and options."""

# mypy takes type[T] for something to be called (python/mypy#4717); a base is only compared with.
handlers = Registry(HANDLERS, GradientHandler)  # type: ignore[type-abstract]
