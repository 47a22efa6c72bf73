"""Cut: a model in stages, from its values to its files."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipegrad.errors import TopologyError
from pipegrad.model.suspects import begin_of
from pipegrad.model.ties import AllTies, find_tied
from pipegrad.partition.carried_cache import CarriedCache
from pipegrad.partition.cut_stage import CutStage, metrics_of, own_loss
from pipegrad.partition.cutting.boundaries import Layer
from pipegrad.partition.cutting.copies import without_memory, without_values
from pipegrad.partition.cutting.layers import Part
from pipegrad.partition.generation import generate
from pipegrad.partition.hf.adapter import adapter_names, has_adapter, tuned_by
from pipegrad.partition.hf.conventions import Conventions, inner_model
from pipegrad.partition.hf.gathered import gather_stages, tensors_of
from pipegrad.partition.hf.pretrained import first_names, load_stages
from pipegrad.partition.hf.saved import DEFAULT_SHARD_BYTES, save_stages
from pipegrad.partition.uncut_use import refuse_uncut
from pipegrad.pipeline.stage import Stage

if TYPE_CHECKING:
    from pipegrad.pipeline.scheduler import Scheduler


@dataclass(frozen=True)
class Source:
    """The source of values for stages on the meta device.

    Attributes:
        device: Device of the stages.
        seed: Seed of initial values; None if every value must be in the directory.
        directory: Directory of saved values; None if all values are initial values.
    """

    device: str | torch.device
    seed: int | None
    directory: Path | None


class Cut:
    """A model in stages. Stages share the uncut model's tensors, and have its names.

    The stages' modules are copies of the uncut model's modules. Call ``train()`` and ``eval()``,
    register hooks and choose adapters on `modules`, not on the uncut model. After a Scheduler has
    loaded only some stages on this rank, the uncut model raises `StepError` in its forward and its
    ``state_dict``, because its other layers are trained on other ranks.

    Pass it to `Scheduler` instead of stages. In another runtime, for example
    ``torch.distributed.pipelining``, use `modules` as stages: each accepts the outputs of earlier
    stages by position, and the arguments of the uncut model by name.

    Attributes:
        modules: Stage -> its module.
        tied: Names of parameters that several stages hold, or that the uncut model holds several
            times: the argument ``tied`` of `GradientSync` and `attach`.
        boundaries: Index of the first layer of every stage but the first.
        layers: Layers at which stages may begin.
        how: The way of the cut: structural or sequential.
        loss_fn: The model's own loss; None if it has none.
        labels: Names of the labels in a batch that `loss_fn` needs.
        returns: Names of the model's outputs, in the order of `StepResult.outputs`.
        not_returned: Names of other tensors that the uncut model returns, for example the states of
            an encoder; no stage sends them.
        source: Source of the values that `load` reads; None if stages have values.
        uncut: The model of transformers without its values; None for other models.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        layers: Sequence[Layer],
        boundaries: Sequence[int],
        *,
        how: str,
        by: str | Sequence[float],
        conventions: Conventions,
        head: str = "",
        carry: CarriedCache | None = None,
        not_returned: tuple[str, ...] = (),
    ) -> None:
        self.modules: Mapping[int, nn.Module] = {i: part.module for i, part in enumerate(parts)}
        self.tied = AllTies(_ties_of(model, parts))
        self.boundaries = tuple(boundaries)
        self.layers = tuple(layers)
        edges = pairwise([0, *boundaries, len(layers)])
        self._by_stage = [self.layers[start:end] for start, end in edges]
        self.how = how
        self._by = by
        self._parts = tuple(parts)
        self._head = head  # its logits are deferred; see `deferred_logits`
        self.returns, self.not_returned = self._parts[-1].outputs, not_returned
        self._conventions = conventions
        self._carry = carry
        self.source: Source | None = None
        # The uncut model without its values, because saving and loading need its code and names.
        self.uncut: Any = None
        if has_adapter(model):
            self.uncut = without_values(model)  # the tokens of a prompt are in no state, and stay
            adapter_names(self.uncut)  # refuses adapters that could not be saved
        elif inner_model(model) is not None:
            self.uncut = without_memory(model)
        self._tuned = tuned_by([model])
        self._model = weakref.ref(model)
        self._held: tuple[int, ...] | None = None  # stages of this rank; None if all may be
        self._scheduler: Callable[[], Scheduler | None] = lambda: None  # weak: it has the stages
        self._first = first_names(model, self.tied)
        self.labels = () if how == "sequential" else self._conventions.labels
        # Holds no module, because it lives as long as the Scheduler.
        own = partial(own_loss, self._conventions, metrics_of(parts[-1]))
        self.loss_fn: Callable[..., object] | None = own if self.labels else None
        self._begins = {i: begin_of(module) for i, module in self.modules.items()}

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self._parts)

    def report(self) -> str:
        """Returns a table that explains the cut, with a line for each stage.

        The last line ends with a newline, too.
        """
        times = [sum(layer.time for layer in layers) for layers in self._by_stage]
        saved = [sum(layer.saved_bytes for layer in layers) for layers in self._by_stage]
        rows = [("stage", "layers", "parameters", "MiB", "time", "activations", "receives")]
        for stage, (layers, part) in enumerate(zip(self._by_stage, self._parts, strict=True)):
            held = {k: v for layer in layers for k, v in layer.parameters.items()}
            rows.append(
                (
                    f"{stage}",
                    " to ".join(dict.fromkeys((layers[0].name, layers[-1].name))),
                    f"{sum(numel for _, numel in held.values()):,}",
                    f"{sum(nbytes for nbytes, _ in held.values()) / 2**20:,.1f}",
                    f"{times[stage] / sum(times):.0%}" if any(times) else "unknown",
                    f"{saved[stage] / 2**20:,.2f} MiB" if any(saved) else "unknown",
                    ", ".join(part.inputs) or "nothing",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        by = self._by if isinstance(self._by, str) else "numbers"
        title = f"{self.num_stages} stages, {self.how}, cut by {by}"
        return "".join(f"{line.rstrip()}\n" for line in (title, *lines))

    def load(self, stages: Iterable[int], scheduler: Scheduler | None = None) -> None:
        """Gives values to stages of a cut that `from_pretrained` or `from_config` made.

        A `Scheduler` calls it for the stages of its rank. All ranks call it, each for its own
        stages. Stages that have values keep them.

        Args:
            stages: Stages of this rank.
            scheduler: The Scheduler that trains the stages.

        Raises:
            TopologyError: If peft has added adapters after the cut; on all ranks.
            WeightsError: If values are missing or cannot be read; on all ranks.
        """
        model = self._model()
        is_other = model is not None and tuned_by([model]) != self._tuned
        if is_other or (not self._tuned and tuned_by(self.modules.values())):
            raise TopologyError(
                "peft has added adapters to a model that was cut already, or has chosen others "
                "there, and its stages do not know them: wrap the model with get_peft_model(), "
                "then cut it"
            )
        self._held = tuple(sorted(stages))
        if scheduler is not None:
            self._scheduler = weakref.ref(scheduler)
        modules, source = [self.modules[stage] for stage in self._held], self.source
        if model is not None and len(self._held) < self.num_stages:
            refuse_uncut(model, self.modules, self._held, is_saved=self.uncut is not None)
        if source is not None:
            load_stages(
                source.directory, self.uncut, modules, device=source.device, seed=source.seed
            )

    def begins(self, stages: Sequence[int]) -> dict[int, str]:
        """Returns digests of the initial values of all stages whose values this rank has.

        Args:
            stages: Stages of this rank. If the values of one have changed since the cut, for
                example by loading, the result is empty, because its initial values are not used.
        """
        now = {i: begin_of(module) for i, module in self.modules.items()}
        is_new = all(now[stage] == self._begins[stage] for stage in stages)
        return {i: digest for i, digest in now.items() if digest} if is_new else {}

    def save_pretrained(
        self, directory: str | Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
    ) -> None:
        """Writes a directory that transformers and `from_pretrained` read. All ranks call it.

        The other ranks send their tensors to the first rank, which writes each tied weight once.
        The directory also gets the configuration and the generation configuration. With adapters of
        peft it gets only the adapters, with the names and folders of peft's ``save_pretrained``, so
        that ``PeftModel.from_pretrained`` reads them.

        Args:
            directory: A path on the first rank. An older model there is replaced.
            max_shard_bytes: Size of a file. A file may be larger, because no layer is split.

        Raises:
            TopologyError: If the model is not of transformers.
            WeightsError: If something cannot be written; on all ranks.
        """
        if self.uncut is None:
            raise TopologyError(
                "save_pretrained writes models of transformers: save the state_dict of each of "
                "cut.modules, which have the names of the uncut model"
            )
        save_stages(
            directory,
            self.uncut,
            {stage: self.modules[stage] for stage in self._settled()},
            tied=self.tied,
            max_shard_bytes=max_shard_bytes,
        )

    def gather(self, model: nn.Module | None = None) -> None:
        """Puts the values of all stages into another uncut model. All ranks call it.

        Ranks that pass None receive nothing, and need memory for one tensor at a time. Parameters
        and buffers are written in place, and keep their dtype, device and requires_grad. Parameters
        and buffers on the meta device get memory on the CPU.

        Args:
            model: A model with the names and shapes of the cut model, but not the cut model,
                because the stages share its tensors.

        Raises:
            TopologyError: If `model` is the model that was cut; on all ranks.
            WeightsError: If `model` has other tensors or shapes; on all ranks.
        """
        held = tensors_of([self.modules[stage] for stage in self._settled()], self._first)
        gather_stages(held, self._first, model, self._model())

    def generate(self, *inputs: object, **named: object) -> Any:  # noqa: ANN401 - as transformers
        """Returns the result of the uncut model's ``generate`` of transformers, on every rank.

        Call ``cut.generate(input_ids=ids, max_new_tokens=20)`` on all ranks. Ranks of one pipeline
        pass the same arguments; each replica may pass others. Each layer runs on its own rank. That
        rank sends the layer's outputs to the other ranks of the pipeline, and keeps the layer's
        cache. Layers are in evaluation mode during the call. Sampling uses the random numbers of
        the pipeline's first rank.

        Args:
            *inputs: Positional arguments of ``generate``.
            **named: Keyword arguments of ``generate``.

        Raises:
            TopologyError: If the model is not of transformers, or does not generate.
            StepError: If the stages cannot generate, or if a layer fails on another rank.
            AgreementError: If ranks have different arguments.
        """
        if self.uncut is None or not hasattr(self.uncut, "generate"):
            raise TopologyError("only models of transformers that generate text have generate()")
        held, scheduler = self._settled(), self._scheduler()
        topology = None if scheduler is None else scheduler.topology
        return generate(self.uncut, self._parts, held, topology, inputs=inputs, named=named)

    def chunks(self, length: int, number: int) -> list[int]:
        """Returns lengths of sequence chunks with equal costs.

        Later chunks are shorter, because their tokens attend to more others. Pass the lengths to
        `Scheduler.step` as ``chunks``. All lengths but the last are multiples of a power of two, up
        to 128.

        Args:
            length: Number of tokens of the text.
            number: Number of chunks.

        Raises:
            TopologyError: If the cut carries no cache, or if there are fewer tokens than chunks.
        """
        if self._carry is None:
            raise TopologyError("chunks() needs pipegrad.cut(model, ..., carry='cache')")
        if not 1 <= number <= length:
            raise TopologyError(f"a text of {length} tokens has no {number} chunks")
        sample = vars(self._parts[0].module)["_pipegrad_run"].flow.sample
        texts = next(iter(sample.values()))  # the input for which operations were counted
        flops = sum(layer.flops for layer in self.layers) / math.prod(texts[:2])
        return self._carry.lengths(length, number, flops=flops)

    def _settled(self) -> Sequence[int]:
        """Waits until values from other ranks have arrived; returns the stages of this rank."""
        if (scheduler := self._scheduler()) is not None:
            scheduler.sync.wait_parameters()
        return range(self.num_stages) if self._held is None else self._held

    def __repr__(self) -> str:
        begins = [layers[0].name for layers in self._by_stage]
        return f"Cut({self.num_stages} stages, {self.how}, begin with {begins})"

    def layers_of(self, stage: int) -> list[str]:
        """Returns the names of a stage's layers."""
        return [layer.name for layer in self._by_stage[stage]]

    def _times_of(self, stage: int) -> dict[str, float]:
        """Returns the layers of a stage with their times, or with 1 if a time is unknown."""
        times: Sequence[float] = [layer.time for layer in self.layers]
        if not isinstance(self._by, str):
            times = self._by
        if not all(times):
            times = [1.0] * len(times)
        weights = {layer.name: time for layer, time in zip(self.layers, times, strict=True)}
        return {name: weights[name] for name in self.layers_of(stage)}

    def stages(
        self, indices: Sequence[int], *, own_loss: bool = False, recompute: bool = False
    ) -> list[Stage]:
        """Returns some stages for a `Scheduler`.

        Args:
            indices: Indices of the stages.
            own_loss: True lets the last stage also return the model's own loss.
            recompute: The argument of `Stage`.
        """
        if self.how == "sequential":
            return [Stage(self.modules[i], i, recompute=recompute) for i in indices]
        last = self.num_stages - 1
        return [
            CutStage(
                # `modules` may have another module now, for example one of torch.compile.
                replace(self._parts[i], module=self.modules[i]),
                i,
                self._conventions,
                is_last=i == last,
                labels=self.labels if own_loss and i == last else (),
                head=self._head,
                recompute=recompute,
                layers=self._times_of(i),
                carry=self._carry,
                shifts=own_loss,
            )
            for i in indices
        ]


def _ties_of(model: nn.Module, parts: Sequence[Part]) -> list[list[str]]:
    """Returns the model's ties, and parameters that several stages hold under one name."""
    tied = find_tied(model)
    known = {name for names in tied for name in names}
    seen, alone = set[str](), list[list[str]]()
    for part in parts:
        for name, _ in part.module.named_parameters():
            if name in seen and name not in known:
                alone.append([name])
                known.add(name)
            seen.add(name)
    return [*tied, *alone]
