"""GradientSync on hand-made gradients: values, verbs in order, tensors of any kind, copies."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pipegrad import Bucketer, GradientSync, Topology, find_tied
from pipegrad.gradients.norm import local_term
from pipegrad_handlers.data_parallel import DataParallel
from tests.support.gradients.cases import (
    SHARED,
    NewStorage,
    give,
    grads,
    in_float32,
    outcome,
    rank,
    replicated,
    scheduled,
    stage,
    step,
    tied,
)
from tests.support.gradients.placements import compute
from tests.support.ranked import gathered
from tests.support.rounding import rounding


@pytest.mark.ranks(2)
def test_ties_registered_in_another_order_get_their_own_sums() -> None:
    """By local order both a and b would be 101 (or 1001) on one of the ranks."""
    module = stage(**dict.fromkeys(("a", "b") if rank() == 0 else ("b", "a"), (1,)))
    sync = tied(module, "a", "b")
    here = 10.0 if rank() else 1.0
    assert step(sync, module, a=here, b=100 * here) == {"a": [11.0], "b": [1100.0]}
    assert len(sync.plan.launches) == 1


@pytest.mark.ranks(2)
def test_a_reduced_or_late_gradient_is_refused_and_a_zeroed_one_accepted() -> None:
    """After zero_grad(set_to_none=False) a gradient nobody adds to stays zero."""
    module = stage(a=(2,), b=(2,))
    sync = tied(module, "a", "b")
    assert step(sync, module, a=1.0) == {"a": [2.0, 2.0], "b": None}
    sync.clip_grad_norm_(1e-3)
    refused = outcome(sync.prepare)
    assert refused.startswith("StepError: the gradient of '0.a' is already reduced")
    assert "sync.accumulate()" in refused
    module.zero_grad(set_to_none=False)
    assert step(sync, module, b=3.0) == {"a": [0.0, 0.0], "b": [6.0, 6.0]}
    for p in module.parameters():
        p.grad = torch.ones_like(p)  # the user's own, not yet reduced
    assert step(sync, module, a=1.0) == {"a": [4.0, 4.0], "b": [2.0, 2.0]}
    # A gradient that changes after it is final is an error. A backward after stage_final changes
    # what has left.
    module = stage(a=(1,))
    sync = tied(module, "a", handlers=["noop"])
    sync.prepare()
    give(module, a=1.0)
    sync.stage_final(rank())
    give(module, a=1.0)
    refused = "StepError: autograd added to the gradient of '0.a' after it was"
    assert outcome(sync.finish).startswith(refused)
    sync.prepare()  # what it changed is dropped, and all go on


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": torch.float64}], ids=str)
def test_accumulated_steps_only_add_up_and_are_divided_each(options: dict[str, Any]) -> None:
    """Of both ranks 1 + 2 + 4 + 8, by 1, and 16, by 2."""
    module = stage(a=(1,))
    sync = tied(module, "a", **options)
    with sync.accumulate():
        step(sync, module, a=1.0)
        with sync.accumulate():
            step(sync, module, a=2.0)
        assert step(sync, module, a=4.0) == {"a": [7.0]}
    with contextlib.suppress(KeyError), sync.accumulate():
        sync.prepare()
        give(module, a=8.0)
        raise KeyError
    assert sync.statistics().steps == 0
    assert step(sync, module, divisor=2.0, a=16.0) == {"a": [46.0]}
    module.zero_grad()
    assert step(sync, module, a=1.0) == {"a": [2.0]}


@pytest.mark.ranks(2)
def test_a_tie_on_one_rank_is_one_parameter_and_costs_no_collective() -> None:
    """Of four stages each rank holds two, with one tied parameter, which may not come apart."""
    topology = Topology.create(pipeline=2, stage_to_rank=[0, 1, 1, 0])
    low, high = stage(w=(1,), own=(1,)), stage(w=(1,))
    modules = dict(zip(topology.local_stages, (low, high), strict=True))
    ties = [{0: "w", 3: "w"}, {1: "w", 2: "w"}]
    sync = GradientSync(modules, topology, tied=ties, handlers=[SHARED])

    def backward() -> None:
        give(low, w=8.0, own=4.0)
        give(high, w=16.0)

    compute(sync, backward, divisor=4.0)
    assert low.get_parameter("w") is high.get_parameter("w")
    assert grads(low) == {"w": [6.0], "own": [1.0]}
    assert (len(sync.plan.launches), len(sync.records())) == (0, 2)
    high.w = nn.Parameter(torch.zeros(1))
    stages = [[0, 3], [1, 2]][rank()]
    refused = f"StepError: '{stages[0]}.w' was one parameter on stages {stages}"
    assert outcome(sync.prepare).startswith(refused)
    high.w = low.w
    low.zero_grad()
    sync.prepare()


@pytest.mark.ranks(2)
def test_verbs_out_of_order_are_refused_and_do_no_harm() -> None:
    module = stage(a=(1,))
    sync = tied(module, "a")
    here, there = rank(), 1 - rank()
    not_here = f"stage {there} is not on this rank, which has [{here}]"

    def refused(verb: Any, *args: Any) -> str:
        kind, words = outcome(lambda: verb(*args)).split(": ", 1)
        assert kind == "StepError"
        return words

    assert refused(sync.finish).startswith("finish() without prepare()")
    for verb in (sync.stage_final, sync.stage_last_backward):
        outside = f"{verb.__name__}() outside a step: call prepare() first"
        assert refused(verb, here).startswith(outside)
    assert not_here in refused(sync.stage_final, there)
    sync.prepare()
    assert not_here in refused(sync.stage_final, there)
    assert f"finish() before stage_final() of stages [{here}]" in refused(sync.finish)
    inside = "clip_grad_norm_() inside a step: call finish() first"
    assert inside in refused(sync.clip_grad_norm_, 1.0)
    give(module, a=1.0)
    sync.stage_final(here)
    assert f"stage {here} is final already" in refused(sync.stage_final, here)
    assert "prepare() inside a step" in refused(sync.prepare)
    assert "drop_gradients() inside a step" in refused(sync.drop_gradients)
    stranger = f"a parameter of shape (3,) is none of those of stage {here}"
    assert stranger in refused(sync.parameters_final, here, [nn.Parameter(torch.ones(3))])
    sync.finish()
    assert refused(sync.finish).startswith("finish() without prepare()")
    assert refused(sync.stage_final, here).startswith("stage_final() outside a step")
    assert grads(module) == {"a": [2.0]}


BOTH = Topology.build(axes=(("pp", 1), ("dp", 1)), stage_to_rank=[0, 0])


def test_one_process_needs_no_group() -> None:
    first, last = stage(w=(2,), b=(2,)), stage(w=(2,))
    sync = GradientSync({0: first, 1: last}, BOTH, tied=[["w"]], handlers=[SHARED])
    sync.check_replicas()

    def backward() -> None:
        give(first, w=2.0)
        give(last, w=4.0)

    compute(sync, backward, divisor=2.0)
    assert grads(first) == {"w": [3.0, 3.0], "b": None}
    assert sync.clip_grad_norm_(1.0).item() == pytest.approx(math.sqrt(18))
    assert (sync.statistics().steps, len(sync.plan.launches)) == (1, 0)
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    sync.drop_gradients()
    compute(sync, lambda: give(first, w=1.0, b=1.0))
    optimizer.step()
    assert first.get_parameter("b").tolist() == [-1.0] * 2
    assert optimizer.state_dict()["param_groups"][0]["params"] == ["w", "b"]
    sync.close()


# Verbs inside of CUDA graphs and compiled regions: refused in words, or run as written.


@pytest.mark.ranks(2)
def test_a_verb_is_refused_while_a_cuda_graph_is_captured() -> None:
    # A replay runs no Python, so it would synchronise nothing.
    module = stage(w=(4,))
    sync, bucketer = replicated(module), Bucketer()
    scheduler = scheduled(nn.Linear(2, 2), pipeline=1, schedule="gpipe", num_microbatches=1)
    x = torch.ones(1, 2)

    def refused(**verbs: Callable[[], object]) -> None:
        yes = mock.Mock(return_value=True)
        with mock.patch.multiple(torch.cuda, is_initialized=yes, is_current_stream_capturing=yes):
            for verb, call in verbs.items():
                words = f"StepError: {verb}() while a CUDA graph is captured"
                assert outcome(call).startswith(words)

    refused(
        prepare=sync.prepare,
        clip_grad_norm_=lambda: sync.clip_grad_norm_(1.0),
        publish=sync.publish,
        check_replicas=sync.check_replicas,
        all_reduce=lambda: bucketer.all_reduce(torch.ones(2), callback=print),
        flush=bucketer.flush,
        step=lambda: scheduler.step(x, target=x),
        evaluate=lambda: scheduler.evaluate(x),
    )
    sync.prepare()
    give(module, w=1.0)
    refused(stage_final=lambda: sync.stage_final(0), finish=sync.finish)
    sync.stage_final(0)
    sync.finish()
    scheduler.step(x, target=x)
    assert grads(module) == {"w": [1.0] * 4}


@pytest.mark.ranks(2)
def test_verbs_in_compiled_code_run_between_its_graphs() -> None:
    module = stage(w=(4,))
    sync = replicated(module)
    step = torch.compile(
        lambda g: compute(sync, lambda: (module.get_parameter("w") * g).sum().backward()),
        backend="eager",
    )
    step(torch.full((4,), 3.0))
    assert grads(module) == {"w": [3.0] * 4}


class Recorder:
    """Counts times, and keeps what is noted."""

    def __init__(self) -> None:
        self.time, self.noted = 0, list[tuple[Any, ...]]()

    def now(self) -> object:
        self.time += 1
        return self.time

    def note(self, kind: str, key: object, began: object) -> None:
        self.noted.append((kind, key, began))


@pytest.mark.ranks(2)
def test_rows_of_all_ranks_are_a_wait_for_ranks() -> None:
    sync = replicated(stage(a=(1,)))
    recorder: Any = Recorder()
    sync.tape.recorder = recorder
    row = torch.tensor([rank() + 1.0, 5.0])
    assert sync.gather(row).tolist() == [[1.0, 5.0], [2.0, 5.0]]
    assert recorder.noted == [("wait for ranks", "numbers of all ranks", 1)]
    sync.tape.recorder = None
    sync.close()


# What all ranks must hold alike. Numbers are those of issue 16.


def pipelined(module: nn.Module, tied: Any) -> GradientSync:
    topology, handlers = Topology.create(pipeline=2), ["pipeline-shared"]
    return GradientSync({rank(): module}, topology, tied=tied, handlers=handlers)


def own(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank() + 1))


@pytest.mark.ranks(2)
def test_copies_start_alike_or_are_made_so() -> None:
    """Issue 16, point 10 (1.2). One of them was overwritten without a word."""
    tied = [{0: "w", 1: "w"}]
    assert outcome(lambda: pipelined(stage(w=own(3, 2)), tied)).startswith(
        "PlanError: tie {0: 'w', 1: 'w'}: 'w' on stage 0 and 'w' on stage 1 start with "
        "different bits"
    )
    module = stage(w=torch.tensor([1.0, 2.0]) * (1 - rank()))  # zeros take the first
    pipelined(module, tied).close()
    assert module.get_parameter("w").tolist() == [1.0, 2.0]
    # An uncut model on every rank needs no common seed. Issue 16, point 10 (1.2). find_tied has
    # seen that both are the tied parameter.
    torch.manual_seed(rank())
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "abc"})
    model["c"].weight = model["a"].weight
    part = nn.ModuleDict({"ac"[rank()]: model["ac"[rank()]]})
    pipelined(part, find_tied(model)).close()
    values = next(part.parameters()).flatten().tolist()
    assert gathered(values) == [values] * 2


@pytest.mark.ranks(2)
def test_replicas_are_reduced_and_start_alike() -> None:
    """Issue 16, point 10 (1.3). Replicas drifted apart, and check_replicas passed."""
    module = stage(w=(2,), frozen=nn.Parameter(torch.zeros(2), requires_grad=False))
    refused = outcome(lambda: replicated(module, handlers=["pipeline-shared"]))
    assert "no handler reduces the gradients of '0.w' and 0 more" in refused
    assert "Add 'data-parallel' to the handlers" in refused
    replicated(module, handlers=["noop"]).close()
    replicated(module, handlers=[], allow_unsynced=["w"]).close()
    module.requires_grad_(requires_grad=False)
    replicated(module, handlers=[]).close()
    # Buffers of replicas start alike. Issue 16, point 10 (1.9). Replicas trained different
    # functions on averaged gradients.
    module = stage(w=(2,))
    module.register_buffer("noise", own(3))
    module.register_buffer("count", torch.zeros(()))
    refused = outcome(lambda: replicated(module))
    assert "buffer 'noise' of stage 0 starts with different bits" in refused
    replicated(module, allow_unsynced=["noise"]).close()
    # Handlers given as instances are compared. Issue 16, point 10 (1.13). bf16 on one rank and fp16
    # on another made gradients of 4.0.
    hooks = ["bf16_compress_hook", "fp16_compress_hook"]
    differing = [DataParallel(hook=hooks[rank()])]
    refused = outcome(lambda: replicated(stage(w=(2,)), handlers=differing))
    assert "ranks disagree on handlers" in refused
    replicated(stage(w=(2,)), handlers=[DataParallel(hook=hooks[0])]).close()


@pytest.mark.ranks(2)
def test_any_dtype_is_made_equal_and_a_part_of_the_world_is_refused() -> None:
    """Issue 16, point 10 (3.5). KeyError: 16, and gloo's "Invalid scalar type"."""
    module = stage(w=torch.complex(own(2).double(), own(2).double()))
    for name, dtype in (("i", torch.int16), ("f", torch.float8_e4m3fn), ("b", torch.bool)):
        odd = nn.Parameter((own(4) * 9).to(dtype), requires_grad=False)
        setattr(module, name, odd)
    sync = replicated(module)
    sync.check_replicas()
    sync.close()
    values = str([p.detach().to(torch.complex128).tolist() for p in module.parameters()])
    assert gathered(values) == [values] * 2
    # A mesh of a part of the world is refused on all its ranks. Issue 16, point 14. Ranks that the
    # mesh left out waited for ever.
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("model", "pp", "dp"))
    refused = outcome(lambda: Topology.from_mesh(mesh["pp", "dp"]))
    assert refused.startswith("TopologyError: ")
    assert "give a mesh of all ranks" in refused


# Tensors: views, layouts, dtypes, norms, replicas.

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
        assert sync.statistics().early == (5 if number else 0)
        strides = [held[name].stride() for name in ("image", "t", "s")]
        assert strides == [(48, 1, 12, 3), (1, 5), ()]
        module.zero_grad(set_to_none=number % 2 == 0)
    assert len(pointers) == 1
    # After zeroing in place one read of each bucket: a norm of each gradient, all side by side.
    # The second step and the fourth compare copies.
    assert nbytes[2] == 24
    assert nbytes[4:] == [24, 0, 24]


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
def test_a_parameter_may_not_be_replaced() -> None:
    """What nobody steps would train nothing, without a word."""

    def low(numel: int, *, is_high: bool = True) -> nn.Parameter:
        parameter = nn.Parameter(torch.ones(numel, dtype=BF16))
        if is_high:
            parameter.grad_dtype = FP32
        return parameter

    module = in_float32(stage(a=torch.zeros(2, dtype=BF16), b=(1,)))
    sync = tied(module, "a", "b")
    kept = module.a
    for wrong, found in (
        (low(2), "'0.a' is another parameter now, as after load_state_dict(assign=True)"),
        (low(2, is_high=False), "gradient torch.bfloat16"),
        (low(3), "(3,)"),
        (nn.Parameter(torch.ones(2)), "torch.float32"),
    ):
        module.a = wrong
        for verb in (sync.prepare, sync.synchronize_parameters):
            refused = outcome(verb)
            assert "StepError: '0.a' " in refused
            assert found in refused
    module.a = kept
    module.get_parameter("b").requires_grad = False
    refused = outcome(sync.prepare)
    assert refused.startswith("StepError: '0.b' was (1,)")
    assert "requires_grad=False" in refused
    module.get_parameter("b").requires_grad = True
    assert step(sync, module, a=1.0, b=1.0) == {"a": [2.0, 2.0], "b": [2.0]}
    module.zero_grad()
    module.load_state_dict({name: p + 1.0 for name, p in module.named_parameters()})
    assert step(sync, module, a=2.0, b=2.0) == {"a": [4.0, 4.0], "b": [4.0]}


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
