"""Drift: makes the copies of each parameter equal, and compares them.

They are made equal at the start, and after a checkpoint was loaded. They are compared on demand,
and in a few steps of every run, by checksums: integers that differ if one bit of a tensor differs,
at the speed of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipegrad.comm.activity import Activity
from pipegrad.comm.agreement import agree
from pipegrad.comm.collectives import all_reduce, broadcast
from pipegrad.comm.process_groups import Groups
from pipegrad.errors import DriftError
from pipegrad.gradients.parameter import Param
from pipegrad.model.dtensor import local
from pipegrad.plan.plan import Plan

Parameters = Mapping[str, Param]
Name = tuple[str, bool]
"""Of a copy, equal on all ranks: key of the parameter, and whether it is its master copy."""
Facts = tuple[int, tuple[tuple[int, ...], ...]]
"""Of a copy on one rank: its checksum, and the ranks of each reduction along which it is equal."""


def make_equal(plan: Plan, parameters: Parameters, groups: Groups) -> None:
    """Copies every parameter from the lowest rank that holds it to all replicas.

    Sync: on the current stream. One broadcast for each reduction of a parameter.
    """
    # Each broadcast starts at the owner of one reduction. All ranks end with the same bits, because
    # the owner of a later reduction on a route already has the values of the owners before it.
    for key, route in plan.routes:
        tensor = local(parameters[key].tensor).detach()
        values = tensor.contiguous()
        for step in route:
            # Send bytes, because some backends lack other dtypes.
            with Activity("the values of all copies", step.ranks):
                broadcast(bytes_of(values), step.owner, groups.of(step.ranks, 0))
        tensor.copy_(values)


def is_compared(number: int, every: int) -> bool:
    """True if copies are compared in a step: 2, 4, 8 and so on, and then every `every` steps."""
    # Compare often in the first steps, because a mistake in a program makes copies differ there.
    # Later comparisons look for rare events of a long run.
    is_early = 1 < number < every and number & (number - 1) == 0
    return every > 0 and (is_early or number % every == 0)


class DriftCheck:
    """Compares the copies of each parameter, also a frozen one, over the ranks that hold it.

    It compares master copies too. It sends two integers for each copy, and one flag over all ranks,
    on the current stream. Replicas that train alone have no copies of each other.

    Args:
        plan: This rank's plan.
        parameters: This rank's parameters, by key.
        with_main: Keys of the parameters that have master copies, the same on all ranks.
        groups: The communicators; comm stream 0's are used.
        ranks: All ranks.
        agree_seconds: Timeout of ranks that wait for each other if copies differ.
        every: Steps between two comparisons; see `is_compared`.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Parameters,
        with_main: Collection[str],
        *,
        groups: Groups,
        ranks: Sequence[int],
        agree_seconds: float,
        every: int,
    ) -> None:
        self._parameters = parameters
        self._groups = groups
        self._ranks = ranks
        self._agree_seconds = agree_seconds
        self._every = every
        self._num_steps = 0
        self._first = 0  # steps before the first one that was counted
        self._last_step = 0
        self._last_equal: int | None = None
        self._is_wanted = False  # whether the next step must compare
        self._over: dict[tuple[int, ...], list[Name]] = {}  # ranks -> copies along them
        for key, route in plan.routes:
            for step in route:
                names = self._over.setdefault(step.ranks, [])
                names.append((key, False))
                # With SHARD each rank has another part of a master copy. With OWNER one rank has
                # it. All ranks of a REPLICATE have the same part, or none has a part.
                has_main = key in with_main and parameters[key].main is not None
                if has_main and not step.syncs_parameters:
                    names.append((key, True))

    def continue_from(self, num_steps: int) -> None:
        """Counts steps from `num_steps` on in messages, for a run that was resumed."""
        self._first = num_steps - self._num_steps

    def look_next_step(self) -> None:
        """Makes the next step compare, unless no step does. All ranks must call it."""
        self._is_wanted = self._every > 0

    def count(self, step: int) -> bool:
        """Counts a step that reduces; returns True if all ranks compare copies in it.

        All ranks have the same count, with the steps that failed. The second call for a step counts
        nothing and returns False.
        """
        if self._groups.world is None or step == self._last_step:
            return False
        # Count a step once, because this rank would otherwise compare in another step than the
        # others. Two callers count it: `finish`, and `abort` if the step fails after that.
        self._last_step = step
        self._num_steps += 1
        is_wanted, self._is_wanted = self._is_wanted, False
        return is_wanted or is_compared(self._num_steps, self._every)

    def look(self) -> None:
        """Compares copies in a step; raises an error on all ranks if any differ in a single bit.

        Raises:
            DriftError: If they differ. It names parameters and ranks.
        """
        if self._groups.world is None:
            return
        held = {name for names in self._over.values() for name in names}
        sums = {name: checksum(self._tensor(name)) for name in held}
        differing = self._differing(sums)
        # Reduce a flag first, because all ranks must raise, and other ranks may hold none of the
        # parameters that differ.
        number = self._first + self._num_steps
        if not self._groups.is_anywhere(bool(differing)):
            self._last_equal = number
            return
        listing = "; ".join(self._odd_copies(differing, sums))
        last = self._last_equal
        when = f"in step {number}" + ("" if last is None else f", and were equal in step {last}")
        raise DriftError(
            f"copies of one parameter have drifted apart: {listing}. They differ {when}. "
            f"Something changed them differently: other options of the optimizer (weight_decay, "
            f"lr), clipping by the norm of one rank's gradients (call sync.clip_grad_norm_), "
            f"values written on one rank, or behind publish(); or a bit has flipped in memory. "
            f"Correct it, and call synchronize_parameters()"
        )

    def _tensor(self, name: Name) -> torch.Tensor:
        key, is_main = name
        parameter = self._parameters[key]
        main = parameter.main if is_main else None
        return local(parameter.tensor) if main is None else main.tensor

    def _differing(self, sums: Mapping[Name, torch.Tensor]) -> list[Name]:
        """Returns the copies that differ over the ranks of a reduction, equal on these ranks.

        Sync: on the current stream; one all-reduce over each set of ranks. The host waits for it.
        """
        differing: list[Name] = []
        # Sort, because ranks that go through the sets in one order cannot wait in a circle.
        for ranks, names in sorted(self._over.items()):
            # One reduction compares any number of copies, because the maximum of the complements is
            # the complement of the minimum: copies are equal if maximum and minimum are.
            values = torch.cat([sums[name] for name in names])
            table = torch.stack([values, ~values])
            with Activity("the checksums of all copies", ranks):
                all_reduce(table, self._groups.of(ranks, 0), dist.ReduceOp.MAX)
            unequal = (table[0] != ~table[1]).tolist()
            differing += [n for n, differs in zip(names, unequal, strict=True) if differs]
        return differing

    def _odd_copies(
        self, differing: Sequence[Name], sums: Mapping[Name, torch.Tensor]
    ) -> list[str]:
        """Returns a description of each set of copies that differ, equal on all ranks."""
        ranks, seconds = self._ranks, self._agree_seconds
        names = agree("check_replicas", lambda: differing, ranks=ranks, timeout_seconds=seconds)
        wanted = sorted({name for reply in names for name in reply})
        facts: dict[Name, Facts] = {
            name: (int(sums[name]), tuple(r for r, held in self._over.items() if name in held))
            for name in wanted
            if name in sums
        }
        replies = agree("checksums", lambda: facts, ranks=ranks, timeout_seconds=seconds)
        of_ranks = dict(zip(ranks, replies, strict=True))
        return [
            words
            for name in wanted
            for words in odd_copies(name, {r: x[name] for r, x in of_ranks.items() if name in x})
        ]


def odd_copies(name: Name, facts: Mapping[int, Facts]) -> Iterator[str]:
    """Yields a description of each set of copies that must be equal and differ. Pure.

    If more than half of the copies of a set are equal, it names the ranks of the others.
    """
    key, is_main = name
    what = f"the master copy of {key!r}" if is_main else repr(key)
    for ranks in _linked(facts):
        counts = Counter(facts[rank][0] for rank in ranks)
        [(sums, number)] = counts.most_common(1)
        odd = [rank for rank in ranks if facts[rank][0] != sums]
        if odd and 2 * number > len(ranks):
            yield f"{what} on ranks {odd}, of the copies on ranks {ranks}"
        elif odd:
            yield f"{what} over ranks {ranks}"


def _linked(facts: Mapping[int, Facts]) -> list[list[int]]:
    """Returns the ranks that are linked by any groups, each set once and ascending."""
    # Join groups, because no single group has all copies of a tied parameter of replicas: it is
    # equal over the holders of the tie, and over the replicas.
    linked: list[set[int]] = []
    for group in {group for _, groups in facts.values() for group in groups}:
        joined = [each for each in linked if not each.isdisjoint(group)]
        linked = [each for each in linked if each not in joined]
        linked.append(set(group).union(*joined))
    return sorted(sorted(each & facts.keys()) for each in linked)


_WORD_BYTES = 8
_BLOCK = 1024  # words


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an int64 sum ``(1,)`` over the bits of a tensor of any dtype. It reads it once.

    A change of any single word of 8 bytes, and so of any single bit, changes the sum. An exchange
    of elements in one block of 8 KiB may leave it.
    """
    # Integers, because the order of additions must not matter. Sums wrap around modulo 2^64. The
    # product of a change and a weight is never a multiple of 2^64, because all weights are odd.
    flat = bytes_of(tensor)
    if flat.storage_offset() % _WORD_BYTES:  # a view of another tensor; words must begin at words
        flat = flat.clone()
    num_blocks = flat.numel() // (_WORD_BYTES * _BLOCK)
    end = num_blocks * _WORD_BYTES * _BLOCK
    rest = nn.functional.pad(flat[end:], (0, -flat.numel() % _WORD_BYTES)).view(torch.int64)
    # Blocks have weights, and the words of a block are summed, because a weight for each word would
    # be a second tensor as large as the first.
    blocks = flat[:end].view(torch.int64).view(num_blocks, _BLOCK).sum(1)
    weights = torch.arange(3, 2 * num_blocks + 3, 2, device=flat.device)
    return ((blocks * weights).sum() + rest.sum()).reshape(1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, uint8 ``(nbytes,)``, in row-major order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
