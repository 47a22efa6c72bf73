"""Trainer: one rank of a job. Everything that can fail is agreed on before the first step."""

from __future__ import annotations

import math
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import functional

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import ConfigError, PlanError, StepError, in_words
from pipegrad.pipeline.partition import Cut
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.pipeline.stage import Stage
from pipegrad.topology import Topology
from pipegrad.train.checkpoint.checkpoint import State, refuse_damaged, verify
from pipegrad.train.checkpoint.checksums import CHECKSUMS, Checksums
from pipegrad.train.config import Config, path_of
from pipegrad.train.data import Corpus, mixed, read_corpus
from pipegrad.train.job import Job
from pipegrad.train.optimizer import group_of, make_learning_rate, make_optimizer
from pipegrad.train.preflight import (
    check_alike,
    check_parameters,
    digests_of,
    try_out_optimizer,
    try_out_stages,
)
from pipegrad.train.process import device_of_rank
from pipegrad.train.summary import outline

_RUN_KEYS = (
    "train.seed",
    "train.precision",
    "gradients.clip_norm",
    "gradients.reduce_dtype",
    "gradients.master_dtype",
)
_PREPARE_SECONDS = 600.0  # for the slowest rank to read its text and build the model


@dataclass(frozen=True)
class StepMetrics:
    """What a step did, the same on all ranks; a line of ``metrics.jsonl``.

    Attributes:
        step: From 1.
        loss: Mean over all tokens of the batch, before the update.
        grad_norm: Of all gradients of all ranks, each parameter once, before clipping.
        step_seconds: Wall-clock time of the slowest rank.
        tokens_per_second: Tokens of the whole batch by that time.
        collectives: Collectives that reduced gradients, each counted by every rank that took part.
        bytes_reduced: Bytes they reduced, counted alike.
        exposed_seconds: Longest time that a rank was blocked, waiting for them.
    """

    step: int
    loss: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float
    collectives: int
    bytes_reduced: int
    exposed_seconds: float


class Trainer:
    """One rank of a training job, ready for its first step. All ranks construct it together.

    Args:
        load: Returns the configuration; called on every rank, which must all return the same.

    Attributes:
        job: What the configuration means.
        first_step: Number of the first step; not 1 if the job goes on from a checkpoint.
        sync: The gradient layer.
        outline: What the job will do, as plain data; on rank 0, elsewhere empty.
        notes: What the user should know of the checkpoint that the job goes on from.

    Raises:
        PipegradError: If anything is wrong with configuration, files, model, plug-ins or devices:
            on all ranks, with the same words.
    """

    def __init__(self, load: Callable[[], Config]) -> None:
        config = self._agreed_configuration(load)
        told = agree(
            "preparing the job", lambda: self._prepare(config), timeout_seconds=_PREPARE_SECONDS
        )
        same("the text", {rank: text for rank, (text, _) in enumerate(told)})
        same("the device", {rank: kind for rank, (_, kind) in enumerate(told)})
        self._topology = self._meet()
        made = agree("the model", self._make_model, timeout_seconds=_PREPARE_SECONDS)
        check_alike(config, dict(enumerate(made)))
        # Layers may meet in it, so only once every rank has made its own.
        agree("trying the model out", self._try_out, timeout_seconds=_PREPARE_SECONDS)
        agree("placing the stages", self._place, timeout_seconds=_PREPARE_SECONDS)
        self._connect()
        agree("the optimizer", self._make_optimizer)
        agree("the outline", self._make_outline)
        self.first_step = 1
        self.notes: tuple[str, ...] = ()
        if config.train.resume is not None:
            self._resume(config)

    def step(self, number: int) -> StepMetrics:
        """Trains on the batch of a step; returns what it did, on every rank.

        Raises:
            StepError: If the gradients are not finite; on all ranks, parameters are as they were.
            PipegradError: As `GradientSync` does.
        """
        config, begin, view = self.job.config, time.perf_counter(), self._topology
        # Dropout differs by stage, data and step, not along ranks that compute the same together;
        # and a run that goes on draws what it would have drawn.
        location = view.coordinate((view.pipeline, *view.data_axes))
        torch.manual_seed(mixed(config.train.seed, number, location))
        tokens, following = self._batch(number)
        result = self._scheduler.step(tokens, target=following)
        clip = config.gradients.clip_norm
        norm = self.sync.clip_grad_norm_(math.inf if clip is None else clip).item()
        if not math.isfinite(norm):
            self._refuse_step(number, norm)
        self._optimizer.step()
        self.sync.publish()
        self._optimizer.zero_grad()
        if self._learning_rate is not None:
            self._learning_rate.step()
        loss = result.loss.item()
        did = self.sync.statistics()
        seconds = time.perf_counter() - begin
        told = [seconds, did.exposed_seconds, did.collectives, did.reduced_bytes]
        rows = _every_rank(told, self._device)
        all_seconds, exposed, collectives, nbytes = zip(*rows, strict=True)
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
        """Writes a checkpoint of the step that has been made; every rank must call it.

        Raises:
            ConfigError: If a rank cannot write it; on all ranks.
        """
        try:
            self._state.save(folder, number, self._run)
        except CheckpointException as error:
            self.job.config.refuse(
                "train.output",
                f"the checkpoint of step {number} cannot be written into {folder}: "
                f"{_said(error)}{_free_space(folder)}: make room, and go on with train.resume from "
                f"the last checkpoint that is whole",
                cause=error,
            )

    def make_folder(self, begin: Callable[[Path], None]) -> Path:
        """Returns the run's folder, which rank 0 makes: one that exists is never written to.

        Args:
            begin: Called there with the folder, to open what is to be written.

        Raises:
            ConfigError: If it cannot be made or begun; on all ranks.
        """

        def make() -> str:
            return self._make_folder(begin) if dist.get_rank() == 0 else ""

        return Path(agree("the output folder", make)[0])

    def close(self) -> None:
        """Ends the comm streams and destroys their process groups; every rank must call it."""
        self._scheduler.close()

    # Before the first step.

    def _agreed_configuration(self, load: Callable[[], Config]) -> Config:
        configs = agree("the configuration", load)
        said = [config.flat() for config in configs]
        for key in dict.fromkeys(key for flat in said for key in flat):
            same(key, {rank: str(flat.get(key)) for rank, flat in enumerate(said)})
        return configs[dist.get_rank()]

    def _prepare(self, config: Config) -> tuple[str, str]:
        """Does what this rank can do alone; returns digest of its text and kind of its device."""
        self.job = Job(config, dist.get_world_size())
        self._corpus: Corpus = read_corpus(config)
        self._device = device_of_rank(config)
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)
        return self._corpus.digest, self._device.type

    def _meet(self) -> Topology:
        """Makes the topology with its process groups; every rank must call it."""
        wanted = self.job.config.parallel
        return Topology.create(
            pipeline=self.job.pipeline,
            dimensions=wanted.dimensions,
            data=tuple(wanted.data_dimensions),
            stage_to_rank=self.job.schedule.stage_to_rank,
            device_type=self._device.type,
        )

    def _make_model(self) -> tuple[object, dict[str, str]]:
        """Makes the uncut model, and cuts it; local, as far as the factory is.

        Returns:
            This rank's coordinates along dimensions that a factory may shard by, and digests.
        """
        job, view = self.job, self._topology
        model = job.model(topology=view)
        self._cut: Cut | None = job.cut(model)
        check_parameters(job.config, self._cut)
        location = tuple(view.coordinate(axis) for axis in job.config.parallel.dimensions)
        return location, digests_of(model)

    def _try_out(self) -> None:
        assert self._cut is not None
        try_out_stages(self.job.config, self._cut)

    def _place(self) -> None:
        """Moves this rank's stages to its device."""
        job, device = self.job, self._device
        assert self._cut is not None
        local = job.topology(dist.get_rank()).local_stages
        self._modules = {stage: self._cut.modules[stage].to(device) for stage in local}
        if job.config.train.precision == "bf16":
            for module in self._modules.values():
                autocast = torch.autocast(device.type, dtype=torch.bfloat16)
                module.forward = autocast(module.forward)

    def _connect(self) -> None:
        """Makes process groups, what runs the schedule, and what reduces its gradients."""
        job = self.job
        assert self._cut is not None
        again = job.config.train.recompute
        self._scheduler = Scheduler(
            [Stage(module, index, recompute=again) for index, module in self._modules.items()],
            self._topology,
            schedule=job.schedule,
            loss_fn=_cross_entropy,
            tied=self._cut.tied,
            handlers=[choice.spec for choice in job.config.gradient_handlers],
            **job.gradient_options,
        )
        self.sync = self._scheduler.sync

    def _make_outline(self) -> None:
        """Writes down what the job will do, and lets go of the stages of other ranks.

        Only rank 0 needs all plans; the others find the same error in those of one replica.
        """
        assert self._cut is not None
        self.outline: dict[str, Any] = {}
        topology, manifest = self.sync.topology, self.sync.manifest
        if dist.get_rank() == 0:
            told = outline(self.job, self._cut, manifest)
            self.outline = {"device": self._device.type, **told}
        else:
            replica = [r for r in topology.ranks if not topology.at(r).coordinate(topology.data)]
            self.job.plans(manifest, ranks=replica)
        self._cut = None

    def _make_optimizer(self) -> None:
        """Makes the optimizer of what this rank steps, which may be nothing."""
        config = self.job.config
        self._kept = try_out_optimizer(config, self._device)
        if any(main_range.sharded for main_range in self.sync.plan.main_ranges):
            self.job.check_optimizer()
        groups = self.sync.optimizer_parameters(partial(group_of, config))
        self._optimizer = make_optimizer(config, groups)
        self._learning_rate = make_learning_rate(config, self._optimizer)
        self._state = State(self.sync, self._modules, self._optimizer)

    def _resume(self, config: Config) -> None:
        held = {key for keys in agree("what is held", self._state.keys) for key in keys}
        folder = path_of(config.train.resume or "")
        metadata, checksums = agree(
            "the checkpoint", lambda: self._state.check(config, self._kept, held)
        )[0]
        self._verify(config, folder, checksums)
        try:
            done = self._state.load(folder, metadata)
        except CheckpointException as error:
            config.refuse("train.resume", f"cannot be read: {_said(error)}", cause=error)
        self._resume_handlers()
        self.first_step = done + 1
        if done >= config.train.steps:
            config.refuse("train.steps", f"the checkpoint is of step {done}: nothing is left to do")
        if self._learning_rate is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch misses the optimizer's steps before these
                for _ in range(done):
                    self._learning_rate.step()

    def _verify(self, config: Config, folder: Path, checksums: Checksums | None) -> None:
        """Refuses a checkpoint whose bytes have changed; notes what this run does differently."""
        if checksums is None:
            told = f"train.resume: {folder} has no {CHECKSUMS}, so its bytes were not verified: "
            self.notes += (f"{told}an older version wrote it, or the file was removed",)
            return
        wrong = agree(
            "the checksums",
            lambda: verify(folder, checksums),
            timeout_seconds=_PREPARE_SECONDS,
        )
        if found := sorted({told for of_rank in wrong for told in of_rank}):
            refuse_damaged(config, found)
        there, here = checksums.run, self._run
        changed = [
            f"{key} was {there.get(key, '(default)')}, and is {here.get(key, '(default)')}"
            for key in sorted(there.keys() | here.keys())
            if there.get(key) != here.get(key)
        ]
        if changed:
            told = "; ".join(changed)
            self.notes += (f"train.resume: this is not the run that wrote the checkpoint: {told}",)

    @property
    def _run(self) -> dict[str, str]:
        """What the losses depend on, as text; a cut is not among it."""
        config = self.job.config
        found = {
            key: repr(value)
            for key, value in config.flat().items()
            if key.partition(".")[0] in ("model", "data", "optimizer") or key in _RUN_KEYS
        }
        return {**found, "data.files": f"text {self._corpus.digest[:16]}"}

    def _resume_handlers(self) -> None:
        """Goes on from what the handlers of all ranks kept, or on none."""
        told = [why for why in agree("what handlers kept", self._state.unpack_kept) if why]
        try:
            self.sync.load_state_dict({} if told else self._state.kept)
        except PlanError as error:
            told = [str(error)]
        if told:
            self.notes += (f"train.resume: error feedback starts afresh: {told[0]}",)

    def _make_folder(self, begin: Callable[[Path], None]) -> str:
        config, number = self.job.config, 1
        wanted = path_of(config.train.output)
        while True:
            try:
                if wanted.resolve() in (here := Path.cwd(), *here.parents):
                    config.refuse(
                        "train.output",
                        f"is {wanted.resolve()}, which holds more than a run: name a folder that "
                        f"is not there yet, as in 'runs/run'",
                    )
                folder = wanted
                if number > 1:
                    folder = folder.parent / f"{folder.resolve().name}-{number}"
                folder.mkdir(parents=True)
                begin(folder)
            except FileExistsError:
                number += 1
            except ConfigError:
                raise
            except (OSError, ValueError) as error:
                config.refuse("train.output", f"cannot be written: {error}", cause=error)
            else:
                return str(folder)

    # In a step.

    def _batch(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns the tokens of a step's batch and those to predict, where stages need them."""
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


def _said(error: CheckpointException) -> str:
    """Returns what the first rank that failed says; an interrupt stays one."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failed: failed[0])
    if isinstance(cause, KeyboardInterrupt):
        raise cause from error
    return f"rank {rank}: {in_words(cause)}"


def _free_space(folder: Path) -> str:
    """Returns how many bytes the disk of a folder has left, in words; "" if that is not known."""
    try:
        return f"; {shutil.disk_usage(folder).free:,} bytes are free there"
    except OSError:
        return ""


def _every_rank(row: list[float], device: torch.device) -> list[list[float]]:
    """Returns every rank's row, on every rank; float64, so that counts of bytes are exact."""
    rows = torch.zeros(dist.get_world_size(), len(row), dtype=torch.float64, device=device)
    rows[dist.get_rank()] = torch.tensor(row, dtype=torch.float64, device=device)
    dist.all_reduce(rows)
    return [[float(x) for x in found] for found in rows.tolist()]
