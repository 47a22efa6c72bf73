"""Counts the calls of pipegrad's functions in a step, and what a tied gradient passes."""

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import sixty_lines
import torch
from torch import Tensor, nn
from ways import FOUR, ONE, PLAIN_PYTHON, Case, Make

import pipegrad
import pipegrad_handlers
from pipegrad.testing import run_ranks

FOLDERS = tuple(str(Path(str(m.__file__)).parent) for m in (pipegrad, pipegrad_handlers))
FEW, MANY, SHAPE = 100, 300, (4, 2)  # parameters: their difference is that of parameters alone
STEP = 2  # the third: copies are compared in the first two, and what is kept is made


class Trace:
    """The calls of functions in some files, in order, by thread.

    It must be there before the threads are that it shall see.
    """

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self.by_thread = dict[int, list[CodeType]]()
        self._prefixes = prefixes
        self._is_on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Keeps calls inside ``with``."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self._is_on and event == "call" and code.co_filename.startswith(self._prefixes):
            self.by_thread.setdefault(threading.get_ident(), []).append(code)


def calls(make: Make, case: Case) -> Counter[CodeType]:
    """Returns how often each function is called in a step of this rank, in all its threads."""
    trace = Trace((*FOLDERS, str(sixty_lines.__file__)))
    module, step = make(case)
    for number in range(STEP + 1):
        module.zero_grad()
        if number < STEP:
            step()
        else:
            with trace.on():
                step()
    return Counter(code for codes in trace.by_thread.values() for code in codes)


def counted(
    makes: Mapping[str, Make], microbatches: int, number: int
) -> dict[str, tuple[int, int]]:
    """Returns, by way, the calls of a step, and the functions that are called once a parameter."""
    found = {}
    for name, make in makes.items():
        counts = calls(make, Case(number, SHAPE, microbatches))
        found[name] = counts.total(), sum(count >= number for count in counts.values())
    return found


def print_calls() -> None:
    """Prints the README's table of calls."""
    print(
        "| | calls a parameter | calls a step beside them | functions that each parameter calls |"
    )
    print("|---|---|---|---|")
    for makes, microbatches in ((ONE, 1), (FOUR, 4)):
        ours = {n: m for n, m in makes.items() if n == PLAIN_PYTHON or n.startswith("pipegrad")}
        few, many = (run_ranks(counted, 2, ours, microbatches, n)[0] for n in (FEW, MANY))
        for name in ours:
            slope = (many[name][0] - few[name][0]) / (MANY - FEW)
            print(f"| {name} | {slope:.1f} | {few[name][0] - slope * FEW:.0f} | {many[name][1]} |")


class Tied(nn.Module):
    """A stage that holds the tied weight and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        """Returns a loss."""
        return self.weight.sum()


def walk(placement: str) -> tuple[int, int, int]:
    """Returns how many functions and files a tied gradient passes, and the changes of file.

    From the first hook in backward to the end of ``optimizer.step``, in all threads of this rank.
    """
    trace, module = Trace(FOLDERS), Tied()
    topology = pipegrad.Topology.create(pipeline=2)
    stage = topology.coordinate(topology.pipeline)
    handler = {"name": "pipeline-shared", "placement": placement}
    sync = pipegrad.GradientSync({stage: module}, topology, tied=[["weight"]], handlers=[handler])
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.1)
    for number in range(STEP + 1):
        sync.prepare()
        sync.stage_first_use(stage)
        loss = module()
        with trace.on() if number == STEP else torch.enable_grad():
            loss.backward()
            sync.stage_final(stage)
            sync.finish()
            optimizer.step()
        optimizer.zero_grad()
    sync.wait_parameters()
    threads = trace.by_thread.values()
    passed = {code for codes in threads for code in codes}
    changes = sum(
        before.co_filename != after.co_filename
        for codes in threads
        for before, after in itertools.pairwise(codes)
    )
    return len(passed), len({code.co_filename for code in passed}), changes


def print_walks() -> None:
    """Prints the README's table of a tied gradient."""
    print("\n| placement, rank | functions | files | changes of file |\n|---|---|---|---|")
    for placement in ("owner", "replicate"):
        for rank, numbers in enumerate(run_ranks(walk, 2, placement)):
            print(f"| `{placement}`, {rank} | {' | '.join(map(str, numbers))} |")
