"""CodecContract: the contract of edge codecs, as a test class that authors subclass.

class TestMine(CodecContract):
    codec = "mine"
    relative_error = 2**-8
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from pipegrad import codecs
from pipegrad.plugins.codec import CARRIED, Carried, EdgeCodec
from pipegrad.plugins.registry import Registry
from pipegrad.testing.plugin_contract import PluginContract

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Shapes of ordinary values, of one element, of odd numbers, of long and of many rows.
SHAPES = ((4, 16, 32), (3, 5, 7), (1, 1), (7,), (1,), (2, 513), (64, 3), (2, 3, 1, 40))
_FILL = 0x5A  # value of memory before it is written


class CodecContract(PluginContract):
    """Checks a codec. Subclass it in a test module, as a class whose name begins with ``Test``.

    Nothing is sent: the checks encode tensors of all floating-point dtypes and of many shapes, and
    decode the messages. They leave out a tensor whose message is not shorter than the tensor,
    because such a message is never sent.

    Attributes:
        codec: The codec, as in a configuration: a name, a table of name and options, or a class.
        relative_error: Largest accepted error of an element, relative to the largest element of the
            tensor. Rounding to the tensor's own dtype is accepted in addition.
    """

    # The type is CodecSpec. With Any a subclass needs no annotations.
    codec: ClassVar[Any]
    relative_error: ClassVar[float] = 1e-6

    # The codec itself.

    def test_it_says_what_it_carries(self) -> None:
        carries: object = self._new_codec().carries
        self._check(
            isinstance(carries, tuple) and bool(carries) and set(carries) <= {*CARRIED},
            f"carries is {carries!r}, expected a tuple out of {list(CARRIED)}",
        )

    # Its messages.

    def test_messages_have_a_known_number_of_bytes(self) -> None:
        # Both ranks compute it, from shape and dtype alone, for any tensor of floats.
        codec, shapes = self._new_codec(), (*SHAPES, (), (0,), (0, 5), (5, 0))
        for dtype in DTYPES:
            for shape in shapes:
                first, again = codec.nbytes(shape, dtype), self._new_codec().nbytes(shape, dtype)
                self._check(
                    type(first) is int and first >= 0 and first == again,
                    f"nbytes() of {dtype} {shape} is {first!r}, then {again!r}: expected one whole "
                    f"number, 0 or more",
                )

    def test_some_tensor_becomes_shorter(self) -> None:
        self._check(
            any(True for _ in self._cases()),
            f"no message is shorter than its tensor, of {[str(d) for d in DTYPES]} in the shapes "
            f"{list(SHAPES)}: nothing would ever be encoded",
        )

    def test_all_bytes_of_a_message_are_written(self) -> None:
        for carried, value in self._cases():
            first, other = (self._message(value, carried, fill) for fill in (_FILL, 255 - _FILL))
            self._check(
                torch.equal(first, other),
                f"encode() leaves bytes of the message of {_words(value)} as they were: write all "
                f"{len(first)}, since equal tensors must give equal messages",
            )

    def test_a_message_made_again_is_the_same(self) -> None:
        for carried, value in self._cases():
            first = self._message(value, carried)
            again = self._message(value.clone(), carried, codec=self._new_codec())
            self._check(
                torch.equal(first, again),
                f"encode() of {_words(value)} gave two messages; it must depend on the tensor "
                f"alone: draw no random numbers, and keep nothing of an earlier call",
            )

    def test_encode_leaves_the_tensor_as_it_was(self) -> None:
        for carried, value in self._cases():
            before = value.clone()
            self._message(value, carried)
            self._check(
                torch.equal(value, before),
                f"encode() changed {_words(value)}, which the stage that made it still reads",
            )

    def test_decode_leaves_the_message_as_it_was(self) -> None:
        for carried, value in self._cases():
            message = self._message(value, carried)
            before = message.clone()
            self._decoded(message, value, carried)
            self._check(torch.equal(message, before), "decode() changed the message")

    # Its values.

    def test_values_come_back_within_the_declared_error(self) -> None:
        for carried, value in self._cases():
            info = torch.finfo(value.dtype)
            for size in (1.0, 0.0, info.tiny, min(math.sqrt(info.max), 1e18)):
                scaled = value * size
                decoded = self._decoded(self._message(scaled, carried), scaled, carried)
                self._check_error(scaled, decoded)

    def test_strides_change_nothing(self) -> None:
        for carried, value in self._cases():
            wide = torch.full((*value.shape, 2), math.nan, dtype=value.dtype)
            wide[..., 0] = value
            for strided in (wide[..., 0], value.mT.contiguous().mT if value.ndim > 1 else value):
                self._check(
                    torch.equal(self._message(strided, carried), self._message(value, carried)),
                    f"encode() of {_words(value)} gave another message for strides "
                    f"{strided.stride()}: read the tensor by its elements, not by its memory",
                )

    def test_all_elements_are_written(self) -> None:
        for carried, value in self._cases():
            message = self._message(value, carried)
            first, other = (self._decoded(message, value, carried, fill) for fill in (1.0, -7.0))
            self._check(
                torch.equal(first, other),
                f"decode() of {_words(value)} leaves elements as they were: write all of them",
            )

    def test_the_largest_numbers_stay_finite(self) -> None:
        # Additive attention masks have the smallest number of their dtype in whole rows. No mask
        # has the smallest number of float64, because sums of it overflow.
        for carried, value in self._cases():
            most = min(torch.finfo(value.dtype).max, torch.finfo(torch.float32).max)
            for largest in (most, -most):
                extreme = torch.full_like(value, largest)
                decoded = self._decoded(self._message(extreme, carried), extreme, carried)
                self._check(
                    bool(decoded.isfinite().all()),
                    f"{_words(value)} of {largest:g} came back as inf or nan: an additive mask "
                    f"would become one",
                )

    def test_what_is_not_finite_is_not_hidden(self) -> None:
        for carried, value in self._cases():
            for odd in (math.nan, math.inf, -math.inf):
                for where in (0, value.numel() // 2, value.numel() - 1):
                    spoilt = value.clone()
                    spoilt.view(-1)[where] = odd
                    decoded = self._decoded(self._message(spoilt, carried), spoilt, carried)
                    self._check(
                        not bool(decoded.isfinite().all()),
                        f"{odd} as element {where} of {_words(value)} came back finite: loss "
                        f"scaling, and the trainer, would not see that a step has overflowed",
                    )

    # Inside.

    @cached_property
    def _spec(self) -> Any:  # noqa: ANN401 - a codec as a configuration names it
        """The codec by its class, because a name would be looked up for each message."""
        if not isinstance(self.codec, str | Mapping):
            return self.codec
        options = {} if isinstance(self.codec, str) else dict(self.codec)
        return {**options, "name": type(codecs.resolve(self.codec).plugin)}

    def _new_codec(self) -> EdgeCodec:
        return codecs.resolve(self._spec).plugin

    def _cases(self) -> Iterator[tuple[Carried, Tensor]]:
        """Yields tensors that would be encoded, with the kind of value that they are."""
        codec = self._new_codec()
        for number, shape in enumerate(SHAPES):
            for dtype in DTYPES:
                if codec.nbytes(shape, dtype) < math.prod(shape) * dtype.itemsize:
                    numbers = torch.Generator().manual_seed(number)
                    value = torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype)
                    for carried in codec.carries:
                        yield carried, value

    def _message(
        self, value: Tensor, carried: Carried, fill: int = _FILL, codec: EdgeCodec | None = None
    ) -> Tensor:
        codec = codec or self._new_codec()
        nbytes = codec.nbytes(tuple(value.shape), value.dtype)
        message = torch.full((nbytes,), fill, dtype=torch.uint8)
        with torch.no_grad():
            codec.encode(value, message, carried)
        return message

    def _decoded(
        self, message: Tensor, like: Tensor, carried: Carried, fill: float = math.nan
    ) -> Tensor:
        value = torch.full(like.shape, fill, dtype=like.dtype)
        with torch.no_grad():
            self._new_codec().decode(message, value, carried)
        return value

    def _check_error(self, value: Tensor, decoded: Tensor) -> None:
        exact = value.double()
        error = (decoded.double() - exact).abs().max().item()
        info, largest = torch.finfo(value.dtype), exact.abs().max().item()
        # Numbers far below the smallest number of float32 may become zero.
        most = (self.relative_error + info.eps) * largest + torch.finfo(torch.float32).tiny
        self._check(
            error <= most,
            f"{_words(value)} with the largest element {largest:g} came back with an error of "
            f"{error:g}; relative_error {self.relative_error:g} allows {most:g}",
        )

    def _plugin(self) -> tuple[str, Registry[EdgeCodec], Any]:
        return "codec", codecs, self.codec


def _words(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
