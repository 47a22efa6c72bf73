"""Limits: the largest sizes that a file, a name or an option may have. More raises an error.

They are far above the needs of a pipeline, and keep a command within minutes and gigabytes.
"""

from __future__ import annotations

import os

from pipegrad.errors import ScheduleError

MOST_CELLS = 1_000_000  # stages x microbatches
MOST_STAGES = 4096  # some tables have an entry for each pair of them
LONG_CELLS = 20_000  # with more of them, a command prints the parts that it begins
MOST_NUMBER = 2**63 - 1  # of bytes, of seconds: products and sums of such numbers stay finite
LEAST_RATE = 1e-9  # bytes per second
LARGEST = 2**31 - 1  # the page of a picture keeps integers of 32 bits
MOST_CONFIG_BYTES = 2**20  # its parser is slow
MOST_CONFIG_DEPTH = 32  # tables in tables
MOST_ORDERS_BYTES = 2**26  # of a list of actions; 64 ranks x 1024 microbatches take a tenth
MOST_JSON_BYTES = 2**30  # a timeline of MOST_CELLS
MOST_JSON_CONTAINERS = 10_000_000  # an empty one takes two bytes in a file, and 64 in memory


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_size(num_stages: int, num_microbatches: int) -> None:
    """Refuses a schedule that is too large to be made whole.

    Raises:
        ScheduleError: If it has too many stages, or too many stages x microbatches.
    """
    if num_stages * num_microbatches > MOST_CELLS:
        raise ScheduleError(
            f"{_words(num_microbatches)} microbatches on {_words(num_stages)} stages: "
            f"expected at most {MOST_CELLS:,} of both multiplied"
        )
    if num_stages > MOST_STAGES:
        raise ScheduleError(f"{num_stages:,} stages: expected at most {MOST_STAGES:,}")


def _words(number: int) -> str:
    return f"{number:,}" if number <= MOST_NUMBER else "far too many"
