"""redacted: values of a configuration, as files and messages may have them.

An option is secret if a word of its name says so, as in ``api_key``. In any value, the user and the
password of a URL are secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"
_SECRET = re.compile(
    r"apikey|auth|authorization|credentials?|key|passphrase|passw(or)?d|pwd|secrets?|token"
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s@]+(?=@)")


def redacted(value: Any, name: str = "") -> Any:  # noqa: ANN401 - what TOML and JSON have
    """Returns plain data without secrets.

    Args:
        value: Of an option, or a table of them; it is not changed.
        name: Of the option.
    """
    if value is not None and _is_secret(name):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: redacted(inside, str(key)) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inside) for inside in value]
    return _CREDENTIALS.sub(REDACTED, value) if isinstance(value, str) else value


def _is_secret(name: str) -> bool:
    return any(_SECRET.fullmatch(word.lower()) for word in _WORD.findall(name))
