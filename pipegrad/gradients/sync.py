"""GradientSync: discover, agree and plan once; launch and finish each step (step.py).

sync = GradientSync({0: module}, topology, tied=find_tied(model), handlers=[...])
optimizer = sync.optimizer(torch.optim.AdamW, lr=1e-3)
for batch in data:
    sync.prepare()              # from here on, gradients move into the buckets
    sync.stage_first_use(0)     # waits for parameters of stage 0 that other ranks have updated
    ...                         # forward and backward of every microbatch
    sync.stage_final(0)         # the gradients of stage 0 are final: launches its buckets
    sync.finish()               # waits: every gradient is in place
    sync.clip_grad_norm_(1.0)
    optimizer.step()            # sends the parameters that this rank has updated
    optimizer.zero_grad()
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Never, Unpack

import torch
import torch.distributed as dist
from torch import nn

from pipegrad.comm.agreement import AGREE_SECONDS, agree, agree_keeping, same, slow_seconds
from pipegrad.comm.comm_stream import outside_of_graphs
from pipegrad.comm.watch import watch
from pipegrad.errors import AgreementError, PlanError, StepError, in_words
from pipegrad.gradients.drift import make_equal
from pipegrad.gradients.main_params import (
    GroupOf,
    Locations,
    MainParameter,
    NamedGroupOf,
    group_keys,
    grouped,
)
from pipegrad.gradients.named_optimizer import (
    Optimizer,
    named_optimizer,
    parts_of,
    refuse_given,
)
from pipegrad.gradients.norm import NonFinite, clip_, merge_non_finite, non_finite_keys
from pipegrad.gradients.optimizer_watch import Gradients
from pipegrad.gradients.set_up import negotiate
from pipegrad.gradients.step import State, Statistics, Step
from pipegrad.model.dtensor import local
from pipegrad.model.main_grad import MainGrad
from pipegrad.model.ties import Tied
from pipegrad.model.wrappers import reshard
from pipegrad.plan.options import SyncKeywords
from pipegrad.plugins.handler import (
    HandlerSpec,
    OuterOptimizer,
    ParameterRecord,
)
from pipegrad.topology import Topology

if TYPE_CHECKING:
    from pipegrad.gradients.grad_scaler import GradScaler
    from pipegrad.gradients.parameter import Param


class GradientSync(Step):
    """Makes the gradients of a model that is cut over ranks equal to the gradients of one process.

    All ranks of the topology construct it together. All ranks raise the same error, or none,
    because they compare everything that can be wrong on one rank before the first collective.
    Replicas are made equal.

    With OWNER, WHOLE and SHARD, parameters become views of flat memory. Save clones then, or a
    whole state_dict, because ``torch.save`` of one parameter writes the whole flat memory.

    Stages may be sharded by FSDP2, and parameters may be DTensors. They reduce over their mesh
    dimensions themselves, and handlers reduce local shards along the other dimensions. For example,
    with FSDP2 over the data ranks, the handlers are ``["pipeline-shared"]``. Call `stage_final`
    after the reduction of FSDP2.

    If you use a gradient after the next `prepare`, for example in a logger, clone it by
    ``parameter.grad.clone()``, because gradients are views of the buckets, and the next step writes
    into the same memory. With SHARD the gradient of a parameter is None after a step, and with
    WHOLE on all ranks but its owner.

    Do not use an optimizer whose step depends on all gradients of a rank, because it makes copies
    of a parameter different. A step of LBFGS raises PlanError; your own optimizer cannot be
    recognised. Use `clip_grad_norm_` instead of ``torch.nn.utils.clip_grad_norm_``, because torch's
    function computes the norm of one rank's gradients. Copies that have become different are an
    error; see `finish`.

    No verb may be called while a CUDA graph is captured. `torch.compile` does not trace verbs.

    Args:
        modules: This rank's stages, ``{stage: module}``.
        topology: The topology of all ranks of the default process group.
        tied: Parameters that several stages hold: lists of names (`find_tied`), mappings
            stage -> name, or ``Pipe.replicated_params``. The same on all ranks.
        handlers: Names, tables of name and options, classes or instances.
        accessor: The place of gradients: `MainGrad`, or None for ``parameter.grad``.
        agree_seconds: Timeout of ranks that wait for each other. After methods that may load files,
            the timeout of the process group, up to ten minutes, if that is longer.
        **options: Fields of `GradientOptions` by name, such as ``bucket_bytes``.

    Attributes:
        agreed: The agreed model, handlers and plan, and the plans of any ranks; for tools.
        topology: The topology.
        manifest: The agreed model.
        name: Equal on all ranks, and different for each GradientSync.
        plan: This rank's buckets and collectives; printable.
        device: Device of this rank's gradients.
        tape: Forwards times of this rank to a recorder, if there is one.
        outer_optimizer: Joins replicas that train alone; None if there are none.
        stateful: The objects whose states `state_dict` has, by name: handlers, and what a
            `Scheduler` keeps for codecs.

    Raises:
        AgreementError: On all ranks, if ranks disagree, or a rank failed or did not arrive.
        PlanError: If handlers contradict each other, or do not reduce a tied parameter.
        PluginError: If a handler cannot be used.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        topology: Topology,
        *,
        tied: Tied = (),
        handlers: Sequence[HandlerSpec],
        accessor: MainGrad | None = None,
        agree_seconds: float = AGREE_SECONDS,
        **options: Unpack[SyncKeywords],
    ) -> None:
        agreed = negotiate(
            modules,
            topology,
            tied=tied,
            handlers=handlers,
            main_grad=accessor,
            agree_seconds=agree_seconds,
            options=options,
        )
        self.topology = topology
        self._ranks = sorted(topology.ranks)
        self.manifest = agreed.manifest
        self.device = agreed.device
        self._agree_seconds = slow_seconds(agreed.device, agree_seconds)
        super().__init__(agreed, modules, agree_seconds=self._agree_seconds)
        self.tape = self._reducer.tape
        self.stateful: dict[str, Any] = dict(agreed.plugins)
        self.outer_optimizer = self._outer_optimizer()
        if self.outer_optimizer is not None:
            self.stateful[self.plan.independent_by] = self.outer_optimizer
        self._synchronize()
        self._watch.start()
        _every.add(self)
        watch()

    # After finish.

    @outside_of_graphs
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients by one factor if their global norm is above `max_norm`.

        Call ``sync.clip_grad_norm_(1.0)`` on all ranks, between `finish` and the optimizer's step.
        With an infinite `max_norm` it only measures. With a `GradScaler` that has not unscaled in
        this step, it first calls `GradScaler.unscale_` for the optimizer that `optimizer` made
        last. If gradients overflow, the norm is not finite, and `GradScaler.step` skips the step.

        A parameter counts once if its copies, or parts, are reduced over the ranks that hold it. If
        no handler reduces it, it counts on each of these ranks. The norm and the factor have the
        same bits on all ranks. If replicas train alone, the bits are equal on the ranks of one
        replica, because each replica has a separate norm. If a gradient of any replica is not
        finite, the norm is not finite on any rank.

        Returns:
            The norm before clipping, an fp32 scalar; fp64 if there are fp64 gradients.

        Sync: on the current stream; one all-reduce of a number for each rank, after the all-reduce
        of `GradScaler.unscale_`, for which the host waits.

        Raises:
            StepError: Inside a step, or after the step of an optimizer of `optimizer`. With a
                `GradScaler`, as its `unscale_`; and on all ranks if that was not called, and there
                is no optimizer of `optimizer`.
        """
        self._check("clip_grad_norm_")
        if self._watch.gradients is Gradients.USED and not math.isinf(max_norm):
            raise StepError(
                "clip_grad_norm_() after optimizer.step(), which has used the gradients: call it "
                "before"
            )
        with self.bounded("clip_grad_norm_()"):
            if (scaler := self.scaler) is not None:
                scaler.unscale_to_clip(self._watch.optimizer())
            gradients = self._main_gradients()
            norm = self._norm.of(gradients, norm_type, self._groups, self.device)
        if not math.isinf(max_norm):
            clip_(list(gradients.values()), norm, max_norm)
            self._watch.note_results()  # these changes are pipegrad's
        return norm

    @outside_of_graphs
    def non_finite(self) -> tuple[NonFinite, ...]:
        """Returns the parameters whose gradient is not finite, by stage; the same on all ranks.

        Call it if the norm that `clip_grad_norm_` returns is not finite. All ranks call it, or
        none, because the norm is not finite on any rank then. The result is empty if each gradient
        is finite, and the norm is too large for its dtype. Clipping to a number makes the other
        gradients zero if the norm is infinite, and leaves them if it is not a number. You may skip
        the step::

            norm = sync.clip_grad_norm_(1.0)
            if norm.isfinite():
                optimizer.step()
            else:
                print("skipped:", *sync.non_finite())
            optimizer.zero_grad()

        The next step compares copies: a copy that was changed is one cause.

        Sync: on the current stream, for which the host waits. It sends names over the store, no
        tensors. Every rank must call it, outside of a step.

        Raises:
            StepError: Inside a step.
            AgreementError: On all ranks, if a rank does not call it.
        """
        self._check("non_finite")
        replies = agree(
            "non_finite",
            lambda: non_finite_keys(self._main_gradients()),
            ranks=self._ranks,
            timeout_seconds=self._agree_seconds,
        )
        self._drift.look_next_step()
        return merge_non_finite(self.manifest, dict(zip(self._ranks, replies, strict=True)))

    def _main_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients of this rank's main parameters, by key; of DTensors, its parts."""
        return {
            key: local(gradient)
            for key, parameter in self._parameters.items()
            if parameter.main is not None and (gradient := parameter.result) is not None
        }

    def scale_by(self, scaler: GradScaler) -> None:
        """Makes `scaler` the scaler of these gradients, as long as the caller keeps it.

        One that is disabled ends the use of another one.
        """
        self._watch.scaler = weakref.ref(scaler) if scaler.is_enabled() else lambda: None

    @property
    def scaler(self) -> GradScaler | None:
        """The `GradScaler` of these gradients; None if there is none, or if it is disabled."""
        return self._watch.scaler()

    # The optimizer.

    def optimizer(
        self,
        kind: Callable[..., Optimizer],
        *parameters: Never,
        group_of: NamedGroupOf | None = None,
        others: Callable[..., torch.optim.Optimizer] | None = None,
        **options: Any,  # noqa: ANN401 - those of `kind`
    ) -> Optimizer:
        """Returns an optimizer of this rank's main parameters, for any placement.

        All ranks make it together. An ordinary loop is complete with it, because it publishes after
        each of its steps, as `publish` does. Its ``state_dict()`` has names of the uncut model, not
        numbers. ``load_state_dict`` reads it on any cut that steps the same elements on this rank,
        and reads whole parameters' state on any cut. `torch.distributed.checkpoint` writes it, and
        reads it into any cut with the same parameters in shards, because the state of a shard is
        flat. To resume, load the model, call `synchronize_parameters`, and load this last, because
        with a `master_dtype` it has the master copies.

        To change parameters right after a step, before other ranks get them, use a hook of the
        optimizer's ``register_step_post_hook``.

        Args:
            kind: A class of torch.optim, or any function that takes parameter groups and `options`.
            *parameters: None may be passed, because `group_of` gives parameters their options.
            group_of: Name and parameter -> options of the parameter's group, or None. Each
                parameter is a tensor on the meta device, with a shape and a dtype but no values,
                because the function gets the parameters of all ranks. Names are from the uncut
                model; if several stages use one name, it begins with the stage: ``"1.weight"``.
            others: If it is given, `kind` steps matrices alone, and this class or function steps
                everything else, for example ``others=partial(torch.optim.AdamW, lr=3e-4)``. The
                handler ``owned`` lists the matrices; without it, `ParameterRecord.is_matrix`
                decides. The result is one optimizer, with the groups of both.
            **options: Arguments of `kind`, equal on all ranks.

        Raises:
            PlanError: On all ranks, if no parameter is trained, if parameters are given, if it
                cannot step shards, or if there are `others` and no matrix.
            AgreementError: On all ranks, if ranks differ, or one of them fails.
            StepError: In its ``step()``, if there are no gradients that were not used yet.
            PlanError: In its ``load_state_dict()``, if the state is of another model, has other
                groups or elements, or lacks a parameter's state.
        """

        def make() -> tuple[Any, str]:
            self.refuse_closed()
            refuse_given(parameters, options)
            locations = Locations(self.topology, self.plan)
            parts = parts_of(
                kind,
                options,
                others,
                records=[r for r in self.manifest.parameters if r.requires_grad],
                matrices=self.plan.matrices,
            )
            return named_optimizer(
                parts,
                group_of,
                sharded=self.plan.sharded,
                main_parameters=self.main_parameters(),
                locations={r.key: locations.of(r.key) for r in self.records()},
            )

        optimizer: Optimizer
        optimizer, replies = agree_keeping(
            "the optimizer", make, ranks=self._ranks, timeout_seconds=self._agree_seconds
        )
        same("the optimizer", dict(zip(self._ranks, replies, strict=True)))
        self._parameter_sync.is_taken = True
        self._watch.add(optimizer)
        return optimizer

    def optimizer_parameters(self, group_of: GroupOf | None = None) -> list[dict[str, Any]]:
        """Returns parameter groups of this rank's main parameters, for an optimizer's constructor.

        Use it for optimizers of another kind, or several, and call `publish` after their steps. For
        one optimizer, `optimizer` is enough.

        With REPLICATE these are the parameters; with OWNER and WHOLE, the parameters that this rank
        owns. With SHARD they are flat shards, for an optimizer that treats each element separately.
        With a `master_dtype` they are copies. After `finish`, the ``.grad`` of a parameter is None
        if the optimizer steps a shard or a copy of it, because the main parameter has the gradient.
        Make an optimizer on every rank, because all ranks get the same groups, some of them empty.

        Args:
            group_of: Record -> the options of its parameter group. Records with equal options are
                in the same group. By default there is one group.
        """
        self._parameter_sync.is_taken = True
        trained = [r for r in self.manifest.parameters if r.requires_grad]
        return grouped(group_keys(trained, group_of), self.main_parameters())

    def main_parameters(self) -> tuple[MainParameter, ...]:
        """Returns the main parameters of this rank, by stage and position."""
        return tuple(p.main for p in self._parameters.values() if p.main is not None)

    # Parameter sync, and replicas.

    def reshard(self) -> None:
        """Frees parameters that FSDP2 has left gathered; the next forward gathers new values."""
        reshard(self._wrapped)

    @outside_of_graphs
    def publish(self) -> None:
        """Sends the parameters that this rank has updated. Call it after the optimizer's step.

        An optimizer of `optimizer` calls it automatically. A second call after the same step does
        nothing. It returns at once. The parameters arrive during the next step's forward, and
        `stage_first_use` waits for them. Without placements and master copies it does nothing. If
        you do not call it, the next method that reads parameters does. All ranks must make the same
        calls.

        Call it before an evaluation, too. An optimizer that steps after it with the same gradients
        raises StepError.

        Sync: on the comm streams, after everything on the current stream.

        Raises:
            StepError: If the gradients of a step were not published, and `optimizer_parameters` was
                never called.
        """
        self._check("publish")
        self._parameter_sync.publish()

    @outside_of_graphs
    def wait_parameters(self) -> None:
        """Waits for all parameters of this rank. Call it before you read or save them.

        Sync: as `stage_first_use`; every rank must call it.
        """
        self._check("wait_parameters")
        with self.bounded("wait_parameters()"):
            self._parameter_sync.publish()
            self._parameter_sync.wait()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of this rank's handlers from step to step, such as error feedback.

        It is empty if no handler has a state. It can be loaded on the same rank, with the same
        plan. If replicas train alone, it has this rank's parameters too while they differ.

        Raises:
            StepError: Inside a step, or if parameters were updated and not published.
        """
        self._check("state_dict")
        if self.outer_optimizer is not None and self._parameter_sync.is_due:
            raise StepError(
                "state_dict() before the step of the optimizer was published, so the outer "
                "optimizer has not run: call wait_parameters() before, on all ranks"
            )
        states = {name: of.state_dict() for name, of in self.stateful.items()}
        states = {name: state for name, state in states.items() if state}
        return {"plan": self.plan.digest, "handlers": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a result of `state_dict` of this rank; other handlers start anew.

        Every rank must call it, because a handler continues on all ranks, or starts anew on all
        ranks. Call it last, after `synchronize_parameters` and after the optimizer's state was
        loaded, because a replica that trains alone gets its parameters back.

        Raises:
            PlanError: On every rank, if the state of a rank is of another plan or of other
                handlers, or if a handler would continue only on some ranks. Then all handlers
                start anew.
            StepError: Inside a step.
        """
        self._check("load_state_dict")
        try:
            replies = agree("load_state_dict", partial(self._load, state), ranks=self._ranks)
            for name in self.stateful:
                sources = {
                    r: x[name] for r, x in zip(self._ranks, replies, strict=True) if name in x
                }
                same(f"what handler {name!r} goes on from", sources)
        except (PlanError, AgreementError) as error:
            # All start anew, because ranks with and without a loaded state would compute different
            # means.
            for stateful in self.stateful.values():
                stateful.load_state_dict({})
            if self.outer_optimizer is not None:  # some replicas may have their own parameters
                self._synchronize()
            raise PlanError(str(error)) from error
        if self.plan.independent_by in state.get("handlers", {}):
            self._send_main_parameters()
        elif self.outer_optimizer is not None:  # it starts anew
            self._synchronize()

    def _load(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Loads the states of this rank's handlers; returns a text for each: state or nothing."""
        if state and state.get("plan") != self.plan.digest:
            raise PlanError(
                "the state of handlers is of another plan: of another model, other handlers, "
                "buckets or ranks; it fits into its own plan alone"
            )
        saved = state.get("handlers", {})
        for name, stateful in self.stateful.items():
            try:
                stateful.load_state_dict(saved.get(name, {}))
            except Exception as error:
                raise PlanError(f"handler {name!r} cannot go on: {in_words(error)}") from error
        # Handlers that launch nothing on this rank, and join no replicas, have no state here.
        return {n: "its state" if saved.get(n) else "nothing" for n in self.plan.launching}

    def _send_main_parameters(self) -> None:
        """Sends the parameters of an outer optimizer to all holders, and waits for them."""
        self._parameter_sync.send_copied()
        self._parameter_sync.wait()
        self._parameter_sync.forget()

    def _outer_optimizer(self) -> OuterOptimizer | None:
        """Makes the optimizer that joins replicas that train alone; `publish` steps it first.

        Raises:
            PlanError: On all ranks, if the handler cannot make one.
        """
        name = self.plan.independent_by
        if not name:
            return None
        # A strong reference would keep this object, and its threads, until the process ends.
        alone = weakref.proxy(self)

        def make() -> tuple[OuterOptimizer, None]:
            try:
                return self.agreed.plugins[name].outer_optimizer(alone), None
            except Exception as error:
                raise PlanError(f"handler {name!r}: {in_words(error)}") from error

        outer, _ = agree_keeping(
            "the outer optimizer", make, ranks=self._ranks, timeout_seconds=self._agree_seconds
        )
        self._parameter_sync.before_publish = partial(GradientSync._step_outer, alone, outer)
        return outer

    def _step_outer(self, outer: OuterOptimizer) -> None:
        """Steps the outer optimizer if it is due; a failure is final for this rank, and posted."""
        # Post a failure as final, because some parameters may be joined and others not.
        if not outer.is_due:
            return
        what = "the outer optimizer's step"
        with self.bounded(what, self._ranks):
            try:
                with self._reducer.reporting(what, self._ranks):
                    # A parameter sync of the step before may still use the same communicators.
                    self._reducer.wait()
                    began = self.tape.now()
                    outer.step()
                    self.tape.note("wait for ranks", what, began)
            except BaseException as error:
                self._post(error, begins=False, final=True)
                raise

    @outside_of_graphs
    def synchronize_parameters(self) -> None:
        """Copies parameters from their lowest rank to all replicas, for example after a checkpoint.

        Main parameters get the values too.

        Sync: on the current stream; every rank must call it, outside of a step.

        Raises:
            StepError: If a step was not published, or parameters are still in flight, because they
                would be lost, or mixed with loaded values.
        """

        def is_moving() -> bool:
            self._check("synchronize_parameters")
            self._tensors.check_held()
            return self._parameter_sync.is_due or bool(self._parameter_sync.coming)

        with self.bounded("synchronize_parameters()"):
            # Agree, because broadcasts follow, and a rank that raised alone would leave the others
            # in them.
            verb = "synchronize_parameters"
            if any(agree(verb, is_moving, ranks=self._ranks, timeout_seconds=self._agree_seconds)):
                raise StepError(
                    "synchronize_parameters() while updates of other ranks are on their way would "
                    "mix it with what was loaded: call wait_parameters() before, ahead of any "
                    "loading"
                )
            self._parameter_sync.wait()  # for what this rank has sent
            self._synchronize()

    def _synchronize(self) -> None:
        self.reshard()
        # Values first, because shards and master copies are made of them, and must be equal on all
        # ranks.
        make_equal(self.plan, self._parameters, self._groups)
        for parameter in self._parameters.values():
            parameter.move()
        self._parameter_sync.forget()
        if self.outer_optimizer is not None:
            self.outer_optimizer.begin()
            self._send_main_parameters()

    @outside_of_graphs
    def check_replicas(self) -> None:
        """Raises an error on every rank if copies of a parameter differ in a single bit.

        It compares parameters, also frozen ones, and master copies that are equal on several ranks.
        It compares neither buffers nor the optimizer's state.

        Sync: sends two integers for each parameter, and one flag. Every rank must call it,
        outside of a step.

        Raises:
            AgreementError: On all ranks, if a rank does not call it.
            DriftError: If copies differ. It names parameters and ranks.
        """
        check = partial(self._check, "check_replicas")
        # Agree first, because checksums use the communicators of buckets. If a rank called this
        # alone, its checksums would be added to the gradients of ranks that are in a step.
        agree("check_replicas", check, ranks=self._ranks, timeout_seconds=self._agree_seconds)
        self.publish()
        with self.bounded("check_replicas()"):
            self._parameter_sync.wait()
            self.reshard()
            self._drift.look()

    def continue_from(self, num_steps: int) -> None:
        """Counts steps from `num_steps` on in messages about copies, for a run that was resumed.

        Args:
            num_steps: Count of steps so far. The same on all ranks.
        """
        self._drift.continue_from(num_steps)

    def parameter(self, record: ParameterRecord) -> nn.Parameter:
        """Returns the parameter of a record."""
        return self._parameters[record.key].tensor

    def records(self) -> tuple[ParameterRecord, ...]:
        """Returns the records of the parameters that this rank holds."""
        return self.manifest.records(self.topology)

    def live(self) -> tuple[Param, ...]:
        """Returns the parameters of this rank, with their main parameters."""
        return tuple(self._parameters.values())

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Returns a communicator of this rank and others, for an `OuterOptimizer`.

        Args:
            ranks: The ranks of a reduction in the plan, or the ranks along
                ``plan.independent_axes``.
        """
        return self._groups.of(tuple(sorted(ranks)), 0)

    def statistics(self) -> Statistics:
        """Returns numbers of the last finished step."""
        return self._statistics

    def close(self) -> None:
        """Ends threads and destroys the process groups of comm streams. Every rank must call it.

        It first waits for parameters that are in flight, unless a step has failed. Gradients and
        parameters stay in their memory, without hooks. After it, every other verb raises StepError.
        A second `close` does nothing.

        Without `close`, all of this ends when the object is garbage, or when Python exits.
        """
        if self.is_closed:
            return
        try:
            # Do not wait inside a step, or after a failed one, because other ranks may never run
            # the collectives that are in flight here.
            if not self.is_in_step and self._final is None and self._doubt is None:
                for ticket in self._reducer.submit_send_waits():
                    self._reducer.wait_for(ticket)
                if self._parameter_sync.is_taken:
                    self.wait_parameters()
        except BaseException:
            self._ending.in_vain = True
            raise
        finally:
            self._state = State.CLOSED
            self._watch.remove()
            for bucket in self._buckets.values():
                bucket.remove_hooks()
            for comm_stream in self._reducer.comm_streams:
                comm_stream.close()
            self._ending.end()
            self._groups.forget()

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        return self._state is State.CLOSED

    @outside_of_graphs
    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, by ascending rank: ``(ranks, numel)``.

        Args:
            row: A few numbers, ``(numel,)``, of the same dtype on all ranks.

        Sync: on the current stream; one all-reduce. Every rank must call it, outside of a step.
        """
        self.refuse_closed()
        began = self.tape.now()
        with self.bounded("gather()"):
            rows = self._groups.gather(row)
        self.tape.note("wait for ranks", "numbers of all ranks", began)
        return rows


_every: weakref.WeakSet[GradientSync] = weakref.WeakSet()


def open_syncs() -> list[GradientSync]:
    """Returns the syncs of this process that are not closed."""
    return [sync for sync in list(_every) if not sync.is_closed]
