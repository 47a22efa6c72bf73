"""What a record of a parameter says if its maker says no more than he must."""

from __future__ import annotations

import torch

from pipegrad import ParameterRecord


def test_a_record_is_of_one_module_and_one_stage_unless_it_is_said() -> None:
    record = ParameterRecord("0.w", "w", 0, (2, 3), torch.float32, True, (0,), 0)
    assert (record.kind, record.aliases, record.tied_in_stage) == ("", (), False)
    assert (record.shared, record.numel) == (False, 6)
