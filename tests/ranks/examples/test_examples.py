"""The examples do what their first lines and the README say."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.train.jobs import EXAMPLES
from tests.support.train.launched import Launched, torchrun

EXAMPLE = EXAMPLES / "torch_pipelining.py"
TOKENS, TITAN_TOKENS = 16 * 64, 16 * 16  # of a batch of the examples


def run_example(*arguments: str, example: Path = EXAMPLE, speaker: int = 0) -> str:
    """Runs an example's main on the ranks that there are; returns what one of them printed."""
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "argv", [str(example), *arguments]),
        mock.patch.object(sys, "path", [str(example.parent), *sys.path]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(str(example), run_name="__main__")
    everywhere = gathered(printed.getvalue())
    assert [rank for rank, text in enumerate(everywhere) if text] == [speaker % len(everywhere)]
    return everywhere[speaker]


def gradient_errors(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"gradient error .* attach +(\S+)", printed)]


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(pipeline, marks=pytest.mark.ranks(num_ranks))
        for num_ranks, pipeline in ((1, 1), (2, 2), (4, 4), (4, 2))
    ],
)
def test_torch_pipelining_equals_one_process(pipeline: int) -> None:
    printed = run_example("--pipeline", str(pipeline), "--steps", "20")
    without, with_attach = gradient_errors(printed)
    assert with_attach < rounding(TOKENS)
    # Without the line it is wrong, and by how much.
    assert without < rounding(TOKENS) if dist.get_world_size() == 1 else without > 0.1
    losses = re.findall(r"loss (\S+)  one process (\S+)", printed)
    assert len(losses) == 3
    for ours, true in losses:
        assert float(ours) == pytest.approx(float(true), rel=rounding(20 * TOKENS))
    assert float(losses[-1][0]) < 0.65 * float(losses[0][0])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", ["llama3-debug", "qwen3-debug"])
@pytest.mark.parametrize("by", [[], ["--scheduler"]], ids=["attach", "scheduler"])
def test_torchtitans_tied_models_equal_one_process(model: str, by: list[str]) -> None:
    arguments = ["--compare", "--steps", "6", "--model", model, *by]
    printed = run_example(*arguments, example=EXAMPLE.with_name("tied_fsdp2.py"))
    found = re.findall(r"loss (\S+)  norm (\S+)  one process: loss (\S+)  norm (\S+)", printed)
    assert len(found) == 6
    for step, (loss, norm, true_loss, true_norm) in enumerate(found, 1):
        most = rounding(step * TITAN_TOKENS)
        assert float(loss) == pytest.approx(float(true_loss), rel=most)
        assert float(norm) == pytest.approx(float(true_norm), rel=most)
    assert float(found[-1][0]) < 0.95 * float(found[0][0])
    assert "tied [['tok_embeddings.weight', 'output.weight']]" in printed
    assert printed.endswith("the same bits on both stages\n")


@pytest.mark.ranks(2)
def test_a_text_that_is_missing_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run_example("--text", str(tmp_path / "nowhere.txt"))


def test_torchrun_runs_it_as_the_readme_says(tmp_path: Path) -> None:
    words = ["--nproc-per-node", "2", str(EXAMPLE), "--steps", "1"]
    launched = Launched(tmp_path, torchrun, *words)
    assert launched.wait() == 0, launched.errors
    assert gradient_errors(launched.printed)[1] < rounding(TOKENS)
    assert "UserWarning" not in launched.errors
