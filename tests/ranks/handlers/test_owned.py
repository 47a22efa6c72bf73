"""owned: matrices whole, each on one rank; the rest in rows; what one process gets of the batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pipegrad import GradientSync, Placement, Reduction, Scheduler, Topology, cut
from pipegrad.comm import collectives
from pipegrad.errors import PlanError
from pipegrad.testing import HandlerContract
from pipegrad_handlers.owned import Owned
from tests.support.gradients.plans import record
from tests.support.ranked import gathered
from tests.support.rounding import ADAM_EPS

VOCAB, WIDTH, ROWS, STEPS = 16, 8, 4, 3


class TestOwned(HandlerContract):
    handler = "owned"
    beside = ("pipeline-shared",)


linear = partial(record, kind="Linear")
MATRICES = [
    linear("1.weight", 4, 3),
    record("1.filter", 2, 3, 5, 5, kind="Conv2d"),
    linear("self_attn.q_proj.weight", 4, 4),
]
OTHERS = [
    linear("1.bias", 4),
    linear("scale"),
    linear("column", 4, 1),
    record("0.weight", 9, 3, kind="Embedding"),
    record("0.weight", 9, 3, kind="ScaledWordEmbedding"),
    linear("embed_tokens.weight", 9, 3),
    linear("lm_head.weight", 9, 3),
    linear("model.head.weight", 9, 3),
    linear("tied", 9, 3, holders=(0, 3)),
    dataclasses.replace(linear("tied", 9, 3), tied_in_stage=True),
    dataclasses.replace(linear("last", 9, 3), aliases=("lm_head.weight",)),
]


@pytest.mark.parametrize("placement", [Placement.WHOLE, Placement.SHARD], ids=str)
def test_matrices_are_whole_and_everything_else_is_in_rows(placement: Placement) -> None:
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)), rank=1)
    records = MATRICES if placement is Placement.WHOLE else OTHERS
    assert list(Owned().reductions(records, topology)) == [
        Reduction(r, (0, 1), "mean", placement) for r in records
    ]


def test_patterns_say_what_else_is_no_matrix() -> None:
    topology = Topology.build(axes=(("pp", 1), ("dp", 2)))
    owned = Owned(others=["*q_proj*"])
    owned.check(MATRICES, topology)
    placed = {r.record.name: r.placement for r in owned.reductions([*MATRICES, *OTHERS], topology)}
    assert placed["self_attn.q_proj.weight"] is Placement.SHARD
    assert placed["lm_head.weight"] is Placement.WHOLE  # the default patterns are replaced
    with pytest.raises(ValueError, match=r"others is \['\*k_proj'\], which matches none"):
        Owned(others=["*k_proj"]).check(MATRICES, topology)
    Owned().check([linear("w", 2)], topology)
    with pytest.raises(ValueError, match=r"others is 'head', expected a list of patterns"):
        Owned(others="head")


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens).flatten(1)  # type: ignore[no-any-return]


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if weight is not None:
            self.lm_head.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(x)  # type: ignore[no-any-return]


def build(*, tied: bool = False) -> nn.Sequential:
    """Five matrices of three shapes, vectors, an embedding and a head, and one that is frozen."""
    torch.manual_seed(3)
    tokens: Any = Tokens()
    model: Any = nn.Sequential(
        tokens,
        nn.Linear(2 * WIDTH, 12),
        nn.Tanh(),
        nn.Linear(12, 12),
        nn.LayerNorm(12),
        nn.Linear(12, 2 * WIDTH),
        nn.Tanh(),
        nn.Linear(2 * WIDTH, 12, bias=False),
        nn.Linear(12, WIDTH),
        Head(tokens.embed.weight if tied else None),
    )
    model[3].bias.requires_grad_(False)
    built: nn.Sequential = model
    return built


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), target)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (ROWS, 2), generator=made), torch.randint(
        VOCAB, (ROWS,), generator=made
    )


muon = partial(torch.optim.Muon, lr=0.02)
adamw = partial(torch.optim.AdamW, lr=0.01, eps=ADAM_EPS)
SMALL = 600  # bytes, so that there are several buckets
IS_MATRIX = tuple(f"{index}.weight" for index in (1, 3, 5, 7, 8))


def half_then_less(step: int) -> float:
    return 0.5 ** (step + 1)


def one_process(
    gradients: Callable[[int, nn.Module], None], *, tied: bool = False
) -> dict[str, torch.Tensor]:
    """Trains the uncut model by two optimizers of torch, with the gradients that are given."""
    model = build(tied=tied)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizers = [
        muon([p for name, p in named.items() if name in IS_MATRIX]),
        adamw([p for name, p in named.items() if name not in IS_MATRIX]),
    ]
    schedules = [LambdaLR(optimizer, half_then_less) for optimizer in optimizers]
    for step in range(STEPS):
        gradients(step, model)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def of_replicas(data: int, microbatches: int) -> Callable[[int, nn.Module], None]:
    """Sets gradients to the mean of replicas, added up in the order in which ranks add them."""

    def gradients(step: int, model: nn.Module) -> None:
        inputs, target = batch(step)
        sums: dict[str, torch.Tensor] = {}
        for x, t in zip(inputs.chunk(data), target.chunk(data), strict=True):
            for one, its_target in zip(x.chunk(microbatches), t.chunk(microbatches), strict=True):
                (loss_of(model(one), its_target) / microbatches).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums[name] = sums[name] + p.grad if name in sums else p.grad
                    p.grad = None
        for name, p in model.named_parameters():
            p.grad = sums[name] / data if name in sums else None

    return gradients


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """Counts the bytes of every message of shards."""
    sent, send = [0], collectives.send

    def counted(tensor: torch.Tensor, peer: int, group: Any, tag: int) -> Any:
        sent[0] += tensor.nbytes if tag != collectives.COMMON else 0
        return send(tensor, peer, group, tag)

    with mock.patch.object(collectives, "send", counted):
        yield sent


@dataclass
class Trained:
    """What this rank has after some steps."""

    weights: dict[str, torch.Tensor]
    state_numel: int  # elements of the optimizer's state
    sent: int  # bytes of payload in the last step


def train(
    pipeline: int,
    shared: Any = "pipeline-shared",
    *,
    tied: bool = False,
    bucket_bytes: int | None = None,
    **options: Any,
) -> Trained:
    options = {"num_microbatches": 2 if pipeline > 1 else 1} | options
    if bucket_bytes is not None:
        options["bucket_bytes"] = bucket_bytes
    topology, parts = Topology.create(pipeline=pipeline), cut(build(tied=tied), pipeline)
    scheduler = Scheduler(
        parts, topology, loss_fn=loss_of, handlers=[shared, "owned"], schedule="1f1b", **options
    )
    sync, data, me = scheduler.sync, topology.size("dp"), topology.coordinate("dp")
    optimizer = scheduler.optimizer(muon, others=adamw)
    schedule, nbytes = LambdaLR(optimizer, half_then_less), 0
    for step in range(STEPS):
        inputs, target = batch(step)
        with counting() as sent:
            scheduler.step(inputs.chunk(data)[me], target=target.chunk(data)[me])
            optimizer.step()
            sync.wait_parameters()
        nbytes = sent[0]
        schedule.step()
        optimizer.zero_grad()
    sync.check_replicas()
    states = [value for state in optimizer.state.values() for value in state.values()]
    found = Trained(
        {n: p.detach() for n, p in parts.modules[topology.coordinate("pp")].named_parameters()},
        sum(value.numel() for value in states if isinstance(value, torch.Tensor) and value.ndim),
        nbytes,
    )
    scheduler.close()
    return found


@pytest.mark.parametrize(
    ("pipeline", "data"),
    [
        pytest.param(pipeline, data, marks=pytest.mark.ranks(pipeline * data))
        for pipeline, data in ((2, 2), (1, 2), (2, 1), (1, 1))
    ],
)
def test_bits_are_those_of_one_process(pipeline: int, data: int) -> None:
    """Two terms have one sum, in any order: so gradients have the same bits, and all else too."""
    expected = one_process(of_replicas(data, 2 if pipeline > 1 else 1))
    weights = train(pipeline, bucket_bytes=SMALL).weights
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
    assert {name for names in gathered([*weights]) for name in names} == set(expected)


@pytest.mark.ranks(4)
def test_states_and_bytes_count_each_element_once() -> None:
    """Muon keeps one number for an element, AdamW two; a ring sends 2 (n - 1) / n of all bytes."""
    ranks, found = 4, train(1)
    trained = {name: p.numel() for name, p in build().named_parameters() if p.requires_grad}
    of_muon = sum(numel for name, numel in trained.items() if name in IS_MATRIX)
    states = 2 * sum(trained.values()) - of_muon
    assert sum(gathered(found.state_numel)) == states
    largest = max(trained[name] for name in IS_MATRIX)
    assert found.state_numel <= states / ranks + largest
    # Slots and shards are aligned to 16 elements of 4 bytes, shards to as many flags.
    padding = 4 * 16 * (len(trained) + 2 * ranks)
    all_reduce = 2 * (ranks - 1) * 4 * sum(trained.values())  # of all ranks together
    total = sum(gathered(found.sent))
    assert all_reduce <= total <= all_reduce + 2 * (ranks - 1) * padding
    # A rank sends more for what it owns: the parameters go to all others.
    assert found.sent <= total / ranks + (ranks - 2) * 4 * largest

    # Muon beside a tied embedding has the bits of one process. With one microbatch the owner of the
    # tie adds two terms, and then two replicas do.
    shared = {"name": "pipeline-shared", "placement": "owner"}
    expected = one_process(of_replicas(2, 1), tied=True)
    found = train(2, shared, tied=True, num_microbatches=1)
    for name, weight in found.weights.items():
        assert torch.equal(weight, expected[name]), name


OF_MATRICES, OTHERS_ADAMW = "Muon steps matrices of two dimensions", {"others": torch.optim.AdamW}
# The handler, the optimizer and its options, and what is said.
MISTAKES: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "vectors for Muon": (
        "data-parallel", torch.optim.Muon, {},
        rf"{OF_MATRICES}, but '0.1.bias' is \(12,\).*others=torch.optim",
    ),
    "Muon for shards": (
        "sharded", torch.optim.Muon, OTHERS_ADAMW,
        "Muon cannot step sharded parameters.*The handler 'owned' gives it whole matrices",
    ),
    "not elementwise": (
        "owned", torch.optim.Adafactor, {},
        "Adafactor cannot step sharded parameters.*others=torch.optim.AdamW",
    ),
    "others of a wrong kind": (
        "owned", torch.optim.Muon, {"others": len}, "made int, expected an Optimizer"
    ),
    "parameters": (
        "owned", torch.optim.AdamW, {"params": []},
        r"was given parameters, and takes none.* use group_of=",
    ),
}  # fmt: skip


@pytest.mark.ranks(2)
def test_mistakes_are_errors_on_all_ranks() -> None:
    for handler, kind, options, words in MISTAKES.values():
        sync = GradientSync({0: build()}, Topology.create(pipeline=1), handlers=[handler])
        with pytest.raises(PlanError, match=words):
            sync.optimizer(kind, **options)
        if kind is torch.optim.AdamW:
            both = sync.optimizer(torch.optim.Muon, others=adamw)
            with pytest.raises(PlanError, match=r"add_param_group\(\) of Muon and AdamW as one"):
                both.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
        sync.close()
