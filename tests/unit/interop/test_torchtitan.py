"""What `enable_tied_pipeline` changes, on a stand-in with the five names of torchtitan 0.3.0.

tests/ranks/interop/test_torchtitan.py runs torchtitan itself where it is installed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad.errors import PlanError
from pipegrad.interop import torchtitan
from pipegrad.interop.torchtitan import enable_tied_pipeline


class Trainer:
    gradient_accumulation_steps = 2

    def __init__(self, config: Any) -> None:
        self.parallel_dims = SimpleNamespace(pp_enabled=False)
        self.model_parts: list[nn.Module] = []
        self.ran: list[str] = []

    def pp_forward_backward_step(self, *, name: str) -> None:
        self.ran.append(name)


class Config:
    enable_weight_tying = True

    def update_from_config(self, *, config: Any) -> None:
        if self.enable_weight_tying:
            raise NotImplementedError("Weight tying is not supported with Pipeline Parallel.")


def split_module(whole: Any, names: list[str]) -> Any:
    every = ("tok_embeddings", "lm_head")
    parts = {name: SimpleNamespace() if name in names else None for name in every}
    return SimpleNamespace(enable_weight_tying=whole.enable_weight_tying, **parts)


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Puts the stand-in in the place of torchtitan."""
    contents: dict[str, dict[str, Any]] = {
        "torchtitan.distributed.pipeline_parallel": {"_split_module": split_module},
        "torchtitan.distributed.utils": {"clip_grad_norm_": nn.utils.clip_grad_norm_},
        "torchtitan.models.common.decoder": {
            "Decoder": SimpleNamespace(Config=type("C", (Config,), {}))
        },
        "torchtitan.trainer": {"Trainer": type("T", (Trainer,), {})},
    }
    modules = dict[str, ModuleType]()
    for name, values in contents.items():
        *parents, last = name.split(".")
        for path in itertools.accumulate([*parents, last], "{}.{}".format):
            modules.setdefault(path, ModuleType(path))
        vars(modules[name]).update(values)
        setattr(modules[".".join(parents)], last, modules[name])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    enable_tied_pipeline.cache_clear()
    yield SimpleNamespace(**{name.rpartition(".")[2]: modules[name] for name in contents})
    enable_tied_pipeline.cache_clear()


def test_tied_models_are_not_refused_and_stay_tied(titan: SimpleNamespace) -> None:
    config = titan.decoder.Decoder.Config()
    with pytest.raises(NotImplementedError):
        config.update_from_config(config=None)
    enable_tied_pipeline()
    config.update_from_config(config=None)
    assert config.enable_weight_tying


@pytest.mark.parametrize(
    ("names", "is_tied"),
    [
        (["tok_embeddings"], False),
        (["lm_head"], False),
        ([], False),
        (["tok_embeddings", "lm_head"], True),
    ],
)
def test_a_part_is_tied_if_it_has_both_copies(
    names: list[str], is_tied: bool, titan: SimpleNamespace
) -> None:
    start = {"weight": nn.init.normal_}
    whole = SimpleNamespace(enable_weight_tying=True, lm_head=SimpleNamespace(_param_init=start))
    enable_tied_pipeline()
    part = titan.pipeline_parallel._split_module(whole, names)
    assert part.enable_weight_tying == is_tied
    if names == ["tok_embeddings"]:
        assert part.tok_embeddings._param_init == start
    if names == ["lm_head"]:
        assert part.lm_head._param_init == {"weight": nn.init.zeros_}


def test_a_tied_weight_counts_once_in_the_norm_and_both_copies_are_clipped(
    titan: SimpleNamespace,
) -> None:
    body, head = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    body.grad, head.grad = torch.tensor([3.0, 4.0]), torch.tensor([30.0, 40.0])
    torchtitan._heads[head] = None
    enable_tied_pipeline()
    norm = titan.utils.clip_grad_norm_([body, head], 1.0)
    assert norm.item() == 5.0
    assert torch.allclose(body.grad, torch.tensor([0.6, 0.8]))
    assert torch.allclose(head.grad, torch.tensor([6.0, 8.0]))


def test_gradients_travel_in_the_last_step_of_an_accumulation(titan: SimpleNamespace) -> None:
    enable_tied_pipeline()
    trainer = titan.trainer.Trainer(None)
    assert not hasattr(trainer, "tied_sync")  # without a pipeline nothing is attached

    @contextmanager
    def accumulate() -> Iterator[None]:
        trainer.ran.append("accumulates")
        yield

    trainer.tied_sync = SimpleNamespace(accumulate=accumulate)
    trainer.tied_calls = itertools.count(1)
    for name in "abcd":
        trainer.pp_forward_backward_step(name=name)
    assert trainer.ran == ["accumulates", "a", "b", "accumulates", "c", "d"]


def test_it_changes_nothing_twice_and_nothing_by_half(titan: SimpleNamespace) -> None:
    enable_tied_pipeline()
    changed = titan.trainer.Trainer.__init__
    enable_tied_pipeline()
    assert titan.trainer.Trainer.__init__ is changed

    enable_tied_pipeline.cache_clear()
    del titan.utils.clip_grad_norm_
    with pytest.raises(PlanError, match=r"clip_grad_norm_.*needs torchtitan"):
        enable_tied_pipeline()
    assert titan.trainer.Trainer.__init__ is changed
