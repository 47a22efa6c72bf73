"""Fine-tunes a chat model over four stages; transformers alone reads the result.

pipegrad launch -n 4 examples/finetune_hf.py MODEL RESULT CHATS STEPS
"""

import itertools
import sys

import torch
import torch.distributed as dist
from chats import batches
from transformers import AutoTokenizer

import pipegrad

base, tuned, chats, steps = sys.argv[1:]
dist.init_process_group("gloo")
topology, rank = pipegrad.Topology.create(pipeline=4), dist.get_rank()
cut = pipegrad.cut.from_pretrained(base, num_stages=4)  # each rank reads its own stage
scheduler = pipegrad.Scheduler(cut, topology, schedule="1f1b", num_microbatches=4)
optimizer = scheduler.optimizer(torch.optim.AdamW, lr=3e-4)
held_out = next(batches(chats, base, held_out=True))
before = scheduler.evaluate(held_out).loss.exp()
# Every rank makes the same batches: input_ids, attention_mask and labels.
for step, batch in enumerate(itertools.islice(batches(chats, base), int(steps)), start=1):
    result = scheduler.step(batch)
    scheduler.sync.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 3 and step % 10 == 0:
        print(f"step {step}  loss {result.loss:.4f}", flush=True)
after = scheduler.evaluate(held_out).loss.exp()
cut.save_pretrained(tuned)  # all ranks call it, and rank 0 writes
if rank == 3:  # it has the last stage
    AutoTokenizer.from_pretrained(base).save_pretrained(tuned)
    print(f"perplexity of held-out answers: {before:.2f} before, {after:.2f} after")
dist.destroy_process_group()
