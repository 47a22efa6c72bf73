"""`pipegrad verify` says what it finds, and ends with 0, 1 or 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipegrad.cli import main
from tests.support.orders import megatron

GOOD = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("orders.csv").write_text(GOOD)
    return Path("orders.csv")


def test_right_orders_are_said_to_be_right_with_what_they_need(orders: Path) -> None:
    result = run(orders)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "orders.csv: 2 ranks, 2 stages, 1 microbatch",
        (
            "assumed: a send ends when its receive has started; one communicator for all ranks; "
            "one by one"
        ),
        "right: every rank ends, and every value arrives where it is read",
        "most at a time: live activations, receive buffers, receives under way",
        "  ranks 0 to 1       1     1     1",
    ]


def test_wrong_orders_end_with_1(orders: Path) -> None:
    orders.write_text(GOOD.replace("0SEND_F0,", ""))
    result = run(orders, "--sends", "eager", "--communicators", "edge")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "1RECV_F0: rank 0 never sends this" in result.stdout
    assert "a send ends at once; a communicator for each rank and" in result.stdout
    assert json.loads(run(orders, "--json").stdout)["is_right"] is False


def test_batched_transfers_start_together(orders: Path) -> None:
    orders.write_text("".join(",".join(cells) + "\n" for cells in megatron(4, 8)))
    assert [run(orders).exit_code, run(orders, "--batched").exit_code] == [1, 0]


@pytest.mark.parametrize("text", ["", "0X0\n", "0F1\n"])
def test_what_cannot_be_read_ends_with_2_and_one_line(orders: Path, text: str) -> None:
    orders.write_text(text)
    result = run(orders)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: orders.csv")
    assert len(result.stderr.splitlines()) == 1


def test_a_file_that_is_not_there_ends_with_2() -> None:
    result = run("nothing.csv")
    assert result.exit_code == 2
    assert result.stderr == "Error: nothing.csv: No such file or directory\n"
