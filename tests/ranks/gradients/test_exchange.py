"""Two holders exchange gradients: the bits of an all-reduce; rows, plans, and what is refused.

Stage 0 has a table that few rows of are used, and the last stage the same as a head, all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import (
    GradientHandler,
    GradientSync,
    ParameterRecord,
    Placement,
    Reduction,
    Topology,
    make_manifest,
    make_plan,
)
from pipegrad.errors import PlanError
from pipegrad.plan.buckets import Bucket, Slot
from pipegrad.plan.options import GradientOptions
from pipegrad.plugins.handler import Exchange
from pipegrad.reduce.pair_exchange import Rows, rows_of
from pipegrad.testing import OrderChecker, run_ranks
from pipegrad_handlers.pipeline_shared import PipelineShared

CPU = torch.device("cpu")
EXCHANGES: Sequence[Exchange] = ("all-reduce", "pairwise", "asymmetric")
SHAPES = {
    "table": (40, 6),
    "wide": (3, 4, 5),
    "bias": (7,),
    "one": (),
    "short": (30, 3),
    "long": (9, 2),
    "waves": (5, 3),
    "unused": (4, 4),
    "there": (6, 5),
}
DTYPES = {"short": torch.bfloat16, "long": torch.float64, "waves": torch.complex64}
STEPS = 3


def tables(*, real: bool) -> nn.Module:
    module = nn.Module()
    for name, shape in SHAPES.items():
        if real and name == "waves":
            continue
        setattr(module, name, nn.Parameter(torch.zeros(shape, dtype=DTYPES.get(name))))
    # Memory that is not row-major: here a row is what lies together, a column of the matrix.
    module.turned = nn.Parameter(torch.zeros(8, 5).t())
    return module


def gradient(name: str, like: torch.Tensor, step: int, *, dense: bool) -> torch.Tensor | None:
    """What a rank has before: zeros of both signs, NaN and infinity among the rest, or nothing."""
    if name == "unused" or (name == "there" and (dense or step == 1)):
        return None
    generator = torch.Generator().manual_seed(7 * step + dist.get_rank() + 31 * len(name))
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


def by_exchange(how: Exchange, handlers: Sequence[Any], **options: Any) -> Any:
    """Returns the bits of each step's gradients, and the OrderChecker's violations."""
    topology = Topology.create(pipeline=2)
    here = topology.coordinate("pp")
    module = tables(real="reduce_dtype" in options)
    with OrderChecker() as checker:
        sync = GradientSync(
            {here: module},
            topology,
            tied=[[name] for name, _ in module.named_parameters()],
            handlers=[{"name": "pipeline-shared", "exchange": how}, *handlers],
            **options,
        )
        sync.optimizer_parameters()
        found = []
        for step in range(STEPS):
            sync.prepare()
            sync.stage_first_use(here)
            for name, parameter in module.named_parameters():
                given = gradient(name, parameter, step, dense=here == 1)
                if given is not None:
                    parameter.grad = given.clone()
            sync.stage_final(here)
            sync.finish()
            found.append({one.record.name: bits(one.tensor.grad) for one in sync.main_parameters()})
            for one in sync.main_parameters():
                one.tensor.grad = None
        sync.close()
    return found, list(map(str, checker.violations)), str(sync.plan)


def bits(gradient: torch.Tensor | None) -> bytes | None:
    """Returns them, all NaN alike: whose payload a sum keeps is the processor's to choose."""
    if gradient is None:
        return None
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    real = torch.where(real.isnan(), torch.full((), float("nan"), dtype=real.dtype), real)
    return bytes(real.detach().flatten().view(torch.uint8).tolist())


CASES: dict[str, dict[str, Any]] = {
    "alone": {"handlers": (), "allow_unsynced": ["*"]},  # over dp nobody reduces
    "behind a mean": {"handlers": ["data-parallel"]},
    "of rows": {"handlers": ["sharded"]},
    "each in a bucket": {"handlers": ["data-parallel"], "bucket_bytes": 0},
    "another wire": {"handlers": ["data-parallel"], "reduce_dtype": torch.float64},
}


def compare() -> dict[str, Any]:
    return {
        name: {how: by_exchange(how, **options) for how in EXCHANGES}
        for name, options in CASES.items()
    }


@pytest.fixture(scope="module")
def replies() -> list[dict[str, Any]]:
    return run_ranks(compare, 4)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("how", EXCHANGES[1:])
def test_the_bits_are_those_of_an_all_reduce(
    replies: list[dict[str, Any]], case: str, how: Exchange
) -> None:
    for rank, reply in enumerate(replies):
        expected, found = reply[case]["all-reduce"][0], reply[case][how][0]
        for step in range(STEPS):
            assert found[step].keys() == expected[step].keys()
            different = [n for n in expected[step] if found[step][n] != expected[step][n]]
            assert not different, f"rank {rank}, step {step}"
    every = [reply[case]["all-reduce"][0] for reply in replies]
    assert not any(one[0].get("unused") for one in every)
    assert all(one[0]["table"] for one in every)


def test_no_read_or_write_is_unordered(replies: list[dict[str, Any]]) -> None:
    assert not [v for reply in replies for case in reply.values() for _, v, _ in case.values() if v]


def test_the_plan_says_how(replies: list[dict[str, Any]]) -> None:
    for how in EXCHANGES[1:]:
        assert f"{how}-replicate-sum(pp) over ranks [0, 2]" in replies[0]["alone"][how][2]
    assert "pairwise" not in replies[0]["alone"]["all-reduce"][2]


# Rows, and what is refused.


def bucket(*slots: Slot) -> Bucket:
    last = slots[-1]
    numel = -(-(last.offset + last.numel) // 16) * 16
    f32 = torch.float32
    return Bucket(0, 0, (0, 1), f32, f32, f32, f32, (), slots, numel)


def test_rows_are_what_lies_together() -> None:
    whole = bucket(
        Slot("table", 0, (5, 4), (4, 1)),
        Slot("turned", 32, (4, 3), (1, 4)),
        Slot("bias", 48, (3,), (1,)),
        Slot("one", 64, (), ()),
    )
    flags = Rows(80, 1, 4)
    assert rows_of(whole, range(80)) == (
        Rows(0, 5, 4),
        Rows(32, 3, 4),
        Rows(48, 1, 3),
        Rows(64, 1, 1),
        flags,
    )
    # A shard's region cuts rows at both ends.
    assert rows_of(whole, range(6, 19)) == (
        Rows(0, 1, 2),
        Rows(2, 2, 4),
        Rows(10, 1, 3),
        Rows(13, 1, 4),
    )
    assert rows_of(whole, range(5, 7)) == (Rows(0, 1, 2), Rows(2, 1, 4))


class Exchanging(GradientHandler):
    """Asks for anything."""

    def __init__(self, ranks: tuple[int, ...], placement: Placement, how: Any) -> None:
        self._asked = ranks, "sum", placement, 1.0, how

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return [Reduction(p, *self._asked) for p in parameters if topology.rank in self._asked[0]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "placement", "how", "complaint"),
    [
        ((0, 1, 2), Placement.REPLICATE, "pairwise", "for the gradients of two ranks"),
        ((0, 1), Placement.OWNER, "pairwise", "placed by 'replicate'"),
        ((0, 1), Placement.SHARD, "asymmetric", "placed by 'replicate'"),
        ((0, 1), Placement.REPLICATE, "dense", "exchange 'dense': expected one of"),
    ],
)
def test_an_exchange_of_others_is_refused_by_name(
    ranks: tuple[int, ...], placement: Placement, how: Any, complaint: str
) -> None:
    topology = Topology.build(axes=(("pp", 1), ("dp", 3)))
    manifest = make_manifest({0: nn.Linear(2, 2)}, topology)
    asked = [("mine", Exchanging(ranks, placement, how))]
    with pytest.raises(PlanError, match=complaint):
        make_plan(manifest, topology, asked, GradientOptions(bucket_bytes=2**20))


def test_an_exchange_comes_last() -> None:
    topology = Topology.build(axes=(("pp", 2), ("dp", 2)))
    stages = {stage: nn.Linear(2, 2, bias=False, device="meta") for stage in range(2)}
    manifest = make_manifest(stages, topology, tied=[["weight"]])

    class Pairs(GradientHandler):
        def reductions(
            self, parameters: Sequence[ParameterRecord], topology: Topology
        ) -> Iterable[Reduction]:
            ranks = topology.ranks_along("dp")
            return [Reduction(p, ranks, "mean", exchange="pairwise") for p in parameters]

    asked = [("pairs", Pairs()), ("pipeline-shared", PipelineShared())]
    with pytest.raises(PlanError, match="an exchange must come last"):
        make_plan(manifest, topology, asked, GradientOptions(bucket_bytes=2**20))


def test_another_exchange_is_another_bucket() -> None:
    topology = Topology.build(axes=(("pp", 2), ("dp", 1)))
    stages = {stage: nn.Linear(2, 2, device="meta") for stage in range(2)}
    shared = [["weight"], ["bias"]]
    manifest = make_manifest(stages, topology, tied=shared)

    class Mixed(PipelineShared):
        def _sum(self, record: ParameterRecord, ranks: tuple[int, ...]) -> Reduction:
            how: Exchange = "pairwise" if record.name == "bias" else "asymmetric"
            return Reduction(record, ranks, exchange=how)

    plan = make_plan(manifest, topology, [("mixed", Mixed())], GradientOptions(bucket_bytes=2**20))
    assert [bucket.route[0].exchange for bucket in plan.buckets] == ["pairwise", "asymmetric"]
