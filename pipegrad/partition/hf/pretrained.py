"""Pretrained: transformers models on the meta device, and the values of their stages.

All ranks make the uncut model on the meta device, where it needs no memory. Then each rank reads
its stages from safetensors files, or initializes them from a seed. Stages have the names of the
uncut model.

Files may have other names and layouts than the model. For example, transformers 5 holds the experts
of a layer in one tensor, and saves them one by one. The loader of transformers converts them.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

from pipegrad.comm.agreement import AGREE_SECONDS, agree, agree_keeping, same, slow_seconds
from pipegrad.errors import ConfigError, WeightsError, refuse
from pipegrad.model.ties import plain_name
from pipegrad.partition.cutting.copies import without_memory, without_values
from pipegrad.partition.hf.files import Weights, extra, listed, put
from pipegrad.partition.hf.gathered import tensors_by_name
from pipegrad.partition.hf.initial_values import initial_values

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_Places = dict[str, list[tuple[nn.Module, str]]]  # name -> the modules and attributes that have it
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def meta_model(
    source: str | Path | PreTrainedConfig,
    *,
    kind: type | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Returns an uncut model whose tensors are on the meta device, in training mode.

    All ranks call it. Nothing is downloaded.

    Args:
        source: A directory that ``save_pretrained`` wrote, a ``config.json``, or a configuration.
        kind: A class of transformers, for example ``AutoModelForCausalLM``. The default is the
            class that the configuration names in ``architectures``.
        dtype: Dtype of the parameters. The default is the dtype that the configuration names, or
            the dtype of the directory's first floating-point tensor.
        trust_remote_code: True lets transformers run the directory's own code.

    Raises:
        ConfigError: If the library transformers is missing, or the configuration cannot be used.
        WeightsError: If the directory is missing.
        AgreementError: If ranks have different configurations.
    """

    def make() -> tuple[PreTrainedModel, str]:
        model = _made(source, kind, dtype, trust_remote_code)
        text = f"{type(model).__name__} {model.dtype} {model.config.to_json_string(use_diff=False)}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return model, f"{type(model).__name__} {digest}"

    seconds = slow_seconds(torch.device("cpu"), AGREE_SECONDS)  # a disk may be slow
    model, digests = agree_keeping("make the model", make, timeout_seconds=seconds)
    same("the configuration of the model", dict(enumerate(digests)))
    return model


def load_stages(
    directory: str | Path | None,
    model: PreTrainedModel,
    stages: Collection[nn.Module],
    *,
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Gives the stages of this rank saved or initial values. All ranks call it.

    Only tensors of these stages are read, one after the other. The host needs memory for the stages
    and for one file. The loader of transformers converts the directory's names and layouts. Tied
    parameters become one parameter on this rank. Tensors that are not on the meta device stay.

    An initial value depends only on the seed and its name: not on the cut, the rank, the device or
    other tensors. Therefore tied tensors on different stages have equal values. transformers draws
    other values after ``torch.manual_seed``.

    Raises:
        WeightsError: If a file is missing or damaged, if a tensor is missing or has another shape,
            or if the model does not initialise it. All ranks raise it, or an AgreementError that
            lists the errors.
        AgreementError: If ranks have different seeds.
    """

    def load() -> str:
        first = first_names(model)
        places = _on_meta(stages, first)
        values = {} if directory is None else _stored(Path(directory), model, first, places)
        saved = {first[name] for name in model.state_dict() if name in first}
        missing = (saved & places.keys()) - values.keys()
        if missing and seed is None:
            raise WeightsError(
                f"{directory} has no values for {listed(missing)} of {type(model).__name__}; is it "
                f"of another model? With a seed they get initial values"
            )
        for name, value in values.items():
            put(places.pop(name), value, device)
        # Buffers that are not saved, such as the frequencies of RoPE, get initial values.
        for name, value in initial_values(model, places, seed or 0).items():
            put(places[name], value, device)
        for stage in stages:  # moves a buffer that a constructor made on the CPU
            stage.to(device)
        return str(seed)

    seconds = slow_seconds(torch.device(device), AGREE_SECONDS)  # a disk may be slow
    seeds = agree("load the stages", load, timeout_seconds=seconds)
    same("the seed of the stages", dict(enumerate(seeds)))


def first_names(model: nn.Module, tied: Iterable[Collection[str]] = ()) -> dict[str, str]:
    """Returns for each name the name under which its tensor is saved; a tied tensor has several.

    Args:
        model: The uncut model. The first name is no target in transformers' list of its ties.
        tied: Groups of names of one tensor each, in addition to the ties of the model's tensors.
    """
    by_tensor = defaultdict[int, list[str]](list)
    for name, tensor in tensors_by_name(model).items():
        by_tensor[id(tensor)].append(plain_name(name))
    targets = getattr(model, "all_tied_weights_keys", {})  # each names its source
    first = dict[str, str]()
    for names in chain(by_tensor.values(), tied):
        name = next((name for name in names if name not in targets), next(iter(names)))
        first |= dict.fromkeys(names, name)
    return first


def _made(
    source: str | Path | PreTrainedConfig,
    kind: type | None,
    dtype: torch.dtype | None,
    trusts: bool,
) -> PreTrainedModel:
    transformers: Any = extra("transformers")
    path = Path(source) if isinstance(source, str | Path) else None
    where = str(source) if path is not None else f"a {type(source).__name__}"
    config: Any = copy.deepcopy(source) if path is None else _config(transformers, path, trusts)
    refuse(
        ConfigError,
        {
            f"{where} is no directory, config.json or configuration of transformers": (
                not isinstance(config, transformers.PreTrainedConfig)
            ),
            f"{where}: quantized weights cannot be trained; use the original ones": (
                getattr(config, "quantization_config", None) is not None
            ),
        },
    )
    cls: Any = kind or _architecture(transformers, config, where, trusts)
    # An Auto class has from_config, which calls _from_config of a model's class.
    make = getattr(cls, "from_config", None) or getattr(cls, "_from_config", None)
    if make is None:
        raise ConfigError(f"kind is {cls!r}, expected a class of models of transformers")
    folder = path if path is not None and path.is_dir() else None
    dtype = dtype or config.dtype or (folder and _first_dtype(folder)) or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}, expected one of torch's, such as torch.bfloat16")
    try:
        # Without an answer, an Auto class prompts the user on the terminal.
        answer = {"trust_remote_code": trusts} if hasattr(cls, "from_config") else {}
        with torch.device("meta"):
            model = make(config, dtype=dtype, **answer)
    except Exception as error:  # any error of a model about its configuration
        raise ConfigError(f"{where}: {cls.__name__} cannot be made of it: {error}") from error
    # Drop all values, because some constructors make tensors on the CPU for any device of torch,
    # and `load_stages` would keep their values.
    model = without_values(model)
    if folder is not None:
        _keep_in_float32(model, dtype)
    if folder is not None and (file := folder / "generation_config.json").exists():
        try:
            read = transformers.GenerationConfig.from_pretrained
            model.generation_config = read(folder, local_files_only=True)
        except Exception as error:  # any error of transformers about a file
            raise ConfigError(f"{file} cannot be read: {error}") from error
    return model


def _config(transformers: Any, path: Path, trusts: bool) -> Any:  # noqa: ANN401 - of any model
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise WeightsError(
            f"there is no {file}: expected a directory that save_pretrained wrote, on this machine "
            f"(nothing is downloaded), or a config.json"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trusts
        )
    except Exception as error:  # any error of transformers about a file
        raise ConfigError(f"{file} is no configuration of transformers: {error}") from error
    for auto, kind in (getattr(config, "auto_map", None) or {}).items():
        if trusts and auto.startswith("AutoModel") and "--" in str(kind):
            raise ConfigError(
                f"{file} names code of another repository, {kind!r}, and nothing is downloaded: "
                f"put the code into the directory, and name it there"
            )
    return config


def _architecture(transformers: Any, config: Any, where: str, trusts: bool) -> Any:  # noqa: ANN401
    names = list(config.architectures or ())
    own = (getattr(config, "auto_map", None) or {}) if trusts else {}
    autos = [auto for auto, kind in own.items() if names and str(kind).endswith(f".{names[0]}")]
    cls = getattr(transformers, [*autos, *names][0], None) if names else None
    if cls is None:
        raise ConfigError(
            f"{where}: architectures is {names}, expected the name of a class of transformers; "
            f"or give the class, for example kind=AutoModelForCausalLM"
        )
    return cls


def _first_dtype(folder: Path) -> torch.dtype | None:
    weights = Weights(folder)
    dtypes = (weights.entry(name).get_dtype() for name in weights.files)
    return next((_FLOATS[dtype] for dtype in dtypes if dtype in _FLOATS), None)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:  # noqa: ANN401
    """Converts the parameters to float32 that the model never has in half precision."""
    plan = model._get_dtype_plan(dtype)
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in plan]
    for name, parameter in model.named_parameters():
        if any(pattern.search(name) for pattern in patterns):
            parameter.data = parameter.data.to(torch.float32)


def _on_meta(stages: Collection[nn.Module], first: Mapping[str, str]) -> _Places:
    """Returns the places of tensors on the meta device, by the first of their names."""
    places = defaultdict[str, list[tuple[nn.Module, str]]](list)
    for stage in stages:
        for name, tensor in tensors_by_name(stage).items():
            if tensor.is_meta:
                path, _, attribute = name.rpartition(".")
                plain = plain_name(name)
                places[first.get(plain, plain)].append((stage.get_submodule(path), attribute))
    if unknown := places.keys() - first.values():
        raise WeightsError(f"the uncut model has no {listed(unknown)}, but a stage has")
    return dict(places)


@dataclass(frozen=True)
class _Entry:
    """A tensor of weights, which is read when transformers' loader indexes it."""

    weights: Weights
    name: str

    def __getitem__(self, _: object) -> torch.Tensor:
        return self.weights.read(self.name)


def _stored(
    folder: Path,
    model: PreTrainedModel,
    first: Mapping[str, str],
    names: Collection[str],
) -> dict[str, torch.Tensor]:
    """Returns the tensors that a directory has under any of their names, by their first name.

    The loader of transformers renames and converts them. No other tensor is read.

    Raises:
        WeightsError: If a tensor has another shape, or if a tied one was saved with two values.
    """
    loading: Any = extra("transformers.core_model_loading")
    mapping: Any = extra("transformers.conversion_mapping").get_model_conversion_mapping(model)
    options = extra("transformers.modeling_utils").LoadStateDictConfig(weight_mapping=mapping)
    weights, target = Weights(folder), without_memory(model)
    # The loader ignores tensors that are not in this state.
    state = {n: x for n, x in model.state_dict().items() if first.get(n) in names}
    vars(target)["state_dict"] = lambda: state
    with (  # in this thread, a tensor after the other, and without a bar for each rank
        patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"),
        patch.object(loading, "tqdm", lambda items, **_: items),
    ):
        stored = {name: _Entry(weights, name) for name in weights.files}
        info, _ = loading.convert_and_load_state_dict_in_model(target, stored, options)
    for name, shape, expected in sorted(info.mismatched_keys):
        raise WeightsError(
            f"{weights.files.get(name, folder)}: {name} has shape {tuple(shape)}, expected "
            f"{tuple(expected)}, as that of the model; is config.json of this model?"
        )
    for name, error in sorted(info.conversion_errors.items()):
        raise WeightsError(f"{folder}: {name} cannot be converted: {error}")
    found = dict[str, torch.Tensor]()
    tensors = tensors_by_name(target)
    for name in sorted(state.keys() - info.missing_keys, key=lambda name: first[name] != name):
        value = found.setdefault(first[name], tensors[name])
        if value is not tensors[name] and not torch.equal(value, tensors[name]):
            raise WeightsError(
                f"{folder} has different values for {first[name]} and {name}, which are tied in "
                f"the model; set tie_word_embeddings to false in config.json"
            )
    return found
