"""On how many ranks the fixture of pytest audits."""

from __future__ import annotations

import pytest

from pipegrad.audit.report import Report
from pipegrad.audit.script import Run
from pipegrad_pytest import _checked

RIGHT = Report((), (), (), num_steps=2, num_ranks=4, seconds=1.0)


def test_a_pipeline_is_audited_on_four_ranks_unless_more_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []

    def in_ranks(run: Run, num_ranks: int) -> Report:
        started.append((run.target, num_ranks))
        return RIGHT

    monkeypatch.setattr(Run, "in_ranks", in_ranks)
    assert _checked("a.py:one") is RIGHT
    assert _checked("a.py:one", 6) is RIGHT
    assert started == [("a.py:one", 4), ("a.py:one", 6)]
