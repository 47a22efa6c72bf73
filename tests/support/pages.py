"""The pages of the documentation, and the blocks of code in them.

A comment in front of a block says what is done with it; GitHub and the site do not show comments.

    <!-- ranks: 4 -->       once a page: its blocks run on so many ranks, else on one
    <!-- file: job.toml --> the block is a file of this name in the folder where the page runs
    <!-- output -->         the block before printed these lines; a line ... stands for others
    <!-- skip: reason -->   the block cannot run here
    <!-- run (code) -->     checks that a reader need not see; what they define, no block sees

Without a comment, blocks of Python share a namespace in the order of the page, the lines of a
console block behind $ are commands, and TOML is a part of a configuration.

A reader can copy a page: what its blocks use, blocks before them define, `gaps` says where not.
``python -m tests.support.pages`` prints all gaps, and how many pages have none.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_DOCS = (path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts)
_FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *_DOCS]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in _FILES}
LANGUAGES = ("python", "toml", "console", "json", "yaml", "bash", "text", "diff")

_PART = re.compile(
    r"^<!-- (?P<marker>\w+)(?:: (?P<argument>.+?))?(?:\n(?P<hidden>.*?)\n)? ?-->$"
    r"|^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code.

    Attributes:
        page: Path of its page, from the root of the repository.
        line: Where its code begins in the page, from 1.
        language: What stands behind the first fence.
        code: Its lines.
        marker: What a comment in front of it says to do: "file", "output", "skip"; "run" of a
            comment that is the block itself; or "".
        argument: Name of the file, or reason.
    """

    page: str
    line: int
    language: str
    code: str
    marker: str
    argument: str

    @property
    def runs(self) -> bool:
        """Whether something is done with it."""
        if self.language in ("text", "diff"):
            return self.marker in ("output", "file")
        return self.marker != "skip"


def blocks_of(page: str) -> Iterator[Block]:
    """Yields the blocks of a page, in order."""
    text, marker, argument, end = PAGES[page], "", "", 0
    for found in _PART.finditer(text):
        if found["hidden"] is not None:
            line = text.count("\n", 0, found.start("hidden")) + 1
            yield Block(page, line, "python", found["hidden"] + "\n", found["marker"], "")
        elif found["marker"]:
            marker, argument, end = found["marker"], found["argument"] or "", found.end()
        else:
            if text[end : found.start()].strip():  # the comment belongs to something else
                marker, argument = "", ""
            line = text.count("\n", 0, found.start("code")) + 1
            yield Block(page, line, found["language"], found["code"], marker, argument)
            marker, argument = "", ""


def num_ranks(page: str) -> int:
    """Returns on how many ranks a page runs."""
    found = re.search(r"^<!-- ranks: (\d+) -->$", PAGES[page], re.MULTILINE)
    return int(found[1]) if found else 1


BLOCKS = {page: list(blocks_of(page)) for page in PAGES}
# The first block of these pages is a script, whole and with the losses of one process.
SCRIPTS = {page: BLOCKS[page][0].code for page in ("docs/attach.md",)}


def file_of(page: str, name: str) -> str:
    """Returns the file that a page shows under this name."""
    [code] = [b.code for b in BLOCKS[page] if (b.marker, b.argument) == ("file", name)]
    return code


def prose(page: str) -> str:
    """Returns a page without its blocks of code and comments."""
    return _PART.sub("", PAGES[page])


def gaps(page: str) -> Iterator[str]:
    """Yields what keeps a reader from copying a page, a line each."""
    visible = [b for b in BLOCKS[page] if b.language == "python" and b.marker != "run"]
    alone = [b for b in visible if b.marker == "file"]
    together = [b for b in visible if b.marker != "file"]
    for blocks in (*([block] for block in alone), together):
        for number, names in enumerate(undefined(block.code for block in blocks)):
            if names:
                yield f"{page}:{blocks[number].line}: nothing defines {', '.join(names)}"
    for block in BLOCKS[page]:
        if block.marker == "run":
            for line, target in _sets(block):
                yield f"{page}:{line}: a hidden block sets {target}"
    number = num_ranks(page)
    starts = f"torchrun --nproc-per-node {number} ", f"pipegrad launch -n {number} "
    is_started = any(start in PAGES[page] for start in starts)
    if any("init_process_group" in b.code for b in visible) and not is_started:
        yield f"{page}: does not say how it starts: {starts[0]}..."


def undefined(codes: Iterable[str]) -> Iterator[list[str]]:
    """Yields for each of several blocks the names that neither it nor one before defines."""
    defined = {*dir(builtins), "__name__", "__file__"}
    for code in codes:
        top = symtable.symtable(code, "page", "exec")
        tables = [top]
        for table in tables:  # it grows
            tables.extend(table.get_children())
        defined |= {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
        used = {
            symbol.get_name()
            for table in tables
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (table is top or symbol.is_global())
        }
        yield sorted(used - defined)


def _sets(block: Block) -> Iterator[tuple[int, str]]:
    """Yields the attributes and items that a block sets: others see them. With their lines."""
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield block.line + node.lineno - 1, ast.unparse(node)


def main() -> None:
    """Prints the gaps of all pages, and how many pages with Python have none."""
    blocks = [b for b in chain(*BLOCKS.values()) if b.language == "python" and b.marker != "run"]
    missing = {page: [*gaps(page)] for page in dict.fromkeys(block.page for block in blocks)}
    whole = [page for page in missing if not missing[page]]
    lines = [*chain(*missing.values()), f"can be copied: {len(whole)} of {len(missing)} pages", ""]
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()
