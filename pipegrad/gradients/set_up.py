"""Set-up: all ranks agree on a model and a plan, and each makes the parts of its GradientSync.

See "Set-up" in docs/internals.md: discover, agree, plan. It ends before the first collective.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipegrad.comm.agreement import agree, same, warn_once
from pipegrad.comm.ending import Ending
from pipegrad.comm.failures import FailedSteps, FailureNotice
from pipegrad.comm.process_groups import Groups, is_local
from pipegrad.errors import PlanError
from pipegrad.gradients.bucket import GradientBucket
from pipegrad.gradients.drift import DriftCheck
from pipegrad.gradients.local_gradients import LocalGradients
from pipegrad.gradients.main_params import MainShard, has_main_shard, master_dtype_of
from pipegrad.gradients.norm import GlobalNorm
from pipegrad.gradients.param_sync import ParameterSync
from pipegrad.gradients.parameter import LiveParameter, LiveParameters, ModuleTree, ParameterBuffer
from pipegrad.gradients.reducer import Reducer
from pipegrad.model.describe import check_stages, describe_rank, device_of, merge
from pipegrad.model.main_grad import MainGrad
from pipegrad.model.manifest import Manifest, RankManifest
from pipegrad.model.ties import AllTies, Tied, declared, link_local, named, refuse_likely_ties
from pipegrad.model.wrappers import fsdp_modules, reshard, unwrapped
from pipegrad.plan.check import (
    refuse_bare_replicas,
    refuse_different_buffers,
    refuse_suspected_replicas,
)
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import Plan, make_plans
from pipegrad.plan.routes import make_routes
from pipegrad.plugins.handler import GradientHandler, HandlerSpec
from pipegrad.plugins.handler import handlers as registry
from pipegrad.topology import Topology

_instances = count()
_CPUINFO = Path("/proc/cpuinfo")


def refuse_main_shards(
    manifest: Manifest, main_grad: MainGrad | None, master_dtype: torch.dtype | None
) -> None:
    """Refuses a master copy of a DTensor, and a gradient elsewhere or in another dtype.

    Raises:
        PlanError: If a DTensor would have one. It names the parameter.
    """
    # A gradient of a DTensor must have the placements of its parameter, and FSDP2 makes it so. A
    # copy in other memory would not follow when FSDP2 exchanges the parameters.
    for record in manifest.parameters:
        entry = manifest.entries(record.key)[0]
        if entry.layout is None or not entry.requires_grad:
            continue
        if has_main_shard(record, main_grad, master_dtype) or entry.gradient_dtype != entry.dtype:
            raise PlanError(
                f"{record.key!r} is a DTensor, {entry.layout}, of {entry.dtype}: it is stepped as "
                f"it is, and its gradient is where and what FSDP2 makes it; found master_dtype="
                f"{master_dtype}, gradients of {entry.gradient_dtype} in "
                f"{'.grad' if main_grad is None else 'main_grad'}: leave both out, FSDP2 has "
                f"MixedPrecisionPolicy"
            )


class Agreed:
    """The model, handlers and plan on which the ranks of a GradientSync have agreed.

    Args:
        modules: This rank's stages.
        topology: Over all ranks.
        tied: Parameters that several stages hold.
        handlers: They return the reductions.
        main_grad: Where gradients live; None for ``.grad``.
        agree_seconds: How long the ranks wait for each other.
        options: Fields of `GradientOptions` by name.

    Attributes:
        topology: The argument.
        main_grad: The argument.
        options: The record of all options.
        wrapped: The modules of this rank's stages that FSDP2 has wrapped.
        handlers: The resolved handlers by name.
        manifest: The model.
        plan: This rank's buckets and collectives.
        device: Of this rank's parameters.
        name: The same on all ranks. No other GradientSync has it.
        check_every: The option; 0 if the machines of ranks are of several kinds.
        needs_parameter_sync: Whether any rank sends updated parameters or has a master copy, or
            replicas train alone.

    Raises:
        PipegradError: The same on all ranks.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        topology: Topology,
        *,
        tied: Tied,
        handlers: Sequence[HandlerSpec],
        main_grad: MainGrad | None,
        agree_seconds: float,
        options: Mapping[str, Any],
    ) -> None:
        self.topology = topology
        self.main_grad = main_grad
        ranks = sorted(topology.ranks)
        describe = partial(self._describe, modules, tied, handlers, options)
        # The first agreement runs everything that one rank alone can get wrong. After it, all ranks
        # have the same manifests, so the checks below raise the same error on all of them.
        replies = agree("GradientSync", describe, ranks=ranks, timeout_seconds=agree_seconds)
        manifests = [manifest for *_, manifest in replies]
        self.manifest = merge(manifests, topology, self._ties)
        refuse_main_shards(self.manifest, main_grad, self.options.master_dtype)
        allowed = self.options.allow_unsynced
        if not isinstance(tied, AllTies):
            refuse_likely_ties(self.manifest.stages, self.manifest.ties, allowed)
        buffers = {r: dict(m.buffers) for r, m in zip(ranks, manifests, strict=True)}
        refuse_different_buffers(buffers, topology, allowed)
        # A handler should be pure, but nothing makes sure of that. Different plans would hang, so
        # all ranks compare the digests of their plans.
        plan = partial(self._make_plan, manifests)
        digests = agree("GradientSync's plan", plan, ranks=ranks, timeout_seconds=agree_seconds)
        if len(set(digests)) > 1:
            self._refuse_different(dict(zip(ranks, digests, strict=True)), agree_seconds)
        self.device = device_of(modules, manifests)
        # Ranks may have made different numbers of objects before. The largest number is new on all.
        self.name = str(max(number for number, *_ in replies))
        kinds, self.check_every = {kind for _, kind, _ in replies if kind}, self.options.check_every
        if len(kinds) > 1 and self.check_every:
            self.check_every = 0
            warn_once(
                f"copies of parameters are not compared, since machines of several kinds round "
                f"differently: {'; '.join(sorted(kinds))}",
                f"kinds of machine {self.name}",
            )
        is_sent = self.plan.syncs_parameters or bool(self.plan.independent_axes)
        self.needs_parameter_sync = is_sent or any(
            record.requires_grad and has_main_shard(record, main_grad, self.options.master_dtype)
            for record in self.manifest.parameters
        )

    def _describe(
        self,
        modules: Mapping[int, nn.Module],
        tied: Tied,
        handlers: Sequence[HandlerSpec],
        options: Mapping[str, Any],
    ) -> tuple[int, str, RankManifest]:
        """Returns a number for the name, the kind of this rank's machine, and its description.

        It runs the checks that need no other rank before.
        """
        check_stages(modules, self.topology)
        if not isinstance(self.main_grad, MainGrad | None):
            raise PlanError(
                f"accessor={type(self.main_grad).__name__}: it is pipegrad.MainGrad() or None, "
                f"where gradients are in .grad"
            )
        self.options = GradientOptions.of(options)
        self.options.check(self.topology)
        self.handlers = registry.resolve_all(handlers)
        self._ties = declared(tied)
        self.wrapped = [part for parts in fsdp_modules(modules).values() for part in parts]
        # Gathered parameters would be described instead of shards, and ties must be one object
        # before the description.
        reshard(self.wrapped)
        link_local(modules, self._ties)
        settings = {
            "the topology": (
                self.topology.axes,
                self.topology.ranks,
                self.topology.stage_to_rank,
                self.topology.data_axes,
            ),
            "tied": [*map(str, self._ties), *["no other"] * isinstance(tied, AllTies)],
            "handlers": [resolved.identity for resolved in self.handlers.values()],
            "accessor": "" if self.main_grad is None else "MainGrad",
            **self.options.settings(),
        }
        manifest = describe_rank(modules, self.main_grad, settings, self._ties)
        device = device_of(modules, [manifest])
        kind = kind_of_machine(device) if manifest.device_type else ""
        return next(_instances), kind, manifest

    def _make_plan(self, manifests: Sequence[RankManifest]) -> str:
        """Makes this rank's plan; returns its digest, which must be equal on all ranks."""
        self.plan: Plan = self.plans([self.topology.rank])[self.topology.rank]
        ranks = sorted(self.topology.ranks)
        prints = {
            rank: {at: e.digest for at, e in m.entries.items() if e.digest is not None}
            for rank, m in zip(ranks, manifests, strict=True)
        }
        routes, allowed = dict(self.plan.routes), self.options.allow_unsynced
        divisors = dict(self.plan.divisors)
        refuse_bare_replicas(
            self.manifest,
            self.topology,
            routes,
            divisors,
            allowed,
            independent_axes=self.plan.independent_axes,
        )
        refuse_suspected_replicas(self.manifest, self.topology, routes, prints, allowed)
        return self.plan.digest

    def _refuse_different(self, digests: Mapping[int, str], agree_seconds: float) -> None:
        """Raises an error that names the first parameter with different routes, and the handlers.

        Raises:
            AgreementError: Always, the same on every rank.
        """
        subject, ranks = "what the handlers reduce", list(digests)
        replies = agree(subject, self._routes_as_text, ranks=ranks, timeout_seconds=agree_seconds)
        for rank, key in sorted({key for reply in replies for key in reply}):
            routes = [reply.get((rank, key), "nothing") for reply in replies]
            same(f"{subject} of {key!r} on rank {rank}", dict(zip(ranks, routes, strict=True)))
        # A handler may return other reductions in this second call. Then all routes are equal now,
        # but the digests were not.
        same(subject, digests)

    def _routes_as_text(self) -> dict[tuple[int, str], str]:
        """Returns the routes of all ranks, computed here, as text by rank and key."""
        handlers = list(self.plugins.items())
        routes, divisors, _ = make_routes(self.manifest, self.topology, handlers)
        return {
            (rank, key): "; ".join(
                f"handler {step.handler!r}: {step} over ranks {list(step.ranks)}" for step in route
            )
            + (f"; divided by {divisors[key]:g}" if key in divisors else "")
            for rank, by_key in routes.items()
            for key, route in by_key.items()
            if route
        }

    def plans(self, ranks: Sequence[int]) -> dict[int, Plan]:
        """Returns the plans of any ranks, computed on this rank."""
        handlers = list(self.plugins.items())
        return make_plans(self.manifest, self.topology, handlers, self.options, ranks=ranks)

    @property
    def plugins(self) -> dict[str, GradientHandler]:
        """The handler instances, by name."""
        return {name: resolved.plugin for name, resolved in self.handlers.items()}


def kind_of_machine(device: torch.device) -> str:
    """Returns a text that is equal on ranks that round alike: device, threads, version of torch.

    Args:
        device: Of the rank's parameters.
    """
    version = f"torch {torch.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {version}"
    # torch takes other instructions on other processors. Where a thread's part of a tensor ends,
    # it takes instructions that may round in another way.
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_processor()}, {capability}, {torch.get_num_threads()} threads, {version}"


def _processor() -> str:
    with suppress(OSError):  # only Linux has this file
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Parts:
    """The parts of a GradientSync.

    Attributes:
        groups: The communicators.
        reducer: Launches collectives, and waits for them.
        failures: Of all steps.
        ending: Ends threads and groups.
        parameters: Of this rank.
        buckets: The gradients of each bucket, by its number.
        local: The gradients that nobody reduces; None if there are none.
        parameter_sync: Sends parameters after the optimizer's step.
        drift: Compares copies.
        norm: Of the gradients of all ranks.
    """

    groups: Groups
    reducer: Reducer
    failures: FailedSteps
    ending: Ending
    parameters: LiveParameters
    buckets: Mapping[int, GradientBucket]
    local: LocalGradients | None
    parameter_sync: ParameterSync
    drift: DriftCheck
    norm: GlobalNorm


def set_up(
    owner: object, agreed: Agreed, modules: Mapping[int, nn.Module], *, agree_seconds: float
) -> Parts:
    """Makes all parts. Every rank must call it, since it makes process groups.

    Args:
        owner: The GradientSync; a weak reference. Threads and groups end when it is garbage.
        agreed: The agreed model and plan.
        modules: This rank's stages.
        agree_seconds: How long the ranks wait for each other.
    """
    # The parts may not hold the owner: with a strong reference it would never be garbage, and its
    # threads would run until the process ends.
    plan, topology, device = agreed.plan, agreed.topology, agreed.device
    groups, reducer, ending, failures = _communication(owner, agreed)
    # Gradients and parameters have separate memory: the next step's gradients are written while the
    # parameters of this step may still be on the wire.
    buffers = {b.index: ParameterBuffer(b, device) for b in plan.buckets if b.syncs_parameters}
    trees = {stage: ModuleTree(unwrapped(module)) for stage, module in modules.items()}
    parameters = _parameters(agreed, modules, trees, buffers)
    parameter_sync = ParameterSync(
        plan,
        parameters,
        buffers=buffers,
        reducer=reducer,
        groups=groups,
        is_needed=agreed.needs_parameter_sync,
        device=device,
    )
    master_dtype = agreed.options.master_dtype
    drift = DriftCheck(
        plan.packs,
        parameters,
        frozenset(  # the same on all ranks
            record.key
            for record in agreed.manifest.parameters
            if record.requires_grad and master_dtype_of(record, master_dtype) != record.dtype
        ),
        groups=groups,
        ranks=sorted(topology.ranks),
        agree_seconds=agree_seconds,
        every=agreed.check_every,
    )
    return Parts(
        groups,
        reducer,
        failures,
        ending,
        LiveParameters(parameters, trees),
        _buckets(agreed, parameters, reducer),
        _local(agreed, parameters),
        parameter_sync,
        drift,
        GlobalNorm(agreed.manifest, plan, topology, master_dtype=master_dtype, tape=reducer.tape),
    )


def _communication(owner: object, agreed: Agreed) -> tuple[Groups, Reducer, Ending, FailedSteps]:
    """Makes the process groups, and all that sends; see `set_up`."""
    plan, topology, device = agreed.plan, agreed.topology, agreed.device
    ranks = sorted(topology.ranks)
    notice = FailureNotice(agreed.name)
    groups = Groups(plan.groups, ranks=ranks, rank=topology.rank, device=device, chains=plan.chains)
    reducer = Reducer(
        plan,
        comm_streams=agreed.options.comm_streams,
        groups=groups,
        handlers=agreed.plugins,
        notice=notice,
        device=device,
    )
    ending = Ending(
        owner, threads=reducer.comm_streams, groups=groups.joined, is_local=is_local(device)
    )
    # A pair exchange may still be sending. If its group were destroyed first, another rank would
    # never receive the message.
    ending.call(reducer.submit_send_waits)
    failures = FailedSteps(notice, reducer.wait)
    return groups, reducer, ending, failures


def _parameters(
    agreed: Agreed,
    modules: Mapping[int, nn.Module],
    trees: Mapping[int, ModuleTree],
    buffers: Mapping[int, ParameterBuffer],
) -> dict[str, LiveParameter]:
    """Returns this rank's parameters by key, with their main shards.

    Args:
        agreed: The agreed model and plan.
        modules: This rank's stages.
        trees: Find the parameters, by stage.
        buffers: The memory of parameters that a parameter sync may write to, by bucket.
    """
    # A tied parameter that several stages of this rank hold is one LiveParameter: `link_local` has
    # made it one object. It is final when all of these stages are.
    manifest, plan, master_dtype = agreed.manifest, agreed.plan, agreed.options.master_dtype
    homes = {location: (trees[location[0]], full) for location, full, _ in named(modules)}
    bucket_of = {slot.key: bucket.index for bucket in plan.buckets for slot in bucket.slots}
    main_ranges = {main_range.key: main_range for main_range in plan.main_ranges}
    parameters: dict[str, LiveParameter] = {}
    for record in manifest.records(agreed.topology):
        key, main_shard = record.key, None
        main_range = main_ranges.get(key)
        if main_range is not None and (
            main_range.sharded or has_main_shard(record, agreed.main_grad, master_dtype)
        ):
            dtype = master_dtype_of(record, master_dtype)
            main_shard = MainShard(main_range, dtype, manifest.entries(key)[0].gradient_dtype)
        parameters[key] = LiveParameter(
            record,
            {p[0]: homes[p] for p in manifest.locations(key) if p[0] in modules},
            agreed.main_grad,
            is_reduced=key in bucket_of,
            has_result=main_range is not None,
            buffer=buffers.get(bucket_of.get(key, -1)),
            main_shard=main_shard,
        )
    return parameters


def _buckets(
    agreed: Agreed, parameters: Mapping[str, LiveParameter], reducer: Reducer
) -> dict[int, GradientBucket]:
    """Returns the gradients of each bucket, by its number."""
    buckets: dict[int, GradientBucket] = {}
    for bucket in agreed.plan.buckets:
        held = [parameters[slot.key] for slot in bucket.slots]
        buckets[bucket.index] = GradientBucket(
            held,
            reducer.memories[bucket.index],
            # DistributedDataParallel reduces gradients until the end of the whole backward. Before
            # that they are not final.
            may_leave_early=agreed.manifest.reduced_by_ddp.isdisjoint(held[0].stages),
            main_grad=agreed.main_grad,
        )
    return buckets


def _local(agreed: Agreed, parameters: Mapping[str, LiveParameter]) -> LocalGradients | None:
    """Returns the gradients that nobody reduces; None if there are none."""
    reduced = {slot.key for bucket in agreed.plan.buckets for slot in bucket.slots}
    alone = [p for k, p in parameters.items() if k not in reduced and p.record.requires_grad]
    divisors = dict(agreed.plan.divisors)
    fixed = [divisors.get(p.record.key, 1.0) for p in alone]
    return LocalGradients(alone, agreed.main_grad, fixed) if alone else None
