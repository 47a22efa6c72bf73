"""diloco: data replicas train alone, and meet every few steps. For clusters with slow links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrad import (
    GradientHandler,
    OuterOptimizer,
    ParameterRecord,
    Placement,
    Reduction,
    Topology,
    errors,
)

if TYPE_CHECKING:
    from pipegrad import GradientSync

_PACK_BYTES = 25 * 2**20  # of one message, at least one parameter
_Key = TypeVar("_Key")


class DiLoCo(GradientHandler):
    """Lets every data replica train alone, and joins all replicas every few steps.

    Use it instead of ``data-parallel``. No gradient is sent along the dimension. After every
    `every` steps the replicas meet; see `Meetings`. The bytes on the dimension are divided by about
    `every`. Make the optimizer by ``sync.optimizer``; its state stays with each replica.

    With `axis`, the handler joins clusters: ``data-parallel`` with the inner dimension as its axis
    keeps the replicas inside of a cluster equal, and this handler has the outer dimension.

    Args:
        every: Steps between two meetings.
        lr: Learning rate of the outer step.
        momentum: Its Nesterov momentum. With 0 and an `lr` of 1 replicas are averaged.
        axis: The mesh dimension; by default all data dimensions of the topology.

    Raises:
        ValueError: If a value is wrong. It names the value.
    """

    def __init__(
        self, *, every: int, lr: float = 0.7, momentum: float = 0.9, axis: str | None = None
    ) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every is {every!r}, expected a whole number of steps, 1 or more")
        numbers: tuple[tuple[str, Any], ...] = (("lr", lr), ("momentum", momentum))
        for name, value in numbers:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value):
                raise ValueError(f"{name} is {value!r}, expected a number")
        if lr <= 0:
            raise ValueError(f"lr is {lr!r}, expected a number above 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum!r}, expected at least 0 and below 1")
        self.equal_every = every
        self.lr, self.momentum, self._axis = lr, momentum, axis

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns none: no gradient is sent."""
        return []

    def independent_axes(self, topology: Topology) -> tuple[str, ...]:
        """Returns `axis`, or all data dimensions."""
        return topology.data_axes if self._axis is None else (self._axis,)

    def outer_optimizer(self, sync: GradientSync) -> Meetings:
        """Returns the meetings of one sync. The handler itself has no state."""
        return Meetings(sync, every=self.equal_every, lr=self.lr, momentum=self.momentum)


class Meetings(OuterOptimizer):
    """Steps the parameters of all replicas together, every few steps.

    A meeting is one step of SGD with Nesterov's momentum. Its gradient is the parameter of the last
    meeting, the anchor, minus the mean of all replicas now. It steps the anchor, and all replicas
    go on from there. If several ranks of a replica have the same elements, one of them averages,
    and sends the result to the others.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
    algorithm 1.

    Args:
        sync: Whose replicas train alone.
        every: Steps between two meetings.
        lr: Learning rate of the outer step.
        momentum: Its momentum.

    Attributes:
        number: Meetings so far. The same on all ranks.
        met_bytes: Bytes that this rank has averaged so far.
    """

    def __init__(self, sync: GradientSync, *, every: int, lr: float, momentum: float) -> None:
        self._sync = sync
        self._options = {"every": every, "lr": lr, "momentum": momentum}
        self._ranks = sync.topology.ranks_along(sync.plan.independent_axes)
        # Along these reductions ranks have the same elements. The owner of all of them averages.
        self._spread = {
            key: [step for step in route if step.placement is Placement.REPLICATE]
            for key, route in sync.plan.routes
        }
        self.number = 0
        self.met_bytes = 0
        self._last = 0  # the steps of the sync until the last meeting
        self._anchors: dict[str, Tensor] = {}  # of the parameters that this rank averages, by key
        self._momenta: dict[str, Tensor] = {}

    @property
    def _num_steps(self) -> int:
        """Steps since the last meeting, whether or not an optimizer has used their gradients."""
        # One replica alone might leave a step of its optimizer out. All ranks end a step with
        # gradients, or all fail in it. So all ranks meet after the same step.
        return self._sync.statistics().steps - self._last

    @property
    def is_due(self) -> bool:
        """Whether as many steps have ended as lie between two meetings."""
        return self._num_steps >= self._options["every"]

    def begin(self) -> None:
        """Makes all replicas equal to the first, and begins anew, without momentum.

        Sync: on the current stream.
        """
        tensors_of = self._main_tensors()
        frozen = [r for r in self._sync.records() if not r.requires_grad]
        tensors = [*tensors_of.values(), *(_local(self._sync.parameter(r)) for r in frozen)]
        self._send(tensors, self._ranks)
        self._last = self._sync.statistics().steps
        self._momenta.clear()
        self._anchors = {
            key: tensor.to(_wide(tensor.dtype), copy=True)
            for key, tensor in tensors_of.items()
            if self._averages(key)
        }

    def step(self) -> None:
        """Meets the other replicas.

        Sync: on the current stream. The host waits if collectives block it.

        Raises:
            DriftError: On all ranks, if the anchors of the replicas differ.
        """
        self._compare()
        tensors_of = self._main_tensors()
        self._last = self._sync.statistics().steps
        self.number += 1
        for keys in _packs(self._anchors):
            self._average({key: tensors_of[key] for key in keys})
        # All ranks go through the sets of ranks in one order, so they cannot wait in a circle. The
        # first of a set has its values by then: sets in which it is not the first come before.
        sets: dict[tuple[int, ...], list[Tensor]] = {}
        for key, tensor in tensors_of.items():
            for along in self._spread.get(key, ()):
                sets.setdefault(along.ranks, []).append(tensor)
        for ranks, tensors in sorted(sets.items(), key=itemgetter(0)):
            self._send(tensors, ranks)

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank needs to go on from here.

        Between two meetings it has what this rank steps: replicas are different then. It has the
        anchors that the present parameters do not give.
        """
        is_apart = self._num_steps > 0
        tensors_of = self._main_tensors()
        return {
            "outer": dict(self._options),
            "num_steps": self._num_steps,
            "number": self.number,
            "momenta": _saved(self._momenta),
            "anchors": _saved({k: self._anchors[k] for k in self._wider(is_apart=is_apart)}),
            "stepped": _saved(tensors_of if is_apart else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a result of `state_dict` of this rank.

        Raises:
            ValueError: If it is not such a state, or was saved with another outer step.
        """
        if not state:
            self.number = 0
            return
        # With another `every` the run would not end with a meeting, because its steps before count.
        if state["outer"] != self._options:
            raise ValueError(
                f"it was saved with the outer step {_written(state['outer'])}, and this run has "
                f"{_written(self._options)}: choose the same numbers"
            )
        tensors_of, is_apart = self._main_tensors(), state["num_steps"] > 0
        wider = {key: self._anchors[key] for key in self._wider(is_apart=is_apart)}
        _check("the momentum", state["momenta"], self._anchors if state["momenta"] else {})
        _check("the last meeting", state["anchors"], wider)
        _check("the parameters", state["stepped"], tensors_of if is_apart else {})
        for key, values in state["stepped"].items():
            tensors_of[key].copy_(values)
        for key, tensor in tensors_of.items() if not is_apart else ():
            if self._averages(key):
                self._anchors[key].copy_(tensor)
        self._momenta.clear()
        for saved, held in ((state["momenta"], self._momenta), (state["anchors"], self._anchors)):
            held.update({k: v.to(tensors_of[k].device, copy=True) for k, v in saved.items()})
        self._last = self._sync.statistics().steps - int(state["num_steps"])
        self.number = int(state["number"])

    def _main_tensors(self) -> dict[str, Tensor]:
        """Returns what this rank steps, by key, without version counters."""
        # In an order that is the same on all ranks that have a parameter.
        mains = sorted(self._sync.main_parameters(), key=lambda main: main.record.key)
        return {main.record.key: _local(main.tensor) for main in mains}

    def _averages(self, key: str) -> bool:
        """Whether this rank averages a parameter that it steps."""
        rank = self._sync.topology.rank
        return all(rank == along.owner for along in self._spread.get(key, ()))

    def _wider(self, *, is_apart: bool) -> list[str]:
        """Returns the keys of the anchors that cannot be made of the present parameters."""
        # Right after a meeting an anchor is equal to the parameter. If it has more bits than that
        # has, it would lose them.
        tensors_of = self._main_tensors()
        return [k for k, a in self._anchors.items() if is_apart or tensors_of[k].dtype != a.dtype]

    def _compare(self) -> None:
        """Refuses anchors that differ between replicas: they would never be equal again."""
        topology, axes = self._sync.topology, self._sync.plan.independent_axes
        sums = self._sync.gather(_checksum(self._anchors.values(), self._sync.device)).flatten()
        of_rank = dict(zip(sorted(topology.ranks), sums.tolist(), strict=True))
        odd = [r for r, x in of_rank.items() if x != of_rank[topology.at(r).ranks_along(axes)[0]]]
        if odd:
            raise errors.DriftError(
                f"ranks {odd} have other parameters of the last meeting than the first replica: a "
                f"bit has flipped in memory, or something has written them; go on from a checkpoint"
            )

    def _average(self, tensors: Mapping[str, Tensor]) -> None:
        """Averages some parameters of one dtype over replicas, and makes the outer step."""
        anchors = [self._anchors[key] for key in tensors]
        # The way that each replica went is sent, not where it is: it is smaller, so the sum loses
        # fewer of its bits.
        ways = [(a - t).reshape(-1) for a, t in zip(anchors, tensors.values(), strict=True)]
        flat = torch.cat(ways)
        dist.all_reduce(flat, group=self._sync.group(self._ranks))
        means = flat.div_(len(self._ranks)).split([way.numel() for way in ways])
        for (key, tensor), anchor, mean in zip(tensors.items(), anchors, means, strict=True):
            self._move(key, anchor, mean.view(anchor.shape))
            tensor.copy_(anchor)
        self.met_bytes += flat.nbytes

    def _move(self, key: str, anchor: Tensor, gradient: Tensor) -> None:
        """Moves an anchor as `torch.optim.SGD` with ``nesterov=True`` does."""
        if factor := self._options["momentum"]:
            momentum = self._momenta.setdefault(key, torch.zeros_like(anchor))
            momentum.mul_(factor).add_(gradient)
            gradient = gradient.add(momentum, alpha=factor)
        anchor.add_(gradient, alpha=-self._options["lr"])

    def _send(self, tensors: Sequence[Tensor], ranks: Sequence[int]) -> None:
        """Sends tensors from the lowest of some ranks to the others."""
        for numbers in _packs(dict(enumerate(tensors))):
            pack = [tensors[number] for number in numbers]
            flat = torch.cat([tensor.reshape(-1) for tensor in pack])
            # Bytes can be sent on every backend. Some backends lack other dtypes.
            dist.broadcast(flat.view(torch.uint8), src=min(ranks), group=self._sync.group(ranks))
            for tensor, values in zip(pack, flat.split([t.numel() for t in pack]), strict=True):
                tensor.copy_(values.view(tensor.shape))


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's elements. Writes to them are no step of an optimizer."""
    to_local = getattr(tensor, "to_local", None)  # of a DTensor; to import it is slow
    part: Tensor = tensor if to_local is None else to_local()
    return part.data


def _packs(tensors: Mapping[_Key, Tensor]) -> Iterator[list[_Key]]:
    """Yields the keys of tensors that are sent together: of one dtype, in few messages."""
    for dtype in sorted({tensor.dtype for tensor in tensors.values()}, key=str):
        pack, nbytes = list[_Key](), 0
        for key, tensor in tensors.items():
            if tensor.dtype == dtype:
                pack, nbytes = [*pack, key], nbytes + tensor.nbytes
                if nbytes >= _PACK_BYTES:
                    yield pack
                    pack, nbytes = [], 0
        if pack:
            yield pack


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which parameters are averaged."""
    # An outer step of lr 0.7 is smaller than the inner steps that it averages. In 16 bits most of
    # it would be lost, also if parameters have no more bits.
    return torch.promote_types(dtype, torch.float32)


def _checksum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of the bits of some tensors as whole numbers, ``(1,)``."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        total += real.view(torch.int64 if real.dtype.itemsize == 8 else torch.int32).sum()
    return total


def _saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies on the CPU."""
    return {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}


def _written(outer: Mapping[str, Any]) -> str:
    """Returns an outer step as text, such as "every=2, lr=0.7"."""
    return ", ".join(f"{name}={value}" for name, value in outer.items())


def _check(what: str, saved: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    """Refuses saved values that are not those of this rank's parameters."""
    shapes, expected = ({k: tuple(t.shape) for k, t in ts.items()} for ts in (saved, present))
    if shapes != expected:
        raise ValueError(f"{what} has the shapes {shapes}, expected {expected}")
