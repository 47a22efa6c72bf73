"""Pieces of whole tensors: which boxes they are, and which pieces fit together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipegrad.errors import ConfigError
from pipegrad.train.checkpoint.shards import Shard, boxes_of, fitted
from pipegrad.train.config import Config
from pipegrad.train.schema import Model, Parallel

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_boxes_have_the_elements_of_a_flat_range_in_order(
    shape: list[int], data: st.DataObject
) -> None:
    whole = numbered(shape)
    begin = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(begin, whole.numel()))
    boxes = list(boxes_of(begin, end, shape))
    elements = [value for box in boxes for value in whole[window(*box)].reshape(-1).tolist()]
    assert elements == list(range(begin, end))
    assert len(boxes) <= 2 * len(shape) - 1


@given(SHAPES, st.data())
def test_pieces_of_any_sizes_make_the_whole_tensor(shape: list[int], data: st.DataObject) -> None:
    """Each piece is written in two flat parts, as two ranks of a sharded optimizer do."""
    whole = numbered(shape)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    count = data.draw(st.integers(1, 4))
    pieces = whole.tensor_split(count, dim)
    shards = fitted_at(dim, {f"[tp={i}]": tuple(p.shape) for i, p in enumerate(pieces)})
    found = torch.full(shape, -1)
    for piece, shard in zip(pieces, shards, strict=True):
        assert shard.shape == tuple(shape)
        flat = piece.reshape(-1)
        middle = data.draw(st.integers(0, flat.numel()))
        for begin, end in ((0, middle), (middle, flat.numel())):
            chunk = shard.chunk(flat[begin:end], begin)
            first = 0
            for offsets, sizes in chunk.boxes:
                part = chunk.local[first : first + torch.Size(sizes).numel()].view(sizes)
                assert (found[window(offsets, sizes)] == -1).all()
                found[window(offsets, sizes)] = part
                first += part.numel()
            assert first == chunk.local.numel()
    assert torch.equal(found, whole)


def test_more_than_nine_pieces_are_in_the_order_of_ranks() -> None:
    begins = [shard.begin for shard in fitted_at(0, {f"[tp={i}]": (2, 3) for i in range(12)})]
    assert begins == [2 * i for i in range(12)]


@pytest.mark.parametrize(
    ("pieces", "dim", "said"),
    [
        ({"[tp=0]": (2, 3), "[tp=1]": (2, 4)}, 0, "pieces of 'up.weight' do not fit along dim"),
        ({"[tp=0]": (2,), "[tp=1]": (2, 4)}, 0, "do not fit along dimension 0"),
        ({"[tp=0]": (2, 3), "[tp=1]": (2, 3)}, 2, "has no dimension 2: its shape is (2, 3)"),
        ({"[tp=0]": (2, 3), "[tp=1]": (2, 3)}, -3, "has no dimension -3"),
        ({"[tp=0]": (), "[tp=1]": ()}, 0, "has no dimension 0: its shape is ()"),
        ({"[ep=0,tp=0]": (2,), "[ep=0,tp=1]": (2,)}, 0, "several dimensions of the mesh"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(
    pieces: dict[str, tuple[int, ...]], dim: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.shards = ") as caught:
        fitted_at(dim, pieces)
    assert said in str(caught.value)


def fitted_at(dim: int, pieces: dict[str, tuple[int, ...]]) -> list[Shard]:
    config = Config(model=Model(factory="a:b"), parallel=Parallel(shards={"up.*": dim}))
    config._path = Path("job.toml")
    return list(fitted(config, "0.up.weight", pieces).values())


def numbered(shape: list[int]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def window(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
