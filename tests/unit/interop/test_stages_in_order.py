"""The stages of a torch schedule come in the order of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pipegrad.interop.torch_schedule import stages_of


def test_stages_come_in_the_order_of_the_model() -> None:
    stages = [SimpleNamespace(stage_index=index) for index in (3, 1)]
    schedule: Any = SimpleNamespace(_stages=stages)
    assert [stage.stage_index for stage in stages_of(schedule)] == [1, 3]
