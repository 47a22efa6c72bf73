"""What an optimizer steps: parameters as they are, shards of them, or copies in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipegrad.errors import PlanError
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.plan.plan import MainRange
from pipegrad.plugins.handler import ParameterRecord

GroupOf = Callable[[ParameterRecord], Mapping[str, Any]]

_ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def master_dtype_of(record: ParameterRecord, master_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which the optimizer steps a parameter."""
    return master_dtype if master_dtype and record.dtype.is_floating_point else record.dtype


def has_main_shard(
    record: ParameterRecord, accessor: GradientAccessor, master_dtype: torch.dtype | None
) -> bool:
    """Whether the optimizer steps something else: in another dtype, or with its gradient there."""
    elsewhere = not isinstance(accessor, GradAttribute)
    return elsewhere or master_dtype_of(record, master_dtype) != record.dtype


class MainShard:
    """What the optimizer steps in a parameter's place: a shard of it, or a copy in another dtype.

    Args:
        share: Which elements.
        master_dtype: What the optimizer steps, and has its state in.
        gradient_dtype: dtype in which gradients of the parameter accumulate.

    Attributes:
        tensor: What the optimizer gets; its ``.grad`` is set by each step.
        copied: Whether it has memory of its own.
    """

    def __init__(
        self, main_range: MainRange, master_dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> None:
        self.main_range = main_range
        self._dtype = master_dtype
        self.copied = False
        self._gradient_dtype = gradient_dtype
        self.tensor: nn.Parameter

    def take_values(self, source: torch.Tensor) -> None:
        """Takes the values of `source`, the parameter or a shard of it, and its memory if it can.

        Sync: on the current stream.
        """
        self._source = source.data  # with a version of its own
        self.copied = source.dtype != self._dtype
        values = self._source.to(self._dtype)
        if hasattr(self, "tensor"):
            self.tensor.data = values
            return
        self.tensor = nn.Parameter(values)
        if not self.copied and self._gradient_dtype != self._dtype:
            self.tensor.grad_dtype = self._gradient_dtype

    def give_back(self) -> None:
        """Brings updated values into the parameter's memory.

        Sync: on the current stream.
        """
        if self.copied:
            self._source.copy_(self.tensor.data)

    def take(self, gradient: torch.Tensor | None, *, adds: bool = False) -> None:
        """Hands the optimizer its gradient, cast if need be; None if nobody contributed.

        Args:
            gradient: The step's.
            adds: Whether to add it to that of the step before, which nobody has zeroed.
        """
        if gradient is not None:
            gradient = gradient.detach().to(self._dtype if self.copied else self._gradient_dtype)
        if not adds or self.tensor.grad is None:
            self.tensor.grad = gradient
        elif gradient is not None:
            self.tensor.grad.add_(gradient)


@dataclass(frozen=True)
class MainParameter:
    """What the optimizer of this rank steps of one parameter.

    Attributes:
        record: Which one.
        tensor: The live parameter; with SHARD, flat, its elements from `begin` on as they lie in
            memory; with a stored dtype a copy.
        begin: 0 unless sharded.
        sharded: Whether it is a shard.
    """

    record: ParameterRecord
    tensor: nn.Parameter
    begin: int = 0
    sharded: bool = False

    @property
    def copied(self) -> bool:
        """Whether its values are its own, in a dtype that is not the parameter's."""
        return self.tensor.dtype != self.record.dtype


def grouped(
    records: Iterable[ParameterRecord],
    main_parameters: Iterable[MainParameter],
    group_of: GroupOf | None,
) -> list[dict[str, Any]]:
    """Returns parameter groups as torch.optim takes them, one for all records with equal options.

    Args:
        records: Of all ranks, so that all have the same groups, in the same order.
        main_parameters: This rank's.
        group_of: Record -> options of its group.
    """
    found: dict[Hashable, dict[str, Any]] = {}
    group_of_key: dict[str, dict[str, Any]] = {}
    for record in records:
        options = dict(group_of(record)) if group_of is not None else {}
        identity = repr(sorted(options.items()))
        group_of_key[record.key] = found.setdefault(identity, {"params": [], **options})
    for one in main_parameters:
        group_of_key[one.record.key]["params"].append(one.tensor)
    return list(found.values())


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer | type) -> None:
    """Refuses an optimizer whose update of a parameter's element depends on other elements.

    One of another origin than torch.optim says that it may step shards by a class attribute
    ``elementwise = True``.

    Raises:
        PlanError: Names it, and those that can be taken.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, _ELEMENTWISE) and getattr(kind, "elementwise", False) is not True:
        known = ", ".join(each.__name__ for each in _ELEMENTWISE)
        raise PlanError(
            f"{kind.__name__} cannot step sharded parameters: each rank has shards of them, and it "
            f"may look at a whole one. Those that do not: {known}, or a class of your own with "
            f"'elementwise = True'; or place the gradients by REPLICATE"
        )
