"""Random states: the generators of random numbers of a rank, as a checkpoint keeps them.

The trainer seeds torch before each step, so dropout needs no state. A model, a loss or a handler
may also draw from Python's and numpy's generators. Their states belong to one rank of one layout:
on another layout a rank computes other layers. There they start from the seed and the step
again, and a note says so if the run has drawn from them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from pipegrad.comm.agreement import agree_keeping
from pipegrad.topology import Topology
from pipegrad.train.checkpoint.packed import pack, unpack_entry
from pipegrad.train.data.corpus import mixed


class RandomStates:
    """The generators of this rank.

    Args:
        topology: The layout of all ranks.
        seed: ``train.seed``.
        device: Whose generator is saved, too.
    """

    PREFIX = "random."  # of the keys in a checkpoint; the rank follows

    def __init__(self, topology: Topology, seed: int, device: torch.device) -> None:
        self._layout = repr((topology.axes, topology.stage_to_rank, topology.data))
        self._seed, self._device = seed, device
        # The same on ranks that compute one layer together, as for dropout.
        self._coordinate = topology.coordinate((topology.pipeline, *topology.data_axes))
        self._had_drawn = False
        self.begin(0)

    @property
    def key(self) -> str:
        """The key of this rank's states in a checkpoint."""
        return f"{self.PREFIX}{dist.get_rank()}"

    def begin(self, step: int) -> None:
        """Seeds all generators for the steps after `step`."""
        seed = mixed(self._seed, step, self._coordinate)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self._begun = _host_states()

    def packed(self) -> Tensor:
        """Returns the states as bytes."""
        drawn = self._had_drawn or _host_states() != self._begun
        state: dict[str, Any] = {"layout": self._layout, "drawn": drawn, **_host_states()}
        state["torch"] = torch.get_rng_state()
        if self._device.type != "cpu":
            state["device"] = torch.get_device_module(self._device).get_rng_state(self._device)
        return pack(state)

    def keys_to_read(self, metadata: Metadata) -> list[str]:
        """Returns the keys that this rank reads. All ranks together read those of all writers."""
        keys = sorted(key for key in metadata.state_dict_metadata if key.startswith(self.PREFIX))
        own = [key for key in keys if key == self.key]
        return own + keys[dist.get_rank() :: dist.get_world_size()]

    def restore(self, read: Mapping[str, Tensor], step: int) -> list[str]:
        """Sets the states of a checkpoint; every rank must call it. Returns notes.

        Args:
            read: What was read of `keys_to_read`.
            step: Of the checkpoint.

        Raises:
            PipegradError: If they cannot be read; on all ranks.
        """

        def unpacked() -> tuple[dict[str, dict[str, Any]], tuple[bool, bool]]:
            states = {key: unpack_entry(key, tensor) for key, tensor in read.items()}
            fits = self.key in states and states[self.key]["layout"] == self._layout
            return states, (fits, any(state["drawn"] for state in states.values()))

        states, replies = agree_keeping("the random states", unpacked)
        self._had_drawn = any(drawn for _, drawn in replies)
        if all(fits for fits, _ in replies):
            self._set(states[self.key])
            return []
        self.begin(step)
        if not self._had_drawn:
            return []
        note = "the generators of Python and numpy start from train.seed again"
        return [f"train.resume: {note}: the checkpoint is of another layout of ranks"]

    def _set(self, state: Mapping[str, Any]) -> None:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, words, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(words, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        if "device" in state and self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(state["device"], self._device)


def _host_states() -> dict[str, Any]:
    """Returns the states of Python and numpy, of numbers and text alone."""
    kind, words, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (str(kind), [int(word) for word in words], position, has_gauss, float(cached)),
    }
