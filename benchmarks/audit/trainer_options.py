"""Which options of `pipegrad train` have an effect, and is it that of one process?

python benchmarks/audit/trainer_options.py [KEY ...]

Each key of docs/config.md is changed in a small job, which runs on one rank, and on four: 2 stages
x 2 replicas. Compared are losses, gradient norms, learning rates, held-out losses after each
update, samples, and the files that a run leaves. The ranks stay from job to job.
"""

import contextlib
import io
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipegrad.cli import main
from pipegrad.testing import run_ranks

STEPS = 4
JOB = f"""
[model]
factory = "tied_gpt:tied_gpt"
layers = 4
width = 32
vocabulary = 256
[parallel]
microbatches = 2
[data]
files = "text.txt"
batch_size = 16
sequence_length = 24
[eval]
every = 1
batches = 2
files = "held.txt"
[optimizer]
name = "SGD"
lr = 0.1
momentum = 0.9
weight_decay = 0.1
[train]
device = "cpu"
steps = {STEPS}
save = false
trace = false
"""
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 256, "n_embd": 32,
    "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0,
    "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
FUNCTIONS = """
import torch
from torch.nn import functional


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def smoothed(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=0.1)


def batches(*, data_rank, num_data_ranks, seed=5, ragged=False):
    for number in range(100):
        tokens = torch.randint(256, (16, 25), generator=seeded(seed + number))
        ends = torch.randint(1, 25, (16, 1), generator=seeded(number))
        target = tokens[:, 1:]
        if ragged:
            target = target.masked_fill(torch.arange(24) >= ends, -100)
        rows = slice(data_rank * 16 // num_data_ranks, (data_rank + 1) * 16 // num_data_ranks)
        yield tokens[rows, :-1], target[rows]
"""
RAGGED = 'data.dataset={ name = "functions:batches", ragged = true }'
SAVES = ("train.save=true", "train.save_every=1", "train.keep_last=2")
SAMPLES = ("eval.sample_every=2", "eval.sample_tokens=6")


class Option(NamedTuple):
    """A change of the job.

    Attributes:
        change: Settings, as of ``--set``.
        beside: Settings of both runs, with which it may have an effect.
        job: The file.
        of_ranks: Whether it is of several ranks alone. One process has it not.
    """

    change: Sequence[str]
    beside: Sequence[str] = ()
    job: str = "job.toml"
    of_ranks: bool = False


def one(*change: str, **more: Any) -> Option:  # noqa: ANN401 - fields of Option
    """Returns a change of the job."""
    return Option(change, **more)


OPTIONS = {
    "gradient_handlers": one('gradient_handlers=["pipeline-shared", "sharded"]'),
    "gradients.bucket_bytes": one("gradients.bucket_bytes=4096"),
    "gradients.reduce_dtype": one('gradients.reduce_dtype="bfloat16"'),
    "gradients.sum_dtype": one(
        'gradients.sum_dtype="float32"',
        beside=('gradients.reduce_dtype="bfloat16"', "parallel.pipeline=1", "parallel.data=4"),
    ),
    "gradients.master_dtype": one(
        'gradients.master_dtype="float32"', beside=('model.dtype="bfloat16"',), job="hf.toml"
    ),
    "gradients.comm_streams": one("gradients.comm_streams=1"),
    "gradients.allow_unsynced": one('gradients.allow_unsynced=["0.weight"]'),
    "gradients.clip_norm": one("gradients.clip_norm=0.5"),
    "gradients.non_finite": one('gradients.non_finite="skip"'),
    "gradients.check_every": one("gradients.check_every=1"),
    "model.factory": one('model.factory="tied_gpt:tied_gpt"', "model.heads=2"),
    "model.config": one('model.config="other.json"', job="hf.toml"),
    "model.dropout": one("model.dropout=0.2"),
    "parallel.dimensions": one("parallel.dimensions={ep = 2}", "parallel.data=1", of_ranks=True),
    "parallel.data_dimensions": one(
        'parallel.data_dimensions=["dp", "ep"]', "parallel.dimensions={ep = 2}", "parallel.data=1",
        of_ranks=True,
    ),
    "parallel.pipeline": one("parallel.pipeline=4", "parallel.data=1", of_ranks=True),
    "parallel.data": one("parallel.data=4", "parallel.pipeline=1", of_ranks=True),
    "parallel.schedule": one('parallel.schedule="zb-h1"', of_ranks=True),
    "parallel.codecs": one('parallel.codecs="bf16"', of_ranks=True),
    "parallel.microbatches": one("parallel.microbatches=4"),
    "parallel.boundaries": one("parallel.boundaries=[2]", of_ranks=True),
    "data.files": one('data.files="held.txt"'),
    "data.column": one('data.column="words"', beside=('data.files="rows.jsonl"',)),
    "data.separator": one('data.separator="!"', beside=('data.files="rows.jsonl"',)),
    "data.batch_size": one("data.batch_size=8"),
    "data.sequence_length": one("data.sequence_length=16"),
    "data.dataset": one(
        RAGGED, beside=('data.dataset="functions:batches"', 'train.loss_reduction="token_mean"'),
        job="function.toml",
    ),
    "eval.every": one("eval.every=2"),
    "eval.files": one('eval.files="text.txt"'),
    "eval.dataset": one(
        'eval.dataset={ name = "functions:batches", seed = 50 }',
        beside=('data.dataset="functions:batches"', 'eval.dataset="functions:batches"'),
        job="function.toml",
    ),
    "eval.batches": one("eval.batches=1"),
    "eval.sample_every": one(*SAMPLES),
    "eval.sample_tokens": one("eval.sample_tokens=9", beside=SAMPLES),
    "eval.prompt": one('eval.prompt="import "', beside=SAMPLES),
    "eval.temperature": one("eval.temperature=1.0", beside=SAMPLES),
    "optimizer.name": one('optimizer.name="RMSprop"'),
    "optimizer.decay_norms_and_biases": one("optimizer.decay_norms_and_biases=false"),
    "optimizer.others": one(
        'optimizer.others={ name = "SGD", lr = 0.3 }',
        beside=('optimizer.others={ name = "SGD", lr = 0.1 }', 'optimizer.name="Muon"',
                "optimizer.lr=0.01"),
    ),
    "optimizer.schedule": one(
        'optimizer.schedule=[{ name = "LinearLR", start_factor = 0.1, total_iters = 3 }]'
    ),
    "optimizer.schedule.steps": one(
        'optimizer.schedule=[{ name = "ConstantLR", factor = 0.5, total_iters = 9, steps = 2 }, '
        '{ name = "ConstantLR", factor = 0.1, total_iters = 9 }]',
        beside=('optimizer.schedule=[{ name = "ConstantLR", factor = 0.5, total_iters = 9 }]',),
    ),
    "optimizer.lr": one("optimizer.lr=0.2"),
    "optimizer.momentum": one("optimizer.momentum=0.5"),
    "optimizer.weight_decay": one("optimizer.weight_decay=0.3"),
    "train.steps": one("train.steps=3"),
    "train.seed": one("train.seed=7"),
    "train.loss": one('train.loss="functions:smoothed"'),
    "train.loss_reduction": one(
        'train.loss_reduction="token_mean"', beside=(RAGGED,), job="function.toml"
    ),
    "train.deterministic": one("train.deterministic=true"),
    "train.reporters": one('train.reporters=["jsonl"]'),
    "train.precision": one('train.precision="bf16"'),
    "train.recompute": one("train.recompute=true"),
    "train.device": one('train.device="auto"'),
    "train.output": one('train.output="elsewhere/run"'),
    "train.save": one("train.save=true"),
    "train.save_every": one("train.save_every=1", beside=("train.save=true",)),
    "train.keep_last": one("train.keep_last=3", beside=SAVES),
    "train.keep_every": one("train.keep_every=1", beside=SAVES),
    "train.resume": one(
        'train.resume="auto"', "train.steps=6",
        beside=("train.save=true", 'train.output="again/run"'),
    ),
    "train.trace": one("train.trace=true"),
    "train.step_timeout_seconds": one("train.step_timeout_seconds=100.0"),
    "train.start_timeout_seconds": one("train.start_timeout_seconds=100.0"),
    "train.log_every": one("train.log_every=1"),
}  # fmt: skip
NOT_TRIED = {
    "model.pretrained": "as model.config, with values of a directory",
    "parallel.prepare": "tests/ranks/train has it: it needs a function",
    "parallel.shards": "it needs a model whose ranks hold pieces",
    "data.tokenizer": "it needs a file of tokenizers",
}


class Run(NamedTuple):
    """What a run left.

    Attributes:
        numbers: By name, of all steps.
        others: What else it left: samples, names of files, lines that it printed, without numbers.
        refusal: Why it did not run.
    """

    numbers: dict[str, list[float]]
    others: list[str]
    refusal: str = ""


COMPARED = "loss", "grad_norm", "learning_rate", "held_out_loss", "tokens_seen"


def ran(folder: Path, job: str, settings: Sequence[str]) -> Run | None:
    """Runs a job on all ranks; returns what it left, on rank 0."""
    own = folder / f"on {dist.get_world_size()}"
    before = set(own.rglob("*"))
    printed, code = io.StringIO(), 0
    with (
        contextlib.chdir(own),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            words = [word for setting in settings for word in ("--set", setting)]
            code = main(["train", job, *words], standalone_mode=False) or 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    dist.barrier()
    if dist.get_rank():
        return None
    if code:
        return Run({}, [], printed.getvalue().strip().splitlines()[-1])
    new = set(own.rglob("*")) - before
    metrics = max(own.rglob("metrics.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    numbers = {name: [step.get(name) or 0.0 for step in steps] for name in COMPARED}
    files = sorted(f"{p.parent.parent.name}/{p.name}" for p in new if p.parent == metrics.parent)
    samples = [step["sample"] for step in steps if step.get("sample")]
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("step ")]
    return Run(numbers, [*files, *samples, f"{len(lines)} lines"])


def all_ran(folder: Path, keys: Sequence[str]) -> dict[tuple[str, bool], Run | None]:
    """Runs each option, and what it is compared with, in the same ranks."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    results = dict[tuple[str, bool], Run | None]()
    known = dict[tuple[object, ...], Run | None]()
    for key in keys:
        option = OPTIONS[key]
        is_one = dist.get_world_size() == 1
        sizes = () if is_one else ("parallel.pipeline=2", "parallel.data=2")
        beside = [x for x in option.beside if not (is_one and x.startswith("parallel."))]
        for is_changed in (False, True):
            own = option.change if is_changed and not (is_one and option.of_ranks) else ()
            settings = (*sizes, *beside, *own)
            if (option.job, settings) not in known:
                known[option.job, settings] = ran(folder, option.job, settings)
            results[key, is_changed] = known[option.job, settings]
    return results


def apart(one: Run, other: Run) -> float:
    """Returns the largest relative difference of two runs' numbers."""
    if any(len(one.numbers[name]) != len(other.numbers[name]) for name in COMPARED):
        return math.inf
    return max(
        abs(a - b) / max(abs(a), abs(b), 1e-12)
        for name in COMPARED
        for a, b in zip(one.numbers[name], other.numbers[name], strict=True)
    )


def row(key: str, ones: Sequence[Run], fours: Sequence[Run]) -> str:
    """Returns a line of the table."""
    if ones[1].refusal or fours[1].refusal:
        return f"| `{key}` | | | refused: {(ones[1].refusal or fours[1].refusal)[:110]} |"
    effects = [
        f"{apart(*runs):.2g}" + (", output" if runs[0].others != runs[1].others else "")
        for runs in (ones, fours)
    ]
    return f"| `{key}` | {effects[0]} | {effects[1]} | {apart(ones[1], fours[1]):.1g} |"


def write(folder: Path) -> None:
    """Writes the jobs, and what they name, into a folder for each number of ranks."""
    examples = Path(__file__).parents[2] / "examples"
    text = Path(contextlib.__file__).read_text()
    rows = [{"text": f"{line} " * 9, "words": line[::-1] * 9} for line in text.splitlines()[:99]]
    function = JOB.replace('files = "text.txt"\nbatch_size = 16\nsequence_length = 24', "").replace(
        'files = "held.txt"', 'dataset = "functions:batches"'
    )
    hf = JOB[JOB.index("[parallel]") :] + '[model]\nconfig = "hf.json"\n'
    files = {
        "tied_gpt.py": (examples / "tied_gpt.py").read_text(), "functions.py": FUNCTIONS,
        "text.txt": text, "held.txt": Path(io.__file__).read_text() * 2,
        "rows.jsonl": "\n".join(map(json.dumps, rows)), "job.toml": JOB, "hf.toml": hf,
        "hf.json": json.dumps(CONFIG), "other.json": json.dumps({**CONFIG, "n_head": 2}),
        "function.toml": function.replace("[data]\n", '[data]\ndataset = "functions:batches"\n'),
    }  # fmt: skip
    for number in (1, 4):
        own = folder / f"on {number}"
        own.mkdir()
        for name, content in files.items():
            (own / name).write_text(content)


if __name__ == "__main__":
    keys = sys.argv[1:] or [*OPTIONS]
    with tempfile.TemporaryDirectory() as name:
        folder, begin = Path(name), time.monotonic()
        write(folder)
        [one_process] = run_ranks(partial(all_ran, folder, keys), 1, timeout_seconds=1200)
        four_ranks, *_ = run_ranks(partial(all_ran, folder, keys), 4, timeout_seconds=1200)
        seconds = time.monotonic() - begin
    print("| key | effect in one process | effect on four ranks | four ranks from one process |")
    print("|---|---|---|---|")
    for key in keys:
        runs = [[found[key, is_changed] for is_changed in (False, True)]
                for found in (one_process, four_ranks)]  # fmt: skip
        print(row(key, *runs))
    print(f"{len(keys)} options in {seconds:.0f} s")
