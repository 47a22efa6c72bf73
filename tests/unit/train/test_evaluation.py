"""After which steps a run continues a text, where that ends, and what the process then holds."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipegrad import Topology
from pipegrad.train.config import Config
from pipegrad.train.evaluation import Evaluation, peak_memory_bytes
from pipegrad.train.schema import Eval, Model, Train

CPU = torch.device("cpu")


def evaluation_of(config: Config, tokenizer: Any) -> Evaluation:
    """Returns the evaluation of a run with one process."""
    scheduler: Any = SimpleNamespace(
        topology=Topology.build(axes=(("pp", 1), ("dp", 1))).at(0),
        sync=SimpleNamespace(bounded=lambda _: nullcontext()),
    )
    job: Any = SimpleNamespace(config=config)
    return Evaluation(
        job, scheduler, feed=None, tokenizer=tokenizer, length=2, ends=[5], device=CPU
    )


@pytest.mark.parametrize(("has_tokenizer", "expected"), [(True, [2, 4, 5]), (False, [])])
def test_a_text_is_continued_after_every_second_step_and_the_last_one(
    monkeypatch: pytest.MonkeyPatch, expected: list[int], *, has_tokenizer: bool
) -> None:
    monkeypatch.setattr(Evaluation, "_sample", lambda _, step, __: f"text {step}")
    config = Config(model=Model(factory="a:b"), train=Train(steps=5), eval=Eval(sample_every=2))
    evaluation = evaluation_of(config, object() if has_tokenizer else None)
    found = {step: evaluation.after(step) for step in range(1, 6)}
    assert {step: x for step, x in found.items() if x} == {
        step: {"sample": f"text {step}"} for step in expected
    }


def test_a_sample_ends_behind_the_token_that_ends_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=Model(factory="a:b"), eval=Eval(sample_every=1, sample_tokens=9))
    drawn, contexts = iter(range(3, 12)), list[list[int]]()

    def following(_: Evaluation, context: list[int], *__: object) -> int:
        contexts.append(context)
        return next(drawn)

    monkeypatch.setattr(Evaluation, "_next", following)
    tokenizer = SimpleNamespace(encode=lambda _: [[5, 1]], decode=str)
    assert evaluation_of(config, tokenizer).after(1) == {"sample": "[5, 1, 3, 4, 5]"}
    assert contexts == [[5, 1], [1, 3], [3, 4]]  # the model takes two tokens


def test_the_memory_of_a_process_is_in_bytes() -> None:
    assert 2**26 < peak_memory_bytes(CPU) < 2**44  # torch alone takes 64 MiB
