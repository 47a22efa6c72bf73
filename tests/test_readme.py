"""What README.md shows runs as it is written there."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.nn import functional

from pipegrad.cli import main
from pipegrad.testing import run_ranks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition("#")[0]
    for line in README.splitlines()
    if " JOB.toml" in line and "my_handlers" not in line  # which a later section writes
]


def run_script(script: str) -> str:
    """Runs a script on a world that is there already; returns what it printed."""
    dist.init_process_group = lambda *_, **__: None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "README.md", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def one_process() -> list[float]:
    """Returns the losses of the uncut model of the README's first script."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(256, 64), nn.Linear(64, 256, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Linear(64, 64), nn.Linear(64, 64), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        tokens = torch.randint(256, (16,))
        loss = functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_first_script_is_whole_and_has_the_losses_of_one_process() -> None:
    """Issue 16, point 18. The README's first snippet had five names that nothing defined."""
    script = README.partition("```python\n")[2].partition("```")[0]
    *others, last = run_ranks(run_script, 4, script)
    assert others == [""] * 3
    printed = [float(loss) for loss in re.findall(r"loss (\S+)", last)]
    # Six decimals are printed; a loss of about 6 has an eps of 6e-7, and sums of 256 terms.
    assert printed == pytest.approx(one_process(), rel=4 * 2**-23 * 256**0.5)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run_as_written(command: str) -> None:
    """Issue 16, point 18. One named a handler that is not installed, one a batch too small."""
    words = shlex.split(command)
    options = words[words.index("JOB.toml") + 1 :]
    ranks = [] if "--ranks" in options else ["--ranks", words[words.index("--nproc-per-node") + 1]]
    job = str(ROOT / "examples" / "tied_gpt.toml")
    found = CliRunner().invoke(main, ["plan", job, *ranks, *options])
    assert found.exit_code == 0, found.output


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) == 3
