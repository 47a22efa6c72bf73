"""The job of the matrix, as a configuration."""

from __future__ import annotations

from pathlib import Path

from tests.faults.cell import EVAL_EVERY, LAYOUTS, MICROBATCHES, SAVE_EVERY, STEPS, Cell

JOB, RUN = "job.toml", "run"
STEP_SECONDS, START_SECONDS = 5.0, 15.0  # the timeouts of the job
_BOUNDARIES = {4: [2, 3, 4], 2: [3]}
_TEXT = """\
gradient_handlers = ["tests.faults.parts:Shared", "{data_handler}"]
[model]
factory = "tests.faults.parts:model"
[parallel]
pipeline = {pipeline}
data = {data}
microbatches = {microbatches}
boundaries = {boundaries}
[data]
dataset = "tests.faults.parts:batches"
[eval]
every = {eval_every}
dataset = "tests.faults.parts:batches"
batches = 1
[train]
device = "cpu"
steps = {steps}
save_every = {save_every}
output = "{run}"
log_every = 1000
step_timeout_seconds = {step_seconds}
start_timeout_seconds = {start_seconds}
"""


def write_job(cell: Cell, folder: Path) -> None:
    """Writes the configuration of a cell into a folder."""
    pipeline, data = LAYOUTS[cell.layout]
    text = _TEXT.format(
        data_handler="sharded" if data > 1 else "data-parallel",
        pipeline=pipeline,
        data=data,
        microbatches=MICROBATCHES,
        boundaries=_BOUNDARIES[pipeline],
        eval_every=EVAL_EVERY,
        steps=STEPS,
        save_every=SAVE_EVERY,
        run=RUN,
        step_seconds=STEP_SECONDS,
        start_seconds=START_SECONDS,
    )
    (folder / JOB).write_text(text)
