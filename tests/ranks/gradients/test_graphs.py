"""Verbs inside of CUDA graphs and compiled regions: refused in words, or run as written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn

from pipegrad import Bucketer, Scheduler, Stage, Topology
from tests.support.gradients.cases import Case, give, grads, on, outcome, replicated, replies, stage
from tests.support.gradients.placements import compute

TWO: list[Case] = []

two = replies(2, TWO)


def capturing() -> AbstractContextManager[Any]:
    yes: Callable[[], bool] = lambda: True  # noqa: E731
    return mock.patch.multiple(torch.cuda, is_initialized=yes, is_current_stream_capturing=yes)


@on(TWO)
def captured() -> Any:
    module = stage(w=(4,))
    sync, bucketer = replicated(module), Bucketer()
    topology = Topology.create(pipeline=1)
    scheduler = Scheduler(
        [Stage(nn.Linear(2, 2), 0)],
        topology,
        schedule="gpipe",
        num_microbatches=1,
        loss_fn=lambda y, t: (y - t).sum(),
    )
    x = torch.ones(1, 2)
    verbs: dict[str, Callable[[], object]] = {
        "prepare": sync.prepare,
        "clip_grad_norm_": lambda: sync.clip_grad_norm_(1.0),
        "publish": sync.publish,
        "publish_if_due": sync.publish_if_due,
        "check_replicas": sync.check_replicas,
        "all_reduce": lambda: bucketer.all_reduce(torch.ones(2), callback=print),
        "flush": bucketer.flush,
        "step": lambda: scheduler.step(x, target=x),
        "evaluate": lambda: scheduler.evaluate(x),
    }
    with capturing():
        said = {verb: outcome(call) for verb, call in verbs.items()}
    sync.prepare()
    give(module, w=1.0)
    with capturing():
        said["stage_final"] = outcome(lambda: sync.stage_final(0))
        said["finish"] = outcome(sync.finish)
    sync.stage_final(0)
    sync.finish()
    scheduler.step(x, target=x)
    return said, grads(module)


def test_a_verb_is_refused_while_a_cuda_graph_is_captured(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 19. A replay runs no Python, so it would synchronise nothing."""
    for reply in two:
        said, after = reply["captured"]
        for verb, words in said.items():
            assert words.startswith(f"StepError: {verb}() while a CUDA graph is captured"), words
        assert after == {"w": [1.0] * 4}


@on(TWO)
def compiled() -> Any:
    module = stage(w=(4,))
    sync = replicated(module)
    step = torch.compile(
        lambda g: compute(sync, lambda: (module.get_parameter("w") * g).sum().backward()),
        backend="eager",
    )
    step(torch.full((4,), 3.0))
    return grads(module)


def test_verbs_in_compiled_code_run_between_its_graphs(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 19."""
    assert [reply["compiled"] for reply in two] == [{"w": [3.0] * 4}] * 2
