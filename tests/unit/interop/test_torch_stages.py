"""torch's stages: their private names, their order, and what a failed step leaves in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import pipegrad.interop.private
from pipegrad.errors import StepError
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.torch_failure import TorchFailure, _backward_zeros
from pipegrad.interop.torch_schedule import stages_of


def stage(**more: Any) -> Any:
    received = SimpleNamespace(buffer=torch.full((2, 3), 7.0, dtype=torch.bfloat16))
    root = SimpleNamespace()  # an argument of the user: nobody waits for its gradient
    return SimpleNamespace(
        has_backward=True,
        fwd_cache={0: "zeros", 1: "other"},
        bwd_cache={},
        args_recv_info={0: (received, root)},
        grad_recv_info={},
        **more,
    )


def test_a_failed_backward_sends_zeros_of_what_was_received() -> None:
    failed = stage()
    _backward_zeros(failed, 0)
    gradient, none = failed.bwd_cache[0]
    assert none is None
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(gradient, torch.zeros(2, 3, dtype=torch.bfloat16))
    assert failed.fwd_cache == {1: "other"}


def test_where_torch_makes_zeros_itself_it_gets_none() -> None:
    failed = stage(_get_grad_send_meta=lambda: None)
    _backward_zeros(failed, 0)
    assert failed.bwd_cache == {0: (None, None)}


def test_an_evaluation_that_failed_sends_no_gradients() -> None:
    failed = stage()
    failed.has_backward = False
    _backward_zeros(failed, 0)
    assert failed.bwd_cache == {}


def failing(schedule: Any, stage: Any) -> TorchFailure:
    failure = TorchFailure(schedule, cast("GradientSync", None))
    failure.follow(stage)
    return failure


class Schedule:
    """A schedule whose stages exchange shapes in the first step, as torch's do."""

    def __init__(self) -> None:
        parts = (
            *("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"),
            *("perform_reduce_grad", "scale_grads"),
            *("_prepare_forward_infra", "_prepare_backward_infra"),
        )
        self.stage = SimpleNamespace(**{part: lambda *_: "done" for part in parts})
        self.stage.stage_index, self._has_backward = 0, False

    def _initialize_stages(self) -> None: ...

    def _maybe_compute_loss(self) -> None: ...

    def _maybe_get_loss(self) -> None: ...


def test_a_step_that_failed_earlier_exchanges_no_shapes() -> None:
    """torch would mark its stages as ready, and later steps would use wrong shapes."""
    schedule = Schedule()
    failure = failing(schedule, schedule.stage)
    assert schedule.stage._prepare_forward_infra() == "done"
    failure.begin()
    failure.error = StepError("a batch of another size")
    with pytest.raises(StepError, match="another size"):
        schedule.stage._prepare_forward_infra()


def test_stages_come_in_the_order_of_the_model() -> None:
    stages = [SimpleNamespace(stage_index=index) for index in (3, 1)]
    schedule: Any = SimpleNamespace(_stages=stages)
    assert [stage.stage_index for stage in stages_of(schedule)] == [1, 3]


# Private names. A version of torch that has one nowhere is found.


INTEROP = Path(pipegrad.interop.private.__file__).parent
OWN = ("_pipegrad",)
OTHERS = ("torchtitan.py",)  # uses names of another package


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
    gone = {name: where for name, where in places.items() if name not in known}
    assert gone == {}, f"torch {torch.__version__} has them no more: {gone}"
