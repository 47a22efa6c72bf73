"""Random mixtures of placements under GradientSync have, to the bit, what one process has."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import GradientSync, ParameterRecord, Placement
from tests.support.gradients.cases import rank, stage
from tests.support.gradients.placements import (
    OWNER,
    REPLICATE,
    SHARD,
    By,
    compute,
    in_memory_order,
    mesh,
    stepped,
    update,
)
from tests.support.pairwise import everything
from tests.support.pipeline.trained import checked, copied
from tests.support.ranked import gathered
from tests.support.rounding import rounding


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Placements by dimension on a mesh; ``pp`` is over the two holders of a tie."""

    axes: Mapping[str, int]
    placed: Mapping[str, Placement]
    mean: str
    stages: tuple[int, ...] | None
    comm_streams: int
    bucket_bytes: int


PLACED = {"owner": OWNER, "shard": SHARD, "replicate": REPLICATE}
# By dimensions: meshes of how many ranks, and what is placed along each.
ALONG: dict[tuple[str, ...], tuple[tuple[int, ...], str]] = {
    ("dp",): ((2, 3, 4), "owner, shard"),
    ("pp",): ((2,), "owner, shard"),
    ("dp", "tp"): (
        (4,),
        "shard replicate, owner shard, replicate owner, shard shard, owner owner",
    ),
    ("pp", "dp"): (
        (4,),
        "owner shard, replicate shard, shard replicate, owner owner, replicate owner",
    ),
}


def drawn() -> Iterator[Any]:
    """Yields a random mixture for each placement; of a tie's stages either is the first."""
    chance = random.Random(7)
    for (axes, (sizes, rows)), again in itertools.product(ALONG.items(), range(NUM_DRAWN)):
        for num_ranks, row, turned in itertools.product(sizes, rows.split(", "), (False, True)):
            if turned and "pp" not in axes:
                continue
            exact = [axis for axis in axes if axis != "pp" and num_ranks != 3]
            mixture = Mixture(
                dict.fromkeys(axes, num_ranks if len(axes) == 1 else 2),
                {axis: PLACED[name] for axis, name in zip(axes, row.split(), strict=True)},
                mean=chance.choice(["", *exact]),
                stages=(1, 0) if turned else chance.choice([None, (0, 0)][: 2 - ("pp" in axes)]),
                comm_streams=chance.choice([1, 2, 3]),
                bucket_bytes=chance.choice([0, 256, 2**20]),
            )
            name = f"{num_ranks} ranks, {' '.join(axes)} {row}{' turned' * turned} {again}"
            yield pytest.param(mixture, id=name, marks=pytest.mark.ranks(num_ranks))


NUM_DRAWN = 8 if everything() else 1
CASES = [*drawn()]
STEPS = 2
NORMS = ((math.inf, 1.0), (math.inf, math.inf), (20.0, 2.0))  # the last one clips
SILENT, LONELY = "silent", "lonely"  # nobody contributes; only the last rank that holds it does


def model(at: int) -> nn.Module:
    """A stage: shapes, layouts and dtypes of every kind; ``tie`` is on both stages."""
    torch.manual_seed(at)
    image = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
    module = stage(
        a=torch.randn(5, 3), scalar=torch.randn(()), image=image, empty=(0, 3),
        big=torch.randn(67), wide=torch.randn(7, dtype=torch.float64),
        wave=torch.randn(3, dtype=torch.complex64), low=torch.randn(9).bfloat16(),
        silent=torch.randn(4), lonely=torch.randn(6),
        frozen=nn.Parameter(torch.randn(2), requires_grad=False),
    )  # fmt: skip
    torch.manual_seed(99)
    module.tie = nn.Parameter(torch.randn(11))
    return module


def contribution(like: torch.Tensor, key: str, at: int, number: int) -> torch.Tensor:
    """What a rank's stage adds to a gradient in a step: small integers, whose sums are exact."""
    made = torch.Generator().manual_seed(1000 * number + 100 * at + sum(map(ord, key)))
    shape, real = like.shape, torch.randint(-4, 5, like.shape, generator=made)
    imaginary = torch.randint(-4, 5, shape, generator=made) if like.is_complex() else 0
    values = real + 1j * imaginary if like.is_complex() else real
    return torch.empty_like(like.detach()).copy_(values)  # strided like it


def options_of(record: ParameterRecord) -> dict[str, Any]:
    return {"weight_decay": 0.0 if len(record.shape) < 2 else 0.1}


def backward(modules: Mapping[int, nn.Module], number: int) -> None:
    for at, module in modules.items():
        for name, p in module.named_parameters():
            last = rank() == torch.distributed.get_world_size() - 1
            if p.requires_grad and name != SILENT and (name != LONELY or last):
                # Tensor.backward of complex numbers asks for a real loss: the gradient, conjugated.
                given = contribution(p, f"{at}{name}", rank(), number)
                (p * given.conj()).sum().real.backward()


def live(sync: GradientSync) -> dict[str, nn.Parameter]:
    return {record.key: sync.parameter(record) for record in sync.records()}


class OneProcess:
    """The same model and the same contributions, summed here and stepped as a whole.

    Args:
        keys: Of all parameters, wherever they are.
        stages: For each rank its stages.
        divisor: Of the sums.
    """

    def __init__(self, keys: set[str], stages: list[tuple[int, ...]], divisor: int) -> None:
        self.stages, self.divisor = stages, divisor
        parts = [key.split(".") for key in sorted(keys)]
        wholes = {f"{home}.{name}": model(int(home)).get_parameter(name) for home, name in parts}
        self.parameters = {key: p for key, p in wholes.items() if p.requires_grad}
        groups = [
            {"params": [p], "weight_decay": 0.0 if p.dim() < 2 else 0.1}
            for p in self.parameters.values()
        ]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def gradients(self, number: int) -> dict[str, torch.Tensor]:
        """Key -> sum of all contributions, for every gradient that there is."""
        sums: dict[str, torch.Tensor] = {}
        for at, stages in enumerate(self.stages):
            for where in stages:
                for key, p in self.parameters.items():
                    home, name = key.split(".")
                    if name == SILENT or (int(home) != where and name != "tie"):
                        continue
                    if name != LONELY or at == len(self.stages) - 1:
                        given = contribution(p, f"{where}{name}", at, number) / self.divisor
                        sums[key] = sums[key] + given if key in sums else given
        return sums

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for key, p in self.parameters.items():
            p.grad = gradients.get(key)
        most, kind = NORMS[-1]
        factor = torch.tensor(most / (norm(gradients, kind) + 1e-6)).clamp(max=1.0)
        for gradient in gradients.values():
            gradient.mul_(factor.to(gradient.dtype))
        self.optimizer.step()


def norm(gradients: Mapping[str, torch.Tensor], kind: float) -> float:
    whole = [g.to(torch.complex128).flatten() for g in gradients.values()]
    return float(torch.linalg.vector_norm(torch.cat(whole), kind))


def assert_gradients(
    mixture: Mixture, sync: GradientSync, gradients: Mapping[str, torch.Tensor]
) -> None:
    """Asserts what this rank steps, what it has not, the norms, and that nothing is missing."""
    mine = stepped(sync)
    held = {key: p.grad is None for key, p in live(sync).items()}
    norms = [sync.clip_grad_norm_(most, kind).item() for most, kind in NORMS]
    assert gathered(norms) == [norms] * torch.distributed.get_world_size()
    true = [norm(gradients, kind) for _, kind in NORMS]
    assert norms == pytest.approx(true, rel=rounding(200))
    spans = dict[str, tuple[int, int]]()
    for key, (begin, gradient) in mine.items():
        if key not in gradients:
            assert gradient is None, key
            continue
        part = in_memory_order(gradient)
        spans[key] = begin, begin + part.numel()
        assert torch.equal(part, in_memory_order(gradients[key])[slice(*spans[key])]), key
    for key, is_none in held.items():
        has_whole = key in mine and key in gradients and SHARD not in placed(mixture, key)
        assert is_none == (not has_whole), key
    everywhere = gathered(spans)
    for key, gradient in gradients.items():
        seen = {i for some in everywhere if key in some for i in range(*some[key])}
        assert seen == {*range(gradient.numel())}, key


def placed(mixture: Mixture, key: str) -> set[Placement]:
    tied = key.endswith("tie") and mixture.axes.get("pp", 1) > 1
    return {p for axis, p in mixture.placed.items() if axis != "pp" or tied}


@pytest.mark.parametrize("mixture", CASES)
@checked(*(case.values[0] for case in CASES[::9]))
def test_any_mixture_trains_like_one_process(mixture: Mixture) -> None:
    """Of ``empty`` no largest gradient is known: asked for one, every rank but its own hung.

    Turned, an owner of the later stage passed its rows on before it had got the others'.
    """
    topology = mesh(**mixture.axes).with_stages(mixture.stages or range(mixture.axes.get("pp", 1)))
    modules = {at: model(at) for at in topology.local_stages}
    handlers = [
        By(axis, placed, "mean" if axis == mixture.mean else "sum")
        for axis, placed in mixture.placed.items()
    ]
    sync = GradientSync(
        modules,
        topology,
        tied=[["tie"]] if topology.num_stages > 1 else (),
        handlers=handlers,
        comm_streams=mixture.comm_streams,
        bucket_bytes=mixture.bucket_bytes,
    )
    optimizer = torch.optim.SGD(sync.optimizer_parameters(options_of), lr=0.1, momentum=0.9)
    begun = copied(live(sync))
    keys, stages = set().union(*gathered({*begun})), gathered(topology.local_stages)
    whole = OneProcess(keys, stages, mixture.axes.get(mixture.mean, 1))
    gradients: Mapping[str, torch.Tensor] = {}
    for number in range(STEPS):
        compute(sync, partial(backward, modules, number))
        gradients = whole.gradients(number)
        assert_gradients(mixture, sync, gradients)
        update(sync, optimizer)
        sync.check_replicas()
        whole.step(gradients)
    sync.wait_parameters()
    for key, value in copied(live(sync)).items():
        assert value.stride() == begun[key].stride()
        if key in gradients:
            low = value.dtype == torch.bfloat16  # an eps of it: the last place is another
            exact = 2 * torch.finfo(value.dtype).eps if low else rounding(STEPS * 4)
            expected = whole.parameters[key].detach()
            torch.testing.assert_close(value, expected, rtol=exact, atol=exact)
            assert value.numel() == 0 or not torch.equal(value, begun[key])
        else:  # neither weight decay nor momentum touch it
            assert torch.equal(value, begun[key])
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert sorted(decays) == [0.0, 0.1]
    assert gathered(decays) == [decays] * len(stages)
    sync.close()
