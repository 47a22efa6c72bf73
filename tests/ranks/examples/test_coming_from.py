"""What the pages for newcomers from other trainers show: each script, before and after."""

from __future__ import annotations

import difflib
import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.ranks.examples.test_examples import run_example
from tests.support.pages import BLOCKS
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.train.jobs import EXAMPLES, by_hand
from tests.support.train.launched import Launched, torchrun

SCRIPTS = EXAMPLES / "coming_from"
PAGES = {
    "fsdp2": "fsdp2",
    "accelerate": "accelerate_and_trainer",
    "trainer": "accelerate_and_trainer",
}
TOKENS = 32 * 16  # of a step
EPOCHS, STEPS = 3, 8  # steps of an epoch
# The last but one line of an epoch is that of its last step, the last one that of its evaluation.
NUM_STEPS = [min(line + 1, STEPS) + STEPS * epoch for epoch in range(EPOCHS) for line in range(9)]


def run(name: str, checkpoint: Path, *arguments: str) -> list[str]:
    """Returns the lines that a script prints."""
    words = ("--checkpoint", str(checkpoint), *arguments)
    return run_example(*words, example=SCRIPTS / f"{name}.py").splitlines()


def losses(lines: list[str]) -> list[float]:
    found = [float(loss) for line in lines for loss in re.findall(r"loss (\S+)", line)]
    assert len(found) == len(NUM_STEPS), lines
    assert found[-1] < 0.85 * found[0]
    return found


def check_equal(before: list[str], after: list[str]) -> None:
    for ours, theirs, number in zip(losses(after), losses(before), NUM_STEPS, strict=True):
        assert ours == pytest.approx(theirs, rel=rounding(number * TOKENS))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_losses_are_those_of_the_script_before_also_if_it_was_interrupted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(f"{name}_after", tmp_path / "whole")
    check_equal(run(f"{name}_before", tmp_path / "before"), whole)
    calls, step = count(), LambdaLR.step

    def interrupted(self: LambdaLR, *args: Any) -> None:
        step(self, *args)
        if next(calls) == STEPS + 3:  # in the second epoch; the first call is that of __init__
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LambdaLR, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(f"{name}_after", tmp_path / "cut")
    resumed = run(f"{name}_after", tmp_path / "cut", "--resume")
    assert resumed == whole[len(whole) // EPOCHS :]


@pytest.mark.ranks(4)
def test_bf16_is_near_to_the_script_before_in_bf16(tmp_path: Path) -> None:
    """Autocast rounds each value of a forward to bf16, and adds in float32."""
    before, after = (
        losses(run(f"ddp_{which}", tmp_path / which, "--bf16")) for which in ("before", "after")
    )
    # What differs in the last bits of float32 may become different numbers of bf16. Each of the
    # values of which the loss is the mean then errs by an eps, in either direction.
    assert after == pytest.approx(before, rel=rounding(1, dtype=torch.bfloat16) / TOKENS**0.5)
    in_fp32 = losses(run("ddp_before", tmp_path / "in fp32"))
    assert after != pytest.approx(in_fp32, rel=rounding(24 * TOKENS))


def test_torchrun_runs_an_accelerate_script_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    check_equal(*(launched(f"accelerate_{which}", tmp_path) for which in ("before", "after")))


def test_a_trainer_of_transformers_before_and_after(tmp_path: Path) -> None:
    """Logs, metrics and the saved model are equal; a run that goes on has the same bits."""
    pytest.importorskip("accelerate")
    before, after = (launched(f"trainer_{which}", tmp_path) for which in ("before", "after"))
    check_equal(before, after)
    accuracies = [re.findall(r"accuracy (\S+)", line) for line in before]
    assert [re.findall(r"accuracy (\S+)", line) for line in after] == accuracies
    assert len(list(filter(None, accuracies))) == EPOCHS
    theirs, ours = (weights(tmp_path / f"trainer_{which}") for which in ("before", "after"))
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        error = (value - theirs[name]).norm() / theirs[name].norm()
        assert error < rounding(EPOCHS * STEPS * TOKENS), name

    last = tmp_path / "trainer_after" / f"checkpoint-{EPOCHS * STEPS}"
    shutil.rmtree(last)
    assert launched("trainer_after", tmp_path, "--resume") == after
    assert all(torch.equal(value, ours[name]) for name, value in weights(last).items())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    safetensors = pytest.importorskip("safetensors.torch")
    files = [safetensors.load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: value for file in files for name, value in file.items()}


def launched(name: str, folder: Path, *arguments: str) -> list[str]:
    words = ["--nproc-per-node", "4", str(SCRIPTS / f"{name}.py"), *arguments]
    ran = Launched(folder, torchrun, *words, "--checkpoint", str(folder / name))
    assert ran.wait() == 0, ran.errors
    return [line for line in ran.printed.splitlines() if line.startswith("epoch")]


# The pages.


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_the_difference_of_its_scripts(name: str) -> None:
    before, after = (
        (SCRIPTS / f"{name}_{which}.py").read_text().splitlines(keepends=True)
        for which in ("before", "after")
    )
    _, _, *lines = difflib.unified_diff(before, after, n=1)
    shown = diffs(f"docs/coming_from/{PAGES[name]}.md")
    assert "".join(lines) in shown, "".join(lines)


def diffs(page: str) -> list[str]:
    return [block.code for block in BLOCKS[page] if block.language == "diff"]


START = """
import torch
import torch.distributed as dist
from gpt import GPT, loss_fn, text
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import pipegrad

torch.manual_seed(0)
data = text(256, seed=1)
losses = []
"""


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sign", ["-", "+"])
def test_the_short_difference_runs(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four replicas before; two after, of two stages each."""
    monkeypatch.syspath_prepend(SCRIPTS)
    short = diffs("docs/coming_from/ddp.md")[0].splitlines()
    assert diffs("README.md") == [diffs("docs/coming_from/ddp.md")[0]]
    code = [line[1:] for line in short if line[0] in (" ", sign)]
    assert len(short) > len(code) > 5
    assert code[-1].startswith("    ")
    space: dict[str, Any] = {}
    exec("\n".join([START, *code, "    losses.append(loss.item())"]), space)
    replicas = 4 if sign == "-" else 2
    everywhere = torch.tensor(gathered(space["losses"])).mean(0)
    for step, (loss, true) in enumerate(zip(everywhere, short_losses(replicas), strict=True), 1):
        assert loss.item() == pytest.approx(true, rel=rounding(step * TOKENS))


def short_losses(replicas: int) -> list[float]:
    """Returns the losses of one process that trains on the batches of all replicas."""
    space: dict[str, Any] = {}
    exec(START, space)
    model, loss_fn, data = space["GPT"](), space["loss_fn"], space["data"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    batches = (data[rows] for rows in order.split(16 * replicas))
    found = by_hand(batches, lambda x: loss_fn(model(x[0]), x[1]), optimizer, clip=1.0)
    return [loss for loss, _ in found]
