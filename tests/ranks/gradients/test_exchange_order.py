"""Two holders exchange gradients: what travels, when, who waits for it, and how that ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import GradientSync, Topology
from pipegrad.comm import collectives, messages
from pipegrad.comm.comm_stream import CommStream
from pipegrad.comm.process_groups import Groups
from pipegrad.plugins.handler import Exchange
from pipegrad.reduce import pair_exchange
from pipegrad.testing import run_ranks
from tests.support.gradients.cases import outcome

CPU = torch.device("cpu")
EXCHANGES: Sequence[Exchange] = ("all-reduce", "pairwise", "asymmetric")
VOCABULARY, WIDTH, UNIQUE = 4000, 16, 150


def embedding_and_head(how: Exchange) -> tuple[int, GradientSync, nn.Parameter]:
    topology = Topology.create(pipeline=2)
    here = topology.coordinate("pp")
    module = nn.Embedding(VOCABULARY, WIDTH)
    sync = GradientSync(
        {here: module},
        topology,
        tied=[["weight"]],
        handlers=[{"name": "pipeline-shared", "exchange": how}],
    )
    return here, sync, module.get_parameter("weight")


def use(parameter: nn.Parameter, here: int) -> None:
    if here == 0:
        tokens = torch.arange(UNIQUE).repeat(3) * 17
        nn.functional.embedding(tokens, parameter).sum().backward()
    else:
        (parameter * 2.0).sum().backward()


def bytes_sent() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for how in EXCHANGES[1:]:
        here, sync, parameter = embedding_and_head(how)
        sync.prepare()
        use(parameter, here)
        sizes: list[int] = []

        def counted(tensor: torch.Tensor, *rest: Any, to: list[int] = sizes) -> Any:
            to.append(tensor.nbytes)
            return messages.send(tensor, *rest)

        with mock.patch.object(pair_exchange, "send", counted):
            sync.stage_final(here)
            sync.finish()
        assert parameter.grad is not None
        found[how] = sizes, float(parameter.grad.sum()), int((parameter.grad == 5).sum())
        sync.close()
    return found


def test_only_touched_rows_come_back() -> None:
    first, last = run_ranks(bytes_sent, 2)
    rows = UNIQUE * WIDTH * 4
    assert sum(first["asymmetric"][0]) <= 1.1 * rows
    assert sum(first["asymmetric"][0]) >= rows
    whole = (VOCABULARY * WIDTH + 1) * 4
    assert sum(first["pairwise"][0]) <= 1.01 * whole
    for reply in (first, last):
        for _, total, used in reply.values():
            assert (total, used) == (2 * VOCABULARY * WIDTH + 3 * UNIQUE * WIDTH, UNIQUE * WIDTH)
    assert last["asymmetric"][0] == last["pairwise"][0] == []  # its part left before, as OWNER's


def two_buckets(how: Exchange) -> tuple[int, GradientSync, nn.Module]:
    """A weight and a bias of both stages, in one comm stream."""
    topology = Topology.create(pipeline=2)
    here = topology.coordinate("pp")
    module = nn.Linear(WIDTH, VOCABULARY)
    sync = GradientSync(
        {here: module},
        topology,
        tied=[["weight"], ["bias"]],
        handlers=[{"name": "pipeline-shared", "exchange": how}],
        bucket_bytes=0,
        comm_streams=1,
    )
    return here, sync, module


def compute(sync: GradientSync, module: nn.Module, here: int, step: int) -> None:
    sync.prepare()
    for parameter in module.parameters():
        (parameter * (here + 1.0 + step)).sum().backward()


def sums(module: nn.Module) -> list[float]:
    found = [float(p.grad.sum()) for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


STEPS = range(3)
SUMS = {
    f"{how} {step}": [(3.0 + 2 * step) * numel for numel in (VOCABULARY * WIDTH, VOCABULARY)]
    for how in EXCHANGES[1:]
    for step in STEPS
}


def meet() -> dict[str, Any]:
    """The last stage ends first; the first one ends when it knows that all the other's parts left.

    And goes on when it has all, though the last one takes what comes back only after that. But in
    the second step of a GradientSync all ranks meet, to compare copies.
    """
    store = dist.distributed_c10d._get_default_store()
    found: dict[str, Any] = {}
    for how in EXCHANGES[1:]:
        here, sync, module = two_buckets(how)
        for step in STEPS:
            name = f"{how} {step}"
            compute(sync, module, here, step)
            if step == 1:
                sync.stage_final(here)
                sync.finish()
            elif here == 0:
                store.wait([f"{name} left"])
                sync.stage_final(here)
                sync.finish()
                store.set(f"{name} went on", "")
            else:
                with watched(store, name):
                    sync.stage_final(here)
                    sync.finish()
            found[name] = sums(module)
        sync.close()
    return found


@contextmanager
def watched(store: Any, name: str) -> Iterator[None]:
    """Says when both parts have left; takes nothing back before the first rank has gone on."""
    left: list[torch.Tensor] = []
    reduce_chain, add_all = collectives.reduce_chain, pair_exchange.PairSum._add_all
    add_rows = pair_exchange.PairSum._add_rows

    def passed(tensor: torch.Tensor, *rest: Any) -> None:
        reduce_chain(tensor, *rest)
        left.append(tensor)
        if len(left) == 2:
            store.set(f"{name} left", "")

    def late(take: Any) -> Any:
        def taken(self: Any) -> None:
            store.wait([f"{name} went on"])
            take(self)

        return taken

    with (
        mock.patch.object(collectives, "reduce_chain", passed),
        mock.patch.object(pair_exchange.PairSum, "_add_all", late(add_all)),
        mock.patch.object(pair_exchange.PairSum, "_add_rows", late(add_rows)),
    ):
        yield


def test_all_parts_leave_early_and_the_first_rank_does_not_wait_for_the_way_back() -> None:
    for reply in run_ranks(meet, 2):
        assert reply == SUMS


def no_tags() -> dict[str, list[float]]:
    """As where messages have no tags, are sent in the order of calls, and block those behind them.

    Each communicator has one queue a rank: a send or receive begins when those before it have
    ended.
    """
    found: dict[str, list[float]] = {}
    for how in EXCHANGES[1:]:
        with one_queue_a_group(), mock.patch.object(Groups, "block_host", return_value=False):
            here, sync, module = two_buckets(how)
            for step in STEPS:
                compute(sync, module, here, step)
                sync.stage_final(here)
                sync.finish()
                found[f"{how} {step}"] = sums(module)
            sync.close()
    return found


class Queued:
    """A message on its way, in a queue of its group."""

    def __init__(self, started: Future[Any]) -> None:
        self._started = started

    def wait(self) -> None:
        self._started.result(timeout=30)


@contextmanager
def one_queue_a_group() -> Iterator[None]:
    queues: dict[int, ThreadPoolExecutor] = {}

    def queued(post: Any) -> Any:
        def posted(tensor: torch.Tensor, *, group: Any, **given: int) -> Queued:
            queue = queues.setdefault(id(group), ThreadPoolExecutor(1))
            untagged = {**given, "tag": 0}
            return Queued(queue.submit(lambda: post(tensor, group=group, **untagged).wait()))

        return posted

    with (
        mock.patch.object(dist, "isend", queued(dist.isend)),
        mock.patch.object(dist, "irecv", queued(dist.irecv)),
    ):
        yield
    for queue in queues.values():
        queue.shutdown()


def test_messages_need_no_tags_and_may_block_those_behind_them() -> None:
    for reply in run_ranks(no_tags, 2, timeout_seconds=100):
        assert reply == SUMS


def fail() -> dict[str, Any]:
    """The last stage waits for what never comes back: the first one failed before it was final."""
    found: dict[str, Any] = {}
    for how in EXCHANGES[1:]:
        here, sync, parameter = embedding_and_head(how)
        sync.prepare()
        use(parameter, here)
        began = time.monotonic()
        if here == 1:
            sync.stage_final(here)
            found[how] = outcome(sync.finish)
        else:
            sync.abort(RuntimeError("no memory"))
        sync.close()
        found[f"{how} seconds"] = time.monotonic() - began
    return found


def test_a_failure_ends_both_ranks_at_once() -> None:
    first, last = run_ranks(fail, 2)
    for how in EXCHANGES[1:]:
        assert "ReduceError: a step failed on another rank" in last[how]
        assert "no memory" in last[how]
        assert max(first[f"{how} seconds"], last[f"{how} seconds"]) < 20


# Where the host runs ahead, what blocks it waits.


@pytest.mark.parametrize("threaded", [False, True])
def test_what_is_put_off_runs_when_somebody_waits(threaded: bool) -> None:
    comm_stream, done = CommStream("comm_stream", CPU, threaded=threaded), list[str]()

    def begin(name: str) -> None:
        done.append(f"{name} begins")
        comm_stream.put_off(lambda: done.append(f"{name} ends"))

    for name in ("first", "second"):
        comm_stream.submit(partial(begin, name), ())
    assert comm_stream.submit(lambda: done.append("behind"), ()).wait(10)
    assert done == ["first begins", "second begins", "behind"]
    assert comm_stream.has_late
    comm_stream.submit(comm_stream.run_late, ())
    assert comm_stream.wait(10)
    assert done[3:] == ["first ends", "second ends"]
    comm_stream.submit(comm_stream.run_late, ())
    assert comm_stream.wait(10)
    assert len(done) == 5
    comm_stream.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_what_is_put_off_may_put_off(threaded: bool) -> None:
    comm_stream, done = CommStream("comm_stream", CPU, threaded=threaded), list[str]()

    def end(name: str) -> None:
        done.append(name)
        if name == "a":
            comm_stream.put_off(partial(end, "c"))

    for name in ("a", "b"):
        comm_stream.submit(partial(comm_stream.put_off, partial(end, name)), ())
    comm_stream.submit(comm_stream.run_late, ())
    assert comm_stream.wait(10)
    assert done == ["a", "b", "c"]
    comm_stream.close()
