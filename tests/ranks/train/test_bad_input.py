"""Everything a user can get wrong: one message, on all ranks, before any step, exit code 1."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.distributions import write_distribution
from tests.support.ranked import gathered
from tests.support.train.jobs import SMALL, command, with_job

NO_DATA = SMALL.replace("[data]\nbatch_size = 8\nsequence_length = 16\n", "")
# What is wrong -> what has to be said of it, as a pattern.
TEXTS: dict[str, tuple[str | bytes, str]] = {  # the file
    "no file": ("", "no file.toml: there is no such file"),
    "a folder": ("", "a folder.toml: cannot be read: Is a directory"),
    "no TOML": ("\nsteps 3", "no TOML.toml: is not valid TOML: .*line 2"),
    "not UTF-8": (b"a = '\xe9'", "is not valid TOML: it is not UTF-8 text: byte 0xe9 at 5"),
    "an empty file": (" ", "an empty file.toml: model is missing"),
    "a table misspelt": (
        f"{SMALL}\n[optimiser]\nlr = 3",
        "optimiser = .*unknown key; known, closest first: optimizer, data",
    ),
}
FACTORIES = {  # model.factory=factories:
    "absent": "cannot be imported: AttributeError",
    "not_callable": "is int, expected a function",
    "needs": "the factory needs the option 'width'",
    "fails": r"RuntimeError\('no such checkpoint'\)",
    "cached": "must not keep tensors from call to call",
    "no_module": "it returns int, expected an nn.Module",
    "not_sequential": "Linear has 0 layers that a stage can begin with, fewer than",
    "Twice": "it returns 2 tensors; expected one, or one that is called logits",
    "few_logits": r"\(1, 16, 100\) for 16 bytes; expected logits \(1, 16, 2",
    "few_tokens": "0 .layers 0 to 0. fails on torch.int64 .1, 16.: Index",
    "not_finite": "logits that are not finite",
    "no_tensor": "1 .layers 1 to 1. returns a tuple; expected one ten",
    "pooled": r"it returns torch.float32 \(1, 256\) for 16 bytes;",
    "in_place": "stage 1 .* fails on .*leaf Variable",
    "integers": "stage 0 .* returns torch.int64 .1, 16.; expec",
    "dtensors": "1 .layers 1 to 1. fails on .*mixed torch.Tensor and DTensor",
    "frozen": "requires a gradient: nothing to train",
    "lonely": r"rank 1: .*'mine alone'.* \(the model: 1 of 2 ranks failed",
    "exits": r"the factory fails: SystemExit\(0\) \(factories.py:",
    "exits_on_one": r"rank 1: .*SystemExit\(3\) \(factories.py:.*1 of 2 ranks failed",
    "exits_forward": r"stage 1 .* fails on .*SystemExit\('bye'\)",
    "differing": "other values on rank 1 than on rank 0, of 'the next random number' and",
    "empty": "it returns an nn.Sequential without any layer",
}
FILES = {  # data.files
    "nowhere.txt": "no file matches nowhere.txt, seen from the working directory",
    "empty.txt": "empty.txt is empty",
    "zero.bin": "zero.bin is binary, not text: it",
    "latin.txt": "latin.txt cannot be read: 'utf-8' .* byte 0xe9 in position 3",
    ".": "Directory . is neither a `Dataset` directory nor a ",
    "short.txt": "= 16: the text has 16 bytes: choose at most 15",
    "mine.txt": "rank 1: ConfigError: .*mine.*1 of 2 ranks failed",
    "ours.txt": "ranks disagree on the text",
    "~/nowhere.txt": "no file matches ~/nowhere.txt, seen",
    "no*.txt": r"no file matches no\*.txt, seen from the working dir",
    "**x": r"no file matches \*\*x, seen",
    "one.txt": "the text has 1 byte, expected a l",
    "blank.jsonl": "blank.jsonl has no text",
    "text.gz": "text.gz cannot be read: Compressed file ended",
}
DATASETS: dict[str | tuple[str, ...], str] = {  # data.dataset, and others
    "data_functions:lited": r"cannot be imported: AttributeError\(",
    "data_function:listed": "imported: ModuleNotFoundError",
    "listed": "should look like 'module:funct",
    "data_functions:ROWS": "is int, expected a function",
    "{name='data_functions:listed', num_batch=3}": (
        "the function has no option 'num_batch'; allowed, closest first: num_batches"
    ),
    "data_functions:needs_rows": "the function needs the option 'rows'",
    "{name='data_functions:alike', data_rank=1}": "the function has no option 'data_rank'",
    (
        "data_functions:without_ranks",
        "parallel.data=2",
    ): "has no parameter data_rank, so all 2 data ranks",
    "data_functions:nothing": "the function has no batch in epoch 1: return an iter",
    "{name='data_functions:needs_rows', rows=3}": (
        r"batch 1 has 3 rows \(.*\), fewer than parallel.microbatches = 4"
    ),
    "data_functions:large_tokens": "stage 0 .* fails on torch.int64 .*: IndexError",
    "data_functions:by_rank": "batch 1 of data.dataset is another one on rank 1 than on rank 0",
    ("data_functions:listed", "eval.sample_every=3"): "needs a tokenizer.json in the dir",
    ("data_functions:listed", "eval.every=3", "eval.dataset=data_functions:nothing"): (
        "eval.dataset = 'data_functions:nothing': the function has no batch"
    ),
}
LOSSES = {  # train.loss=data_functions:
    "not_reduced": r"the loss of .* is torch.float32 \(16,\); e",
    "no_number": ".* is a float; expected one element",
    "fails": "the loss fails on torch.float32 .*: RuntimeError",
    "smothed": "cannot be imported: AttributeError",
    "no_gradient": ".* has no gradient",
}
SETTINGS: dict[str | tuple[str, ...], str] = {
    "train.stpes=3": "--set: train.stpes = 3: unknown",
    "parallel.microbatch=3": "closest first: microbatches, ",
    "=3": "--set =3: '' is not a dotted key",
    "train.steps": "--set train.steps: expected key=value",
    "train.steps=many": r"train.steps = 'many': should be a valid integer \(number of opt",
    "data.files=a": r"data.files = \['a'\]: no file matches a, seen",
    "model.factory=tied": "'tied': should look like 'module:function'",
    ("train.steps=0", "train.seed=-1"): r"(?s)steps = 0.*\n--set: train.seed = -1",
    "parallel.pipeline=3": "pipeline = 3: 2 ranks cannot be cut into groups of 3",
    "parallel.data=4": "data = 4: 2 ranks cannot be cut",
    ("parallel.pipeline=1", "parallel.data=1"): "pipeline 1 x data 1 are 1 ranks, .* are 2",
    "data.batch_size=6": "= 6: 1 replicas x 4 microbatches do not divide it: .* of 4",
    "parallel.schedule={name='interleaved-1f1b', stages_per_rank=4}": (
        "pipeline = .default.: a model of 7 layers cannot be cut into 8 stages"
    ),
    "parallel.boundaries=[1, 2]": r"\[1, 2\] do not cut 5 layers",
    "parallel.boundaries=[9]": "ascending indices from 1 to 4",
    "model.factory=absent:f": "cannot be imported: ModuleNotFoundErr",
    "model.widht=3": "3: model = .*: the factory has no option 'widht'; .* width, ",
    "model.width=-2": "--set model.width=-2: model = .*: the factory fails: Ru",
    ("model.factory=factories:two_tensors", "parallel.boundaries=[2]"): (
        "stage 0 .layers 0 to 1. returns a tuple; expected one tensor of floats"
    ),
    "gradient_handlers=[3]": r"handlers\[0\] = 3: should be a name, or a table of name",
    "gradient_handlers=[{axis='dp'}]": r"gradient_handlers\[0\].name is missing",
    "gradient_handlers=[{name='noop', axis='dp'}]": "'noop' .* has no option 'axis'",
    "parallel.schedule=4": "= 4: should be a name, or",
    "parallel.schedule={name='1f1b', stages=3}": "'1f1b' .* has no option 'stages'",
    ("parallel.schedule=interleaved-1f1b", "parallel.microbatches=1"): (
        "takes a multiple of 2 microbatches .* found 1; the nearest is 2"
    ),
    "optimizer.name=AdanW": "torch.optim has none; .*: AdamW, ",
    "optimizer.momentum=3": "momentum=3: optimizer = .*: AdamW has no option 'momentum'",
    "optimizer.lr=-1": "AdamW will not take that: Invalid learning rate: -1",
    "optimizer.name=LBFGS": "it evaluates the loss itself",
    ("optimizer.name=Rprop", "optimizer.decay_norms_and_biases=false"): "Rprop has no weight",
    "optimizer.schedule=Cosine": r"schedule\[0\] = 'Cosine': torch.optim.lr_sch",
    "optimizer.schedule=CosineAnnealingLR": "needs the option 'T_max'",
    "optimizer.schedule={name='LambdaLR', lr_lambda='x'}": "torch will not take that: TypeError",
    "optimizer.schedule={name='ReduceLROnPlateau'}": "cannot be given by name and plain",
    "optimizer.schedule=[{name='LinearLR'}, {name='ConstantLR'}]": (
        r"schedule\[0\] = 'LinearLR': every schedule but the last needs"
    ),
    "optimizer.schedule={name='OneCycleLR', max_lr=1, total_steps=2}": (
        "schedule = .*: fails within 12 steps: ValueError"
    ),
    "optimizer.capturable=true": "optimizer = .*: its first step fails: Assertion",
    "optimizer.amsgrad=no": "--set optimizer.amsgrad=no: no is not TOML, and",
    "train.output=": "train.output = '': .* at least 1 character",
    r'train.output="a\u0000b"': "cannot be written: .*null",
    "train.device=tpu": "train.device = 'tpu': this machine has",
    "train.output=short.txt/x": "cannot be written: .*Not a dir",
    "train.seed={rank}": "ranks disagree on train.seed: 0 on rank 0, 1 on rank 1; make",
    "data.files=[a.txt]": "the value is not TOML .*: write words in quotes, as in",
    r'data.files=["a\u0000b"]': "no file matches a.*b, seen",
    r'train.resume="a\u0000b"': "train.resume = .*null",
    "train.lr=3": "train.lr = 3: unknown key, there is optimizer.lr; known, closest first",
    "train.output=.": "holds more than a run: name a folder",
    "train.output=/": "= '/': is /, which holds more than a run",
    "data.tokenizer=no.json": "data.tokenizer = 'no.json': (no.json is no file|it needs)",
    "data.streaming=true": "there are no files to read: set data.files",
    ("data.files=['ours.txt']", "data.streaming=true", "data.batch_size=400"): (
        "the stream has no 400 sequences of 16 bytes"
    ),
    ("data.files=['table.jsonl']", "data.column=body"): (
        r"table.jsonl has no column 'body', only \['text', 'n'\]"
    ),
    "data.dataset=data_functions:listed": (
        "data.batch_size = 8: has no effect beside data.dataset: .* write dataset = {name ="
    ),
    "eval.every=3": "set eval.files or eval.dataset",
    "eval.files=['ours.txt']": "nothing measures it: set eval.eve",
    ("eval.files=['short.txt']", "eval.every=3"): (
        "= 16: the text of eval.files has 16 bytes: choose at most 15"
    ),
    ("eval.files=['ours.txt']", "eval.every=3"): (
        "the text has 6 sequences of data.sequence_length = 16: expected data.batch_size = 8"
    ),
    ("eval.files=['ours.txt']", "eval.dataset=data_functions:listed", "eval.every=3"): (
        "eval.files are set too: choose one of them"
    ),
    "train.reporters=['json']": r"train.reporters\[0\] = 'json': .*closest first: jsonl",
    "train.reporters=['data_functions:smoothed']": r"reporters\[0\] = .*expected a concrete",
}
WORDS = {  # other options
    "--handler pipeline-shared --handler data-paralel": (
        r"--handler: gradient_handlers\[1\] = 'data-paralel': .*closest first: data-parallel, "
    ),
    "--handler broken": (
        r"'broken' \(broken_handler:X, zeta 1.0\) .*cannot be imported: RuntimeError\('too old'\)"
    ),
    "--handler twice": (
        r"2 plug-ins .* 'twice': alpha 2.0 x:Y \('alpha::twice'\); zeta 1.0 x:Y \('zeta::twice'\)"
    ),
    "--handler lopsided_handler:Lopsided": (
        "rank 0 reduces .* over ranks .0, 1., but rank 1 has no reduction of it; a handler"
    ),
    "--handler lopsided_handler:Failing": (
        "Failing': reductions.. of rank 0 failed: AttributeErr.* .lopsided_handler.py:9."
    ),
    "--handler lopsided_handler:Silent": (
        "'lopsided_handler:Silent': reductions.. of rank 0 failed: TypeError"
    ),
    "--handler pipeline-shared --set parallel.data=2": (
        "no handler reduces the gradients of '0.0.weight' and 6 more over .* ranks .0, 1."
    ),
    "--handler data-parallel": (
        "'0.weight' on stage 0 and '4.weight' on stage 1 are one parameter, but no handler reduces"
    ),
    "--schedule 1f1": "--schedule: parallel.schedule = '1f1': .*closest first: 1f1b, ",
    "--schedule odd_schedule:Odd": (
        r"(?s)schedule = 'odd_schedule:Odd': schedule 'odd' cannot go on: .*\nrank 0  >0B3< "
    ),
    "--schedule odd_schedule:Short": (
        "asked for 2 ranks and 4 microbatches, and made a schedule of 2 ranks and 3 microbatches"
    ),
    "--handler exits:X": (
        r"gradient_handlers\[0\] = 'exits:X': .*cannot be imported: SystemExit\(0\); repair"
    ),
    "--handler exiting_handler:Making": r"cannot be constructed with {}: SystemExit\(0\)",
    "--handler exiting_handler:Reducing": r"reductions\(\) of rank \d failed: SystemExit\('bye'\)",
    "--handler exiting_handler:Looking": r"check\(\) failed: SystemExit\(0\)",
}

EXITING = """
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

LOPSIDED = """
from pipegrad import GradientHandler, Reduction
class Lopsided(GradientHandler):
    def reductions(self, parameters, topology):
        ranks = (0, 1) if topology.rank == 0 else (1,)
        return [Reduction(p, ranks) for p in parameters]
class Failing(GradientHandler):
    def reductions(self, parameters, topology):
        return [Reduction(p, topology.ranks) for p in parameters if p.ndim > 1]
class Silent(GradientHandler):
    def reductions(self, parameters, topology):
        pass
"""

ODD = """
from pipegrad.schedules import ScheduleGenerator, build
class Odd(ScheduleGenerator):
    def generate(self, *, num_ranks, num_microbatches):
        import dataclasses
        good = build("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
        rows = tuple(tuple(reversed(row)) for row in good.actions)
        return dataclasses.replace(good, name="odd", actions=rows)
class Short(ScheduleGenerator):
    def generate(self, *, num_ranks, num_microbatches):
        return build("1f1b", num_ranks=num_ranks, num_microbatches=3)
"""


def with_set(settings: str | tuple[str, ...], key: str = "") -> list[str]:
    first, *others = [settings] if isinstance(settings, str) else settings
    return [word for setting in [key + first, *others] for word in ("--set", setting)]


def of(table: Mapping[str, str], setting: str) -> dict[str, tuple[list[str], str]]:
    return {
        f"{setting.partition('=')[0]} {name}": (["small.toml", "--set", setting.format(name)], says)
        for name, says in table.items()
    }


CASES = {
    **{name: ([f"{name}.toml"], says) for name, (_, says) in TEXTS.items()},
    **of(FACTORIES, "model.factory=factories:{}"),
    **of(FILES, "data.files=['{}']"),
    **of(LOSSES, "train.loss=data_functions:{}"),
    **{str(s): (["small.toml", *with_set(s)], says) for s, says in SETTINGS.items()},
    **{words: (["small.toml", *words.split()], says) for words, says in WORDS.items()},
    **{
        f"data.dataset={s}": (["no data.toml", *with_set(s, "data.dataset=")], says)
        for s, says in DATASETS.items()
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Configurations, texts, plug-ins: everything the cases name."""
    made = with_job(tmp_path_factory.mktemp("bad"))
    (made / "no data.toml").write_text(NO_DATA)
    for name, (text, _) in TEXTS.items():
        if text:
            content = text if isinstance(text, bytes) else text.encode()
            (made / f"{name}.toml").write_bytes(content)
    (made / "a folder.toml").mkdir()
    texts = {
        "empty.txt": b"",
        "zero.bin": b"abc\0def" * 9,
        "latin.txt": b"caf\xe9" * 9,
        "short.txt": b"x" * 16,
        "one.txt": b"x",
        "blank.jsonl": b"\n \n",
        "table.jsonl": b'{"text": "one", "n": 2}\n',
        "text.gz": b"\x1f\x8b\x08\x00",
    }
    for rank, only in enumerate(
        ({"mine.txt": b"x" * 99, "ours.txt": b"x" * 99}, {"ours.txt": b"y" * 99})
    ):
        (made / f"rank {rank}").mkdir()
        for name, content in (texts | only).items():
            (made / f"rank {rank}" / name).write_bytes(content)
    (made / "lopsided_handler.py").write_text(LOPSIDED)
    (made / "odd_schedule.py").write_text(ODD)
    (made / "exiting_handler.py").write_text(EXITING)
    (made / "exits.py").write_text("raise SystemExit(0)")
    entries = {"twice": "x:Y"}
    write_distribution(made, "alpha", version="2.0", entry_points=entries)
    write_distribution(
        made,
        "zeta",
        entry_points=entries | {"broken": "broken_handler:X"},
        modules={"broken_handler": "raise RuntimeError('too old')"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(made)
        yield made


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("words", "says"), CASES.values(), ids=CASES)
def test_bad_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    """Some were a traceback, no output and code 0, or 620 s without a word."""
    # Each rank speaks for itself, as on its machine.
    rank = dist.get_rank()
    monkeypatch.chdir(folder / f"rank {rank}")
    monkeypatch.setenv("LOCAL_RANK", "0")
    job, *options = (word.replace("{rank}", str(rank)) for word in words)
    code, said = command("train", f"../{job}", *options)
    assert gathered((code, said)) == [(1, said)] * 2
    assert said.startswith("Error: ")
    assert re.search(says, said), said
    assert "tokens/s" not in said
    assert not list(folder.rglob("runs"))
