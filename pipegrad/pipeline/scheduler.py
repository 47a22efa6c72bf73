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

# This number names one Scheduler on all ranks, because they make them in the same order.
_instances = count()


class Scheduler:
    """Runs the stages of this rank through a schedule, with the gradients of one process.

    All ranks of the topology construct it together. An error on one rank is an error on all ranks,
    before anything is sent. The schedule is lowered to a Program, and the Program is proven
    (`verify`). The first step determines the shapes and dtypes of the outputs of stages.

    Args:
        stages: The stages that the schedule places on this rank; or a `Cut`, of which it takes
            these.
        topology: The topology of all ranks. The schedule places stages on them.
        schedule: Name or table of the group ``pipegrad.schedules``, or a `Schedule`. Some change it
            when steps were measured: ``"adaptive-1f1b"`` after any step, ``"hop-aware-1f1b"``,
            ``"hop-aware-zb-h1"`` and ``"auto"`` after the second one, unless they are given costs.
        num_microbatches: The number of microbatches of a step, along the first dimension. A step
            may have another number.
        loss_fn: Takes the last stage's outputs and a microbatch's ``target``. They go to its
            parameters as inputs go to the parameters of a `Stage`. Returns one element, or ``(loss,
            metrics)`` with a mapping of names and numbers, or tensors of one element: see
            `StepResult.metrics`. All microbatches of all steps have the same names. A `Cut` has the
            model's own loss, if a step has labels.
        loss_reduction: ``"mean"``: the loss of a step is the mean over microbatches and data ranks.
            A microbatch counts by its rows, if the step cuts them. With ``nn.CrossEntropyLoss``,
            ``nn.NLLLoss``, their functions or `chunked_cross_entropy` as loss_fn it counts by its
            labels, or by the weights of their classes. The loss then equals the mean of one
            process. Another loss must be a mean over rows: one over a mask, or of pairs of rows, is
            not, and nothing warns. This is the default, but for the own loss of a `Cut`.
            ``"token_mean"``: loss_fn returns ``(sum, weight)`` or ``(sum, weight, metrics)``, such
            as the sum of ``cross_entropy(..., ignore_index=-100, reduction="sum")`` and the number
            of targets that are not ignored. The loss is the sum over all microbatches and data
            ranks, divided by the sum of all weights, and gradients belong to this loss. If that sum
            is 0, the loss is nan and gradients are zero, as in one process. In steps inside
            ``sync.accumulate()`` weights add up too: gradients are divided by all of them. float16
            needs a small loss scale, because gradients are sums until the end of a step.
        loss_over: ``"microbatch"``, or ``"batch"``: loss_fn runs once a step, with the rows of all
            microbatches in each output and in the target, as in a contrastive loss. An output whose
            microbatches differ beyond the first dimension is a tuple of them. `StepResult.loss` is
            the mean of this loss over data ranks, each of which has its own batch. All forwards of
            the last stage come before its backwards, as in ``"gpipe"``. With ``recompute`` of the
            last stage, only its outputs are kept until then.
        whole: Names of inputs that belong to no sample, such as a table of rotary frequencies.
            Every microbatch gets them whole. They may be anything, also ``"target"``.
        codecs: Codecs that send values between pipeline ranks in fewer bytes. A name or table of
            the group ``pipegrad.codecs``, or an `EdgeCodec`: on all hops. ``{"activations": ...,
            "gradients": ...}``: another one for each. ``{"0-1": ..., "2-3": ...}``: on these hops,
            in both directions. None: values are sent unencoded.
        tied: See `GradientSync`.
        handlers: See `GradientSync`.
        depth: The number of receives of an edge that are posted ahead.
        accessor: See `GradientSync`.
        agree_seconds: See `GradientSync`. In the first step ranks wait for each other so long, or
            for the timeout of the process group, at most ten minutes, if that is longer, because
            kernels may be compiled there.
        **options: Fields of `GradientOptions` by name, but for the ticks of the schedule.

    Attributes:
        sync: The gradient layer: clipping, statistics, its plan.
        topology: The topology with the schedule's stages.

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
        # The wiring comes first, because the gradient layer needs the ticks of the schedule. The
        # program comes last, because it needs the plan of the gradient layer.
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
            # Before the gradient layer, because it makes replicas equal, and master copies, from
            # these values.
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
        `torch.tensor_split` does. All tensors on one rank have the same number of rows, at least
        one for each microbatch, or `rows_of` has the number of rows of each sample. Another step
        may have another number, and so may a replica. A value may be a tree: dicts, lists and
        tuples of tensors, cut leaf by leaf. Every microbatch gets the values of ``whole``, tensors
        without dimensions, numbers, strings and None as they are. Anything else raises a StepError.
        Afterwards `inputs` describes how each input was cut.

        An input or the target may come from a graph of the caller's, such as an encoder's output.
        When a step returns, backward has run through that graph once. Its gradient belongs to this
        data rank's loss, through the stages of this rank that take the value.

        Args:
            *inputs: External inputs, in the order of their first use; or one that holds them all.
            target: Cut like inputs; goes to the loss.
            loss_divisor: The losses of all microbatches are summed and divided by it. The default
                is the number of microbatches, for losses that are means: see ``loss_reduction``.
                For losses that are sums over tokens, give the number of tokens of the batch over
                all data ranks, divided by the number of data ranks; or make the Scheduler with
                ``loss_reduction="token_mean"``, which counts them. All ranks give the same number,
                because each divides the gradients of its stages.
            microbatches: Ready microbatches, instead of inputs and target. Each has the form of a
                single argument that holds the inputs, with its labels as ``"target"``, whatever a
                loader calls them; None or empty on ranks that need nothing. They go to the stages
                unchanged: each may have other shapes, and values of any type. Inputs of ``whole``
                may be given in the same call.
            num_microbatches: Another number of microbatches than the Scheduler's, for this step.
                All ranks must give it, or as many `microbatches`. The first step of a number makes
                and proves its Program. If ranks disagree, all raise, after ``agree_seconds``.
            rows_of: The number of rows of each sample, for tensors whose rows are no samples, such
                as images or their patches: name -> a list or tensor of integers from 0, in the
                order of samples. These rows are cut at the borders of samples. The mapping may have
                tensors that this rank does not need. A `Cut` of transformers derives these numbers
                from grids or the tokens of images.
            chunks: The number of chunks of time of each microbatch, or their lengths: for stages
                that carry a state from chunk to chunk, with its gradient, and a schedule such as
                ``"chunked-1f1b"``. Each chunk is a microbatch of the schedule. The loss is the loss
                of whole sequences: the mean of a chunk counts by its length. With ``loss_divisor``,
                loss_fn must return sums, because the losses of all chunks are summed; a loss of a
                stage must be a sum if chunks are uneven. A target has an entry for each position.
                All ranks must give it, as `num_microbatches`.
            time_dim: The dimension of time. Every tensor that has it is cut there, and all of
                them have the same length. A mapping has it by name, None for an input without
                time; others have theirs along dimension 1.
            outputs: Whether the result has the outputs of the last stage. They are kept until the
                step ends. Only the ranks of the last stage need to set it.
            **named: External inputs by name.

        Returns:
            The loss and the metrics of this call alone, on every rank, also inside
            ``sync.accumulate()``; they are still in flight. `StepResult.weight` joins them.

        Sync: all on the current stream; call every step from the same one.

        Raises:
            StepError: If an input is missing or does not fit, if a microbatch looks unlike the
                first one, or if a parameter was exchanged. All ranks raise, with stage and
                microbatch.
            AgreementError: If ranks disagree on the number of microbatches; then ranks with the
                Scheduler's own number raise a StepError. On all ranks, in the steps 1, 2, 4, 8 and
                so on and every `check_every` steps, if ranks of one pipeline were given different
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
        **options: Any,  # noqa: ANN401 - options of `kind`
    ) -> Optimizer:
        """Returns an optimizer of this rank's main parameters; see `GradientSync.optimizer`."""
        return self.sync.optimizer(kind, *parameters, group_of=group_of, others=others, **options)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank's handlers and codecs.

        It is the result of `GradientSync.state_dict`, with the errors of codecs; empty if there is
        nothing. It can be loaded on the same rank, with the same plan.

        Raises:
            StepError: Inside a step.
        """
        return self.sync.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a result of `state_dict` of this rank; all else starts anew.

        Every rank must call it.

        Raises:
            PlanError: On every rank, as `GradientSync.load_state_dict`, or if the state of codecs
                is invalid, or belongs to another cut. Then they start anew.
            StepError: Inside a step.
        """
        self.sync.load_state_dict(state)

    @property
    def schedule(self) -> Schedule:
        """The actions of all ranks in the next step."""
        return self._programs.schedule

    @property
    def program(self) -> Program:
        """The actions and transfers of all ranks in the next training step; printable."""
        return self._steps.proven[0]

    @property
    def proof(self) -> Proof:
        """The numbers of live activations and buffers of `program` on each rank."""
        return self._steps.proven[1]

    @property
    def inputs(self) -> dict[str, str]:
        """A description of the treatment of each input of this rank in the last step.

        By name, and for a tree by name and path: ``{"x": "8 rows, cut into 4 microbatches of 2",
        "batch['scale']": "whole in every microbatch"}``. Empty before the first step.
        """
        return dict(self._steps.report)

    @property
    def times(self) -> Times | None:
        """The times of the step before the last one, on all ranks; None if it was not measured.

        Steps are measured from the second one on, while the schedule may still change by it.
        """
        return self._programs.times

    @property
    def codecs(self) -> CodecChoice:
        """The codecs of all hops, for activations and gradients; printable."""
        return self._steps.pipeline.codecs

    @property
    def choice(self) -> Any:  # noqa: ANN401 - the type depends on the generator
        """The reason for the choice of ``"auto"``; None for others, and before it is chosen."""
        generator = self._programs.spec
        if not isinstance(generator, MeasuredGenerator):
            return None
        return generator.choice(
            num_ranks=self.schedule.num_ranks, num_microbatches=self.schedule.num_microbatches
        )

    @property
    def steps(self) -> Steps:
        """The object that runs the steps of this rank; for `pipegrad.observe`."""
        return self._steps

    def close(self) -> None:
        """Ends comm streams and destroys process groups, once; every rank must call it."""
        self._steps.close()


def _complaint_of(options: Collection[str]) -> str:
    """Returns a message about unknown names of further options; "" if all are known."""
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
