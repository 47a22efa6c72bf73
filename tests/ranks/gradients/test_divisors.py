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
from pipegrad.testing import run_ranks
from pipegrad_handlers.expert_parallel import ExpertParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from pipegrad_handlers.sequence_parallel import SequenceParallel
from pipegrad_handlers.sharded import Sharded
from tests.support.gradients.cases import outcome
from tests.support.plan.manifests import Reductions, manifest, say

PIPELINE = Topology.build(axes=(("pp", 2), ("dp", 2)))  # ranks 0, 1 hold stage 0; 2, 3 stage 1
MODEL = manifest(["emb", "a"], ["head", "b"])
SHARED = ("pipeline-shared", PipelineShared())
OPTIONS: dict[str, Any] = {"bucket_bytes": 64, "comm_streams": 1}


def over(axis: str, divisor: float, *names: str) -> Reductions:
    """Sums what has one of the names, with a divisor."""
    return lambda ps, t: [
        Reduction(p, t.ranks_along(axis), divisor=divisor) for p in ps if p.name in names
    ]


def alone(ps: Sequence[ParameterRecord], t: Topology) -> list[Reduction]:
    return [Reduction(p, (t.rank,), divisor=3) for p in ps if p.name == "b"]


def test_a_plan_lists_those_that_are_not_one_and_drops_the_free_hop_only() -> None:
    handlers = [say(over("dp", 2.5, "a")), ("other", say(alone)[1]), SHARED]
    plans = make_plans(MODEL, PIPELINE, handlers, GradientOptions(**OPTIONS))
    assert plans[0].divisors == plans[1].divisors == (("0.a", 2.5),)
    assert plans[2].divisors == plans[3].divisors == (("1.b", 3.0),)
    assert "1.b" not in dict(plans[2].routes)
    assert str(plans[0]).splitlines()[1] == "divided by 2.5 before they leave: 0.a"
    without = make_plans(
        MODEL, PIPELINE, [say(over("dp", 1, "a")), SHARED], GradientOptions(**OPTIONS)
    )
    assert without[0].divisors == ()
    assert "divided" not in str(without[0])
    assert without[0].digest != plans[0].digest


def test_several_divisors_of_one_gradient_are_multiplied() -> None:
    handlers = [say(over("dp", 2, "emb", "head")), ("x", say(over("pp", 3, "emb", "head"))[1])]
    plans = make_plans(MODEL, PIPELINE, handlers, GradientOptions(**OPTIONS))
    assert all(plan.divisors == (("0.emb", 6.0),) for plan in plans.values())


@pytest.mark.parametrize(
    ("mistake", "fragments"),
    {
        "ranks of one reduction": (
            lambda ps, t: [
                Reduction(p, t.ranks_along("dp"), divisor=1 + t.coordinate("dp")) for p in ps
            ],
            ["'0.emb' is divided by 2 on rank 1, but by 1 on rank 0: handlers ['mine'] must"],
        ),
        "copies on other stages": (
            lambda ps, t: [
                Reduction(p, t.ranks_along("dp"), divisor=1 + t.coordinate("pp")) for p in ps
            ],
            ["'0.emb' is divided by 2 on rank 2, but by 1 on rank 0"],
        ),
        "copies that are not reduced": (
            lambda ps, t: [Reduction(p, (t.rank,), divisor=1 + t.rank) for p in ps],
            ["'0.emb' is divided by 2 on rank 1, but by 1 on rank 0"],
        ),
        "nothing": (over("dp", 0, "a"), ["'0.a'", "divisor 0: expected a positive number"]),
        "less": (over("dp", -1, "a"), ["divisor -1: expected a positive number"]),
        "no number": (over("dp", math.nan, "a"), ["divisor nan: expected a positive number"]),
        "too much": (over("dp", math.inf, "a"), ["divisor inf: expected a positive number"]),
    }.values(),
)
def test_divisors_that_are_none_are_refused(mistake: Reductions, fragments: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        make_plans(
            MODEL, PIPELINE, [say(mistake)], GradientOptions(allow_unsynced=["*"], **OPTIONS)
        )
    assert all(fragment in str(caught.value) for fragment in ["handler", *fragments])


def test_four_dimensions_make_one_plan_with_shards_in_rows_and_ties() -> None:
    """pp 2 x dp 2 x ep 2 x tp 2: what is cut, what is whole, experts, and a tie that is whole."""
    axes = (("pp", 2), ("dp", 2), ("ep", 2), ("tp", 2))
    mesh = Topology.build(axes=axes, data=("dp", "ep"))
    model = manifest(["emb", "cut", "experts"], ["head", "whole", "experts.whole"])
    handlers = [
        ("tp", SequenceParallel(parameters=["emb", "*whole"])),
        ("ep", ExpertParallel(placement="shard")),
        ("pipeline-shared", PipelineShared(placement="owner")),
    ]
    plans = make_plans(model, mesh, handlers, GradientOptions(**OPTIONS))
    assert len({plan.digest for plan in plans.values()}) == 1
    routes = {key: list(map(str, route)) for plan in plans.values() for key, route in plan.routes}
    assert routes == {
        "0.emb": ["owner-sum(pp)", "shard-mean(dp+ep)", "replicate-sum(tp)"],
        "0.cut": ["shard-mean(dp+ep)"],
        "0.experts": ["shard-mean(dp)"],
        "1.whole": ["shard-mean(dp+ep)", "replicate-sum(tp)"],
        "1.experts.whole": ["shard-mean(dp)", "replicate-sum(tp)"],
    }
    assert plans[5].divisors == (("0.experts", 2.0),)
    assert plans[15].divisors == (("1.experts.whole", 2.0),)
    dense = make_plans(
        model, mesh, [handlers[0], ("dp", Sharded()), handlers[2]], GradientOptions(**OPTIONS)
    )
    assert [str(h) for h in dict(dense[3].routes)["0.experts"]] == ["shard-mean(dp+ep)"]


class Halves(GradientHandler):
    """Sums ``a``, leaves the rest where it is; all are divided by two."""

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        for p in parameters:
            ranks = topology.ranks_along("dp") if p.name == "a" else (topology.rank,)
            yield Reduction(p, ranks, "sum", divisor=2)


def divided() -> list[list[float]]:
    """On 2 ranks: gradients after a step of 4 microbatches, as they are and as they accumulate."""
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("a", "b", "c")})
    sync = GradientSync({0: module}, Topology.create(pipeline=1), handlers=[Halves])
    found = []
    for num_accumulated in (0, 1):
        with sync.accumulate():
            for _ in range(num_accumulated):
                _step(sync, module)
        _step(sync, module)
        found.append([float(p.grad[0]) for p in module.values() if p.grad is not None])
        module.zero_grad()
    sync.close()
    return found


def _step(sync: GradientSync, module: nn.ParameterDict) -> None:
    sync.prepare(divisor=4)
    ((module["a"].sum() + module["b"].sum()) * (sync.topology.rank + 1)).backward()
    sync.stage_final(0)
    sync.finish()


def test_a_gradient_is_divided_once_by_all_that_divides_it() -> None:
    """Also where no reduction is left; and nothing is made of a gradient that nobody has."""
    first, second = run_ranks(divided, 2)
    assert first == [[3 / 8, 1 / 8], [2 * 3 / 8, 2 * 1 / 8]]
    assert second == [[3 / 8, 2 / 8], [2 * 3 / 8, 2 * 2 / 8]]


LATE: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "replicate": (["data-parallel"], {}),
    "shard": (["sharded"], {}),
    "nobody": (["noop"], {}),
    "half": (["data-parallel"], {"dtype": torch.float16}),
    "on the wire": (["data-parallel"], {"reduce_dtype": torch.bfloat16}),
    "masters": (["sharded"], {"dtype": torch.bfloat16, "master_dtype": torch.float32}),
}
SUMS, COUNT = (65536.0, 3.0), 98304.0  # of rank 0 and of rank 1; the count is none of float16


def divided_late() -> dict[str, Any]:
    """On 2 ranks: gradients that `finish` divides, of a matrix, a scalar and one of nobody."""
    found = dict[str, Any]()
    for name, (handlers, given) in LATE.items():
        options = dict(given)
        dtype = options.pop("dtype", torch.float32)
        shapes = {"a": (3,), "b": (), "c": (2,)}
        module = nn.ParameterDict(
            {key: nn.Parameter(torch.zeros(shape, dtype=dtype)) for key, shape in shapes.items()}
        )
        topology = Topology.create(pipeline=1)
        sync = GradientSync({0: module}, topology, handlers=handlers, **options)
        sync.optimizer_parameters()
        scale = 1.0 if dtype != torch.float16 else 2.0**-4
        for number_of_steps in (1, 2):
            with sync.accumulate():
                for _ in range(number_of_steps - 1):
                    _add(sync, module, scale)
                    sync.finish()
            _add(sync, module, scale)
            sync.finish(divisor=torch.tensor(COUNT, dtype=torch.float64))
        mains = {main.record.name: main.tensor.grad for main in sync.main_parameters()}
        found[name] = {k: None if g is None else g.tolist() for k, g in mains.items()}
        sync.close()
    return found


def _add(sync: GradientSync, module: nn.ParameterDict, scale: float) -> None:
    if not sync.is_in_step:
        for main in sync.main_parameters():
            main.tensor.grad = None
    sync.prepare(divisor=None)
    sync.stage_first_use(0)
    ((module["a"].sum() + module["b"]) * SUMS[sync.topology.rank] * scale).backward()
    sync.stage_final(0)


def test_a_divisor_that_is_known_at_the_end_divides_each_result_once() -> None:
    first, second = run_ranks(divided_late, 2)
    mean, eps = sum(SUMS) / COUNT, 2.0**-8  # of two accumulated steps, and of two ranks
    for name in LATE:
        for at, found in enumerate((first[name], second[name])):
            wanted = 2 * SUMS[at] / COUNT if name == "nobody" else mean
            wanted *= 2.0**-4 if name == "half" else 1.0
            error = eps if name in ("half", "on the wire", "masters") else 1e-7
            values = [x for key in ("a", "b") for x in _flat(found.get(key))]
            assert values or name in ("shard", "masters"), name
            assert all(abs(value / wanted - 1) <= error for value in values), (name, values)
            assert found.get("c") is None, name
    shards = [_flat(found["shard"].get(key)) for found in (first, second) for key in ("a", "b")]
    assert sum(map(len, shards)) == 4, "a shard is missing"


def _flat(value: Any) -> list[float]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def given_wrongly() -> list[str]:
    """On 2 ranks: what is said of a divisor that is given twice, or never, or comes too late."""
    module = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.ones(2))})
    sync = GradientSync({0: module}, Topology.create(pipeline=1), handlers=["noop"])
    found = []
    for early, late in ((None, None), (1.0, torch.tensor(2.0))):
        sync.prepare(divisor=early)
        module["a"].sum().backward()
        sync.stage_final(0)
        found.append(outcome(partial(sync.finish, divisor=late)))
        sync.finish(divisor=None if early else torch.tensor(2.0))
        module["a"].grad = torch.ones(2)
        found.append(outcome(partial(sync.prepare, divisor=None)))
        module["a"].grad = torch.zeros(2)
    sync.close()
    return found


def test_a_divisor_is_given_once_and_to_new_gradients_alone() -> None:
    for found in run_ranks(given_wrongly, 2):
        assert all("one of prepare() and finish() takes the divisor" in said for said in found[::2])
        assert all("the parameter '0.a' has a gradient already" in said for said in found[1::2])


def mixed() -> Any:
    """On 2 ranks: divisors that change within accumulated steps, each refused, then given well."""
    module = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2))})
    sync = GradientSync({0: module}, Topology.create(pipeline=1), handlers=["data-parallel"])
    said, values = [], []
    total = torch.tensor(4.0)
    for early, late in ((4.0, None), (None, total)):
        other = None if early else 4.0
        with sync.accumulate():
            sync.prepare(divisor=early)
            sync.stage_first_use(0)
            (module["a"].sum() * 2).backward()
            said.append(outcome(partial(sync.finish, divisor=total)))
            sync.finish()
        said.append(outcome(partial(sync.prepare, divisor=other)))
        sync.prepare(divisor=early)
        module["a"].sum().backward()
        sync.stage_final(0)
        sync.finish(divisor=late)
        assert module["a"].grad is not None
        values.append(module["a"].grad.tolist())
        module["a"].grad = None
    sync.close()
    return said, values


def test_accumulated_steps_have_their_divisors_in_one_place() -> None:
    """The first divisor was ignored, or a gradient was divided twice, or never."""
    for said, values in run_ranks(mixed, 2):
        assert all("inside accumulate() takes no divisor" in each for each in said[::2])
        assert all("the accumulated steps before gave" in each for each in said[1::2])
        assert values == [[0.75] * 2] * 2


WHOLE = {"name": "sequence-parallel", "parameters": ["*"]}
NORM = {"name": "sequence-parallel", "parameters": ["1.*"]}
COPIES, SHARDS = (0, 0), (0, 1)

# Seeds of two ranks, the dimension they lie along, handlers, and what may stay as it is.
STARTS: dict[str, tuple[tuple[int, int], str, list[Any], tuple[str, ...]]] = {
    "copies alone": (COPIES, "tp", ["data-parallel", NORM], ()),
    "copies allowed": (COPIES, "tp", ["data-parallel", NORM], ("0.weight",)),
    "copies": (COPIES, "tp", [{**WHOLE, "op": "mean"}], ()),
    "shards": (SHARDS, "tp", ["data-parallel", NORM], ()),
    "shards reduced": (SHARDS, "tp", ["data-parallel", WHOLE], ()),
    "replicas": (SHARDS, "dp", ["data-parallel"], ()),
    "constants alone": (SHARDS, "tp", ["data-parallel"], ()),
    "constants allowed": (SHARDS, "tp", ["data-parallel"], ("1.*",)),
}


def starts() -> dict[str, tuple[str, list[str]]]:
    """On 2 ranks: what is said and warned of a layer and its norm, and of what they start with."""
    found = {}
    for name, (seeds, axis, handlers, allowed) in STARTS.items():
        dimensions = {"tp": 2} if axis == "tp" else {}
        topology = Topology.create(pipeline=1, dimensions=dimensions)
        torch.manual_seed(seeds[topology.rank])
        layer = nn.Linear(3, 3, bias=False)
        module, before, said = nn.Sequential(layer, nn.LayerNorm(3)), layer.weight.clone(), "fine"
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                GradientSync(
                    {0: module}, topology, handlers=handlers, allow_unsynced=allowed
                ).close()
            except PlanError as error:
                said = str(error)
        assert axis == "dp" or torch.equal(before, layer.weight)
        found[name] = said, [str(w.message) for w in warned]
    return found


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[str, list[str]]]:
    first, second = run_ranks(starts, 2)
    assert first == second
    return first


def test_copies_that_nobody_reduces_along_a_dimension_of_the_same_data_are_refused(
    told: dict[str, tuple[str, list[str]]],
) -> None:
    said, _ = told["copies alone"]
    assert "'0.0.weight' and 0 more start with the same bits on ranks [0, 1], along 'tp'" in said
    assert "Add 'sequence-parallel' to the handlers and them to its parameters" in said
    for name in ("copies allowed", "copies", "shards", "replicas"):
        assert told[name] == ("fine", []), name


def test_shards_that_a_handler_reduces_along_their_dimension_are_refused(
    told: dict[str, tuple[str, list[str]]],
) -> None:
    """It would have given all ranks the first one's shard, before the first step."""
    said, warned = told["shards reduced"]
    assert "handler 'sequence-parallel' reduces '0.0.weight' by replicate-sum(tp)" in said
    assert "it starts with different bits on ranks [0, 1], along 'tp'" in said
    assert "leave it out of the handler's parameters" in said
    assert warned == []


def test_constants_that_nobody_reduces_may_be_copies_and_are_warned_of(
    told: dict[str, tuple[str, list[str]]],
) -> None:
    """Norms and biases start alike on all ranks whether they are copies or each has a part."""
    said, [warned] = told["constants alone"]
    assert said == "fine"
    assert warned == (
        "'0.1.weight', '0.1.bias' start constant on ranks [0, 1], along 'tp', and no handler "
        "reduces them there: list copies in the parameters of 'sequence-parallel', and in "
        "allow_unsynced what each rank has a part of its own of"
    )
    assert told["constants allowed"] == ("fine", [])
