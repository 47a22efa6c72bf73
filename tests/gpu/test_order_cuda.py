"""OrderChecker on a card's own streams: it follows their events, autograd's too, and cries no wolf.

CPU tensors have no virtual streams here: what they share with a card is ordered by the host.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
from torch import nn

from pipegrad.comm.comm_stream import CommStream
from pipegrad.comm.sync_points import sites
from pipegrad.gradients.bucket_memory import WRITTEN, FlatBuffer
from pipegrad.testing import OrderChecker
from tests.support.gpu.card import GPU, Card, sleep
from tests.support.gpu.programs import EXPECTED, TWINS, Program, dropped

pytestmark = GPU
CUDA = torch.device("cuda")


def run(program: Program) -> tuple[Any, list[str]]:
    with OrderChecker(virtual_streams=False) as checker:
        found = program(Card(), {})
    return found, list(map(str, checker.violations))


@contextmanager
def beside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Makes a stream current between two stretches of the one that is current now."""
    before = torch.cuda.current_stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


@pytest.mark.parametrize("program", EXPECTED, ids=lambda program: program.__name__)
def test_programs_are_ordered_on_real_streams(program: Program) -> None:
    assert run(program) == (EXPECTED[program], [])


@pytest.mark.parametrize("name", TWINS)
def test_a_site_that_is_off_is_found_whatever_the_numbers(name: str) -> None:
    with sites[name].off():
        _, violations = run(TWINS[name].program)
    assert violations


def test_memory_that_is_dropped_too_early_is_found() -> None:
    _, violations = run(dropped)
    assert violations


def test_a_stream_and_its_neighbour_are_told_apart() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    tensor = torch.zeros(8, device=CUDA)
    torch.cuda.synchronize()
    for waits in (True, False):
        with OrderChecker(virtual_streams=False) as checker:
            with torch.cuda.stream(first):
                tensor.add_(1)
            if waits:
                second.wait_stream(first)
            with torch.cuda.stream(second):
                tensor.add_(1)
            torch.cuda.synchronize()
        assert [v.hazard for v in checker.violations] == (
            [] if waits else ["write not ordered after write"]
        )


def test_the_host_orders_what_it_has_waited_for() -> None:
    side = torch.cuda.Stream()
    with OrderChecker(virtual_streams=False) as checker:
        tensor = torch.zeros(8, device=CUDA)
        there = tensor.cpu()
        assert there.add_(1).sum() == 8
        with torch.cuda.stream(side):
            tensor.add_(1)
        side.synchronize()
        tensor.add_(1)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        with torch.cuda.stream(side):
            tensor.add_(1)
        torch.cuda.synchronize()
        assert tensor.tolist() == [3.0] * 8
    assert checker.violations == []


def test_autograd_is_followed_from_a_side_stream() -> None:
    """Autograd runs backward where forward ran, and orders the caller's stream behind it."""
    side = torch.cuda.Stream()
    with OrderChecker(virtual_streams=False) as checker:
        weight = nn.Parameter(torch.ones(1024, device=CUDA))
        x = torch.full((1024,), 3.0, device=CUDA)
        for _ in range(2):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = (weight * x).sum()
            loss.backward()  # from another stream than forward, which autograd allows
            assert weight.grad is not None
            weight.grad.mul_(2)
        assert weight.grad is not None
        assert set(weight.grad.tolist()) == {18.0}
    assert checker.violations == []


class Reducer:
    """What a hook does: the event of a gradient goes to a comm stream, which doubles it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._comm_stream = CommStream("comm_stream", CUDA, threaded=False)
        self._flat = FlatBuffer(torch.zeros(sum(p.numel() for p in parameters), device=CUDA))
        self._events: list[torch.Event] = []
        self._hooks = []
        self.streams: set[int] = set()
        for p, part in zip(parameters, self._flat.buffer.split(parameters[0].numel()), strict=True):
            p.grad = part.view_as(p).data
            self._hooks.append(p.register_post_accumulate_grad_hook(self._written))

    def finish(self) -> None:
        self._comm_stream.submit(self._double, self._events)
        self._comm_stream.wait(10)
        for hook in self._hooks:
            hook.remove()

    def _double(self) -> None:
        self._flat.buffer.mul_(2)

    def _written(self, parameter: torch.Tensor) -> None:
        event = WRITTEN(self._flat.device)
        assert event is not None
        self._events.append(event)
        self.streams.add(torch.cuda.current_stream().cuda_stream)


def backward_on_streams(stages: list[Callable[..., Any]], x: torch.Tensor, pause: float) -> None:
    """Stage k runs forward, and so backward, on stream k; each is late by a sleep of its own."""
    parts = []
    for k, stage in enumerate(stages):
        with beside(torch.cuda.Stream()):
            parts.append(Late.apply(stage(x), pause * (k + 1)))  # type: ignore[no-untyped-call]
    cast("torch.Tensor", sum(part.sum() for part in parts)).backward()


class Late(torch.autograd.Function):
    """The identity, behind which backward is late."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pause: float) -> torch.Tensor:
        ctx.pause = pause
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.pause:
            sleep(ctx.pause)
        return gradients[0], None


class Scale(nn.Module):
    """One parameter, elementwise: its gradient is exact."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, device=CUDA))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x * self.scale + 1.0).relu()


def test_hooks_of_several_streams_are_ordered_with_their_comm_stream() -> None:
    with OrderChecker(virtual_streams=False) as checker:
        stages = [Scale(k + 1.0) for k in range(3)]
        reducer = Reducer([stage.weight for stage in stages])
        backward_on_streams(list(stages), torch.full((1024,), 2.0, device=CUDA), 0.0)
        reducer.finish()
        found = [gradients(stage) for stage in stages]
        del reducer
    assert (found, checker.violations) == ([{4.0}, {8.0}, {12.0}], [])


@pytest.mark.filterwarnings("default")  # whatever torch's compiler warns of is not ours
@pytest.mark.timeout(300)
def test_compiled_stages_whose_hooks_run_on_several_streams_have_right_gradients() -> None:
    """DeepSpeed#8061's setting. The dispatcher does not see compiled kernels: numbers must tell."""
    backend = "inductor" if find_spec("triton") and shutil.which("gcc") else "aot_eager"
    stages = [Scale(k + 1.0) for k in range(3)]
    compiled = [torch.compile(stage, backend=backend) for stage in stages]
    x = torch.full((1024,), 2.0, device=CUDA)

    def step(pause: float) -> tuple[list[set[float]], int]:
        reducer = Reducer([stage.weight for stage in stages])
        torch.cuda.synchronize()
        backward_on_streams(compiled, x, pause)
        reducer.finish()
        return [gradients(stage) for stage in stages], len(reducer.streams)

    right = [{4.0}, {8.0}, {12.0}], 3
    assert step(0.0) == right  # compiles, and loads kernels
    assert step(1.0) == right
    with sites["comm-stream.producers"].off():
        assert step(1.0) != right


def gradients(stage: Scale) -> set[float]:
    """Returns the different values of a gradient."""
    assert stage.weight.grad is not None
    return set(stage.weight.grad.tolist())
