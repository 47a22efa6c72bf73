"""Two holders exchange gradients: what travels, when, who waits for it, and how that ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import GradientSync, Topology
from pipegrad.comm import collectives, messages
from pipegrad.comm.agreement import store
from pipegrad.comm.comm_stream import CommStream
from pipegrad.comm.process_groups import Groups
from pipegrad.plugins.handler import Exchange
from pipegrad.reduce import pair_exchange
from tests.support.gradients.cases import outcome, rank

VOCABULARY, WIDTH, UNIQUE = 4000, 16, 150
EXCHANGES = pytest.mark.parametrize("how", ["pairwise", "asymmetric"])


def pair(module: nn.Module, how: Exchange, **options: Any) -> GradientSync:
    return GradientSync(
        {rank(): module},
        Topology.create(pipeline=2),
        tied=[[name] for name, _ in module.named_parameters()],
        handlers=[{"name": "pipeline-shared", "exchange": how}],
        **options,
    )


def use(weight: torch.Tensor) -> None:
    if rank() == 0:
        tokens = torch.arange(UNIQUE).repeat(3) * 17
        nn.functional.embedding(tokens, weight).sum().backward()
    else:
        (weight * 2.0).sum().backward()


@pytest.mark.ranks(2)
@EXCHANGES
def test_only_touched_rows_come_back(how: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Embedding(VOCABULARY, WIDTH).weight
    sync, sizes = pair(nn.ParameterDict({"w": weight}), how), list[int]()
    sync.prepare()
    use(weight)

    def counted(tensor: torch.Tensor, *rest: Any) -> Any:
        sizes.append(tensor.nbytes)
        return messages.send(tensor, *rest)

    monkeypatch.setattr(pair_exchange, "send", counted)
    sync.stage_final(rank())
    sync.finish()
    assert weight.grad is not None
    assert float(weight.grad.sum()) == 2 * VOCABULARY * WIDTH + 3 * UNIQUE * WIDTH
    assert int((weight.grad == 5).sum()) == UNIQUE * WIDTH
    rows, whole = UNIQUE * WIDTH * 4, (VOCABULARY * WIDTH + 1) * 4
    if rank() == 1:
        assert sizes == []  # its part left before, as OWNER's
    elif how == "asymmetric":
        assert rows <= sum(sizes) <= 1.1 * rows
    else:
        assert sum(sizes) <= 1.01 * whole
    sync.close()


def two_buckets(how: Exchange) -> tuple[GradientSync, nn.Module]:
    """A weight and a bias of both stages, in one comm stream."""
    module = nn.Linear(WIDTH, VOCABULARY)
    return pair(module, how, bucket_bytes=0, comm_streams=1), module


def compute(sync: GradientSync, module: nn.Module, step: int) -> None:
    sync.prepare()
    for parameter in module.parameters():
        (parameter * (rank() + 1.0 + step)).sum().backward()


def end(sync: GradientSync, module: nn.Module, step: int) -> None:
    sync.stage_final(rank())
    sync.finish()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 3.0 + 2 * step).all()
    module.zero_grad()


@pytest.mark.ranks(2)
@EXCHANGES
def test_all_parts_leave_early_and_the_first_rank_does_not_wait_for_the_way_back(
    how: Exchange,
) -> None:
    # The last stage ends first; the first one ends when it knows that all the other's parts left.
    # And it goes on when it has all, though the last one takes what comes back only after that. But
    # in the second step of a GradientSync all ranks meet, to compare copies.
    sync, module = two_buckets(how)
    for step in range(3):
        name = f"{how} {step}"
        compute(sync, module, step)
        if step != 1 and rank() == 0:
            store().wait([f"{name} left"])
        with watched(name) if step != 1 and rank() == 1 else nullcontext():
            end(sync, module, step)
        store().set(f"{name} rank {rank()} went on", "")
    sync.close()


@contextmanager
def watched(name: str) -> Iterator[None]:
    """Says when both parts have left; takes nothing back before the first rank has gone on."""
    left: list[torch.Tensor] = []
    reduce_chain = collectives.reduce_chain

    def passed(tensor: torch.Tensor, *rest: Any) -> None:
        reduce_chain(tensor, *rest)
        left.append(tensor)
        if len(left) == 2:
            store().set(f"{name} left", "")

    def late(take: Any) -> Any:
        def taken(self: Any) -> None:
            store().wait([f"{name} rank 0 went on"])
            take(self)

        return taken

    pair_sum = pair_exchange.PairSum
    with (
        mock.patch.object(collectives, "reduce_chain", passed),
        mock.patch.object(pair_sum, "_add_all", late(pair_sum._add_all)),
        mock.patch.object(pair_sum, "_add_rows", late(pair_sum._add_rows)),
    ):
        yield


@pytest.mark.ranks(2)
@EXCHANGES
def test_messages_need_no_tags_and_may_block_those_behind_them(how: Exchange) -> None:
    with one_queue_a_group(), mock.patch.object(Groups, "block_host", return_value=False):
        sync, module = two_buckets(how)
        for step in range(3):
            compute(sync, module, step)
            end(sync, module, step)
        sync.close()


@contextmanager
def one_queue_a_group() -> Iterator[None]:
    """As where messages have no tags, are sent in the order of calls, and block those behind them.

    Each communicator has one queue a rank: a send or receive begins when those before it have
    ended.
    """
    queues: dict[int, ThreadPoolExecutor] = {}

    def queued(post: Any) -> Any:
        def posted(tensor: torch.Tensor, *, group: Any, **options: int) -> Any:
            queue = queues.setdefault(id(group), ThreadPoolExecutor(1))
            untagged = {**options, "tag": 0}
            message = queue.submit(lambda: post(tensor, group=group, **untagged).wait())
            return SimpleNamespace(wait=partial(message.result, timeout=100))

        return posted

    with (
        mock.patch.object(dist, "isend", queued(dist.isend)),
        mock.patch.object(dist, "irecv", queued(dist.irecv)),
    ):
        yield
    for queue in queues.values():
        queue.shutdown()


@pytest.mark.ranks(2)
@EXCHANGES
def test_a_failure_ends_both_ranks(how: Exchange) -> None:
    # The last stage waits for what never comes back: the first one failed before it was final.
    weight = nn.Embedding(VOCABULARY, WIDTH).weight
    sync = pair(nn.ParameterDict({"w": weight}), how)
    sync.prepare()
    use(weight)
    if rank() == 1:
        sync.stage_final(1)
        words = outcome(sync.finish)
        assert "ReduceError: a step failed on another rank" in words
        assert "no memory" in words
    else:
        sync.abort(RuntimeError("no memory"))
    sync.close()


# Where the host runs ahead, what blocks it waits.


@pytest.mark.parametrize("threaded", [False, True])
def test_what_is_put_off_runs_when_somebody_waits(threaded: bool) -> None:
    stream, done = CommStream("s", torch.device("cpu"), threaded=threaded), list[str]()

    def begin(name: str) -> None:
        done.append(f"{name} begins")
        stream.put_off(lambda: done.append(f"{name} ends"))

    for name in ("first", "second"):
        stream.submit(partial(begin, name), ())
    assert stream.submit(lambda: done.append("behind"), ()).wait(60)
    assert done == ["first begins", "second begins", "behind"]
    assert stream.has_late
    for _ in range(2):  # the second time nothing is left
        stream.submit(stream.run_late, ())
        assert stream.wait(60)
        assert done[3:] == ["first ends", "second ends"]
    stream.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_what_is_put_off_may_put_off(threaded: bool) -> None:
    stream, done = CommStream("s", torch.device("cpu"), threaded=threaded), list[str]()

    def finish(name: str) -> None:
        done.append(name)
        if name == "a":
            stream.put_off(partial(finish, "c"))

    for name in ("a", "b"):
        stream.submit(partial(stream.put_off, partial(finish, name)), ())
    stream.submit(stream.run_late, ())
    assert stream.wait(60)
    assert done == ["a", "b", "c"]
    stream.close()
