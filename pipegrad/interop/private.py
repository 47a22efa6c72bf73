"""Every private name of torch that pipegrad uses, behind a name of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.cuda import _gpu_trace as gpu_trace  # where torch's own sanitizer listens too
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # its documented home
    is_traceable_wrapper_subclass,
)

from pipegrad.model.wrappers import is_imported_kind

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase

__all__ = ["PipelineStageBase", "TorchDispatchMode", "gpu_trace"]


def is_profiled() -> bool:
    """Whether a torch profiler is recording. Asking costs less than a range that nobody records."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def script_arguments(function: Any) -> list[str] | None:  # noqa: ANN401 - its schema is C++'s
    """Returns the names of what a scripted or traced function takes; None of any other."""
    if not isinstance(function, torch.ScriptMethod | torch.ScriptFunction):
        return None
    schema: Any = function.schema
    return [argument.name for argument in schema.arguments if argument.name != "self"]


def is_arriving(tensor: torch.Tensor) -> bool:
    """Returns whether a collective of torch, of tensor parallelism say, still writes a tensor."""
    module = "torch.distributed._functional_collectives"
    return is_imported_kind(tensor, module, "AsyncCollectiveTensor")


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has no memory of its own, but stands for other tensors."""
    return is_traceable_wrapper_subclass(tensor)


def num_holders(tensor: torch.Tensor) -> int:
    """Returns how many tensors share the memory of one, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # but for `storage` itself


def end_backward(part: FSDPModule) -> None:
    """Does for an outermost FSDP2 module what autograd calls FSDP2 for behind each backward."""
    state = part._get_fsdp_state()
    if state._is_root:
        state._root_post_backward_final_callback()


def forget_backwards(parts: Iterable[FSDPModule]) -> None:
    """Lets go of all that FSDP2 keeps of a step that failed, what has added up as well."""
    for part in parts:
        state = part._get_fsdp_state()
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        if state._is_root:
            state._reset_iter_state()


def activate_gpu_trace() -> None:
    """Has torch call what listens to `gpu_trace`; there is no way back."""
    torch._C._activate_gpu_trace()
