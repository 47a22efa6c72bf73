"""Partial models: an uncut model in which only some layers have memory, with the values of all.

[Note: partial models] The initial values of all layers come from one stream of random numbers. A
rank that makes its own layers alone would draw other numbers than one process does. So it makes all
layers, but keeps no memory for those of other ranks. The factory runs twice:

1. All tensors are on the meta device, which has no memory, and nothing is drawn. Every operator is
   recorded, with the memory that it reads and writes. Then the model can be cut, so each rank knows
   which layers it keeps. Memory that only parameters and buffers of other layers have is not
   wanted. All memory that wanted memory is made of is wanted.
2. Operators that write wanted memory run on the CPU, all others on the meta device. If one of the
   others draws random numbers, it draws them on the CPU too, and they are dropped at once.

Code must not see which tensors have no memory: torch's own initialisers draw nothing for these. So
all tensors say that they are on the CPU. Both runs must call the same operators. If they do not, or
if a factory reads values of tensors, which the meta device does not have, the model is made whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from pipegrad.interop.private import TorchDispatchMode

# They draw as many numbers as the values of their inputs say, and a dropped input has no values.
_DRAW_BY_VALUE = ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


# What tensors say of themselves, by the getters of these properties.
_SAID = {
    inspect.getattr_static(Tensor, name).__get__: value
    for name, value in {"is_meta": False, "is_cpu": True, "device": torch.device("cpu")}.items()
}


class NotInPartsError(Exception):
    """A factory whose model cannot be made in parts."""


class _Operator(NamedTuple):
    """An operator that a factory has called; memory is told by numbers."""

    name: str
    reads: frozenset[int]
    writes: frozenset[int]


class PartialModel:
    """A model that a factory makes without memory first, and then with memory for some layers.

    Args:
        make: Calls the factory. Every call must do the same, with the same random numbers.

    Attributes:
        outline: The model on the meta device.

    Raises:
        Exception: If the factory needs the values of its tensors.
    """

    def __init__(self, make: Callable[[], nn.Sequential]) -> None:
        self._make = make
        self._record = _Record()
        with self._record, _OnCpu():
            self.outline = make()

    def made(self, layers: Collection[str]) -> nn.Sequential:
        """Returns the model with memory for some layers.

        Args:
            layers: Their names.

        Raises:
            NotInPartsError: If the second run differs from the first one.
        """
        kept, dropped = set[int](), set[int]()
        for name, layer in self.outline.named_children():
            for tensor in _state(layer):
                (kept if name in layers else dropped).add(self._record.number_of(tensor))
        needed = self._record.needed(dropped - kept)
        build = _Build(self._record.operators, needed)
        try:
            with build, _OnCpu():
                model = self._make()
            build.check_end()
        except Exception as error:
            raise NotInPartsError(build.mismatch or str(error)) from error
        own = [
            tensor for n, layer in model.named_children() if n in layers for tensor in _state(layer)
        ]
        if build.mismatch or any(tensor.is_meta for tensor in own):
            raise NotInPartsError(build.mismatch or "a tensor has no memory")
        return model


def lacks_memory(model: nn.Module) -> bool:
    """Whether a tensor of a model is on the meta device, also one that is a plain attribute."""
    return any(tensor.is_meta for module in model.modules() for tensor in _tensors(vars(module)))


class _Record(TorchDispatchMode):
    """Runs everything on the meta device, and records it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[_Operator] = []
        # By address. An address may be used again when its memory is gone, and gets a new number.
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}
        self._num_storages = 0

    # ANN401: an operator takes and returns anything.
    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _DRAW_BY_VALUE:
            raise NotInPartsError(f"it draws by {func}")
        inputs = list(_tensors((args, kwargs)))
        reads = frozenset(map(self.number_of, inputs))
        result = _on_meta(func, args, kwargs)
        written = chain(_tensors(result), _mutated(func, args, kwargs))
        self.operators.append(_Operator(str(func), reads, frozenset(map(self.number_of, written))))
        return result

    def number_of(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's memory."""
        reference = StorageWeakRef(tensor.untyped_storage())
        known = self._numbers.get(reference.cdata)
        if known is None or known[0].expired():
            known = self._numbers[reference.cdata] = reference, self._num_storages
            self._num_storages += 1
        return known[1]

    def needed(self, dropped: Collection[int]) -> list[bool]:
        """Returns for each operator whether it writes memory that is wanted in the end.

        Args:
            dropped: Memory that is not wanted, although it is alive.
        """
        alive = {number for reference, number in self._numbers.values() if not reference.expired()}
        wanted = alive - set(dropped)
        needed = list[bool]()
        for operator in reversed(self.operators):
            needed.append(not wanted.isdisjoint(operator.writes))
            if needed[-1]:
                wanted |= operator.reads
        return needed[::-1]


class _Build(TorchDispatchMode):
    """Runs the operators that are needed, and draws the random numbers of all others.

    Attributes:
        mismatch: How this run differs from the recorded one; "" if it does not.
    """

    def __init__(self, operators: list[_Operator], needed: list[bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded = list(zip(operators, needed, strict=True))
        self._number = 0
        self.mismatch = ""
        self._scratch: dict[torch.dtype, Tensor] = {}

    # ANN401: an operator takes and returns anything.
    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        recorded, needed = self._recorded[self._number]
        self._number += 1
        if recorded.name != str(func):
            self.mismatch = f"it calls {func} in the place of {recorded.name}"
            raise NotInPartsError(self.mismatch)
        if needed:
            return func(*args, **kwargs)
        result = _on_meta(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(func, args, kwargs, result)
        return result

    def check_end(self) -> None:
        """Refuses a run that has left recorded operators out."""
        if self._number < len(self._recorded):
            self.mismatch = f"it calls no {self._recorded[self._number][0].name}"
            raise NotInPartsError(self.mismatch)

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:  # noqa: ANN401
        """Draws the random numbers of an operator, and drops them."""
        # A new tensor each time would not take the memory of the one before: the allocator aligns
        # blocks, and a block that was freed is a little too small for the next one of its size.
        written = {id(tensor) for tensor in _mutated(func, args, kwargs)}
        given = [
            _mapped(values, lambda t: self._dropped(t) if id(t) in written else _ones_like(t))
            for values in (args, kwargs)
        ]
        overload = "" if func._overloadname == "default" else f"{func._overloadname}_"
        out = getattr(func.overloadpacket, f"{overload}out", None)
        if written or out is None or not isinstance(result, Tensor):
            func(*given[0], **given[1])
            return
        known = {argument.name for argument in out._schema.arguments}
        options = {name: value for name, value in given[1].items() if name in known}
        out(*given[0], **options, out=self._dropped(result))

    def _dropped(self, tensor: Tensor) -> Tensor:
        """Returns a tensor like this one, in memory that all of them share."""
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        scratch = self._scratch.get(tensor.dtype)
        if scratch is None or len(scratch) <= last:
            self._scratch.pop(tensor.dtype, None)
            scratch = self._scratch[tensor.dtype] = torch.empty(last + 1, dtype=tensor.dtype)
        return scratch.as_strided(tensor.shape, tensor.stride())


class _OnCpu(TorchFunctionMode):
    """Lets all tensors say that they are on the CPU."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        # A property's getter is another object each time, but equal ones have equal hashes.
        return _SAID[func] if func in _SAID else func(*args, **(kwargs or {}))


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - any operator
    """Returns what an operator returns on the meta device."""
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": torch.device("meta")}
    return func(*_mapped(args, _without_memory), **_mapped(kwargs, _without_memory))


def _without_memory(tensor: Tensor) -> Tensor:
    return tensor.to("meta") if _has_memory(tensor) else tensor


def _ones_like(tensor: Tensor) -> Tensor:
    """Returns a tensor with memory that looks like this one; its values do not matter."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).fill_(1)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().device.type != "meta"


def _mutated(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:  # noqa: ANN401 - any operator
    """Yields the arguments that an operator writes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - as it is
    """Returns the arguments of an operator with their tensors replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, function) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, function) for name, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:  # noqa: ANN401 - as it is
    """Yields the tensors in arguments, or in a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _state(layer: nn.Module) -> Iterable[Tensor]:
    return chain(layer.parameters(), layer.buffers())
