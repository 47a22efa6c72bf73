"""What communication hooks keep, and what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

from pipegrad import CommunicationHook, Placement, handlers
from pipegrad.errors import PluginError
from pipegrad.plan.buckets import Slot
from pipegrad.reduce import power_sgd
from pipegrad.reduce.ddp_hooks import TorchBucket
from pipegrad.reduce.reductions import StepBucket
from tests.support.gradients.cases import outcome, rank, stage, step
from tests.support.gradients.hooks import (
    HERE,
    POWER_SGD,
    Grads,
    alone,
    averaged,
    go_on,
    hooked,
    model,
    ours,
    same,
)
from tests.support.gradients.placements import By
from tests.support.gradients.placements import alone as placed

# What is kept.

SMALL: dict[str, Any] = {"bucket_bytes": 512, "comm_streams": 2}
HOOKS: dict[str, dict[str, Any]] = {
    "warm": POWER_SGD,
    "cold": {**POWER_SGD, "warm_start": False},
    "own": {"name": f"{HERE}:halving", "state": f"{HERE}:Half"},
    "batched": {**POWER_SGD, "name": "batched_powerSGD_hook", "wrapper": f"{HERE}:wrapped"},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_what_is_kept_goes_on_to_the_bit(hook: dict[str, Any]) -> None:
    whole, sync = ours(hook, 7, **SMALL)
    sync.load_state_dict({})
    assert sync.state_dict() == {}
    sync.close()
    module, state = model(), dict[str, Any]()
    late: Grads = []
    for steps in (range(1), range(1, 4), range(4, 7)):
        told = dict(reversed(hook.items())) if steps.start == 1 else hook  # in any order
        sync = averaged(module, told, **SMALL)
        sync.load_state_dict(state)
        assert bool(sync.state_dict()) == bool(steps.start)  # also before the first step
        late += go_on(sync, module, steps)
        state = sync.state_dict()
        sync.close()
    assert same(late, whole) == [True] * 7
    sync = averaged(model(), hook, **SMALL)
    sync.load_state_dict({**state, "handlers": {}})
    assert sync.state_dict() == {}
    sync.close()


CANNOT_GO_ON = "PlanError: handler 'data-parallel' cannot go on: ValueError("
RANK_1 = {**POWER_SGD, "matrix_approximation_rank": 1}
DISAGREE = "PlanError: ranks disagree on what handler 'data-parallel' goes on from; make them the"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("hook", "options", "change", "refused"),
    [
        (POWER_SGD, SMALL, dict, "PlanError: what handlers kept is of another plan"),
        (RANK_1, {}, dict, f'{CANNOT_GO_ON}"what is to be'),
        (None, {}, dict, f"{CANNOT_GO_ON}'it has no comm"),
        (POWER_SGD, {}, lambda _: {}, DISAGREE),
        (
            POWER_SGD,
            {},
            lambda state: {**state, "plan": "another"},
            "PlanError: rank 1: PlanError: w",
        ),
    ],
)
def test_what_was_kept_of_something_else_or_differs_is_refused(
    hook: Any, options: dict[str, Any], change: Any, refused: str
) -> None:
    _, sync = ours(POWER_SGD, 3)
    state = sync.state_dict()
    sync.close()
    sync = averaged(model(), hook, **options)
    said = outcome(lambda: sync.load_state_dict(change(state) if rank() else state))
    assert said.startswith(refused)
    assert sync.state_dict() == {}
    if change is not dict:
        sync.load_state_dict(state)  # ranks still are in one place
    sync.close()


@pytest.mark.ranks(2)
def test_a_state_inside_a_step_is_refused() -> None:
    sync = averaged(model(), "bf16_compress_hook")
    sync.prepare()
    assert outcome(sync.state_dict).startswith("StepError: state_dict() inside a step")
    sync.abort(ValueError("over"))
    sync.close()


# What is refused.


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_short", "gave torch.Size([1]), expected a tensor of 16 elements: the mean"),
        ("no_future", "expected a Future"),
        ("steps_parameters", "has gradients(), not parameters()"),
        ("fails_later", "a callback gave up"),
    ],
)
def test_a_hook_that_fails_ends_the_step_in_words(name: str, says: str) -> None:
    refused = outcome(lambda: alone(f"{HERE}:{name}", 1.0))
    assert refused.startswith("ReduceError: ")
    assert says in refused


@pytest.mark.ranks(2)
def test_a_hook_that_leaves_its_memory_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(state: Any, bucket: Any) -> Any:
        state.p_memory_dict.clear()
        return powerSGD_hook(state, bucket)

    monkeypatch.setattr(power_sgd, "powerSGD_hook", forgetful)
    refused = outcome(lambda: alone(POWER_SGD, 1.0, 1.0, 1.0, shape=(16, 16)))
    assert refused.startswith("ReduceError: ")
    assert "does not use the memory that pipegrad lays out for it" in refused


@pytest.mark.ranks(2)
def test_a_hook_of_two_syncs_ends_the_step() -> None:
    instance = handlers.resolve(hooked(POWER_SGD)).plugin
    modules = stage(w=(3,)), stage(w=(3,))
    step(placed(modules[0], instance), modules[0], w=1.0)
    sync = placed(modules[1], instance)
    refused = outcome(lambda: step(sync, modules[1], w=1.0))
    assert refused.startswith("ReduceError: ")
    assert "belongs to one GradientSync, and was given to two" in refused


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("bf16_compres_hook", "known, closest first: bf16_compress_hook, fp16_compress_hook"),
        ({"matrix_approximation_rank": 1}, "lacks 'name'"),
        ({"name": "powerSGD_hook", "rank": 1}, "has no option 'rank'; allowed, closest first"),
        ({"name": "bf16_compress_hook", "by": 1}, "has no option 'by'"),
        ({"name": f"{HERE}:scaled"}, "needs the option 'by'"),
        ({"name": f"{HERE}:halving", "state": f"{HERE}:Half", "group": 1}, "no option 'group'"),
        ({"name": "powerSGD_hook", "wrapper": "fp16"}, "no wrapper is called 'fp16'; known"),
        ({"name": "powerSGD_hook", "start_powerSGD_iter": 1}, "Expect `start_powerSGD_iter` > 1"),
        ({**POWER_SGD, "matrix_approximation_rank": 1.5}, "matrix_approximation_rank = 1.5"),
        ({**POWER_SGD, "matrix_approximation_rank": 0}, "matrix_approximation_rank = 0"),
        ({**POWER_SGD, "warm_start": 1}, "warm_start = 1"),
        ({**POWER_SGD, "random_seed": -1}, "random_seed = -1"),
        ({**POWER_SGD, "process_group": None}, "has no option 'process_group'"),
        (f"{HERE}:nothing", "cannot be imported"),
        (f"{HERE}:POWER", "expected a function"),
        (3, "the hook 3"),
    ],
)
def test_hooks_that_are_not_there_are_refused_by_name(hook: Any, says: str) -> None:
    with pytest.raises(PluginError) as caught:
        CommunicationHook(hook)
    assert says in str(caught.value)
    with pytest.raises(PluginError, match="plug-in 'data-parallel'"):
        handlers.resolve(hooked(hook))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("op", "placement"), [("sum", Placement.REPLICATE), ("mean", Placement.SHARD)]
)
def test_only_means_that_live_everywhere_have_hooks(op: Any, placement: Placement) -> None:
    handler = By("dp", placement, op)
    handler.hook = CommunicationHook("bf16_compress_hook")
    refused = outcome(lambda: placed(stage(w=(3,)), handler))
    assert refused.startswith("PlanError: handler 'tests.support.gradients.placements:By'")
    how = f"{placement.value}-{op}, all-reduce"
    assert f"reduces '0.w' by {how}: expected replicate-mean" in refused


def test_a_square_has_gradients_and_zeros() -> None:
    buffer = torch.full((8,), 9.0)
    slots = [Slot("a", 1, (2,), (1,)), Slot("b", 4, (1,), (1,))]
    square = power_sgd._Square(
        TorchBucket(StepBucket(buffer, 2, index=0, slots=slots, scattered=(6,)))
    )
    assert square.buffer().tolist() == [0, 9, 9, 0, 9, 0, 0, 0, 0]
    assert [tuple(g.shape) for g in square.gradients()] == [(3, 3)]


def test_torch_sees_gradients_as_they_lie_in_memory() -> None:
    buffer = torch.arange(20.0)
    slots = [Slot("t", 0, (2, 3), (1, 2)), Slot("s", 8, (), ()), Slot("none", 9, (0, 2), (2, 1))]
    bucket = StepBucket(buffer, 3, index=7, slots=slots, scattered=(17,))
    seen = TorchBucket(bucket)
    assert (seen.index(), seen.is_last()) == (7, True)
    assert bucket.flags.tolist() == [17.0, 18.0, 19.0]
    assert [g.tolist() for g in bucket.gradients] == [[[0, 2, 4], [1, 3, 5]], 8.0, []]
    assert [g.tolist() for g in seen.gradients()] == [[[0, 1], [2, 3], [4, 5]], [8]]
    seen.set_buffer(seen.buffer().to(torch.float16))
    assert {g.dtype for g in seen.gradients()} == {torch.float16}
    seen.take([seen.buffer() + 1])
    assert buffer.tolist() == [*range(1, 18), 17, 18, 19]
