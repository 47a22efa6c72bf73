"""Ranks send each other plain data: it arrives as it left, and anything else is one error."""

from __future__ import annotations

import enum
import math
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from pipegrad.comm import plain
from pipegrad.comm.activity import Failure, Record
from pipegrad.errors import MessageError
from pipegrad.model.dtensor import Layout
from pipegrad.model.manifest import ParameterEntry
from pipegrad.pipeline.edges import Spec

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**200), 0.1, -0.0, math.inf),
    *("", "é\udc80", b"\0x", [], (), {}, set(), frozenset({1})),
    [1, (2, [None])],
    {("a", 0): {1: 2.5}, "b": {"x", "y"}},
    Path("/a/b"),
    torch.bfloat16,
    torch.device("cuda", 1),
    Spec((2, 3), torch.float32, differentiable=True),
    Record(1, "a", seconds=math.inf, waits=(("x", (0,)),), row=(0, 1), failure=Failure("x")),
    ParameterEntry("w", (), (2,), (1,), torch.int8, torch.half, True, Layout((), (), (), ())),
]


def arrived(value: object) -> Any:
    return plain.loads(plain.dumps(value))


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_value_arrives_as_it_left(value: object) -> None:
    found = arrived(value)
    assert (found, type(found), repr(found)) == (value, type(value), repr(value))


def test_not_a_number_arrives_and_equal_sets_have_equal_bytes() -> None:
    assert math.isnan(arrived(math.nan))
    one, other = set(range(0, 16, 8)), set(range(8, -8, -8))  # their hashes collide
    assert list(one) != list(other)
    assert plain.dumps(one) == plain.dumps(other)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t().requires_grad_(),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor(True),
        torch.ones(2, dtype=torch.complex64).mul(1j).conj(),
        torch.ones(2, dtype=torch.float8_e4m3fn),
        torch.empty(2, 3, device="meta"),
    ],
    ids=str,
)
def test_a_tensor_arrives_as_it_left(tensor: torch.Tensor) -> None:
    found = arrived(tensor)
    traits = [(t.shape, t.dtype, t.device, t.requires_grad) for t in (found, tensor)]
    assert traits[0] == traits[1]
    assert tensor.is_meta or found.tolist() == tensor.tolist()


def test_subclasses_of_builtin_types_arrive_as_these() -> None:
    given = [torch.Size([1]), np.float64(0.5), OrderedDict(a=1), nn.Parameter(torch.ones(1))]
    found = arrived(given)
    assert found == given
    assert [type(x) for x in found] == [tuple, float, dict, torch.Tensor]


class Pair(NamedTuple):
    first: int


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [len, object(), Pair(1), Color.RED, np.int64(1), ValueError("x"), torch.strided],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_data_is_not_sent(value: object) -> None:
    with pytest.raises(MessageError, match="cannot be sent between ranks"):
        plain.dumps([value])


def test_a_value_that_holds_itself_is_not_sent() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(MessageError, match="more than 64 levels"):
        plain.dumps(endless)


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("it ran",)


def message(text: str) -> bytes:
    return plain.dumps(0)[:-1] + text.encode()


WRONG = {
    "nothing": (b"", "expected a message of pipegrad"),
    "a pickle": (pickle.dumps(Trap()), "expected a message of pipegrad"),
    "no JSON": (message("q"), "Expecting value"),
    "an unknown record": (message('{"os.system":["true"]}'), "no record is called 'os.system'"),
    "a function of a record's module": (message('{"comm.agreement.agree":[]}'), "no record is"),
    "a record with other fields": (message('{"comm.activity.Failure":[1]}'), "other fields than"),
    "an object of two": (message('{"set":[],"tuple":[]}'), "cannot be read"),
    "bytes behind it": (message("1N"), "Extra data"),
    "more values than any message has": (message("[" + "0," * 2**24 + "0,0]"), "too many values"),
    "lists in lists": (message("[" * 100_000), "recursion"),
    "a table of tables": (message('{"table":[{"table":[]},1]}'), "unhashable"),
    "a tensor of other bytes": (
        plain.dumps(torch.ones(2)).replace(b"[2]", b"[9]"),
        "other bytes than its shape",
    ),
    "a negative shape": (plain.dumps(torch.ones(2)).replace(b"[2]", b"[-2]"), "no tensor has"),
    "bytes that are none": (message('{"bytes":"a"}'), "cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_one_error_of_pipegrad(name: str) -> None:
    content, words = WRONG[name]
    with pytest.raises(MessageError, match=words) as caught:
        plain.loads(content)
    assert str(caught.value).startswith("a message between ranks cannot be read: ")


def test_a_message_with_changed_bytes_is_another_value_or_an_error() -> None:
    content, draw = plain.dumps(VALUES), random.Random(0)
    failed = 0
    for _ in range(3000):
        changed = bytearray(content[: draw.choice([len(content), draw.randrange(1, len(content))])])
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        try:
            plain.loads(bytes(changed))
        except MessageError:
            failed += 1
    assert failed > 1000


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(MessageError, match="it is of tuple, expected Record"):
        plain.loads(plain.dumps(()), Record)


def test_every_record_exists() -> None:
    for name in plain._MODULES:
        assert plain._class(name).__match_args__, name
