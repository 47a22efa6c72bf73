"""Mixtures of experts of transformers whose own loss has a balance loss of their routers.

Tests have one of each kind: `ROUTED` of tests/support/partition/families.py.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.partition.families import GROUPED, ROUTER, SIZES, Family
from tests.unit.partition.test_changes import compare_with_uncut

_LAYERS = {"num_hidden_layers": 4}
_ROUTER = {"num_experts_per_tok": 2} | ROUTER
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
_LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2} | dict.fromkeys(
    ("linear_key_head_dim", "linear_value_head_dim"), 8
)
_PLAIN: dict[str, Any] = SIZES | _LAYERS | _ROUTER | {"num_key_value_heads": 1}
_HEADS: dict[str, Any] = GROUPED | _LAYERS | _ROUTER
_LOCAL, _GLOBAL = {"num_local_experts": 4}, {"num_experts": 4}
_NARROW = {"moe_intermediate_size": 8}
_SHARED = {"shared_expert_intermediate_size": 8}
_MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}


def _causal(name: str, *options: dict[str, Any], config: str | None = None) -> Family:
    merged = {key: value for more in options for key, value in more.items()}
    return Family(config or f"{name}Config", f"{name}ForCausalLM", merged, dtype=torch.float32)


ROUTED = {
    "Mixtral": _causal("Mixtral", _HEADS, _LOCAL),
    "Qwen2-MoE": _causal("Qwen2Moe", _PLAIN, _GLOBAL, _NARROW, _SHARED),
    "Qwen3-Next": _causal("Qwen3Next", _HEADS, _GLOBAL, _NARROW, _SHARED, _LINEAR, _MIXED),
    "Qwen3.5-MoE": _causal(
        "Qwen3_5Moe",
        *(_HEADS, _GLOBAL, _NARROW, _SHARED, _LINEAR, _MIXED),
        config="Qwen3_5MoeTextConfig",
    ),
    "Qwen4": _causal(
        "Qwen4Exp",
        *(_HEADS, _GLOBAL, _NARROW, _SHARED, _LINEAR, _MIXED, {"hc_count": 2, "hc_lowrank": 4}),
        {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        {"indexer_budget": 4, "indexer_compress_ratio": 2},
        config="Qwen4ExpTextConfig",
    ),
    "Granite-MoE": _causal("GraniteMoe", _PLAIN, _LOCAL),
    "Granite-MoE, shared": _causal(
        "GraniteMoeShared", _PLAIN, _LOCAL, {"shared_intermediate_size": 8}
    ),
    "Granite-MoE, hybrid": _causal(
        "GraniteMoeHybrid",
        *(_PLAIN, _LOCAL, _MAMBA, {"shared_intermediate_size": 8, "mamba_n_groups": 1}),
        {"layer_types": ["attention", "mamba"] * 2},
    ),
    "Granite-MoE, SWA": _causal("GraniteMoeSWA", _PLAIN, _LOCAL),
    "OLMoE": _causal("Olmoe", _PLAIN, _GLOBAL),
    "FlexOlmo": _causal("FlexOlmo", _PLAIN, _GLOBAL),
    "Phimoe": _causal("Phimoe", _PLAIN, _LOCAL, {"router_jitter_noise": 0.0}),
    "DBRX": _causal(
        "Dbrx",
        {"vocab_size": 61, "d_model": 16, "n_heads": 2, "n_layers": 4, "max_seq_len": 32},
        {"pad_token_id": 0, "output_router_logits": True, "resid_pdrop": 0.0, "emb_pdrop": 0.0},
        {"attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4}},
        {
            "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 16, "moe_num_experts": 4}
            | {"moe_top_k": 2, "moe_loss_weight": 0.5}
        },
    ),
    "Jamba": _causal(
        "Jamba",
        *(_PLAIN, _GLOBAL, {"attn_layer_period": 2, "attn_layer_offset": 1}),
        {"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4},
        {"mamba_dt_rank": 4},
    ),
    "GPT-OSS": _causal(
        "GptOss",
        *(_HEADS, _LOCAL, {"sliding_window": 4}),
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "MiniMax": _causal("MiniMax", _HEADS, _LOCAL, _MIXED, {"block_size": 4}),
    "MiniMax-M2": _causal("MiniMaxM2", _HEADS, _LOCAL),
    "MiniMax-M3": _causal("MiniMaxM3VL", _HEADS, _LOCAL, config="MiniMaxM3VLTextConfig"),
    "Ernie 4.5": _causal(
        "Ernie4_5_Moe",
        {key: value for key, value in _PLAIN.items() if key != "num_experts_per_tok"},
        {"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1} | _NARROW,
    ),
    "Doge": _causal("Doge", _PLAIN, _GLOBAL, {"is_moe": True, "hidden_dropout": 0.0}),
    "JetMoE": _causal(
        "JetMoe",
        {key: value for key, value in _PLAIN.items() if key != "num_attention_heads"},
        _LOCAL | {"kv_channels": 8, "aux_loss_coef": 0.5},
    ),
    "Flint": _causal("Flint", _HEADS, _GLOBAL, _NARROW),
    "Laguna": _causal("Laguna", _HEADS, _GLOBAL, _NARROW, _SHARED),
    "Mellum": _causal("Mellum", _HEADS, _GLOBAL, _NARROW, {"layer_types": ["full_attention"] * 4}),
    "DeepSeek-V4": _causal(
        "DeepseekV4", _HEADS, {"n_routed_experts": 4, "n_shared_experts": 1}, _NARROW
    ),
}


def check(name: str) -> None:
    """Compares a cut into three, in one process, with the uncut model.

    Raises:
        AssertionError: If the loss or a gradient differs.
        PipegradError: If the cut is refused.
    """
    compare_with_uncut(ROUTED[name].build(), torch.randint(3, 61, (2, 9)))
