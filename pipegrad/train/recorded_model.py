"""Recorded model: what a factory makes, first without memory, and then the layers of a rank.

[Note: recorded factories] A rank has memory for its own layers alone, and a factory is any code. So
it runs once, on torch's fake tensors, which have shapes and no memory, and every operator that it
calls is recorded. The model can be cut then. The operators of which a rank's layers are made run
again, with memory. What they draw at random has seeds by name ([Note: seeds by name]), so every cut
has the same values. Meta tensors would not do: torch's own initialisers leave them as they are, and
nothing would be recorded.

A factory cannot be recorded if it reads values, communicates, has a generator of its own, or keeps
a tensor elsewhere than in attributes, lists and dicts of its modules.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipegrad.interop.private import (
    FakeTensorMode,
    TorchDispatchMode,
    accumulate_hooks,
    arguments_of,
    fake_tensors,
    forget_fakes,
    has_gradient_hooks,
    real_tensors,
    storage_key,
    tree_flatten,
    tree_unflatten,
    weak_storage,
)
from pipegrad.partition.weights.initial_values import NamedSeeds


class NotRecordedError(Exception):
    """A factory that must make the whole model."""


class _View(NamedTuple):
    """A tensor without memory: which part of which memory it is."""

    memory: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Call(NamedTuple):
    """An operator that a factory has called, with views in the places of tensors."""

    operator: Any
    arguments: list[Any]
    spec: Any  # of the tree of arguments
    results: list[Any]
    reads: set[int]
    writes: set[int]
    draw: int  # its number among the operators that draw random numbers; 0 if it draws none
    default_dtype: torch.dtype


class RecordedModel:
    """A model whose factory has run once, and which has no memory yet.

    Args:
        make: Calls the factory.
        seed: Of the initial values.

    Attributes:
        model: The model on the meta device.
        num_draws: How many operators of the factory draw random numbers.

    Raises:
        Exception: If the factory fails, or cannot be recorded.
    """

    def __init__(self, make: Callable[[], nn.Module], seed: int) -> None:
        self._seed = seed
        with fake_tensors() as mode, _Recorder(mode) as recorder:
            self.model = make()
            torch_has = vars(nn.Parameter(torch.empty(0))).keys()  # all else is the user's
        self._recorder = recorder
        self._views: dict[int, tuple[Tensor, _View]] = {}  # by id of the meta tensor
        metas = dict[int, Tensor]()
        for container, key, tensor in list(_places([self.model])):
            if _is_fake(tensor):
                if id(tensor) not in metas:
                    _check_leaf(tensor)
                    view = recorder.view(tensor)
                    meta = torch.empty_strided(
                        view.shape, view.stride, dtype=view.dtype, device="meta"
                    )
                    meta = metas[id(tensor)] = _like(tensor, meta, leave_out=torch_has)
                    self._views[id(meta)] = meta, view
                container[key] = metas[id(tensor)]
        del container, tensor
        self.num_draws = recorder.num_draws
        recorder.check_end({view.memory for _, view in self._views.values()})
        named = [*self.model.named_parameters(), *self.model.named_buffers()][::-1]
        self._names = {self._views[id(t)][1].memory: n for n, t in named if id(t) in self._views}

    def load(self, modules: Iterable[nn.Module]) -> None:
        """Gives all tensors that some modules of the model hold their memory and values.

        Torch's own generators are left as they were.

        Args:
            modules: Stages of a cut, which share the model's tensors; or the model.
        """
        places = [place for place in _places(modules) if id(place[2]) in self._views]
        views = {id(tensor): self._views[id(tensor)][1] for *_, tensor in places}
        memory = self._computed({view.memory for view in views.values()})
        filled = dict[int, Tensor]()  # a tied tensor is one in all its places
        for container, key, meta in places:
            if id(meta) not in filled:
                filled[id(meta)] = _like(meta, _real(views[id(meta)], memory))
            container[key] = filled[id(meta)]

    @torch.no_grad()
    def _computed(self, wanted: set[int]) -> dict[int, torch.UntypedStorage]:
        """Returns memory with its values: the operators that make it run again."""
        calls, last = self._recorder.needed(wanted)
        memory, seeds = dict[int, torch.UntypedStorage](), NamedSeeds(self._seed)
        default_dtype = torch.get_default_dtype()
        try:
            with torch.random.fork_rng(devices=[]):
                for number, call in calls:
                    torch.set_default_dtype(call.default_dtype)
                    if call.draw:
                        first, name = call.arguments[0], f"the temporary of draw {call.draw}"
                        if isinstance(first, _View):
                            name = self._names.get(first.memory, name)
                        torch.default_generator.manual_seed(seeds.of(name))
                    _run(call, memory)
                    # A temporary goes with its last use, or all of them would be here at the end.
                    for key in (call.reads | call.writes) - wanted:
                        if last[key] == number:
                            memory.pop(key, None)
        finally:
            torch.set_default_dtype(default_dtype)
        return memory


class _Recorder(TorchDispatchMode):
    """Records the operators that are called with fake tensors."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self.calls: list[_Call] = []
        self.num_draws = 0
        self._storages: dict[int, Any] = {}  # weak; while one is here, its key is not used again

    # ANN401: an operator takes and returns anything.
    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if "c10d" in func.namespace:
            raise NotRecordedError("it communicates")
        leaves, spec = tree_flatten((args, kwargs))
        arguments = [self._argument(leaf) for leaf in leaves]
        written = set[int]()
        for index, (name, is_written) in enumerate(arguments_of(func)):
            value = args[index] if index < len(args) else kwargs.get(name)
            for leaf in tree_flatten(value)[0] if is_written else ():
                if isinstance(leaf, Tensor):
                    written.add(self.view(leaf).memory)
        result = func(*args, **kwargs)
        forget_fakes(self._mode)
        results = [
            self.view(leaf) if isinstance(leaf, Tensor) else leaf
            for leaf in tree_flatten(result)[0]
        ]
        reads = {leaf.memory for leaf in arguments if isinstance(leaf, _View)}
        writes = written | {leaf.memory for leaf in results if isinstance(leaf, _View)}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self.num_draws += draws
        draw, default = self.num_draws * draws, torch.get_default_dtype()
        self.calls.append(_Call(func, arguments, spec, results, reads, writes, draw, default))
        return result

    def view(self, tensor: Tensor) -> _View:
        """Returns what a fake tensor is a view of."""
        if not _is_fake(tensor):
            raise NotRecordedError("it writes to a tensor that no operator has made")
        storage = tensor.untyped_storage()
        key, offset = storage_key(storage), int(tensor.storage_offset())
        self._storages.setdefault(key, weak_storage(storage))
        return _View(key, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)

    def check_end(self, memory: set[int]) -> None:
        """Refuses a model with memory that no operator has made, and tensors that are elsewhere."""
        if not memory <= set[int]().union(*(call.writes for call in self.calls)):
            raise NotRecordedError("a tensor was made by no operator")
        if not all(storage.expired() for storage in self._storages.values()):
            gc.collect()
        if not all(storage.expired() for storage in self._storages.values()):
            raise NotRecordedError("a tensor is elsewhere than in the modules")

    def needed(self, wanted: set[int]) -> tuple[list[tuple[int, _Call]], dict[int, int]]:
        """Returns the calls that make some memory, and each memory's last call, by number."""
        needed, last, known = list[tuple[int, _Call]](), dict[int, int](), set(wanted)
        for number in reversed(range(len(self.calls))):
            call = self.calls[number]
            if not known.isdisjoint(call.writes):
                needed.append((number, call))
                known |= call.reads
                for key in call.reads | call.writes:
                    last.setdefault(key, number)
        return needed[::-1], last

    def _argument(self, leaf: object) -> object:
        """Returns what stands for an argument of an operator."""
        if isinstance(leaf, torch.Generator | torch.UntypedStorage | torch.TypedStorage):
            raise NotRecordedError(f"it has a {type(leaf).__name__} of its own")
        if not isinstance(leaf, Tensor) or _is_fake(leaf):
            return self.view(leaf) if isinstance(leaf, Tensor) else leaf
        with real_tensors():  # a copy, because it may be numpy's memory, which changes unseen
            return leaf.clone()


def lacks_memory(model: nn.Module) -> bool:
    """Whether a tensor of a model has no memory, also one that is a plain attribute."""
    return any(_is_fake(tensor) for *_, tensor in _places([model]))


def _places(modules: Iterable[nn.Module]) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yields where modules hold tensors, also in lists and dicts: container, key and tensor."""
    containers: list[Any] = [vars(part) for module in modules for part in module.modules()]
    seen = set[int]()
    while containers:
        container = containers.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            if isinstance(value, Tensor):
                yield container, key, value
            elif isinstance(value, list | dict):
                containers.append(value)


def _is_fake(tensor: Tensor) -> bool:
    return tensor.untyped_storage().device.type == "meta"


def _check_leaf(tensor: Tensor) -> None:
    if tensor.grad_fn is not None or has_gradient_hooks(tensor) or accumulate_hooks(tensor):
        raise NotRecordedError("a tensor has a graph or a hook")


def _like(tensor: Tensor, values: Tensor, leave_out: Iterable[str] = ()) -> Tensor:
    """Returns values as a parameter, if the tensor is one, and with the user's attributes of it."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, tensor.requires_grad)
    vars(values).update({key: x for key, x in vars(tensor).items() if key not in leave_out})
    return values.requires_grad_(tensor.requires_grad)


def _real(view: _View, memory: dict[int, torch.UntypedStorage]) -> Tensor:
    empty = torch.empty(0, dtype=view.dtype)
    return empty.set_(memory[view.memory], view.offset, view.shape, view.stride)


def _run(call: _Call, memory: dict[int, torch.UntypedStorage]) -> None:
    """Runs an operator again, with memory, and adds the memory that it makes."""
    # What it is given of no operator is copied, because it may be written to.
    arguments = [
        _real(leaf, memory)
        if isinstance(leaf, _View)
        else leaf.clone()
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in call.arguments
    ]
    args, kwargs = tree_unflatten(arguments, call.spec)
    results = tree_flatten(call.operator(*args, **kwargs))[0]
    for view, result in zip(call.results, results, strict=True):
        if isinstance(view, _View):
            if (result.stride(), result.dtype) != (view.stride, view.dtype):
                raise NotRecordedError(f"{call.operator} returns other strides with memory")
            memory.setdefault(view.memory, result.untyped_storage())
