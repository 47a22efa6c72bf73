"""Recompute: a stage keeps what it is given, and runs its forward again before its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError

Values = Sequence[object]
Outputs = tuple[Tensor, ...]


class Recompute:
    """The forwards of one stage that will run again, as they ran: what they are given and draw.

    A buffer that a forward changes, such as a running mean, is put back for the second one: so the
    result is the same, and what is counted is counted once.

    Args:
        module: The stage's.
        device: Where it is.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._devices = [] if device.type == "cpu" else [device]
        self._changing: set[str] | None = None  # buffers that forwards change, once it is known
        self._forwards: dict[int, tuple[list[int], list[Tensor], dict[str, Tensor]]] = {}

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._forwards.clear()

    def first(self, microbatch: int, values: Values, forward: Callable[[], Outputs]) -> Outputs:
        """Runs a forward whose graph nobody will need.

        Raises:
            StepError: If it changes a buffer that the first of all did not change.
        """
        buffers = dict(self._module.named_buffers())
        before = {name: buffer._version for name, buffer in buffers.items()}
        kept = {
            name: buffer.clone()
            for name, buffer in buffers.items()
            if self._changing is None or name in self._changing
        }
        random = [torch.get_device_module(d).get_rng_state(d) for d in self._devices]
        self._forwards[microbatch] = (
            _versions(values),
            [torch.get_rng_state(), *random],
            kept,
        )
        outputs = forward()
        after = dict(self._module.named_buffers())
        changed = {
            name
            for name, buffer in buffers.items()
            if after.get(name) is not buffer or buffer._version != before[name]
        }
        if self._changing is None:
            # Some operators, as batch normalization, write without telling.
            changed |= {name for name, old in kept.items() if not torch.equal(buffers[name], old)}
            self._changing = changed
            for name in kept.keys() - changed:
                del kept[name]
        elif not changed <= self._changing:
            raise StepError(
                f"a forward that is to be recomputed changed the buffers "
                f"{sorted(changed - self._changing)}, which the first one did not: it cannot be "
                f"run again as it was"
            )
        return outputs

    @contextmanager
    def again(self, microbatch: int, values: Values) -> Iterator[None]:
        """Inside, a forward is as it was; what it draws or counts is nobody's.

        Raises:
            StepError: If what it was given is no longer what it was.
        """
        versions, random, kept = self._forwards.pop(microbatch)
        if _versions(values) != versions:
            raise StepError(
                "a stage that is to be recomputed, or somebody else, has changed in place what the "
                "stage was given: copy it first"
            )
        now = {name: self._module.get_buffer(name) for name in kept}
        with torch.random.fork_rng(self._devices, device_type=self._device.type):
            torch.set_rng_state(random[0])
            for device, state in zip(self._devices, random[1:], strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            self._put(kept)
            try:
                yield
            finally:
                self._put(now)

    def _put(self, buffers: dict[str, Tensor]) -> None:
        for full, buffer in buffers.items():
            path, _, name = full.rpartition(".")
            setattr(self._module.get_submodule(path), name, buffer)


def _versions(values: Values) -> list[int]:
    return [value._version for value in values if isinstance(value, Tensor)]
