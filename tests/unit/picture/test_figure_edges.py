"""Names of ranks in a figure of many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipegrad.picture import figure, write_figure
from pipegrad.simulation.timeline import Span, Timeline


def test_names_of_many_ranks_are_smaller_than_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn, found = figure._drawn, list[Any]()

    def kept(*arguments: Any) -> Any:
        found.append(drawn(*arguments))
        return found[0]

    monkeypatch.setattr(figure, "_drawn", kept)
    spans = tuple(Span(rank, "F", 0.0, 1.0, stage=rank, microbatch=0) for rank in range(128))
    many = Timeline("many", "predicted", 128, tuple(range(128)), 1, spans, (1.0,))
    write_figure([many], tmp_path / "figure.svg")
    [axes] = found[0].axes
    names = [text for text in axes.texts if text.get_text().startswith("rank ")]
    assert len(names) == 128
    # The axes count inches of a figure that is not shrunk yet.
    shrink = axes.get_position().height * found[0].get_figheight() / axes.get_ylim()[0]
    height = 72 * shrink * figure._HEIGHTS["rank"]
    assert min(text.get_fontsize() for text in names) >= 2.0
    assert max(text.get_fontsize() for text in names) < height < 8.0
