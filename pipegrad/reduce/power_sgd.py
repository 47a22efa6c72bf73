"""PowerSGD for one bucket: torch's hook, with memory and random numbers that are ours.

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

from pipegrad.errors import PluginOptionError
from pipegrad.plugins.options import complaints_of

if TYPE_CHECKING:
    from pipegrad.reduce.ddp_hooks import TorchBucket

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

# [Note: random numbers] When torch's hook finds no Q it seeds the process's generators, those of
# devices too, and forks that of the CPU alone: in a comm stream's thread that would disturb
# dropout. So Q is there before the hook looks: the same numbers, from a generator of our own.

# [Note: lost columns] A gradient of zeros leaves zeros in Q, which the next step starts from; what
# is then left of any gradient is zero, for good. One that is not finite leaves NaN. Such columns
# get their first numbers again. Q is a sum, alike on all ranks, and so is what is done to it.


class PowerSGD:
    """`powerSGD_hook` for one bucket, with error feedback of its own.

    If no rank contributed to a bucket, nothing of it is sent or changed; what error feedback would
    have delivered to a parameter whose gradient stays None is kept for later.

    Args:
        group: Over which ranks.
        options: Those of ``PowerSGDState``.
        batched: Compress the bucket as one square matrix, as `batched_powerSGD_hook` does: torch's
            own asserts, in 2.13, that its matrices have three dimensions, and they have two.
        wrapper: Casts what is compressed.
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
        self._state.warm_start = True  # else the hook draws its own: [Note: random numbers]
        if batched:
            self._state.min_compression_rate = 0  # whatever it saves
        self._batched = batched
        self._hook = self._compress if wrapper is None else wrapper(self._compress)
        self._fresh = torch.empty(0)
        self._given: torch.Tensor | None = None

    @staticmethod
    def check(name: str, options: Mapping[str, Any]) -> None:
        """Refuses options that torch refuses, or fails with later.

        Raises:
            PluginOptionError: Names them.
        """
        if complaints := complaints_of(PowerSGDState, options, given=("process_group",)):
            raise PluginOptionError(f"hook {name!r} {complaints}")
        defaults = inspect.signature(PowerSGDState).parameters
        for option, value in options.items():
            kind = type(defaults[option].default)  # bool or int
            good = type(value) is kind or (option in _FLOATS and type(value) is float)
            if not good or value < (option == "matrix_approximation_rank"):
                raise PluginOptionError(f"hook {name!r} cannot have {option} = {value!r}")
        try:
            _state(None, options)
        except Exception as error:
            raise PluginOptionError(f"hook {name!r}: {error}") from error

    def start(self, bucket: TorchBucket) -> torch.futures.Future[torch.Tensor]:
        """Returns the future of the mean."""
        self._given = None
        return self._hook(self._state, bucket)

    def end(self, bucket: TorchBucket) -> None:
        """Checks that torch used what it was given, and keeps what nobody will see.

        Raises:
            RuntimeError: If this torch works otherwise.
        """
        if self._given is None:
            return
        used = self._state.q_memory_dict.get(bucket.index())
        if used is None or used.data_ptr() != self._given.data_ptr():
            raise RuntimeError(
                f"powerSGD_hook of torch {torch.__version__} does not use the memory that pipegrad "
                f"lays out for it: use another hook, or another version of torch"
            )
        error = self._state.error_dict.get(bucket.index())
        flags = bucket.flat.flags.tolist()
        for flag, (begin, shape) in zip(flags, bucket.pieces, strict=True):
            if flag == 0 and error is not None:
                lost = slice(begin, begin + shape.numel())
                error[lost] += bucket.flat.payload[lost]

    def state_dict(self) -> dict[str, Any]:
        """Returns steps, error feedback, P and Q, and the state of the random numbers."""
        told: Any = self._state.rng.get_state()
        kind, keys, *rest = told
        memory = {name: getattr(self._state, name) for name in _MEMORY}
        return {
            **{name: getattr(self._state, name) for name in _COUNTS},
            **{
                name: {index: _saved(tensor) for index, tensor in found.items()}
                for name, found in memory.items()
            },
            "fresh": _saved(self._fresh),
            "rng": [kind, torch.from_numpy(keys.astype("int64")), *rest],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from that."""
        for name in _COUNTS:
            setattr(self._state, name, state[name])
        for name in _MEMORY:
            found = {index: _saved(tensor) for index, tensor in state[name].items()}
            setattr(self._state, name, found)
        self._fresh = _saved(state["fresh"])
        kind, keys, *rest = state["rng"]
        self._state.rng.set_state((kind, keys.numpy().astype("uint32"), *rest))

    def _compress(
        self, state: PowerSGDState, bucket: TorchBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if state.iter < state.start_powerSGD_iter:
            return powerSGD_hook(state, bucket)
        given = _Square(bucket) if self._batched else bucket
        self._lay_out(given)
        numel = bucket.buffer().numel()
        future = powerSGD_hook(state, given)
        return future.then(lambda done: done.value()[:numel]) if self._batched else future

    def _lay_out(self, bucket: TorchBucket | _Square) -> None:
        """Gives the hook P and Q where it looks for them. See [Note: random numbers]."""
        state, index, buffer = self._state, bucket.index(), bucket.buffer()
        for name in _MEMORY:  # what was loaded
            memory = getattr(state, name)
            memory.update({i: tensor.to(buffer.device) for i, tensor in memory.items()})
        if index in state.error_dict:  # of a step that was not finite nothing is owed
            state.error_dict[index].nan_to_num_(0.0, 0.0, 0.0)
        shapes = list(self._shapes(bucket.gradients()))
        if not self._starts_warm or index not in state.q_memory_dict:
            self._draw(index, shapes, buffer)
        else:
            self._revive(state.q_memory_dict[index], shapes)
        self._given = state.q_memory_dict[index]

    def _shapes(self, gradients: list[torch.Tensor]) -> Iterator[tuple[int, int, int, int]]:
        """Yields (matrices, rows, columns, rank) of what is compressed, in the hook's order."""
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
        """Makes P and Q, with the numbers that torch would draw: alike on all ranks."""
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
        """Draws columns again that nothing comes back from. See [Note: lost columns]."""
        self._fresh = self._fresh.to(q.device)
        begin = 0
        for n, _, columns, rank in shapes:
            end = begin + n * columns * rank
            found, fresh = (x[begin:end].view(n, columns, rank) for x in (q, self._fresh))
            lost = (found == 0).all(1, keepdim=True) | ~found.isfinite().all(1, keepdim=True)
            found.copy_(torch.where(lost, fresh, found))
            begin = end


class _Square:
    """A bucket as one square matrix in memory of its own, with zeros wherever no gradient is."""

    def __init__(self, bucket: TorchBucket) -> None:
        buffer = bucket.buffer()
        self._side = math.ceil(math.sqrt(buffer.numel()))
        self._padded = buffer.new_zeros(self._side**2)
        for begin, shape in bucket.pieces:  # behind a SHARD flags may lie in the gaps
            place = slice(begin, begin + shape.numel())
            self._padded[place] = buffer[place]
        self.index, self.is_last = bucket.index, bucket.is_last

    def buffer(self) -> torch.Tensor:
        return self._padded

    def gradients(self) -> list[torch.Tensor]:
        return [self._padded.view(self._side, self._side)]


def _state(group: dist.ProcessGroup | None, options: Mapping[str, Any]) -> PowerSGDState:
    return PowerSGDState(group, **{**_DEFAULTS, **options})


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()
