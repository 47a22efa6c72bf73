"""What communication hooks keep, and what is refused of them."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

from pipegrad import CommunicationHook, GradientSync, Placement, Topology, handlers
from pipegrad.errors import PlanError, PluginError, ReduceError
from pipegrad.plan.buckets import Slot
from pipegrad.reduce import power_sgd
from pipegrad.reduce.ddp_hooks import TorchBucket
from pipegrad.reduce.reductions import StepBucket
from tests.support.gradients.cases import Case, on, outcome, rank, replies, stage, step
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

TWO: list[Case] = []
two = replies(2, TWO)


# What is kept.


@on(TWO)
def continued() -> Any:
    found: dict[str, Any] = {}
    state: dict[str, Any] = {}
    comm_streams: dict[str, Any] = {"bucket_bytes": 512, "comm_streams": 2}
    own = {"name": f"{HERE}:halving", "state": f"{HERE}:Half"}
    cold = {**POWER_SGD, "warm_start": False}
    batched = {**POWER_SGD, "name": "batched_powerSGD_hook", "wrapper": f"{HERE}:wrapped"}
    for name, hook in {"warm": POWER_SGD, "cold": cold, "own": own, "batched": batched}.items():
        whole, sync = ours(hook, 7, **comm_streams)
        sync.close()
        module = model()
        late: Grads = []
        for steps in (range(1), range(1, 4), range(4, 7)):
            told = dict(reversed(hook.items())) if steps.start == 1 else hook  # in any order
            sync = averaged(module, told, **comm_streams)
            sync.load_state_dict(state if steps.start else {})
            assert bool(sync.state_dict()) == bool(steps.start)  # also before the first step
            late += go_on(sync, module, steps)
            state = sync.state_dict()
            sync.close()
        found[name] = same(late, whole)
        _, sync = ours(hook, 4, **comm_streams)
        sync.load_state_dict({})
        assert sync.state_dict() == {}
        sync.close()
    sync = averaged(model(), POWER_SGD, **comm_streams)
    sync.load_state_dict({**state, "handlers": {}})
    found["nothing"] = sync.state_dict()
    sync.close()
    return found


def test_what_is_kept_goes_on_to_the_bit(two: Any) -> None:
    for reply in two:
        found = dict(reply["continued"])
        assert found.pop("nothing") == {}
        assert found == dict.fromkeys(("warm", "cold", "own", "batched"), [True] * 7)


@on(TWO)
def of_something_else() -> Any:
    _, sync = ours(POWER_SGD, 3)
    state = sync.state_dict()
    sync.close()
    found = {}
    for name, hook, options in (
        ("buckets", POWER_SGD, {"bucket_bytes": 512}),
        ("rank", {**POWER_SGD, "matrix_approximation_rank": 1}, {}),
        ("none", None, {}),
    ):
        sync = averaged(model(), hook, **options)
        said = outcome(partial(sync.load_state_dict, state))
        found[name] = said, sync.state_dict()
        sync.close()
    own = {**state, "plan": "another"} if rank() else state
    for name, mine in {"one afresh": {} if rank() else state, "one refused": own}.items():
        sync = averaged(model(), POWER_SGD)
        said = outcome(partial(sync.load_state_dict, mine))
        found[name] = said, sync.state_dict()
        sync.load_state_dict(state)  # ranks still are in one place
        sync.close()
    sync = averaged(model(), "bf16_compress_hook")
    sync.prepare()
    found["open"] = outcome(sync.state_dict), {}
    sync.abort(ValueError("over"))
    sync.close()
    return found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("buckets", "PlanError: what handlers kept is of another plan"),
        ("rank", "PlanError: handler 'data-parallel' cannot go on: ValueError(\"what is to be"),
        ("none", "PlanError: handler 'data-parallel' cannot go on: ValueError('it has no comm"),
        (
            "one afresh",
            "PlanError: ranks disagree on what handler 'data-parallel' goes on from; make them the",
        ),
        (
            "one refused",
            "PlanError: rank 1: PlanError: w",
        ),
        ("open", "StepError: state_dict() inside a step"),
    ],
)
def test_what_was_kept_of_something_else_is_refused(two: Any, name: str, says: str) -> None:
    for reply in two:
        said, kept = reply["of_something_else"][name]
        assert said.startswith(says)
        assert kept == {}


# What is refused.


@on(TWO)
def failing() -> Any:
    found = {}
    for name in ("too_short", "no_future", "steps_parameters", "fails_later"):
        found[name] = outcome(partial(alone, f"{HERE}:{name}", 1.0))

    def forgetful(state: Any, bucket: Any) -> Any:
        state.p_memory_dict.clear()
        return powerSGD_hook(state, bucket)

    with mock.patch.object(power_sgd, "powerSGD_hook", forgetful):
        found["layout"] = outcome(partial(alone, POWER_SGD, 1.0, 1.0, 1.0, shape=(16, 16)))
    instance = handlers.resolve(hooked(POWER_SGD)).plugin
    for _ in range(2):
        module = stage(w=(3,))
        sync = GradientSync({0: module}, Topology.create(pipeline=1), handlers=[instance])
        found["twice"] = outcome(partial(step, sync, module, w=1.0))
    return found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_short", "gave torch.Size([1]), expected a tensor of 16 elements: the mean"),
        ("no_future", "expected a Future"),
        ("steps_parameters", "has gradients(), not parameters()"),
        ("fails_later", "a callback gave up"),
        ("layout", "does not use the memory that pipegrad lays out for it"),
        ("twice", "belongs to one GradientSync, and was given to two"),
    ],
)
def test_a_hook_that_fails_ends_the_step_in_words(two: Any, name: str, says: str) -> None:
    for reply in two:
        said = reply["failing"][name]
        assert said.startswith(ReduceError.__name__)
        assert says in said


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


@on(TWO)
def placed() -> Any:
    def hooks(op: Any, placement: Placement) -> GradientSync:
        handler = By("dp", placement, op)
        handler.hook = CommunicationHook("bf16_compress_hook")
        return GradientSync({0: stage(w=(3,))}, Topology.create(pipeline=1), handlers=[handler])

    return [
        outcome(partial(hooks, "sum", Placement.REPLICATE)),
        outcome(partial(hooks, "mean", Placement.SHARD)),
    ]


def test_only_means_that_live_everywhere_have_hooks(two: Any) -> None:
    for reply in two:
        for said, how in zip(reply["placed"], ("replicate-sum", "shard-mean"), strict=True):
            assert said.startswith(
                f"{PlanError.__name__}: handler 'tests.support.gradients.placements:By'"
            )
            assert f"reduces '0.w' by {how}, all-reduce: expected replicate-mean" in said


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
