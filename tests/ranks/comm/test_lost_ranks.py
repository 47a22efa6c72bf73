"""A rank that is gone is named on all others, whatever it died of, and nobody else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.train.launched import Launched, torchrun

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from torch import nn
import pipegrad
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
loop, how = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
module = nn.Linear(8, 8)
x = torch.ones(8, 8)
topology = pipegrad.Topology.create(pipeline=3 if loop in ("scheduler", "attach") else 1)
if loop == "scheduler":
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(module, rank)], topology, schedule="1f1b", num_microbatches=4,
        loss_fn=nn.MSELoss())
    step = lambda: float(scheduler.step(x, target=x).loss)
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
for number in range(1, 6):
    if rank == 1 and number == 3:
        if how == "less":
            break
        sys.exit() if how == "exit" else os._exit(0)
    try:
        step()
    except Exception as error:
        with open(f"{rank}.told", "w") as stream:
            stream.write(f"{type(error).__name__}: {error}")
        time.sleep(0.5)  # so that the others can read the report
        os._exit(0)
    module.zero_grad()
if rank == 1:
    dist.destroy_process_group()
"""
LAST = {"scheduler": "scheduler.step() 2", "attach": "schedule.step()", "sync": "finish()"}
NOW = {"scheduler": "scheduler.step() 3", "attach": "schedule.step()", "sync": "finish()"}


@pytest.mark.parametrize(
    ("loop", "how"),
    [
        *(("scheduler", how) for how in ("_exit", "exit", "less")),
        ("attach", "exit"),
        ("sync", "_exit"),
    ],
)
def test_a_rank_that_ended_is_the_cause_on_all_others(tmp_path: Path, loop: str, how: str) -> None:
    """Its neighbours were: "rank 0: Connection closed by peer"."""
    (tmp_path / "script.py").write_text(SCRIPT)
    # Codes are 0: torchrun kills the others when a rank has another one.
    run = Launched(tmp_path, torchrun, "--nproc-per-node", "3", "script.py", loop, how)
    run.wait()
    told = {path.name: path.read_text() for path in tmp_path.glob("*.told")}
    last, now = re.escape(LAST[loop]), re.escape(NOW[loop])
    ended = r"without a word \(process \d+\)" if how == "_exit" else f"after {last}"
    words = rf"StallError: rank 1 has ended {ended}\. Rank [02] lost the connection in {now}"
    assert told.keys() == {"0.told", "2.told"}, str(run)
    assert [text for text in told.values() if not re.fullmatch(words, text)] == []
    assert run.errors.count("\nError: rank") + run.errors.startswith("Error: rank") == 1, str(run)
