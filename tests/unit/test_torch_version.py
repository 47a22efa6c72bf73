"""A torch that is too old is refused in words, at import."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipegrad._torch_version import OLDEST, refuse_old

ROOT = Path(__file__).parents[2]


def beside_old_torch(
    tmp_path: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python where torch is 2.10.1."""
    installed = tmp_path / "torch-2.10.1+cu130.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.10.1+cu130\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "handlers")])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_importing_pipegrad_beside_an_old_torch_says_what_is_needed(tmp_path: Path) -> None:
    """Issue 16, point 17. The import ended in an ImportError of some name inside of torch."""
    ran = beside_old_torch(tmp_path, "-c", "import pipegrad")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith(
        "ImportError: pipegrad needs torch 2.11 or later, and found torch 2.10.1+cu130. Install "
    )


def test_pytest_runs_beside_an_old_torch_and_an_audit_says_what_is_needed(tmp_path: Path) -> None:
    """Security, F10. The plug-in broke every run of pytest, of any project."""
    audit = "def test_audit(audit_pipeline): audit_pipeline('a.py:b')"
    (tmp_path / "test_other.py").write_text(f"def test_other(): pass\n{audit}\n")
    words = ["-p", "pipegrad_pytest", "-p", "no:cacheprovider"]
    ran = beside_old_torch(
        tmp_path, "-m", "pytest", *words, str(tmp_path), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
    )
    assert "1 failed, 1 passed" in ran.stdout
    assert "pipegrad needs torch 2.11 or later, and found torch 2.10.1" in ran.stdout


@pytest.mark.parametrize("version", ["2.9.1+cpu", "1.13.1", "2.10.0a0+git1"])
def test_every_older_version_is_refused(version: str) -> None:
    """Issue 16, point 17. As numbers: 2.9 is older than 2.11."""
    with pytest.raises(ImportError, match=f"found torch {version.replace('+', '.')}"):
        refuse_old(version)


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.11.0a0+git1", "2.13.0+cpu", "2.15.0.dev20261101", "3.0", "unknown"]
)
def test_newer_and_unknown_versions_are_not(version: str) -> None:
    """Issue 16, point 17."""
    refuse_old(version)


def test_what_is_refused_is_what_the_installation_asks_for() -> None:
    """Issue 16, point 17."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = f"torch>={'.'.join(map(str, OLDEST))},"
    assert any(needed.startswith(oldest) for needed in project["dependencies"])
