"""PALETTE: the colour of each kind of span. The page and the figures have the same.

The colours are those of Okabe and Ito, which people tell apart who see red and green alike.
Waits are hatched in the colour of what they wait for.

Source: M. Okabe and K. Ito, Color Universal Design, https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

from typing import NamedTuple

from pipegrad.simulation.timeline import SpanKind

_DARK, _LIGHT = "#111111", "#ffffff"


class Paint(NamedTuple):
    """How a kind looks.

    Attributes:
        name: The kind in words.
        fill: Its colour; if it is hatched, the colour of the lines.
        text: The colour of text on it.
        is_hatched: True for waits: lines, and the background between them.
        is_mirrored: True if the lines fall instead of rise.
    """

    name: str
    fill: str
    text: str = _DARK
    is_hatched: bool = False
    is_mirrored: bool = False


_BLUE, _RED, _PURPLE, _GREY = "#0072b2", "#d55e00", "#882e72", "#7f7f7f"
PALETTE: dict[SpanKind, Paint] = {
    "F": Paint("forward", "#56b4e9"),
    "B": Paint("backward", "#e69f00"),
    "I": Paint("backward of inputs", "#f0e442"),
    "W": Paint("backward of weights", "#009e73"),
    "optimizer": Paint("optimizer", "#cc79a7"),
    "host": Paint("host", "#a0a0a0"),
    "wait for receive": Paint("wait for receive", _BLUE, is_hatched=True),
    "wait for send": Paint("wait for send", _BLUE, is_hatched=True, is_mirrored=True),
    "wait for reduction": Paint("wait for reduction", _RED, is_hatched=True),
    "wait for parameters": Paint("wait for parameters", _PURPLE, is_hatched=True),
    "wait for ranks": Paint("wait for ranks", _GREY, is_hatched=True, is_mirrored=True),
    "transfer": Paint("transfer", _BLUE, _LIGHT),
    "reduction": Paint("gradient reduction", _RED, _LIGHT),
    "parameter sync": Paint("parameter sync", _PURPLE, _LIGHT),
}
