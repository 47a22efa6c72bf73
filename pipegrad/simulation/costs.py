"""Costs of computing, sending, reducing and stepping. Plain data, saved as JSON.

A file may leave everything out that is zero::

    {
      "stages": [
        {"forward_seconds": 0.010, "backward_seconds": 0.020, "outputs": {"x": 1048576}},
        {"forward_seconds": 0.010, "backward_seconds": 0.020}
      ],
      "network": {"nic_bytes_per_second": 125e6, "latency_seconds": 0.0001}
    }
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from pipegrad import run_files
from pipegrad.errors import ScheduleError
from pipegrad.limits import LEAST_RATE, MOST_NUMBER
from pipegrad.schedules.program.program import Channel, Link
from pipegrad.schedules.schedule import Kind, Schedule
from pipegrad.simulation.timeline import Collective, loaded, validated

_LONG_SECONDS, _LONG_LATENCY = 5.0, 1.0
# Bytes a second that no NIC has, as NICs of 1 and of 10 Gbit/s are in use; and the rate of a modem.
_RATES_IN_BITS, _LOW_RATE = (1e9, 1e10), 1e4


@dataclass(frozen=True)
class _Numbers:
    """Numbers that make sense: none is negative, nan, or so large that a sum would overflow."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        wrong = list[str]()
        for each in fields(self):
            if each.type not in ("int", "float", "Mapping[str, int]"):
                continue
            value = getattr(self, each.name)
            for number in value.values() if isinstance(value, Mapping) else [value]:
                is_number = isinstance(number, int | float) and not isinstance(number, bool)
                if not is_number or not number >= 0:
                    wrong.append(f"{each.name} is {number!r}, expected a number, at least 0")
                # A rate may be without a limit; a time or a size may not.
                elif each.name.endswith("bytes_per_second"):
                    if number < LEAST_RATE:
                        least = f"a number above 0, at least {LEAST_RATE}"
                        wrong.append(f"{each.name} is {number!r}, expected {least}")
                elif number > MOST_NUMBER:
                    size = "inf" if number == math.inf else "too large"
                    wrong.append(f"{each.name} is {size}, expected at most {MOST_NUMBER:.0e}")
        if wrong:
            raise ScheduleError("; ".join(wrong))


@dataclass(frozen=True)
class StageCosts(_Numbers):
    """The costs of one microbatch on a stage, and the bytes that the stage holds.

    Attributes:
        forward_seconds: Time of F.
        backward_seconds: Time of B, or of I and W together.
        weight_seconds: The part of the backward that a split backward computes in W.
        optimizer_seconds: Time of the optimizer, once a step.
        parameter_bytes: Parameters.
        gradient_bytes: Gradients, with the buckets that they lie in.
        optimizer_bytes: State of the optimizer, and master copies.
        activation_bytes: Bytes that a microbatch holds from its F until its B, or until its I:
            saved tensors and outputs, without the values that it received.
        factor_bytes: The part of `activation_bytes` that W needs; it is held until W.
        outputs: For each value that the stage makes, its bytes in one microbatch. The gradient that
            comes back has as many.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    weight_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    factor_bytes: int = 0
    outputs: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_seconds > self.backward_seconds:
            raise ScheduleError(
                f"weight_seconds is {self.weight_seconds}, a part of backward_seconds, which is "
                f"{self.backward_seconds}"
            )

    def seconds(self, kind: Kind) -> float:
        """Returns the time of an action of this kind."""
        return {
            "F": self.forward_seconds,
            "B": self.backward_seconds,
            "I": self.backward_seconds - self.weight_seconds,
            "W": self.weight_seconds,
        }[kind]

    def changed_bytes(self, kind: Kind) -> int:
        """Returns the change of activation bytes by an action of this kind; below 0 if it frees."""
        return {
            "F": self.activation_bytes,
            "B": -self.activation_bytes,
            "I": self.factor_bytes - self.activation_bytes,
            "W": -self.factor_bytes,
        }[kind]

    def of_chunk(self, chunks: int) -> StageCosts:
        """Returns the costs of one of so many chunks of a sequence; `Costs.of_chunks` calls it."""
        return replace(
            self,
            forward_seconds=self.forward_seconds / chunks,
            backward_seconds=self.backward_seconds / chunks,
            weight_seconds=self.weight_seconds / chunks,
            activation_bytes=self.activation_bytes // chunks,
            factor_bytes=self.factor_bytes // chunks,
            outputs={name: nbytes // chunks for name, nbytes in self.outputs.items()},
        )

    @property
    def held_bytes(self) -> int:
        """The bytes that the stage holds all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class LinkCosts(_Numbers):
    """One direction between two ranks.

    Attributes:
        source: Pipeline rank that sends.
        target: Pipeline rank that receives.
        latency_seconds: Time of an empty message.
        bytes_per_second: Rate of one message alone; infinite if only the NICs limit it.
    """

    source: int
    target: int
    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf


@dataclass(frozen=True)
class Network(_Numbers):
    """The connections between ranks.

    Every host has a full-duplex NIC. Messages that leave a NIC at once share its rate, and so do
    messages that enter it; messages with longer round trips get less. Ranks of one host send to
    each other without their NIC. Messages from one rank to another go one after the other, in the
    order in which they are sent. Skips may go in parallel with them, as between CPUs; see
    [Note: skips] in `program`.

    Attributes:
        nic_bytes_per_second: Rate of every NIC, each way: the rate that it sustains, not the rate
            of one message after a pause. If infinite, messages take `latency_seconds` and the time
            of their link.
        latency_seconds: Time of an empty message, unless `links` has another one.
        hosts: For each pipeline rank the number of its host; empty if each rank has its own.
        links: Pairs of ranks that differ from the rest.
    """

    nic_bytes_per_second: float = math.inf
    latency_seconds: float = 0.0
    hosts: tuple[int, ...] = ()
    links: tuple[LinkCosts, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = [(link.source, link.target) for link in self.links]
        if len(set(ends)) < len(ends):
            source, target = next(pair for pair in ends if ends.count(pair) > 1)
            raise ScheduleError(f"links has two from rank {source} to rank {target}, expected one")

    @cached_property
    def _links(self) -> dict[tuple[int, int], LinkCosts]:
        return {(link.source, link.target): link for link in self.links}

    def link(self, source: int, target: int) -> LinkCosts:
        """Returns the costs from one rank to another."""
        links = self._links
        if (source, target) not in links:
            links[source, target] = LinkCosts(source, target, self.latency_seconds)
        return links[source, target]

    def host(self, rank: int) -> int:
        """Returns the number of a rank's host."""
        return self.hosts[rank] if self.hosts else rank

    def seconds(self, source: int, target: int, num_bytes: int) -> float:
        """Returns the time of a message from one rank to another while nothing else is sent."""
        return self.link(source, target).latency_seconds + num_bytes / self.rate(source, target)

    def rate(self, source: int, target: int) -> float:
        """Returns the bytes per second of a message from one rank to another, alone."""
        rate = self.link(source, target).bytes_per_second
        is_inside = self.host(source) == self.host(target)
        return rate if is_inside else min(rate, self.nic_bytes_per_second)


@dataclass(frozen=True)
class CollectiveCosts(_Numbers):
    """The costs of a reduction, and of its parameter sync.

    Attributes:
        num_bytes: Bytes that each rank gives to the reduction.
        num_ranks: Number of its ranks, along data parallelism and other dimensions too.
        kind: The collective. "send" goes from rank to rank, from the last of its pipeline ranks to
            the first, which adds up; its parameter sync goes back the same way.
        sync_bytes: Bytes of the parameter sync that belongs to it; 0 if there is none.
        seconds: If above 0, the time of the reduction; then it is not computed from bytes.
        sync_seconds: Likewise, of the parameter sync.
        stages: The stages whose gradients it reduces. A rank launches it when its own stages among
            these are final. Without any, it is not simulated.
        comm_stream: Number of its comm stream, which runs its reductions one by one.
        readers: The stages whose next forward waits for its parameter sync.
    """

    num_bytes: int = 0
    num_ranks: int = 1
    kind: Literal["all-reduce", "reduce-scatter", "send"] = "all-reduce"
    sync_bytes: int = 0
    seconds: float = 0.0
    sync_seconds: float = 0.0
    stages: tuple[int, ...] = ()
    comm_stream: int = 0
    readers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_ranks < 1:
            raise ScheduleError(f"num_ranks is {self.num_ranks}, expected at least 1")


@dataclass(frozen=True)
class CodecCosts(_Numbers):
    """A codec between two pipeline ranks, for values that cross in either direction.

    Attributes:
        ranks: The two pipeline ranks, the lower one first.
        carries: The values that it encodes.
        codec: Its name.
        share: Bytes of a message, for each byte of its value.
        encode_seconds_per_byte: Time of the rank that sends, for each byte of the value.
        decode_seconds_per_byte: Time of the rank that receives, for each byte of the value.
    """

    ranks: tuple[int, int]
    carries: Literal["activations", "gradients"]
    codec: str = ""
    share: float = 1.0
    encode_seconds_per_byte: float = 0.0
    decode_seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ranks[0] < self.ranks[1]:
            raise ScheduleError(
                f"a codec has the ranks {list(self.ranks)}, expected two, the lower one first"
            )


class Crossing(NamedTuple):
    """The costs of a value that crosses from one rank to another.

    Attributes:
        num_bytes: Bytes of its message.
        encode_seconds: Time of the rank that sends.
        decode_seconds: Time of the rank that receives.
    """

    num_bytes: int
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class HostCosts(_Numbers):
    """The time that a rank's host takes on top of computing.

    Attributes:
        action_seconds: Time for each action.
        message_seconds: Time for each message that it sends and for each that it waits for.
        step_seconds: Time for each step.
    """

    action_seconds: float = 0.0
    message_seconds: float = 0.0
    step_seconds: float = 0.0


@dataclass(frozen=True)
class Costs(_Numbers):
    """All costs of a model and of a cluster that `simulate` needs.

    Attributes:
        stages: Costs of each stage.
        network: How pipeline ranks are connected.
        collectives: The reductions by name, in the order in which every rank launches its own.
        host: The time that hosts take on top of computing.
        codecs: Costs of the codecs, for hops that have one.
        ranks_meet: True if no rank begins a step before all have ended the one before. Clipping by
            a global norm and reading the loss on every rank do that.
        meeting_seconds: Time of the messages of such an end, when the last rank is there: a round
            trip over the slowest link for the loss, and as much for the norm.
        chunks: `stages` are costs of one of so many chunks of a sequence; 1: of whole sequences.
    """

    stages: tuple[StageCosts, ...]
    network: Network = Network()
    collectives: Mapping[str, CollectiveCosts] = field(default_factory=dict)
    host: HostCosts = HostCosts()
    codecs: tuple[CodecCosts, ...] = ()
    ranks_meet: bool = True
    meeting_seconds: float = 0.0
    chunks: int = 1

    def of_chunks(self, chunks: int) -> Costs:
        """Returns the costs of the microbatches of a schedule with so many chunks of a sequence.

        Each chunk takes an equal part. Call this before you compute with the stages of a schedule;
        costs that are of such chunks already stay as they are.

        Raises:
            ScheduleError: If the costs are of chunks of another size.
        """
        if chunks == self.chunks:
            return self
        if self.chunks != 1:
            raise ScheduleError(
                f"the costs are of one of {self.chunks} chunks of a sequence, and the schedule has "
                f"{chunks}: give costs of whole sequences"
            )
        stages = tuple(stage.of_chunk(chunks) for stage in self.stages)
        return replace(self, stages=stages, chunks=chunks)

    def compute_seconds(self, schedule: Schedule) -> list[float]:
        """Returns the seconds that each rank of a schedule computes in a step."""
        return [
            sum(self.stages[action.stage].seconds(action.kind) for action in own)
            for own in schedule.actions
        ]

    @cached_property
    def _codecs(self) -> dict[tuple[tuple[int, int], str], CodecCosts]:
        return {(codec.ranks, codec.carries): codec for codec in self.codecs}

    def crossing(self, link: Link, channel: Channel) -> Crossing:
        """Returns the costs of a value, or of its gradient, on its way from rank to rank."""
        num_bytes = self.stages[link.producer].outputs.get(link.name, 0)
        ranks = min(channel.source, channel.target), max(channel.source, channel.target)
        codec = self._codecs.get((ranks, "activations" if channel.kind == "F" else "gradients"))
        if codec is None:
            return Crossing(num_bytes)
        return Crossing(
            round(num_bytes * codec.share),
            num_bytes * codec.encode_seconds_per_byte,
            num_bytes * codec.decode_seconds_per_byte,
        )

    def hop_seconds(self, source: int, target: int, kind: Literal["F", "B"]) -> float:
        """Returns the time of all outputs of stage `source`, or `target`, between two ranks.

        For stages that are on the ranks of their numbers, and while nothing else is sent.
        """
        producer = source if kind == "F" else target
        crossings = [
            self.crossing(Link(name, producer, (producer + 1,)), Channel(0, kind, source, target))
            for name in self.stages[producer].outputs
        ]
        coding = sum(each.encode_seconds + each.decode_seconds for each in crossings)
        num_bytes = sum(each.num_bytes for each in crossings)
        return coding + self.network.seconds(source, target, num_bytes)

    def reductions(self, stage_to_rank: Sequence[int]) -> tuple[Collective, ...]:
        """Returns the reductions of a pipeline that are simulated, in the order of launching."""
        return tuple(
            Collective(
                name,
                tuple(sorted({stage_to_rank[stage] for stage in own.stages})),
                own.stages,
                own.comm_stream,
                own.readers,
            )
            for name, own in self.collectives.items()
            if own.stages
        )

    def doubts(self) -> Iterator[str]:
        """Yields likely mistakes: another unit, or a link that lacks its way back."""
        for number, stage in enumerate(self.stages):
            if stage.forward_seconds >= _LONG_SECONDS:
                seconds = stage.forward_seconds
                yield f"the forward of stage {number} takes {seconds:g} s: costs are in seconds"
                break
        network = self.network
        latency = max([network.latency_seconds, *(link.latency_seconds for link in network.links)])
        if latency >= _LONG_LATENCY:
            yield f"an empty message takes {latency:g} s: costs are in seconds"
        ends = {(link.source, link.target) for link in network.links}
        if alone := sorted(pair for pair in ends if pair[::-1] not in ends):
            source, target = alone[0]
            back = f"an empty message back takes {network.latency_seconds:g} s"
            yield f"links has one from rank {source} to rank {target} and none back: {back}"
        rate = network.nic_bytes_per_second
        if rate in _RATES_IN_BITS or rate < _LOW_RATE:
            yield f"a NIC sends {8e-6 * rate:g} Mbit/s: rates are in bytes a second, not in bits"

    def to_json(self) -> dict[str, Any]:
        """Returns the costs as plain data, without defaults; `from_json` reads it."""
        data: dict[str, Any] = _adapter().dump_python(self, mode="json", exclude_defaults=True)
        return data

    @classmethod
    def from_json(cls, data: object) -> Costs:
        """Returns the costs that plain data describes.

        Raises:
            ScheduleError: If a name is unknown, or a value has another type or range.
        """
        return validated(_adapter(), data, "costs")

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        run_files.replace(path, f"{json.dumps(self.to_json(), indent=2)}\n".encode())

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Reads a file that `save`, or a person, wrote.

        Raises:
            ScheduleError: If the file is missing, is no JSON, or does not describe costs.
        """
        return loaded(path, "costs", cls.from_json)


@cache
def _adapter() -> TypeAdapter[Costs]:
    return TypeAdapter(Costs)
