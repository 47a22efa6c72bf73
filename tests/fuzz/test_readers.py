"""Whatever a file says, a reader refuses it in words of ours or reads what is right, and ends soon.

``scripts/fuzz --minutes 60`` runs this for as long as it is asked to, with contents that are new
each time; here they are the same in every run, and take some 10 s.

A row has a valid content, hostile ones, and what is to hold of a value that is read. A new reader
is a new row.
"""

from __future__ import annotations

import copy
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from pipegrad.checkpoint.files import Files
from pipegrad.checkpoint.folders import INDEX as CHECKPOINT
from pipegrad.comm import plain
from pipegrad.errors import PipegradError, ScheduleError
from pipegrad.orders import verify
from pipegrad.partition.hf.files import INDEX, SINGLE, Weights, write_shard
from pipegrad.picture import write_html
from pipegrad.pipeline.edges import WORDS, Spec, header, read_header
from pipegrad.schedules import build, lower, read_csv, write_csv
from pipegrad.simulation.costs import Costs, Network, StageCosts
from pipegrad.simulation.explain.explanation import explain
from pipegrad.simulation.simulator import simulate
from pipegrad.simulation.timeline import Timeline
from pipegrad.train.config import Config, load, parsed_setting
from pipegrad.train.run_folder import METRICS, cut_rows
from tests.support.checkpoints import index_of
from tests.support.checkpoints import written as checkpoint_in
from tests.support.picture.timelines import SMALL
from tests.support.train.jobs import SMALL as JOB

DEEP = (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900)
NUMBERS = (b"9" * 5000, b"1" + b"0" * 400, b"1e999", b"-1e999", b"NaN", b"-0.0")
STEP = 3  # of a message
NO_TEXT = (b"", b"\xff\xfe", b"\xef\xbb\xbf{}", b"\0", b"null", b"[]", b"{}")


@dataclass(frozen=True, repr=False)
class Reader:
    """How a content is read, and what is right.

    Attributes:
        read: Writes the content into a new folder and reads it; returns a value, or raises.
        valid: Contents that are read.
        hostile: Contents that have been found to do harm.
        refuses: What it raises of what is wrong; of one line.
        lines: Whether it may say several lines, one for each mistake.
        form: How a content is altered: as "json", or as bytes.
    """

    read: Callable[[bytes, Path], object]
    valid: tuple[bytes, ...]
    hostile: tuple[bytes, ...] = ()
    refuses: tuple[type[Exception], ...] = (PipegradError,)
    lines: bool = False
    form: str = "bytes"


def written(content: bytes, folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def as_bytes(data: object) -> bytes:
    return json.dumps(data).encode()


# What is read, and what is to hold of it.


def costs(content: bytes, folder: Path) -> None:
    found = Costs.load(written(content, folder, "costs.json"))
    assert Costs.from_json(found.to_json()) == found
    num_stages = len(found.stages)
    if 0 < num_stages <= 8:
        with suppress(ScheduleError):  # of hosts that are not those of the ranks
            program = lower(build("1f1b", num_ranks=num_stages, num_microbatches=2))
            simulation = simulate(program, found, num_steps=2)
            assert all(map(math.isfinite, simulation.step_seconds))
            assert simulation.timeline is not None
            explain(simulation.timeline, program=program, costs=found)


def timeline(content: bytes, folder: Path) -> None:
    found = Timeline.load(written(content, folder, "timeline.json"))
    assert Timeline.from_json(json.loads(json.dumps(found.to_json()))) == found
    explain(found)
    write_html([found], folder / "page.html")


def config(content: bytes, folder: Path) -> None:
    found = load(written(content, folder, "job.toml"))
    data = found.model_dump(exclude_none=True)
    assert Config.model_validate(data).model_dump(exclude_none=True) == data


def setting(content: bytes, _folder: Path) -> None:
    path, _ = parsed_setting(content.decode("utf-8", "surrogateescape"))
    assert path


def changed(content: bytes, folder: Path) -> None:
    job = written(JOB.encode(), folder, "job.toml")
    load(job, [content.decode("utf-8", "surrogateescape")])


def store_value(content: bytes, _folder: Path) -> None:
    written_again = plain.dumps(plain.loads(content))
    assert plain.dumps(plain.loads(written_again)) == written_again


def metrics(content: bytes, folder: Path) -> None:
    path = written(content, folder, METRICS)
    cut_rows(path, 2)
    assert set(path.read_bytes().splitlines()) <= set(content.splitlines())


def orders(content: bytes, folder: Path) -> None:
    path = folder / "orders.csv"
    path.write_bytes(content)
    verdict = verify(path, batched=True)
    assert str(verdict)
    verdict.as_json()


def csv(content: bytes, _folder: Path) -> None:
    found = read_csv(content.decode("utf-8", "replace"))
    assert read_csv(write_csv(found)) == found


def message(content: bytes, _folder: Path) -> None:
    whole = bytearray(content.ljust(8 * WORDS, b"\0")[: 8 * WORDS])
    words = torch.frombuffer(whole, dtype=torch.int64).tolist()
    key, found = read_header(STEP, words)
    if found is not None:
        assert header(STEP, key, found).tolist() == words
        assert found.nbytes >= 0


@cache
def checkpoint() -> dict[str, Any]:
    """Returns the index of a small checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        return index_of(checkpoint_in(Path(name) / "it", {"model.w": torch.arange(4.0)}))


def index_of_checkpoint(content: bytes, folder: Path) -> None:
    """Its checksum is right, whatever it says."""
    sealed = b'{"crc32": %d, "index": %b}' % (zlib.crc32(content), content)
    found = Files(written(sealed, folder, CHECKPOINT).parent)
    assert not any("/" in name for name in found.index.files)
    assert all(isinstance(value, str) for value in found.index.run.values())


def _index(**changed: object) -> bytes:
    return as_bytes(checkpoint() | changed)


TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@cache
def shard() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        write_shard(Path(name) / SINGLE, TENSORS)
        return (Path(name) / SINGLE).read_bytes()


def weights(name: str, content: bytes, folder: Path) -> None:
    written(content, folder, name)
    if name == INDEX:
        written(shard(), folder, "1.safetensors")
    found = Weights(folder)
    for tensor in found.files:
        shape = found.entry(tensor).get_shape()
        assert [*found.read(tensor).shape] == shape


def _timeline(**changed: object) -> bytes:
    return as_bytes(SMALL.to_json() | changed)


def _costs(**changed: object) -> bytes:
    stage = StageCosts(0.1, 0.2, 0.1, outputs={"x": 100})
    network = Network(125e6, 1e-4, hosts=(0, 1))
    return as_bytes(Costs((stage, replace(stage, outputs={})), network).to_json() | changed)


INDEXED = as_bytes({"weight_map": dict.fromkeys(TENSORS, "1.safetensors")})
JSON = (*DEEP, *NUMBERS, *NO_TEXT)
READERS: dict[str, Reader] = {
    "costs": Reader(
        costs,
        (_costs(),),
        (
            *JSON,
            _costs(network={"nic_bytes_per_second": 1e-300}),
            _costs(stages=[{"outputs": {"x": 10**400}}] * 2),
            _costs(codecs=[{"ranks": [0, 1], "carries": "activations", "share": 1e308}]),
        ),
        form="json",
    ),
    "timeline": Reader(
        timeline,
        (_timeline(),),
        (
            *JSON,
            _timeline(num_microbatches=10**18),
            _timeline(num_microbatches=10**400),
            _timeline(name="\x1b[2J\nstep 0"),
            _timeline(memory=[[[0.0, 10**400]], []]),
        ),
        form="json",
    ),
    "configuration": Reader(
        config,
        (JOB.encode(), b'[model]\nfactory = "a:b"\n[parallel]\nschedule = {name = "1f1b"}\n'),
        (
            *NO_TEXT,
            b"a = " + DEEP[0],
            b"a = " + DEEP[2],
            b"a = " + b"{a=" * 900 + b"1" + b"}" * 900,
            b".".join([b"a"] * 5000) + b" = 1",
            b"[" + b".".join([b"a"] * 5000) + b"]\nb = 1",
            *(b"[train]\nsteps = " + number for number in NUMBERS),
            b"[train]\nsteps = 1979-05-27",
        ),
        lines=True,
    ),
    "--set": Reader(
        setting,
        (b"train.steps=10", b"parallel.schedule={name='1f1b'}"),
        (
            b"[a]\n[b]\nc=1",
            b"a=[\n",
            b"a=" + DEEP[0],
            b"=",
            b"=1",
            b"\0=1",
            b".".join([b"a"] * 5000) + b"=1",
            b"a=" + NUMBERS[0],
        ),
    ),
    "--set of a job": Reader(
        changed,
        (b"train.steps=10", b"parallel.schedule={name='1f1b'}"),
        (
            b".".join([b"a"] * 900) + b"=1",
            b"train.steps=" + NUMBERS[1],
            b"train.reporters=" + DEEP[2],
            b"gradient_handlers=" + DEEP[2],
        ),
        lines=True,
    ),
    "metrics": Reader(
        metrics,
        (b'{"step": 1}\n{"step": 2, "loss": 1.5}\n{"step": 3}\n',),
        (b"[1]\n", b'{"step": "a"}\n', b"3\n"),
    ),
    "schedule of torch": Reader(
        csv,
        (b"0F0,0B0\n", b"0F0,,0B0\n1F0,1B0\n"),
        (b"999999999F0\n", b"(" * 5000, b"0F999999999,0B0\n", b'"' + b"a" * 200_000, b"\0"),
        lines=True,  # it shows the grid
    ),
    "orders": Reader(
        orders,
        (
            b"0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            b"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            b"0UNSHARD,0F0,(0I0;0F1)OVERLAP_F_B,0W0,0B1,0REDUCE_GRAD\n",
            b"ForwardPass(buffer_id=0),SendActivation(buffer_id=0)\nRecvActivation(),ForwardPass()\n",
            b"forward_step,send_forward,recv_backward\nrecv_forward,forward_step,backward_step\n",
        ),
        (b"999999999F0\n", b"(" * 5000, b"0F999999999,0B0\n", b'"' + b"a" * 200_000, b"\0"),
    ),
    "header of a transfer": Reader(
        message,
        tuple(
            header(STEP, (3, 4), spec).numpy().tobytes()
            for spec in (Spec((2, 3), torch.float32, True), Spec((), torch.uint16, False), None)
        ),
        tuple(
            b"".join(word.to_bytes(8, "little", signed=True) for word in words)
            for words in (
                [0x7069706567726164, -2, 0],
                [0x7069706567726164, 99, 0],
                [0x7069706567726164, 0, 14, *[1] * 13],
                [0x7069706567726164, 0, -1],
                [0x7069706567726164, 0, 2, -3, 4],
                [0x7069706567726164, 0, 4, *[2**40] * 4],
                [1, 0, 0],
            )
        ),
    ),
    "value of the store": Reader(
        store_value,
        (
            plain.dumps({"a": [1, -(2**70), 0.5, None, True, "x", b"y"], (2,): {3, 4}}),
            plain.dumps(Spec((2, 3), torch.float32, differentiable=True)),
            plain.dumps(torch.arange(6.0).view(2, 3)),
        ),
        (
            b"",
            *(
                plain.dumps(0)[:-1] + text
                for text in (b"[" * 100_000, b'{"tensor":[0,[9],0,0]}', b'{"os.system":[]}')
            ),
            plain.dumps(0)[:-1] + b"9" * 65535,
        ),
    ),
    "index of a checkpoint": Reader(
        index_of_checkpoint,
        (_index(),),
        (*JSON, _index(run=[]), _index(tensors={"model.w": {}}), _index(tensors=[])),
        form="json",
    ),
    "index of weights": Reader(
        partial(weights, INDEX),
        (INDEXED,),
        (
            *JSON,
            as_bytes({"weight_map": {"a.weight": "../1.safetensors"}}),
            as_bytes({"weight_map": {"nothing": "1.safetensors", "b": "absent"}}),
            as_bytes({"weight_map": {"a.weight": "", "b": "."}}),
            as_bytes({"weight_map": {"a.weight": "\0"}}),
        ),
        form="json",
    ),
    "weights": Reader(
        partial(weights, SINGLE),
        (shard(),),
        (
            b"",
            (2**63).to_bytes(8, "little"),
            (10).to_bytes(8, "little") + b"[" * 10,
            len(shard()).to_bytes(8, "little") + b"{}",
        ),
    ),
}

# For each reader.
SECONDS = 60 * float(os.environ.get("PIPEGRAD_FUZZ_MINUTES", "0")) / len(READERS)
EXAMPLES = 200 if SECONDS else 100
MOST_SECONDS = 10  # of the processor, for one content
MOST_BYTES = 3 * 2**30  # of memory, on top of what there is
PATIENT = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=not SECONDS,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if SECONDS else [])],
    suppress_health_check=list(HealthCheck),
)
ODD: tuple[Any, ...] = (
    *(None, True, "", "\x1b[2J\n", "\0", "x" * 5000, [], {}, [[]], [0] * 100, {"name": "x"}),
    *(0, -1, 1, 0.5, -0.0, 10**9, 2**31, 2**63, 10**18, 10**400, -(10**30)),
    *(1e-320, 1e300, 1.7e308, -1e300, float("nan"), float("inf")),
)
PIECES = (
    *(b"", b"\0", b"\xff" * 8, b"[", b"]", b"{", b"}", b'"', b"\n", b"\r", b"\\", b",", b".", b"="),
    *(b"1e999", b"-1", b"0", b"9" * 30, b"\x1b[2J", b"nan", b"'''", b"0" * 5000, b"(", b"K" * 70),
)


@contextmanager
def bounds() -> Iterator[None]:
    """Lets a content that takes too long, or too much memory, fail its test."""

    def late(*_: object) -> None:
        raise AssertionError(f"it takes more than {MOST_SECONDS} s")

    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
        held = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, late)  # SIGALRM is the time limit's of pytest
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, before[1]))
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)


def holds(reader: Reader, content: bytes) -> bool:
    """Returns whether a content is read; fails if that is neither right nor refused in words."""
    with tempfile.TemporaryDirectory() as name, bounds():
        try:
            reader.read(content, Path(name))
        except reader.refuses as error:
            refusal = str(error)
        else:
            return True
    assert refusal.strip()
    assert reader.lines or "\n" not in refusal
    assert len(refusal) < 10_000
    return False


@st.composite
def altered_bytes(draw: Callable[..., Any], reader: Reader) -> bytes:
    """Draws a content with some pieces cut out, put in, or repeated."""
    content = bytearray(draw(st.sampled_from([*reader.valid, *reader.hostile])))
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(content)))
        end = min(len(content), begin + draw(st.sampled_from([0, 1, 2, 8, 64])))
        piece = draw(st.one_of(st.sampled_from(PIECES), st.binary(max_size=8)))
        content[begin:end] = draw(st.sampled_from([piece, content[begin:end] * 3]))
    return bytes(content)


@st.composite
def altered_json(draw: Callable[..., Any], reader: Reader) -> bytes:
    """Draws valid data with some odd values in it."""
    data = {"": json.loads(draw(st.sampled_from(reader.valid)))}
    for _ in range(draw(st.integers(1, 3))):
        inside, key = data, ""  # type: Any, Any
        while isinstance(inside[key], dict | list) and inside[key] and draw(st.integers(0, 4)):
            inside = inside[key]
            keys = sorted(inside) if isinstance(inside, dict) else range(len(inside))
            key = draw(st.sampled_from(keys))
        what = draw(st.integers(0, 9))
        if what == 0 and inside is not data:
            del inside[key]
        elif what == 1 and isinstance(inside, dict):
            inside[draw(st.text(max_size=3))] = copy.deepcopy(inside[key])
        elif what == 2 and isinstance(inside, list):
            inside.append(copy.deepcopy(inside[key]))
        else:
            odd = st.sampled_from(ODD).map(copy.deepcopy)
            inside[key] = draw(st.one_of(odd, st.integers(), st.floats()))
    return json.dumps(data.get("")).encode()


@pytest.mark.parametrize("name", READERS)
def test_what_is_valid_is_read(name: str) -> None:
    for content in READERS[name].valid:
        assert holds(READERS[name], content)


@pytest.mark.parametrize("name", READERS)
def test_whatever_is_read_is_right_or_refused_in_words(name: str) -> None:
    reader = READERS[name]
    contents = altered_bytes(reader)
    if reader.form == "json":
        contents = st.one_of(altered_json(reader), altered_json(reader), contents)

    def test(content: bytes) -> None:
        holds(reader, content)

    for content in (*reader.hostile, *reader.valid):
        test = example(content)(test)
    run = PATIENT(given(contents)(test))
    begin = time.monotonic()
    run()
    while time.monotonic() - begin < SECONDS:
        run()
        sys.stderr.write(".")
