"""Any mixture of placements on real ranks, trained for two steps, against one process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import GradientSync, ParameterRecord, Placement
from tests.support.gradients.cases import outcome, rank, stage
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
from tests.support.pipeline.trained import on_first
from tests.support.rounding import rounding


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Placements by dimension on a mesh; ``pp`` is over the two holders of a tie."""

    axes: Mapping[str, int]
    placed: Mapping[str, Placement]
    mean: str = ""
    stages: tuple[int, ...] | None = None
    comm_streams: int = 2
    bucket_bytes: int = 256


MIXTURES = {
    2: {
        "owner": Mixture({"dp": 2}, {"dp": OWNER}, mean="dp"),
        "owner of a tie": Mixture({"pp": 2}, {"pp": OWNER}, comm_streams=1),
        "owner of a later stage": Mixture({"pp": 2}, {"pp": OWNER}, stages=(1, 0)),
        "shard": Mixture({"dp": 2}, {"dp": SHARD}, mean="dp", comm_streams=3, bucket_bytes=0),
        "shards of a tie": Mixture({"pp": 2}, {"pp": SHARD}, bucket_bytes=2**20),
        "two stages a rank": Mixture({"dp": 2}, {"dp": SHARD}, stages=(0, 0)),
    },
    3: {
        "owner": Mixture({"dp": 3}, {"dp": OWNER}, comm_streams=3, bucket_bytes=0),
        "shard": Mixture({"dp": 3}, {"dp": SHARD}, comm_streams=1, bucket_bytes=2**20),
    },
    4: {
        "owner": Mixture({"dp": 4}, {"dp": OWNER}, mean="dp", comm_streams=1),
        "shard": Mixture({"dp": 4}, {"dp": SHARD}, mean="dp", bucket_bytes=2**20),
        "shard, replicate": Mixture({"dp": 2, "tp": 2}, {"dp": SHARD, "tp": REPLICATE}, mean="tp"),
        "owner, shard": Mixture({"dp": 2, "tp": 2}, {"dp": OWNER, "tp": SHARD}, comm_streams=3),
        "owner, replicate": Mixture({"dp": 2, "tp": 2}, {"dp": REPLICATE, "tp": OWNER}, mean="dp"),
        "shard, shard": Mixture({"dp": 2, "tp": 2}, {"dp": SHARD, "tp": SHARD}, mean="dp"),
        "owner, owner": Mixture({"dp": 2, "tp": 2}, {"dp": OWNER, "tp": OWNER}, bucket_bytes=0),
        "tie owner, shard": Mixture({"pp": 2, "dp": 2}, {"pp": OWNER, "dp": SHARD}, mean="dp"),
        "tie owner, shard, turned": Mixture(
            {"pp": 2, "dp": 2}, {"pp": OWNER, "dp": SHARD}, stages=(1, 0)
        ),
        "tie replicate, shard": Mixture({"pp": 2, "dp": 2}, {"pp": REPLICATE, "dp": SHARD}),
        "tie shard, replicate": Mixture({"pp": 2, "dp": 2}, {"pp": SHARD, "dp": REPLICATE}),
        "tie owner, owner": Mixture({"pp": 2, "dp": 2}, {"pp": OWNER, "dp": OWNER}),
        "tie owner, owner, turned": Mixture(
            {"pp": 2, "dp": 2}, {"pp": OWNER, "dp": OWNER}, stages=(1, 0)
        ),
        "tie replicate, owner": Mixture({"pp": 2, "dp": 2}, {"pp": REPLICATE, "dp": OWNER}),
    },
}
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


def train(mixture: Mixture) -> Any:
    """Returns what this rank stepped and has in the end."""
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
    report: dict[str, Any] = {"stages": topology.local_stages, "begun": wholes(sync), "steps": []}
    for number in range(STEPS):
        compute(sync, partial(backward, modules, number))
        held = {key: p.grad is None for key, p in live(sync).items()}
        sums = stepped(sync)
        norms = [sync.clip_grad_norm_(most, kind).item() for most, kind in NORMS]
        report["steps"].append((sums, held, norms))
        update(sync, optimizer)
        report["drift"] = outcome(sync.check_replicas)
    sync.wait_parameters()
    report["ended"] = wholes(sync)
    report["groups"] = [group["weight_decay"] for group in optimizer.param_groups]
    sync.close()
    return report


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


def wholes(sync: GradientSync) -> dict[str, torch.Tensor]:
    return {key: p.detach().clone() for key, p in live(sync).items()}


class OneProcess:
    """The same model and the same contributions, summed here and stepped as a whole."""

    def __init__(self, mixture: Mixture, found: list[Any]) -> None:
        self.found = found
        self.divisor = mixture.axes.get(mixture.mean, 1)
        begun = {key: whole for report in found for key, whole in report["begun"].items()}
        self.parameters = {
            key: nn.Parameter(p.clone()) for key, p in begun.items() if "frozen" not in key
        }
        groups = [
            {"params": [p], "weight_decay": 0.0 if p.dim() < 2 else 0.1}
            for p in self.parameters.values()
        ]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def gradients(self, number: int) -> dict[str, torch.Tensor]:
        """Key -> sum of all contributions, for every gradient that there is."""
        sums: dict[str, torch.Tensor] = {}
        for at, report in enumerate(self.found):
            for where in report["stages"]:
                for key, p in self.parameters.items():
                    home, name = key.split(".")
                    if name == SILENT or (int(home) != where and name != "tie"):
                        continue
                    if name != LONELY or at == len(self.found) - 1:
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


def check_gradients(
    mixture: Mixture, gradients: Mapping[str, torch.Tensor], found: list[Any]
) -> None:
    """Asserts what each rank stepped in a step, what it had not, and the norms."""
    seen = {key: torch.zeros(g.numel(), dtype=torch.bool) for key, g in gradients.items()}
    for mine, held, norms in found:
        assert norms == found[0][2]
        assert norms == pytest.approx(
            [norm(gradients, kind) for _, kind in NORMS], rel=rounding(200)
        )
        for key, (begin, gradient) in mine.items():
            if key not in gradients:
                assert gradient is None, key
                continue
            part = in_memory_order(gradient)
            span = slice(begin, begin + part.numel())
            assert torch.equal(part, in_memory_order(gradients[key])[span]), key
            seen[key][span] = True
        for key, is_none in held.items():
            has_whole = key in mine and key in gradients and SHARD not in placed(mixture, key)
            assert is_none == (not has_whole), key
    assert all(bool(where.all()) for where in seen.values())


def placed(mixture: Mixture, key: str) -> set[Placement]:
    tied = key.endswith("tie") and mixture.axes.get("pp", 1) > 1
    return {p for axis, p in mixture.placed.items() if axis != "pp" or tied}


@pytest.mark.parametrize(
    "mixture",
    [
        pytest.param(mixture, id=f"{number} ranks, {name}", marks=pytest.mark.ranks(number))
        for number, mixtures in MIXTURES.items()
        for name, mixture in mixtures.items()
    ],
)
def test_any_mixture_trains_like_one_process(mixture: Mixture) -> None:
    """Of ``empty`` no largest gradient is known: asked for one, every rank but its own hung.

    Turned, an owner of the later stage passed its rows on before it had got the others'.
    """
    found = on_first(train(mixture))
    if found is None:
        return
    whole = OneProcess(mixture, found)
    gradients: Mapping[str, torch.Tensor] = {}
    for number in range(STEPS):
        gradients = whole.gradients(number)
        check_gradients(mixture, gradients, [report["steps"][number] for report in found])
        whole.step(gradients)
    for report in found:
        assert (report["drift"], sorted(report["groups"])) == ("None", [0.0, 0.1])
        assert report["groups"] == found[0]["groups"]
        for key, value in report["ended"].items():
            begun = report["begun"][key]
            assert value.stride() == begun.stride()
            if key in gradients:
                low = value.dtype == torch.bfloat16  # an eps of it: the last place is another
                exact = 2 * torch.finfo(value.dtype).eps if low else rounding(STEPS * 4)
                expected = whole.parameters[key].detach()
                torch.testing.assert_close(value, expected, rtol=exact, atol=exact)
                assert value.numel() == 0 or not torch.equal(value, begun)
            else:  # neither weight decay nor momentum touch it
                assert torch.equal(value, begun)
