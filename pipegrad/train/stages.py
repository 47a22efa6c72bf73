"""Stages: every rank makes the model, keeps its own stages, and tries them out.

Many errors of a model appear only when it runs. Here they are errors of the configuration, on all
ranks alike, before any training.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Cut, Scheduler, Stage, Topology, run_files
from pipegrad.comm.activity import failure_of
from pipegrad.comm.agreement import agree, agree_keeping, nobody_comes
from pipegrad.errors import AgreementError, ConfigError, WeightsError
from pipegrad.partition.cut_model import Source
from pipegrad.partition.hf.files import extra
from pipegrad.partition.hf.pretrained import meta_model
from pipegrad.plugins.written import digest
from pipegrad.train.config import Config, beside, with_options
from pipegrad.train.corpus import TOKENIZER, Tokenizer, tokenizer_file
from pipegrad.train.dataset import INPUT_IDS, Feed, Inputs, Texts

if TYPE_CHECKING:
    from pipegrad.train.job import Job

_PREPARE_SECONDS = 600.0  # timeout for the slowest rank to make or to try the model
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by precision
_DTYPES = ("float32", "bfloat16", "float16")
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Files in the folder of a tokenizer.json that belong to it.
_BESIDE = (_TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")
_PLAIN_TOKENIZER = '{"tokenizer_class": "PreTrainedTokenizerFast"}\n'


def build_stages(
    job: Job, topology: Topology, feed: Feed, texts: Texts, device: torch.device
) -> tuple[Cut, list[Stage]]:
    """Returns the cut and this rank's stages on its device; every rank calls it.

    Raises:
        PipegradError: If the model cannot be made or cut; on all ranks.
    """
    config = job.config
    cut = _make_model(job, topology, feed, texts.tokenizer)
    own = cut.stages(topology.local_stages, recompute=config.train.recompute)

    def place() -> None:
        for stage in own:
            stage.module.to(device)
        if (choice := config.parallel.prepare) is not None:
            prepare = with_options(config, "parallel.prepare", choice, lambda names: names[:2])
            with config.refusing("parallel.prepare", "it fails: "):
                prepare([stage.module for stage in own], topology)
        for stage in own:
            if (dtype := _AUTOCAST.get(config.train.precision)) is not None:
                autocast = torch.autocast(device.type, dtype=dtype)
                stage.module.forward = autocast(stage.module.forward)

    agree("placing the stages", place, timeout_seconds=_PREPARE_SECONDS)
    return cut, own


def _make_model(job: Job, topology: Topology, feed: Feed, tokenizer: Tokenizer | None) -> Cut:
    """Makes and cuts the model on every rank."""
    config = job.config
    example: Inputs | None = None
    uncut = job.model() if config.model.is_transformers else None
    inputs = None if feed.pair is None else feed.pair[0]
    if uncut is None and job.dataset is not None and inputs is not None:
        # Take one rank's rows, because data ranks may have sequences of other lengths, and all must
        # cut alike.
        named = {"": inputs} if isinstance(inputs, Tensor) else inputs
        rows = {name: tensor[:2].cpu().clone() for name, tensor in named.items()}
        looked: Mapping[str, Tensor] = agree("a look at the first batch", lambda: rows)[0]
        example = looked.get("", looked)

    def make() -> tuple[Cut, tuple[object, object]]:
        if uncut is None:
            cut = job.cut(job.model(topology=topology), example)
        else:
            if isinstance(inputs, Mapping):
                check_batch(config, uncut, inputs)
            if tokenizer is not None:
                check_tokenizer(config, uncut, tokenizer)
            cut = job.cut(uncut)
        if not any(p.requires_grad for m in cut.modules.values() for p in m.parameters()):
            config.refuse("model", "it has no parameter that requires a gradient: nothing to train")
        location = tuple(topology.coordinate(axis) for axis in config.parallel.dimensions)
        held = (buffer for module in cut.modules.values() for buffer in module.buffers())
        buffers = [digest(x) for x in held if type(x) is Tensor and not x.is_meta]
        return cut, (location, (cut.begins(topology.local_stages), buffers))

    cut, replies = agree_keeping("the model", make, timeout_seconds=_PREPARE_SECONDS)
    # Ranks of one location must have made the same values, also of stages that only one of them
    # keeps. Other locations may hold other shards.
    first: dict[object, tuple[int, object]] = {}
    for rank, (location, values) in enumerate(replies):
        other, expected = first.setdefault(location, (rank, values))
        if values != expected:
            config.refuse(
                "model.factory",
                f"it makes other values on rank {rank} than on rank {other}, though train.seed "
                f"seeds torch, numpy and random alike: draw from these alone, in an order that no "
                f"set or hash decides",
            )
    if uncut is not None:
        load_stages(config, cut, topology.local_stages)
    return cut


def try_out(
    job: Job,
    scheduler: Scheduler,
    modules: Sequence[nn.Module],
    *,
    feed: Feed,
    tokenizer: Tokenizer | None,
    device: torch.device,
) -> None:
    """Evaluates a batch, and restores the buffers of this rank's stages; every rank calls it.

    Args:
        job: The job.
        scheduler: The pipeline.
        modules: This rank's stages.
        feed: Has the first batch of this rank.
        tokenizer: Makes the tokens of a text.
        device: The device of this rank's stages.

    Raises:
        ConfigError: If the model or the loss fails, or the loss is not finite; on all ranks.
    """
    pair = feed.pair
    assert pair is not None
    if job.dataset is None:  # a text may not have the largest token for many steps
        assert tokenizer is not None
        tokens = largest_first(job.config, tokenizer).repeat(job.schedule.num_sequences, 1)
        pair = tokens, tokens
    inputs, target = job.placed(pair, scheduler.topology, device)
    # A forward may replace a buffer, or write into it.
    buffers = [
        (layer, name, buffer, buffer.clone())
        for module in modules
        for layer in module.modules()
        for name, buffer in layer.named_buffers(recurse=False)
    ]

    def evaluate() -> tuple[bool, str]:
        try:
            loss = scheduler.evaluate(inputs, target=target, outputs=False).loss.item()
        except (Exception, SystemExit) as error:
            if nobody_comes(error):
                raise
            failure = failure_of(error)
            return failure.follows, failure.error
        return False, "" if math.isfinite(loss) else f"the loss of the first batch is {loss}"

    replies = agree("trying the model out", evaluate, timeout_seconds=_PREPARE_SECONDS)
    for _, words in sorted(reply for reply in replies if reply[1]):
        job.config.refuse("model", " ".join(words.split()))  # one line
    for layer, name, buffer, before in buffers:
        setattr(layer, name, buffer)
        if not torch.equal(buffer, before):  # one that is expanded cannot be written
            with torch.no_grad():
                buffer.copy_(before)


def largest_first(config: Config, tokenizer: Tokenizer) -> Tensor:
    """Returns a sequence of tokens that begins with the largest one, ``(1, length)``."""
    length = config.data.sequence_length
    tokens = torch.arange(tokenizer.size - 1, tokenizer.size - 1 - length, -1)
    return tokens.remainder(tokenizer.size)[None]


# Models of ``[model] pretrained`` or ``config``. Every rank makes the uncut model without memory,
# cuts it, and gives its own stages their values.


def uncut_model(config: Config) -> Any:  # noqa: ANN401 - a PreTrainedModel
    """Returns the uncut model on the meta device; every rank must call it.

    Raises:
        ConfigError: If it cannot be made, is no causal language model, or is for shorter sequences.
    """
    key, path = _named(config)
    for name in sorted(config.model.options.keys() - {"dtype"}):
        config.refuse("model", f"a model of transformers has no option {name!r}; allowed: dtype")
    if (dtype := config.model.options.get("dtype")) not in (None, *_DTYPES):
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


def _named(config: Config) -> tuple[str, Path]:
    """Returns the key that names the model, and the path that the key has."""
    if config.model.pretrained is not None:
        return "model.pretrained", beside(config, config.model.pretrained)
    assert config.model.config is not None
    return "model.config", beside(config, config.model.config)


def _check_kind(config: Config, key: str, model: Any) -> None:  # noqa: ANN401 - a PreTrainedModel
    """Refuses a directory of another kind of model, whose weights do not fit a causal one."""
    expected = type(model).__name__
    found = (model.config.architectures or [expected])[0]
    # transformers makes causal models of encoders, too. Then they see the tokens that follow.
    auto: Any = extra("transformers.models.auto.modeling_auto")
    masked = model.config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_decoder = model.config.is_encoder_decoder or getattr(model.config, "is_decoder", False)
    if found == expected and masked and not is_decoder:
        found, expected = f"{found} with is_decoder = false", "a decoder"
    if found != expected:
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
    """Returns the number of tokens that a model takes; `sys.maxsize` without a limit."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if longest and longest > 0 else sys.maxsize  # XLNet's is -1


def ends_of(model: Any) -> list[int]:  # noqa: ANN401
    """Returns the tokens at which `generate` of transformers ends a text."""
    ends: Any = getattr(model.generation_config, "eos_token_id", None)
    return ends if isinstance(ends, list) else [ends]


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
    with config.refusing(key, "", WeightsError, AgreementError):
        cut.load(stages)


def save_model(config: Config, cut: Cut, folder: Path) -> None:
    """Writes a folder that transformers reads, with the tokenizer; every rank must call it.

    Raises:
        ConfigError: If it cannot be written.
    """
    tokenizer, is_first = tokenizer_file(config), dist.get_rank() == 0

    def make() -> None:
        if is_first:
            run_files.make_folder(folder)

    def copy() -> None:
        if is_first and tokenizer is not None:
            _copy_tokenizer(tokenizer, folder)

    words = f"the model cannot be written into {folder}: "
    with config.refusing("train.output", words, WeightsError, AgreementError, OSError, say=str):
        agree("the folder of the model", make)
        cut.save_pretrained(folder)
        agree("the tokenizer of the model", copy)


def _copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    run_files.replace(folder / TOKENIZER, run_files.read(tokenizer))
    for name in _BESIDE:
        if tokenizer.name == TOKENIZER and tokenizer.with_name(name).is_file():
            run_files.replace(folder / name, run_files.read(tokenizer.with_name(name)))
    # Without it transformers would take the tokenizer of the model's family.
    if not (folder / _TOKENIZER_CONFIG).exists():
        run_files.replace(folder / _TOKENIZER_CONFIG, _PLAIN_TOKENIZER.encode())
