"""A rank that waits for ranks in code of the user warns early, once, and the run goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.mistakes import NO_TEST
from tests.support.train.launched import Launched, torchrun

SCRIPT = """
import sys, threading, time
import torch, torch.distributed as dist
from torch import nn
import pipegrad
from pipegrad.comm import absent, activity, agreement

absent._ABSENT_SECONDS = absent._ASK_SECONDS = activity._STILL_SECONDS = 1.0
sent = list()
def counted(set):
    def call(self, key, value):
        if "/stand/" in key:
            sent.append(key)
        return set(self, key, value)
    return call
store = absent.SignedStore
store.set = counted(store.set)

dist.init_process_group("gloo")
rank, topology = dist.get_rank(), pipegrad.Topology.create(pipeline=2)
torch.manual_seed(0)
class Slow(nn.Linear):
    seconds = 0.0
    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)
cut = pipegrad.cut(nn.Sequential(Slow(4, 4), Slow(4, 4)), 2)
scheduler = pipegrad.Scheduler(
    cut, topology, schedule="1f1b", num_microbatches=2, loss_fn=nn.MSELoss(),
    step_timeout_seconds=8.0 if sys.argv[1].startswith("alone") else 60.0, agree_seconds=8.0,
)
optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
x = torch.ones(4, 4)
def step():
    scheduler.step(x, target=x).loss.item()
    optimizer.zero_grad()
def evaluate():
    return scheduler.evaluate(x, target=x).loss.item()
def away(verb, alone):
    if rank == alone:
        verb()
    else:
        time.sleep(5)
        verb()
how = sys.argv[1]
if how == "first":
    away(step, 0)
elif how == "usual":
    for _ in range(20):
        step()
        time.sleep(0.1)
    assert sent == [], sent
elif how == "slow":  # in a verb, and not absent
    for layer in cut.modules[topology.coordinate("pp")]:
        layer.seconds = 2.0 * (rank == 1)
    step()
    step()
elif how == "debugger":
    import pdb, io
    class Prompt(io.StringIO):
        def readline(self, *_):
            time.sleep(5)
            return "continue\\n"
    step()
    if rank == 1:
        pdb.Pdb(stdin=Prompt(), stdout=io.StringIO()).set_trace()
    step()
elif how == "ahead":  # ranks wait in two verbs, for a slow one
    for layer in cut.modules[topology.coordinate("pp")]:
        layer.seconds = 2.0 * (rank == 1)
    for _ in range(2):
        scheduler.step(x, target=x)
        scheduler.sync.clip_grad_norm_(1.0)
        optimizer.zero_grad()
elif how.startswith("alone"):
    for _ in range(2):  # the third ones are not compared
        step()
        evaluate()
    what, alone = how.split()[1:]
    if rank == int(alone):
        evaluate() if what == "evaluate" else scheduler.sync.check_replicas()
    step()
elif how == "clip":
    scheduler.step(x, target=x)
    away(lambda: scheduler.sync.clip_grad_norm_(1.0), 0)
    optimizer.zero_grad()
elif how == "save":
    away(lambda: agreement.agree("the directory", int), 3)
else:
    step()
    for _ in range(2):  # the third one is not compared
        evaluate()
    for _ in range(2):  # one warning
        away(evaluate, 0)
step()
dist.barrier()
print("ends", flush=True)
dist.destroy_process_group()
"""


def run(tmp_path: Path, how: str, ranks: int = 4) -> list[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--nproc-per-node", str(ranks), "train.py", how)
    launched = Launched(tmp_path, torchrun, *words, variables=NO_TEST)
    assert launched.wait() == 0, str(launched)
    text = str(launched)
    assert text.count("ends") == ranks, text
    return [line for line in text.splitlines() if "Warning: rank" in line]


# The rank that waits, what in, for whom, and the first of these.
CASES = {
    "evaluate": (0, r"scheduler\.evaluate\(\) 4", "rank 2", 2),
    "first": (0, r"scheduler\.step\(\) 1", "ranks [1, 2, 3]", 1),
    "clip": (0, r"clip_grad_norm_\(\)", "ranks [1, 2, 3]", 1),
    "save": (3, "the directory", "ranks [0, 1, 2]", 0),
}


@pytest.mark.parametrize("how", CASES)
def test_a_rank_that_is_in_a_verb_alone_warns_once_and_the_run_goes_on(
    tmp_path: Path, how: str
) -> None:
    (shown,), (rank, verb, absent, first) = run(tmp_path, how), CASES[how]
    assert re.search(
        rf"Warning: rank {rank} was in {verb}(, .+)?, for \d\.\d s \(train\.py:\d+ in \S+\), and "
        rf"waits for {re.escape(absent)}: rank {first} was outside of pipegrad "
        r"\(train\.py:\d+ in away\)\. All ranks must make the same calls, in one order$",
        shown,
    ), shown


@pytest.mark.parametrize("how", ["usual", "slow", "debugger", "ahead"])
def test_nobody_warns_if_all_go_on_or_a_rank_is_in_a_verb_or_a_debugger(
    tmp_path: Path, how: str
) -> None:
    assert run(tmp_path, how, ranks=4 if how == "ahead" else 2) == []


# How many ranks there are, what the lowest one waits in, and what the others.
CIRCLES = {
    "alone evaluate 0": (2, r"scheduler\.evaluate\(\) 5", r"rank 1 was in scheduler\.step\(\) 5"),
    "alone evaluate 1": (2, r"scheduler\.step\(\) 5", r"rank 1 was in scheduler\.evaluate\(\) 5"),
    "alone check 3": (4, r"scheduler\.step\(\) 5", r"rank 3 was in check_replicas"),
}


@pytest.mark.parametrize("how", CIRCLES)
def test_ranks_in_different_verbs_that_wait_for_each_other_are_warned_of_once(
    tmp_path: Path, how: str
) -> None:
    """Each waited until its time was over, with no line before. Checksums went into gradients."""
    ranks, here, there = CIRCLES[how]
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--nproc-per-node", str(ranks), "train.py", how)
    launched = Launched(tmp_path, torchrun, *words, variables=NO_TEST)
    assert launched.wait() != 0, str(launched)
    (shown,) = [line for line in str(launched).splitlines() if "Warning: rank" in line]
    assert re.search(
        rf"Warning: rank 0 was in {here}.*, for \d\.\d s \(train\.py:\d+ in \S+\), and waits for "
        rf"{there[:6]}: {there}.*, for \d\.\d s \(train\.py:\d+ in \S+\)\. All ranks must make the",
        shown,
    ), shown
