"""Machine: what decides how a rank rounds. Ranks of one kind make the same step, bit by bit."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


def kind_of_machine(device: torch.device) -> str:
    """Returns a text that is equal on ranks that round alike: device, threads, version of torch.

    Args:
        device: Of the rank's parameters.
    """
    version = f"torch {torch.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {version}"
    # torch takes other instructions on other processors. Where a thread's part of a tensor ends,
    # it takes instructions that may round in another way.
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_processor()}, {capability}, {torch.get_num_threads()} threads, {version}"


def _processor() -> str:
    with suppress(OSError):  # only Linux has this file
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
