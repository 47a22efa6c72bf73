"""Drift: makes the copies of each parameter equal, and compares them.

They are made equal at the start, and after a checkpoint was loaded. They are compared on demand,
and in a few steps of every run, by checksums: integers that differ if one bit of a tensor differs,
at the speed of memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from pipegrad.comm.activity import Activity
from pipegrad.comm.agreement import agree
from pipegrad.comm.collectives import all_reduce, broadcast
from pipegrad.comm.process_groups import Groups
from pipegrad.errors import DriftError
from pipegrad.gradients.parameter import LiveParameter
from pipegrad.model.dtensor import local
from pipegrad.plan.buckets import Bucket
from pipegrad.plugins.handler import Placement

Parameters = Mapping[str, LiveParameter]
Sums = Callable[[torch.Tensor], torch.Tensor]  # `checksum` or `full_checksum`
Name = tuple[str, bool]
"""Of a copy, equal on all ranks: key of the parameter, and whether it is its master copy."""
Sets = tuple[tuple[int, ...], ...]
"""Of a copy: the ranks of each reduction along which it is equal."""
Facts = tuple[tuple[int, ...], Sets]
"""What a rank says of its copy: its checksum, and along which ranks it is equal."""

_LEAST = torch.iinfo(torch.int64).min
_ROUNDINGS = 4.0  # allowed in one step, of the largest element: an optimizer rounds a few times
_WHY = (
    "Something changed them differently: other options of the optimizer (weight_decay, lr), "
    "clipping by the norm of one rank's gradients (call sync.clip_grad_norm_), values written on "
    "one rank, or behind publish(); or a bit has flipped in memory."
)
_GONE = "none that differs still, so they are written while they are compared"


def make_equal(
    packs: Sequence[Bucket], parameters: Parameters, groups: Groups, device: torch.device
) -> None:
    """Copies every parameter from the lowest rank that holds it to all replicas.

    Args:
        packs: This rank's parameters by route, in the order of all ranks.
        parameters: Of this rank, by key.
        groups: The communicators; those of comm stream 0 are used.
        device: Of the parameters.

    Sync: on the current stream. One broadcast for each reduction of a pack, of a flat copy.
    """
    # Each broadcast starts at the owner of one reduction. Along a route, the owner of a later
    # reduction already has the values of the owners before it, so all ranks end with the same bits.
    for pack in packs:
        flat = _gather(pack, parameters, device)
        for step in pack.route:
            # Bytes can be sent on every backend. Some backends lack other dtypes.
            group = groups.of(step.ranks, 0)
            with Activity("the values of all copies", step.ranks):
                broadcast(flat.view(torch.uint8), step.owner, group)
        with torch.no_grad():
            for slot in pack.slots:
                view = flat.as_strided(slot.shape, slot.stride, slot.offset)
                local(parameters[slot.key].parameter).copy_(view)
        del flat  # otherwise two copies would exist at a time


def _gather(pack: Bucket, parameters: Parameters, device: torch.device) -> torch.Tensor:
    flat = torch.zeros(pack.payload_numel, dtype=pack.dtype, device=device)
    for slot in pack.slots:
        view = flat.as_strided(slot.shape, slot.stride, slot.offset)
        view.copy_(local(parameters[slot.key].parameter).detach())
    return flat


def is_compared(number: int, every: int) -> bool:
    """Whether copies are compared in a step: 2, 4, 8 and so on, and then every `every` steps.

    Args:
        number: Of the step, from 1.
        every: 0 for never.
    """
    # A mistake in a program makes copies differ in its first steps, so comparisons are frequent
    # there. Later they look for what happens once in a long run.
    is_early = 1 < number < every and number & (number - 1) == 0
    return every > 0 and (is_early or number % every == 0)


class DriftCheck:
    """Compares the copies of each parameter, also a frozen one, over the ranks that hold it.

    It compares master copies too. It sends two integers for each copy, and one flag over all ranks,
    on the current stream. Replicas that train alone have no copies of each other.

    Args:
        packs: This rank's parameters by route, in the order of all ranks.
        parameters: Of this rank, by key.
        with_main: Keys of the parameters that have master copies, the same on all ranks.
        groups: The communicators; those of comm stream 0 are used.
        ranks: All ranks.
        device: Of this rank.
        agree_seconds: How long the ranks wait for each other if copies differ.
        every: Steps between two comparisons; see `is_compared`.
        is_exact: Whether ranks round alike, so that copies must be equal bit by bit.
    """

    def __init__(
        self,
        packs: Sequence[Bucket],
        parameters: Parameters,
        with_main: Collection[str],
        *,
        groups: Groups,
        ranks: Sequence[int],
        device: torch.device,
        agree_seconds: float,
        every: int,
        is_exact: bool,
    ) -> None:
        self._parameters = parameters
        self._groups = groups
        self._ranks = ranks
        self._device = device
        self._agree_seconds = agree_seconds
        self._every = every
        self._is_exact = is_exact
        self._num_steps = 0
        self._first = 0  # steps before the first one that was counted
        self._last_step = 0
        self._last_equal: int | None = None
        self._is_wanted = False  # whether the next step must compare
        self._copies: dict[Name, Sets] = {}
        for pack in packs:
            everywhere = tuple(dict.fromkeys(step.ranks for step in pack.route))
            # With SHARD each rank has another part of a master copy. With OWNER one rank has it.
            mains = (s.ranks for s in pack.route if s.placement is Placement.REPLICATE)
            replicated = tuple(dict.fromkeys(mains))
            for slot in pack.slots:
                self._copies[slot.key, False] = everywhere
                if slot.key in with_main and replicated:
                    self._copies[slot.key, True] = replicated
        self._over: dict[tuple[int, ...], list[Name]] = {}  # ranks -> copies along them
        for name, sets in self._copies.items():
            for members in sets:
                self._over.setdefault(members, []).append(name)

    def continue_from(self, num_steps: int) -> None:
        """Counts steps from `num_steps` on in messages, for a run that was resumed."""
        self._first = num_steps - self._num_steps

    def look_next_step(self) -> None:
        """Makes the next step compare, unless no step does. All ranks must call it."""
        self._is_wanted = self._every > 0

    def count(self, step: int) -> bool:
        """Counts a step that reduces; returns whether all ranks compare copies in it.

        All ranks have the same count, with the steps that failed. The second call for a step counts
        nothing and returns False.

        Args:
            step: Its number; different for each step.
        """
        if self._groups.world is None or step == self._last_step:
            return False
        # Two callers count a step: `finish`, and `abort` where it fails behind that. Counted twice,
        # this rank would compare in another step than the others.
        self._last_step = step
        self._num_steps += 1
        is_wanted, self._is_wanted = self._is_wanted, False
        return is_wanted or is_compared(self._num_steps, self._every)

    def look(self) -> None:
        """Compares copies in a step; raises an error on all ranks if any differ.

        Machines of two kinds may round differently, in each step the last bit of an element. There,
        if the bits of a parameter differ, the parameter itself is sent too.

        Raises:
            DriftError: If they differ, by more than roundings explain. It names parameters and
                ranks.
        """
        differing = self._differing(checksum)
        if not self._is_exact:
            # Errors of independent roundings grow with the square root of their number.
            limit = _ROUNDINGS * math.sqrt(self._num_steps)
            # `_spread` runs collectives. All ranks that hold a parameter have the same differences,
            # in the same order, so they run the same collectives.
            differing = [
                (name, ranks)
                for name, ranks in differing
                if not name[1]
                and _spread(local(self._parameters[name[0]].parameter), self._groups.of(ranks, 0))
                > limit
            ]
        self._refuse([name for name, _ in differing])

    def refuse(self) -> None:
        """Raises an error on all ranks if copies differ in a single bit.

        Raises:
            DriftError: If they differ. It names parameters and ranks.
        """
        if self._groups.world is not None:
            self._refuse([name for name, _ in self._differing(full_checksum)])

    def _refuse(self, differing: Sequence[Name]) -> None:
        """Raises an error on all ranks if copies differ on any."""
        # Other ranks may hold none of the parameters that differ. They must raise too, so all ranks
        # reduce a flag first.
        number = self._first + self._num_steps
        if not self._groups.is_anywhere(bool(differing)):
            self._last_equal = number
            return
        listing = "; ".join(self._odd_copies(differing)) or _GONE
        last = self._last_equal
        when = f"in step {number}" + ("" if last is None else f", and were equal in step {last}")
        raise DriftError(
            f"copies of one parameter have drifted apart: {listing}. They differ {when}. "
            f"{_WHY} Correct it, and call synchronize_parameters()"
        )

    def _odd_copies(self, differing: Sequence[Name]) -> list[str]:
        """Returns which copies differ from which, in words, the same on all ranks."""
        ranks, seconds = self._ranks, self._agree_seconds
        names = agree("check_replicas", lambda: differing, ranks=ranks, timeout_seconds=seconds)
        wanted = sorted({name for reply in names for name in reply})
        facts = partial(self._facts, wanted)
        replies = agree("checksums", facts, ranks=ranks, timeout_seconds=seconds)
        of_ranks = dict(zip(ranks, replies, strict=True))
        return [
            words
            for name in wanted
            for words in odd_copies(name, {r: x[name] for r, x in of_ranks.items() if name in x})
        ]

    def _tensor(self, name: Name) -> torch.Tensor | None:
        """Returns the tensor of a copy, without version counter of the parameter.

        None for a master copy, or a part of one, that another rank steps.
        """
        parameter = self._parameters[name[0]]
        if not name[1]:
            return local(parameter.parameter).data
        main_shard = parameter.main_shard
        return main_shard.tensor.data if main_shard is not None and main_shard.copied else None

    def _facts(self, names: Collection[Name]) -> dict[Name, Facts]:
        """Returns what this rank says of its copies of some names."""
        return {
            name: (tuple(full_checksum(tensor).tolist()), sets)
            for name, sets in self._copies.items()
            if name in names and (tensor := self._tensor(name)) is not None
        }

    def _differing(self, sums: Sums) -> list[tuple[Name, tuple[int, ...]]]:
        """Returns the copies that differ over the ranks of a reduction, with these ranks.

        All ranks of a reduction have the same result.

        Sync: on the current stream; one all-reduce over each set of ranks. The host waits for it.
        """
        rows = {name: self._row(name, sums) for name in self._copies}
        differing = []
        # All ranks go through the sets of ranks in one order, so they cannot wait in a circle.
        for ranks, names in sorted(self._over.items()):
            table = torch.stack([rows[name] for name in names])
            with Activity("the checksums of all copies", ranks):
                all_reduce(table, self._groups.of(ranks, 0), dist.ReduceOp.MAX)
            largest, complements = table.chunk(2, dim=1)
            is_nowhere = (largest == _LEAST) & (complements == _LEAST)
            unequal = ((largest != ~complements) & ~is_nowhere).any(dim=1).tolist()
            differing += [(n, ranks) for n, differs in zip(names, unequal, strict=True) if differs]
        return differing

    def _row(self, name: Name, sums: Sums) -> torch.Tensor:
        """Returns the sums and their complements; the least numbers if the tensor is not here."""
        # The maximum of the complements is the complement of the minimum. So one reduction compares
        # any number of copies: they are equal if maximum and minimum are.
        tensor = self._tensor(name)
        if tensor is None:
            number = 2 * len(sums(torch.zeros(0)))
            return torch.full((number,), _LEAST, device=self._device)
        values = sums(tensor)
        return torch.cat([values, ~values])


def _spread(parameter: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Returns the largest difference, in roundings of the largest element; inf if not finite."""
    low = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    low = low.to(torch.promote_types(low.dtype, torch.float32), copy=True).contiguous()
    high = low.clone()
    all_reduce(low, group, dist.ReduceOp.MIN)
    all_reduce(high, group, dist.ReduceOp.MAX)
    if not parameter.numel() or not (parameter.is_floating_point() or parameter.is_complex()):
        return math.inf if bool((low != high).any()) else 0.0
    # Small elements may differ by many of their own roundings, after a subtraction in the optimizer
    # for example. So the largest element is the measure.
    largest = torch.maximum(low.abs(), high.abs()).max() * torch.finfo(parameter.dtype).eps
    spread = ((high - low).max() / largest).item() if bool(largest) else 0.0
    return math.inf if math.isnan(spread) else spread


def odd_copies(name: Name, facts: Mapping[int, Facts]) -> Iterator[str]:
    """Yields in words the sets of copies that differ: one for each set that must be equal. Pure.

    If more than half of the copies of a set are equal, the words name the ranks of the others.

    Args:
        name: Of the copies.
        facts: Of each rank that has a copy.
    """
    key, is_main = name
    what = f"the master copy of {key!r}" if is_main else repr(key)
    for ranks in _connected(facts):
        counts = Counter(facts[rank][0] for rank in ranks)
        [(sums, number)] = counts.most_common(1)
        odd = [rank for rank in ranks if facts[rank][0] != sums]
        if odd and 2 * number > len(ranks):
            yield f"{what} on ranks {odd}, of the copies on ranks {ranks}"
        elif odd:
            yield f"{what} over ranks {ranks}"


def _connected(facts: Mapping[int, Facts]) -> Iterator[list[int]]:
    """Yields the ranks that are linked by any groups, each set once and ascending."""
    # A tied parameter of replicas is equal over the holders of the tie, and over the replicas. No
    # single group has all of its copies.
    remaining = sorted(facts)
    while remaining:
        linked, new = set[int](), {remaining[0]}
        while new:
            linked |= new
            groups = [group for rank in new for group in facts[rank][1]]
            new = {rank for group in groups for rank in group if rank in facts} - linked
        yield sorted(linked)
        remaining = [rank for rank in remaining if rank not in linked]


_BLOCK = 1024  # words of 8 bytes
_PIECE = 2**17  # words: what is mixed at a time fits into a cache
_LOW = 2**32 - 1
_ODD = 0x1E3779B97F4A7C15  # the golden ratio, so that products have bits everywhere


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an int64 sum ``(1,)`` over the bits. It reads the tensor once.

    A change of any single word of 8 bytes changes it, so any single bit does. An exchange of
    elements in one block of 8 KiB may leave it.

    Args:
        tensor: Of any dtype and shape.
    """
    # Integers, so that the order of additions does not matter. Sums wrap around modulo 2^64. All
    # weights are odd, so the product of a change and a weight is never a multiple of 2^64.
    words, rest = _words(tensor)
    # A weight for each word would be a second tensor as large as the first. So blocks have weights,
    # and the words of a block are summed.
    whole = words.numel() // _BLOCK * _BLOCK
    total = words[whole:].sum()
    if rest is not None:
        total = total + rest
    if whole:
        blocks = words[:whole].view(-1, _BLOCK).sum(1)
        weights = torch.arange(3, 2 * blocks.numel() + 3, 2, device=blocks.device)
        total = total + (blocks * weights).sum()
    return total.reshape(1)


def full_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns three int64 sums ``(3,)``: `checksum`, and two that also see exchanged elements.

    It takes several times as long as `checksum`.

    Args:
        tensor: Of any dtype and shape.
    """
    words, _ = _words(tensor)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    positions = torch.arange(min(_PIECE, words.numel()), device=words.device)
    for start in range(0, words.numel(), _PIECE):
        mixed = _mixed(words[start : start + _PIECE])
        plain = mixed.sum()
        weighted = (mixed * positions[: len(mixed)]).sum() + start * plain
        sums += torch.stack([plain, weighted])
    return torch.cat([checksum(tensor), sums])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, uint8 ``(nbytes,)``, in row-major order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the whole words of a tensor, int64, and the padded word of the bytes after them."""
    flat = bytes_of(tensor)
    if flat.storage_offset() % 8:  # a view of another tensor; words must begin at words
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    if whole == flat.numel():
        return words, None
    rest = flat.new_zeros(8)
    rest[: flat.numel() - whole] = flat[whole:]
    return words, rest.view(torch.int64)[0]


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Returns words of which each bit depends on several; different words stay different."""
    # Without it, a difference in the highest bits alone would vanish in the weighted sum.
    mixed = (words ^ ((words >> 32) & _LOW)) * _ODD
    return mixed ^ ((mixed >> 32) & _LOW)
