"""The pages of the documentation, and the Python snippets in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCS}


def snippets() -> Iterator[tuple[str, str, str]]:
    """Yields page, heading and code of every Python snippet."""
    for name, page in PAGES.items():
        heading, code = "", list[str]()
        language = None  # of the block that a line is in
        for line in page.splitlines():
            if line.startswith("```"):
                if language == "python":
                    yield name, heading, "\n".join(code)
                language, code = (line[3:] or "text") if language is None else None, []
            elif language is not None:
                code.append(line)
            elif line.startswith("#"):
                heading = line.lstrip("# ")


SNIPPETS = list(snippets())
SCRIPTS = [(page, code) for page, _, code in SNIPPETS if "init_process_group" in code]


def write_handler(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """Writes my_handlers.py as docs/handlers.md has it; returns its test."""
    handler, test = (code for page, _, code in SNIPPETS if page == "docs/handlers.md")
    (folder / "my_handlers.py").write_text(handler)
    patch.syspath_prepend(folder)
    return test
