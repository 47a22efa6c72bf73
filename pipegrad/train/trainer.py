"""Trainer: one rank of a job. Everything that can fail is agreed on before the first step.

[Note: set-up of a job] Each part of the set-up runs inside of `agree`. A rank that fails in it does
not leave its peers in a collective: all ranks raise the same error. The order matters:

1. Configuration and device of each rank, alone; then the text, once a machine.
2. The topology with its process groups; with it each rank knows its data, and has its first batch.
3. The model, which a factory may shard along dimensions of the topology, and its stages on the
   device.
4. The scheduler with the gradient layer, which evaluates a batch to try the model out.
5. The optimizer.
6. The summary, and at last a checkpoint if the job goes on from one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipegrad import checkpoint
from pipegrad.comm.agreement import agree, agree_keeping, same
from pipegrad.comm.watch import Bounded
from pipegrad.errors import PlanError
from pipegrad.gradients.grad_scaler import GradScaler
from pipegrad.partition.cut_model import Cut
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.pipeline.stage import Stage
from pipegrad.simulation.timeline import BATCH
from pipegrad.topology import Topology
from pipegrad.train.config import Config
from pipegrad.train.corpus import mixed
from pipegrad.train.evaluation import Evaluation, Tracing, every_rank, peak_memory_bytes
from pipegrad.train.feed import make_feed, read_texts
from pipegrad.train.job import Job
from pipegrad.train.optimizer import (
    Update,
    group_of,
    make_learning_rate,
    make_optimizer,
    try_out_optimizer,
)
from pipegrad.train.process import Signals, choose_algorithms, device_of_rank, show_in
from pipegrad.train.reporters.reporter import StepMetrics
from pipegrad.train.resume import Kept, resume
from pipegrad.train.run_folder import (
    RunLock,
    continue_run_folder,
    locked_origin,
    make_run_folder,
    refuse_unseen,
)
from pipegrad.train.stages import agreed, build_stages, try_out
from pipegrad.train.summary import make_summary
from pipegrad.train.transformers_model import positions, save_model

# A run that goes on from a checkpoint with another value of these has a note: see `resume`.
_RUN_KEYS = (
    "train.seed",
    "train.precision",
    "train.loss",
    "train.loss_reduction",
    "parallel.codecs",
    "gradients.clip_norm",
    "gradients.reduce_dtype",
    "gradients.sum_dtype",
    "gradients.master_dtype",
)
_PREPARE_SECONDS = 600.0  # timeout for the slowest rank to import what the job names
_ALIKE = "if that is not wanted, let the function return other batches for each data_rank"


class Trainer:
    """One rank of a training job, ready for its first step. All ranks construct it together.

    Args:
        load: Returns the configuration. It must return the same on every rank.

    Attributes:
        job: The configuration applied to all ranks.
        tracing: Records steps, unless that is not wanted.
        folder: Of the run, when `make_folder` has made it.
        saving: Writes the checkpoints of a run.
        signals: What this process is asked to do.
        ended_by: Number of a signal that some rank has received; 0 if there was none.
        first_step: Number of the first step; not 1 if the job goes on from a checkpoint.
        checkpoint: The checkpoint that the job goes on from; None if it begins.
        sync: The gradient layer.
        scaler: Of the loss, the same on all ranks; None unless ``train.precision = "fp16"``.
        summary: Summary of the job, as plain data; empty on other ranks than 0.
        notes: Notes for the user about the checkpoint that the job goes on from.

    Raises:
        PipegradError: If configuration, files, model, plug-ins or devices are wrong. All ranks
            raise the same message.
    """

    def __init__(self, load: Callable[[], Config]) -> None:
        config = self._agreed_configuration(load)
        with Bounded("the set-up", within_seconds=config.train.start_timeout_seconds):
            self._set_up(config)

    def _set_up(self, config: Config) -> None:
        kinds = agree(
            "preparing the job", lambda: self._prepare(config), timeout_seconds=_PREPARE_SECONDS
        )
        same("the device", dict(enumerate(kinds)))
        self._texts = read_texts(config)
        self._topology = Topology.create(
            pipeline=self.job.pipeline,
            dimensions=config.parallel.dimensions,
            data=tuple(config.parallel.data_dimensions),
            stage_to_rank=self.job.schedule.stage_to_rank,
            device_type=self._device.type,
        )
        self._feed = make_feed(self.job, self._topology, self._texts)
        self._feed.begin(1)
        self._cut: Cut | None
        self._cut, stages = build_stages(
            self.job, self._topology, self._feed, self._texts, self._device
        )
        self._modules = {stage.index: stage.module for stage in stages}
        self._make_scheduler(stages)
        try_out(
            self.job,
            self._scheduler,
            [*self._modules.values()],
            feed=self._feed,
            tokenizer=self._texts.tokenizer,
            device=self._device,
        )
        self._evaluation = self._make_evaluation()
        agree("trying the optimizer out", self._try_out_optimizer)
        # All ranks make it together: it agrees by itself.
        self._optimizer = make_optimizer(
            config, partial(self._scheduler.optimizer, group_of=partial(group_of, config))
        )
        self.scaler = GradScaler(self.sync) if config.train.precision == "fp16" else None
        agree("the learning rate", self._make_learning_rate)
        self._make_state(config)
        agree("the outline", self._summarize)
        self.first_step = 1
        self.folder: Path | None = None
        self._lock: RunLock | None = None  # of the folder, on rank 0
        self.checkpoint: Path | None = None
        self.signals, self.ended_by = Signals(), 0
        self.notes: tuple[str, ...] = ()
        if self._feed.is_repeated:
            self.notes = (f"{self._feed.what}: all data ranks have the same first batch: {_ALIKE}",)
        self._resume(config)
        self._begin = time.perf_counter()
        self.tracing = Tracing(config, self._scheduler)

    def step(self, number: int) -> StepMetrics:
        """Trains on the batch of a step; returns its metrics, the same on every rank.

        Raises:
            StepError: If the gradients are not finite, unless such steps are skipped. On all
                ranks, and parameters are unchanged.
            PipegradError: As `GradientSync` does.
        """
        with self.sync.bounded(f"step {number}"):
            metrics = self._train(number)
        return replace(metrics, **self._evaluation.after(number))

    def _train(self, number: int) -> StepMetrics:
        config, begin, topology = self.job.config, time.perf_counter(), self._topology
        # A rank without a batch ends the run here, on all ranks; see [Note: a batch ahead].
        self._feed.begin(number)
        # Dropout must differ by stage, data and step. It must be the same on ranks that compute one
        # layer together, such as tensor-parallel ranks. Seeded by the step, a resumed run draws the
        # same numbers as a run that was never interrupted. A model or a loss may draw from Python's
        # and numpy's generators, too.
        coordinate = topology.coordinate((topology.pipeline, *topology.data_axes))
        seed = mixed(config.train.seed, number, coordinate)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        assert self._feed.pair is not None
        inputs, target = self.job.placed(self._feed.pair, topology, self._device)
        result = self._scheduler.step(inputs, target=target)
        # A device still computes while the host fetches the next batch.
        if number < config.train.steps:
            fetching = self.sync.tape.now()
            self._feed.fetch(number + 1)
            self.sync.tape.note("host", BATCH, fetching)
        update = self._update.make(number)
        loss = result.loss.item()
        if number == config.train.steps:  # what follows, as a checkpoint, is not of this step
            self.tracing.stop()
        statistics = self.sync.statistics()
        now = time.perf_counter()
        measured = [
            now - begin,
            statistics.exposed_seconds,
            statistics.collectives,
            statistics.reduced_bytes,
            peak_memory_bytes(self._device),
            now - self._begin,
            self.signals.received,
        ]
        all_measured = every_rank([*measured, *self._feed.reply], self._device)
        self._feed.replies = [of_rank[len(measured) :] for of_rank in all_measured]
        columns = list(zip(*all_measured, strict=True))
        seconds, exposed, collectives, nbytes, memory, elapsed, signals, *_ = columns
        # All ranks have the same numbers, so they stop after the same step.
        self.ended_by = int(max(signals))
        return StepMetrics(
            step=number,
            loss=loss,
            grad_norm=update.grad_norm,
            step_seconds=max(seconds),
            tokens_per_second=self._feed.elements / max(seconds),
            collectives=int(sum(collectives)),
            bytes_reduced=int(sum(nbytes)),
            exposed_seconds=max(exposed),
            learning_rate=update.learning_rate,
            tokens_seen=self._feed.elements_seen,
            elapsed_seconds=max(elapsed),
            peak_memory_bytes=int(max(memory)),
            skipped=self._update.skipped,
            note=update.note,
        )

    def save_model(self, folder: Path) -> None:
        """Writes a model of transformers as it reads one; every rank must call it.

        Raises:
            ConfigError: If it cannot be written; on all ranks.
        """
        assert self._cut is not None
        self.sync.wait_parameters()
        save_model(self.job.config, self._cut, folder)

    def make_folder(self, begin: Callable[[Path], None]) -> Path:
        """Returns the run's folder, which rank 0 makes: a new one, or that of the run that goes on.

        Args:
            begin: Called on rank 0 with the folder, to open the files of the run.

        Raises:
            ConfigError: If the folder cannot be made, `begin` fails, or a rank that saves does not
                see the folder; on all ranks.
        """
        config, own = self.job.config, self._goes_on_in

        def begin_new(folder: Path) -> None:
            self._lock = RunLock(folder)
            begin(folder)

        def make() -> str:
            if dist.get_rank():
                return ""
            if own is None:
                return make_run_folder(config, begin_new)
            return continue_run_folder(config, own, self.first_step - 1, begin)

        folder = Path(agree("the output folder", make)[0])
        if config.train.save:
            refuse_unseen(config, folder, is_new=own is None)
        self.folder = folder
        show_in(folder)
        return folder

    def close(self) -> None:
        """Ends the comm streams and destroys their process groups; every rank must call it."""
        self.saving.close()
        self._scheduler.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        choose_algorithms(deterministic=self._were_deterministic)

    # Before the first step.

    def _agreed_configuration(self, load: Callable[[], Config]) -> Config:
        def loaded() -> tuple[Config, dict[str, str]]:
            config = load()
            return config, {key: str(value) for key, value in config.flat().items()}

        config, values = agree_keeping("the configuration", loaded)
        for key in dict.fromkeys(key for flat in values for key in flat):
            same(key, {rank: flat.get(key, "None") for rank, flat in enumerate(values)})
        return config

    def _prepare(self, config: Config) -> str:
        """Makes the job and chooses the device; returns its type."""
        self.job = Job(config, dist.get_world_size())
        self._device = device_of_rank(config)
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)
        self._were_deterministic = torch.are_deterministic_algorithms_enabled()
        choose_algorithms(deterministic=config.train.deterministic)
        return self._device.type

    def _make_scheduler(self, stages: list[Stage]) -> None:
        """Makes the scheduler with its gradient layer, and their process groups."""
        job = self.job
        assert self._cut is not None
        self._scheduler = Scheduler(
            stages,
            self._topology,
            # Some schedules change when steps were measured. Only their generator can do that.
            schedule=job.measured_generator or job.schedule,
            num_microbatches=job.schedule.num_sequences,
            loss_fn=job.loss,
            loss_reduction=job.config.train.loss_reduction,
            codecs=job.config.parallel.codecs,
            tied=self._cut.tied,
            handlers=[choice.spec for choice in job.config.gradient_handlers],
            **job.gradient_options,
        )
        self.sync = self._scheduler.sync

    def _make_evaluation(self) -> Evaluation:
        """Makes what is measured and shown between steps; every rank must call it."""
        config = self.job.config
        feed = None
        if config.eval.every is not None:
            feed = make_feed(self.job, self._topology, self._texts, held_out=True)
            feed.begin(1)
            if feed.has_ended:
                config.refuse("eval.dataset", "the function has no batch")
        assert self._cut is not None
        length = config.data.sequence_length
        if config.model.is_transformers:  # batches of a function have their own length
            length = min(length, positions(self._cut.uncut))
        return Evaluation(
            self.job,
            self._scheduler,
            feed=feed,
            tokenizer=self._texts.of_samples,
            length=length,
            device=self._device,
        )

    def _summarize(self) -> None:
        """Makes the summary, and frees what other ranks hold of the model that a factory made."""
        # Only rank 0 prints it. The plans alone have the same errors, so other ranks make those.
        assert self._cut is not None
        self.summary: dict[str, Any] = {}
        topology, manifest = self.sync.topology, self.sync.manifest
        if dist.get_rank() == 0:
            summary = make_summary(self.job, self._cut, manifest)
            self.summary = {"device": self._device.type, **summary}
        else:
            self.job.plans(manifest, ranks=topology.one_replica)
        if not self.job.config.model.is_transformers:
            self._cut = None

    def _try_out_optimizer(self) -> None:
        self._state_names = try_out_optimizer(self.job.config, self._device)
        self.job.check_optimizer(self.sync.manifest, [self.sync.plan])

    def _make_learning_rate(self) -> None:
        config = self.job.config
        self._learning_rate = make_learning_rate(config, self._optimizer)
        self._update = Update(config, self.sync, self._optimizer, self._learning_rate, self.scaler)

    def _make_state(self, config: Config) -> None:
        """Makes what checkpoints have, and what writes them; every rank must call it."""
        self._kept = Kept(self._update)
        try:
            self._state = checkpoint.State(
                self._scheduler,
                self._optimizer,
                extra={"update": self._kept},
                shards=config.parallel.shards,
            )
        except PlanError as error:
            if not config.parallel.shards:
                raise
            config.refuse("parallel.shards", str(error).removeprefix("shards: "), cause=error)
        self.saving = checkpoint.Saver(
            self._state,
            keep_last=config.train.keep_last,
            keep_every=config.train.keep_every,
            run=self._run,
        )

    @property
    def _run(self) -> dict[str, str]:
        """Values that the losses depend on, as text. The cut does not change losses."""
        values = {
            key: repr(value)
            for key, value in self.job.config.flat().items()
            if key.partition(".")[0] in ("model", "data", "optimizer") or key in _RUN_KEYS
        }
        text, files = self._texts.training, "None"
        if text is not None:
            files = f"text {text.digest[:16]}"
        if values.pop("data.streaming") == "True":
            files = f"stream of {values['data.files']}"
        return {**values, "data.files": files}

    def _resume(self, config: Config) -> None:
        """Goes on from a checkpoint, if there is one; see [Note: what a run goes on from]."""

        def found() -> tuple[Path | None, Path | None, tuple[str, ...]] | None:
            if dist.get_rank() != 0:
                return None
            folder, checkpoint, self._lock = locked_origin(config)
            return folder, checkpoint, () if self._lock is None else self._lock.notes

        self._goes_on_in, self.checkpoint, notes = agreed("train.resume", found)[0]
        self.notes += notes
        if self.checkpoint is None:
            return
        num_steps, notes_of_state = resume(
            config,
            self._state,
            self._kept,
            self.checkpoint,
            run=self._run,
        )
        self.notes += tuple(notes_of_state)
        self.first_step = num_steps + 1
        self.sync.continue_from(num_steps)
        if num_steps >= config.train.steps and self._goes_on_in is None:
            config.refuse(
                "train.steps", f"the checkpoint is of step {num_steps}: nothing is left to do"
            )
