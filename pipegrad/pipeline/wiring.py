"""Wiring: the links between outputs and inputs of stages, and the schedule on these links.

Ranks exchange the names of their stages once, in `agree_on_wiring`. The rest is computed from them,
on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipegrad.comm.agreement import agree_keeping, same
from pipegrad.errors import ScheduleError, TopologyError
from pipegrad.model.dtensor import is_dtensor
from pipegrad.pipeline.codings import CodecChoice, CodecsSpec, Hop, choice_of
from pipegrad.pipeline.loss_message import MEAN, REDUCTIONS, TOKEN_MEAN
from pipegrad.pipeline.stage import Stage, StageSource, bind
from pipegrad.plan.check import refuse_loss_parameters
from pipegrad.plan.plan import Plan
from pipegrad.schedules import Schedule, ScheduleGenerator, generate, registry
from pipegrad.schedules.measured import MeasuredGenerator
from pipegrad.schedules.program.program import Link
from pipegrad.topology import Topology

Loss = Callable[..., object]  # returns a loss, or a tuple: see `loss_parts`
ScheduleSpec = Schedule | ScheduleGenerator | str | Mapping[str, Any]
LOSS_OVER = "microbatch", "batch"
# The arguments of `Scheduler.step` by name, without inputs.
OF_STEP = (
    "target",
    "microbatches",
    "num_microbatches",
    "chunks",
    "time_dim",
    "rows_of",
    "loss_divisor",
    "outputs",
)
REST = "**"  # prefix of the name of an input that takes everything that no stage names
Names = tuple[str, ...]
Ends = dict[int, tuple[Names, Names, Names]]  # stage -> its inputs, outputs and losses
Begins = dict[int, str]  # stage -> a digest of its values


@dataclass(frozen=True)
class Wiring:
    """The links between the stages of a pipeline.

    Attributes:
        links: Values that stages pass to later stages.
        external: Names of the values that come from outside, in the order of their first use.
        taken: For each stage its inputs, in order: a number in `links`, or an external name.
        losses: Names of the losses that stages make.
    """

    links: tuple[Link, ...]
    external: tuple[str, ...]
    taken: tuple[tuple[int | str, ...], ...]
    losses: Names


@dataclass(frozen=True)
class WiredPipeline:
    """The stages, links and schedule that all ranks have agreed on.

    Attributes:
        schedule: The actions of all ranks, for this wiring.
        topology: The topology with the schedule's stages.
        wiring: The links between the stages.
        stages: The stages of this rank.
        loss_fn: Takes the last stage's outputs and a target by position; on this rank alone.
        is_weighted: Whether losses are sums and have weights.
        labels: Names of the inputs that are the target, too; empty if a step has a target.
        codecs: The codecs of all hops.
        mixed: Two ranks whose first values of the uncut model differ; None if none are known.
        carries: Whether any stage carries values from chunk to chunk.
        is_over_batch: Whether there is one loss, of all microbatches.
    """

    schedule: Schedule
    topology: Topology
    wiring: Wiring
    stages: Sequence[Stage]
    loss_fn: Loss | None
    is_weighted: bool
    labels: Names
    codecs: CodecChoice
    mixed: tuple[int, int] | None
    is_over_batch: bool
    carries: bool

    def fitted(self, schedule: Schedule) -> Schedule:
        """Returns another schedule for this wiring.

        Raises:
            ScheduleError: If it cannot be run on it, or with this loss; or if it has stages on
                other ranks.
        """
        present = self.schedule
        if schedule.stage_to_rank != present.stage_to_rank:
            raise ScheduleError(
                f"schedule {schedule.name!r} has the stages of {schedule.num_microbatches} "
                f"microbatches on ranks {schedule.stage_to_rank}, and those of "
                f"{present.num_microbatches} on ranks {present.stage_to_rank}: a step cannot move "
                f"them"
            )
        return fitted(schedule, self.wiring, is_over_batch=self.is_over_batch, carries=self.carries)


@dataclass(frozen=True)
class Described:
    """The description of a rank's part of a pipeline, which all ranks exchange.

    Attributes:
        arguments: Arguments that must be equal on all ranks, a line each.
        schedule: Its name.
        grid: The schedule itself.
        codecs: The identity of its codecs.
        carries: Whether one of its stages carries values from chunk to chunk.
        begins: Digests of the values of the stages of a cut model.
        ends: The names of its stages' inputs, outputs and losses.
    """

    arguments: str
    schedule: str
    grid: str
    codecs: str
    carries: bool
    begins: Begins
    ends: Ends


_Local = tuple[Schedule, Topology, Sequence[Stage], Loss | None, CodecChoice]


def agree_on_wiring(
    stages: Sequence[Stage] | StageSource,
    topology: Topology,
    *,
    schedule: ScheduleSpec,
    num_microbatches: int | None,
    loss_fn: Loss | None,
    loss_reduction: str | None,
    loss_over: str,
    whole: Sequence[str],
    codecs: CodecsSpec,
    depth: int,
    complaint: str,
    timeout_seconds: float,
) -> WiredPipeline:
    """Returns the stages, links and schedule of a pipeline, after all ranks have agreed on them.

    The arguments are arguments of `Scheduler`, and a complaint about unknown names of options.
    Every rank of the topology must call it.

    Raises:
        PipegradError: If anything does not fit together; on all ranks alike.
    """
    source = None if isinstance(stages, Sequence) else stages
    labels: Names = ()
    if source is not None and loss_fn is None:
        loss_fn, labels = source.loss_fn, tuple(source.labels)
    reduction = loss_reduction or (TOKEN_MEAN if labels else MEAN)

    def describe() -> tuple[_Local, Described]:
        # Everything that can fail on this rank alone is inside, because its error must be raised on
        # all ranks.
        if complaint:
            raise ScheduleError(complaint)
        _check_loss(reduction, loss_over, is_own=bool(labels))
        generated = schedule_of(schedule, topology, num_microbatches)
        choice = choice_of(codecs)
        staged = topology.with_stages(generated.stage_to_rank)
        local_stages = stages_of_rank(stages, generated, staged, own_loss=bool(labels))
        check_stages(generated, local_stages, staged)
        bound = bound_loss(loss_fn, local_stages, staged)
        arguments = (
            f"depth {depth}",
            f"whole {whole!r}",
            f"loss_reduction {reduction!r}",
            f"loss_over {loss_over!r}",
            f"{generated.num_microbatches} microbatches{later_words(schedule)}",
            "" if source is None else f"{source!r}",
        )
        return (generated, staged, local_stages, bound, choice), Described(
            "\n".join(arguments),
            generated.name,
            str(generated),
            choice.identity,
            carries=any(stage.carry for stage in local_stages),
            begins={} if source is None else dict(source.begins(staged.local_stages)),
            ends={s.index: (s.inputs, s.outputs, s.losses) for s in local_stages},
        )

    ranks = sorted(topology.ranks)
    local, replies = agree_keeping(
        "Scheduler", describe, ranks=ranks, timeout_seconds=timeout_seconds
    )
    generated, staged, local_stages, bound, choice = local
    # An error below is raised on all ranks, because all of them have the same replies.
    by_rank = dict(zip(ranks, replies, strict=True))
    same("the schedule", {rank: one.arguments for rank, one in by_rank.items()})
    if len({one.grid for one in replies}) > 1:
        # Names are clearer than a row of a grid. Equal grids may have two names.
        same("the schedule", {r: f"{one.schedule}\n{one.grid}" for r, one in by_rank.items()})
    same("codecs", {rank: one.codecs for rank, one in by_rank.items()})
    wiring = wired({rank: one.ends for rank, one in by_rank.items()})
    check_whole(whole, wiring)
    choice.check(hops_of(wiring, generated.stage_to_rank))
    is_over_batch, carries = loss_over == "batch", any(one.carries for one in replies)
    return WiredPipeline(
        fitted(generated, wiring, is_over_batch=is_over_batch, carries=carries),
        staged,
        wiring,
        local_stages,
        bound,
        is_weighted=reduction == TOKEN_MEAN,
        labels=labels,
        codecs=choice,
        is_over_batch=is_over_batch,
        carries=carries,
        mixed=mixed_in(staged, {rank: one.begins for rank, one in by_rank.items()}),
    )


def _check_loss(reduction: str, loss_over: str, *, is_own: bool) -> None:
    """Refuses an unknown loss_reduction or loss_over, or one that the model's own loss excludes."""
    if reduction not in REDUCTIONS:
        raise ScheduleError(f"loss_reduction is {reduction!r}, expected one of {list(REDUCTIONS)}")
    if is_own and reduction != TOKEN_MEAN:
        raise ScheduleError(
            f"loss_reduction is {reduction!r}, but the model's own loss is a mean over labels: "
            f"leave it out, or give a loss_fn"
        )
    if loss_over not in LOSS_OVER:
        raise ScheduleError(f"loss_over is {loss_over!r}, expected one of {list(LOSS_OVER)}")
    if is_own and loss_over == "batch":
        raise ScheduleError(
            "loss_over is 'batch', but the model computes its own loss of the rows that it is "
            "given, a microbatch: give a loss_fn, which takes what the model returns"
        )


def mixed_in(topology: Topology, begins: Mapping[int, Begins]) -> tuple[int, int] | None:
    """Returns two ranks that give their stages first values of different models."""
    # All replicas of a stage get the values of its lowest rank.
    givers = {
        stage: rank
        for rank in sorted(begins, reverse=True)
        for stage in topology.at(rank).local_stages
    }
    for a, b in combinations(sorted({*givers.values()}), 2):
        if any(begins[a][stage] != begins[b][stage] for stage in begins[a].keys() & begins[b]):
            return a, b
    return None


def wire(ends: Mapping[int, tuple[Sequence[str], Sequence[str], Sequence[str]]]) -> Wiring:
    """Returns the links, external inputs and losses of the stages of a pipeline.

    Args:
        ends: Stage -> names of its inputs, of its outputs and of its losses; all stages from 0.

    Raises:
        ScheduleError: If a name is doubled or reserved, or if a stage that is not the last makes
            a value that no later stage takes.
    """
    num_stages = len(ends)
    sources = list[list[tuple[int, str] | str]]()
    newest: dict[str, int] = {}  # name -> the nearest earlier stage that makes it
    for stage in range(num_stages):
        inputs, outputs, losses = ends[stage]
        ends_in_losses = bool(losses) and stage < num_stages - 1
        for names, what, may_be_empty in (
            (inputs, "inputs", False),
            (outputs, "outputs", ends_in_losses),
            ((*outputs, *losses), "outputs and losses", ends_in_losses),
        ):
            if len(set(names)) != len(names) or not (names or may_be_empty):
                raise ScheduleError(
                    f"stage {stage} has the {what} {list(names)}: expected one or more, each once"
                )
        sources.append([(newest[n], n) if n in newest else n for n in inputs])
        newest |= dict.fromkeys(outputs, stage)
    # In the order of producers, and of their outputs: the same on every rank.
    consumers = {
        (stage, name): tuple(c for c, taken in enumerate(sources) if (stage, name) in taken)
        for stage in range(num_stages)
        for name in ends[stage][1]
    }
    for stage in range(num_stages - 1):
        wasted = [name for name in ends[stage][1] if not consumers[stage, name]]
        if wasted:
            raise ScheduleError(
                f"stage {stage} makes {wasted}, which no later stage takes: name them among the "
                f"inputs of one, or leave them out"
            )
    external = tuple(dict.fromkeys(s for taken in sources for s in taken if isinstance(s, str)))
    reserved = [name for name in external if name in OF_STEP]
    if reserved:
        raise ScheduleError(
            f"stages take {reserved} from outside, which are arguments of step() itself: rename"
        )
    links = tuple(Link(name, stage, users) for (stage, name), users in consumers.items() if users)
    number = {(link.producer, link.name): i for i, link in enumerate(links)}
    return Wiring(
        links,
        external,
        tuple(tuple(s if isinstance(s, str) else number[s] for s in taken) for taken in sources),
        tuple(dict.fromkeys(name for stage in range(num_stages) for name in ends[stage][2])),
    )


def hops_of(wiring: Wiring, stage_to_rank: Sequence[int]) -> tuple[Hop, ...]:
    """Returns the pairs of pipeline ranks between which values cross, the lower one first."""
    pairs = {
        (stage_to_rank[link.producer], stage_to_rank[consumer])
        for link in wiring.links
        for consumer in link.consumers
    }
    return tuple(sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}))


def schedule_of(
    spec: ScheduleSpec, topology: Topology, num_microbatches: int | None, chunks: int | None = None
) -> Schedule:
    """Returns the schedule of this pipeline for `spec`.

    Raises:
        PipegradError: If there is none, or not of these numbers.
    """
    num_ranks = topology.size(topology.pipeline)
    if isinstance(spec, Schedule):
        is_alike = num_microbatches in (None, spec.num_sequences) and chunks in (None, spec.chunks)
        if not is_alike or spec.num_ranks != num_ranks:
            parts = f" of {spec.chunks} and {chunks or 1} chunks" if chunks != spec.chunks else ""
            raise ScheduleError(
                f"schedule {spec.name!r} is of {spec.num_ranks} ranks and {spec.num_sequences} "
                f"microbatches, asked for are {num_ranks} and {num_microbatches}{parts}"
            )
        return spec
    if num_microbatches is None:
        raise ScheduleError("num_microbatches is missing: into how many is a batch cut?")
    generator = registry.resolve(spec)
    if chunks is not None:
        generator = replace(generator, plugin=generator.plugin.of_chunks(chunks))
    return generate(generator, num_ranks=num_ranks, num_microbatches=num_microbatches)


def later_words(spec: ScheduleSpec) -> str:
    """Returns a description of the generator of later schedules; "" if all are alike."""
    if isinstance(spec, Schedule):
        return ""
    resolved = registry.resolve(spec)
    is_measured = isinstance(resolved.plugin, MeasuredGenerator) and resolved.plugin.wants_times
    return f", {resolved} with {dict(resolved.options)}" if is_measured else ""


def stages_of_rank(
    stages: Sequence[Stage] | StageSource, schedule: Schedule, topology: Topology, *, own_loss: bool
) -> Sequence[Stage]:
    """Returns the stages of this rank: the given ones, or stages that the source makes.

    Raises:
        ScheduleError: If the source has another number of stages than the schedule.
    """
    if isinstance(stages, Sequence):
        return stages
    number = len(schedule.stage_to_rank)
    if stages.num_stages != number:
        raise ScheduleError(
            f"schedule {schedule.name!r} is of {number} stages, and the model is cut into "
            f"{stages.num_stages}: cut it with num_stages={number}"
        )
    return stages.stages(topology.local_stages, own_loss=own_loss)


def check_stages(schedule: Schedule, stages: Sequence[Stage], topology: Topology) -> None:
    """Refuses stages that are not this rank's, or that reduce their gradients themselves."""
    indices = sorted(stage.index for stage in stages)
    if indices != list(topology.local_stages):
        raise TopologyError(
            f"schedule {schedule.name!r} places stages {list(topology.local_stages)} on this rank, "
            f"which has {indices}"
        )
    splits = schedule.splits_backward
    for stage in stages:
        _ = stage.binding  # raises if the names of inputs look swapped
        if splits and any(is_dtensor(p) for p in stage.module.parameters()):
            raise TopologyError(
                f"schedule {schedule.name!r} splits backward, and stage {stage.index} has DTensor "
                f"parameters, whose backward FSDP2, or tensor parallelism, wants whole: take a "
                f"schedule that does not split, such as '1f1b' or 'interleaved-1f1b'"
            )
        for part in stage.module.modules():
            if isinstance(part, DistributedDataParallel):
                raise TopologyError(
                    f"stage {stage.index} has a {type(part).__name__}, which wants a backward "
                    f"behind each forward: give the module inside, and the handler 'data-parallel' "
                    f"reduces its gradients"
                )
            if isinstance(part, nn.SyncBatchNorm) and len(topology.pipelines[0]) > 1:
                ranks = dist.get_process_group_ranks(part.process_group or dist.group.WORLD)
                if len({topology.at(rank).local_stages for rank in ranks}) > 1:
                    raise TopologyError(
                        f"a SyncBatchNorm is over ranks {ranks}, and some of them have other "
                        f"stages and never call it: give it process_group="
                        f"topology.group_along({topology.data!r})"
                    )


def check_whole(whole: object, wiring: Wiring) -> None:
    """Refuses names in `whole` that no stage takes from outside."""
    known = (*wiring.external, "target")
    takes_all = any(name.startswith(REST) for name in wiring.external)
    if not isinstance(whole, tuple | list) or (
        not takes_all and any(name not in known for name in whole)
    ):
        raise ScheduleError(
            f"whole is {whole!r}, expected a tuple of names of what step() is given, out of "
            f"{list(known)}"
        )


def bound_loss(loss_fn: Loss | None, stages: Sequence[Stage], topology: Topology) -> Loss | None:
    """Returns the call of the loss with the outputs of the last stage, and a target.

    Raises:
        PipegradError: If the names of its parameters look swapped; or if it has trainable
            parameters that no stage of this rank holds.
    """
    last = [stage for stage in stages if stage.index == topology.num_stages - 1]
    if loss_fn is None or not last:
        return loss_fn
    refuse_loss_parameters(loss_fn, [stage.module for stage in stages])
    return bind(loss_fn, (*last[0].outputs, "target"), "the last stage, with loss_fn's target,")


def wired(by_rank: Mapping[int, Ends]) -> Wiring:
    """Returns the wiring of the stages of all ranks; see `wire`.

    Args:
        by_rank: The inputs, outputs and losses of each rank's stages.

    Raises:
        AgreementError: If replicas of a stage have other inputs, outputs or losses.
        ScheduleError: If `wire` raises it.
    """
    merged: Ends = {}
    for ends in by_rank.values():
        merged |= ends
    for stage in sorted(merged):
        views = {rank: str(ends[stage]) for rank, ends in by_rank.items() if stage in ends}
        same(f"inputs, outputs and losses of stage {stage}", views)
    return wire(merged)


def fitted(
    schedule: Schedule, wiring: Wiring, *, is_over_batch: bool, carries: bool = False
) -> Schedule:
    """Returns `schedule` for this wiring.

    Raises:
        ScheduleError: If it cannot be run on it. Or if its last stage begins a backward before all
            of its forwards, and the loss needs the outputs of all of them. Or if it has chunks of
            time, and no stage carries anything from one to the next.
    """
    if schedule.chunks > 1 and (is_over_batch or not carries):
        why = "loss_over is 'batch'" if is_over_batch else "no stage carries anything"
        raise ScheduleError(
            f"{schedule.chunks} chunks of time, and {why}: "
            + (
                "a loss of all rows at once needs whole sequences"
                if is_over_batch
                else "each chunk would be a sequence of its own. Stage(carry=...) names what a "
                "module hands to the next chunk, and pipegrad.cut(model, carry='cache') does so "
                "for transformers"
            )
        )
    feeds = tuple(
        tuple(sorted({link.producer for link in wiring.links if stage in link.consumers}))
        for stage in range(len(schedule.stage_to_rank))
    )
    # A schedule without feeds is one of a chain, which the generators are made for.
    is_chain = all(feed == ((s - 1,) if s else ()) for s, feed in enumerate(feeds))
    schedule = replace(schedule, feeds=None if is_chain else feeds)
    _ = schedule.ticks  # raises if it cannot be run on this wiring
    last = len(schedule.stage_to_rank) - 1
    actions = [a for a in schedule.actions[schedule.stage_to_rank[last]] if a.stage == last]
    forwards = {action for action in actions[: schedule.num_microbatches] if action.kind == "F"}
    if is_over_batch and len(forwards) < schedule.num_microbatches:
        early = next(action for action in actions if action.kind != "F")
        raise ScheduleError(
            f"loss_over is 'batch': the loss needs the outputs of all {schedule.num_microbatches} "
            f"microbatches, and schedule {schedule.name!r} has the backward {early} before the "
            f"last forward of stage {last}. Take 'gpipe', or a Schedule whose last stage has all "
            f"forwards first"
        )
    return schedule


def synced_stages(plans: Iterable[Plan]) -> set[int]:
    """Returns the stages with parameters that other ranks update, from the plans of a pipeline."""
    return {stage for plan in plans for publish in plan.publishes for stage in publish.readers}
