"""Adapter: the parameters that peft adds to a model, saved alone. Only this file knows peft.

[Note: what peft saves] Each kind of adapter has rules of its own for what is saved, and some of it
is computed first. Only the uncut model knows them. So peft is asked twice, always of the uncut
model. At the cut its tensors are fake: this shows from which tensors peft makes what it saves, and
what cannot be saved is refused before any step. When an adapter is saved, stages write these
tensors, and one rank puts them into the uncut model for peft.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from pipegrad import run_files
from pipegrad.errors import StepError, WeightsError, in_words
from pipegrad.interop.private import (
    DataDependentOutputException,
    FakeTensorMode,
    TorchDispatchMode,
    storage_key,
    tree_flatten,
)
from pipegrad.model.ties import plain_name
from pipegrad.model.wrappers import is_imported_kind
from pipegrad.partition.structural.shallow import isolated
from pipegrad.partition.weights.files import extra, write_shard

_FILE = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_DEFAULT = "default"  # the adapter that peft writes into the directory itself
_PREFIX = "base_model.model."  # PeftModel.from_pretrained expects it
_MODELS = ("PeftModel", "PeftMixedModel")  # their names have it


class AdapterSources(NamedTuple):
    """From which tensors of the uncut model peft makes what it saves.

    Attributes:
        names: Of those in its state dict.
        unnamed: Those that are not in its state dict, such as the tokens of a prompt.
    """

    names: frozenset[str]
    unnamed: tuple[Tensor, ...]


def has_adapter(model: Any) -> bool:  # noqa: ANN401 - of any kind
    """Whether peft has added parameters: to peft's own model, or to the model inside of it."""
    return bool(getattr(model, "peft_config", None))


def adapter_kinds(model: Any) -> set[str]:  # noqa: ANN401 - of any kind
    """Returns peft's names of the kinds of adapters that a model has."""
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    return {str(config.peft_type.value) for config in configs.values()}


def kind_of_prompt(model: Any) -> str:  # noqa: ANN401 - of any kind
    """Returns peft's name of the kind of prompt that a model learns; "" if it learns none."""
    config: Any = getattr(model, "active_peft_config", None) if has_adapter(model) else None
    return str(config.peft_type.value) if getattr(config, "is_prompt_learning", False) else ""


def has_tuned_layers(modules: Iterable[nn.Module]) -> bool:
    """Whether peft has exchanged or wrapped layers inside of modules."""
    kind = "peft.tuners.tuners_utils", "BaseTunerLayer"
    return any(is_imported_kind(part, *kind) for module in modules for part in module.modules())


def refuse_merging(model: nn.Module, words: str) -> None:
    """Makes peft refuse to merge adapters into a model, or to take them out of it.

    Args:
        model: The uncut model, whose stages share the modules that peft would exchange.
        words: Why.
    """

    def refuse(*_: object, **__: object) -> NoReturn:
        raise StepError(words)

    for part in model.modules():
        if is_imported_kind(part, "peft.tuners.tuners_utils", "BaseTuner"):
            public = [name for name in dir(type(part)) if not name.startswith("_")]
            changing = [name for name in public if "merge" in name or "unload" in name]
            vars(part).update(dict.fromkeys(changing, refuse))


def adapter_sources(model: nn.Module) -> AdapterSources:
    """Returns from which tensors peft makes what it saves of a model. Nothing is computed.

    Args:
        model: The uncut model; its tensors may be on the meta device.

    Raises:
        WeightsError: If peft fails, or if values decide what it saves.
    """
    names = defaultdict[int, set[str]](set)
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[id(tensor)].add(plain_name(name))
    originals = dict[int, Tensor]()  # by storage of the fake

    def fake(tensor: Tensor) -> Tensor:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        originals[storage_key(empty.untyped_storage())] = tensor
        return nn.Parameter(empty, tensor.requires_grad) if _is_parameter(tensor) else empty

    # A mode sees operators before those around it, which compute.
    with warnings.catch_warnings(), FakeTensorMode(), _Sources() as mode:
        warnings.simplefilter("ignore")  # peft says it again when it saves
        saved = _saved(model, fake)
    found = [
        originals[key]
        for tensors in saved.values()
        for tensor in tensors.values()
        for key in mode.of(tensor)
        if key in originals
    ]
    return AdapterSources(
        frozenset(name for tensor in found for name in names.get(id(tensor), ())),
        tuple(tensor for tensor in found if id(tensor) not in names),
    )


def described(model: nn.Module) -> nn.Module:
    """Returns a copy of an uncut model from which its adapters can be saved, on the meta device.

    Raises:
        WeightsError: If the adapters could not be saved.
    """
    unnamed = {id(tensor) for tensor in adapter_sources(model).unnamed}

    def without_values(tensor: Tensor) -> Tensor:
        new = tensor.clone() if id(tensor) in unnamed else torch.empty_like(tensor, device="meta")
        return nn.Parameter(new, tensor.requires_grad) if _is_parameter(tensor) else new

    return isolated(model, without_values)


def place_adapters(
    part: Path,
    model: Any,  # noqa: ANN401
    first: Mapping[str, str],
    shards: Collection[Path],
) -> None:
    """Writes what peft writes of a model, and moves it to its place.

    Args:
        part: The folder of what is being written, inside of the directory.
        model: The uncut model.
        first: For each name the one name of its tensor in the shards.
        shards: What the ranks have written: the tensors of `adapter_sources`.
    """
    stored = dict[str, Tensor]()
    for path in shards:
        stored |= extra("safetensors.torch").load_file(path)
    names = ((id(t), plain_name(n)) for n, t in model.state_dict(keep_vars=True).items())
    values = {key: stored[n] for key, name in names if (n := first.get(name, name)) in stored}

    def value(tensor: Tensor) -> Tensor:
        new = values.get(id(tensor), tensor)
        return nn.Parameter(new, tensor.requires_grad) if _is_parameter(tensor) else new

    for name, tensors in _saved(model, value).items():
        folder = Path() if name == _DEFAULT else Path(name)  # as peft has it
        (part / folder).mkdir(exist_ok=True)
        if folder != Path():  # the directory itself may be a link: the user names it
            run_files.make_folder(part.parent / folder)
        # Copies, because safetensors refuses tensors that share memory.
        own = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
        write_shard(part / folder / _FILE, own)
        _config(model, name).save_pretrained(part / folder)
        for file in (_FILE, _CONFIG):
            (part / folder / file).replace(part.parent / folder / file)


def _saved(model: Any, tensor_of: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Tensor]]:  # noqa: ANN401
    """Returns what peft saves of each adapter, of a copy of a model with other tensors.

    Raises:
        WeightsError: If peft fails.
    """
    uncut: Any = isolated(model, tensor_of)
    is_peft = any(is_imported_kind(model, "peft", kind) for kind in _MODELS)
    prefix = "" if is_peft else _PREFIX
    saved = dict[str, dict[str, Tensor]]()
    for name, config in uncut.peft_config.items():
        config.base_model_name_or_path = _on_this_machine(config.base_model_name_or_path)
        try:
            state = extra("peft").get_peft_model_state_dict(
                uncut, uncut.state_dict(keep_vars=True), adapter_name=name
            )
        except Exception as error:  # whatever a kind of adapter raises
            depends = isinstance(error, DataDependentOutputException)
            raise WeightsError(
                f"peft cannot save the adapter {name!r} ({type(config).__name__}) from stages: "
                f"{'what is saved depends on values' if depends else in_words(error)}"
            ) from error
        saved[name] = {prefix + key: t for key, t in state.items() if isinstance(t, Tensor)}
    return saved


def _on_this_machine(base: str | None) -> str | None:
    """Returns the folder of a base model, if it is on this machine.

    peft looks there whether the vocabulary has another size, and would ask the hub.
    """
    if not base or Path(base).is_dir():
        return base
    library = extra("huggingface_hub")
    with suppress(library.errors.HFValidationError):  # a folder that is gone
        found = library.try_to_load_from_cache(base, "config.json")
        return str(Path(found).parent) if isinstance(found, str) else None
    return None


def _config(model: Any, name: str) -> Any:  # noqa: ANN401
    """Returns the configuration of an adapter, as peft saves it."""
    config = copy.copy(model.peft_config[name])
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config.inference_mode = True  # whoever trains it further says so
    if config.task_type is None:  # then peft looks here for the class of the base
        kind = type(base)
        config.auto_mapping = {
            "base_model_class": kind.__name__.removeprefix("FSDP"),
            "parent_library": kind.__module__,
        }
    path = getattr(base, "name_or_path", None)
    config.base_model_name_or_path = config.base_model_name_or_path or path
    return config


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


class _Sources(TorchDispatchMode):
    """Finds out from which storages a tensor was computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = dict[int, frozenset[int]]()  # by storage: a write changes all of its views
        self._alive = list[Tensor]()  # so no key is used again

    def of(self, tensor: Tensor) -> frozenset[int]:
        """Returns the storages from which a tensor was computed, its own one too."""
        key = storage_key(tensor.untyped_storage())
        return self._sources.get(key, frozenset()) | {key}

    # ANN401: an operator takes and returns anything.
    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        sources = frozenset[int]().union(*map(self.of, given))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor):
                self._alive.append(tensor)
                self._sources[storage_key(tensor.untyped_storage())] = self.of(tensor) | sources
        return result
