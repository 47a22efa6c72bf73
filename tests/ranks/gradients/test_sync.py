"""GradientSync on hand-made gradients: values, the order of the verbs, alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import GradientSync, Topology
from pipegrad.errors import PlanError
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import (
    SHARED,
    Case,
    Silent,
    give,
    grads,
    on,
    outcome,
    rank,
    replies,
    stage,
    step,
    tied,
)

TWO: list[Case] = []


two = replies(2, TWO)


@on(TWO)
def crossed() -> Any:
    """Two ties that the stages register in opposite order."""
    names = ("a", "b") if rank() == 0 else ("b", "a")
    module = stage(**dict.fromkeys(names, (1,)))
    sync = tied(module, "a", "b")
    here = (10.0 if rank() else 1.0) * 1.0
    return step(sync, module, a=here, b=100 * here), len(sync.plan.launches)


@pytest.mark.smoke
def test_ties_registered_in_another_order_get_their_own_sums(two: list[dict[str, Any]]) -> None:
    """By local order both a and b would be 101 (or 1001) on one of the ranks."""
    gradients, launches = two[0]["crossed"]
    assert (gradients, launches) == ({"a": [11.0], "b": [1100.0]}, 1)
    assert two[1]["crossed"] == ({"b": [1100.0], "a": [11.0]}, 1)


@on(TWO)
def missing() -> Any:
    """`a` only on rank 0, `b` nowhere, `c` everywhere, `d` is frozen."""
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    module = stage(a=(2,), b=(2,), c=(2,), d=frozen)
    found = []
    for options in ({}, {"bucket_bytes": 0}, {"reduce_dtype": torch.float64}):
        sync = tied(module, "a", "b", "c", "d", **options)
        for _ in range(2):
            given = {"a": 1.0, "c": 2.0} if rank() == 0 else {"c": 3.0}
            found.append(step(sync, module, **given))
            module.zero_grad()
    return found


def test_missing_gradients_are_zeros_or_none_and_never_hang(two: list[dict[str, Any]]) -> None:
    right = {"a": [1.0, 1.0], "b": None, "c": [5.0, 5.0], "d": None}
    assert [reply["missing"] for reply in two] == [[right] * 6] * 2
    assert all(reply["missing seconds"] < 20 for reply in two)


@on(TWO)
def zeroed() -> Any:
    """After zero_grad(set_to_none=False) a gradient nobody adds to stays zero."""
    module = stage(a=(2,), b=(2,))
    sync = tied(module, "a", "b")
    first = step(sync, module, a=1.0)
    refused = outcome(sync.prepare)
    module.zero_grad(set_to_none=False)
    second = step(sync, module, a=2.0, b=1.0)
    sync.clip_grad_norm_(1e-3)
    clipped = outcome(sync.prepare)
    module.zero_grad(set_to_none=False)
    third = step(sync, module, b=3.0)
    for p in module.parameters():
        p.grad = torch.ones_like(p)  # the user's own, not yet reduced
    fourth = step(sync, module, a=1.0)
    return refused, clipped, [first, second, third, fourth]


def test_a_reduced_gradient_is_refused_and_a_zeroed_one_accepted(two: list[dict[str, Any]]) -> None:
    for refused, clipped, steps in (reply["zeroed"] for reply in two):
        assert refused == clipped
        assert refused.startswith("StepError: the gradient of '0.a' is already reduced")
        assert "zero_grad()" in refused
        assert "sync.accumulate()" in refused
        assert steps == [
            {"a": [2.0, 2.0], "b": None},
            {"a": [4.0, 4.0], "b": [2.0, 2.0]},
            {"a": [0.0, 0.0], "b": [6.0, 6.0]},
            {"a": [4.0, 4.0], "b": [2.0, 2.0]},
        ]


@on(TWO)
def accumulated() -> Any:
    module = stage(a=(1,))
    found: list[Any] = []
    for options in ({}, {"reduce_dtype": torch.float64}):
        module.zero_grad()
        sync = tied(module, "a", **options)
        with sync.accumulate():
            step(sync, module, a=1.0)
            with sync.accumulate():
                step(sync, module, a=2.0)
            inner = step(sync, module, a=4.0)
        with suppress(KeyError), sync.accumulate():
            sync.prepare()
            give(module, a=8.0)
            raise KeyError
        quiet = sync.statistics().steps
        sync.prepare(divisor=2.0)
        give(module, a=16.0)
        sync.stage_final(rank())
        sync.finish()
        found.append((inner, quiet, grads(module), sync.statistics().collectives))
        module.zero_grad()
        found.append(step(sync, module, a=1.0))
    return found


def test_accumulated_steps_only_add_up_and_are_divided_each(two: list[dict[str, Any]]) -> None:
    """Of both ranks 1 + 2 + 4 + 8, by 1, and 16, by 2."""
    once = [({"a": [7.0]}, 0, {"a": [46.0]}, 1), {"a": [2.0]}]
    assert [reply["accumulated"] for reply in two] == [once * 2] * 2


@on(TWO)
def divided() -> Any:
    """Every gradient once: routed, local, held twice by this rank."""
    topology = Topology.create(pipeline=2, stage_to_rank=[0, 1, 1, 0])
    first, last = stage(w=(1,), own=(1,)), stage(w=(1,))
    modules = {0: first, 3: last} if rank() == 0 else {1: first, 2: last}
    sync = GradientSync(
        modules,
        topology,
        tied=[{0: "w", 3: "w"}, {1: "w", 2: "w"}],
        handlers=[SHARED],
    )
    sync.prepare(divisor=4.0)
    give(first, w=8.0, own=4.0)
    give(last, w=16.0)
    for at in reversed(topology.local_stages):
        sync.stage_final(at)
    sync.finish()
    one = first.get_parameter("w") is last.get_parameter("w")
    return one, grads(first), sync.statistics().collectives, len(sync.records())


def test_a_tie_on_one_rank_is_one_parameter_and_costs_no_collective(
    two: list[dict[str, Any]],
) -> None:
    right = (True, {"w": [6.0], "own": [1.0]}, 0, 2)
    assert [reply["divided"] for reply in two] == [right, right]


@on(TWO)
def out_of_order() -> Any:
    module = stage(a=(1,))
    sync = tied(module, "a")
    said = [
        outcome(sync.finish),
        outcome(lambda: sync.stage_final(rank())),
        outcome(lambda: sync.stage_last_backward(rank())),
        outcome(lambda: sync.stage_final(1 - rank())),
    ]
    sync.prepare()
    said += [
        outcome(lambda: sync.stage_final(1 - rank())),
        outcome(sync.finish),
        outcome(lambda: sync.clip_grad_norm_(1.0)),
    ]
    give(module, a=1.0)
    sync.stage_final(rank())
    said += [outcome(lambda: sync.stage_final(rank())), outcome(sync.prepare)]
    stranger = nn.Parameter(torch.ones(3))
    said += [outcome(lambda: sync.parameters_final(rank(), [stranger]))]
    sync.finish()
    said += [outcome(sync.finish), outcome(lambda: sync.stage_final(rank()))]
    return said, grads(module)


def test_verbs_out_of_order_are_refused_and_do_no_harm(two: list[dict[str, Any]]) -> None:
    for number, reply in enumerate(two):
        said, gradients = reply["out_of_order"]
        here, there = number, 1 - number
        assert [s.split(":")[0] for s in said] == ["StepError"] * len(said)
        expected = [
            "finish() without prepare()",
            "stage_final() outside a step: call prepare() first",
            "stage_last_backward() outside a step: call prepare() first",
            f"stage {there} is not on this rank, which has [{here}]",
            f"stage {there} is not on this rank, which has [{here}]",
            f"finish() before stage_final() of stages [{here}]",
            "clip_grad_norm_() inside a step: call finish() first",
            f"stage {here} is final already",
            "prepare() inside a step",
            f"a parameter of shape (3,) is none of those of stage {here}",
            "finish() without prepare()",
            "stage_final() outside a step",
        ]
        assert [e for e, s in zip(expected, said, strict=True) if e not in s] == []
        assert gradients == {"a": [2.0]}


@on(TWO)
def late() -> Any:
    """A backward after stage_final changes what has left."""
    module = stage(a=(1,))
    sync = tied(module, "a", handlers=[Silent])
    sync.prepare()
    give(module, a=1.0)
    sync.stage_final(rank())
    give(module, a=1.0)
    said = outcome(sync.finish)
    return said, outcome(sync.prepare)


def test_a_gradient_that_changes_after_it_is_final_is_an_error(two: list[dict[str, Any]]) -> None:
    for said, after in (reply["late"] for reply in two):
        assert said.startswith("StepError: autograd added to the gradient of '0.a' after it was")
        assert after == "None"  # what it changed is dropped, and all go on


@on(TWO)
def untied() -> Any:
    """One of the two names of a parameter that this rank holds twice is replaced."""
    topology = Topology.create(pipeline=2, stage_to_rank=[0, 1, 1, 0])
    low, high = topology.local_stages
    modules = {low: stage(w=(1,)), high: stage(w=(1,))}
    ties = [{0: "w", 3: "w"}, {1: "w", 2: "w"}]
    sync = GradientSync(modules, topology, tied=ties, handlers=[PipelineShared])
    modules[high].w = nn.Parameter(torch.zeros(1))
    said = outcome(sync.prepare)
    modules[high].w = modules[low].w
    return said, outcome(sync.prepare)


def test_a_tie_that_comes_apart_is_refused(two: list[dict[str, Any]]) -> None:
    for reply, stages in zip(two, ([0, 3], [1, 2]), strict=True):
        said, repaired = reply["untied"]
        assert said.startswith(f"StepError: '{stages[0]}.w' was one parameter on stages {stages}")
        assert repaired == "None"


@on(TWO)
def aborted() -> Any:
    """A step that fails before anything left can be repeated."""
    module = stage(a=(1,))
    sync = tied(module, "a")
    sync.prepare()
    give(module, a=5.0)
    sync.abort(RuntimeError("out of memory"))
    module.zero_grad()
    return step(sync, module, a=1.0)


def test_a_step_aborted_before_a_launch_can_be_repeated(two: list[dict[str, Any]]) -> None:
    assert [reply["aborted"] for reply in two] == [{"a": [2.0]}] * 2


@contextmanager
def closing(sync: GradientSync) -> Iterator[GradientSync]:
    yield sync
    sync.close()


def test_one_process_needs_no_process_group() -> None:
    first, last = stage(w=(2,), b=(2,)), stage(w=(2,))
    topology = Topology.build(axes=(("pp", 1), ("dp", 1)), stage_to_rank=[0, 0])
    with closing(
        GradientSync({0: first, 1: last}, topology, tied=[["w"]], handlers=[PipelineShared])
    ) as sync:
        sync.check_replicas()
        sync.prepare(divisor=2.0)
        give(first, w=2.0)
        give(last, w=4.0)
        sync.stage_final(1)
        sync.stage_final(0)
        sync.finish()
        assert grads(first) == {"w": [3.0, 3.0], "b": None}
        assert sync.clip_grad_norm_(1.0).item() == pytest.approx(math.sqrt(18))
        assert (sync.statistics().steps, sync.statistics().collectives) == (1, 0)


def test_a_tie_that_nobody_declares_is_refused() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8)
    modules = {
        0: stage(emb=weight, a=torch.randn(3)),
        1: stage(head=weight.clone(), b=torch.randn(3)),
    }
    topology = Topology.build(axes=(("pp", 1), ("dp", 1)), stage_to_rank=[0, 0])
    with pytest.raises(PlanError, match=r"{0: 'emb', 1: 'head'}"):
        GradientSync(modules, topology, handlers=[PipelineShared])
    with closing(
        GradientSync(modules, topology, handlers=[PipelineShared], allow_unsynced=["emb"])
    ):
        pass
