"""What an audit sees of clipping, and how it measures very small gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad.audit.judge import Judge
from pipegrad.audit.seen import Clip, Placed, Watch
from pipegrad.audit.states import Entry


def test_the_limit_and_the_norm_of_torchs_clipping_are_seen_but_not_a_measurement() -> None:
    parameter = nn.Parameter(torch.ones(4))
    watch = Watch({"w": parameter}, lambda: {"w": parameter.grad}, Placed({}))
    with watch.running():
        parameter.grad = torch.full((4,), 3.0)
        nn.utils.clip_grad_norm_([parameter], 2.0)
        nn.utils.clip_grad_norm_([parameter], math.inf)
    assert watch.clips == [Clip(("w",), 2.0, 6.0)]


def test_a_gradient_far_below_the_others_is_compared_with_a_thousandth_of_the_whole_norm() -> None:
    truth: Any = SimpleNamespace(
        gradients={
            "large": torch.full((4,), 0.5, dtype=torch.float64),
            "small": torch.full((4,), 1e-9, dtype=torch.float64),
        },
        noise={},
        uses={"large": ("large",), "small": ("small",)},
        terms=("",),
        is_coupled=False,
    )
    entries = [
        Entry(name, (0,), (0,), (name,), gradient * (1 if name == "large" else 1.5))
        for name, gradient in truth.gradients.items()
    ]
    judge = Judge(nn.Linear(1, 1), tolerance=1e-4)
    dtypes = dict.fromkeys(truth.gradients, torch.float32)
    findings, gradients = judge._gradients(entries, truth, dtypes, {}, 4)
    assert findings == []
    assert [one.error for one in gradients] == pytest.approx([0.0, 1e-9 / 1e-3], rel=1e-6)
