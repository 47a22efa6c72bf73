"""Main parameters: what an optimizer steps. Parameters, shards of them, or master copies.

Step 8 of the journey of a gradient in docs/internals.md.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipegrad.errors import PlanError
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.plan.plan import MainRange
from pipegrad.plugins.handler import ParameterRecord

GroupOf = Callable[[ParameterRecord], Mapping[str, Any]]
NamedGroupOf = Callable[[str, nn.Parameter], Mapping[str, Any] | None]

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
    """Whether the optimizer steps another tensor than the parameter, even without SHARD."""
    # It does for a master copy. It also does if the accessor keeps gradients elsewhere: an
    # optimizer looks only in ``.grad``, so the main shard has the gradient there.
    elsewhere = not isinstance(accessor, GradAttribute)
    return elsewhere or master_dtype_of(record, master_dtype) != record.dtype


class MainShard:
    """The tensor that the optimizer steps instead of a parameter: a shard, or a master copy.

    Args:
        main_range: The elements of the parameter.
        master_dtype: dtype of the tensor, and of the optimizer's state.
        gradient_dtype: dtype in which gradients of the parameter accumulate.

    Attributes:
        tensor: The main parameter, for the optimizer. Each step sets its ``.grad``.
        copied: Whether it has its own memory, in another dtype than the parameter.
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
        """Takes the values of `source`, and shares its memory if the dtypes are equal.

        Args:
            source: The parameter, or a shard of it.

        Sync: on the current stream.
        """
        # The optimizer may have been made already. So an existing tensor gets new memory, and stays
        # the same object. `.data` has its own version counter.
        self._source = source.data
        self.copied = source.dtype != self._dtype
        values = self._source.to(self._dtype)
        if hasattr(self, "tensor"):
            self.tensor.data = values
            return
        self.tensor = nn.Parameter(values)
        if not self.copied and self._gradient_dtype != self._dtype:
            self.tensor.grad_dtype = self._gradient_dtype

    def copy_back(self) -> None:
        """Copies updated values into the parameter, from a master copy.

        Sync: on the current stream.
        """
        if self.copied:
            self._source.copy_(self.tensor.data)

    def take(self, gradient: torch.Tensor | None, *, adds: bool = False) -> None:
        """Sets the ``.grad`` of the main parameter, in the dtype that the optimizer needs.

        Args:
            gradient: Of this step; None if no rank contributed.
            adds: Whether to add it to the gradient of the last step, which was not zeroed.
        """
        if gradient is not None:
            gradient = gradient.detach().to(self._dtype if self.copied else self._gradient_dtype)
        if not adds or self.tensor.grad is None:
            self.tensor.grad = gradient
        elif gradient is not None:
            self.tensor.grad.add_(gradient)


@dataclass(frozen=True)
class MainParameter:
    """What the optimizer of this rank steps for one parameter.

    Attributes:
        record: The parameter.
        tensor: The live parameter. With SHARD a flat tensor of its elements from `begin` on, in the
            order of memory; with a master dtype a copy.
        begin: 0 unless sharded.
        sharded: Whether it is a shard.
    """

    record: ParameterRecord
    tensor: nn.Parameter
    begin: int = 0
    sharded: bool = False

    @property
    def copied(self) -> bool:
        """Whether it is a copy, in another dtype than the parameter."""
        return self.tensor.dtype != self.record.dtype


def group_keys(
    records: Iterable[ParameterRecord], group_of: GroupOf | None
) -> list[tuple[dict[str, Any], list[str]]]:
    """Returns the options and the keys of each parameter group: one for each set of options.

    Args:
        records: Of all ranks.
        group_of: Record -> options of its group.
    """
    # Groups come from the records of all ranks, so all ranks have the same groups in the same
    # order, some of them empty. A learning-rate schedule and a checkpoint need this.
    groups: dict[Hashable, tuple[dict[str, Any], list[str]]] = {}
    for record in records:
        options = dict(group_of(record)) if group_of is not None else {}
        identity = repr(sorted(options.items()))
        groups.setdefault(identity, (options, []))[1].append(record.key)
    return list(groups.values())


def grouped(
    groups: Iterable[tuple[dict[str, Any], Sequence[str]]],
    main_parameters: Iterable[MainParameter],
) -> list[dict[str, Any]]:
    """Returns parameter groups for torch.optim, some of which may be empty.

    Args:
        groups: Of all ranks, by `group_keys`.
        main_parameters: Of this rank. Those in no group are left out.
    """
    group_of_key: dict[str, list[nn.Parameter]] = {}
    made = []
    for options, keys in groups:
        tensors: list[nn.Parameter] = []
        group_of_key |= dict.fromkeys(keys, tensors)
        made.append({"params": tensors, **options})
    for main_parameter in main_parameters:
        if main_parameter.record.key in group_of_key:
            group_of_key[main_parameter.record.key].append(main_parameter.tensor)
    return made


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer | type) -> None:
    """Refuses an optimizer whose update of an element depends on other elements.

    An optimizer that is not of torch.optim may step shards if its class has the attribute
    ``elementwise = True``.

    Raises:
        PlanError: If it may not step shards. It names the optimizers that may.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, _ELEMENTWISE) and getattr(kind, "elementwise", False) is not True:
        known = ", ".join(each.__name__ for each in _ELEMENTWISE)
        raise PlanError(
            f"{kind.__name__} cannot step sharded parameters: each rank has shards of them, and it "
            f"may look at a whole one. The handler 'owned' gives it whole matrices, and "
            f"others=torch.optim.AdamW steps the shards of all else. Those that look at no whole "
            f"parameter: {known}, or a class of your own with 'elementwise = True'. By "
            f"'data-parallel' each rank steps whole parameters"
        )
