"""Schedules go through torch's CSV notation unharmed; torch's own reader and schedules agree."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from pipegrad import schedules
from pipegrad.cli import main
from pipegrad.errors import ScheduleError
from pipegrad.schedules import Action, Schedule, ScheduleGenerator, read_csv, torch_csv, write_csv

OPTIONS: dict[str, dict[str, object]] = {
    "hop-aware-1f1b": {"hop_seconds": [0, 0.5, 0], "compute_seconds": 1},
    "hop-aware-zb-h1": {"hop_seconds": [0, 0.5, 0], "compute_seconds": 1},
    "interleaved-1f1b": {"stages_per_rank": 3},
}
SPLIT = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n"


def built(name: str) -> Schedule:
    return schedules.build(name, num_ranks=4, num_microbatches=8, **OPTIONS.get(name, {}))


def installed() -> list[str]:
    return [plugin.name for plugin in schedules.registry if plugin.distribution == "pipegrad"]


def bare(cls: Any, *, num_ranks: int, num_stages: int, num_microbatches: int) -> Any:
    """Returns a torch schedule that can say and read orders: without ranks or a process group.

    Issue 16, point 17: torch's own constructor makes it, from stages that only know their numbers.
    A schedule that was put together attribute by attribute lacked one that torch 2.15 added.
    """
    stage = SimpleNamespace(
        num_stages=num_stages, group_size=num_ranks, group_rank=0, submod=nn.Identity()
    )
    return cls([stage] * (num_stages // num_ranks), num_microbatches)


@pytest.mark.parametrize("name", installed())
def test_what_is_written_is_read(name: str) -> None:
    made = built(name)
    assert read_csv(write_csv(made), name=name) == made


@pytest.mark.parametrize("name", [*installed(), "split"])
def test_torch_reads_the_same_actions(name: str, tmp_path: Path) -> None:
    made = read_csv(SPLIT) if name == "split" else built(name)
    path = tmp_path / "made.csv"
    path.write_text(write_csv(made))
    theirs = bare(
        torch_schedules._PipelineScheduleRuntime,
        num_ranks=made.num_ranks,
        num_stages=len(made.stage_to_rank),
        num_microbatches=made.num_microbatches,
    )
    theirs._load_csv(str(path))  # raises if it is not valid, or cannot be given transfers
    order = theirs.pipeline_order
    assert [[str(a or "") for a in order[rank]] for rank in sorted(order)] == [
        [str(action or "") for action in row] for row in made.grid
    ]
    assert theirs.stage_index_to_group_rank == dict(enumerate(made.stage_to_rank))


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_what_torch_writes_is_read(name: str, tmp_path: Path) -> None:
    numbers = {"num_ranks": 4, "num_stages": 8, "num_microbatches": 10}
    theirs = bare(getattr(torch_schedules, name), **numbers)
    order = theirs.pipeline_order
    path = tmp_path / "theirs.csv"
    theirs._dump_csv(str(path), format="compute_only")
    made = read_csv(path.read_text())
    assert made.stage_to_rank == (0, 1, 2, 3, 3, 2, 1, 0)
    assert made.num_microbatches == 10
    flat = [
        [str(part) for action in order[rank] if action for part in action.sub_actions or [action]]
        for rank in range(4)
    ]
    assert [[str(action) for action in row] for row in made.actions] == flat
    assert ("OVERLAP_F_B" in path.read_text()) == (name == "ScheduleDualPipeV")


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\n\n", ""])
def test_line_endings_do_not_matter(ending: str) -> None:
    between = ending if ending in {"\n", "\r\n"} else "\n"
    made = read_csv(f"0F0,,,0B0{between},1F0,1B0{ending}")
    assert made.actions[1] == (Action(1, "F", 0), Action(1, "B", 0))
    # Overlapped actions are read in order, and an executor's own are skipped.
    ends = "0RESHARD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD"
    made = read_csv(f"0UNSHARD,0F0,0F1, (0B0; 0F2)OVERLAP_F_B ,,0B1,0B2,{ends}\n\n")
    assert [str(action) for action in made.actions[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0", "file, line 2, cell 2: '1X0' is not understood; expected stage, ki"),
        ("0F0,0B0;0W0", "line 1, cell 2: '0B0;0W0' is not understood"),
        ("0F0,(0B0;0X0)OVERLAP_F_B", "line 1, cell 2: '0X0' is not understood"),
        ("0F9999999999,0B0", "line 1, cell 1: '0F9999999999' is not understood"),
        ("0F0,0SEND_F0", "cell 2: 0SEND_F0 is a transfer; give the compute-only file, pipegrad"),
        ("0F0,0WAIT_SEND_F0", "cell 2: 0WAIT_SEND_F0 is a transfer; give the compute-only file"),
        ("0F0,,0B0\n,0F1", "line 2, cell 2: 0F1 is of stage 0, which line 1 has already"),
        ("0F0,0B0\n2F0,2B0", "file has a stage 2 but no stage 1; expected all from 0 on"),
        ("0F1,0B1", "file has a microbatch 1 but no microbatch 0"),
        ("0F0,0F999999999", "file has a microbatch 999999999 but no microbatch 1"),
        ("", "file has no cells; expected a line for each rank"),
        ("0F0,0B0\n,,", "file, line 2 has no cells; each rank holds a stage"),
        ("0F0,0B0\n\n1F0,1B0", "file, line 2 has no cells"),
        ("0" * 200_000, "file is not a CSV file: field larger than"),
        ("0F0,0B0\n1F0", r"'file' is not complete: .* stage 1 microbatch 0 has \['F'\]"),
        ("0B0,0F0", "'file' cannot go on"),
    ],
)
def test_files_that_are_no_schedule_are_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_csv(text, name="file")


def test_a_schedule_that_is_none_is_not_written() -> None:
    wrong = Schedule("mine", 1, (0,), ((Action(0, "F", 0),),))
    with pytest.raises(ScheduleError, match="'mine' is not complete"):
        write_csv(wrong)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["schedule", *arguments])


SIZE = ("--ranks", "2", "--microbatches", "2")


def test_the_command_line_prints_the_grid_or_the_file() -> None:
    made = schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    assert command("1f1b", *SIZE).output == f"{made}\n"
    assert command("1f1b", *SIZE, "--format", "torch-csv").output == write_csv(made)
    # Idle cells are written in their places.
    assert write_csv(made) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
    made = schedules.build("interleaved-1f1b", num_ranks=2, num_microbatches=2, stages_per_rank=3)
    assert command("interleaved-1f1b", *SIZE, "--set", "stages_per_rank=3").output == f"{made}\n"
    skips = command(f"{__name__}:Skips", "--ranks", "3", "--microbatches", "2")
    assert skips.output.startswith("rank 0  0F0 0F1")


class Skips(ScheduleGenerator):
    """A schedule whose last stage also takes the output of the first stage."""

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        made = schedules.build("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
        return dataclasses.replace(made, feeds=((), (0,), (0, 1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["egar", *SIZE], "is called 'egar'; known, closest first: 1f1b, adaptive-1f1b, auto"),
        (["1f1b", "--ranks", "0", "--microbatches", "2"], "0 is not in the range x>=1"),
        (["1f1b", *SIZE, "--format", "csv"], "'csv' is not one of 'text', 'torch-csv'"),
        (["1f1b", *SIZE, "--set", "depth=3"], "has no option 'depth'"),
        (["hop-aware-1f1b", *SIZE, "--set", "compute_seconds=1"], "hop_seconds is None and comp"),
        (
            [f"{__name__}:Skips", "--ranks", "3", "--microbatches", "2", "--format", "torch-csv"],
            "torch sends the output of a stage to the next stage only: run it by pipegrad.Sched",
        ),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments: list[str], message: str) -> None:
    found = command(*arguments)
    assert message in found.output
    # click has 2 for words of the command line, and shows its usage.
    assert found.exit_code == (2 if found.output.startswith("Usage: ") else 1)


def test_the_notation_is_read_without_torch() -> None:
    imported = re.findall(r"^(?:from|import) (\S+)", inspect.getsource(torch_csv), re.MULTILINE)
    assert {name.partition(".")[0] for name in imported} & {"torch", "pipegrad"} == {"pipegrad"}
