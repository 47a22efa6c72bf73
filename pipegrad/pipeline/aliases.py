"""Aliases: tensors of a step that share memory, and the copies that keep them apart.

[Note: shared memory] In a step, four kinds of memory are written while other tensors may lie in it:

- A receive buffer. When its value is released, the next receive writes into it.
- A buffer of a module, such as a running mean. The next forward may write into it.
- A tensor that a module returns and also keeps. The module may change it later.
- A gradient. Autograd adds to it in place, in each further backward.

A stage may return a view of any of these, and autograd may make two gradients views of one tensor.
So whatever outlives a forward or a backward is compared by the address of its storage. It is copied
only if the address is taken, gradients only if they overlap: in most models nothing is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.interop.private import is_arriving, is_wrapper, num_holders
from pipegrad.model.dtensor import is_dtensor, local
from pipegrad.pipeline.stage import Stage


class Aliases:
    """Copies tensors that lie in memory of others; see [Note: shared memory].

    Args:
        stages: The stages of this rank.
        sharded: The stages whose parameters FSDP2 swaps.
        lent: Addresses of the receive buffers that stages read now: a view, which changes.

    Attributes:
        lent: The same view.
    """

    def __init__(
        self, stages: Mapping[int, Stage], sharded: ShardedStages, lent: Collection[int]
    ) -> None:
        self._stages = stages
        self._sharded = sharded
        self.lent = lent
        self.forget()

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._module_buffers = set[int]()  # addresses
        self._unread = list[int]()  # stages whose buffers are not among them yet
        self._without_gradient = dict[int, list[nn.Parameter]]()  # by stage
        # By stage, what its last forward handed on, and the version of each.
        self._handed_on: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {
            stage: [] for stage in self._stages
        }

    def note_forward(self, stage: int) -> None:
        """Notes that a stage's first forward in a step has run.

        It may make buffers, so their addresses are not known before it.
        """
        self._unread.append(stage)

    def note_backward(self, stage: int, parameters: Iterable[nn.Parameter]) -> None:
        """Notes which parameters have no gradient, right before a stage's first backward.

        Autograd makes a new tensor for such a gradient, and that tensor may be a view of another
        gradient. A gradient that exists already, such as a slot of a bucket, stays where it is.
        """
        missing = [p for p in parameters if p.grad is None and p.requires_grad]
        self._without_gradient[stage] = [p for p in missing if not self._sharded.reduces(stage, p)]

    def settled(self, stage: int, outputs: list[Tensor], *, has_graph: bool) -> tuple[Tensor, ...]:
        """Returns the outputs of a stage, copied where the module keeps them.

        Args:
            stage: The stage that returned them.
            outputs: No other reference to them may exist in pipegrad; the list is changed.
            has_graph: Whether a backward will run from them; else they are cut off their graph.

        Raises:
            StepError: If an output is not a plain tensor, or lies in memory of an earlier output.
        """
        for reference, version in self._handed_on[stage]:
            earlier = reference()
            if earlier is not None and earlier._version != version:
                raise StepError(
                    f"a forward of stage {stage} has written into what an earlier forward "
                    f"returned, which may still be on its way: return a clone of it"
                )
        self._handed_on[stage] = []
        for i, name in enumerate(self._stages[stage].outputs):
            if type(outputs[i]) is not Tensor and is_arriving(outputs[i]):
                outputs[i] = outputs[i].clone()  # which waits, and is a plain tensor
            if type(outputs[i]) is not Tensor or outputs[i].layout is not torch.strided:
                check_plain(outputs[i], f"stage {stage} returned {name!r}")
            # An output that requires a gradient has other holders too: nodes that have saved it. So
            # a later write is noticed by its version.
            requires_grad = outputs[i].requires_grad
            if not (requires_grad and has_graph):
                # The list has the only reference of pipegrad. If the tensor survives without it,
                # or if its storage has a second holder, then the module keeps the output.
                before = weakref.ref(outputs[i])
                outputs[i] = outputs[i].detach()
                if before() is not None or num_holders(outputs[i]) > 1:
                    outputs[i] = outputs[i].clone()
                outputs[i].requires_grad_(requires_grad)
        return tuple(outputs)

    def handed_on(self, stage: int, output: Tensor) -> Tensor:
        """Returns what is handed on of an output, without its graph; see `settled`."""
        value = self.apart(output)
        if value is output and output.requires_grad:
            self._handed_on[stage] += [(weakref.ref(output), output._version)]
        return value.detach()

    def apart(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`, copied if it lies in a receive buffer or in a buffer of a module."""
        while self._unread:  # the last stage of a pipeline hands nothing on, so nobody asks
            buffers = self._stages[self._unread.pop()].module.buffers()
            self._module_buffers.update(buffer.untyped_storage().data_ptr() for buffer in buffers)
        address = tensor.untyped_storage().data_ptr()
        is_shared = address in self.lent or address in self._module_buffers
        return tensor.clone() if is_shared else tensor

    def part_gradients(self, stage: int, values: Sequence[Tensor]) -> None:
        """Copies new gradients that share memory with one another or with a receive buffer.

        Args:
            stage: The stage whose backward has just run.
            values: The leaves that its forward read.
        """
        # Gradients are compared with each other, too: autograd may give a value and a parameter,
        # such as the terms of a sum, views of one gradient. FSDP2 gives its gathered parameters
        # new gradients in each backward; see `note_backward` for the others.
        missing = self._without_gradient[stage]
        owners = [*values, *missing, *self._sharded.gathered(stage)]
        memory, shared = dict[int, list[Tensor]](), False  # by the address of a storage
        for owner in owners:
            if (gradient := owner.grad) is None:
                continue
            if gradient.layout is not torch.strided:  # its values may lie anywhere
                owner.grad = gradient.clone()
                continue
            if type(gradient) is not Tensor:
                gradient = local(gradient)
            address = gradient.untyped_storage().data_ptr()
            if address in memory:
                memory[address].append(owner)
                shared = True
            else:
                memory[address] = [owner]
                shared |= address in self.lent
        if shared:
            for address, sharing in memory.items():
                lent = address in self.lent
                _clone_gradients(sharing if lent else _overlapping(sharing))
        if missing:
            self._without_gradient[stage] = [p for p in missing if p.grad is None]


def _clone_gradients(owners: Sequence[Tensor]) -> None:
    for owner in owners:
        assert owner.grad is not None
        owner.grad = owner.grad.clone()


def _overlapping(owners: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors whose gradient overlaps that of one before, all in one storage.

    Slots of a bucket are in one storage, and do not overlap.
    """
    spans = [(*_span(owner), owner) for owner in owners]
    spans.sort(key=lambda span: span[0])
    found, taken = list[Tensor](), 0
    for begin, end, owner in spans:
        if begin < taken:
            found.append(owner)
        else:
            taken = end
    return found


def _span(owner: Tensor) -> tuple[int, int]:
    """Returns the address at which a gradient begins, and that behind its last element."""
    assert owner.grad is not None
    gradient = local(owner.grad)
    begin, nbytes = gradient.data_ptr(), gradient.nbytes
    if not gradient.is_contiguous():  # it may have gaps
        steps = zip(gradient.shape, gradient.stride(), strict=True)
        nbytes = gradient.element_size() * (1 + sum((size - 1) * step for size, step in steps))
    return begin, begin + nbytes


def check_plain(output: Tensor, what: str) -> None:
    """Refuses a tensor that is no piece of memory, since only memory can be sent.

    Raises:
        StepError: Begins with `what`.
    """
    if type(output) is Tensor and output.layout is torch.strided:
        return
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
