"""The weights' gradients that I leaves to W, and which parameters are final."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from pipegrad.gradients.sync import GradientSync
from pipegrad.pipeline.split_backward import (
    PACKED,
    WeightProduct,
    accumulate,
    backward_inputs,
    by_parameter,
    mark,
)

_AT_ONCE_BYTES = 2**18  # one pass of autograd costs some 20 us, so small weights share one


class WeightGradients:
    """The weights' gradients that I leaves to W.

    A parameter is final when its stage has computed all gradients of its inputs and no product of
    the parameter waits. Products are counted for each parameter, so no hooks are needed.

    Args:
        modules: The modules of this rank, by stage.
        sync: The gradient layer. It learns which parameters are final.
    """

    def __init__(self, modules: Mapping[int, nn.Module], sync: GradientSync) -> None:
        self._modules = modules
        self._sync = sync
        self._warned = set[int]()  # stages
        self._parameters: dict[int, dict[int, nn.Parameter]] = {}  # by stage and id, in a step
        self._marked: dict[int, nn.Parameter] = {}  # those of the last step that were trained
        self.forget()

    def begin(self) -> None:
        """Begins a step. No graph of another step may be left: see [Note: direct]."""
        with _garbage_later():
            mark(self._marked.values())

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._waiting: dict[tuple[int, int], list[WeightProduct]] = {}
        # By stage and parameter: microbatches with products of it that wait.
        self._counts = {stage: Counter[int]() for stage in self._modules}
        self._inputs_are_final = set[int]()
        if self._parameters:
            trained = [p for by_id in self._parameters.values() for p in by_id.values()]
            self._marked = {id(p): p for p in trained if p.requires_grad}
            self._parameters = {}

    def backward(
        self,
        stage: int,
        microbatch: int,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        *,
        parameters: Iterable[nn.Parameter],
    ) -> None:
        """Computes the gradients of a stage's inputs, and those of weights that cannot wait.

        Args:
            stage: The stage.
            microbatch: The microbatch.
            roots: The outputs of its forward.
            gradients: The gradients of the roots.
            parameters: Those of the stage, the same in a step.
        """
        if stage not in self._parameters:
            self._parameters[stage] = {id(p): p for p in parameters}
        with _garbage_later():
            waiting = backward_inputs(roots, gradients, self._parameters[stage], self._marked)
        if waiting.early and stage not in self._warned:
            self._warned.add(stage)
            advice = "; Stage(recompute=True) can be both" if PACKED in waiting.early else ""
            warnings.warn(
                f"stage {stage}: the gradients of weights under {', '.join(waiting.early)} are "
                f"computed with those of the stage's inputs, not later: its backward is not split "
                f"there{advice}",
                stacklevel=2,
            )
        self._counts[stage].update({id(product.parameter) for product in waiting.products})
        self._waiting[stage, microbatch] = waiting.products

    def inputs_are_final(self, stage: int) -> None:
        """Passes on the final parameters of a stage whose inputs have all their gradients."""
        self._inputs_are_final.add(stage)
        counts = self._counts[stage]
        final = [p for key, p in self._parameters[stage].items() if not counts.get(key)]
        self._sync.parameters_final(stage, final)

    def compute(self, stage: int, microbatch: int) -> None:
        """Computes the waiting products of a microbatch."""
        self._accumulate(stage, self._waiting.pop((stage, microbatch)))

    def compute_shared(self, stage: int) -> None:
        """Computes the waiting products of parameters that other ranks hold too.

        It does so for all microbatches: other ranks wait for these gradients, so they come before
        the rest of the weights.
        """
        crosses = self._sync.topology.crosses
        records = self._sync.records()
        shared = {id(self._sync.parameter(r)) for r in records if crosses(r.holders)}
        for (at, _), waiting in self._waiting.items():
            if at == stage:
                of_shared = [p for p in waiting if id(p.parameter) in shared]
                waiting[:] = [p for p in waiting if id(p.parameter) not in shared]
                self._accumulate(stage, of_shared)

    def _accumulate(self, stage: int, products: list[WeightProduct]) -> None:
        """Computes products of a microbatch, a few parameters at a time; lets go of each."""
        # All uses of a weight go together, since its hooks must see their sum. The list is emptied
        # first, so that the factors of each product are freed as soon as it is computed.
        groups = list(reversed(by_parameter(products).values()))
        products.clear()
        chunk, nbytes = list[list[WeightProduct]](), 0
        while groups:
            chunk.append(uses := groups.pop())
            nbytes += len(uses) * uses[0].parameter.nbytes
            if nbytes >= _AT_ONCE_BYTES or not groups:
                parameters = [uses[0].parameter for uses in chunk]
                # The name would hold the factors of the last weight until the next chunk.
                del uses
                accumulate(chunk)
                self._became_complete(stage, parameters)
                chunk, nbytes = [], 0

    def _became_complete(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        counts = self._counts[stage]
        counts.subtract([id(parameter) for parameter in parameters])
        if stage in self._inputs_are_final:
            final = [p for p in parameters if not counts[id(p)]]
            if final:
                self._sync.parameters_final(stage, final)


@contextlib.contextmanager
def _garbage_later() -> Iterator[None]:
    """Keeps Python from looking for garbage inside.

    A walk through autograd's graph makes an object for each node, and few of them outlive it. But
    Python would count them, and look through the objects of the whole process far more often: that
    takes longer than the walk.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
