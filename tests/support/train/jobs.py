"""What the tests of the trainer share: a small job, in a folder with the models it can name."""

from __future__ import annotations

from pathlib import Path

SMALL = """
[model]
factory = "factories:tied"
[data]
batch_size = 8
sequence_length = 16
[train]
device = "cpu"
steps = 12
"""


def with_job(folder: Path, name: str = "small.toml", text: str = SMALL) -> Path:
    """Writes a job and the module of its factories into a folder; returns the folder."""
    (folder / name).write_text(text)
    (folder / "factories.py").write_text((Path(__file__).parent / "factories.py").read_text())
    return folder
