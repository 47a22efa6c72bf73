"""Run it by torchrun --nproc-per-node 4. It takes --epochs 3 --bf16 --resume."""

import argparse
import math

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from gpt import GPT, loss_fn, text
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--checkpoint", default="checkpoint")
args = parser.parse_args()
batch_size, accumulate, warm_up, total = 32, 2, 4, 24  # rows of a step, and numbers of steps

accelerator = Accelerator(
    cpu=True,
    mixed_precision="bf16" if args.bf16 else "no",
    gradient_accumulation_steps=accumulate,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    step_scheduler_with_optimizer=False,
)
torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def factor(step: int) -> float:
    part = (step - warm_up) / (total - warm_up)
    return (step + 1) / warm_up if step < warm_up else (1 + math.cos(math.pi * part)) / 2


lr_schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
train, held_out = text(256, seed=1), text(64, seed=2)
micro_size = batch_size // accelerator.num_processes // accumulate
loader = DataLoader(train, micro_size, shuffle=True)
held_out_loader = DataLoader(held_out, micro_size)
model, optimizer, loader, held_out_loader = accelerator.prepare(
    model, optimizer, loader, held_out_loader
)
accelerator.register_for_checkpointing(lr_schedule)

first = 0
if args.resume:
    accelerator.load_state(args.checkpoint)
    first = lr_schedule.last_epoch * batch_size // len(train)

for epoch in range(first, args.epochs):
    loader.set_epoch(epoch)
    losses = []
    for tokens, target in loader:
        with accelerator.accumulate(model):
            loss = loss_fn(model(tokens), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            lr_schedule.step()
            loss = accelerator.reduce(torch.stack(losses).mean(), "mean")
            accelerator.print(f"epoch {epoch}  loss {loss:.7f}")
            losses.clear()
    model.eval()
    with torch.no_grad():
        losses = [loss_fn(model(x), y) for x, y in held_out_loader]
    loss = accelerator.reduce(torch.stack(losses).mean(), "mean")
    model.train()
    accelerator.print(f"epoch {epoch}  held-out loss {loss:.7f}")
    accelerator.save_state(args.checkpoint)
accelerator.end_training()
