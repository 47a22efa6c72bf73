"""Audits megatron-core: GPTModel, 1F1B, DistributedDataParallel, clipping and optimizer.

pipegrad audit benchmarks/audit/megatron_pipeline.py:clipping --ranks 2

All ranks are stages of one pipeline. `two_stages` makes replicas of two stages. Embedding and head
are tied. megatron-core needs no GPU here: what asks for a CUDA device gets the CPU.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shared import (
    LAYERS,
    LEARNING_RATE,
    LENGTH,
    MICROBATCHES,
    ROWS,
    VOCABULARY,
    WIDTH,
    batches,
    loss_fn,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from uncut_megatron import HEADS, UncutGpt

from pipegrad.audit import Audit, of_megatron


def clipping() -> Audit:
    """Clipped to 1."""
    return _audit(clip_grad=1.0)


def two_stages() -> Audit:
    """The same, in pipelines of two stages: with 4 ranks there are two replicas."""
    return _audit(clip_grad=1.0, num_stages=2)


def padding() -> Audit:
    """Not clipped. Microbatches have different numbers of targets."""
    return _audit(has_padding=True)


def padding_per_token() -> Audit:
    """The same with ``calculate_per_token_loss``."""
    return _audit(has_padding=True, is_per_token=True)


def options() -> Audit:
    """Options of the configuration and of the optimizer, each beside one process."""
    variants: dict[str, Callable[[], Audit]] = {
        "clipping": partial(_audit, clip_grad=1.0),
        "padding": partial(_audit, has_padding=True),
        "padding per token": partial(_audit, has_padding=True, is_per_token=True),
        "dropout": partial(_audit, hidden_dropout=0.1),
        "momentum": partial(_audit, momentum=0.9),
        "weight decay": partial(_audit, weight_decay=0.1),
        "weight decay, no scheduler": partial(_audit, weight_decay=0.1, has_scheduler=False),
        "no bias of linear layers": partial(_audit, add_bias_linear=False),
    }
    return replace(_audit(), variants=variants)


class _Updates:
    """What updates the uncut model.

    Weight decay is of matrices alone: "the classic megatron approach of skipping all len 1 and bias
    parameters", says get_standard_config_overrides.
    """

    def __init__(
        self, clip_grad: float, momentum: float, weight_decay: float, model: nn.Module
    ) -> None:
        self._parameters, self._clip_grad = list(model.parameters()), clip_grad or 1e9
        groups = [
            {"params": [p], "weight_decay": weight_decay if p.ndim > 1 else 0.0}
            for p in self._parameters
        ]
        self._optimizer = torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=momentum)

    def step(self) -> None:
        """Updates the model."""
        nn.utils.clip_grad_norm_(self._parameters, self._clip_grad)
        self._optimizer.step()


class _OnCpu(TorchFunctionMode):
    """Gives the CPU to what asks for a CUDA device."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(result, str):  # clipping asserts a CUDA tensor
            return result.replace("torch.Float", "torch.cuda.Float")
        return result


def _forward_step(data: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    """As in Megatron-LM's pretrain_gpt.py."""
    tokens, target = next(data)
    positions = torch.arange(LENGTH).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    counted = (target != -100).float()

    def sums(losses: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        loss, number = (losses * counted).sum(), counted.sum().int()
        return loss, number, {"loss": torch.stack([loss.detach(), number.float()])}

    return model(tokens, positions, mask, labels=target.clamp(min=0)), sums


def _audit(
    *,
    clip_grad: float = 0.0,
    num_stages: int | None = None,
    has_padding: bool = False,
    is_per_token: bool = False,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    has_scheduler: bool = True,
    **more: Any,  # noqa: ANN401 - of TransformerConfig
) -> Audit:
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_, **__: None
    if not any(isinstance(mode, _OnCpu) for mode in _get_current_function_mode_stack()):
        _OnCpu().__enter__()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel as Ddp
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    tracker = tensor_parallel.get_cuda_rng_tracker()  # for dropout, which is 0
    type(tracker).fork = lambda *_, **__: contextlib.nullcontext()
    num_stages = num_stages or dist.get_world_size()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_stages)
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "use_cpu_initialization": True,
        "pipeline_model_parallel_size": num_stages,
        "pipeline_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "init_method_std": 0.3,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "calculate_per_token_loss": is_per_token,
    }
    config = TransformerConfig(**settings | more)
    stage = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    wrapped = Ddp(config, DistributedDataParallelConfig(), stage)
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    options = OptimizerConfig(
        optimizer="sgd",
        lr=LEARNING_RATE,
        sgd_momentum=momentum,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        use_distributed_optimizer=False,
    )
    optimizer = get_megatron_optimizer(options, [wrapped])
    config.grad_scale_func = optimizer.scale_loss
    if has_scheduler:  # as Megatron-LM's training loop; it sets the weight decay of each group
        OptimizerParamScheduler(
            optimizer,
            init_lr=LEARNING_RATE,
            max_lr=LEARNING_RATE,
            min_lr=LEARNING_RATE,
            lr_warmup_steps=0,
            lr_decay_steps=1,
            lr_decay_style="constant",
            start_wd=weight_decay,
            end_wd=weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
    num_replicas = parallel_state.get_data_parallel_world_size()
    audit = of_megatron(
        get_forward_backward_func(),
        _forward_step,
        [wrapped],
        optimizer,
        model=UncutGpt(more.get("hidden_dropout", 0.0), more.get("add_bias_linear", True)),
        loss_fn=loss_fn,
        batches=batches(num_replicas=num_replicas, has_padding=has_padding),
        microbatches=MICROBATCHES,
        options={"seq_length": LENGTH, "micro_batch_size": ROWS},
    )
    return replace(audit, optimizer=partial(_Updates, clip_grad, momentum, weight_decay))
