"""Divisors: what gradients are divided by besides their means, alike on all copies."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import GradientHandler, GradientSync, ParameterRecord, Reduction, Topology
from pipegrad.errors import PlanError
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import make_plans
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import give, grads, outcome, rank, replicated, stage, step
from tests.support.gradients.placements import compute
from tests.support.gradients.plans import Reductions, manifest, say
from tests.support.ranked import gathered

PIPELINE = Topology.build(axes=(("pp", 2), ("dp", 2)))  # ranks 0, 1 hold stage 0; 2, 3 stage 1
MODEL = manifest(["emb", "a"], ["head", "b"])
SHARED = ("pipeline-shared", PipelineShared())
plans = partial(make_plans, MODEL, PIPELINE)


def options(**others: Any) -> GradientOptions:
    return GradientOptions(bucket_bytes=64, comm_streams=1, **others)


def over(axis: str, divisor: float, *names: str) -> Reductions:
    """Sums what has one of the names, with a divisor."""
    return lambda ps, t: [
        Reduction(p, t.ranks_along(axis), divisor=divisor) for p in ps if p.name in names
    ]


def alone(ps: Sequence[ParameterRecord], t: Topology) -> list[Reduction]:
    return [Reduction(p, (t.rank,), divisor=3) for p in ps if p.name == "b"]


def test_a_plan_lists_divisors_of_each_route() -> None:
    divided = plans([say(over("dp", 2.5, "a")), ("other", say(alone)[1]), SHARED], options())
    assert divided[0].divisors == divided[1].divisors == (("0.a", 2.5),)
    assert divided[2].divisors == divided[3].divisors == (("1.b", 3.0),)
    assert "1.b" not in dict(divided[2].routes)
    assert str(divided[0]).splitlines()[1] == "divided by 2.5 before they leave: 0.a"
    without = plans([say(over("dp", 1, "a")), SHARED], options())
    assert without[0].divisors == ()
    assert "divided" not in str(without[0])
    assert without[0].digest != divided[0].digest
    # Several divisors of one gradient are multiplied.
    handlers = [say(over("dp", 2, "emb", "head")), ("x", say(over("pp", 3, "emb", "head"))[1])]
    multiplied = plans(handlers, options())
    assert all(plan.divisors == (("0.emb", 6.0),) for plan in multiplied.values())


def by(divisor: str, ranks: str = "dp") -> Reductions:
    """Divides all parameters by one more than a coordinate, or than the rank."""

    def reductions(ps: Sequence[ParameterRecord], t: Topology) -> list[Reduction]:
        number = t.rank if divisor == "rank" else t.coordinate(divisor)
        over = (t.rank,) if ranks == "alone" else t.ranks_along(ranks)
        return [Reduction(p, over, divisor=1 + number) for p in ps]

    return reductions


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (by("dp"), "'0.emb' is divided by 2 on rank 1, but by 1 on rank 0: handlers ['mine'] must"),
        (by("rank", "alone"), "'0.emb' is divided by 2 on rank 1, but by 1 on rank 0"),
        (over("dp", 0, "a"), "divisor 0: expected a positive number"),
        (over("dp", math.nan, "a"), "divisor nan: expected a positive number"),
        (over("dp", math.inf, "a"), "divisor inf: expected a positive number"),
    ],
)
def test_divisors_that_are_none_or_differ_are_refused(mistake: Reductions, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        plans([say(mistake)], options(allow_unsynced=["*"]))
    name = "'0.a'" if "expected" in words else "'0.emb'"
    assert all(word in str(caught.value) for word in ("handler", name, words))


class Halves(GradientHandler):
    """Sums ``a``, leaves the rest where it is; all are divided by two."""

    def reductions(self, parameters: Any, topology: Topology) -> Iterable[Reduction]:
        for p in parameters:
            ranks = topology.ranks_along("dp") if p.name == "a" else (topology.rank,)
            yield Reduction(p, ranks, "sum", divisor=2)


@pytest.mark.ranks(2)
def test_a_gradient_is_divided_once_by_all_that_divides_it() -> None:
    # Also where no reduction is left; and nothing is made of a gradient that nobody has.
    module = stage(a=(2,), b=(2,), c=(2,))
    sync = replicated(module, handlers=[Halves])
    given: dict[str, Any] = {"divisor": 4, "a": rank() + 1.0, "b": rank() + 1.0}
    for num_accumulated in (0, 1):
        with sync.accumulate():
            for _ in range(num_accumulated):
                step(sync, module, **given)
        step(sync, module, **given)
        a, b = (3 / 8, (rank() + 1) / 8) if num_accumulated == 0 else (3 / 4, (rank() + 1) / 4)
        assert grads(module) == {"a": [a] * 2, "b": [b] * 2, "c": None}
        module.zero_grad()
    sync.close()


SUMS, COUNT = (65536.0, 3.0), 98304.0  # of rank 0 and of rank 1; the count is none of float16


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("handler", "dtype", "options", "most"),
    [
        ("data-parallel", torch.float32, {}, 1e-7),
        ("sharded", torch.float32, {}, 1e-7),
        ("noop", torch.float32, {}, 1e-7),
        ("data-parallel", torch.float16, {}, 2.0**-8),
        ("data-parallel", torch.float32, {"reduce_dtype": torch.bfloat16}, 2.0**-8),
        ("sharded", torch.bfloat16, {"master_dtype": torch.float32}, 2.0**-8),
    ],
)
def test_a_divisor_that_is_known_at_the_end_divides_each_result_once(
    handler: str, dtype: torch.dtype, options: dict[str, Any], most: float
) -> None:
    scale = 2.0**-4 if dtype == torch.float16 else 1.0
    module = stage(
        a=torch.zeros(3, dtype=dtype), b=torch.zeros((), dtype=dtype), c=torch.zeros(2, dtype=dtype)
    )
    sync = replicated(module, handlers=[handler], **options)
    sync.optimizer_parameters()

    value, count = SUMS[rank()] * scale, torch.tensor(COUNT, dtype=torch.float64)
    work = partial(give, module, a=value, b=value)
    for num_accumulated in (0, 1):
        for main in sync.main_parameters():
            main.tensor.grad = None
        with sync.accumulate():
            for _ in range(num_accumulated):
                compute(sync, work, divisor=None)
        compute(sync, work, divisor=None, late=count)
    # Two accumulated steps, and the mean of two ranks.
    right = scale * (2 * SUMS[rank()] if handler == "noop" else sum(SUMS)) / COUNT
    gradients = {main.record.name: main.tensor.grad for main in sync.main_parameters()}
    assert gradients.pop("c", None) is None
    numel = 0
    for gradient in gradients.values():
        if gradient is not None:
            assert ((gradient.double() / right - 1).abs() <= most).all()
            numel += gradient.numel()
    assert sum(gathered(numel)) == 4 * (1 if handler == "sharded" else 2), "a shard is missing"
    sync.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("early", "late"), [(None, None), (1.0, torch.tensor(2.0))])
def test_a_divisor_is_given_once_and_to_new_gradients_alone(
    early: float | None, late: torch.Tensor | None
) -> None:
    module = stage(a=(2,), b=(2,))
    sync = replicated(module, handlers=["noop"])
    sync.prepare(divisor=early)
    give(module, a=1.0)
    sync.stage_final(0)
    words = outcome(lambda: sync.finish(divisor=late))
    assert "one of prepare() and finish() takes the divisor" in words
    sync.finish(divisor=None if early else torch.tensor(2.0))
    module.get_parameter("a").grad = torch.ones(2)
    words = outcome(lambda: sync.prepare(divisor=None))
    assert "the parameter '0.a' has a gradient already" in words
    sync.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("early", "late"), [(4.0, None), (None, torch.tensor(4.0))])
def test_accumulated_steps_have_their_divisors_in_one_place(
    early: float | None, late: torch.Tensor | None
) -> None:
    # The first divisor was ignored, or a gradient was divided twice, or never.
    module = stage(a=(2,))
    sync = replicated(module)
    with sync.accumulate():
        sync.prepare(divisor=early)
        sync.stage_first_use(0)
        give(module, a=2.0)
        words = outcome(lambda: sync.finish(divisor=torch.tensor(4.0)))
        assert "inside accumulate() takes no divisor" in words
        sync.finish()
    words = outcome(lambda: sync.prepare(divisor=None if early else 4.0))
    assert "the accumulated steps before gave" in words
    compute(sync, lambda: give(module, a=1.0), divisor=early, late=late)
    assert grads(module) == {"a": [0.75] * 2}
    sync.close()


DATA = "data-parallel"
WHOLE = {"name": "sequence-parallel", "parameters": ["*"]}
NORM = {"name": "sequence-parallel", "parameters": ["1.*"]}
ALONE = "'0.0.weight' and 0 more start with the same bits on ranks [0, 1], along 'tp'"
# It would have given all ranks the first one's shard, before the first step.
REDUCED = "handler 'sequence-parallel' reduces '0.0.weight' by replicate-sum(tp)"
# Norms and biases start alike on all ranks whether they are copies or each has a part.
CONSTANT = "'0.1.weight', '0.1.bias' start constant on ranks [0, 1], along 'tp', and no handler"


# Seeds of the ranks, the axis along which they lie, handlers; what is allowed, refused, warned of.
BITS: dict[str, tuple[Any, ...]] = {
    "copies alone": ((0, 0), "tp", [DATA, NORM], (), ALONE, []),
    "copies allowed": ((0, 0), "tp", [DATA, NORM], ("0.weight",), "", []),
    "copies": ((0, 0), "tp", [{**WHOLE, "op": "mean"}], (), "", []),
    "shards": ((0, 1), "tp", [DATA, NORM], (), "", []),
    "shards reduced": ((0, 1), "tp", [DATA, WHOLE], (), REDUCED, []),
    "replicas": ((0, 1), "dp", [DATA], (), "", []),
    "constants alone": ((0, 1), "tp", [DATA], (), "", [CONSTANT]),
    "constants allowed": ((0, 1), "tp", [DATA], ("1.*",), "", []),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("row", BITS.values(), ids=BITS)
def test_bits_at_the_start_show_which_handler_is_missing_or_too_much(row: Any) -> None:
    seeds, axis, handlers, allowed, refused, warned = row
    topology = Topology.create(pipeline=1, dimensions={"tp": 2} if axis == "tp" else {})
    torch.manual_seed(seeds[rank()])
    layer = nn.Linear(3, 3, bias=False)
    module, before = nn.Sequential(layer, nn.LayerNorm(3)), layer.weight.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        words = outcome(
            lambda: GradientSync(
                {0: module}, topology, handlers=handlers, allow_unsynced=allowed
            ).close()
        )
    assert words.startswith("PlanError: ") if refused else words == "None"
    assert refused in words
    assert [str(w.message)[: len(CONSTANT)] for w in caught] == warned
    assert axis == "dp" or torch.equal(before, layer.weight)
