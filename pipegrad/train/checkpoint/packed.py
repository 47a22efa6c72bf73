"""Packed: what is no tensor of the model or the optimizer, as tensors of bytes in a checkpoint.

- Common state: what all ranks have alike, in one entry: learning-rate schedules, the loss scale,
  and the steps that were skipped.
- Random states: the generators of a rank. The trainer seeds torch before each step, so dropout
  needs no state. A model, a loss or a handler may also draw from Python's and numpy's generators.
  Their states belong to one rank of one layout: on another layout a rank computes other layers.
  There they start from the seed and the step again, and a note says so if the run has drawn from
  them.
- The state of the handlers and codecs of a rank. It belongs to one rank and one plan, and no other
  cut can use parts of it.
"""

from __future__ import annotations

import io
import random
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from pipegrad.comm.agreement import agree_keeping
from pipegrad.errors import PlanError, in_words
from pipegrad.topology import Topology
from pipegrad.train.checkpoint.storage import DamageError
from pipegrad.train.config import Config
from pipegrad.train.data.corpus import mixed
from pipegrad.train.optimizer import Update

COMMON = "common"  # the key of common state
HANDLERS = "handlers."  # of keys of handler state; the rank follows


def pack(state: dict[str, Any]) -> Tensor:
    """Returns a state as bytes, ``(numel,)`` of uint8.

    Raises:
        Exception: If it could not be read again: it is not of numbers, strings and CPU tensors.
    """
    file = io.BytesIO()
    torch.save(state, file)
    packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    # It is read back at once, because an error at the next resume is too late.
    unpack(packed)
    return packed


def unpack(packed: Tensor) -> dict[str, Any]:
    """Returns a state from bytes. Reading executes nothing.

    Raises:
        Exception: If torch cannot read it.
    """
    file = io.BytesIO(packed.numpy().tobytes())
    # torch would also inflate what was deflated, to a thousand times its size, and read the same
    # bytes for many entries. It writes neither.
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not is_stored or sum(entry.file_size for entry in entries) > packed.numel():
        raise ValueError("its entries are compressed, or share bytes: torch writes none so")
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def unpack_entry(key: str, packed: Tensor) -> dict[str, Any]:
    """Returns the state of an entry of a checkpoint, as `unpack` does.

    Raises:
        DamageError: If torch cannot read it.
    """
    try:
        return unpack(packed)
    except Exception as error:
        raise DamageError(f"its {key!r} cannot be read: {error!r}".partition("\\n")[0]) from error


class CommonState:
    """The state of the schedules and of updates.

    Args:
        config: The configuration.
        optimizer: The optimizer of this rank. Schedules set options in it.
        schedule: All learning-rate schedules as one; None if there are none.
        update: Has the loss scale, and counts the steps that were skipped.
    """

    def __init__(
        self,
        config: Config,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler | None,
        update: Update,
    ) -> None:
        self._configured = repr(config.optimizer)
        self._optimizer, self._schedule, self._update = optimizer, schedule, update

    def packed(self) -> Tensor:
        """Returns the state as bytes."""
        state = {"update": self._update.state_dict()}
        if self._schedule is None:
            return pack(state)
        schedule = {
            "configured": self._configured,
            "schedule": self._schedule.state_dict(),
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in self._optimizer.param_groups
            ],
        }
        try:
            return pack({**state, "learning_rate": schedule})
        except Exception:  # noqa: BLE001 - a schedule may keep any object; `restore` does without
            return pack(state)

    def restore(self, read: Tensor | None, num_steps: int) -> None:
        """Sets the state after so many steps.

        Args:
            read: The state in the checkpoint; None if it has none.
            num_steps: How many steps were made before the checkpoint.

        Raises:
            DamageError: If it cannot be read.
        """
        state: dict[str, Any] = {} if read is None else unpack_entry(COMMON, read)
        try:
            if "update" in state:
                self._update.load_state_dict(state["update"])
            if self._schedule is not None:
                self._restore(self._schedule, state.get("learning_rate", {}), num_steps)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(f"its {COMMON!r} is of another version: {error!r}") from error

    def _restore(self, schedule: LRScheduler, saved: dict[str, Any], num_steps: int) -> None:
        if saved.get("configured") == self._configured:
            schedule.load_state_dict(saved["schedule"])
            for group, options in zip(self._optimizer.param_groups, saved["groups"], strict=True):
                group.update(options)
            return
        # A run with other schedules has other states. They make the same number of steps; a
        # skipped step was none for them.
        with warnings.catch_warnings():
            # torch warns, because the optimizer makes no step between these.
            warnings.simplefilter("ignore")
            for _ in range(num_steps - self._update.skipped):
                schedule.step()


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

    def keys_to_read(self, saved: Iterable[str]) -> list[str]:
        """Returns the keys that this rank reads. All ranks together read those of all writers."""
        keys = sorted(key for key in saved if key.startswith(self.PREFIX))
        mine = [key for key in keys if key == self.key]
        return mine + keys[dist.get_rank() :: dist.get_world_size()]

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


def packed_handlers(state: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the state of this rank's handlers and codecs by its key; empty without state.

    Raises:
        PlanError: If it could not be read again.
    """
    try:
        return {f"{HANDLERS}{dist.get_rank()}": pack(state)} if state else {}
    except Exception as error:
        raise PlanError(
            f"no checkpoint can be written: what handlers {sorted(state['handlers'])} keep from "
            f"step to step is not of numbers, strings and CPU tensors alone: {in_words(error)}"
        ) from error


def handlers_to_read(saved: Iterable[str]) -> list[str]:
    """Returns the key of the handler state that this rank reads; empty if a checkpoint has none."""
    # A rank without state reads that of another rank. It says which plan the state
    # belongs to, and all ranks must refuse another plan alike.
    keys = sorted(key for key in saved if key.startswith(HANDLERS))
    mine = f"{HANDLERS}{dist.get_rank()}"
    return [mine] if mine in keys else keys[:1]


def unpacked_handlers(read: Mapping[str, Tensor]) -> tuple[dict[str, Any], str]:
    """Returns handler state, of another rank only the description of its plan.

    Args:
        read: What was read of `handlers_to_read`.

    Returns:
        The state, and why it cannot be read, else "".
    """
    for key, tensor in read.items():
        try:
            state = unpack(tensor)
        except Exception as error:  # noqa: BLE001 - whatever torch says
            reason = error.__context__ or error  # torch's own error only adds advice to it
            return {}, f"the state of handlers cannot be read again: {reason}"
        is_own = key == f"{HANDLERS}{dist.get_rank()}"
        return state if is_own else {"plan": state.get("plan"), "handlers": {}}, ""
    return {}, ""
