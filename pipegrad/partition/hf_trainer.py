"""The Trainer of transformers over a pipeline: its loop, data, logs, metrics and checkpoints.

Written for transformers 5.23 and accelerate 1.15, whose loop runs unchanged. `PipelineTrainer`
changes the rows of each rank, the step, its gradient clipping, the evaluation and the checkpoint.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import find_batch_size, gather, recursively_apply
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import IterableDatasetShard

from pipegrad.checkpoint import Saver, State, resume
from pipegrad.comm.agreement import agree
from pipegrad.errors import ConfigError, StepError, refuse
from pipegrad.partition.cut_model import Cut
from pipegrad.partition.generation import Link
from pipegrad.pipeline.scheduler import Scheduler

_STATE = "pipeline"  # the folder in a checkpoint that resumes a run on any layout
_Hf = Any  # arguments and results of transformers
# Arguments of TrainingArguments that do not work in a pipeline -> advice.
_REFUSED = {
    "gradient_accumulation_steps": "set num_microbatches of the Scheduler",
    "gradient_checkpointing": "call the model's gradient_checkpointing_enable() before the cut",
    "fp16": "use bf16",
    "label_smoothing_factor": "give the Scheduler a loss_fn",
    "neftune_noise_alpha": "add the noise in the model",
    "torch_compile": "compile the modules of the cut",
    "use_liger_kernel": "apply it to the model before the cut",
    "auto_find_batch_size": "more microbatches take less memory",
    "deepspeed": "pipegrad reduces gradients",
    "fsdp": "give the Scheduler handlers=['sharded']",
    "parallelism_config": "pipegrad.Topology has the dimensions",
    "fp16_full_eval": "give the cut a dtype",
    "bf16_full_eval": "give the cut a dtype",
    "push_to_hub": "upload the directory when the run has ended",
    "eval_use_gather_object": "compute_metrics has the predictions of all replicas already",
    "debug": "scheduler.sync.non_finite() names the parameters whose gradients are not finite",
}
_REFUSED_OTHERS = ("model", "model_init", "compute_loss_func", "optimizers")
# Methods of Trainer that the loop does not call in a pipeline, or that need a whole model -> advice
# instead of an override.
_NOT_CALLED = {
    name: advice
    for names, advice in {
        "compute_loss": "give the Scheduler a loss_fn",
        "get_batch_samples _get_num_items_in_batch": (
            "the loss is a mean over all labels of a step; for another give the Scheduler a "
            "loss_fn. Change batches in training_step"
        ),
        "compute_loss_context_manager autocast_smart_context_manager": (
            "override training_step and prediction_step, and enter it around super()'s"
        ),
        "create_optimizer_and_scheduler": "override create_optimizer and create_scheduler",
        "_clip_grad_norm _get_grad_norm": (
            "set max_grad_norm, or call scheduler.sync.clip_grad_norm_ in on_pre_optimizer_step"
        ),
        "get_sp_size get_cp_size get_tp_size _prepare_context_parallel_inputs": (
            "pipegrad.Topology has the dimensions"
        ),
        "_wrap_model _move_model_to_device": "change cut.modules before the Scheduler is made",
        "hyperparameter_search call_model_init": "make a model, cut and trainer in each trial",
    }.items()
    for name in names.split()
}


class _Stages(nn.ModuleList):
    """The stages of this rank, which the loop trains as its model.

    Attributes:
        optimizer: The stages' optimizer; None before the run.
    """

    optimizer: torch.optim.Optimizer | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, also of shards and copies that only the optimizer holds."""
        super().zero_grad(set_to_none)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def forward(self, *_args: object, **_named: object) -> NoReturn:
        """Raises StepError: a rank has no whole model."""
        raise StepError(
            "this rank has stages, and no whole model to call: call super().training_step() or "
            "super().prediction_step(), or the Scheduler's evaluate()"
        )


class PipelineTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose model is cut into stages. Every rank makes it and calls its methods.

    ``per_device_train_batch_size`` and ``per_device_eval_batch_size`` are the rows of a replica in
    one step. All ranks of a replica have the same rows. The `Scheduler` computes the loss. The
    model's own loss is a mean over all labels of a step that count, as in Trainer. Every rank gets
    the arguments of ``compute_metrics``.

    A subclass may override methods that the loop calls, for example ``create_optimizer``,
    ``training_step`` around ``super()``, ``prediction_step``, ``log`` and ``get_train_dataloader``.
    An override that the loop would not call, for example ``compute_loss``, raises `ConfigError`.

    Args:
        cut: A cut of a model of transformers.
        scheduler: The Scheduler of this cut.
        args: The arguments of Trainer. Their constructor starts torch.distributed.
        **others: Other arguments of Trainer, for example ``train_dataset`` and ``callbacks``.

    Raises:
        ConfigError: If an argument, or an override of a method, cannot work in a pipeline. In
            ``train``, on all ranks, if the optimizer does not step this rank's parameters.
    """

    def __init__(
        self, cut: Cut, scheduler: Scheduler, args: TrainingArguments, **others: _Hf
    ) -> None:
        _check(cut, args, others)
        self._refuse_overrides()
        self.cut, self.scheduler, self._topology = cut, scheduler, scheduler.topology
        # The model on the meta device: its class, configuration and names of parameters.
        super().__init__(model=cut.uncut, args=args, **others)
        self.optimizer: _Hf = None
        self._saver: Saver | None = None
        self._stages = _Stages([cut.modules[i] for i in self._topology.local_stages])
        self._link = Link(self._topology, self.args.device)
        self._last = self._topology.ranks_of([self._topology.num_stages - 1])[0]
        # The loop gets loaders and the results of all ranks from the accelerator.
        self.accelerator.prepare_data_loader = self._loader
        self.accelerator.prepare_optimizer = self._of_this_rank
        self.accelerator.gather = self._of_replicas
        self.accelerator.clip_grad_norm_ = _refuse_clipping

    def _refuse_overrides(self) -> None:
        """Refuses a method of a subclass, or of this object, that the loop would not call."""
        order = type(self).__mro__
        behind = order[order.index(PipelineTrainer) + 1]
        methods = {name: getattr(self, name, None) for name in _NOT_CALLED}
        own = {name: getattr(PipelineTrainer, name, None) for name in _NOT_CALLED}
        refuse(
            ConfigError,
            {
                f"PipelineTrainer hides methods of {behind.__name__}, which stands behind it: name "
                f"PipelineTrainer last among the bases of {type(self).__name__}": (
                    behind is not Trainer
                ),
                **{
                    f"{type(self).__name__} overrides {name}, which has no effect in a pipeline: "
                    f"{_NOT_CALLED[name]}": getattr(method, "__func__", None) is not own[name]
                    for name, method in methods.items()
                },
            },
        )

    def _of_this_rank(self, optimizer: _Hf, **_options: _Hf) -> _Hf:
        """Returns the optimizer, or raises if it steps no parameters of this rank.

        All ranks call it.
        """

        def check() -> None:
            given = [p for group in optimizer.param_groups for p in group["params"]]
            stepped = {id(main.tensor) for main in self.scheduler.sync.main_parameters()}
            if any(p.is_meta for p in given) or (stepped and stepped.isdisjoint(map(id, given))):
                raise ConfigError(
                    f"{type(optimizer).__name__} would train nothing: it has parameters that this "
                    f"rank does not train, such as those of trainer.model, which has no values. "
                    f"Make it by self.scheduler.optimizer(kind, **options)"
                )

        agree("the optimizer of PipelineTrainer", check)
        self._stages.optimizer = optimizer
        return optimizer

    def _loader(self, loader: _Hf, **_options: _Hf) -> _Hf:
        accelerator, axes = self.accelerator, self._topology.data_axes
        replicas, replica = self._topology.size(axes), self._topology.coordinate(axes)
        if replicas > 1 and isinstance(loader.dataset, IterableDataset):
            # It counts rows, because all replicas must make the same steps for any sharding.
            shard = IterableDatasetShard(
                loader.dataset, loader.batch_size or 1, loader.drop_last, replicas, replica
            )
            loader, replicas, replica = copy.copy(loader), 1, 0
            loader.__dict__["dataset"] = shard  # torch refuses an assignment
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=replicas,
            process_index=replica,
            put_on_device=True,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,  # otherwise each rank would get other rows
            even_batches=True,  # all replicas make the same steps
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
        )

    def _of_replicas(self, tensors: _Hf) -> _Hf:
        """Returns the joined values of all replicas, from one rank of each replica."""
        ranks = self._topology.ranks_along(self._topology.data_axes)

        def joined(tensor: Tensor) -> Tensor:
            parts = gather(tensor).chunk(dist.get_world_size())
            return torch.cat([parts[rank] for rank in ranks])

        with self.scheduler.sync.bounded("gather()"):
            return recursively_apply(joined, tensors)

    # Methods that the loop calls.

    def _move_model_to_device(self, *_args: _Hf) -> None:
        """Does nothing, because stages are on their device and the model is on the meta device."""

    def _wrap_model(self, *_args: _Hf, **_kwargs: _Hf) -> nn.Module:
        self._refuse_overrides()
        return self._stages

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        replicas = self._topology.size(self._topology.data_axes)
        return int(self._train_batch_size * replicas)

    def create_optimizer(self, model: _Hf = None) -> _Hf:
        """Makes the optimizer that ``args.optim`` names, for this rank's parameters."""
        if self.optimizer is None:
            kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, self.model
            )
            if options.keys() & {"params", "model", "optimizer_dict"}:
                raise ConfigError(f"optim={self.args.optim} takes the whole model: choose another")
            decayed = {*self.get_decay_parameter_names(self.model)}
            decay = {True: {"weight_decay": self.args.weight_decay}, False: {"weight_decay": 0.0}}
            self.optimizer = self.scheduler.optimizer(
                kind, group_of=lambda name, _: decay[name in decayed], **options
            )
        return self.optimizer

    def training_step(
        self, model: nn.Module, inputs: _Hf, num_items_in_batch: _Hf = None
    ) -> Tensor:
        """Runs a step of the Scheduler; returns its loss."""
        self._stages.train()
        inputs = self._prepare_inputs(inputs)
        with self.accelerator.autocast():
            return self.scheduler.step(inputs, num_microbatches=self._number(inputs)).loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.scheduler.sync.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.scheduler.sync.clip_grad_norm_(math.inf) if grad_norm is None else grad_norm

    def store_flos(self) -> None:
        """Stores the operations of all batches. Each rank of a replica has counted its batches."""
        self.current_flos *= self._topology.size(self._topology.data_axes) / dist.get_world_size()
        super().store_flos()

    def prediction_step(
        self,
        model: nn.Module,
        inputs: _Hf,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, _Hf, _Hf]:
        """Runs an evaluation; returns loss, logits and labels."""
        inputs = self._prepare_inputs(inputs)
        self._count_last(inputs)
        with self.accelerator.autocast():
            result = self.scheduler.evaluate(
                inputs, num_microbatches=self._number(inputs), outputs=not prediction_loss_only
            )
        names = [name for name in self.label_names if name in inputs]
        loss = result.loss if names else None
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            ignore_keys = getattr(self.model.config, "keys_to_ignore_at_inference", [])
        kept = [n for n in self.cut.returns if not n.endswith("loss") and n not in ignore_keys]
        # The model's own loss comes after these names; other losses have no rows.
        named = dict(zip(self.cut.returns, result.outputs, strict=False))
        outputs = self._link.shared([named[n] for n in kept if n in named], self._last)
        labels: _Hf = [inputs[name] for name in names]
        # The uncut model returns a tuple, also if no stage sends its other outputs.
        is_tuple = any(name not in ignore_keys for name in self.cut.not_returned)
        logits: _Hf = outputs[0] if len(outputs) == 1 and not is_tuple else tuple(outputs) or None
        return loss, logits, labels[0] if len(labels) == 1 else tuple(labels) or None

    def _count_last(self, inputs: _Hf) -> None:
        """Sets the number of rows in the last batch for the loop, if the dataset has no length."""
        loader: _Hf = self.callback_handler.eval_dataloader
        if not getattr(loader, "end_of_dataloader", False) or loader.remainder >= 0:
            return  # or one that accelerate has not prepared
        rows = find_batch_size(inputs) * self._topology.size(self._topology.data_axes)
        # Use the dataset's count if this process has it, which needs a loader without workers,
        # because the batch may contain rows that only fill it up.
        counted = 0 if loader._drop_last else getattr(loader.dataset, "num_examples", 0)
        loader.remainder = counted % rows or rows

    def _number(self, inputs: _Hf) -> int:
        """Returns the number of microbatches, fewer if the last batch has few rows."""
        rows: int = find_batch_size(inputs)
        return min(self.scheduler.schedule.num_sequences, rows)

    # A checkpoint is a directory that transformers reads, with a folder to resume from.

    def _save(self, output_dir: str | None = None, state_dict: _Hf = None) -> None:
        folder = output_dir or self.args.output_dir
        self.cut.save_pretrained(folder)
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if self.args.should_save and processor is not None:
            processor.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self._resumable()
        self._saver = self._saver or Saver(state)
        self._saver.state = state
        self._saver.write(Path(output_dir) / _STATE, self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: _Hf = None) -> None:
        """Does nothing, because `_load_optimizer_and_scheduler` also reads the model."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            for note in resume(Path(checkpoint) / _STATE, self._resumable()).notes:
                warnings.warn(note, stacklevel=2)

    def _load_best_model(self) -> None:
        resume(Path(self.state.best_model_checkpoint) / _STATE, State(self.scheduler))

    def _resumable(self) -> State:
        extra = {"lr_scheduler": self.lr_scheduler}
        return State(self.scheduler, self.optimizer, extra=extra)


def _refuse_clipping(*_args: object, **_named: object) -> NoReturn:
    """Raises StepError, because accelerate would clip by the norm of local gradients."""
    raise StepError(
        "accelerator.clip_grad_norm_ knows the gradients of this rank alone: call "
        "scheduler.sync.clip_grad_norm_(max_norm)"
    )


def _check(cut: object, args: TrainingArguments, others: Mapping[str, _Hf]) -> None:
    """Refuses arguments that cannot work in a pipeline."""
    default = TrainingArguments.__dataclass_fields__
    given = {name: getattr(args, name) for name in _REFUSED}
    why = "cannot work in a pipeline"
    refuse(
        ConfigError,
        {
            "cut is not what pipegrad.cut makes of a model of transformers": (
                not isinstance(cut, Cut) or cut.uncut is None
            ),
            **{
                f"{name} {why}: see the Scheduler and its cut": others.get(name) is not None
                for name in _REFUSED_OTHERS
            },
            "save_only_model=True leaves nothing from which to load the best model": (
                args.save_only_model and args.load_best_model_at_end
            ),
            "batch_rebalance gives each rank other rows: use 'group_by_length'": (
                args.train_sampling_strategy == "batch_rebalance"
            ),
            "split_batches=True has no effect: a batch is the rows of one replica": (
                args.accelerator_config.split_batches
            ),
            **{
                f"{name}={x!r} {why}: {_REFUSED[name]}": x and x != default[name].default
                for name, x in given.items()
            },
        },
    )
