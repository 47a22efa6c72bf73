"""Times a resolve by name: with a scan of all metadata at each call, and with the last scan.

python benchmarks/registry/run.py [--distributions 10 100 500] [--rounds 200]

Times are of the processor, in microseconds: first quartiles, and medians in brackets.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from pipegrad.plugins import registry
from pipegrad.plugins.handler import handlers

NAME = "of-the-benchmark"
AT_ONCE = 20  # resolves with the last scan that one reading of the clock times
LAST_YEAR = time.time() - 365 * 86_400


def install(site: Path, number: int) -> None:
    """Writes metadata of distributions; every fourth has a command, one also has a handler."""
    for index in range(number):
        info = site / f"package_{index}-1.0.dist-info"
        info.mkdir(parents=True)
        head = f"Metadata-Version: 2.1\nName: package-{index}\nVersion: 1.0\n\n"
        (info / "METADATA").write_text(head + "A line of a long description.\n" * 150)
        points = f"[console_scripts]\ncommand-{index} = package_{index}:main\n"
        if index == number // 2:
            points += f"[{registry.HANDLERS}]\n"
            points += f"{NAME} = pipegrad_handlers.data_parallel:DataParallel\n"
        if index % 4 == 0 or index == number // 2:
            (info / "entry_points.txt").write_text(points)
    os.utime(site, (LAST_YEAR, LAST_YEAR))  # a scan of a folder that is new is not used again


def print_row(distributions: str, name: str, rounds: int) -> None:
    """Prints the times of a resolve: with a scan, and with the last scan."""
    scanned, last = [], []
    for _ in range(rounds):
        registry._scans.clear()
        begin = time.process_time()
        handlers.resolve(name)
        middle = time.process_time()
        for _ in range(AT_ONCE):
            handlers.resolve(name)
        scanned.append(1e6 * (middle - begin))
        last.append(1e6 * (time.process_time() - middle) / AT_ONCE)
    quartiles = statistics.quantiles(scanned), statistics.quantiles(last)
    before, after = (f"{first:,.0f} ({median:,.0f})" for first, median, _ in quartiles)
    ratio = f"**{quartiles[0][0] / quartiles[1][0]:,.0f}**"
    print(f"| {distributions} | {before} | {after} | {ratio} |", flush=True)


def main() -> None:
    """Prints the README's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--distributions", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    print("| distributions | a scan at each call | the last scan | ratio |\n|---|---|---|---|")
    installed = len(list(metadata.distributions()))
    print_row(f"{installed}, installed here", "data-parallel", given.rounds)
    of_python = [path for path in sys.path if path.startswith(sys.base_prefix)]
    for number in given.distributions:
        with tempfile.TemporaryDirectory() as site:
            install(Path(site), number)
            sys.path[:] = [str(Path(__file__).parent), *of_python, site]
            print_row(str(number), NAME, given.rounds)


if __name__ == "__main__":
    main()
