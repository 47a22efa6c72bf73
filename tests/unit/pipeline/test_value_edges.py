"""Values of a step at their edges: named outputs, tensors of one row, headers."""

from __future__ import annotations

import torch

from pipegrad.pipeline.transfers.messages import HEADER, header, spec_in
from pipegrad.pipeline.transfers.specs import Spec
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


def test_a_header_has_the_bytes_that_all_versions_agree_on_and_aligns_every_dtype() -> None:
    spec = Spec((3, 5), torch.complex128, differentiable=True)
    assert header(spec).nbytes == HEADER == 128
    assert HEADER % torch.complex128.itemsize == 0
    assert spec_in(header(spec), differentiable=True) == spec
