"""Ranks as processes on one card: NCCL, and gloo with CUDA tensors. Never a timing.

NCCL refuses two ranks on one device, unless they seem to be on two hosts: ``NCCL_HOSTID``. The same
cases run on gloo and CPU, so that they are right before a card sees them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pipegrad
from pipegrad import Bucketer, GradientSync, Topology
from pipegrad.comm.sync_points import sites
from pipegrad.testing import OrderChecker, run_ranks
from tests.support.gpu.card import GPU, sleep
from tests.support.gpu.worlds import (
    GLOO,
    NCCL,
    TIMEOUT_SECONDS,
    WORLDS,
    World,
    at_rest,
    enter,
)
from tests.support.gradients.cases import grads, rank, replicated, stage, tied
from tests.support.ordering.programs import OWNED, updated
from tests.support.pipeline.models import TOKENS, VOCAB, build
from tests.support.pipeline.pipelines import loss_of, stage_module

pytestmark = pytest.mark.timeout(2 * TIMEOUT_SECONDS + 40)

Case = Callable[[torch.device], Any]
CASES: dict[str, tuple[Case, Callable[[int], Sequence[Any]], tuple[int, ...]]] = {}


def case(
    expected: Callable[[int], Sequence[Any]], *sizes: int
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function a case: what each of so many ranks must return, for worlds of `sizes`."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[function.__name__] = function, expected, sizes
        return function

    return add


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a case one more: streams and events, autograd's and NCCL's too, order all of it."""
    _, expected, sizes = CASES[function.__name__]

    def checked(device: torch.device) -> Any:
        with OrderChecker(virtual_streams=False) as checker:
            found = function(device)
        return found, list(map(str, checker.violations))

    def without_violations(num_ranks: int) -> Sequence[Any]:
        return [(found, []) for found in expected(num_ranks)]

    CASES[f"{function.__name__}_checked"] = checked, without_violations, sizes
    return function


def run_cases(world: World, folder: str, names: Sequence[str]) -> dict[str, Any]:
    """Runs on every rank."""
    device = enter(world, folder)
    found = {}
    for name in names:
        found[name] = CASES[name][0](device)
        at_rest(device)
    return found


def cases_of(world: World, num_ranks: int) -> tuple[str, ...]:
    found = [name for name, (_, _, sizes) in CASES.items() if num_ranks in sizes]
    return tuple(name for name in found if world != GLOO or name not in NEEDS_SEND)


@cache
def outcome(
    world: World, num_ranks: int, names: tuple[str, ...]
) -> list[dict[str, Any]] | Exception:
    """Returns what the ranks returned, or why they did not: a world that hangs does so once."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return run_ranks(
                run_cases, num_ranks, world, folder, names, timeout_seconds=TIMEOUT_SECONDS
            )
    except Exception as error:  # noqa: BLE001 - raised by each of its tests
        return error


# GradientSync.


@cache
def streams() -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream() for _ in range(3))


@contextmanager
def beside(device: torch.device, number: int) -> Iterator[None]:
    """Makes side stream `number` current, behind and ahead of the one that is current now."""
    if device.type == "cpu":
        yield
        return
    here, there = torch.cuda.current_stream(), streams()[number % 3]
    there.wait_stream(here)
    with torch.cuda.stream(there):
        yield
    here.wait_stream(there)


def backward(module: nn.Module, gradients: dict[str, float], device: torch.device) -> None:
    """Gives these gradients; forward of parameter k, and so its backward, is on stream k mod 3."""
    total = torch.zeros((), device=device)
    for k, (name, gradient) in enumerate(gradients.items()):
        with beside(device, k):
            part = (module.get_parameter(name) * gradient).sum()
        total = total + part
    total.backward()


def steps(
    sync: GradientSync,
    module: nn.Module,
    gradients: Sequence[dict[str, float]],
    *,
    clip: bool = True,
) -> list[dict[str, Any]]:
    device = next(module.parameters()).device
    found = []
    for given in gradients:
        sync.prepare()
        for at in sync.topology.local_stages:
            sync.stage_last_backward(at)
        backward(module, given, device)
        for at in sync.topology.local_stages:
            sync.stage_final(at)
        sync.finish()
        if clip:
            sync.clip_grad_norm_(1e9)
        found.append(grads(module))
        module.zero_grad()
    sync.check_replicas()
    sync.close()
    return found


def model(device: torch.device, large: torch.dtype = torch.float32) -> nn.Module:
    """Parameters that share buckets, one that fills its own, one that rank 0 uses, one nobody."""
    tensor = torch.zeros(64, dtype=large)
    return stage(a=(3,), b=(2,), large=tensor, part=(5,), unused=(4,)).to(device)


def used(step: int) -> dict[str, float]:
    """The gradients of this rank: means over two and over four ranks come out whole."""
    mine = 2.0 * rank() + step
    given = {"a": mine, "b": 3 * mine, "large": mine}
    return given if rank() else {"part": 8.0, **given}


def means(num_ranks: int) -> Sequence[Any]:
    def mean(step: int) -> dict[str, Any]:
        whole = num_ranks - 1.0 + step
        return {
            "a": [whole] * 3,
            "b": [3 * whole] * 2,
            "large": [whole] * 64,
            "part": [8.0 / num_ranks] * 5,
            "unused": None,
        }

    return [[mean(step) for step in range(4)]] * num_ranks


def four_steps(
    device: torch.device, large: torch.dtype = torch.float32, **options: Any
) -> list[dict[str, Any]]:
    module = model(device, large)
    sync = replicated(module, bucket_bytes=256, **options)
    numbers = [used(step) for step in range(4)]
    return steps(sync, module, numbers, clip=large is not torch.float64)


@case(means, 2, 4)
def one_comm_stream(device: torch.device) -> Any:
    return four_steps(device, comm_streams=1)


@watched
@case(means, 2, 4)
def two_comm_streams(device: torch.device) -> Any:
    return four_steps(device, comm_streams=2)


@case(means, 2, 4)
def mixed_dtypes(device: torch.device) -> Any:
    return four_steps(device, torch.float64)


@case(means, 2, 4)
def half_precision(device: torch.device) -> Any:
    return four_steps(device, torch.bfloat16)


@case(means, 2, 4)
def copied(device: torch.device) -> Any:
    """Gradients of another dtype than the wire's are copied into their buckets and back."""
    return four_steps(device, reduce_dtype=torch.float64)


@case(
    lambda n: [
        [{"w": [10.0] * 4, "own": [own] * 3}] * 3  # 3 + 7, means over the data ranks of each stage
        for own in (3.0, 3.0, 7.0, 7.0)
    ],
    4,
)
def tie_and_means(device: torch.device) -> Any:
    module = stage(w=(4,), own=(3,)).to(device)
    sync = tied(module, "w", bucket_bytes=64)
    mine = 2.0 * rank() + 2
    return steps(sync, module, [{"w": mine, "own": mine}] * 3)


@case(lambda n: [[[float(n)] * 4, [2.0 * n] * 4]] * n, 2, 4)
def accumulated(device: torch.device) -> Any:
    """Over two steps, the second of which starts where the first has left off."""
    module = stage(w=(4,)).to(device)
    sync = replicated(module)
    found = []
    for step in range(2):
        with sync.accumulate():
            sync.prepare()
            backward(module, {"w": rank() + 1.0}, device)
            sync.stage_final(0)
            sync.finish()
        sync.prepare()
        backward(module, {"w": dist.get_world_size() * (step + 1) - rank() - 1.0}, device)
        sync.stage_final(0)
        sync.finish()
        found.append(grads(module)["w"])
        module.zero_grad()
    sync.close()
    return found


# Gradients that are placed elsewhere, and parameters that come back.


def trained(
    sync: GradientSync, module: nn.Module, gradients: Sequence[dict[str, float]]
) -> list[dict[str, Any]]:
    """Steps that subtract gradients; returns the parameters that each forward finds, and the last.

    A second forward reads them all behind the optimizer: none may arrive before it has.
    """
    device, (at,) = next(module.parameters()).device, sync.topology.local_stages
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    found = []
    for given in gradients:
        optimizer.zero_grad()
        sync.prepare()
        sync.stage_first_use(at)
        found.append([p.detach().clone() for p in module.parameters()])
        sync.stage_last_backward(at)
        backward(module, given, device)
        sync.stage_final(at)
        sync.finish()
        optimizer.step()
        sum(p.detach().sum() for p in module.parameters())
        sync.publish()
    sync.check_replicas()
    sync.close()
    found.append([p.detach().clone() for p in module.parameters()])
    names = [name for name, _ in module.named_parameters()]
    return [{n: p.unique().tolist() for n, p in zip(names, one, strict=True)} for one in found]


def rows_of(num_ranks: int) -> Sequence[Any]:
    whole = num_ranks - 1.0
    steps = [
        {"a": mean, "b": 3 * mean, "large": mean, "part": 8.0 / num_ranks, "unused": 0.0}
        for mean in (whole, whole + 1, whole + 2, whole + 3)
    ]
    return [updated(steps)] * num_ranks


@watched
@case(rows_of, 2, 4)
def rows(device: torch.device, **options: Any) -> Any:
    """Each rank has rows of the means, and steps them."""
    module = model(device)
    sync = replicated(module, bucket_bytes=256, comm_streams=2, handlers=["sharded"], **options)
    return trained(sync, module, [used(step) for step in range(4)])


@case(rows_of, 2, 4)
def rows_of_master_copies(device: torch.device) -> Any:
    return rows(device, master_dtype=torch.float64)


def owned_of(num_ranks: int) -> Sequence[Any]:
    """A sum over two stages of means over the others; what each stage has alone is a mean."""
    both, copies = num_ranks * (num_ranks + 1) / 2, num_ranks // 2
    owned, own = both / copies, [(copies + 1) / 2, (copies + 1) / 2 + copies]
    return [updated([{"w": owned, "own": mine}] * 3) for mine in own for _ in range(copies)]


@watched
@case(owned_of, 2, 4)
def owned(device: torch.device) -> Any:
    """Sums are passed down to the first stage, whose parameters are passed up; rows of both."""
    module = stage(w=(4,), own=(6,)).to(device)
    sync = tied(module, "w", bucket_bytes=64, handlers=[OWNED, "sharded"])
    return trained(sync, module, [{"w": rank() + 1.0, "own": rank() + 1.0}] * 3)


def ends(num_ranks: int) -> Sequence[Any]:
    """Of a chain of ranks: all have the same."""
    return [updated([{"w": num_ranks * (num_ranks + 1) / 2}] * 3)] * num_ranks


@case(ends, 2, 4)
def chain(device: torch.device) -> Any:
    """A stage on each rank: those in between pass gradients down and parameters up."""
    module = stage(w=(4,)).to(device)
    topology = Topology.create(pipeline=dist.get_world_size())
    sync = GradientSync({rank(): module}, topology, tied=[["w"]], handlers=[OWNED])
    return trained(sync, module, [{"w": rank() + 1.0}] * 3)


# A schedule of torch.


@case(lambda n: [True] * n, 2, 4)
def schedule(device: torch.device) -> Any:
    """Three steps of 1F1B on two stages, against one process on the uncut model."""
    topology = Topology.create(pipeline=2)
    whole, cut = build("tied").to(device), build("tied").to(device)
    here = topology.coordinate("pp")
    module = stage_module(cut, here, 2)
    made = PipelineStage(module, here, 2, device, group=topology.group_along("pp"))
    schedule = Schedule1F1B(made, 4, loss_fn=loss_of)
    sync = pipegrad.attach(schedule, topology=topology, tied=pipegrad.find_tied(cut))
    shares, share = topology.size("dp"), topology.coordinate("dp")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (whole, module)]
    worst = 0.0
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (4 * shares, TOKENS), generator=generator).to(device)
        target = (5 * tokens + 3) % VOCAB
        loss_of(whole(tokens), target).backward()
        mine = target.chunk(shares)[share] if here else None
        schedule.step(*(() if here else (tokens.chunk(shares)[share],)), target=mine)
        for name, parameter in module.named_parameters():
            true, found = whole.get_parameter(name).grad, parameter.grad
            assert true is not None
            assert found is not None
            worst = max(worst, ((found - true).abs().max() / true.abs().max()).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert worst < 1e-5, worst
    sync.check_replicas()
    sync.close()
    return True


NEEDS_SEND = ("schedule",)  # gloo would hand a device's pointer to the socket


# Bucketer.


def sums(num_ranks: int) -> Sequence[Any]:
    total = num_ranks * (num_ranks + 1) / 2
    return [
        [[total * (me + 1) + num_ranks * call, total + num_ranks * call] for call in range(8)]
        for me in range(num_ranks)
    ]


def bucketed(device: torch.device, other: torch.device, capacity_bytes: int) -> Any:
    """Eight reduce-scatters and as many all-reduces, in turns on two devices, on one stream."""
    bucketer, size = Bucketer(capacity_bytes=capacity_bytes), dist.get_world_size()
    found: dict[tuple[str, int], torch.Tensor] = {}

    def keep(kind: str, call: int) -> Callable[[torch.Tensor], object]:
        return lambda result: found.update({(kind, call): result.clone()})

    with beside(device, 1):
        for call in range(8):
            where, mine = (device, other)[call % 2], rank() + 1.0
            rows = [
                torch.full((10 + call,), mine * (row + 1) + call, device=where)
                for row in range(size)
            ]
            bucketer.reduce_scatter(rows, callback=keep("scatter", call))
            alike = torch.full((2, 5 + call), mine + call, device=where)
            bucketer.all_reduce(alike, callback=keep("all", call))
        bucketer.flush()
    at_rest(device)
    assert {tuple(x.shape) for (kind, _), x in found.items() if kind == "all"} == {
        (2, 5 + call) for call in range(8)
    }
    assert all(found["scatter", call].device == (device, other)[call % 2] for call in range(8))
    bucketer.release()
    assert bucketer.allocated_bytes == 0
    values = []
    for call in range(8):
        pair = [found[kind, call].unique().tolist() for kind in ("scatter", "all")]
        values.append([value for values in pair for value in values])
    return values


@case(sums, 2, 4)
def bucketer(device: torch.device) -> Any:
    return bucketed(device, device, 1024)


@case(sums, 2, 4)
def bucketer_without_buckets(device: torch.device) -> Any:
    return bucketed(device, device, 0)


@case(sums, 2, 4)
def bucketer_on_two_devices(device: torch.device) -> Any:
    return bucketed(device, torch.device("cpu"), 1024)


@case(lambda n: [(found, []) for found in sums(n)], 2)
def bucketer_checked(device: torch.device) -> Any:
    with OrderChecker(virtual_streams=False) as checker:
        found = bucketed(device, device, 1024)
    return found, list(map(str, checker.violations))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_finds_what_one_process_would(name: str, world: World, num_ranks: int) -> None:
    names = cases_of(world, num_ranks)
    if name not in names:
        pytest.skip("is not for this world")
    replies = outcome(world, num_ranks, names)
    if isinstance(replies, Exception):  # of whichever case: now this one alone
        replies = outcome(world, num_ranks, (name,))
    if isinstance(replies, Exception):
        raise replies
    assert [reply[name] for reply in replies] == list(CASES[name][1](num_ranks))


# In worlds of their own: what may hang, and what goes wrong.


def opposite_orders(world: World, folder: str) -> Any:
    """The first collectives of three comm streams, which the two ranks begin in opposite orders."""
    device = enter(world, folder)
    names = ("u", "v", "w")[:: 1 - 2 * rank()]
    module = stage(**dict.fromkeys(names, (4,))).to(device)
    sync = tied(module, "u", "v", "w", bucket_bytes=0, comm_streams=3)
    found = steps(sync, module, [dict.fromkeys(names, rank() + 1.0)] * 2)
    return [dict(sorted(step.items())) for step in found]


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_may_begin_with_different_comm_streams(world: World, tmp_path: Path) -> None:
    """NCCL makes a communicator at its first collective, and its members then wait for another."""
    replies = run_ranks(opposite_orders, 2, world, str(tmp_path), timeout_seconds=60)
    assert replies == [[dict.fromkeys("uvw", [3.0] * 4)] * 2] * 2


def late_peer(world: World, folder: str, mutant: str | None) -> Any:
    """Rank 1's collective is late, and what comes behind it on rank 0 is not."""
    device = enter(world, folder)
    module = stage(w=(4,)).to(device)
    sync = replicated(module)
    found = []
    for warm in (True, False):
        sync.prepare()
        if rank() == 1 and not warm:
            sleep(10)
        backward(module, {"w": 2.0 * rank() + 2}, device)
        if warm or mutant is None:
            sync.stage_final(0)
        else:
            with sites[mutant].off():
                sync.stage_final(0)
        sync.finish()
        found.append(grads(module)["w"])
        at_rest(device)
        module.zero_grad()
    sync.close()
    return found


@pytest.mark.parametrize("mutant", [None, "reduce.collective"])
@pytest.mark.parametrize("world", [pytest.param(NCCL, id="nccl", marks=GPU)])
def test_a_mean_waits_for_its_collective(world: World, mutant: str | None, tmp_path: Path) -> None:
    replies = run_ranks(late_peer, 2, world, str(tmp_path), mutant, timeout_seconds=60)
    right = [3.0] * 4
    assert [reply[0] for reply in replies] == [right, right]
    if mutant is None:
        assert [reply[1] for reply in replies] == [right, right]
    else:
        assert replies[0][1] != right
