"""Prints the mutation score last."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        (report, dict(report.user_properties)["killed by"])
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport) and "killed by" in dict(report.user_properties)
    ]
    if reports:
        for report, killer in reports:
            mutant = report.nodeid.partition("[")[2].removesuffix("]")
            terminalreporter.write_line(f"{mutant:24}{killer or 'SURVIVED'}")
        killed = sum(killer is not None for _, killer in reports)
        terminalreporter.write_line(f"mutation score: {killed} of {len(reports)} killed")
