"""sync.optimizer: an ordinary loop is complete with it, for every placement."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipegrad import GradientSync, Topology
from pipegrad.optimizer.param_sync import ParameterSync
from tests.support.gradients.cases import (
    Case,
    bits,
    give,
    on,
    outcome,
    rank,
    replicated,
    replies,
    stage,
    tied,
)
from tests.support.gradients.placements import OWNER, REPLICATE, SHARD, WHOLE, By, alone, compute
from tests.support.pipeline.schedulers import error
from tests.support.rounding import ADAM_EPS, rounding

TWO: list[Case] = []

two = replies(2, TWO)

STEPS, MAX_NORM = 4, 0.5
KINDS: dict[str, tuple[By, dict[str, Any]]] = {
    "replicate": (By("dp", REPLICATE, "mean"), {}),
    "owner": (By("dp", OWNER, "mean"), {}),
    "sharded": (By("dp", SHARD, "mean"), {}),
    "whole": (By("dp", WHOLE, "mean"), {}),
    "whole copies": (By("dp", WHOLE, "mean"), {"master_dtype": torch.float64}),
    "mixed": (By("dp", {"a": SHARD, "b": OWNER, "c": REPLICATE}, "mean"), {}),
    "copies": (By("dp", REPLICATE, "mean"), {"master_dtype": torch.float64}),
    "sharded copies": (By("dp", SHARD, "mean"), {"master_dtype": torch.float64}),
}


def small() -> nn.Module:
    torch.manual_seed(5)
    return stage(a=torch.randn(5, 3), b=torch.randn(67), c=torch.randn(7))


def drawn(at: int, number: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(10 * number + at)
    return {n: torch.randn(p.shape, generator=made) for n, p in small().named_parameters()}


def group_of(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Decays matrices, and has another rate for one parameter."""
    options = {} if parameter.ndim > 1 else {"weight_decay": 0.0}
    return {**options, "lr": 0.02} if name == "c" else options


OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "eps": ADAM_EPS}


def made(kind: str) -> tuple[nn.Module, GradientSync, torch.optim.Optimizer]:
    handler, options = KINDS[kind]
    module = small()
    sync = alone(module, handler, bucket_bytes=128, **options)
    return module, sync, sync.optimizer(torch.optim.AdamW, group_of=group_of, **OPTIONS)


def train(
    module: nn.Module, sync: GradientSync, optimizer: torch.optim.Optimizer, numbers: range
) -> None:
    """The loop of the documentation, without any duty behind the optimizer's step."""
    for number in numbers:
        compute(sync, partial(give, module, **drawn(rank(), number)))
        sync.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def values(module: nn.Module) -> dict[str, Any]:
    return {name: bits(p) for name, p in module.named_parameters()}


@on(TWO)
def loops() -> Any:
    found = {}
    for kind, (handler, options) in KINDS.items():
        module, sync, optimizer = made(kind)
        with mock.patch.object(ParameterSync, "send", autospec=True, side_effect=_send) as sent:
            train(module, sync, optimizer, range(STEPS))
        sync.wait_parameters()
        same = outcome(sync.check_replicas)
        own = {name: p.detach().clone() for name, p in module.named_parameters()}
        # The loop of before: its optimizer does not publish, so the caller does.
        before = small()
        sync = alone(before, handler, bucket_bytes=128, **options)
        groups = sync.optimizer_parameters(
            lambda record: group_of(record.name, record_tensor(record))
        )
        optimizer = torch.optim.AdamW(groups, **OPTIONS)
        for number in range(STEPS):
            train(before, sync, optimizer, range(number, number + 1))
            sync.publish()
        sync.wait_parameters()
        found[kind] = (sent.call_count, same, own, values(module) == values(before))
    return found


_send = ParameterSync.send


def record_tensor(record: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(record.shape))


def of_one_process() -> dict[str, torch.Tensor]:
    module = small()
    step_alone(module, torch.optim.AdamW(groups_of(module), **OPTIONS), range(STEPS))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p], **group_of(n, p)} for n, p in module.named_parameters()]


def step_alone(module: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        for name, p in module.named_parameters():
            p.grad = (drawn(0, number)[name] + drawn(1, number)[name]) / 2
        nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_without_duties_trains_as_one_process(two: list[dict[str, Any]], kind: str) -> None:
    """Issue 18, point 5. Also bit by bit as with publish(), which is called once a step."""
    right = of_one_process()
    for reply in two:
        sends, same, own, as_before = reply["loops"][kind]
        assert sends == (0 if kind == "replicate" else STEPS)
        assert same == "None"
        assert as_before
        for name, value in right.items():
            # Sums of 89 squares in the norm, about ten operations a step.
            assert error(own[name], value) <= rounding(STEPS * 10 * 9), name


@on(TWO)
def again() -> Any:
    """publish() behind the step, twice, and a hook of the user before it."""
    found = {}
    for kind in KINDS:
        module, sync, optimizer = made(kind)
        mains = [main.tensor for main in sync.main_parameters()]

        def clamp(*_: object, mains: list[nn.Parameter] = mains) -> None:
            with torch.no_grad():
                for tensor in mains:
                    tensor.clamp_(-0.5, 0.5)

        optimizer.register_step_post_hook(clamp)
        with mock.patch.object(ParameterSync, "send", autospec=True, side_effect=_send) as sent:
            for number in range(2):
                train(module, sync, optimizer, range(number, number + 1))
                sync.publish()
                sync.publish()
        sync.wait_parameters()
        largest = max(float(p.abs().max()) for p in module.parameters())
        found[kind] = (sent.call_count, largest, outcome(sync.check_replicas))
    return found


def test_publish_behind_it_does_nothing_and_a_hook_comes_before(two: list[dict[str, Any]]) -> None:
    """Issue 18, point 5. What the user's hook changes is what other ranks get."""
    for reply in two:
        for kind, (sends, largest, same) in reply["again"].items():
            assert sends == (0 if kind == "replicate" else 2), kind
            assert (largest, same) == (0.5, "None"), kind


@on(TWO)
def guarded() -> Any:
    """A rank whose optimizer has nothing does not call it; then all evaluate, or go on."""
    found = []
    for evaluates in (True, False):
        module = stage(w=(40,))
        sync = alone(module, By("dp", OWNER))
        optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
        for _ in range(2):
            compute(sync, partial(give, module, w=1.0))
            if any(group["params"] for group in optimizer.param_groups):
                optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                sync.publish_if_due()
                sync.stage_first_use(0)
                found.append(module.get_parameter("w").unique().tolist())
        sync.wait_parameters()
        found.append(module.get_parameter("w").unique().tolist())
    return found


def test_a_rank_that_steps_nothing_may_leave_its_step_out(two: list[dict[str, Any]]) -> None:
    """One rank had published and the other found nothing to publish: an evaluation hung."""
    assert [reply["guarded"] for reply in two] == [[[-2.0], [-4.0], [-4.0], [-4.0]]] * 2


@on(TWO)
def skipped() -> Any:
    """A batch whose step is left out, as a GradScaler does."""
    found = []
    for kind in ("owner", "sharded", "copies"):
        module, sync, optimizer = made(kind)
        begun = values(module)
        compute(sync, partial(give, module, **drawn(rank(), 0)))
        optimizer.zero_grad()
        train(module, sync, optimizer, range(1, 2))
        sync.wait_parameters()
        found.append((values(module) != begun, outcome(sync.check_replicas)))
    return found


def test_a_step_may_be_left_out(two: list[dict[str, Any]]) -> None:
    assert [reply["skipped"] for reply in two] == [[(True, "None")] * 3] * 2


# --- state


def rounded(state: Mapping[str, Any]) -> Any:
    """Returns the names and shapes of a state_dict."""
    return (
        {n: {k: tuple(v.shape) for k, v in found.items()} for n, found in state["state"].items()},
        [(group["params"], group["lr"]) for group in state["param_groups"]],
    )


@on(TWO)
def states() -> Any:
    """Stops after two steps, goes on in another model, by torch.save and torch.load."""
    found = {}
    for kind in KINDS:
        module, sync, optimizer = made(kind)
        train(module, sync, optimizer, range(STEPS))
        sync.wait_parameters()
        right = values(module)
        module, sync, optimizer = made(kind)
        train(module, sync, optimizer, range(2))
        sync.wait_parameters()
        file = io.BytesIO()
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        shapes = rounded(copy.deepcopy(optimizer.state_dict()))
        file.seek(0)
        saved = torch.load(file)
        module, sync, optimizer = made(kind)
        module.load_state_dict(saved["model"])
        sync.synchronize_parameters()
        optimizer.load_state_dict(saved["optimizer"])
        train(module, sync, optimizer, range(2, STEPS))
        sync.wait_parameters()
        found[kind] = (values(module) == right, shapes)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_by_names_goes_on_with_the_same_bits(two: list[dict[str, Any]], kind: str) -> None:
    """Issue 18, point 5."""
    stepped = set()
    for reply in two:
        same, (shapes, groups) = reply["states"][kind]
        assert same
        assert groups == [(["a"], 0.05), (["b"], 0.05), (["c"], 0.02)]
        stepped |= shapes.keys()
        for name, found in shapes.items():
            shape = tuple(small().get_parameter(name).shape)
            numel = torch.Size(shape).numel()
            is_shard = "sharded" in kind or (kind, name) == ("mixed", "a")
            expected = {"exp_avg": (numel,) if is_shard else shape, "step": ()}
            expected |= {"exp_avg_sq": expected["exp_avg"]}
            expected |= {"master": expected["exp_avg"]} if "copies" in kind else {}
            assert found == expected, name
    assert stepped == {"a", "b", "c"}


@on(TWO)
def across() -> Any:
    """Written by torch.distributed.checkpoint in one placement, read whole in another."""
    [folder] = [Path(tempfile.mkdtemp())] if rank() == 0 else [None]
    shared: list[Any] = [folder]
    dist.broadcast_object_list(shared, src=0)
    folder, found = shared[0], {}
    assert folder is not None
    for kind in ("replicate", "owner", "sharded", "mixed"):
        module, sync, optimizer = made(kind)
        train(module, sync, optimizer, range(2))
        sync.wait_parameters()
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        save(state, checkpoint_id=folder / kind)
        if rank() == 0:
            dcp_to_torch_save(folder / kind, folder / f"{kind}.pt")
        dist.barrier()
        whole = torch.load(folder / f"{kind}.pt")
        train(module, sync, optimizer, range(2, STEPS))
        sync.wait_parameters()
        right = {name: p.detach().clone() for name, p in module.named_parameters()}
        for other in ("replicate", "sharded", "mixed"):
            module, sync, optimizer = made(other)
            module.load_state_dict(whole["model"])
            sync.synchronize_parameters()
            optimizer.load_state_dict(copy.deepcopy(whole["optimizer"]))  # which it would change
            train(module, sync, optimizer, range(2, STEPS))
            sync.wait_parameters()
            found[kind, other] = max(
                error(p.detach(), right[name]) for name, p in module.named_parameters()
            )
        # In place, into the state of an optimizer that has stepped.
        module, sync, optimizer = made(kind)
        train(module, sync, optimizer, range(7, 8))
        sync.wait_parameters()
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        load(state, checkpoint_id=folder / kind)
        module.load_state_dict(state["model"])
        sync.synchronize_parameters()
        optimizer.load_state_dict(state["optimizer"])
        train(module, sync, optimizer, range(2, STEPS))
        sync.wait_parameters()
        found[kind, "in place"] = float(
            max((p - right[n]).abs().max() for n, p in module.named_parameters())
        )
    return found


def test_a_state_is_read_in_another_placement(two: list[dict[str, Any]]) -> None:
    """Issue 18, point 5. A chunk each, so no rank writes over another one's shard."""
    for reply in two:
        for kinds, largest in reply["across"].items():
            # The norm of a clip adds its squares in another order in another placement.
            assert largest <= (0.0 if kinds[1] == "in place" else rounding(2 * 10 * 9)), kinds


@on(TWO)
def from_one_process() -> Any:
    """Two steps in one process, the others on ranks."""
    begun, found = small(), {}
    alone_made = torch.optim.AdamW(groups_of(begun), **OPTIONS)
    step_alone(begun, alone_made, range(2))
    saved = get_optimizer_state_dict(begun, alone_made)
    for kind in KINDS:
        module, sync, optimizer = made(kind)
        module.load_state_dict(begun.state_dict())
        sync.synchronize_parameters()
        optimizer.load_state_dict(copy.deepcopy(saved))
        train(module, sync, optimizer, range(2, STEPS))
        sync.wait_parameters()
        found[kind] = {name: p.detach().clone() for name, p in module.named_parameters()}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_one_process_is_read_in_any_placement(
    two: list[dict[str, Any]], kind: str
) -> None:
    right = of_one_process()
    for reply in two:
        for name, value in right.items():
            found = reply["from_one_process"][kind][name]
            assert error(found, value) <= rounding(STEPS * 10 * 9), name


@on(TWO)
def names() -> Any:
    """Two stages that use one name for two parameters, and a tie."""
    torch.manual_seed(rank())
    module = stage(weight=torch.randn(3), tie=torch.ones(2), **{f"own{rank()}": torch.randn(2, 2)})
    sync = tied(module, "tie")
    seen: list[Any] = []

    def note(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        seen.append((name, tuple(parameter.shape), parameter.device.type))
        return {}

    optimizer = sync.optimizer(torch.optim.SGD, group_of=note, lr=0.1, momentum=0.9)
    compute(sync, partial(give, module, weight=1.0, tie=1.0, **{f"own{rank()}": 1.0}))
    optimizer.step()
    state = optimizer.state_dict()
    return seen, [group["params"] for group in state["param_groups"]], sorted(state["state"])


def test_names_are_those_of_the_uncut_model(two: list[dict[str, Any]]) -> None:
    everything = ["0.weight", "1.weight", "own0", "own1", "tie"]
    own = [["0.weight", "own0", "tie"], ["1.weight", "own1", "tie"]]
    for reply, mine in zip(two, own, strict=True):
        seen, groups, state = reply["names"]
        assert sorted(name for name, _, _ in seen) == everything
        assert {device for *_, device in seen} == {"meta"}
        assert {name: shape for name, shape, _ in seen}["own1"] == (2, 2)
        assert list(map(sorted, groups)) == [everything]
        assert state == mine


# --- mistakes


class Bad(nn.Module):
    """No optimizer."""

    def __init__(self, params: Any, **_: Any) -> None:
        super().__init__()


def differing(name: str, _: nn.Parameter) -> dict[str, Any]:
    return {"lr": 0.1 + rank()} if name == "w" else {}


def failing(_: str, __: nn.Parameter) -> dict[str, Any]:
    if rank() == 1:
        raise KeyError("no such layer")
    return {}


@on(TWO)
def wrong() -> Any:
    """What cannot be made, and why: the same on all ranks."""
    sync = replicated(stage(w=(4,)))
    sharded = alone(stage(w=(40,)), By("dp", SHARD))
    frozen = replicated(stage(w=nn.Parameter(torch.ones(2), requires_grad=False)))
    sgd = torch.optim.SGD
    found = {
        "options": outcome(lambda: sync.optimizer(sgd, lr=0.1 + rank())),
        "groups": outcome(lambda: sync.optimizer(sgd, group_of=differing, lr=0.1)),
        "one rank": outcome(lambda: sync.optimizer(sgd, group_of=failing, lr=0.1)),
        "no optimizer": outcome(lambda: sync.optimizer(Bad)),  # type: ignore[type-var]
        "unknown": outcome(lambda: sync.optimizer(sgd, lr=0.1, betas=(0.9, 0.9))),
        "shards": outcome(lambda: sharded.optimizer(torch.optim.Adafactor)),
        "frozen": outcome(lambda: frozen.optimizer(sgd, lr=0.1)),
    }
    optimizer = sync.optimizer(sgd, lr=0.1)
    plain = torch.optim.SGD(stage(w=(4,)).parameters(), lr=0.1)
    found["numbers"] = outcome(lambda: optimizer.load_state_dict(plain.state_dict()))
    other = replicated(stage(v=(4,))).optimizer(sgd, lr=0.1)
    found["another model"] = outcome(lambda: optimizer.load_state_dict(other.state_dict()))
    both = replicated(stage(w=(4,), v=(4,)))
    one, parts = both.optimizer(sgd, lr=0.1), both.optimizer(sgd, lr=0.1, group_of=_by_name)
    found["other groups"] = outcome(lambda: one.load_state_dict(parts.state_dict()))
    module, sync, adam = made("sharded")
    train(module, sync, adam, range(1))
    states: list[Any] = [None] * 2
    dist.all_gather_object(states, adam.state_dict())
    found["another rank"] = outcome(lambda: adam.load_state_dict(states[1 - rank()]))
    sync.close()
    found["closed"] = outcome(lambda: sync.optimizer(sgd, lr=0.1))
    return found


def _by_name(name: str, _: nn.Parameter) -> dict[str, Any]:
    return {"lr": {"w": 0.1, "v": 0.2}[name]}


@pytest.mark.parametrize(
    ("mistake", "words"),
    {
        "options": "AgreementError: ranks disagree on the optimizer; make them the same",
        "groups": "AgreementError: ranks disagree on the optimizer; make them the same",
        "one rank": "AgreementError: rank 1: KeyError: 'no such layer' (the optimizer: 1 of ",
        "no optimizer": "PlanError: tests.ranks.gradients.test_optimizer:Bad made Bad, expected",
        "unknown": "TypeError: SGD.__init__() got an unexpected keyword argument 'betas'",
        "shards": "PlanError: Adafactor cannot step sharded parameters",
        "frozen": "PlanError: no parameter requires a gradient",
        "numbers": "PlanError: the optimizer's state is of another model: it has ['0']",
        "another model": "PlanError: the optimizer's state is of another model: it has ['v']",
        "other groups": "PlanError: the optimizer's state has groups of [1, 1] parameters",
        "another rank": "PlanError: the optimizer's state of '0.",
        "closed": "StepError: this GradientSync is closed",
    }.items(),
)
def test_what_cannot_be_made_or_loaded_is_said_on_all_ranks(
    two: list[dict[str, Any]], mistake: str, words: str
) -> None:
    assert [reply["wrong"][mistake][: len(words)] for reply in two] == [words] * 2


@on(TWO)
def untimely() -> Any:
    """Steps at a wrong time; each is refused, and the loop goes on behind it."""
    found: dict[str, Any] = {}
    for kind in ("replicate", "owner", "sharded", "copies"):
        module, sync, optimizer = made(kind)

        def once(module: nn.Module = module, sync: GradientSync = sync) -> None:
            compute(sync, partial(give, module, **drawn(rank(), 0)))

        said = {"before": outcome(optimizer.step)}
        once()
        optimizer.zero_grad()
        with sync.accumulate():
            once()
        said["accumulating"] = outcome(optimizer.step)
        once()
        optimizer.step()
        said["clip"] = outcome(lambda sync=sync: sync.clip_grad_norm_(1.0))  # type: ignore[misc]
        optimizer.zero_grad()
        said["twice"] = outcome(optimizer.step)
        other = sync.optimizer(torch.optim.SGD, lr=0.0)
        once()
        optimizer.step()
        said["two"] = outcome(other.step)
        optimizer.zero_grad()
        if kind != "owner":  # there another rank has all main parameters
            raw = torch.optim.SGD([main.tensor for main in sync.main_parameters()])
            once()
            optimizer.step()
            said["raw"] = outcome(raw.step)
            optimizer.zero_grad()
        train(module, sync, optimizer, range(1))
        sync.wait_parameters()
        found[kind] = (said, outcome(sync.check_replicas))
    return found


@pytest.mark.parametrize("kind", ["replicate", "owner", "sharded", "copies"])
def test_a_step_at_a_wrong_time_is_refused(two: list[dict[str, Any]], kind: str) -> None:
    """Issue 18, point 5: what can still go wrong by a forgotten call raises."""
    early = "StepError: optimizer.step() before the gradients of a step are there"
    both = "StepError: two optimizers step the same parameters with the same gradients"
    for reply in two:
        said, same = reply["untimely"][kind]
        assert said["before"].startswith(early)
        assert said["accumulating"].startswith(early)
        assert said["clip"].startswith("StepError: clip_grad_norm_() after optimizer.step()")
        assert said["twice"].startswith("StepError: optimizer.step() a second time")
        assert said["two"].startswith(both)
        assert said.get("raw", both).startswith(both)
        assert same == "None"


class Composite(torch.optim.Optimizer):
    """Steps matrices and all others each by an optimizer of their own."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        tensors = [t for group in self.param_groups for t in group["params"]]
        self.parts = [
            torch.optim.SGD([{"params": found}], lr=lr)
            for found in ([t for t in tensors if t.ndim > 1], [t for t in tensors if t.ndim == 1])
        ]
        self.fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
            if self.fails:
                raise ValueError("one part has stepped")


@on(TWO)
def composite() -> Any:
    """Optimizers within an optimizer; its second step; others behind a step of it that failed."""
    found = {}
    for kind in ("replicate", "owner", "sharded", "copies"):
        trained, said = [], list[str]()
        handler, options = KINDS[kind]
        for make in (torch.optim.SGD, Composite):
            module = small()
            sync = alone(module, handler, bucket_bytes=128, **options)
            optimizer: torch.optim.Optimizer = sync.optimizer(make, lr=0.1)
            train(module, sync, optimizer, range(STEPS))
            sync.wait_parameters()
            trained.append(values(module))
            said.append(outcome(optimizer.step))
            if isinstance(optimizer, Composite):
                compute(sync, partial(give, module, **drawn(rank(), 0)))
                optimizer.fails = True
                said.append(outcome(optimizer.step))
                optimizer.zero_grad()
                with sync.accumulate():
                    compute(sync, partial(give, module, **drawn(rank(), 0)))
                    own = [part for part in optimizer.parts if part.param_groups[0]["params"]]
                    said += [outcome(part.step) for part in own]
        found[kind] = (trained, said)
    return found


def test_an_optimizer_of_optimizers_steps_as_one(two: list[dict[str, Any]]) -> None:
    """The second of them was taken for another optimizer of the same parameters."""
    for reply in two:
        for kind, ((right, trained), said) in reply["composite"].items():
            assert trained == right, kind
            assert all("a second time" in each for each in said[:2]), kind
            assert said[2] == "ValueError: one part has stepped"
            assert all("before the gradients of a step are there" in each for each in said[3:])


@on(TWO)
def of_module() -> Any:
    """The module's own parameters under an owner, without sync.optimizer."""
    module = stage(w=(4,))
    sync = alone(module, By("dp", OWNER))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    compute(sync, partial(give, module, w=1.0))
    said = outcome(optimizer.step)
    right = sync.optimizer(torch.optim.SGD, lr=1.0)
    compute(sync, partial(give, module, w=1.0))
    right.step()
    sync.wait_parameters()
    return said, module.get_parameter("w").tolist()


def test_an_optimizer_of_the_module_under_an_owner_is_refused(two: list[dict[str, Any]]) -> None:
    """Issue 18, point 5. It was said one step later, by prepare()."""
    for reply in two:
        said, stepped = reply["of_module"]
        assert said.startswith("StepError: some gradients live on other ranks")
        assert "make it by sync.optimizer()" in said
        assert stepped == [-2.0] * 4


def test_one_rank_needs_no_process_group() -> None:
    module = stage(w=(2,))
    topology = Topology.build(axes=(("pp", 1), ("dp", 1)))
    sync = GradientSync({0: module}, topology, handlers=[])
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    compute(sync, partial(give, module, w=1.0))
    optimizer.step()
    assert module.get_parameter("w").tolist() == [-1.0] * 2
    assert optimizer.state_dict()["param_groups"][0]["params"] == ["w"]
