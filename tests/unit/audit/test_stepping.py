"""An optimizer steps again in float64 as torch's own one does on the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad.audit.seen import Seen, Stepped
from pipegrad.audit.stepping import Reference, several

FIRST = {"a": "a", "b": "b", "b.again": "b"}
STEPS = 3

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "SGD with Nesterov": lambda groups: torch.optim.SGD(groups, 0.1, 0.9, nesterov=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
}


def values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (5,)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


class Training:
    """A caller's optimizer, and what a rank sees of it."""

    def __init__(self, make: Make, **more: Any) -> None:
        self.parameters = {name: nn.Parameter(value) for name, value in values(0).items()}
        groups = [{"params": [self.parameters["a"]]}, {"params": [self.parameters["b"]], **more}]
        self.optimizer = make(groups)
        self.is_new = True

    def step(self, number: int) -> Seen:
        gradients, before = values(number), self.copies()
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].clone()
        self.optimizer.step()
        found = seen(before, gradients, [self.stepped()], self.copies())
        self.is_new = False
        return found

    def stepped(self) -> Stepped:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        options = {
            names[id(p)]: {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
            for p in group["params"]
        }
        return Stepped(type(self.optimizer), options, 0, self.is_new, 1)

    def copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def seen(
    before: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    optimizers: list[Stepped],
    after: Mapping[str, Tensor],
    rank: int = 0,
) -> Seen:
    return Seen(
        rank=rank, replica=0, groups=dict.fromkeys(before, (rank,)),
        uses={name: (name,) for name in before}, before=before, gradients=gradients, unclipped={},
        after=after, buffers=({}, {}), norm=None, clip_norm=None, losses=(), optimizers=optimizers,
    )  # fmt: skip


def causes(reference: Reference, *every: Seen, explained: Collection[str] = ()) -> dict[str, str]:
    """Returns what is wrong with each parameter after a step."""
    findings = reference.judge(every, FIRST, set(explained))
    assert reference.why_not == ""
    return {name: finding.cause for finding in findings for name in finding.names}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_torch_also_on_several_ranks(kind: str) -> None:
    """A learning rate that a scheduler changes is followed."""
    training, alone, several_ranks = Training(KINDS[kind], lr=0.03), Reference(), Reference()
    for number in range(1, STEPS + 1):
        for group in training.optimizer.param_groups:
            group["lr"] /= number
        one = training.step(number)
        assert causes(alone, one) == {}
        every = [of_rank(one, 0, "a", "b"), of_rank(one, 1, "b.again")]
        assert causes(several_ranks, *every) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_in_float64(kind: str) -> None:
    training, reference = Training(KINDS[kind]), Reference()
    own = {name: nn.Parameter(value.double()) for name, value in values(0).items()}
    optimizer = KINDS[kind]([{"params": [parameter]} for parameter in own.values()])
    one, gradients = training.step(1), values(1)
    for name, parameter in own.items():
        parameter.grad = gradients[name].double()
    optimizer.step()
    for name, value in reference.step([one], FIRST).items():
        torch.testing.assert_close(value, own[name].detach(), rtol=1e-12, atol=1e-12)


def test_a_state_that_is_lost_between_steps_is_seen() -> None:
    training, reference = Training(KINDS["SGD with momentum"]), Reference()
    assert causes(reference, training.step(1)) == {}
    training.optimizer.state.clear()
    wrong = causes(reference, training.step(2))
    assert wrong.keys() == {"a", "b"}
    assert "not that of one process on the same gradient" in wrong["a"]


def test_a_gradient_that_changes_before_the_update_is_seen_and_one_may_be_missing() -> None:
    one = Training(KINDS["SGD with momentum"]).step(1)
    others: dict[str, Tensor | None] = {**one.gradients, "a": torch.ones(3, 4)}
    wrong = causes(Reference(), seen(one.before, others, list(one.optimizers), one.after))
    assert wrong.keys() == {"a"}
    assert wrong["a"].startswith(OTHER)
    stays = with_after(one, b=one.before["b"])
    gradients = {**one.gradients, "b": None}
    assert causes(Reference(), replace(stays, gradients=gradients)) == {}


OTHER = "the optimizer's step is not that of one process on the same gradient"


def with_after(one: Seen, **after: Tensor) -> Seen:
    return seen(one.before, one.gradients, list(one.optimizers), {**one.after, **after})


def test_an_update_of_another_size_has_its_share_if_all_have_one() -> None:
    one = Training(KINDS["SGD with momentum"]).step(1)
    still = {"b": one.before["b"]}
    twice = {name: 2 * value - one.before[name] for name, value in one.after.items()}
    wrong = causes(Reference(), with_after(one, **still))
    assert wrong == {"b": f"{OTHER}: its update is 0 of the right one"}
    wrong = causes(Reference(), with_after(one, **twice))
    assert wrong == dict.fromkeys("ab", f"{OTHER}: its update is 2 of the right one")
    wrong = causes(Reference(), with_after(one, **twice | still))
    assert wrong == dict.fromkeys("ab", OTHER)


def test_a_parameter_that_is_wrong_for_another_cause_is_not_said_again() -> None:
    one, explained = Training(KINDS["AdamW"]).step(1), {"other"}
    stays = with_after(one, b=one.before["b"])
    assert causes(Reference(), stays, explained=["b"]) == {}
    Reference().judge([stays], FIRST, explained)
    assert explained == {"other", "b"}


def test_a_parameter_with_a_gradient_that_no_optimizer_has() -> None:
    """It is left out where an optimizer had it in the step before."""
    training, reference = Training(KINDS["AdamW"]), Reference()
    one = training.step(1)
    [stepped] = one.optimizers
    alone = [replace(stepped, options={"a": stepped.options["a"]})]
    [finding] = Reference().judge(
        [replace(with_after(one, b=one.before["b"]), optimizers=alone)], FIRST, set()
    )
    assert finding.cause == "no optimizer steps the parameter, although it has a gradient"
    assert (finding.names, finding.ranks) == (("b",), (0,))

    assert causes(reference, one) == {}
    two = training.step(2)
    stays = with_after(two, b=two.before["b"])
    assert causes(reference, replace(stays, optimizers=alone)).keys() == {"b"}


def test_what_happens_several_times_in_a_step_is_said() -> None:
    one = replace(Training(KINDS["AdamW"]).step(1), rank=3, num_clips=1)
    [stepped] = one.optimizers
    assert list(several(one)) == []
    [finding] = several(replace(one, optimizers=[replace(stepped, times=2)]))
    assert finding.cause == "the optimizer stepped 2 times in one step"
    assert finding.ranks == (3,)
    [finding] = several(replace(one, num_clips=4))
    assert finding.cause == "gradients are clipped 4 times in one step"


def of_rank(one: Seen, rank: int, *names: str) -> Seen:
    """Returns what a rank sees that has some of the parameters; "b.again" is a copy of "b"."""
    [stepped] = one.optimizers
    of_name = {name: FIRST[name] for name in names}
    options = {name: stepped.options[first] for name, first in of_name.items()}
    return seen(
        {name: one.before[first] for name, first in of_name.items()},
        {name: one.gradients[first] for name, first in of_name.items()},
        [replace(stepped, options=options)],
        {name: one.after[first] for name, first in of_name.items()},
        rank,
    )


def test_a_parameter_that_is_wrong_on_all_its_ranks_has_them_all() -> None:
    one = Training(KINDS["AdamW"]).step(1)
    stays = with_after(one, b=one.before["b"])
    every = [of_rank(stays, 0, "a", "b"), of_rank(stays, 1, "b.again")]
    [finding] = Reference().judge(every, FIRST, set())
    assert (finding.names, finding.ranks) == (("b",), (0, 1))
    # A copy that is wrong alone is left to the comparison of copies.
    every[0] = of_rank(one, 0, "a", "b")
    assert causes(Reference(), *every) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_a_parameters_dtype_is_allowed(dtype: torch.dtype) -> None:
    before = values(0, dtype)
    gradients = {name: value.abs() for name, value in values(1, dtype).items()}
    parameters = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters.values()], lr=0.1)
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    optimizer.step()
    options = {
        name: {key: value for key, value in group.items() if key != "params"}
        for name, group in zip(parameters, optimizer.param_groups, strict=True)
    }
    after = {name: p.detach() for name, p in parameters.items()}
    one = seen(before, gradients, [Stepped(torch.optim.SGD, options, 0, True, 1)], after)
    assert causes(Reference(), one) == {}
    in_float32 = {name: value.float() for name, value in after.items()}
    assert causes(Reference(), with_after(one, **in_float32)).keys() == {"a", "b"}


def stepped_by(*kinds: type[torch.optim.Optimizer], **own: Any) -> list[Stepped]:
    options = {"options": {}, "num_unknown": 0, "is_new": True, "times": 1, **own}
    return [Stepped(kind, **options) for kind in kinds]


class Strange(torch.optim.SGD):
    """Takes an argument that only the caller knows."""

    def __init__(self, groups: Any, *, known: int) -> None:
        super().__init__(groups, lr=0.1)


@pytest.mark.parametrize(
    ("optimizers", "says"),
    [
        ([], "no optimizer of torch.optim has stepped"),
        (
            stepped_by(torch.optim.SGD, torch.optim.AdamW),
            "there are several kinds, ['AdamW', 'SGD']",
        ),
        (stepped_by(torch.optim.SGD, num_unknown=1), "tensors that are no parameters"),
        (
            stepped_by(torch.optim.SGD) + stepped_by(torch.optim.SGD, is_new=False),
            "they had stepped before the audit",
        ),
        (stepped_by(Strange, options={"a": {}}), "Strange does not step here: "),
    ],
)
def test_what_cannot_be_compared_says_why(optimizers: list[Stepped], says: str) -> None:
    own, reference = values(0), Reference()
    assert reference.judge([seen(own, values(1), optimizers, values(2))], FIRST, set()) == []
    assert says in reference.why_not
    # Steps after it are not compared.
    one, why_not = Training(KINDS["AdamW"]).step(1), reference.why_not
    assert reference.judge([with_after(one, b=one.before["b"])], FIRST, set()) == []
    assert reference.why_not == why_not


def test_a_rank_whose_parameters_stay_is_said_also_where_they_are_not_compared() -> None:
    own, optimizers = values(0), stepped_by(torch.optim.SGD, num_unknown=1)
    [finding] = Reference().judge([seen(own, values(1), optimizers, own, rank=1)], FIRST, set())
    assert finding.cause == "no parameter of the rank changed in the optimizer's step"
    assert finding.ranks == (1,)
    still = stepped_by(torch.optim.SGD, num_unknown=1, rate=0.0)
    assert Reference().judge([seen(own, values(1), still, own)], FIRST, set()) == []
