"""GradientSync: the page to read first. Discover, agree and plan once; launch and finish each step.

sync = GradientSync({0: module}, topology, shared=find_tied(model), handlers=[...])
optimizer = AdamW(sync.optimizer_parameters())
for batch in data:
    sync.prepare()              # gradients accumulate into the buckets from here on
    sync.stage_first_use(0)     # what other ranks stepped of stage 0 is here
    ...                         # forward and backward of every microbatch
    sync.stage_final(0)         # stage 0's gradients are final: its buckets leave
    sync.finish()               # every gradient is in place
    sync.clip_grad_norm_(1.0)
    optimizer.step()
    sync.publish()              # what this rank stepped leaves for those who hold it too
    optimizer.zero_grad()
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from pipegrad.comm.agreement import AGREE_SECONDS, agree, slow_seconds
from pipegrad.comm.graph_capture import outside_of_graphs
from pipegrad.errors import StepError
from pipegrad.gradients.negotiate import Agreed
from pipegrad.gradients.norm import clip_
from pipegrad.gradients.replicas import make_equal
from pipegrad.gradients.set_up import set_up
from pipegrad.gradients.state import State, Statistics
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.model.ties import Tied
from pipegrad.model.wrappers import reshard
from pipegrad.optimizer.main_params import (
    GroupOf,
    MainParameter,
    grouped,
    refuse_unless_elementwise,
)
from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import HandlerSpec, ParameterRecord, Placement
from pipegrad.reduce.ddp_hooks import load_hook_states
from pipegrad.topology import Topology


class GradientSync:
    """Makes the gradients of a model cut over ranks what one process would have computed.

    All ranks of the topology construct it together: what one rank alone can get wrong is exchanged
    before the first collective, so all raise the same error or none does. Replicas are made equal.

    With OWNER and SHARD parameters become views of flat memory that they come back to. So save
    clones, or a whole state_dict: ``torch.save`` of one parameter writes all that lies beside it.

    Stages may be sharded by FSDP2, and parameters be DTensors: what their own mesh dimensions need
    is theirs to do, and handlers reduce local shards along others. So with FSDP2 over the data
    ranks the handlers are ``["pipeline-shared"]``, and `stage_final` comes behind its reduction.

    Gradients are views of the buckets, so that nothing is copied, and the next step writes into
    the same memory. Whatever keeps a gradient beyond the next `prepare`, an optimizer's state or
    a logger, keeps a clone of it: ``parameter.grad.clone()``.

    Some optimizers do not fit copies of one parameter: one whose step depends on all gradients of
    a rank (LBFGS is refused by name; an own one cannot be recognised), and
    ``torch.nn.utils.clip_grad_norm_``, which has the norm of one rank's gradients: use
    `clip_grad_norm_`. Copies that such a thing tears apart are an error, see `finish`.

    No verb may be called while a CUDA graph is captured; `torch.compile` leaves them out of its
    graphs.

    Args:
        modules: This rank's stages, ``{stage: module}``.
        topology: Over all ranks of the default process group.
        tied: Parameters that several stages hold: lists of names (`find_tied`), mappings
            stage -> name, or ``Pipe.replicated_params``. The same on all ranks.
        handlers: Names, tables of name and options, classes or instances.
        accessor: Where gradients live; ``parameter.grad`` by default.
        agree_seconds: How long the ranks wait for each other here. Where they may have loaded
            files before, they wait for the process group's timeout too, up to ten minutes.
        **options: Fields of `GradientOptions` by name, such as ``bucket_bytes``.

    Attributes:
        topology: As given.
        handlers: The resolved handlers by name, with distribution and version.
        manifest: What the ranks agreed on.
        plan: This rank's buckets and collectives; printable.

    Raises:
        AgreementError: If ranks disagree, or one failed or stayed away. On all ranks alike.
        PlanError: If handlers contradict each other, or leave a shared parameter uncovered.
        PluginError: If a handler cannot be used.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        topology: Topology,
        *,
        tied: Tied = (),
        handlers: Sequence[HandlerSpec],
        accessor: GradientAccessor | None = None,
        agree_seconds: float = AGREE_SECONDS,
        **options: Any,  # noqa: ANN401 - fields of GradientOptions, checked there
    ) -> None:
        agreed = Agreed(
            modules,
            topology,
            tied=tied,
            handlers=handlers,
            accessor=accessor or GradAttribute(),
            agree_seconds=agree_seconds,
            options=options,
        )
        self._agreed = agreed
        self._agree_seconds = slow_seconds(agreed.device, agree_seconds)
        self.topology = topology
        self.handlers = agreed.handlers
        self.manifest = agreed.manifest
        self.plan = agreed.plan
        parts = set_up(self, agreed, modules, agree_seconds=agree_seconds)
        self._parts = parts
        self._step = parts.step
        self._parameters = parts.parameters
        self._parameter_sync = parts.parameter_sync
        self._synchronize()

    # The verbs of a step, in order.

    @outside_of_graphs
    def prepare(self, *, divisor: float = 1.0) -> None:
        """Starts a step, or continues an accumulated one: gradients get zeroed slots to go to.

        Args:
            divisor: What this step adds to gradients is divided by it, once, when they are final:
                the number of microbatches, where each microbatch's loss is a mean. So the sum of
                all microbatches must fit into the gradient's dtype; where that is float16, divide
                the loss instead, or set ``parameter.grad_dtype`` to float32. Steps that accumulate
                may have different ones; a gradient that you set yourself is not divided.

        Sync: zeroes gradients on the current stream, and may scale those of accumulated steps: call
        backward from it, or from one that waits for it. pipegrad's own buffers are safe whichever
        streams its verbs are called on.

        Raises:
            StepError: If a gradient still is the reduced one of the step before, if a parameter is
                no longer what the ranks agreed on, if one was changed behind `publish`, or if this
                step's gradients are leaving. Try again soon: other ranks wait for some seconds.
            ReduceError: If an earlier step failed in a comm stream: its communicators are out of
                step.
        """
        self._step.prepare(divisor)

    def accumulate(self) -> AbstractContextManager[None]:
        """Steps inside only add up: nothing is final, divided or launched until one outside."""
        return self._step.accumulate()

    @property
    def is_accumulating(self) -> bool:
        """Whether this step only adds up."""
        return self._step.is_accumulating

    @property
    def is_in_step(self) -> bool:
        """Whether `prepare` was called and `finish` was not: gradients are not reduced yet."""
        return self._step.is_open

    @outside_of_graphs
    def stage_last_backward(self, stage: int) -> None:
        """Says that the next backward of `stage` is its last: parameters become final one by one.

        A shortcut, for full backward only. What it does not reach, `stage_final` does.
        """
        self._step.stage_last_backward(stage)

    @outside_of_graphs
    def parameters_final(self, stage: int, parameters: Iterable[nn.Parameter]) -> None:
        """Says that some parameters of `stage` are final, ahead of `stage_final`.

        Sync: whatever wrote their gradients must be ahead of the current stream.

        Raises:
            StepError: If one is not a parameter that the ranks agreed on.
        """
        self._step.parameters_final(stage, parameters)

    @outside_of_graphs
    def stage_final(self, stage: int) -> None:
        """Says that all of `stage` is final; buckets that are complete leave, in order.

        Sync: whatever wrote the stage's gradients must be ahead of the current stream.
        """
        self._step.stage_final(stage)

    @outside_of_graphs
    def finish(self) -> None:
        """Waits until every gradient is in place.

        A gradient that no rank contributed to is None again, as in one process. In the steps 2, 4,
        8, 16 and so on all ranks meet here, and copies of one parameter are compared, as
        `check_replicas` does; only what a few roundings a step explain is no error then, since
        machines of two kinds may round differently. Steps that only accumulate do not count.

        Sync: the current stream waits for the comm streams; the host only where collectives block
            it, and
        for the flag of each parameter that this rank has no gradient of.

        Raises:
            ReduceError: If a collective failed, on every rank that waits for one that never ends:
                within a second where collectives block the host, else when their backend gives up.
            StepError: If a stage is not final, or a gradient changed after it was.
            DriftError: If copies have drifted apart; on all ranks alike.
        """
        if self._step.finish():
            self.reshard()
            self._parts.drift.refuse_growing(self._step.statistics.steps)

    def abort(self, error: BaseException, *, begun: bool = True, final: bool = False) -> str | None:
        """Ends a step that failed: all ranks are told, and can go on with the next one.

        Gradients are None afterwards, those of steps that were accumulated as well. This rank still
        launches the collectives that are left of the step, of zeros: so no other rank waits for one
        in vain, and each of them finds out in its `finish`. The next `prepare` waits for them.

        This object is of no further use where a collective itself failed, or could not be launched,
        and where a handler has a communication hook or keeps state: what is left of the step would
        spoil it.

        Args:
            error: Why.
            begun: False if this rank did not come as far as `prepare`, or was refused there, and
                will not try this step again.
            final: Whether there is no going on after it.

        Returns:
            What a rank said that failed before this one, and so is the cause; None if none did.
        """
        return self._step.abort(error, begun=begun, final=final)

    def drop_gradients(self) -> None:
        """Takes all gradients away, those of accumulated steps as well: they are None."""
        self._step.drop_gradients()

    # After finish.

    @outside_of_graphs
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`; returns the norm.

        An infinite `max_norm` measures and scales nothing.

        A parameter counts once, however many ranks hold it, or parts of it, if its copies are
        reduced over those ranks; one that no handler reduces counts on every rank that holds it.
        The norm, and so the factor, has the same bits on all ranks: every rank must call this.

        Returns:
            The norm before clipping, an fp32 scalar; of fp64 if there are gradients of fp64.

        Sync: on the current stream; one scalar all-reduce over all ranks.
        """
        self._step.check("clip_grad_norm_")
        found = {key: p.main_gradient for key, p in self._parameters.items()}
        gradients = {key: gradient for key, gradient in found.items() if gradient is not None}
        norm = self._parts.norm.of(
            gradients, norm_type, group=self._parts.groups.world, device=self.device
        )
        if not math.isinf(max_norm):
            clip_(list(gradients.values()), norm, max_norm)
            for key in gradients:
                self._parameters[key].mark_reduced()
        return norm

    def optimizer_parameters(self, group_of: GroupOf | None = None) -> list[dict[str, Any]]:
        """Returns parameter groups of what this rank steps, for any optimizer's constructor.

        With REPLICATE that is the parameter itself. With OWNER it is too, on the owner alone. With
        SHARD it is a flat shard of it, for an optimizer that looks at each element by itself. With
        a `master_dtype` it is a copy. The gradient is where the optimizer steps: behind `finish`
        ``.grad`` of a parameter is None if the optimizer steps a shard or a copy of it. All ranks
        get the same groups, of which some may be empty: make an optimizer on every rank.

        Args:
            group_of: Record -> the options of its parameter group; records with equal options are
                in one group. By default one group has all.
        """
        self._parameter_sync.take()
        trained = [r for r in self.manifest.parameters if r.requires_grad]
        return grouped(trained, self.main_parameters(), group_of)

    def main_parameters(self) -> tuple[MainParameter, ...]:
        """Returns what this rank's optimizer steps, by stage and position."""
        return tuple(
            MainParameter(
                self._parameters[main_range.key].record,
                tensor,
                main_range.begin,
                main_range.sharded,
            )
            for main_range in self.plan.main_ranges
            if (tensor := self._parameters[main_range.key].main_parameter) is not None
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer | type) -> None:
        """Refuses an optimizer that cannot step shards of parameters, if that is what it would get.

        Any optimizer is checked before it steps; this is to know it earlier.

        Raises:
            PlanError: Names it, and those that can be taken.
        """
        if any(h.placement is Placement.SHARD for _, route in self.plan.routes for h in route):
            refuse_unless_elementwise(optimizer)

    # Parameters that come back, and replicas.

    def reshard(self) -> None:
        """Frees what FSDP2 has left gathered, so that the next forward gathers what is stepped."""
        reshard(self._agreed.wrapped)

    @outside_of_graphs
    def publish(self) -> None:
        """Sends what the optimizer has stepped to all that hold it; call it after its step.

        It returns at once: what moves arrives under the next step's forward, and is waited for at
        its first use. Where no placement moves anything this does nothing. If it is not called, the
        next verb that reads parameters does; every rank must call the same.

        Sync: behind all that the current stream has done; on the comm streams.

        Raises:
            StepError: Inside a step, or if the optimizer was not given `optimizer_parameters`.
        """
        self._step.check("publish")
        self._parameter_sync.publish()

    def publish_if_due(self) -> None:
        """Publishes what was stepped and not published yet: before an evaluation, say.

        If no rank has stepped anything since its gradients are there, it is left for later.

        Sync: where placements move parameters, one flag for all ranks; every rank must call it.
        """
        self._step.check("publish_if_due")
        if self._parameter_sync.is_needed:
            self._parameter_sync.find_if_stepped()
            self._parameter_sync.publish_if_stepped()

    @outside_of_graphs
    def stage_first_use(self, stage: int) -> None:
        """Waits for the parameters of `stage` that other ranks have published.

        Call it before the stage's first forward of a step, or of an evaluation.

        Sync: afterwards the current stream may read them; where collectives block the host, so
        does this.

        Raises:
            ReduceError: If a movement failed, on every rank that waits for it.
        """
        self._step.check("stage_first_use")
        self._parameter_sync.publish_if_stepped()
        self._parameter_sync.first_use(stage)

    @outside_of_graphs
    def wait_parameters(self) -> None:
        """Waits for all parameters of this rank: call it before reading or saving them.

        Sync: as `stage_first_use`; every rank must call it.
        """
        self._step.check("wait_parameters")
        self._parameter_sync.publish_if_due()
        self._parameter_sync.wait()

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank's handlers keep from step to step, such as error feedback.

        Empty if none keeps anything. It fits into the plan that it is of, on this rank.

        Raises:
            StepError: Inside a step.
        """
        self._step.check("state_dict")
        kept = {name: found.plugin.state_dict() for name, found in self.handlers.items()}
        kept = {name: state for name, state in kept.items() if state}
        return {"plan": self.plan.digest, "handlers": kept} if kept else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned on this rank; handlers not in it start afresh.

        Every rank must call it: a handler goes on, or starts afresh, on all ranks or on none.

        Raises:
            PlanError: On every rank, if on one it is of another plan, or of handlers that keep
                something else, or if a handler would go on here and start afresh there. Nothing
                is kept then: all handlers start afresh.
            StepError: Inside a step.
        """
        self._step.check("load_state_dict")
        load_hook_states(
            state,
            self.handlers,
            self.plan.digest,
            launching=self.plan.launching,
            ranks=sorted(self.topology.ranks),
        )

    @outside_of_graphs
    def synchronize_parameters(self) -> None:
        """Gives all replicas the bits of their lowest rank. Call it after loading a checkpoint.

        What the optimizer steps in their place takes their values.

        Sync: on the current stream; every rank must call it, outside of a step.

        Raises:
            StepError: Behind a step that is not published, or while parameters are on their way:
                what other ranks stepped would be lost, or mixed with what was loaded.
        """

        def check() -> None:
            self._step.check("synchronize_parameters")
            if self._parameter_sync.is_due or self._parameter_sync.is_moving:
                raise StepError(
                    "synchronize_parameters() while what other ranks stepped is on its way would "
                    "mix it with what was loaded: call wait_parameters() before, ahead of any "
                    "loading"
                )

        ranks, seconds = self.topology.ranks, self._agree_seconds
        agree("synchronize_parameters", check, ranks=ranks, timeout_seconds=seconds)
        self._synchronize()

    def _synchronize(self) -> None:
        self.reshard()
        parts = self._parts
        make_equal(self.plan.packs, parts.lookup, parts.groups, self.device)
        for parameter in self._parameters.values():
            parameter.settle()
        self._parameter_sync.forget()

    @outside_of_graphs
    def check_replicas(self) -> None:
        """Raises on every rank if copies of a parameter differ in a single bit.

        Sync: two integers a parameter travel, and one for all; every rank must call it, outside of
        a step.

        Raises:
            DriftError: Names parameters and ranks.
        """
        self._step.check("check_replicas")
        self.publish_if_due()
        self._parameter_sync.wait()
        self.reshard()
        self._parts.drift.refuse()

    def parameter(self, record: ParameterRecord) -> nn.Parameter:
        """Returns the live parameter of a record, looked up in its module now."""
        return self._parts.lookup(record.key)

    def records(self) -> tuple[ParameterRecord, ...]:
        """Returns the records of the parameters that this rank holds."""
        return self.manifest.records(self.topology)

    def plans(self, ranks: Sequence[int]) -> dict[int, Plan]:
        """Returns the plans of any ranks, made here."""
        return self._agreed.plans(ranks)

    @property
    def device(self) -> torch.device:
        """Where this rank's gradients are."""
        return self._agreed.device

    def statistics(self) -> Statistics:
        """Returns what the last finished step did."""
        return self._step.statistics

    def close(self) -> None:
        """Ends threads and destroys the process groups of comm streams; every rank must call it.

        Parameters that are on their way arrive before, unless a step has failed. Gradients and
        parameters stay where they are, without hooks. Every other verb raises StepError from then
        on; a second `close` does nothing.

        What is not closed ends by itself: when nothing refers to it any more, or Python exits.
        """
        if self.is_closed:
            return
        parts = self._parts
        try:
            if not self._step.is_open and not parts.failures.are_in_doubt:
                parts.reducer.settle()
                if self._parameter_sync.is_taken:
                    self.wait_parameters()
        except BaseException:
            parts.ending.note_in_vain(True)
            raise
        finally:
            self._step.close()
            parts.reducer.close()
            parts.ending.end()
            parts.groups.forget()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._step.state is State.CLOSED

    @outside_of_graphs
    def take_largest(self, values: torch.Tensor) -> None:
        """Replaces each element of `values` by the largest that any rank has there.

        Sync: on the current stream; one all-reduce. Every rank must call it, outside of a step.
        """
        self._parts.groups.take_largest(values)

    def refuse_closed(self) -> None:
        """Raises StepError behind `close`."""
        self._step.refuse_closed()
