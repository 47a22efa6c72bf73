"""GradientSync and tensors: views, layouts, dtypes, norms, replicas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad.gradients.norm import local_term
from tests.support.gradients.cases import (
    NewStorage,
    give,
    grads,
    in_float32,
    outcome,
    rank,
    stage,
    step,
    tied,
)
from tests.support.ranked import gathered
from tests.support.rounding import rounding

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.ranks(2)
def test_steady_state_allocates_and_copies_nothing() -> None:
    last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    module = stage(a=(7,), image=last, t=torch.zeros(3, 5).t(), s=(), e=(0, 3), own=(4,))
    sync = tied(module, "a", "image", "t", "s", "e")
    pointers, nbytes = set(), []
    for number in range(7):
        with NewStorage() as counter:
            sync.prepare()
        sync.stage_last_backward(rank())
        torch.stack([(p * (rank() + 1.0)).sum() for p in module.parameters()]).sum().backward()
        with counter:
            sync.stage_final(rank())
            sync.finish()
        held = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        pointers.add(tuple(held[n].data_ptr() for n in ("a", "image", "t", "s")))
        nbytes.append(counter.nbytes)
        # "own" is on one rank alone, so nobody reduces it.
        assert (sync.statistics().copies, sync.statistics().early) == (0, 5 if number else 0)
        strides = [held[name].stride() for name in ("image", "t", "s")]
        assert strides == [(48, 1, 12, 3), (1, 5), ()]
        module.zero_grad(set_to_none=number % 2 == 0)
    assert len(pointers) == 1
    # After zeroing in place one read of the bucket: its least and largest value, and a bool.
    # The second step and the fourth compare copies.
    assert nbytes[2] == 17
    assert nbytes[4:] == [17, 0, 17]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_bytes": 0, "comm_streams": 3}, {"reduce_dtype": torch.float64}],
    ids=str,
)
def test_gradients_of_every_shape_and_layout(options: dict[str, Any]) -> None:
    """Strided, 0-d, empty and sparse gradients; create_graph; the empty alone in its bucket."""
    table = nn.Parameter(torch.zeros(4, 2))
    gaps = torch.zeros(2, 6)[:, ::2]
    module = stage(t=torch.zeros(2, 3).t(), s=(), e=(0, 3), table=table, gaps=gaps)
    sync = tied(module, *dict(module.named_parameters()), **options)
    sync.check_replicas()
    sync.prepare()
    values = torch.arange(6.0).reshape(3, 2)
    (module.get_parameter("t") * values).sum().backward(create_graph=True)
    give(module, s=2.0, e=1.0, gaps=torch.arange(6.0).reshape(2, 3))
    nn.functional.embedding(torch.tensor([rank(), 3]), table, sparse=True).sum().backward()
    sync.stage_final(rank())
    sync.finish()
    assert grads(module) == {
        "t": [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]],
        "s": 4.0,
        "e": [],
        "table": [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [2.0, 2.0]],
        "gaps": [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]],
    }
    squares = 2 * sum(x * x for x in (2, 4, 6, 8, 10)) + 16 + 4 + 8
    norm = sync.clip_grad_norm_(math.inf).item()
    assert norm == pytest.approx(math.sqrt(squares), rel=rounding(20))
    for p in module.parameters():
        assert p.grad is not None
        assert (p.grad.requires_grad, p.grad.layout) == (False, torch.strided)


@pytest.mark.ranks(2)
def test_parameters_may_be_replaced_but_not_by_something_else() -> None:
    """Parameters are looked up anew in every step."""

    def low(numel: int, *, is_high: bool = True) -> nn.Parameter:
        parameter = nn.Parameter(torch.ones(numel, dtype=BF16))
        if is_high:
            parameter.grad_dtype = FP32
        return parameter

    module = stage(a=torch.zeros(2, dtype=BF16), b=(1,))
    sync = tied(module, "a", "b")
    for is_high in (False, True):
        sync = tied(in_float32(module) if is_high else module, "a", "b")
        step(sync, module, a=1.0, b=1.0)
        module.a = low(2, is_high=is_high)
        module.zero_grad()
        assert step(sync, module, a=2.0, b=2.0) == {"a": [4.0, 4.0], "b": [4.0]}
        assert sync.parameter(sync.records()[0]) is module.a
        module.zero_grad()
    for wrong, found in ((low(3), "(3,)"), (nn.Parameter(torch.ones(2)), "torch.float32")):
        module.a = wrong
        refused = outcome(sync.prepare)
        assert refused.startswith("StepError: '0.a' was (2,)")
        assert found in refused
    module.a = low(2)
    module.get_parameter("b").requires_grad = False
    refused = outcome(sync.prepare)
    assert refused.startswith("StepError: '0.b' was (1,)")
    assert "requires_grad=False" in refused
    module.get_parameter("b").requires_grad = True
    assert step(sync, module, a=1.0, b=1.0) == {"a": [2.0, 2.0], "b": [2.0]}


@pytest.mark.ranks(4)
def test_replicas_start_equal_and_a_copy_that_differs_is_named() -> None:
    """All ranks begin with other values, but in the tie; then one bit of one copy flips."""
    tie = torch.randn(5)
    torch.manual_seed(rank())
    counts = nn.Parameter(torch.full((2,), rank()), requires_grad=False)
    module = stage(tie=tie, own=torch.randn(3), empty=(0,), counts=counts)
    flags = torch.tensor([bool(rank()), True])
    module.flags = nn.Parameter(flags, requires_grad=False)
    module.low = nn.Parameter(torch.randn(3, dtype=BF16))
    sync = tied(module, "tie")
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    first = gathered(values)[rank() // 2 * 2]
    assert all(torch.equal(first[name], value) for name, value in values.items())
    assert torch.equal(values["tie"], tie)
    sync.check_replicas()
    with torch.no_grad():
        if rank() == 3:
            module.get_parameter("tie").view(torch.int32)[2] ^= 1
        if rank() == 0:
            module.get_parameter("own")[:2] = module.get_parameter("own")[:2].flip(0)
    drift = outcome(sync.check_replicas)
    assert gathered(drift) == [drift] * 4
    assert drift.startswith("DriftError: copies of one parameter have drifted apart")
    where = "'0.tie' on ranks [3], of the copies on ranks [0, 1, 2, 3]"
    assert f": '0.own' over ranks [0, 1]; {where}. " in drift
    assert outcome(sync.check_replicas) == drift
    sync.synchronize_parameters()
    sync.check_replicas()
    for name, p in module.named_parameters():  # of two copies nobody knows the right one
        assert torch.equal(values[name], p) == (name != "own" or rank() >= 2), name


def test_the_norm_of_float64_gradients_and_of_mixed_ones() -> None:
    gradients = [torch.full((4,), 3.0, dtype=dtype) for dtype in (torch.float64, BF16)]
    for number in (1, 2):
        norm = local_term(gradients[:number], 2.0, device=torch.device("cpu"), dtype=FP32).sqrt()
        assert norm.dtype == FP32
        assert norm.item() == pytest.approx(6.0 * number**0.5)
