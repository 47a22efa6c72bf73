"""Boxes, texts and lines as SVG."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

BOX, BAR = 28, 11  # height in pixels, of a box and of a thin one
# Those of the Okabe-Ito palette, lightened: colour-blind readers can tell them apart.
COLOURS = {
    "F": "#8ecae6",
    "B": "#fdae6b",
    "I": "#fdae6b",
    "W": "#ffe08a",
    "transfer": "#9a9a9a",
    "mean": "#74c476",
    "tie": "#c8a2d8",
    "stage": "#eef3f8",
}


class Box(NamedTuple):
    """A coloured box with a text: left, top, width and height in pixels."""

    left: float
    top: float
    width: float
    height: float
    colour: str
    text: str


def svg(width: float, height: float, parts: Iterable[str], *, zoom: float = 1.0) -> str:
    """Returns a picture on white; where there is room, it is shown so many times larger."""
    size = f'width="{zoom * width:.0f}" height="{zoom * height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size}'
    back = f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>'
    lines = [f'{head} font-family="sans-serif" font-size="11">', back]
    return "\n".join([*lines, *parts, "</svg>", ""])


def drawn(box: Box) -> str:
    """Returns a box as SVG; a text that does not fit is left out."""
    font = 11 if box.height > BAR else 9
    rect = (
        f'<rect x="{box.left:.1f}" y="{box.top:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" fill="{box.colour}" stroke="white"/>'
    )
    if len(box.text) * font * 0.5 > box.width:
        return rect
    x, y = box.left + box.width / 2, box.top + box.height / 2 + font / 2 - 1.5
    middle = f'font-size="{font}" text-anchor="middle"'
    return f'{rect}<text x="{x:.1f}" y="{y:.1f}" {middle}>{box.text}</text>'


def label(x: float, y: float, text: str, more: str = "") -> str:
    """Returns a text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>'
