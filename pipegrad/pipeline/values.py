"""Values: the inputs and outputs of one rank's stages in a step, and their gradients.

[Note: life of a value] Each station is a method of `Values`. The program calls them in this order:

    producer's rank                       a consumer's rank
    1. produce        its forward has run
    2. send                               3. receive
                                          4. inputs_of       its forward begins
                                          5. release         its backward has run
    7. receive        the gradient        6. send            the gradient goes back
    8. gradients_of   its backward begins
    9. release

In a split backward all of this comes with I, because the products hold the factors that W
multiplies. If a consumer is a stage of the producer's rank, `produce` and `release` pass the value
on without a message. In an evaluation `release` follows a forward at once.

[Note: shared memory] The memory of a value belongs to the tensor that holds it. pipegrad writes
into no value, and gives no memory to two of them. Modules and autograd may still write into it.
Three rules prevent errors from that:

- An output without a graph is copied when it is passed to other stages. It may be a buffer or a
  cache of the module, which the next forward writes, and nothing would detect that.
- An output with a graph is not copied. Its version changes if the next forward of its stage writes
  into it. Then the step raises a StepError.
- Autograd may make the gradients of two leaves views of one tensor, and adds to each in place.
  Therefore new gradients in one storage are compared, and those that overlap are copied.

Outputs of evaluations are copied once, because they have no graph (benchmarks/overhead,
`received.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.interop.private import is_arriving, is_wrapper
from pipegrad.model.dtensor import is_dtensor, local
from pipegrad.pipeline.edges import Spec
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.transfers import Transfers
from pipegrad.pipeline.wiring import Wiring
from pipegrad.schedules.program.program import Program

Key = tuple[int, int]  # a link, channel or stage, and a microbatch


@dataclass(slots=True, eq=False)
class Held:
    """A value of a link in one microbatch, on this rank.

    Attributes:
        spec: The spec of the value and its gradient, if a stage of this rank made it; else None.
        tensor: The tensor that stages of this rank read: a leaf, if a gradient will come back.
        num_readers: Stages of this rank that have not run their last action of the microbatch.
        gradients: The gradients that are there, by the rank that took the value.
    """

    spec: Spec | None
    tensor: Tensor | None
    num_readers: int
    gradients: dict[int, Tensor | None] = field(default_factory=dict)


class Values:
    """All values of a step on one rank, and their gradients; see [Note: life of a value].

    A received value is one leaf for all stages of this rank that take it, because autograd then
    sums their gradients. A stage's output is a new leaf for the stages of the same rank that take
    it.

    Attributes:
        external: External name -> its value for each microbatch, of the present step.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        *,
        transfers: Transfers,
        sharded: ShardedStages,
        specs: dict[int, Spec],
        outer: Sequence[Tensor],
    ) -> None:
        self._outer = outer
        self._program = program
        self._channels = program.channels
        self._rank = rank
        self._transfers = transfers
        self._sharded = sharded
        self._outputs = {index: stage.outputs for index, stage in stages.items()}
        self._specs = specs
        # Stage -> the links that it takes and makes; and how many stages of this rank take each.
        links = program.rank_links[rank]
        self._taken, self._made = links.taken, links.made
        self._num_consumers = [*map(len, links.consumers)]
        # Stage -> its inputs in order: a link, or the name of an external input.
        self._inputs: dict[int, list[tuple[int | None, str]]] = {
            stage: [(s, "") if isinstance(s, int) else (None, s) for s in wiring.taken[stage]]
            for stage in stages
        }
        # Stage -> indices of its inputs that other stages also read.
        readers = Counter(source for taken in wiring.taken for source in taken)
        self._read_elsewhere = {
            stage: [i for i, source in enumerate(wiring.taken[stage]) if readers[source] > 1]
            for stage in stages
        }
        self.external: Mapping[str, Sequence[object]] = {}
        self._held: dict[Key, Held] = {}  # by link
        self._leaving: dict[int, tuple[Tensor, Spec]] = {}  # by link, the value made last
        self._newest: dict[int, Spec] = {}  # its spec; kept between steps
        # By stage, outputs of its last forward with a graph, and the version of each.
        self._handed_on = defaultdict[int, list[tuple[Tensor, int]]](list)
        self._without_gradient: dict[int, list[nn.Parameter]] = {}  # by stage

    def forget(self) -> None:
        """Drops all references of a step."""
        self.external = {}
        self._held.clear()
        self._leaving.clear()
        self._handed_on.clear()
        self._without_gradient.clear()

    # Values.

    def receive(self, channel: int, microbatch: int) -> None:
        """Waits for a value or a gradient from another rank, and keeps it.

        Raises:
            StepError: If the value never came. A gradient may be missing: then its producer
                has no backward to run.
        """
        link, kind, source, _ = self._channels[channel]
        if kind == "B":
            # A gradient has the spec of its value, which this rank made: no header is needed.
            held = self._held[link, microbatch]
            held.gradients[source] = self._transfers.wait(channel, microbatch, held.spec)
            return
        tensor = self._transfers.wait(channel, microbatch)
        assert tensor is not None
        # It becomes a leaf: backward stops there, and its gradient goes back. All stages of this
        # rank read this one leaf, because autograd then sums, in the order of their backwards.
        if self._specs[link].differentiable and not self._program.forward_only:
            tensor.requires_grad_()
        num = self._num_consumers[link]
        self._held[link, microbatch] = Held(None, tensor, num)

    def inputs_of(self, stage: int, microbatch: int) -> list[object]:
        """Returns the inputs of a stage, in order."""
        external, held = self.external, self._held
        return [
            external[name][microbatch] if link is None else held[link, microbatch].tensor
            for link, name in self._inputs[stage]
        ]

    def shared_inputs(self, stage: int, inputs: Sequence[object]) -> list[object]:
        """Returns those inputs of a stage that other stages or microbatches read too."""
        shared = set(self._read_elsewhere[stage])
        for number, (link, name) in enumerate(self._inputs[stage]):
            values = self.external[name] if link is None else ()
            # Whole in all microbatches, or in all chunks of one.
            if len(values) > 1 and any(values[0] is other for other in (values[1], values[-1])):
                shared.add(number)
        return [inputs[number] for number in shared]

    def checked(self, stage: int, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the outputs of a forward as plain tensors.

        Raises:
            StepError: If one is no plain tensor, or as `refuse_written`.
        """
        self.refuse_written(stage)
        self._handed_on[stage].clear()
        plain = list[Tensor]()
        for name, output in zip(self._outputs[stage], outputs, strict=True):
            if type(output) is not Tensor or output.layout is not torch.strided:
                # A clone waits for the collective that writes an output.
                output = output.clone() if is_arriving(output) else output  # noqa: PLW2901
                check_plain(output, f"stage {stage} returned {name!r}")
            plain += (output,)
        return tuple(plain)

    def refuse_written(self, stage: int) -> None:
        """Called when a forward has run, the second one of a recomputation too.

        Raises:
            StepError: If the outputs of the forward before it were written into.
        """
        for earlier, version in self._handed_on[stage]:
            if earlier._version != version:
                raise StepError(
                    f"something has written into what a forward of stage {stage} returned, which "
                    f"may still be on its way: return a clone of it, or write into a copy"
                )

    def handed_on(self, stage: int, output: Tensor) -> Tensor:
        """Returns the tensor to pass on for an output, without its graph: [Note: shared memory]."""
        if not output.requires_grad:
            return output.clone()
        value = output.detach()  # it has the version of the output, and counts with it
        self._handed_on[stage] += [(value, value._version)]
        return value

    def produce(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Keeps the outputs of a stage, for its consumers on this rank and on others.

        Raises:
            StepError: If an output has a gradient and had none in the first microbatch, or had one.
        """
        for link, output in zip(self._made[stage], outputs, strict=True):
            if (output.shape, output.dtype, output.requires_grad) != self._newest.get(link):
                self._newest[link] = self._checked(link, stage, microbatch, Spec.of(output))
            spec = self._newest[link]
            value = self.handed_on(stage, output)
            # One entry for each link is enough, whatever the number of microbatches, because the
            # program sends a value right after the forward that made it.
            self._leaving[link] = value, spec
            # A stage of this rank reads a leaf, too, and not the output with its graph, because
            # each stage must have a graph of its own: a schedule may run their backwards apart.
            num, leaf = self._num_consumers[link], None
            if num:
                leaf = value.requires_grad_() if output.requires_grad else value
            self._held[link, microbatch] = Held(spec, leaf, num)

    def _checked(self, link: int, stage: int, microbatch: int, spec: Spec) -> Spec:
        """Returns `spec`, if the value has a gradient as in the first microbatch."""
        first = self._specs.setdefault(link, spec)
        # The program has a channel for the gradient, or it has none.
        if first.differentiable != spec.differentiable:
            raise StepError(
                f"stage {stage}, microbatch {microbatch}: {self._program.links[link].name!r} is "
                f"{spec}, and was {first} in the first microbatch: a value may change its shape "
                f"and dtype, but always or never has a gradient"
            )
        return spec

    def send(self, channel: int, microbatch: int) -> None:
        """Starts to send a value, or the gradient of a received value."""
        link, kind, _, _ = self._channels[channel]
        if kind == "F":
            self._transfers.send(channel, microbatch, *self._leaving[link])
        else:
            gradient = self._held[link, microbatch].gradients[self._rank]
            if gradient is not None:
                self._transfers.send(channel, microbatch, gradient)
            else:  # the value has no gradient: [Note: first step] in `steps`
                self._transfers.send_nothing(channel, microbatch)
            del self._held[link, microbatch]

    # Gradients.

    def gradients_of(
        self, stage: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the outputs of a stage that have a gradient, and their gradients."""
        roots, gradients = list[Tensor](), list[Tensor]()
        for root, link in zip(outputs, self._made[stage], strict=True):
            if not root.requires_grad:
                continue
            by_rank = self._held[link, microbatch].gradients
            del self._held[link, microbatch]
            rank, *others = by_rank
            gradient = _summed(by_rank) if others else by_rank[rank]
            if gradient is not None:
                roots += (root,)
                gradients += (gradient,)
        return roots, gradients

    def leaves_of(self, stage: int, microbatch: int) -> list[Tensor]:
        """Returns the inputs of a stage that may get a gradient."""
        leaves = [*self._outer]
        for link in self._taken[stage]:
            if (tensor := self._held[link, microbatch].tensor) is not None:
                leaves += (tensor,)
        return leaves

    def release(self, stage: int, microbatch: int) -> None:
        """Drops the inputs of a stage, if no other stage of this rank will read them.

        If several stages of this rank read a value, autograd sums their gradients in the leaf. The
        gradient is read after the last of their backwards, because the sum is complete then.
        """
        for link in self._taken[stage]:
            held = self._held[link, microbatch]
            held.num_readers -= 1
            if held.num_readers:
                continue
            if self._program.forward_only:
                del self._held[link, microbatch]
                continue
            # The memory is freed now and not at the end of the step, because the schedule's bound
            # on activations requires it.
            tensor, held.tensor = held.tensor, None
            assert tensor is not None
            gradient = tensor.grad
            if gradient is None and held.spec is None and tensor.requires_grad:
                # Its producer has posted a receive, and only a message can end it.
                gradient = torch.zeros_like(tensor)
            held.gradients[self._rank] = gradient
            # A module may keep its input. It must not keep the gradient with it, which is sent.
            tensor.grad = None

    def begin_backward(self, stage: int, parameters: Iterable[nn.Parameter]) -> None:
        """Records the parameters without a gradient, right before a stage's first backward.

        Autograd makes a new tensor for such a gradient, and that tensor may be a view of another
        gradient. A gradient that exists already, such as a slot of a bucket, stays where it is.
        """
        # Once in a step, and not in each backward, because autograd adds to a gradient that is
        # there.
        missing = [p for p in parameters if p.grad is None and p.requires_grad]
        if stage in self._sharded.stages:
            missing = [p for p in missing if not self._sharded.reduces(p)]
        self._without_gradient[stage] = missing

    def separate_gradients(self, stage: int, leaves: Sequence[Tensor]) -> None:
        """Copies new gradients that share memory with one another; see [Note: shared memory].

        Args:
            stage: The stage whose backward has just run.
            leaves: All tensors that its forward read and that may have a gradient now.
        """
        missing = self._without_gradient[stage]
        # FSDP2 gives its gathered parameters new gradients in each backward; see `begin_backward`
        # for the others.
        is_sharded = stage in self._sharded.stages
        owners = [*missing, *(self._sharded.gathered(stage) if is_sharded else ()), *leaves]
        memory = dict[int, list[Tensor]]()  # by the address of a storage
        for owner in owners:
            if (gradient := owner.grad) is None:
                continue
            if gradient.layout is not torch.strided:  # its values may lie anywhere
                owner.grad = gradient.clone()
                continue
            if type(gradient) is not Tensor:
                gradient = local(gradient)
            address = gradient.untyped_storage().data_ptr()
            memory.setdefault(address, []).append(owner)
        for sharers in memory.values():
            for owner in _overlapping(sharers) if len(sharers) > 1 else ():
                assert owner.grad is not None
                owner.grad = owner.grad.clone()
        # Parameters that have their gradient now are not checked again: later backwards add to it.
        if missing:
            self._without_gradient[stage] = [p for p in missing if p.grad is None]

    # Failures.

    def receive_and_drop(self, channel: int, microbatch: int) -> None:
        """Waits for a value or a gradient that no stage will read, unless it has come."""
        held = self._held.get((self._channels[channel].link, microbatch))
        self._transfers.drop(channel, microbatch, None if held is None else held.spec)


def _summed(by_rank: Mapping[int, Tensor | None]) -> Tensor | None:
    """Returns the sum of the gradients of a value that several ranks took; overwrites one of them.

    They are added in the order of ranks, not of arrival, because floating-point sums depend on
    their order, and the bits must be the same in every run.
    """
    total: Tensor | None = None
    for _, term in sorted(by_rank.items()):
        # The first term has arrived, or is a gradient of this rank; no other code reads it.
        if term is not None:
            total = term if total is None else total.add_(term)
    return total


def _overlapping(owners: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors whose gradient overlaps the gradient of one before, all in one storage.

    Slots of a bucket are in one storage, and do not overlap. They must stay there.
    """
    spans = list[tuple[int, int, Tensor]]()
    for owner in owners:
        assert owner.grad is not None
        gradient = local(owner.grad)
        begin, steps = gradient.data_ptr(), zip(gradient.shape, gradient.stride(), strict=True)
        numel = 1 + sum((size - 1) * step for size, step in steps)  # from the first to the last
        spans.append((begin, begin + numel * gradient.element_size(), owner))
    spans.sort(key=lambda span: span[0])
    overlapping, taken = list[Tensor](), 0
    for begin, end, owner in spans:
        if begin < taken:
            overlapping.append(owner)
        else:
            taken = end
    return overlapping


def check_plain(output: Tensor, what: str) -> None:
    """Refuses a tensor that is no piece of memory, because only memory can be sent.

    Raises:
        StepError: Begins with `what`.
    """
    if type(output) is not Tensor or output.layout is not torch.strided:
        _refuse_memoryless(output, what)


def _refuse_memoryless(output: Tensor, what: str) -> None:
    if is_dtensor(output):
        advice = "return output.full_tensor(), or output.to_local() if each rank has all of it"
    elif is_wrapper(output):
        advice = "return a torch.Tensor of its values"
    elif output.layout != torch.strided:
        advice = "return output.to_dense()"
    else:
        return
    raise StepError(
        f"{what} as a {type(output).__name__} of layout {output.layout}, expected a plain "
        f"strided tensor, which can be handed on: {advice}"
    )
