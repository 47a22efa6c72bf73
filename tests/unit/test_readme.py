"""What README.md and docs/ show compiles, commands are as written, and links lead somewhere."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

import pipegrad
from tests.support.pages import (
    BLOCKS,
    LANGUAGES,
    PAGES,
    ROOT,
    gaps,
    prose,
    undefined,
)

# How many blocks of a page cannot run here.
SKIPPED = {
    "CONTRIBUTING.md": 4,
    "README.md": 2,
    "docs/audit.md": 1,
    "docs/coming_from/other_frameworks.md": 2,
    "docs/faults.md": 1,
    "docs/how_to/slurm_and_kubernetes.md": 2,
    "docs/how_to/write_a_codec.md": 1,
    "docs/how_to/write_a_handler.md": 1,
}
EVERY = [block for blocks in BLOCKS.values() for block in blocks]


def test_every_block_says_its_language() -> None:
    wrong = [f"{b.page}:{b.line}: {b.language!r}" for b in EVERY if b.language not in LANGUAGES]
    indented = [page for page, text in PAGES.items() if re.search(r"^ +```", text, re.MULTILINE)]
    assert wrong + indented == []  # blocks inside of lists would not run


def test_every_comment_is_a_marker() -> None:
    """A marker that is misspelt would be ignored."""
    for page, text in PAGES.items():
        code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        marker = r"^<!-- (?:(?:file|skip|ranks): .+ -->|output -->|run$)"
        known = re.findall(marker, code, re.MULTILINE)
        assert len(re.findall("^<!--", code, re.MULTILINE)) == len(known), page


def test_few_blocks_are_skipped_and_each_says_why() -> None:
    skipped = [block for block in EVERY if block.marker == "skip"]
    assert [f"{block.page}:{block.line}" for block in skipped if not block.argument] == []
    pages = [block.page for block in skipped]
    assert {page: pages.count(page) for page in pages} == SKIPPED


@pytest.mark.parametrize("page", BLOCKS)
def test_python_compiles_and_toml_is_read(page: str) -> None:
    for block in BLOCKS[page]:
        if block.language == "python":
            compile("\n" * (block.line - 1) + block.code, page, "exec")
        if block.language == "toml":
            tomllib.loads(block.code)


@pytest.mark.parametrize("page", BLOCKS)
def test_a_reader_can_copy_a_page(page: str) -> None:
    """25 of 35 pages had names that hidden blocks defined; many had no import of torch."""
    assert [*gaps(page)] == []


def test_code_that_is_folded_is_still_code() -> None:
    """Markdown reads no code in lines that touch a tag of HTML."""
    for page, text in PAGES.items():
        tags = re.findall(r"^</?details>.*$", text, re.MULTILINE)
        assert len(re.findall(r"(?<=\n\n)</?details>.*(?=\n\n)", text + "\n")) == len(tags), page


def test_a_name_counts_if_a_block_before_defines_it() -> None:
    blocks = [
        "import a.b\nc: int = a.b",
        "def f(x):\n    y = x + c\n    return [y + z + d for z in e]",
        "class G(f):\n    w = v\nd = len([w for w in __name__])",
    ]
    assert [*undefined(blocks)] == [[], ["d", "e"], ["v"]]


def test_what_is_made_of_code_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "docs"))["pages"]()
    assert {*ROOT.glob("docs/drawings/*.svg")} - made.keys() == set()
    stale = [path for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run scripts/docs"


def anchors(page: str) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", prose(name)):
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), link


def test_the_index_has_every_page() -> None:
    """The side bar of the site is made from it."""
    listed = re.findall(r"^- \[[^\]]+\]\((\S+?)\)", PAGES["docs/index.md"], re.MULTILINE)
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.[mr][ds]*") if is_page(path)}
    pages |= {*ROOT.glob("benchmarks/*/README.md"), *ROOT.glob("examples/*/README.md")}
    pages |= {ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"}
    assert [link for link in listed if listed.count(link) > 1] == []
    assert {(ROOT / "docs" / link).resolve() for link in listed} == pages


def is_page(path: Path) -> bool:
    return path.suffix in (".md", ".rst") and "_build" not in path.parts and path.stem != "index"


def test_the_reference_has_every_public_name() -> None:
    pages = (path.read_text() for path in (ROOT / "docs" / "reference").glob("*.rst"))
    documented = set(re.findall(r"^\.\. auto\w+:: (\S+)", "\n".join(pages), re.MULTILINE))
    public = {f"pipegrad.{name}" for name in pipegrad.__all__}
    for module in (pipegrad.schedules, pipegrad.checkpoint):
        public.remove(module.__name__)
        public |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert public - documented == set()


def test_the_list_of_files_has_a_sentence_for_each() -> None:
    listed = [*runpy.run_path(str(ROOT / "scripts" / "docs"))["files"]()]
    sentences = [line.partition("`: ")[2] for line in listed if line.startswith("- ")]
    assert len(sentences) > 100
    assert [line for line in sentences if not line.endswith((".", "?"))] == []


def test_the_readme_is_short() -> None:
    words = [word for word in prose("README.md").split() if re.search(r"\w", word)]
    assert len(words) <= 600
