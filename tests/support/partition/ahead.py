"""DeepSeek-V3 with multi-token prediction: transformers has the model, but not these modules.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from tests.support.partition.families import SIZES

WEIGHT = 0.3  # of the losses of tokens ahead, as a mean over depths
DEPTHS = 2


class Ahead(nn.Module):
    """The module of one depth: reads the hidden state of a token, and one that comes later."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.enorm, self.hnorm = DeepseekV3RMSNorm(width), DeepseekV3RMSNorm(width)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = DeepseekV3DecoderLayer(config, config.num_hidden_layers + number)
        self.norm = DeepseekV3RMSNorm(width)

    def forward(self, hidden: Tensor, embedded: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)
        hidden = self.block(self.eh_proj(both), **options)
        return hidden, self.norm(hidden)


class DeepseekV3AheadForCausalLM(DeepseekV3ForCausalLM):  # type: ignore[misc]
    """DeepSeek-V3 whose embedding and head are those of the modules that look ahead, too."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mtp = nn.ModuleList(Ahead(config, number) for number in range(DEPTHS))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutputWithPast:
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        hidden = x = self.model(**given).last_hidden_state
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=positions,
        )
        options = {
            "attention_mask": mask,
            "position_ids": positions,
            "position_embeddings": self.model.rotary_emb(hidden, positions),
        }
        tokens, ahead = input_ids, []
        for module in self.mtp:
            tokens = F.pad(tokens[:, 1:], (0, 1))
            x, normed = module(x, self.model.embed_tokens(tokens), **options)
            ahead.append(normed)
        # (rows, 1 + depths, tokens, classes): a cut hands on nothing but logits.
        return CausalLMOutputWithPast(logits=self.lm_head(torch.stack([hidden, *ahead], 1)))


def loss_ahead(logits: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of all tokens, and that of the tokens ahead, ``mtp_loss``."""
    first, *others = (
        F.cross_entropy(x.mT[..., : -k - 1], target[:, k + 1 :])
        for k, x in enumerate(logits.unbind(1))
    )
    mtp_loss = torch.stack(others).mean()
    return first + WEIGHT * mtp_loss, {"mtp_loss": mtp_loss}


def deepseek_ahead(*, ties: bool = False) -> Any:
    """Returns a small one, with the same bits in every process."""
    torch.manual_seed(7)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    sizes = SIZES | {"num_hidden_layers": 4, "num_key_value_heads": 2, "v_head_dim": 8}
    config = DeepseekV3Config(
        **sizes, **experts, **groups, **ranks, tie_word_embeddings=ties, output_router_logits=False
    )
    return DeepseekV3AheadForCausalLM(config).train()
