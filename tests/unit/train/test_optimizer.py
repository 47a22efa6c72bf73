"""Optimizers and learning rates by torch's names do what torch's own do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from pipegrad import ParameterRecord
from pipegrad.errors import ConfigError
from pipegrad.gradients.main_params import MainParameter, group_keys, grouped
from pipegrad.gradients.named_optimizer import JoinedOptimizer
from pipegrad.train.config import Config
from pipegrad.train.optimizer import (
    group_of,
    make_learning_rate,
    make_optimizer,
    try_out_optimizer,
)
from pipegrad.train.schema import Named, Train


def config(**optimizer: Any) -> Config:
    return Config.model_validate({"model": {"factory": "a:b"}, "optimizer": optimizer})


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in [(2, 3), (3,), (), (1, 3)]]


def of(params: Any) -> Callable[..., torch.optim.Optimizer]:
    """Returns what makes an optimizer of parameters, or of groups of them."""
    return lambda kind, **options: kind(params, **options)


def record(position: int, shape: tuple[int, ...]) -> ParameterRecord:
    return ParameterRecord(
        f"0.{position}", f"{position}", 0, shape, torch.float32, True, (0,), position
    )


def parted(spared: Config, records: Sequence[ParameterRecord]) -> Any:
    """Returns the groups that a configuration wants."""

    def options_of(record: ParameterRecord) -> dict[str, Any]:
        return group_of(spared, record.name, nn.Parameter(torch.empty(record.shape)))

    return group_keys(records, options_of)


def test_norms_and_biases_may_be_spared() -> None:
    spared = config(name="SGD", lr=1.0, weight_decay=0.5, decay_norms_and_biases=False)
    given = parameters()
    records = [record(index, p.shape) for index, p in enumerate(given)]
    rows = [MainParameter(r, p, 0) for r, p in zip(records, given, strict=True)]
    rows[3] = MainParameter(
        records[3], nn.Parameter(given[3].detach().flatten()), 0
    )  # a row of a matrix
    made = make_optimizer(spared, of(grouped(parted(spared, records), rows)))
    decayed, undecayed = made.param_groups
    assert [p.shape for p in decayed["params"]] == [(2, 3), (3,)]
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.5, 0.0)
    for row in rows:
        row.tensor.grad = torch.zeros_like(row.tensor)
    made.step()
    assert [float(row.tensor.detach().flatten()[0]) for row in rows] == [0.5, 1.0, 1.0, 0.5]
    # A rank with vectors only has both groups.
    made = make_optimizer(spared, of(grouped(parted(spared, records[:2]), [rows[1]])))
    assert [(len(g["params"]), g["weight_decay"]) for g in made.param_groups] == [(0, 0.5), (1, 0)]


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {"betas": [0.8, 0.9], "weight_decay": 0.3}), ("RMSprop", {}), ("SGD", {})],
)
def test_a_first_order_optimizer_with_torchs_own_options(name: str, options: Any) -> None:
    given = parameters()
    made = make_optimizer(config(name=name, lr=0.1, **options), of(given))
    assert type(made) is getattr(torch.optim, name)
    [group] = made.param_groups
    assert group["lr"] == 0.1
    assert {key: group[key] for key in options} in (options, options | {"betas": (0.8, 0.9)})
    for parameter in given:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    assert all(bool((p < 1).all()) for p in given)


def test_others_step_what_is_no_matrix() -> None:
    def of_both(kind: Any, *, others: Any, **options: Any) -> torch.optim.Optimizer:
        matrix, *rest = parameters()
        return JoinedOptimizer([kind([matrix], **options), others(rest)])

    wanted = config(name="Muon", lr=0.2, others={"name": "AdamW", "lr": 0.1, "betas": [0.8, 0.9]})
    of_muon, of_adamw = make_optimizer(wanted, of_both).param_groups
    assert (of_muon["lr"], of_muon["momentum"]) == (0.2, 0.95)
    assert (of_adamw["lr"], *of_adamw["betas"]) == (0.1, 0.8, 0.9)
    try_out_optimizer(wanted, "cpu")
    assert config(others="AdamW").optimizer.others == Named(name="AdamW")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ("AdamWW", "name = 'AdamWW': torch.optim has none; known, closest first: Ad"),
        ({"name": "AdamW", "rate": 1}, ".*AdamW has no option 'rate'"),
        ({"name": "AdamW", "lr": True}, "lr.*should be a finite number"),
        ("LBFGS", "name.*it evaluates the loss itself"),
    ],
)
def test_wrong_others_are_refused_by_key(others: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.others.?{message}"):
        make_optimizer(config(name="Muon", others=others), of(parameters()[:1]))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"others": {"name": "AdamW", "lr": -1}}, ".others = .*'lr': -1}: AdamW will not take tha"),
        ({"lr": -1, "others": "AdamW"}, " = .*'lr': -1.*: Muon will not take that: Learning rate"),
        (
            {"others": {"name": "AdamW", "betas": [0.9, 0.9, 0.9]}},
            ".others = .*: its first step fails: ValueError",
        ),
        (
            {"ns_coefficients": ["a", "b", "c"], "others": "AdamW"},
            " = .*: its first step fails: ",
        ),
    ],
)
def test_wrong_values_name_the_part_that_has_them(optimizer: Any, message: str) -> None:
    """Every error named the first optimizer, and showed its options."""
    with pytest.raises(ConfigError, match=f"optimizer{message}"):
        try_out_optimizer(config(name="Muon", **optimizer), "cpu")


def test_weight_decay_of_vectors_is_that_of_the_others() -> None:
    spared: dict[str, Any] = {"name": "Rprop", "decay_norms_and_biases": False}
    with pytest.raises(ConfigError, match="Rprop has no weight decay"):
        make_optimizer(config(**spared), of(parameters()))
    make_optimizer(
        config(**spared, others="AdamW"), lambda kind, others, **options: kind(parameters())
    )


def rates(schedule: Any, steps: int) -> list[float]:
    wanted = config(name="SGD", lr=1.0, schedule=schedule)
    optimizer = make_optimizer(wanted, of(parameters()))
    scheduler = make_learning_rate(wanted, optimizer)
    return list(stepped(optimizer, scheduler, steps))


def stepped(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> Any:
    for _ in range(steps):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def test_schedules_follow_one_another() -> None:
    warm = {"name": "LinearLR", "start_factor": 0.1, "total_iters": 5, "steps": 5}
    found = rates([warm, {"name": "CosineAnnealingLR", "T_max": 10}], 15)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    parts = [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, 10)]
    assert found == list(stepped(optimizer, SequentialLR(optimizer, parts, [5]), 15))
    assert found[0] == pytest.approx(0.1)
    assert max(found) == found[5] == pytest.approx(1.0)
    # One schedule needs no list, and none is a constant rate.
    assert rates([], 3) == [1.0, 1.0, 1.0]
    assert rates({"name": "StepLR", "step_size": 2, "gamma": 0.5}, 5) == [1, 1, 0.5, 0.5, 0.25]


def test_a_schedule_is_tried_out_at_its_ends() -> None:
    one, many = {"name": "OneCycleLR", "max_lr": 1.0, "total_steps": 10**9}, Train(steps=10**9)
    try_out_optimizer(config(schedule=one).model_copy(update={"train": many}), "cpu")
    rising = [{"name": "ExponentialLR", "gamma": 10.0, "steps": 310}, {"name": "ConstantLR"}]
    with pytest.raises(ConfigError, match="fails within 1000000000 steps: OverflowError"):
        try_out_optimizer(config(schedule=rising).model_copy(update={"train": many}), "cpu")
