"""Installed distributions as their metadata shows them, without pip."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path


def write_distribution(
    site: Path,
    name: str,
    *,
    entry_points: Mapping[str, str],
    group: str = "pipegrad.handlers",
    version: str = "1.0",
    modules: Mapping[str, str] | None = None,
) -> Path:
    """Writes metadata and modules of a distribution into a folder that is to be on ``sys.path``."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    lines = [f"[{group}]", *(f"{key} = {value}" for key, value in entry_points.items())]
    info.joinpath("entry_points.txt").write_text("\n".join(lines))
    for module, source in (modules or {}).items():
        site.joinpath(f"{module}.py").write_text(source)
    return site


def declared(group: str) -> dict[str, str]:
    """Returns the entry points of a group that pyproject.toml declares, by name."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    points: dict[str, str] = tomllib.loads(text)["project"]["entry-points"][group]
    return dict(sorted(points.items()))
