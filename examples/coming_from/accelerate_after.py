"""Run it by torchrun --nproc-per-node 4. It takes --epochs 3 --bf16 --resume."""

import argparse
import math

import torch
from accelerate import Accelerator
from gpt import GPT, loss_fn, text
from torch.utils.data import DataLoader, DistributedSampler

import pipegrad

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--checkpoint", default="checkpoint")
args = parser.parse_args()
batch_size, accumulate, warm_up, total = 32, 2, 4, 24  # rows of a step, and numbers of steps

accelerator = Accelerator(cpu=True, mixed_precision="bf16" if args.bf16 else "no")
topology = pipegrad.Topology.create(pipeline=2)
torch.manual_seed(0)
cut = pipegrad.cut(GPT(), 2, example={"tokens": text(1, seed=0)[:][0]})
model = cut.modules[topology.coordinate("pp")]
scheduler = pipegrad.Scheduler(
    cut, topology, schedule="1f1b", num_microbatches=accumulate, loss_fn=loss_fn
)
optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-3)


def factor(step: int) -> float:
    part = (step - warm_up) / (total - warm_up)
    return (step + 1) / warm_up if step < warm_up else (1 + math.cos(math.pi * part)) / 2


lr_schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
train, held_out = text(256, seed=1), text(64, seed=2)
replica, replicas = topology.coordinate("dp"), topology.size("dp")
samplers = [DistributedSampler(data, replicas, replica) for data in (train, held_out)]
loader, held_out_loader = (
    DataLoader(sampler.dataset, batch_size // replicas, sampler=sampler) for sampler in samplers
)
path = f"{args.checkpoint}.{accelerator.process_index}"

first = 0
if args.resume:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    lr_schedule.load_state_dict(saved["lr_schedule"])
    first = lr_schedule.last_epoch * batch_size // len(train)

for epoch in range(first, args.epochs):
    samplers[0].set_epoch(epoch)
    for tokens, target in loader:
        with accelerator.autocast():
            loss = scheduler.step(tokens, target=target).loss
        scheduler.sync.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        lr_schedule.step()
        accelerator.print(f"epoch {epoch}  loss {loss:.7f}")
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        results = [scheduler.evaluate(x, target=y) for x, y in held_out_loader]
    loss = sum(r.loss * r.weight for r in results) / sum(r.weight for r in results)
    model.train()
    accelerator.print(f"epoch {epoch}  held-out loss {loss:.7f}")
    saved = {"optimizer": optimizer.state_dict(), "lr_schedule": lr_schedule.state_dict()}
    torch.save({**saved, "model": model.state_dict()}, path)
accelerator.end_training()
