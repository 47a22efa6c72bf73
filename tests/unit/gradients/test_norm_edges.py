"""Gradients on a device are divided there, by a factor that no number of 16 bits is."""

from __future__ import annotations

import torch

from pipegrad.gradients.norm import divide_


class OnDevice(torch.Tensor):
    """A number on the CPU that the host may not read, like one of a device."""

    is_cpu = False
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_gradients_of_any_kind_are_divided_by_a_number_on_the_device() -> None:
    half = torch.tensor([2.0**15, 3.0], dtype=torch.float16)
    scalar, matrix = torch.tensor(2.0**18), torch.full((2, 2), 2.0**17)
    sparse = torch.tensor([2.0**17, 0.0, 2.0**18]).to_sparse()
    divide_([half, scalar, matrix, sparse], torch.tensor(2.0**17).as_subclass(OnDevice))
    assert half.tolist() == [0.25, float(torch.tensor(3 / 2**17, dtype=torch.float16))]
    assert scalar.item() == 2.0
    assert matrix.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert sparse.to_dense().tolist() == [1.0, 0.0, 2.0]
