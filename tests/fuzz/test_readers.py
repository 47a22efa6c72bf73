"""Whatever a file says, a reader refuses it in words of ours or reads what is right, and ends soon.

``scripts/fuzz --minutes 60`` runs this for as long as it is asked to, with contents that are new
each time; here they are the same in every run, and take some 10 s.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.readers import READERS, Reader, values_of

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
            inside[draw(st.text(max_size=3))] = values_of(inside[key])
        elif what == 2 and isinstance(inside, list):
            inside.append(values_of(inside[key]))
        else:
            odd = st.sampled_from(ODD).map(values_of)
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
