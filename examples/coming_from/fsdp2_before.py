"""Run it by torchrun --nproc-per-node 4. It takes --epochs 3 --bf16 --resume."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, loss_fn, text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--checkpoint", default="checkpoint")
args = parser.parse_args()
batch_size, accumulate, warm_up, total = 32, 2, 4, 24  # rows of a step, and numbers of steps

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = GPT()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def factor(step: int) -> float:
    part = (step - warm_up) / (total - warm_up)
    return (step + 1) / warm_up if step < warm_up else (1 + math.cos(math.pi * part)) / 2


lr_schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
train, held_out = text(256, seed=1), text(64, seed=2)
samplers = [DistributedSampler(data, world, rank) for data in (train, held_out)]
loader, held_out_loader = (
    DataLoader(sampler.dataset, batch_size // world, sampler=sampler, drop_last=True)
    for sampler in samplers
)
autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.bf16)

first = 0
if args.resume:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    saved = {"model": of_model, "optimizer": of_optimizer, "epoch": 0}
    saved["lr_schedule"] = lr_schedule.state_dict()
    dcp.load(saved, checkpoint_id=args.checkpoint)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    lr_schedule.load_state_dict(saved["lr_schedule"])
    first = saved["epoch"] + 1

for epoch in range(first, args.epochs):
    samplers[0].set_epoch(epoch)
    for tokens, target in loader:
        loss = torch.zeros(())
        microbatches = zip(tokens.chunk(accumulate), target.chunk(accumulate), strict=True)
        for number, (x, y) in enumerate(microbatches, 1):
            model.set_requires_gradient_sync(number == accumulate)
            with autocast:
                micro_loss = loss_fn(model(x), y) / accumulate
            micro_loss.backward()
            loss += micro_loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_schedule.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}  loss {loss:.7f}")
    model.eval()
    with torch.no_grad(), autocast:
        losses = [loss_fn(model(x), y) for x, y in held_out_loader]
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    model.train()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    saved = {"model": of_model, "optimizer": of_optimizer, "epoch": epoch}
    saved["lr_schedule"] = lr_schedule.state_dict()
    dcp.save(saved, checkpoint_id=args.checkpoint)
    if rank == 0:
        print(f"epoch {epoch}  held-out loss {loss:.7f}")
dist.destroy_process_group()
