"""Makes a small tied Qwen3 with random weights, and a tokenizer, as a directory of transformers.

python examples/make_hf.py [FOLDER]      # to try out what takes longer with a trained model
"""

import pydoc_data.topics
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEXT = "".join(body for _, body in sorted(pydoc_data.topics.topics.items()))  # CPython's help
END = "<|im_end|>"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: str, vocabulary: int = 512) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=alphabet,
        special_tokens=["<|im_start|>", END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=CHAT)
    fast.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make([*sys.argv, "runs/qwen3"][1])
