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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pipegrad.comm.agreement import AGREE_SECONDS, agree, slow_seconds
from pipegrad.comm.ending import Ending
from pipegrad.comm.failures import FailedSteps, FailureNotice
from pipegrad.comm.graph_capture import outside_of_graphs
from pipegrad.comm.process_groups import Groups, is_local
from pipegrad.errors import PipegradError, StepError
from pipegrad.gradients.drift import DriftCheck
from pipegrad.gradients.negotiate import Agreed
from pipegrad.gradients.norm import clip_, global_norm
from pipegrad.gradients.optimizer_watch import OptimizerWatch, steps_alike
from pipegrad.gradients.parameter import LiveParameter, live_parameters
from pipegrad.gradients.replicas import make_equal
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.model.module_tree import ModuleTree
from pipegrad.model.ties import Tied
from pipegrad.model.wrappers import reshard, unwrapped
from pipegrad.optimizer.main_params import (
    GroupOf,
    Stepped,
    grouped,
    refuse_unless_elementwise,
)
from pipegrad.optimizer.param_sync import Mirror
from pipegrad.plan.plan import Plan
from pipegrad.plan.routes import is_counted
from pipegrad.plugins.handler import (
    BUCKET_BYTES,
    HandlerSpec,
    ParameterRecord,
    Placement,
    keeps_state,
)
from pipegrad.reduce.bucket_buffer import RELEASED
from pipegrad.reduce.ddp_hooks import load_kept
from pipegrad.reduce.reducer import Reducer
from pipegrad.topology import Topology


@dataclass(frozen=True)
class Statistics:
    """What the last finished step did on this rank.

    Attributes:
        steps: Steps finished so far.
        collectives: Collectives launched.
        reduced_bytes: Bytes they reduced, as gradients: a communication hook sends fewer.
        copies: Gradients copied out of a bucket; 0 where all are views.
        early: Parameters whose gradient left before their stage's backward ended.
        published_bytes: Bytes of parameters that move back after it, to this rank or from it.
        exposed_seconds: Time that `finish` was blocked, waiting for collectives; and before it
            `stage_first_use`, for parameters.
    """

    steps: int = 0
    collectives: int = 0
    reduced_bytes: int = 0
    copies: int = 0
    early: int = 0
    published_bytes: int = 0
    exposed_seconds: float = 0.0


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
        bucket_bytes: Wire bytes at which a bucket is closed.
        reduce_dtype: dtype on the wire; each gradient's own if None, which saves all copies.
        master_dtype: dtype of what the optimizer steps, and of its state, where it is not a
            parameter's own: float32 gives parameters of lower precision a master copy of what this
            rank steps of them. Each parameter's own if None: then nothing is copied.
        comm_streams: Side streams (on CPU threads), each with communicators of its own.
        allow_unsynced: Shell-style patterns of names or keys of ties that may drift apart.
        stage_ticks: For each stage when it is final, in any unit; orders the collectives. By
            default from the last stage to the first.
        shared_ticks: The same for gradients that stages on several ranks hold.
        accessor: Where gradients live; ``parameter.grad`` by default.
        agree_seconds: How long the ranks wait for each other here. Where they may have loaded
            files before, they wait for the process group's timeout too, up to ten minutes.

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
        bucket_bytes: int = BUCKET_BYTES,
        reduce_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = None,
        comm_streams: int = 2,
        allow_unsynced: Sequence[str] = (),
        stage_ticks: Sequence[int] | None = None,
        shared_ticks: Sequence[int] | None = None,
        accessor: GradientAccessor | None = None,
        agree_seconds: float = AGREE_SECONDS,
    ) -> None:
        agreed = Agreed(
            modules,
            topology,
            tied=tied,
            handlers=handlers,
            accessor=accessor or GradAttribute(),
            master_dtype=master_dtype,
            agree_seconds=agree_seconds,
            options={
                "bucket_bytes": bucket_bytes,
                "reduce_dtype": reduce_dtype,
                "comm_streams": comm_streams,
                "allow_unsynced": allow_unsynced,
                "stage_ticks": stage_ticks and list(stage_ticks),
                "shared_ticks": shared_ticks and list(shared_ticks),
            },
        )
        self._agreed = agreed
        self._agree_seconds = slow_seconds(agreed.device, agree_seconds)
        self.topology = topology
        self.handlers = agreed.handlers
        self.manifest = agreed.manifest
        self.plan = agreed.plan
        self._routes = dict(agreed.plan.routes)
        self._device = agreed.device
        ranks = sorted(topology.ranks)
        notice = FailureNotice(agreed.name)
        self._groups = Groups(
            self.plan.groups,
            ranks=ranks,
            rank=topology.rank,
            device=self._device,
            handed=self.plan.chains,
        )
        self._reducer = Reducer(
            self.plan,
            comm_streams=comm_streams,
            groups=self._groups,
            handlers=agreed.plugins,
            notice=notice,
            device=self._device,
        )
        self._ending = Ending(
            self,
            threads=self._reducer.comm_streams,
            groups=self._groups.made,
            is_local=is_local(self._device),
        )
        # Else destroying a group would take what another rank has not received yet.
        self._ending.call(self._reducer.let_leave)
        self._failed = FailedSteps(notice, self._reducer.wait)
        self._keep_state = any(keeps_state(plugin) for plugin in agreed.plugins.values())
        self._keep_equal = all(plugin.keeps_equal for plugin in agreed.plugins.values())
        self._mirror = Mirror(
            self.plan, reducer=self._reducer, groups=self._groups, device=self._device
        )
        self._trees = {stage: ModuleTree(unwrapped(module)) for stage, module in modules.items()}
        self._parameters = live_parameters(
            agreed,
            modules,
            self._trees,
            buffers=self._reducer.buffer_of,
            mirrored=self._mirror.buffer_of,
        )
        self._lookup = partial(_lookup, self._parameters)  # no method: a cycle would keep threads
        self._drift = DriftCheck(
            self.plan.packs,
            self._lookup,
            groups=self._groups,
            ranks=ranks,
            agree_seconds=self._agree_seconds,
        )
        self._by_stage: dict[int, list[LiveParameter]] = {stage: [] for stage in sorted(modules)}
        for parameter in reversed(self._parameters.values()):
            for stage in sorted(parameter.stages):
                self._by_stage[stage].append(parameter)
        entries = (e for r in self.manifest.parameters for e in self.manifest.entries(r.key))
        dtypes = {master_dtype, *(entry.gradient_dtype for entry in entries)}
        double = dtypes & {torch.float64, torch.complex128}  # anywhere: all ranks sum in one dtype
        self._norm_dtype = torch.float64 if double else torch.float32
        self._stand_ins = [p.stand_in for p in self._parameters.values() if p.stand_in]
        self._statistics = Statistics()
        self._accumulating = False
        self._adds_up = False  # whether the step at hand began as one that only adds up
        self._open = False
        self._is_closed = False
        self._last_backwards: set[int] = set()
        self._final_stages: set[int] = set()
        self._late_error: StepError | None = None
        self._asked = False  # for what the optimizer is to step
        self._synchronize()
        alike = steps_alike(self.manifest, self.plan, topology)
        live = self._parameters.values()
        self._watch = OptimizerWatch(live, alike=alike, on_refusal=self._refused)

    # The verbs of a step, in order.

    @outside_of_graphs
    def prepare(self, *, divisor: float = 1.0) -> None:
        """Starts a step, or continues an accumulated one: gradients get zeroed slots to go to.

        Args:
            divisor: What this step adds to gradients is divided by it, once, when they are final:
                the number of microbatches, where each microbatch's loss is a mean. So the sum of
                all microbatches must fit into the gradient's dtype; where that is float16, divide
                the loss instead, or accumulate in float32 (`Float32Grad`). Steps that accumulate
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
        self.refuse_closed()
        with self._failed.refusing():
            self._prepare(divisor)

    def _prepare(self, divisor: float) -> None:
        self._failed.refuse()
        if self._open and any(p.final for p in self._parameters.values()):
            raise StepError("prepare() inside a step whose gradients are leaving: call finish()")
        if self._mirror.is_due:
            self.publish()
        self._mirror.check_published()
        if not self._open:  # else FSDP2 may go on with what it has gathered
            self.reshard()
        self._refresh()
        self._failed.begin()
        self._late_error = None
        zeroed = {
            key: p for key, p in self._parameters.items() if p.open(divisor, continuing=self._open)
        }
        for buffer in self._reducer.buffers.values():
            buffer.reset([key for key in buffer.views if key in zeroed])
        for parameter in zeroed.values():
            parameter.use_view()
        for parameter in self._parameters.values():
            parameter.watch(self._on_accumulated)
        self._reducer.begin()
        if not self._accumulating:
            self._reducer.expect()
        self._last_backwards.clear()
        self._final_stages.clear()
        self._by_id = {id(p.live): p for p in self._parameters.values()}
        self._watch.follow(self._by_id)
        self._adds_up = self._accumulating
        self._open = self._ending.in_vain = True

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Steps inside only add up: nothing is final, divided or launched until one outside."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @property
    def is_accumulating(self) -> bool:
        """Whether this step only adds up."""
        return self._accumulating

    @property
    def is_in_step(self) -> bool:
        """Whether `prepare` was called and `finish` was not: gradients are not reduced yet."""
        return self._open

    @outside_of_graphs
    def stage_last_backward(self, stage: int) -> None:
        """Says that the next backward of `stage` is its last: parameters become final one by one.

        A shortcut, for full backward only. What it does not reach, `stage_final` does.
        """
        self._check_open(stage)
        if not self._accumulating:
            self._last_backwards.add(stage)

    @outside_of_graphs
    def parameters_final(self, stage: int, parameters: Iterable[nn.Parameter]) -> None:
        """Says that some parameters of `stage` are final, ahead of `stage_final`.

        Sync: whatever wrote their gradients must be ahead of the current stream.

        Raises:
            StepError: If one is not a parameter that the ranks agreed on.
        """
        self._check_open(stage)
        if self._accumulating:
            return
        for parameter in parameters:
            found = self._by_id.get(id(parameter))
            if found is None or stage not in found.stages:
                raise StepError(
                    f"a parameter of shape {tuple(parameter.shape)} is none of those of stage "
                    f"{stage} that the ranks agreed on: make a new GradientSync on all ranks"
                )
            self._leave(found, stage)

    @outside_of_graphs
    def stage_final(self, stage: int) -> None:
        """Says that all of `stage` is final; buckets that are complete leave, in order.

        Sync: whatever wrote the stage's gradients must be ahead of the current stream.
        """
        self._check_open(stage)
        if self._accumulating:
            return
        if stage in self._final_stages:
            raise StepError(f"stage {stage} is final already: call stage_final() once a step")
        self._final_stages.add(stage)
        self._last_backwards.discard(stage)
        for parameter in self._by_stage[stage]:
            self._leave(parameter, stage)

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
        self.refuse_closed()
        if self._accumulating:
            self._failed.end()
            return
        if not self._open:
            raise StepError("finish() without prepare(): there is no step to finish")
        with self._failed.refusing():
            unfinished = sorted({s for p in self._parameters.values() for s in p.waiting})
            if unfinished:
                raise StepError(f"finish() before stage_final() of stages {unfinished}")
        try:
            if self._late_error is not None:
                raise self._late_error
            exposed_seconds = self._reducer.wait()
            if compares := self._keep_equal and self._drift.is_due(self._failed.step):
                self._reducer.wait_for(self._reducer.meet())
            self._reducer.refuse_failed()
        except BaseException as error:
            self.abort(error)
            raise
        parameters = self._parameters.values()
        early = sum(parameter.left_early for parameter in parameters)
        copies = sum(parameter.finish() for parameter in parameters)
        for buffer in self._reducer.buffers.values():
            buffer.release(RELEASED)
        self._open = self._ending.in_vain = False
        if self._agreed.moves:
            self._mirror.expect(self._moved())
        self._failed.end()
        launched = self._reducer.num_launched
        assert launched == len(self.plan.launches)
        self._statistics = Statistics(
            steps=self._statistics.steps + 1,
            collectives=launched,
            reduced_bytes=self.plan.reduced_bytes,
            copies=copies,
            early=early,
            published_bytes=self.plan.published_bytes,
            exposed_seconds=exposed_seconds + self._mirror.blocked_seconds,
        )
        self._mirror.blocked_seconds = 0.0
        if compares:
            self.reshard()
            self._drift.refuse_growing(self._statistics.steps)

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
        if self._is_closed:
            return None
        if self._failed.knows(error):
            return self._failed.cause()
        if not begun:
            self._failed.settle()
            if self._failed.are_final:
                return None  # `prepare` has told
        is_left, self._open = self._open or not begun, False
        reduces = is_left and not (self._adds_up if begun else self._accumulating)
        launches = reduces and bool(self.plan.launches)
        final = final or (launches and (self._keep_state or self._reducer.has_failed))
        cause = self._failed.tell(error, begun=begun, final=final)
        if is_left:
            self.drop_gradients()
        if reduces and not final:
            # In the order of a step that ends: the collectives, the meeting, the parameters that
            # other ranks may publish behind it.
            if launches:
                self._give_up(begun=begun)
            if self._keep_equal and self._drift.is_due(self._failed.step):
                self._reducer.meet()
            if launches:
                self._mirror.send()
        return cause

    def drop_gradients(self) -> None:
        """Takes all gradients away, those of accumulated steps as well: they are None."""
        self._open = False
        for parameter in self._parameters.values():
            parameter.drop()

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
        self._check_closed("clip_grad_norm_")
        found = {key: p.stepped_gradient for key, p in self._parameters.items()}
        gradients = {key: gradient for key, gradient in found.items() if gradient is not None}
        norm = global_norm(
            [g for key, g in gradients.items() if self._is_counted(key)],
            norm_type,
            group=self._groups.world,
            device=self._device,
            dtype=self._norm_dtype,
        )
        if not math.isinf(max_norm):
            clip_(list(gradients.values()), norm, max_norm)
            for key in gradients:
                self._parameters[key].mark_reduced()
        return norm

    def optimizer_parameters(self, group_of: GroupOf | None = None) -> list[dict[str, Any]]:
        """Returns parameter groups of what this rank steps, for any optimizer's constructor.

        With REPLICATE that is the parameter itself; with OWNER likewise, on the owner; with SHARD a
        flat row of it, for an optimizer that looks at each element by itself; with a stored dtype a
        copy. Gradients are where they are stepped: of parameters that something stands in for,
        ``.grad`` is None after `finish`. All ranks get the same groups, of which some may be empty:
        make an optimizer on every rank.

        Args:
            group_of: Record -> the options of its parameter group; records with equal options are
                in one group. By default one group has all.
        """
        self._asked = True
        trained = [r for r in self.manifest.parameters if r.requires_grad]
        return grouped(trained, self.stepped(), group_of)

    def stepped(self) -> tuple[Stepped, ...]:
        """Returns what this rank's optimizer steps, by stage and position."""
        return tuple(
            Stepped(self._parameters[share.key].record, tensor, share.begin, share.sharded)
            for share in self.plan.shares
            if (tensor := self._parameters[share.key].stepped) is not None
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer | type) -> None:
        """Refuses an optimizer that cannot step rows of parameters, if that is what it would get.

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
        self._check_closed("publish")
        if self._agreed.moves and not self._asked:
            raise StepError(
                "some gradients live on other ranks, in rows or in another dtype, and nobody has "
                "asked for what this rank steps: give the optimizer sync.optimizer_parameters(), "
                "not module.parameters()"
            )
        self._mirror.publish(self._stand_ins, self._moved())

    def publish_if_due(self) -> None:
        """Publishes what was stepped and not published yet: before an evaluation, say.

        If no rank has stepped anything since its gradients are there, it is left for later.

        Sync: where placements move parameters, one flag for all ranks; every rank must call it.
        """
        self.refuse_closed()
        if self._agreed.moves:
            self._mirror.ask()
            if self._mirror.is_due and not self._mirror.can_wait:
                self.publish()

    @outside_of_graphs
    def stage_first_use(self, stage: int) -> None:
        """Waits for the parameters of `stage` that other ranks have published.

        Call it before the stage's first forward of a step, or of an evaluation.

        Sync: afterwards the current stream may read them; where collectives block the host, so
        does this.

        Raises:
            ReduceError: If a movement failed, on every rank that waits for it.
        """
        self.refuse_closed()
        if self._mirror.is_due and not self._mirror.can_wait:
            self.publish()
        self._mirror.first_use(stage)

    @outside_of_graphs
    def wait_parameters(self) -> None:
        """Waits for all parameters of this rank: call it before reading or saving them.

        Sync: as `stage_first_use`; every rank must call it.
        """
        self._check_closed("wait_parameters")
        if self._mirror.is_due:
            self.publish()
        self._mirror.wait()

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank's handlers keep from step to step, such as error feedback.

        Empty if none keeps anything. It fits into the plan that it is of, on this rank.

        Raises:
            StepError: Inside a step.
        """
        self._check_closed("state_dict")
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
        self._check_closed("load_state_dict")
        hops = {bucket.index: bucket.route for bucket in self.plan.buckets}
        launching = {hops[launch.bucket][launch.hop].handler for launch in self.plan.launches}
        ranks = sorted(self.topology.ranks)
        load_kept(state, self.handlers, self.plan.digest, launching=launching, ranks=ranks)

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
            self._check_closed("synchronize_parameters")
            if self._mirror.is_due or self._mirror.is_moving:
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
        make_equal(self.plan.packs, self._lookup, self._groups, self._device)
        for parameter in self._parameters.values():
            parameter.settle()
        self._mirror.forget()

    @outside_of_graphs
    def check_replicas(self) -> None:
        """Raises on every rank if copies of a parameter differ in a single bit.

        Sync: two integers a parameter travel, and one for all; every rank must call it, outside of
        a step.

        Raises:
            DriftError: Names parameters and ranks.
        """
        self._check_closed("check_replicas")
        self.publish_if_due()
        self._mirror.wait()
        self.reshard()
        self._drift.refuse()

    def parameter(self, record: ParameterRecord) -> nn.Parameter:
        """Returns the live parameter of a record, looked up in its module now."""
        return self._lookup(record.key)

    def records(self) -> tuple[ParameterRecord, ...]:
        """Returns the records of the parameters that this rank holds."""
        return self.manifest.records(self.topology)

    def plans(self, ranks: Sequence[int]) -> dict[int, Plan]:
        """Returns the plans of any ranks, made here."""
        return self._agreed.plans(ranks)

    @property
    def device(self) -> torch.device:
        """Where this rank's gradients are."""
        return self._device

    def statistics(self) -> Statistics:
        """Returns what the last finished step did."""
        return self._statistics

    def close(self) -> None:
        """Ends threads and destroys the process groups of comm streams; every rank must call it.

        Parameters that are on their way arrive before, unless a step has failed. Gradients and
        parameters stay where they are, without hooks. Every other verb raises StepError from then
        on; a second `close` does nothing.

        What is not closed ends by itself: when nothing refers to it any more, or Python exits.
        """
        if self._is_closed:
            return
        try:
            if not self._open and not self._failed.are_in_doubt:
                self._reducer.settle()
                if self._asked:
                    self.wait_parameters()
        except BaseException:
            self._ending.in_vain = True
            raise
        finally:
            self._is_closed = True
            self._watch.remove()
            for parameter in self._parameters.values():
                parameter.unwatch()
            self._reducer.close()
            self._ending.end()
            self._groups.forget()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @outside_of_graphs
    def take_largest(self, values: torch.Tensor) -> None:
        """Replaces each element of `values` by the largest that any rank has there.

        Sync: on the current stream; one all-reduce. Every rank must call it, outside of a step.
        """
        self._groups.take_largest(values)

    # Inside.

    def _refused(self, error: PipegradError) -> None:
        """Tells ranks that do not step, and go on, of an optimizer that is refused on this one."""
        if not self._open:
            self.abort(error, begun=False)

    def _refresh(self) -> None:
        """Looks up what this step begins with, and refuses what would make it wrong."""
        for tree in self._trees.values():
            tree.check()
        for buffer in self._reducer.buffers.values():
            buffer.look_again()
        for parameter in self._parameters.values():
            parameter.refresh(continuing=self._open)

    def _on_accumulated(self, parameter: LiveParameter) -> None:
        """Called by autograd, possibly in its own threads, after each accumulation."""
        if not parameter.waiting <= self._last_backwards or not self._open:
            return
        parameter.firings += 1
        if parameter.final:
            self._late_error = StepError(
                f"autograd added to the gradient of {parameter.record.key!r} after it was final; "
                f"a module that runs backward inside backward must do so in every step, and where "
                f"a stage has several backwards (an auxiliary loss, say) stage_last_backward() is "
                f"called before the very last one, or not at all"
            )
        elif parameter.early and parameter.fires_last:
            self._finalize(parameter)

    def _leave(self, parameter: LiveParameter, stage: int) -> None:
        """Finalizes a parameter, if no other local stage will still add to it."""
        parameter.waiting.discard(stage)
        if not parameter.waiting and not parameter.final:
            self._finalize(parameter)

    def _finalize(self, parameter: LiveParameter) -> None:
        try:
            gradient = parameter.close()
        except StepError as error:  # `finish` raises it and tells the ranks that wait for this one
            self._late_error = self._late_error or error
            return
        if parameter.buffer is not None:
            self._reducer.announce(
                parameter.record.key, gradient, contributed=parameter.contributed
            )

    def _moved(self) -> dict[str, nn.Parameter]:
        """What this rank's optimizer steps of what other ranks hold too, or in another dtype."""
        found = {key: p.stepped for key, p in self._parameters.items() if p.moves}
        return {key: tensor for key, tensor in found.items() if tensor is not None}

    def _give_up(self, *, begun: bool) -> None:
        """Launches what is left of a step that failed, and what `prepare` would have."""
        if not begun:
            if self._mirror.is_due and self._asked:
                self.publish()
            self._reducer.begin()
            for buffer in self._reducer.buffers.values():
                buffer.reset(list(buffer.views))
            self._reducer.expect()
        self._reducer.give_up()

    def _is_counted(self, key: str) -> bool:
        """Whether this rank's gradient counts, of those that are the same."""
        return is_counted(self._routes.get(key, ()), self.topology.rank) and (
            self.manifest.is_counted(self.topology.rank, key)
        )

    def _check_closed(self, verb: str) -> None:
        """Refuses what would run collectives between those of a step: ranks would mix them up."""
        self.refuse_closed()
        if self._open:
            raise StepError(f"{verb}() inside a step: call finish() first")

    def refuse_closed(self) -> None:
        """Raises StepError behind `close`."""
        if self._is_closed:
            raise StepError("this GradientSync is closed: make another one, on all ranks")

    def _check_open(self, stage: int) -> None:
        self.refuse_closed()
        if stage not in self._by_stage:
            raise StepError(f"stage {stage} is not on this rank, which has {list(self._by_stage)}")
        if not self._open:
            raise StepError(
                f"stage {stage} cannot become final outside a step: call prepare() first"
            )
        if stage in self._mirror.coming:
            raise StepError(
                f"stage {stage} has computed while its parameters were on their way: call "
                f"stage_first_use({stage}) before its first forward"
            )


def _lookup(parameters: Mapping[str, LiveParameter], key: str) -> nn.Parameter:
    return parameters[key].parameter
