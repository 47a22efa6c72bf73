"""A U-Net whose skips cross stages trains as in one process, and not where a skip is lost."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad.testing import run_ranks
from tests.support.rounding import rounding

EXAMPLE = Path(__file__).parents[3] / "examples" / "unet_skip.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
PIXELS = 32 * 16 * 16  # of a batch


def run_example(arguments: list[str], lost: str = "") -> str:
    """Runs the example's main on a world that is there already; returns what it printed.

    Args:
        arguments: Of the command line.
        lost: Name of a value through which stages let no gradient back.
    """
    dist.init_process_group = lambda *_, **__: None
    example = runpy.run_path(str(EXAMPLE))
    lose_gradient(example["UNet"], lost)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        example["main"](arguments, standalone_mode=False)
    return printed.getvalue()


def lose_gradient(unet: Any, name: str) -> None:
    """Has stages cut the graph at an input of this name, which the uncut model does not have."""
    whole = unet.forward

    def forward(self: Any, *values: Any) -> Any:
        pairs = zip(self.inputs, values, strict=True)
        return whole(self, *(v.detach() if n == name else v for n, v in pairs))

    unet.forward = forward


def gradient_errors(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"gradient error +(\S+)", printed)]


def losses(printed: str) -> list[tuple[float, float]]:
    found = re.findall(r"loss (\S+)  one process (\S+)", printed)
    return [(float(ours), float(true)) for ours, true in found]


def num_bytes(printed: str) -> tuple[int, ...]:
    """Returns the bytes of skips, of the hidden state and of t."""
    *_, last = printed.splitlines()
    found = re.fullmatch(r"bytes .* skips (\d+)  hidden state (\d+)  t (\d+)", last)
    assert found is not None, last
    return tuple(map(int, found.groups()))


# In float64, so that an error is one; skips are 32 images of 16 x 8 x 8 and of 32 x 4 x 4.
SKIPS = 2 * 8 * 32 * (16 * 8 * 8 + 32 * 4 * 4)
HIDDEN = [2 * 8 * 32 * n for n in (32 * 4 * 4, 64 * 2 * 2, 32 * 4 * 4)]  # leaving stage 0, 1, 2
TIME = 2 * 8 * 32 * 32  # to a rank


@pytest.mark.parametrize(
    ("num_ranks", "pipeline", "schedule", "sent"),
    [
        pytest.param(1, 1, "1f1b", (0, 0, 0), id="1"),
        pytest.param(2, 2, "1f1b", (SKIPS, HIDDEN[1], TIME), id="2"),
        pytest.param(2, 2, "interleaved-1f1b", (SKIPS, sum(HIDDEN), TIME), id="2-interleaved"),
        pytest.param(4, 2, "eager-1f1b", (SKIPS, HIDDEN[1], TIME), id="2x2"),
        pytest.param(4, 4, "1f1b", (SKIPS, sum(HIDDEN), 3 * TIME), id="4-1f1b"),
        pytest.param(4, 4, "eager-1f1b", (SKIPS, sum(HIDDEN), 3 * TIME), id="4-eager"),
        pytest.param(4, 4, "gpipe", (SKIPS, sum(HIDDEN), 3 * TIME), id="4-gpipe"),
    ],
)
def test_it_equals_one_process(
    num_ranks: int, pipeline: int, schedule: str, sent: tuple[int, ...]
) -> None:
    arguments = ["--pipeline", f"{pipeline}", "--schedule", schedule, "--steps", "10", "--double"]
    printed, *others = run_ranks(run_example, num_ranks, arguments)
    assert printed.startswith(f"schedule {schedule}\nrank 0  0F0")
    errors = gradient_errors(printed)
    assert len(errors) == 3  # of the steps 1, which learns what is sent, 2 and 10
    assert max(errors) < rounding(10 * PIXELS, dtype=torch.float64)
    for ours, true in losses(printed):
        assert ours == pytest.approx(true, abs=2e-6)  # as printed
    assert losses(printed)[-1][0] < 0.9 * losses(printed)[0][0]
    assert num_bytes(printed) == sent
    assert others == [""] * (num_ranks - 1)


@pytest.mark.parametrize("lost", ["skip1", "skip2", "t"])
def test_without_the_gradient_of_one_value_it_does_not(lost: str) -> None:
    arguments = ["--schedule", "interleaved-1f1b", "--steps", "1", "--double"]
    printed, _ = run_ranks(run_example, 2, arguments, lost)
    assert gradient_errors(printed)[0] > 0.05
    [(ours, true)] = losses(printed)
    assert ours == pytest.approx(true, abs=2e-6)  # forward is what it was


def test_torchrun_runs_it_and_its_stages_are_those_of_its_first_lines() -> None:
    arguments = ["--schedule", "interleaved-1f1b", "--steps", "1"]
    ran = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", str(EXAMPLE), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert gradient_errors(ran.stdout)[0] < rounding(PIXELS)
    stages = re.findall(r"(stage \d) on rank \d (.*)", ran.stdout)
    assert len(stages) == 4
    assert all(" ".join(stage) in EXAMPLE.read_text() for stage in stages)
