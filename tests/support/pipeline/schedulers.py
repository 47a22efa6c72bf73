"""What tests of Scheduler share: schedules, errors, and what a rank has and is given."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipegrad import Stage, Topology
from pipegrad.schedules import Action, Kind, Schedule
from tests.support.pipeline.models import TOKENS, VOCAB
from tests.support.pipeline.pipelines import stage_module
from tests.support.rounding import rounding

ROWS = 2  # of a microbatch
MOST = rounding(17 * ROWS * TOKENS)  # of the largest batch


@functools.cache
def topology(pipeline: int) -> Topology:
    return Topology.create(pipeline=pipeline)


# Schedules.


def greedy(
    places: Sequence[int],
    num_microbatches: int,
    *,
    first: Kind = "B",
    name: str = "greedy",
    late: int = -1,
) -> Schedule:
    """Returns a schedule for any placement: each rank does the first thing that it can.

    Args:
        places: For each stage its rank.
        num_microbatches: Microbatches of a step.
        first: "B": backwards before forwards, late stages before early ones. "F": forwards first,
            and those of early stages, so that as much as possible is kept for later.
        name: What it is called.
        late: Backward is split, and each stage this many weights' gradients late; not if below 0.
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
    schedule = Schedule(name, num_microbatches, tuple(places), tuple(map(tuple, rows)))
    return schedule if late < 0 else split(schedule, late)


def split(schedule: Schedule, late: int) -> Schedule:
    """Returns a schedule whose backwards are split: weights' gradients come `late` later."""

    def turns(row: Sequence[Action]) -> Iterator[Action]:
        waiting = dict[int, list[Action]]()
        for action in row:
            if action.kind == "F":
                yield action
                continue
            yield action._replace(kind="I")
            mine = waiting.setdefault(action.stage, [])
            mine.append(action._replace(kind="W"))
            if len(mine) > late:
                yield mine.pop(0)
        for mine in waiting.values():
            yield from mine

    return replace(schedule, actions=tuple(tuple(turns(row)) for row in schedule.actions))


def needs(action: Action, num_stages: int) -> set[Action]:
    stage, kind, m = action
    if kind == "F":
        return {Action(stage - 1, "F", m)} if stage else set()
    after = {Action(stage + 1, "B", m)} if stage + 1 < num_stages else set()
    return {Action(stage, "F", m), *after}


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
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


# What a rank has, and is given.


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


def batch(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and targets, over all data ranks."""
    generator = torch.Generator().manual_seed(seed)
    tokens, target = torch.randint(VOCAB, (2, rows, TOKENS), generator=generator)
    return tokens, target
