"""File system: how torch.distributed.checkpoint opens files, without links."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from pathlib import Path

from torch.distributed.checkpoint import filesystem

from pipegrad import run_files


class FileSystem(filesystem.FileSystem):
    """Writes new files alone, and reads regular files alone; see [Note: who may write there]."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        opened = run_files.created if "w" in mode else run_files.opened
        with opened(Path(path)) as stream:
            yield stream

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        run_files.make_folder(Path(path))
