"""Initial values of a transformers model, for some of its tensors, whatever the cut.

[Note: a seed for each draw] One stream of random numbers would give a layer other values in another
cut, because a rank that does not make a layer does not draw its numbers. So each draw has a seed of
its own: the seed of the run, and the number of the draw. Every rank runs the ``_init_weights`` of
the whole model, so a draw has the same number on all. Tensors that are not wanted stay on the meta
device, where a draw costs nothing. All draws are made on the CPU, so values do not depend on the
device either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from pipegrad.errors import WeightsError
from pipegrad.interop.private import TorchDispatchMode
from pipegrad.partition.structural.shallow import without_memory
from pipegrad.partition.weights.files import listed, put

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def initial_values(
    model: PreTrainedModel, names: Collection[str], seed: int
) -> dict[str, torch.Tensor]:
    """Returns the initial values of some tensors. They depend on the model and the seed alone.

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
    skeleton: Any = without_memory(model)
    for module in skeleton.modules():
        vars(module).pop("_is_hf_initialized", None)
        # Else each module of a tie would initialise its tensor, and the last one would count.
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                put([(module, attribute)], tensor.clone(), "meta")
    wanted = dict[str, torch.Tensor]()
    for name in sorted(names):
        path, _, attribute = name.rpartition(".")
        place = skeleton.get_submodule(path), attribute
        old = getattr(*place)
        empty = torch.full_like(old, torch.nan if old.is_floating_point() else 0, device="cpu")
        put([place], empty)
        wanted[name] = getattr(*place)
    versions = {name: tensor._version for name, tensor in wanted.items()}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), SeededDraws(seed):
        skeleton.initialize_weights()
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


def seed_of_draw(seed: int, number: int) -> int:
    """Returns the seed of a draw of a run. See [Note: a seed for each draw]."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:8]) >> 1


class SeededDraws(TorchDispatchMode):
    """Seeds every operator that draws random numbers. See [Note: a seed for each draw]."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._num_draws = 0

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
            self._num_draws += 1
            torch.default_generator.manual_seed(seed_of_draw(self._seed, self._num_draws))
        return func(*args, **(kwargs or {}))
