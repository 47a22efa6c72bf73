"""One model under any placement, trained by one process and by ranks: what each of them saw."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, cut
from tests.support.pipeline.placement_cases import (
    MAX_NORM,
    PRECISIONS,
    Case,
    boundaries,
    build,
    loss_of,
    make_handlers,
)
from tests.support.pipeline.schedulers import share, topology

# One process.


@dataclass
class Truth:
    """What one process sees, or a rank that says the same.

    Attributes:
        losses: Of every batch.
        evaluated: Of the first batch of each step, after it.
        norms: Before clipping.
        read: Parameters after the first step.
        parameters: In the end.
        gradients: Of the first step, before clipping.
        terms: For each of these the sum of the absolute values of all that it is a sum of.
    """

    losses: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    read: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)


def truth(case: Case) -> Truth:
    """Returns how one process trains; many cases are one to it."""
    known = replace(case, handlers="", schedule="", recompute="", buckets="", after="", end="")
    return _truth(known)


@functools.cache
def _truth(case: Case) -> Truth:
    model = build(case).float()  # the master copy, where parameters are of lower precision
    named = dict(model.named_parameters(remove_duplicate=False))
    optimizer, true = case.make_optimizer(model.parameters()), Truth()
    for step in range(case.steps):
        for part in range(int(case.parts)):
            terms = true.terms if step == 0 else {}
            true.losses.append(_backward(case, model, *case.batch(step, part), terms))
        true.gradients = true.gradients or {name: _copy(p.grad) for name, p in named.items()}
        if case.clip == "clip":
            true.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.zeroed == "none")
        with torch.no_grad():
            true.evaluated.append(_evaluate(case, model, *case.batch(step, 0)))
        true.parameters = {name: p.detach().clone() for name, p in named.items()}
        true.read = true.read or true.parameters
    return true


def _backward(
    case: Case, model: nn.Sequential, tokens: Tensor, target: Tensor, terms: dict[str, Tensor]
) -> float:
    """Adds to the gradients; returns the loss.

    What a rank rounds within a microbatch is rounded here too, whatever it adds up is not.
    """
    if case.is_exact:
        whole = loss_of(model(tokens), target)
        whole.backward()
        return whole.item()
    worker, losses = _worker(case, model), list[float]()
    masters = dict(model.named_parameters(remove_duplicate=False))
    for one, its_target in _microbatches(case, tokens, target):
        loss = loss_of(worker(one), its_target)
        (loss / case.num_microbatches).backward()
        losses.append(loss.item())
        for name, parameter in worker.named_parameters():
            if parameter.grad is not None:
                term, master = parameter.grad.float() / case.data, masters[name]
                master.grad = term.clone() if master.grad is None else master.grad + term
                terms[name] = terms.get(name, torch.zeros(())) + term.abs()
                parameter.grad = None
    return sum(losses) / len(losses)


def _evaluate(case: Case, model: nn.Sequential, tokens: Tensor, target: Tensor) -> float:
    if case.is_exact:
        return loss_of(model(tokens), target).item()
    worker, parts = _worker(case, model), _microbatches(case, tokens, target)
    losses = [loss_of(worker(one), its_target).item() for one, its_target in parts]
    return sum(losses) / len(losses)


def _microbatches(case: Case, tokens: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    number = case.num_microbatches * case.data
    return zip(tokens.chunk(number), target.chunk(number), strict=True)


def _worker(case: Case, model: nn.Sequential) -> nn.Sequential:
    """Returns the model in the precision of the case; no two layers share a parameter."""
    return nn.Sequential(*(copy.deepcopy(layer) for layer in model)).to(case.dtype)


# The ranks.


@dataclass
class Piece:
    """Elements of a parameter, or of its gradient, from `begin` on as they lie in memory."""

    name: str
    begin: int
    tensor: Tensor | None

    @property
    def numel(self) -> int:
        return 0 if self.tensor is None else self.tensor.numel()


@dataclass
class Seen(Truth):
    """What one rank sees.

    Attributes:
        first: The first step's gradients, before clipping, of what its optimizer steps.
        clipped: Those of each step, after clipping, where steps are few.
        stepped: What its optimizer has made of these parameters.
        state: For each of them how many elements of a state the optimizer has.
        idle: Parameters whose gradient is there, and nothing steps.
        padding: Elements of its sharded buckets that are no parameter's.
    """

    first: list[Piece] = field(default_factory=list)
    clipped: list[list[Piece]] = field(default_factory=list)
    stepped: list[Piece] = field(default_factory=list)
    state: dict[str, int] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    padding: int = 0


def run_cases(cases: Sequence[Case]) -> list[Seen]:
    """Trains every case. Runs on every rank."""
    found = []
    for case in cases:
        try:
            found.append(Run(case).train())
        except Exception as error:
            error.add_note(f"in the case: {case}")
            raise
    return found


class Run:
    """One case on one rank."""

    def __init__(self, case: Case) -> None:
        self.case, self.seen, self.at = case, Seen(), topology(case.pipeline)
        places = case.made.stage_to_rank
        parts = cut(build(case), len(places), boundaries=boundaries(len(places)))
        local = self.at.with_stages(places).local_stages
        self.modules = {stage: parts.modules[stage] for stage in local}
        self.scheduler = Scheduler(
            [Stage(m, i, recompute=case.recompute != "keep") for i, m in self.modules.items()],
            self.at,
            schedule=case.made,
            loss_fn=loss_of,
            tied=parts.tied,
            handlers=make_handlers(case.handlers),
            bucket_bytes=600 if case.buckets == "small" else 2**20,
            **PRECISIONS[case.precision],
        )
        self.sync = self.scheduler.sync
        # The Scheduler's publishes by itself, so it has the cases in which the caller does not.
        self.optimizer = (
            case.make_optimizer(self.sync.optimizer_parameters())
            if case.after.startswith("publish")
            else self.scheduler.optimizer(case.make_optimizer)
        )

    def train(self) -> Seen:
        for step in range(self.case.steps):
            self._find_gradients(step)
            if self.case.clip == "clip":
                self.seen.norms.append(self.sync.clip_grad_norm_(MAX_NORM).item())
            if self.case.steps == 3:
                self.seen.clipped.append(self._pieces(of_gradients=True))
            self.optimizer.step()
            self._look(step)
            self.optimizer.zero_grad(set_to_none=self.case.zeroed == "none")
        if self.case.end == "wait":
            self.sync.wait_parameters()
            self.seen.parameters = self._parameters()
            self.sync.check_replicas()
        self.scheduler.close()
        self.seen.parameters = self.seen.parameters or self._parameters()
        self.seen.stepped = self._pieces()
        self._count()
        return self.seen

    def _find_gradients(self, step: int) -> None:
        parts = int(self.case.parts)
        for part in range(parts):
            tokens, target = (share(whole, self.at) for whole in self.case.batch(step, part))
            with self.sync.accumulate() if part + 1 < parts else nullcontext():
                result = self.scheduler.step(tokens, target=target)
            self.seen.losses.append(result.loss.item())
        if step == 0:
            self.seen.first = self._pieces(of_gradients=True)
            used = {id(one.tensor) for one in self.sync.main_parameters()}
            left = [(name, p) for name, p in self._named() if p.grad is not None]
            self.seen.idle = [name for name, p in left if id(p) not in used]

    def _look(self, step: int) -> None:
        """Does what comes after a step of the optimizer."""
        if self.case.after.startswith("publish"):
            self.sync.publish()
        if self.case.after.endswith("eval"):
            tokens, target = (share(whole, self.at) for whole in self.case.batch(step, 0))
            self.seen.evaluated.append(self.scheduler.evaluate(tokens, target=target).loss.item())
        if self.case.after == "read":
            self.sync.wait_parameters()
            self.seen.read = self.seen.read or self._parameters()

    def _pieces(self, *, of_gradients: bool = False) -> list[Piece]:
        stepped = [(one, one.tensor) for one in self.sync.main_parameters()]
        return [
            Piece(one.record.name, one.begin, _copy(tensor.grad if of_gradients else tensor))
            for one, tensor in stepped
        ]

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        modules = self.modules.values()
        return [pair for m in modules for pair in m.named_parameters(remove_duplicate=False)]

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._named()}

    def _count(self) -> None:
        for one in self.sync.main_parameters():
            state = self.optimizer.state.get(one.tensor, {})
            held = [state[name] for name in ("momentum_buffer", "exp_avg") if name in state]
            self.seen.state[one.record.name] = sum(tensor.numel() for tensor in held)
        for bucket in self.sync.plan.buckets:
            if len(bucket.region(self.at.rank, len(bucket.route))) < bucket.payload_numel:
                self.seen.padding += bucket.payload_numel - sum(s.numel for s in bucket.slots)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
