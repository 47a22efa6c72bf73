"""Who is the cause of a stall, where several ranks wait for nobody."""

from __future__ import annotations

from tests.unit.comm.test_failure_report import computing, report, waiting


def test_a_free_rank_for_which_others_wait_comes_before_one_that_is_slower() -> None:
    found = report([waiting(0, 3), computing(1, 50.0), waiting(2, 3), computing(3)], alarm="LATE")
    assert found.cause.startswith("rank 3 was in step 3, compute 2F1, for 9.0 s")
