"""Placed parameters misused, stale, or of ranks that fail: refused by name, on all ranks, soon."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad.errors import ReduceError
from pipegrad.gradients import param_sync
from pipegrad.gradients.reductions import sync_parameters
from tests.support.gradients.cases import give, outcome, rank, stage
from tests.support.gradients.placements import (
    OWNER,
    REPLICATE,
    SHARD,
    By,
    Job,
    alone,
    compute,
    update,
)

COPIES: dict[str, Any] = {"placed": REPLICATE, "master_dtype": torch.float64}
# What is moved: by an owner, in rows, and out of a copy in another dtype.
MOVED = {"owner": {"placed": OWNER}, "rows": {"placed": SHARD}, "copies": COPIES}
however_moved = pytest.mark.parametrize("moved", MOVED.values(), ids=MOVED)


@pytest.mark.ranks(2)
@however_moved
def test_parameters_do_not_move_inside_a_step(moved: dict[str, Any]) -> None:
    job = Job(**moved)
    job.step()
    job.sync.publish()  # a second time does nothing
    job.sync.prepare()
    job.sync.stage_first_use(0)
    job.sync.publish()  # nothing is due
    for verb in ("wait_parameters", "synchronize_parameters", "check_replicas"):
        refused = f"StepError: {verb}() inside a step: call finish() first"
        assert outcome(getattr(job.sync, verb)) == refused
    give(job.module, w=2.0)
    job.sync.stage_final(0)
    job.sync.finish()
    update(job.sync, job.optimizer)
    assert job.arrived == [-6.0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placed", [OWNER, SHARD])
def test_a_forgotten_first_use_is_an_error(placed: Any) -> None:
    job = Job(placed)
    job.step()
    job.sync.prepare()
    give(job.module, w=1.0)
    waits = any(publish.readers for publish in job.sync.plan.publishes)
    assert waits == (placed is SHARD or rank() == 1)  # an owner waits for nobody
    if waits:
        refused = (
            "StepError: stage 0 has computed while its parameters were on their way: call "
            "stage_first_use(0) before its first forward"
        )
        assert outcome(lambda: job.sync.stage_final(0)) == refused
        assert outcome(lambda: job.sync.stage_last_backward(0)) == refused
        params = job.module.parameters()
        assert outcome(lambda: job.sync.parameters_final(0, params)) == refused
        job.sync.stage_first_use(0)
    job.sync.stage_final(0)
    job.sync.finish()
    assert job.values == [-2.0]


@pytest.mark.ranks(2)
@however_moved
def test_parameters_that_are_misused_are_refused(moved: dict[str, Any]) -> None:
    """It was made of module.parameters(). close() refused, too, and left threads and groups."""
    module, options = stage(w=(40,)), {**moved}
    sync = alone(module, By("dp", options.pop("placed")), **options)
    compute(sync, partial(give, module, w=1.0))
    refused = outcome(sync.publish)
    assert refused.startswith("StepError: some gradients live on other ranks")
    assert "give the optimizer sync.optimizer_parameters()" in refused
    assert outcome(sync.prepare) == outcome(sync.wait_parameters) == refused
    assert outcome(sync.close) == "None"
    # A step behind publish is refused, and so is what is written there. A copy in another dtype was
    # never brought back then, and nobody said so: the run stood.
    steps_nothing = moved["placed"] is OWNER and rank() == 1
    job = Job(**moved)
    job.compute()
    job.sync.publish()
    refused = "StepError: optimizer.step() after publish(), or after an evaluation"
    assert outcome(job.optimizer.step).startswith("None" if steps_nothing else refused)
    job = Job(**moved)
    job.step()
    for one in job.sync.main_parameters():
        with torch.no_grad():
            one.tensor.add_(1.0)
    refused = "StepError: '0.w' was changed after publish(), so other ranks do not have it"
    assert outcome(job.sync.prepare).startswith("None" if steps_nothing else refused)
    # Parameters whose memory is replaced are refused. A copy in another dtype went on from its own
    # values, into memory that nobody used.
    job = Job(**moved)
    held: Any = job.module
    held.w.data = torch.full((40,), 5.0)
    refused = outcome(job.sync.prepare)
    assert refused.startswith("StepError: the memory of '0.w' was replaced")
    assert "call sync.synchronize_parameters() on all ranks" in refused
    job.sync.synchronize_parameters()
    job.step()
    job.sync.wait_parameters()
    assert job.arrived == [3.0]
    held.w, kept = nn.Parameter(torch.full((40,), 7.0)), held.w
    for verb in (job.sync.prepare, job.sync.synchronize_parameters):
        assert "StepError: '0.w' is another parameter now, as after" in outcome(verb)
    held.w = kept
    job.optimizer.zero_grad()
    job.step()
    assert job.arrived == [1.0]
    job.sync.check_replicas()


@pytest.mark.ranks(2)
def test_a_stored_copy_notices_a_change() -> None:
    """It does not know of what is loaded into its parameter, and would undo it."""
    job = Job(**COPIES)
    job.step()
    job.load(100.0)
    assert outcome(job.sync.prepare).startswith("StepError: '0.w' was changed, and its stored copy")
    job.sync.wait_parameters()
    job.sync.synchronize_parameters()
    job.step()
    assert job.arrived == [98.0]
    job.sync.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("published", [False, True])
@however_moved
def test_replicas_are_not_made_equal_in_a_step(moved: dict[str, Any], *, published: bool) -> None:
    """The rows of all ranks but the lowest were overwritten by what they had been before."""
    job = Job(**moved)
    job.compute()
    job.optimizer.step()
    if published:
        job.sync.publish()
    if not published or moved["placed"] is not REPLICATE:
        refused = outcome(job.sync.synchronize_parameters)
        assert refused.startswith(
            "StepError: synchronize_parameters() while updates of other ranks"
        )
        assert "call wait_parameters() before" in refused
    job.sync.wait_parameters()
    job.sync.synchronize_parameters()
    assert job.values == [-2.0]
    job.load(5.0)
    job.sync.synchronize_parameters()
    job.optimizer.zero_grad()
    job.step()
    assert job.arrived == [3.0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("verbs", [("close",), ("publish", "close"), ("stage_first_use",)], ids=str)
@however_moved
def test_what_was_stepped_arrives_before_close_or_a_first_use_ends(
    moved: dict[str, Any], verbs: tuple[str, ...]
) -> None:
    """Also if publish() was forgotten."""
    job = Job(**moved)
    job.compute()
    job.optimizer.step()
    job.optimizer.zero_grad()
    for verb in verbs:
        getattr(job.sync, verb)(*[0] * verb.startswith("stage"))
    assert job.values == [-2.0]


class Foreign(torch.optim.Optimizer):
    """An optimizer of another origin, which looks at one element at a time but does not say so."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


class Elementwise(Foreign):
    elementwise = True


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, Foreign]
)
def test_optimizers_that_look_at_whole_parameters_are_refused(kind: Any) -> None:
    job = Job(SHARD)
    asked = job.sync.optimizer_parameters()
    if kind is torch.optim.Muon:  # wants matrices: it is given rows later, behind its back
        optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
        optimizer.param_groups[0]["params"] = asked[0]["params"]
    else:
        optimizer = kind(asked)
    job.compute()
    closure: Any = (lambda: 0.0,) if kind is torch.optim.LBFGS else ()
    refused = outcome(lambda: optimizer.step(*closure))
    assert refused.startswith(f"PlanError: {kind.__name__} cannot step sharded parameters")
    assert "AdamW" in refused
    assert "'elementwise = True'" in refused
    assert job.values == [0.0]
    job.sync.close()


@pytest.mark.ranks(2)
def test_rows_added_to_an_optimizer_later_are_refused() -> None:
    """It was checked once, when it was made: add_param_group() walked around that."""
    # By elements, or of whole parameters, it is taken.
    for placed, kind in (SHARD, Elementwise), (OWNER, Foreign):
        job = Job(placed)
        job.optimizer = kind(job.sync.optimizer_parameters())
        job.step()
        assert job.arrived == [-2.0]
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    job = Job(SHARD)
    optimizer = torch.optim.Adafactor([other])
    assert outcome(optimizer.step) == "None"
    for group in job.sync.optimizer_parameters():
        optimizer.add_param_group(group)
    job.compute()
    refused = "PlanError: Adafactor cannot step sharded parameters"
    assert outcome(optimizer.step).startswith(refused)
    job.sync.close()
    assert not outcome(optimizer.step).startswith("Plan")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("placed", [OWNER, SHARD])
def test_all_go_on_behind_a_rank_that_fails_among_launches(placed: Any, *, launched: bool) -> None:
    """Issue 16, point 10: such a failure was final, and found out about by a time-out."""
    job = Job(placed)
    job.step()
    if rank() != 1:
        refused = outcome(job.step)
        # With rank 1's launches others may end the step, and step.
        if refused != "None" or not launched:
            assert refused.startswith("ReduceError: ")
            assert "too large" in refused
    else:
        job.sync.prepare()
        job.sync.stage_first_use(0)
        if launched:
            give(job.module, w=5.0)
            job.sync.stage_final(0)
        job.sync.abort(MemoryError("too large"))
    job.step(2.0)
    job.sync.check_replicas()
    if not launched:
        assert job.values == [-9.0]
    job.sync.close()


@pytest.mark.ranks(2)
def test_an_owner_that_cannot_send_is_every_ranks_error() -> None:
    """An owner waits for nobody: its next step tells what failed, or the others would wait."""
    job = Job(OWNER)
    job.compute()
    job.optimizer.step()
    job.optimizer.zero_grad()
    dist.barrier()  # before one has failed, all have ended the step
    refuse = mock.Mock(side_effect=OSError("no route to host"))
    with mock.patch.object(
        param_sync, "sync_parameters", refuse if rank() == 0 else sync_parameters
    ):
        job.sync.publish()
        while rank() == 0 and not any(s.error for s in job.sync._reducer.comm_streams):
            time.sleep(0.01)
        refused = outcome(job.sync.prepare), outcome(lambda: job.sync.stage_first_use(0))
    assert "ReduceError: " in refused[rank()]
    assert "no route to host" in refused[rank()]


@pytest.mark.ranks(2)
def test_a_first_use_that_fails_keeps_its_tickets() -> None:
    """They were taken off before they were waited for: who tried again read what had not come."""
    job = Job(SHARD)
    job.step()
    fails_twice = [ReduceError("a step failed on another rank")] * 2 + [None]
    with mock.patch.object(job.sync._reducer, "wait_for", side_effect=fails_twice) as waits:
        for _ in range(2):
            with pytest.raises(ReduceError):
                job.sync.stage_first_use(0)
        job.sync.stage_first_use(0)
        job.sync.stage_first_use(0)
    assert waits.call_args_list == [waits.call_args_list[0]] * 3
    assert job.arrived == [-2.0]
