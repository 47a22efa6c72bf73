"""Stored: tensors of a model, read from weights whose names and layouts may be others.

transformers 5 holds, for example, the experts of a layer in one tensor, and saves them one by one.
Its own table says how weights are converted, and its own operators do it, a tensor at a time.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pipegrad.errors import WeightsError
from pipegrad.partition.weights.files import Weights, extra, listed


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
    """The tensors of a model that weights have.

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
        for name, kept in first.items():
            self._aliases[kept].append(name)
        self._entries = self._find_entries()

    def has(self, name: str) -> bool:
        """Whether the weights have a tensor of the model, under any of its names."""
        return any(alias in self._entries for alias in self._aliases[name])

    def values(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors of the model by name, as they are in the weights: any dtype.

        Raises:
            WeightsError: If a tensor has another shape, or if a tied one was saved with two values.
        """
        stored = {name: self._stored(name) for name in names}
        by_stored = {alias: name for name, (alias, *_) in stored.items()}
        for alias, name in by_stored.items():  # all shapes, before any values
            self._check_shape(alias, name)
        done = set[str]()
        # Files are read in the order of the model, so each is opened once or twice.
        for entry in self._entries.values():
            if entry.name in done:
                continue
            done.add(entry.name)
            wanted = [r for r in self._results(entry) if r in by_stored]
            for alias, value in self._convert(entry).items() if wanted else ():
                if alias in by_stored:
                    yield by_stored[alias], self._checked(by_stored[alias], value, stored)

    def _stored(self, name: str) -> list[str]:
        """Returns the names under which a tensor was saved, the best first."""
        return sorted(
            (alias for alias in self._aliases[name] if alias in self._entries),
            key=lambda alias: alias != name,
        )

    def _check_shape(self, alias: str, name: str) -> None:
        entry = self._entries[alias]
        for _, source in entry.sources:
            shape = self._weights.spec(source).shape
            if entry.converter is None and shape != tuple(self._state[name].shape):
                raise WeightsError(
                    f"{self._weights.path(source)}: {source} has shape {shape}, and {name} of the "
                    f"model has {tuple(self._state[name].shape)}; is config.json of this model?"
                )

    def _checked(
        self, name: str, value: torch.Tensor, stored: Mapping[str, list[str]]
    ) -> torch.Tensor:
        """Returns a value, if all copies of a tied tensor that were saved are the same."""
        for other in stored[name][1:]:
            copies = self._convert(self._entries[other])
            if not torch.equal(copies[other], value):
                raise WeightsError(
                    f"{self._weights.directory} has different values for {name} and {other}, which "
                    f"are tied in the model; set tie_word_embeddings to false in config.json"
                )
        return value

    def _convert(self, entry: _Entry) -> dict[str, torch.Tensor]:
        """Reads what an entry needs, and returns the tensors of the model that it makes."""
        if entry.converter is None:
            return {entry.name: self._weights.read(entry.sources[0][1])}
        converter = copy.deepcopy(entry.converter)
        for pattern, source in entry.sources:
            converter.add_tensor(entry.name, source, pattern, self._weights.read(source))
        try:
            made = converter.convert(entry.name, model=self._model, config=self._model.config)
        except Exception as error:  # whatever an operation says
            raise WeightsError(
                f"{self._weights.directory}: {listed(s for _, s in entry.sources)} cannot be "
                f"converted to {entry.name}: {error}"
            ) from error
        return {name: v[0] if isinstance(v, list) else v for name, v in made.items()}

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
        for source in sorted(self._weights.names, key=loading.dot_natural_key):
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
