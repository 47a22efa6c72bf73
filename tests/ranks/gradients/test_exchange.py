"""Two holders exchange gradients: the bits of an all-reduce; rows, plans, and what is refused.

Stage 0 has a table that few rows of are used, and the last stage the same as a head, all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

from pipegrad import (
    GradientSync,
    ParameterRecord,
    Placement,
    Reduction,
    Topology,
    make_manifest,
    make_plan,
)
from pipegrad.comm import collectives
from pipegrad.comm.comm_stream import CommStream
from pipegrad.comm.process_groups import Groups
from pipegrad.comm.store import store
from pipegrad.errors import PlanError
from pipegrad.gradients import tie_exchange
from pipegrad.gradients.tie_exchange import rows_of
from pipegrad.plan.buckets import Bucket, Slot
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import Exchange, GradientHandler
from pipegrad.testing import OrderChecker
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import outcome, rank, stage, tied
from tests.support.gradients.plans import Say

TABLES: dict[str, torch.Tensor] = {
    "table": torch.zeros(40, 6),
    "wide": torch.zeros(3, 4, 5),
    "bias": torch.zeros(7),
    "one": torch.zeros(()),
    "short": torch.zeros(30, 3, dtype=torch.bfloat16),
    "long": torch.zeros(9, 2, dtype=torch.float64),
    "waves": torch.zeros(5, 3, dtype=torch.complex64),
    "unused": torch.zeros(4, 4),
    "there": torch.zeros(6, 5),
    # Memory that is not row-major: here a row is what lies together, a column of the matrix.
    "turned": torch.zeros(8, 5).t(),
}
STEPS = 3


def gradient(name: str, like: torch.Tensor, step: int, *, dense: bool) -> torch.Tensor | None:
    """What a rank has before: zeros of both signs, NaN and infinity among the rest, or nothing."""
    if name == "unused" or (name == "there" and (dense or step == 1)):
        return None
    generator = torch.Generator().manual_seed(7 * step + rank() + 31 * len(name))
    whole = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)
    zero = torch.zeros((), dtype=like.dtype)
    if dense:
        whole = torch.where(torch.rand(like.shape, generator=generator) < 0.3, -zero, whole)
    elif like.dim():
        whole[step + 2 :] = 0
        whole[-1:] = -zero
        if step == 2:
            whole[0] = float("nan")
            whole[1:2] = float("inf")
    return whole


def train(how: Exchange, handlers: Sequence[Any], **options: Any) -> list[dict[str, Any]]:
    """Returns the bits of each step's gradients by name; no read or write is unordered."""
    topology = Topology.create(pipeline=2)
    here = topology.coordinate("pp")
    tables = {name: table.clone() for name, table in TABLES.items()}
    if "reduce_dtype" in options:
        del tables["waves"]
    module = stage(**tables)
    with OrderChecker() as checker:
        sync = GradientSync(
            {here: module},
            topology,
            tied=[[name] for name in tables],
            handlers=[{"name": "pipeline-shared", "exchange": how}, *handlers],
            **options,
        )
        words = f"{how}-replicate-sum(pp) over ranks [{rank() % 2}, {rank() % 2 + 2}]"
        assert (words in str(sync.plan)) == (how != "all-reduce")
        sync.optimizer_parameters()
        results = []
        for step in range(STEPS):
            sync.prepare()
            sync.stage_first_use(here)
            for name, parameter in module.named_parameters():
                before = gradient(name, parameter, step, dense=here == 1)
                if before is not None:
                    parameter.grad = before
            sync.stage_final(here)
            sync.finish()
            results.append({s.record.name: bits(s.tensor.grad) for s in sync.main_parameters()})
            for one in sync.main_parameters():
                one.tensor.grad = None
        sync.close()
    assert checker.violations == []
    return results


def bits(gradient: torch.Tensor | None) -> bytes | None:
    """Returns them, all NaN alike: whose payload a sum keeps is the processor's to choose."""
    if gradient is None:
        return None
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    real = torch.where(real.isnan(), torch.full((), float("nan"), dtype=real.dtype), real)
    return bytes(real.detach().flatten().view(torch.uint8).tolist())


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"handlers": (), "allow_unsynced": ["*"]}, id="alone"),  # nobody over dp
        pytest.param({"handlers": ["data-parallel"]}, id="behind a mean"),
        pytest.param({"handlers": ["sharded"]}, id="of rows"),
        pytest.param({"handlers": ["data-parallel"], "bucket_bytes": 0}, id="each in a bucket"),
        pytest.param(
            {"handlers": ["data-parallel"], "reduce_dtype": torch.float64}, id="another wire"
        ),
    ],
)
def test_the_bits_are_those_of_an_all_reduce(options: dict[str, Any]) -> None:
    right = train("all-reduce", **options)
    assert not right[0].get("unused")
    assert right[0]["table"]
    for step, (one, other) in enumerate(zip(train("asymmetric", **options), right, strict=True)):
        assert one.keys() == other.keys()
        assert [name for name in one if one[name] != other[name]] == [], step


def plan(pp: int, dp: int, *handlers: GradientHandler) -> Plan:
    """Plans a layer of each stage, tied if there are several."""
    topology = Topology.build(axes=(("pp", pp), ("dp", dp)))
    stages = {at: nn.Linear(2, 2, device="meta") for at in range(pp)}
    tied = [["weight"], ["bias"]] if pp > 1 else []
    manifest = make_manifest(stages, topology, tied=tied)
    named = [(type(handler).__name__, handler) for handler in handlers]
    return make_plan(manifest, topology, named, GradientOptions(bucket_bytes=2**20))


@pytest.mark.parametrize(
    ("ranks", "placement", "how", "complaint"),
    [
        ((0, 1, 2), Placement.REPLICATE, "asymmetric", "for the gradients of two ranks"),
        ((0, 1), Placement.OWNER, "asymmetric", "placed by 'replicate'"),
        ((0, 1), Placement.SHARD, "asymmetric", "placed by 'replicate'"),
        ((0, 1), Placement.REPLICATE, "pairwise", "exchange 'pairwise': expected one of"),
    ],
)
def test_an_exchange_of_others_is_refused_by_name(
    ranks: tuple[int, ...], placement: Placement, how: Any, complaint: str
) -> None:
    asked = Say(
        lambda ps, t: [
            Reduction(p, ranks, "sum", placement, 1.0, how) for p in ps if t.rank in ranks
        ]
    )
    with pytest.raises(PlanError, match=complaint):
        plan(1, 3, asked)


def test_an_exchange_comes_last_in_a_bucket_and_rows_lie_together() -> None:
    pairs = Say(
        lambda ps, t: [Reduction(p, t.ranks_along("dp"), "mean", exchange="asymmetric") for p in ps]
    )
    with pytest.raises(PlanError, match="an exchange must come last"):
        plan(2, 2, pairs, PipelineShared())

    # Another exchange is another bucket.
    class Mixed(PipelineShared):
        def _sum(self, record: ParameterRecord, ranks: tuple[int, ...]) -> Reduction:
            how: Exchange = "all-reduce" if record.name == "bias" else "asymmetric"
            return Reduction(record, ranks, exchange=how)

    buckets = plan(2, 1, Mixed()).buckets
    assert [bucket.route[0].exchange for bucket in buckets] == ["all-reduce", "asymmetric"]
    # Rows are what lies together.
    slots = (
        Slot("table", 0, (5, 4), (4, 1)),
        Slot("turned", 32, (4, 3), (1, 4)),
        Slot("bias", 48, (3,), (1,)),
        Slot("one", 64, (), ()),
    )
    f32 = torch.float32
    whole = Bucket(
        index=0,
        ready=0,
        holders=(0, 1),
        dtype=f32,
        wire_dtype=f32,
        sum_dtype=f32,
        parameter_dtype=f32,
        route=(),
        slots=slots,
        payload_numel=80,
    )

    def found(region: range) -> list[tuple[int, ...]]:
        """Returns where each piece begins, how many rows it has, and how wide they are."""
        parts = rows_of(torch.arange(len(region) + 4.0), whole, region)
        return [(int(part[0, 0]), *part.shape) for part in parts]

    flags = (80, 1, 4)
    assert found(range(80)) == [(0, 5, 4), (32, 3, 4), (48, 1, 3), (64, 1, 1), flags]
    # A shard's region cuts rows at both ends.
    assert found(range(6, 19)) == [(0, 1, 2), (2, 2, 4), (10, 1, 3), (13, 1, 4)]
    assert found(range(5, 7)) == [(0, 1, 2), (2, 1, 4)]


# Two holders exchange gradients: what travels, when, who waits for it, and how that ends.


VOCABULARY, WIDTH, UNIQUE = 4000, 16, 150


def pair(module: nn.Module, **options: Any) -> GradientSync:
    handlers = [{"name": "pipeline-shared", "exchange": "asymmetric"}]
    return tied(module, *dict(module.named_parameters()), handlers=handlers, **options)


def use(weight: torch.Tensor) -> None:
    if rank() == 0:
        tokens = torch.arange(UNIQUE).repeat(3) * 17
        nn.functional.embedding(tokens, weight).sum().backward()
    else:
        (weight * 2.0).sum().backward()


def two_buckets() -> tuple[GradientSync, nn.Module]:
    """A weight and a bias of both stages, in one comm stream."""
    module = nn.Linear(WIDTH, VOCABULARY)
    return pair(module, bucket_bytes=0, comm_streams=1), module


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
def test_parts_leave_early_without_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last stage ends first; the first one ends when it knows that all the other's parts left.
    # And it goes on when it has all, though the last one takes what comes back only after that. But
    # in the second step of a GradientSync all ranks meet, to compare copies.
    sync, module = two_buckets()
    for step in range(3):
        name = f"step {step}"
        compute(sync, module, step)
        if step != 1 and rank() == 0:
            store().wait([f"{name} left"])
        with watched(name) if step != 1 and rank() == 1 else nullcontext():
            end(sync, module, step)
        store().set(f"{name} rank {rank()} went on", "")
    sync.close()
    # Messages need no tags and may block those behind them.
    with one_queue_a_group(), mock.patch.object(Groups, "block_host", return_value=False):
        sync, module = two_buckets()
        for step in range(3):
            compute(sync, module, step)
            end(sync, module, step)
        sync.close()
    # A failure ends both ranks.
    # The last stage waits for what never comes back: the first one failed before it was final.
    weight = nn.Embedding(VOCABULARY, WIDTH).weight
    sync = pair(nn.ParameterDict({"w": weight}))
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
    # Only touched rows come back.
    weight = nn.Embedding(VOCABULARY, WIDTH).weight
    sync, sizes = pair(nn.ParameterDict({"w": weight})), list[int]()
    sync.prepare()
    use(weight)

    def counted(tensor: torch.Tensor, *rest: Any) -> Any:
        sizes.append(tensor.nbytes)
        return collectives.send(tensor, *rest)

    monkeypatch.setattr(tie_exchange, "send", counted)
    sync.stage_final(rank())
    sync.finish()
    assert weight.grad is not None
    assert float(weight.grad.sum()) == 2 * VOCABULARY * WIDTH + 3 * UNIQUE * WIDTH
    assert int((weight.grad == 5).sum()) == UNIQUE * WIDTH
    rows = UNIQUE * WIDTH * 4
    if rank() == 1:
        assert sizes == []  # its part left before, as OWNER's
    else:
        assert rows <= sum(sizes) <= 1.1 * rows
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

    add_rows = tie_exchange.PairSum._add_rows

    def late(self: Any, buffer: torch.Tensor) -> None:
        store().wait([f"{name} rank 0 went on"])
        add_rows(self, buffer)

    with (
        mock.patch.object(tie_exchange, "reduce_chain", passed),
        mock.patch.object(tie_exchange.PairSum, "_add_rows", late),
    ):
        yield


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
    # What is put off may put off.
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
