"""One mistake of a script prints one message, whoever makes it, and torchrun says no more after."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.mistakes import MISTAKES, NO_TEST, made
from tests.support.train.launched import Launched, torchrun

MOST_LINES = 6  # of all ranks together
WARNED = ("clip",)  # a warning, and the run goes on


@pytest.mark.parametrize("name", [name for name in MISTAKES if name not in WARNED])
def test_a_mistake_prints_one_message(tmp_path: Path, name: str) -> None:
    """Each of them printed 56 to 251 lines, of all ranks in turn."""
    done = made(name, tmp_path)
    shown = "\n".join(done.ours)
    assert done.code == 1, shown
    assert MISTAKES[name][1] in done.ours[0], shown
    assert len(done.ours) <= MOST_LINES, shown
    assert len([line for line in done.ours if line.startswith("Error: ")]) == 1, shown
    # Where the user's own code is the cause, its line is there.
    assert name != "backward" or "has run backward: leave it out" in shown
    assert name == "early" or re.search(r"\n  train\.py:\d+ in ", shown), shown
    # torchrun lists one failure.
    assert sum("exitcode  : " in line for line in done.noise) == 1, "\n".join(done.noise)


@pytest.mark.parametrize("name", ["forward", "early"])
def test_pipegrad_launch_adds_nothing(tmp_path: Path, name: str) -> None:
    done = made(name, tmp_path, launch=True)
    assert done.code == 1
    assert done.noise == []
    assert MISTAKES[name][1] in done.ours[0]
    assert len(done.ours) <= MOST_LINES


HOOKS = """
import os, sys, threading
import torch.distributed as dist
import pipegrad

def own(kind, error, trace):
    print(f"own hook {dist.get_rank()}: {error}", flush=True)

how = sys.argv[1]
if how == "hook":
    sys.excepthook = own
dist.init_process_group("gloo")
dist.barrier()  # else one that ends at once fails this in the other
rank = dist.get_rank()
pipegrad.Topology.create(pipeline=2)
if how == "behind":
    ours = sys.excepthook
    def behind(*raised):
        ours(*raised)
        print(f"behind {rank}", flush=True)
    sys.excepthook = behind
if how == "thread":
    def fail():
        raise ValueError("in a thread")
    thread = threading.Thread(target=fail, name="loader")
    if rank == 1:
        thread.start()
        thread.join()
    dist.barrier()
    dist.destroy_process_group()
elif how == "two":
    log = open(f"log.{rank}", "w")
    log.write("not flushed")
    raise ValueError(f"shard {rank} is missing")
elif rank == 1:
    raise ValueError("mine")
else:
    pipegrad.comm.agreement.agree("nothing", int)
"""


def hooked(tmp_path: Path, how: str, **variables: str) -> tuple[int, str]:
    (tmp_path / "hooks.py").write_text(HOOKS)
    words = ("--nproc-per-node", "2", "hooks.py", how)
    run = Launched(tmp_path, torchrun, *words, variables={**NO_TEST, **variables})
    return run.wait(), str(run)


def test_a_hook_of_the_user_is_called_on_every_rank(tmp_path: Path) -> None:
    code, text = hooked(tmp_path, "hook")
    assert code == 1
    assert text.count("Error: rank 1: ValueError('mine')") == 1, text
    assert "own hook 1: mine" in text
    assert "own hook 0: rank 1: ValueError('mine')" in text


def test_a_hook_that_calls_ours_goes_on(tmp_path: Path) -> None:
    code, text = hooked(tmp_path, "behind")
    assert code == 1
    assert sorted(re.findall(r"^behind \d", text, re.MULTILINE)) == ["behind 0", "behind 1"], text


def test_an_error_in_another_thread_is_short_and_ends_nothing(tmp_path: Path) -> None:
    code, text = hooked(tmp_path, "thread")
    assert code == 0, text
    assert [line.strip() for line in text.splitlines()] == [
        "Error: rank 1, thread 'loader': ValueError('in a thread') (hooks.py:24)",
        'hooks.py:24 in fail: raise ValueError("in a thread")',
    ]


def test_two_mistakes_are_both_there(tmp_path: Path) -> None:
    code, text = hooked(tmp_path, "two")
    assert code == 1
    for rank in (0, 1):
        errors = re.findall(rf"^Error: rank {rank}.*shard {rank} is missing", text, re.MULTILINE)
        assert len(errors) == 1, text
        assert (tmp_path / f"log.{rank}").read_text() == "not flushed"


def test_tracebacks_come_back(tmp_path: Path) -> None:
    code, text = hooked(tmp_path, "two", PIPEGRAD_TRACEBACK="1")
    assert code == 1
    # torchrun may end a rank before it raises, when the other one has ended.
    counts = [text.count(f"[rank{r}]: ValueError: shard {r} is missing") for r in range(2)]
    assert sorted(counts) in ([0, 1], [1, 1]), text
    assert text.count("]: Traceback (most recent call last)") >= sum(counts), text
