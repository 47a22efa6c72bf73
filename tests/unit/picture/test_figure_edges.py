"""Names of ranks in a figure of many."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipegrad.picture import figure, write_figure
from tests.support.picture.timelines import simulated


def test_names_of_many_ranks_are_smaller_than_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn, found = figure._drawn, list[Any]()

    def kept(*arguments: Any) -> Any:
        found.append(drawn(*arguments))
        return found[0]

    monkeypatch.setattr(figure, "_drawn", kept)
    write_figure([simulated(ranks=48, microbatches=1)], tmp_path / "figure.svg")
    [axes] = found[0].axes
    names = [text for text in axes.texts if text.get_text().startswith("rank ")]
    assert len(names) == 48
    points = 72 * axes.get_position().height * found[0].get_figheight() / axes.get_ylim()[0]
    least = min(b - a for a, b in pairwise(text.get_position()[1] for text in names))
    assert 2.0 <= max(text.get_fontsize() for text in names) < least * points
