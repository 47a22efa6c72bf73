"""Each defect of a pipeline has its one cause, on any number of stages and replicas.

No rank runs here. Gradients of the parts of a batch come from plain autograd, and each defect says
how often a rank has a part. What no hypothesis makes has no known cause.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.audit.causes import NOT_KNOWN
from pipegrad.audit.judge import Judge
from pipegrad.audit.seen import Seen
from pipegrad.audit.truth import Data, leaves_cut

VOCABULARY, WIDTH, LENGTH, ROWS, MICROBATCHES = 9, 5, 4, 2, 4
CUTS = {2: ["e a", "b h"], 4: ["e", "a", "b", "h"]}
SHARE = 0.3  # of the balance loss


class Model(nn.Module):
    """Tied, with padded targets and a balance loss: two terms of different denominators."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(VOCABULARY, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.h.weight = self.e.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.a(self.e(tokens)))
        return self.h(torch.tanh(self.b(x))), x.square().mean()


def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    logits, balance = output
    entropy = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
    return entropy + SHARE * balance


class Part(NamedTuple):
    """A part of a batch in the gradient of a rank.

    Attributes:
        own: Replica of the rank.
        replica: Whose rows these are.
        microbatch: Of these rows.
        term: "entropy" or "balance".
        use: Name of the module that uses the parameter.
        is_first: Whether the first stage uses it.
        is_own: Whether the stage of the rank uses it.
        job: What all ranks do.
    """

    own: int
    replica: int
    microbatch: int
    term: str
    use: str
    is_first: bool
    is_own: bool
    job: Job


@dataclass(frozen=True)
class Job:
    """A right job: its data, and the gradient of each part in the whole."""

    stages: int
    replicas: int
    model: Model
    data: Data
    targets: Tensor  # counted, of replicas and microbatches
    parts: dict[tuple[int, int, str], dict[str, Tensor]]

    @property
    def share(self) -> Tensor:
        """Of replicas and microbatches in all targets."""
        return self.targets / self.targets.sum()


@functools.cache
def job(stages: int, replicas: int, shift: int = 0) -> Job:
    """Returns a job; with `shift`, microbatches have the targets of others."""
    torch.manual_seed(1)
    model = Model()
    tokens = torch.randint(VOCABULARY, (replicas * MICROBATCHES * ROWS, LENGTH + 1))
    length = torch.randint(1, LENGTH + 1, (len(tokens), 1))
    target = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= length, -100)
    whole = tokens[:, :-1], target
    cut = [
        list(zip(*(leaves_cut(x, MICROBATCHES) for x in row), strict=True))
        for row in zip(*(leaves_cut(x, replicas) for x in whole), strict=True)
    ]
    targets = torch.tensor([[int((y != -100).sum()) for _, y in row] for row in cut]).double()
    loose = copy.deepcopy(model).double()
    loose.h.weight = nn.Parameter(loose.h.weight.detach().clone())
    parts = {}
    for r, row in enumerate(cut):
        for m, (x, _) in enumerate(row):
            logits, balance = loose(x)
            y = row[(m - shift) % MICROBATCHES][1]
            entropy = functional.cross_entropy(
                logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
            )
            terms = {
                "entropy": entropy / targets.sum(),
                "balance": SHARE * balance / targets.numel(),
            }
            for term, loss in terms.items():
                found = torch.autograd.grad(
                    loss, list(loose.parameters()), retain_graph=True, materialize_grads=True
                )
                names = dict(loose.named_parameters())
                parts[r, m, term] = dict(zip(names, found, strict=True))
    return Job(stages, replicas, model, Data(loss_fn, cut, whole), targets, parts)


Weight = Callable[[Part], float]


def seen_of(one: Job, weight: Weight, noise: float = 0.0) -> list[Seen]:
    """Returns what ranks have if parts are in their gradients so often."""
    found = []
    first = CUTS[one.stages][0]
    for stage, held in enumerate(CUTS[one.stages]):
        for own in range(one.replicas):
            before, gradients = {}, dict[str, Tensor | None]()
            for name in dict(one.model.named_parameters(remove_duplicate=False)):
                if name[0] not in held:
                    continue
                uses = ["e.weight", "h.weight"] if name[0] in "eh" else [name]
                total = torch.zeros_like(one.parts[0, 0, "entropy"][name])
                for (r, m, term), values in one.parts.items():
                    for use in uses:
                        part = Part(own, r, m, term, use[0], use[0] in first, use[0] in held, one)
                        total += weight(part) * values[use]
                if name[0] in first and noise:
                    total *= 1 + noise * torch.randn(total.shape, dtype=total.dtype)
                before[name], gradients[name] = (
                    one.model.get_parameter(name).detach(),
                    total.float(),
                )
            rank = stage * one.replicas + own
            found.append(
                Seen(
                    rank=rank,
                    replica=own,
                    groups=dict.fromkeys(before, (rank,)),
                    uses={name: (name,) for name in before},
                    before=before,
                    gradients=gradients,
                    unclipped={},
                    after=before,
                    buffers=({}, {}),
                    norm=None,
                    clip_norm=None,
                    losses=(),
                    updates=[],
                )
            )
    return found


def causes_of(one: Job, seen: list[Seen]) -> set[str]:
    judge = Judge(copy.deepcopy(one.model))
    return {finding.cause for finding in judge.judge(seen, one.data, 1)[0]}


def tie(factor: Callable[[Job], float]) -> Weight:
    return lambda p: factor(p.job) if p.use in "eh" else 1.0


def of_entropy(weight: Weight) -> Weight:
    return lambda p: weight(p) if p.term == "entropy" else 1.0


def both(*weights: Weight) -> Weight:
    def product(part: Part) -> float:
        found = 1.0
        for weight in weights:
            found *= float(weight(part))
        return found

    return product


def own_targets(p: Part) -> float:
    return float(1 / p.job.replicas / p.job.share[p.replica].sum())


def same_rows(p: Part) -> float:
    own = p.job.share[0].sum() if p.term == "entropy" else 1 / p.job.replicas
    return float(p.replica == 0) / float(own)


mean_of_means = of_entropy(
    lambda p: float(1 / p.job.share.numel() / p.job.share[p.replica, p.microbatch])
)
replicas_apart: Weight = lambda p: p.own == p.replica  # noqa: E731
averaged: Weight = lambda p: 1 / p.job.replicas  # noqa: E731
balance_times_m: Weight = lambda p: MICROBATCHES if p.term == "balance" else 1  # noqa: E731
balance_stops: Weight = lambda p: not (p.term == "balance" and p.use == "e")  # noqa: E731
first_lost: Weight = lambda p: p.microbatch > 0 or not p.is_first  # noqa: E731
broadcast: Weight = lambda p: p.replica == 0  # noqa: E731
twice: Weight = lambda p: (2, 1, 1, 0)[p.microbatch]  # noqa: E731
reduced_each: Weight = lambda p: p.job.replicas ** (MICROBATCHES - 1 - p.microbatch)  # noqa: E731

TIE_TWICE = "the tie is reduced twice: the gradient is {replicas} times too large"
UNKNOWN = "no known cause"
TIE_MEAN = "the tie is averaged: the gradient is"
REPLICAS_ALIKE = "replicas count alike, although they have different numbers of targets"
BY_REPLICAS = "it is divided by the number of replicas, {replicas}, once too often"
BALANCE = "the part of the loss that comes from output[1] is"
ONE_REPLICA = "only the data of replicas [0] (from 0) of {replicas} is in the gradient"
LAST = "only the last 3 microbatches are in the gradient, of 4"
DEFECTS: dict[str, tuple[Weight, list[str]]] = {
    "right": (lambda _: 1.0, []),
    "a tie averaged": (tie(lambda _: 0.5), [TIE_MEAN]),
    "a tie averaged over the pipeline": (tie(lambda j: 1 / j.stages), [TIE_MEAN]),
    "a tie over replicas twice": (tie(lambda j: j.replicas), [TIE_TWICE]),
    "a tie apart": (lambda p: p.is_own, ["the tie is not reduced: of 2 uses"]),
    "targets of each replica": (of_entropy(own_targets), [REPLICAS_ALIKE]),
    "the same rows": (same_rows, [ONE_REPLICA]),
    "a balance loss times M": (balance_times_m, [f"{BALANCE} multiplied by the number of micro"]),
    "a balance loss that stops": (balance_stops, [f"{BALANCE} not in the gradient"]),
    "averaged replicas": (averaged, [BY_REPLICAS]),
    "reduced behind each microbatch": (reduced_each, ["{none}no known cause"]),
    "broadcast": (broadcast, [ONE_REPLICA]),
    "replicas apart": (replicas_apart, ["is not reduced over the {replicas} replicas"]),
    "the first microbatch lost by one stage": (first_lost, [LAST]),
    "a microbatch twice": (twice, [UNKNOWN]),
    "a mean of means": (mean_of_means, ["the gradient is a mean of means"]),
    "a mean of means, averaged": (both(mean_of_means, averaged), ["a mean of means", BY_REPLICAS]),
    "lost and averaged": (both(first_lost, averaged), [LAST, BY_REPLICAS]),
    "a tie apart, averaged": (both(lambda p: p.is_own, averaged), ["the tie is not", BY_REPLICAS]),
    "replicas apart, five times": (
        both(replicas_apart, lambda _: 5.0),
        ["is not reduced over the {replicas} replicas", "multiplied by 5"],
    ),
    "broadcast, and a balance loss that stops": (
        both(broadcast, balance_stops),
        [ONE_REPLICA, f"{BALANCE} not in the gradient"],
    ),
    "a balance loss times M, averaged": (
        both(balance_times_m, averaged),
        [f"{BALANCE} multiplied by the number of microbatches", BY_REPLICAS],
    ),
    "targets of each replica, and a tie averaged": (
        both(of_entropy(own_targets), tie(lambda _: 0.5)),
        [REPLICAS_ALIKE, TIE_MEAN],
    ),
}
JOBS = [(2, 1), (4, 2), (2, 3)]  # stages and replicas


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.parametrize(("stages", "replicas"), JOBS)
def test_a_defect_has_its_causes_and_no_other(name: str, stages: int, replicas: int) -> None:
    weight, words = DEFECTS[name]
    one = job(stages, replicas)
    causes = causes_of(one, seen_of(one, weight))
    # On one replica there is nothing to reduce.
    expected = [
        w.format(replicas=replicas, none="")
        for w in words
        if replicas > 1 or ("{" not in w and w != REPLICAS_ALIKE)
    ]
    assert len(causes) == len(expected), causes
    assert all(any(w in cause for cause in causes) for w in expected), causes


@pytest.mark.parametrize(("stages", "replicas"), JOBS)
def test_targets_of_another_microbatch_are_named_and_rounded_values_have_no_cause(
    stages: int, replicas: int
) -> None:
    one, shifted = job(stages, replicas), job(stages, replicas, shift=1)
    [cause] = causes_of(one, seen_of(shifted, lambda _: 1.0))
    assert cause.startswith("outputs are compared with the targets of another microbatch")
    # Rounded as in bfloat16, alone and beside averaged replicas: no weights are made of it.
    for weight in (lambda _: 1.0, averaged, first_lost):
        causes = causes_of(one, seen_of(one, weight, noise=2**-8))
        assert NOT_KNOWN.words in causes


def test_a_parameter_that_trains_on_one_side_alone_is_found() -> None:
    one = job(2, 2)
    right = seen_of(one, lambda _: 1.0)
    frozen = [
        replace(s, frozen=frozenset({"b.bias"}), gradients={**s.gradients, "b.bias": None})
        if "b.bias" in s.gradients
        else s
        for s in right
    ]
    assert causes_of(one, frozen) == {
        "the parameter is frozen, and in the uncut model it is trained"
    }
    model = copy.deepcopy(one.model)
    model.b.bias.requires_grad = False
    assert causes_of(replace(one, model=model), right) == {
        "the parameter is trained, and in the uncut model it is frozen"
    }
    is_right = replace(one, model=model)
    assert causes_of(is_right, frozen) == set()
