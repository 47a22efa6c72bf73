"""Loop: one rank of a job, from its configuration to its last checkpoint. Copy it for your own.

[Note: set-up of a job] Each part of the set-up runs inside of `agree`. A rank that fails in it does
not leave its peers in a collective: all ranks raise the same error. The order matters:

1. Configuration and device of each rank, alone; then the text, once a machine.
2. The topology with its process groups. It gives each rank its data, and so its first batch.
3. The model, which a factory may shard along dimensions of the topology, and its stages on the
   device.
4. The scheduler with the gradient layer, which evaluates a batch to try the model out.
5. The optimizer.
6. The summary, and at last a checkpoint if the job goes on from one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipegrad import GradScaler, Scheduler, Topology, checkpoint, record
from pipegrad.comm.agreement import agree, agree_keeping, same
from pipegrad.comm.watch import Bounded
from pipegrad.errors import (
    CheckpointError,
    DriftError,
    PipegradError,
    TopologyError,
    in_words,
)
from pipegrad.observe.recording import Recording
from pipegrad.partition.cut_model import Cut
from pipegrad.simulation.timeline import BATCH
from pipegrad.train.config import Config, path_of
from pipegrad.train.corpus import Corpus, mixed, seed_all
from pipegrad.train.dataset import make_feed, read_texts
from pipegrad.train.evaluation import Evaluation, every_rank, peak_memory_bytes
from pipegrad.train.job import Job
from pipegrad.train.optimizer import (
    Update,
    group_of,
    make_learning_rate,
    make_optimizer,
    try_out_optimizer,
)
from pipegrad.train.process import (
    Signals,
    choose_algorithms,
    device_of_rank,
    exit_code,
    show_in,
)
from pipegrad.train.report import Report, manifest_of
from pipegrad.train.reporters.reporter import StepMetrics
from pipegrad.train.run_folder import (
    RunLock,
    continue_run_folder,
    locked_origin,
    make_run_folder,
    refuse_unseen,
)
from pipegrad.train.stages import build_stages, ends_of, positions, save_model, try_out
from pipegrad.train.summary import make_summary

# A run that goes on from a checkpoint with another value of these has a note.
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
_RECORDED = 3, 8  # last steps of a run: a half of all, at least and at most so many
_PREPARE_SECONDS = 600.0  # timeout for the slowest rank to import the job's functions and plug-ins


class Trainer:
    """One rank of a training job, ready for its first step. All ranks construct it together.

    Args:
        load: Returns the configuration. It must return the same on every rank.

    Attributes:
        job: The configuration applied to all ranks.
        tracing: Ends the recording of steps, when it is closed.
        is_of_first_pipeline: True if this rank is of the pipeline whose timeline is kept.
        folder: The run's folder; None until `make_folder` has made it.
        saving: Writes the checkpoints of a run.
        signals: Receives the signals that end this process.
        ended_by: Number of a signal that some rank has received; 0 if there was none.
        first_step: Number of the first step; not 1 if the job goes on from a checkpoint.
        checkpoint: The checkpoint that the job goes on from; None if it begins.
        sync: The gradient layer.
        scaler: The loss scale, the same on all ranks; None unless ``train.precision = "fp16"``.
        summary: Summary of the job, as plain data; empty on other ranks than 0.
        notes: Notes for the user about the checkpoint that the job goes on from.

    Raises:
        PipegradError: If configuration, files, model, plug-ins or devices are wrong. All ranks
            raise the same message.
    """

    def __init__(self, load: Callable[[], Config]) -> None:
        def loaded() -> tuple[Config, dict[str, str]]:
            config = load()
            return config, {key: str(value) for key, value in config.flat().items()}

        config, values = agree_keeping("the configuration", loaded)
        for key in dict.fromkeys(key for flat in values for key in flat):
            same(key, {rank: flat.get(key, "None") for rank, flat in enumerate(values)})
        with Bounded("the set-up", within_seconds=config.train.start_timeout_seconds):
            self._set_up(config)

    def _set_up(self, config: Config) -> None:
        kinds = agree(
            "preparing the job", lambda: self._prepare(config), timeout_seconds=_PREPARE_SECONDS
        )
        same("the device", dict(enumerate(kinds)))
        texts = read_texts(config)
        self._topology = Topology.create(
            pipeline=self.job.pipeline,
            dimensions=config.parallel.dimensions,
            data=tuple(config.parallel.data_dimensions),
            stage_to_rank=self.job.schedule.stage_to_rank,
            device_type=self._device.type,
        )
        self.is_of_first_pipeline = self._topology.rank in self._topology.one_replica
        self._feed = make_feed(self.job, self._topology, texts)
        self._feed.begin(1)
        self._states: Collection[float] = ()  # whether the ranks have the next batch
        self._cut: Cut | None
        self._cut, stages = build_stages(self.job, self._topology, self._feed, texts, self._device)
        self._modules = {stage.index: stage.module for stage in stages}
        self._scheduler = Scheduler(
            stages,
            self._topology,
            # Some schedules change when steps were measured. Only their generator can do that.
            schedule=self.job.measured_generator or self.job.schedule,
            num_microbatches=self.job.schedule.num_sequences,
            loss_fn=self.job.loss,
            loss_reduction=config.train.loss_reduction,
            codecs=config.parallel.codecs,
            tied=self._cut.tied,
            handlers=[choice.spec for choice in config.gradient_handlers],
            **self.job.gradient_options,
        )
        self.sync = self._scheduler.sync
        try_out(
            self.job,
            self._scheduler,
            [*self._modules.values()],
            feed=self._feed,
            tokenizer=texts.tokenizer,
            device=self._device,
        )
        held_out = None
        if config.eval.every is not None:
            held_out = make_feed(self.job, self._topology, texts, held_out=True)
            if not held_out.check(state for state, *_ in held_out.begin(1)):
                config.refuse(held_out.what, "there is no batch")
        length, ends = config.data.sequence_length, list[int]()
        if config.model.is_transformers:  # batches of a function have their own length
            uncut = self._cut.uncut
            length = min(length, positions(uncut))
            ends = agree("the end of a sample", lambda: ends_of(uncut))[0]
        self._evaluation = Evaluation(
            self.job,
            self._scheduler,
            feed=held_out,
            tokenizer=texts.tokenizer,
            length=length,
            ends=ends,
            device=self._device,
        )
        agree("the outline", self._summarize)
        agree("trying the optimizer out", lambda: try_out_optimizer(config, self._device))
        # Not inside of `agree`, because all ranks agree inside of `Scheduler.optimizer` already.
        optimizer = make_optimizer(
            config, partial(self._scheduler.optimizer, group_of=partial(group_of, config))
        )
        self.scaler = GradScaler(self.sync) if config.train.precision == "fp16" else None
        agree("the learning rate", lambda: self._make_update(optimizer))
        self.saving = self._make_saver(optimizer, texts.training)
        self.first_step = 1
        self.folder: Path | None = None
        self._lock: RunLock | None = None  # of the folder, on rank 0
        self.checkpoint: Path | None = None
        self.signals, self.ended_by = Signals(), 0
        self.notes: tuple[str, ...] = ()
        self._resume(config)
        self._begin = time.perf_counter()
        self.tracing = ExitStack()

    def step(self, number: int) -> StepMetrics:
        """Trains on the batch of a step; returns its metrics, the same on every rank.

        Raises:
            StepError: If the gradients are not finite, unless such steps are skipped. On all
                ranks, and parameters are unchanged.
            PipegradError: If `GradientSync` raises it.
        """
        with self.sync.bounded(f"step {number}"):
            metrics = self._train(number)
        return replace(metrics, **self._evaluation.after(number))

    def _train(self, number: int) -> StepMetrics:
        config, begin, topology = self.job.config, time.perf_counter(), self._topology
        # A rank without a batch ends the run here, on all ranks; see [Note: a batch ahead].
        if self._feed.number != number:
            self._feed.begin(number)
        self._feed.check(self._states)
        # Dropout must differ by stage, data and step. It must be the same on ranks that compute one
        # layer together, such as tensor-parallel ranks. Seeded by the step, a resumed run draws the
        # same numbers as a run that was never interrupted. A model or a loss may draw from Python's
        # and numpy's generators, too.
        coordinate = topology.coordinate((topology.pipeline, *topology.data_axes))
        seed_all(mixed(config.train.seed, number, coordinate))
        assert self._feed.pair is not None
        elements, seen = self._feed.reply[1:]
        inputs, target = self.job.placed(self._feed.pair, topology, self._device)
        result = self._scheduler.step(inputs, target=target)
        # A device still computes while the host fetches the next batch.
        if number < config.train.steps:
            fetching = self.sync.tape.now()
            self._feed.fetch(number + 1)
            self.sync.tape.note("host", BATCH, fetching)
        update = self._update.make(number)
        loss, metrics = result.loss.item(), result.metrics
        if number == config.train.steps:  # later work, such as a checkpoint, is not of this step
            self.tracing.close()
        statistics, now = self.sync.statistics(), time.perf_counter()
        # The columns of a table with a row for each rank.
        (
            seconds,
            exposed,
            collectives,
            num_bytes,
            memory,
            elapsed,
            signals,
            all_elements,
            all_seen,
            self._states,
        ) = every_rank(
            self.sync,
            [
                now - begin,
                statistics.exposed_seconds,
                len(self.sync.plan.launches),
                self.sync.plan.reduced_bytes,
                peak_memory_bytes(self._device),
                now - self._begin,
                self.signals.received,
                elements,
                seen,
                self._feed.reply[0],
            ],
            self._device,
        )
        # All ranks stop after the same step, because they have the same numbers.
        self.ended_by = int(max(signals))
        ranks_of_batch = self.job.num_ranks // self.job.num_shares
        return StepMetrics(
            step=number,
            loss=loss,
            grad_norm=update.grad_norm,
            step_seconds=max(seconds),
            tokens_per_second=sum(all_elements) / ranks_of_batch / max(seconds),
            collectives=int(sum(collectives)),
            bytes_reduced=int(sum(num_bytes)),
            exposed_seconds=max(exposed),
            learning_rate=update.learning_rate,
            tokens_seen=int(sum(all_seen)) // ranks_of_batch,
            elapsed_seconds=max(elapsed),
            peak_memory_bytes=int(max(memory)),
            skipped=self._update.skipped,
            note=update.note,
            metrics=metrics,
        )

    def recorded(self) -> AbstractContextManager[Recording | None]:
        """Returns a recorder of the last steps of a run, if ``train.trace`` is true."""
        train, (least, most) = self.job.config.train, _RECORDED
        steps = max(least, min(most, train.steps // 2))
        return record(self._scheduler, steps=steps) if train.trace else nullcontext()

    def save_model(self, folder: Path) -> None:
        """Writes a model of transformers as it reads one; every rank must call it.

        Raises:
            ConfigError: If it cannot be written; on all ranks.
        """
        assert self._cut is not None
        self.sync.wait_parameters()
        save_model(self.job.config, self._cut, folder)

    def make_folder(self, begin: Callable[[Path], None]) -> Path:
        """Returns the run's folder: a new one that rank 0 makes, or the old one of a resumed run.

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
        self.folder = self.saving.folder = folder
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

    def _prepare(self, config: Config) -> str:
        """Makes the job and chooses the device; returns its type."""
        self.job = Job(config, dist.get_world_size())
        with config.refusing("train.device", "", TopologyError):
            self._device = device_of_rank(config.train.device)
        self._were_deterministic = torch.are_deterministic_algorithms_enabled()
        choose_algorithms(deterministic=config.train.deterministic)
        return self._device.type

    def _make_update(self, optimizer: torch.optim.Optimizer) -> None:
        config = self.job.config
        learning_rate = make_learning_rate(config, optimizer)
        self._update = Update(config, self.sync, optimizer, learning_rate, self.scaler)

    def _make_saver(
        self, optimizer: torch.optim.Optimizer, text: Corpus | None
    ) -> checkpoint.Saver:
        """Makes the writer of checkpoints; every rank must call it."""
        config = self.job.config
        self._state = checkpoint.State(
            self._scheduler,
            optimizer,
            extra={"update": self._update},
            shards=config.parallel.shards,
        )
        # Values that the losses depend on, as text. The cut does not change losses.
        self._run = {
            key: repr(value)
            for key, value in config.flat().items()
            if key.partition(".")[0] in ("model", "data", "optimizer") or key in _RUN_KEYS
        }
        self._run["data.files"] = "None" if text is None else f"text {text.digest[:16]}"
        train = config.train
        return checkpoint.Saver(
            self._state, keep_last=train.keep_last, keep_every=train.keep_every, run=self._run
        )

    def _summarize(self) -> None:
        """Makes the summary, and frees the cut of a model that a factory made."""
        # Only rank 0 prints it. Other ranks make the plans, because these raise the same errors.
        assert self._cut is not None
        self.summary: dict[str, Any] = {}
        if dist.get_rank() == 0:
            summary = make_summary(self.job, self._cut, self.sync.manifest)
            self.summary = {"device": self._device.type, **summary}
        else:
            self.job.plans(self.sync.manifest, ranks=self._topology.one_replica)
        if not self.job.config.model.is_transformers:
            self._cut = None

    def _resume(self, config: Config) -> None:
        """Goes on from a checkpoint, if there is one; see [Note: what a run goes on from]."""

        def found() -> object:
            if dist.get_rank():
                return None
            folder, saved, self._lock = locked_origin(config)
            return folder, saved

        reply: Any = agree("train.resume", found)[0]
        self._goes_on_in, self.checkpoint = reply
        if self.checkpoint is None:
            return
        with config.refusing("train.resume", "", CheckpointError):
            resumed = checkpoint.resume(self.checkpoint, self._state, options=False)
        self._update.follow(resumed.step)
        notes = [*_differences(resumed.run, self._run), *resumed.notes]
        self.notes = tuple(f"train.resume: {note}" for note in notes)
        self.first_step = resumed.step + 1
        self.sync.continue_from(resumed.step)
        if resumed.step >= config.train.steps and self._goes_on_in is None:
            config.refuse(
                "train.steps", f"the checkpoint is of step {resumed.step}: nothing is left to do"
            )


def _differences(saved: Mapping[str, str], run: Mapping[str, str]) -> list[str]:
    """Returns a note on differences between this run and the one that wrote a checkpoint."""
    changed = [
        f"{key} was {saved.get(key, '(default)')}, and is {run.get(key, '(default)')}"
        for key in sorted(saved.keys() | run.keys())
        # A checkpoint of an older version lacks keys that are new. They had no value then.
        if saved.get(key, "None") != run.get(key, "None")
    ]
    words = "this is not the run that wrote the checkpoint: "
    return [words + "; ".join(changed)] if changed else []


def run(trainer: Trainer, report: Report) -> int:
    """Makes the steps of a run; every rank must call it. Returns the exit code of the process.

    It is 0, or the exit code of the signal that ended the run.

    Raises:
        PipegradError: If a step fails, the last checkpoint cannot be written, or replicas differ.
    """
    config, is_first_rank = trainer.job.config, dist.get_rank() == 0
    train, step, saved = config.train, trainer.first_step - 1, trainer.checkpoint
    manifest = manifest_of(config, trainer.summary)
    folder = trainer.make_folder(lambda new: report.begin(new, manifest, trainer.first_step))
    trainer.saving.note = report.note
    if is_first_rank:
        report.note(_begins(trainer, folder))
    running = report.running if is_first_rank else nullcontext()
    with trainer.signals, trainer.tracing, running:
        recording = trainer.tracing.enter_context(trainer.recorded())
        for step in range(trainer.first_step, train.steps + 1):
            metrics = trainer.step(step)
            if is_first_rank:
                report.step(metrics)
            if step == train.steps or trainer.ended_by:
                trainer.tracing.close()
                saved = trainer.saving.save(step, wait=True) if train.save else None
                break
            if train.saves_after(step):
                trainer.saving.save(step)
    if step < train.steps:
        name = signal.Signals(trainer.ended_by).name
        rest = f"saved {saved}; go on with train.resume = '{folder}'"
        rest = rest if saved else "nothing is saved, as train.save = false"
        if is_first_rank:
            report.note(f"stopped by {name} after step {step}; {rest}")
        return exit_code(trainer.ended_by)
    _end(trainer, report, folder, recording)
    return 0


def _begins(trainer: Trainer, folder: Path) -> str:
    """Returns a line with the folder of a run, and a reason if it is not ``train.output``."""
    if trainer.first_step > 1:
        return f"writes into {folder}, from step {trainer.first_step} on"
    output = path_of(trainer.job.config.train.output)
    is_other = folder.name != output.resolve().name
    return f"writes into {folder}{f': {output} is there already' if is_other else ''}"


def _end(trainer: Trainer, report: Report, folder: Path, recording: Recording | None) -> None:
    """Checks replicas, prints the summary, and writes the model and timeline of a whole run."""
    config, is_first_rank = trainer.job.config, dist.get_rank() == 0
    if was_complete := trainer.first_step > config.train.steps:
        report.note(
            f"all {config.train.steps} steps are made already: {trainer.checkpoint}; for more, "
            f"set train.steps higher"
        )
    # All ranks raise the same DriftError. The summary of the run is printed before.
    try:
        trainer.sync.check_replicas()
    except DriftError:
        if is_first_rank and not was_complete:
            report.close(folder, trainer.summary, "DIFFER")
        raise
    if config.model.is_transformers:
        trainer.save_model(folder / "model")
    if was_complete:
        return
    # Last, because a run that has made its steps and saved its model must not fail for a timeline.
    timeline = None
    try:
        if recording is not None and trainer.is_of_first_pipeline:
            timeline = recording.timeline()
    except (PipegradError, OSError) as error:
        report.note(f"there is no timeline of this run: {in_words(error)}")
    if is_first_rank:
        replicas = "equal, bit by bit" if trainer.summary["replicas"] > 1 else None
        report.close(folder, trainer.summary, replicas, timeline)
