"""A rank of a launcher that ends by an error that nobody expects shows where it was raised."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

SCRIPT = """
from pipegrad.train.process import process_group

def layer_of_the_user():
    raise ValueError("no such layer")

with process_group():
    layer_of_the_user()
"""


def test_the_traceback_of_an_unexpected_error_is_printed() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1
    assert "in layer_of_the_user\n" in ended.stderr
    assert "ValueError: no such layer" in ended.stderr
