"""PowerSGD for one bucket: torch's hook, with memory and random numbers from pipegrad.

Source: PowerSGD, arXiv:1905.13727; torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from pipegrad import errors
from pipegrad.plugins.handler import complaints_of

if TYPE_CHECKING:
    from pipegrad_handlers.communication_hook import TorchBucket

_EPSILON = "orthogonalization_epsilon"
_DEFAULTS = {_EPSILON: 1e-8}  # torch's 0 makes NaN of a gradient that is zero
_FLOATS = (_EPSILON, "min_compression_rate")
_COUNTS = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)
_MEMORY = ("error_dict", "p_memory_dict", "q_memory_dict")

# [Note: random numbers] If torch's hook finds no Q, it seeds the generators of the process, those
# of devices too, and saves only that of the CPU. In a comm stream's thread this would disturb the
# dropout of the compute. So pipegrad makes Q before the hook looks for it. It has the same numbers,
# from a separate generator.

# [Note: lost columns] The next step starts from the Q of this step. A gradient of zeros leaves zero
# columns in Q, and from then on these columns stay zero for any gradient. A gradient that is not
# finite leaves NaN. Such columns get their first random numbers again. Q is a sum, equal on all
# ranks, so all ranks replace the same columns.


class PowerSGD:
    """`powerSGD_hook` for one bucket, with its own error feedback.

    If no rank contributed to a bucket, nothing is sent or changed. If the gradient of a parameter
    stays None, its part of the error feedback is saved for a later step.

    Args:
        group: Of the ranks to average over.
        options: Those of ``PowerSGDState``.
        batched: Compress the bucket as one square matrix, as `batched_powerSGD_hook` does. torch's
            own hook fails in 2.13: it asserts three dimensions for matrices that have two.
        wrapper: Casts the payload before the compression.
    """

    sums_flags_first = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        options: Mapping[str, Any],
        batched: bool,
        wrapper: Callable[..., Any] | None,
    ) -> None:
        self._state = _state(group, options)
        self._starts_warm = self._state.warm_start
        # Without a warm start, the hook draws its own numbers in each step; see
        # [Note: random numbers].
        self._state.warm_start = True
        if batched:
            self._state.min_compression_rate = 0  # compress even if it saves nothing
        self._batched = batched
        self._hook = self._compress if wrapper is None else wrapper(self._compress)
        self._fresh = torch.empty(0)
        self._prepared: torch.Tensor | None = None  # the Q that the hook must use

    @staticmethod
    def check(name: str, options: Mapping[str, Any]) -> None:
        """Refuses options that torch refuses, or with which it fails later.

        Raises:
            PluginOptionError: If there are such options. It names them.
        """
        if complaints := complaints_of(PowerSGDState, options, given=("process_group",)):
            raise errors.PluginOptionError(f"hook {name!r} {complaints}")
        defaults = inspect.signature(PowerSGDState).parameters
        for option, value in options.items():
            kind = type(defaults[option].default)  # bool or int
            good = type(value) is kind or (option in _FLOATS and type(value) is float)
            if not good or value < (option == "matrix_approximation_rank"):
                raise errors.PluginOptionError(f"hook {name!r} cannot have {option} = {value!r}")
        try:
            _state(None, options)
        except Exception as error:
            raise errors.PluginOptionError(f"hook {name!r}: {error}") from error

    def start(self, bucket: TorchBucket) -> torch.futures.Future[torch.Tensor]:
        """Returns the future of the mean."""
        self._prepared = None
        return self._hook(self._state, bucket)

    def end(self, bucket: TorchBucket) -> None:
        """Checks that torch has used the prepared memory, and saves means that nobody reads.

        Raises:
            RuntimeError: If this version of torch does not use the prepared memory.
        """
        if self._prepared is None:
            return
        used = self._state.q_memory_dict.get(bucket.index())
        if used is None or used.data_ptr() != self._prepared.data_ptr():
            raise RuntimeError(
                f"powerSGD_hook of torch {torch.__version__} does not use the memory that pipegrad "
                f"lays out for it: use another hook, or another version of torch"
            )
        # If no rank contributed to a gradient, it becomes None again, and its mean is dropped. But
        # the mean holds error feedback of earlier steps, which must not be lost.
        error = self._state.error_dict.get(bucket.index())
        flags = bucket.flat.flags.tolist()
        for flag, (begin, shape) in zip(flags, bucket.pieces, strict=True):
            if flag == 0 and error is not None:
                unread = slice(begin, begin + shape.numel())
                error[unread] += bucket.flat.payload[unread]

    def state_dict(self) -> dict[str, Any]:
        """Returns steps, error feedback, P and Q, and the state of the random numbers."""
        random_state: Any = self._state.rng.get_state()
        kind, keys, *rest = random_state
        memory = {name: getattr(self._state, name) for name in _MEMORY}
        return {
            **{name: getattr(self._state, name) for name in _COUNTS},
            **{
                name: {index: _saved(tensor) for index, tensor in tensors.items()}
                for name, tensors in memory.items()
            },
            "fresh": _saved(self._fresh),
            "rng": [kind, torch.from_numpy(keys.astype("int64")), *rest],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a result of `state_dict`."""
        for name in _COUNTS:
            setattr(self._state, name, state[name])
        for name in _MEMORY:
            tensors = {index: _saved(tensor) for index, tensor in state[name].items()}
            setattr(self._state, name, tensors)
        self._fresh = _saved(state["fresh"])
        kind, keys, *rest = state["rng"]
        self._state.rng.set_state((kind, keys.numpy().astype("uint32"), *rest))

    def _compress(
        self, state: PowerSGDState, bucket: TorchBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if state.iter < state.start_powerSGD_iter:
            return powerSGD_hook(state, bucket)
        matrices = _Square(bucket) if self._batched else bucket
        self._lay_out(matrices)
        numel = bucket.buffer().numel()
        future = powerSGD_hook(state, matrices)
        return future.then(lambda done: done.value()[:numel]) if self._batched else future

    def _lay_out(self, bucket: TorchBucket | _Square) -> None:
        """Puts P and Q where the hook looks for them. See [Note: random numbers]."""
        state, index, buffer = self._state, bucket.index(), bucket.buffer()
        for name in _MEMORY:  # tensors of a loaded state are on the CPU
            memory = getattr(state, name)
            memory.update({i: tensor.to(buffer.device) for i, tensor in memory.items()})
        # After a step whose gradients were not finite, the error feedback is not finite either. It
        # would spoil all later steps.
        if index in state.error_dict:
            state.error_dict[index].nan_to_num_(0.0, 0.0, 0.0)
        shapes = list(self._shapes(bucket.gradients()))
        if not self._starts_warm or index not in state.q_memory_dict:
            self._draw(index, shapes, buffer)
        else:
            self._revive(state.q_memory_dict[index], shapes)
        self._prepared = state.q_memory_dict[index]

    def _shapes(self, gradients: list[torch.Tensor]) -> Iterator[tuple[int, int, int, int]]:
        """Yields (matrices, rows, columns, rank) for the compressed gradients, in hook order."""
        state, number = self._state, Counter[tuple[int, int]]()
        for gradient in gradients:
            rows = gradient.shape[0]
            columns = gradient.numel() // rows
            rank = min(rows, columns, state.matrix_approximation_rank)
            if (rows + columns) * rank * state.min_compression_rate < rows * columns:
                number[rows, columns] += 1
        for (rows, columns), times in number.items():
            rank = min(rows, columns, state.matrix_approximation_rank)
            if state.batch_tensors_with_same_shape:
                yield times, rows, columns, rank
            else:
                yield from [(1, rows, columns, rank)] * times

    def _draw(
        self, index: int, shapes: list[tuple[int, int, int, int]], buffer: torch.Tensor
    ) -> None:
        """Makes P and Q with the numbers that torch would draw, equal on all ranks."""
        state = self._state
        random = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
        drawn = [
            torch.randn(n, columns, rank, generator=random, dtype=buffer.dtype).flatten()
            for n, _, columns, rank in shapes
        ]
        self._fresh = torch.cat([*drawn, torch.empty(0, dtype=buffer.dtype)])
        numel = sum(n * rows * rank for n, rows, _, rank in shapes)
        state.p_memory_dict[index] = buffer.new_zeros(numel)
        state.q_memory_dict[index] = self._fresh.to(buffer.device, copy=True)

    def _revive(self, q: torch.Tensor, shapes: list[tuple[int, int, int, int]]) -> None:
        """Replaces columns of Q that are zero or not finite. See [Note: lost columns]."""
        self._fresh = self._fresh.to(q.device)
        begin = 0
        for n, _, columns, rank in shapes:
            end = begin + n * columns * rank
            present, fresh = (x[begin:end].view(n, columns, rank) for x in (q, self._fresh))
            lost = (present == 0).all(1, keepdim=True) | ~present.isfinite().all(1, keepdim=True)
            present.copy_(torch.where(lost, fresh, present))
            begin = end


class _Square:
    """A copy of a bucket as one square matrix, with zeros in the gaps between gradients."""

    def __init__(self, bucket: TorchBucket) -> None:
        buffer = bucket.buffer()
        self._side = math.ceil(math.sqrt(buffer.numel()))
        self._padded = buffer.new_zeros(self._side**2)
        # Only the gradients are copied: after a reduction with SHARD, flags may lie in the gaps.
        for begin, shape in bucket.pieces:
            elements = slice(begin, begin + shape.numel())
            self._padded[elements] = buffer[elements]
        self.index, self.is_last = bucket.index, bucket.is_last

    def buffer(self) -> torch.Tensor:
        return self._padded

    def gradients(self) -> list[torch.Tensor]:
        return [self._padded.view(self._side, self._side)]


def _state(group: dist.ProcessGroup | None, options: Mapping[str, Any]) -> PowerSGDState:
    return PowerSGDState(group, **{**_DEFAULTS, **options})


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()
