"""Megatron's GPT in plain torch, under the same names. What `megatron_pipeline.py` compares with.

Not run by itself. A GPTModel itself cannot be copied, because it holds process groups.
"""

from functools import partial

import torch
from shared import LAYERS, LENGTH, VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.nn import functional

HEADS = 4


class UncutGpt(nn.Module):
    """From tokens to logits."""

    def __init__(self, dropout: float = 0.0, has_biases: bool = True) -> None:
        super().__init__()
        self.dropout = dropout
        words = nn.Embedding(VOCABULARY, WIDTH)
        self.embedding = nn.ModuleDict(
            {"word_embeddings": words, "position_embeddings": nn.Embedding(LENGTH, WIDTH)}
        )
        self.decoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList([_layer(has_biases) for _ in range(LAYERS)]),
                "final_layernorm": nn.LayerNorm(WIDTH),
            }
        )
        self.output_layer = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output_layer.weight = words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        places = self.embedding["position_embeddings"](torch.arange(length))
        hidden = self.dropped(self.embedding["word_embeddings"](tokens) + places)
        for layer in self.decoder["layers"]:
            attention = layer["self_attention"]
            qkv = attention["linear_qkv"](layer["input_layernorm"](hidden))
            heads = qkv.view(rows, length, HEADS, 3, -1).unbind(3)
            query, key, value = (part.transpose(1, 2) for part in heads)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(rows, length, -1)
            hidden = hidden + self.dropped(attention["linear_proj"](mixed))
            wide = layer["mlp"]["linear_fc1"](layer["pre_mlp_layernorm"](hidden))
            hidden = hidden + self.dropped(layer["mlp"]["linear_fc2"](functional.gelu(wide)))
        logits: Tensor = self.output_layer(self.decoder["final_layernorm"](hidden))
        return logits

    def dropped(self, hidden: Tensor) -> Tensor:
        """Returns it with dropout."""
        return functional.dropout(hidden, self.dropout, self.training)


def _layer(has_biases: bool) -> nn.ModuleDict:
    linear = partial(nn.Linear, bias=has_biases)
    attention = {"linear_proj": linear(WIDTH, WIDTH), "linear_qkv": linear(WIDTH, 3 * WIDTH)}
    mlp = {"linear_fc1": linear(WIDTH, 4 * WIDTH), "linear_fc2": linear(4 * WIDTH, WIDTH)}
    return nn.ModuleDict(
        {
            "input_layernorm": nn.LayerNorm(WIDTH),
            "self_attention": nn.ModuleDict(attention),
            "pre_mlp_layernorm": nn.LayerNorm(WIDTH),
            "mlp": nn.ModuleDict(mlp),
        }
    )
