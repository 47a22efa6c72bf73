"""Adapters of peft in stages: each kind trains as in one process, and loads into plain peft."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad import Scheduler, Topology, cut
from pipegrad.errors import TopologyError
from tests.support.partition.families import FAMILIES, VOCAB, Family
from tests.support.partition.twins import difference

pytestmark = [
    pytest.mark.ranks(2, seconds=300),
    pytest.mark.filterwarnings("ignore"),  # peft's, of tied weights and of its own code
]

peft = pytest.importorskip("peft")

ERROR = 1e-6
TASK: dict[str, Any] = {"task_type": "CAUSAL_LM"}
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], **TASK}
TOKENS: dict[str, Any] = {"token_indices": [3, 5], "target_modules": ["embed_tokens"], **TASK}
PROMPT: dict[str, Any] = {"num_virtual_tokens": 3, **TASK}
BOTH = ["embed_tokens", "lm_head"]
TIED = "tied modules beside LoRA"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {**LORA, "target_modules": "all-linear"}),
    "rows of the embedding": (
        "LoraConfig",
        {**LORA, "target_modules": ["q_proj", "embed_tokens"]},
    ),
    "a head beside LoRA": ("LoraConfig", {**LORA, "modules_to_save": ["lm_head"]}),
    TIED: (
        "LoraConfig",
        {**LORA, "modules_to_save": BOTH, "ensure_weight_tying": True},
    ),
    "tokens beside LoRA": ("LoraConfig", {**LORA, "trainable_token_indices": [3, 5]}),
    "tokens": ("TrainableTokensConfig", TOKENS),
    "an encoded prompt": ("PromptEncoderConfig", {**PROMPT, "encoder_hidden_size": 8}),
    "a prefix": ("PrefixTuningConfig", PROMPT),
    "a computed prefix": (
        "PrefixTuningConfig",
        {**PROMPT, "prefix_projection": True, "encoder_hidden_size": 4},
    ),
    # Peft exchanges the forward of attention for its own.
    "prompts inside of attention": (
        "AdaptionPromptConfig",
        {"adapter_len": 3, "adapter_layers": 2, **TASK},
    ),
}


def base(*, is_tied: bool) -> Any:
    """Returns a model in float32, as peft writes adapters."""
    family = FAMILIES["Llama 3.2"].with_layers(2)
    options = {**family.options, "tie_word_embeddings": is_tied}
    return Family(family.config, family.head, options).build().float()


@pytest.mark.parametrize(
    ("kind", "is_tied"),
    [*((kind, kind == TIED) for kind in KINDS), ("a head beside LoRA", True), ("tokens", True)],
)
def test_an_adapter_trains_as_in_one_process_and_loads_into_plain_peft(
    kind: str, is_tied: bool, tmp_path: Path
) -> None:
    def build() -> Any:
        name, options = KINDS[kind]
        model = peft.get_peft_model(base(is_tied=is_tied), getattr(peft, name)(**options))
        torch.manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:  # what begins with zeros hides mistakes
                    parameter.add_(0.05 * torch.randn_like(parameter))
        return model.train()

    true, parts = build(), cut(build(), 2)
    schedule = "zb-h1" if kind == "LoRA" else "1f1b"
    scheduler = Scheduler(parts, Topology.create(pipeline=2), schedule=schedule, num_microbatches=4)
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.5)
    expected = torch.optim.SGD([p for p in true.parameters() if p.requires_grad], lr=0.5)
    for seed in range(2):
        batch = FAMILIES["Llama 3.2"].batch(seed)
        loss = true(**batch).loss
        assert difference(scheduler.step(batch).loss, loss) <= ERROR * loss.item()
        loss.backward()
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    parts.save_pretrained(tmp_path)
    dist.barrier()
    loaded = peft.PeftModel.from_pretrained(base(is_tied=is_tied), tmp_path).eval()
    true.eval()
    given = {name: x for name, x in FAMILIES["Llama 3.2"].batch(3).items() if name != "labels"}
    with torch.no_grad():
        logits = true(**given).logits
        assert difference(loaded(**given).logits, logits) <= 10 * ERROR
        assert difference(build().eval()(**given).logits, logits) > 50 * ERROR  # it has learnt
    scheduler.close()


def test_adalora_is_refused() -> None:
    """Its loss has a term over all layers, and each stage added that of its own, in silence."""
    config = peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"], **TASK)
    model = peft.get_peft_model(base(is_tied=False), config)
    with pytest.raises(TopologyError, match="AdaLoRA adds a loss over the adapters of all layers"):
        cut(model, 2)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_of_a_quantized_model_train_as_in_one_process(bits: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    if dist.get_rank() == 0:
        options = {**FAMILIES["Llama 3.2"].options, **sizes}
        model: Any = Family("LlamaConfig", "LlamaForCausalLM", options).build()
        model.float().save_pretrained(tmp_path)
    dist.barrier()
    batch: dict[str, Any] = {"input_ids": torch.arange(24).reshape(4, 6) % VOCAB}
    batch["labels"] = batch["input_ids"]

    def build() -> Any:
        quantized = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=quantized, device_map="cpu", dtype=torch.float32
        )
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(**LORA, init_lora_weights=False)).train()

    true, parts = build(), cut(build(), 2)
    scheduler = Scheduler(parts, Topology.create(pipeline=2), schedule="1f1b", num_microbatches=2)
    loss = true(**batch).loss
    loss.backward()
    assert difference(scheduler.step(batch).loss, loss) <= 1e-4  # of int8 and bf16 kernels
    named = dict(true.named_parameters())
    largest = max(p.grad.abs().max().item() for p in named.values() if p.grad is not None)
    held = parts.modules[dist.get_rank()].named_parameters()
    trained = {name: p for name, p in held if p.requires_grad}
    for name, parameter in trained.items():
        assert difference(parameter.grad, named[name].grad) <= 1e-3 * largest, name
    prompt = {"input_ids": batch["input_ids"], "max_new_tokens": 3}
    assert torch.equal(parts.generate(**prompt), true.eval().generate(**prompt))
    parts.save_pretrained(tmp_path / "adapter")
    scheduler.close()
