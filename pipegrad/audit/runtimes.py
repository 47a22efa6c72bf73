"""Runtimes: audits of torch's, DeepSpeed's and Megatron's pipelines, without a step function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pipegrad.audit.audit import Audit
from pipegrad.audit.seen import before_clipping, gradient_of
from pipegrad.audit.truth import Batch, leaves_cut

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from pipegrad.interop.torch_schedule import TorchSchedule


def of_torch(
    schedule: TorchSchedule,
    optimizer: Optimizer,
    *,
    model: nn.Module,
    batches: Sequence[Batch],
    before_step: Callable[[], object] | None = None,
    **more: Any,  # noqa: ANN401 - fields of Audit
) -> Audit:
    """Returns the audit of a schedule of torch.distributed.pipelining.

    A step sets gradients to zero, runs the schedule, calls `before_step`, and steps the optimizer.

    Args:
        schedule: This rank's schedule; it provides stages, loss function and microbatches.
        optimizer: The optimizer of this rank's parameters.
        model: As in `Audit`.
        batches: As in `Audit`.
        before_step: Reduces and clips gradients, as the training does. It may return their norm.
        **more: Other attributes of `Audit`.
    """
    from pipegrad.interop.torch_schedule import loss_fn_of, num_microbatches, stages_of

    stages = stages_of(schedule)
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)

    def step(inputs: Any, target: Any) -> Mapping[str, object]:  # noqa: ANN401 - as batches
        optimizer.zero_grad()
        losses = list[Tensor]()
        of_last = {"target": target, "losses": losses} if is_last else {}
        if not is_first:
            schedule.step(**of_last)
        elif isinstance(inputs, Mapping):
            schedule.step(**inputs, **of_last)
        else:
            args = inputs if isinstance(inputs, tuple | list) else (inputs,)
            schedule.step(*args, **of_last)
        norm = before_step() if before_step is not None else None
        optimizer.step()
        return {"loss": losses or None, "grad_norm": norm}

    known: dict[str, Any] = {
        "loss_fn": loss_fn_of(schedule),
        "microbatches": num_microbatches(schedule),
        "modules": [stage.submod for stage in stages],
    }
    return Audit(step=step, model=model, batches=batches, **{**known, **more})


def of_deepspeed(
    engine: Any,  # noqa: ANN401 - DeepSpeed need not be installed
    *,
    model: nn.Module,
    batches: Sequence[Batch],
    **more: Any,  # noqa: ANN401 - fields of Audit
) -> Audit:
    """Returns the audit of DeepSpeed's PipelineModule, by ``engine.train_batch``.

    If DeepSpeed keeps gradients in its own memory, give ``gradients``. For example, with bf16 call
    ``deepspeed.utils.safe_get_full_grad``; with ZeRO 1 read the partitions of its optimizer, as in
    benchmarks/audit/deepspeed_pipeline.py.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        model: As in `Audit`. In an nn.Sequential of all layers, a layer has its index as its name;
            for other models give ``names``.
        batches: As in `Audit`.
        **more: Other attributes of `Audit`.
    """
    number: int = engine.gradient_accumulation_steps()
    clip = getattr(engine, "clip_fp32_gradients", None)
    if clip is not None:  # without ZeRO it clips by its own code, which returns no norm

        def marked() -> None:
            before_clipping()
            clip()

        engine.clip_fp32_gradients = marked

    def step(inputs: Any, target: Any) -> Mapping[str, object]:  # noqa: ANN401 - as batches
        return {
            "loss": engine.train_batch(data_iter=iter(leaves_cut((inputs, target), number))),
            "grad_norm": engine.get_global_grad_norm(),
        }

    known: dict[str, Any] = {
        "clip_norm": engine.gradient_clipping() or None,
        "loss_fn": engine.module.loss_fn,
        "microbatches": number,
        "modules": engine.module,
        "num_replicas": engine.grid.get_data_parallel_world_size(),
        "replica": engine.grid.get_data_parallel_rank(),
        "names": _names_of_layers(engine.module),
    }
    return Audit(step=step, model=model, batches=batches, **{**known, **more})


def of_megatron(
    forward_backward_func: Callable[..., Any],
    forward_step_func: Callable[..., Any],
    modules: Sequence[nn.Module],
    optimizer: Any,  # noqa: ANN401 - Megatron need not be installed
    *,
    microbatches: int,
    options: Mapping[str, Any],
    loss_of: Callable[[Any], object] | None = None,
    **more: Any,  # noqa: ANN401 - fields of Audit
) -> Audit:
    """Returns the audit of a training step of Megatron-LM.

    Args:
        forward_backward_func: The function that ``get_forward_backward_func`` returned.
        forward_step_func: ``forward_step_func(data_iterator, model)``. The iterator yields a
            microbatch: inputs and target.
        modules: This rank's model chunks, wrapped in Megatron's DistributedDataParallel.
        optimizer: Megatron's optimizer. The first two results of its ``step`` are its success and
            the norm.
        microbatches: Number of microbatches of a step.
        options: Further arguments of `forward_backward_func`: ``seq_length``, ``micro_batch_size``.
        loss_of: Computes the loss from the result of `forward_backward_func`, as the training logs
            it; by default the sum of its ``{"loss": [sum, number of tokens]}``.
        **more: Other attributes of `Audit`.
    """
    chunks: list[Any] = list(modules)
    loss_of = loss_of or _logged
    bare = [getattr(chunk, "module", chunk) for chunk in chunks]

    def step(inputs: Any, target: Any) -> Mapping[str, object]:  # noqa: ANN401 - as batches
        for chunk in chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
        optimizer.zero_grad()
        every = leaves_cut((inputs, target), microbatches)
        # With virtual stages each chunk reads the batch from its beginning.
        data = [iter(every) for _ in chunks] if len(chunks) > 1 else iter(every)
        reduced = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=data,
            model=chunks,
            num_microbatches=microbatches,
            forward_only=False,
            **options,
        )
        _, norm, *_ = optimizer.step()
        return {"loss": loss_of(reduced), "grad_norm": norm}

    def gradients() -> Mapping[str, Tensor | None]:
        return {n: gradient_of(p) for module in bare for n, p in module.named_parameters()}

    known: dict[str, Any] = {
        "clip_norm": getattr(getattr(optimizer, "config", None), "clip_grad", None) or None,
        "gradients": gradients,
        "modules": bare,
        "names": _names_of_decoders(bare),
        **_replica_of_megatron(),
    }
    return Audit(step=step, microbatches=microbatches, **{**known, **more})


def _names_of_layers(module: Any) -> Mapping[str, str]:  # noqa: ANN401 - a PipelineModule
    """Returns names of a PipelineModule's parameters -> names in an nn.Sequential of its layers."""
    # A layer's name is its index. A tied layer has its key as name, on each stage that has it.
    indices: dict[str, int] = {}
    for index in range(module._local_start, module._local_stop):
        indices.setdefault(getattr(module._layer_specs[index], "key", ""), index)
    result = {}
    for name, _ in module.named_parameters():
        home, *rest = name.split(".")
        if home == "tied_modules":
            home, rest = str(indices[rest[0]]), rest[1:]
        result[name] = ".".join([home, *rest])
    return result


def _names_of_decoders(modules: Sequence[nn.Module]) -> Mapping[str, str] | None:
    """Returns names of Megatron's chunks -> names in the uncut model, where all layers count."""
    result = {}
    for module in modules:
        for name, _ in module.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                layer: Any = module.get_submodule(".".join(parts[:3]))
                if not hasattr(layer, "layer_number"):
                    return None
                parts[2] = str(layer.layer_number - 1)
            result[name] = ".".join(parts)
    # Chunks have the same names. Without layers of Megatron, names need no change.
    has_layers = any(name.startswith("decoder.layers.") for name in result)
    return result if has_layers and len(modules) == 1 else None


def _replica_of_megatron() -> Mapping[str, int]:
    """Returns this rank's replica and the number of replicas, if Megatron is initialized."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    return {
        "replica": state.get_data_parallel_rank(),
        "num_replicas": state.get_data_parallel_world_size(),
    }


def _logged(reduced: Any) -> float | None:  # noqa: ANN401 - of the training
    """Returns the loss of this replica as Megatron-LM's training loop adds it up."""
    losses = [one["loss"] for one in reduced or () if isinstance(one, Mapping) and "loss" in one]
    if not losses or any(getattr(loss, "numel", int)() != 2 for loss in losses):
        return None
    total = sum(losses)
    return float(total[0] / total[1])
