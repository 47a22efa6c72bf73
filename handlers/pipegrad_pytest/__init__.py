"""pytest: the fixture `audit_pipeline`.

This package imports nothing heavy, because pytest loads it wherever pipegrad is installed. It lies
outside of `pipegrad`, because importing `pipegrad` raises an error with an old torch: only a test
that uses the fixture fails then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pipegrad.audit.report import Report
    from pipegrad.audit.script import Target


@pytest.fixture
def audit_pipeline() -> Callable[..., Report]:
    """Audits a pipeline, and fails the test if anything is wrong.

    ``audit_pipeline(function, ranks=4, steps=None, tolerance=None)`` runs a function at the top
    level of a module, or ``"FILE.py:function"``, on so many gloo ranks. The function returns a
    `pipegrad.Audit`. Returns the report.
    """
    return _checked


def _checked(
    target: Target, ranks: int = 4, *, steps: int | None = None, tolerance: float | None = None
) -> Report:
    try:
        from pipegrad.audit.script import Run
        from pipegrad.errors import PipegradError
    except ImportError as error:  # of an old torch
        pytest.fail(str(error), pytrace=False)
    try:
        report = Run(target, steps, tolerance).in_ranks(ranks)
    except PipegradError as error:
        pytest.fail(str(error), pytrace=False)
    if not report.is_right:
        pytest.fail(str(report), pytrace=False)
    return report
