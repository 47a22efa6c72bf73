"""Recompute: a stage keeps what it is given, and runs its forward again before its backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Inside, autograd's graphs tell what requires a gradient, and keep nothing to compute it."""

    def pack(_: Tensor) -> None:
        return None

    def unpack(_: None) -> NoReturn:
        raise AssertionError("a graph that keeps nothing")

    with saved_tensors_hooks(pack, unpack):
        yield


class RandomState:
    """The random state of now, on the CPU and on a device, to draw the same again.

    Args:
        device: Of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._devices = [] if device.type == "cpu" else [device]
        module = torch.get_device_module(device)
        self._states = [module.get_rng_state(found) for found in self._devices]
        self._cpu_state = torch.get_rng_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, random numbers are those that were drawn then; outside nothing is drawn."""
        with torch.random.fork_rng(self._devices, device_type=self._device.type):
            torch.set_rng_state(self._cpu_state)
            module = torch.get_device_module(self._device)
            for found, state in zip(self._devices, self._states, strict=True):
                module.set_rng_state(state, found)
            yield
