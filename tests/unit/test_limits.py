"""What is too large or no file is refused in one line, and names of others write no escapes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from pipegrad.audit.report import Finding, Report
from pipegrad.cli import main
from pipegrad.errors import ScheduleError
from pipegrad.picture import write_figure, write_html
from pipegrad.printable import printable
from pipegrad.run_files import parsed_json, read
from pipegrad.simulation.costs import Costs, LinkCosts, StageCosts
from pipegrad.simulation.timeline import Timeline
from tests.support.distributions import write_distribution
from tests.support.picture.timelines import SMALL

SIZE = ["--ranks", "4", "--microbatches", "8"]
FORGED = "1f1b\n\x1b[2Jstep 0: fine\u202e\x9b31m"
SHOWN = "1f1b\\n\\x1b[2Jstep 0: fine\\u202e\\x9b31m"


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)


def refused(*words: object) -> str:
    """Returns what a command says that fails; it says one line, after the usage."""
    result = run(*words)
    *_, line = result.output.splitlines()
    assert result.exit_code in (1, 2), result.output
    assert line.startswith("Error: ")
    assert result.output.count("Error: ") == 1
    return line


def timeline(tmp_path: Path, **changed: object) -> Path:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(SMALL.to_json() | changed))
    return path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["interleaved-1f1b", *SIZE, "--set", "stages_per_rank=100000000"], "at most 1,000,000"),
        (["interleaved-1f1b", *SIZE, "--set", f"stages_per_rank={10**30}"], "far too many stages"),
        (["gpipe", "--ranks", "5000", "--microbatches", "1"], "5,000 stages: expected at most"),
    ],
)
def test_a_schedule_too_large_is_refused_before_it_is_made(words: Sequence[str], says: str) -> None:
    """Security, F6. Stages were not counted: 7.6 GB."""
    assert says in refused("schedule", *words)


def test_long_work_says_what_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security, F6. 1000 x 1000 said nothing for minutes."""
    monkeypatch.setattr("pipegrad.commands.command_options.LONG_CELLS", 31)
    said = run("simulate", "1f1b", *SIZE).stderr.splitlines()
    assert [line.partition("s: ")[2].partition(",")[0] for line in said] == [
        "makes the schedule",
        "simulates it",
        "looks for what would make it shorter",
    ]
    monkeypatch.setattr("pipegrad.commands.command_options.LONG_CELLS", 32)
    assert run("simulate", "1f1b", *SIZE).stderr == ""


def test_microbatches_that_a_file_only_names_cost_nothing(tmp_path: Path) -> None:
    """Security, F6. 1.7 KB that named the most of them took 20 s."""
    result = run("trace", timeline(tmp_path, num_microbatches=500_000))
    assert "step 0 was recorded in part: 4 computes of at least 2,000,000" in result.output


def test_costs_at_the_limits_are_simulated() -> None:
    stage = StageCosts(1e18, 1e18, outputs={"x": 2**63 - 1})
    data = {"stages": [stage] * 4, "network": {"nic_bytes_per_second": 1e-9}}
    costs = Costs.from_json(data)
    assert costs.network.seconds(0, 1, 2**63 - 1) == pytest.approx(2**63 / 1e-9)
    with pytest.raises(ScheduleError, match="at least 1e-09"):
        LinkCosts(0, 1, bytes_per_second=1e-10)
    with pytest.raises(ScheduleError, match="forward_seconds is too large"):
        StageCosts(1e308, 1e308)


@pytest.mark.parametrize("command", ["train", "trace"])
def test_a_pipe_or_a_device_is_not_waited_for(tmp_path: Path, command: str) -> None:
    """Security, F6. A FIFO hung."""
    os.mkfifo(tmp_path / "pipe")
    assert "expected a file" in refused(command, tmp_path / "pipe")
    assert "expected a file" in refused(command, "/dev/zero")


def test_files_and_json_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read(path, 4) == b"1234"
    with pytest.raises(OSError, match="more than 3 bytes"):
        read(path, 3)
    with pytest.raises(ValueError, match="nested too deeply"):
        parsed_json(b"[" * 100_000)
    with pytest.raises(ValueError, match="limit"):
        parsed_json(b"9" * 5000)
    monkeypatch.setattr("pipegrad.run_files.MOST_JSON_CONTAINERS", 2)
    assert parsed_json(b"[{}]") == [{}]
    with pytest.raises(ValueError, match="3 lists and objects, expected at most 2"):
        parsed_json(b"[{},[]]")


def test_printable_leaves_text_and_shows_what_a_terminal_would_obey() -> None:
    assert printable("läuft: 1F0 → 2") == "läuft: 1F0 → 2"
    assert printable(FORGED) == SHOWN
    assert printable("\t\x00\udc80") == "\\t\\x00\\udc80"


def hostile() -> Timeline:
    data = SMALL.to_json() | {"name": FORGED, "notes": {FORGED: FORGED}}
    data["spans"] = [[*span[:-1], FORGED + span[-1]] for span in data["spans"]]
    return Timeline.from_json(data)


def test_a_name_forges_no_line_and_no_escape_of_a_trace(tmp_path: Path) -> None:
    """Security, F7."""
    hostile().save(tmp_path / "timeline.json")
    result = run("trace", tmp_path)
    assert result.exit_code == 0
    assert all(map(str.isprintable, result.output.splitlines()))
    assert result.output.startswith(f"{SHOWN}: 2 ranks")


def test_a_name_of_a_file_or_an_option_neither() -> None:
    assert "ab\\x1b[2J" in refused("trace", "ab\x1b[2J")
    assert "\\x1b" in refused("simulate", "x\x1b", *SIZE)
    assert "\\x1b" in refused("simulate", "1f1b", *SIZE, "--set", "\x1b=1")


def test_no_plugin_writes_on_the_terminal_when_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security, F7."""
    write_distribution(tmp_path, "evil", entry_points={"a\x1b[31mb": "evil:Sum\u202ex"})
    monkeypatch.syspath_prepend(tmp_path)
    result = run("handlers")
    assert all(map(str.isprintable, result.output.splitlines()))
    assert "a\\x1b[31mb" in result.output
    assert "evil:Sum\\u202ex" in result.output


def test_no_name_in_a_report_of_an_audit_does() -> None:
    finding = Finding(FORGED, "mend it", (FORGED,), details=(FORGED,))
    report = Report((finding,), ("x\x1b",), (), 1, 1, 1.0)
    assert all(map(str.isprintable, str(report).splitlines()))
    assert f"parameters: {SHOWN}" in str(report)


def test_pictures_of_such_names_are_whole(tmp_path: Path) -> None:
    """Security, F7. With an escape, a SVG was no XML."""
    write_figure([hostile()], tmp_path / "a.svg", title=FORGED)
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert SHOWN in texts
    write_html([hostile()], tmp_path / "a.html", title=FORGED)
    page = (tmp_path / "a.html").read_text()
    assert f"<title>{SHOWN}</title>" in page
    assert SHOWN.replace("\\", "\\\\") in page  # as JSON
    assert not [c for c in ("\\u001b", "\\u009b", "\x1b", "\u202e", "\x9b") if c in page]
