"""The map: which tests run which lines of the product, and how long each takes.

Tests without ranks are mapped one by one, others by the file: its tests share processes.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from mutating.edits import ROOT, Mutant
from mutating.forks import import_product, run_pytest, work

NOT_MAPPED = ("tests/gpu/", "tests/mutation/", "tests/faults/")
NOT_MAPPED += ("tests/ranks/docs/", "tests/ranks/examples/")
CHUNK_TESTS, CHUNK_SECONDS = 30, 15.0  # of one start of pytest


def write_map(options: argparse.Namespace) -> None:
    """Runs the tests, a file at a time, and writes which lines each runs."""
    files = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    files = [file for file in files if not file.startswith(NOT_MAPPED)]
    parts = options.map.with_suffix("")
    parts.mkdir(parents=True, exist_ok=True)
    part_of = {file: parts / f"{file.replace('/', '+')}.json" for file in files}
    todo = [file for file in files if not part_of[file].exists()]
    todo.sort(key=lambda file: (not file.startswith("tests/unit/"), "/parity/" in file))

    def map_file(number: int, worker: int) -> None:
        import_product(ROOT)  # in this process alone: trees of mutants have their own
        file, trace = todo[number], options.work / f"trace{worker}"
        shutil.rmtree(trace, ignore_errors=True)
        trace.mkdir()
        is_unit = file.startswith("tests/unit/")
        found = run_pytest(ROOT, [file], tier=options.tier, options=options, trace=str(trace))
        lines = defaultdict[str, set[str]](set)
        for path in trace.iterdir():
            for row in path.read_text().splitlines():
                test, name, line = (*row.split("\t"), "", "")[:3]
                if line and test.startswith("tests/"):
                    lines[f"{name}:{line}"].add(test if is_unit else file)
        if not is_unit:
            found["seconds"] = {file: found["cpu"]}
        found["lines"] = {line: sorted(tests) for line, tests in lines.items()}
        if "import" not in found["failed"]:
            part_of[file].write_text(json.dumps(found))
        print(f"{file}: {len(lines)} lines, {found['cpu']} s, failed {found['failed']}", flush=True)

    for _ in work(len(todo), options.jobs, map_file):
        pass
    merge_map(part_of.values(), options.map)


def merge_map(parts: Iterable[Path], path: Path) -> None:
    """Writes one map of the parts."""
    seconds, failed, lines = dict[str, float](), list[str](), defaultdict[str, list[str]](list)
    for part in parts:
        if part.exists():
            found = json.loads(part.read_text())
            seconds |= found["seconds"]
            failed += found["failed"]
            for line, tests in found["lines"].items():
                lines[line] += tests
    numbers, order = {test: i for i, test in enumerate(seconds)}, [*seconds.values()]
    known = {line: [numbers[t] for t in tests if t in numbers] for line, tests in lines.items()}
    cheap = {line: sorted(tests, key=order.__getitem__)[:200] for line, tests in known.items()}
    path.write_text(json.dumps({"seconds": seconds, "failed": failed, "lines": cheap}))
    print(f"{len(seconds)} tests and files of tests, {len(lines)} lines: {path}")


def covering(mutant: Mutant, lines: dict[str, list[int]]) -> set[int]:
    """Returns the tests that run the line of a mutant, by number.

    A line at the top of a module runs in all of them: those count that run a line with its name.
    """
    file, line = mutant["file"], mutant["line"]
    tree = ast.parse((ROOT / file).read_bytes())
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    around = [s for s in statements if s.lineno <= line <= (s.end_lineno or 0)]
    functions = [s for s in around if isinstance(s, ast.FunctionDef)]
    spans = [(line, line), *map(_own_lines, reversed(around))]
    if functions and line < functions[-1].body[0].lineno:  # a default: what runs the body has it
        spans = [(functions[-1].body[0].lineno, functions[-1].end_lineno or 0)]
    for begin, end in spans:
        if hit := {test for i in range(begin, end + 1) for test in lines.get(f"{file}:{i}", ())}:
            return hit
    targets = [getattr(s, "target", getattr(s, "targets", [None])[0]) for s in around]
    names = [name for t in targets if t and (name := getattr(t, "attr", getattr(t, "id", "")))]
    return _users(names[-1], lines) if names and not functions else set()


def _own_lines(statement: ast.stmt) -> tuple[int, int]:
    """Returns the lines of a statement without those of the statements in it."""
    body = getattr(statement, "body", [])
    return statement.lineno, body[0].lineno - 1 if body else statement.end_lineno or 0


def _users(name: str, lines: dict[str, list[int]]) -> set[int]:
    use, hit = re.compile(rf"\b{re.escape(name)}\b"), set[int]()
    for path in [*ROOT.glob("pipegrad/**/*.py"), *ROOT.glob("handlers/**/*.py")]:
        for i, text in enumerate(path.read_text().splitlines(), 1):
            if use.search(text):
                hit.update(lines.get(f"{path.relative_to(ROOT)}:{i}", ()))
    return hit


def chunks_of(tests: Iterable[str], seconds: dict[str, float], file: str) -> Iterator[list[str]]:
    """Yields what one start of pytest runs, for a mutant of a file: likely killers first.

    Unit tests come before others, then files whose name has a word of the mutated one's, then the
    cheap ones.
    """
    words = {word[:5] for word in re.findall("[a-z]{4,}", Path(file).stem)}
    likely = {test for test in tests if any(word in Path(test).name for word in words)}
    order = sorted(
        tests, key=lambda t: (not t.startswith("tests/unit/"), t not in likely, seconds[t])
    )
    chunk, left = list[str](), CHUNK_SECONDS
    for test in order:
        is_other = chunk and chunk[0].startswith("tests/unit/") != test.startswith("tests/unit/")
        is_full = len(chunk) == CHUNK_TESTS or seconds[test] > left
        if chunk and (is_other or is_full):
            yield chunk
            chunk, left = [], CHUNK_SECONDS
        chunk.append(test)
        left -= seconds[test]
    if chunk:
        yield chunk
