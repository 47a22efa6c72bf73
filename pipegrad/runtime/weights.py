"""What waits of this rank's backwards in a step, and which parameters are final."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipegrad.gradients.sync import GradientSync
from pipegrad.runtime.backward import Waiting, backward_inputs
from pipegrad.runtime.products import WeightProduct


class WeightGradients:
    """The weights' gradients that I leaves to W.

    A parameter is final once its stage has computed all its inputs' gradients and nothing of its
    own waits; that is known of each one alone, and needs no hooks.

    Args:
        modules: This rank's, by stage.
        sync: Told of final parameters.
        lent: Addresses of the buffers that others will write into.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], sync: GradientSync, lent: Collection[int]
    ) -> None:
        self._modules = modules
        self._sync = sync
        self._lent = lent
        self._whole = dict(sync.manifest.wrappers)
        self._told = set[int]()
        self.forget()

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._waiting: dict[tuple[int, int], Waiting] = {}
        self._counts = {stage: Counter[int]() for stage in self._modules}  # by parameter
        self._inputs_are_final = set[int]()

    def backward(
        self,
        stage: int,
        microbatch: int,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Iterable[Tensor],
    ) -> Iterable[Tensor]:
        """Computes the gradients of a stage's inputs, and of what does not wait.

        Args:
            stage: Whose.
            microbatch: Which.
            roots: What its forward made.
            gradients: Of the roots.
            inputs: What the stage was given, as leaves.

        Returns:
            The gradients that are kept until the weights' are computed.
        """
        if stage in self._whole:  # it reduces when autograd's hooks fire
            torch.autograd.backward(roots, gradients)
            waiting = Waiting(early=(self._whole[stage],))
        else:
            waiting = backward_inputs(roots, gradients, inputs)
        if waiting.early and stage not in self._told:
            self._told.add(stage)
            warnings.warn(
                f"stage {stage}: the weights' gradients of {', '.join(waiting.early)} are computed "
                f"with those of its inputs, not later: a schedule that splits backward gains "
                f"nothing by them",
                stacklevel=2,
            )
        for product in waiting.products:
            assert product.gradient is not None
            if product.gradient.untyped_storage().data_ptr() in self._lent:
                product.gradient = product.gradient.clone()
            self._counts[stage][id(product.parameter)] += 1
        self._waiting[stage, microbatch] = waiting
        return [p.gradient for p in waiting.products if p.gradient is not None]

    def inputs_are_final(self, stage: int, _microbatch: int = 0) -> None:
        """Says which parameters are final now that nothing but weights' gradients is left."""
        self._inputs_are_final.add(stage)
        counts = self._counts[stage]
        parameters = self._modules[stage].parameters()
        self._sync.stage_final(stage, [p for p in parameters if not counts[id(p)]])

    def compute(self, stage: int, microbatch: int) -> None:
        """Computes what waits of a microbatch."""
        waiting = self._waiting[stage, microbatch]
        del self._waiting[stage, microbatch]
        waiting.unpack()
        while waiting.products:
            self._accumulate(stage, waiting.products.popleft())

    def compute_shared(self, stage: int, _microbatch: int = 0) -> None:
        """Computes what waits of the parameters that other ranks hold too, of all microbatches."""
        records = [r for r in self._sync.records() if r.shared and stage in r.holders]
        shared = {id(self._sync.parameter(record)) for record in records}
        for (at, _), waiting in self._waiting.items():
            if at == stage:
                waiting.unpack()
                products, waiting.products = waiting.products, deque()
                for product in products:
                    if id(product.parameter) in shared:
                        self._accumulate(stage, product)
                    else:
                        waiting.products.append(product)

    def _accumulate(self, stage: int, product: WeightProduct) -> None:
        product.accumulate()
        counts, key = self._counts[stage], id(product.parameter)
        counts[key] -= 1
        if not counts[key] and stage in self._inputs_are_final:
            self._sync.stage_final(stage, [product.parameter])
