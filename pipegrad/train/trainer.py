"""Trainer: one rank of a job. Everything that can fail is agreed on before the first step.

[Note: set-up of a job] Each part of the set-up runs inside of `agree`. A rank that fails in it does
not leave its peers in a collective: all ranks raise the same error. The order matters:

1. Configuration, text and device of each rank, alone.
2. The topology with its process groups.
3. The model, which a factory may shard along dimensions of the topology.
4. A preflight of the model. Layers may use process groups, so every rank must have its model first.
5. Stages on the device, the scheduler with the gradient layer, and the optimizer.
6. The summary, and at last a checkpoint if the job goes on from one.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import functional

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import StepError
from pipegrad.pipeline.partition import Cut
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.pipeline.stage import Stage
from pipegrad.topology import Topology
from pipegrad.train.checkpoint.checkpoint import TrainingState
from pipegrad.train.checkpoint.resume import failure_message, resume
from pipegrad.train.config import Config
from pipegrad.train.data import Corpus, mixed, read_corpus
from pipegrad.train.job import Job
from pipegrad.train.metrics import StepMetrics, every_rank
from pipegrad.train.optimizer import group_of, make_learning_rate, make_optimizer
from pipegrad.train.preflight import (
    check_alike,
    check_parameters,
    digests_of,
    try_out_optimizer,
    try_out_stages,
)
from pipegrad.train.process import device_of_rank
from pipegrad.train.run_folder import free_space, make_run_folder
from pipegrad.train.summary import make_summary

_RUN_KEYS = (
    "train.seed",
    "train.precision",
    "gradients.clip_norm",
    "gradients.reduce_dtype",
    "gradients.master_dtype",
)
_PREPARE_SECONDS = 600.0  # timeout for the slowest rank to read its text and build the model


class Trainer:
    """One rank of a training job, ready for its first step. All ranks construct it together.

    Args:
        load: Returns the configuration. It must return the same on every rank.

    Attributes:
        job: The configuration applied to all ranks.
        first_step: Number of the first step; not 1 if the job goes on from a checkpoint.
        sync: The gradient layer.
        summary: Summary of the job, as plain data; empty on other ranks than 0.
        notes: Notes for the user about the checkpoint that the job goes on from.

    Raises:
        PipegradError: If configuration, files, model, plug-ins or devices are wrong. All ranks
            raise the same message.
    """

    def __init__(self, load: Callable[[], Config]) -> None:
        config = self._agreed_configuration(load)
        replies = agree(
            "preparing the job", lambda: self._read_inputs(config), timeout_seconds=_PREPARE_SECONDS
        )
        same("the text", {rank: text for rank, (text, _) in enumerate(replies)})
        same("the device", {rank: kind for rank, (_, kind) in enumerate(replies)})
        self._topology = self._make_topology()
        models = agree("the model", self._make_model, timeout_seconds=_PREPARE_SECONDS)
        check_alike(config, dict(enumerate(models)))
        agree("trying the model out", self._run_preflight, timeout_seconds=_PREPARE_SECONDS)
        agree("placing the stages", self._place_stages, timeout_seconds=_PREPARE_SECONDS)
        self._make_scheduler()
        agree("trying the optimizer out", self._try_out_optimizer)
        # All ranks make it together: it agrees by itself.
        self._optimizer = make_optimizer(
            config, partial(self._scheduler.optimizer, group_of=partial(group_of, config))
        )
        agree("the learning rate", self._make_learning_rate)
        agree("the outline", self._summarize)
        self.first_step = 1
        self.notes: tuple[str, ...] = ()
        if config.train.resume is not None:
            self._resume(config)

    def step(self, number: int) -> StepMetrics:
        """Trains on the batch of a step; returns its metrics, the same on every rank.

        Raises:
            StepError: If the gradients are not finite. On all ranks, and parameters are unchanged.
            PipegradError: As `GradientSync` does.
        """
        config, begin, topology = self.job.config, time.perf_counter(), self._topology
        # Dropout must differ by stage, data and step. It must be the same on ranks that compute one
        # layer together, such as tensor-parallel ranks. Seeded by the step, a resumed run draws the
        # same numbers as a run that was never interrupted.
        coordinate = topology.coordinate((topology.pipeline, *topology.data_axes))
        torch.manual_seed(mixed(config.train.seed, number, coordinate))
        tokens, following = self._batch(number)
        result = self._scheduler.step(tokens, target=following)
        clip = config.gradients.clip_norm
        norm = self.sync.clip_grad_norm_(math.inf if clip is None else clip).item()
        if not math.isfinite(norm):
            self._refuse_step(number, norm)
        # Parameters are sent as soon as they are stepped. They arrive during the next forwards.
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._learning_rate is not None:
            self._learning_rate.step()
        loss = result.loss.item()
        statistics = self.sync.statistics()
        seconds = time.perf_counter() - begin
        measured = [
            seconds,
            statistics.exposed_seconds,
            statistics.collectives,
            statistics.reduced_bytes,
        ]
        all_measured = every_rank(measured, self._device)
        all_seconds, exposed, collectives, nbytes = zip(*all_measured, strict=True)
        num_tokens = config.data.batch_size * config.data.sequence_length
        return StepMetrics(
            step=number,
            loss=loss,
            grad_norm=norm,
            step_seconds=max(all_seconds),
            tokens_per_second=num_tokens / max(all_seconds),
            collectives=int(sum(collectives)),
            bytes_reduced=int(sum(nbytes)),
            exposed_seconds=max(exposed),
        )

    def save(self, folder: Path, number: int) -> None:
        """Writes a checkpoint after a step; every rank must call it.

        Raises:
            ConfigError: If a rank cannot write it; on all ranks.
        """
        try:
            self._state.save(folder, number, self._run)
        except CheckpointException as error:
            self.job.config.refuse(
                "train.output",
                f"the checkpoint of step {number} cannot be written into {folder}: "
                f"{failure_message(error)}{free_space(folder)}: make room, and go on with "
                f"train.resume from the last checkpoint that is whole",
                cause=error,
            )

    def make_folder(self, begin: Callable[[Path], None]) -> Path:
        """Returns the run's folder, which rank 0 makes. The folder is always new.

        Args:
            begin: Called on rank 0 with the folder, to open the files of the run.

        Raises:
            ConfigError: If the folder cannot be made, or `begin` fails; on all ranks.
        """

        def make() -> str:
            return make_run_folder(self.job.config, begin) if dist.get_rank() == 0 else ""

        return Path(agree("the output folder", make)[0])

    def close(self) -> None:
        """Ends the comm streams and destroys their process groups; every rank must call it."""
        self._scheduler.close()

    # Before the first step.

    def _agreed_configuration(self, load: Callable[[], Config]) -> Config:
        configs = agree("the configuration", load)
        values = [config.flat() for config in configs]
        for key in dict.fromkeys(key for flat in values for key in flat):
            same(key, {rank: str(flat.get(key)) for rank, flat in enumerate(values)})
        return configs[dist.get_rank()]

    def _read_inputs(self, config: Config) -> tuple[str, str]:
        """Reads the text and chooses the device; returns the text's digest and the device type."""
        self.job = Job(config, dist.get_world_size())
        self._corpus: Corpus = read_corpus(config)
        self._device = device_of_rank(config)
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)
        return self._corpus.digest, self._device.type

    def _make_topology(self) -> Topology:
        """Makes the topology with its process groups; every rank must call it."""
        parallel = self.job.config.parallel
        return Topology.create(
            pipeline=self.job.pipeline,
            dimensions=parallel.dimensions,
            data=tuple(parallel.data_dimensions),
            stage_to_rank=self.job.schedule.stage_to_rank,
            device_type=self._device.type,
        )

    def _make_model(self) -> tuple[object, dict[str, str]]:
        """Makes the uncut model and cuts it. Local, unless the factory communicates.

        Returns:
            This rank's coordinates along dimensions that a factory may shard along, and digests.
        """
        job, view = self.job, self._topology
        model = job.model(topology=view)
        self._cut: Cut | None = job.cut(model)
        check_parameters(job.config, self._cut)
        location = tuple(view.coordinate(axis) for axis in job.config.parallel.dimensions)
        return location, digests_of(model)

    def _run_preflight(self) -> None:
        assert self._cut is not None
        try_out_stages(self.job.config, self._cut)

    def _place_stages(self) -> None:
        """Moves this rank's stages to its device."""
        job, device = self.job, self._device
        assert self._cut is not None
        local = job.topology(dist.get_rank()).local_stages
        self._modules = {stage: self._cut.modules[stage].to(device) for stage in local}
        if job.config.train.precision == "bf16":
            for module in self._modules.values():
                autocast = torch.autocast(device.type, dtype=torch.bfloat16)
                module.forward = autocast(module.forward)

    def _make_scheduler(self) -> None:
        """Makes the scheduler with its gradient layer, and their process groups."""
        job = self.job
        assert self._cut is not None
        recompute = job.config.train.recompute
        self._scheduler = Scheduler(
            [Stage(module, index, recompute=recompute) for index, module in self._modules.items()],
            self._topology,
            schedule=job.schedule,
            loss_fn=_cross_entropy,
            tied=self._cut.tied,
            handlers=[choice.spec for choice in job.config.gradient_handlers],
            **job.gradient_options,
        )
        self.sync = self._scheduler.sync

    def _summarize(self) -> None:
        """Makes the summary, and frees the stages of other ranks."""
        # Only rank 0 needs all plans, and a plan of many ranks takes time. The plans of one replica
        # have the same errors, so other ranks make only those.
        assert self._cut is not None
        self.summary: dict[str, Any] = {}
        topology, manifest = self.sync.topology, self.sync.manifest
        if dist.get_rank() == 0:
            summary = make_summary(self.job, self._cut, manifest)
            self.summary = {"device": self._device.type, **summary}
        else:
            replica = [r for r in topology.ranks if not topology.at(r).coordinate(topology.data)]
            self.job.plans(manifest, ranks=replica)
        self._cut = None

    def _try_out_optimizer(self) -> None:
        self._state_names = try_out_optimizer(self.job.config, self._device)
        if any(main_range.sharded for main_range in self.sync.plan.main_ranges):
            self.job.check_optimizer()

    def _make_learning_rate(self) -> None:
        self._learning_rate = make_learning_rate(self.job.config, self._optimizer)
        self._state = TrainingState(self.sync, self._modules, self._optimizer)

    def _resume(self, config: Config) -> None:
        """Goes on from the checkpoint ``train.resume``."""
        num_steps, notes = resume(
            config, self._state, self.sync, state_names=self._state_names, run=self._run
        )
        self.notes += tuple(notes)
        self.first_step = num_steps + 1
        if num_steps >= config.train.steps:
            config.refuse(
                "train.steps", f"the checkpoint is of step {num_steps}: nothing is left to do"
            )
        # Learning-rate schedules are not in a checkpoint, because another configuration may have
        # others. They make the steps that have been made.
        if self._learning_rate is not None:
            with warnings.catch_warnings():
                # torch warns, because the optimizer makes no step between these.
                warnings.simplefilter("ignore")
                for _ in range(num_steps):
                    self._learning_rate.step()

    @property
    def _run(self) -> dict[str, str]:
        """Values that the losses depend on, as text. The cut does not change losses."""
        config = self.job.config
        values = {
            key: repr(value)
            for key, value in config.flat().items()
            if key.partition(".")[0] in ("model", "data", "optimizer") or key in _RUN_KEYS
        }
        return {**values, "data.files": f"text {self._corpus.digest[:16]}"}

    # In a step.

    def _batch(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns tokens of a batch and their successors; None for what no stage here needs."""
        config, topology = self.job.config, self.sync.topology
        first, last = 0 in self._modules, topology.num_stages - 1 in self._modules
        if not (first or last):
            return None, None
        tokens, following = self._corpus.batch(
            number,
            seed=config.train.seed,
            size=config.data.batch_size,
            share=topology.coordinate(topology.data),
            num_shares=self.job.num_shares,
        )
        return (
            tokens.to(self._device) if first else None,
            following.to(self._device) if last else None,
        )

    def _refuse_step(self, number: int, norm: float) -> NoReturn:
        raise StepError(
            f"step {number}: the norm of the gradients is {norm}, and this update would destroy "
            f"the parameters: lower optimizer.lr, set gradients.clip_norm, warm up, or look at "
            f"what the handlers send"
        )


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss of a microbatch, in fp32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
