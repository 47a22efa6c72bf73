"""Run it by torchrun --nproc-per-node 4. It takes --epochs 3 --bf16 --resume."""

import argparse
import math

import torch
import torch.distributed as dist
from gpt import GPT, loss_fn, text
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import pipegrad

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--checkpoint", default="checkpoint")
args = parser.parse_args()
batch_size, accumulate, warm_up, total = 32, 2, 4, 24  # rows of a step, and numbers of steps

dist.init_process_group("gloo")
rank, topology = dist.get_rank(), pipegrad.Topology.create(pipeline=2)
replica, world = topology.coordinate("dp"), topology.size("dp")
torch.manual_seed(0)
cut = pipegrad.cut(GPT(), 2, example={"tokens": text(1, seed=0)[:][0]})
stage = topology.coordinate("pp")
model = cut.modules[stage]
for name in cut.layers_of(stage):
    fully_shard(model.get_submodule(name), mesh=topology.mesh["dp"])
fully_shard(model, mesh=topology.mesh["dp"])
handlers = ["pipeline-shared"]  # FSDP2 reduces over the replicas
scheduler = pipegrad.Scheduler(
    cut, topology, schedule="1f1b", num_microbatches=accumulate, loss_fn=loss_fn, handlers=handlers
)
optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-3)


def factor(step: int) -> float:
    part = (step - warm_up) / (total - warm_up)
    return (step + 1) / warm_up if step < warm_up else (1 + math.cos(math.pi * part)) / 2


lr_schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
train, held_out = text(256, seed=1), text(64, seed=2)
samplers = [DistributedSampler(data, world, replica) for data in (train, held_out)]
loader, held_out_loader = (
    DataLoader(sampler.dataset, batch_size // world, sampler=sampler, drop_last=True)
    for sampler in samplers
)
autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.bf16)

first = 0
if args.resume:
    saved = torch.load(f"{args.checkpoint}.{rank}", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    lr_schedule.load_state_dict(saved["lr_schedule"])
    first = saved["epoch"] + 1

for epoch in range(first, args.epochs):
    samplers[0].set_epoch(epoch)
    for tokens, target in loader:
        with autocast:
            loss = scheduler.step(tokens, target=target).loss
        scheduler.sync.clip_grad_norm_(1.0)
        optimizer.step()
        lr_schedule.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}  loss {loss:.7f}")
    model.eval()
    with torch.no_grad(), autocast:
        results = [scheduler.evaluate(x, target=y) for x, y in held_out_loader]
    loss = sum(r.loss * r.weight for r in results) / sum(r.weight for r in results)
    model.train()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    saved["lr_schedule"] = lr_schedule.state_dict()
    torch.save(saved, f"{args.checkpoint}.{rank}")
    if rank == 0:
        print(f"epoch {epoch}  held-out loss {loss:.7f}")
dist.destroy_process_group()
