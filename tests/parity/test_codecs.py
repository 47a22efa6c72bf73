"""Codecs: a pipeline computes what one process does that encodes and decodes between its stages.

The bits are equal: encoding is the same function there, and its backward passes the gradient
straight through, encoded with the codec of gradients and the error of the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, codecs
from pipegrad.plugins.codec import Carried
from tests.support.pipeline.schedulers import (
    Report,
    digest,
    finder,
    greedy,
    named,
    run_each,
    topology,
)
from tests.support.worlds import smoked

WIDTH, ROWS, MICROBATCHES, STEPS = 32, 3, 4, 4
Places = tuple[int, ...]
Errors = dict[tuple[str, int], Tensor]


class Block(nn.Module):
    """A stage that makes a value, and the first one a skip for all later stages, too."""

    def __init__(self, stage: int, dtype: torch.dtype, *, has_skip: bool) -> None:
        super().__init__()
        self.makes_skip = has_skip and stage == 0
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        out = torch.tanh(self.linear(x))
        if self.makes_skip:
            return out, 2 * out.sin()
        return out if skip is None else out + skip


@dataclass(frozen=True)
class Case:
    """A choice of codecs, on a schedule.

    Attributes:
        name: The codecs, in words.
        places: For each stage its rank.
        late: As `greedy`.
        dtype: Of parameters and values.
    """

    name: str
    places: Places
    late: int = -1
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.name} {self.places} {self.late} {self.dtype}"

    @property
    def num_ranks(self) -> int:
        return max(self.places) + 1

    @property
    def has_skip(self) -> bool:
        """Whether later stages take a skip: its gradients are two terms, so their order is free."""
        return len(self.places) == 3

    def ends(self, stage: int) -> tuple[list[str], list[str]]:
        """Returns the inputs and the outputs of a stage."""
        skip = ["skip"] * self.has_skip
        return ["x", *(skip if stage else [])], ["x", *([] if stage else skip)]


CHOICES: dict[str, Any] = {
    **{name: name for name in ("bf16", "fp8", "int8", "topk")},
    "int8 without feedback": {"name": "int8", "feedback": False},
    "both": {"activations": "int8", "gradients": {"name": "topk", "fraction": 0.2}},
    "gradients alone": {"gradients": "fp8"},
    "one hop": {"0-1": "int8"},
    "hops": {(2, 1): {"activations": "bf16"}, "0-1": {"gradients": "int8"}, "0-2": "fp8"},
}
CASES = [
    *(Case(name, (0, 1, 2)) for name in CHOICES),
    *(Case(name, (0, 1, 2, 0, 1, 2)) for name in ("int8", "both")),
    *(Case(name, (0, 1, 2, 2, 1, 0), 1) for name in ("int8", "one hop")),
    *(
        Case(name, (0, 1, 2), dtype=dtype)
        for name in ("int8", "topk")
        for dtype in (torch.float64, torch.float16)
    ),
]


class Hop(NamedTuple):
    """Where a value crosses: its name there, the microbatch, codecs, and errors of gradients."""

    name: str
    microbatch: int
    spec: dict[str, Any]
    errors: Errors


class Crossed(torch.autograd.Function):
    """A hop in one process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hop: Hop) -> Tensor:
        ctx.hop = hop
        return coded(x, hop.spec.get("activations"), "activations")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), hop = gradients, ctx.hop
        spec = hop.spec.get("gradients")
        if spec is None or not codecs.resolve(spec).plugin.feedback:
            return coded(gradient, spec, "gradients"), None
        key = hop.name, hop.microbatch
        total = gradient + hop.errors.get(key, torch.zeros_like(gradient))
        decoded = coded(total, spec, "gradients")
        hop.errors[key] = total - decoded
        return decoded, None


def coded(x: Tensor, spec: Any, carried: Carried) -> Tensor:
    """Returns what the other end of a hop has of a tensor."""
    if spec is None:
        return x.clone()
    codec = codecs.resolve(spec).plugin
    nbytes = codec.nbytes(tuple(x.shape), x.dtype)
    if nbytes >= x.nbytes:
        return x.clone()
    message, decoded = torch.empty(nbytes, dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, message, carried)
    codec.decode(message, decoded, carried)
    return decoded


def spec_of(choice: Any, source: int, target: int) -> dict[str, Any]:
    """Returns the codecs of a hop, by what they carry."""
    if isinstance(choice, dict) and not {"name", "activations", "gradients"} & set(choice):
        low, high = min(source, target), max(source, target)
        found = [v for k, v in choice.items() if k in (f"{low}-{high}", (low, high), (high, low))]
        choice = found[0] if found else {}
    if isinstance(choice, dict) and "name" not in choice:
        return choice
    return dict.fromkeys(codecs.resolve(choice).plugin.carries, choice)


def alone(
    case: Case, blocks: Sequence[Block], x: Tensor, microbatch: int, errors: Errors
) -> Tensor:
    """Returns what the last stage makes, in one process.

    A value crosses to each other rank once. Stages of one rank share what arrived.
    """
    places, choice = case.places, CHOICES[case.name]
    arrived: dict[tuple[str, int], Tensor] = {}

    def take(name: str, value: Tensor, source: int, stage: int) -> Tensor:
        target = places[stage]
        if source == target:
            return value
        key = name, target
        if key not in arrived:
            spec = spec_of(choice, source, target)
            hop = Hop(f"{name} {key}", microbatch, spec, errors)
            arrived[key] = Crossed.apply(value, hop)  # type: ignore[no-untyped-call]
        return arrived[key]

    made = blocks[0](x)
    out, skip = made if case.has_skip else (made, None)
    for stage in range(1, len(places)):
        value = take(f"x{stage}", out, places[stage - 1], stage)
        out = blocks[stage](value, None if skip is None else take("skip", skip, places[0], stage))
    assert isinstance(out, Tensor)
    return out


def made(case: Case) -> list[Block]:
    torch.manual_seed(7)
    return [Block(s, case.dtype, has_skip=case.has_skip) for s in range(len(case.places))]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).float().square().mean()


def run_case(case: Case) -> Report:
    """Trains some steps and evaluates, on every rank. `bits` has wrong names."""
    at, report = topology(case.num_ranks), Report()
    own, true = made(case), made(case)
    stages = [Stage(own[s], s, *case.ends(s)) for s in at.with_stages(case.places).local_stages]
    scheduler = Scheduler(
        stages,
        at,
        schedule=greedy(case.places, MICROBATCHES, late=case.late),
        loss_fn=loss_of,
        codecs=CHOICES[case.name],
    )
    errors: Errors = {}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, target = torch.randn(2, ROWS * MICROBATCHES, WIDTH, generator=generator).to(case.dtype)
        loss = scheduler.step(x, target=target).loss
        expected = 0.0
        parts = zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        for microbatch, (part, wanted) in enumerate(parts):
            one = loss_of(alone(case, true, part, microbatch, errors), wanted) / MICROBATCHES
            one.backward()
            expected += float(one)
        report.losses.append(abs(float(loss) - expected) / expected)
        wrong = {
            f"step {step} {stage.index}.{name}"
            for stage in stages
            for name, p in named([stage]).items()
            if digest(p.grad) != digest(dict(true[stage.index].named_parameters())[name].grad)
        }
        report.bits.append(wrong)
        for parameter in (p for block in (*own, *true) for p in block.parameters()):
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad)
            parameter.grad = None
    x, target = torch.randn(2, ROWS * MICROBATCHES, WIDTH).to(case.dtype)
    result = scheduler.evaluate(x, target=target)
    with torch.no_grad():
        outputs = [alone(case, true, part, 0, {}) for part in x.chunk(MICROBATCHES)]
    for out in result.outputs:
        report.bits.append(set() if torch.equal(out, torch.cat(outputs)) else {"evaluation"})
    scheduler.close()
    return report


def run_cases(names: list[str]) -> list[Report]:
    return run_each(run_case, CASES, names)


found = finder(CASES, run_cases)


@pytest.mark.parametrize("case", smoked(CASES, CASES[2]))
def test_a_pipeline_has_the_bits_of_one_process_that_encodes(case: Case) -> None:
    for rank, report in enumerate(found(case)):
        assert set().union(*report.bits) == set(), f"rank {rank}"
        # Losses are sums of microbatches, in another order.
        assert max(report.losses) <= 4 * torch.finfo(torch.float32).eps


def test_the_reference_encodes_something() -> None:
    """Otherwise equal bits would prove nothing."""
    x = torch.randn(ROWS, WIDTH)
    for name in ("bf16", "fp8", "int8", "topk"):
        assert not torch.equal(coded(x, name, "gradients"), x)
