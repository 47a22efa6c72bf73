"""Split backward over stages in a V, with a third or half of the activations of 1f1b."""

from __future__ import annotations

from collections.abc import Sequence

from pipegrad.schedules.builtin.zb_h1 import SplitBackward
from pipegrad.schedules.schedule import Action, Kind, Schedule

# Start times of microbatch 0 on a rank, in units: F down the V, F up, I up, I down. Microbatch m is
# 6 m units later, because each takes six actions of a rank.
Block = tuple[int, int, int, int]


def repeated(
    name: str,
    blocks: Sequence[Block],
    num_live: int,
    num_microbatches: int,
    *,
    head_w_first: bool,
) -> Schedule:
    """Returns the schedule that repeats a block for each microbatch, as early as it can.

    Two ways are tried, and the shorter one is taken, if every action takes one unit:

    - Each rank computes F and I in the order of the blocks.
    - An action whose inputs are there overtakes others. This fills the warm-up and the drain, and
      is most of the gain if microbatches are few. The live forwards down are then limited to the
      number that the block holds at a time.
    """
    num_ranks = len(blocks)
    stage_to_rank = (*range(num_ranks), *reversed(range(num_ranks)))
    # The gradient of a forward is there once its I has ended, and W may come two units later. Keep
    # one place of the limit for the way up, because microbatches on the way down could otherwise
    # never go on.
    down = [min(num_live - 1, -(-(block[3] - block[0] + 3) // 6)) for block in blocks]
    ways = [
        _actions(blocks, num_live, [num_live] * num_ranks, num_microbatches, most_ahead=1),
        _actions(blocks, num_live, down, num_microbatches, most_ahead=4),
    ]
    _, actions = min(ways, key=lambda way: way[0])
    return Schedule(name, num_microbatches, stage_to_rank, actions, head_w_first=head_w_first)


def _actions(
    blocks: Sequence[Block],
    num_live: int,
    num_live_down: Sequence[int],
    num_microbatches: int,
    *,
    most_ahead: int,
) -> tuple[int, tuple[tuple[Action, ...], ...]]:
    """Returns the number of ticks if all ranks begin as early as they can, and their actions."""
    last = 2 * len(blocks) - 1
    # Count the microbatches that have begun. A count is enough, because those of a stage and kind
    # are in order.
    begun: dict[tuple[int, Kind], int] = {
        (stage, kind): 0 for stage in range(last + 1) for kind in ("F", "I", "W")
    }
    rows = [list[Action]() for _ in blocks]
    late = [list[Action]() for _ in blocks]  # W

    def may_begin(rank: int, stage: int, kind: Kind, microbatch: int) -> bool:
        if kind == "I":
            came = stage == last or ended[stage + 1, "I"] > microbatch
            return came and ended[stage, "F"] > microbatch
        live = {s: ended[s, "F"] - ended[s, "W"] for s in (rank, last - rank)}
        has_room = sum(live.values()) < num_live
        if stage == rank:
            has_room &= live[stage] < num_live_down[rank]
        return has_room and (stage == 0 or ended[stage - 1, "F"] > microbatch)

    num_ticks = 0
    while any(len(row) < 6 * num_microbatches for row in rows):
        num_ticks += 1
        ended = dict(begun)
        for rank, (row, block) in enumerate(zip(rows, blocks, strict=True)):
            up = last - rank
            turns: tuple[tuple[int, Kind], ...] = ((rank, "F"), (up, "F"), (up, "I"), (rank, "I"))
            planned = sorted(
                (at + 6 * ended[turn], turn)
                for at, turn in zip(block, turns, strict=True)
                if ended[turn] < num_microbatches
            )
            for _, (stage, kind) in planned[:most_ahead]:
                if may_begin(rank, stage, kind, ended[stage, kind]):
                    action = Action(stage, kind, ended[stage, kind])
                    break
            else:
                # W fills idle time, because it needs no other rank, and makes room for forwards.
                if not late[rank]:
                    continue
                action = late[rank].pop(0)
            row.append(action)
            begun[action.stage, action.kind] += 1
            if action.kind == "I":
                late[rank].append(action._replace(kind="W"))
        assert begun != ended, "no rank can go on"
    return num_ticks, tuple(map(tuple, rows))


class VMin(SplitBackward):
    """Two stages a rank, in a V, and a third of the activations of 1f1b.

    For 2 ranks and 3 microbatches::

        rank 0  0F0         3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2     0I2 0W2
        rank 1      1F0 2F0         2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    Each rank holds at most 2 ((P+4) // 3) activations of its half stages, as much as (P+4) // 3 of
    whole stages. 1f1b holds P of these on its first rank. If F, I and W take one unit each, a step
    takes at most 6M+4P-3 units, of which a rank computes for 6M. 1f1b takes 6M+6P-6.

    Transfers are never hidden, because a microbatch goes down, up, down and up the V without a
    pause: if a transfer takes C units, each microbatch takes up to 6C longer. If I takes longer
    than F, ranks wait in each microbatch too. `v-half` has some slack for both. A longer warm-up
    would hide transfers, but needs more activations than the limit allows.

    Args:
        head_w_first: As in `zb-h1`, for ties of stages on different ranks.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, arXiv 2405.15362,
    section 3: the block of V-Min, with its pause if 3 divides P.
    """

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches."""
        # Without the wait, two actions of a rank would fall on one unit.
        wait = 2 if num_ranks % 3 == 0 else 0
        blocks = [
            (
                rank,
                2 * num_ranks - 1 - rank,
                2 * num_ranks + wait + rank,
                4 * num_ranks + wait - 1 - rank,
            )
            for rank in range(num_ranks)
        ]
        num_live = 2 * ((num_ranks + 4) // 3)
        return repeated("v-min", blocks, num_live, num_microbatches, head_w_first=self.head_w_first)


class VHalf(SplitBackward):
    """Two stages a rank, in a V, and half of the activations of 1f1b.

    For 2 ranks and 3 microbatches::

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2     0I2 0W2
        rank 1      1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2I1 1I1 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    Each rank holds at most 2 ((P+2) // 2) activations of its half stages, as much as (P+2) // 2 of
    whole stages. If F, I and W take one unit each and M >= P, a step takes at most 6M+3P-3 units,
    of which a rank computes for 6M. Fewer microbatches take at most 6M+4P-5. 1f1b takes 6M+6P-6.

    Args:
        head_w_first: As in `zb-h1`, for ties of stages on different ranks.

    Source: as of `v-min`: the block of V-Half, with its pause if P is even.
    """

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches."""
        wait = 3 if num_ranks % 2 == 0 else 0
        blocks = [
            (
                2 * rank,
                3 * num_ranks - 2 - rank,
                3 * num_ranks + wait - 1 + 2 * rank,
                6 * num_ranks + wait - 2 - rank,
            )
            for rank in range(num_ranks)
        ]
        num_live = 2 * ((num_ranks + 2) // 2)
        return repeated(
            "v-half", blocks, num_live, num_microbatches, head_w_first=self.head_w_first
        )
