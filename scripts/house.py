"""Measures the house: what one step enters, how long files are, how many names are public.

    python scripts/house.py

Two gloo ranks hold a tied weight. The second step is measured, in the main thread. This works on
any commit whose GradientSync has the verbs of today.
"""

from __future__ import annotations

import sys
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
    topology, found = pipegrad.Topology.create(pipeline=2), set[CodeType]()
    stage, module = topology.coordinate("pp"), Stage()
    handlers = ["pipeline-shared", "data-parallel"]
    ties = {TIE: [["w"]]}
    sync = pipegrad.GradientSync({stage: module}, topology, handlers=handlers, **ties)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=0.1)

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith((str(PACKAGE), str(HANDLERS))):
            found.add(frame.f_code)

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

    step()
    sys.setprofile(note)
    step()
    sys.setprofile(None)
    classes = {c.co_qualname.rpartition(".")[0] for c in found if "." in c.co_qualname}
    classes = {c for c in classes if "<locals>" not in c}
    return {
        "files": len({code.co_filename for code in found}),
        "classes": len(classes),
        "functions": len(found),
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
        print(f"{what} that one step enters, main thread: {number}")
    print(f"lines: {sum(files.values())} in {len(files)} files")
    print(f"biggest file: {biggest.relative_to(PACKAGE.parent)}, {files[biggest]} lines")
    print(f"lines that are comments: {comments / sum(files.values()):.1%}")
    print(f"public names: {len(pipegrad.__all__)}")
    print(f"words of the README: {words}")


if __name__ == "__main__":
    main()
