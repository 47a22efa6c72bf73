"""The values of a step on one rank: who makes and takes them, and those that are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pipegrad.pipeline.stage import Stage, Wiring
from pipegrad.pipeline.transfers import Buffer
from pipegrad.schedules.program.program import Program

Key = tuple[int, int]  # a link, channel or stage, and a microbatch


@dataclass(slots=True)
class Value:
    """A value that stages of this rank take.

    Attributes:
        tensor: A leaf, if a gradient will come back.
        num_returns: Stages of this rank that have not sent its gradient back.
        num_readers: Those that still read it, for any gradient.
        channel: What brought it.
        buffer: Where it lies, if it came from another rank.
    """

    tensor: Tensor
    num_returns: int
    num_readers: int
    channel: int = -1
    buffer: Buffer | None = None


class LocalValues:
    """Who makes and takes values on this rank, and what is there of them in a step.

    Args:
        program: What all ranks do.
        rank: This rank's place in the pipeline.
        stages: This rank's.
        wiring: How stages hang together.

    Attributes:
        num_consumers: For each link, how many stages of this rank take it.
        incoming: Link -> rank -> channel of a gradient that comes back from there.
        back: Of a value that goes to one other rank alone, the channel back.
        taken: Stage -> what it takes: links, or external names.
        links: Stage -> the links it takes.
        made: Stage -> the links it makes; of the last stage none.
        ends: Stage -> what its backward begins with: the links it makes, or the loss.
        returns: Stage -> channels of the gradients that come back to it from other ranks.
        held: Values that stages here take, by link.
        leaving: What was made last, by link: it leaves at once.
        arrived: Received gradients, by channel.
        gradients: Of values, by link, to send or to hand over.
    """

    def __init__(
        self, program: Program, rank: int, stages: Mapping[int, Stage], wiring: Wiring
    ) -> None:
        places, last = program.schedule.stage_to_rank, len(wiring.made) - 1
        self.num_consumers = [
            sum(places[c] == rank for c in link.consumers) for link in program.links
        ]
        self.incoming: dict[int, dict[int, int]] = {}
        for number, (link, kind, source, target) in enumerate(program.channels):
            if kind == "B" and target == rank:
                self.incoming.setdefault(link, {})[source] = number
        self.back = {link: min(channels.values()) for link, channels in self.incoming.items()}
        self.taken: dict[int, list[tuple[int | None, str]]] = {
            stage: [(s, "") if isinstance(s, int) else (None, s) for s in wiring.taken[stage]]
            for stage in stages
        }
        self.links = {
            stage: [link for link, _ in taken if link is not None]
            for stage, taken in self.taken.items()
        }
        self.made = {stage: () if stage == last else wiring.made[stage] for stage in stages}
        self.ends: dict[int, tuple[int | None, ...]] = {
            stage: (None,) if stage == last else made for stage, made in self.made.items()
        }
        self.returns = {
            stage: [c for link in made for c in self.incoming.get(link, {}).values()]
            for stage, made in self.made.items()
        }
        self.held: dict[Key, Value] = {}
        self.leaving: dict[int, Tensor] = {}
        self.arrived: dict[Key, Buffer | None] = {}
        self.gradients: dict[Key, Tensor | None] = {}

    def forget(self) -> None:
        """Lets go of everything of a step."""
        for table in (self.held, self.leaving, self.arrived, self.gradients):
            table.clear()
