"""torch's stages: their private names, and their order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import pipegrad.interop.private
from pipegrad.interop.torch_schedule import stages_of


def test_stages_come_in_the_order_of_the_model() -> None:
    stages = [SimpleNamespace(stage_index=index) for index in (3, 1)]
    schedule: Any = SimpleNamespace(_stages=stages)
    assert [stage.stage_index for stage in stages_of(schedule)] == [1, 3]


# Private names. A version of torch that has one nowhere is found.


INTEROP = Path(pipegrad.interop.private.__file__).parent
OWN = ("_pipegrad",)
OTHERS = ("torchtitan.py",)  # uses names of another package
# Names that torch 2.11 does not have yet: hasattr looks for them there.
LATER = {"_stage_meta", "_fsdp_param_groups"} if torch.__version__ < "2.13" else set[str]()


def used(file: Path) -> Iterator[tuple[str, str]]:
    """Yields private attributes of what is not the file's own, and where they stand."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_self and node.attr not in OWN:
                yield node.attr, f"{file.name}:{node.lineno}"


def test_torch_still_has_each_private_name_somewhere() -> None:
    places = dict[str, list[str]]()
    for file in sorted(INTEROP.glob("*.py")):
        for name, place in used(file) if file.name not in OTHERS else ():
            places.setdefault(name, []).append(place)
    # One of attach, one of FSDP2: there are names to look for.
    assert {"_n_microbatches", "_get_fsdp_state"} <= places.keys()
    known = set[str]()
    for source in Path(torch.__file__).parent.rglob("*.py"):
        known |= places.keys() & set(re.findall(r"\b_\w+", source.read_text(errors="replace")))
    gone = {name: where for name, where in places.items() if name not in known | LATER}
    assert gone == {}, f"torch {torch.__version__} has them no more: {gone}"
