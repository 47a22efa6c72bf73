"""Values: what the stages of one rank take and make in a step, and the gradients of it.

[Note: life of a value] Each station is a method of `Values`. The program calls them in this order:

    producer's rank                       a consumer's rank
    1. produce        its forward has run
    2. send                               3. receive
                                          4. inputs_of       its forward begins
                                          5. take_gradients  its backward has run
                                          6. send            the gradient goes back
    8. receive        the gradient        7. release         no stage here reads it any more
    9. join           if there are several
    10. gradients_of  its backward begins
    11. take_gradients

In a split backward, `release` comes after W, and all the rest with I. If a consumer is a stage of
the producer's rank, `produce` and `take_gradients` hand over without a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipegrad.errors import StepError
from pipegrad.pipeline.aliases import Aliases
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.transfers.buffers import Buffer
from pipegrad.pipeline.transfers.specs import Spec, Specs
from pipegrad.pipeline.transfers.transfers import PeerFailedError, Transfers
from pipegrad.pipeline.wiring import Wiring
from pipegrad.schedules.program.program import Program

Key = tuple[int, int]  # a link, channel or stage, and a microbatch


@dataclass(slots=True)
class _Value:
    """A value that stages of this rank take.

    Attributes:
        tensor: A leaf, if a gradient will come back.
        num_backwards: Stages of this rank whose backward has not run yet.
        num_readers: Stages of this rank that still read it, for any gradient.
        channel: The channel that brought it.
        buffer: The receive buffer that it lies in, if it came from another rank.
    """

    tensor: Tensor
    num_backwards: int
    num_readers: int
    channel: int = -1
    buffer: Buffer | None = None


class Values:
    """All values of a step on one rank, and their gradients; see [Note: life of a value].

    A received value is one leaf for all stages of this rank that take it, so autograd itself sums
    their gradients. A stage's output is a new leaf for the stages of the same rank that take it.

    Args:
        program: What all ranks do.
        rank: The pipeline rank.
        stages: The stages of this rank.
        wiring: Which values each stage takes and makes.
        transfers: Sends and receives, and owns the receive buffers.
        aliases: Copies values that lie in memory of others.
        specs: What values look like in the first microbatch.
        outer: Parts of external values that need a gradient, by name and microbatch: a table that
            changes with each step.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        *,
        transfers: Transfers,
        aliases: Aliases,
        specs: Specs,
        outer: Mapping[str, Mapping[int, Sequence[Tensor]]],
    ) -> None:
        self._outer = outer
        self._program = program
        self._channels = program.channels
        self._rank = rank
        self._transfers = transfers
        self._aliases = aliases
        self._specs = specs
        ranks, last = program.schedule.stage_to_rank, len(wiring.made) - 1
        # How many stages of this rank take each link.
        self._num_consumers = [
            sum(ranks[stage] == rank for stage in link.consumers) for link in program.links
        ]
        # Link -> rank -> channel of the gradient that comes back from there.
        self._incoming: dict[int, dict[int, int]] = {}
        for number, (link, kind, source, target) in enumerate(program.channels):
            if kind == "B" and target == rank:
                self._incoming.setdefault(link, {})[source] = number
        # If one other rank alone takes a value: link -> channel of its gradient.
        self._back = {link: min(channels.values()) for link, channels in self._incoming.items()}
        # Stage -> its inputs in order: a link, or the name of an external input.
        self._inputs: dict[int, list[tuple[int | None, str]]] = {
            stage: [(s, "") if isinstance(s, int) else (None, s) for s in wiring.taken[stage]]
            for stage in stages
        }
        # Stage -> those of its inputs that other stages read too.
        readers = Counter(source for taken in wiring.taken for source in taken)
        self._read_elsewhere = {
            stage: [i for i, source in enumerate(wiring.taken[stage]) if readers[source] > 1]
            for stage in stages
        }
        self._links_taken = {
            stage: [link for link, _ in taken if link is not None]
            for stage, taken in self._inputs.items()
        }
        # Stage -> the external values that its backward may give a gradient.
        self._names_taken = {
            stage: [name for link, name in taken if link is None] + ["target"] * (stage == last)
            for stage, taken in self._inputs.items()
        }
        self._links_made = {stage: () if stage == last else wiring.made[stage] for stage in stages}
        # Stage -> channels of the gradients that other ranks send to it.
        self._returns = {
            stage: [c for link in made for c in self._incoming.get(link, {}).values()]
            for stage, made in self._links_made.items()
        }
        self._external: Mapping[str, Sequence[object]] = {}
        self._held: dict[Key, _Value] = {}  # values that stages here take, by link
        self._leaving: dict[int, Tensor] = {}  # by link, the value that was made last
        self._newest: dict[int, Spec] = {}  # by link, what that one looks like; kept between steps
        self._made: dict[Key, Spec] = {}  # by link, what a gradient that comes back looks like
        self._arrived: dict[Key, Buffer | None] = {}  # received gradients, by channel
        self._gradients: dict[Key, Tensor | None] = {}  # to send or to hand over, by link

    def begin(
        self, external: Mapping[str, Sequence[object]], targets: Sequence[object] | None
    ) -> None:
        """Takes what a step is given.

        Args:
            external: External name -> its value for each microbatch.
            targets: For each microbatch; None where no loss is computed.
        """
        self._external = external if targets is None else {**external, "target": targets}

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._external = {}
        for table in (self._held, self._leaving, self._made, self._arrived, self._gradients):
            table.clear()

    # Values.

    def receive(self, channel: int, microbatch: int) -> None:
        """Waits for a value or a gradient from another rank, and keeps it.

        Raises:
            PeerFailedError: If the value never came. A gradient may be missing: then its producer
                has no backward to run.
        """
        link, kind, _, _ = self._channels[channel]
        if kind == "B":
            made = self._made[link, microbatch]
            self._arrived[channel, microbatch] = self._transfers.wait(channel, microbatch, made)
            return
        buffer = self._transfers.wait(channel, microbatch)
        if buffer is None:
            raise PeerFailedError(f"{self._program.transfer(channel, microbatch)} never came")
        tensor = buffer.tensor
        spec = self._specs.by_link[link]
        assert spec is not None
        if spec.differentiable and not self._program.forward_only:
            # The leaf is a new tensor in the same memory: the buffer's own tensor must never
            # require a gradient, since the next receive writes into it.
            tensor = tensor.detach().requires_grad_()
        num = self._num_consumers[link]
        self._held[link, microbatch] = _Value(tensor, num, num, channel, buffer)

    def inputs_of(self, stage: int, microbatch: int) -> list[object]:
        """Returns the inputs of a stage, in order: values, and external inputs."""
        inputs: list[object] = []
        for link, name in self._inputs[stage]:
            if link is None:
                inputs += (self._external[name][microbatch],)
            else:
                inputs += (self._held[link, microbatch].tensor,)
        return inputs

    def shared_inputs(self, stage: int, microbatch: int) -> list[object]:
        """Returns those inputs of a stage that other stages or microbatches read too."""
        inputs, taken = self.inputs_of(stage, microbatch), self._inputs[stage]
        whole = [
            number
            for number, (link, name) in enumerate(taken)
            if link is None and len(values := self._external[name]) > 1 and values[0] is values[-1]
        ]
        return [inputs[number] for number in {*self._read_elsewhere[stage], *whole}]

    def produce(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Takes what a stage made, for its consumers on this rank and on others.

        Raises:
            StepError: If an output has a gradient and had none in the first microbatch, or had one.
        """
        for link, output in zip(self._links_made[stage], outputs, strict=True):
            if (output.shape, output.dtype, output.requires_grad) != self._newest.get(link):
                self._newest[link] = self._checked(link, stage, microbatch, Spec.of(output))
            self._made[link, microbatch] = self._newest[link]
            value = self._aliases.handed_on(stage, output)
            # The program sends a value right after the forward that made it. So one entry a link
            # is enough, whatever the number of microbatches.
            self._leaving[link] = value
            if num := self._num_consumers[link]:
                leaf = value.requires_grad_() if output.requires_grad else value
                self._held[link, microbatch] = _Value(leaf, num, num)

    def send(self, channel: int, microbatch: int) -> None:
        """Starts to send a value, or the gradient of a received value."""
        link, kind, _, _ = self._channels[channel]
        if kind == "F":
            self._transfers.send(channel, microbatch, self._leaving[link], self._newest[link])
        else:
            gradient = self._gradients[link, microbatch]
            if gradient is not None:  # otherwise nothing will ever cross: see `take_gradients`
                self._transfers.send(channel, microbatch, gradient)
            del self._gradients[link, microbatch]

    def release(self, stage: int, microbatch: int) -> None:
        """Frees those inputs of a stage that no other stage of this rank reads."""
        for link in self._links_taken[stage]:
            value = self._held[link, microbatch]
            value.num_readers -= 1
            if not value.num_readers:
                del self._held[link, microbatch]
                # The tensor would be a second holder of the buffer's storage, and the buffer would
                # not go back to the pool: see [Note: held buffers].
                channel, buffer = value.channel, value.buffer
                del value
                if buffer is not None:
                    self._transfers.give_back(channel, buffer)

    # Gradients.

    def join(self, link: int, microbatch: int) -> None:
        """Sums the gradients of a value that several ranks took.

        Floating-point sums depend on their order. Gradients are added in the order of ranks, not of
        arrival, so the bits are the same in every run.
        """
        arrived = {rank: self._arrived[c, microbatch] for rank, c in self._incoming[link].items()}
        terms = {rank: buffer.tensor for rank, buffer in arrived.items() if buffer is not None}
        own = self._gradients.pop((link, microbatch), None)
        if own is not None:
            terms[self._rank] = own
        total: Tensor | None = None
        for rank in sorted(terms):
            # The first term is a receive buffer or a gradient of this rank; nobody else reads it.
            total = terms[rank] if total is None else total.add_(terms[rank])
        self._gradients[link, microbatch] = total

    def gradients_of(
        self, stage: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns those outputs of a stage that a gradient came back to, and the gradients."""
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for root, link in zip(outputs, self._links_made[stage], strict=True):
            if not root.requires_grad:
                continue
            key = link, microbatch
            gradient: Tensor | None
            if key in self._gradients:  # it was joined, or a stage of this rank computed it
                gradient = self._gradients[key]
                del self._gradients[key]
            else:
                buffer = self._arrived[self._back[link], microbatch]
                gradient = None if buffer is None else buffer.tensor
            if gradient is not None:
                roots += (root,)
                gradients += (gradient,)
        return roots, gradients

    def leaves_of(self, stage: int, microbatch: int) -> list[Tensor]:
        """Returns the inputs of a stage that may get a gradient."""
        leaves = [self._held[link, microbatch].tensor for link in self._links_taken[stage]]
        for name in self._names_taken[stage]:
            if name in self._outer:
                leaves += self._outer[name].get(microbatch, ())
        return leaves

    def take_gradients(self, stage: int, microbatch: int) -> None:
        """Takes the gradients of a stage's inputs, and frees those of its outputs.

        If several stages of this rank take a value, autograd sums their gradients in the leaf. The
        sum is complete after the last of their backwards, so it is taken then.
        """
        # Gradients are parted before any of them is handed on, and before a receive buffer that
        # one of them may lie in goes back to the pool.
        self._aliases.part_gradients(stage, self.leaves_of(stage, microbatch))
        for link in self._links_taken[stage]:
            value = self._held[link, microbatch]
            value.num_backwards -= 1
            if not value.num_backwards:
                gradient = value.tensor.grad
                if gradient is None and value.buffer is not None and value.tensor.requires_grad:
                    # Its producer has posted a receive, which only a message can end.
                    gradient = torch.zeros_like(value.tensor)
                self._gradients[link, microbatch] = gradient
                value.tensor.grad = None
        for channel in self._returns[stage]:
            buffer = self._arrived[channel, microbatch]
            del self._arrived[channel, microbatch]
            if buffer is not None:
                self._transfers.give_back(channel, buffer)

    # Failures.

    def give_back_buffers(self) -> None:
        """Gives back the receive buffers that a failed step still holds."""
        for value in self._held.values():
            if value.buffer is not None:
                self._transfers.give_back(value.channel, value.buffer)
        for (channel, _), buffer in self._arrived.items():
            if buffer is not None:
                self._transfers.give_back(channel, buffer)

    def receive_and_drop(self, channel: int, microbatch: int) -> None:
        """Waits for a value or a gradient that no stage will read."""
        spec = self._made.get((self._channels[channel].link, microbatch))
        self._transfers.receive_and_drop(channel, microbatch, spec)

    def _checked(self, link: int, stage: int, microbatch: int, spec: Spec) -> Spec:
        """Returns `spec`, if the value has a gradient as in the first microbatch."""
        first = self._specs.first(link, spec)
        # The program has a channel for the gradient, or it has none.
        if first is None or first.differentiable != spec.differentiable:
            raise StepError(
                f"stage {stage}, microbatch {microbatch}: {self._program.links[link].name!r} is "
                f"{spec}, and was {first} in the first microbatch: a value may change its shape "
                f"and dtype, but always or never has a gradient"
            )
        return spec
