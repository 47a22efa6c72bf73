"""OWNER and SHARD misused, and ranks that fail: said by name, on all ranks, within seconds."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import FlatBucket, GradientSync, ReductionStep, Work
from pipegrad.comm.comm_stream import Ticket
from pipegrad.comm.process_groups import Groups
from pipegrad.errors import ReduceError
from pipegrad.model.manifest import Manifest
from pipegrad.optimizer.meetings import Meetings
from pipegrad.optimizer.param_sync import ParameterSync
from pipegrad.reduce.reducer import Reducer
from pipegrad.testing import run_ranks
from pipegrad_handlers.sharded import Sharded
from tests.support.gradients.cases import Case, give, grads, on, outcome, rank, replies, stage
from tests.support.gradients.placements import (
    OWNER,
    REPLICATE,
    SHARD,
    By,
    alone,
    compute,
    update,
)
from tests.support.gradients.plans import entry, grid, plans

TWO: list[Case] = []
THREE: list[Case] = []


two = replies(2, TWO)
three = replies(3, THREE)
SOON = 40.0  # seconds, on a machine that does much else


class Job:
    """One parameter of 40 elements, placed, and plain SGD with a rate of 1."""

    def __init__(self, handler: By | Sharded, **options: Any) -> None:
        self.module = stage(w=(40,))
        self.sync = alone(self.module, handler, **options)
        params = self.sync.optimizer_parameters()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=1.0)

    def compute(self, gradient: float = 1.0) -> None:
        compute(self.sync, partial(give, self.module, w=gradient))

    def step(self, gradient: float = 1.0) -> None:
        self.compute(gradient)
        update(self.sync, self.optimizer)

    @property
    def values(self) -> list[float]:
        found: list[float] = self.module.get_parameter("w").unique().tolist()
        return found


def jobs(**options: Any) -> list[Job]:
    """What is moved: by an owner, in rows, and out of a copy in another dtype."""
    return [
        Job(By("dp", OWNER), **options),
        Job(By("dp", SHARD), **options),
        Job(By("dp", REPLICATE), **options, master_dtype=torch.float64),
    ]


# --- verbs


@on(TWO)
def inside() -> Any:
    """Verbs that move parameters, inside of a step; the step goes on."""
    found = []
    for job in jobs():
        job.step()
        job.sync.prepare()
        job.sync.stage_first_use(0)
        verbs = [
            job.sync.publish,
            job.sync.wait_parameters,
            job.sync.synchronize_parameters,
            job.sync.check_replicas,
        ]
        said = [outcome(verb) for verb in verbs]
        give(job.module, w=2.0)
        job.sync.stage_final(0)
        job.sync.finish()
        update(job.sync, job.optimizer)
        job.sync.wait_parameters()
        found.append((said, job.values))
    return found


def test_parameters_do_not_move_inside_a_step(two: list[dict[str, Any]]) -> None:
    verbs = ("publish", "wait_parameters", "synchronize_parameters", "check_replicas")
    said = [f"StepError: {verb}() inside a step: call finish() first" for verb in verbs]
    assert [reply["inside"] for reply in two] == [[(said, [-6.0])] * 3] * 2


@on(TWO)
def unwaited() -> Any:
    """A forward that does not wait for its parameters is found where its gradients are final."""
    found = []
    for job in jobs()[:2]:
        job.step()
        job.sync.prepare()
        give(job.module, w=1.0)
        said = []
        if any(publish.readers for publish in job.sync.plan.publishes):  # an owner waits for nobody
            said = [
                outcome(partial(job.sync.stage_final, 0)),
                outcome(partial(job.sync.stage_last_backward, 0)),
                outcome(partial(job.sync.parameters_final, 0, job.module.parameters())),
            ]
            job.sync.stage_first_use(0)
        job.sync.stage_final(0)
        job.sync.finish()
        found.append((said, job.values))
    return found


def test_a_forgotten_first_use_is_an_error(two: list[dict[str, Any]]) -> None:
    told = (
        "StepError: stage 0 has computed while its parameters were on their way: call "
        "stage_first_use(0) before its first forward"
    )
    owner, other = (reply["unwaited"] for reply in two)
    assert owner == [([], [-2.0]), ([told] * 3, [-2.0])]
    assert other == [([told] * 3, [-2.0])] * 2


@on(TWO)
def unasked() -> Any:
    """The optimizer was made of module.parameters(): it would step what has no gradient."""
    found = []
    for placed in (OWNER, SHARD, REPLICATE):
        module = stage(w=(40,))
        stored = torch.float64 if placed is REPLICATE else None
        sync = alone(module, By("dp", placed), master_dtype=stored)
        compute(sync, partial(give, module, w=1.0))
        verbs = (sync.publish, sync.prepare, sync.wait_parameters)
        found.append([outcome(verb) for verb in verbs] + [outcome(sync.close)])
    module = stage(w=(40,))
    sync = alone(module, By("dp", REPLICATE))
    compute(sync, partial(give, module, w=1.0))
    return found, outcome(sync.publish), grads(module)


def test_an_optimizer_of_other_parameters_is_noticed(two: list[dict[str, Any]]) -> None:
    """close() refused, too, and left threads and groups behind."""
    for reply in two:
        found, replicated, gradients = reply["unasked"]
        for published, prepared, waited, closed in found:
            assert published.startswith("StepError: some gradients live on other ranks")
            assert "give the optimizer sync.optimizer_parameters()" in published
            assert published == prepared == waited
            assert closed == "None"
        assert (replicated, gradients) == ("None", {"w": [2.0] * 40})


@on(TWO)
def too_early() -> Any:
    """publish() comes before optimizer.step(); in a last job behind it, and twice."""
    found = []
    for job in jobs():
        job.compute()
        job.sync.publish()
        job.optimizer.step()
        job.optimizer.zero_grad()
        found.append(outcome(job.sync.prepare))
    job = Job(By("dp", SHARD))
    job.step()
    job.sync.publish()
    found.append(outcome(job.sync.prepare))
    return found


def test_what_is_stepped_behind_publish_is_refused(two: list[dict[str, Any]]) -> None:
    """A copy in another dtype was never brought back then, and nobody said so: the run stood."""
    for number, reply in enumerate(two):
        owner, rows, copies, right = reply["too_early"]
        told = "StepError: '0.w' was changed after publish(), so other ranks do not have it"
        assert owner.startswith("None" if number else told)
        assert rows.startswith(told)
        assert copies.startswith(told)
        assert right == "None"


@on(TWO)
def replaced() -> Any:
    """The memory of a parameter is another one: what is stepped would not arrive there."""
    found = []
    for job in jobs():
        job.module.get_parameter("w").data = torch.full((40,), 5.0)
        said = outcome(job.sync.prepare)
        job.sync.synchronize_parameters()
        job.step()
        job.sync.wait_parameters()
        job.module.w = nn.Parameter(torch.full((40,), 7.0))
        said_again = outcome(job.sync.prepare)
        job.sync.synchronize_parameters()
        if any(one.tensor is job.module.w for one in job.sync.main_parameters()):
            job.optimizer = torch.optim.SGD(job.sync.optimizer_parameters(), lr=1.0)
        job.step()
        job.sync.wait_parameters()
        found.append((said, said_again, job.values, outcome(job.sync.check_replicas)))
    return found


def test_parameters_whose_memory_is_replaced_are_refused(two: list[dict[str, Any]]) -> None:
    """A copy in another dtype went on from its own values, into memory that nobody used."""
    for reply in two:
        for said, again, values, drift in reply["replaced"]:
            assert said.startswith("StepError: the memory of '0.w' was replaced")
            assert "call sync.synchronize_parameters() on all ranks" in said
            assert again == said
            assert (values, drift) == ([5.0], "None")


@on(TWO)
def unpublished() -> Any:
    found = []
    for job in jobs():
        job.compute()
        job.optimizer.step()
        said = outcome(job.sync.synchronize_parameters)
        job.sync.wait_parameters()
        found.append((said, outcome(job.sync.synchronize_parameters), job.values))
    return found


def test_replicas_are_not_made_equal_before_a_step_is_published(two: list[dict[str, Any]]) -> None:
    """The rows of all ranks but the lowest were overwritten by what they had been before."""
    for reply in two:
        for said, after, values in reply["unpublished"]:
            assert said.startswith(
                "StepError: synchronize_parameters() while what other ranks stepped"
            )
            assert "call wait_parameters() before" in said
            assert (after, values) == ("None", [-2.0])


@on(TWO)
def closed() -> Any:
    """Parameters on their way, published or not, arrive before the end."""
    found: list[Any] = []
    for job in (*jobs(), *jobs()):
        job.compute()
        job.optimizer.step()
        if len(found) < 3:
            job.sync.publish()
        found.append((outcome(job.sync.close), job.values))
    return found


def test_what_is_on_its_way_arrives_before_close_ends(two: list[dict[str, Any]]) -> None:
    assert [reply["closed"] for reply in two] == [[("None", [-2.0])] * 6] * 2


# --- optimizers


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


KINDS: list[Any] = [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, Foreign]


@on(TWO)
def refused() -> Any:
    found = {}
    for kind in KINDS:
        job = Job(By("dp", SHARD))
        checked = outcome(partial(job.sync.check_optimizer, kind))
        asked = job.sync.optimizer_parameters()
        if kind is torch.optim.Muon:  # wants matrices: it is given rows later, behind its back
            optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
            optimizer.param_groups[0]["params"] = asked[0]["params"]
        else:
            optimizer = kind(asked)
        job.compute()
        closure: Any = (lambda: 0.0,) if kind is torch.optim.LBFGS else ()
        said = outcome(partial(optimizer.step, *closure))
        found[kind.__name__] = (checked, said, job.values)
        job.sync.close()
    job = Job(By("dp", SHARD))
    job.sync.check_optimizer(Elementwise)
    job.optimizer = Elementwise(job.sync.optimizer_parameters())
    job.step()
    job.sync.wait_parameters()
    whole = Job(By("dp", OWNER))  # whole parameters may be stepped by anything
    whole.sync.check_optimizer(Foreign)
    whole.optimizer = Foreign(whole.sync.optimizer_parameters())
    whole.step()
    whole.sync.wait_parameters()
    return found, job.values, whole.values


def test_optimizers_that_look_at_whole_parameters_are_refused(two: list[dict[str, Any]]) -> None:
    for reply in two:
        found, own, whole = reply["refused"]
        assert list(found) == ["Adafactor", "LBFGS", "Muon", "Foreign"]
        for name, (checked, said, values) in found.items():
            assert checked == said, name
            assert said.startswith(f"PlanError: {name} cannot step sharded parameters")
            assert "AdamW" in said
            assert "'elementwise = True'" in said
            assert values == [0.0]
        assert (own, whole) == ([-2.0], [-2.0])


@on(TWO)
def behind_its_back() -> Any:
    """Rows that an optimizer gets after its first step; another model's optimizer is left alone."""
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    job = Job(By("dp", SHARD))
    optimizer = torch.optim.Adafactor([other])
    first = outcome(optimizer.step)
    for group in job.sync.optimizer_parameters():
        optimizer.add_param_group(group)
    job.compute()
    said = outcome(optimizer.step)
    job.sync.close()
    return first, said, outcome(optimizer.step)[:4]


def test_rows_added_to_an_optimizer_later_are_refused(two: list[dict[str, Any]]) -> None:
    """It was checked once, when it was made: add_param_group() walked around that."""
    for reply in two:
        first, said, closed = reply["behind_its_back"]
        assert first == "None"
        assert said.startswith("PlanError: Adafactor cannot step sharded parameters")
        assert not closed.startswith("Plan")


# --- steps that fail


@on(THREE)
def before_launching() -> Any:
    """One rank fails with its receive posted; all come back, twice, and go on."""
    found = []
    for job in (Job(By("dp", OWNER)), Job(By("dp", SHARD))):
        job.step()
        for _ in range(2):
            job.sync.prepare()
            job.sync.stage_first_use(0)
            give(job.module, w=5.0)
            job.sync.abort(MemoryError("too large"))
            job.module.zero_grad()
            job.optimizer.zero_grad()
        job.step(2.0)
        job.sync.wait_parameters()
        found.append((job.values, outcome(job.sync.check_replicas), outcome(job.sync.close)))
    return found


def test_a_posted_receive_is_the_next_steps_if_this_one_fails(three: list[dict[str, Any]]) -> None:
    """Two receives would be posted for the one message of the step that succeeds."""
    right = [([-9.0], "None", "None")] * 2
    assert [reply["before_launching"] for reply in three] == [right] * 3


def after_failure(job: Job, *, launched: bool) -> str:
    """Fails on rank 1; returns what each rank says. Nobody zeroes a gradient."""
    if rank() != 1:
        return outcome(job.step)
    job.sync.prepare()
    job.sync.stage_first_use(0)
    if launched:
        give(job.module, w=5.0)
        job.sync.stage_final(0)
    job.sync.abort(MemoryError("too large"))
    return "ReduceError: too large"


@on(THREE)
def after_launching() -> Any:
    """The others have launched, and wait for rank 1; or it has too, and they may have ended."""
    found = []
    for launched in (False, True):
        for job in (Job(By("dp", OWNER)), Job(By("dp", SHARD))):
            job.step()
            began = time.monotonic()
            said = after_failure(job, launched=launched)
            job.step(2.0)
            same = outcome(job.sync.check_replicas)
            values, closed = job.values, outcome(job.sync.close)
            found.append((launched, said, values, same, closed, time.monotonic() - began))
    return found


def test_all_go_on_behind_a_rank_that_fails_among_launches(three: list[dict[str, Any]]) -> None:
    """Issue 16, point 10: such a failure was final, and found out about by a time-out."""
    for reply in three:
        for launched, said, values, same, closed, seconds in reply["after_launching"]:
            if said != "None" or not launched:  # else this rank had ended the step, and stepped
                assert said.startswith("ReduceError: ")
                assert "too large" in said
            if not launched:
                assert values == [-9.0]
            assert (same, closed) == ("None", "None")
            assert seconds < SOON


class Fails(Sharded):
    """Rank 1 cannot send gradients of 11."""

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        if rank() == 1 and bucket.buffer[0] == 11:
            raise OSError("no route to host")
        return super().launch(bucket, reduction, group)


@on(THREE)
def launch_raises() -> Any:
    job = Job(Fails())
    job.step()
    began = time.monotonic()
    said = outcome(partial(job.compute, 11.0))
    seconds = time.monotonic() - began
    return said, outcome(job.sync.prepare), outcome(job.sync.close), seconds


def test_a_launch_of_rows_that_raises_is_every_ranks_error(three: list[dict[str, Any]]) -> None:
    for reply in three:
        said, prepared, closed, seconds = reply["launch_raises"]
        told = ["ReduceError", "rank 1", "shard-mean(dp) over ranks [0, 1, 2]", "no route to host"]
        assert [part for part in told if part not in said] == []
        assert prepared.startswith("ReduceError: this GradientSync failed before")
        assert closed == "None"
        assert seconds < SOON


def end_step(sync: GradientSync) -> None:
    sync.stage_final(0)
    sync.finish()


def die_before_publish(folder: str, placed: str) -> None:
    """Rank 1's process ends between publish and first use of the others."""
    job = Job(By("dp", OWNER if placed == "owner" else SHARD))
    job.step()
    job.compute()
    job.optimizer.step()
    if rank() == 1:
        os._exit(7)
    job.sync.publish()
    job.optimizer.zero_grad()
    began = time.monotonic()
    said = [outcome(job.sync.prepare)]
    said += [outcome(lambda: job.sync.stage_first_use(0)) for _ in range(2)]
    give(job.module, w=1.0)
    said.append(outcome(partial(end_step, job.sync)))
    seconds = time.monotonic() - began
    Path(folder, str(rank())).write_text(json.dumps([*said, seconds]))


@pytest.mark.parametrize("placed", ["owner", "shard"])
def test_a_peer_that_dies_is_an_error_at_each_first_use(placed: str, tmp_path: Path) -> None:
    """The first wait forgot what had not come: the second one passed, over stale parameters."""
    with pytest.raises(RuntimeError, match="rank 1"):
        run_ranks(die_before_publish, 3, str(tmp_path), placed, timeout_seconds=60)
    for number in (0, 2):
        told = json.loads(Path(tmp_path, str(number)).read_text())
        prepared, first, second, finished, seconds = told
        assert prepared == "None"
        assert first == second
        if placed == "owner" and number == 0:  # it waits for nobody, and learns of it in the end
            assert first == "None"
            first = finished
        assert "ReduceError: " in first
        assert "parameters of bucket 0 (0.w) back along" in first
        assert seconds < SOON


class Never(Reducer):
    """A reducer whose tickets never come."""

    def __init__(self) -> None:
        self.asked: list[Ticket] = []

    def wait_for(self, ticket: Ticket) -> None:
        self.asked.append(ticket)
        if len(self.asked) < 3:
            raise ReduceError("a step failed on another rank")


def test_a_first_use_that_fails_keeps_its_tickets() -> None:
    """They were taken off before they were waited for: who tried again read what had not come."""
    plan = plans(Manifest(((entry("w", 4),),), ()), grid(1, 2), [("s", By("dp", SHARD))])[0]
    never, cpu = Never(), torch.device("cpu")
    parameter_sync = ParameterSync(
        plan,
        buffers={},
        reducer=never,
        groups=cast("Groups", None),
        main_shards=[],
        meetings=cast("Meetings", None),
        main_parameters=dict,
        stepped_parameters=dict,
        is_needed=True,
        device=cpu,
    )
    ticket = Ticket(cpu)
    parameter_sync.coming[0] = [ticket]
    for _ in range(2):
        with pytest.raises(ReduceError):
            parameter_sync.first_use(0)
    parameter_sync.first_use(0)
    parameter_sync.first_use(0)
    assert never.asked == [ticket] * 3
