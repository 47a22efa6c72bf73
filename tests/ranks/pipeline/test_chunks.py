"""Sequences in chunks of time: loss and gradients of the whole sequence in one process."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

import pipegrad
from pipegrad import Scheduler, Stage, Topology
from pipegrad.errors import PipegradError
from tests.support.gradients.cases import rank
from tests.support.pairwise import pairwise
from tests.support.pipeline.layers import one_stage_each
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(2)
WIDTH, CLASSES, ROWS, LENGTH, MICROBATCHES = 8, 5, 6, 12, 3
MOST = rounding(ROWS * LENGTH * WIDTH)
State = Any


class Recurrent(nn.Module):
    """Backpropagation through time: a state of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, state: State = None) -> Any:
        return self.lstm(x, state)


class Attention(nn.Module):
    """Causal attention whose state is a list that grows: a key and a value of each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        past: list[dict[str, Any]] = [] if state is None else state["past"]
        q, k, v = self.qkv(x).split(WIDTH, -1)
        # Earlier tensors are handed on as they came, and so is a number.
        now = [*past, {"k": k, "v": v}]
        keys, values = (torch.cat([part[name] for part in now], 1) for name in ("k", "v"))
        begin = keys.shape[1] - x.shape[1]
        assert begin == (0 if state is None else state["length"])
        seen = torch.arange(keys.shape[1]) <= torch.arange(begin, keys.shape[1])[:, None]
        scores = (q @ keys.mT).masked_fill(~seen, -torch.inf)
        x = x + self.out(self.drop(scores.softmax(-1)) @ values)
        return x, {"past": now, "length": keys.shape[1], "none": None}


class Head(nn.Module):
    """The last stage, whose state has no gradient in one part."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.head = kind(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        inner, count = (None, torch.zeros(())) if state is None else state
        x, inner = self.inner(x, inner)
        return self.head(x), (inner, count + x.detach().sum())


def batch(*, ignored: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(rows, LENGTH, WIDTH, generator=drawn)
    target = torch.randint(CLASSES, (rows, LENGTH), generator=drawn)
    target[0, LENGTH - ignored :] = -100
    return x, target


def mean(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), target.flatten())


def sums(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="sum")
    return loss, (target != -100).sum()


WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "chunked-1f1b"},
    "split": {"schedule": "chunked-zb-h1"},
    "recompute": {"schedule": "chunked-1f1b", "recompute": True},
    "split, recompute": {"schedule": "chunked-zb-h1", "recompute": True},
    "scaler": {"schedule": "chunked-zb-h1", "scale": 8.0},
    "its own number": {"schedule": {"name": "chunked-1f1b", "chunks": 4}},
    "ready": {"schedule": "chunked-1f1b", "ready": True},
    "token_mean": {"schedule": "chunked-1f1b", "loss_fn": sums, "ignored": 7},
    "uneven rows": {"schedule": "chunked-1f1b", "rows": 8},
}
CHUNKS = {"one": 1, "even": 4, "uneven": 5, "lengths": [7, 1, 4], "single": LENGTH}


@pytest.mark.parametrize("kind", [Recurrent, Attention])
@pytest.mark.parametrize(("way", "cut"), pairwise(WAYS, CHUNKS))
def test_chunks_are_the_whole_sequence(kind: type[nn.Module], way: str, cut: str) -> None:
    options, chunks = dict(WAYS[way]), CHUNKS[cut]
    torch.manual_seed(1)
    true = [kind(), Head(kind)]
    own = copy.deepcopy(true)
    x, target = batch(ignored=options.pop("ignored", 0), rows=options.pop("rows", ROWS))
    is_ready, scale = options.pop("ready", False), options.pop("scale", None)
    of_stage = [{"carry": ("state",), "recompute": options.pop("recompute", False)}] * 2
    options = {"loss_fn": mean, **options}
    if options["loss_fn"] is sums:
        options["loss_reduction"] = "token_mean"
    scheduler = one_stage_each(*own, num_microbatches=MICROBATCHES, of_stage=of_stage, **options)
    scaler = None if scale is None else pipegrad.GradScaler(scheduler.sync, init_scale=scale)
    hidden, _ = true[0](x)
    outputs, _ = true[1](hidden)
    wanted = mean(outputs, target)
    wanted.backward()
    parts = zip(x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True)
    ready = [{"x": part, "target": labels} for part, labels in parts]
    given: dict[str, Any] = {"microbatches": ready} if is_ready else {"x": x, "target": target}
    if "chunks" not in options["schedule"] or chunks != 4:
        given["chunks"] = chunks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluated = scheduler.evaluate(**given)
        assert error(evaluated.loss, wanted.detach()) <= MOST
        if rank() == 1:
            assert error(evaluated.outputs[0], outputs.detach()) <= MOST
        for _ in range(2):
            for p in own[rank()].parameters():
                p.grad = None
            assert error(scheduler.step(**given).loss, wanted.detach()) <= MOST
    for (name, p), q in zip(own[rank()].named_parameters(), true[rank()].parameters(), strict=True):
        assert p.grad is not None
        assert error(p.grad / (scale or 1.0), q.grad) <= MOST, name
    # A step of whole sequences follows, with the same result.
    for p in own[rank()].parameters():
        p.grad = None
    assert error(scheduler.step(**{**given, "chunks": 1}).loss, wanted.detach()) <= MOST
    del scaler
    scheduler.close()


class Embedding(nn.Module):
    """The first stage of a model whose head has the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(CLASSES, WIDTH), Recurrent()

    def forward(self, tokens: Tensor, state: State = None) -> Any:
        return self.inner(self.embedding(tokens), state)


HANDLERS: dict[str, list[Any]] = {
    "replicas": ["pipeline-shared", "data-parallel"],
    "sharded": ["pipeline-shared", "sharded"],
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("handlers", HANDLERS)
@pytest.mark.parametrize("schedule", ["chunked-1f1b", "chunked-zb-h1"])
def test_replicas_and_a_tie_train_as_one_process(handlers: str, schedule: str) -> None:
    """Each replica has half of the rows; after a step the tied weights have the same bits."""

    def made() -> list[Any]:
        torch.manual_seed(1)
        stages: list[Any] = [Embedding(), Head(Attention)]
        stages[1].head.weight = stages[0].embedding.weight
        return stages

    true, own = made(), made()
    topology = Topology.create(pipeline=2)
    here, replica = topology.coordinate("pp"), topology.coordinate("dp")
    tokens, target = (batch()[1][:4], batch()[1].flip(1)[:4])
    scheduler = Scheduler(
        [Stage(own[here], here, ("tokens",) if here == 0 else ("x",), carry=("state",))],
        topology,
        schedule=schedule,
        num_microbatches=2,
        loss_fn=mean,
        tied=[{0: "embedding.weight", 1: "head.weight"}],
        handlers=HANDLERS[handlers],
    )
    ours = scheduler.optimizer(torch.optim.SGD, lr=0.5)
    parameters = {id(p): p for stage in true for p in stage.parameters()}
    theirs = torch.optim.SGD(parameters.values(), lr=0.5)
    rows = slice(2 * replica, 2 * replica + 2)
    for _ in range(2):
        result = scheduler.step(tokens[rows], target=target[rows], chunks=[5, 4, 3])
        loss = mean(true[1](true[0](tokens)[0])[0], target)
        theirs.zero_grad()
        loss.backward()
        assert error(result.loss, loss.detach()) <= MOST
        ours.step()
        theirs.step()
        ours.zero_grad()
    # Sharded parameters come back for the next forwards.
    loss = mean(true[1](true[0](tokens)[0])[0], target).detach()
    assert error(scheduler.evaluate(tokens[rows], target=target[rows]).loss, loss) <= MOST
    for (name, p), q in zip(own[here].named_parameters(), true[here].parameters(), strict=True):
        assert error(p.detach(), q.detach()) <= MOST, name
    scheduler.sync.check_replicas()
    scheduler.close()


class Forgetful(Recurrent):
    def forward(self, x: Tensor, state: State = None) -> Any:
        return super().forward(x, state)[0]


@dataclass
class Held:
    state: State


class Hidden(Recurrent):
    """Its state would keep the graph of the chunk before, which is freed in that one's backward."""

    def forward(self, x: Tensor, state: State = None) -> Any:
        y, state = super().forward(x, state.state if state else None)
        return y, Held(state)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another schedule": ({"schedule": "1f1b"}, "makes no schedule of chunks of time"),
    "no state": ({"carry": ()}, "no stage carries anything"),
    "a loss of the batch": ({"num_microbatches": 1, "loss_over": "batch"}, "whole sequences"),
    "too many": ({"chunks": 13}, "of lengths .* cannot be cut into 13 chunks"),
    "other lengths": ({"chunks": [3, 3]}, "add up to 6, and tensors are 12 long"),
    "none": ({"chunks": 0}, "chunks is 0, expected how many there are"),
    "rows as time": ({"time_dim": 0}, "time_dim is 0, expected a dimension from 1"),
    "an unknown name": ({"time_dim": {"y": 1}}, "time_dim is .* out of"),
    "a target of rows": ({"target": "rows"}, "the target has no dimension of time"),
    "a target of another length": ({"target": "short"}, "how long their tensors are in time"),
    "ranks that differ": ({"chunks_of_rank": True}, "chunks"),
    "forgets its state": ({"kind": Forgetful}, ""),
    "a state that nobody sees into": ({"kind": Hidden}, "carries a Held, which holds tensors with"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_on_all_ranks(case: str) -> None:
    options, words = dict(REFUSED[case][0]), REFUSED[case][1]
    carry = {"carry": options.pop("carry", ("state",))}
    x, target = batch()
    own: list[nn.Module] = [options.pop("kind", Recurrent)(), Head(Recurrent)]
    step = {"chunks": options.pop("chunks", 4)}
    if "time_dim" in options:
        step["time_dim"] = options.pop("time_dim")
    shape = options.pop("target", None)
    target = {"rows": target[:, 0], "short": target[:, 1:], None: target}[shape]
    if options.pop("chunks_of_rank", False):
        step["chunks"] = 4 if rank() else 3
    options = {
        "schedule": "chunked-1f1b",
        "loss_fn": lambda x, target: x.mean() + 0 * target.sum(),
        "num_microbatches": MICROBATCHES,
        **options,
    }
    scheduler = one_stage_each(*own, of_stage=[carry, carry], agree_seconds=5.0, **options)
    with pytest.raises(PipegradError, match=words):
        scheduler.step(x, target=target, **step)
    scheduler.close()


def test_what_has_no_time_goes_whole_to_each_chunk() -> None:
    """A scale for each row, a table of frequencies, and a mask whose time is elsewhere."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Recurrent()

        def forward(  # noqa: PLR0917 - by name
            self, x: Tensor, scale: Tensor, style: Tensor, table: Tensor, mask: Tensor,
            state: State = None,
        ) -> tuple[Tensor, State]:  # fmt: skip
            y, state = self.inner(x * scale[:, None, None] + style[:, None] + table.sum(), state)
            return y * mask.mT, state

    names = ("x", "scale", "style", "table", "mask")
    torch.manual_seed(1)
    true = [Mixed(), Head(Recurrent)]
    own = copy.deepcopy(true)
    x, target = batch()
    drawn = torch.Generator().manual_seed(5)
    given: dict[str, Any] = {
        "x": x.clone().requires_grad_(),
        "scale": torch.rand(ROWS, generator=drawn),
        "style": torch.rand(ROWS, WIDTH, generator=drawn),
        "table": torch.rand(LENGTH, generator=drawn).expand(3, LENGTH),
        "mask": torch.rand(ROWS, 1, LENGTH, generator=drawn),
    }
    scheduler = one_stage_each(
        *own,
        of_stage=[{"inputs": names, "carry": ("state",)}, {"carry": ("state",)}],
        schedule="chunked-1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=mean,
        whole=("table",),
    )
    twin = given["x"].detach().clone().requires_grad_()
    mean(true[1](true[0](**{**given, "x": twin})[0])[0], target).backward()
    here: dict[str, Any] = given if rank() == 0 else {}
    time_dim = {"style": None, "mask": 2} if rank() == 0 else 1
    scheduler.step(**here, target=target, chunks=4, time_dim=time_dim)
    if rank() == 0:
        assert error(given["x"].grad, twin.grad) <= MOST
        assert scheduler.inputs["x"].endswith("each cut into chunks of 3")
        assert scheduler.inputs["style"].endswith("microbatches of 2")
    for (name, p), q in zip(own[rank()].named_parameters(), true[rank()].parameters(), strict=True):
        assert error(p.grad, q.grad) <= MOST, name
    scheduler.close()


class Blind(Recurrent):
    """An LSTM whose state goes nowhere."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.lstm(x)[0]


class PerToken(nn.Sequential):
    """Looks at each position alone; draws random numbers, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self[2](self[1](self[0](x)).mT).mT


@pytest.mark.parametrize("kind", [Blind, PerToken])
def test_a_stage_whose_chunks_do_not_see_each_other_is_warned_of(kind: type[nn.Module]) -> None:
    """The loss of such a stage is another one, without an error."""
    torch.manual_seed(1)
    first = kind()
    before = {name: buffer.clone() for name, buffer in first.named_buffers()}
    of_stage: list[dict[str, Any]] = [{}, {"carry": ("state",)}]
    scheduler = one_stage_each(
        first,
        Head(Recurrent),
        of_stage=of_stage,
        schedule="chunked-1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=mean,
    )
    x, target = batch()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        random = torch.get_rng_state()
        scheduler.evaluate(x, target=target, chunks=3)
        assert torch.equal(random, torch.get_rng_state())
        for name, buffer in first.named_buffers():
            assert torch.equal(buffer, before[name]), name
        assert first.training
        scheduler.step(x, target=target, chunks=3)
    found = [str(w.message) for w in seen if "in two chunks of time" in str(w.message)]
    is_blind = kind is Blind and rank() == 0
    assert len(found) == is_blind
    if is_blind:
        assert "stage 0: a sequence in two chunks of time gives other outputs" in found[0]
    scheduler.close()


class Extra(NamedTuple):
    table: Tensor
    bias: Tensor


class Odd(nn.Module):
    """Takes a tree without time; returns time behind channels, and a number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Recurrent()

    def forward(self, x: Tensor, extra: Extra, state: State = None) -> Any:
        y, state = self.inner(x.mT * extra.table.sum() + extra.bias.sum(), state)
        return y.mT, y.sum((1, 2)), state


@pytest.mark.ranks(1)
def test_time_may_be_elsewhere_and_trees_whole() -> None:
    torch.manual_seed(1)
    module = Odd()
    scheduler = Scheduler(
        [Stage(module, 0, ("x", "extra"), ("y", "sums"), carry=("state",))],
        Topology.create(pipeline=1),
        schedule="chunked-1f1b",
        num_microbatches=2,
        loss_fn=lambda y, sums, target: (y - target).square().mean() + 0 * sums.sum(),
        whole=("extra",),
    )
    x, extra = torch.randn(4, WIDTH, 8), Extra(torch.rand(4, 8), torch.rand(4, 8))
    wanted, _, _ = module(x, extra)
    result = scheduler.evaluate(x, extra, target=x, chunks=2, time_dim=2)
    y, sums = result.outputs
    assert error(y, wanted.detach()) <= MOST
    parts = wanted.detach().view(4, WIDTH, 2, 4).sum((1, 3))  # of each row and chunk
    assert error(sums, parts) <= MOST
    assert error(result.loss, (wanted.detach() - x).square().mean()) <= MOST
    scheduler.close()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("chunks", [1, 2, [7, 1], np.array([3, 5])])
def test_sums_are_those_of_whole_sequences(chunks: Any) -> None:
    torch.manual_seed(1)
    module = Recurrent()
    loss_fn = nn.MSELoss(reduction="sum")
    scheduler = Scheduler(
        [Stage(module, 0, carry=("state",))],
        Topology.create(pipeline=1),
        schedule="chunked-1f1b",
        num_microbatches=2,
        loss_fn=loss_fn,
    )
    x = torch.randn(4, 8, WIDTH)
    wanted = loss_fn(module(x)[0], x).detach() / 2  # the mean of two microbatches
    assert error(scheduler.step(x, target=x, chunks=chunks).loss, wanted) <= MOST
    scheduler.close()


class Writes(Recurrent):
    def forward(self, x: Tensor, scale: Tensor, state: State = None) -> Any:  # type: ignore[override]
        scale.add_(1.0)
        return super().forward(x * scale[:, None, None], state)


class Adapter(nn.Linear):
    """Puts its change into the weight for evaluation, and takes it out for training."""

    merged = False

    def train(self, mode: bool = True) -> Adapter:
        super().train(mode)
        if self.merged is mode:
            self.merged = not mode
            self.weight.data.add_(-1.0 if mode else 1.0)
        return self


@pytest.mark.ranks(1)
def test_what_chunks_share_may_not_be_written_and_modes_are_more_than_flags() -> None:
    topology = Topology.create(pipeline=1)
    options: dict[str, Any] = {"schedule": "chunked-1f1b", "num_microbatches": 2, "loss_fn": mean}
    x, scale, target = torch.randn(4, 8, WIDTH), torch.ones(4), torch.zeros(4, 8, dtype=torch.int64)
    writes = Stage(Writes(), 0, ("x", "scale"), carry=("state",))
    scheduler = Scheduler([writes], topology, **options)
    with pytest.raises(PipegradError, match="changed in place"):
        scheduler.step(x, scale, target=target, chunks=2)
    scheduler.close()
    adapter = Adapter(WIDTH, WIDTH)
    weight = adapter.weight.detach().clone()
    scheduler = Scheduler(
        [Stage(nn.Sequential(adapter), 0)], topology, **{**options, "schedule": "1f1b"}
    )  # fmt: skip
    scheduler.evaluate(x, target=target)
    scheduler.step(x, target=target)
    assert adapter.training
    assert not adapter.merged
    assert error(adapter.weight.detach(), weight) <= MOST
    scheduler.close()
