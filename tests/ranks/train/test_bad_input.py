"""Each mechanism that refuses a job ends it with one line and exit code 1, before any step.

Most are tried in one process; what only ranks can notice, on two. Any bytes: tests/fuzz/readers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from pipegrad.cli import main
from tests.support.ranked import gathered
from tests.support.train.jobs import SMALL, command, with_job
from tests.support.train.launched import Launched, torchrun

Settings = str | tuple[str, ...]
LISTED = "data={dataset='data_functions:listed'}"
TWO_STAGES = "parallel.schedule={name='interleaved-1f1b', stages_per_rank=2}"
# The content of a file, and what is said of it, as a pattern.
FILES: dict[str, tuple[str | bytes, str]] = {
    "no file": ("", "no file.toml: there is no such file"),
    "a folder": ("", "a folder.toml: cannot be read: Is a directory"),
    "not UTF-8": (b"a = '\xe9'", "is not valid TOML: .utf-8. codec .* byte 0xe9 in position 5"),
    "no TOML": ("\nsteps 3", "no TOML.toml: is not valid TOML: .*line 2"),
    "lists in lists": ("a = " + "[" * 5000 + "]" * 5000, "is not valid TOML: maximum recursion"),
    "an empty file": (" ", "model = {}: Field required"),
    "a table misspelt": (
        f"{SMALL}\n[optimiser]\nlr = 3",
        "unknown key .optimiser.; .*: optimizer, data",
    ),
}
# What --set is given, and what is said of it.
KEYS: dict[Settings, str] = {
    "train.stpes=3": "train = .*: unknown key .stpes.; known, closest first: steps",
    "train.steps=many": "train.steps = 'many': should be a valid integer",
    ("train.steps=0", "train.seed=-1"): r"(?s)steps = 0.*\ntrain.seed = -1",
    "optimizer.lr=true": "optimizer.lr = True: should be a finite number",
    "gradient_handlers=[3]": r"handlers\[0\] = 3: should be a name, or a table of name",
    "gradient_handlers=[{axis='dp'}]": r"gradient_handlers\[0\].name = .*: Field required",
    "parallel.boundaries=[1.5]": r"boundaries\[0\].int = 1.5: should be a valid integer",
    "parallel.dimensions={pp=2}": "other than 'pp' and 'dp'",
    "parallel.dimensions={'t p'=2}": "should name dimensions by words",
    "train.steps": "--set train.steps: expected key=value",
    "=3": "--set =3: '' is not a dotted key",
    "data.files=[a.txt]": "the value is not TOML .*: write words in quotes, as in",
    "train.steps=3\ntrain.seed=4": "another key follows: repeat --set for several",
    "data.dataset=data_functions:listed": "batch_size = 8: has no effect beside data.dataset: ",
    "eval.every=3": "together with eval.files or eval.dataset",
    ("eval.files=['ours.txt']", "eval.dataset=data_functions:listed", "eval.every=3"): (
        "eval.files are set too: choose one of them"
    ),
}
FACTORIES = {  # model.factory=factories:
    "absent": "cannot be imported: AttributeError",
    "not_callable": "is int, expected a function",
    "needs": "the factory needs the option 'width'",
    "exits": r"the factory fails: SystemExit\(0\) \(factories.py:",
    "no_module": "it returns int, expected an nn.Module",
    "empty": "it returns an nn.Sequential without any layer",
    "frozen": "requires a gradient: nothing to train",
    "few_logits": "IndexError.*Target 255 is out of bounds.* In 0F0 on pipeline rank 0",
    "not_finite": "the loss of the first batch is nan",
    "few_tokens": "IndexError.*index out of range.* In 0F0 on pipeline rank 0",
    "exits_forward": r"SystemExit\('bye'\).* In 0F0 on pipeline rank 0",
}
MODELS: dict[Settings, str] = {
    **{f"model.factory=factories:{name}": says for name, says in FACTORIES.items()},
    "model.factory=tied": "'tied': should look like 'module:function'",
    "parallel.schedule={name='interleaved-1f1b', stages_per_rank=8}": (
        "pipeline = .default.: a model of 5 layers cannot be cut into 8 stages"
    ),
    ("parallel.boundaries=[9]", TWO_STAGES): "ascending indices from 1 to 4",
    "train.loss=data_functions:not_reduced": "In 0F0 on pipeline rank 0",
    "train.loss=data_functions:fails": "RuntimeError.* In 0F0 on pipeline rank 0",
}
DATA: dict[Settings, str] = {
    "data.files=['nowhere.txt']": "no file matches nowhere.txt, seen from the working directory",
    r'data.files=["a\u0000b"]': "no file matches a.*b, seen",
    "data.files=['empty.txt']": "empty.txt has no text",
    "data.files=['zero.bin']": "zero.bin is binary, not text: it",
    "data.files=['one.txt']": "the text has 1 bytes: choose at most 0",
    "data.files=['blank.jsonl']": "blank.jsonl has no text",
    "data.batch_size=1000000000000": "batch 1 of data.files cannot be made: RuntimeError",
    ("eval.files=['ours.txt']", "eval.every=3"): (
        r"eval.files = \['ours.txt'\]: there is no batch"
    ),
    (LISTED, "eval.sample_every=3"): "needs a tokenizer.json in",
    (
        "data={dataset='data_functions:listed'}",
        "eval={every=3, dataset='data_functions:nothing'}",
    ): ("eval.dataset = 'data_functions:nothing': there is no batch"),
}
PARTS: dict[Settings, str] = {
    ("parallel.microbatches=100000000", "data.batch_size=100000000"): (
        "parallel.schedule = '1f1b': .*: expected at most 1,000,000"
    ),
    "parallel.schedule={name='1f1b', stages=3}": "'1f1b' .* has no option 'stages'",
    "parallel.schedule=odd_schedule:Odd": (
        r"(?s)schedule = 'odd_schedule:Odd': schedule 'odd' cannot go on: .*\nrank 0  >0B3< "
    ),
    "parallel.schedule=odd_schedule:Short": "and made a schedule of 1 ranks and 3 microbatches",
    "gradient_handlers=['exits:X']": "cannot be imported: SystemExit.0.; repair it, or add",
    "gradient_handlers=['handlers_that_exit:Making']": "constructed with {}: SystemExit.0.",
    "gradient_handlers=['handlers_that_exit:Reducing']": "of rank 0 failed: SystemExit.'bye'",
    "gradient_handlers=['handlers_that_exit:Looking']": r"check\(\) failed: SystemExit\(0\)",
    "optimizer.schedule=Cosine": r"schedule\[0\].name = 'Cosine': torch.optim.lr_sch",
    "optimizer.schedule=CosineAnnealingLR": "needs the option 'T_max'",
    "optimizer.schedule={name='LambdaLR', lr_lambda='x'}": "torch will not take that: TypeError",
    "optimizer.schedule={name='ReduceLROnPlateau'}": "cannot be given by name and plain",
    "optimizer.schedule=[{name='LinearLR'}, {name='ConstantLR'}]": (
        r"schedule\[0\] = 'LinearLR': every schedule but the last needs"
    ),
    "optimizer.schedule={name='OneCycleLR', max_lr=1, total_steps=2}": "fails within 12 steps: Val",
    "train.device=tpu": "train.device = 'tpu': this machine has",
    "train.device='cpu:5'": "train.device = 'cpu:5': .*: write 'cpu'",
    r'train.output="a\u0000b"': "cannot be written: .*null",
    "train.output=one.txt/x": "cannot be written: .*Not a dir",
    "train.output=.": "holds more than a run: name a folder",
    r'train.resume="a\u0000b"': "train.resume = .*null",
    "train.resume=nowhere": "train.resume = 'nowhere': nowhere is not a whole checkpoint of this v",
}
# Words of the command line, and what is said of them.
COMMANDS: dict[Sequence[str], str] = {
    ("train",): "Missing argument 'CONFIG'",
    ("train", "small.toml", "--stps", "3"): "No such option '?--stps",
    ("train", "small.toml", "--set"): "Option '--set' requires an argument",
    ("train", "small.toml", "--schedule", "1f1"): "parallel.schedule = '1f1': .*: 1f1b",
    (
        "train",
        "small.toml",
        "--handler",
        "shraded",
    ): r"gradient_handlers\[0\] = ",
    ("train", "a\0b"): r"a\\x00b: is not valid TOML: embedded null byte",
    ("trace", "a\0b"): r"'a\\x00b' cannot be read: embedded null byte",
}
# What only ranks can notice: they look at other files, have other values, or fail alone.
ON_RANKS: dict[Settings, str] = {
    "model.factory=factories:lonely": r"rank 1: .*'mine alone'.* \(the model: 1 of 2 ranks failed",
    "model.factory=factories:differing": "other values on rank 1 than on rank 0, though train.seed",
    "model.factory=factories:differing_buffer": "it makes other values on rank 1 than on rank 0, ",
    "data.files=['ours.txt']": "ranks disagree on the text",
    "data={dataset='data_functions:by_rank'}": "ranks 0 and 1 were given different tensors as 'x'",
    ("data={dataset='data_functions:without_ranks'}", "parallel.data=2"): (
        "has no parameter data_rank, so all 2 data ranks"
    ),
    "train.seed={rank}": "ranks disagree on train.seed: 0 on rank 0, 1 on rank 1; make",
}
HANDLERS_THAT_EXIT = """
from pipegrad import GradientHandler
class Making(GradientHandler):
    def __init__(self):
        raise SystemExit(0)
    def reductions(self, parameters, topology):
        return []
class Reducing(GradientHandler):
    def reductions(self, parameters, topology):
        raise SystemExit("bye")
class Looking(GradientHandler):
    def check(self, parameters, topology):
        raise SystemExit(0)
    def reductions(self, parameters, topology):
        return []
"""
ODD = """
import dataclasses
from pipegrad.schedules import ScheduleGenerator, build
class Odd(ScheduleGenerator):
    def generate(self, *, num_ranks, num_microbatches):
        good = build("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
        rows = tuple(tuple(reversed(row)) for row in good.actions)
        return dataclasses.replace(good, name="odd", actions=rows)
class Short(ScheduleGenerator):
    def generate(self, *, num_ranks, num_microbatches):
        return build("1f1b", num_ranks=num_ranks, num_microbatches=3)
"""


def train(settings: Settings) -> list[str]:
    every = [settings] if isinstance(settings, str) else settings
    return ["train", "small.toml", *(word for setting in every for word in ("--set", setting))]


CASES: dict[str, tuple[Sequence[str], str]] = {
    **{name: (("train", f"{name}.toml"), says) for name, (_, says) in FILES.items()},
    **{str(s): (train(s), says) for s, says in (KEYS | MODELS | DATA | PARTS).items()},
    **{" ".join(words): (words, says) for words, says in COMMANDS.items()},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations, texts, plug-ins: everything the cases name."""
    made = with_job(tmp_path_factory.mktemp("bad"))
    for name, (content, _) in FILES.items():
        if content:
            (made / f"{name}.toml").write_bytes(
                content if isinstance(content, bytes) else content.encode()
            )
    (made / "a folder.toml").mkdir()
    for name, text in {
        "empty.txt": b"",
        "zero.bin": b"abc\0def" * 9,
        "one.txt": b"x",
        "blank.jsonl": b"\n \n",
        "ours.txt": b"x" * 99,
        "handlers_that_exit.py": HANDLERS_THAT_EXIT.encode(),
        "odd_schedule.py": ODD.encode(),
        "exits.py": b"raise SystemExit(0)",
    }.items():
        (made / name).write_bytes(text)
    for rank in (0, 1):
        with_job(made / f"rank {rank}").joinpath("ours.txt").write_text(f"{rank}" * 99)
    return made


@pytest.mark.parametrize("name", CASES)
def test_bad_input(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Some were a traceback, no output and code 0, or 620 s without a word."""
    words, says = CASES[name]
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, list(words))
    assert isinstance(result.exception, SystemExit), result.exception
    usage, error, said = result.output.rpartition("Error: ")
    assert error
    # click has 2 for words of the command line, and may show its usage.
    assert result.exit_code == (2 if usage or "requires an argument" in said else 1)
    assert re.search(says, f"{error}{said}"), said
    assert "Traceback" not in result.output
    assert not (folder / "runs").exists()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", ON_RANKS, ids=str)
def test_one_rank_says_it_for_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    # Each rank is in a folder of its own, as on its machine.
    rank = dist.get_rank()
    monkeypatch.chdir(folder / f"rank {rank}")
    monkeypatch.setenv("LOCAL_RANK", "0")
    code, said = command(*(word.replace("{rank}", str(rank)) for word in train(settings)))
    assert gathered((code, said)) == [(1, said)] * 2
    assert re.search(f"^Error: .*{ON_RANKS[settings]}", said), said
    assert said.count("\n") == 1
    assert not list(folder.rglob("runs"))


def test_one_rank_says_it_for_all_under_torchrun(folder: Path) -> None:
    words, says = CASES["lists in lists"]
    launched = Launched(
        folder, torchrun, "--standalone", "--nproc-per-node", "2", "-m", "pipegrad", *words
    )
    assert launched.wait() != 0
    [line] = [line for line in launched.errors.splitlines() if line.startswith("Error")]
    assert re.search(says, line), line
    # What follows is torchrun's own.
    before = launched.errors.partition("torch/distributed")[0]
    assert "Traceback" not in before, before
    assert launched.printed == ""
    assert not (folder / "runs").exists()
