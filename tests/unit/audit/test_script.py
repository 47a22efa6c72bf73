"""A function of somebody's file is found, or it is said why not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pipegrad.audit import Audit, Report, script
from pipegrad.audit.script import Run, audit_of, function
from pipegrad.errors import ConfigError

REPORT = Report((), (), (), 1, 1, 0.0)
CALLS: list[object] = []

SCRIPT = """
from torch import nn
import beside
from pipegrad.audit import Audit

def loss(output, target):
    return output.sum()

def audited():
    return Audit(step=print, modules=nn.Linear(1, 1), model=nn.Linear(1, 1), loss_fn=loss,
                 batches=[], microbatches=beside.NUMBER)

def number():
    return 3

value = 3
"""


class Recorded(Audit):
    """Remembers how it was run."""

    def run(self, *, steps: int | None = None, tolerance: float | None = None) -> Report:
        CALLS.append(("run", steps, tolerance, *self.variants))
        return REPORT


def recorded() -> Audit:
    layer = nn.Linear(1, 1)
    return Recorded(
        step=print, modules=layer, model=layer, loss_fn=print, batches=[], microbatches=1
    )


def with_variants() -> Audit:
    return replace(recorded(), variants={"packing": recorded, "Muon": recorded})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Writes a script and a file beside it. What is imported there is forgotten."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("NUMBER = 5\n")
    (tmp_path / "random.py").write_text("")
    path = tmp_path / "somebodys_script.py"
    path.write_text(SCRIPT)
    yield path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@dataclass
class Ranks:
    """Stands for ranks: what would have run in them."""

    started: list[tuple[Run, int, float]] = field(default_factory=list)

    def __call__(
        self, run: Callable[[], Report], num_ranks: int, *, timeout_seconds: float
    ) -> list[Report]:
        owner: Any = getattr(run, "__self__", None)
        self.started.append((owner, num_ranks, timeout_seconds))
        return [REPORT] * num_ranks


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    fake = Ranks()
    monkeypatch.setattr(script, "run_ranks", fake)
    return fake


def test_a_function_of_a_file_or_module_makes_the_audit(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert audit_of(f"{file}:audited").microbatches == 5
    assert function(f"{file}:audited") is function(f"{file}:audited")  # it is imported once
    assert isinstance(audit_of(recorded), Recorded)
    monkeypatch.syspath_prepend(file.parent)
    assert audit_of("somebodys_script:audited").microbatches == 5
    monkeypatch.chdir(file.parent)
    assert audit_of(f"{file.name}:audited").microbatches == 5


@pytest.mark.parametrize("target", ["script.py", "module", ":f", "script.py:", ""])
def test_a_target_without_a_file_or_a_function_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=r"expected FILE\.py:function, or module:function"):
        function(target)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{folder}/nowhere.py:audited", "^{folder}/nowhere.py cannot be imported: .*there is no "),
        ("no_such_module:audited", "^no_such_module cannot be imported: ModuleNotFound"),
        ("{file}:adited", r"has no function 'adited'; it has \['loss', 'audited', 'number'\]$"),
        ("{file}:value", "has no function 'value'"),
        ("{folder}/random.py:audited", "random is another module here, .*: rename the file"),
        ("{file}:number", r":number returned int, expected a pipegrad\.Audit"),
    ],
)
def test_what_is_missing_or_no_audit_is_named(file: Path, target: str, words: str) -> None:
    known = {"folder": file.parent, "file": file}
    with pytest.raises(ConfigError, match=words.format(**known)):
        audit_of(target.format(**known))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", r"SystemExit\(3\)"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_an_error_of_the_file_is_said_with_its_cause_and_may_be_repaired(
    file: Path, line: str, says: str
) -> None:
    file.write_text(line)
    with pytest.raises(ConfigError, match=f"{file} cannot be imported: .*{says}") as caught:
        function(f"{file}:audited")
    assert caught.value.__cause__ is not None
    file.write_text(SCRIPT)
    assert audit_of(f"{file}:audited").microbatches == 5


def test_ranks_get_the_whole_path_of_a_file_and_a_module_as_it_is(
    file: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert Run(f"{file.name}:audited", steps=2).in_ranks(3, 7.0) is REPORT
    assert ranks.started.pop() == (Run(f"{file.resolve()}:audited", steps=2), 3, 7.0)
    monkeypatch.syspath_prepend(file.parent)
    for target, sent in (
        ("somebodys_script:audited", "somebodys_script:audited"),
        (recorded, f"{__file__}:recorded"),
    ):
        Run(target).in_ranks(2)
        assert ranks.started.pop()[0].target == sent


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lambda: audit_of(recorded), "is no function at the top level of a file"),
        (functools.partial(recorded), "is no function at the top level of a file"),
        (Ranks.__call__, "is no function at the top level of a file"),
        (f"{__file__}:adited", "has no function"),
    ],
    ids=["a lambda", "a partial", "a method", "a typo"],
)
def test_a_function_that_other_processes_do_not_find_starts_no_ranks(
    target: Any, words: str, ranks: Ranks
) -> None:
    with pytest.raises(ConfigError, match=words):
        Run(target).in_ranks(2)
    assert ranks.started == []


@pytest.mark.parametrize(
    ("run", "call"),
    [
        (Run(recorded), ("run", None, None)),
        (Run(recorded, steps=2, tolerance=0.5), ("run", 2, 0.5)),
        (Run(with_variants), ("run", None, None, "packing", "Muon")),
        (Run(with_variants, variants=("Muon",)), ("run", None, None, "Muon")),
    ],
)
def test_a_rank_runs_what_it_is_asked_for(run: Run, call: tuple[object, ...]) -> None:
    CALLS.clear()
    assert run.here() is REPORT
    assert [call] == CALLS


def test_a_variant_that_the_audit_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no variant 'muon'; it has \['packing', 'Muon'\]$"):
        Run(with_variants, variants=("muon",)).here()
