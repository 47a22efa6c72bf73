"""A hundred more bad inputs: each ends in one line that says what is wrong, before any step.

`test_bad_input` has the mistakes of people. Here are files that are no text, numbers out of every
range, paths that cannot be, and wrong starts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from pipegrad.cli import main
from pipegrad.errors import ConfigError
from pipegrad.train.config import load
from tests.support.ranked import gathered
from tests.support.train.jobs import SMALL, command, with_job
from tests.support.train.launched import Launched, torchrun


def with_set(settings: str | Sequence[str]) -> list[str]:
    words = [settings] if isinstance(settings, str) else settings
    return [word for setting in words for word in ("--set", setting)]


LONG = "a" * 5000
NOT_TOML = "is not valid TOML: "
# Content of a file -> what is said of it. The name of the case is the name of the file.
FILES: dict[str, tuple[bytes | str, str]] = {
    "UTF-16": (SMALL.encode("utf-16"), f"{NOT_TOML}it is not UTF-8 text: byte 0xff at 0"),
    "a zip": (b"PK\x03\x04\x00\x00", NOT_TOML),
    "a null character": (b"a = 1\0", NOT_TOML),
    "a key twice": (SMALL + "steps = 3\n", f"{NOT_TOML}Cannot overwrite a value .at line 10"),
    "lines of an old Mac": (SMALL.replace("\n", "\r"), f"{NOT_TOML}Invalid statement"),
    "lists in lists": ("a = " + "[" * 5000 + "]" * 5000, f"{NOT_TOML}maximum recursion depth"),
    "a number of 5000 digits": (SMALL + "seed = " + "9" * 5000, f"{NOT_TOML}Exceeds the limit"),
    "lines of Windows": (
        SMALL.replace("\n", "\r\n") + "stps = 3\r\n",
        "train.stps = 3: unknown key; known, closest first: steps, ",
    ),
    "a number as a model": ("model = 3", "model = 3: should be a table"),
    "two models": (
        '[model]\nfactory = "factories:tied"\nconfig = "x.json"',
        "should have one of the keys factory, pretrained and config",
    ),
    "a number as a key": (f"3 = 4\n{SMALL}", "3 = 4: unknown key"),
    "a date": (SMALL + "seed = 2020-01-01", r"train.seed = datetime.date\(2020, 1, 1\): should be"),
}
# What --set is given that the configuration does not take.
OUT_OF_RANGE = """
train=3 parallel.microbatches=true train.steps=1.5 train.steps=0 gradients.clip_norm=-1
gradients.clip_norm=nan train.precision=fp8 gradients.non_finite=ignore gradients.check_every=-1
gradients.reduce_dtype=int8 gradient_handlers=noop train.steps.x=3
train.seed=2147483648 train.seed=-1 train.steps=1e3 train.steps=1__0 train.log_every=0
train.save_every=0 train.trace=1 data.batch_size=0 data.sequence_length=0
gradients.bucket_bytes=-1 gradients.bucket_bytes=1.5e6 gradients.comm_streams=0
gradients.comm_streams=65 gradients.clip_norm=0 gradients.clip_norm='1'
gradients.allow_unsynced='*' eval.every=0 eval.temperature=-1 eval.temperature=inf
eval.sample_tokens=0 parallel.microbatches=0 parallel.pipeline=0 parallel.data=-3
parallel.dimensions={tp=-2} parallel.dimensions={tp='x'} parallel.data_dimensions=[]
gradient_handlers=[{name=3}] train.reporters=3 optimizer.schedule=3 train.loss_reduction=sum
data.files=[3] data.separator= train.output=3 train.resume=3
"""
# What --set is given -> what is said of it.
SETTINGS: dict[str | Sequence[str], str] = {
    ("train.steps=3", "train.steps=x"): "train.steps = 'x': should be a valid integer",
    "train..steps=3": "'train..steps' is not a dotted key",
    "train.steps=3\ntrain.seed=4": "another key follows: repeat --set for several",
    "train.reporters[0]=x": r"'train.reporters\[0\]' is not a dotted key",
    "model=none": "none is not TOML",
    "train.save_every='5'": "train.save_every = '5': should be a valid integer",
    "train.recompute=yes": "yes is not TOML, .* write true or false",
    "data.batch_size=1000000000000": "batch 1 of data.files cannot be made: RuntimeError",
    "data.sequence_length=1000000000000": "the text has 466117 bytes: choose at most 466116",
    "gradients.master_dtype=float64": "should be 'float32', 'bfloat16' or 'float16'",
    ("eval.prompt=", "eval.sample_every=1"): "should have at least 1 character",
    ("parallel.microbatches=100000000", "data.batch_size=100000000"): (
        "^Error: --set: parallel.microbatches = 100000000: .*: expected at most 1,000,000"
    ),
    "parallel.pipeline=100000000000000000000": "this is one rank of 1000000000000000000",
    "parallel.dimensions={pp=2}": "other than 'pp' and 'dp'",
    "parallel.dimensions={'t p'=2}": "should name dimensions by words",
    "parallel.data_dimensions=['xp']": r"expected of \['dp'\], once each",
    "parallel.data_dimensions=['dp','dp']": r"expected of \['dp'\], once each",
    "parallel.boundaries=[1.5]": r"boundaries\[0\] = 1.5: should be an index or a name",
    "parallel.boundaries=['nope']": r"\['nope'\] are no layers .*; these are \['0', '1', '2'",
    "model.factory=": "should look like 'module:function'",
    "model.factory=':tied'": "should look like 'module:function'",
    "model.factory='factories:tied()'": "should look like 'module:function'",
    "model.factory=factories:nn.nothing": "'torch.nn' has no attribute 'nothing'",
    "model.factory=os:_exit": "the factory needs the option 'status'",
    "model.width=x": r"the factory fails: TypeError.* \(factories.py:\d+\)",
    "model.width=1000000000000": "the factory fails: RuntimeError.*can't allocate memory",
    "model={pretrained='small.toml'}": "small.toml is no configuration of transformers",
    "model={pretrained='.'}": "there is no config.json: expected a directory",
    "gradient_handlers=['nowhere:X']": "ModuleNotFoundError.*; repair or uninstall it",
    "gradient_handlers=['factories:tied']": "is <function tied>: expected a concrete subclass",
    "gradient_handlers=['']": "is called ''; known, closest first",
    "parallel.schedule=": "is called ''; known, closest first: 1f1b",
    "parallel.schedule={stages_per_rank=2}": "parallel.schedule.name is missing",
    "parallel.schedule={name='interleaved-1f1b', stages_per_rank=-2}": "is -2, expected at l",
    "parallel.schedule={name='interleaved-1f1b', stages_per_rank='two'}": "is 'two', expected at l",
    "parallel.schedule={name='auto', costs='small.toml'}": (
        "small.toml holds no costs: line 2, column 2 is no JSON"
    ),
    "train.reporters=[{name='jsonl', x=1}]": "has no option 'x'",
    "optimizer.lr=inf": "optimizer.lr = inf: should be a finite number",
    "optimizer.lr=nan": "optimizer.lr = nan: should be a finite number",
    "optimizer.lr=true": "optimizer.lr = True: should be a finite number",
    "optimizer={name='SGD', momentum=inf}": "optimizer.momentum = inf: should be a finite",
    "optimizer.name=": "optimizer.name = '': torch.optim has none; known",
    "optimizer.name=Optimizer": "torch.optim has none; known",
    "optimizer.name=lr_scheduler": "torch.optim has none; known",
    "optimizer.betas=[1.5, 0.9]": "will not take that: Invalid beta parameter at index 0: 1.5",
    "optimizer.betas=[0.9, 0.9, 0.9]": "its first step fails: ValueError",
    "optimizer.params=[]": "AdamW has no option 'params'; allowed, closest first",
    "optimizer.schedule=[{name='LinearLR', steps=0}]": r"schedule\[0\].steps = 0: should be gr",
    "optimizer.schedule={name='StepLR', step_size=0}": (
        r"optimizer.schedule = \[{'name': 'StepLR', 'step_size': 0}\]: fails within 12 steps"
    ),
    "train.loss=x": "should look like 'module:function'",
    "data.files=['/']": "Directory / is neither a `Dataset` directory",
    "data.files=['/proc/self/mem']": "/proc/self/mem is empty",
    "data.dataset=3": "data.dataset = 3: should be a name, or a table",
    "train.device=meta": "train.device = 'meta': this machine has",
    "train.device='cpu:5'": "train.device = 'cpu:5': .*: write 'cpu'",
    "train.output=/proc/x": "train.output = '/proc/x': ",
    f"train.output={LONG}": ("train.output = 'aaa.*File name too long"),
    "train.resume=small.toml": "train.resume = 'small.toml': ",
    "train.resume=/dev/null": "train.resume = '/dev/null': ",
    "train.resume=": "train.resume = '': ",
    f"train.resume={LONG}": ("train.resume = 'aaa"),
    "train.resume=~nobodyatall/x": "train.resume = '~nobodyatall/x': ",
    "train.resume=a zip": "train.resume = 'a zip': ",
}
SIZES = ("--ranks", "2", "--microbatches", "2")
# Words of the command line -> what is said of them.
COMMANDS: dict[Sequence[str], str] = {
    ("train",): "Missing argument 'CONFIG'",
    ("train", ""): "cannot be read: Is a directory",
    ("train", "a\0b"): r"'a\\x00b' is no path",
    ("train", f"{LONG}.toml"): "cannot be read: File name too long",
    ("train", "small.toml/x.toml"): "small.toml/x.toml: cannot be read: Not a directory",
    ("train", "/dev/null"): "/dev/null: cannot be read: /dev/null is a device, expected a file",
    ("train", "loop.toml"): "loop.toml: cannot be read: Too many levels of symbolic links",
    ("train", "small.toml", "small.toml"): "unexpected extra argument .small.toml",
    ("train", "small.toml", "--stps", "3"): "No such option '?--stps",
    ("train", "small.toml", "--set"): "Option '--set' requires an argument",
    ("trian", "small.toml"): "No such command 'trian'",
    (
        "plan",
        "small.toml",
        "--ranks",
        "0",
    ): "'--ranks': '0': expected a whole number from 1 to 1,048,576",
    ("plan", "small.toml", "--html", "no/where.html"): "--html no/where.html: .*No such file",
    ("schedule", "nope", *SIZES): "is called 'nope'; known, closest first",
    ("schedule", "1f1b", *SIZES, "--set", "x=1"): "has no option 'x'",
    ("trace", "small.toml"): "small.toml holds no timeline",
    ("doctor", "--timeout", "0"): "'--timeout': '0': expected a number from 1.0 to 3,600.0",
    ("export", ".", "--dtype", "int8"): "'int8' is not one of 'float32', 'bfloat16', 'float16'",
    ("launch", "-n", "2", "nowhere.toml"): "nowhere.toml: there is no such file",
    ("trace", LONG): "cannot be read: File name too long",
    ("trace", "a\0b"): r"'a\\x00b' cannot be read: embedded null byte",
    ("plan", "small.toml", "--costs", "a\0b"): r"'a\\x00b' cannot be read: embedded null byte",
    ("trace", "a zip.toml"): "a zip.toml holds no timeline: line 1, column 1 is no JSON",
    ("simulate", "1f1b", *SIZES, "--save", ""): "--save .: ",
    ("simulate", "1f1b", *SIZES, "--html", "."): "--html .: Is a directory",
    ("simulate", "1f1b", *SIZES, "--steps", "9" * 30): "expected a whole number from 1 to 10,000",
}
CASES: dict[str, tuple[Sequence[str], str]] = {
    **{name: (("train", f"{name}.toml"), says) for name, (_, says) in FILES.items()},
    **{
        str(settings)[:80]: (("train", "small.toml", *with_set(settings)), says)
        for settings, says in SETTINGS.items()
    },
    **{" ".join(words)[:80]: (words, says) for words, says in COMMANDS.items()},
}
UNDER_TORCHRUN = ["lists in lists", "model.factory=os:_exit", "gradient_handlers=['nowhere:X']"]
ON_RANKS = [
    "a zip",
    "two models",
    "gradient_handlers=['factories:tied']",
    "data.files=['/']",
    "data.batch_size=1000000000000",
    "train.resume=small.toml",
    "parallel.boundaries=[1.5]",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = with_job(tmp_path_factory.mktemp("hundred"))
    for name, (content, _) in FILES.items():
        (made / f"{name}.toml").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    (made / "a zip").mkdir()
    (made / "a zip" / "checkpoint.json").write_bytes(b"PK\x03\x04")
    (made / "loop.toml").symlink_to("loop.toml")
    return made


@pytest.mark.parametrize("setting", OUT_OF_RANGE.split())
def test_a_value_out_of_range_is_refused(folder: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=r"= .*: .*should (be|have at least) ") as caught:
        load(folder / "small.toml", [setting])
    assert str(caught.value).startswith((f"--set {setting}: ", "--set: "))


@pytest.mark.parametrize("name", CASES)
def test_one_line_says_what_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A traceback, or a run, for each of these: lists in lists, a number of 5000 digits, a null
    character in the path, a second line in --set, a batch too large, ``cpu:5``, ``lr = true``.
    """
    words, says = CASES[name]
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, list(words))
    assert isinstance(result.exception, SystemExit), result.exception
    *usage, line = result.output.splitlines()
    # click has 2 for words of the command line, and shows its usage.
    assert result.exit_code == (2 if usage or "requires an argument" in line else 1)
    assert re.search(says, line), line
    assert line.startswith("Error: ")
    assert all(word.startswith(("Usage: ", "Try ")) or not word for word in usage), usage
    assert not (folder / "runs").exists()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ON_RANKS)
def test_one_rank_says_it_for_all(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    words, says = CASES[name]
    monkeypatch.chdir(folder)
    code, said = command(*words)
    assert gathered(code) == [1, 1]
    if dist.get_rank():
        assert said == ""
    else:
        assert re.search(rf"^Error: .*{says}.*\n$", said), said


@pytest.mark.parametrize("name", UNDER_TORCHRUN)
def test_one_rank_says_it_for_all_under_torchrun(folder: Path, name: str) -> None:
    words, says = CASES[name]
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
