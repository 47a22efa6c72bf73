"""Runs the blocks of a page, on the ranks of a world that is there already."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from pipegrad.cli import main
from pipegrad.observe import links
from pipegrad.testing import ranks
from pipegrad.train.config import Config
from tests.support.pages import ROOT, Block

# Jobs of this repository, and the reader's own, which is a copy of one: some steps show enough.
_LONG_JOBS = ("examples/", "JOB.toml")
_STEPS = ["--set", "train.steps=2"]
_OF_AUDITS = ("torch._dynamo", "pipegrad.audit.script", "pipegrad.pipeline.scheduler")


def run_page(blocks: Sequence[Block], folder: Path) -> list[str]:
    """Runs the blocks in order; returns what each of those that run prints on all ranks."""
    page = _Page()
    with _inside(folder, page.group):
        for block in (block for block in blocks if block.runs):
            try:
                page.printed.append(_run(block, page))
            except BaseException as error:
                error.add_note(f"In {block.page}, the block of line {block.line}.")
                raise
    return page.printed[1:]


class _Page:
    """What the blocks of a page share.

    Attributes:
        group: The default process group.
        printed: What each block has printed.
    """

    def __init__(self) -> None:
        self.group = _Group()
        self.printed = [""]
        self._space: dict[str, Any] = {"__name__": "__main__"}
        self._checks: dict[str, Any] = {}

    def run(self, code: CodeType) -> None:
        """Runs a visible block."""
        exec(code, self._space)

    def check(self, code: CodeType) -> None:
        """Runs a hidden block: it sees all names, and what was `printed`. Nobody sees what it did.

        Raises:
            AssertionError: If a visible block could see that it ran.
        """
        self._checks |= self._space | {"printed": self.printed[-1]}
        before = _outside()
        with torch.random.fork_rng(devices=[]):
            exec(code, self._checks)
        after = _outside()
        changed = [name for name in before if before[name] != after[name]]
        assert not changed, f"a hidden block changes {changed}"


def _outside() -> dict[str, Any]:
    """Returns what a hidden block could change for others."""
    files = {path for path in Path().rglob("*") if "__pycache__" not in path.parts}
    return {"files": files, "sys.path": [*sys.path], "os.environ": dict(os.environ)}


class _Group:
    """The default process group, as the code of a page sees it.

    A script makes and destroys its process group. Here blocks, and pages, share the one of the
    test: it is there all the time, as the watch sees it. Code sees it after it has called
    `init_process_group`, as a reader must.
    """

    def __init__(self) -> None:
        self.is_made = False

    def make(self, *_: Any, **__: Any) -> None:
        if self.is_made:
            raise ValueError("trying to initialize the default process group twice!")
        self.is_made = True

    def destroy(self, group: dist.ProcessGroup | None = None) -> None:
        if group in (None, dist.group.WORLD):
            self.is_made = False

    def __bool__(self) -> bool:
        return self.is_made

    @contextlib.contextmanager
    def of_another_program(self) -> Iterator[None]:
        before, self.is_made = self.is_made, True  # `pipegrad` makes none if there is one
        try:
            yield
        finally:
            self.is_made = before


@contextlib.contextmanager
def _inside(folder: Path, group: _Group) -> Iterator[None]:
    """Lets the code of a page see its folder, and nothing of this page last in the process."""
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        mock.patch.dict(os.environ),
        mock.patch.object(dist, "is_initialized", group.__bool__),
        mock.patch.object(dist, "init_process_group", group.make),
        mock.patch.object(dist, "destroy_process_group", group.destroy),
    ):
        yield
    for name, module in list(sys.modules.items()):
        if str(folder) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


def _run(block: Block, page: _Page) -> str:
    """Does what the block says; returns what all ranks print."""
    if block.marker == "output":
        _compare(block, page.printed[-1])
        return page.printed[-1]
    if block.marker == "file":
        return _on_first_rank(lambda: _write(block))
    if block.language == "toml":
        return _check_configuration(block.code)
    if block.language == "console":
        found = list(commands(block))
        assert found, "a console block has commands behind $"
        with page.group.of_another_program():
            return "".join(_command(command) for command in found)
    code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
    run = page.check if block.marker == "run" else page.run
    return _on_all_ranks(lambda: run(code))


def _on_all_ranks(call: Callable[[], object]) -> str:
    """Returns what the call prints on all ranks."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, out.getvalue())
    return "".join(everywhere)


def _on_first_rank(call: Callable[[], object]) -> str:
    return _on_all_ranks(call if dist.get_rank() == 0 else lambda: None)


def _write(block: Block) -> None:
    path = Path(block.argument)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.code)


def _compare(block: Block, printed: str) -> None:
    """Raises unless each line was printed."""
    lines = {line.rstrip() for line in printed.splitlines()} | {""}
    missing = [line for line in block.code.splitlines() if not _is_in(line.rstrip(), lines)]
    assert not missing, f"not printed: {missing}; printed was:\n{printed}"


def _is_in(line: str, lines: Collection[str]) -> bool:
    """Returns whether a line was printed, or one that begins like it if it ends with dots."""
    begin = line.removesuffix("...")
    return line in lines or (line != begin and any(there.startswith(begin) for there in lines))


def _check_configuration(text: str) -> str:
    """Raises unless a part of a configuration has keys and values that there are."""
    try:
        Config.model_validate(tomllib.loads(text))
    except ValidationError as error:
        wrong = [each for each in error.errors() if each["type"] != "missing"]
        assert not wrong, wrong
    return ""


def commands(block: Block) -> Iterator[str]:
    """Yields the commands of a console block, without prompts."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield line.removeprefix("$ ")


def _command(command: str) -> str:
    """Runs a command as torchrun, python and the shell would; returns what it prints."""
    words = shlex.split(command, comments=True)
    while "=" in words[0]:  # a variable
        words = words[1:]
    target = words.pop() if ">" in words else None
    program, *words = [word for word in words if word != ">"]
    if (program, *words[:2]) == ("pipegrad", "launch", "-n"):
        trains = [] if words[3].endswith(".py") else ["-m", "pipegrad", "train"]
        program, words = "torchrun", ["--nproc-per-node", words[2], *trains, *words[3:]]
    if program == "torchrun":
        return _on_all_ranks(lambda: _torchrun(words))
    known = {"pipegrad": _pipegrad, "python": _python, "pip": _pip, "cp": _cp}
    assert program in known, f"{program}: this harness runs {', '.join(known)} and torchrun"
    printed = _on_first_rank(lambda: known[program](words))
    if target:
        _on_first_rank(lambda: Path(target).write_text(printed))
    return printed


def _torchrun(words: list[str]) -> None:
    """Runs what torchrun would start, on the ranks that there are."""
    words = [word for word in words if word != "--standalone"]
    option, number, *words = words
    size = str(dist.get_world_size())
    assert (option, number) == ("--nproc-per-node", size), f"this page runs on {size} ranks"
    if words[0] != "-m":
        return _python(words)
    if words[1] == "pipegrad":
        return _pipegrad(words[2:])
    raise AssertionError(f"no program {words[1]}")


def _pipegrad(words: list[str]) -> None:
    if words[0] == "audit":
        return _audit(words)
    if words[0] == "train" and words[1].startswith(_LONG_JOBS):
        words = [*words, *_STEPS]
    # What the doctor finds in a short time need not be right.
    # The installed command has no folder of the reader on its path.
    path = [folder for folder in sys.path if folder != str(Path.cwd())]
    with (
        mock.patch.multiple(links, _LONG_SECONDS=1e-3, _REPEATS=1),
        mock.patch.object(sys, "path", path),
    ):
        code = main(words, standalone_mode=False)
    assert not code, code
    return None


def _audit(words: list[str]) -> None:
    """Runs an audit in ranks of its own. Exit code 1 says that something is wrong, as it may."""
    # The fork server of this rank imports once what all ranks of all audits need.
    ranks._fork_server().set_forkserver_preload([*ranks._PRELOADED, *_OF_AUDITS])
    alone = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    with mock.patch.dict(os.environ, alone, clear=True), pytest.raises(SystemExit) as ended:
        main(words, standalone_mode=False)
    assert ended.value.code in {0, 1}, ended.value.code


def _python(words: list[str]) -> None:
    if words[0] == "-m":
        assert words[1] == "pipegrad", words
        return _pipegrad(words[2:])
    if words[0] == "examples/smollm2.py":  # a small model, with a chat template, in its place
        words = ["examples/make_hf.py", "runs/smollm2"]
    if words[0] == "examples/finetune_hf.py":
        words = [*words[:-1], "2"]  # steps
    script = str(Path(words[0]).resolve())
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "path", [str(Path(script).parent), *sys.path]),
    ):
        dist.destroy_process_group()  # a script makes its own
        runpy.run_path(script, run_name="__main__")
    return None


def _cp(words: list[str]) -> None:
    *files, target = words
    for file in files:
        shutil.copy(file, target)


def _pip(words: list[str]) -> None:
    """Installs nothing; raises unless the extras that are named exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for word in words for extra in word.partition("[")[2].rstrip("]").split(",")}
    assert named - {""} <= extras["optional-dependencies"].keys(), words
