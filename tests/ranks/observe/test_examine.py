"""The doctor between real ranks: slow links, other clocks, and a rank that does not answer."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipegrad import Work
from pipegrad.comm import sync_points
from pipegrad.comm.agreement import agree
from pipegrad.errors import AgreementError
from pipegrad.observe import clocks, links
from pipegrad.observe.doctor import examine
from pipegrad.train.run.tracing import Tracing
from tests.support.gradients.cases import Case, Replies, on, rank, replies

THREE: list[Case] = []
three = replies(3, THREE)
SLOW_RATE = 20e6  # bytes in a second
AHEAD_SECONDS = 1000.0
CPU = torch.device("cpu")


class SlowLink(sync_points.Backend):
    """A network whose link from rank 1 to rank 2 is slow."""

    def send(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        if (rank(), peer) == (1, 2):
            time.sleep(tensor.nbytes / SLOW_RATE)
        return super().send(group, tensor, peer, tag)


class Clock:
    """The clock of another machine on rank 2."""

    def perf_counter(self) -> float:
        return time.perf_counter() + (AHEAD_SECONDS if rank() == 2 else 0.0)


@on(THREE)
def examined() -> Any:
    with (
        sync_points.using(SlowLink()),
        mock.patch.object(clocks, "time", Clock()),
        mock.patch.object(links, "_REPEATS", 2),
    ):
        return examine(CPU)


@on(THREE)
def other_variables() -> str:
    """PIPEGRAD_TRACE is not the same on all ranks."""
    config: Any = SimpleNamespace(train=SimpleNamespace(trace=False))
    value = "" if rank() == 1 else "1"
    with (
        mock.patch.dict(os.environ, {"PIPEGRAD_TRACE": value}),
        pytest.raises(AgreementError) as caught,
    ):
        Tracing(config, mock.Mock())
    return str(caught.value)


@on(THREE)
def unanswered() -> str:
    """Rank 1 does not come, and so has met the others less often: this case is the last one."""
    message = ""
    if rank() != 1:
        with pytest.raises(AgreementError) as caught:
            examine(CPU, timeout_seconds=1.0)
        message = str(caught.value)
    agree("the end", lambda: None, meeting="end of unanswered")
    return message


def test_all_ranks_find_the_same_of_each_link_and_each_rank(three: Replies) -> None:
    first, *others = [reply["examined"] for reply in three]
    assert all(other == first for other in others)
    pairs = [(link.costs.source, link.costs.target) for link in first.links]
    assert pairs == [(a, b) for a in range(3) for b in range(3) if a != b]
    assert [facts.rank for facts in first.ranks] == [0, 1, 2]
    assert {facts.backend for facts in first.ranks} == {"gloo"}


def test_a_slow_link_is_measured_in_its_direction_alone(three: Replies) -> None:
    found = three[0]["examined"].links
    rates = {(x.costs.source, x.costs.target): x.costs.bytes_per_second for x in found}
    assert rates[1, 2] <= 1.05 * SLOW_RATE
    assert min(rate for pair, rate in rates.items() if pair != (1, 2)) > rates[1, 2]


def test_the_clock_of_another_machine_is_found_to_its_error(three: Replies) -> None:
    _, near, far = three[0]["examined"].clocks
    assert abs(near.offset) <= near.error
    assert abs(far.offset + AHEAD_SECONDS) <= far.error < AHEAD_SECONDS


def test_a_rank_that_does_not_answer_is_named(three: Replies) -> None:
    for number in (0, 2):
        assert "nothing heard from ranks [1]" in three[number]["unanswered"]


def test_tracing_on_some_ranks_only_is_refused_on_all(three: Replies) -> None:
    for reply in three:
        message = reply["other_variables"]
        assert "ranks disagree on PIPEGRAD_TRACE" in message
        assert "ranks [1]" in message
