"""What wraps a stage: DistributedDataParallel, FSDP1 or FSDP2. The one file that knows them.

FSDP is slow to import. Where nobody has imported it no module can be of it.
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


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside a DistributedDataParallel, or `module` itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def is_fsdp2(module: object) -> TypeIs[FSDPModule]:
    """Whether FSDP2 (``fully_shard``) has wrapped a module."""
    return is_imported_kind(module, _FSDP, FSDP2)


def wrapper_of(stage: nn.Module) -> str:
    """Returns the class name of the first wrapper of a stage that reduces by itself."""
    for module in stage.modules():
        if isinstance(module, DistributedDataParallel):
            return DDP
        for name in (FSDP1, FSDP2):
            if is_imported_kind(module, _FSDP, name):
                return name
    return ""


def fsdp_modules(modules: Mapping[int, nn.Module]) -> dict[int, list[FSDPModule]]:
    """Returns what FSDP2 has wrapped of each stage, the outermost first."""
    return {
        stage: [part for part in module.modules() if is_fsdp2(part)]
        for stage, module in modules.items()
    }


def reshard(parts: Iterable[FSDPModule]) -> None:
    """Puts the sharded parameters back into their modules, where a forward left whole ones."""
    for part in parts:
        part.reshard()


def is_imported_kind(value: object, module: str, name: str) -> bool:
    """Whether a value is of a class of a module that is slow to import: not before somebody has.

    Args:
        value: Anything.
        module: Full name of the module that has the class.
        name: Of the class; missing while the module is being imported.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
