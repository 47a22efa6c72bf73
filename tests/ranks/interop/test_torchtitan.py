"""torchtitan's own trainer, on CPUs, with a tied model: in stages it trains as one process does.

.ci/torchtitan installs torchtitan and runs this file; elsewhere torchtitan is not installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipegrad import schedules
from pipegrad.errors import PlanError
from pipegrad.interop.torchtitan import enable_tied_pipeline
from tests.support.rounding import rounding

ROOT = Path(__file__).parents[3]
STEPS, TOKENS = 5, 8 * 64  # of a batch
needs_torchtitan = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="torchtitan is not installed; see .ci/torchtitan"
)


@pytest.mark.skipif(find_spec("torchtitan") is not None, reason="torchtitan is installed")
def test_without_torchtitan_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # A job puts its folder at the front of the path: no example may have the name of a package.
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    with pytest.raises(PlanError, match="'torchtitan': enable_tied_pipeline needs"):
        enable_tied_pipeline()


class Runs:
    """Runs torchtitan from one checkpoint; remembers what it printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        seed = ["--checkpoint.create-seed-checkpoint", "--checkpoint.enable"]
        assert self.run("seed", 1, *seed).returncode == 0

    def run(
        self, name: str, num_ranks: int, *arguments: str, tied: bool = True
    ) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "handlers")))
        own = {"TITAN_ASSETS": str(self.folder), "TITAN_TIED": "1" if tied else ""}
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += ["--nproc-per-node", str(num_ranks), "-m", "tests.support.interop.titan_on_cpu"]
        return subprocess.run(
            [*torchrun, "--dump-folder", str(self.folder / name), *arguments],
            env={**os.environ, **own, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def steps(self, name: str, num_ranks: int, *arguments: str) -> list[tuple[float, float]]:
        """Returns loss and gradient norm of each step."""
        shutil.copytree(self.folder / "seed", self.folder / name)
        ran = self.run(name, num_ranks, "--checkpoint.enable", *arguments)
        assert ran.returncode == 0, ran.stderr[-3000:]
        plain = re.sub(r"\x1b\[[0-9;]*m", "", ran.stdout + ran.stderr)
        found = re.findall(r"step: +(\d+) +loss: +(\d\S*) +grad_norm: +(\S+)", plain)
        numbers = {int(step): (float(loss), float(norm)) for step, loss, norm in found}
        assert sorted(numbers) == list(range(1, STEPS + 1))
        return [numbers[step] for step in sorted(numbers)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("torchtitan"))


def pipeline(size: int, schedule: str = "1F1B") -> list[str]:
    name = "--parallelism.pipeline_parallel"
    return [f"{name}_degree", str(size), f"{name}_schedule", schedule]


ACCUMULATE = ["--training.global_batch_size", "16"]
REPLICATE = ["--parallelism.data_parallel_replicate_degree", "2"]
TENSOR = ["--parallelism.tensor_parallel_degree", "2"]
CASES = {
    "1F1B over 4 ranks": (1, [], 4, pipeline(4)),
    "accumulation": (1, ACCUMULATE, 4, [*pipeline(4), *ACCUMULATE]),
    "eager-1f1b from a file": (1, [], 4, [*pipeline(4), "CSV"]),
    "interleaved": (1, [], 2, pipeline(2, "Interleaved1F1B")),
    "with FSDP2": (2, [], 4, pipeline(2)),
    "with FSDP2, interleaved": (2, [], 4, pipeline(2, "Interleaved1F1B")),
    "with replicas": (2, REPLICATE, 4, [*pipeline(2), *REPLICATE]),
    "with tensor parallelism": (2, TENSOR, 4, [*pipeline(2), *TENSOR]),
}


@needs_torchtitan
@pytest.mark.parametrize("name", CASES)
def test_a_tied_pipeline_trains_as_torchtitan_does_without_one(name: str, runs: Runs) -> None:
    num_true_ranks, true_arguments, num_ranks, arguments = CASES[name]
    if arguments[-1] == "CSV":
        file = runs.folder / "eager.csv"
        made = schedules.build("eager-1f1b", num_ranks=4, num_microbatches=8)
        file.write_text(schedules.write_csv(made))
        arguments = [*arguments[:-1], "--parallelism.pipeline_parallel_schedule_csv", str(file)]
    true = runs.steps(f"{name}, true", num_true_ranks, *true_arguments)
    found = runs.steps(name, num_ranks, *arguments)

    assert true[-1][0] < 0.95 * true[0][0]
    for step, (numbers, true_numbers) in enumerate(zip(found, true, strict=True), 1):
        # Five and four decimals are printed; AdamW's own eps lets rounding grow by a step or two.
        most = 4 * rounding(step * TOKENS)
        assert numbers == pytest.approx(true_numbers, rel=most, abs=1e-4)


@needs_torchtitan
def test_torchtitan_itself_refuses_tied_models(runs: Runs) -> None:
    ran = runs.run("refused", 2, *pipeline(2), tied=False)
    assert ran.returncode != 0
    assert "Weight tying is not supported with Pipeline Parallel" in ran.stderr


@needs_torchtitan
def test_a_schedule_with_both_copies_on_one_rank_is_refused_in_words(runs: Runs) -> None:
    ran = runs.run("zbv", 2, *pipeline(2, "ZBVZeroBubble"))
    assert ran.returncode != 0
    assert "are on one rank, and fully_shard has made two parameters of them" in ran.stderr
