"""What the parity tests of Scheduler share: its cases run on every rank, against one process.

A `Case` trains the uncut tied model under a schedule; a `Wiring` has stages hung together by names,
which one process runs one after the other. Both report errors by step and name, relative to the
largest true value.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import (
    Schedule,
    Scheduler,
    Stage,
    Topology,
    find_shared,
    lower,
    schedules,
    verify,
)
from pipegrad.schedules import Action, Kind
from tests.runtime.models import TOKENS, VOCAB, WIDTH, build
from tests.runtime.pipelines import loss_of, stage_module

ROWS = 2  # of a microbatch
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "hop-aware-1f1b", "interleaved-1f1b", "vee")
TIED = ("0.weight", "7.weight")

Sent = tuple[str, str, int, int]  # name, "F" or "B", from rank, to rank


def greedy(
    places: Sequence[int], num_microbatches: int, *, first: Kind = "B", name: str = "greedy"
) -> Schedule:
    """Returns a schedule for any placement: each rank does the first thing that it can.

    Args:
        places: For each stage its rank.
        num_microbatches: Microbatches of a step.
        first: "B": backwards before forwards, late stages before early ones. "F": forwards first,
            and those of early stages, so that as much as possible is kept for later.
        name: What it is called.
    """

    def priority(action: Action) -> tuple[bool, int, int]:
        early = action.kind == first == "F"
        return action.kind != first, action.stage if early else -action.stage, action.microbatch

    kinds: tuple[Kind, Kind] = ("F", "B")
    numbers = range(num_microbatches)
    left = [Action(s, kind, m) for s in range(len(places)) for kind in kinds for m in numbers]
    left.sort(key=priority)
    rows: list[list[Action]] = [[] for _ in range(max(places) + 1)]
    done = set[Action]()
    while left:
        now = dict[int, Action]()
        for action in left:
            if places[action.stage] not in now and needs(action, len(places)) <= done:
                now[places[action.stage]] = action
        for rank, action in now.items():
            rows[rank].append(action)
            left.remove(action)
        done.update(now.values())
    return Schedule(name, num_microbatches, tuple(places), tuple(map(tuple, rows)))


def needs(action: Action, num_stages: int) -> set[Action]:
    stage, kind, m = action
    if kind == "F":
        return {Action(stage - 1, "F", m)} if stage else set()
    after = {Action(stage + 1, "B", m)} if stage + 1 < num_stages else set()
    return {Action(stage, "F", m), *after}


def vee(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns a schedule whose stages go there and back: the first rank holds the last one too."""
    return greedy([*range(num_ranks), *reversed(range(num_ranks))], num_microbatches, name="vee")


@functools.cache
def topology(pipeline: int) -> Topology:
    return Topology.create(pipeline=pipeline)


# Errors.


def error(found: Tensor | None, true: Tensor | None, *, lenient: bool = False) -> float:
    """Returns the largest error, relative to the largest true value.

    Args:
        found: None is infinitely wrong, unless that is the truth.
        true: What one process has.
        lenient: Zeros are as good as None, and None as zeros.
    """
    if lenient:
        either = found if found is not None else true
        zeros = None if either is None else torch.zeros_like(either)
        found, true = (zeros if t is None else t for t in (found, true))
    if found is None or true is None:
        return 0.0 if found is true else math.inf
    if found.shape != true.shape:
        return math.inf
    largest = true.abs().max().item()
    return ((found - true).abs().max() / (largest or 1.0)).item()


def wrong(errors: Mapping[str, float], most: float) -> dict[str, float]:
    """Returns the errors that are too large, or not a number."""
    return {name: found for name, found in errors.items() if not found <= most}


def digest(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    raw = bytes(tensor.detach().flatten().view(torch.uint8).tolist())
    return hashlib.sha256(raw).hexdigest()


@dataclass
class Report:
    """What one rank found in a case.

    Attributes:
        errors: By step and name.
        bits: For each step digests of the tied gradients that this rank holds.
        losses: Of each step.
        buffers: Receive buffers after each step.
        most_buffers: What proofs allow.
        sent: What crosses, in the program of a step that is not the first.
        notes: What else a case wants to tell.
    """

    errors: dict[str, float] = field(default_factory=dict)
    bits: list[set[str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    most_buffers: int = 0
    sent: list[Sent] = field(default_factory=list)
    notes: Any = None


def most_buffers(scheduler: Scheduler) -> int:
    """Returns how many receive buffers proofs allow this rank, in training and in evaluation."""
    rank = scheduler.topology.coordinate(scheduler.topology.pipeline)
    program = scheduler.program
    forwards = verify(lower(scheduler.schedule, links=program.links, forward_only=True))
    return max(scheduler.proof.receive_buffers[rank], forwards.receive_buffers[rank])


def sent(scheduler: Scheduler) -> list[Sent]:
    program = scheduler.program
    return [(program.links[c.link].name, *c[1:]) for c in program.channels]


# The uncut model, under every schedule.


@dataclass(frozen=True)
class Case:
    """A way to train the tied model."""

    schedule: str
    pipeline: int
    num_microbatches: int
    data: int = 1
    handlers: tuple[str, ...] = ("pipeline-shared", "data-parallel")

    def __str__(self) -> str:
        ranks = (
            f"{self.pipeline} x {self.data} ranks" if self.data > 1 else f"{self.pipeline} ranks"
        )
        told = f"{self.schedule}, {ranks}, {self.num_microbatches} microbatches"
        return told if "noop" not in self.handlers else f"{told}, unsynced"

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data

    @property
    def spec(self) -> Any:
        """What a user would write."""
        if self.schedule == "vee":
            return vee(self.pipeline, self.num_microbatches)
        if self.schedule == "hop-aware-1f1b":
            hops = [0.6, 0.0, 1.2][: self.pipeline - 1]
            return {"name": self.schedule, "hop_seconds": hops, "compute_seconds": 1.0}
        return self.schedule

    @property
    def places(self) -> tuple[int, ...]:
        if isinstance(self.spec, Schedule):
            return self.spec.stage_to_rank
        generator = schedules.registry.resolve(self.spec)
        return schedules.generate(
            generator, num_ranks=self.pipeline, num_microbatches=self.num_microbatches
        ).stage_to_rank

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns tokens and targets, over all data ranks."""
        generator = torch.Generator().manual_seed(100 + step)
        rows = ROWS * self.num_microbatches * self.data
        tokens = torch.randint(VOCAB, (2, rows, TOKENS), generator=generator)
        return tokens[0], tokens[1]


def cases(pipeline: int) -> Iterator[Case]:
    """Yields every schedule with every number of microbatches that it is defined for."""
    for schedule in SCHEDULES:
        for number in sorted({1, 2, pipeline, 2 * pipeline, 4 * pipeline + 1}):
            if schedule != "interleaved-1f1b" or number % pipeline == 0:
                yield Case(schedule, pipeline, number)


def cut(model: nn.Sequential, places: Sequence[int], at: Topology) -> list[Stage]:
    """Returns this rank's stages of a model of eight layers."""
    local = at.with_stages(places).local_stages
    return [Stage(stage_module(model, s, len(places)), s) for s in local]


def named(stages: Sequence[Stage]) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for stage in stages
        for name, parameter in stage.module.named_parameters(remove_duplicate=False)
    }


def share(batch: Tensor, at: Topology) -> Tensor:
    """Returns this data rank's part of a batch."""
    return batch.chunk(at.size("dp"))[at.coordinate("dp")]


def compare(
    errors: dict[str, float],
    step: object,
    mine: Mapping[str, nn.Parameter],
    true: nn.Module,
    *,
    lenient: bool = False,
) -> None:
    """Adds the errors of all gradients, and forgets the gradients."""
    theirs = dict(true.named_parameters(remove_duplicate=False))
    for name, parameter in mine.items():
        found = error(parameter.grad, theirs[name].grad, lenient=lenient)
        errors[f"step {step} {name}"] = found
    for parameter in (*mine.values(), *theirs.values()):
        parameter.grad = None


def run_case(case: Case) -> Report:
    """Trains two steps, the first of which learns what values look like. Runs on every rank."""
    at, report = topology(case.pipeline), Report()
    model, true = build("tied"), build("tied")
    stages = cut(model, case.places, at)
    scheduler = Scheduler(
        stages,
        at,
        schedule=case.spec,
        num_microbatches=case.num_microbatches,
        loss_fn=loss_of,
        shared=find_shared(model),
        handlers=case.handlers,
    )
    for step in range(2):
        tokens, target = case.batch(step)
        loss = scheduler.step(share(tokens, at), target=share(target, at)).loss
        true_loss = loss_of(true(tokens), target)
        true_loss.backward()
        report.losses.append(loss.item())
        report.errors[f"step {step} loss"] = error(loss, true_loss.detach())
        mine = named(stages)
        report.bits.append({digest(mine[name].grad) for name in TIED if name in mine})
        compare(report.errors, step, mine, true)
        report.buffers.append(scheduler.receive_buffers)
    report.most_buffers = most_buffers(scheduler)
    scheduler.close()
    return report


# Stages that are hung together by names.

Part = tuple[nn.Module, str, str]  # a stage, and its inputs and outputs, separated by spaces


class Piece(nn.Module):
    """A stage of one expression, which may use the layer and the parameters."""

    def __init__(self, function: Callable[..., Any], **parameters: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, shape in parameters.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self._function = function

    def forward(self, *values: Any) -> Any:
        return self._function(self, *values)


class Plain(nn.Module):
    """A stage of one expression, without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *values: Any) -> Any:
        return self._function(*values)


@dataclass(frozen=True)
class Wiring:
    """Stages, where they are, and what they are given."""

    name: str
    parts: Callable[[], list[Part]]
    places: tuple[int, ...]
    first: Kind = "B"
    num_microbatches: int = 6
    given: Callable[[int], dict[str, object]] = lambda rows: {}
    lenient: bool = False
    loss: Callable[[Tensor, Tensor], Tensor] = field(default_factory=lambda: mean_square)
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        told = f"{self.name} {self.places}, {self.first} first, {self.num_microbatches}"
        return told + "".join(f", {name} {value}" for name, value in self.options)

    @property
    def num_ranks(self) -> int:
        return max(self.places) + 1

    def batch(self, step: int) -> tuple[dict[str, Any], Tensor]:
        torch.manual_seed(200 + step)
        rows = ROWS * self.num_microbatches
        x, target = torch.randn(2, rows, TOKENS, WIDTH)
        return {"x": x, **self.given(rows)}, target


def alone(parts: Sequence[Part], given: Mapping[str, Any]) -> Tensor:
    """Returns what the last stage makes, in one process."""
    known = dict(given)
    for module, inputs, outputs in parts:
        keywords: Sequence[str] = getattr(module, "keywords", ())
        positions = [known[name] for name in inputs.split() if name not in keywords]
        out = module(*positions, **{name: known[name] for name in keywords})
        names = outputs.split()
        if isinstance(out, Mapping):
            known |= {name: out[name] for name in names}
        else:
            values = out if isinstance(out, tuple | list) else (out,)
            known |= dict(zip(names, values, strict=True))
    last: Tensor = known[parts[-1][2]]
    return last


def microbatches(
    wiring: Wiring, given: Mapping[str, Any], target: Tensor
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yields what each microbatch is given, and its target."""
    number = wiring.num_microbatches
    for m in range(number):
        cut = {n: v.chunk(number)[m] if _is_cut(v) else v for n, v in given.items()}
        yield cut, target.chunk(number)[m]


def accumulated(
    wiring: Wiring, parts: Sequence[Part], given: Mapping[str, Any], target: Tensor
) -> Tensor:
    """Returns the mean loss of all microbatches, and leaves the gradients.

    Not by backward(): torch may leave the gradients of two parameters in one storage, and then adds
    those of the next microbatch to both.
    """
    parameters = [p for module, _, _ in parts for p in module.parameters() if p.requires_grad]
    total = torch.zeros(())
    for part, wanted in microbatches(wiring, given, target):
        loss = wiring.loss(alone(parts, part), wanted) / wiring.num_microbatches
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                before = 0.0 if parameter.grad is None else parameter.grad
                parameter.grad = gradient + before
        total += loss.detach()
    return total


@torch.no_grad()
def evaluated(
    wiring: Wiring, parts: Sequence[Part], given: Mapping[str, Any], target: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the mean loss, and what the last stage makes."""
    losses, outputs = list[Tensor](), list[Tensor]()
    for part, wanted in microbatches(wiring, given, target):
        outputs.append(alone(parts, part))
        losses.append(wiring.loss(outputs[-1], wanted))
    whole = torch.cat(outputs) if outputs[0].dim() else torch.stack(outputs)
    return torch.stack(losses).mean(), whole


def _is_cut(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def built(wiring: Wiring) -> list[Part]:
    torch.manual_seed(11)
    return wiring.parts()


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out.reshape(target.shape), target)


def run_wiring(wiring: Wiring) -> Report:
    """Trains three steps and evaluates two, the first ones of which learn. Runs on every rank."""
    at, report = topology(wiring.num_ranks), Report()
    parts, true = built(wiring), built(wiring)
    whole = nn.ModuleList([module for module, _, _ in true])
    local = at.with_stages(wiring.places).local_stages
    stages = [Stage(parts[s][0], s, parts[s][1].split(), parts[s][2].split()) for s in local]
    scheduler = Scheduler(
        stages,
        at,
        schedule=greedy(wiring.places, wiring.num_microbatches, first=wiring.first),
        loss_fn=wiring.loss,
        **dict(wiring.options),
    )
    mine = {f"{s.index}.{n}": p for s in stages for n, p in named([s]).items()}
    for step in range(3):
        given, target = wiring.batch(step)
        result = scheduler.step(**given, target=target)
        true_loss = accumulated(wiring, true, given, target)
        report.losses.append(result.loss.item())
        report.errors[f"step {step} loss"] = error(result.loss, true_loss)
        compare(report.errors, step, mine, whole, lenient=wiring.lenient)
        report.buffers.append(scheduler.receive_buffers)
    for step in range(2):
        given, target = wiring.batch(step)
        result = scheduler.evaluate(**given, target=target)
        true_loss, true_out = evaluated(wiring, true, given, target)
        report.errors[f"evaluation {step} loss"] = error(result.loss, true_loss)
        for out in result.outputs:
            report.errors[f"evaluation {step} out"] = error(out, true_out)
    report.most_buffers = most_buffers(scheduler)
    report.sent = sent(scheduler)
    report.notes = [(link.name, link.differentiable) for link in scheduler.program.links]
    scheduler.close()
    return report


def run_each(run: Callable[[Any], Report], tasks: Sequence[Any]) -> dict[str, Report]:
    """Runs one after the other; an error says where it was."""
    found = dict[str, Report]()
    for task in tasks:
        try:
            found[str(task)] = run(task)
        except Exception as error:
            error.add_note(f"in the case: {task}")
            raise
    return found
