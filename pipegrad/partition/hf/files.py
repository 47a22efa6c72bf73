"""Weights: tensors in safetensors files, by name. This file is independent of models.

A directory has one file ``model.safetensors``, or several files and an index with the file of each
tensor. `Weights.read` reads one tensor and nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pipegrad import run_files
from pipegrad.errors import ConfigError, WeightsError
from pipegrad.partition.cutting.copies import like
from pipegrad.printable import printable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = (
    "it has pickled weights (pytorch_model.bin), which are not read: load them once with "
    "transformers' from_pretrained and save them with save_pretrained"
)
# File in a directory without weights -> the reason that it has none.
_INSTEAD = {
    "pytorch_model.bin": _PICKLED,
    "pytorch_model.bin.index.json": _PICKLED,
    "adapter_config.json": (
        "it has an adapter of peft only: load the model that the adapter was made for"
    ),
}
_NAMES_SHOWN = 4  # names that a message lists


class Weights:
    """The tensors of a directory, by name.

    Args:
        directory: It has ``model.safetensors``, or ``model.safetensors.index.json`` and the files
            that the index lists.

    Attributes:
        files: The file that has a tensor, by the tensor's name.

    Raises:
        ConfigError: If the library safetensors is missing.
        WeightsError: If the directory is missing or has no such files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # One file is open at a time, because an open file is mapped, and its pages count as memory
        # of the process until it is closed.
        self._open_file: tuple[Path, Any] | None = None
        self.files = self._find_files()

    def entry(self, name: str) -> Any:  # noqa: ANN401 - a slice of safetensors, which has no types
        """Returns an unread tensor with ``get_shape`` and ``get_dtype``; indexing reads its values.

        Raises:
            WeightsError: If its file is missing, damaged, or has no such tensor.
        """
        path = self.files[name]
        if self._open_file is None or self._open_file[0] != path:
            self._open_file = None  # closed before the next file is opened
            self._open_file = path, _opened(path)
        try:
            return self._open_file[1].get_slice(name)
        except Exception as error:  # safetensors raises nothing more precise
            what = f"{path} has no tensor {name}, or it is damaged: {error}"
            raise WeightsError(printable(what)) from error

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU, in memory of its own. Raises the errors of `entry`."""
        # A copy, because the tensor of safetensors lies in the mapped file.
        return torch.clone(self.entry(name)[...])

    def _find_files(self) -> dict[str, Path]:
        """Returns the file of each tensor."""
        if not self.directory.is_dir():
            raise WeightsError(
                f"there is no directory {self.directory}; it must be on this machine, written by "
                f"save_pretrained (nothing is downloaded)"
            )
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.exists():  # transformers prefers it too
            return dict.fromkeys(_opened(single).keys(), single)
        if index.exists():
            return _indexed(index)
        reasons = (why for name, why in _INSTEAD.items() if (self.directory / name).exists())
        reason = next(reasons, "if it was being written, the writer did not end")
        raise WeightsError(f"{self.directory} has neither {SINGLE} nor {INDEX}: {reason}")


def extra(module: str) -> ModuleType:
    """Returns a module of a library of the extra ``hf``, such as transformers.

    Raises:
        ConfigError: If the library is not installed.
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this needs the library {library}: pip install 'pipegrad[hf]' ({error})"
        ) from error


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors into one file.

    Raises:
        WeightsError: If the file cannot be written.
    """
    # Metadata are needed, because transformers refuses files without "format".
    try:
        extra("safetensors.torch").save_file(dict(tensors), path, metadata={"format": "pt"})
    except Exception as error:  # a SafetensorError, also for a full disk
        raise WeightsError(f"{path} cannot be written: {error}") from error


def put(
    places: Iterable[tuple[torch.nn.Module, str]],
    value: torch.Tensor,
    device: str | torch.device = "cpu",
) -> None:
    """Sets one tensor in all places, with the dtype and kind of the old tensor in the first."""
    places = list(places)
    old = getattr(*places[0])
    new = like(old, value.to(device, old.dtype))
    for module, attribute in places:
        setattr(module, attribute, new)


def listed(names: Iterable[str]) -> str:
    """Returns names for a message: the first ones, and how many more there are."""
    every = sorted(names)
    more = len(every) - _NAMES_SHOWN
    return printable(", ".join(every[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _opened(path: Path) -> Any:  # noqa: ANN401 - the library has no types
    library = extra("safetensors")
    try:
        return library.safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        name = printable(str(path))
        raise WeightsError(f"there is no file {name}, but its index lists it") from error
    except Exception as error:  # a SafetensorError, or an OSError
        name, why = printable(str(path)), printable(str(error))
        raise WeightsError(f"{name} is not a whole safetensors file: {why}") from error


def _indexed(index: Path) -> dict[str, Path]:
    """Returns the file of each tensor from an index."""
    try:
        content: Any = run_files.parsed_json(run_files.read(index))
        entries = content["weight_map"]
        names = {str(name): str(file) for name, file in entries.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index} is no index of safetensors files: {error!r}") from error
    outside = {file for file in names.values() if Path(file).name != file}
    if outside:
        raise WeightsError(f"{index} lists files outside of its directory: {listed(outside)}")
    return {name: index.parent / file for name, file in names.items()}
