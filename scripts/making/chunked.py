"""Texts in chunks of time, by hand: the stages of a cut in one process, without a Scheduler."""
# ruff: noqa: ANN401 - what stages hand on

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from pipegrad.partition.cut_model import Cut
from pipegrad.pipeline.trees import flattened

Pairs = list[tuple[Any, Any]]  # what a stage made, and the leaf that is handed on


def leaf_of(value: Any) -> Any:
    """Returns a leaf of the same memory, with a gradient if the value has one."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def step(cut: Cut, batch: Mapping[str, Any], lengths: Sequence[int]) -> Tensor:
    """Runs the chunks of a batch forward and backward; gradients go into the cut's modules.

    Returns:
        The mean loss of all labels.
    """
    stages: list[Any] = cut.stages(range(cut.num_stages), own_loss=True)
    given, dims = stages[-1].in_time({**batch, "target": batch["labels"]})
    given = dict(given)
    target = given.pop("target")
    states: list[Any] = [None] * len(stages)
    runs, losses, weights = list[list[Pairs]](), list[Tensor](), list[Tensor]()
    for begin, end in pairwise([0, *accumulate(lengths)]):
        part = {
            name: x[:, begin:end] if isinstance(x, Tensor) and name not in dims else x
            for name, x in given.items()
        }
        known, run, outputs = dict[str, Any](), list[Pairs](), list[Any]()
        for number, stage in enumerate(stages):
            taken = [known[name] for name in stage.inputs[:-1]]
            *outputs, state = stage.forward([*taken, part, states[number]])
            made = dict(zip(stage.outputs, outputs, strict=True))
            is_last = number + 1 == len(stages)
            handed = {} if is_last else {name: leaf_of(x) for name, x in made.items()}
            known |= handed
            leaves, rebuilt = flattened(state)
            carried = [(x, leaf_of(x)) for _, x in leaves]
            states[number] = rebuilt([leaf for _, leaf in carried])
            run.append([(made[name], leaf) for name, leaf in handed.items()] + carried)
        loss_fn: Any = cut.loss_fn
        loss, weight, _ = loss_fn(*outputs, {n: x[:, begin:end] for n, x in target.items()})
        losses.append(loss)
        weights.append(weight)
        runs.append(run)
    total = torch.stack(weights).sum()
    for loss, run in reversed([*zip(losses, runs, strict=True)]):
        for number, pairs in reversed([*enumerate(run)]):
            roots = [(x, leaf.grad) for x, leaf in pairs if getattr(leaf, "grad", None) is not None]
            if number + 1 == len(stages):
                roots.append((loss, 1 / total))
            torch.autograd.backward([x for x, _ in roots], [grad for _, grad in roots])
    return torch.stack(losses).detach().sum() / total
