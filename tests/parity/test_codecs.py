"""Codecs: a pipeline computes what one process does that encodes and decodes between its stages.

The bits are equal: encoding is the same function there, and its backward passes the gradient
straight through, encoded with the codec of gradients and the error of the one before it. Replicas
have one batch, so that their means are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, codecs
from pipegrad.plugins.codec import Carried
from tests.support.pipeline.schedulers import digest, greedy, named, topology
from tests.support.pipeline.trained import Seen, backward, checked, on_ranks, once, train

WIDTH, ROWS, MICROBATCHES, STEPS = 32, 3, 4, 4
Places = tuple[int, ...]
Errors = dict[tuple[str, int], Tensor]  # of gradients, by hop and microbatch


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
    """A choice of codecs, and for each stage its rank; late as in `greedy`."""

    name: str
    places: Places
    late: int = -1
    dtype: torch.dtype = torch.float32
    way: str = ""  # of data parallelism, over two replicas

    def __str__(self) -> str:
        told = f"{self.name} {self.places} {self.late} {self.dtype}"
        return f"{told} {self.way}" if self.way else told

    @property
    def pipeline(self) -> int:
        return max(self.places) + 1

    @property
    def num_ranks(self) -> int:
        return self.pipeline * (2 if self.way else 1)

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
WAYS: dict[str, list[Any]] = {
    "": ["pipeline-shared"],
    "data-parallel": ["data-parallel"],
    "sharded": ["sharded"],
    "owned": ["owned"],
    "diloco": [{"name": "diloco", "every": STEPS + 1}],  # they do not meet
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
    *(Case(name, (0, 1), way=way) for name in ("int8", "both") for way in WAYS if way),
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


def batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, ROWS * MICROBATCHES, WIDTH, generator=generator).to(case.dtype)
    return x, target


@once
def truth(case: Case) -> tuple[Seen, Tensor]:
    """Trains in one process, and evaluates."""
    blocks, errors = nn.ModuleList(made(case)), Errors()
    every: Any = blocks

    def step(number: int, _: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        parts = zip(*(whole.chunk(MICROBATCHES) for whole in batch(case, number)), strict=True)
        for microbatch, (part, wanted) in enumerate(parts):
            loss = loss_of(alone(case, every, part, microbatch, errors), wanted)
            total += backward(loss).detach() / MICROBATCHES
        for parameter in blocks.parameters():
            if parameter.grad is not None:
                parameter.grad /= MICROBATCHES
        return total

    optimizer = torch.optim.SGD(blocks.parameters(), lr=1.0)
    seen = train(step, lambda: dict(blocks.named_parameters()), optimizer=optimizer, steps=STEPS)
    with torch.no_grad():
        parts = batch(case, STEPS)[0].chunk(MICROBATCHES)
        return seen, torch.cat([alone(case, every, part, 0, {}) for part in parts])


@pytest.mark.parametrize("case", on_ranks(CASES))
@checked(CASES[2], Case("both", (0, 1, 2, 0, 1, 2)), Case("int8", (0, 1), way="sharded"))
def test_a_pipeline_has_the_bits_of_one_process_that_encodes(case: Case) -> None:
    at, blocks = topology(case.pipeline), made(case)
    stages = [Stage(blocks[s], s, *case.ends(s)) for s in at.with_stages(case.places).local_stages]
    scheduler = Scheduler(
        stages,
        at,
        schedule=greedy(case.places, MICROBATCHES, late=case.late),
        loss_fn=loss_of,
        codecs=CHOICES[case.name],
        handlers=WAYS[case.way],
    )
    held = {f"{stage.index}.{n}": p for stage in stages for n, p in named([stage]).items()}

    def step(number: int, _: int) -> Tensor:
        x, target = batch(case, number)
        return scheduler.step(x, target=target).loss

    optimizer = scheduler.optimizer(torch.optim.SGD, lr=1.0)
    gradients_of: dict[str, Any] = {} if case.way else held  # else they may be in shards
    sync = scheduler.sync
    seen = train(step, lambda: gradients_of, sync=sync, optimizer=optimizer, steps=STEPS)
    x, target = batch(case, STEPS)
    result = scheduler.evaluate(x, target=target)
    sync.wait_parameters()
    ends = {name: digest(parameter) for name, parameter in held.items()}
    scheduler.close()

    true, outputs = truth(replace(case, way=""))
    assert {name: digest(true.parameters[name]) for name in held} == ends
    for number, gradients in enumerate(seen.gradients):
        for name, gradient in gradients.items():
            assert digest(gradient) == digest(true.gradients[number][name]), (number, name)
    assert [torch.equal(out, outputs) for out in result.outputs] in ([], [True])
    assert bool(result.outputs) == (len(blocks) - 1 in {stage.index for stage in stages})
    # Losses are sums of microbatches, in another order.
    for loss, expected in zip(seen.losses, true.losses, strict=True):
        assert abs(loss - expected) / expected <= 4 * torch.finfo(torch.float32).eps


def test_the_reference_encodes_something() -> None:
    """Otherwise equal bits would prove nothing."""
    x = torch.randn(ROWS, WIDTH)
    for name in ("bf16", "fp8", "int8", "topk"):
        assert not torch.equal(coded(x, name, "gradients"), x)
