"""How a GradientSync ends: closed, dropped, forgotten at exit; and what it leaves behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.optim import optimizer as optimizers

from pipegrad import GradientSync, MainGrad, Topology
from pipegrad.comm import agreement, ending, failures
from pipegrad.comm.agreement import agree
from pipegrad.comm.ending import Ending, cut
from pipegrad.comm.failures import FailureNotice
from pipegrad.comm.store import store as the_store
from tests.support.gradients.cases import give, grads, outcome, rank, stage, step, tied

WAYS: tuple[dict[str, Any], ...] = ({}, {"exchange": "asymmetric"}, {"placement": "owner"})


def pair(module: nn.Module, *, accessor: Any = None, **options: Any) -> GradientSync:
    own = {} if accessor is None else {"accessor": accessor}
    return tied(module, "w", handlers=[{"name": "pipeline-shared", **options}], **own)


def trained(module: nn.Module, **options: Any) -> GradientSync:
    """Returns a sync that has made one step."""
    sync = pair(module, **options)
    step(sync, module, w=1.0)
    with torch.no_grad():
        for one in sync.main_parameters():
            one.tensor.add_(1.0)
    sync.optimizer_parameters()
    sync.publish()
    sync.wait_parameters()
    module.zero_grad()
    return sync


def freeze() -> None:
    """Has the collector of garbage look at nothing that is there already, which takes long."""
    gc.collect()
    gc.freeze()


def resources(module: nn.Module) -> dict[str, int]:
    gc.collect()
    return {
        "threads": threading.active_count(),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "hooks": len(optimizers._global_optimizer_pre_hooks),
        "hooks of w": len(module.get_parameter("w")._post_accumulate_grad_hooks or ()),
    }


@pytest.mark.ranks(2)
@pytest.mark.parametrize("close", [GradientSync.close, lambda sync: None], ids=["close", "drop"])
def test_what_is_closed_or_dropped_leaves_nothing(close: Callable[[GradientSync], None]) -> None:
    # Each left threads, files, hooks and the whole model behind. Parameter, hook and sync held each
    # other where gc does not look.
    freeze()
    module, few = stage(w=[64, 64]), dict[str, int]()
    for number in range(6):
        for options in WAYS:
            sync = trained(module, **options)
            close(sync)
            del sync
            gc.collect()
            dist.barrier()
        if number == 1:
            few = resources(module)
    many = resources(module)
    assert many["hooks of w"] == 0
    # What tests before this one have dropped may still end.
    assert {name: count for name, count in many.items() if count > few[name]} == {}


@pytest.mark.ranks(2)
def test_what_still_leaves_a_dropped_sync_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 0 drops its sync behind `finish`, before rank 1 has taken what rank 0 sent. Its groups
    # were destroyed at once: now and then rank 1 lost its connection in `finish`.
    store, wait = the_store(), Ending._wait

    def wait_and_say_so(self: Ending, timeout_seconds: float) -> bool:
        store.set("rank 0 drops its sync", "")
        return wait(self, timeout_seconds)

    monkeypatch.setattr(ending, "_GRACE_SECONDS", 100.0)
    module = stage(w=[64, 64])
    sync = pair(module, exchange="asymmetric")
    sync.prepare()
    give(module, w=1.0)
    sync.stage_final(rank())
    if rank() == 1:
        store.wait(["rank 0 drops its sync"])
    sync.finish()
    if rank() == 0:
        monkeypatch.setattr(Ending, "_wait", wait_and_say_so)
    del sync
    assert grads(module) == {"w": [[2.0] * 64] * 64}


@pytest.mark.ranks(2)
def test_a_dropped_one_and_its_model_end_at_once() -> None:
    # In a cycle it would keep its threads until the garbage is collected.
    gc.disable()
    try:
        for options in WAYS:
            sync = trained(stage(w=[64, 64]), **options)
            held = weakref.ref(sync)
            del sync
            assert held() is None
            dist.barrier()
    finally:
        gc.enable()
    # A dropped model is freed.
    module = stage(w=[64, 64])
    refs: list[weakref.ref[Any]] = [weakref.ref(module), weakref.ref(module.get_parameter("w"))]
    sync = trained(module)
    del sync, module
    gc.collect()
    dist.barrier()
    assert [one() for one in refs] == [None, None]
    # What is dropped in a step waits for nobody.
    # Rank 0 waits in a collective that rank 1 does not come to, and lets go of everything. Its
    # thread came back while the interpreter ended, which aborted.
    module = stage(w=[4])
    sync = trained(module)
    if rank() == 0:
        sync.prepare()
        sync.stage_final(0)
    threads = [t for t in threading.enumerate() if t.name.startswith("pipegrad comm stream")]
    assert len(threads) == 2
    del sync
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
    dist.barrier()


VERBS: list[tuple[Any, ...]] = [
    *[("prepare",), ("stage_first_use", 0), ("stage_last_backward", 0), ("stage_final", 0)],
    *[("finish",), ("clip_grad_norm_", 1.0), ("publish",)],
    *[("wait_parameters",), ("synchronize_parameters",), ("check_replicas",)],
    *[("state_dict",), ("load_state_dict", {})],
]


@pytest.mark.ranks(2)
def test_a_closed_one_refuses_every_verb_and_leaves_gradients_alone() -> None:
    # finish() waited on a queue whose thread was gone.
    module = stage(w=[4])
    sync = trained(module)
    sync.prepare()
    sync.close()
    sync.close()
    assert sync.is_closed
    refused = "StepError: this GradientSync is closed: make another one, on all ranks"
    for verb, *values in VERBS:
        assert outcome(partial(getattr(sync, verb), *values)) == refused, verb
    give(module, w=3.0)
    # A closed one leaves gradients alone.
    # Its hooks took the gradients of a later sync and of plain training away.
    module = stage(w=[2])
    sync = pair(module, accessor=MainGrad())
    step(sync, module, w=1.0)
    sync.close()
    later = pair(module)
    assert step(later, module, w=1.0)["w"] == [2.0, 2.0]
    later.close()
    module.zero_grad()
    give(module, w=3.0)
    assert grads(module) == {"w": [3.0, 3.0]}


@pytest.mark.ranks(2)
def test_groups_and_agreements_leave_nothing() -> None:
    # Neither abort() nor destroying it does, on gloo.
    group = dist.new_group([0, 1])
    if rank() == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        assert work is not None
        cut(group)
        assert outcome(work.wait).startswith("RuntimeError")
    dist.barrier()
    dist.destroy_process_group(group)
    # Agreements leave no keys.
    # Each left five in the store.
    counts = []
    for _ in range(3):
        for _ in range(20):
            agree("something", lambda: "the same")
        dist.barrier()
        counts.append(the_store().raw.num_keys())
        dist.barrier()
    assert counts == [counts[0]] * 3
    # Groups have the timeout of the default one.
    # They had 30 minutes, whatever the user asked for.
    module = stage(w=[4])
    sync = pair(module)
    topologies = [Topology.create(pipeline=2).group_along(axis) for axis in ("pp", "dp")]
    groups = [dist.group.WORLD, *sync._groups.joined, *topologies]
    cpu = torch.device("cpu")
    assert len({group._get_backend(cpu).options._timeout for group in groups if group}) == 1
    step(sync, module, w=1.0)
    sync.close()


@pytest.mark.ranks(2, ends_world=True)
def test_a_new_process_group_on_the_same_store_hears_nothing_of_the_old_one() -> None:
    """Answers of an earlier life were read. Last, a sync is closed behind its group."""
    for life in range(3):
        assert agree("the size", lambda: life) == [life, life]  # noqa: B023 - called at once
        agreement._agreements.clear()  # by default process group: as a new one begins
    module = stage(w=[4])
    sync = pair(module)
    step(sync, module, w=1.0)
    dist.barrier()
    dist.destroy_process_group()
    sync.close()
    sync.close()


@pytest.mark.ranks(1)
def test_a_store_that_is_gone_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    # If rank 0 kept it and died, others ended in 'Broken pipe'.
    notice = FailureNotice("gone")
    notice.next_step()
    broken = mock.Mock()
    for verb in ("set", "get", "text", "count", "check", "wait", "set_first"):
        getattr(broken, verb).side_effect = dist.DistNetworkError("Broken pipe")
    for module in (agreement, failures):
        monkeypatch.setattr(module, "store", lambda: broken)
    gone = "the key-value store of the process group cannot be reached"
    assert notice.post("it failed") == "rank 0: it failed"
    assert str(notice.read()).startswith(gone)
    words = outcome(lambda: agree("something", lambda: 1))
    assert words.startswith(f"AgreementError: something: {gone}")


@pytest.mark.ranks(2, ends_world=True)
def test_a_file_store_names_who_is_missing(tmp_path: Path) -> None:
    store, here, seconds = FileStore(str(tmp_path / "store"), 2), rank(), timedelta(seconds=60)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=here, world_size=2, timeout=seconds)
    if here == 0:
        words = outcome(lambda: agree("something", lambda: 1, timeout_seconds=0.5))
        store.set("rank 0 has an error", "")
        says = "AgreementError: something: nothing heard from ranks [1] within 0.5 s"
        assert words.startswith(says)
    else:
        store.wait(["rank 0 has an error"], seconds)
