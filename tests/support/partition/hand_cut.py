"""Small transformers models of several families, and how they are cut by hand.

transformers is imported in functions: its import takes seconds, also for who runs other tests.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, TOKENS = 96, 7


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        kind: Its class in transformers.
        config: What its configuration is made of.
        layers: The lists of layers, in the order of the model.
        first: Modules that the first stage has alone.
        last: Modules that the last stage has alone.
    """

    kind: str
    config: dict[str, Any]
    layers: tuple[str, ...] = ("model.layers",)
    first: tuple[str, ...] = ("model.embed_tokens",)
    last: tuple[str, ...] = ("model.norm", "lm_head")

    def model(self, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
        """Returns a model with transformers' own initial values, in eval mode."""
        import transformers

        torch.manual_seed(seed)
        cls = getattr(transformers, self.kind)
        return cls(cls.config_class(**self.config | more)).to(dtype).eval()

    def stages(self, model: nn.Module, num_stages: int = 2) -> dict[int, nn.Module]:
        """Returns all stages of a model; the module tree is copied, its tensors are not."""
        layers = [
            f"{name}.{i}"
            for name in self.layers
            for i in range(len(model.get_submodule(name)))  # type: ignore[arg-type]
        ]
        per_stage = math.ceil(len(layers) / num_stages)
        stage_of = {name: i // per_stage for i, name in enumerate(layers)}
        stage_of |= dict.fromkeys(self.first, 0) | dict.fromkeys(self.last, num_stages - 1)
        return {i: _with_stand_ins(model, "", stage_of, i) for i in range(num_stages)}


def _with_stand_ins(
    module: nn.Module, name: str, stage_of: dict[str, int], stage: int
) -> nn.Module:
    if stage_of.get(name, stage) != stage:
        return nn.Identity()
    new = copy.copy(module)
    new._parameters, new._buffers = dict(module._parameters), dict(module._buffers)
    new._modules = {
        child_name: child
        and _with_stand_ins(child, f"{name}.{child_name}".lstrip("."), stage_of, stage)
        for child_name, child in module._modules.items()
    }
    return new


_SMALL = (
    {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1}
    | {"eos_token_id": 2}
)
_LLAMA = _SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", _LLAMA),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2},
        layers=("transformer.h",),
        first=("transformer.wte", "transformer.wpe"),
        last=("transformer.ln_f", "lm_head"),
    ),
    "bert": Family(
        "BertForMaskedLM",
        _SMALL,
        layers=("bert.encoder.layer",),
        first=("bert.embeddings",),
        last=("cls",),
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        layers=("encoder.block", "decoder.block"),
        first=("shared", "encoder.embed_tokens", "encoder.final_layer_norm"),
        last=("decoder.embed_tokens", "decoder.final_layer_norm", "lm_head"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", _LLAMA | {"num_local_experts": 4, "tie_word_embeddings": False}
    ),
}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters and buffers by name, also those that are not saved, and ties twice."""
    return {
        **{n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)},
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def joined(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Returns the tensors of all stages, which must agree where several have one."""
    every = dict[str, Tensor]()
    for stage in stages:
        for name, tensor in tensors(stage).items():
            assert name not in every or torch.equal(every[name], tensor), name
            every[name] = tensor
    return every


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Asserts names, dtypes and bits."""
    assert found.keys() == expected.keys()
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def logits(model: nn.Module) -> Tensor:
    """Returns what a model makes of one batch."""
    ids = torch.arange(2 * TOKENS).reshape(2, TOKENS) % VOCAB
    more = {"decoder_input_ids": ids} if hasattr(model, "decoder") else {}
    with torch.no_grad():
        return model(input_ids=ids, **more).logits  # type: ignore[no-any-return]
