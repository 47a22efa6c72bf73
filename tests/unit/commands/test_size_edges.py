"""The smallest sizes that a command takes."""

from __future__ import annotations

from click.testing import CliRunner

from pipegrad.cli import main


def test_a_schedule_may_have_one_rank_and_one_microbatch_but_not_none() -> None:
    one = CliRunner().invoke(main, ["schedule", "gpipe", "--ranks", "1", "--microbatches", "1"])
    assert one.exit_code == 0, one.output
    assert "0F0" in one.output
    none = CliRunner().invoke(main, ["schedule", "gpipe", "--ranks", "1", "--microbatches", "0"])
    assert none.exit_code == 2
