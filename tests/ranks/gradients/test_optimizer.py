"""sync.optimizer: an ordinary loop is complete with it, for every placement."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from pipegrad import GradientSync, ParameterRecord
from pipegrad.gradients.param_sync import ParameterSync
from pipegrad_handlers.diloco import DiLoCo
from tests.support.gradients.cases import bits, give, outcome, rank, replicated, stage, tied
from tests.support.gradients.placements import (
    OWNER,
    REPLICATE,
    SHARD,
    WHOLE,
    By,
    Job,
    alone,
    compute,
    drawn,
    small,
    update,
)
from tests.support.pipeline.schedulers import error
from tests.support.ranked import gathered
from tests.support.rounding import ADAM_EPS, rounding

pytestmark = pytest.mark.ranks(2)
STEPS, MAX_NORM = 4, 0.5
# Sums of 89 squares in the norm, about ten operations a step.
MOST = rounding(STEPS * 10 * 9)
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "eps": ADAM_EPS}
KINDS: dict[str, tuple[By, dict[str, Any]]] = {
    "replicate": (By("dp", REPLICATE, "mean"), {}),
    "owner": (By("dp", OWNER, "mean"), {}),
    "sharded": (By("dp", SHARD, "mean"), {}),
    "whole": (By("dp", WHOLE, "mean"), {}),
    "whole copies": (By("dp", WHOLE, "mean"), {"master_dtype": torch.float64}),
    # In one comm stream: without tags of its own, the rows of `a` arrived in `b`.
    "mixed": (
        By("dp", {"a": SHARD, "b": OWNER, "c": REPLICATE}, "mean"),
        {"comm_streams": 1, "bucket_bytes": 0},
    ),
    "copies": (By("dp", REPLICATE, "mean"), {"master_dtype": torch.float64}),
    "sharded copies": (By("dp", SHARD, "mean"), {"master_dtype": torch.float64}),
}
FOUR_KINDS = ["replicate", "owner", "sharded", "copies"]
Made = tuple[nn.Module, GradientSync, torch.optim.Optimizer]


def group_of(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Decays matrices, and has another rate for one parameter."""
    options = {} if parameter.ndim > 1 else {"weight_decay": 0.0}
    return {**options, "lr": 0.02} if name == "c" else options


def placed(kind: str) -> tuple[nn.Module, GradientSync]:
    handler, options = KINDS[kind]
    module = small()
    return module, alone(module, handler, **{"bucket_bytes": 128, **options})


def made(kind: str) -> Made:
    module, sync = placed(kind)
    return module, sync, sync.optimizer(torch.optim.AdamW, group_of=group_of, **OPTIONS)


def train(made: Made, *numbers: int) -> Made:
    """The loop of the documentation, without any duty behind the optimizer's step."""
    module, sync, optimizer = made
    for number in numbers:
        compute(sync, partial(give, module, **drawn(rank(), number)))
        sync.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return made


def values(made: Made) -> dict[str, Any]:
    made[1].wait_parameters()
    return {name: bits(p) for name, p in made[0].named_parameters()}


def furthest(made: Made, right: nn.Module) -> float:
    made[1].wait_parameters()
    pairs = zip(made[0].parameters(), right.parameters(), strict=True)
    return max(error(p.detach(), q.detach()) for p, q in pairs)


def go_on(kind: str, saved: dict[str, Any]) -> Made:
    """Another model takes two steps, from what is saved behind the first two."""
    module, sync, optimizer = made(kind)
    module.load_state_dict(saved["model"])
    sync.synchronize_parameters()
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # which it would change
    return train((module, sync, optimizer), 2, 3)


def in_one_process(steps: int = STEPS) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = small()
    groups = [{"params": [p], **group_of(n, p)} for n, p in module.named_parameters()]
    optimizer = torch.optim.AdamW(groups, **OPTIONS)
    for number in range(steps):
        for name, p in module.named_parameters():
            p.grad = (drawn(0, number)[name] + drawn(1, number)[name]) / 2
        nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
    return module, optimizer


def watched_sends() -> Any:
    return mock.patch.object(ParameterSync, "send", autospec=True, side_effect=ParameterSync.send)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_without_duties_trains_and_resumes_as_one_process(kind: str) -> None:
    """Issue 18, point 5. Also bit by bit as with publish(), which is called once a step."""
    job = made(kind)
    with watched_sends() as sends:
        train(job, *range(STEPS))
    assert sends.call_count == (0 if kind == "replicate" else STEPS)
    true, right = in_one_process()[0], values(job)
    assert furthest(job, true) <= MOST
    job[1].check_replicas()
    # A state by names goes on with the same bits in another model, by torch.save and torch.load.
    module, sync, optimizer = train(made(kind), 0, 1)
    sync.wait_parameters()
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    state = optimizer.state_dict()
    found = [(group["params"], group["lr"]) for group in state["param_groups"]]
    assert found == [(["a"], 0.05), (["b"], 0.05), (["c"], 0.02)]
    for name, kept in state["state"].items():
        parameter = module.get_parameter(name)
        is_shard = "sharded" in kind or (kind, name) == ("mixed", "a")
        moments = ["exp_avg", "exp_avg_sq", *(["master"] if "copies" in kind else [])]
        shape = (parameter.numel(),) if is_shard else tuple(parameter.shape)
        expected = {"step": (), **dict.fromkeys(moments, shape)}
        assert {k: tuple(v.shape) for k, v in kept.items()} == expected, name
    assert set().union(*gathered(set(state["state"]))) == {"a", "b", "c"}
    file.seek(0)
    assert values(go_on(kind, torch.load(file))) == right
    # So does that of one process, in any placement.
    begun, alone = in_one_process(steps=2)
    state = {"model": begun.state_dict(), "optimizer": get_optimizer_state_dict(begun, alone)}
    assert furthest(go_on(kind, state), true) <= MOST


@pytest.mark.parametrize("kind", KINDS)
def test_publish_behind_it_does_nothing_and_a_hook_comes_before(kind: str) -> None:
    """Issue 18, point 5. What the user's hook changes is what other ranks get."""
    job = module, sync, optimizer = made(kind)
    mains = [main.tensor for main in sync.main_parameters()]

    def clamp(*_: object) -> None:
        with torch.no_grad():
            for tensor in mains:
                tensor.clamp_(-0.5, 0.5)

    optimizer.register_step_post_hook(clamp)
    with watched_sends() as sends:
        for number in range(2):
            train(job, number)
            sync.publish()
            sync.publish()
    assert sends.call_count == (0 if kind == "replicate" else 2)
    sync.wait_parameters()
    assert max(float(p.abs().max()) for p in module.parameters()) == 0.5
    sync.check_replicas()


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_rank_that_steps_nothing_may_leave_its_step_out(*, evaluates: bool) -> None:
    """One rank had published and the other found nothing to publish: an evaluation hung."""
    job = Job(OWNER)
    optimizer = job.sync.optimizer(torch.optim.SGD, lr=1.0)
    for number in (1, 2):
        job.compute()
        if any(group["params"] for group in optimizer.param_groups):
            optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            job.sync.publish()
            job.sync.stage_first_use(0)
            assert job.values == [-2.0 * number]
    assert job.arrived == [-4.0]


@pytest.mark.parametrize("own", [True, False])
def test_a_step_behind_an_evaluation_is_refused(*, own: bool) -> None:
    """Its update would reach no other rank."""
    job = Job(OWNER)
    sgd = torch.optim.SGD
    if own:
        groups = [*job.sync.optimizer_parameters(), {"params": [nn.Parameter(torch.ones(1))]}]
        optimizer = sgd(groups, lr=1.0)
    else:
        optimizer = job.sync.optimizer(sgd, lr=1.0)
    job.compute()
    job.sync.publish()
    steps = not own or bool(job.sync.main_parameters())
    words = outcome(optimizer.step)
    assert ("after publish(), or after an evaluation, which publishes" in words) == steps


def test_names_are_those_of_the_uncut_model() -> None:
    """Two stages that use one name for two parameters, and a tie."""
    torch.manual_seed(rank())
    own = f"own{rank()}"
    module = stage(weight=torch.randn(3), tie=torch.ones(2), **{own: torch.randn(2, 2)})
    sync = tied(module, "tie")
    seen: dict[str, nn.Parameter] = {}

    def note(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        assert name not in seen
        seen[name] = parameter
        return {}

    optimizer = sync.optimizer(torch.optim.SGD, group_of=note, lr=0.1, momentum=0.9)
    compute(sync, partial(give, module, **dict.fromkeys(("weight", "tie", own), 1.0)))
    optimizer.step()
    everything = ["0.weight", "1.weight", "own0", "own1", "tie"]
    assert sorted(seen) == everything
    assert {parameter.device.type for parameter in seen.values()} == {"meta"}
    assert seen["own1"].shape == (2, 2)
    state = optimizer.state_dict()
    assert [sorted(group["params"]) for group in state["param_groups"]] == [everything]
    assert sorted(state["state"]) == [f"{rank()}.weight", own, "tie"]


class Bad(nn.Identity):
    """No optimizer."""


def failing(_: str, __: nn.Parameter) -> dict[str, Any]:
    if rank() == 1:
        raise KeyError("no such layer")
    return {}


DISAGREE = "AgreementError: ranks disagree on the optimizer: "


def test_what_cannot_be_made_or_loaded_is_refused_on_all_ranks() -> None:
    sync = replicated(stage(w=(4,)))
    frozen = replicated(stage(w=nn.Parameter(torch.ones(2), requires_grad=False)))
    sgd = torch.optim.SGD
    for make, refused in (
        (lambda: sync.optimizer(sgd, group_of=lambda *_: {"lr": 0.1 + rank()}), DISAGREE),
        (
            lambda: sync.optimizer(sgd, group_of=failing, lr=0.1),
            "AgreementError: rank 1: KeyError: 'no such layer' (the optimizer: 1 of ",
        ),
        (lambda: sync.optimizer(Bad), f"PlanError: {__name__}:Bad made Bad, expected"),  # type: ignore[type-var]
        (
            lambda: sync.optimizer(sgd, lr=0.1, betas=(0.9, 0.9)),
            "TypeError: SGD.__init__() got an unexpected keyword argument 'betas'",
        ),
        (lambda: frozen.optimizer(sgd, lr=0.1), "PlanError: no parameter requires a gradient"),
    ):
        assert outcome(make).startswith(refused)
    sync.close()
    closed = outcome(lambda: sync.optimizer(sgd, lr=0.1))
    assert closed.startswith("StepError: this GradientSync is closed")
    # A state of something else is refused on all ranks.
    optimizer = replicated(stage(w=(4,))).optimizer(torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(stage(w=(4,)).parameters(), lr=0.1)
    other = replicated(stage(v=(4,))).optimizer(torch.optim.SGD, lr=0.1)
    for name, wrong in {"0": plain, "v": other}.items():
        refused = outcome(lambda wrong=wrong: optimizer.load_state_dict(wrong.state_dict()))  # type: ignore[misc]
        words = "PlanError: the optimizer's state is of another model: it has "
        assert refused.startswith(f"{words}['{name}']")
    both = replicated(stage(w=(4,), v=(4,)))
    one = both.optimizer(torch.optim.SGD, lr=0.1)
    by_name = lambda name, _: {"lr": {"w": 0.1, "v": 0.2}[name]}  # noqa: E731
    parts = both.optimizer(torch.optim.SGD, group_of=by_name, lr=0.1)
    refused = outcome(lambda: one.load_state_dict(parts.state_dict()))
    assert refused.startswith("PlanError: the optimizer's state has groups of [1, 1] parameters")
    _, _, adam = train(made("sharded"), 0)
    states = gathered(adam.state_dict())
    refused = outcome(lambda: adam.load_state_dict(states[1 - rank()]))
    assert refused.startswith("PlanError: the optimizer's state of '0.")
    # So is that of a run whose replicas train alone, and that of another run there.
    stepped: list[torch.optim.Optimizer] = []
    for handler in (DiLoCo(every=2), By("dp", REPLICATE, "mean")):
        module = small()
        sync = alone(module, handler)
        stepped.append(train((module, sync, sync.optimizer(torch.optim.AdamW)), 0)[2])
    for of_run, of_another in (stepped, reversed(stepped)):
        kept = [state["exp_avg"] for state in of_run.state.values()]
        refused = outcome(lambda o=of_run, w=of_another: o.load_state_dict(w.state_dict()))  # type: ignore[misc]
        assert refused.startswith("PlanError: the optimizer's state lacks ['a")
        assert [state["exp_avg"] for state in of_run.state.values()] == kept


@pytest.mark.parametrize("kind", FOUR_KINDS)
def test_a_step_at_a_wrong_time_is_refused(kind: str) -> None:
    """Issue 18, point 5: what can still go wrong by a forgotten call raises."""
    early = "StepError: optimizer.step() before the gradients of a step are there"
    again = "StepError: optimizer.step() a second time with the same gradients"
    job = module, sync, optimizer = made(kind)
    once = partial(compute, sync, partial(give, module, **drawn(rank(), 0)))
    assert outcome(optimizer.step).startswith(early)
    once()
    optimizer.zero_grad()
    with sync.accumulate():
        once()
    assert outcome(optimizer.step).startswith(early)
    once()
    optimizer.step()
    clipped = outcome(lambda: sync.clip_grad_norm_(1.0))
    assert clipped.startswith("StepError: clip_grad_norm_() after optimizer.step()")
    optimizer.zero_grad()
    assert outcome(optimizer.step).startswith(again)
    other = sync.optimizer(torch.optim.SGD, lr=0.0)
    once()
    optimizer.step()
    assert outcome(other.step).startswith(again)
    optimizer.zero_grad()
    if kind != "owner":  # there another rank has all main parameters
        raw = torch.optim.SGD([main.tensor for main in sync.main_parameters()])
        once()
        optimizer.step()
        assert outcome(raw.step).startswith(again)
        optimizer.zero_grad()
    train(job, 0)
    sync.wait_parameters()
    sync.check_replicas()


ELEMENTWISE: dict[str, dict[str, Any]] = {
    "ASGD": {}, "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {},
    "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rows_are_stepped_as_the_whole_is(name: str) -> None:
    kind = getattr(torch.optim, name)
    true, module = small(), small()
    optimizer = kind(true.parameters(), lr=0.05, **ELEMENTWISE[name])
    for number in range(3):
        for key in "ab":
            true.get_parameter(key).grad = drawn(0, number)[key] + drawn(1, number)[key]
        optimizer.step()
    sync = alone(module, By("dp", {"a": SHARD, "b": SHARD, "c": OWNER}), bucket_bytes=128)
    optimizer = kind(sync.optimizer_parameters(), lr=0.05, **ELEMENTWISE[name])
    for number in range(3):
        given = drawn(rank(), number)
        compute(sync, partial(give, module, a=given["a"], b=given["b"]))
        update(sync, optimizer)
    sync.wait_parameters()
    for key, p in true.named_parameters():
        found = module.get_parameter(key).detach()
        assert error(found, p.detach()) <= rounding(3 * 10)  # operations of three steps
    assert torch.equal(module.get_parameter("c"), small().get_parameter("c"))
    sync.close()


def test_all_ranks_have_the_same_parameter_groups_also_empty_ones() -> None:
    """Rank 1 steps rows of `w` alone: its group of `b` and `c` stays in its place."""
    module = stage(b=(3,), w=(40, 2), c=(3,), frozen=nn.Parameter(torch.ones(2), False))
    sync = alone(module, By("dp", {"b": OWNER, "w": SHARD, "c": OWNER}))

    def group_of(record: ParameterRecord) -> dict[str, Any]:
        return {"lr": 0.5, "weight_decay": 0.0} if record.name in "bc" else {"weight_decay": 0.1}

    asked = sync.optimizer_parameters(group_of)
    owned, rows = ([(3,), (3,)], [(48,)]) if rank() == 0 else ([], [(32,)])
    assert [{**g, "params": [tuple(p.shape) for p in g["params"]]} for g in asked] == [
        {"params": owned, "lr": 0.5, "weight_decay": 0.0},
        {"params": rows, "weight_decay": 0.1},
    ]
    assert [len(group["params"]) for group in sync.optimizer_parameters()] == [3 - 2 * rank()]


class Composite(torch.optim.Optimizer):
    """Steps matrices and all others each by an optimizer of their own."""

    elementwise = True
    fails = False

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        tensors = [t for group in self.param_groups for t in group["params"]]
        self.parts = [
            torch.optim.SGD([{"params": found}], lr=lr)
            for found in ([t for t in tensors if t.ndim > 1], [t for t in tensors if t.ndim == 1])
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
            if self.fails:
                raise ValueError("one part has stepped")


@pytest.mark.parametrize("kind", FOUR_KINDS)
def test_an_optimizer_of_optimizers_steps_as_one(kind: str) -> None:
    """The second of them was taken for another optimizer of the same parameters."""
    plain, sync = placed(kind)
    right: Any = (plain, sync, sync.optimizer(torch.optim.SGD, lr=0.1))
    module, sync = placed(kind)
    optimizer = sync.optimizer(Composite, lr=0.1)
    job = (module, sync, optimizer)
    assert values(train(job, *range(STEPS))) == values(train(right, *range(STEPS)))
    assert "a second time" in outcome(optimizer.step)
    assert "a second time" in outcome(right[2].step)
    once = partial(compute, sync, partial(give, module, **drawn(rank(), 0)))
    once()
    optimizer.fails = True
    assert outcome(optimizer.step) == "ValueError: one part has stepped"
    optimizer.zero_grad()
    with sync.accumulate():
        once()
        for part in optimizer.parts:
            if part.param_groups[0]["params"]:
                assert "before the gradients of a step are there" in outcome(part.step)


def test_an_optimizer_of_the_module_under_an_owner_is_refused() -> None:
    """Issue 18, point 5. It was said one step later, by prepare()."""
    module = stage(w=(4,))
    sync = alone(module, By("dp", OWNER))
    compute(sync, partial(give, module, w=1.0))
    refused = outcome(torch.optim.SGD(module.parameters(), lr=1.0).step)
    assert refused.startswith("StepError: some gradients live on other ranks")
    assert "make it by sync.optimizer()" in refused
    right = sync.optimizer(torch.optim.SGD, lr=1.0)
    compute(sync, partial(give, module, w=1.0))
    right.step()
    sync.wait_parameters()
    assert module.get_parameter("w").tolist() == [-2.0] * 4
