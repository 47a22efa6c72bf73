"""Values of a step at their edges: named outputs, tensors of one row, headers."""

from __future__ import annotations

import pytest
import torch

from pipegrad.errors import StepError
from pipegrad.pipeline.edges import Spec, header, read_header
from pipegrad.pipeline.transfers import Sizes
from pipegrad.pipeline.wiring import REST, wire
from tests.unit.pipeline.test_batches import Named, X, Y, batches, cut, returned, rows


def test_a_named_tuple_gives_outputs_by_name_and_not_in_its_own_order() -> None:
    logits, loss = returned(Named(loss=Y, logits=X), "logits", "loss")
    assert logits is X
    assert loss is Y


def test_a_tensor_of_one_row_beside_others_goes_whole_to_every_microbatch() -> None:
    wiring = wire({0: ((REST,), ("x",), ()), 1: (("x",), ("y",), ())})
    table = torch.ones(1, 3)
    parts = cut(batches(wiring), {"x": rows(4), "positions": table})[REST]
    assert [tuple(part["x"].shape) for part in parts] == [(2, 2), (2, 2)]
    assert all(part["positions"] is table for part in parts)
    parts = cut(batches(wiring), {"x": rows(2), "mask": rows(2, seed=1)})[REST]  # as others are
    assert [tuple(part["mask"].shape) for part in parts] == [(1, 2), (1, 2)]


def test_a_header_has_the_bytes_that_all_versions_agree_on() -> None:
    spec = Spec((3, 5), torch.complex128, differentiable=False)
    assert header((7, 9), spec).nbytes == 144
    assert read_header(header((7, 9), spec).tolist()) == ((7, 9), spec)
    assert read_header(header((7, 9), None).tolist()) == ((7, 9), None)


@pytest.mark.parametrize(
    ("at", "number"),
    [(0, 1), (3, -2), (3, 19), (4, -1), (4, 14), (5, -1), (7, 1)],
    ids=["mark", "dtype -2", "dtype 19", "-1 sizes", "14 sizes", "size -1", "size behind"],
)
def test_a_header_that_no_value_has_is_refused(at: int, number: int) -> None:
    """A dtype's number was taken from the end, and 14 sizes were taken from 13."""
    head = header((7, 9), Spec((3, 5), torch.float32, differentiable=True))
    head[at] = number
    with pytest.raises(StepError, match="another rank has sent a header that no value has"):
        read_header(head.tolist())


def test_a_value_is_refused_before_memory_is_made_if_it_is_far_larger_than_all_before() -> None:
    sizes = Sizes(Spec((2**20,), torch.float32, differentiable=True))
    sizes.check_size(Spec((2**30,), torch.float32, differentiable=True))
    with pytest.raises(StepError, match=r"4294967300 bytes, .*: expected at most 4294967296"):
        sizes.check_size(Spec((2**30 + 1,), torch.float32, differentiable=True))
    small = Sizes(Spec((), torch.uint8, differentiable=True))
    small.check_size(Spec((2**30,), torch.uint8, differentiable=True))
    with pytest.raises(StepError, match="expected at most 1073741824"):
        small.check_size(Spec((2**33,), torch.uint8, differentiable=True))
