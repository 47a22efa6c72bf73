"""Scheduler: trains and evaluates a pipeline, its reductions interleaved with its compute.

scheduler = Scheduler([Stage(module, 0)], topology, schedule="1f1b", num_microbatches=8, loss_fn=f)
optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-3)
for x, y in data:
    result = scheduler.step(x, target=y)
    scheduler.sync.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Never, Unpack

import torch

from pipegrad.comm.agreement import AGREE_SECONDS, slow_seconds
from pipegrad.comm.collectives import can_send
from pipegrad.comm.comm_stream import outside_of_graphs
from pipegrad.errors import PlanError, ScheduleError
from pipegrad.gradients.main_params import NamedGroupOf
from pipegrad.gradients.named_optimizer import Optimizer
from pipegrad.gradients.sync import GradientSync
from pipegrad.model.main_grad import MainGrad
from pipegrad.model.ties import AllTies, Tied
from pipegrad.pipeline.batch import Batch
from pipegrad.pipeline.codings import CodecChoice, CodecsSpec
from pipegrad.pipeline.loss_message import StepResult
from pipegrad.pipeline.programs import Programs
from pipegrad.pipeline.stage import Counts, Stage, StageSource
from pipegrad.pipeline.steps import Steps
from pipegrad.pipeline.wiring import Loss, ScheduleSpec, agree_on_wiring, synced_stages
from pipegrad.plan.options import CHECK_EVERY, GradientKeywords
from pipegrad.plugins.handler import DEFAULT_HANDLERS, HandlerSpec
from pipegrad.plugins.registry import closest_first
from pipegrad.schedules import Program, Proof, Schedule
from pipegrad.schedules.measured import MeasuredGenerator, Times
from pipegrad.schedules.program.lower import DEPTH
from pipegrad.topology import Topology

# All ranks make their Schedulers in the same order, so this number names one on all of them.
_instances = count()


class Scheduler:
    """Runs the stages of this rank through a schedule; gradients are those of one process.

    All ranks of the topology construct it together. An error on one rank is an error on all ranks,
    before anything is sent. The schedule is lowered to a Program, and the Program is proven
    (`verify`). The first step finds out what the outputs of stages look like.

    Args:
        stages: The stages that the schedule places on this rank; or a `Cut`, of which it takes
            these.
        topology: Over all ranks. The schedule says which rank has which stages.
        schedule: Name or table of the group ``pipegrad.schedules``, or a `Schedule`. Some change it
            when steps were measured: ``"adaptive-1f1b"`` after any step, ``"hop-aware-1f1b"``,
            ``"hop-aware-zb-h1"`` and ``"auto"`` after the second one, unless they are given costs.
        num_microbatches: Into how many a batch is cut, along the first dimension. A step may have
            another number.
        loss_fn: Takes the last stage's outputs and a microbatch's ``target``, which go to its
            parameters as inputs go to those of a `Stage`. Returns one element, or ``(loss,
            metrics)`` with a mapping of names and numbers, or tensors of one element: see
            `StepResult.metrics`. All microbatches of all steps have the same names. A `Cut` has the
            model's own loss, if a step is given labels.
        loss_reduction: ``"mean"``: the loss of a step is the mean over microbatches and data ranks.
            A microbatch counts by its rows, if the step cuts them. With ``nn.CrossEntropyLoss``,
            ``nn.NLLLoss``, their functions or `chunked_cross_entropy` as loss_fn it counts by its
            labels, or by the weights of their classes. So it is the mean of one process. Another
            loss must be a mean over rows: one over a mask, or of pairs of rows, is not, and nothing
            warns. This is the default, but for the own loss of a `Cut`.
            ``"token_mean"``: loss_fn returns ``(sum, weight)`` or ``(sum, weight, metrics)``, such
            as the sum of ``cross_entropy(..., ignore_index=-100, reduction="sum")`` and the number
            of targets that are not ignored. The loss is the sum over all microbatches and data
            ranks, divided by the sum of all weights, and gradients are those of this loss. If that
            sum is 0, the loss is nan and gradients are zero, as in one process. In steps inside
            ``sync.accumulate()`` weights add up too: gradients are divided by all of them. Until
            the end of a step gradients are sums, so float16 needs a small loss scale.
        loss_over: ``"microbatch"``, or ``"batch"``: loss_fn runs once a step, with the rows of all
            microbatches in each output and in the target, as in a contrastive loss. An output whose
            microbatches differ beyond the first dimension is a tuple of them. The loss is that of
            the step, and a mean over data ranks, each of which has its own batch. All forwards of
            the last stage come before its backwards, as in ``"gpipe"``. With ``recompute`` of the
            last stage, its outputs alone are kept until then.
        whole: Names of inputs that belong to no sample, such as a table of rotary frequencies.
            Every microbatch gets them whole. They may be anything, also ``"target"``.
        codecs: How values cross hops between pipeline ranks in fewer bytes. A name or table of the
            group ``pipegrad.codecs``, or an `EdgeCodec`: on all hops. ``{"activations": ...,
            "gradients": ...}``: another one for each. ``{"0-1": ..., "2-3": ...}``: on these hops,
            in both directions. None: values cross as they are.
        tied: As `GradientSync`.
        handlers: As `GradientSync`.
        depth: How many receives of an edge are posted ahead.
        accessor: As `GradientSync`.
        agree_seconds: As `GradientSync`. In the first step ranks wait for each other so long, or
            for the timeout of the process group, at most ten minutes, if that is longer: kernels
            may be compiled there.
        **options: Fields of `GradientOptions` by name, but for the ticks of the schedule.

    Attributes:
        sync: The gradient layer: clipping, statistics, its plan.
        topology: With the schedule's stages.

    Raises:
        PipegradError: If anything does not fit together; on all ranks alike.
    """

    def __init__(
        self,
        stages: Sequence[Stage] | StageSource,
        topology: Topology,
        *,
        schedule: ScheduleSpec,
        num_microbatches: int | None = None,
        loss_fn: Loss | None = None,
        loss_reduction: str | None = None,
        loss_over: str = "microbatch",
        whole: Sequence[str] = (),
        codecs: CodecsSpec = None,
        tied: Tied = (),
        handlers: Sequence[HandlerSpec] = DEFAULT_HANDLERS,
        depth: int = DEPTH,
        accessor: MainGrad | None = None,
        agree_seconds: float = AGREE_SECONDS,
        **options: Unpack[GradientKeywords],
    ) -> None:
        # The gradient layer needs the ticks of the schedule, so the wiring comes first. The program
        # needs the plan of the gradient layer, so it comes last.
        pipeline = agree_on_wiring(
            stages,
            topology,
            schedule=schedule,
            num_microbatches=num_microbatches,
            loss_fn=loss_fn,
            loss_reduction=loss_reduction,
            loss_over=loss_over,
            whole=whole,
            codecs=codecs,
            depth=depth,
            complaint=_complaint_of(options),
            timeout_seconds=agree_seconds,
        )
        self.topology = pipeline.topology
        modules = {stage.index: stage.module for stage in pipeline.stages}
        self._modules = list(modules.values())
        if not isinstance(stages, Sequence):
            if isinstance(tied, Sequence):  # GradientSync refuses others, on all ranks alike
                tied = AllTies([*stages.tied, *tied])
            # Before the gradient layer: it makes replicas equal, and master copies, of these
            # values.
            stages.load(self.topology.local_stages, self)
        self.sync = GradientSync(
            modules,
            self.topology,
            tied=tied,
            handlers=handlers,
            stage_ticks=pipeline.schedule.stage_ticks,
            shared_ticks=pipeline.schedule.shared_ticks,
            accessor=accessor,
            agree_seconds=agree_seconds,
            **options,
        )
        name = f"{next(_instances)}"
        plans = self.sync.agreed.plans(self.topology.ranks_along(self.topology.pipeline))
        try:
            self._refuse_unsendable()
            self._programs = Programs(
                pipeline,
                schedule,
                synced=synced_stages(plans.values()),
                depth=depth,
                name=f"scheduler {name}",
                timeout_seconds=agree_seconds,
            )
        except (PlanError, ScheduleError):
            self.sync.close()  # on all ranks alike
            raise
        self._steps = Steps(
            pipeline,
            self._programs,
            self.sync,
            name=name,
            whole=frozenset(whole),
            wait_seconds=slow_seconds(self.sync.device, agree_seconds),
            check_every=options.get("check_every", CHECK_EVERY),
        )

    def _refuse_unsendable(self) -> None:
        device = self.sync.device
        if len(self.topology.pipelines[0]) > 1 and not can_send(None, device):
            raise PlanError(
                f"stages are on {device}, and gloo sends from the CPU alone: begin with "
                f'torch.distributed.init_process_group("cpu:gloo,{device.type}:BACKEND"), where '
                f"BACKEND is nccl on CUDA"
            )

    # What users call.

    @outside_of_graphs
    def step(
        self,
        *inputs: object,
        target: object = None,
        loss_divisor: float | None = None,
        microbatches: Sequence[object] | None = None,
        num_microbatches: int | None = None,
        rows_of: Mapping[str, Counts] | None = None,
        chunks: int | Sequence[int] | None = None,
        time_dim: int | Mapping[str, int | None] = 1,
        outputs: bool = False,
        **named: object,
    ) -> StepResult:
        """Runs forward and backward of a batch; gradients are complete and reduced afterwards.

        Every rank must call it. An input is needed only on the ranks of stages that name it, and
        the target on the rank of the last stage. One argument alone may hold the inputs: a mapping,
        dataclass or named tuple by name, a tuple or list in order. A mapping may also hold
        ``"target"``, and other parts only if they are parts of `target`.

        Tensors are cut into microbatches along their first dimension, as evenly as
        `torch.tensor_split` does. All that are given on one rank have the same number of rows, at
        least one for each microbatch, or `rows_of` says how many each sample has. Another step may
        have another number, and so may a replica. A value may be a tree: dicts, lists and tuples of
        tensors, cut leaf by leaf. Every microbatch gets the values of ``whole``, tensors without
        dimensions, numbers, strings and None as they are. Anything else is refused. Afterwards
        `inputs` says what was done.

        An input or the target may come from a graph of the caller's, such as an encoder's output.
        When a step returns, backward has run through that graph once. The gradient is that of this
        data rank's loss, through the stages of this rank that take the value.

        Args:
            *inputs: External inputs, in the order of their first use; or one that holds them all.
            target: Cut like inputs; goes to the loss.
            loss_divisor: The losses of all microbatches are summed and divided by it. The default
                is the number of microbatches, for losses that are means: see ``loss_reduction``.
                For losses that are sums over tokens, give the number of tokens of the batch over
                all data ranks, divided by the number of data ranks; or make the Scheduler with
                ``loss_reduction="token_mean"``, which counts them. The ranks of stages with a loss
                need it. Other ranks may give it too, and then the same number.
            microbatches: Ready microbatches, in place of inputs and target. Each is what alone may
                hold the inputs, with ``"target"``, whatever a loader calls its labels; None or
                empty on ranks that need nothing. They go to the stages as they are: each may have
                other shapes, and values of any type.
                Inputs of ``whole`` may be given beside them.
            num_microbatches: Another number of microbatches than the Scheduler's, for this step.
                All ranks must give it, or as many `microbatches`. The first step of a number makes
                and proves its Program. If ranks disagree, all raise, after ``agree_seconds``.
            rows_of: Of tensors whose rows are no samples, such as images or their patches: name ->
                how many rows each sample has, in the order of samples, a list or tensor of
                integers from 0. These rows are cut where samples are. It may have tensors that
                this rank does not need. A `Cut` of transformers finds out itself what grids or the
                tokens of images tell.
            chunks: Into how many chunks of time each microbatch is cut, or their lengths: for
                stages that carry a state from chunk to chunk, with its gradient, and a schedule
                such as ``"chunked-1f1b"``. Each chunk is a microbatch of the schedule. The loss is
                that of whole sequences: the mean of a chunk counts by its length. With
                ``loss_divisor`` the losses of all chunks are summed, so they are to be sums, and so
                is a loss of a stage if chunks are uneven. A target has an entry for each position.
                All ranks must give it, as `num_microbatches`.
            time_dim: Which dimension is time. Every tensor that has it is cut there, and all of
                them have the same length. A mapping has it by name, None for an input without
                time; others have theirs along dimension 1.
            outputs: Whether the result has the outputs of the last stage. They are kept until the
                step ends. Only the ranks of the last stage need to ask.
            **named: External inputs by name.

        Returns:
            The loss and the metrics of this call alone, on every rank, also inside
            ``sync.accumulate()``; they are still on their way. `StepResult.weight` joins them.

        Sync: all on the current stream; call every step from the same one.

        Raises:
            StepError: If an input is missing or does not fit, if a microbatch looks unlike the
                first one, or if a parameter was exchanged. All ranks raise, with stage and
                microbatch.
            AgreementError: If ranks disagree on the number of microbatches; then ranks with the
                Scheduler's own number raise a StepError. On all ranks, in the steps 1, 2, 4, 8 and
                so on and every `check_every` steps, if those of one pipeline were given different
                batches, or ranks different ``loss_divisor``.
            Exception: The error of a stage; on other ranks a StepError with its words.
        """
        batch = Batch(
            inputs,
            named,
            target,
            loss_divisor,
            microbatches,
            num_microbatches,
            outputs,
            rows_of,
            chunks,
            time_dim,
        )
        return self._steps.run(batch, forward_only=False)

    @outside_of_graphs
    def evaluate(
        self,
        *inputs: object,
        target: object = None,
        loss_divisor: float | None = None,
        microbatches: Sequence[object] | None = None,
        num_microbatches: int | None = None,
        rows_of: Mapping[str, Counts] | None = None,
        chunks: int | Sequence[int] | None = None,
        time_dim: int | Mapping[str, int | None] = 1,
        outputs: bool = True,
        **named: object,
    ) -> StepResult:
        """Runs forward alone, without gradients and with all modules in evaluation mode.

        Everything is as in `step`. Without a target the loss and its metrics are nan.
        """
        batch = Batch(
            inputs,
            named,
            target,
            loss_divisor,
            microbatches,
            num_microbatches,
            outputs,
            rows_of,
            chunks,
            time_dim,
        )
        with evaluating(self._modules), torch.no_grad():
            return self._steps.run(batch, forward_only=True)

    def optimizer(
        self,
        kind: Callable[..., Optimizer],
        *parameters: Never,
        group_of: NamedGroupOf | None = None,
        others: Callable[..., torch.optim.Optimizer] | None = None,
        **options: Any,  # noqa: ANN401 - those of `kind`
    ) -> Optimizer:
        """Returns an optimizer of what this rank steps; see `GradientSync.optimizer`."""
        return self.sync.optimizer(kind, *parameters, group_of=group_of, others=others, **options)

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank's handlers and codecs keep from step to step.

        It is what `GradientSync.state_dict` returns, with the errors of codecs beside it; empty if
        there is nothing. It can be loaded on the same rank, with the same plan.

        Raises:
            StepError: Inside a step.
        """
        state, errors = self.sync.state_dict(), self._steps.feedback.state_dict()
        plan = {"plan": self.sync.plan.digest, "handlers": {}}
        return {**plan, **state, "codecs": errors} if errors else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a result of `state_dict` of this rank; all else starts anew.

        Every rank must call it.

        Raises:
            PlanError: On every rank, as `GradientSync.load_state_dict`, or if the state of codecs
                is none of theirs, or of another cut. Then they start anew.
            StepError: Inside a step.
        """
        self._steps.feedback.clear()
        self.sync.load_state_dict({key: v for key, v in state.items() if key != "codecs"})
        if not self.codecs.is_none:
            self._steps.feedback.load(state.get("codecs", {}), sorted(self.topology.ranks))

    @property
    def schedule(self) -> Schedule:
        """What every rank computes, in the next step."""
        return self._programs.schedule

    @property
    def program(self) -> Program:
        """What every rank does in the next training step; printable."""
        return self._steps.proven[0]

    @property
    def proof(self) -> Proof:
        """How many live activations and buffers that needs on each rank."""
        return self._steps.proven[1]

    @property
    def inputs(self) -> dict[str, str]:
        """What the last step did with each of its inputs on this rank, in words.

        By name, and for a tree by name and path: ``{"x": "8 rows, cut into 4 microbatches of 2",
        "batch['scale']": "whole in every microbatch"}``. Empty before the first step.
        """
        return dict(self._steps.report)

    @property
    def times(self) -> Times | None:
        """What the step before the last one took, on all ranks; None if it was not measured.

        Steps are measured from the second one on, while the schedule may still change by it.
        """
        return self._programs.times

    @property
    def codecs(self) -> CodecChoice:
        """Which codec carries what over which hop; printable."""
        return self._steps.pipeline.codecs

    @property
    def choice(self) -> Any:  # noqa: ANN401 - that of whoever makes schedules
        """Why the schedule ``"auto"`` is what it is; None for others, and before it is chosen."""
        generator = self._programs.spec
        if not isinstance(generator, MeasuredGenerator):
            return None
        return generator.choice(
            num_ranks=self.schedule.num_ranks, num_microbatches=self.schedule.num_microbatches
        )

    @property
    def steps(self) -> Steps:
        """What runs the steps of this rank; for `pipegrad.observe`."""
        return self._steps

    def close(self) -> None:
        """Ends comm streams and destroys process groups, once; every rank must call it."""
        self._steps.close()


def _complaint_of(options: Collection[str]) -> str:
    """Returns what is wrong with the names of further options of a Scheduler; "" if nothing is."""
    fields = GradientKeywords.__annotations__.keys()
    if not (unknown := sorted(set(options) - fields)):
        return ""
    known = (fields | inspect.signature(Scheduler).parameters.keys()) - {"stages", "topology"}
    closest = closest_first(unknown[0], known - {"options"})
    return f"Scheduler has no option {unknown[0]!r}; allowed, closest first: {closest}"


@contextlib.contextmanager
def evaluating(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Puts modules into evaluation mode, and afterwards each part back into its own mode."""
    before = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in before:
            if type(part).train is torch.nn.Module.train:
                part.training = training
            else:  # adapters put their weights into another form
                part.train(training)
