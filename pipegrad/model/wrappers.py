"""Wrappers of a stage: DistributedDataParallel, FSDP1 and FSDP2. No other file looks for them.

FSDP is not imported here, because that is slow. If no code has imported it, no module is wrapped by
it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from typing_extensions import TypeIs

DDP = "DistributedDataParallel"
FSDP1 = "FullyShardedDataParallel"
FSDP2 = "FSDPModule"
_FSDP = "torch.distributed.fsdp"
_HOMES = {DDP: "torch.nn.parallel", FSDP1: _FSDP, FSDP2: _FSDP}


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside a DistributedDataParallel, or `module` itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def is_fsdp2(module: object) -> TypeIs[FSDPModule]:
    """True if FSDP2 (``fully_shard``) has wrapped a module."""
    return is_imported_kind(module, _FSDP, FSDP2)


def wrapper_of(stage: nn.Module) -> str:
    """Returns the class name of the first wrapper in a stage that reduces gradients; "" if none."""
    modules = stage.modules()
    found = (
        name for m in modules for name, home in _HOMES.items() if is_imported_kind(m, home, name)
    )
    return next(found, "")


def fsdp_modules(modules: Mapping[int, nn.Module]) -> dict[int, list[FSDPModule]]:
    """Returns the modules of each stage that FSDP2 has wrapped, the outermost first."""
    return {
        stage: [part for part in module.modules() if is_fsdp2(part)]
        for stage, module in modules.items()
    }


def reshard(parts: Iterable[FSDPModule]) -> None:
    """Puts sharded parameters back into their modules after a forward left gathered parameters."""
    for part in parts:
        part.reshard()


def is_imported_kind(value: object, module: str, name: str) -> bool:
    """True if a value is an instance of a class whose module is slow to import."""
    # Before an import of the module, no such instance exists. During the import, the class may be
    # missing in it.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
