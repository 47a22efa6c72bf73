"""Measures the house: what one step enters, how long files are, how many names are public.

    python scripts/house.py

Two gloo ranks hold a tied weight. The third step is measured: the first two compare copies, and
the first makes what is kept. This works on any commit whose GradientSync has the verbs of today.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

import pipegrad
from pipegrad.testing import run_ranks

PACKAGE = Path(pipegrad.__file__).parent
HANDLERS = PACKAGE.parent / "handlers"
TIE = "tied" if hasattr(pipegrad, "find_tied") else "shared"


class Stage(nn.Module):
    """A stage that holds the tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))


def entered() -> dict[str, int]:
    """Returns how many files, classes and functions of pipegrad one step enters."""
    phase, found = "", dict[str, set[CodeType]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if phase and event == "call" and file.startswith((str(PACKAGE), str(HANDLERS))):
            found.setdefault(phase, set()).add(frame.f_code)
            if threading.current_thread() is threading.main_thread():
                found.setdefault("main", set()).add(frame.f_code)

    threading.setprofile(note)  # of comm streams, which are threads on CPU
    topology = pipegrad.Topology.create(pipeline=2)
    stage, module = topology.coordinate("pp"), Stage()
    handlers = ["pipeline-shared", "data-parallel"]
    ties = {TIE: [["w"]]}
    sync = pipegrad.GradientSync({stage: module}, topology, handlers=handlers, **ties)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=0.1)
    sys.setprofile(note)
    for number in range(3):
        measured = number == 2
        phase = "before" if measured else ""
        sync.prepare()
        sync.stage_first_use(stage)
        phase = "gradient" if measured else ""
        module.w.sum().backward()
        sync.stage_final(stage)
        sync.finish()
        phase = "behind" if measured else ""
        sync.clip_grad_norm_(1.0)
        optimizer.step()
        sync.publish()
        optimizer.zero_grad()
    phase = ""
    sys.setprofile(None)
    threading.setprofile(None)
    main = found["main"]
    classes = {c.co_qualname.rpartition(".")[0] for c in main if "." in c.co_qualname}
    return {
        "files that one step enters, main thread": len({code.co_filename for code in main}),
        "classes, likewise": len({c for c in classes if "<locals>" not in c}),
        "functions, likewise": len({c for c in main if not c.co_name.startswith("<")}),
        "files from backward to the end of finish, all threads": len(
            {code.co_filename for code in found["gradient"]}
        ),
    }


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


if __name__ == "__main__":
    main()
