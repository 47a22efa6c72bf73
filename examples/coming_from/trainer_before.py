"""Run it by torchrun --nproc-per-node 4. It takes --epochs 3 --resume."""

import argparse

import torch
from transformers import (
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--checkpoint", default="trainer")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()


def texts(rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Returns rows of tokens, each of which tells the next one."""
    tokens = [torch.randint(97, (rows,), generator=torch.Generator().manual_seed(seed))]
    for _ in range(15):
        tokens.append((5 * tokens[-1] + 3) % 97)
    return [{"input_ids": row, "labels": row} for row in torch.stack(tokens, 1)]


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    right = predicted.predictions[:, :-1].argmax(-1) == predicted.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


set_seed(0)
sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4))
args = TrainingArguments(
    options.checkpoint,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    num_train_epochs=options.epochs,
    learning_rate=1e-2,
    adam_epsilon=1e-3,
    warmup_steps=4,
    weight_decay=0.1,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
data = {"train_dataset": texts(256, seed=1), "eval_dataset": texts(64, seed=2)}
trainer = Trainer(model, args, **data, compute_metrics=accuracy)
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model()
if trainer.is_world_process_zero():
    for line in trainer.state.log_history:
        if "loss" in line:
            print(f"epoch {line['epoch']:.2f}  loss {line['loss']:.7f}")
        if "eval_loss" in line:
            words = f"loss {line['eval_loss']:.7f}  accuracy {line['eval_accuracy']:.4f}"
            print(f"epoch {line['epoch']:.2f}  held-out {words}")
