"""Files of a checkpoint: one safetensors file a rank, and an index of slices and checksums.

[Note: files of a checkpoint] ``rank-R.safetensors`` has the tensors that rank R wrote: any reader
of the format reads it. ``index.json``, which is written last, has the positions of each tensor's
slices, and the size and a CRC-32 of each file. Nothing here is a pickle, and reading executes
nothing. A reader uses the index only after its own checksum and all of its sizes are right.

A slice is a flat range of a box of the whole tensor. A whole tensor is one box, a part of a tensor
that several ranks share is another one, and an optimizer that is sharded cuts ranges of these.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping
from importlib import metadata as distributions
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from pipegrad import run_files
from pipegrad.checkpoint.folders import INDEX, UNFINISHED, step_of
from pipegrad.errors import CheckpointError, reason
from pipegrad.limits import MOST_NUMBER
from pipegrad.printable import printable, shortened

VERSION = 1  # of the format; a later one gets another number if this code would misread it
_PIECE_BYTES = 16 * 2**20
# dtype -> its name in the format.
_SAFETENSORS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _SAFETENSORS}
_Count = Annotated[int, Field(ge=0, le=MOST_NUMBER)]
_FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{1,9}\.safetensors$")]
# The index follows its own checksum.
_SEALED = re.compile(rb'\{"crc32": ([0-9]{1,10}), "index": (.*)\}', re.DOTALL)


class Range(NamedTuple):
    """A flat range of a box of a whole tensor."""

    offsets: tuple[_Count, ...]
    sizes: tuple[_Count, ...]
    begin: _Count
    end: _Count


class Part(NamedTuple):
    """A rank's part of a whole tensor: a range of a box, and its elements, flat."""

    shape: tuple[int, ...]
    range: Range
    values: Tensor


class _Slice(NamedTuple):
    range: Range
    file: _FileName
    at: _Count  # its first byte


class _Tensor(BaseModel, strict=True):
    dtype: str
    shape: tuple[_Count, ...]
    slices: list[_Slice]


class Index(BaseModel, strict=True):
    """The content of a checkpoint.

    Attributes:
        version: Version of this format.
        pipegrad: The version of pipegrad that wrote it.
        step: Number of steps before it.
        layout: Name and size of each dimension of the ranks that wrote it.
        run: Values of the run, by name, as text.
        tied: Name of a tied parameter in the checkpoint -> its other names.
        files: Size and CRC-32 by name.
        tensors: Dtype, shape and slices by key.
    """

    version: int = VERSION
    pipegrad: str = Field(default_factory=lambda: distributions.version("pipegrad"))
    step: _Count
    layout: list[tuple[str, int]]
    run: dict[str, str]
    tied: dict[str, list[str]]
    files: dict[_FileName, tuple[_Count, _Count]]
    tensors: dict[str, _Tensor]

    def check(self) -> None:
        """Refuses tensors of other sizes than their slices, and slices without their bytes.

        Raises:
            ValueError: If there are some. KeyError: If there is no such dtype or file.
        """
        left = {name: size for name, (size, _) in self.files.items()}
        for key, tensor in self.tensors.items():
            boxes: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
            for (offsets, sizes, begin, end), file, at in tensor.slices:
                num_bytes = (end - begin) * _DTYPES[tensor.dtype].itemsize
                left[file] -= num_bytes
                boxes.setdefault((offsets, sizes), []).append((begin, end))
                last = [o + n for o, n in zip(offsets, sizes, strict=True)]
                is_inside = all(a <= b for a, b in zip(last, tensor.shape, strict=True))
                if begin > end or at + num_bytes > self.files[file][0] or not is_inside:
                    raise ValueError(f"{key} lies outside")
            for (_, sizes), ranges in boxes.items():
                begins, ends = zip(*sorted(ranges), strict=True)
                if (*begins, math.prod(sizes)) != (0, *ends):
                    raise ValueError(f"{key} has gaps")
            if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(tensor.shape):
                raise ValueError(f"{key} is not whole")
        if min(left.values(), default=0) < 0:
            raise ValueError("slices overlap")

    def sealed(self) -> bytes:
        """Returns the content of its file."""
        content = self.model_dump_json().encode()
        return b'{"crc32": %d, "index": %b}' % (zlib.crc32(content), content)


class Files:
    """The files of a checkpoint, for reading. Messages of its errors lack the folder.

    Args:
        folder: The folder of the checkpoint.

    Attributes:
        index: The index of the checkpoint.

    Raises:
        CheckpointError: If the folder is no whole checkpoint of this version, or its index is
            damaged or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if folder.name.endswith(UNFINISHED):
            raise CheckpointError(
                "is not a whole checkpoint: the run that wrote it did not finish it"
            )
        try:
            content = run_files.read(folder / INDEX)
        except (OSError, ValueError) as error:  # or no path at all
            raise CheckpointError(
                f"is not a whole checkpoint of this version of pipegrad: {INDEX}: {reason(error)}: "
                f"restore it, or name another checkpoint"
            ) from error
        self.index = _parsed(content)
        if step_of(folder) not in (None, self.index.step):
            raise CheckpointError(
                f"is the checkpoint of step {self.index.step} by what it has: give the folder the "
                f"name checkpoint-{self.index.step} again"
            )

    def verify(self, number: int = 0, of: int = 1) -> None:
        """Compares the bytes of files with their checksums: of each `of`-th one, from `number` on.

        Raises:
            CheckpointError: If they differ, or cannot be read.
        """
        for name, expected in sorted(self.index.files.items())[number::of]:
            size, crc = 0, 0
            try:
                with run_files.opened(self._folder / name) as file:
                    while part := file.read(_PIECE_BYTES):
                        size, crc = size + len(part), zlib.crc32(part, crc)
            except OSError as error:
                raise damage(f"{name} cannot be read: {reason(error)}") from error
            if (size, crc) != expected:
                raise damage(f"{name} has other bytes than were written")

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a whole tensor."""
        return self.index.tensors[key].shape

    def whole(self, key: str) -> Tensor:
        """Returns a whole tensor."""
        shape = self.shape(key)
        whole = Range((0,) * len(shape), shape, 0, math.prod(shape))
        return self.read(key, whole).view(shape)

    def read(self, key: str, wanted: Range) -> Tensor:
        """Returns a range of a tensor, ``(numel,)``.

        Raises:
            CheckpointError: If it cannot be read.
        """
        tensor = self.index.tensors[key]
        dtype = _DTYPES[tensor.dtype]
        values = torch.empty(wanted.end - wanted.begin, dtype=dtype)
        of_box = [each for each in tensor.slices if each.range[:2] == wanted[:2]]
        if of_box or not values.numel():
            for (*_, first, last), name, at in of_box:
                begin, end = max(wanted.begin, first), min(wanted.end, last)
                if begin < end:
                    into = values[begin - wanted.begin : end - wanted.begin]
                    self._fill(into, name, at + (begin - first) * dtype.itemsize)
            return values
        # Ranks of another layout cut it into other boxes.
        whole = torch.empty(tensor.shape, dtype=dtype)
        for offsets, sizes in {each.range[:2] for each in tensor.slices}:
            box = Range(offsets, sizes, 0, math.prod(sizes))
            whole[_window(box)] = self.read(key, box).view(sizes)
        return whole[_window(wanted)].reshape(-1)[wanted.begin : wanted.end]

    def _fill(self, values: Tensor, name: str, at: int) -> None:
        try:
            with run_files.opened(self._folder / name) as file:
                file.seek(at)
                num_read = file.readinto(values.view(torch.uint8).numpy().data)
        except OSError as error:
            raise damage(f"{name} cannot be read: {reason(error)}") from error
        if num_read != values.nbytes:
            raise damage(f"{name} is too short")


def damage(message: str) -> CheckpointError:
    """Returns the error for a checkpoint whose bytes are not those that were written."""
    return CheckpointError(f"is damaged: {message}: restore the files, or take another checkpoint")


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    moves: Callable[[], object] = lambda: None,
) -> tuple[tuple[int, int], dict[str, int]]:
    """Writes a new safetensors file to the disk; `moves` is called after each piece of it.

    Returns:
        Its size and CRC-32, and the first byte of each tensor.

    Raises:
        OSError: If that fails. CheckpointError: If the format has no such dtype.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begins, end = {}, 0
    # The largest elements come first, because then all are aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for key, tensor in ordered:
        if tensor.dtype not in _SAFETENSORS:
            raise CheckpointError(f"{key!r} is {tensor.dtype}, for which safetensors has no name")
        begins[key], end = end, end + tensor.nbytes
        header[key] = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [begins[key], end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    crc = zlib.crc32(head)
    with path.open("xb") as file:  # a link of that name is refused, wherever it leads to
        file.write(head)
        for _, tensor in ordered:
            held = tensor.detach().cpu().contiguous()
            # A single element may have any stride, with which no bytes can be viewed.
            content = held.as_strided((held.numel(),), (1,)).view(torch.uint8).numpy().data
            for begin in range(0, len(content), _PIECE_BYTES):
                piece = content[begin : begin + _PIECE_BYTES]
                file.write(piece)
                crc = zlib.crc32(piece, crc)
                if len(piece) == _PIECE_BYTES:  # or a slow disk would be waited for at the end
                    os.fdatasync(file.fileno())
                moves()
        file.flush()
        os.fsync(file.fileno())
    return (len(head) + end, crc), {key: len(head) + begin for key, begin in begins.items()}


def _parsed(content: bytes) -> Index:
    match = _SEALED.fullmatch(content)
    if match is None or zlib.crc32(match[2]) != int(match[1]):
        raise damage(f"{INDEX} has other bytes than were written")
    try:
        head: Any = run_files.parsed_json(match[2])
        if head["version"] != VERSION:
            raise CheckpointError(
                f"has version {shortened(repr(head['version']))}, which this version of pipegrad "
                f"cannot read: take pipegrad {shortened(printable(str(head['pipegrad'])))}, which "
                f"wrote it"
            )
        index = Index.model_validate_json(match[2])
        index.check()
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise damage(f"{INDEX} is not what a run has written") from error
    return index


def _window(box: Range) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
