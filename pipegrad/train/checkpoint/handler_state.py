"""Handler state: that of handlers and codecs on one rank, packed into a checkpoint as bytes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from pipegrad.errors import PlanError, in_words
from pipegrad.train.checkpoint import packed

PREFIX = "kept."  # followed by the rank


def own_key() -> str:
    """Returns the key of this rank's handler state in a checkpoint."""
    return f"{PREFIX}{dist.get_rank()}"


def readable_key(metadata: Metadata) -> str | None:
    """Returns the key of the handler state that this rank reads; None if a checkpoint has none."""
    # A rank without state of its own reads that of another rank. It says which plan the state
    # belongs to, and all ranks must refuse another plan alike.
    keys = sorted(key for key in metadata.state_dict_metadata if key.startswith(PREFIX))
    return own_key() if own_key() in keys else next(iter(keys), None)


def pack(state: dict[str, Any]) -> Tensor:
    """Returns the handler state of a rank as bytes.

    Raises:
        PlanError: If it could not be read again.
    """
    # The state belongs to one rank and one plan, and no other cut could use parts of it. So it is
    # one tensor of bytes.
    try:
        return packed.pack(state)
    except Exception as error:
        raise PlanError(
            f"no checkpoint can be written: what handlers {sorted(state['handlers'])} keep from "
            f"step to step is not of numbers, strings and CPU tensors alone: {in_words(error)}"
        ) from error


def unpack(tensor: Tensor, *, is_own: bool) -> dict[str, Any]:
    """Returns handler state from bytes; of another rank only the description of its plan.

    Raises:
        PlanError: If torch cannot read it.
    """
    try:
        state = packed.unpack(tensor)
    except Exception as error:
        reason = error.__context__ or error  # torch's own error only adds advice to it
        raise PlanError(f"what handlers kept cannot be read again: {reason}") from error
    return state if is_own else {"plan": state.get("plan"), "handlers": {}}
