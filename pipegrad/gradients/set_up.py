"""Set-up: makes the parts of a GradientSync, after the ranks have agreed on a model and a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from pipegrad.comm.ending import Ending
from pipegrad.comm.failures import FailedSteps, FailureNotice
from pipegrad.comm.process_groups import Groups, is_local
from pipegrad.gradients.bucket import GradientBucket
from pipegrad.gradients.careful import CarefulBucket
from pipegrad.gradients.drift import DriftCheck, Lookup
from pipegrad.gradients.local_gradients import LocalGradients
from pipegrad.gradients.main_params import MainShard, has_main_shard, master_dtype_of
from pipegrad.gradients.negotiate import Agreed
from pipegrad.gradients.norm import GlobalNorm
from pipegrad.gradients.optimizer_watch import steps_alike
from pipegrad.gradients.param_sync import ParameterBuffer, ParameterSync, parameter_buffers
from pipegrad.gradients.parameter import LiveParameter
from pipegrad.gradients.reducer import Reducer
from pipegrad.gradients.step import Step
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.gradient_storage import GradAttribute
from pipegrad.model.module_tree import ModuleTree
from pipegrad.model.ties import named
from pipegrad.model.wrappers import unwrapped
from pipegrad.plugins.handler import keeps_state


@dataclass(frozen=True)
class Parts:
    """The parts of a GradientSync.

    Attributes:
        groups: The communicators.
        reducer: Launches collectives, and waits for them.
        failures: Of all steps.
        ending: Ends threads and groups.
        parameters: Of this rank, by key.
        lookup: Key -> the parameter that is in its module now.
        parameter_sync: Sends parameters after the optimizer's step.
        drift: Compares copies.
        norm: Of the gradients of all ranks.
        step: The present step.
    """

    groups: Groups
    reducer: Reducer
    failures: FailedSteps
    ending: Ending
    parameters: Mapping[str, LiveParameter]
    lookup: Lookup
    parameter_sync: ParameterSync
    drift: DriftCheck
    norm: GlobalNorm
    step: Step


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
    trees = {stage: ModuleTree(unwrapped(module)) for stage, module in modules.items()}
    buffers = parameter_buffers(plan, device)
    parameters = live_parameters(
        agreed,
        modules,
        trees,
        parameter_buffers={key: buffer for buffer in buffers.values() for key in buffer.views},
    )
    lookup = partial(_lookup, parameters)
    parameter_sync = ParameterSync(
        plan,
        buffers=buffers,
        reducer=reducer,
        groups=groups,
        main_shards=[p.placed.main_shard for p in parameters.values() if p.placed.main_shard],
        main_parameters=partial(_synced, parameters),
        stepped_parameters=partial(_stepped, parameters),
        is_needed=agreed.needs_parameter_sync,
        device=device,
    )
    drift = DriftCheck(
        plan.packs,
        lookup,
        partial(_master_copy, parameters),
        _with_master_copies(agreed),
        groups=groups,
        ranks=sorted(topology.ranks),
        device=device,
        agree_seconds=agree_seconds,
        every=agreed.options.check_every,
        is_exact=agreed.rounds_alike,
    )
    reduced, local = _gradients(agreed, parameters, reducer)
    step = Step(
        plan,
        parameters,
        trees,
        buckets=reduced,
        local=local,
        accessor=agreed.accessor,
        reducer=reducer,
        parameter_sync=parameter_sync,
        failures=failures,
        drift=drift,
        ending=ending,
        wrapped=agreed.wrapped,
        alike=steps_alike(agreed.manifest, plan, topology),
        keeps_state=any(keeps_state(plugin) for plugin in agreed.plugins.values()),
        keeps_equal=all(plugin.keeps_equal for plugin in agreed.plugins.values()),
    )
    master_dtype = agreed.options.master_dtype
    norm = GlobalNorm(agreed.manifest, plan, topology, master_dtype=master_dtype, tape=reducer.tape)
    return Parts(
        groups,
        reducer,
        failures,
        ending,
        parameters,
        lookup,
        parameter_sync,
        drift,
        norm,
        step,
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
        # In a pipeline, the stage before waits for the rest of this backward.
        is_patient=topology.size(topology.pipeline) == 1,
    )
    ending = Ending(
        owner, threads=reducer.comm_streams, groups=groups.own, is_local=is_local(device)
    )
    # A pair exchange may still be sending. If its group were destroyed first, another rank would
    # never receive the message.
    ending.call(reducer.submit_send_waits)
    failures = FailedSteps(notice, reducer.wait)
    return groups, reducer, ending, failures


def live_parameters(
    agreed: Agreed,
    modules: Mapping[int, nn.Module],
    trees: Mapping[int, ModuleTree],
    *,
    parameter_buffers: Mapping[str, ParameterBuffer],
) -> dict[str, LiveParameter]:
    """Returns this rank's parameters by key, with their main shards.

    Args:
        agreed: The agreed model and plan.
        modules: This rank's stages.
        trees: Find the parameters, by stage.
        parameter_buffers: Key -> the memory of the parameter, if a parameter sync may write to it.
    """
    # A tied parameter that several stages of this rank hold is one LiveParameter: `link_local` has
    # made it one object. It is final when all of these stages are.
    manifest, plan = agreed.manifest, agreed.plan
    reduced = {slot.key for bucket in plan.buckets for slot in bucket.slots}
    homes = {location: (trees[location[0]], full) for location, full, _ in named(modules)}
    main_shards = _main_shards(agreed)
    with_result = {main_range.key for main_range in plan.main_ranges}
    parameters: dict[str, LiveParameter] = {}
    for record in manifest.records(agreed.topology):
        local = {p[0]: homes[p] for p in manifest.locations(record.key) if p[0] in modules}
        parameters[record.key] = LiveParameter(
            record,
            local,
            agreed.accessor,
            is_reduced=record.key in reduced,
            has_result=record.key in with_result,
            parameter_buffer=parameter_buffers.get(record.key),
            main_shard=main_shards.get(record.key),
        )
    return parameters


def _gradients(
    agreed: Agreed, parameters: Mapping[str, LiveParameter], reducer: Reducer
) -> tuple[dict[int, GradientBucket], LocalGradients]:
    """Returns the gradients of each bucket by its number, and those that nobody reduces."""
    plan, accessor = agreed.plan, agreed.accessor
    divisors = dict(plan.divisors)
    buckets: dict[int, GradientBucket] = {}
    for bucket in plan.buckets:
        held = [parameters[slot.key] for slot in bucket.slots]
        # What is rare is decided here, once; see careful.py.
        is_rare = (
            not isinstance(accessor, GradAttribute)
            or bucket.dtype != bucket.wire_dtype
            or any(is_dtensor(p.live) for p in held)
        )
        make = partial(CarefulBucket, accessor) if is_rare else GradientBucket
        buckets[bucket.index] = make(
            held,
            reducer.buffers[bucket.index],
            mean=reducer.mean_of(bucket),
            # DistributedDataParallel reduces gradients until the end of the whole backward. Before
            # that they are not final.
            may_leave_early=agreed.manifest.reduced_by_ddp.isdisjoint(held[0].stages),
        )
    reduced = {slot.key for bucket in plan.buckets for slot in bucket.slots}
    alone = [p for k, p in parameters.items() if k not in reduced and p.record.requires_grad]
    own = [divisors.get(p.record.key, 1.0) for p in alone]
    return buckets, LocalGradients(alone, accessor, own)


def _main_shards(agreed: Agreed) -> dict[str, MainShard]:
    """Returns the main shards of this rank, by key."""
    manifest, master_dtype = agreed.manifest, agreed.options.master_dtype
    records = {record.key: record for record in manifest.records(agreed.topology)}
    return {
        main_range.key: MainShard(
            main_range,
            master_dtype_of(records[main_range.key], master_dtype),
            manifest.entries(main_range.key)[0].gradient_dtype,
        )
        for main_range in agreed.plan.main_ranges
        if main_range.sharded
        or has_main_shard(records[main_range.key], agreed.accessor, master_dtype)
    }


def _lookup(parameters: Mapping[str, LiveParameter], key: str) -> nn.Parameter:
    return parameters[key].parameter


def _with_master_copies(agreed: Agreed) -> frozenset[str]:
    """Returns the keys of all parameters that have master copies, the same on all ranks."""
    dtype = agreed.options.master_dtype
    return frozenset(
        record.key
        for record in agreed.manifest.parameters
        if record.requires_grad and master_dtype_of(record, dtype) != record.dtype
    )


def _master_copy(parameters: Mapping[str, LiveParameter], key: str) -> torch.Tensor | None:
    main_shard = parameters[key].placed.main_shard
    return main_shard.tensor if main_shard is not None and main_shard.copied else None


def _synced(parameters: Mapping[str, LiveParameter]) -> dict[str, nn.Parameter]:
    """Returns the main parameters of this rank that are sent to others, or copied, by key."""
    return _stepped({k: p for k, p in parameters.items() if p.placed.is_updated_elsewhere})


def _stepped(parameters: Mapping[str, LiveParameter]) -> dict[str, nn.Parameter]:
    """Returns all main parameters of this rank, by key."""
    tensors = {key: parameter.main_parameter for key, parameter in parameters.items()}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}
