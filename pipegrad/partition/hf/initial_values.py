"""Initial values of some tensors of a transformers model, independent of the cut.

[Note: seeds by name] One stream of random numbers would give a layer other values in another cut,
because a rank that does not make a layer does not draw its numbers. Therefore each draw has its own
seed, made of the seed of the run, the name of the tensor, and the number of draws for this name. If
a draw fills a temporary tensor, the module's name replaces the tensor's name. There is one
exception: values depend on the cut if a module draws temporary tensors for layers of several
stages. The model initialises itself by its own ``_init_weights``. Tensors that are not wanted stay
on the meta device, where a draw costs nothing. Values do not depend on the device either, because
all draws run on the CPU.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipegrad.errors import WeightsError
from pipegrad.interop.private import TorchDispatchMode, storage_key
from pipegrad.partition.cutting.copies import like, without_memory
from pipegrad.partition.hf.files import extra, listed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def initial_values(
    model: PreTrainedModel, names: Collection[str], seed: int
) -> dict[str, torch.Tensor]:
    """Returns the initial values of some tensors. They depend on the seed and the names alone.

    Torch's own generators are left as they were.

    Returns:
        Tensors on the CPU, with the shape and the dtype that the model has.

    Raises:
        WeightsError: If the model does not initialise one of the tensors.
    """
    skeleton = without_memory(model)
    # Untie all tensors, because each module of a tie would initialise the tensor, and the last one
    # would decide its values.
    for module in skeleton.modules():
        for table in (module._parameters, module._buffers):
            held = {name: x for name, x in table.items() if x is not None}
            untied: Any = {name: like(x, torch.empty_like(x)) for name, x in held.items()}
            table.update(untied)
    wanted = dict[str, torch.Tensor]()
    for name in sorted(names):
        path, _, attribute = name.rpartition(".")
        old = getattr(skeleton.get_submodule(path), attribute)
        value = torch.nan if old.is_floating_point() else 0
        wanted[name] = like(old, torch.full_like(old, value, device="cpu"))
        setattr(skeleton.get_submodule(path), attribute, wanted[name])
    versions = {name: tensor._version for name, tensor in wanted.items()}
    seeds = _SeedByName(seed, skeleton)
    # Inner modules come first. The innermost model of transformers around a module has its rules.
    owners: dict[str, Any] = {}
    kind = extra("transformers").PreTrainedModel
    for name, module in skeleton.named_modules():
        owners[name] = module if isinstance(module, kind) else owners[name.rpartition(".")[0]]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), seeds:
        for name, owner in reversed(owners.items()):
            seeds.module = name
            owner._init_weights(skeleton.get_submodule(name))
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


class _SeedByName(TorchDispatchMode):
    """Seeds every operator that draws random numbers. See [Note: seeds by name]."""

    def __init__(self, seed: int, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module = ""
        tensors = chain(model.named_parameters(), model.named_buffers())
        self._names = {storage_key(t.untyped_storage()): name for name, t in tensors}
        self._seed, self._draws = seed, Counter[str]()

    # ANN401: an operator takes and returns anything.
    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        # Count draws on the meta device too, because the tensors there depend on the cut.
        if torch.Tag.nondeterministic_seeded in func.tags:
            target, name = args[0] if args else None, f"a temporary of {self.module}"
            if isinstance(target, torch.Tensor):
                name = self._names.get(storage_key(target.untyped_storage()), name)
            self._draws[name] += 1
            text = f"{self._seed}/{name}/{self._draws[name]}"
            digest = hashlib.sha256(text.encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8]) >> 1)
        return func(*args, **(kwargs or {}))
