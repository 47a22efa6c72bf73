"""A GAN: two optimizers step two parts of one model in turn, each by its own loss.

torchrun --nproc-per-node 4 examples/gan.py
Both parts are cut as one model, and each loss has a Scheduler. D learns which points are real, and
G learns to make points on a circle.
"""

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from pipegrad import Scheduler, Topology, cut


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.G = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
        self.D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return self.D(self.G(noise)), self.D(real)


def d_loss(fake: Tensor, real: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    right = torch.cat([real > 0, fake <= 0]).float().mean()
    return cross_entropy(real, target) + cross_entropy(fake, 1 - target), {"right": right}


def g_loss(fake: Tensor, _real: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(fake, target)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    topology = Topology.create(pipeline=2)
    torch.manual_seed(0)  # every rank makes the same uncut model
    gan = GAN()
    stages = cut(gan, 2, example={"noise": torch.zeros(2, 8), "real": torch.zeros(2, 2)})
    d_step, g_step = (
        Scheduler(stages, topology, schedule="1f1b", num_microbatches=4, loss_fn=loss_fn)
        for loss_fn in (d_loss, g_loss)
    )
    d_optimizer, g_optimizer = (  # on every rank, also where it has no parameters
        torch.optim.Adam(part.parameters(), lr=1e-2) for part in (gan.D, gan.G)
    )
    torch.manual_seed(topology.coordinate("dp"))  # other data on each replica
    for step in range(1, 31):
        angle = 6.28 * torch.rand(32, 1)
        batch = {"noise": torch.randn(32, 8), "real": torch.cat([angle.cos(), angle.sin()], 1)}
        gan.zero_grad()  # of both parts: the step for D leaves gradients in G
        d_result = d_step.step(batch, target=torch.ones(32, 1))
        d_optimizer.step()
        gan.zero_grad()
        g_result = g_step.step(batch, target=torch.ones(32, 1))
        g_optimizer.step()
        right = d_result.metrics["right"]
        if topology.rank == 0 and step % 10 == 0:
            print(f"step {step}  D {d_result.loss:.4f}, {right:.0%} right  G {g_result.loss:.4f}")
    distributed.destroy_process_group()
