"""Simulates schedules on hosts with one full-duplex NIC each, for the best time a step can take.

python benchmarks/network/optimum.py --forward 10 --backward 20 --transfer 17.4
"""

import argparse
import math
from collections import deque
from collections.abc import Mapping, Sequence

import pipegrad
from pipegrad.schedules import Action, Kind, Schedule
from pipegrad.schedules.one_f_one_b import in_turns


def makespan(schedule: Schedule, durations: Mapping[Kind, float], transfer: float) -> float:
    """Returns how long a step takes where ranks wait for nothing but what they consume.

    A rank begins its next action when the one before is done and its input is there. What it makes
    for another rank queues at its NIC at once: one message leaves a NIC at a time, first come first
    served, and one at a time enters. The switch forwards while it receives, and keeps what has to
    wait for the receiver. Of a split backward, I sends the gradient on; nobody waits for W.

    Args:
        schedule: Of any kinds of actions.
        durations: For each kind its time on a stage, in any unit.
        transfer: Time of one message alone, from NIC to NIC.
    """
    places, ranks = schedule.stage_to_rank, range(schedule.num_ranks)
    actions = [deque(row) for row in schedule.actions]
    messages = [deque[tuple[float, Action]]() for _ in ranks]  # of each NIC: since when, for what
    free, leaves, enters = ([0.0] * schedule.num_ranks for _ in range(3))
    arrived = {Action(0, "F", m): 0.0 for m in range(schedule.num_microbatches)}
    arrived |= {Action(len(places) - 1, "B", m): 0.0 for m in range(schedule.num_microbatches)}
    while any(actions):  # what can begin first does, so that messages meet in order
        sends = [(max(leaves[r], messages[r][0][0]), r) for r in ranks if messages[r]]
        heads = [(r, _input_of(actions[r][0])) for r in ranks if actions[r]]
        computes = [(max(free[r], arrived[a]), r) for r, a in heads if a in arrived]
        begin, rank = min(sends, default=(math.inf, -1))
        if begin <= min(computes, default=(math.inf, -1))[0]:
            _, action = messages[rank].popleft()
            target = places[action.stage]
            leaves[rank] = begin + transfer
            enters[target] = max(begin, enters[target]) + transfer
            arrived[action] = enters[target]
            continue
        begin, rank = min(computes)
        stage, kind, microbatch = actions[rank].popleft()
        free[rank] = begin + durations[kind]
        following = _input_of(Action(stage + (1 if kind == "F" else -1), kind, microbatch))
        if kind != "W" and 0 <= following.stage < len(places):
            if places[following.stage] == rank:
                arrived[following] = free[rank]
            else:
                messages[rank].append((free[rank], following))
    return max(free)


def _input_of(action: Action) -> Action:
    """Returns the action that is given the message that one needs: I and W need what B would."""
    return action if action.kind == "F" else action._replace(kind="B")


def candidates(num_ranks: int, num_microbatches: int) -> list[Schedule]:
    """Returns schedules of one stage a rank: a rank warms up with 1, 2, ... more than the next."""
    schedules = [
        in_turns(f"{step} a hop", range((num_ranks - 1) * step, -1, -step), num_microbatches)
        for step in range(1, num_microbatches)
    ]
    asked = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    return [*schedules, pipegrad.schedules.build("gpipe", **asked)]


def optimum(
    num_ranks: int, num_microbatches: int, durations: Mapping[Kind, float], transfer: float
) -> tuple[float, str]:
    """Returns the shortest makespan of the candidates, and the first that has it."""
    found = candidates(num_ranks, num_microbatches)
    times = [(makespan(s, durations, transfer), i) for i, s in enumerate(found)]
    best, at = min(times)
    return best, found[at].name


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the makespan of every candidate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    for name, value in (("forward", 10.0), ("backward", 20.0), ("transfer", 17.4)):
        parser.add_argument(f"--{name}", type=float, default=value)
    given = parser.parse_args(arguments)
    durations: dict[Kind, float] = {"F": given.forward, "B": given.backward}
    for schedule in candidates(given.ranks, given.microbatches):
        took = makespan(schedule, durations, given.transfer)
        print(f"{schedule.name:10} {took:8.1f}")


if __name__ == "__main__":
    main()
