"""The trainer of parity tests: what ranks have of a model, and what one process has of it.

`train` trains either, whatever runs a step: a Scheduler, a schedule of torch under attach, or the
uncut model. `differences` says how far apart they are, and `bits` whether copies are the same.
A test that is `checked` also shows that no access is left to luck.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import GradientSync, Scheduler, Topology, find_tied, schedules
from pipegrad.comm import sync_points
from pipegrad.schedules import Schedule
from pipegrad.testing import OrderChecker
from tests.support.gradients.placements import in_memory_order
from tests.support.pipeline.models import build
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import (
    MOST,
    batch,
    cut,
    digest,
    error,
    named,
    topology,
    wrong,
)
from tests.support.ranked import gathered
from tests.support.rounding import ADAM_EPS

T = TypeVar("T")
tied = partial(build, "tied")
Held = Mapping[str, nn.Parameter]


class OnRanks(Protocol):
    @property
    def num_ranks(self) -> int: ...


class OnMesh:
    """A case on so many ranks, pipeline x data."""

    mesh: str

    @property
    def pipeline(self) -> int:
        return int(self.mesh[0])

    @property
    def data(self) -> int:
        return int(self.mesh[2])

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data


def on_ranks(cases: Iterable[OnRanks], **options: float) -> list[Any]:
    """Returns cases as parameters, each on its number of ranks."""
    return [
        pytest.param(case, id=str(case), marks=pytest.mark.ranks(case.num_ranks, **options))
        for case in cases
    ]


Test = Callable[..., None]


def checked(*always: object) -> Callable[[Test], Test]:
    """Lets a test on ranks run under an OrderChecker, which must find nothing.

    It does so with these parameters. With PIPEGRAD_CHECK_ORDER=1, for the night, with all of them.
    """

    def add(test: Test) -> Test:
        @functools.wraps(test)
        def watched(**given: Any) -> None:
            is_night = os.environ.get("PIPEGRAD_CHECK_ORDER") == "1"
            if not is_night and not any(value in always for value in given.values()):
                test(**given)
                return
            if isinstance(sync_points.in_use, OrderChecker):  # of the process, by the threads alone
                sync_points.in_use.__exit__()
            with OrderChecker() as checker:
                test(**given)
            assert not checker.violations, "\n".join(map(str, checker.violations))

        return watched

    return add


def once(function: Callable[..., T]) -> Callable[..., T]:
    """Lets rank 0 alone compute what all ranks ask for with the same arguments."""

    @functools.cache
    def sent(*args: Any) -> Any:
        found = [packed(function(*args)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        return pickle.loads(found[0] or b"")

    return sent


class _Tensors(pickle.Pickler):
    """Pickles what tensors hold; for small ones torch takes fifty times as long."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        dense = value.detach().clone()
        raw = torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage())
        return _unpacked, (raw.numpy().tobytes(), dense.dtype, dense.shape, dense.stride())


def _unpacked(raw: bytes, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, stride)


def packed(value: object) -> bytes:
    """Pickles a value with many small tensors."""
    buffer = io.BytesIO()
    _Tensors(buffer).dump(value)
    return buffer.getvalue()


@dataclass
class Seen:
    """What came of training.

    Attributes:
        losses: Of each part of each step, where there is one.
        norms: Of each step, before clipping.
        gradients: Of each step, by name, before clipping.
        parameters: In the end, by name.
    """

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train(
    step: Callable[[int, int], Tensor | None],
    held: Callable[[], Held],
    *,
    sync: GradientSync | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 2,
    parts: int | Sequence[int] = 1,
    clip: tuple[float, float] | None = None,
    set_to_none: bool = True,
    look: Callable[[int], object] = abs,
) -> Seen:
    """Trains, on every rank or in one process.

    Args:
        step: Forward and backward of a part of a step; returns the loss, where there is one.
        held: Returns the parameters by their names in the uncut model.
        sync: Of ranks; None in one process.
        optimizer: None leaves the parameters as they are.
        steps: How many.
        parts: How many batches a step, or each step, accumulates.
        clip: Maximum and type of the norm.
        set_to_none: What becomes of gradients after a step.
        look: Is called after a step of the optimizer, while gradients are still there.
    """
    seen = Seen()
    for number in range(steps):
        num_parts = parts if isinstance(parts, int) else parts[number]
        for part in range(num_parts):
            is_last = part + 1 == num_parts
            with nullcontext() if sync is None or is_last else sync.accumulate():
                loss = step(number, part)
            seen.losses += [] if loss is None else [loss.detach().clone()]
        seen.gradients.append(copied({name: p.grad for name, p in held().items()}))
        if clip is not None:
            if sync is None:
                whole = list(dict.fromkeys(held().values()))
                seen.norms.append(nn.utils.clip_grad_norm_(whole, *clip))
            else:
                seen.norms.append(sync.clip_grad_norm_(*clip))
        if optimizer is not None:
            optimizer.step()
            look(number)
            optimizer.zero_grad(set_to_none=set_to_none)
        else:
            for parameter in held().values():
                parameter.grad = None
    seen.parameters = copied(held())
    return seen


def copied(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: None if t is None else t.detach().clone() for name, t in tensors.items()}


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=ADAM_EPS)


def differences(
    seen: Seen,
    true: Seen,
    most: float,
    *,
    later: float | None = None,
    parameters: float | None = None,
    lenient: bool = False,
) -> dict[str, float]:
    """Returns the errors that are too large, by name, relative to the largest true value.

    Args:
        seen: Of a rank; what a rank has none of is not asked for.
        true: Of one process; gradients of as many steps as are to be compared.
        most: How large the error of a gradient may be.
        later: How large that of a loss or a norm may be; by default as large.
        parameters: How large that of a parameter in the end may be; None does not ask for it.
        lenient: As in `error`.
    """
    found, numbers, ends = dict[str, float](), dict[str, float](), dict[str, float]()
    for kind in ("losses", "norms"):
        ours, theirs = getattr(seen, kind), getattr(true, kind)
        pairs = zip(ours, theirs, strict=True) if ours else ()
        numbers |= {f"{kind} {n}": error(*pair) for n, pair in enumerate(pairs)}
    for step, (mine, whole) in enumerate(zip(seen.gradients, true.gradients, strict=False)):
        for name, gradient in mine.items():
            found[f"step {step} {name}"] = error(gradient, whole[name], lenient=lenient)
    if parameters is not None:
        for name, parameter in seen.parameters.items():
            ends[f"{name} in the end"] = error(parameter, true.parameters[name])
    return wrong(found, most) | wrong(numbers, later or most) | wrong(ends, parameters or 0.0)


def stepped(sync: GradientSync) -> dict[str, nn.Parameter]:
    """Returns what this rank's optimizer steps, by name and first element."""
    return {f"{one.record.name} from {one.begin}": one.tensor for one in sync.main_parameters()}


def differences_of_stepped(
    sync: GradientSync,
    gradients: Mapping[str, Tensor | None],
    true: Mapping[str, Tensor | None],
) -> dict[str, float]:
    """Returns the errors of gradients of what `stepped` returns, relative to whole ones, by name.

    Args:
        sync: Whose optimizer steps.
        gradients: Of parameters, or of shards of them.
        true: Of one process.
    """
    found = {}
    for one in sync.main_parameters():
        mine, whole = gradients[f"{one.record.name} from {one.begin}"], true[one.record.name]
        if not one.sharded or mine is None or whole is None:
            found[one.record.name] = error(mine, whole)
        elif len(mine):
            alike = torch.empty_like(sync.parameter(one.record)).copy_(whole)
            part = in_memory_order(alike)[one.begin : one.begin + len(mine)]
            found[one.record.name] = ((mine - part).abs().max() / whole.abs().max()).item()
    return found


def bits(tensors: Mapping[str, Tensor | None], ties: Sequence[Sequence[str]]) -> dict[str, int]:
    """Asserts that copies have the same bits on all ranks; returns how many ranks hold each.

    Args:
        tensors: Of this rank.
        ties: Names that belong together; each counts as the first of them.
    """
    first = {name: tie[0] for tie in ties for name in tie}
    mine, found = dict[str, set[str]](), dict[str, list[set[str]]]()
    for name, tensor in tensors.items():
        mine.setdefault(first.get(name, name), set()).add(digest(tensor))
    for others in gathered(mine):
        for name, known in others.items():
            found.setdefault(name, []).append(known)
    assert {name: known for name, known in found.items() if len(set().union(*known)) > 1} == {}
    return {name: len(known) for name, known in found.items()}


def scheduled(
    model: nn.Sequential,
    schedule: Any,
    at: Topology,
    num_microbatches: int | None,
    *,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_of,
    **options: Any,
) -> Scheduler:
    """Returns a Scheduler of this rank's stages of a model of eight layers."""
    made = schedule
    if not isinstance(schedule, Schedule):
        generator = schedules.registry.resolve(schedule)
        sizes = {"num_ranks": at.size("pp"), "num_microbatches": num_microbatches or 0}
        made = schedules.generate(generator, **sizes)
    return Scheduler(
        cut(model, made.stage_to_rank, at),
        at,
        schedule=schedule,
        num_microbatches=num_microbatches,
        loss_fn=loss_fn,
        tied=find_tied(model),
        **options,
    )


def held_by(scheduler: Scheduler) -> dict[str, nn.Parameter]:
    """Returns the parameters of this rank."""
    return named(list(scheduler.steps.pipeline.stages))


class Twins:
    """A model of eight layers over two ranks, a stage on each, and the same in one process."""

    def __init__(
        self,
        make: Callable[[], nn.Sequential] = tied,
        num_microbatches: int = 4,
        *,
        schedule: str | Schedule = "1f1b",
        most: float = MOST,
    ) -> None:
        self.true, self.rows, self.most = make(), 2 * num_microbatches, most
        number = num_microbatches if isinstance(schedule, str) else None
        self.scheduler = scheduled(make(), schedule, topology(2), number)
        self.stages = list(self.scheduler.steps.pipeline.stages)
        self.close = self.scheduler.close

    def step(self, seed: int, *, num_parts: int = 1) -> None:
        """Takes a step on both sides, in one process with a batch in parts, and compares them."""
        tokens, target = batch(seed, self.rows)
        loss = self.scheduler.step(tokens, target=target).loss
        assert error(loss, self.alone(tokens, target, num_parts)) <= MOST
        assert wrong(self.apart(), self.most) == {}

    def alone(self, tokens: Tensor, target: Tensor, num_parts: int = 1) -> Tensor:
        """Runs one process; returns the loss."""
        total = torch.zeros(())
        for x, y in zip(tokens.chunk(num_parts), target.chunk(num_parts), strict=True):
            total += backward(loss_of(self.true(x), y) / num_parts).detach()
        return total

    def apart(self) -> dict[str, float]:
        """Returns how far gradients are apart, by name in the uncut model; and forgets them."""
        mine, theirs = (
            {name.replace("_orig_mod.", ""): parameter for name, parameter in known}
            for known in (
                held_by(self.scheduler).items(),
                self.true.named_parameters(remove_duplicate=False),
            )
        )
        found = {name: error(p.grad, theirs[name].grad) for name, p in mine.items()}
        for parameter in (*mine.values(), *theirs.values()):
            parameter.grad = None
        return found
