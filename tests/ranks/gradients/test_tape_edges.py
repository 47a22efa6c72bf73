"""Numbers of all ranks: whoever records sees for how long a rank waited for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.gradients.cases import rank, replicated, stage


class Recorder:
    """Counts times, and keeps what is noted."""

    def __init__(self) -> None:
        self.time, self.noted = 0, list[tuple[Any, ...]]()

    def now(self) -> object:
        self.time += 1
        return self.time

    def note(self, kind: str, key: object, began: object) -> None:
        self.noted.append((kind, key, began))


@pytest.mark.ranks(2)
def test_rows_of_all_ranks_are_a_wait_for_ranks() -> None:
    sync = replicated(stage(a=(1,)))
    recorder: Any = Recorder()
    sync.tape.recorder = recorder
    row = torch.tensor([rank() + 1.0, 5.0])
    assert sync.gather(row).tolist() == [[1.0, 5.0], [2.0, 5.0]]
    assert recorder.noted == [("wait for ranks", "numbers of all ranks", 1)]
    sync.tape.recorder = None
    sync.close()
