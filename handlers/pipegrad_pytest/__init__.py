"""pytest: ``pytest --pipegrad-audit FILE.py:function``, and the fixture `audit_pipeline`.

pytest loads this package wherever pipegrad is installed. So it imports nothing heavy, and it stands
beside `pipegrad`, which refuses an old torch when it is imported: only a test that uses it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pipegrad.audit.report import Report
    from pipegrad.audit.script import Target

_OPTION = "--pipegrad-audit"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("pipegrad")
    group.addoption(
        _OPTION,
        action="append",
        default=[],
        metavar="FILE.py:FUNCTION",
        help="audit a pipeline: the function returns a pipegrad.Audit; repeat for several",
    )
    group.addoption(
        "--pipegrad-audit-ranks",
        type=int,
        default=4,
        metavar="N",
        help="gloo ranks of each audit (default: 4)",
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Adds a test for each audit of the command line."""
    ranks: int = config.getoption("--pipegrad-audit-ranks")
    items += [
        _AuditItem.from_parent(session, name=f"audit {target}", target=target, ranks=ranks)
        for target in config.getoption(_OPTION)
    ]


class _AuditItem(pytest.Item):
    """One audit of the command line."""

    def __init__(self, *, target: str, ranks: int, **options: Any) -> None:  # noqa: ANN401
        super().__init__(**options)
        self._target, self._ranks = target, ranks

    def runtest(self) -> None:
        _checked(self._target, self._ranks)


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
