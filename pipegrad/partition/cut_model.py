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
    """Where stages on the meta device get their values from.

    Attributes:
        device: Where the values go.
        seed: Of initial values; None if there are none.
        directory: Of values that were saved; None if all are initial ones.
    """

    device: str | torch.device
    seed: int | None
    directory: Path | None


class Cut:
    """A model in stages. Stages share the uncut model's tensors, and have its names.

    They are copies of its modules: call ``train()`` and ``eval()`` of `modules`, and register hooks
    and choose adapters there, not in the uncut model. Once a Scheduler has this rank's stages, the
    uncut model runs no more, and has no ``state_dict``: its other layers are trained elsewhere.

    `Scheduler` takes it instead of stages. In other runtimes, such as those of
    ``torch.distributed.pipelining``, `modules` are the stages: each takes what earlier stages send
    by position, and the arguments of the uncut model by name.

    Attributes:
        modules: Stage -> its module.
        tied: Parameters that several stages hold, or that the uncut model holds several times, by
            name: what `GradientSync` and `attach` take as ``tied``.
        boundaries: Index of the first layer of every stage but the first.
        layers: Where stages may begin.
        how: In which way the model was cut.
        loss_fn: The model's own loss; None if it has none.
        labels: Names of what `loss_fn` needs of a batch.
        returns: Names of what the model returns, in the order of `StepResult.outputs`.
        not_returned: Names of other tensors that the uncut model returns, such as the states of an
            encoder; no stage sends them.
        source: Where `load` gets values from; None if stages have values.
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
        self._head = head  # whose logits wait until something needs them all
        self.returns, self.not_returned = self._parts[-1].outputs, not_returned
        self._conventions = conventions
        self._carry = carry
        self.source: Source | None = None
        # What saving and loading need to know of the uncut model, without its values.
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
        # It holds no module: on a rank it lives as long as the Scheduler.
        own = partial(own_loss, self._conventions, metrics_of(parts[-1]))
        self.loss_fn: Callable[..., object] | None = own if self.labels else None
        self._begins = {i: begin_of(module) for i, module in self.modules.items()}

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self._parts)

    def report(self) -> str:
        """Returns why the model is cut where it is: a table with a line for each stage.

        Its last line ends, too: whatever is written behind it begins a line of its own.
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
        """Gives stages of a cut that `from_pretrained` or `from_config` made their values.

        A `Scheduler` calls it for the stages of its rank. All ranks call it, each for its own.
        Stages that have values keep them.

        Args:
            stages: Those of this rank.
            scheduler: What will change the values.

        Raises:
            TopologyError: If peft has added adapters behind the cut; on all ranks.
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
        """Returns digests of the first values of all stages, as far as this rank knows them.

        Args:
            stages: Those of this rank. If one has other values since the cut, such as loaded ones,
                the result is empty: its first values are not used.
        """
        now = {i: begin_of(module) for i, module in self.modules.items()}
        is_new = all(now[stage] == self._begins[stage] for stage in stages)
        return {i: digest for i, digest in now.items() if digest} if is_new else {}

    def save_pretrained(
        self, directory: str | Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
    ) -> None:
        """Writes a directory that transformers and `from_pretrained` read. All ranks call it.

        The first rank writes what the others send it, a tied weight once. The directory has the
        configuration, and the one of generation. Of a model with adapters of peft it has these
        alone, with the names and in the folders of peft's own ``save_pretrained``, as
        ``PeftModel.from_pretrained`` reads them.

        Args:
            directory: Of the first rank. An older model in it is replaced.
            max_shard_bytes: Size of a file. A layer is not split, so a file may be larger.

        Raises:
            TopologyError: If it is no model of transformers.
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

        Ranks that pass None take nothing, and need memory for one tensor at a time. Parameters and
        buffers are written in place, and keep their dtype, device and requires_grad. Those of a
        model on the meta device get memory, on the CPU.

        Args:
            model: With the names and shapes of the model that was cut, but not that one: its
                layers are those of the stages.

        Raises:
            TopologyError: If it is the model that was cut; on all ranks.
            WeightsError: If it has other tensors or shapes; on all ranks.
        """
        held = tensors_of([self.modules[stage] for stage in self._settled()], self._first)
        gather_stages(held, self._first, model, self._model())

    def generate(self, *inputs: object, **named: object) -> Any:  # noqa: ANN401 - as transformers
        """Returns what ``generate`` of the uncut model of transformers returns, on every rank.

        Nothing is merged: layers run where they are, and send what they return to the other ranks
        of the pipeline. Caches stay with the layers. All ranks call it; those of a pipeline with
        the same arguments, and each replica with its own. Layers are in evaluation mode meanwhile.
        Sampling draws the random numbers of the pipeline's first rank.

        Args:
            *inputs: As of ``generate``.
            **named: As of ``generate``, such as ``input_ids``, ``max_new_tokens``, ``do_sample``.

        Raises:
            TopologyError: If it is no model of transformers that generates.
            StepError: If stages cannot do it, or if a layer fails on another rank.
            AgreementError: If ranks have different arguments.
        """
        if self.uncut is None or not hasattr(self.uncut, "generate"):
            raise TopologyError("only models of transformers that generate text have generate()")
        held, scheduler = self._settled(), self._scheduler()
        topology = None if scheduler is None else scheduler.topology
        return generate(self.uncut, self._parts, held, topology, inputs=inputs, named=named)

    def chunks(self, length: int, number: int) -> list[int]:
        """Returns lengths of chunks of time that cost as much: the last ones are the shortest.

        A token of a later chunk attends to more others. Give them as ``chunks`` of
        `Scheduler.step`. Lengths but the last one are multiples of a power of two, up to 128.

        Args:
            length: Tokens of the text.
            number: How many chunks.

        Raises:
            TopologyError: If the cut carries no cache, or if there are fewer tokens than chunks.
        """
        if self._carry is None:
            raise TopologyError("chunks() needs pipegrad.cut(model, ..., carry='cache')")
        if not 1 <= number <= length:
            raise TopologyError(f"a text of {length} tokens has no {number} chunks")
        sample = vars(self._parts[0].module)["_pipegrad_run"].flow.sample
        texts = next(iter(sample.values()))  # of which operations were counted
        flops = sum(layer.flops for layer in self.layers) / math.prod(texts[:2])
        return self._carry.lengths(length, number, flops=flops)

    def _settled(self) -> Sequence[int]:
        """Returns the stages of this rank, when their values have come from other ranks."""
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
        """Returns the layers of a stage with their times, or with 1 if times are unknown."""
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
            indices: Which ones.
            own_loss: Whether the last stage also returns the model's own loss.
            recompute: As `Stage`.
        """
        if self.how == "sequential":
            return [Stage(self.modules[i], i, recompute=recompute) for i in indices]
        last = self.num_stages - 1
        return [
            CutStage(
                # The user may have exchanged the module, as torch.compile does.
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
    """Returns what the model ties, and parameters that several stages hold under one name."""
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
