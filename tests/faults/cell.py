"""Cells of the fault matrix: a fault, its place, the layout of the ranks, and what they send."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

FAULTS = {
    "raise": "raises RuntimeError",
    "exit": "calls sys.exit(0)",
    "_exit": "calls os._exit(0)",
    "kill": "gets SIGKILL",
    "stop": "gets SIGSTOP, and is never continued",
    "stall": "sleeps in Python, and never goes on",
    "cut": "loses its network link",
    "slow": "comes two seconds late",
    "no gradient": "gives None instead of a gradient",
    "shape": "gives a tensor of another shape",
    "non-finite": "gives nan",
}
PLACES = {
    "construction": "in the function that makes the model",
    "handler": "in the constructor of a gradient handler",
    "first step": "in the first forward of step 1",
    "forward": "in a forward of step 3",
    "backward": "in a backward of step 3",
    "transfer": "right before a send of step 3",
    "reduction": "in a handler's launch of step 3",
    "parameter sync": "while parameters of step 3 come back",
    "optimizer": "in a hook of the optimizer's step 3",
    "evaluation": "in a forward of the evaluation after step 4",
    "checkpoint": "in state_dict, for the checkpoint of step 4",
    "writing": "between two tensors that are written into the checkpoint of step 4",
}
LAYOUTS: Mapping[str, tuple[int, int]] = {"4": (4, 1), "2x2": (2, 2)}  # pipeline, data
# Bytes that a stage sends to the next one. A large value is half on its way for a while.
SIZES: Mapping[str, int] = {"small": 0, "16 MiB": 2**24}
STEPS, SAVE_EVERY, EVAL_EVERY, MICROBATCHES = 6, 2, 2, 4
FAULT_STEP = 3
SLOW_SECONDS = 2.0
VARIABLE = "PIPEGRAD_TEST_FAULT"  # of the environment; ranks find their cell in it


@dataclass(frozen=True)
class Cell:
    """One run with one fault."""

    fault: str  # "" for a run without a fault
    place: str
    layout: str
    rank: int  # the global rank with the fault
    size: str = "small"

    @classmethod
    def of(
        cls, fault: str, place: str, layout: str, rank: int | None = None, size: str = "small"
    ) -> Cell:
        """Returns the cell; by default with a rank that comes to the place."""
        # In a pipeline of four, only the first and the last rank hold the tied parameter.
        usual = 3 if place in ("reduction", "parameter sync") else 2
        return cls(fault, place, layout, usual if rank is None else rank, size)

    @classmethod
    def here(cls) -> Cell | None:
        """Returns the cell of this process, None if it is not part of the matrix."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of the ranks has of it."""
        return {VARIABLE: json.dumps(asdict(self))}

    def __str__(self) -> str:
        name = f"{self.fault} x {self.place} x {self.layout}"
        name += f" x {self.size}" if self.size != "small" else ""
        is_usual = self == Cell.of(self.fault, self.place, self.layout, size=self.size)
        return name if is_usual else f"{name} on rank {self.rank}"
