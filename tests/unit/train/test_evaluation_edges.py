"""After which steps a run continues a text."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipegrad import Topology
from pipegrad.train.config import Config
from pipegrad.train.evaluation import Evaluation
from pipegrad.train.schema import Eval, Model, Train


@pytest.mark.parametrize(("has_tokenizer", "expected"), [(True, [2, 4, 5]), (False, [])])
def test_a_text_is_continued_after_every_second_step_and_the_last_one(
    monkeypatch: pytest.MonkeyPatch, expected: list[int], *, has_tokenizer: bool
) -> None:
    monkeypatch.setattr(Evaluation, "_sample", lambda _, step, __: f"text {step}")
    config = Config(model=Model(factory="a:b"), train=Train(steps=5), eval=Eval(sample_every=2))
    scheduler: Any = SimpleNamespace(topology=Topology.build(axes=(("pp", 1), ("dp", 1))).at(0))
    tokenizer: Any = object() if has_tokenizer else None
    evaluation = Evaluation(
        config, scheduler, feed=None, tokenizer=tokenizer, device=torch.device("cpu")
    )
    found = {step: evaluation.after(step) for step in range(1, 6)}
    assert {step: x for step, x in found.items() if x} == {
        step: {"sample": f"text {step}"} for step in expected
    }


def test_a_sample_ends_behind_the_token_that_ends_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=Model(factory="a:b"), eval=Eval(sample_every=1, sample_tokens=9))
    drawn = iter(range(3, 12))
    monkeypatch.setattr(Evaluation, "_next", lambda *_: next(drawn))
    scheduler: Any = SimpleNamespace(
        topology=Topology.build(axes=(("pp", 1), ("dp", 1))).at(0),
        sync=SimpleNamespace(bounded=lambda _: nullcontext()),
    )
    tokenizer: Any = SimpleNamespace(ends={5}, encode=lambda _: [[5, 1]], decode=str)
    evaluation = Evaluation(
        config, scheduler, feed=None, tokenizer=tokenizer, device=torch.device("cpu")
    )
    assert evaluation.after(1) == {"sample": "[5, 1, 3, 4, 5]"}
