"""A Llama with multi-token prediction: transformers has the model, but not these modules.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from tests.support.partition.families import GROUPED

WEIGHT = 0.3  # of the losses of tokens ahead, as a mean over depths
DEPTHS = 2


class Ahead(nn.Module):
    """The module of one depth: reads the hidden state of a token, and one that comes later."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.enorm, self.hnorm = LlamaRMSNorm(width), LlamaRMSNorm(width)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = LlamaDecoderLayer(config, config.num_hidden_layers + number)
        self.norm = LlamaRMSNorm(width)

    def forward(self, hidden: Tensor, embedded: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)
        hidden = self.block(self.eh_proj(both), **options)
        return hidden, self.norm(hidden)


@dataclass
class AheadOutput(CausalLMOutputWithPast):  # type: ignore[misc]
    """With the loss of all depths."""

    mtp_loss: Tensor | None = None


class LlamaAheadForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama whose embedding and head are those of the modules that look ahead, too."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mtp = nn.ModuleList(Ahead(config, number) for number in range(DEPTHS))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> AheadOutput:
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        hidden = x = self.model(**given).last_hidden_state
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        options = {"position_ids": positions}
        options["attention_mask"] = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=positions,
        )
        options["position_embeddings"] = self.model.rotary_emb(hidden, positions)
        tokens, losses = input_ids, []
        logits, loss, mtp_loss = self.lm_head(hidden), None, None
        for depth, module in enumerate(self.mtp, 1):
            tokens = F.pad(tokens[:, 1:], (0, 1))
            x, normed = module(x, self.model.embed_tokens(tokens), **options)
            if labels is not None:
                following = F.pad(labels[:, depth:], (0, depth), value=-100)
                losses.append(self._loss(self.lm_head(normed), following))
        if labels is not None:
            mtp_loss = sum(losses) / DEPTHS
            loss = self._loss(logits, labels) + WEIGHT * mtp_loss
        return AheadOutput(loss=loss, logits=logits, mtp_loss=mtp_loss)

    def _loss(self, logits: Tensor, labels: Tensor) -> Any:
        return self.loss_function(logits, labels, self.config.vocab_size)


def llama_ahead(*, ties: bool = False) -> Any:
    """Returns a small one, with the same bits in every process."""
    torch.manual_seed(7)
    sizes = GROUPED | {"num_hidden_layers": 4, "tie_word_embeddings": ties}
    return LlamaAheadForCausalLM(LlamaConfig(**sizes)).double().train()
