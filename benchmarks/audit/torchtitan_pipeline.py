"""Audits torchtitan 0.2.2: its models, pipeline_llm, loss, Trainer.train_step and clipping.

pipegrad audit benchmarks/audit/torchtitan_pipeline.py:no_clipping --ranks 2

Trainer.__init__ needs a tokenizer, data and a GPU. So it is not called: the trainer gets the
attributes that train_step reads. torch must say that the device of this machine is a CPU, because
torchtitan asks when it is imported.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from shared import LEARNING_RATE, LENGTH, MICROBATCHES, ROWS, VOCABULARY, batches, loss_fn
from torch import Tensor, nn

from pipegrad.audit import Audit

torch._utils._get_available_device_type = lambda: "cpu"


def no_clipping() -> Audit:
    """Llama 3, 1F1B, and the norm is not clipped."""
    return _audit("llama3", max_norm=1e9)


def default_clipping() -> Audit:
    """The same, clipped to torchtitan's default of 1."""
    return _audit("llama3", max_norm=1.0)


def tied_qwen3() -> Audit:
    """As `no_clipping`, with a Qwen3 whose embedding and head are tied."""
    return _audit("qwen3", max_norm=1e9)


def options() -> Audit:
    """Options of the job and of its batches, each beside one process."""
    none = partial(_audit, "llama3", max_norm=1e9)
    variants: dict[str, Callable[[], Audit]] = {
        "clipping": partial(_audit, "llama3", max_norm=1.0),
        "padding": partial(none, has_padding=True),
        "positions": partial(none, has_positions=True),
        "recompute": partial(none, recompute=True),
        "rope theta": partial(none, rope_theta=100.0),
        "no weight decay of vectors": partial(none, decays_vectors=False),
    }
    return replace(none(), variants=variants)


def _updates(model: nn.Module, *, max_norm: float, decays_vectors: bool) -> SimpleNamespace:
    """Returns what updates a model in one process."""
    optimizer = torch.optim.SGD(_groups(model.parameters(), decays_vectors), lr=LEARNING_RATE)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()

    return SimpleNamespace(step=step)


def _groups(parameters: Iterable[nn.Parameter], decays_vectors: bool) -> list[dict[str, Any]]:
    return [
        {"params": [p], "weight_decay": 0.1 if decays_vectors or p.ndim > 1 else 0.0}
        for p in parameters
    ]


def _model(kind: str, **more: float) -> tuple[nn.Module, Any, Any]:
    """Returns a model, its arguments and torchtitan's function that parallelizes it."""
    size = {"dim": 32, "n_layers": 4, "n_heads": 4, "vocab_size": VOCABULARY, "max_seq_len": LENGTH}
    size |= more
    if kind == "llama3":
        from torchtitan.models.llama3.infra.parallelize import parallelize_llama as parallelize
        from torchtitan.models.llama3.model.args import TransformerModelArgs as Args
        from torchtitan.models.llama3.model.model import Transformer as Model

        args = Args(**size, multiple_of=32)
    else:
        from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3 as parallelize
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs as Args
        from torchtitan.models.qwen3.model.model import Qwen3Model as Model

        args = Args(**size, n_kv_heads=2, head_dim=8, hidden_dim=64, enable_weight_tying=True)
    model = Model(args)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
        model.tok_embeddings.weight.mul_(0.3)  # else a tied head's logits are very large
    return model, args, parallelize


def _audit(
    kind: str,
    *,
    max_norm: float,
    has_padding: bool = False,
    has_positions: bool = False,
    recompute: bool = False,
    decays_vectors: bool = True,
    **more: float,
) -> Audit:
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.train import Trainer

    world, device = dist.get_world_size(), torch.device("cpu")
    config = JobConfig()
    config.parallelism.pipeline_parallel_degree = world
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.parallelism.pipeline_parallel_microbatch_size = ROWS
    config.training.local_batch_size = MICROBATCHES * ROWS
    config.training.seq_len = LENGTH
    config.training.mixed_precision_param = "float32"
    config.training.max_norm = max_norm
    config.activation_checkpoint.mode = "full" if recompute else "none"
    ones = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"), 1)
    dims = ParallelDims(**ones, pp=world, world_size=world)
    dims.build_mesh()
    model, args, parallelize = _model(kind, **more)
    pipeline, parts, is_first, is_last = pipeline_llm(
        model,
        parallel_dims=dims,
        job_config=config,
        device=device,
        model_args=args,
        parallelize_fn=parallelize,
        loss_fn=cross_entropy_loss,
    )
    parameters = _groups((p for part in parts for p in part.parameters()), decays_vectors)
    logged: dict[str, float] = {}

    def log(_: int, loss: float, __: float, norm: float, **___: object) -> None:
        logged.update(loss=loss, grad_norm=norm)

    schedulers = [SimpleNamespace(get_last_lr=lambda: [LEARNING_RATE])]
    trainer = object.__new__(Trainer)
    vars(trainer).update(
        job_config=config,
        parallel_dims=dims,
        device=device,
        model_args=args,
        model_parts=parts,
        pp_schedule=pipeline,
        pp_has_first_stage=is_first,
        pp_has_last_stage=is_last,
        loss_fn=cross_entropy_loss,
        train_context=utils.get_train_context(False),
        maybe_enable_amp=utils.maybe_enable_amp(dims, "float32", "cpu"),
        optimizers=torch.optim.SGD(parameters, lr=LEARNING_RATE),
        gradient_accumulation_steps=1,
        step=1,
        ntokens_seen=0,
        tokenizer=None,
        lr_schedulers=SimpleNamespace(schedulers=schedulers, step=lambda: None),
        checkpointer=SimpleNamespace(maybe_wait_for_staging=lambda: None),
        metrics_processor=SimpleNamespace(should_log=lambda step: True, log=log),
    )

    def step(inputs: Any, target: Tensor) -> Mapping[str, float | None]:  # noqa: ANN401
        names = {"tokens": "input"}  # as the data loader calls them
        by_name = inputs if isinstance(inputs, Mapping) else {"input": inputs}
        trainer.train_step(iter([({names.get(n, n): x for n, x in by_name.items()}, target)]))
        return {"loss": logged["loss"] if is_last else None, "grad_norm": logged["grad_norm"]}

    return Audit(
        step=step,
        modules=parts,
        model=_model(kind, **more)[0],
        loss_fn=loss_fn,
        batches=_packed(batches()) if has_positions else batches(has_padding=has_padding),
        optimizer=partial(_updates, max_norm=max_norm, decays_vectors=decays_vectors),
        microbatches=MICROBATCHES,
    )


def _packed(every: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Returns batches whose rows are two texts: the positions of the second begin at 0 again."""
    result = []
    for tokens, target in every:
        positions = torch.arange(LENGTH) % (LENGTH // 2)
        result.append(({"tokens": tokens, "positions": positions.expand_as(tokens)}, target))
    return result
