"""`pipegrad train` on a card, alone, has the losses it has on a CPU; which the CPU shows first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipegrad.cli import main
from tests.support.gpu.card import GPU

TIED_GPT = Path(__file__).parents[2] / "examples" / "tied_gpt.toml"
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def losses(folder: Path, *settings: str) -> list[float]:
    """Trains some steps of the example; returns their losses."""
    wanted = ["train.steps=5", f"train.output={folder / 'run'}", *settings]
    options = [word for setting in wanted for word in ("--set", setting)]
    result = CliRunner().invoke(main, ["train", str(TIED_GPT), *options])
    assert result.exit_code == 0, result.output
    newest = max(folder.glob("run*/metrics.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(line)["loss"] for line in newest.read_text().splitlines()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-3), ("bf16", 2e-2)])
def test_losses_are_those_of_the_cpu(
    tmp_path: Path, device: str, precision: str, error: float
) -> None:
    exact = losses(tmp_path, "train.device=cpu")
    found = losses(tmp_path, f"train.device={device}", f"train.precision={precision}")
    assert found == pytest.approx(exact, rel=error)
