"""Verbs inside of CUDA graphs and compiled regions: refused in words, or run as written."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

from pipegrad import Bucketer, Scheduler, Stage, Topology
from tests.support.gradients.cases import give, grads, outcome, replicated, stage
from tests.support.gradients.placements import compute

pytestmark = pytest.mark.ranks(2)


def test_a_verb_is_refused_while_a_cuda_graph_is_captured() -> None:
    # A replay runs no Python, so it would synchronise nothing.
    module = stage(w=(4,))
    sync, bucketer = replicated(module), Bucketer()
    scheduler = Scheduler(
        [Stage(nn.Linear(2, 2), 0)],
        Topology.create(pipeline=1),
        schedule="gpipe",
        num_microbatches=1,
        loss_fn=lambda y, t: (y - t).sum(),
    )
    x = torch.ones(1, 2)

    def refused(**verbs: Callable[[], object]) -> None:
        yes = mock.Mock(return_value=True)
        with mock.patch.multiple(torch.cuda, is_initialized=yes, is_current_stream_capturing=yes):
            for verb, call in verbs.items():
                words = f"StepError: {verb}() while a CUDA graph is captured"
                assert outcome(call).startswith(words)

    refused(
        prepare=sync.prepare,
        clip_grad_norm_=lambda: sync.clip_grad_norm_(1.0),
        publish=sync.publish,
        publish_if_due=sync.publish_if_due,
        check_replicas=sync.check_replicas,
        all_reduce=lambda: bucketer.all_reduce(torch.ones(2), callback=print),
        flush=bucketer.flush,
        step=lambda: scheduler.step(x, target=x),
        evaluate=lambda: scheduler.evaluate(x),
    )
    sync.prepare()
    give(module, w=1.0)
    refused(stage_final=lambda: sync.stage_final(0), finish=sync.finish)
    sync.stage_final(0)
    sync.finish()
    scheduler.step(x, target=x)
    assert grads(module) == {"w": [1.0] * 4}


def test_verbs_in_compiled_code_run_between_its_graphs() -> None:
    module = stage(w=(4,))
    sync = replicated(module)
    step = torch.compile(
        lambda g: compute(sync, lambda: (module.get_parameter("w") * g).sum().backward()),
        backend="eager",
    )
    step(torch.full((4,), 3.0))
    assert grads(module) == {"w": [3.0] * 4}
