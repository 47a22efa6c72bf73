"""Measures the house: statements, lines and functions of each folder, and what a step enters.

    python scripts/house.py                                        # this tree
    PYTHONPATH=OTHER:OTHER/handlers python scripts/house.py        # another checkout

Statements are those of the syntax tree without docstrings, so neither long lines nor comments
change their number. What a step enters is counted in the third of three: the first two compare
copies, and the first makes what is kept. It is the union of all ranks, each function once.

Peers are counted alike: FSDP2 for a gradient, torch.distributed.pipelining for a step, and
torchgpipe, if it can be imported. Each counts its own files.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import pipegrad
from drawings.folders import CORE
from pipegrad.testing import run_ranks

PACKAGE = Path(pipegrad.__file__).parent
ROOT = PACKAGE.parent
HANDLERS = ROOT / "handlers"
PIPELINING = Path(torch.__file__).parent / "distributed" / "pipelining"
ROWS, WIDTH, MICROBATCHES = 8, 4, 4


class Stage(nn.Module):
    """A stage that holds the tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies by the weight."""
        return self.w * x


Walk = set[tuple[str, int]]  # functions by file and first line


class Entered:
    """Collects the functions of some folders that are entered while it is on."""

    def __init__(self, *folders: Path) -> None:
        self.is_on = False
        self.walk: Walk = set()
        self._folders = tuple(map(str, folders))
        threading.setprofile(self._see)  # comm streams are threads on CPU
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code: CodeType = frame.f_code
        if self.is_on and event == "call" and code.co_filename.startswith(self._folders):
            self.walk.add((code.co_filename, code.co_firstlineno))


def third(entered: Entered, step: Callable[[], object]) -> Walk:
    """Takes three steps; returns what the third enters, in all threads."""
    for is_on in (False, False, True):
        entered.is_on = is_on
        step()
    sys.setprofile(None)
    threading.setprofile(None)
    return entered.walk


def of_sync() -> Walk:
    """Returns what a tied gradient enters from its backward until its parameter has stepped."""
    entered = Entered(PACKAGE, HANDLERS)
    topology = pipegrad.Topology.create(pipeline=2)
    stage, module = topology.coordinate("pp"), Stage()
    handlers = ["pipeline-shared", "data-parallel"]
    sync = pipegrad.GradientSync({stage: module}, topology, handlers=handlers, tied=[["w"]])
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

    return third(entered, step)


def of_fsdp2() -> Walk:
    """Returns what a sharded gradient of FSDP2 enters, likewise."""
    import torch.distributed.fsdp._fully_shard as folder
    from torch.distributed.device_mesh import init_device_mesh

    entered, module = Entered(Path(folder.__file__).parent), Stage()
    folder.fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> None:
        module(torch.ones(4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return third(entered, step)


def of_scheduler(*, is_tied: bool) -> Walk:
    """Returns what a step of pipegrad enters, with or without a weight of both stages."""
    entered, topology = Entered(PACKAGE, HANDLERS), pipegrad.Topology.create(pipeline=2)
    torch.manual_seed(topology.coordinate("pp"))
    module = nn.Linear(WIDTH, WIDTH)
    if is_tied:
        nn.init.ones_(module.weight)
    stage = pipegrad.Stage(module, topology.coordinate("pp"))
    options = {"schedule": "1f1b", "num_microbatches": MICROBATCHES, "loss_fn": F.mse_loss}
    tied = [["weight"]] if is_tied else []
    scheduler = pipegrad.Scheduler([stage], topology, tied=tied, **options)
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
    x = torch.ones(ROWS, WIDTH)

    def step() -> None:
        scheduler.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()

    walk = third(entered, step)
    scheduler.close()
    return walk


def of_torch() -> Walk:
    """Returns what a step of torch.distributed.pipelining enters, on this rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    entered, rank, x = Entered(PIPELINING), torch.distributed.get_rank(), torch.ones(ROWS, WIDTH)
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    return third(entered, lambda: schedule.step(target=x) if rank else schedule.step(x))


def of_torchgpipe() -> Walk:
    """Returns what a step of torchgpipe enters: one process, all stages."""
    import torchgpipe

    entered, x = Entered(Path(torchgpipe.__file__).parent), torch.ones(ROWS, WIDTH)
    stages = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    options = {"devices": ["cpu", "cpu"], "chunks": MICROBATCHES, "checkpoint": "never"}
    model = torchgpipe.GPipe(stages, [1, 1], **options)
    return third(entered, lambda: F.mse_loss(model(x), x).backward())


def print_walks() -> None:
    """Prints what one step enters, beside peers. FSDP2 computes its forward in it, too."""
    systems: dict[str, tuple[Callable[[], Walk], int]] = {
        "a tied gradient: pipegrad": (of_sync, 2),
        "a sharded gradient: FSDP2": (of_fsdp2, 2),
        "a plain step: pipegrad": (partial(of_scheduler, is_tied=False), 2),
        "a tied step: pipegrad": (partial(of_scheduler, is_tied=True), 2),
        "a plain step: torch's 1F1B": (of_torch, 2),
    }
    if importlib.util.find_spec("torchgpipe"):
        systems["a plain step: torchgpipe"] = (of_torchgpipe, 1)
    print(f"\n{'what is entered in':28}  files  functions  statements")
    for system, (walk_of, num_ranks) in systems.items():
        walk: Walk = set().union(*run_ranks(walk_of, num_ranks))
        sizes = {file: statements_of_functions(Path(file)) for file, _ in walk}
        entered = {(file, line) for file, line in walk if line in sizes[file]}
        number = sum(sizes[file][line] for file, line in entered)
        print(f"{system:28} {len(sizes):6} {len(entered):10} {number:11}")


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


def num_statements(tree: ast.AST) -> int:
    """Returns the statements below a node of a syntax tree, docstrings not counted."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    docstrings = sum(is_docstring(body[0]) for body in bodies if body)
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - docstrings


def is_docstring(statement: ast.stmt) -> bool:
    """Returns whether the first statement of a body is a docstring."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def statements_of_functions(path: Path) -> dict[int, int]:
    """Returns the statements of each function of a file, by its first line, as code objects say."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, FUNCTIONS)]
    lines = [min([n.lineno, *(d.lineno for d in n.decorator_list)]) for n in nodes]
    return {line: num_statements(n) - 1 for line, n in zip(lines, nodes, strict=True)}


def words(pages: Iterable[Path]) -> int:
    """Returns the words of pages."""
    return sum(len(page.read_text().split()) for page in pages)


def row(name: str, files: Iterable[Path]) -> str:
    """Returns the line of a folder: statements, lines, files and functions."""
    sources = [path.read_text() for path in files]
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = sum(isinstance(node, FUNCTIONS) for node in nodes)
    statements, lines = sum(map(num_statements, trees)), sum(s.count("\n") for s in sources)
    return f"{name:28} {statements:11} {lines:7} {len(sources):6} {functions:10}"


def print_tree() -> None:
    """Prints the size of each folder, of the product, of tests and pages."""
    files = sorted([*PACKAGE.rglob("*.py"), *HANDLERS.rglob("*.py")])
    folders: dict[str, list[Path]] = {}
    for path in files:
        top = path.relative_to(PACKAGE).parts[0] if path.is_relative_to(PACKAGE) else "handlers"
        folders.setdefault(top if path.parent != PACKAGE else "top level", []).append(path)
    print(f"{'':28}  statements   lines  files  functions")
    for name, own in folders.items():
        print(row(name, own))
    names = {*CORE, "top level"} - {"testing"}  # which no step of a user enters
    core = [path for name in names for path in folders.get(name, [])]
    print(row("core", core))
    print(row("tools", set(files) - set(core)))
    print(row("product", files))
    print(row("tests", (ROOT / "tests").rglob("*.py")))
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    print(f"words: {words([ROOT / 'README.md'])} in the README, {words(pages)} in docs/")


if __name__ == "__main__":
    print_tree()
    print_walks()
