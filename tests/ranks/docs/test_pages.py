"""Every block of code of README.md, CONTRIBUTING.md and docs/ runs, page by page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.support import with_transformers  # noqa: F401
from tests.support.page_run import run_page
from tests.support.pages import BLOCKS, ROOT, SCRIPTS, Block, file_of, num_ranks
from tests.support.train.jobs import by_hand

RUNNING = [page for page, blocks in BLOCKS.items() if any(block.runs for block in blocks)]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder as a clone of the repository, as far as pages need one."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.ranks(num_ranks(page), seconds=500), id=page)
        for page in RUNNING
    ],
)
def test_the_blocks_of_a_page_run(page: str, clone: Path) -> None:
    printed = run_page(BLOCKS[page], clone)
    running = [block for block in BLOCKS[page] if block.runs]
    assert len(printed) == len(running)
    if page in SCRIPTS:
        check_script(page, running, printed)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("hidden", "visible", "refusal"),
    [
        ("x = 1", "print(x)", "name 'x' is not defined"),
        ("import torch", "print(torch)", "name 'torch' is not defined"),
        ("open('x.txt', 'w').close()", "", "a hidden block changes ['files']"),
        ("import sys; sys.path.append('x')", "", "a hidden block changes ['sys.path']"),
        ("import os; os.environ['X'] = ''", "", "a hidden block changes ['os.environ']"),
        ("", "import pipegrad\npipegrad.Topology.create(pipeline=1)", "init_process_group()"),
    ],
)
def test_a_page_runs_as_a_reader_copies_it(
    hidden: str, visible: str, refusal: str, tmp_path: Path
) -> None:
    blocks = [
        Block("README.md", 1, "python", hidden, "run", ""),
        Block("README.md", 2, "python", visible, "", ""),
    ]
    with pytest.raises((AssertionError, NameError, RuntimeError, ValueError)) as error:
        run_page(blocks, tmp_path)
    assert refusal in str(error.value)
    # What a page has made, hidden blocks see, and the process group is there for the next page.
    made = "import torch.distributed as dist\ndist.init_process_group('gloo')\nx = 2"
    checks = "y = x + 1\nassert dist.is_initialized()", "assert (y, x, printed) == (3, 2, '')"
    code = [Block("README.md", 1, "python", made, "", "")]
    run_page([*code, *(Block("README.md", 1, "python", c, "run", "") for c in checks)], tmp_path)
    assert dist.is_initialized()
    with pytest.raises(ValueError, match="twice"):
        run_page([*code, *code], tmp_path)


def check_script(page: str, running: list[Block], printed: list[str]) -> None:
    """Raises unless a page's script is whole, and has the losses of one process.

    The README's first snippet had five names that nothing defined.
    """
    python = [i for i, block in enumerate(running) if block.language == "python"]
    assert running[python[0]].code == SCRIPTS[page]  # no block before has defined anything
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed[python[0]])]
    # Six decimals are printed, by one rank; a loss of about 6 has an eps of 6e-7, and sums of 256
    # terms.
    assert losses == pytest.approx(one_process(), rel=4 * 2**-23 * 256**0.5)


def one_process() -> list[float]:
    """Returns the losses of the uncut model of the scripts."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(256, 64), nn.Linear(64, 256, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Linear(64, 64), nn.Linear(64, 64), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = (torch.randint(256, (16,)) for _ in range(10))
    found = by_hand(batches, lambda x: functional.cross_entropy(model(x), x), optimizer)
    return [loss for loss, _ in found]


@pytest.mark.parametrize(
    ("page", "module", "test"),
    [
        ("docs/how_to/write_a_handler.md", "my_handlers", "TestDataParallel"),
        ("docs/how_to/write_a_codec.md", "my_codecs", "TestSigns"),
    ],
)
def test_the_plug_in_of_a_page_keeps_its_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, module: str, test: str
) -> None:
    (tmp_path / f"{module}.py").write_text(file_of(page, f"{module}.py"))
    monkeypatch.syspath_prepend(tmp_path)
    space: dict[str, Any] = {"__name__": f"test_{module}"}
    exec(file_of(page, f"test_{module}.py"), space)
    checks = space[test]()
    names = ["test_gradients_are_those_of_one_process"]
    if test == "TestSigns":
        names = [name for name in dir(checks) if name.startswith("test_")]
        assert len(names) > 10
    for name in names:
        getattr(checks, name)()
