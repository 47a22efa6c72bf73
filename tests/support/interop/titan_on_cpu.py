"""torchtitan's own trainer on CPUs: stands in for what it wants of an accelerator.

A program for torchrun, with the arguments of ``torchtitan.train`` but ``--module`` and
``--config``. It trains torchtitan's Llama debug model, tied, on the text that Python carries.
"""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

import torch

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan reads it when it is imported

import torchtitan.components.metrics as titan_metrics  # noqa: E402
import torchtitan.distributed.fsdp as titan_fsdp  # noqa: E402
import torchtitan.distributed.utils as titan_utils  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.param_init import skip_param_init  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.train import main  # noqa: E402

from pipegrad.interop.torchtitan import enable_tied_pipeline  # noqa: E402

ASSETS = Path(os.environ["TITAN_ASSETS"])  # where the tokenizer is, or is to be


class NoMemoryMonitor:
    """torchtitan's monitor asks for the properties of an accelerator."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return titan_metrics.DeviceMemStats(*[0] * len(titan_metrics.DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        """Has nothing to reset."""


divide = titan_fsdp.disable_fsdp_gradient_division


def without_premultiplied_sum(model: torch.nn.Module) -> None:
    """gloo has no PREMUL_SUM, by which FSDP2 would multiply by 1."""
    divide(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def topics(_path: str) -> Any:
    texts = sorted(pydoc_data.topics.topics.items())
    return Dataset.from_list([{"text": text} for _, text in texts])


def write_tokenizer() -> None:
    """Writes a tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {letter: number for number, letter in enumerate([*letters, "<bos>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(ASSETS / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (ASSETS / "tokenizer_config.json").write_text(json.dumps(settings))


def tied() -> Any:
    """Returns the configuration: `torchtitan.train` finds it by its name."""
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.enable_weight_tying = True
    model.tok_embeddings.param_init = {"weight": skip_param_init}
    for layer in model.layers:  # FlexAttention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dataloader.dataset = "topics"
    config.hf_assets_path = str(ASSETS)
    config.training = TrainingConfig(
        local_batch_size=8,
        seq_len=64,
        steps=5,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )
    config.validator.enable = False
    config.debug.seed = 1
    return config


if __name__ == "__main__":
    titan_metrics.build_device_memory_monitor = NoMemoryMonitor
    titan_fsdp.disable_fsdp_gradient_division = without_premultiplied_sum
    titan_utils.set_pg_timeouts = lambda **_: None  # its barrier names devices, which gloo refuses
    text_datasets.DATASETS["topics"] = DatasetConfig(
        path="", loader=topics, sample_processor=lambda sample: sample["text"]
    )
    if not (ASSETS / "tokenizer.json").exists():
        write_tokenizer()
    if os.environ.get("TITAN_TIED"):
        enable_tied_pipeline()
    sys.argv[1:1] = ["--module", "tests.support.interop.titan_on_cpu", "--config", "tied"]
    main()
