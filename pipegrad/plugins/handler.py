"""The contract of gradient handlers: their arguments, their results, and methods to override.

Handlers whose options name functions check them by `complaints_of` and `closest_first`.

To add a placement, give it a member of `Placement`, at its position in a route. plan/routes.py says
which ranks continue, and plan/buckets.py with which elements. Then add its collectives, there and
back, to gradients/reductions.py, and a row to tests/parity/test_gradient_placements.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from pipegrad.comm.sync_points import Done as Done  # noqa: PLC0414 - public
from pipegrad.comm.sync_points import Work
from pipegrad.plugins.registry import HANDLERS, Registry
from pipegrad.plugins.registry import closest_first as closest_first  # noqa: PLC0414 - public
from pipegrad.plugins.registry import complaints_of as complaints_of  # noqa: PLC0414 - public
from pipegrad.plugins.written import Constructed
from pipegrad.topology import Topology

DEFAULT_HANDLERS = ("pipeline-shared", "data-parallel")
# Usual names of embeddings and heads. Muon is meant for the matrices between them.
EMBEDDINGS_AND_HEADS = ("*embed*", "*lm_head*", "head.*", "*.head.*", "output.*", "*classifier*")
BUCKET_BYTES = 25 * 2**20  # a bucket is closed at this size, as in DistributedDataParallel

Op = Literal["sum", "mean"]
Exchange = Literal["all-reduce", "asymmetric"]


class Placement(Enum):
    """The place of a reduction's result. It determines the collective and the parameter sync.

    OWNER: on the lowest rank. WHOLE: each parameter whole on one of the ranks, another one for each
    parameter. SHARD: a shard on each rank. REPLICATE: on every rank. The reductions of a route come
    in this order, because less is sent: after OWNER only the owner takes part, and after WHOLE and
    SHARD each rank replicates only its part.
    """

    OWNER = "owner"
    WHOLE = "whole"
    SHARD = "shard"
    REPLICATE = "replicate"

    @property
    def scatters(self) -> bool:
        """True if each rank goes on with its own part of a bucket: a reduce-scatter."""
        return self in (Placement.WHOLE, Placement.SHARD)


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter, as plain data on which the ranks agreed: the same on every rank.

    If several stages of a rank hold a parameter, the rank has one record, of its lowest stage.

    Attributes:
        key: The identity: stage and name at the lowest holder, for example ``"0.embed.weight"``.
        name: Name in the module of `stage`, without wrapper prefixes such as ``_orig_mod.``.
        stage: The stage of this record.
        shape: Shape of the parameter, and of its gradient.
        dtype: dtype of the parameter. Its gradient may have another dtype.
        requires_grad: Whether it is trained. Other parameters are never reduced.
        holders: All stages that hold it, ascending.
        position: Index in the order of ``named_parameters`` of the lowest holder.
        kind: Class name of the first module at the lowest holder that has it, for example
            ``"Embedding"``.
        aliases: Its other names in the module of `stage`.
        tied_in_stage: Whether several modules of one stage hold it. A module with several names is
            one module.
    """

    key: str
    name: str
    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    holders: tuple[int, ...]
    position: int
    kind: str = ""
    aliases: tuple[str, ...] = ()
    tied_in_stage: bool = False

    @property
    def shared(self) -> bool:
        """True if several stages hold it."""
        return len(self.holders) > 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, its name at the lowest holder, and its aliases: for patterns of options."""
        # All names, because neither the cut nor the order of registration may change the parameters
        # that a pattern selects: a tied parameter has another name on each stage, the cut decides
        # if two holders are in one stage, and the order decides which of them has the first name.
        return (self.name, self.key.partition(".")[2], *self.aliases)

    def is_matrix(self, others: Sequence[str] = EMBEDDINGS_AND_HEADS) -> bool:
        """True if an optimizer such as Muon should step it: not a vector, an embedding, or a head.

        It has two dimensions or more of more than one element. The class name of its module does
        not contain "Embedding". No other module holds it, as a tied head does.

        Args:
            others: Shell-style patterns of names of other parameters, case-sensitive. They are
                compared with all of its names.
        """
        return (
            sum(size > 1 for size in self.shape) > 1
            and "Embedding" not in self.kind
            and not self.shared
            and not self.tied_in_stage
            and not matches_any(others, self.names)
        )


def matches_any(patterns: Sequence[str], names: Iterable[str]) -> bool:
    """True if a shell-style pattern matches one of some names, case-sensitive."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


@dataclass(frozen=True)
class Reduction:
    """A request: sum (or average) a gradient over some global ranks.

    Attributes:
        record: The parameter of the gradient.
        ranks: Global ranks, each once, in any order.
        op: Sum or mean.
        placement: Place of the result.
        divisor: Each rank's gradient is divided by this before it is sent, in addition to the
            division of a mean. It also counts for a reduction over a single rank.
        exchange: Kind of sum with REPLICATE over two ranks. ``asymmetric``: one message in each
            direction. The higher rank sends as soon as its gradient is final. The lower rank sends
            only rows of its gradient that are not zero. The result has the bits of an all-reduce.
    """

    record: ParameterRecord
    ranks: tuple[int, ...]
    op: Op = "sum"
    placement: Placement = Placement.REPLICATE
    divisor: float = 1.0
    exchange: Exchange = "all-reduce"


@dataclass(frozen=True)
class ReductionStep:
    """One reduction of a route, for `GradientHandler.launch`.

    Several groups of ranks may run the same reduction, each for its own copy of the parameter.

    Attributes:
        axes: The mesh dimensions that it spans (``"dp"``, ``"pp[0,3]"``). The same in each group.
        ranks: Global ranks of this group, ascending.
        op: ``"mean"`` is launched as a sum, and pipegrad divides afterwards. If the handler does
            not override `launch`, pipegrad may divide before: see `FlatBucket.is_mean`.
        placement: Place of the result.
        handler: Name of the handler that has requested it.
        exchange: Kind of sum of two ranks.
    """

    axes: str
    ranks: tuple[int, ...]
    op: Op
    placement: Placement
    handler: str
    exchange: Exchange = "all-reduce"

    @property
    def owner(self) -> int:
        """The lowest rank. With OWNER it has the result. Equal results count on this rank."""
        return self.ranks[0]

    @cached_property
    def signature(self) -> tuple[str, ...]:
        """All its properties except the ranks: the same in each group."""
        return (self.axes, self.op, self.placement.value, self.handler, self.exchange)

    @property
    def syncs_parameters(self) -> bool:
        """True if updated parameters are sent along it, backwards, after the optimizer's step."""
        return self.placement is not Placement.REPLICATE

    @property
    def is_point_to_point(self) -> bool:
        """True if each rank sends its partial sum to the previous rank.

        The previous rank has posted the receive at the start of the step.
        """
        return self.placement is Placement.OWNER or self.is_pair

    @property
    def is_pair(self) -> bool:
        """True if two ranks exchange their parts by messages: see `Reduction.exchange`."""
        return self.exchange == "asymmetric"

    def spans(self, axis: str) -> bool:
        """True if it spans this mesh dimension. False for ``"ranks[..]"``, which is unknown."""
        return axis in {part.partition("[")[0] for part in self.axes.split("+")}

    def __str__(self) -> str:
        exchange = "" if self.exchange == "all-reduce" else f"{self.exchange}-"
        return f"{exchange}{self.placement.value}-{self.op}({self.axes})"


class FlatBucket(Protocol):
    """Gradients that are reduced together, for a handler's `launch`.

    Attributes:
        is_mean: A `launch` sets it if it leaves the mean. Then pipegrad does not divide. It is True
            already if gradients were divided before.
    """

    is_mean: bool

    @property
    def index(self) -> int:
        """The number of the bucket: the same on all ranks, and in every step."""

    @property
    def payload(self) -> torch.Tensor:
        """The part of `buffer` with the gradients, and the gaps between them, flat."""

    @property
    def flags(self) -> torch.Tensor:
        """The rest of `buffer`, to be summed: for each gradient 1 if this rank contributed."""

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Views of `payload`, one for each flag, in the shapes of the parameters.

        After a reduction with SHARD or WHOLE: one view, of all that this rank has.
        """

    @property
    def buffer(self) -> torch.Tensor:
        """Flat tensor ``(numel,)``, to be reduced in place. Zero if this rank has no gradient."""

    def reduce(self, reduction: ReductionStep, group: dist.ProcessGroup) -> Work:
        """Sums over `group` with the reduction's placement; the default `launch` calls it.

        For a mean it divides before the sum, because a sum of float16 may overflow, and sets
        `is_mean`. With a `sum_dtype`, it divides the wide sum and sets `is_mean`.
        """


class OuterOptimizer(Protocol):
    """Joins replicas that train alone; see `GradientHandler.outer_optimizer`.

    Between steps it may use the result of ``sync.main_parameters()``, and communicators of
    ``sync.group``. It may write parameters by ``.data`` alone, because other writes look like a
    step of an optimizer.
    """

    def begin(self) -> None:
        """Makes all replicas equal, with the values of the first one, and starts anew.

        Every rank calls it, at the start and in ``sync.synchronize_parameters()``.
        """

    @property
    def is_due(self) -> bool:
        """True if to step now. All ranks read it after the same ``sync.statistics().steps``."""

    def step(self) -> None:
        """Steps if it is due, after this rank's optimizer, and before anything is published.

        An error inside is final for all ranks.
        """

    def state_dict(self) -> dict[str, Any]:
        """As `GradientHandler.state_dict`; never empty, with the parameters of this replica."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `GradientHandler.load_state_dict`. If the state is empty, `begin` follows."""


class GradientHandler(Constructed, ABC):
    """Returns the reductions of gradients. pipegrad does everything else.

    Options are keyword-only arguments of ``__init__``. Subclasses import only ``pipegrad``'s
    public names.

    Attributes:
        leaves: ``"mean"`` if `launch` always averages. Then pipegrad does not divide, and every
            reduction must be a mean with REPLICATE.
        equal_every: Steps after which replicas along `independent_axes` are equal again.
        keeps_equal: False in a handler that sends nothing, for measurements. Then copies drift
            apart, and `GradientSync.finish` does not compare them.
    """

    leaves: Op = "sum"
    equal_every: int = 1
    keeps_equal: bool = True

    @abstractmethod
    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns the reductions of the parameters that ``topology.rank`` holds.

        It must be pure. Every rank calls it for every rank (``topology.at(rank)``), and computes
        the plans of all ranks. Reductions over a single rank cost nothing: they are dropped, except
        their divisors.
        """

    def check(self, parameters: Sequence[ParameterRecord], topology: Topology) -> None:
        """Raises an error if the handler's options do not fit the model. By default it does not.

        It is called once on every rank, with the parameters of all stages. It must be pure.
        """

    def independent_axes(self, topology: Topology) -> tuple[str, ...]:
        """Returns the data dimensions along which replicas train alone. By default there is none.

        Then no handler may reduce a gradient along them. Each replica has its own parameters, norm
        and optimizer's state. `outer_optimizer` makes replicas equal again. One handler alone may
        return dimensions of more than one rank. It must be pure.
        """
        return ()

    def outer_optimizer(self, sync: Any) -> OuterOptimizer:  # noqa: ANN401 - it imports this
        """Returns an object that joins replicas along `independent_axes`; called once per sync.

        Every rank calls it, after the ranks have agreed on a plan. It must send nothing. If it
        raises an error, all ranks do.

        Args:
            sync: The `GradientSync`. It is a weak reference.
        """
        raise NotImplementedError("it has independent_axes() and no outer_optimizer()")

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        """Sums ``bucket.buffer`` in place over `group`.

        Override it to send in another way. With REPLICATE, every rank must have the whole sum
        afterwards. Leave other placements and exchanges to ``super().launch``. Return its work, or
        wrap it: a work that wraps a `LateWork` must be a `LateWork` too.

        Returns:
            The work to wait for, right after the launch; or a `LateWork`, to wait for at the end of
            the step. Return a `LateWork` if its wait blocks the host, or computes.

        Sync: runs on a comm stream, never on the compute stream: on CPU in its thread, on devices
        with its side stream current, after all producers of the bucket. pipegrad keeps the buffer
        until the returned work is done.
        """
        # Step 6 of the journey of a gradient in docs/internals.md.
        return bucket.reduce(reduction, group)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state from step to step: numbers, strings and CPU tensors.

        By default there is none. Override it if `launch` has a state.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a result of `state_dict` of the same rank; starts anew if it is empty.

        Raises:
            ValueError: If it is the state of something else.
        """
        if state:
            raise ValueError(
                "it keeps nothing from step to step, and this is what another one kept"
            )


HandlerSpec = GradientHandler | type[GradientHandler] | str | Mapping[str, object]
"""How a user selects a handler: an instance, a class, a name, or a table of name and options."""

# mypy assumes that a type[T] is called (python/mypy#4717). The registry only compares with it.
handlers = Registry(HANDLERS, GradientHandler)  # type: ignore[type-abstract]
