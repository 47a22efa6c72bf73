"""Everything a user can get wrong: one message, on all ranks, before any step, exit code 1."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from pipegrad.cli import main
from pipegrad.testing import run_ranks
from tests.support.distributions import write_distribution
from tests.support.train import data_functions
from tests.support.train.jobs import SMALL, with_job

NO_DATA = SMALL.replace("[data]\nbatch_size = 8\nsequence_length = 16\n", "")


@dataclass(frozen=True)
class Bad:
    """A configuration, and options of the command line; and what has to be said of them."""

    says: str
    text: str = SMALL
    options: Sequence[str] = field(default=())


def put(*settings: str, says: str, text: str = SMALL) -> Bad:
    """The good configuration with settings that are not."""
    return Bad(says, text, [word for setting in settings for word in ("--set", setting)])


def model(name: str, says: str) -> Bad:
    return put(f"model.factory=factories:{name}", says=says)


CASES: dict[str, Bad] = {
    # the file
    "no file": Bad("no file.toml: there is no such file", text=""),
    "a folder": Bad("a folder.toml: cannot be read: Is a directory", text=""),
    "no TOML": Bad(r"no TOML.toml: is not valid TOML: .*line 2", text="\nsteps 3"),
    "not UTF-8": Bad("not UTF-8.toml: is not valid TOML: 'utf-8' codec", text=""),
    "an empty file": Bad("an empty file.toml: model is missing", text=" "),
    # keys
    "a table misspelt": Bad(
        "optimiser = .*unknown key; known, closest first: optimizer, data",
        text=f"{SMALL}\n[optimiser]\nlr = 3",
    ),
    "a key misspelt": put("train.stpes=3", says="--set train.stpes=3: train.stpes = 3: unknown"),
    "bytes misspelt": put("gradients.bucket_byte=3", says="closest first: bucket_bytes, "),
    "microbatch": put("parallel.microbatch=3", says="closest first: microbatches, "),
    "no key": put("=3", says="--set =3: '' is not a dotted key"),
    "no value": put("train.steps", says="--set train.steps: expected key=value"),
    "a table as a value": put("train=3", says="train = 3: should be a table"),
    # types and ranges
    "a word for a number": put(
        "train.steps=many", says=r"train.steps = 'many': should be a valid integer \(number of opt"
    ),
    "true for a number": put("parallel.microbatches=true", says="= True: should be a valid int"),
    "half a step": put("train.steps=1.5", says="= 1.5: should be a valid integer"),
    "no steps": put("train.steps=0", says="= 0: should be greater than or equal to 1"),
    "a negative norm": put("gradients.clip_norm=-1", says="= -1: should be greater than 0"),
    "no number": put("gradients.clip_norm=nan", says="clip_norm = nan: should be a finite number"),
    "fp8": put("train.precision=fp8", says="'fp8': should be 'fp32', 'bf16' or 'fp16'"),
    "a third way": put("gradients.non_finite=ignore", says="'ignore': should be 'raise' or 'skip'"),
    "a negative period": put("gradients.check_every=-1", says="= -1: should be greater than or eq"),
    "a word for true": put("gradients.repair=majority", says="'majority': should be a valid bool"),
    "int8": put("gradients.reduce_dtype=int8", says="should be 'float32', 'bfloat16' or 'float16'"),
    "a file, not a list": put("data.files=a", says=r"data.files = \['a'\]: there is no a, seen"),
    "no module": put("model.factory=tied", says="'tied': should look like 'module:function'"),
    "several at once": put(
        "train.steps=0",
        "train.seed=-1",
        says=r"(?s)steps = 0.*\n--set train.seed=-1: train.seed",
    ),
    # sizes
    "a pipeline that does not divide": put(
        "parallel.pipeline=3", says="pipeline = 3: 2 ranks cannot be cut into groups of 3"
    ),
    "replicas that do not divide": put("parallel.data=4", says="data = 4: 2 ranks cannot be cut"),
    "sizes that do not fit": put(
        "parallel.pipeline=1", "parallel.data=1", says="pipeline 1 x data 1 are 1 ranks, .* are 2"
    ),
    "a batch that does not divide": put(
        "data.batch_size=6", says="= 6: 1 replicas x 4 microbatches do not divide it: .* of 4"
    ),
    "more stages than layers": put(
        "parallel.schedule={name='interleaved-1f1b', stages_per_rank=4}",
        says="pipeline = .default.: a model of 7 layers cannot be cut into 8 stages",
    ),
    "boundaries too many": put("parallel.boundaries=[1, 2]", says=r"\[1, 2\] do not cut 5 layers"),
    "boundaries too far": put("parallel.boundaries=[9]", says="ascending indices from 1 to 4"),
    # the model
    "an absent module": put("model.factory=absent:f", says="cannot be imported: ModuleNotFoundErr"),
    "an absent function": model("absent", says="cannot be imported: AttributeError"),
    "a factory that is none": model("not_callable", says="is int, expected a function"),
    "an unknown argument": put(
        "model.widht=3", says="3: model = .*: the factory has no option 'widht'; .* width, "
    ),
    "a missing argument": model("needs", says="the factory needs the option 'width'"),
    "a wrong argument": put(
        "model.width=-2", says="--set model.width=-2: model = .*: the factory fails: Ru"
    ),
    "a factory that fails": model("fails", says=r"RuntimeError\('no such checkpoint'\)"),
    "a factory with a cache": model("cached", says="must not keep tensors from call to call"),
    "no Sequential": model(
        "not_sequential", says="of what it returns, only an nn.Sequential, .* found Linear"
    ),
    "few logits": model(
        "few_logits", says=r"\(1, 16, 100\) for 16 bytes; expected logits \(1, 16, 2"
    ),
    "few tokens": model("few_tokens", says="0 .layers 0 to 0. fails on torch.int64 .1, 16.: Index"),
    "logits that are not finite": model("not_finite", says="logits that are not finite"),
    "no tensor": model("no_tensor", says="1 .layers 1 to 1. returns a tuple; expected one ten"),
    "one answer a sequence": model(
        "pooled", says=r"it returns torch.float32 \(1, 256\) for 16 bytes;"
    ),
    "a forward of its own": model("Scaled", says="an nn.Sequential, with its own forward, can be"),
    "a function of C": put("model.factory=builtins:max", says="the factory fails: TypeError"),
    "two tensors at a boundary": put(
        "model.factory=factories:two_tensors",
        "parallel.boundaries=[2]",
        says="stage 0 .layers 0 to 1. returns a tuple; expected one tensor of floats",
    ),
    "in place at a boundary": model("in_place", says="stage 1 .* fails on .*leaf Variable"),
    "integers at a boundary": model(
        "integers", says="stage 0 .* returns torch.int64 .1, 16.; expec"
    ),
    "DTensors": model(
        "dtensors", says="'1.weight' and 0 more are DTensors, which checkpoints here do not take"
    ),
    "nothing to train": model("frozen", says="requires a gradient: nothing to train"),
    # the text
    "no text": put("data.files=['nowhere.txt']", says="data.files = .*there is no nowhere.txt"),
    "an empty text": put("data.files=['empty.txt']", says="empty.txt is empty"),
    "a binary text": put("data.files=['zero.bin']", says="zero.bin is binary, not text: it"),
    "no UTF-8": put("data.files=['latin.txt']", says="latin.txt is not UTF-8 text: byte 0xe9 at 3"),
    "a folder as text": put("data.files=['.']", says=". cannot be read: Is a directory"),
    "a short text": put(
        "data.files=['short.txt']", says="= 16: the text has 16 bytes: choose at most 15"
    ),
    # plug-ins
    "a handler misspelt": Bad(
        r"--handler: gradient_handlers\[1\] = 'data-paralel': .*closest first: data-parallel, ",
        options=["--handler", "pipeline-shared", "--handler", "data-paralel"],
    ),
    "handlers as a word": put("gradient_handlers=noop", says="= 'noop': should be a valid list"),
    "a handler that is a number": put(
        "gradient_handlers=[3]", says=r"handlers\[0\] = 3: should be a name, or a table of name"
    ),
    "a handler without a name": put(
        "gradient_handlers=[{axis='dp'}]", says=r"gradient_handlers\[0\].name is missing"
    ),
    "an unknown option of a handler": put(
        "gradient_handlers=[{name='noop', axis='dp'}]", says="'noop' .* has no option 'axis'"
    ),
    "a broken handler": Bad(
        r"'broken' \(broken_handler:X, zeta 1.0\) .*cannot be imported: RuntimeError\('too old'\)",
        options=["--handler", "broken"],
    ),
    "two distributions with one name": Bad(
        r"2 plug-ins .* 'twice': alpha 2.0 x:Y \('alpha::twice'\); zeta 1.0 x:Y \('zeta::twice'\)",
        options=["--handler", "twice"],
    ),
    "a handler that contradicts itself": Bad(
        "rank 0 reduces .* over ranks .0, 1., but rank 1 has no reduction of it; a handler",
        options=["--handler", "lopsided_handler:Lopsided"],
    ),
    "a handler that fails": Bad(
        "Failing': reductions.. of rank 0 failed: AttributeErr.* .lopsided_handler.py:9.",
        options=["--handler", "lopsided_handler:Failing"],
    ),
    "a handler that says nothing": Bad(
        "'lopsided_handler:Silent': reductions.. of rank 0 failed: TypeError",
        options=["--handler", "lopsided_handler:Silent"],
    ),
    "replicas without a handler": Bad(
        "no handler reduces the gradients of '0.0.weight' and 6 more over .* ranks .0, 1.",
        options=["--handler", "pipeline-shared", "--set", "parallel.data=2"],
    ),
    "a tie without a handler": Bad(
        "'0.weight' on stage 0 and '4.weight' on stage 1 are one parameter, but no handler reduces",
        options=["--handler", "data-parallel"],
    ),
    "a schedule misspelt": Bad(
        "--schedule 1f1: parallel.schedule = '1f1': .*closest first: 1f1b, ",
        options=["--schedule", "1f1"],
    ),
    "a schedule that is a number": put("parallel.schedule=4", says="= 4: should be a name, or"),
    "an unknown option of a schedule": put(
        "parallel.schedule={name='1f1b', stages=3}", says="'1f1b' .* has no option 'stages'"
    ),
    "microbatches the schedule does not take": put(
        "parallel.schedule=interleaved-1f1b",
        "parallel.microbatches=1",
        says="takes a multiple of 2 microbatches .* found 1; the nearest is 2",
    ),
    "a schedule that cannot go on": Bad(
        r"(?s)schedule = 'odd_schedule:Odd': schedule 'odd' cannot go on: .*\nrank 0  >0B3< ",
        options=["--schedule", "odd_schedule:Odd"],
    ),
    "another schedule than was asked for": Bad(
        "asked for 2 ranks and 4 microbatches, and made a schedule of 2 ranks and 3 microbatches",
        options=["--schedule", "odd_schedule:Short"],
    ),
    # the optimizer
    "an unknown optimizer": put("optimizer.name=AdanW", says="torch.optim has none; .*: AdamW, "),
    "an unknown option": put(
        "optimizer.momentum=3", says="momentum=3: optimizer = .*: AdamW has no option 'momentum'"
    ),
    "a word for a rate": put(
        "optimizer.lr=fast", says="lr=fast: optimizer = .*: AdamW will not take that: "
    ),
    "a negative rate": put(
        "optimizer.lr=-1", says="AdamW will not take that: Invalid learning rate: -1"
    ),
    "LBFGS": put("optimizer.name=LBFGS", says="it evaluates the loss itself"),
    "no decay to leave out": put(
        "optimizer.name=Rprop",
        "optimizer.decay_norms_and_biases=false",
        says="Rprop has no weight",
    ),
    "an unknown rate schedule": put(
        "optimizer.schedule=Cosine",
        says=r"schedule\[0\] = 'Cosine': torch.optim.lr_sch",
    ),
    "a rate schedule without its option": put(
        "optimizer.schedule=CosineAnnealingLR", says="needs the option 'T_max'"
    ),
    "a function for a rate": put(
        "optimizer.schedule={name='LambdaLR', lr_lambda='x'}",
        says="torch will not take that: TypeError",
    ),
    "a rate schedule by results": put(
        "optimizer.schedule={name='ReduceLROnPlateau'}", says="cannot be given by name and plain"
    ),
    "a rate schedule without end": put(
        "optimizer.schedule=[{name='LinearLR'}, {name='ConstantLR'}]",
        says=r"schedule\[0\] = 'LinearLR': every schedule but the last needs",
    ),
    "a rate schedule that ends too early": put(
        "optimizer.schedule={name='OneCycleLR', max_lr=1, total_steps=2}",
        says="schedule = .*: fails within 12 steps: ValueError",
    ),
    "an option that fails later": put(
        "optimizer.capturable=true", says="optimizer = .*: its first step fails: Assertion"
    ),
    "no for false": put(
        "optimizer.amsgrad=no", says="--set optimizer.amsgrad=no: no is not TOML, and"
    ),
    # the machine
    "no folder": put("train.output=", says="train.output = '': .* at least 1 character"),
    "a zero byte": put('train.output="a\\u0000b"', says="cannot be written: .*null"),
    "no such device": put("train.device=tpu", says="train.device = 'tpu': this machine has"),
    "a folder inside a file": put(
        "train.output=short.txt/x", says="cannot be written: .*Not a dir"
    ),
    # one rank alone
    "a text that one rank lacks": put(
        "data.files=['mine.txt']",
        says=r"rank 1: ConfigError: .*mine.*1 of 2 ranks failed",
    ),
    "a factory that fails where others meet in their forward": model(
        "lonely", says=r"rank 1: .*'mine alone'.* \(the model: 1 of 2 ranks failed"
    ),
    "texts that differ": put("data.files=['ours.txt']", says="ranks disagree on the text"),
    "configurations that differ": put(
        "train.seed={rank}", says="(?s)ranks disagree on train.seed; .*: 0\n.*: 1\n"
    ),
}

CASES |= {  # Issue 16, point 9: SystemExit was no output and code 0, or 620 s without a word
    "a factory that exits": model(
        "exits", says=r"the factory fails: SystemExit\(0\) \(factories.py:"
    ),
    "a factory that exits on one rank": model(
        "exits_on_one", says=r"rank 1: .*SystemExit\(3\) \(factories.py:.*1 of 2 ranks failed"
    ),
    "a layer that exits": model("exits_forward", says=r"stage 1 .* fails on .*SystemExit\('bye'\)"),
    "a plug-in that exits": Bad(
        r"gradient_handlers\[0\] = 'exits:X': .*cannot be imported: SystemExit\(0\); repair",
        options=["--handler", "exits:X"],
    ),
    "a handler that exits when made": Bad(
        r"cannot be constructed with {}: SystemExit\(0\)",
        options=["--handler", "exiting_handler:Making"],
    ),
    "a handler that exits": Bad(
        r"reductions\(\) of rank \d failed: SystemExit\('bye'\)",
        options=["--handler", "exiting_handler:Reducing"],
    ),
    "a handler that exits when it looks": Bad(
        r"check\(\) failed: SystemExit\(0\)", options=["--handler", "exiting_handler:Looking"]
    ),
    "values by rank": model(
        "differing", says=r"other values on rank 1 than on rank 0, of 'the next random number' and"
    ),
}
CASES |= {  # Issue 16, point 18: each was a traceback, silent, or said nothing of what to do
    "an infinite rate": put("optimizer.lr=inf", says="lr = inf: should be a finite number"),
    "an infinite momentum": put(
        "optimizer={name='SGD', momentum=inf}", says="optimizer.momentum = inf: should be a finite"
    ),
    "a file in the home folder": put(
        "data.files=['~/nowhere.txt']", says="there is no /.*/nowhere.txt, seen from"
    ),
    "a pattern that matches nothing": put(
        "data.files=['no*.txt']", says=r"no file matches no\*.txt, seen from the working dir"
    ),
    "a pattern that is none": put("data.files=['**x']", says=r"\*\*x(: Invalid pattern|, seen)"),
    "a list without quotes": put(
        "data.files=[a.txt]", says="the value is not TOML .*: write words in quotes, as in"
    ),
    "a zero byte in a file's name": put('data.files=["a\\u0000b"]', says="is no path: .*null"),
    "a zero byte in a checkpoint's": put('train.resume="a\\u0000b"', says="train.resume = .*null"),
    "a text of one byte": put("data.files=['one.txt']", says="the text has 1 byte, expected a l"),
    "no layers": model("empty", says="it returns an nn.Sequential without any layer"),
    "the rate in another table": put(
        "train.lr=3", says="train.lr = 3: unknown key, there is optimizer.lr; known, closest first"
    ),
    "the steps in another table": put(
        "data.seed=3", says="data.seed = 3: unknown key, there is train.seed; known"
    ),
    "the working directory": put("train.output=.", says="holds more than a run: name a folder"),
    "the one above": put("train.output=..", says="holds more than a run: name a folder"),
    "the root": put("train.output=/", says="= '/': is /, which holds more than a run"),
}


def dataset(name: str, *settings: str, says: str) -> Bad:
    return put(f"data.dataset=data_functions:{name}", *settings, says=says, text=NO_DATA)


def loss(name: str, says: str) -> Bad:
    return put(f"train.loss=data_functions:{name}", says=f"train.loss = .*: {says}")


CASES |= {  # Issue 18, point 6
    # text
    "a bad line": put("data.files=['bad.jsonl']", says="bad.jsonl, line 2, is not JSON: Expecting"),
    "no field of text": put("data.files=['other.jsonl']", says=r"found \['content'\]"),
    "lines that are empty": put("data.files=['blank.jsonl']", says="the text has 0 byte, expected"),
    "a zipped text": put("data.files=['text.gz']", says="not UTF-8 text: byte 0x8b at 1; convert"),
    "no tokenizer": put(
        "data.tokenizer=no.json", says="data.tokenizer = 'no.json': (there is no no.json|it needs)"
    ),
    "a cache that is a file": put(
        "data.files=['ours.txt']", "data.cache=short.txt", says="data.cache = .*cannot be written"
    ),
    # functions
    "a function misspelt": dataset("lited", says=r"cannot be imported: AttributeError\("),
    "a module misspelt": put(
        "data.dataset=data_function:listed", text=NO_DATA, says="imported: ModuleNotFoundError"
    ),
    "no function": put("data.dataset=listed", text=NO_DATA, says="should look like 'module:funct"),
    "a number": dataset("ROWS", says="is int, expected a function"),
    "an option misspelt": put(
        "data.dataset={name='data_functions:listed', num_batch=3}",
        text=NO_DATA,
        says="the function has no option 'num_batch'; allowed, closest first: num_batches",
    ),
    "an option that is missing": dataset("needs_rows", says="the function needs the option 'rows'"),
    "a data rank of the file": put(
        "data.dataset={name='data_functions:alike', data_rank=1}",
        text=NO_DATA,
        says="the function has no option 'data_rank'",
    ),
    "all data ranks alike": dataset(
        "without_ranks", "parallel.data=2", says="has no parameter data_rank, so all 2 data ranks"
    ),
    "a batch size beside a function": put(
        "data.dataset=data_functions:listed",
        says="data.batch_size = 8: has no effect beside data.dataset: .* write dataset = {name =",
    ),
    "no batches": dataset("nothing", says="the function has no batch in epoch 1: return an iter"),
    "rows that cannot be cut": put(
        "data.dataset={name='data_functions:needs_rows', rows=3}",
        text=NO_DATA,
        says=r"batch 1 has 3 rows \(.*\), fewer than parallel.microbatches = 4",
    ),
    "tokens that the model has not": dataset(
        "large_tokens", says="stage 0 .* fails on torch.int64 .*: IndexError"
    ),
    "a function that goes by the rank": dataset(
        "by_rank", says="batch 1 of data.dataset is another one on rank 1 than on rank 0, which"
    ),
    # losses
    "a loss of many numbers": loss(
        "not_reduced", says=r"the loss of .* is torch.float32 \(16,\); e"
    ),
    "a loss that is no tensor": loss("no_number", says=".* is a float; expected one element"),
    "a loss that fails": loss("fails", says="the loss fails on torch.float32 .*: RuntimeError"),
    "a loss misspelt": loss("smothed", says="cannot be imported: AttributeError"),
    "a loss without gradient": loss("no_gradient", says=".* has no gradient"),
    # beside the training
    "nothing to measure": put("eval.every=3", says="set eval.files or eval.dataset"),
    "nothing measures it": put("eval.files=['ours.txt']", says="nothing measures it: set eval.eve"),
    "a short text to measure": put(
        "eval.files=['short.txt']",
        "eval.every=3",
        says="= 16: the text of eval.files has 16 bytes: choose at most 15",
    ),
    "less than a batch to measure": put(
        "eval.files=['ours.txt']",
        "eval.every=3",
        says="the text has 6 sequences of data.sequence_length = 16: expected data.batch_size = 8",
    ),
    "samples of no text": dataset("listed", "eval.sample_every=3", says="needs text, and data.dat"),
    "two things to measure": put(
        "eval.files=['ours.txt']",
        "eval.dataset=data_functions:listed",
        "eval.every=3",
        says="eval.files are set too: choose one of them",
    ),
    "no batches to measure": dataset(
        "listed",
        "eval.every=3",
        "eval.dataset=data_functions:nothing",
        says="eval.dataset = 'data_functions:nothing': the function has no batch",
    ),
    "a reporter misspelt": put(
        "train.reporters=['json']", says=r"train.reporters\[0\] = 'json': .*closest first: jsonl"
    ),
    "a reporter that is none": put(
        "train.reporters=['data_functions:smoothed']",
        says=r"reporters\[0\] = .*expected a concrete",
    ),
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


class Outcome(NamedTuple):
    code: object
    said: str
    seconds: float


def outcomes(folder: str, cases: dict[str, Bad]) -> dict[str, Outcome]:
    """Runs the command line on every case, on a rank; each speaks for itself, as on its machine."""
    os.chdir(f"{folder}/rank {dist.get_rank()}")
    os.environ["LOCAL_RANK"] = "0"
    return {name: outcome(name, case) for name, case in cases.items()}


def outcome(name: str, case: Bad) -> Outcome:
    told, began = io.StringIO(), time.monotonic()
    options = [word.replace("{rank}", str(dist.get_rank())) for word in case.options]
    code: object = "none"
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
        try:
            main(["train", f"../{name}.toml", *options], standalone_mode=False)
        except SystemExit as exit_:
            code = exit_.code
    return Outcome(code, told.getvalue(), time.monotonic() - began)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations, texts, plug-ins: everything the cases name."""
    made = tmp_path_factory.mktemp("bad")
    for name, case in CASES.items():
        if case.text:
            with_job(made, f"{name}.toml", case.text)
    (made / "a folder.toml").mkdir()
    (made / "not UTF-8.toml").write_bytes(b"a = '\xe9'")
    texts = {
        "empty.txt": b"",
        "zero.bin": b"abc\0def" * 9,
        "latin.txt": b"caf\xe9" * 9,
        "short.txt": b"x" * 16,
        "one.txt": b"x",
        "bad.jsonl": b'{"text": "one"}\n{"text": one}\n',
        "other.jsonl": b'{"content": "one"}\n',
        "blank.jsonl": b"\n \n",
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
    (made / "data_functions.py").write_text(Path(data_functions.__file__).read_text())
    (made / "exits.py").write_text("raise SystemExit(0)")
    entries = {"twice": "x:Y"}
    write_distribution(made, "alpha", version="2.0", entry_points=entries)
    write_distribution(
        made,
        "zeta",
        entry_points=entries | {"broken": "broken_handler:X"},
        modules={"broken_handler": "raise RuntimeError('too old')"},
    )
    return made


@pytest.fixture(scope="module")
def replies(folder: Path) -> list[dict[str, Outcome]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return run_ranks(outcomes, 2, str(folder), CASES)


@pytest.mark.parametrize("name", CASES)
def test_bad_input(replies: list[dict[str, Outcome]], name: str) -> None:
    """Issue 16, points 9 and 18, besides: see the groups of `CASES`."""
    first, second = (reply[name] for reply in replies)
    assert re.search(CASES[name].says, first.said), first.said
    assert first.said.startswith("Error: ")
    assert first.said == second.said
    assert (first.code, second.code) == (1, 1)
    assert max(first.seconds, second.seconds) < 30
    assert "tokens/s" not in first.said


def test_nothing_was_written(replies: list[dict[str, Outcome]], folder: Path) -> None:
    assert replies
    assert not list(folder.rglob("runs"))
