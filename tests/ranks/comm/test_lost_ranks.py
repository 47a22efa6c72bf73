"""A rank that is gone is named on all others, whatever it died of, and nobody else is."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from pipegrad.comm.agreement import AGREE_SECONDS
from tests.support.train.launched import Launched, torchrun

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from torch import nn
import pipegrad
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
loop, how, where, lost, last = *sys.argv[1:4], *map(int, sys.argv[4:])
number = 0
def end(place):
    if (place, rank, number) == (where, lost, last):
        sys.exit() if how == "exit" else os._exit(0)
class Layer(nn.Linear):
    def forward(self, x):
        end("forward" if self.training else "evaluation")
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: end("backward"))
        return out
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
module = Layer(8, 8)
x = torch.ones(8, 2**20, 8) if loop == "large" else torch.ones(8, 8)
topology = pipegrad.Topology.create(pipeline=1 if loop == "sync" else 3)
if loop in ("scheduler", "large"):
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(module, rank)], topology, schedule="1f1b", num_microbatches=4,
        loss_fn=nn.MSELoss())
    def step():
        float(scheduler.step(x, target=x).loss)
        if where == "evaluation":
            module.eval()
            scheduler.evaluate(x, target=x)
            module.train()
elif loop == "attach":
    schedule = Schedule1F1B(
        PipelineStage(module, rank, 3, torch.device("cpu"), group=topology.group_along("pp")), 4,
        nn.MSELoss())
    pipegrad.attach(schedule, topology=topology)
    step = lambda: schedule.step(*[x][rank:], target=x if rank == 2 else None, losses=[])
else:
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0)
    sync = pipegrad.GradientSync({0: module}, topology, handlers=["data-parallel"])
    def step():
        sync.prepare()
        sync.stage_first_use(0)
        sync.stage_last_backward(0)
        module(x).sum().backward()
        sync.stage_final(0)
        sync.finish()
dist.barrier()  # a set-up needs all ranks
for number in range(1, 6):
    if (how, rank, number) == ("less", lost, last):
        break
    end("between")
    try:
        step()
    except Exception as error:
        with open(f"{rank}.told", "w") as stream:
            stream.write(f"{type(error).__name__}: {error}")
        time.sleep(0.5)  # so that the others can read the report
        os._exit(0)
    module.zero_grad()
if rank == lost:
    dist.destroy_process_group()
"""
LAST = {"scheduler": "scheduler.step() 2", "attach": "schedule.step()", "sync": "finish()"}
NOW = LAST | {"scheduler": "scheduler.step() 3", "large": "scheduler.step() 3"}


CASES = (  # what runs, how a rank ends, where, and which one
    ("scheduler", "_exit", "between", 1),
    ("scheduler", "exit", "between", 0),
    ("scheduler", "less", "between", 2),
    ("scheduler", "_exit", "forward", 1),
    ("scheduler", "_exit", "backward", 2),
    ("scheduler", "_exit", "evaluation", 0),
    ("attach", "exit", "between", 1),
    ("sync", "_exit", "between", 1),
    # gloo tells nobody of the end of a message that is half on its way: 64 MiB, in both directions.
    ("large", "_exit", "forward", 1),
    ("large", "_exit", "backward", 1),
)
INSIDE = (("forward", 1, "1F0"), ("backward", 2, "2B0"), ("evaluation", 0, "0F0"))


def ended(tmp_path: Path, *words: str, lost: int, last: int) -> tuple[list[str], Launched]:
    """Runs the script; returns what each rank but the lost one was told."""
    (tmp_path / "script.py").write_text(SCRIPT)
    # Codes are 0: torchrun kills the others when a rank has another one.
    words = (*words, str(lost), str(last))
    run = Launched(tmp_path, torchrun, "--nproc-per-node", "3", "script.py", *words)
    run.wait()
    told = {path.name: path.read_text() for path in tmp_path.glob("*.told")}
    assert told.keys() == {f"{rank}.told" for rank in range(3) if rank != lost}, str(run)
    return list(told.values()), run


@pytest.mark.parametrize(("loop", "how", "where", "lost"), CASES)
def test_a_rank_that_ended_is_the_cause_on_all_others(
    tmp_path: Path, loop: str, how: str, where: str, lost: int
) -> None:
    """Its neighbours were: "rank 0: Connection closed by peer"."""
    told, run = ended(tmp_path, loop, how, where, lost=lost, last=3)
    last, now = re.escape(LAST.get(loop, "")), re.escape(NOW[loop])
    now = r"scheduler\.evaluate\(\) 6" if where == "evaluation" else now
    after = r"without a word \(process \d+\)" if how == "_exit" else f"after {last}"
    alarm = rf"Rank \d (lost the connection|waits) in {now}"
    hint = "" if how == "_exit" else r"\. All ranks must make the same calls"
    words = rf"StallError: rank {lost} has ended {after}\. {alarm}{hint}"
    assert [text for text in told if not re.fullmatch(words, text)] == []
    assert run.errors.count("\nError: rank") + run.errors.startswith("Error: rank") == 1, str(run)


@pytest.mark.parametrize(("how", "where", "lost"), [case[1:] for case in CASES[:5]])
def test_a_rank_that_ended_in_the_first_step_is_the_cause_on_all_others(
    tmp_path: Path, how: str, where: str, lost: int
) -> None:
    """The others wait for what it writes into the store, and did so until the time was over."""
    began = time.monotonic()
    told, _ = ended(tmp_path, "scheduler", how, where, lost=lost, last=1)
    after = "without a word" if how == "_exit" else "after its set-up"
    assert [text for text in told if f"StallError: rank {lost} has ended {after}" not in text] == []
    assert time.monotonic() - began < AGREE_SECONDS


@pytest.mark.parametrize(("where", "lost", "action"), INSIDE)
def test_a_rank_that_exits_in_a_step_tells_all_others(
    tmp_path: Path, where: str, lost: int, action: str
) -> None:
    told, _ = ended(tmp_path, "scheduler", "exit", where, lost=lost, last=3)
    words = f"StepError: a step failed on another rank: rank {lost}: SystemExit:  In {action} on "
    assert [text for text in told if not text.startswith(words)] == []
