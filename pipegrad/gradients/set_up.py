"""Set-up: all ranks agree on a model and a plan, and each makes the parts of its GradientSync.

See "Set-up" in docs/internals.md: discover, agree, plan. It ends before the first collective.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipegrad.comm.agreement import agree, agree_keeping, same, warn_once
from pipegrad.comm.ending import Ending
from pipegrad.comm.failures import FailureNotice
from pipegrad.comm.process_groups import Groups, is_local
from pipegrad.errors import PlanError
from pipegrad.gradients.bucket import GradientBucket
from pipegrad.gradients.bucket_memory import BucketMemory
from pipegrad.gradients.drift import DriftCheck
from pipegrad.gradients.main_params import MainParameter, has_main_shard, master_dtype_of
from pipegrad.gradients.norm import GlobalNorm
from pipegrad.gradients.param_sync import ParameterSync
from pipegrad.gradients.parameter import Param, ParameterBuffer, Parameters
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
from pipegrad.plan.plan import MainRange, Plan, buckets_alone, make_plans
from pipegrad.plan.routes import make_routes
from pipegrad.plugins.handler import GradientHandler, HandlerSpec
from pipegrad.plugins.handler import handlers as registry
from pipegrad.plugins.registry import ResolvedPlugin
from pipegrad.topology import Topology

_instances = count()


def refuse_main_shards(
    manifest: Manifest, main_grad: MainGrad | None, master_dtype: torch.dtype | None
) -> None:
    """Refuses a master copy of a DTensor, and a gradient elsewhere or in another dtype.

    Raises:
        PlanError: If a DTensor would have one. It names the parameter.
    """
    # FSDP2 gives a gradient the placements of its parameter, as a DTensor requires. Refuse a copy,
    # because other memory would not follow when FSDP2 exchanges the parameters.
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


@dataclass(frozen=True)
class Agreed:
    """The model, handlers and plan on which the ranks of a GradientSync have agreed.

    Attributes:
        topology: The topology of all ranks.
        main_grad: The accessor of gradients; None for ``.grad``.
        options: All options. `check_every` is 0 if the machines of ranks are of several kinds.
        handlers: The resolved handlers by name.
        manifest: The model.
        plan: This rank's buckets and collectives.
        device: Device of this rank's parameters.
        name: Equal on all ranks. No other GradientSync has it.
    """

    topology: Topology
    main_grad: MainGrad | None
    options: GradientOptions
    handlers: Mapping[str, ResolvedPlugin[GradientHandler]]
    manifest: Manifest
    plan: Plan
    device: torch.device
    name: str

    @property
    def plugins(self) -> dict[str, GradientHandler]:
        """The handler instances, by name."""
        return {name: resolved.plugin for name, resolved in self.handlers.items()}

    @property
    def needs_parameter_sync(self) -> bool:
        """True if a rank sends updated parameters or has master copies, or replicas train alone."""
        is_sent = self.plan.syncs_parameters or bool(self.plan.independent_axes)
        return is_sent or any(
            record.requires_grad
            and has_main_shard(record, self.main_grad, self.options.master_dtype)
            for record in self.manifest.parameters
        )

    def plans(self, ranks: Sequence[int]) -> dict[int, Plan]:
        """Returns the plans of any ranks, computed on this rank."""
        handlers = list(self.plugins.items())
        return make_plans(self.manifest, self.topology, handlers, self.options, ranks=ranks)


def negotiate(
    modules: Mapping[int, nn.Module],
    topology: Topology,
    *,
    tied: Tied,
    handlers: Sequence[HandlerSpec],
    main_grad: MainGrad | None,
    agree_seconds: float,
    options: Mapping[str, Any],
) -> Agreed:
    """Agrees with all ranks on a model and a plan.

    Args:
        modules: This rank's stages.
        topology: The topology of all ranks.
        tied: Parameters that several stages hold.
        handlers: They return the reductions.
        main_grad: The accessor of gradients; None for ``.grad``.
        agree_seconds: Timeout of ranks that wait for each other.
        options: Fields of `GradientOptions` by name.

    Raises:
        PipegradError: The same on all ranks.
    """
    ranks = sorted(topology.ranks)
    # The first agreement runs everything that can fail on one rank alone. The checks after it raise
    # the same error on all ranks, because all have the same manifests then.
    (chosen, resolved), replies = agree_keeping(
        "GradientSync",
        lambda: _describe(
            modules,
            topology,
            tied=tied,
            handlers=handlers,
            main_grad=main_grad,
            options=options,
        ),
        ranks=ranks,
        timeout_seconds=agree_seconds,
    )
    by_rank = {rank: manifest for rank, (*_, manifest) in zip(ranks, replies, strict=True)}
    manifest = merge(list(by_rank.values()), topology, declared(tied))
    refuse_main_shards(manifest, main_grad, chosen.master_dtype)
    if not isinstance(tied, AllTies):
        refuse_likely_ties(manifest.stages, manifest.ties, chosen.allow_unsynced)
    refuse_different_buffers(
        {rank: dict(described.buffers) for rank, described in by_rank.items()},
        topology,
        chosen.allow_unsynced,
    )
    plugins = [(name, handler.plugin) for name, handler in resolved.items()]

    def make_plan() -> tuple[Plan, str]:
        plan = make_plans(manifest, topology, plugins, chosen, ranks=[topology.rank])[topology.rank]
        routes, allowed = dict(plan.routes), chosen.allow_unsynced
        refuse_bare_replicas(
            manifest,
            topology,
            routes,
            dict(plan.divisors),
            allowed,
            independent_axes=plan.independent_axes,
        )
        digests = {
            rank: {at: e.digest for at, e in described.entries.items() if e.digest is not None}
            for rank, described in by_rank.items()
        }
        refuse_suspected_replicas(manifest, topology, routes, digests, allowed)
        return plan, plan.digest

    # Compare the digests of all plans, because different plans would hang. A handler should be
    # pure, but nothing makes sure of that.
    plan, digests = agree_keeping(
        "GradientSync's plan", make_plan, ranks=ranks, timeout_seconds=agree_seconds
    )
    if len(set(digests)) > 1:
        subject = "what the handlers reduce"
        texts = agree(
            subject,
            lambda: _in_words(manifest, topology, plugins, plan.digest),
            ranks=ranks,
            timeout_seconds=agree_seconds,
        )
        same(subject, dict(zip(ranks, texts, strict=True)))
    # Ranks may have made different numbers of objects before. The largest number is new on all.
    name = str(max(number for number, *_ in replies))
    kinds = {kind for _, kind, _ in replies if kind}
    if len(kinds) > 1 and chosen.check_every:
        chosen = replace(chosen, check_every=0)
        warn_once(
            f"copies of parameters are not compared, since machines of several kinds round "
            f"differently: {'; '.join(sorted(kinds))}",
            f"kinds of machine {name}",
        )
    return Agreed(
        topology=topology,
        main_grad=main_grad,
        options=chosen,
        handlers=resolved,
        manifest=manifest,
        plan=plan,
        device=device_of(modules, list(by_rank.values())),
        name=name,
    )


def _describe(
    modules: Mapping[int, nn.Module],
    topology: Topology,
    *,
    tied: Tied,
    handlers: Sequence[HandlerSpec],
    main_grad: MainGrad | None,
    options: Mapping[str, Any],
) -> tuple[
    tuple[GradientOptions, dict[str, ResolvedPlugin[GradientHandler]]],
    tuple[int, str, RankManifest],
]:
    """Returns options and handlers; and a number for the name, this rank's machine and manifest.

    It runs the checks that need no other rank before.
    """
    check_stages(modules, topology)
    if not isinstance(main_grad, MainGrad | None):
        raise PlanError(
            f"accessor={type(main_grad).__name__}: it is pipegrad.MainGrad() or None, "
            f"where gradients are in .grad"
        )
    chosen = GradientOptions.of(options)
    chosen.check(topology)
    resolved, ties = registry.resolve_all(handlers), declared(tied)
    # Reshard, because gathered parameters would be described instead of shards. Link, because ties
    # must be one object before the description.
    reshard(part for parts in fsdp_modules(modules).values() for part in parts)
    link_local(modules, ties)
    settings = {
        "the topology": (
            topology.axes,
            topology.ranks,
            topology.stage_to_rank,
            topology.data_axes,
        ),
        "tied": [*map(str, ties), *["no other"] * isinstance(tied, AllTies)],
        "handlers": [handler.identity for handler in resolved.values()],
        "accessor": "" if main_grad is None else "MainGrad",
        **vars(chosen),
    }
    manifest = describe_rank(modules, main_grad, settings, ties)
    kind = kind_of_machine(device_of(modules, [manifest])) if manifest.device_type else ""
    return (chosen, resolved), (next(_instances), kind, manifest)


def _in_words(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    digest: str,
) -> str:
    """Returns the routes of all ranks, computed here: a line for each rank and key."""
    routes, divisors, _ = make_routes(manifest, topology, handlers)
    lines = [
        f"of {key!r} on rank {rank}: "
        + "; ".join(
            f"handler {step.handler!r}: {step} over ranks {list(step.ranks)}" for step in route
        )
        + (f"; divided by {divisors[key]:g}" if key in divisors else "")
        for rank, by_key in routes.items()
        for key, route in by_key.items()
    ]
    # A handler may return other reductions in this second call. Then all routes are equal now, but
    # the digests of the plans were not.
    return "\n".join([*lines, digest])


def kind_of_machine(device: torch.device) -> str:
    """Returns a text that is equal on ranks that round alike: device, threads, version of torch."""
    version = f"torch {torch.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {version}"
    # Name the processor, because torch uses other instructions on other ones. Add the count of
    # threads, because instructions at the end of a thread's part of a tensor may round differently.
    processor = platform.processor() or platform.machine()
    with suppress(OSError):  # only Linux has this file
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        processor = text.partition("model name")[2].partition("\n")[0].strip("\t :") or processor
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{processor}, {capability}, {torch.get_num_threads()} threads, {version}"


class Parts:
    """The components of a GradientSync. Every rank must make it, because it makes process groups.

    Args:
        agreed: The agreed model and plan.
        modules: This rank's stages.
        agree_seconds: Timeout of ranks that wait for each other.

    Attributes:
        _wrapped: The modules of this rank's stages that FSDP2 has wrapped.
        _groups: The communicators.
        _reducer: Launches collectives, and waits for them.
        _failures: The board of failures, which counts the steps.
        _ending: Ends threads and groups.
        _parameters: This rank's parameters by key.
        _tensors: Checks that modules still hold the parameters.
        _buckets: The gradients of each bucket, by its number.
        _parameter_sync: Sends parameters after the optimizer's step.
        _drift: Compares copies.
        _norm: Norm of the gradients of all ranks.
    """

    # No component may hold this object, because a strong reference would keep it, and its threads,
    # until the process ends.
    def __init__(
        self,
        agreed: Agreed,
        modules: Mapping[int, nn.Module],
        *,
        agree_seconds: float,
    ) -> None:
        plan, topology, device = agreed.plan, agreed.topology, agreed.device
        options, ranks = agreed.options, sorted(topology.ranks)
        self.modules = dict(modules)
        self._failures = FailureNotice(agreed.name)
        self._wrapped = [part for parts in fsdp_modules(modules).values() for part in parts]
        self._groups = Groups(
            plan.groups, ranks=ranks, rank=topology.rank, device=device, chains=plan.chains
        )
        self._reducer = Reducer(
            plan,
            comm_streams=options.comm_streams,
            groups=self._groups,
            handlers=agreed.plugins,
            notice=self._failures,
            device=device,
        )
        self._ending = Ending(
            self,
            threads=self._reducer.comm_streams,
            groups=self._groups.joined,
            is_local=is_local(device),
            # Wait for pair exchanges, because another rank would never receive a message whose
            # group was destroyed first.
            begin=self._reducer.submit_send_waits,
        )
        # Gradients and parameters have separate memory, because the next step's gradients are
        # written while the parameters of this step may still be in flight.
        buffers = {b.index: ParameterBuffer(b, device) for b in plan.buckets if b.syncs_parameters}
        by_key = _parameters(agreed, modules, buffers)
        self._parameters, self._tensors = by_key, Parameters(by_key)
        alone = buckets_alone(agreed.manifest, plan, topology)
        memories = self._reducer.memories | {b.index: BucketMemory(b, device) for b in alone}
        self._buckets = {
            index: GradientBucket(
                [by_key[slot.key] for slot in memory.bucket.slots],
                memory,
                # Not early with DistributedDataParallel, because it reduces gradients until the end
                # of the whole backward. Before that they are not final.
                may_leave_early=bool(memory.bucket.route)
                and agreed.manifest.reduced_by_ddp.isdisjoint(
                    by_key[memory.bucket.slots[0].key].homes
                ),
                main_grad=agreed.main_grad,
            )
            for index, memory in memories.items()
        }
        self._parameter_sync = ParameterSync(
            plan,
            by_key,
            buffers=buffers,
            reducer=self._reducer,
            groups=self._groups,
            is_needed=agreed.needs_parameter_sync,
            device=device,
        )
        self._drift = DriftCheck(
            plan,
            by_key,
            frozenset(  # the same on all ranks
                record.key
                for record in agreed.manifest.parameters
                if record.requires_grad
                and master_dtype_of(record, options.master_dtype) != record.dtype
            ),
            groups=self._groups,
            ranks=ranks,
            agree_seconds=agree_seconds,
            every=options.check_every,
        )
        self._norm = GlobalNorm(
            agreed.manifest,
            plan,
            topology,
            master_dtype=options.master_dtype,
            tape=self._reducer.tape,
        )


def _parameters(
    agreed: Agreed, modules: Mapping[int, nn.Module], buffers: Mapping[int, ParameterBuffer]
) -> dict[str, Param]:
    """Returns this rank's parameters by key, with their main parameters."""
    # A tied parameter that several stages of this rank hold is one Param, because `link_local` has
    # made it one object. It is final when all of these stages are.
    manifest, plan = agreed.manifest, agreed.plan
    names = {location: (full, tensor) for location, full, tensor in named(modules)}
    bucket_of = {slot.key: bucket.index for bucket in plan.buckets for slot in bucket.slots}
    main_ranges = {main_range.key: main_range for main_range in plan.main_ranges}
    parameters: dict[str, Param] = {}
    for record in manifest.records(agreed.topology):
        key = record.key
        held = [location for location in manifest.locations[key] if location[0] in modules]
        parameters[key] = parameter = Param(
            record,
            names[held[0]][1],
            {at[0]: (unwrapped(modules[at[0]]), names[at][0]) for at in held},
            is_reduced=key in bucket_of,
            buffer=buffers.get(bucket_of.get(key, -1)),
        )
        if key in main_ranges:
            parameter.main = _main_parameter(agreed, parameter, main_ranges[key])
    return parameters


def _main_parameter(agreed: Agreed, parameter: Param, main_range: MainRange) -> MainParameter:
    """Returns the main parameter of a parameter of this rank."""
    record, tensor, master_dtype = parameter.record, parameter.tensor, agreed.options.master_dtype
    main = MainParameter(record, tensor, main_range.begin, main_range.sharded)
    if main.sharded or has_main_shard(record, agreed.main_grad, master_dtype):
        source: torch.Tensor = tensor
        if main.sharded and parameter.buffer is not None:
            source = parameter.buffer.shard(record.key, main_range.begin, main_range.end)
            main.stride = parameter.buffer.views[record.key].stride()
        main.tensor = nn.Parameter(torch.empty(0, dtype=master_dtype_of(record, master_dtype)))
        main.bind(source)
        if not main.copied:
            # A copy has a gradient of its dtype, because torch's optimizers need equal dtypes.
            main.tensor.grad_dtype = agreed.manifest.entries(record.key)[0].gradient_dtype
    return main
