"""What tests need of torch: cases that an older one cannot run are skipped, and say so."""

from __future__ import annotations

from typing import Protocol

import pytest
import torch
from torch.torch_version import TorchVersion

SPLIT_BY_TORCH = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "file zb-h1", "file zbv")
IS_OLD = TorchVersion(torch.__version__) < "2.13"

needs_2_13 = pytest.mark.skipif(
    IS_OLD,
    reason="needs torch 2.13: before it torch splits backward wrongly (pytorch#180952), and "
    "pipegrad.attach refuses such schedules",
)


class Scheduled(Protocol):
    @property
    def schedule(self) -> str: ...


def marks_of(case: Scheduled) -> tuple[pytest.MarkDecorator, ...]:
    return (needs_2_13,) if case.schedule in SPLIT_BY_TORCH else ()
