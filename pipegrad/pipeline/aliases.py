"""Aliases: tensors of a step that share memory, and what keeps them apart.

[Note: shared memory] The memory of a value belongs to the tensor that holds it. pipegrad writes
into no value, and gives no memory to two of them. Modules and autograd may still write into it, and
three rules decide about that:

- An output without a graph is copied when it is handed on. It may be a buffer or a cache of the
  module, which is written in the next forward: nothing tells.
- An output with a graph is not copied. Its version tells if the next forward of its stage has
  written into it. That is refused.
- Autograd may make the gradients of two leaves views of one tensor, and adds to each in place. So
  new gradients in one storage are compared, and those that overlap are copied.

Outputs of evaluations have no graph, so each is copied once (benchmarks/overhead, `received.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.interop.private import is_arriving, is_wrapper
from pipegrad.model.dtensor import is_dtensor, local
from pipegrad.pipeline.stage import Stage


class Aliases:
    """Keeps apart tensors that share memory; see [Note: shared memory].

    Args:
        stages: The stages of this rank.
        sharded: The stages whose parameters FSDP2 swaps.
    """

    def __init__(self, stages: Mapping[int, Stage], sharded: ShardedStages) -> None:
        self._stages = stages
        self._sharded = sharded
        self.forget()

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._without_gradient = dict[int, list[nn.Parameter]]()  # by stage
        # By stage, what its last forward handed on with a graph, and the version of each.
        self._handed_on: dict[int, list[tuple[Tensor, int]]] = {stage: [] for stage in self._stages}

    def note_backward(self, stage: int, parameters: Iterable[nn.Parameter]) -> None:
        """Notes which parameters have no gradient, right before a stage's first backward.

        Autograd makes a new tensor for such a gradient, and that tensor may be a view of another
        gradient. A gradient that exists already, such as a slot of a bucket, stays where it is.
        """
        missing = [p for p in parameters if p.grad is None and p.requires_grad]
        self._without_gradient[stage] = [p for p in missing if not self._sharded.reduces(stage, p)]

    def checked(self, stage: int, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the outputs of a forward as plain tensors.

        Raises:
            StepError: If one is no plain tensor, or as `refuse_written`.
        """
        self.refuse_written(stage)
        self._handed_on[stage] = []
        plain = list[Tensor]()
        for name, output in zip(self._stages[stage].outputs, outputs, strict=True):
            if type(output) is Tensor and output.layout is torch.strided:
                plain += (output,)
            elif is_arriving(output):
                plain += (output.clone(),)  # which waits for the collective that writes it
            else:
                check_plain(output, f"stage {stage} returned {name!r}")
                plain += (output,)
        return tuple(plain)

    def refuse_written(self, stage: int) -> None:
        """Called when a forward has run, the second one of a recomputation too.

        Raises:
            StepError: If what the forward before it returned was written into.
        """
        for earlier, version in self._handed_on[stage]:
            if earlier._version != version:
                raise StepError(
                    f"something has written into what a forward of stage {stage} returned, which "
                    f"may still be on its way: return a clone of it, or write into a copy"
                )

    def handed_on(self, stage: int, output: Tensor) -> Tensor:
        """Returns what is handed on of an output, without its graph."""
        if not output.requires_grad:
            return output.clone()
        value = output.detach()  # it has the version of the output, and counts with it
        self._handed_on[stage] += [(value, value._version)]
        return value

    def part_gradients(self, stage: int, values: Sequence[Tensor]) -> None:
        """Copies new gradients that share memory with one another.

        Args:
            stage: The stage whose backward has just run.
            values: The leaves that its forward read.
        """
        # FSDP2 gives its gathered parameters new gradients in each backward; see `note_backward`
        # for the others.
        missing = self._without_gradient[stage]
        memory = dict[int, list[Tensor]]()  # by the address of a storage
        for owner in (*missing, *self._sharded.gathered(stage), *values):
            if (gradient := owner.grad) is None:
                continue
            if gradient.layout is not torch.strided:  # its values may lie anywhere
                owner.grad = gradient.clone()
                continue
            if type(gradient) is not Tensor:
                gradient = local(gradient)
            address = gradient.untyped_storage().data_ptr()
            memory.setdefault(address, []).append(owner)
        for owners in memory.values():
            for owner in _overlapping(owners) if len(owners) > 1 else ():
                assert owner.grad is not None
                owner.grad = owner.grad.clone()
        if missing:
            self._without_gradient[stage] = [p for p in missing if p.grad is None]


def _overlapping(owners: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors whose gradient overlaps that of one before, all in one storage.

    Slots of a bucket are in one storage, and do not overlap. They must stay there.
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
