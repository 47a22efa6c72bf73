"""Measures the house: lines, files and functions, and what one step enters.

    python scripts/house.py                                        # this tree
    PYTHONPATH=OTHER:OTHER/handlers python scripts/house.py        # another checkout

Two gloo ranks hold a tied weight. The third step is measured: the first two compare copies, and
the first makes what is kept. This works on any commit whose GradientSync has the verbs of today.

A step of a pipeline of two stages and four microbatches is counted alike for `Scheduler`, for
torch.distributed.pipelining, and for torchgpipe if it can be imported. Each counts its own files.
"""

from __future__ import annotations

import ast
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
from drawings.folders import CORE, TOOLS
from pipegrad.testing import run_ranks

PACKAGE = Path(pipegrad.__file__).parent
ROOT = PACKAGE.parent
HANDLERS = ROOT / "handlers"
PIPELINING = Path(torch.__file__).parent / "distributed" / "pipelining"
TIE = "tied" if hasattr(pipegrad, "find_tied") else "shared"
ROWS, WIDTH, MICROBATCHES = 8, 4, 4


class Stage(nn.Module):
    """A stage that holds the tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies by the weight."""
        return self.w * x


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


Numbers = tuple[int, int, int, int]  # files, functions, changes of file, threads


def numbers(threads: list[list[CodeType]]) -> Numbers:
    """Returns how many files and functions were entered, and how often the file changed."""
    codes = [code for thread in threads for code in thread]
    changes = sum(a.co_filename != b.co_filename for t in threads for a, b in pairwise(t))
    return len(files_of(codes)), len(functions_of(codes)), changes, sum(map(bool, threads))


def third(watch: Entered, step: Callable[[], object]) -> list[Numbers]:
    """Takes three steps; returns what the third enters, in the main thread and in all."""
    for phase in ("", "", "step"):
        watch.phase = phase
        step()
    watch.phase = ""
    watch.end()
    return [numbers(watch.threads()[:1]), numbers(watch.threads())]


def of_sync() -> list[Numbers]:
    """Returns what a tied gradient enters from its backward until its parameter has stepped."""
    watch = Entered(PACKAGE, HANDLERS)
    topology = pipegrad.Topology.create(pipeline=2)
    stage, module = topology.coordinate("pp"), Stage()
    handlers = ["pipeline-shared", "data-parallel"]
    ties = {TIE: [["w"]]}
    sync = pipegrad.GradientSync({stage: module}, topology, handlers=handlers, **ties)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=0.1)

    def step() -> None:
        sync.prepare()
        sync.stage_first_use(stage)
        module.w.sum().backward()
        sync.stage_final(stage)
        sync.finish()
        sync.clip_grad_norm_(1.0)
        optimizer.step()
        sync.publish()
        optimizer.zero_grad()

    return third(watch, step)


def of_fsdp2() -> list[Numbers]:
    """Returns what a sharded gradient of FSDP2 enters, likewise."""
    import torch.distributed.fsdp._fully_shard as folder
    from torch.distributed.device_mesh import init_device_mesh

    watch, module = Entered(Path(folder.__file__).parent), Stage()
    folder.fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> None:
        module(torch.ones(4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return third(watch, step)


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


def print_walks() -> None:
    """Prints what one step enters, beside peers. FSDP2 computes its forward in it, too."""
    walks = {
        "a tied gradient": {"pipegrad": (of_sync, 2), "FSDP2, sharded": (of_fsdp2, 2)},
        "a step of a pipeline": {
            "pipegrad": (of_scheduler, 2),
            "torch.distributed.pipelining": (of_torch, 2),
        },
    }
    if importlib.util.find_spec("torchgpipe"):
        walks["a step of a pipeline"]["torchgpipe"] = (of_torchgpipe, 1)
    for what, systems in walks.items():
        print(f"\n{what + ' enters':48}   files  functions  changes of file  threads")
        for system, (counted, num_ranks) in systems.items():
            for rank, found in enumerate(run_ranks(counted, num_ranks)):
                for which, row in zip(("main thread", "all threads"), found, strict=True):
                    where = f"{system}, rank {rank}, {which}"
                    print(f"{where:48} {row[0]:7} {row[1]:10} {row[2]:16} {row[3]:8}")


def functions_in(path: Path) -> list[int]:
    """Returns the lines of each function of a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(path.read_text()))
    return [(n.end_lineno or n.lineno) - n.lineno + 1 for n in nodes if isinstance(n, kinds)]


def importers(files: Iterable[Path]) -> dict[Path, set[Path]]:
    """Returns each file -> the files that import from it. Faces of folders do not count."""
    found: dict[Path, set[Path]] = {path: set() for path in files}
    for path in found:
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name == "__init__.py" or not isinstance(node, ast.ImportFrom):
                continue
            for name in (str(node.module), *(f"{node.module}.{a.name}" for a in node.names)):
                home = (ROOT / name.replace(".", "/")).with_suffix(".py")
                if home in found and home != path:
                    found[home].add(path)
    return found


def words(*pages: Path) -> int:
    """Returns the words of pages."""
    return sum(len(page.read_text().split()) for page in pages)


def print_tree() -> None:
    """Prints what can be counted without a step."""
    files = sorted([*PACKAGE.rglob("*.py"), *HANDLERS.rglob("*.py")])
    lines = {path: path.read_text().splitlines() for path in files}
    print(f"{'':24}  lines  files  functions")
    folders: dict[str, list[Path]] = {}
    for path in files:
        top = path.relative_to(PACKAGE).parts[0] if path.is_relative_to(PACKAGE) else "handlers"
        folders.setdefault(top if path.parent != PACKAGE else "beside them", []).append(path)
    for what, parts in (("core", CORE), ("tools", TOOLS), ("product", list(folders))):
        folders[what] = [path for part in parts for path in folders.get(part, [])]
    for name, own in folders.items():
        length, count = sum(len(lines[p]) for p in own), sum(len(functions_in(p)) for p in own)
        print(f"{name:24} {length:6} {len(own):6} {count:10}")
    users, names = importers(files), [p.name for p in files if p.name != "__init__.py"]
    once = [p for p, who in users.items() if len(who) == 1 and p.name != "__init__.py"]
    every = [line for own in lines.values() for line in own]
    tests = [*(ROOT / "tests").rglob("*.py")]
    docs = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    biggest = max(files, key=lambda path: len(lines[path]))
    long = sorted(n for path in files for n in functions_in(path))
    print(f"biggest file: {biggest.relative_to(ROOT)}, {len(lines[biggest])} lines")
    print(f"lines of a function, median: {long[len(long) // 2]}")
    print(f"lines that are comments: {sum(x.lstrip()[:1] == '#' for x in every) / len(every):.1%}")
    print(f"file names that are used twice: {len({n for n in names if names.count(n) > 1})}")
    small = [path for path in once if len(lines[path]) <= 100]
    print(f"modules with one importer: {len(once)}, of at most 100 lines: {len(small)}")
    print(f"public names: {len(pipegrad.__all__)}")
    print(
        f"tests: {sum(len(p.read_text().splitlines()) for p in tests)} lines in {len(tests)} files"
    )
    docs = [page for page in docs if "_build" not in page.parts]
    print(f"words of the README: {words(docs[0])}, of all pages: {words(*docs)}")


if __name__ == "__main__":
    print_tree()
    print_walks()
