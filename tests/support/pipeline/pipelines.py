"""A small model as a pipeline of torch: a `Case` says how it is trained, a `Cut` builds it.

Its handlers count their launches.
"""

from __future__ import annotations

import copy
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from click.testing import CliRunner
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

import pipegrad
from pipegrad import FlatBucket, ReductionStep, Topology, Work
from pipegrad.cli import main
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.pipeline.models import LAYERS, TOKENS, VOCAB, WIDTH, build

TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti

LOOPS = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "CSV runtime", "CSV multi")
VEES = ("ZBVZeroBubble", "DualPipeV")
HOP_AWARE = ["--set", "hop_seconds=[0, 0.5, 0]", "--set", "compute_seconds=1"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One way of training. Two stages a rank where the schedule wants them, one otherwise."""

    schedule: str  # torch's name of it, or "file NAME": as `pipegrad schedule NAME` prints it
    model: str = "tied"
    optimizer: str = "SGD"  # "AdamW", "standstill": every step is the first one again
    num_microbatches: int = 4
    steps: int = 8
    cut: str = "manual"  # "apart": local ties are copied apart; "split-point": traced
    tied: str = "names"  # "places": stage -> name; "pipe": pipe.replicated_params
    accumulate: int = 1
    clip: tuple[float, float] | None = None  # maximum and type of the norm
    scale_grads: bool = True
    set_to_none: bool = True
    evaluate: bool = False
    wrapper: str = ""  # "compile", "ddp"
    optimizer_first: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        told = changed(self).items()
        return " ".join(v if isinstance(v, str) else f"{name}={v}" for name, v in told)

    def batch(self, step: int, part: int, num_data_ranks: int) -> tuple[Tensor, Tensor]:
        """Returns tokens, and what they must become: something that can be learned."""
        number = part if self.optimizer == "standstill" else step * self.accumulate + part
        generator = torch.Generator().manual_seed(1000 + number)
        rows = self.num_microbatches * num_data_ranks
        tokens = torch.randint(VOCAB, (rows, TOKENS), generator=generator)
        return tokens, (5 * tokens + 3) % VOCAB

    @property
    def training(self) -> dict[str, Any]:
        """What `train` is told."""
        return {
            "steps": self.steps,
            "parts": self.accumulate,
            "clip": self.clip,
            "set_to_none": self.set_to_none,
        }

    @property
    def traced(self) -> bool:
        return self.cut == "split-point"


def changed(case: Any) -> dict[str, Any]:
    """Returns what of a case is not as by default."""
    told = {f.name: (getattr(case, f.name), f.default) for f in fields(case)}
    return {name: value for name, (value, default) in told.items() if value != default}


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def printed(schedule: str, num_ranks: int, num_microbatches: int) -> str:
    """Returns the file that the command line prints of a schedule ``"file NAME"``."""
    name = schedule.removeprefix("file ")
    options = HOP_AWARE if name.startswith("hop-aware") else []
    size = ["--ranks", str(num_ranks), "--microbatches", str(num_microbatches)]
    found = CliRunner().invoke(main, ["schedule", name, *size, *options, "--format", "torch-csv"])
    assert found.exit_code == 0, found.output
    return found.output


def stage_to_rank(schedule: str, topology: Topology) -> Sequence[int]:
    ranks = list(range(topology.size("pp")))
    if schedule.startswith("file "):
        text = printed(schedule, len(ranks), 2 * len(ranks))
        return pipegrad.schedules.read_csv(text).stage_to_rank
    if schedule in VEES:
        return [*ranks, *reversed(ranks)]
    return [*ranks, *ranks] if schedule in LOOPS else ranks


def stage_module(model: nn.Sequential, stage: int, num_stages: int) -> nn.Sequential:
    """Returns the layers of a stage, under their names in the uncut model."""
    number = LAYERS // num_stages
    mine = range(stage * number, (stage + 1) * number)
    return nn.Sequential(OrderedDict((str(i), model[i]) for i in mine))


class Cut:
    """This rank's stages of a model, with the names and the ties of the uncut one."""

    def __init__(self, case: Case, topology: Topology) -> None:
        self.case = case
        self.placed = topology.with_stages(stage_to_rank(case.schedule, topology))
        model = build(case.model)
        self._layers = LAYERS // self.placed.num_stages
        self.ties = pipegrad.find_tied(model)
        self.tied: Any = self.ties
        if case.tied == "places":
            self.tied = [{self.stage_of(name): name for name in tie} for tie in self.ties]
        if case.traced:
            self.stages = self._traced(model)
        else:
            self.stages = [self._stage(model, stage) for stage in self.placed.local_stages]
        self.modules = {stage.stage_index: stage.submod for stage in self.stages}

    def stage_of(self, name: str) -> int:
        return int(name.split(".", maxsplit=1)[0]) // self._layers

    def parameters(self) -> list[nn.Parameter]:
        found = [p for module in self.modules.values() for p in module.parameters()]
        return list(dict.fromkeys(found))

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters by their names in the uncut model; not a tracer's leftovers."""
        found = []
        for stage, module in self.modules.items():
            for full_name, parameter in module.named_parameters(remove_duplicate=False):
                name = full_name.removeprefix("_orig_mod.").removeprefix("module.")
                if self.stage_of(name) == stage:
                    found.append((name, parameter))
        return found

    def inputs(self, step: int = 0, part: int = 0) -> dict[str, Any]:
        """Returns this rank's share of a batch, as ``schedule.step`` wants it."""
        shares, share = self.placed.size("dp"), self.placed.coordinate("dp")
        whole = self.case.batch(step, part, shares)
        tokens, target = (tensor.chunk(shares)[share] for tensor in whole)
        first, last = 0 in self.modules, self.placed.num_stages - 1 in self.modules
        return {"args": (tokens,) if first else (), "target": target if last else None}

    def schedule(self) -> TorchSchedule:
        options = {"loss_fn": loss_of, "scale_grads": self.case.scale_grads}
        name, number = self.case.schedule, self.case.num_microbatches
        made: TorchSchedule
        if name.startswith("file "):
            made = _PipelineScheduleRuntime(self.stages, number, **options)
            text = printed(name, self.placed.size("pp"), number)
            load(made, lambda path: path.write_text(text))
        elif name not in (*LOOPS, *VEES):
            made = get_schedule_class(name)(self.stages[0], number, **options)
        elif name.startswith("CSV"):
            made = self._loaded(options)
        else:
            made = get_schedule_class(name)(self.stages, number, **options)
        if self.case.traced and name in VEES:
            # It sends a first message from a rank to itself, which gloo cannot, and needs not.
            made._warmup_p2p = lambda *_: None  # type: ignore[method-assign]
        return made

    def _loaded(self, options: Mapping[str, Any]) -> PipelineScheduleMulti:
        """Returns a bare schedule with the grid of Interleaved1F1B, by way of a file."""
        number = self.case.num_microbatches
        grid = get_schedule_class("Interleaved1F1B")(self.stages, number, **options)
        runtime = self.case.schedule == "CSV runtime"
        kind = _PipelineScheduleRuntime if runtime else PipelineScheduleMulti
        loaded = kind(self.stages, number, **options)
        load(loaded, lambda path: grid._dump_csv(str(path), format="compute_only"))
        return loaded

    def _stage(self, model: nn.Sequential, stage: int) -> _PipelineStageBase:
        module: Any = stage_module(model, stage, self.placed.num_stages)
        if self.case.cut == "apart":
            module = copy.deepcopy(module)
        if self.case.wrapper == "compile":
            module = torch.compile(module, backend="eager")
        if self.case.wrapper == "ddp":
            group = self.placed.group_along("dp")
            module = nn.parallel.DistributedDataParallel(
                module, process_group=group, find_unused_parameters=True
            )
        total, group = self.placed.num_stages, self.placed.group_along("pp")
        shapes = self._shapes(stage) if self.case.model == "reentrant" else {}
        return PipelineStage(module, stage, total, CPU, group=group, **shapes)

    def _shapes(self, stage: int) -> dict[str, Any]:
        """Returns example tensors: reentrant checkpoints forbid torch to find shapes by itself."""
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        hidden = torch.zeros(1, TOKENS, WIDTH, requires_grad=True)
        logits = torch.zeros(1, TOKENS, VOCAB, requires_grad=True)
        last = self.placed.num_stages - 1
        return {
            "input_args": tokens if stage == 0 else hidden,
            "output_args": logits if stage == last else hidden,
        }

    def _traced(self, model: nn.Sequential) -> list[_PipelineStageBase]:
        starts = range(self._layers, LAYERS, self._layers)
        example = (torch.zeros(1, TOKENS, dtype=torch.long),)
        spec = {str(layer): SplitPoint.BEGINNING for layer in starts}
        pipe = pipeline(model, mb_args=example, split_spec=spec)
        if self.case.tied == "pipe":
            self.tied = pipe.replicated_params
        group = self.placed.group_along("pp")
        return [pipe.build_stage(stage, CPU, group) for stage in self.placed.local_stages]


def load(schedule: PipelineScheduleMulti, write: Callable[[Path], object]) -> None:
    """Gives a schedule the file that `write` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        write(path)
        schedule._load_csv(str(path))


launches: list[str] = []


class CountingShared(PipelineShared):
    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        launches.append("shared")
        return super().launch(bucket, reduction, group)


class CountingData(DataParallel):
    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        launches.append("data")
        return super().launch(bucket, reduction, group)
