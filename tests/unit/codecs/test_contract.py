"""The built-in codecs keep the contract; and the contract catches wrong codecs, and tells why."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from pipegrad.plugins.codec import Carried
from pipegrad.testing import CodecContract
from pipegrad_codecs.bf16 import BFloat16
from pipegrad_codecs.int8 import Int8
from pipegrad_codecs.top_k import TopK


class TestBFloat16(CodecContract):
    codec = "bf16"
    relative_error = 2**-8  # eight bits


class TestFloat8(CodecContract):
    codec = "fp8"
    relative_error = 2**-3 + 2**-20  # e5m2 has two bits behind the point; the scale is rounded


class TestInt8(CodecContract):
    codec = "int8"
    relative_error = 0.5 / 127 + 2**-20


class TestTopK(CodecContract):
    codec = "topk"
    relative_error = 1.0  # what is not sent is zero


class TestTopKOfFew(CodecContract):
    codec = {"name": "topk", "fraction": 1e-3, "feedback": False}  # noqa: RUF012 - as authors write
    relative_error = 1.0


class HidesNan(Int8):
    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        super().encode(value.nan_to_num(), message, carried)


class LeavesBytes(TopK):
    """Its message has eight bytes more than it writes."""

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return super().nbytes(shape, dtype) + 8

    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        super().encode(value, message[:-8], carried)

    def decode(self, message: Tensor, value: Tensor, carried: Carried) -> None:
        super().decode(message[:-8], value, carried)


class Random(Int8):
    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        super().encode(value + 0.1 * torch.randn_like(value), message, carried)


class ReadsMemory(BFloat16):
    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        flat = torch.as_strided(value, (value.numel(),), (1,))
        super().encode(flat.view(value.shape), message, carried)


class Scales(BFloat16):
    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        super().encode(value.mul_(2), message, carried)


class Adds(TopK):
    def decode(self, message: Tensor, value: Tensor, carried: Carried) -> None:
        before = value.clone()
        super().decode(message, value, carried)
        value.add_(before)


class Overflows(BFloat16):
    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        message.view(torch.bfloat16).view(value.shape).copy_(value)


class NeverShorter(BFloat16):
    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return torch.Size(shape).numel() * 8


class Grows(BFloat16):
    calls = iter(range(10**6))

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return super().nbytes(shape, dtype) + next(self.calls)


class TakesAnything(BFloat16):
    def __init__(self, **options: object) -> None:
        self.options = options


WRONG = {
    HidesNan: ("what_is_not_finite_is_not_hidden", "came back finite"),
    LeavesBytes: ("all_bytes_of_a_message_are_written", "write all"),
    Random: ("a_message_made_again_is_the_same", "random"),
    ReadsMemory: ("strides_change_nothing", "not by its memory"),
    Scales: ("encode_leaves_the_tensor_as_it_was", "still reads"),
    Adds: ("all_elements_are_written", "write all of them"),
    Overflows: ("the_largest_numbers_stay_finite", "came back as inf or nan"),
    NeverShorter: ("some_tensor_becomes_shorter", "shorter"),
    Grows: ("messages_have_a_known_number_of_bytes", "one whole number"),
    TakesAnything: ("an_unknown_option_is_refused_by_name", "without \\*\\*"),
}


@pytest.mark.parametrize(
    ("cls", "check", "words"),
    [
        pytest.param(cls, f"test_{check}", words, id=cls.__name__)
        for cls, (check, words) in WRONG.items()
    ],
)
def test_the_contract_catches(cls: type[BFloat16], check: str, words: str) -> None:
    class Checked(CodecContract):
        codec = cls
        relative_error = 1.0

    with pytest.raises(AssertionError, match=rf"(?s)codec .*{cls.__name__}.*{words}"):
        getattr(Checked(), check)()


def test_a_large_error_is_refused_with_its_size() -> None:
    class Checked(CodecContract):
        codec = "int8"
        relative_error = 1e-4

    with pytest.raises(AssertionError, match=re.escape("relative_error 0.0001 allows")):
        Checked().test_values_come_back_within_the_declared_error()
