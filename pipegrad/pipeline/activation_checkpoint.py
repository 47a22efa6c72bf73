"""Activation checkpointing: a stage keeps its inputs alone, and runs its forward twice.

The second forward runs right before the backward, and makes the graph that the backward needs.

[Note: second forwards] The gradient comes from the second forward, and the loss from the first one.
Both forwards must be equal, because otherwise the gradient would belong to another loss. The states
of the global random generators of torch, Python and numpy, and the buffers, are restored before the
second forward. A module may also draw from a generator of its own, or count its calls, and pipegrad
cannot detect that. Therefore a number that depends on all bits of the outputs is compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.pipeline.trees import number_of, versions_of

DIFFERENT = (
    "a stage with recompute=True returned something else when its forward ran again before the "
    "backward, so its gradient would not be that of the loss: it draws from a generator of its own "
    "(torch.Generator, numpy's, random.Random), counts its calls, or uses operators that are not "
    "deterministic. Draw from the global generators, keep counts in buffers, call "
    "torch.use_deterministic_algorithms(True), or leave recompute=True out for this stage"
)
Values = Sequence[object]
Outputs = tuple[Tensor, ...]


class FirstForward(NamedTuple):
    """The state that the second forward of a microbatch restores: see [Note: second forwards]."""

    versions: list[int]  # of its inputs
    generators: tuple[object, Any, list[Tensor]]  # states of Python's, numpy's and torch's
    buffers: dict[str, Tensor]
    number: int | Tensor | None  # of the first forward's outputs


class Recompute:
    """The forwards of one stage that will run again, with the same random numbers and buffers.

    A forward may change a buffer, such as a running mean. The second forward gets the old values,
    because it must return the same result. Afterwards the new values are restored: a counter counts
    each forward once.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._devices = [] if device.type == "cpu" else [device]
        self._changing: set[str] | None = None  # names; None before the first forward

    def first(self, values: Values, forward: Callable[[], Outputs]) -> tuple[Outputs, FirstForward]:
        """Runs a forward without keeping its graph; also returns the state for the second one.

        Raises:
            StepError: If it changes a buffer that the very first forward did not change.
        """
        buffers = dict(self._module.named_buffers())
        before = {name: buffer._version for name, buffer in buffers.items()}
        # No module declares which buffers its forward changes. The very first forward keeps a copy
        # of all buffers, and later forwards copy only those that changed in it.
        copies = {
            name: buffer.clone()
            for name, buffer in buffers.items()
            if self._changing is None or name in self._changing
        }
        versions, generators = versions_of(values), self._generators()
        outputs = forward()
        number = number_of(list(outputs))
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
        return outputs, FirstForward(versions, generators, copies, number)

    @contextmanager
    def again(self, first: FirstForward, values: Values) -> Iterator[None]:
        """Makes a forward in its body equal to the first one, and undoes its side effects.

        Raises:
            StepError: If an input was changed in place since.
        """
        if versions_of(values) != first.versions:
            raise StepError(
                "a stage that is to be recomputed, or somebody else, has changed in place what the "
                "stage was given: copy it first"
            )
        # Buffers are exchanged, not overwritten: autograd may have saved the present ones.
        present = {name: self._module.get_buffer(name) for name in first.buffers}
        generators = self._generators()
        self._set_generators(first.generators)
        self._put(first.buffers)
        try:
            yield
        finally:
            self._put(present)
            self._set_generators(generators)

    def _generators(self) -> tuple[object, Any, list[Tensor]]:
        on_devices = [torch.get_device_module(d).get_rng_state(d) for d in self._devices]
        return random.getstate(), np.random.get_state(), [torch.get_rng_state(), *on_devices]

    def _set_generators(self, states: tuple[object, Any, list[Tensor]]) -> None:
        of_python, of_numpy, (of_torch, *on_devices) = states
        random.setstate(of_python)  # type: ignore[arg-type]
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        for device, state in zip(self._devices, on_devices, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)

    def _put(self, buffers: dict[str, Tensor]) -> None:
        for full, buffer in buffers.items():
            path, _, name = full.rpartition(".")
            setattr(self._module.get_submodule(path), name, buffer)


def compare(first: FirstForward, outputs: Outputs, what: str) -> int | Tensor:
    """Compares the outputs of a second forward with the outputs of the first one.

    Returns:
        0; on a device, which the host does not wait for, 1 if they differ.

    Raises:
        StepError: If they differ, on CPU.
    """
    again = number_of(list(outputs))
    if isinstance(first.number, Tensor) and isinstance(again, Tensor):
        return first.number != again
    if first.number != again:
        raise StepError(f"{what}: {DIFFERENT}")
    return 0
