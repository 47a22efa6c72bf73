"""Every block of code of README.md, CONTRIBUTING.md and docs/ runs, page by page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipegrad.testing import run_ranks
from tests.support.page_run import run_page, run_script
from tests.support.pages import BLOCKS, ROOT, SCRIPTS, file_of, num_ranks

RUNNING = [page for page, blocks in BLOCKS.items() if any(block.runs for block in blocks)]


def folder_with_examples(folder: Path) -> Path:
    """Returns a folder as a clone of the repository, as far as pages need one."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "docs").symlink_to(ROOT / "docs")
    return folder


@pytest.mark.parametrize("page", RUNNING)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    folder = folder_with_examples(tmp_path)
    ran = run_ranks(run_page, num_ranks(page), BLOCKS[page], str(folder))
    assert ran == [sum(block.runs for block in BLOCKS[page])] * num_ranks(page)


def one_process() -> list[float]:
    """Returns the losses of the uncut model of the scripts."""
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


@pytest.mark.parametrize("page", SCRIPTS)
def test_scripts_are_whole_and_have_the_losses_of_one_process(page: str) -> None:
    """Issue 16, point 18. The README's first snippet had five names that nothing defined."""
    *others, last = run_ranks(run_script, 4, SCRIPTS[page])
    assert others == [""] * 3
    printed = [float(loss) for loss in re.findall(r"loss (\S+)", last)]
    # Six decimals are printed; a loss of about 6 has an eps of 6e-7, and sums of 256 terms.
    assert printed == pytest.approx(one_process(), rel=4 * 2**-23 * 256**0.5)


def test_the_handler_of_the_page_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "docs/how_to/write_a_handler.md"
    (tmp_path / "my_handlers.py").write_text(file_of(page, "my_handlers.py"))
    monkeypatch.syspath_prepend(tmp_path)
    space: dict[str, Any] = {"__name__": "test_my_handlers"}
    exec(file_of(page, "test_my_handlers.py"), space)
    space["TestDataParallel"]().test_gradients_are_those_of_one_process()


def test_the_codec_of_the_page_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "docs/how_to/write_a_codec.md"
    (tmp_path / "my_codecs.py").write_text(file_of(page, "my_codecs.py"))
    monkeypatch.syspath_prepend(tmp_path)
    space: dict[str, Any] = {"__name__": "test_my_codecs"}
    exec(file_of(page, "test_my_codecs.py"), space)
    checks = space["TestSigns"]()
    names = [name for name in dir(checks) if name.startswith("test_")]
    assert len(names) > 10
    for name in names:
        getattr(checks, name)()
