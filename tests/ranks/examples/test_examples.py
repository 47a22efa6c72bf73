"""The examples do what their first lines and the README say."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from pipegrad.testing import run_ranks
from tests.support.rounding import rounding

EXAMPLE = Path(__file__).parents[3] / "examples" / "torch_pipelining.py"
TITAN = EXAMPLE.with_name("tied_fsdp2.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TOKENS, TITAN_TOKENS = 16 * 64, 16 * 16  # of a batch of the examples


def run_example(arguments: list[str], example: Path = EXAMPLE) -> str:
    """Runs an example's main on a world that is there already; returns what it printed."""
    dist.init_process_group = lambda *_, **__: None
    sys.argv = [str(example), *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(example), run_name="__main__")
    return printed.getvalue()


def gradient_errors(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"gradient error .* attach +(\S+)", printed)]


def losses(printed: str) -> list[tuple[float, float]]:
    found = re.findall(r"loss (\S+)  one process (\S+)", printed)
    return [(float(ours), float(true)) for ours, true in found]


@pytest.mark.parametrize(
    ("num_ranks", "pipeline"), [(1, 1), (2, 2), (4, 4), (4, 2)], ids=["1", "2", "4", "2x2"]
)
def test_torch_pipelining_equals_one_process(num_ranks: int, pipeline: int) -> None:
    arguments = ["--pipeline", str(pipeline), "--steps", "20"]
    printed, *others = run_ranks(run_example, num_ranks, arguments)
    without, with_attach = gradient_errors(printed)
    assert with_attach < rounding(TOKENS)
    assert (without < rounding(TOKENS)) == (
        num_ranks == 1
    )  # without the line it is wrong, and by how much
    assert num_ranks == 1 or without > 0.1
    assert others == [""] * (num_ranks - 1)
    assert len(losses(printed)) == 3
    for ours, true in losses(printed):
        assert ours == pytest.approx(true, rel=rounding(20 * TOKENS))
    assert losses(printed)[-1][0] < 0.65 * losses(printed)[0][0]


@pytest.mark.parametrize("model", ["llama3-debug", "qwen3-debug"])
@pytest.mark.parametrize("by", [[], ["--scheduler"]], ids=["attach", "scheduler"])
def test_torchtitans_tied_models_equal_one_process(model: str, by: list[str]) -> None:
    arguments = ["--compare", "--steps", "6", "--model", model, *by]
    printed, *others = run_ranks(run_example, 4, arguments, TITAN)
    found = re.findall(r"loss (\S+)  norm (\S+)  one process: loss (\S+)  norm (\S+)", printed)
    assert len(found) == 6
    for step, (loss, norm, true_loss, true_norm) in enumerate(found, 1):
        most = rounding(step * TITAN_TOKENS)
        assert float(loss) == pytest.approx(float(true_loss), rel=most)
        assert float(norm) == pytest.approx(float(true_norm), rel=most)
    assert float(found[-1][0]) < 0.95 * float(found[0][0])
    assert "tied [['tok_embeddings.weight', 'output.weight']]" in printed
    assert printed.endswith("the same bits on both stages\n")
    assert others == [""] * 3


def test_a_text_that_is_missing_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.txt"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run_ranks(run_example, 2, ["--text", str(missing)])


def test_torchrun_runs_it_as_the_readme_says() -> None:
    ran = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "4", str(EXAMPLE), "--steps", "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert gradient_errors(ran.stdout)[1] < rounding(TOKENS)
    assert "UserWarning" not in ran.stderr
