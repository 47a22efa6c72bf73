"""The weights' gradients that I leaves to W, and which parameters are final."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter, defaultdict
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

_AT_ONCE_BYTES = 2**18  # small weights share a pass of autograd, because each costs some 20 us


class WeightGradients:
    """Computes the weights' gradients that I leaves to W, and finds the final parameters.

    A parameter is final when its stage has computed all gradients of its inputs and no product of
    the parameter waits. No hooks are needed, because products are counted for each parameter.

    Args:
        sync: The gradient layer, which is informed of final parameters.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._warned = set[int]()  # stages
        self._parameters = dict[int, Mapping[int, nn.Parameter]]()  # by stage and id
        self.begin()

    def begin(self) -> None:
        """Begins a step. No graph of another step may be left: see [Note: direct]."""
        trained = [p for of_stage in self._parameters.values() for p in of_stage.values()]
        self._marked = {id(p): p for p in trained if p.requires_grad}
        self._parameters.clear()
        # By stage and parameter: microbatches with products of it that wait.
        self._counts = defaultdict[int, Counter[int]](Counter)
        self._inputs_are_final = set[int]()
        with _garbage_later():
            mark(self._marked.values())

    def backward(
        self,
        stage: int,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        parameters: Mapping[int, nn.Parameter],
    ) -> list[WeightProduct]:
        """Computes the gradients of a stage's inputs, and of the weights that cannot wait.

        Args:
            stage: The stage.
            roots: The outputs of its forward in a microbatch.
            gradients: The gradients of the roots.
            parameters: The parameters of the stage by id, the same in a step.
        """
        self._parameters[stage] = parameters
        with _garbage_later():
            waiting = backward_inputs(roots, gradients, parameters, self._marked)
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
        return waiting.products

    def inputs_are_final(self, stage: int) -> None:
        """Passes on the final parameters of a stage whose inputs have all their gradients."""
        self._inputs_are_final.add(stage)
        counts = self._counts[stage]
        final = [p for key, p in self._parameters[stage].items() if not counts.get(key)]
        self._sync.parameters_final(stage, final)

    def compute_shared(self, stage: int, waiting: Iterable[list[WeightProduct]]) -> None:
        """Computes the products of some microbatches whose parameters other ranks also hold."""
        crosses = self._sync.topology.crosses
        records = self._sync.records()
        shared = {id(self._sync.parameter(r)) for r in records if crosses(r.holders)}
        for products in waiting:
            of_shared = [p for p in products if id(p.parameter) in shared]
            products[:] = [p for p in products if id(p.parameter) not in shared]
            self.compute(stage, of_shared)

    def compute(self, stage: int, products: list[WeightProduct]) -> None:
        """Computes products of a microbatch, a few parameters at a time, and frees them."""
        counts = self._counts[stage]
        # All uses of a weight go together, because its hooks must see their sum. The list is
        # emptied first, because the factors of each product must be freed as soon as it is
        # computed.
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
                counts.subtract([id(parameter) for parameter in parameters])
                final = [p for p in parameters if not counts[id(p)]]
                if final and stage in self._inputs_are_final:
                    self._sync.parameters_final(stage, final)
                chunk, nbytes = [], 0


@contextlib.contextmanager
def _garbage_later() -> Iterator[None]:
    """Disables Python's garbage collection in its body.

    A walk through autograd's graph makes an object for each node, and few of them outlive it. But
    Python would count them, and search the objects of the whole process far more often, which takes
    longer than the walk.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
