"""Feed: the batches of this rank, fetched a step ahead.

[Note: a batch ahead] A rank whose batch fails, or differs from the one that another rank of its
pipeline has, must not leave the others alone in a step. So each batch is fetched while the step
before it still computes. The ranks exchange what they have found together with the metrics of that
step, in one message. Then all of them begin the next step, or all raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipegrad.comm.agreement import agree
from pipegrad.errors import PipegradError, StepError, in_words
from pipegrad.topology import Topology
from pipegrad.train.data.pairs import Inputs, Pair

_SLOW_SECONDS = 3600.0  # timeout for the slowest rank to come to its first batch
_READY, _ENDED, _FAILED = range(3)
_NOTHING = -1.0  # the digest on a rank that needs no data
_DIGEST_BYTES = 2**20  # of each tensor; the rest of a large one is not compared


class Feed:
    """The batches of this rank. Every rank has one, also a rank that needs no data.

    Args:
        topology: Says which ranks have the same data.
        source: Returns inputs and targets of a batch by its number, from 1; None if there are no
            more. Not called if no stage of this rank needs data.
        elements_seen: Returns how many elements the targets of all batches up to a number have.
        what: What the batches are, for messages.
        takes_inputs: Whether stages of this rank take the inputs.
        takes_target: Whether the last stage is on this rank.

    Attributes:
        what: As above.
        number: Of the batch that was fetched last.
        pair: Inputs and targets of this batch; None on a rank that needs no data.
        found: What other ranks need to know of it.
        replies: By rank, what was `found` there. Who fetches a batch without `begin` sets it.
        elements: Elements of the targets of the agreed batch, all data ranks together.
        elements_seen: The same of all batches up to it.
        has_ended: Whether a rank has no such batch.
        is_repeated: Whether all data ranks have the same batch.
    """

    def __init__(
        self,
        topology: Topology,
        source: Callable[[int], Pair | None],
        elements_seen: Callable[[int], int],
        what: str,
        *,
        takes_inputs: bool,
        takes_target: bool,
    ) -> None:
        needs_data = takes_inputs or takes_target
        self._source = source if needs_data else None
        self._count, self.what = elements_seen, what
        self._takes_inputs, self._takes_target = takes_inputs, takes_target
        by_data: dict[int, list[int]] = {}
        for rank in topology.ranks:
            by_data.setdefault(topology.at(rank).coordinate(topology.data), []).append(rank)
        self._by_data = list(by_data.values())
        self.number = 0
        self.pair: Pair | None = None
        self._error: BaseException | None = None
        self.found: list[float] = []
        self.replies: Sequence[Sequence[float]] = ()
        self.elements = self.elements_seen = 0
        self.has_ended = self.is_repeated = False

    def begin(self, number: int) -> None:
        """Fetches a batch and settles it; every rank must call it.

        Raises:
            PipegradError: As `settle` does.
        """
        if self.number != number:

            def fetched() -> list[float]:
                self.fetch(number)
                return self.found

            self.replies = agree(self.what, fetched, timeout_seconds=_SLOW_SECONDS)
        self.settle()

    def fetch(self, number: int) -> None:
        """Fetches a batch. If that fails, `settle` raises the error. Local."""
        self.number, self.pair, self._error = number, None, None
        self.found = [_READY, _NOTHING, 0, 0]
        if self._source is None:
            return
        try:
            self.pair = self._source(number)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised by `settle`, on all ranks
            self._error = error
            self.found = [_FAILED, _NOTHING, 0, 0]
            return
        if self.pair is None:
            self.found = [_ENDED, _NOTHING, 0, 0]
        else:
            elements = self.pair[1].numel()
            self.found = [_READY, digest_of(self.pair), elements, self._count(number)]

    def settle(self) -> None:
        """Compares what all ranks have fetched; every rank must call it.

        Raises:
            PipegradError: If a rank has failed, or ranks of a pipeline have different batches. On
                all ranks.
        """
        replies = self.replies
        states = {int(reply[0]) for reply in replies}
        if _FAILED in states:
            agree(f"batch {self.number} of {self.what}", self._raise)
        self.has_ended = _ENDED in states
        for ranks in self._by_data:
            digests = {replies[r][1]: r for r in reversed(ranks) if replies[r][1] != _NOTHING}
            if len(digests) > 1:
                one, other, *_ = sorted(digests.values())
                raise StepError(
                    f"batch {self.number} of {self.what} is another one on rank {other} than on "
                    f"rank {one}, which need the same: let the function draw random numbers from "
                    f"torch, numpy and random alone, and go by data_rank, not by the rank"
                )
        batches = [{replies[rank][1] for rank in ranks} - {_NOTHING} for ranks in self._by_data]
        self.is_repeated = len(batches) > 1 and all(batch == batches[0] for batch in batches)
        self.elements, self.elements_seen = (
            int(sum(max(replies[rank][column] for rank in ranks) for ranks in self._by_data))
            for column in (2, 3)
        )

    def placed(self, device: torch.device) -> tuple[Inputs | None, Tensor | None]:
        """Returns inputs and targets on a device; None for what this rank does not take."""
        if self.pair is None:
            return None, None
        inputs, target = self.pair
        return (
            placed(inputs, device) if self._takes_inputs else None,
            target.to(device) if self._takes_target else None,
        )

    def _raise(self) -> None:
        if self._error is None:
            return
        if isinstance(self._error, PipegradError):
            raise self._error
        # A function of the user has errors in words already. This may be too little memory.
        raise StepError(
            f"batch {self.number} of {self.what} cannot be made: {in_words(self._error)}"
        ) from self._error


def placed(inputs: Inputs, device: torch.device) -> Inputs:
    """Returns inputs on a device."""
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def digest_of(pair: Pair) -> float:
    """Returns a digest of a batch that a float64 has exactly."""
    digest = hashlib.sha256()
    inputs, target = pair
    named = {"": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    for name, tensor in [*sorted(named.items()), ("target", target)]:
        digest.update(name.encode())
        flat = tensor.detach().flatten()
        part = flat[: _DIGEST_BYTES // max(1, tensor.itemsize)].cpu().contiguous()
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(part.view(torch.uint8).numpy().tobytes())
    return float(int.from_bytes(digest.digest()[:6]))
