"""Worlds of ranks that share one card: NCCL, lazy and eager, and gloo with CUDA tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public

from pipegrad.testing import share_one_card
from tests.support.gpu.card import GPU

TIMEOUT_SECONDS = 100.0


@dataclass(frozen=True)
class World:
    """A backend, and where the tensors live."""

    backend: str
    device: str
    is_eager: bool = False  # communicators are made at once, by `device_id`


CPU, GLOO = World("gloo", "cpu"), World("gloo", "cuda")
NCCL = World("cpu:gloo,cuda:nccl", "cuda")
# Without gloo: torch before the mend of pytorch#192106 ends in a segmentation fault where a mesh
# splits it, if an earlier world of this process had gloo too.
EAGER = World("nccl", "cuda", is_eager=True)
WORLDS = [
    pytest.param(CPU, id="gloo-cpu"),
    pytest.param(GLOO, id="gloo-cuda", marks=GPU),
    pytest.param(NCCL, id="nccl", marks=GPU),
    pytest.param(EAGER, id="nccl-eager", marks=GPU),
]


def enter(world: World, folder: str) -> torch.device:
    """Leaves the world of `run_ranks` for another one; returns this rank's device."""
    me, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    share_one_card(me)
    os.environ["NCCL_DEBUG"] = "WARN"
    device = torch.device("cpu")
    if world.device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.init()  # or a DeviceMesh would choose a device
        device = torch.device("cuda", 0)
    dist.init_process_group(
        world.backend,
        store=FileStore(str(Path(folder, "store")), size),
        rank=me,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
        device_id=device if world.is_eager else None,
    )
    return device


def at_rest(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
