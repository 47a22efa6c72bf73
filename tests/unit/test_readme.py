"""What README.md and docs/ show compiles, commands are as written, and links lead somewhere."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipegrad.cli import main
from tests.support.pages import PAGES, ROOT, SCRIPTS, SNIPPETS, write_handler

COMMANDS = [
    line.partition("#")[0]
    for page in PAGES.values()
    for line in page.splitlines()
    if " JOB.toml" in line
]


def test_the_first_snippet_and_the_one_line_are_scripts() -> None:
    assert [page for page, _ in SCRIPTS] == ["README.md", "docs/attach.md"]
    assert SNIPPETS[0][2] == SCRIPTS[0][1]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_every_snippet_compiles(number: int) -> None:
    page, heading, code = SNIPPETS[number]
    compile(code, f"{page}, {heading}", "exec")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run_as_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 16, point 18. One named a handler that is not installed, one a batch too small."""
    write_handler(tmp_path, monkeypatch)
    for example in ("tied_gpt.toml", "tied_gpt.py"):
        shutil.copy(ROOT / "examples" / example, tmp_path)
    words = shlex.split(command)
    options = words[words.index("JOB.toml") + 1 :]
    alone = "--nproc-per-node" not in words
    ranks = ["--ranks", "1" if alone else words[words.index("--nproc-per-node") + 1]]
    ranks = [] if "--ranks" in options else ranks
    job = str(tmp_path / "tied_gpt.toml")
    found = CliRunner().invoke(main, ["plan", job, *ranks, *options])
    assert found.exit_code == 0, found.output


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("name", ["config.md", "timeline.svg"])
def test_what_is_made_of_code_is_up_to_date(name: str) -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "docs"))["pages"]()
    path = ROOT / "docs" / name
    assert path.read_text(encoding="utf-8") == pages[path], "run scripts/docs"


def prose(page: str) -> str:
    """Returns a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[name]):
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), link


def test_the_index_has_every_page() -> None:
    pages = {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")}
    listed = re.findall(r"^\| \[(\S+)\]", PAGES["docs/index.md"], re.MULTILINE)
    assert set(listed) == pages - {"index.md"}


def test_internals_name_every_file() -> None:
    """Folder by folder, in the table at the end of the page."""
    last = PAGES["docs/internals.md"].partition("## Where each file is")[2]
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", last, re.MULTILINE)
    told = {folder: set(re.findall(r"(\w+\.py)`", files)) for folder, files in rows}
    there = {
        folder.name: {f.name for f in folder.rglob("*.py") if not f.name.startswith("__")}
        for folder in (ROOT / "pipegrad").iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    }
    there["schedules"] -= {f.name for f in (ROOT / "pipegrad/schedules/builtin").glob("*.py")}
    assert told == there


def test_the_readme_is_short() -> None:
    assert len(prose(PAGES["README.md"]).split()) <= 700
