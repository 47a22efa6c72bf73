"""Transformers model: what ``[model] pretrained`` or ``config`` names, for the trainer.

Every rank makes the uncut model without memory, cuts it, and gives its own stages their values.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrad import run_files
from pipegrad.comm.agreement import agree
from pipegrad.errors import AgreementError, ConfigError, WeightsError
from pipegrad.partition.cut_model import Cut, Source
from pipegrad.partition.hf.files import extra
from pipegrad.partition.hf.pretrained import meta_model
from pipegrad.plugins.registry import complaints_of
from pipegrad.train.config import Config, beside
from pipegrad.train.corpus import TOKENIZER, Tokenizer, tokenizer_file
from pipegrad.train.dataset import INPUT_IDS

_DTYPES = ("float32", "bfloat16", "float16")
_TOKENIZER_CONFIG = "tokenizer_config.json"
# What lies beside a tokenizer.json and belongs to it.
_BESIDE = (_TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")
_PLAIN_TOKENIZER = '{"tokenizer_class": "PreTrainedTokenizerFast"}\n'


def uncut_model(config: Config) -> Any:  # noqa: ANN401 - a PreTrainedModel
    """Returns the uncut model on the meta device; every rank must call it.

    Raises:
        ConfigError: If it cannot be made, is no causal language model, or is for shorter sequences.
    """
    key, path = _named(config)
    options = config.model.options
    if complaint := complaints_of(_options, options):
        config.refuse("model", f"a model of transformers {complaint}")
    if (dtype := options.get("dtype")) not in (None, *_DTYPES):
        config.refuse("model.dtype", f"expected one of {[*_DTYPES]}")
    try:
        transformers: Any = extra("transformers")
        kind = transformers.AutoModelForCausalLM
        model = meta_model(path, kind=kind, dtype=getattr(torch, dtype) if dtype else None)
    except (ConfigError, WeightsError) as error:
        # transformers lists all classes that it has on further lines.
        config.refuse(key, str(error).partition("\n")[0], cause=error)
    _check_kind(config, key, model)
    if config.data.dataset is None:
        _check_length(config, "data.sequence_length", model, config.data.sequence_length)
    return model


def _options(*, dtype: str | None = None) -> None:
    """Has the options of a model of transformers."""


def _named(config: Config) -> tuple[str, Path]:
    """Returns the key that names the model, and what it names."""
    if config.model.pretrained is not None:
        return "model.pretrained", beside(config, config.model.pretrained)
    assert config.model.config is not None
    return "model.config", beside(config, config.model.config)


def _check_kind(config: Config, key: str, model: Any) -> None:  # noqa: ANN401 - a PreTrainedModel
    """Refuses a directory of another kind of model, whose weights do not fit a causal one."""
    named = (model.config.architectures or [type(model).__name__])[0]
    if named != type(model).__name__:
        _refuse_kind(config, key, named, type(model).__name__)
    # transformers makes causal models of encoders, too. Then they see the tokens that follow.
    auto: Any = extra("transformers.models.auto.modeling_auto")
    masked = model.config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_decoder = model.config.is_encoder_decoder or getattr(model.config, "is_decoder", False)
    if masked and not is_decoder:
        _refuse_kind(config, key, f"{named} with is_decoder = false", "a decoder")


def _refuse_kind(config: Config, key: str, found: str, expected: str) -> NoReturn:
    config.refuse(
        key,
        f"it is a {found}, and the trainer trains causal language models ({expected}): train "
        f"others with pipegrad.cut and a loop of your own",
    )


def _check_length(config: Config, key: str, model: Any, length: int) -> None:  # noqa: ANN401
    if length > (longest := positions(model)):
        config.refuse(
            key,
            f"the model has positions for {longest} tokens (max_position_embeddings), and "
            f"sequences have {length}: choose shorter ones",
        )


def positions(model: Any) -> int:  # noqa: ANN401
    """Returns how many tokens a model takes; no limit is `sys.maxsize`."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if longest and longest > 0 else sys.maxsize  # XLNet's is -1


def check_tokenizer(config: Config, model: Any, tokenizer: Tokenizer) -> None:  # noqa: ANN401
    """Refuses a tokenizer with more tokens than the model."""
    size = model.config.get_text_config().vocab_size
    if tokenizer.size > size:
        config.refuse(
            "model",
            f"it has a vocabulary of {size} tokens, and the tokenizer "
            f"({tokenizer_file(config) or 'bytes'}) has {tokenizer.size}: choose the tokenizer of "
            f"the model, or a vocab_size of {tokenizer.size} or more",
        )


def check_batch(config: Config, model: Any, inputs: Mapping[str, Tensor]) -> None:  # noqa: ANN401
    """Refuses a batch that is too long, or has names that the model would ignore."""
    known = set(inspect.signature(type(model).forward).parameters) - {"self", "kwargs", "labels"}
    unknown = sorted(inputs.keys() - known)
    if unknown:
        config.refuse(
            "data.dataset",
            f"its batches have {unknown}, which {type(model).__name__} does not take: leave out "
            f"what is not of {sorted(known)}, labels and target",
        )
    _check_length(config, "data.dataset", model, inputs[INPUT_IDS].shape[1])


def load_stages(config: Config, cut: Cut, stages: Sequence[int]) -> None:
    """Gives the stages of this rank their values, on the CPU; every rank must call it.

    Raises:
        ConfigError: If the directory lacks a value, or cannot be read.
    """
    key, path = _named(config)
    is_saved = key == "model.pretrained"
    cut.source = Source("cpu", None if is_saved else config.train.seed, path if is_saved else None)
    try:
        cut.load(stages)
    except (WeightsError, AgreementError) as error:
        config.refuse(key, str(error), cause=error)


def save_model(config: Config, cut: Cut, folder: Path) -> None:
    """Writes a folder that transformers reads, with the tokenizer; every rank must call it.

    Raises:
        ConfigError: If it cannot be written.
    """
    tokenizer = tokenizer_file(config)

    def make() -> None:
        if dist.get_rank() == 0:
            run_files.make_folder(folder)

    def copy() -> None:
        if dist.get_rank() == 0 and tokenizer is not None:
            _copy_tokenizer(tokenizer, folder)

    try:
        agree("the folder of the model", make)
        cut.save_pretrained(folder)
        agree("the tokenizer of the model", copy)
    except (WeightsError, AgreementError, OSError) as error:
        complaint = f"the model cannot be written into {folder}: {error}"
        config.refuse("train.output", complaint, cause=error)


def _copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    run_files.replace(folder / TOKENIZER, run_files.read(tokenizer))
    for name in _BESIDE:
        if tokenizer.name == TOKENIZER and tokenizer.with_name(name).is_file():
            run_files.replace(folder / name, run_files.read(tokenizer.with_name(name)))
    # Without it transformers would take the tokenizer of the model's family.
    if not (folder / _TOKENIZER_CONFIG).exists():
        run_files.replace(folder / _TOKENIZER_CONFIG, _PLAIN_TOKENIZER.encode())
