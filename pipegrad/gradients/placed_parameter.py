"""One parameter of this rank, and its main parameter."""

from __future__ import annotations

from torch import nn

from pipegrad.errors import StepError
from pipegrad.gradients.main_params import MainShard
from pipegrad.gradients.param_sync import ParameterBuffer
from pipegrad.plugins.handler import Placement


class PlacedParameter:
    """One parameter, and the tensor that this rank's optimizer steps for it.

    Args:
        key: Of the parameter, for messages.
        is_trained: Whether it requires a gradient.
        has_result: Whether this rank has its reduced gradient, or a shard of it.
        buffer: The memory of the parameter, if a parameter sync may write to it.
        main_shard: What the optimizer steps instead of the parameter.

    Attributes:
        main_shard: The same.
        is_sharded: Whether its gradient is reduced with SHARD. With WHOLE it is like with OWNER.
        is_replaced: Whether an optimizer may not step the parameter itself on this rank.
        is_updated_elsewhere: Whether its values come from a parameter sync or a master copy.
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
        self.is_updated_elsewhere = main_shard is not None or buffer is not None
        self._is_whole = is_trained and has_result and not self.is_sharded
        # Updated values are written to this address, and a master copy was made from this version.
        # `check` compares both, since a parameter that a user has replaced would never be updated.
        self._address: int | None = None
        self._version: int | None = None

    def tensor(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Returns the main parameter; None if another rank steps it, or it is frozen."""
        if self.main_shard is not None:
            return self.main_shard.tensor
        return parameter if self._is_whole else None

    def settle(self, parameter: nn.Parameter) -> None:
        """Moves the parameter into its buffer, and its values into the main parameter.

        Sync: on the current stream.
        """
        # The buffer comes first: the main shard is a view of it, so that nothing is copied in step
        # 9 of the journey of a gradient.
        if self._buffer is not None:
            self._buffer.adopt(self._key, parameter)
        if self.main_shard is not None:
            main_range, source = self.main_shard.main_range, parameter.data
            if main_range.sharded and self._buffer is not None:
                source = self._buffer.shard(main_range.key, main_range.begin, main_range.end)
            self.main_shard.take_values(source)
        self._address = parameter.data_ptr() if self.is_updated_elsewhere else None
        is_copied = self.main_shard is not None and self.main_shard.copied
        self._version = parameter._version if is_copied else None

    def check(self, parameter: nn.Parameter) -> None:
        """Refuses a parameter that updated values would not reach.

        Raises:
            StepError: If its memory was replaced, or if it was changed and its master copy was not.
        """
        if self._address is not None and self._address != parameter.data_ptr():
            raise StepError(
                f"the memory of {self._key!r} was replaced, and what is stepped for it would "
                f"not arrive there: call sync.synchronize_parameters() on all ranks; if it is "
                f"another parameter now, make the optimizer again, by sync.optimizer()"
            )
        if self._version is not None and self._version != parameter._version:
            raise StepError(
                f"{self._key!r} was changed, and its stored copy, which is what is stepped, "
                f"was not: call sync.synchronize_parameters() on all ranks, outside of a step"
            )
