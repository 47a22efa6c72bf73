"""Fine-tunes runs/qwen3 over four stages; transformers alone reads the result.

python examples/make_hf.py && torchrun --standalone --nproc-per-node 4 examples/finetune_hf.py
"""

import sys

import torch
import torch.distributed as dist
from make_hf import TEXT
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipegrad

base, tuned, steps = sys.argv[1:] or ("runs/qwen3", "runs/qwen3-tuned", 100)
dist.init_process_group("gloo")
topology, rank = pipegrad.Topology.create(pipeline=4), dist.get_rank()
cut = pipegrad.cut.from_pretrained(base, num_stages=4)  # each rank reads its own stage
scheduler = pipegrad.Scheduler(cut, topology, schedule="1f1b", num_microbatches=4)
optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2)
tokenizer = AutoTokenizer.from_pretrained(base)
rows = tokenizer(TEXT, return_tensors="pt")["input_ids"][0].unfold(0, 64, 64)
torch.manual_seed(0)  # every rank draws the same batches
held_out, *batches = rows[torch.randperm(len(rows))].split(16)
for step, ids in enumerate(batches[: int(steps)], start=1):
    result = scheduler.step(input_ids=ids, labels=ids)
    scheduler.sync.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 3 and step % 10 == 0:
        print(f"step {step}  loss {result.loss:.4f}")
result = scheduler.evaluate(input_ids=held_out, labels=held_out)
cut.save_pretrained(tuned)
if rank == 3:  # it has the last stage
    model = AutoModelForCausalLM.from_pretrained(tuned)
    logits = torch.cat([model(ids).logits for ids in held_out.split(4)])
    assert torch.equal(logits, result.outputs[0])
    text = tokenizer.decode(model.generate(held_out[:1, :16], max_new_tokens=32)[0])
    print(f"perplexity {result.loss.exp():.2f}  {text!r}")
dist.destroy_process_group()
