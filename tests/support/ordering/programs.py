"""Small programs that need every wait, record and hold of the gradient layer, on two gloo ranks.

Each yields what it found, plain values, under a checker that has been told nothing of pipegrad.
They are tests (`test_order.py`), and what the mutation gate kills its mutants with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from pipegrad import GradientSync, Scheduler, Stage, Topology
from pipegrad.comm.comm_stream import CommStream
from pipegrad.comm.process_groups import Groups
from pipegrad.comm.sync_points import sites
from pipegrad.gradients.bucket_memory import WRITTEN, FlatBuffer
from pipegrad.observe import links
from pipegrad.observe.links import measure_hops, measure_links
from pipegrad.observe.recording import read_clock
from pipegrad.pipeline import edges
from pipegrad.pipeline.edges import Edges
from pipegrad.schedules.program.program import Channel
from pipegrad.testing import OrderChecker
from tests.support.gpu import programs
from tests.support.gradients.cases import give, grads, rank, replicated, stage, tied
from tests.support.ordering.producers import CPU, Producers

Run = Callable[[OrderChecker], Any]
Result = tuple[Any, list[str]]  # what the program returned, and the violations


@dataclass(frozen=True)
class Program:
    """A function of a checker; what it returns, the same on all ranks; how order is modelled."""

    run: Run
    expected: Any
    virtual_streams: bool = True


PROGRAMS: dict[str, Program] = {}


def program(expected: Any, *variants: str) -> Callable[[Run], Run]:
    """Makes a function a program, and in other variants further ones.

    ``inline``: the host runs ahead of its comm streams, as with NCCL; messages are those of gloo.
    ``on_host``: there are no streams at all. Threads order a gloo job on CPU.
    """

    def add(function: Run) -> Run:
        name = function.__name__
        PROGRAMS[name] = Program(function, expected)
        if "inline" in variants:
            PROGRAMS[f"{name}_inline"] = Program(partial(ahead, function), expected)
        if "on_host" in variants:
            PROGRAMS[f"{name}_on_host"] = Program(function, expected, virtual_streams=False)
        return function

    return add


def ahead(function: Run, checker: OrderChecker) -> Any:
    with mock.patch.object(Groups, "block_host", return_value=False):
        return function(checker)


def run_programs(names: Sequence[str], mutant: str | None = None) -> dict[str, Result]:
    """Runs programs, with a site switched off. Runs on every rank."""
    found: dict[str, Result] = {}
    for name in names:
        this = PROGRAMS[name]
        with OrderChecker(virtual_streams=this.virtual_streams) as checker:
            if mutant is None:
                value = this.run(checker)
            else:
                with off(mutant):
                    value = this.run(checker)
        found[name] = value, list(map(str, checker.violations))
    return found


@contextmanager
def off(mutant: str) -> Iterator[None]:
    """Switches off a site; of ``"site in function"`` what that function, or what it calls, uses."""
    name, _, function = mutant.partition(" in ")
    site = sites[name]
    if not function:
        with site.off():
            yield
        return
    call = type(site).__call__

    def unless_there(called: object, *given: Any) -> Any:
        there = called is site and function in running()
        return None if there else call(called, *given)

    with mock.patch.object(type(site), "__call__", unless_there):
        yield


def running() -> set[str]:
    """Returns the qualified names of the functions that this thread is in."""
    names = set[str]()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        names.add(frame.f_code.co_qualname)
        frame = frame.f_back
    return names


def wrong(name: str, result: Result) -> str | None:
    """Returns what is wrong with the result of a program, if anything."""
    value, violations = result
    if violations:
        return violations[0]
    expected = PROGRAMS[name].expected
    return None if value == expected else f"{value} instead of {expected}"


def model() -> nn.Module:
    """Parameters that share buckets, one that fills its own, one that nobody uses."""
    large = torch.zeros(64)
    return stage(a=(3,), b=(2,), large=large, part=(5,), own=(2,), unused=(4,))


def used(step: int) -> dict[str, float]:
    """The gradients of this rank: means over two ranks come out whole."""
    mine = 2.0 * (rank() + 1) + step
    given = {"a": mine, "b": 3 * mine, "large": mine, "own": mine}
    return given if rank() else given | {"part": 8.0}


def means(step: int) -> dict[str, Any]:
    whole = 3.0 + step
    return {
        "a": [whole] * 3,
        "b": [3 * whole] * 2,
        "large": [whole] * 64,
        "part": [4.0] * 5,
        "own": [whole] * 2,
        "unused": None,
    }


def steps(
    checker: OrderChecker, sync: GradientSync, module: nn.Module, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Steps of one backward, with as many producers as the step says; then closes."""
    producers = Producers(checker, list(module.parameters()))
    found = []
    for step, number in enumerate(numbers):
        producers.number = number
        sync.prepare()
        sync.stage_last_backward(0)
        with producers.backward():
            total = torch.zeros(())
            for name, gradient in used(step).items():
                total = total + (module.get_parameter(name) * gradient).sum()
            total.backward()
        sync.stage_final(0)
        sync.finish()
        sync.clip_grad_norm_(1e9)
        found.append(grads(module))
        module.zero_grad()
    sync.close()
    return found


NUMBERS = (1, 2, 3, 3)  # of producers, in each step


@program([means(step) for step in range(4)])
def viewed(checker: OrderChecker) -> Any:
    """Autograd writes into buckets, on several streams; comm streams are threads, as with gloo."""
    module = model()
    return steps(checker, replicated(module, bucket_bytes=256, comm_streams=2), module, NUMBERS)


@program([{"a": [3.0 + step] * 3, "b": [9.0 + 3 * step] * 2} for step in range(3)])
def wandering(checker: OrderChecker) -> Any:
    """Every verb on a stream of its own, which waits for that of `prepare`.

    Everything is used everywhere, else the host would wait for a flag and order all behind it.
    """
    module = stage(a=(3,), b=(2,))
    sync = replicated(module, bucket_bytes=256, reduce_dtype=torch.float64)
    made = checker.record(CPU)  # parameters are the caller's to order, and so are gradients
    found = []
    for step in range(3):
        with checker.on(f"prepare {step}"):
            sync.prepare()
            zeroed = checker.record(CPU)
        with checker.on(f"backward {step}"):
            checker.wait(made, CPU)
            checker.wait(zeroed, CPU)
            give(module, a=used(step)["a"], b=used(step)["b"])
            sync.stage_final(0)
        with checker.on(f"finish {step}"):
            sync.finish()
            found.append(grads(module))
        module.zero_grad()
    sync.close()
    return found


# Gradients that are placed elsewhere, and parameters that come back.

OWNED = {"name": "pipeline-shared", "placement": "owner"}
EXCHANGED = {"name": "pipeline-shared", "exchange": "asymmetric"}


def updated(gradients: Sequence[Mapping[str, float]]) -> list[dict[str, list[float]]]:
    """Returns the value of parameters before each step and after the last."""
    values, found = dict.fromkeys(gradients[0], 0.0), []
    for step in ({}, *gradients):
        values = {name: value - step.get(name, 0.0) for name, value in values.items()}
        found.append({name: [value] for name, value in values.items()})
    return found


def trained(
    checker: OrderChecker,
    sync: GradientSync,
    module: nn.Module,
    given: Callable[[int], Mapping[str, float]],
    numbers: Sequence[int],
    *,
    backwards: int = 1,
) -> list[dict[str, Any]]:
    """Steps of an optimizer, whose parameters are on their way; returns what each forward finds.

    Somebody also reads all parameters behind the optimizer's step: none may arrive before. The
    gradient of a step comes in as many parts as there are backwards.
    """
    stage = sync.topology.local_stages[0]
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    producers = Producers(checker, list(module.parameters()))
    found = []
    for step, number in enumerate(numbers):
        producers.number = number
        optimizer.zero_grad()
        sync.prepare()
        sync.stage_first_use(stage)
        found.append({name: p.detach() + 0 for name, p in module.named_parameters()})
        for number_left in reversed(range(backwards)):
            if not number_left:
                sync.stage_last_backward(stage)
            with producers.backward():
                total = torch.zeros(())
                for name, gradient in given(step).items():
                    total = total + (module.get_parameter(name) * (gradient / backwards)).sum()
                total.backward()
        sync.stage_final(stage)
        sync.finish()
        sync.clip_grad_norm_(1e9)
        optimizer.step()
        for parameter in module.parameters():
            parameter.detach().sum()  # for a log, say
        sync.publish()
    sync.wait_parameters()
    found.append({name: p.detach() + 0 for name, p in module.named_parameters()})
    sync.close()
    return [{name: p.unique().tolist() for name, p in one.items()} for one in found]


def parts(step: int) -> dict[str, float]:
    return {"w": rank() + 1.0, "v": rank() + 1.0 + step}


ROWS = updated(
    [{n: values[0] if values else 0.0 for n, values in means(step).items()} for step in range(4)]
)
PASSED = updated([{"w": 3.0, "v": 3.0 + 2 * step} for step in range(4)])


@program(ROWS, "inline", "on_host")
def rows(checker: OrderChecker) -> Any:
    """Each rank steps rows; comm streams are threads, as with gloo."""
    module = model()
    sync = replicated(module, bucket_bytes=256, comm_streams=2, handlers=["sharded"])
    return trained(checker, sync, module, used, NUMBERS)


@program(ROWS)
def rows_of_two_backwards(checker: OrderChecker) -> Any:
    """Producers of a first backward add to a bucket, and others in the last one."""
    module = model()
    sync = replicated(module, bucket_bytes=256, handlers=["sharded"])
    return trained(checker, sync, module, used, NUMBERS, backwards=2)


@program(ROWS)
def rows_wide(checker: OrderChecker) -> Any:
    """Gradients of bfloat16 travel, and are added in float32 when they have arrived."""
    module = model().to(torch.bfloat16)
    sync = replicated(module, bucket_bytes=256, handlers=["sharded"], sum_dtype=torch.float32)
    return trained(checker, sync, module, used, NUMBERS)


FOUR = "abcd"


@program(updated([dict.fromkeys(FOUR, 3.0 + step) for step in range(4)]))
def rows_that_go(checker: OrderChecker) -> Any:
    """Buckets are reduced, and their memory goes, while other producers write the next ones."""
    module = stage(**dict.fromkeys(FOUR, (64,)))
    with mock.patch.object(Groups, "block_host", return_value=False):
        sync = replicated(module, bucket_bytes=256, handlers=["sharded"])
    return trained(
        checker, sync, module, lambda step: dict.fromkeys(FOUR, used(step)["a"]), NUMBERS
    )


@program(programs.EXPECTED[programs.freed])
def freed(checker: OrderChecker) -> Any:
    """A gradient is copied on another stream than the one that made it, and freed at once."""
    return programs.freed(programs.Virtual(checker), {})


@program(PASSED)
def passed(checker: OrderChecker) -> Any:
    """The first rank steps: gradients are passed down to it, parameters up from it."""
    module = stage(w=(4,), v=(4,))
    sync = tied(module, "w", "v", bucket_bytes=0, handlers=[OWNED])
    return trained(checker, sync, module, parts, NUMBERS)


@program(None)
def given_up(checker: OrderChecker) -> Any:
    """A step fails, nobody waits for what was launched, and the buffers are freed."""
    del checker
    buffer = FlatBuffer(torch.zeros(4))
    comm_stream = CommStream("given up", CPU, threaded=False)
    event = WRITTEN(buffer.device)
    assert event is not None
    comm_stream.submit(lambda tensor=buffer.buffer: tensor.mul_(2), [event])  # type: ignore[misc]
    comm_stream.close()
    del buffer, comm_stream
    torch.zeros(4)  # in the same memory, perhaps


class Late:
    """A message that is sent when it is waited for, or as soon as posted; kept until then."""

    def __init__(self, post: Callable[[], Any], *, lazy: bool) -> None:
        self.post = post
        self.work = None if lazy else post()
        self.done = False

    def wait(self) -> None:
        if not self.done:
            self.done = True
            (self.work or self.post()).wait()


@program({"w": [3.0] * 4})
def met_late(checker: OrderChecker) -> Any:
    """What the first rank sends back leaves when it is waited for: the sync is closed then."""
    del checker
    module, send = stage(w=(4,)), dist.isend

    def isend(tensor: torch.Tensor, **options: Any) -> Late:
        return Late(lambda: send(tensor, **options), lazy=rank() == 0)

    with mock.patch.object(dist, "isend", isend):
        sync = tied(module, "w", handlers=[EXCHANGED])
        sync.prepare()
        give(module, w=rank() + 1.0)
        sync.stage_final(rank())
        sync.finish()
        sync.close()
    return grads(module)


PIPELINED = [[24.0, 12.0, 12.0], [48.0, 24.0, 24.0]]  # the loss, the gradient of a weight


@program(PIPELINED)
def transfers(checker: OrderChecker) -> Any:
    """A pipeline: values and their gradients are on their way while both stages compute."""
    del checker
    return pipeline()


LENGTHS = (1, 90, 5)
GROWING = [[16.0 * n * n, 8.0 * n * n, 8.0 * n * n] for n in LENGTHS]


@program(GROWING)
def lengths(checker: OrderChecker) -> Any:
    """A pipeline whose values are longer and shorter than before."""
    del checker
    return pipeline(LENGTHS)


@program(GROWING)
def lengths_without_tags(checker: OrderChecker) -> Any:
    """As between other devices than processors: headers go beside."""
    del checker
    with mock.patch.object(edges, "has_tags", return_value=False):
        return pipeline(LENGTHS)


@program(GROWING)
def headers(checker: OrderChecker) -> Any:
    """What is read of a header that nobody has waited for is right all the same: no rank hangs."""

    take = edges.Inbox.wait

    def late(inbox: edges.Inbox) -> list[int]:
        head = inbox.posted[0][0]
        take(inbox)
        head.sum()  # `tolist` is no operator, so the checker does not see it
        while not head[0]:
            pass
        return head.tolist()

    with mock.patch.object(edges.Inbox, "wait", late):
        return lengths_without_tags(checker)


@program(True)
def measured(checker: OrderChecker) -> Any:
    """Messages there and back."""
    del checker
    topology = Topology.create(pipeline=2)
    (seconds,) = measure_hops(topology, num_bytes=64, repeats=2)
    torch.zeros(64)  # in the memory of a message, perhaps
    return seconds > 0


@program(True)
def examined(checker: OrderChecker) -> Any:
    """Clocks and links, as the doctor looks at them."""
    del checker
    topology = Topology.create(pipeline=2)
    both = Edges([Channel(0, "F", 0, 1), Channel(0, "B", 1, 0)], topology, CPU)
    me = topology.coordinate("pp")
    with mock.patch.object(links, "SIZES", (64,)):
        reading = read_clock(both, me, 2)
        torch.zeros(1, dtype=torch.float64)  # in the memory of a message, perhaps
        found = measure_links(
            both,
            rank=me,
            ranks=topology.ranks,
            pairs=[(0, 1), (1, 0)],
            device=CPU,
        )
        torch.zeros(64)
    both.close()
    return reading.seconds > 0 and all(each.latency_seconds > 0 for each in found)


@program(True)
def wired(checker: OrderChecker) -> Any:
    """Messages of links, one by one."""
    del checker
    both = Edges([Channel(0, "F", 0, 1), Channel(0, "B", 1, 0)], Topology.create(pipeline=2), CPU)
    wires = links.Wires(both, rank(), CPU)
    for num_bytes in (0, 64):
        wires.pass_on(0, 1, num_bytes)
        torch.zeros(num_bytes or 1, dtype=torch.uint8)  # in the memory of the message, perhaps
    both.close()
    return True


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * self.weight


def pipeline(lengths: Sequence[int] = (0, 0)) -> list[list[float]]:
    """Steps of four microbatches; the gradient of either weight is the sum of the inputs.

    Args:
        lengths: Of the values of each step, all of whose elements are the length then.
    """
    stage = Scale()
    scheduler = Scheduler(
        [Stage(stage, rank())],
        Topology.create(pipeline=2),
        schedule="1f1b",
        num_microbatches=4,
        loss_fn=lambda out, _: out.sum(),
        handlers=["noop"],
    )
    found = []
    for step, length in enumerate(lengths, 1):
        given = torch.arange(8.0).reshape(4, 2).floor_divide(2).mul_(2).mul_(step)
        if length:
            given = torch.full((8, length, 2), float(length))
        result = scheduler.step(given, target=given, loss_divisor=1.0)
        assert stage.weight.grad is not None
        found.append([float(result.loss), *stage.weight.grad.tolist()])
        stage.weight.grad = None
    scheduler.close()
    return found
