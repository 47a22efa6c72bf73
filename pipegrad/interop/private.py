"""Every private name of torch that pipegrad uses, each with a public name here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.cuda import _gpu_trace as gpu_trace  # where torch's own sanitizer listens too
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _WrappedHook as WrappedHook
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # its documented home
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_leaves_with_path,
    tree_map,
    tree_unflatten,
)

from pipegrad.model.wrappers import is_imported_kind

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase

__all__ = [
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "PipelineStageBase",
    "TorchDispatchMode",
    "TreeSpec",
    "WrappedHook",
    "gpu_trace",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]
_Part = tuple[int, str, int]  # of a cell: a stage, an action as in 2F0, and a microbatch
CLIPS_WITH_NORM = (
    "_clip_grads_with_norm_"  # what clip_grad_norm_ calls, in torch.nn.utils.clip_grad
)


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keeps torch from logging the reason for which an operator does not take fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def is_profiled() -> bool:
    """True if a torch profiler is recording. The check is cheaper than an unused range."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def flat(
    tree: object, is_leaf: Callable[[object], bool] | None = None
) -> tuple[list[tuple[str, object]], Callable[[list[object]], object]]:
    """Returns the leaves of a tree of dicts, tuples and lists, and a function that rebuilds it.

    Args:
        tree: A tree; classes that are registered in ``torch.utils._pytree`` are nodes too.
        is_leaf: Returns True if a node is a leaf.

    Returns:
        Pairs of path, for example ``"['mask'][0]"``, and leaf; and a function from new leaves, in
        the same order, to a tree of the same structure.
    """
    leaves, spec = tree_flatten(tree, is_leaf)
    try:
        paths = [keystr(path) for path, _ in tree_leaves_with_path(tree, is_leaf)]
    except ValueError:  # a registered class need not name its parts
        paths = [f"[{number}]" for number in range(len(leaves))]
    return list(zip(paths, leaves, strict=True)), partial(tree_unflatten, treespec=spec)


def accumulate_hooks(tensor: torch.Tensor) -> dict[int, Callable[[Any], object]]:
    """Returns the table of hooks that autograd calls, in its order, after it has set `.grad`."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def resting_hook(parameter: torch.nn.Parameter) -> tuple[dict[int, Callable[[Any], object]], int]:
    """Returns the table of hooks that autograd calls for a parameter, and a free number there."""
    # A function under that number is called, after the ones that are there already. A write to the
    # table is cheaper than a new hook and its handle for each parameter in each step.
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    hooks = accumulate_hooks(parameter)
    handle.remove()
    return hooks, handle.id


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """True if autograd calls hooks with each gradient before it is added to `.grad`."""
    return bool(tensor._backward_hooks)


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """True if a call of a module does more than its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def script_arguments(function: Any) -> list[str] | None:  # noqa: ANN401 - its schema is C++'s
    """Returns the argument names of a scripted or traced function; None for any other function."""
    if not isinstance(function, torch.ScriptMethod | torch.ScriptFunction):
        return None
    schema: Any = function.schema
    return [argument.name for argument in schema.arguments if argument.name != "self"]


def is_arriving(tensor: torch.Tensor) -> bool:
    """Returns True if a collective of torch, for example of tensor parallelism, still writes."""
    module = "torch.distributed._functional_collectives"
    return is_imported_kind(tensor, module, "AsyncCollectiveTensor")


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor has no memory itself and wraps other tensors."""
    return is_traceable_wrapper_subclass(tensor)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Returns a key that differs from the keys of all other storages, as long as it lives."""
    return int(storage._cdata)


def weak_storage(storage: torch.UntypedStorage) -> object:
    """Returns a reference that reserves a key of `storage_key`, but does not keep the memory."""
    return StorageWeakRef(storage)


def end_backward(part: FSDPModule) -> None:
    """Ends a backward of an outermost FSDP2 module, as autograd's final callback does."""
    # Call FSDP2's final callback here, because autograd never queues it if no gradient reaches the
    # module. Gradients of earlier backwards would then stay unreduced.
    state = part._get_fsdp_state()
    if state._is_root:
        state._root_post_backward_final_callback()


def groups_of(part: FSDPModule) -> list[Any]:
    """Returns the groups of parameters that an FSDP2 module gathers together."""
    state = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return [*filter(None, [state._fsdp_param_group])]  # torch 2.11 has one group, or none


def forget_backwards(parts: Iterable[FSDPModule]) -> None:
    """Drops the state that FSDP2 keeps of a failed step, and its accumulated gradients."""
    # FSDP2 before torch 2.15 keeps accumulated gradients in one of two attributes. Clear both,
    # because the next step would add to them.
    for part in parts:
        state = part._get_fsdp_state()
        for group in groups_of(part):
            for parameter in group.fsdp_params:
                if "unsharded_accumulated_grad" in vars(parameter):
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        if state._is_root and hasattr(part, "reset_iter_state"):
            part.reset_iter_state()
        elif state._is_root:  # torch 2.11: a backward without gradients ends there
            context = state._state_ctx
            context.iter_forward_root, context.is_last_backward = None, True
            for each in context.all_states:
                each._modules_to_run_forward.clear()
            state._root_post_backward_final_callback()


def activate_gpu_trace() -> None:
    """Makes torch call the callbacks of `gpu_trace`. It cannot be undone."""
    torch._C._activate_gpu_trace()


def with_transfers(
    order: Sequence[Sequence[Sequence[_Part]]], rank_of: Sequence[int]
) -> list[list[_Part]] | None:
    """Returns the actions of each rank with transfers where torch's runtime puts them.

    Args:
        order: For each rank its cells, each of one or more actions.
        rank_of: Rank of each stage.

    Returns:
        The actions of each rank; None if inputs of some never come.
    """
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv

    made: dict[int, list[Any]] = {
        rank: [_Action(-1, "", None, tuple(_Action(*part) for part in cell)) for cell in cells]  # type: ignore[arg-type]
        for rank, cells in enumerate(order)
    }
    try:
        placed = _add_send_recv(made, rank_of.__getitem__, len(rank_of))
    except AssertionError:
        return None
    parts = [[p for each in placed[r] for p in each.sub_actions or [each]] for r in sorted(placed)]
    # Types of actions are strings of a class of their own.
    return [[(p[0], str.__str__(p[1]), p[2]) for p in of_rank] for of_rank in parts]  # type: ignore[misc]
