"""Simulates schedules on hosts with one full-duplex NIC each, for the best time a step can take.

python benchmarks/network/optimum.py --forward 10 --backward 20 --transfer 17.4
"""

import argparse
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from nics import InTurns, Message, Network

import pipegrad
from pipegrad.schedules import Action, Kind, Schedule
from pipegrad.schedules.builtin.one_f_one_b import in_turns


def makespan(
    schedule: Schedule,
    durations: Mapping[Kind, float],
    transfer: float,
    network: Callable[[float], Network] = InTurns,
) -> float:
    """Returns how long a step takes where ranks wait for nothing but what they consume.

    A rank begins its next action when the one before is done and its input is there. What it makes
    for another rank it sends at once. Of a split backward, I sends the gradient on; nobody waits
    for W.

    Args:
        schedule: Of any kinds of actions.
        durations: For each kind its time on a stage, in any unit.
        transfer: Time of one message alone, from NIC to NIC.
        network: What NICs do with messages that are sent at once.
    """
    places, on_the_way = schedule.stage_to_rank, network(transfer)
    actions = [deque(row) for row in schedule.actions]
    free = [0.0] * schedule.num_ranks
    arrived = {Action(0, "F", m): 0.0 for m in range(schedule.num_microbatches)}
    arrived |= {Action(len(places) - 1, "B", m): 0.0 for m in range(schedule.num_microbatches)}
    while any(actions):  # what can begin first does, so that messages meet in order
        heads = [(rank, _input_of(row[0])) for rank, row in enumerate(actions) if row]
        computes = [(max(free[rank], arrived[a]), rank) for rank, a in heads if a in arrived]
        begin, rank = min(computes, default=(math.inf, -1))
        if on_the_way.soonest() <= begin:
            arrived |= on_the_way.step()
            continue
        stage, kind, microbatch = actions[rank].popleft()
        free[rank] = begin + durations[kind]
        following = _input_of(Action(stage + (1 if kind == "F" else -1), kind, microbatch))
        if kind != "W" and 0 <= following.stage < len(places):
            if places[following.stage] == rank:
                arrived[following] = free[rank]
            else:
                hop = rank, places[following.stage]
                on_the_way.send(Message(free[rank], hop, following))
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
