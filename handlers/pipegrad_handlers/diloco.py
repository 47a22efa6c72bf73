"""diloco: data replicas train alone, and meet every few steps. For clusters with slow links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.sgd import sgd

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
        if type(lr) not in (int, float) or not 0 < lr < math.inf:
            raise ValueError(f"lr is {lr!r}, expected a number above 0")
        if type(momentum) not in (int, float) or not 0 <= momentum < 1:
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
        sync: The gradient layer whose replicas train alone.
        every: Steps between two meetings.
        lr: Learning rate of the outer step.
        momentum: Its momentum.

    Attributes:
        met_bytes: Bytes that this rank has averaged so far.
    """

    def __init__(self, sync: GradientSync, *, every: int, lr: float, momentum: float) -> None:
        self._sync = sync
        self._every, self._lr, self._momentum = every, lr, momentum
        self._outer = f"every={every}, lr={lr}, momentum={momentum}"
        self._ranks = sync.topology.ranks_along(sync.plan.independent_axes)
        # Along these reductions ranks have the same elements.
        self._spread = {
            key: [step for step in route if step.placement is Placement.REPLICATE]
            for key, route in sync.plan.routes
        }
        self.met_bytes = 0
        self._last = 0  # the steps of the sync until the last meeting
        self._anchors: dict[str, Tensor] = {}  # of the parameters that this rank averages, by key
        self._momenta: dict[str, Tensor] = {}

    @property
    def _num_steps(self) -> int:
        """Steps since the last meeting, whether or not an optimizer has used their gradients."""
        # Count steps of the sync, because one replica alone might leave a step of its optimizer
        # out. All ranks meet after the same step: all end it with gradients, or all fail in it.
        return self._sync.statistics().steps - self._last

    @property
    def is_due(self) -> bool:
        """True if as many steps have ended as lie between two meetings."""
        return self._num_steps >= self._every

    def begin(self) -> None:
        """Makes all replicas equal to the first, and begins anew, without momentum.

        Sync: on the current stream.
        """
        tensors_of = self._main_tensors()
        records = self._sync.records()
        frozen = {r.key: _local(self._sync.parameter(r)) for r in records if not r.requires_grad}
        self._send({**tensors_of, **frozen}, self._ranks)
        self._last = self._sync.statistics().steps
        rank = self._sync.topology.rank
        # An outer step of lr 0.7 is smaller than the inner steps that it averages. In 16 bits most
        # of it would be lost, also if parameters have no more bits.
        self._anchors = {
            key: tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            for key, tensor in tensors_of.items()
            # Of ranks that have the same elements, the owner averages.
            if all(rank == along.owner for along in self._spread.get(key, ()))
        }
        if self._momentum:
            self._momenta = {key: torch.zeros_like(x) for key, x in self._anchors.items()}

    def step(self) -> None:
        """Meets the other replicas.

        Sync: on the current stream. The host waits if collectives block it.

        Raises:
            DriftError: On all ranks, if the anchors of the replicas differ.
        """
        self._compare()
        tensors_of = self._main_tensors()
        self._last = self._sync.statistics().steps
        for keys in _packs(self._anchors):
            self._average({key: tensors_of[key] for key in keys})
        # All ranks go through the sets of ranks in one order, because they must not wait in a
        # circle. The first of a set has its values by then: sets in which it is not the first come
        # before.
        sets: dict[tuple[int, ...], dict[str, Tensor]] = {}
        for key, tensor in tensors_of.items():
            for along in self._spread.get(key, ()):
                sets.setdefault(along.ranks, {})[key] = tensor
        for ranks, tensors in sorted(sets.items(), key=itemgetter(0)):
            self._send(tensors, ranks)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank. Replicas have different ones between two meetings."""
        return {
            "outer": self._outer,
            "num_steps": self._num_steps,
            "tensors": {
                name: {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
                for name, tensors in self._kept().items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a result of `state_dict` of this rank.

        Raises:
            ValueError: If it is not such a state, or was saved with another outer step.
        """
        if not state:
            return
        # With another `every` the run would not end with a meeting, because its steps before count.
        if state["outer"] != self._outer:
            raise ValueError(
                f"it was saved with the outer step {state['outer']}, and this run has "
                f"{self._outer}: choose the same numbers"
            )
        for name, tensors in self._kept().items():
            saved = state["tensors"][name]
            if {k: t.shape for k, t in saved.items()} != {k: t.shape for k, t in tensors.items()}:
                raise ValueError(f"its {name} are not those of this rank's {sorted(tensors)}")
            for key, tensor in tensors.items():
                tensor.copy_(saved[key])
        self._last = self._sync.statistics().steps - int(state["num_steps"])

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors of a state, by name and key."""
        return {
            "momenta": self._momenta,
            "anchors": self._anchors,
            "main parameters": self._main_tensors(),
        }

    def _main_tensors(self) -> dict[str, Tensor]:
        """Returns the main parameters of this rank by key, without version counters."""
        # In an order that is the same on all ranks that have a parameter.
        mains = sorted(self._sync.main_parameters(), key=lambda main: main.record.key)
        return {main.record.key: _local(main.tensor) for main in mains}

    def _compare(self) -> None:
        """Refuses anchors that differ between replicas: they would never be equal again."""
        topology, axes = self._sync.topology, self._sync.plan.independent_axes
        # Add integers, because their order does not matter, and any flipped bit changes the sum.
        words = (anchor.reshape(-1).view(torch.int32).sum() for anchor in self._anchors.values())
        total = sum(words, torch.zeros(1, dtype=torch.int64, device=self._sync.device))
        sums = self._sync.gather(total).flatten()
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
        # Send the way that each replica went, not its position. The sum of ways loses fewer bits,
        # because ways are smaller.
        ways = [(a - t).reshape(-1) for a, t in zip(anchors, tensors.values(), strict=True)]
        flat = torch.cat(ways)
        dist.all_reduce(flat, group=self._sync.group(self._ranks))
        means = flat.div_(len(self._ranks)).split([way.numel() for way in ways])
        sgd(
            anchors,
            [mean.view(anchor.shape) for mean, anchor in zip(means, anchors, strict=True)],
            [self._momenta.get(key) for key in tensors],
            weight_decay=0.0,
            momentum=self._momentum,
            lr=self._lr,
            dampening=0.0,
            nesterov=True,
            maximize=False,
        )
        for tensor, anchor in zip(tensors.values(), anchors, strict=True):
            tensor.copy_(anchor)
        self.met_bytes += flat.nbytes

    def _send(self, tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> None:
        """Sends tensors from the lowest of some ranks to the others."""
        for keys in _packs(tensors):
            pack = [tensors[key] for key in keys]
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


def _packs(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the keys of tensors that are sent together: of one dtype, in few messages."""
    packs: dict[tuple[torch.dtype, int], list[str]] = {}
    begin = 0
    for key, tensor in tensors.items():
        packs.setdefault((tensor.dtype, begin // _PACK_BYTES), []).append(key)
        begin += tensor.nbytes
    return list(packs.values())
