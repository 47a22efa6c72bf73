"""Batches of a file of chats, with the loss on the answers alone, as fine-tuning needs them.

python examples/chats.py [FILE]      # writes such a file: what functions of CPython do
"""

import ast
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, DataCollatorForSeq2Seq


def batches(
    file: str,
    model: str,
    *,
    held_out: bool = False,
    rows: int = 8,
    length: int = 96,
    seed: int = 0,
    data_rank: int = 0,
    num_data_ranks: int = 1,
) -> Iterator[Any]:
    """Yields input_ids, attention_mask and labels, the same on every rank of a pipeline.

    A line of the file is {"messages": [{"role": ..., "content": ...}, ...]}. The last message is
    learnt. Chats of more than `length` tokens are left out. One in 20 is held out.

    Raises:
        ValueError: If a line has no messages, or there are no `rows` chats.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    collate = DataCollatorForSeq2Seq(tokenizer)  # it fills up labels with -100
    lines = Path(file).read_text().splitlines()
    chosen = [line for n, line in enumerate(lines) if (n % 20 == 0) == held_out]
    random.Random(seed).shuffle(chosen)
    examples: list[dict[str, list[int]]] = []
    has_batch = False
    for line in chosen:
        chat = json.loads(line)
        if "messages" not in chat:
            raise ValueError(f"{file} has a line without messages; it has {[*chat]}")
        messages = chat["messages"]
        question = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, return_dict=False
        )
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        if len(ids) > length:
            continue
        labels = [-100] * len(question) + ids[len(question) :]
        examples.append({"input_ids": ids, "labels": labels})
        if len(examples) == rows:
            yield dict(collate(examples[data_rank::num_data_ranks]))
            examples, has_batch = [], True
    if not has_batch:
        which = f"{'held-out ' if held_out else ''}chats of at most {length} tokens"
        raise ValueError(f"{file} has {len(examples)} {which}, fewer than a batch of {rows}")


def docstrings() -> Iterator[tuple[str, str]]:
    """Yields functions of CPython's library, and the first lines of their documentation."""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        bodies = [(path.stem, module.body)]
        classes = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))
        bodies += [(f"{path.stem}.{node.name}", node.body) for node in classes]
        for owner, body in bodies:
            for node in body:
                # A name that begins with an underscore is private.
                if isinstance(node, ast.FunctionDef) and "._" not in f".{owner}.{node.name}":
                    line = (ast.get_docstring(node) or "").partition("\n")[0]
                    if line.endswith("."):
                        yield f"{owner}.{node.name}({ast.unparse(node.args)})", line


def write(file: str) -> None:
    """Writes docstrings as questions and answers, in an order that is the same everywhere."""
    lines = []
    for call, line in sorted(set(docstrings())):
        question = {"role": "user", "content": f"What does {call} do?"}
        answer = {"role": "assistant", "content": line}
        lines.append(json.dumps({"messages": [question, answer]}) + "\n")
    random.Random(0).shuffle(lines)
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(lines))
    print(f"{file}: {len(lines)} chats")


if __name__ == "__main__":
    write([*sys.argv, "runs/docstrings.jsonl"][1])
