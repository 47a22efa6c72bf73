"""Trains a small U-Net transformer over pipeline stages; its skips pass the stages between by.

torchrun --standalone --nproc-per-node 4 examples/unet_skip.py [--pipeline 2: 2 ranks x 2 replicas]
NAMES says what each part takes and makes, and names make edges. Over 4 stages they become

    stage 0 (x, time) -> x, t, skip1        stage 3 (x, t, skip1) -> x
    stage 1 (x, t) -> x, skip2              stage 2 (x, t, label, skip2) -> x

A skip goes straight to the rank that takes it, and its gradient straight back; t goes to three
ranks, whose gradients are summed. The workload is that of Zhuang et al., "On Optimizing the
Communication of Model Parallelism", 2022 (arXiv 2211.05322): images that get small and deep on
their way to the middle, and skips that stay large.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import pipegrad

SIZE, CHANNELS, TIME, CLASSES, BATCH = 16, 16, 32, 4, 32

NAMES = {  # part: what it takes, what it makes
    "entry": (["x", "time"], ["x", "t"]),
    "down1": (["x", "t"], ["x", "skip1"]),
    "down2": (["x", "t"], ["x", "skip2"]),
    "middle": (["x", "t", "label"], ["x"]),
    "up2": (["x", "t", "skip2"], ["x"]),
    "up1": (["x", "t", "skip1"], ["x"]),
    "head": (["x"], ["x"]),
}
CUTS = {1: [], 2: [3], 4: [2, 3, 5]}  # number of stages: first part of each but the first


class Entry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, CHANNELS, 2, stride=2)
        self.embed = nn.Sequential(nn.Linear(TIME, TIME), nn.GELU(), nn.Linear(TIME, TIME))

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        waves = time[:, None] * torch.logspace(0, 2, TIME // 2)
        return self.patchify(x), self.embed(torch.cat([waves.sin(), waves.cos()], 1))


class Block(nn.Module):
    """A transformer block over the pixels of ``(batch, channels, size, size)``."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(size * size, channels) * 0.02)
        self.condition = nn.Linear(TIME, channels)
        self.layer = nn.TransformerEncoderLayer(
            channels, 4, 4 * channels, 0.0, "gelu", batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        tokens: Tensor = self.layer(x.flatten(2).mT + self.position + self.condition(t)[:, None])
        return tokens.mT.reshape(x.shape)


class Down(Block):
    def __init__(self, channels: int, size: int) -> None:
        super().__init__(channels, size)
        self.downsample = nn.Conv2d(channels, 2 * channels, 2, stride=2)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        skip = super().forward(x, t)
        return self.downsample(skip), skip


class Middle(Block):
    def __init__(self, channels: int, size: int) -> None:
        super().__init__(channels, size)
        self.embed = nn.Embedding(CLASSES, TIME)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, t + self.embed(label))


class Up(Block):
    def __init__(self, channels: int, size: int) -> None:
        super().__init__(channels, size)
        self.upsample = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.merge = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor, t: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.merge(torch.cat([self.upsample(x), skip], 1)), t)


class UNet(nn.ModuleDict):
    """Parts that find their inputs by name. Some of them, in order, are a stage."""

    @property
    def inputs(self) -> list[str]:
        """What its parts take and none before them makes."""
        found, made = list[str](), set[str]()
        for takes, makes in map(NAMES.__getitem__, self):
            found += [name for name in takes if name not in made and name not in found]
            made.update(makes)
        return found

    def forward(self, *values: Tensor) -> dict[str, Tensor]:
        known = dict(zip(self.inputs, values, strict=True))
        for part, module in self.items():
            takes, makes = NAMES[part]
            made = module(*(known[name] for name in takes))
            known.update(zip(makes, made if isinstance(made, tuple) else (made,), strict=True))
        return known


def make_unet() -> UNet:
    c, s = CHANNELS, SIZE // 2  # behind the entry
    parts: list[nn.Module] = [Entry(), Down(c, s), Down(2 * c, s // 2), Middle(4 * c, s // 4)]
    parts += [Up(2 * c, s // 2), Up(c, s), nn.ConvTranspose2d(c, 3, 2, stride=2)]
    return UNet(dict(zip(NAMES, parts, strict=True)))


def cut(model: UNet, num_stages: int) -> list[pipegrad.Stage]:
    """Returns all stages: each makes what those behind it take, the last one ``x``."""
    if num_stages not in CUTS:
        raise click.UsageError(f"there would be {num_stages} stages, expected one of {[*CUTS]}")
    parts, stages = list(model.items()), list[pipegrad.Stage]()
    for start, end in pairwise([0, *CUTS[num_stages], len(parts)]):
        module, wanted = UNet(dict(parts[start:end])), UNet(dict(parts[end:])).inputs or ["x"]
        made = dict.fromkeys(name for part in module for name in NAMES[part][1])
        outputs = [name for name in made if name in wanted]
        stages.append(pipegrad.Stage(module, len(stages), module.inputs, outputs))
    return stages


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns noisy images of waves, time and class of each, and the noise."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (BATCH,), generator=generator)
    time, phase = torch.rand(2, BATCH, generator=generator)
    noise = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    along = torch.linspace(0, 2 * torch.pi, SIZE)
    waves = (along * (label[:, None] + 1) + 2 * torch.pi * phase[:, None]).sin()
    angle = (time * torch.pi / 2)[:, None, None, None]
    noisy = angle.cos() * waves[:, None, None, :] + angle.sin() * noise
    return noisy, time, label, noise


@torch.no_grad()
def traffic(program: pipegrad.schedules.Program, stages: Sequence[pipegrad.Stage]) -> Counter[str]:
    """Returns how many bytes of each name a batch sends between ranks, there and back."""
    sizes, total = dict[tuple[str, int], int](), Counter[str]()
    known = dict(zip(("x", "time", "label"), draw(0), strict=False))
    for stage in stages:
        made = stage.forward([known[name] for name in stage.inputs])
        known.update(zip(stage.outputs, made, strict=True))
        sizes |= {(name, stage.index): known[name].nbytes for name in stage.outputs}
    for channel in program.channels:
        link = program.links[channel.link]
        total[link.name] += sizes[link.name, link.producer]
    return total


def gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters if p.grad is not None}


@click.command()
@click.option("--pipeline", type=int, help="Ranks of a pipeline, all by default; else replicas.")
@click.option("--schedule", "name", default="eager-1f1b", show_default=True)
@click.option("--microbatches", default=8, show_default=True)
@click.option("--steps", default=50, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--double", is_flag=True, help="In float64: a gradient error that is no rounding.")
def main(
    *, pipeline: int | None, name: str, microbatches: int, steps: int, seed: int, double: bool
) -> None:
    """Trains a small U-Net transformer over pipeline stages, and in one process beside them."""
    dist.init_process_group("gloo")
    num_ranks = pipeline or dist.get_world_size()
    schedule = pipegrad.schedules.build(name, num_ranks=num_ranks, num_microbatches=microbatches)
    topology = pipegrad.Topology.create(pipeline=num_ranks, stage_to_rank=schedule.stage_to_rank)

    torch.set_default_dtype(torch.float64 if double else torch.float32)
    torch.manual_seed(seed)
    model = make_unet()
    reference = copy.deepcopy(model)  # one process, to compare with
    stages = cut(model, topology.num_stages)
    mine = [stages[index] for index in topology.local_stages]
    own = {n: p for stage in mine for n, p in stage.module.named_parameters()}
    scheduler = pipegrad.Scheduler(mine, topology, schedule=schedule, loss_fn=functional.mse_loss)
    optimizers = [
        scheduler.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9),
        torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9),
    ]

    def share(batch: Tensor) -> Tensor:
        return batch.chunk(topology.size("dp"))[topology.coordinate("dp")]

    def gradient_error() -> float:
        """Largest error of a gradient on any rank, relative to that parameter's largest."""
        found, true = gradients(own.items()), gradients(reference.named_parameters())
        error = max((found[n] - true[n]).abs().max() / true[n].abs().max() for n in own)
        dist.all_reduce(error, dist.ReduceOp.MAX)
        return error.item()

    say = print if dist.get_rank() == 0 else lambda _: None
    say(f"schedule {schedule.name}\n{schedule}")
    for stage, place in zip(stages, schedule.stage_to_rank, strict=True):
        takes, makes = ", ".join(stage.inputs), ", ".join(stage.outputs)
        say(f"stage {stage.index} on rank {place} ({takes}) -> {makes}")
    for number in range(1, steps + 1):
        x, time, label, noise = draw(1000 * seed + number)  # the same on every rank
        result = scheduler.step(share(x), time=share(time), label=share(label), target=share(noise))
        true_loss = functional.mse_loss(reference(x, time, label)["x"], noise)
        true_loss.backward()
        error = gradient_error()
        if number in (1, 2) or number % 10 == 0:
            told = f"loss {result.loss:.6f}  one process {true_loss:.6f}"
            say(f"step {number:4}  gradient error {error:.1e}  {told}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    sent = traffic(scheduler.program, stages)
    skips = sum(num_bytes for name, num_bytes in sent.items() if name.startswith("skip"))
    say(f"bytes between ranks a step: skips {skips}  hidden state {sent['x']}  t {sent['t']}")
    scheduler.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
