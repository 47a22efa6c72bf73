"""Main parameters: the tensors that an optimizer steps: parameters, shards, or master copies.

Step 8 of the journey of a gradient in docs/internals.md. In a checkpoint their state is under names
of the uncut model, the state of a shard as a `Chunk`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipegrad.errors import PlanError
from pipegrad.model.main_grad import MainGrad
from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import ParameterRecord
from pipegrad.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

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
    record: ParameterRecord, main_grad: MainGrad | None, master_dtype: torch.dtype | None
) -> bool:
    """True if the optimizer steps another tensor than the parameter, even without SHARD."""
    # It does for a master copy. It also does for gradients in `main_grad`, because an optimizer
    # reads only ``.grad``: the main shard has the gradient there.
    return main_grad is not None or master_dtype_of(record, master_dtype) != record.dtype


@dataclass(eq=False)
class MainParameter:
    """The tensor that the optimizer of this rank steps for one parameter.

    Attributes:
        record: The parameter.
        tensor: The parameter itself. With SHARD a flat tensor of its elements from `begin` on, in
            the order of memory. With a master dtype a copy.
        begin: Index of the first element; 0 unless sharded.
        sharded: Whether it is a shard.
        stride: Stride of the whole parameter in memory, if it is sharded.
        source: The memory of the parameter, or of the shard, if `tensor` is not the parameter.
    """

    record: ParameterRecord
    tensor: nn.Parameter
    begin: int = 0
    sharded: bool = False
    stride: tuple[int, ...] = ()
    source: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def copied(self) -> bool:
        """True if it is a copy, in another dtype than the parameter."""
        return self.tensor.dtype != self.record.dtype

    def bind(self, source: Tensor) -> None:
        """Takes the values of the parameter or the shard, and its memory if the dtypes are equal.

        Sync: on the current stream.
        """
        # Keep the object, because an optimizer may have it. Set `.data`, because it counts its own
        # versions: a write to one tensor, or of a parameter sync, is no write to the others.
        self.source = source.data
        self.tensor.data = self.source.to(self.tensor.dtype)

    def copy_back(self) -> None:
        """Copies updated values into the parameter, from a master copy.

        Sync: on the current stream.
        """
        if self.copied:
            self.source.copy_(self.tensor.data)

    def set_grad(self, gradient: Tensor | None) -> None:
        """Sets ``.grad`` of `tensor`, in the dtype that the optimizer needs."""
        # A gradient of that dtype is not copied, because `.grad` is then a view of the bucket.
        self.tensor.grad = (
            None if gradient is None else gradient.detach().to(self.tensor.grad_dtype)
        )


def group_keys(
    records: Iterable[ParameterRecord], group_of: GroupOf | None
) -> list[tuple[dict[str, Any], list[str]]]:
    """Returns the options and the keys of each parameter group: one for each set of options."""
    # Use the records of all ranks, because all ranks must have the same groups in the same order,
    # some of them empty. A learning-rate schedule and a checkpoint need this.
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for record in records:
        options = dict(group_of(record)) if group_of is not None else {}
        groups.setdefault(repr(sorted(options.items())), (options, []))[1].append(record.key)
    return list(groups.values())


def grouped(
    groups: Iterable[tuple[dict[str, Any], Sequence[str]]],
    main_parameters: Iterable[MainParameter],
) -> list[dict[str, Any]]:
    """Returns parameter groups for torch.optim, some of which may be empty."""
    mains, parameter_groups = list(main_parameters), []
    for options, keys in groups:
        wanted = {*keys}
        tensors = [main.tensor for main in mains if main.record.key in wanted]
        parameter_groups.append({"params": tensors, **options})
    return parameter_groups


def refuse_unless_elementwise(
    optimizer: torch.optim.Optimizer | type, *, as_others: bool = False
) -> None:
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
            + f". {kind.__name__} is given as others, which step shards here"
            * as_others
        )


def uncut_names(records: Sequence[ParameterRecord]) -> dict[str, str]:
    """Returns key -> name in the uncut model.

    If several stages use one name for parameters that are not tied, the name is the key, such as
    ``"1.weight"``.
    """
    names = {record.key: record.key.partition(".")[2] for record in records}
    counts = Counter(names.values())
    return {key: name if counts[name] == 1 else key for key, name in names.items()}


class Locations:
    """Locations of this rank's parameters, as in ``"[tp=1]"``; "" if all replicas are equal.

    Args:
        topology: The topology of this rank.
        plan: The plan of this rank.
    """

    def __init__(self, topology: Topology, plan: Plan) -> None:
        self._view = topology
        self._routes, self._divisors = dict(plan.routes), dict(plan.divisors)
        self._independent = plan.independent_axes

    def of(self, key: str | None = None) -> str:
        """Returns the location of a parameter, in dimensions that none of its reductions spans.

        Args:
            key: The parameter; None for a buffer, which no reduction makes equal.
        """
        # Replicas of the data count as one parameter, even if no reduction makes them equal. There
        # are two exceptions: experts, because each data rank may hold others, and replicas that
        # train alone, because each has separate parameters and a separate state of the optimizer.
        replicated = set[str]()
        if key is None or (key not in self._divisors and not self._independent):
            # A buffer may belong to an expert.
            experts = [self._axes_apart(expert) for expert in self._divisors] if key is None else []
            replicated = {*self._view.data_axes}.difference(*experts)
        apart = [
            f"{axis}={self._view.coordinate(axis)}"
            for axis in self._axes_apart(key)
            if axis not in replicated
        ]
        return f"[{','.join(apart)}]" if apart else ""

    def _axes_apart(self, key: str | None) -> list[str]:
        """Returns the dimensions that no reduction of a parameter spans, but the pipeline."""
        view = self._view
        reduction_steps = [set(step.ranks) for step in self._routes.get(key or "", ())]
        return [
            axis
            for axis, size in view.axes
            if size > 1 and axis != view.pipeline
            if not any(set(view.ranks_along(axis)) <= step for step in reduction_steps)
        ]


def parted(key: str) -> tuple[str, str]:
    """Returns a name without its location, and the location."""
    match = re.fullmatch(r"(.*?)(\[\w+=\d+(?:,\w+=\d+)*\])", key)
    return (match[1], match[2]) if match else (key, "")


class Chunk(Tensor):
    """Elements ``begin:begin + local.numel()`` of a whole flat tensor.

    It is a tensor of the whole size without memory of that size. A checkpoint can be read in other
    chunks than it was written, because torch.distributed.checkpoint calls the three methods below,
    which DTensor has too. They return only the elements of this rank.

    It can be copied and moved to another device. No other computation is possible, because it has
    no values except `local`.

    Attributes:
        local: The elements of this rank, flat and contiguous.
        begin: The first of them in the whole tensor.
    """

    local: Tensor
    begin: int

    @staticmethod
    def of(local: Tensor, begin: int, numel: int) -> Chunk:
        """Returns the chunk at `begin` of `numel` elements; `local` is flat and contiguous."""
        # One element, expanded, because it has the whole size and needs no memory.
        whole = torch.empty((), dtype=local.dtype, device=local.device).expand(numel)
        chunk = whole.as_subclass(Chunk)
        chunk.local, chunk.begin = local, begin
        return chunk

    # Import torch.distributed.checkpoint inside of these, because the import takes long. If it
    # calls them, it is imported already.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        (chunk,) = self.__create_chunk_list__()
        # The offset is part of the index, because torch then finds all ranks' chunks by one name.
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size([self.begin]), self.local.size())]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.local

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Chunk(from {self.begin} on, of {self.numel()}: {self.local})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's signature
        """Copies and moves the local elements; refuses to compute."""
        options = dict(kwargs or {})
        if func in _COPIES:
            chunk = args[0]
            return Chunk.of(func(chunk.local, *args[1:], **options), chunk.begin, chunk.numel())
        result = super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        if isinstance(result, Tensor):
            raise TypeError(
                f"{func} of a Chunk, this rank's part of a sharded state: take its `local` values, "
                f"or save and load it by torch.distributed.checkpoint"
            )
        return result


_COPIES = {Tensor.detach, Tensor.clone, Tensor.cpu, Tensor.to, Tensor.__deepcopy__}

# torch.load reads only classes that are registered.
torch.serialization.add_safe_globals([Chunk])
