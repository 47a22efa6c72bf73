"""Measures the house: what one step enters, how long files are, how many names are public.

    python scripts/house.py

Two gloo ranks hold a tied weight. The third step is measured: the first two compare copies, and
the first makes what is kept. This works on any commit whose GradientSync has the verbs of today.

A step of a pipeline of two stages and four microbatches is counted alike for `Scheduler`, for
torch.distributed.pipelining, and for torchgpipe if it can be imported. Each counts its own files.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import pipegrad
from pipegrad.testing import run_ranks

PACKAGE = Path(pipegrad.__file__).parent
HANDLERS = PACKAGE.parent / "handlers"
PIPELINING = Path(torch.__file__).parent / "distributed" / "pipelining"
TIE = "tied" if hasattr(pipegrad, "find_tied") else "shared"
ROWS, WIDTH, MICROBATCHES = 8, 4, 4


class Stage(nn.Module):
    """A stage that holds the tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))


class Entered:
    """Notes the functions of some folders that are entered, while there is a phase."""

    def __init__(self, *folders: Path) -> None:
        self.phase = ""
        self._folders = tuple(map(str, folders))
        self._calls: list[tuple[str, int, CodeType]] = []
        threading.setprofile(self._note)  # of comm streams, which are threads on CPU
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self.phase and event == "call" and code.co_filename.startswith(self._folders):
            self._calls.append((self.phase, threading.get_ident(), code))

    def end(self) -> None:
        """Notes nothing more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def threads(self, phase: str = "") -> list[list[CodeType]]:
        """Returns what each thread entered, in its order; the main thread is the first."""
        found: dict[int, list[CodeType]] = {threading.main_thread().ident or 0: []}
        for when, thread, code in self._calls:
            if phase in ("", when):
                found.setdefault(thread, []).append(code)
        return list(found.values())


def files_of(codes: Iterable[CodeType]) -> set[str]:
    """Returns the files of functions."""
    return {code.co_filename for code in codes}


def functions_of(codes: Iterable[CodeType]) -> set[CodeType]:
    """Returns functions that have a name."""
    return {code for code in codes if not code.co_name.startswith("<")}


def entered() -> dict[str, int]:
    """Returns how many files, classes and functions of pipegrad one step enters."""
    watch = Entered(PACKAGE, HANDLERS)
    topology = pipegrad.Topology.create(pipeline=2)
    stage, module = topology.coordinate("pp"), Stage()
    handlers = ["pipeline-shared", "data-parallel"]
    ties = {TIE: [["w"]]}
    sync = pipegrad.GradientSync({stage: module}, topology, handlers=handlers, **ties)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=0.1)
    for number in range(3):
        measured = number == 2
        watch.phase = "before" if measured else ""
        sync.prepare()
        sync.stage_first_use(stage)
        watch.phase = "gradient" if measured else ""
        module.w.sum().backward()
        sync.stage_final(stage)
        sync.finish()
        watch.phase = "behind" if measured else ""
        sync.clip_grad_norm_(1.0)
        optimizer.step()
        sync.publish()
        optimizer.zero_grad()
    watch.phase = ""
    watch.end()
    main = watch.threads()[0]
    classes = {c.co_qualname.rpartition(".")[0] for c in main if "." in c.co_qualname}
    return {
        "files that one step enters, main thread": len(files_of(main)),
        "classes, likewise": len({c for c in classes if "<locals>" not in c}),
        "functions, likewise": len(functions_of(main)),
        "files from backward to the end of finish, all threads": len(
            files_of(code for thread in watch.threads("gradient") for code in thread)
        ),
    }


Numbers = tuple[int, int, int, int]  # files, functions, changes of file, threads


def third(watch: Entered, step: Callable[[], object]) -> list[Numbers]:
    """Takes three steps; returns what the third enters, in the main thread and in all."""
    for phase in ("", "", "step"):
        watch.phase = phase
        step()
    watch.phase = ""
    watch.end()
    found = []
    for threads in (watch.threads()[:1], watch.threads()):
        codes = [code for thread in threads for code in thread]
        changes = sum(a.co_filename != b.co_filename for t in threads for a, b in pairwise(t))
        used = sum(map(bool, threads))
        found.append((len(files_of(codes)), len(functions_of(codes)), changes, used))
    return found


def of_scheduler() -> list[Numbers]:
    """Returns what a step of pipegrad enters, on this rank."""
    watch, topology = Entered(PACKAGE, HANDLERS), pipegrad.Topology.create(pipeline=2)
    torch.manual_seed(topology.coordinate("pp"))
    stage = pipegrad.Stage(nn.Linear(WIDTH, WIDTH), topology.coordinate("pp"))
    options = {"schedule": "1f1b", "num_microbatches": MICROBATCHES, "loss_fn": F.mse_loss}
    scheduler = pipegrad.Scheduler([stage], topology, **options)
    x = torch.ones(ROWS, WIDTH)
    found = third(watch, lambda: scheduler.step(x, target=x))
    scheduler.close()
    return found


def of_torch() -> list[Numbers]:
    """Returns what a step of torch.distributed.pipelining enters, on this rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    watch, rank, x = Entered(PIPELINING), torch.distributed.get_rank(), torch.ones(ROWS, WIDTH)
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    return third(watch, lambda: schedule.step(target=x) if rank else schedule.step(x))


def of_torchgpipe() -> list[Numbers]:
    """Returns what a step of torchgpipe enters: one process, all stages."""
    import torchgpipe

    watch, x = Entered(Path(torchgpipe.__file__).parent), torch.ones(ROWS, WIDTH)
    stages = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    options = {"devices": ["cpu", "cpu"], "chunks": MICROBATCHES, "checkpoint": "never"}
    model = torchgpipe.GPipe(stages, [1, 1], **options)
    return third(watch, lambda: F.mse_loss(model(x), x).backward())


def print_pipelines() -> None:
    """Prints the table of pipelines."""
    systems = {"pipegrad": (of_scheduler, 2), "torch.distributed.pipelining": (of_torch, 2)}
    if importlib.util.find_spec("torchgpipe"):
        systems["torchgpipe"] = (of_torchgpipe, 1)
    print(f"{'one step of a pipeline enters':48}   files  functions  changes of file  threads")
    for system, (counted, num_ranks) in systems.items():
        for rank, numbers in enumerate(run_ranks(counted, num_ranks)):
            where = f"{system}, rank {rank}" if num_ranks > 1 else system
            for which, row in zip(("main thread", "all threads"), numbers, strict=True):
                print(f"{f'{where}, {which}':48} {row[0]:7} {row[1]:10} {row[2]:16} {row[3]:8}")
    if "torchgpipe" not in systems:
        print("torchgpipe is not installed")


def main() -> None:
    """Prints the table."""
    files = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    comments = sum(
        line.lstrip().startswith("#") for p in files for line in p.read_text().splitlines()
    )
    biggest = max(files, key=lambda path: files[path])
    words = len((PACKAGE.parent / "README.md").read_text().split())
    for what, number in run_ranks(entered, 2)[0].items():
        print(f"{what}: {number}")
    print(f"lines: {sum(files.values())} in {len(files)} files")
    print(f"biggest file: {biggest.relative_to(PACKAGE.parent)}, {files[biggest]} lines")
    print(f"lines that are comments: {comments / sum(files.values()):.1%}")
    print(f"public names: {len(pipegrad.__all__)}")
    print(f"words of the README: {words}")
    print_pipelines()


if __name__ == "__main__":
    main()
