"""Families of models of transformers: tiny, with random weights, tied where the family is tied.

A batch has eight rows. Padding stands on both sides. Labels count unevenly: none of rows 2 and 3
counts. transformers is imported in a function: its import takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 8
TOKENS = 11
VOCAB = 61
WIDTH = 16
IGNORED = -100
# Many families name these so.
SIZES: dict[str, Any] = (
    {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24}
    | {"num_hidden_layers": 6, "num_attention_heads": 2, "max_position_embeddings": 32}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
)
GROUPED = SIZES | {"num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODED = {  # BART and Whisper
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

Batch = dict[str, Tensor]


def text(generator: torch.Generator, tokens: int = TOKENS) -> Batch:
    """Returns tokens, a mask with padding on both sides, and uneven labels."""
    ids = torch.randint(3, VOCAB, (ROWS, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -4:] = mask[3, -1:] = mask[5, -2:] = 0
    mask[1, :3] = mask[6, :2] = 0
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[2:4] = labels[4, 3:] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def translated(generator: torch.Generator, tokens: int = TOKENS) -> Batch:
    """Returns what encoder-decoders take: labels of a length of their own."""
    batch = text(generator, tokens)
    return batch | {"labels": text(generator, 7)["labels"]}


def spoken(generator: torch.Generator) -> Batch:
    """Returns what Whisper takes."""
    features = torch.randn(ROWS, 8, 24, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": text(generator, 7)["labels"]}


def seen(generator: torch.Generator) -> Batch:
    """Returns images with labels."""
    images = torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": images, "labels": torch.arange(ROWS) % 3}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        config: Name of its configuration in transformers.
        head: Name of its model in transformers.
        options: Of the configuration.
        make_batch: Makes a batch.
        dtype: Of parameters and images.
    """

    config: str
    head: str
    options: Mapping[str, Any]
    make_batch: Callable[..., Batch] = text
    dtype: torch.dtype = torch.float64

    def build(self) -> nn.Module:
        """Returns the uncut model, with the same bits in every process."""
        import transformers

        torch.manual_seed(7)
        config = getattr(transformers, self.config)(**self.options)
        model: nn.Module = getattr(transformers, self.head)(config)
        return model.to(self.dtype).train()

    def with_layers(self, number: int) -> Family:
        """Returns the same with so many layers, half of which encode if any do."""
        sizes = dict.fromkeys(("n_layer", "num_hidden_layers"), number)
        sizes |= dict.fromkeys(("encoder_layers", "decoder_layers", "num_layers"), number // 2)
        known = {option: size for option, size in sizes.items() if option in self.options}
        return replace(self, options={**self.options, **known})

    def batch(self, seed: int, **sizes: int) -> Batch:
        """Returns the batch of a seed."""
        batch = self.make_batch(torch.Generator().manual_seed(seed), **sizes)
        return {n: x.to(self.dtype) if x.is_floating_point() else x for n, x in batch.items()}


FAMILIES = {
    "GPT-2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 6, "n_head": 2}
        | {"n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "Llama 3.2": Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        GROUPED
        | {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "Qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    # Its attention is nan in float64, at tokens that may attend to none.
    "Gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        GROUPED | {"sliding_window": 4},
        dtype=torch.float32,
    ),
    "Gemma3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GROUPED | {"sliding_window": 4, "sliding_window_pattern": 3},
    ),
    "Mistral": Family("MistralConfig", "MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "OPT": Family(
        "OPTConfig",
        "OPTForCausalLM",
        {n: x for n, x in SIZES.items() if n != "intermediate_size"}
        | {"ffn_dim": 24, "word_embed_proj_dim": 8, "dropout": 0.0},
    ),
    "Mixtral": Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        GROUPED | EXPERTS | {"num_local_experts": 4},
        dtype=torch.float32,
    ),
    "BERT": Family("BertConfig", "BertForMaskedLM", SIZES | NO_DROPOUT),
    "T5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_heads": 2}
        | {"num_layers": 3, "dropout_rate": 0.0, "decoder_start_token_id": 0}
        | {"relative_attention_num_buckets": 8},
        translated,
    ),
    "BART": Family(
        "BartConfig",
        "BartForConditionalGeneration",
        DECODED | {"max_position_embeddings": 32},
        translated,
    ),
    "Whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        DECODED | {"max_source_positions": 12, "max_target_positions": 16, "num_mel_bins": 8},
        spoken,
    ),
    "ViT": Family(
        "ViTConfig",
        "ViTForImageClassification",
        {n: x for n, x in SIZES.items() if n in ("hidden_size", "intermediate_size")}
        | {"num_hidden_layers": 6, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
        | {"num_labels": 3}
        | NO_DROPOUT,
        seen,
    ),
}

DEEP = 2  # layers of the models below
ENCODER = SIZES | NO_DROPOUT | {"num_hidden_layers": DEEP, "num_labels": 3}
DECODER = GROUPED | {"num_hidden_layers": DEEP, "num_labels": 3, "classifier_dropout": 0.0}
CLASSES = torch.arange(ROWS) % 3


def labelled(**labels: Tensor) -> Callable[..., Batch]:
    """Returns what makes a text with these labels."""

    def batch(generator: torch.Generator, tokens: int = TOKENS) -> Batch:
        inputs = text(generator, tokens)
        return {name: inputs[name] for name in ("input_ids", "attention_mask")} | labels

    return batch


def tagged(generator: torch.Generator, tokens: int = TOKENS) -> Batch:
    """Returns a text with a class for each token; those of row 2 and 3 do not count."""
    batch = text(generator, tokens)
    counts = batch["labels"] != IGNORED
    return batch | {"labels": torch.where(counts, batch["labels"] % 3, IGNORED)}


def choices(generator: torch.Generator, tokens: int = TOKENS) -> Batch:
    """Returns two texts a row, one of which is right."""
    ids = torch.randint(3, VOCAB, (ROWS, 2, tokens), generator=generator)
    return {"input_ids": ids, "labels": CLASSES % 2}


REAL = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
SPAN = {"start_positions": CLASSES, "end_positions": CLASSES + 2}
CLASSIFIER = "ForSequenceClassification"
HEADS = {
    "BERT, classes": Family("BertConfig", f"Bert{CLASSIFIER}", ENCODER, labelled(labels=CLASSES)),
    "BERT, a number": Family(
        "BertConfig", f"Bert{CLASSIFIER}", ENCODER | {"num_labels": 1}, labelled(labels=REAL)
    ),
    "Llama, tokens": Family("LlamaConfig", "LlamaForTokenClassification", DECODER, tagged),
    "BERT, next": Family("BertConfig", "BertLMHeadModel", ENCODER | {"is_decoder": True}, text),
    "BART, decoder alone": Family("BartConfig", "BartForCausalLM", FAMILIES["BART"].options, text),
    "BERT, answers": Family(
        "BertConfig", "BertForQuestionAnswering", ENCODER | {"num_labels": 2}, labelled(**SPAN)
    ),
    "BERT, choices": Family("BertConfig", "BertForMultipleChoice", ENCODER, choices),
}
ROUTER: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
# Models whose own loss has a balance loss of their routers.
ROUTED = {
    "Qwen3-MoE": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        GROUPED
        | EXPERTS
        | ROUTER
        | {"num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 8},
        dtype=torch.float32,  # torch multiplies groups of matrices in no float64
    ),
    # Its balance losses are computed of labels alone, and never without.
    "NLLB-MoE": Family(
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        DECODED
        | ROUTER
        | {"encoder_layers": 2, "decoder_layers": 2, "num_experts": 4, "expert_capacity": 64}
        | {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "router_jitter_noise": 0.0}
        | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
        | dict.fromkeys(("attention_dropout", "activation_dropout", "moe_token_dropout"), 0.0),
        translated,
        torch.float32,
    ),
    # Its z-losses and balance losses are those of an argument, and no configuration asks for them.
    "Switch": Family(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_heads": 2}
        | {"num_layers": 2, "num_decoder_layers": 2, "expert_capacity": 64, "dropout_rate": 0.0}
        | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4}
        | {"router_jitter_noise": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
        | dict.fromkeys(("router_z_loss_coef", "router_aux_loss_coef"), 0.5),
        translated,
        torch.float32,
    ),
}
