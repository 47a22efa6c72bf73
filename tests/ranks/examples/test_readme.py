"""What README.md and docs/ show runs as it is written there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pipegrad.testing import run_ranks
from tests.support.pages import SCRIPTS, SNIPPETS, write_handler

# What the snippets under a heading may take for granted: that of a page, behind what they all have.
GIVEN = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pipegrad

device, world_size, index = torch.device("cpu"), dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
"""
GIVEN_UNDER = {
    "The arguments": """
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
model[3].weight = model[0].weight
module, loss_fn = model[index], nn.functional.mse_loss
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
first_batch, second_batch = torch.randn(8, 4), torch.randn(8, 4)

def train_step(batch):
    schedule.step(*([batch] if index == 0 else []), target=batch if index == 3 else None)
""",
    "Your own loop": """
module, stage, tied = [nn.Linear(4, 4) for _ in range(4)][index], index, []
microbatches = torch.randn(8, 4).chunk(4)

def forward_and_backward(microbatch):
    module(microbatch).sum().backward()
""",
    "Many small sums: `Bucketer`": """
gradient, tensor, group, sums = torch.ones(8), torch.ones(3), topology.group_along("pp"), []
use = sums.append
""",
    "Stages and names": """
class Encoder(nn.Linear):
    def forward(self, x):
        return super().forward(x), x

class Decoder(nn.Linear):
    def forward(self, x, skip, attention_mask):
        return super().forward((x + skip) * attention_mask)

encoder, decoder, tied = Encoder(4, 4), Decoder(4, 4), []
x, y, mask, loss_fn = torch.randn(32, 4), torch.randn(32, 4), torch.ones(32, 4), nn.MSELoss()
""",
    "Losses and metrics": """
F = nn.functional

class Experts(nn.Embedding):
    def forward(self, tokens):
        x = super().forward(tokens)
        return x, x.square().mean()

experts, head = Experts(8, 4), nn.Linear(4, 8)
stage = topology.coordinate("pp")
stage = pipegrad.Stage([nn.Embedding(8, 4), head][stage], stage)
tokens, target = torch.randint(8, (2, 8, 3))
""",
    "A loop of your own": """
import runpy
import tempfile

runs = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(runs, src=0)
before = os.getcwd()
if dist.get_rank() == 0:
    examples = f"{os.path.dirname(pipegrad.__file__)}/../examples"
    runpy.run_path(f"{examples}/make_hf.py")["make"](f"{runs[0]}/runs/qwen3")
dist.barrier()
os.chdir(runs[0])
""",
    "fp16": """
fp16_stage = topology.coordinate("pp")
fp16_stage = pipegrad.Stage([nn.Linear(4, 4), nn.Linear(4, 4)][fp16_stage], fp16_stage)
""",
    "Where a step goes": """
import tempfile

before = os.getcwd()
os.chdir(tempfile.mkdtemp())
torch.manual_seed(topology.coordinate("pp"))
stage = pipegrad.Stage(nn.Linear(4, 4), topology.coordinate("pp"))
scheduler = pipegrad.Scheduler(
    [stage], topology, schedule="1f1b", num_microbatches=4, loss_fn=nn.MSELoss()
)
optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
x, y = torch.randn(32, 4), torch.randn(32, 4)
""",
    "What the optimizer steps": """
topology = pipegrad.Topology.create(pipeline=2)
stage, module = topology.coordinate("pp"), nn.Linear(4, 4, bias=False).to(torch.bfloat16)
tied = [{0: "weight", 1: "weight"}]
""",
    "Save and load": """
import tempfile

folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder, src=0)
[folder] = folder
sync.prepare()
module(torch.ones(1, 4).to(torch.bfloat16)).sum().backward()
sync.stage_final(stage)
sync.finish()
optimizer.step()
loaded = {"model": {"weight": torch.ones(4, 4)}, "optimizer": optimizer.state_dict()}
for state in loaded["optimizer"]["state"].values():
    state.pop("master")
""",
    "In torch's runtime, and in torchtitan": """
import copy
import tempfile

os.chdir(tempfile.mkdtemp())
eager = pipegrad.schedules.build("eager-1f1b", num_ranks=4, num_microbatches=8)
with open("eager.csv", "w") as file:
    file.write(pipegrad.schedules.write_csv(eager))
topology, loss_fn = pipegrad.Topology.create(pipeline=4), nn.functional.mse_loss
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
model[3].weight = model[0].weight
uncut = copy.deepcopy(model)
group, tied = topology.group_along("pp"), [["0.weight", "3.weight"]]
module = nn.Sequential()
module.add_module(str(index), model[index])
stages = [PipelineStage(module, index, 4, device, group=group)]
""",
}
CHECKED_AFTER = {
    "In torch's runtime, and in torchtitan": """
batch, losses = torch.randn(8, 4), []
schedule.step(*([batch] if index == 0 else []), target=batch if index == 3 else None, losses=losses)
loss_fn(uncut(batch), batch).backward()
assert torch.allclose(model[index].weight.grad, uncut[index].weight.grad, rtol=1e-5)
""",
    "A loop of your own": "assert sorted(os.listdir('runs')) == ['qwen3', 'tuned']",
    "Ways of cutting": "assert cut.tied == [['model.embed_tokens.weight', 'lm_head.weight']]",
    "LoRA": "assert 'adapter_model.safetensors' in os.listdir('runs/adapter')",
    "Gradient checkpointing": "os.chdir(before)",
    "Many small sums: `Bucketer`": "assert [float(s[0]) for s in sums] == [4.0, 4.0]",
    "Save and load": "assert bool((module.weight == 1).all()) and os.listdir(folder)",
    "Your own schedule": "assert same_schedule.actions == schedule.actions",
    "Where a step goes": "assert len(timeline.step_ends) == 3; os.chdir(before)",
    "Further dimensions": "assert topology.size('ep') == 2",
}


def run_snippets(found: list[tuple[str, str, str]]) -> list[str]:
    """Runs those of each page in a namespace of its own; returns the headings."""
    spaces: dict[str, dict[str, Any]] = {}
    begun = set[tuple[str, str]]()
    for page, heading, code in found:
        if page not in spaces:
            spaces[page] = {"__name__": page}
            exec(GIVEN, spaces[page])
        try:
            if (page, heading) not in begun:
                exec(GIVEN_UNDER.get(heading, ""), spaces[page])
            begun.add((page, heading))
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, f"{page}, {heading}", "exec"), spaces[page])
            exec(CHECKED_AFTER.get(heading, ""), spaces[page])
        except Exception as error:
            error.add_note(f"In a snippet of {page}, {heading!r}.")
            raise
    return [heading for _, heading, _ in found]


def run_script(script: str) -> str:
    """Runs a script on a world that is there already; returns what it printed."""
    dist.init_process_group = lambda *_, **__: None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "README.md", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


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


@pytest.mark.parametrize("script", [code for _, code in SCRIPTS], ids=[page for page, _ in SCRIPTS])
def test_scripts_are_whole_and_have_the_losses_of_one_process(script: str) -> None:
    """Issue 16, point 18. The README's first snippet had five names that nothing defined."""
    *others, last = run_ranks(run_script, 4, script)
    assert others == [""] * 3
    printed = [float(loss) for loss in re.findall(r"loss (\S+)", last)]
    # Six decimals are printed; a loss of about 6 has an eps of 6e-7, and sums of 256 terms.
    assert printed == pytest.approx(one_process(), rel=4 * 2**-23 * 256**0.5)


def test_every_snippet_runs() -> None:
    whole = [code for _, code in SCRIPTS]
    found = [snippet for snippet in SNIPPETS if snippet[2] not in whole]
    headings = [heading for _, heading, _ in found]
    assert run_ranks(run_snippets, 4, found) == [headings] * 4
    assert set(GIVEN_UNDER) | set(CHECKED_AFTER) <= set(headings)


def test_the_handler_of_the_page_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space: dict[str, Any] = {"__name__": "test_my_handlers"}
    exec(write_handler(tmp_path, monkeypatch), space)
    space["TestDataParallel"]().test_gradients_are_those_of_one_process()
