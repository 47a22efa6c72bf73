"""Layout: refuses a checkpoint whose parameters lie elsewhere along the mesh than here."""

from __future__ import annotations

import re

from pipegrad.train.config import Config


def check_locations(config: Config, saved: set[str], own: set[str]) -> None:
    """Refuses a checkpoint in which a parameter or buffer of this run has other locations.

    Args:
        config: The configuration.
        saved: All keys of the checkpoint.
        own: The keys of all ranks of this run.

    Raises:
        ConfigError: If locations differ. Names a key and both sets of locations.
    """
    saved_at, own_at = _locations_of(saved), _locations_of(own)
    for stem in sorted(own_at.keys() & saved_at.keys()):
        if saved_at[stem] != own_at[stem]:
            config.refuse(
                "train.resume",
                f"{stem.partition('.')[2]!r} is there in the places "
                f"{_in_words(saved_at[stem])}, and here in {_in_words(own_at[stem])}: "
                f"choose the parallel.dimensions, the parallel.data, the parallel.shards and the "
                f"handlers of the run that wrote it",
            )


def _locations_of(keys: set[str]) -> dict[str, set[str]]:
    """Returns keys without locations -> their locations."""
    locations: dict[str, set[str]] = {}
    for key in keys:
        stem, location = parted(key)
        locations.setdefault(stem, set()).add(location)
    return locations


def parted(key: str) -> tuple[str, str]:
    """Returns a key of a checkpoint without its location, and the location."""
    match = re.fullmatch(r"(.*?)(\[\w+=\d+(?:,\w+=\d+)*\])", key)
    return (match[1], match[2]) if match else (key, "")


def _in_words(locations: set[str]) -> str:
    return " ".join(location or "(everywhere the same)" for location in sorted(locations))
