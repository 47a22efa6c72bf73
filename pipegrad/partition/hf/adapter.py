"""Adapter: saves the parameters that peft adds to a model, without the rest of the model.

[Note: what peft saves] Each kind of adapter has its own rules for the tensors to save, and computes
some of them first. peft runs twice on the uncut model, because only this model has these rules. At
the cut the uncut model has fake tensors. This run shows which tensors peft needs, and raises before
any step if an adapter cannot be saved. During a save, one rank gets these tensors from the stages,
and puts them into the uncut model for peft.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipegrad import run_files
from pipegrad.errors import WeightsError, in_words
from pipegrad.interop.private import FakeTensorMode
from pipegrad.model.ties import plain_name
from pipegrad.model.wrappers import is_imported_kind
from pipegrad.partition.cutting.copies import like, with_tensors
from pipegrad.partition.hf.files import extra, write_shard

_FILE = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_DEFAULT = "default"  # the adapter that peft writes into the directory itself
_PREFIX = "base_model.model."  # PeftModel.from_pretrained expects it
_MODELS = ("PeftModel", "PeftMixedModel")  # their names have it


def has_adapter(model: Any) -> bool:  # noqa: ANN401 - of any kind
    """True if peft has added parameters: to peft's own model, or to the model inside of it."""
    return bool(getattr(model, "peft_config", None))


def adapter_kinds(model: Any) -> set[str]:  # noqa: ANN401 - of any kind
    """Returns peft's names of the kinds of adapters that a model has."""
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    return {str(config.peft_type.value) for config in configs.values()}


def kind_of_prompt(model: Any) -> str:  # noqa: ANN401 - of any kind
    """Returns peft's name of the kind of a model's learnt prompt; "" if it has none."""
    config: Any = getattr(model, "active_peft_config", None) if has_adapter(model) else None
    return str(config.peft_type.value) if getattr(config, "is_prompt_learning", False) else ""


def tuned_by(modules: Iterable[nn.Module]) -> set[str]:
    """Returns the names of the active adapters in layers that peft has exchanged or wrapped."""
    kind = "peft.tuners.tuners_utils", "BaseTunerLayer"
    parts: Any = (part for module in modules for part in module.modules())
    tuned = (part for part in parts if is_imported_kind(part, *kind))
    return {name for part in tuned for name in part.active_adapters}


def adapter_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of the model's tensors that peft needs to save the adapters.

    Args:
        model: The uncut model; its tensors may be on the meta device.

    Raises:
        WeightsError: If peft fails, also if it needs values of tensors.
    """
    originals = dict[int, Tensor]()  # by id of the fake

    def fake(tensor: Tensor) -> Tensor:
        new = like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
        originals[id(new)] = tensor
        return new

    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")  # peft warns again when it saves
        saved = _saved(model, fake)
    found = [originals.get(id(x)) for tensors in saved.values() for x in tensors.values()]
    is_saved = {id(tensor) for tensor in found}
    state = model.state_dict(keep_vars=True)
    # Include all trained tensors, because peft may compute saved tensors from them.
    return frozenset(
        plain_name(n) for n, x in state.items() if x.requires_grad or id(x) in is_saved
    )


def place_adapters(
    part: Path,
    model: Any,  # noqa: ANN401
    first: Mapping[str, str],
    stored: Mapping[str, Tensor],
) -> None:
    """Writes the adapters of a model as peft does, and moves the files to their place.

    Args:
        part: The temporary folder inside of the directory.
        model: The uncut model.
        first: Any name of a tensor -> its name in `stored`.
        stored: The tensors of `adapter_names`.
    """
    names = {id(t): plain_name(n) for n, t in model.state_dict(keep_vars=True).items()}
    values = {
        key: stored[n] for key, name in names.items() if (n := first.get(name, name)) in stored
    }
    whole = _saved(model, lambda tensor: like(tensor, values.get(id(tensor), tensor)))
    for name, tensors in whole.items():
        folder = Path() if name == _DEFAULT else Path(name)  # as peft has it
        (part / folder).mkdir(exist_ok=True)
        if folder != Path():  # the directory itself may be a link, because the user names it
            run_files.make_folder(part.parent / folder)
        # Copies, because safetensors refuses tensors that share memory.
        own = {
            key: tensor.detach().to("cpu", copy=True).contiguous()
            for key, tensor in tensors.items()
        }
        write_shard(part / folder / _FILE, own)
        _config(model, name).save_pretrained(part / folder)
        for file in (_FILE, _CONFIG):
            (part / folder / file).replace(part.parent / folder / file)


def _saved(model: Any, tensor_of: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Tensor]]:  # noqa: ANN401
    """Returns the tensors that peft saves for each adapter, from a copy of a model.

    Args:
        model: The uncut model.
        tensor_of: Returns the copy's tensor for a tensor of the model.

    Raises:
        WeightsError: If peft fails.
    """
    uncut: Any = with_tensors(model, tensor_of)
    is_peft = any(is_imported_kind(model, "peft", kind) for kind in _MODELS)
    prefix = "" if is_peft else _PREFIX
    saved = dict[str, dict[str, Tensor]]()
    for name, config in uncut.peft_config.items():
        config.base_model_name_or_path = _on_this_machine(config.base_model_name_or_path)
        try:
            state = extra("peft").get_peft_model_state_dict(
                uncut, uncut.state_dict(keep_vars=True), adapter_name=name
            )
        except Exception as error:  # any error of any kind of adapter about missing values
            raise WeightsError(
                f"peft cannot save the adapter {name!r} ({type(config).__name__}) from stages, "
                f"where what is saved must not depend on values: {in_words(error)}"
            ) from error
        saved[name] = {prefix + key: t for key, t in state.items() if isinstance(t, Tensor)}
    return saved


def _on_this_machine(base: str | None) -> str | None:
    """Returns the folder of a base model if it is on this machine, otherwise None.

    peft compares the size of the vocabulary with this folder. Without it, peft would send a request
    to the hub.
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
    config.inference_mode = True  # further training sets it to False
    if config.task_type is None:  # peft then reads the class of the base from here
        kind = type(base)
        config.auto_mapping = {
            "base_model_class": kind.__name__.removeprefix("FSDP"),
            "parent_library": kind.__module__,
        }
    path = getattr(base, "name_or_path", None)
    config.base_model_name_or_path = config.base_model_name_or_path or path
    return config
