"""measure_costs: what the stages and links of a `Scheduler` really take, for `simulate`.

costs = pipegrad.measure_costs(scheduler, x, target=y)
print(simulate(scheduler.program, costs).step_seconds)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pipegrad.comm.agreement import AGREE_SECONDS, agree, slow_seconds
from pipegrad.errors import ScheduleError, StepError
from pipegrad.gradients.named_optimizer import Optimizer
from pipegrad.model.wrappers import fsdp_modules
from pipegrad.observe.codec_costs import measured_codecs
from pipegrad.observe.links import Pair, host_name, measure_links, network_of
from pipegrad.observe.stage_profile import Loss, StageAlone
from pipegrad.observe.step_costs import (
    collective_costs,
    gradient_bytes,
    host_costs,
    optimizer_costs,
)
from pipegrad.pipeline.edges import Spec
from pipegrad.pipeline.losses import loss_parts
from pipegrad.pipeline.microbatch import Batch
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.pipeline.trees import flattened
from pipegrad.simulation.costs import Costs, HostCosts, Network, StageCosts
from pipegrad.simulation.timeline import Timeline


def measure_costs(
    scheduler: Scheduler,
    *inputs: object,
    target: object = None,
    microbatches: Sequence[object] | None = None,
    num_microbatches: int | None = None,
    optimizer: Optimizer | None = None,
    timeline: Timeline | None = None,
    links: bool = True,
    repeats: int = 5,
    **named: object,
) -> Costs:
    """Returns what computing, sending, reducing and stepping take on the ranks of `scheduler`.

    All ranks call it together, between steps, with a batch as for `Scheduler.step`. Its first
    microbatch is measured. Stages run one after the other, each alone; a stage that takes what
    other stages make gets random numbers of the right shapes. Nothing changes: parameters,
    gradients, buffers, random numbers and the Scheduler are as before. While a stage is measured
    it holds its gradients a second time.

    Args:
        scheduler: Whose stages.
        *inputs: As in `Scheduler.step`.
        target: As there.
        microbatches: As there.
        num_microbatches: As there.
        optimizer: Of `scheduler.optimizer`; without it, its step takes no time and holds nothing.
        timeline: Of a recording of these ranks, from which the times of the host are read; without
            it, the host takes no time on top of computing.
        links: Whether to measure the links; without it, messages take no time.
        repeats: Of each pass; the median counts.
        **named: As in `Scheduler.step`.

    Raises:
        PipegradError: On all ranks, if the batch does not fit, if stages are of FSDP2, or if a step
            is not finished.
        Exception: What a stage raises; on other ranks an AgreementError with its words.
    """
    topology = scheduler.topology
    batch = Batch(inputs, named, target, None, microbatches, num_microbatches, False)
    ranks = sorted(topology.ranks)
    seconds = slow_seconds(scheduler.sync.device, AGREE_SECONDS)
    met = partial(agree, ranks=ranks, timeout_seconds=seconds)
    profile = _Profile(scheduler, batch, optimizer, repeats)
    pipeline = topology.ranks_along(topology.pipeline)
    met("measuring costs", profile.begin)
    stages = list[StageCosts]()
    for stage in range(topology.num_stages):
        replies = met(f"measuring stage {stage}", partial(profile.stage, stage))
        replicas = [reply for reply in replies if reply is not None]
        # Replicas may have batches of other sizes, so shapes are those of this rank's pipeline.
        specs = (r.specs for rank, r in zip(ranks, replies, strict=True) if r and rank in pipeline)
        profile.specs |= next(specs)
        # All replicas of a step wait for the slowest one.
        stages.append(
            max((r.costs for r in replicas), key=lambda c: c.forward_seconds + c.backward_seconds)
        )
    pairs = sorted({(c.source, c.target) for c in scheduler.program.channels}) if links else []

    def around() -> tuple[Network, HostCosts] | None:
        """Looks at the first pipeline; the others keep still, because they may share its NICs."""
        if topology.rank not in topology.one_replica:
            return None
        host = HostCosts() if timeline is None else host_costs(timeline)
        network = _network(scheduler, pairs, seconds) if pairs else Network()
        return network, host

    # Each link has a meeting of its own, and so have links that are used at once.
    patience = seconds * (1 + 3 * len(pairs))
    found = agree("links", around, ranks=ranks, timeout_seconds=patience)
    network, host = next(each for each in found if each is not None)
    codecs = agree("codecs", partial(measured_codecs, scheduler, profile.specs), ranks=ranks)
    return Costs(tuple(stages), network, collective_costs(scheduler.sync), host, codecs[0])


def _network(scheduler: Scheduler, pairs: Sequence[Pair], timeout_seconds: float) -> Network:
    """Returns what explains the links of this rank's pipeline; all its ranks call it."""
    topology = scheduler.topology
    pipeline = topology.ranks_along(topology.pipeline)
    hosts = agree("hosts", host_name, ranks=pipeline)
    measured = measure_links(
        scheduler.steps.edges,
        rank=topology.coordinate(topology.pipeline),
        ranks=pipeline,
        pairs=pairs,
        hosts=hosts,
        device=scheduler.sync.device,
        timeout_seconds=timeout_seconds,
    )
    return network_of(measured, hosts)


class _Reply(NamedTuple):
    """What a rank found out about one of its stages: its costs, and what its outputs look like."""

    costs: StageCosts
    specs: dict[int, Spec]


class _Profile:
    """Measures the stages of one rank.

    Attributes:
        specs: What values look like that the stages so far make, by link.
    """

    def __init__(
        self, scheduler: Scheduler, batch: Batch, optimizer: Optimizer | None, repeats: int
    ) -> None:
        self._scheduler = scheduler
        self._pipeline = scheduler.steps.pipeline
        self._stages = {stage.index: stage for stage in self._pipeline.stages}
        self._batch = batch
        self._optimizer = optimizer
        self._repeats = repeats
        self._device = scheduler.sync.device
        self.specs: dict[int, Spec] = {}

    def begin(self) -> None:
        """Takes the first microbatch.

        Raises:
            PipegradError: If it does not fit, or nothing can be measured now.
        """
        sync = self._scheduler.sync
        sync.refuse_closed()
        if sync.is_in_step:
            raise StepError("measure_costs() inside of a step: call it between steps")
        if self._repeats < 1:
            raise ScheduleError(f"repeats is {self._repeats!r}, expected a number, at least 1")
        modules = {index: stage.module for index, stage in self._stages.items()}
        if any(fsdp_modules(modules).values()):
            raise ScheduleError(
                "stages of FSDP2 gather parameters and reduce gradients in each pass, so they "
                "cannot run alone: record real steps with pipegrad.record()"
            )
        ready = self._batch.microbatches
        number = self._batch.num_microbatches or self._scheduler.schedule.num_microbatches
        number = number if ready is None else len(ready)
        with torch.no_grad():  # nothing is cut off a graph of the caller's
            batches = self._scheduler.steps.batches.apart()
            parts, targets = batches.cut(self._batch, number, needs_target=True)
        self._external = {name: _detached(column[0]) for name, column in parts.items()}
        self._target = None if targets is None else _detached(targets[0])

    def stage(self, stage: int) -> _Reply | None:
        """Measures a stage; None if it is on another rank."""
        if stage not in self._stages:
            return None
        wiring = self._pipeline.wiring
        taken = wiring.taken[stage]
        links = {
            link: _random(self.specs[link], self._device) for link in taken if isinstance(link, int)
        }
        inputs = [links[x] if isinstance(x, int) else self._external[x] for x in taken]
        alone = StageAlone(
            self._stages[stage],
            inputs,
            list(links.values()),
            target=self._target,
            loss=self._loss if stage == len(wiring.taken) - 1 else None,
            splits=self._scheduler.schedule.splits_backward,
            device=self._device,
        )
        made = dict(zip(wiring.made[stage], alone.outputs(), strict=False))
        outputs = {self._scheduler.program.links[i].name: x for i, x in made.items()}
        steps = optimizer_costs(self._scheduler.sync, self._optimizer, stage, self._repeats)
        costs = replace(
            alone.costs(outputs, self._repeats),
            optimizer_seconds=steps.seconds,
            gradient_bytes=gradient_bytes(self._scheduler.sync, stage),
            optimizer_bytes=steps.num_bytes,
        )
        return _Reply(costs, {link: Spec.of(value) for link, value in made.items()})

    @property
    def _loss(self) -> Loss:
        function, is_weighted = self._pipeline.loss_fn, self._pipeline.is_weighted

        def loss(outputs: tuple[Tensor, ...]) -> Tensor:
            assert function is not None
            return loss_parts(function(*outputs, self._target), is_weighted=is_weighted)[0]

        return loss


def _random(spec: Spec, device: torch.device) -> Tensor:
    """Returns a value that looks as `spec` says."""
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    # Numbers of its own: those of the caller stay as they are.
    generator = torch.Generator(device).manual_seed(0)
    real = torch.float32 if spec.dtype.is_floating_point else spec.dtype
    value = torch.randn(spec.shape, dtype=real, device=device, generator=generator)
    return value.to(spec.dtype).requires_grad_(spec.differentiable)


def _detached(value: object) -> object:
    leaves, rebuilt = flattened(value)
    return rebuilt([leaf.detach() if isinstance(leaf, Tensor) else leaf for _, leaf in leaves])
