"""Activation checkpointing: a stage keeps its inputs alone, and runs its forward twice.

The second forward runs right before the backward, and makes the graph that the backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.pipeline.batch.trees import leaves_of

Values = Sequence[object]
Outputs = tuple[Tensor, ...]


class Recompute:
    """The forwards of one stage that will run again, with the same random numbers and buffers.

    A forward may change a buffer, such as a running mean. For the second forward its old value is
    put back, so the result is the same. Afterwards the new value is put back: a counter counts each
    forward once.

    Args:
        module: The module of the stage.
        device: Where its parameters are.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._devices = [] if device.type == "cpu" else [device]
        self._changing: set[str] | None = None  # names; None before the first forward
        # Microbatch -> versions of its inputs, states of random generators, old buffers.
        self._forwards: dict[int, tuple[list[int], list[Tensor], dict[str, Tensor]]] = {}

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._forwards.clear()

    def first(self, microbatch: int, values: Values, forward: Callable[[], Outputs]) -> Outputs:
        """Runs a forward whose graph is not needed.

        Raises:
            StepError: If it changes a buffer that the very first forward did not change.
        """
        buffers = dict(self._module.named_buffers())
        before = {name: buffer._version for name, buffer in buffers.items()}
        # Nobody declares which buffers a forward changes. So the very first forward keeps a copy of
        # all buffers, and later forwards keep only those that have changed in it.
        copies = {
            name: buffer.clone()
            for name, buffer in buffers.items()
            if self._changing is None or name in self._changing
        }
        random = [torch.get_device_module(d).get_rng_state(d) for d in self._devices]
        self._forwards[microbatch] = (
            _versions(values),
            [torch.get_rng_state(), *random],
            copies,
        )
        outputs = forward()
        after = dict(self._module.named_buffers())
        changed = {
            name
            for name, buffer in buffers.items()
            if after.get(name) is not buffer or buffer._version != before[name]
        }
        if self._changing is None:
            # Some operators, such as batch normalization, write without a new version.
            changed |= {name for name, old in copies.items() if not torch.equal(buffers[name], old)}
            self._changing = changed
            for name in copies.keys() - changed:
                del copies[name]
        elif not changed <= self._changing:
            raise StepError(
                f"a forward that is to be recomputed changed the buffers "
                f"{sorted(changed - self._changing)}, which the first one did not: it cannot be "
                f"run again as it was"
            )
        return outputs

    @contextmanager
    def again(self, microbatch: int, values: Values) -> Iterator[None]:
        """Makes a forward inside equal to the first one, and undoes its side effects afterwards.

        Raises:
            StepError: If an input was changed in place since.
        """
        versions, random, copies = self._forwards.pop(microbatch)
        if _versions(values) != versions:
            raise StepError(
                "a stage that is to be recomputed, or somebody else, has changed in place what the "
                "stage was given: copy it first"
            )
        # Buffers are exchanged, not overwritten: autograd may have saved the present ones.
        present = {name: self._module.get_buffer(name) for name in copies}
        with torch.random.fork_rng(self._devices, device_type=self._device.type):
            torch.set_rng_state(random[0])
            for device, state in zip(self._devices, random[1:], strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            self._put(copies)
            try:
                yield
            finally:
                self._put(present)

    def _put(self, buffers: dict[str, Tensor]) -> None:
        for full, buffer in buffers.items():
            path, _, name = full.rpartition(".")
            setattr(self._module.get_submodule(path), name, buffer)


def _versions(values: Values) -> list[int]:
    trees = [
        (value,) if isinstance(value, Tensor) else leaves_of({"": value}).values()
        for value in values
    ]
    return [leaf._version for leaves in trees for leaf in leaves if isinstance(leaf, Tensor)]
