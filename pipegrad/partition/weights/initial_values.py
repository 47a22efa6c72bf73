"""Initial values of a transformers model, for some of its tensors, whatever the cut.

[Note: seeds by name] One stream of random numbers would give a layer other values in another cut,
because a rank that does not make a layer does not draw its numbers. So each draw has a seed of its
own: the seed of the run, the name of the tensor that is drawn, and how often it was drawn before.
If a draw fills a temporary tensor, the module's name takes the place of the tensor's. So there is
one exception: a module that draws temporary tensors for layers of several stages. The model
initialises itself by its own ``_init_weights``. Tensors that are not wanted stay on the meta
device, where a draw costs nothing. All draws are made on the CPU, so values do not depend on the
device either.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipegrad.errors import WeightsError
from pipegrad.interop.private import TorchDispatchMode, storage_key
from pipegrad.partition.weights.files import extra, listed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def initial_values(
    model: PreTrainedModel, names: Collection[str], seed: int
) -> dict[str, torch.Tensor]:
    """Returns the initial values of some tensors. They depend on the seed and the names alone.

    Torch's own generators are left as they were.

    Args:
        model: The uncut model. It is not changed, and its tensors may be on the meta device.
        names: Of parameters and buffers of the model; one name of each tied tensor.
        seed: Any integer.

    Returns:
        Tensors on the CPU, with the shape and the dtype that the model has.

    Raises:
        WeightsError: If the model does not initialise one of the tensors.
    """
    skeleton = _skeleton(model, {})
    wanted = {name: _materialised(skeleton, name) for name in sorted(names)}
    versions = {name: tensor._version for name, tensor in wanted.items()}
    seeds = _SeedByName(seed, skeleton)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), seeds:
        for module_name, module, owner in _children_first(skeleton, "", skeleton, set()):
            seeds.module = module_name
            owner._init_weights(module)
    # Floating-point tensors were filled with NaN. The version of a tensor counts its writes, but
    # not those through `.data`.
    missed = [
        name
        for name, tensor in wanted.items()
        if (tensor.is_floating_point() and bool(tensor.isnan().any()))
        or (not tensor.is_floating_point() and tensor._version == versions[name])
    ]
    if missed:
        raise WeightsError(
            f"{type(model).__name__} does not initialise {listed(missed)} by its _init_weights; "
            f"make the model with values, not on the meta device"
        )
    return {name: tensor.detach() for name, tensor in wanted.items()}


def _skeleton(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Returns a copy of a module tree, with all tensors on the meta device and none of them tied.

    Otherwise each module of a tie would initialise its tensor, and the last one would count.
    """
    if id(module) in made:
        return made[id(module)]
    # Not copy.copy, which a parametrized module refuses.
    new: nn.Module = object.__new__(type(module))
    new.__dict__.update(module.__dict__)
    made[id(module)] = new
    new._parameters = {
        name: None
        if p is None
        else nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    new._buffers = {
        name: None if b is None else torch.empty_like(b, device="meta")
        for name, b in module._buffers.items()
    }
    new._modules = {
        name: None if child is None else _skeleton(child, made)
        for name, child in module._modules.items()
    }
    return new


def _materialised(skeleton: nn.Module, name: str) -> torch.Tensor:
    """Gives a tensor memory on the CPU, and returns it."""
    path, _, attribute = name.rpartition(".")
    module = skeleton.get_submodule(path)
    old = getattr(module, attribute)
    new = torch.empty_like(old, device="cpu")
    new.fill_(float("nan") if new.is_floating_point() else 0)
    new = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    setattr(module, attribute, new)
    return new


def _children_first(
    module: nn.Module,
    name: str,
    owner: Any,  # noqa: ANN401 - a PreTrainedModel
    seen: set[int],
) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yields name, module and the model whose `_init_weights` serves it, in transformers' order."""
    if id(module) in seen:
        return
    seen.add(id(module))
    kind = extra("transformers").PreTrainedModel
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        yield from _children_first(child, full, child if isinstance(child, kind) else owner, seen)
    yield name, module, owner


class NamedSeeds:
    """Seeds of the draws of a run. See [Note: seeds by name]."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draws = Counter[str]()

    def of(self, name: str) -> int:
        """Returns the seed of the next draw for a tensor of this name."""
        self._draws[name] += 1
        text = f"{self._seed}/{name}/{self._draws[name]}"
        digest = hashlib.sha256(text.encode()).digest()
        return int.from_bytes(digest[:8]) >> 1


class _SeedByName(TorchDispatchMode):
    """Seeds every operator that draws random numbers. See [Note: seeds by name]."""

    def __init__(self, seed: int, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module = ""
        tensors = chain(model.named_parameters(), model.named_buffers())
        self._names = {storage_key(t.untyped_storage()): name for name, t in tensors}
        self._seeds = NamedSeeds(seed)

    # ANN401: an operator takes and returns anything.
    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        # Draws on the meta device count too: which tensors are there depends on the cut.
        if torch.Tag.nondeterministic_seeded in func.tags:
            target, name = args[0] if args else None, f"a temporary of {self.module}"
            if isinstance(target, torch.Tensor):
                name = self._names.get(storage_key(target.untyped_storage()), name)
            torch.default_generator.manual_seed(self._seeds.of(name))
        return func(*args, **(kwargs or {}))
