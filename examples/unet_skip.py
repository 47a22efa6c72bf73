"""A small U-Net: skips pass the stages between by, and go straight to the rank that takes them.

torchrun --nproc-per-node 4 examples/unet_skip.py
Images get small and deep on their way to the middle, and skips stay large: the workload of Zhuang
et al., 2022 (arXiv 2211.05322). benchmarks/unet measures it. The model finds noise in waves.
"""

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import avg_pool2d, interpolate, mse_loss

from pipegrad import Scheduler, Stage, Topology


class Level(nn.Module):
    def __init__(self, taken: int, made: int) -> None:
        super().__init__()
        self.norm, self.time = nn.GroupNorm(1, taken), nn.Linear(1, taken)
        self.conv, self.out = nn.Conv2d(taken, 32, 3, padding=1), nn.Conv2d(32, made, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (batch, channels, size, size), (batch, 1)
        return self.out(self.conv(self.norm(x) + self.time(t)[..., None, None]).relu())


class Down(Level):
    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return avg_pool2d(skip := super().forward(x, t), 2), skip


class Up(Level):
    def forward(self, x: Tensor, t: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([interpolate(x, scale_factor=2), skip], 1), t)


def stages() -> list[Stage]:
    return [
        Stage(Down(3, 16), 0, ["x", "t"], ["x", "skip0"]),
        Stage(Down(16, 32), 1, ["x", "t"], ["x", "skip1"]),
        Stage(Up(64, 16), 2, ["x", "t", "skip1"]),
        Stage(Up(32, 3), 3, ["x", "t", "skip0"]),
    ]


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    topology = Topology.create(pipeline=4)
    torch.manual_seed(0)  # every rank makes the same uncut model
    stage = stages()[topology.coordinate("pp")]
    scheduler = Scheduler([stage], topology, schedule="1f1b", num_microbatches=8, loss_fn=mse_loss)
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(1, 31):
        t, noise = torch.rand(16, 1), torch.randn(16, 3, 16, 16)  # the same on every rank
        waves = (torch.linspace(0, 6, 16) * torch.randint(1, 4, (16, 1, 1, 1))).sin()
        noisy = torch.lerp(waves.expand_as(noise), noise, t[..., None, None])
        result = scheduler.step(noisy, t=t, target=noise)
        optimizer.step()
        optimizer.zero_grad()
        if topology.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {result.loss:.4f}")
    distributed.destroy_process_group()
