"""The folders of the package as bars of their size, the core and the tools in two colours."""

from __future__ import annotations

from pathlib import Path

from drawings.svg import COLOURS, Box, drawn, label, svg

# From the first that is imported to the last; a folder that is not here is a tool.
CORE = ["comm", "plugins", "model", "plan", "gradients"]
CORE += ["interop", "schedules", "pipeline", "testing"]
TOOLS = ["simulation", "picture", "partition", "observe", "train", "audit", "commands"]
LINES_A_PIXEL, HEIGHT = 20, 20


def picture(package: Path) -> str:
    """Returns the picture: a bar for each folder, as long as it has lines."""
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    core = [name for name in CORE if name in folders]
    tools = [name for name in TOOLS if name in folders] + sorted(folders - {*CORE, *TOOLS})
    parts, top = [], 8
    for title, names, colour in (
        ("core: runs in a step", core, COLOURS["F"]),
        ("tools: stand beside a step", tools, COLOURS["B"]),
    ):
        parts.append(label(8, top + 14, title, 'font-weight="bold"'))
        top += 22
        for name in names:
            lines = size(package / name)
            parts.append(label(8, top + 14, f"{name}/"))
            parts.append(drawn(Box(90, top, lines / LINES_A_PIXEL, HEIGHT, colour, "")))
            parts.append(label(96 + lines / LINES_A_PIXEL, top + 14, f"{lines:,} lines"))
            top += HEIGHT + 4
        top += 10
    return svg(660, top, parts)


def size(folder: Path) -> int:
    """Returns the lines of its Python files, to hundreds."""
    return round(sum(path.read_bytes().count(b"\n") for path in folder.rglob("*.py")), -2)
