"""What an audit compares beside the sizes of gradients: losses, pieces, and what optimizers do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad.audit.judge import Judge
from pipegrad.audit.seen import Clip, Placed, Seen, Update, Watch
from pipegrad.audit.states import Entry, entries_of, losses, several, updates, why_not_updated

FIRST = {"a": "a", "b": "b", "b.again": "b"}


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, generator=generator) for name in ("a", "b")}


def seen(rank: int = 0, *names: str, **more: Any) -> Seen:
    """Returns what a rank has seen that holds some parameters; "b.again" is a copy of "b"."""
    names = names or ("a", "b")
    before, gradients, after = (
        {name: values(seed)[FIRST[name]] for name in names} for seed in range(3)
    )
    options: dict[str, Any] = {
        "groups": dict.fromkeys(names, (rank,)), "gradients": gradients,
        "after": after, "updates": [Update(frozenset(names), 0)],
    }  # fmt: skip
    return Seen(
        rank=rank, replica=0, uses={name: (name,) for name in names}, before=before, unclipped={},
        buffers=({}, {}), norm=None, clip_norm=None, losses=(), **(options | more),
    )  # fmt: skip


def causes(*every: Seen, explained: set[str] | None = None) -> list[tuple[str, Any, Any]]:
    """Returns what is wrong after a step, and where."""
    found = updates(every, FIRST, set() if explained is None else explained)
    return [(finding.cause, finding.names, finding.ranks) for finding in found]


def test_what_happens_several_times_in_a_step_is_said() -> None:
    clip = Clip(("a",), 1.0, 2.0)
    one = seen(3, clips=[clip, Clip(("b",), 1.0, 2.0)])
    [update] = one.updates
    assert list(several([one])) == []
    [finding] = several([replace(one, updates=[replace(update, times=2)])])
    assert finding.cause == "the optimizer stepped 2 times in one step"
    assert finding.ranks == (3,)
    [finding] = several([replace(one, clips=[clip] * 4)])
    assert finding.cause == "gradients are clipped 4 times in one step"


LEFT_OUT = "no optimizer steps the parameter, although it has a gradient"
CHANGED = (
    "the optimizer's step is not that of one process on the same gradient: other code changes the "
    "parameter behind it"
)


def test_a_parameter_with_a_gradient_that_no_optimizer_has() -> None:
    alone = [Update(frozenset({"a"}), 0)]
    assert causes(seen(updates=alone)) == [(LEFT_OUT, ("b",), (0,))]
    assert causes(seen(updates=alone), explained={"b"}) == []
    # A tie has all its names.
    tied = seen(0, "a", "b", "b.again", updates=[Update(frozenset({"a", "b"}), 0)])
    uses = {"a": ("a",), "b": ("b", "b.again"), "b.again": ("b", "b.again")}
    assert causes(replace(tied, uses=uses)) == []
    gradients: dict[str, Tensor | None] = {**values(1), "b": None}
    assert causes(seen(updates=alone, gradients=gradients)) == []


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ([], "no optimizer of torch.optim has stepped"),
        ([Update(frozenset({"a"}), 1)], "tensors that are no parameters"),
        ([Update(frozenset({"a"}), 0)], ""),
    ],
)
def test_which_optimizer_has_a_parameter_is_not_always_known(held: list[Update], says: str) -> None:
    one = seen(updates=held)
    assert says in why_not_updated([one])
    assert (why_not_updated([one]) == "") == (says == "")
    assert [cause for cause, *_ in causes(one)] == ([] if says else [LEFT_OUT])


def test_a_rank_whose_parameters_stay_is_said() -> None:
    stays = seen(1, after=values(0), updates=[Update(frozenset(), 1)])
    [(cause, names, ranks)] = causes(stays)
    assert cause == "no parameter of the rank changed in the optimizer's step"
    assert (names, ranks) == ((), (1,))
    assert causes(replace(stays, updates=[Update(frozenset(), 1, rate=0.0)])) == []


def test_a_parameter_that_changes_behind_the_optimizer_on_all_its_ranks_has_them_all() -> None:
    both = [seen(0, changed=frozenset({"b"})), seen(1, "b.again", changed=frozenset({"b.again"}))]
    explained = {"other"}
    assert causes(*both, explained=explained) == [(CHANGED, ("b",), (0, 1))]
    assert explained == {"other", "b"}
    assert causes(*both, explained={"b"}) == []
    # A copy that changes alone is left to the comparison of copies.
    assert causes(both[0], seen(1, "b.again")) == []


def scaled(parameter: nn.Parameter) -> None:
    parameter.data *= 0.5


@pytest.mark.parametrize(("behind", "expected"), [(lambda _: None, set()), (scaled, {"w"})])
def test_a_change_behind_any_optimizer_is_seen(
    behind: Callable[[nn.Parameter], None], expected: set[str]
) -> None:
    parameter, without = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter, without], lr=0.1)
    parameters = {"w": parameter, "without": without}
    watch = Watch(parameters, lambda: {n: p.grad for n, p in parameters.items()}, Placed({}))
    for _ in range(2):  # also one that has a state
        parameter.grad = torch.full((4,), 3.0)
        with watch.running():
            optimizer.step()
            behind(parameter)
            scaled(without)  # by the rank that owns it
        assert watch.changed() == expected


def test_pieces_of_a_gradient_are_added_up_and_have_all_their_ranks() -> None:
    def piece(rank: int, group: tuple[int, ...], gradient: Tensor | None) -> Seen:
        held: Mapping[str, Tensor | None] = {"a": gradient}
        return seen(rank, "a", groups={"a": group}, gradients=held)

    whole = torch.tensor([1.0, 2.0, 3.0, 4.0])
    low, high = whole.clone(), whole.clone()
    low[2:], high[:2] = 0, 0
    for pieces in ([low, high], [None, whole], [whole, None]):
        every = [piece(rank, (0, 1), one) for rank, one in enumerate(pieces)]
        [entry] = entries_of(every, [one.gradients for one in every], FIRST)
        assert entry.gradient is not None
        assert torch.equal(entry.gradient, whole)
        assert entry.ranks == (0, 1)
    # Ranks of two dimensions have a gradient together where their groups overlap.
    groups = (0, 1), (0, 1), (1, 2), (3,)
    every = [piece(rank, group, torch.ones(4)) for rank, group in enumerate(groups)]
    first, last = entries_of(every, [one.gradients for one in every], FIRST)
    assert (first.ranks, last.ranks) == ((0, 1, 2), (3,))
    assert first.gradient is not None
    assert torch.equal(first.gradient, 3 * torch.ones(4))


# Microbatches of 1 and 3 targets on replica 0; those of replica 1 make the whole another loss.
TRUTH: Any = SimpleNamespace(
    own=torch.tensor([3.5, 8.5], dtype=torch.float64),
    losses=torch.tensor([[2.0, 4.0], [8.0, 9.0]], dtype=torch.float64),
    loss=6.0625,
    loss_error=0.0,
)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (6.0625, None),
        (3.5, None),  # of the rows of the replica
        (6.0, "the sum over microbatches"),
        (23.0, "the sum over microbatches and replicas"),
        (12.125, "multiplied by the number of microbatches"),
        (3.0, "a mean of means: microbatches count alike"),
        (1.75, "divided by the number of microbatches twice"),
        (5.5, "not that of one process"),
    ],
)
def test_a_loss_is_that_of_all_targets_or_of_those_of_the_replica(
    loss: float, words: str | None
) -> None:
    seen: Any = SimpleNamespace(rank=0, replica=0, losses=[loss])
    found = [finding.cause for finding in losses([seen], TRUTH)]
    assert found == ([] if words is None else [f"the loss is {words}"])


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
    )
    entries = [
        Entry(name, (0,), (0,), (name,), gradient * (1 if name == "large" else 1.5))
        for name, gradient in truth.gradients.items()
    ]
    judge = Judge(nn.Linear(1, 1), tolerance=1e-4)
    dtypes = dict.fromkeys(truth.gradients, torch.float32)
    compared = judge._compared(entries, truth, dtypes, 4)
    assert all(one.error <= one.allowed for one in compared)
    assert [one.error for one in compared] == pytest.approx([0.0, 1e-9 / 1e-3], rel=1e-6)
