"""What the optimizer of this rank steps for one parameter, and where that goes afterwards."""

from __future__ import annotations

from torch import nn

from pipegrad.errors import StepError
from pipegrad.optimizer.main_params import MainShard
from pipegrad.optimizer.param_sync import ParameterBuffer
from pipegrad.plugins.handler import Placement


class PlacedParameter:
    """One parameter, and the tensor that this rank's optimizer steps for it.

    Args:
        key: Of the parameter, for messages.
        is_trained: Whether it requires a gradient.
        has_result: Whether this rank has its reduced gradient, or a shard of it.
        buffer: The memory of the parameter, if it may come from other ranks.
        main_shard: What the optimizer steps in its place.
    """

    def __init__(
        self,
        key: str,
        *,
        is_trained: bool,
        has_result: bool,
        buffer: ParameterBuffer | None,
        main_shard: MainShard | None,
    ) -> None:
        self.main_shard = main_shard
        self._key = key
        self._buffer = buffer
        self.is_sharded = buffer is not None and any(
            step.placement is Placement.SHARD for step in buffer.bucket.route
        )
        self.is_replaced = main_shard is not None or self.is_sharded
        self.moves = main_shard is not None or buffer is not None
        self._is_whole = is_trained and has_result and not self.is_sharded
        self._address: int | None = None  # of the memory that updated values are written to
        self._version: int | None = None  # of a parameter that a copy is stepped for

    def tensor(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Returns what this rank's optimizer steps; None if another rank does, or it is frozen."""
        if self.main_shard is not None:
            return self.main_shard.tensor
        return parameter if self._is_whole else None

    def settle(self, parameter: nn.Parameter) -> None:
        """Moves the parameter into the buffer, and its values into what is stepped for it.

        Sync: on the current stream.
        """
        if self._buffer is not None:
            self._buffer.adopt(self._key, parameter)
        if self.main_shard is not None:
            main_range, source = self.main_shard.main_range, parameter.data
            if main_range.sharded and self._buffer is not None:
                source = self._buffer.shard(main_range.key, main_range.begin, main_range.end)
            self.main_shard.take_values(source)
        self._address = parameter.data_ptr() if self.moves else None
        is_copied = self.main_shard is not None and self.main_shard.copied
        self._version = parameter._version if is_copied else None

    def check(self, parameter: nn.Parameter) -> None:
        """Refuses a parameter that updated values would not arrive at.

        Raises:
            StepError: If its memory was replaced, or it was changed beside its copy.
        """
        if self._address is not None and self._address != parameter.data_ptr():
            raise StepError(
                f"the memory of {self._key!r} was replaced, and what is stepped for it would "
                f"not arrive there: call sync.synchronize_parameters() on all ranks; if it is "
                f"another parameter now, make the optimizer of sync.optimizer_parameters() again"
            )
        if self._version is not None and self._version != parameter._version:
            raise StepError(
                f"{self._key!r} was changed, and its stored copy, which is what is stepped, "
                f"was not: call sync.synchronize_parameters() on all ranks, outside of a step"
            )
