"""State of optimizers by name and location, of several as one; and who steps which parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from pipegrad import ParameterRecord, Placement, Topology, make_plan
from pipegrad.errors import PlanError
from pipegrad.gradients.main_params import Locations, MainParameter
from pipegrad.gradients.named_optimizer import JoinedOptimizer, parts_in, parts_of, use_names
from pipegrad.plugins.handler import GradientHandler
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.diloco import DiLoCo
from pipegrad_handlers.owned import Owned
from tests.support.gradients.plans import manifest, record

MESH = Topology.build(axes=(("pp", 1), ("dp", 2), ("out", 2), ("tp", 2)), data=("dp", "out"))


@pytest.mark.parametrize(
    ("handlers", "location"),
    [
        ([DataParallel()], "[tp=1]"),
        ([DiLoCo(every=2)], "[dp=1,out=1,tp=1]"),
        ([DataParallel(axis="dp"), DiLoCo(every=2, axis="out")], "[out=1,tp=1]"),
    ],
)
def test_replicas_that_train_alone_have_locations(
    handlers: list[GradientHandler], location: str
) -> None:
    plan = make_plan(manifest(("a",)), MESH.at(7), [(str(i), h) for i, h in enumerate(handlers)])
    locations = Locations(MESH.at(7), plan)
    assert locations.of("0.a") == location
    assert locations.of() == "[tp=1]"  # a buffer, once for all data ranks


def with_names(main: MainParameter, name: str = "w") -> torch.optim.Optimizer:
    """Returns an optimizer of one parameter, whose state has names."""
    optimizer = torch.optim.SGD([main.tensor], lr=0.1, momentum=0.9)
    use_names(optimizer, {name: main}, [["w"]])
    return optimizer


@pytest.mark.parametrize(
    ("name", "saved", "is_found"),
    [
        ("w[tp=1]", "w[tp=1]", True),
        ("w[tp=1]", "w", False),
        ("w[dp=0]", "w", False),  # of a run whose replicas do not train alone
        ("w", "w[dp=0]", False),
        ("w[dp=0,tp=1]", "w[tp=1]", False),
        ("w[ep=3]", "w[ep=1]", False),
        ("w", "v", False),  # of another rank
    ],
)
def test_state_of_another_location_is_refused(name: str, saved: str, *, is_found: bool) -> None:
    """Whole state of a run without TP was loaded for a shard, and the next step failed."""
    main = MainParameter(record("w", 2, 3), nn.Parameter(torch.ones(2, 3)))
    optimizer = with_names(main, name)
    state = optimizer.state_dict()
    state["state"] = {saved: {"momentum_buffer": torch.ones(2 if is_found else 4, 3)}}
    if is_found:
        optimizer.load_state_dict(state)
        assert list(optimizer.state[main.tensor]) == ["momentum_buffer"]
        return
    optimizer.state[main.tensor] = kept = {"momentum_buffer": torch.zeros(2, 3)}
    with pytest.raises(PlanError) as caught:
        optimizer.load_state_dict(state)
    assert optimizer.state[main.tensor] is kept
    message = str(caught.value)
    assert f"lacks ['{name}'], which this rank steps; it has ['{saved}']: load it with" in message
    assert "or begin with a new optimizer" in message
    # What it says works.
    state["state"][name] = {}
    optimizer.load_state_dict(state)
    assert not optimizer.state[main.tensor]


@pytest.mark.parametrize("saved", [(), ("w", "other"), (5,)])
def test_a_parameter_without_a_gradient_has_no_state_to_miss(saved: tuple[str | int, ...]) -> None:
    mains = {n: MainParameter(record(n, 2), nn.Parameter(torch.ones(2))) for n in ("w", "unused")}
    optimizer = torch.optim.SGD([main.tensor for main in mains.values()], lr=0.1, momentum=0.9)
    use_names(optimizer, mains, [list(mains)])
    state = optimizer.state_dict()
    state["state"] = {name: {"momentum_buffer": torch.ones(2)} for name in saved}
    optimizer.load_state_dict(state)
    assert list(optimizer.state) == [mains["w"].tensor for name in saved if name == "w"]


@pytest.mark.parametrize("copied", [True, False])
def test_only_a_master_copy_is_saved_as_one(*, copied: bool) -> None:
    dtype = torch.float32 if copied else torch.bfloat16
    parameter = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    main = MainParameter(record("w", 2, 3, dtype=torch.bfloat16), parameter)
    state = with_names(main).state_dict()["state"]
    assert {name: list(own) for name, own in state.items()} == ({"w": ["master"]} if copied else {})


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ((3, 1), [4.0, 5.0, 6.0, 7.0, 8.0]),
        ((1, 4), [1.0, 4.0, 7.0, 10.0, 2.0]),  # the memory goes down the columns
    ],
)
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_shard_takes_its_elements_of_a_whole_in_the_order_of_memory(
    strides: tuple[int, int], expected: list[float], *, is_flat: bool
) -> None:
    shard = nn.Parameter(torch.zeros(5))
    main = MainParameter(record("w", 4, 3), shard, begin=4, sharded=True, stride=strides)
    optimizer = with_names(main)
    whole = torch.arange(12.0).view(4, 3)
    in_memory = whole.reshape(-1) if strides == (3, 1) else whole.t().reshape(-1)
    state = optimizer.state_dict()
    state["state"] = {"w": {"momentum_buffer": in_memory if is_flat else whole}}
    optimizer.load_state_dict(state)
    assert optimizer.state[shard]["momentum_buffer"].tolist() == expected


def parameters() -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=made)) for shape in [(3, 4), (4, 2), (5,)]]


def optimizers(of: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    groups: list[dict[str, Any]] = [{"params": of[:1], "lr": 0.3}, {"params": of[1:2]}]
    return [torch.optim.Muon(groups, lr=0.1), torch.optim.Adagrad(of[2:], lr=0.2)]


def step(of: list[nn.Parameter], *made: torch.optim.Optimizer) -> None:
    for parameter in of:
        parameter.grad = parameter.detach().sin()
    for optimizer in made:
        optimizer.step()


def equal(one: list[nn.Parameter], other: list[nn.Parameter]) -> bool:
    return all(map(torch.equal, one, other))


def test_it_steps_and_schedules_as_its_parts_do_alone() -> None:
    apart, together = parameters(), parameters()
    alone, joined = optimizers(apart), JoinedOptimizer(optimizers(together))
    schedules = [StepLR(one, 1, 0.5) for one in alone]
    schedule = StepLR(joined, 1, 0.5)
    for _ in range(3):
        step(apart, *alone)
        step(together, joined)
        schedule.step()
        for one in schedules:
            one.step()
    assert equal(apart, together)
    assert [group["lr"] for group in joined.param_groups] == [0.0375, 0.0125, 0.025]
    joined.zero_grad()
    assert all(parameter.grad is None for parameter in together)


def test_its_defaults_are_those_that_all_parts_have() -> None:
    """OneCycleLR refused two AdamW as one: it looks for their momentum among the defaults."""
    of = parameters()
    adams = [torch.optim.AdamW(of[:1], lr=0.3), torch.optim.AdamW(of[1:], lr=0.2)]
    joined = JoinedOptimizer(adams)
    assert joined.defaults == adams[0].defaults
    schedule = OneCycleLR(joined, [0.3, 0.2], total_steps=4)
    step(of, joined)
    schedule.step()
    assert "betas" not in JoinedOptimizer(optimizers(parameters())).defaults
    with pytest.raises(ValueError, match="must support momentum"):
        OneCycleLR(JoinedOptimizer(optimizers(parameters())), 0.3, total_steps=4)


def test_its_state_is_loaded_by_each_part() -> None:
    """Adagrad looked for its step in the state of Muon, which has none."""
    expected, found = parameters(), parameters()
    first = JoinedOptimizer(optimizers(expected))
    step(expected, first)
    saved = copy.deepcopy(first.state_dict())
    saved["state"] = {number: saved["state"][number] for number in range(3)}
    assert [len(values) for values in saved["state"].values()] == [1, 1, 2]
    second = JoinedOptimizer(optimizers(found))
    for old, new in zip(expected, found, strict=True):
        new.data.copy_(old.data)
    second.load_state_dict(saved)
    for made, of in ((first, expected), (second, found)):
        made.param_groups[0]["lr"] = 0.7
        step(of, made)
    assert equal(expected, found)
    assert [type(part) for part in parts_in(second)] == [torch.optim.Muon, torch.optim.Adagrad]


def test_a_copy_steps_its_own_parameters() -> None:
    given = parameters()
    joined = JoinedOptimizer(optimizers(given))
    step(given, joined)
    twin = copy.deepcopy(joined)
    of_twin = [p for group in twin.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in given]
    step(of_twin, twin)
    assert all(map(torch.equal, given, before))
    step(given, joined)
    assert equal(given, of_twin)


def test_it_runs_a_closure_once_and_takes_no_groups_later() -> None:
    given, losses = parameters(), [2.0, 3.0]
    joined = JoinedOptimizer(optimizers(given))
    assert joined.step(lambda: losses.pop(0)) == 2.0
    assert losses == [3.0]
    assert joined.step() is None
    with pytest.raises(PlanError, match="of Muon and Adagrad as one optimizer: make another"):
        joined.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(joined.param_groups) == 3
    alone = torch.optim.SGD(parameters(), lr=0.1)
    assert parts_in(alone) == (alone,)


# Which optimizer steps which parameters, and what an optimizer that cannot is told.

Kind = Callable[..., torch.optim.Optimizer]
MUON, ADAMW, ADAFACTOR = torch.optim.Muon, torch.optim.AdamW, torch.optim.Adafactor


RECORDS = [record("matrix", 4, 3), record("bias", 4)]
FILTERS = [record("matrix", 4, 3), record("filter", 2, 3, 5, 5)]


def refused(
    kind: Kind, others: Kind | None, records: list[ParameterRecord], sharded: Container[str] = ()
) -> str:
    messages = []
    for part in parts_of(kind, {}, others, records=records, matrices=()):
        try:
            part.check(sharded)
        except PlanError as error:
            messages.append(str(error))
    [message] = messages
    return message


def test_each_part_says_what_it_steps() -> None:
    [alone] = parts_of(ADAMW, {}, None, records=RECORDS, matrices=())
    both = parts_of(MUON, {}, ADAMW, records=RECORDS, matrices=())
    described = [(part.steps, [r.name for r in part.records]) for part in (alone, *both)]
    assert described == [
        ("everything", ["matrix", "bias"]),
        ("matrices", ["matrix"]),
        ("others", ["bias"]),
    ]


def test_filters_are_named_in_an_option_that_there_is() -> None:
    """It named an option of a handler that the run did not have, as if it had it."""
    message = refused(MUON, ADAMW, FILTERS)
    assert "'0.filter' is (2, 3, 5, 5): name it in the option 'others' of the handler" in message
    assert "'data-parallel' has no such option, so use 'owned' instead" in message
    # What it says works.
    topology = Topology.build(axes=(("pp", 1), ("dp", 2)))
    placed = Owned(others=["filter"]).reductions(FILTERS, topology)
    matrices = {r.record.key for r in placed if r.placement is Placement.WHOLE}
    for part in parts_of(MUON, {}, ADAMW, records=FILTERS, matrices=matrices):
        part.check({"0.filter"})


def test_muon_is_told_to_leave_vectors_to_another_or_that_others_do_not_fit() -> None:
    message = refused(MUON, None, RECORDS)
    assert "but '0.bias' is (4,): let another optimizer step what is no matrix" in message
    assert "owned" not in message
    # It was told to set others=AdamW, and not that its others were at fault.
    for first in (MUON, ADAMW):
        message = refused(first, MUON, RECORDS)
        assert "but '0.bias' is (4,): Muon is given as others, which step what is no" in message


def test_others_that_cannot_step_shards_are_told_that_they_are_others() -> None:
    message = refused(MUON, ADAFACTOR, RECORDS, {"0.bias"})
    assert message.startswith("Adafactor cannot step sharded parameters")
    assert "Adafactor is given as others, which step shards here" in message
    assert "given as others" not in refused(ADAFACTOR, None, RECORDS, {"0.bias"})
