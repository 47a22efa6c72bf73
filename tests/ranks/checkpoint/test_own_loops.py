"""A loop of one's own saves and goes on: to the bit, on the same and on other layouts."""

from __future__ import annotations

import re
import time
import zlib
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import pipegrad
from pipegrad import checkpoint
from pipegrad.checkpoint import files
from pipegrad.errors import CheckpointError, PlanError
from pipegrad.testing import run_ranks
from tests.support.checkpoints import differences, index_of

STEPS, STOP = 6, 3
SHARDED, PLAIN = ("pipeline-shared", "sharded"), ("pipeline-shared", "data-parallel")


class Layout(NamedTuple):
    """How a loop lies over ranks."""

    ranks: int
    stages: int
    handlers: tuple[str, ...] = SHARDED


LAYOUTS = {
    "4 stages": Layout(4, 4),
    "2 stages, 2 replicas": Layout(4, 2),
    "4 replicas": Layout(4, 1),
    "whole": Layout(2, 1, PLAIN),
    "one process": Layout(1, 1),
}


class Layer(nn.Module):
    """It has a parameter without dimensions, and a buffer that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift: Tensor
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x + self.shift).tanh() * self.scale
        return y


def tied() -> nn.Sequential:
    """Embedding and head are one weight."""
    embedding, head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, Layer(), Layer(), head)


class Loop:
    """A loop of one rank."""

    def __init__(self, layout: Layout, kind: Any = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.topology = pipegrad.Topology.create(pipeline=layout.stages)
        dtype = torch.bfloat16 if options else torch.float32
        self.scheduler = pipegrad.Scheduler(
            pipegrad.cut(tied().to(dtype), layout.stages),
            self.topology,
            schedule="1f1b",
            num_microbatches=2,
            loss_fn=lambda x, y: nn.functional.cross_entropy(x.flatten(0, 1).float(), y.flatten()),
            handlers=list(layout.handlers),
            **options,
        )
        self.optimizer = self.scheduler.optimizer(kind, lr=1e-2)
        self.rates = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.state = checkpoint.State(self.scheduler, self.optimizer, extra={"rates": self.rates})

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            batch = torch.randint(10, (16, 4), generator=torch.Generator().manual_seed(step))
            mine = batch.chunk(self.topology.size("dp"))[self.topology.coordinate("dp")]
            losses.append(float(self.scheduler.step(mine, target=mine).loss))
            self.optimizer.step()
            self.rates.step()
            self.optimizer.zero_grad()
        return losses


def trained(folder: Path, layout: Layout, options: dict[str, Any]) -> list[float]:
    """Trains; saves in the middle, while it goes on, and at the end."""
    loop = Loop(layout, **options)
    saver = checkpoint.Saver(loop.state, folder, run={"seed": "0"})
    losses = loop.steps(0, STOP)
    saver.save(STOP)
    losses += loop.steps(STOP, STEPS)
    saver.save(STEPS, wait=True)
    saver.close()
    return losses


def went_on(folder: Path, layout: Layout, options: dict[str, Any], end: str) -> list[float]:
    loop = Loop(layout, **options)
    resumed: Any = checkpoint.resume(folder / f"checkpoint-{STOP}", loop.state)
    assert resumed == (STOP, {"seed": "0"}, ())
    losses = loop.steps(resumed.step, STEPS)
    saver = checkpoint.Saver(loop.state)
    saver.write(folder / end, STEPS)
    saver.close()
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loops")


@cache
def whole(folder: Path, name: str, master: bool) -> tuple[Path, list[float]]:
    """Returns a run that never stopped."""
    run, layout = folder / f"{name} {master}", LAYOUTS[name]
    run.mkdir()
    losses, *_ = run_ranks(trained, layout.ranks, run, layout, options(master))
    return run, losses


def options(master: bool) -> dict[str, Any]:
    return {"master_dtype": torch.float32} if master else {}


@pytest.mark.parametrize(
    ("name", "to", "master"),
    [
        *((name, name, False) for name in LAYOUTS),
        ("4 stages", "2 stages, 2 replicas", False),
        ("4 stages", "one process", False),
        ("2 stages, 2 replicas", "4 stages", False),
        ("2 stages, 2 replicas", "4 replicas", False),
        ("4 replicas", "whole", False),
        ("whole", "4 replicas", False),
        ("one process", "2 stages, 2 replicas", False),
        ("2 stages, 2 replicas", "2 stages, 2 replicas", True),
        ("2 stages, 2 replicas", "one process", True),
    ],
)
def test_any_layout_goes_on_from_any_other(folder: Path, name: str, to: str, master: bool) -> None:
    run, losses = whole(folder, name, master)
    end = f"from {to}"
    found, *_ = run_ranks(went_on, LAYOUTS[to].ranks, run, LAYOUTS[to], options(master), end)
    if name == to:
        assert found == losses[STOP:]
        assert differences(run / end, run / f"checkpoint-{STEPS}") == []
    assert found == pytest.approx(losses[STOP:], rel=1e-2 if master else 1e-5)


def test_each_slice_is_written_once(folder: Path) -> None:
    run, _ = whole(folder, "2 stages, 2 replicas", False)
    index = index_of(run / f"checkpoint-{STOP}")
    assert index["tied"] == {"0.weight": ["3.weight"]}
    sizes = [size for size, _ in index["files"].values()]
    assert len(sizes) == 4
    assert max(sizes) < 3 * min(sizes)
    weights = pipegrad.load(run)
    assert weights.keys() == tied().state_dict().keys()
    assert weights["3.weight"] is weights["0.weight"]


class Counting:
    """An extra state."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def state_dict(self) -> Any:
        return {"number": self.number}

    def load_state_dict(self, state: Any) -> None:
        self.number = state["number"]


def refusals(folder: Path) -> dict[str, str]:
    """Returns in which words things are refused."""
    words = {}

    def refused(name: str, call: Any) -> None:
        with pytest.raises((CheckpointError, PlanError)) as caught:
            call()
        words[name] = str(caught.value)

    loop = Loop(LAYOUTS["whole"])
    there = folder / f"checkpoint-{STOP}"
    state = loop.state
    refused("none", lambda: checkpoint.resume(checkpoint.newest(folder / "nothing"), state))
    refused("nothing", lambda: checkpoint.resume(folder / "nothing", state))
    apart = checkpoint.Saver(state, folder / f"of {dist.get_rank()}")
    refused("apart", lambda: apart.save(STOP, wait=True))
    refused("digits", lambda: apart.save(f"{STOP}"))  # type: ignore[arg-type]
    apart.close()
    other = Loop(LAYOUTS["whole"], torch.optim.RMSprop)
    before = [main.tensor.clone() for main in other.scheduler.sync.main_parameters()]
    refused("optimizer", lambda: checkpoint.resume(there, other.state))
    after = [main.tensor for main in other.scheduler.sync.main_parameters()]
    assert all(map(torch.equal, before, after))  # nothing is half loaded
    mine = torch.optim.SGD([main.tensor for main in loop.scheduler.sync.main_parameters()], lr=0.1)
    refused("no names", lambda: checkpoint.State(loop.scheduler, mine))
    refused("shards", lambda: checkpoint.State(loop.scheduler, shards={"*.up": 0}))
    of_rank = {"each": Counting(torch.tensor(dist.get_rank()))}
    saver = checkpoint.Saver(checkpoint.State(loop.scheduler, loop.optimizer, extra=of_rank))
    saver.write(folder / "each", 1)
    of_rank["each"].number = None
    checkpoint.resume(folder / "each", saver.state)
    assert of_rank["each"].number == dist.get_rank()
    odd = checkpoint.State(loop.scheduler, extra={"odd": Counting(object())})
    odd_saver = checkpoint.Saver(odd)
    refused("odd", lambda: odd_saver.write(folder / "odd", 1))
    odd_saver.close()
    saver.close()
    # Of a run the newest checkpoint is taken.
    assert checkpoint.resume(folder, state).step == STEPS
    return words


# Two optimizers, of which the second looks for state that the first has not kept, or the other way.
OTHERS: dict[str, tuple[Any, Any]] = {
    "amsgrad of .* is True here, and False there": (
        torch.optim.AdamW,
        partial(torch.optim.AdamW, amsgrad=True),
    ),
    "centered of .* is True here, and False there": (
        torch.optim.RMSprop,
        partial(torch.optim.RMSprop, centered=True),
    ),
    "momentum of .* is 0.9 here, and 0 there": (
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9),
    ),
    "momentum of .* is 0 here, and 0.9 there": (
        partial(torch.optim.SGD, momentum=0.9),
        torch.optim.SGD,
    ),
}


def refused_by_options(folder: Path) -> list[str]:
    found = []
    for number, (kind, other) in enumerate(OTHERS.values()):
        loop, later = Loop(LAYOUTS["whole"], kind), Loop(LAYOUTS["whole"], other)
        loop.steps(0, 1)
        saver = checkpoint.Saver(loop.state)
        saver.write(folder / f"{number}", 1)
        saver.close()
        with pytest.raises(CheckpointError) as caught:
            checkpoint.resume(folder / f"{number}", later.state, options=False)
        found.append(str(caught.value))
        # With the options of the checkpoint it is the optimizer that has written it.
        checkpoint.resume(folder / f"{number}", later.state)
        assert later.steps(1, 2) == loop.steps(1, 2)
    return found


def test_options_that_give_the_state_other_names_are_refused(tmp_path: Path) -> None:
    """torch raised a KeyError in the first step."""
    first, second = run_ranks(refused_by_options, 2, tmp_path)
    assert first == second
    for words, said in zip(OTHERS, first, strict=True):
        assert "is of an optimizer that keeps other state: " in said
        assert re.search(words, said), said


def slowly(folder: Path) -> float:
    """Saves with a disk that takes a twentieth of a second for 16 bytes, on one rank."""
    loop = Loop(LAYOUTS["whole"], step_timeout_seconds=1.0)
    saver, began = checkpoint.Saver(loop.state, folder), time.monotonic()
    crc32 = zlib.crc32

    def slow(content: Any, begin: int = 0) -> int:
        time.sleep(0.05 * dist.get_rank())
        return crc32(content, begin)

    with (
        mock.patch.object(files, "_PIECE_BYTES", 16),
        mock.patch.object(zlib, "crc32", slow),
    ):
        saver.save(1, wait=True)
        saver.close()
    return time.monotonic() - began


def test_a_save_may_take_longer_than_a_step(tmp_path: Path) -> None:
    """What counts is whether the writer goes on. The fault matrix has one that stalls."""
    assert min(run_ranks(slowly, 2, tmp_path)) > 2
    assert len(pipegrad.load(tmp_path)) == len(tied().state_dict())


def one_rank(folder: Path) -> str:
    loop = Loop(LAYOUTS["one process"])
    state = checkpoint.State(loop.scheduler, loop.optimizer, extra={"each": Counting(0)})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resume(folder / "each", state)
    return str(caught.value)


def test_what_does_not_fit_is_refused_on_all_ranks(folder: Path) -> None:
    run, _ = whole(folder, "whole", False)
    first, second = run_ranks(refusals, 2, run)
    where, why = zip(*(words.pop("apart").split(": ", 1) for words in (first, second)), strict=True)
    assert [each[-12:] for each in where] == ["checkpoint-3"] * 2
    assert why[0] == why[1]
    assert "is not there, although the first rank has made its folder: save the same" in why[0]
    assert first == second
    assert first["none"].startswith("there is no checkpoint to resume from: ")
    assert (
        "nothing is not a whole checkpoint of this version of pipegrad: index.json"
        in first["nothing"]
    )
    assert "is of another optimizer: of ['AdamW'], not ['RMSprop']" in first["optimizer"]
    assert first["digits"] == "step is '3', expected a whole number, 0 or more"
    assert first["no names"].startswith("the state of this SGD has no names: make it by ")
    assert first["shards"] == "shards: '*.up' matches no parameter"
    assert "odd: rank 0: no checkpoint can be written: what 'odd' keeps" in first["odd"]
    assert not (run / "odd").exists()
    [words] = run_ranks(one_rank, 1, run)
    assert "has another state of 'each' for each rank, so only the layout that wrote it" in words


def saved_by_torch(folder: Path) -> list[float]:
    loop = Loop(LAYOUTS["2 stages, 2 replicas"])
    loop.steps(0, STOP)
    loop.scheduler.sync.wait_parameters()
    [module] = loop.scheduler.sync.modules.values()
    state = {"model": module.state_dict(), "optimizer": loop.optimizer.state_dict()}
    dcp.state_dict_saver.save(state, checkpoint_id=folder / "of torch")
    return loop.steps(STOP, STEPS)


def read_by_torch(folder: Path) -> list[float]:
    loop = Loop(LAYOUTS["whole"])
    saved = torch.load(folder / "whole.pt", weights_only=True)
    [module] = loop.scheduler.sync.modules.values()
    module.load_state_dict(saved["model"])
    loop.scheduler.sync.synchronize_parameters()
    loop.optimizer.load_state_dict(saved["optimizer"])
    loop.rates.last_epoch = STOP
    return loop.steps(STOP, STEPS)


def test_torchs_own_checkpoints_are_read_on_another_layout(tmp_path: Path) -> None:
    expected, *_ = run_ranks(saved_by_torch, 4, tmp_path)
    dcp_to_torch_save(tmp_path / "of torch", tmp_path / "whole.pt")
    found, *_ = run_ranks(read_by_torch, 2, tmp_path)
    assert found == pytest.approx(expected, rel=1e-5)
