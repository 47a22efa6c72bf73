"""How a GradientSync ends: closed, dropped, forgotten at exit; and what it leaves behind."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.optim import optimizer as optimizers

from pipegrad import Bucketer, GradientSync, MainGrad, Topology
from pipegrad.comm import agreement, failures
from pipegrad.comm.agreement import agree
from pipegrad.comm.ending import cut
from pipegrad.comm.failures import FailureNotice
from pipegrad.testing import run_ranks
from tests.support.gradients.cases import (
    Case,
    Replies,
    give,
    on,
    outcome,
    rank,
    replies,
    stage,
    step,
)

TWO: list[Case] = []
two = replies(2, TWO)

WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "pairwise": {"exchange": "pairwise"},
    "owner": {"placement": "owner"},
}


def pair(module: nn.Module, **options: Any) -> GradientSync:
    handlers = [{"name": "pipeline-shared", **options}]
    return GradientSync(
        {rank(): module}, Topology.create(pipeline=2), tied=[["w"]], handlers=handlers
    )


def freeze() -> None:
    """Has the collector of garbage look at nothing that is there already, which takes long."""
    gc.collect()
    gc.freeze()


def resources() -> dict[str, int]:
    gc.collect()
    hooks = optimizers._global_optimizer_pre_hooks
    return {
        "threads": threading.active_count(),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "hooks": len(hooks),
    }


def train(sync: GradientSync, module: nn.Module) -> None:
    step(sync, module, w=1.0)
    if sync.main_parameters():
        with torch.no_grad():
            for one in sync.main_parameters():
                one.tensor.add_(1.0)
    sync.optimizer_parameters()
    sync.publish()
    sync.wait_parameters()
    module.zero_grad()


def again_and_again(close: Callable[[GradientSync], object]) -> dict[str, dict[str, int]]:
    """Makes one after the other on one module; returns what there is after a few and after all."""
    freeze()
    module, found = stage(w=[64, 64]), {}
    for number in range(6):
        for options in WAYS.values():
            sync = pair(module, **options)
            train(sync, module)
            close(sync)
            del sync
            gc.collect()
            dist.barrier()
        if number == 1:
            found["few"] = resources()
    found["many"] = resources()
    hooks = module.get_parameter("w")._post_accumulate_grad_hooks
    found["many"]["hooks of w"] = len(hooks or ())
    found["few"]["hooks of w"] = 0
    return found


@on(TWO)
def closed_ones() -> dict[str, dict[str, int]]:
    return again_and_again(lambda sync: sync.close())


@on(TWO)
def dropped_ones() -> dict[str, dict[str, int]]:
    return again_and_again(lambda sync: None)


def test_what_is_closed_leaves_nothing(two: Replies) -> None:
    """Issue 16, point 2 (3.2): each left threads, files, hooks and the whole model behind."""
    for reply in two:
        assert reply["closed_ones"]["few"] == reply["closed_ones"]["many"]


def test_what_is_dropped_leaves_nothing(two: Replies) -> None:
    """Issue 16, point 2 (3.2): parameter, hook and sync held each other where gc does not look."""
    for reply in two:
        assert reply["dropped_ones"]["few"] == reply["dropped_ones"]["many"]


@on(TWO)
def dropped_while_it_leaves() -> Any:
    """Rank 0 drops its sync behind `finish`, before rank 1 has taken what rank 0 sent."""
    module = stage(w=[64, 64])
    sync = pair(module, exchange="asymmetric")
    sync.prepare()
    give(module, w=1.0)
    sync.stage_final(rank())
    if rank() == 1:
        time.sleep(1)
    sync.finish()
    del sync
    return float(module.get_parameter("w").grad.min())  # type: ignore[union-attr]


def test_what_still_leaves_arrives_though_its_sync_is_dropped(two: Replies) -> None:
    """Its groups were destroyed at once: now and then rank 1 lost its connection in `finish`."""
    assert [reply["dropped_while_it_leaves"] for reply in two] == [2.0, 2.0]


@on(TWO)
def dropped_without_gc() -> list[bool]:
    found = []
    gc.disable()
    for options in WAYS.values():
        module = stage(w=[64, 64])
        sync = pair(module, **options)
        train(sync, module)
        held = weakref.ref(sync)
        del sync
        found.append(held() is None)
        dist.barrier()
    gc.enable()
    return found


def test_a_dropped_one_ends_at_once(two: Replies) -> None:
    """In a cycle it would keep its threads until the garbage is collected."""
    for reply in two:
        assert all(reply["dropped_without_gc"])


@on(TWO)
def dropped_models() -> list[bool]:
    module = stage(w=[64, 64])
    held: list[weakref.ref[Any]] = [weakref.ref(module), weakref.ref(module.get_parameter("w"))]
    sync = pair(module)
    train(sync, module)
    del sync, module
    gc.collect()
    dist.barrier()
    return [one() is None for one in held]


def test_a_dropped_model_is_freed(two: Replies) -> None:
    """Issue 16, point 2 (3.2): the model lived as long as the process."""
    for reply in two:
        assert all(reply["dropped_models"])


VERBS: dict[str, Callable[[GradientSync], object]] = {
    "prepare": lambda sync: sync.prepare(),
    "stage_first_use": lambda sync: sync.stage_first_use(rank()),
    "stage_last_backward": lambda sync: sync.stage_last_backward(rank()),
    "stage_final": lambda sync: sync.stage_final(rank()),
    "finish": lambda sync: sync.finish(),
    "clip_grad_norm_": lambda sync: sync.clip_grad_norm_(1.0),
    "publish": lambda sync: sync.publish(),
    "publish_if_due": lambda sync: sync.publish_if_due(),
    "wait_parameters": lambda sync: sync.wait_parameters(),
    "synchronize_parameters": lambda sync: sync.synchronize_parameters(),
    "check_replicas": lambda sync: sync.check_replicas(),
    "state_dict": lambda sync: sync.state_dict(),
    "load_state_dict": lambda sync: sync.load_state_dict({}),
}


@on(TWO)
def after_close() -> dict[str, str]:
    module = stage(w=[4])
    sync = pair(module)
    train(sync, module)
    sync.prepare()
    sync.close()
    sync.close()
    found = {name: outcome(partial(verb, sync)) for name, verb in VERBS.items()}
    (module.get_parameter("w") * 3.0).sum().backward()
    return found | {"closed": str(sync.is_closed)}


def test_every_verb_of_a_closed_one_is_refused_at_once(two: Replies) -> None:
    """Issue 16, point 3 (2.1): finish() waited for ever, on a queue whose thread was gone."""
    for reply in two:
        assert reply["after_close"].pop("closed") == "True"
        for said in reply["after_close"].values():
            assert said == "StepError: this GradientSync is closed: make another one, on all ranks"


@on(TWO)
def plain_training_after() -> Any:
    """A sync with another accessor, closed; then a new one, and plain torch."""
    module = stage(w=[2])
    sync = GradientSync(
        {rank(): module},
        Topology.create(pipeline=2),
        tied=[["w"]],
        handlers=["pipeline-shared"],
        accessor=MainGrad(),
    )
    sync.prepare()
    (module.get_parameter("w") * 1.0).sum().backward()
    sync.stage_final(rank())
    sync.finish()
    sync.close()
    later = pair(module)
    found = step(later, module, w=1.0)["w"]
    later.close()
    module.zero_grad()
    (module.get_parameter("w") * 3.0).sum().backward()
    return found, module.get_parameter("w").grad.tolist()  # type: ignore[union-attr]


def test_a_closed_one_leaves_gradients_alone(two: Replies) -> None:
    """Issue 16, point 10 (1.6): its hooks took the gradients of plain training away."""
    for reply in two:
        assert reply["plain_training_after"] == ([2.0, 2.0], [3.0, 3.0])


@on(TWO)
def a_collective_that_never_ends() -> dict[str, Any]:
    """Rank 0 waits in a collective that rank 1 does not come to, and lets go of everything."""
    module = stage(w=[4])
    sync = pair(module)
    train(sync, module)
    began = time.monotonic()
    if rank() == 0:
        sync.prepare()
        sync.stage_final(0)
    threads = [t for t in threading.enumerate() if t.name.startswith("pipegrad comm stream")]
    del sync
    gc.collect()
    ended = not any(thread.is_alive() for thread in threads)
    dist.barrier()
    return {"ended": ended, "threads": len(threads), "seconds": time.monotonic() - began}


def test_what_is_dropped_in_a_step_waits_for_nobody(two: Replies) -> None:
    """Issue 16, point 1 (3.1): its thread came back while the interpreter ended, which aborted."""
    for reply in two:
        found = reply["a_collective_that_never_ends"]
        assert found["ended"]
        assert found["threads"] == 2
        assert found["seconds"] < 8


@on(TWO)
def connections_cut() -> str:
    group = dist.new_group([0, 1])
    told: list[str] = []
    waiting = threading.Thread(
        target=lambda: told.append(outcome(lambda: dist.all_reduce(torch.ones(1), group=group)))
    )
    if rank() == 0:
        waiting.start()
        time.sleep(0.2)
        cut(group)
        waiting.join(20)
    dist.barrier()
    dist.destroy_process_group(group)
    return "".join(told)


def test_cutting_a_group_wakes_who_waits_in_it(two: Replies) -> None:
    """Issue 16, point 1: neither abort() nor destroying it does, on gloo."""
    assert two[0]["connections_cut"].startswith("RuntimeError")


@on(TWO)
def bucketers() -> list[int]:
    freeze()
    found = []
    for number in range(8):
        bucketer = Bucketer()
        bucketer.all_reduce(torch.ones(4), callback=lambda _: None)
        bucketer.flush()
        if number % 2:
            bucketer.release()
        del bucketer
        gc.collect()
        found.append(sum(t.name == "pipegrad bucketer" for t in threading.enumerate()))
    return found


def test_a_dropped_bucketer_leaves_no_thread(two: Replies) -> None:
    """Issue 16, point 2 (3.2): one thread each."""
    for reply in two:
        assert reply["bucketers"] == [0] * 8


@on(TWO)
def words_of_the_store() -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    found = []
    for _ in range(3):
        for _ in range(20):
            agree("something", lambda: "the same")
        dist.barrier()
        found.append(store.num_keys())
        dist.barrier()
    return found


def test_agreements_leave_no_keys(two: Replies) -> None:
    """Issue 16, point 2: each left five in the store, for ever."""
    for reply in two:
        before, *later = reply["words_of_the_store"]
        assert later == [before, before]


# Worlds of their own.


def timeouts() -> Any:
    world = dist.group.WORLD
    assert world is not None
    module = stage(w=[4])
    sync = pair(module)
    groups = [
        *sync._parts.groups.own,
        Topology.create(pipeline=2).group_along("pp"),
        Topology.create(pipeline=2).group_along("dp"),
    ]
    cpu = torch.device("cpu")
    found = {group._get_backend(cpu).options._timeout for group in [world, *groups]}
    step(sync, module, w=1.0)
    return len(found)


def test_groups_have_the_timeout_of_the_default_one() -> None:
    """Issue 16, point 10 (2.2): 30 minutes, whatever the user asked for."""
    assert run_ranks(timeouts, 2) == [1, 1]


def lives() -> list[list[int]]:
    """Default process groups come and go on one store; last, a sync is closed behind its group."""
    found = []
    for life in range(3):
        found.append(agree("the size", lambda: life))  # noqa: B023 - called at once
        agreement._meetings.clear()  # by default process group: as a new one begins
    module = stage(w=[4])
    sync = pair(module)
    step(sync, module, w=1.0)
    dist.barrier()
    dist.destroy_process_group()
    sync.close()
    sync.close()
    return found


def test_a_new_process_group_on_the_same_store_hears_nothing_of_the_old_one() -> None:
    """Issue 16, point 10 (3.3, 2.1): answers of an earlier life were read; close() raised."""
    for found in run_ranks(lives, 2):
        assert found == [[0, 0], [1, 1], [2, 2]]


def store_that_goes() -> list[str]:
    notice = FailureNotice("gone")
    notice.next_step()
    gone = dist.DistNetworkError("Broken pipe")
    broken = type("Broken", (), {"__getattr__": lambda self, name: _raises(gone)})()
    with (
        mock.patch.object(agreement, "store", return_value=broken),
        mock.patch.object(failures, "store", return_value=broken),
    ):
        said = [notice.post("it failed"), str(notice.read())]
        return [*said, outcome(lambda: agree("something", lambda: 1))]


def _raises(error: Exception) -> Callable[..., object]:
    def fail(*_: object) -> object:
        raise error

    return fail


def test_a_store_that_is_gone_is_said_in_words() -> None:
    """Issue 16, point 10 (3.4): if rank 0 kept it and died, others ended in 'Broken pipe'."""
    (said,) = run_ranks(store_that_goes, 1)
    gone = "the key-value store of the process group cannot be reached"
    assert said[0] == "rank 0: it failed"
    assert said[1].startswith(gone)
    assert said[2].startswith(f"AgreementError: something: {gone}")


def missing(folder: str) -> str:
    dist.destroy_process_group()
    store = FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    if dist.get_rank() == 0:
        return outcome(lambda: agree("something", lambda: 1, timeout_seconds=1))
    time.sleep(3)
    return ""


def test_a_file_store_names_who_is_missing(tmp_path: Path) -> None:
    """Issue 16, point 10 (3.4): 'Wait timeout', and no name."""
    said, _ = run_ranks(missing, 2, str(tmp_path))
    assert said.startswith("AgreementError: something: nothing heard from ranks [1] within 1 s")
