"""Pretrained: transformers models on the meta device, and the values that their stages get.

All ranks make the uncut model on the meta device, where it needs no memory. Then each rank reads
its stages from safetensors files, or starts them from a seed. Names are those of the uncut model.

[Note: other names] Weights may have other names and layouts than the model. transformers 5 holds,
for example, the experts of a layer in one tensor, and saves them one by one. Its own table says how
weights are converted, and its own operators do it, a tensor at a time.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipegrad.comm.agreement import AGREE_SECONDS, agree, agree_keeping, same, slow_seconds
from pipegrad.errors import ConfigError, WeightsError
from pipegrad.model.ties import plain_name
from pipegrad.partition.weights.files import Weights, extra, listed
from pipegrad.partition.weights.initial_values import initial_values

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
        kind: A class of transformers, for example ``AutoModelForCausalLM``. By default the class
            that the configuration names in ``architectures``.
        dtype: Of the parameters. By default the one that the configuration names, and of a
            directory without one that of its first tensor.
        trust_remote_code: Whether transformers may run the directory's own code.

    Raises:
        ConfigError: If the library transformers is missing, or the configuration cannot be used.
        WeightsError: If the directory is missing.
        AgreementError: If ranks have different configurations.
    """

    def make() -> tuple[PreTrainedModel, str]:
        model = _made(source, kind, dtype, trust_remote_code)
        return model, _digest(model)

    model, digests = agree_keeping("make the model", make, timeout_seconds=_patience("cpu"))
    same("the configuration of the model", dict(enumerate(digests)))
    return model


def load_stages(
    directory: str | Path,
    model: PreTrainedModel,
    stages: Collection[nn.Module],
    *,
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Gives the stages of this rank the values of a directory of safetensors files. All ranks call.

    Only tensors of these stages are read, one after the other: the host needs memory for the stages
    and for one file. The directory's names and layouts are converted as transformers does it. Tied
    parameters become one parameter on this rank. Tensors that are not on the meta device stay.

    Args:
        directory: What ``save_pretrained`` wrote.
        model: The uncut model, with its ties. The stages have its names.
        stages: Their tensors on the meta device are replaced. Dtype and requires_grad stay.
        device: Where the tensors go.
        seed: If given, tensors that the directory lacks get initial values as in `start_stages`,
            such as the head of a classifier. Otherwise they are an error.

    Raises:
        WeightsError: If a file is missing or damaged, or a tensor is missing or has another shape.
            All ranks raise it, or an AgreementError that lists the errors.
    """
    folder = Path(directory)

    def load() -> None:
        first = first_names(model)
        persistent, others = _on_meta(stages, first)
        weights = Weights(folder)
        reader = StoredTensors(weights, model, first)
        missing = [name for name in persistent if not reader.has(name)]
        if missing and seed is None:
            raise WeightsError(
                f"{folder} has no values for {listed(missing)} of {type(model).__name__}; is it "
                f"of another model? With a seed they get initial values"
            )
        for name, value in reader.values(set(persistent) - set(missing)):
            _put(persistent[name], value, name, device)
        weights.close()
        # Buffers that are not saved, such as the frequencies of RoPE, are made as at the start.
        fresh = others | {name: persistent[name] for name in missing}
        _fill(model, stages, fresh, seed or 0, device)

    agree("load the stages", load, timeout_seconds=_patience(device))


def start_stages(
    model: PreTrainedModel,
    stages: Collection[nn.Module],
    *,
    seed: int,
    device: str | torch.device = "cpu",
) -> None:
    """Gives the stages of this rank initial values, by the model's own rules. All ranks call.

    The values of a tensor depend on the seed and its name alone: not on the cut, the rank, the
    device or other tensors. So tied tensors on different stages are the same. They are not the
    values that transformers draws after ``torch.manual_seed``.

    Args:
        model: The uncut model, with its ties. The stages have its names.
        stages: Their tensors on the meta device are replaced. Dtype and requires_grad stay.
        seed: Any integer, the same on all ranks.
        device: Where the tensors go. They are drawn on the CPU.

    Raises:
        WeightsError: If the model does not initialise one of its tensors.
        AgreementError: If ranks have different seeds, or a rank failed.
    """

    def start() -> str:
        persistent, others = _on_meta(stages, first_names(model))
        _fill(model, stages, persistent | others, seed, device)
        return str(seed)

    seeds = agree("start the stages", start, timeout_seconds=_patience(device))
    same("the seed of the stages", dict(enumerate(seeds)))


def first_names(model: nn.Module, tied: Iterable[Collection[str]] = ()) -> dict[str, str]:
    """Returns for each name the name that its tensor is saved with; a tied tensor has several.

    Args:
        model: The uncut model. What transformers says of its ties decides which name is the first.
        tied: Names of one tensor each, beside those that the model shows.
    """
    tensors = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    by_tensor = defaultdict[int, list[str]](list)
    for name, tensor in tensors:
        by_tensor[id(tensor)].append(plain_name(name))
    targets = getattr(model, "all_tied_weights_keys", {})  # each names its source
    first = dict[str, str]()
    for names in chain(by_tensor.values(), tied):
        name = next((name for name in names if name not in targets), next(iter(names)))
        first |= dict.fromkeys(names, name)
    return first


def _patience(device: str | torch.device) -> float:
    """Returns how long ranks wait for each other. Files of a slow disk take minutes."""
    return slow_seconds(torch.device(device), AGREE_SECONDS)


def _digest(model: PreTrainedModel) -> str:
    text = f"{type(model).__name__} {model.dtype} {model.config.to_json_string(use_diff=False)}"
    return f"{type(model).__name__} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


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
    if not isinstance(config, transformers.PreTrainedConfig):
        raise ConfigError(f"{where} is no directory, config.json or configuration of transformers")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{where}: quantized weights cannot be trained; use the original ones")
    cls: Any = kind or _architecture(transformers, config, where, trusts)
    # An Auto class has from_config, and each of its models has what that calls.
    make = getattr(cls, "from_config", None) or getattr(cls, "_from_config", None)
    if make is None:
        raise ConfigError(f"kind is {cls!r}, expected a class of models of transformers")
    folder = path if path is not None and path.is_dir() else None
    dtype = dtype or config.dtype or (folder and _first_dtype(folder)) or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}, expected one of torch's, such as torch.bfloat16")
    try:
        # Without an answer an Auto class asks the user on the terminal.
        answer = {"trust_remote_code": trusts} if hasattr(cls, "from_config") else {}
        with torch.device("meta"):
            model = make(config, dtype=dtype, **answer)
    except Exception as error:  # whatever a model says of its configuration
        raise ConfigError(f"{where}: {cls.__name__} cannot be made of it: {error}") from error
    _drop_values(model)
    if folder is not None:
        _keep_in_float32(model, dtype)
        _read_generation_config(transformers, model, folder)
    return model


def _read_generation_config(transformers: Any, model: Any, folder: Path) -> None:  # noqa: ANN401
    file = folder / "generation_config.json"
    if not file.exists():
        return
    try:
        config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers says of a file
        raise ConfigError(f"{file} cannot be read: {error}") from error
    model.generation_config = config


def _drop_values(model: nn.Module) -> None:
    """Puts all saved tensors on the meta device.

    Some constructors make tensors on the CPU whatever torch's device is. Their values would be
    taken for those of a checkpoint.
    """
    new = dict[int, torch.Tensor]()
    for module in model.modules():
        tensors = module._parameters | module._buffers
        for attribute in tensors.keys() - module._non_persistent_buffers_set:
            old = tensors[attribute]
            if old is None or old.is_meta:
                continue
            if id(old) not in new:
                meta = old.detach().to("meta")
                is_parameter = isinstance(old, nn.Parameter)
                new[id(old)] = nn.Parameter(meta, old.requires_grad) if is_parameter else meta
            setattr(module, attribute, new[id(old)])


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
    except Exception as error:  # whatever transformers says of a file
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
    dtypes = (weights.spec(name).dtype for name in weights.files)
    return next((_FLOATS[dtype] for dtype in dtypes if dtype in _FLOATS), None)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:  # noqa: ANN401
    """Keeps those parameters in float32 that the model never has in half precision."""
    plan = model._get_dtype_plan(dtype)
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in plan]
    for name, parameter in model.named_parameters():
        if any(pattern.search(name) for pattern in patterns):
            parameter.data = parameter.data.to(torch.float32)


def _on_meta(stages: Collection[nn.Module], first: Mapping[str, str]) -> tuple[_Places, _Places]:
    """Returns the places of tensors on the meta device: of those that are saved, and of others."""
    persistent, others = defaultdict[str, Any](list), defaultdict[str, Any](list)
    unknown = list[str]()
    for stage in stages:
        for path, module in stage.named_modules(remove_duplicate=False):
            for attribute, tensor in chain(module._parameters.items(), module._buffers.items()):
                if tensor is None or not tensor.is_meta:
                    continue
                name = plain_name(f"{path}.{attribute}" if path else attribute)
                if name not in first:
                    unknown.append(name)
                    continue
                is_saved = attribute not in module._non_persistent_buffers_set
                places = (persistent if is_saved else others)[first[name]]
                if (module, attribute) not in places:
                    places.append((module, attribute))
    if unknown:
        raise WeightsError(f"the uncut model has no {listed(unknown)}, but a stage has")
    return dict(persistent), dict(others)


def _fill(
    model: PreTrainedModel,
    stages: Collection[nn.Module],
    places: _Places,
    seed: int,
    device: str | torch.device,
) -> None:
    """Puts initial values into places, and then has all tensors of the stages on one device."""
    for name, value in initial_values(model, places, seed).items():
        _put(places[name], value, name, device)
    for stage in stages:  # a buffer that a constructor made on the CPU is still there
        stage.to(device)


def _put(
    places: list[tuple[nn.Module, str]],
    value: torch.Tensor,
    name: str,
    device: str | torch.device,
) -> None:
    """Puts one tensor into all its places."""
    old = getattr(*places[0])
    if value.shape != old.shape:
        raise WeightsError(f"{name} has shape {tuple(value.shape)}, expected {tuple(old.shape)}")
    new = value.to(device, old.dtype)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for module, attribute in places:
        setattr(module, attribute, new)


@dataclass
class _Entry:
    """Tensors of a directory that become one or several tensors of a model.

    Attributes:
        name: The name of the first tensor of the model.
        converter: What makes them; None if one tensor is taken as it is.
        sources: The names in the directory, each with the pattern of the converter that it fits.
    """

    name: str
    converter: Any
    sources: list[tuple[str | None, str]] = field(default_factory=list)


class StoredTensors:
    """The tensors of a model that weights have; see [Note: other names].

    Args:
        weights: Of a directory.
        model: The uncut model of transformers; its tensors may be on the meta device.
        first: For each name the one name of its tensor; a tied tensor has several names.
    """

    def __init__(self, weights: Weights, model: Any, first: Mapping[str, str]) -> None:  # noqa: ANN401
        self._weights = weights
        self._model = model
        self._state = model.state_dict()
        self._aliases = defaultdict[str, list[str]](list)
        for name, first_name in first.items():
            self._aliases[first_name].append(name)
        self._entries = self._find_entries()

    def has(self, name: str) -> bool:
        """Whether the weights have a tensor of the model, under any of its names."""
        return any(alias in self._entries for alias in self._aliases[name])

    def values(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors of the model by name, as they are in the weights: any dtype.

        Raises:
            WeightsError: If a tensor has another shape, or if a tied one was saved with two values.
        """
        stored = {  # the names under which each was saved, the best first
            name: sorted(
                (alias for alias in self._aliases[name] if alias in self._entries),
                key=lambda alias, name=name: alias != name,  # type: ignore[misc]
            )
            for name in names
        }
        by_alias = {alias: name for name, (alias, *_) in stored.items()}
        for alias, name in by_alias.items():  # all shapes, before any values
            self._check_shapes(self._entries[alias], name)
        # Files are read in the order of the model, so each is opened once or twice.
        for entry in {entry.name: entry for entry in self._entries.values()}.values():
            if by_alias.keys().isdisjoint(self._results(entry)):
                continue
            for alias, value in self._convert(entry).items():
                if alias in by_alias:
                    name = by_alias[alias]
                    self._check_copies(name, value, stored[name][1:])
                    yield name, value

    def _check_shapes(self, entry: _Entry, name: str) -> None:
        for _, source in entry.sources:
            shape = self._weights.spec(source).shape
            if entry.converter is None and shape != tuple(self._state[name].shape):
                raise WeightsError(
                    f"{self._weights.files[source]}: {source} has shape {shape}, and {name} of the "
                    f"model has {tuple(self._state[name].shape)}; is config.json of this model?"
                )

    def _check_copies(self, name: str, value: torch.Tensor, others: Collection[str]) -> None:
        for other in others:
            if not torch.equal(self._convert(self._entries[other])[other], value):
                raise WeightsError(
                    f"{self._weights.directory} has different values for {name} and {other}, which "
                    f"are tied in the model; set tie_word_embeddings to false in config.json"
                )

    def _convert(self, entry: _Entry) -> dict[str, torch.Tensor]:
        """Reads what an entry needs, and returns the tensors of the model that it makes."""
        if entry.converter is None:
            return {entry.name: self._weights.read(entry.sources[0][1])}
        converter = copy.deepcopy(entry.converter)
        for pattern, source in entry.sources:
            converter.add_tensor(entry.name, source, pattern, self._weights.read(source))
        try:
            tensors = converter.convert(entry.name, model=self._model, config=self._model.config)
        except Exception as error:  # whatever an operation says
            raise WeightsError(
                f"{self._weights.directory}: {listed(s for _, s in entry.sources)} cannot be "
                f"converted to {entry.name}: {error}"
            ) from error
        return {name: v[0] if isinstance(v, list) else v for name, v in tensors.items()}

    def _results(self, entry: _Entry) -> list[str]:
        if entry.converter is None:
            return [entry.name]
        first, *others = entry.converter.target_patterns
        return [entry.name, *(entry.name.replace(first, other, 1) for other in others)]

    def _find_entries(self) -> dict[str, _Entry]:
        """Returns what makes each tensor of the model, as transformers' own loading finds it."""
        loading: Any = extra("transformers.core_model_loading")
        mapping: Any = extra("transformers.conversion_mapping")
        transforms = mapping.get_model_conversion_mapping(self._model)
        renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        prefix = self._model.base_model_prefix
        entries = dict[str, _Entry]()
        for source in sorted(self._weights.files, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(
                source, renamings, converters, prefix, self._state
            )
            if name not in self._state and source in self._state:
                name, pattern = source, None
            if name not in self._state:
                continue
            converter = None if pattern is None else by_pattern[pattern]
            entry = entries.setdefault(name, _Entry(name, converter))
            entry.sources.append((pattern, source))
        return {result: entry for entry in entries.values() for result in self._results(entry)}
