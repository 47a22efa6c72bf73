"""cut: an uncut model into the stages of a pipeline, in one call.

cut = pipegrad.cut(model, num_stages=4)
scheduler = pipegrad.Scheduler(cut, topology, schedule="1f1b", num_microbatches=8)
result = scheduler.step(input_ids=ids, attention_mask=mask, labels=labels)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipegrad.errors import TopologyError, refuse
from pipegrad.model.wrappers import DDP, FSDP1, FSDP2, wrapper_of
from pipegrad.partition.carried_cache import CarriedCache
from pipegrad.partition.cut_model import Cut, Source
from pipegrad.partition.cutting.boundaries import Layer, starts_of
from pipegrad.partition.cutting.calls import Call
from pipegrad.partition.cutting.flow import flow_of
from pipegrad.partition.cutting.layers import (
    Part,
    has_state,
    is_sequential,
    layers_of,
    sequential_layers,
    sequential_parts,
)
from pipegrad.partition.cutting.parts import parts_of
from pipegrad.partition.cutting.stage_module import StageModule
from pipegrad.partition.hf.conventions import (
    LOSS,
    ROUTED,
    Conventions,
    inner_model,
    sample_of,
)
from pipegrad.partition.hf.pretrained import meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WAYS = ("structural", "sequential")


class Cutter:
    """`pipegrad.cut`: a function, with others under its name."""

    def __call__(
        self,
        model: nn.Module,
        num_stages: int,
        *,
        by: str | Sequence[float] = "parameters",
        boundaries: Sequence[int | str] | None = None,
        how: str | None = None,
        example: Mapping[str, object] | None = None,
        loss: str = "own",
        carry: str | None = None,
    ) -> Cut:
        """Returns `model` cut into stages.

        Nothing is copied: stages share the model's tensors. All ranks must call it with the same
        arguments.

        Args:
            model: The uncut model, of transformers, an ``nn.Sequential``, or any other.
            num_stages: Number of stages, each of at least one layer.
            by: The quantity to balance: ``"parameters"``; ``"time"``, estimated from operations and
                memory traffic; ``"memory"`` of parameters with their gradients and two moments,
                and of the activations of as many microbatches as a stage of 1f1b has in flight; or
                a number for each layer, for example the seconds that `profile_stages` measures.
            boundaries: Index or name of the first layer of stages 1, 2, ...; replaces `by`.
                `Cut.layers` has the names.
            how: ``"structural"`` runs the model's own code on each stage. ``"sequential"`` cuts an
                ``nn.Sequential`` into its layers; another Sequential inside is one layer. The
                default is sequential for an ``nn.Sequential``, and structural for other models.
            example: Keyword arguments of the model's forward, for a small batch. Most models of
                transformers need none.
            loss: ``"own"`` runs the model's own loss unchanged. ``"chunked"`` computes it by
                `chunked_cross_entropy`, which never holds all logits. It needs a model of
                transformers whose head is an ``nn.Linear`` on the last stage. A model that does
                more with its logits than scale, cap, cast and reshape them still computes all of
                them. A model that writes into them makes the step raise `StepError`.
            carry: ``"cache"`` lets `Scheduler.step` cut texts into sequence ``chunks``: each stage
                passes the keys and values of its layers from one chunk to the next. It needs a
                causal model of transformers.

        Raises:
            TopologyError: If the model cannot be cut in this way.
            WeightsError: If adapters of peft could not be saved from the stages.
        """
        way = how or ("sequential" if is_sequential(model) else "structural")
        refuse(
            TopologyError,
            {
                f"how is {how!r}, expected one of {list(WAYS)}": way not in WAYS,
                f"loss is {loss!r}, expected 'own' or 'chunked'": loss not in ("own", "chunked"),
                f"carry is {carry!r}, expected None or 'cache'": carry not in (None, "cache"),
            },
        )
        _check_model(model)
        _check_types(num_stages, by, boundaries, example)
        carried = CarriedCache(inner_model(model)) if carry else None
        conventions, not_returned = Conventions(model, example), tuple[str, ...]()
        if way == "sequential":
            named = sequential_layers(model)
            layers = [Layer(name, _sizes(layer)) for name, layer in named]
            starts = starts_of(layers, num_stages, by=by, boundaries=boundaries)
            parts = sequential_parts(model, named, starts)
        else:
            layers, starts, parts, not_returned = _structural(
                model, conventions, num_stages, by=by, boundaries=boundaries, example=example
            )
        head = _head_of(model, parts[-1].module, way) if loss == "chunked" else ""
        return Cut(
            model,
            parts,
            layers,
            starts,
            how=way,
            by=by if boundaries is None else "boundaries",
            conventions=conventions,
            head=head,
            carry=carried,
            not_returned=not_returned,
        )

    def from_pretrained(
        self,
        directory: str | Path,
        num_stages: int,
        *,
        kind: type | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        seed: int | None = None,
        trust_remote_code: bool = False,
        **options: Any,  # noqa: ANN401 - of a cut
    ) -> Cut:
        """Returns a model of transformers cut into stages; each rank reads only its own stages.

        No rank needs memory for the whole model: see `Cut.load`. Nothing is downloaded.

        Args:
            directory: A directory that ``save_pretrained`` or `Cut.save_pretrained` wrote.
            num_stages: Number of stages.
            kind: A class of transformers, for example ``AutoModelForSequenceClassification``. The
                default is the class that the configuration names.
            dtype: Dtype of the parameters. The default is the dtype of the saved model.
            device: Device of the stages.
            seed: Seed of values that the directory lacks, for example of a new head. Without a
                seed, missing values are an error.
            trust_remote_code: True lets transformers run the directory's code on all ranks, as its
                own ``from_pretrained`` does. Otherwise no such code runs.
            **options: ``by``, ``boundaries``, ``how``, ``example``, ``loss`` and ``carry`` of
                ``pipegrad.cut``.

        Raises:
            PipegradError: If the directory, its configuration or the cut is wrong.
        """
        model = meta_model(directory, kind=kind, dtype=dtype, trust_remote_code=trust_remote_code)
        result = self(model, num_stages, **options)
        result.source = Source(device, seed, Path(directory))
        return result

    def from_config(
        self,
        config: PreTrainedConfig | str | Path,
        num_stages: int,
        *,
        seed: int,
        kind: type | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        **options: Any,  # noqa: ANN401 - of a cut
    ) -> Cut:
        """Returns a model of transformers cut into stages, with initial values.

        Each rank initializes only its own stages. Values depend on the seed and the names of
        parameters, but not on the cut. They differ from the values after ``torch.manual_seed``.

        Args:
            config: A configuration of transformers, or the path of a ``config.json``.
            num_stages: Number of stages.
            seed: Seed of the values, equal on all ranks.
            kind: Class of the model, needed if the configuration names none; see `from_pretrained`.
            dtype: Dtype of the parameters. The default is the dtype that the configuration names.
            device: Device of the stages.
            **options: Options of ``pipegrad.cut``, see `from_pretrained`.

        Raises:
            PipegradError: If the configuration or the cut is wrong.
        """
        result = self(meta_model(config, kind=kind, dtype=dtype), num_stages, **options)
        result.source = Source(device, seed, None)
        return result


cut = Cutter()


_REDUCES = "The Scheduler reduces the gradients of replicas"
_SHARDS = "fully_shard() may shard its stages: see docs/coming_from/fsdp2.md"
_COMPILE = "torch.compile"
_WRAPPERS = {  # wrapper -> its replacement
    DDP: _REDUCES,
    "DataParallel": _REDUCES,
    FSDP1: _SHARDS,
    FSDP2: _SHARDS,
    _COMPILE: "Compile its stages: cut.modules[i] = torch.compile(cut.modules[i])",
}


_CALLS = {FSDP2: "fully_shard()"}  # its caller has seen no name of a class


def _check_model(model: object) -> None:
    """Refuses anything but an uncut model."""
    if not isinstance(model, nn.Module):
        raise TopologyError(f"the model is a {type(model).__name__}, expected an nn.Module")
    wrapper = "DataParallel" if isinstance(model, nn.DataParallel) else wrapper_of(model)
    if hasattr(model, "_orig_mod"):
        wrapper = _COMPILE
    refuse(
        TopologyError,
        {
            "the model is a stage of a cut already: cut the uncut model": isinstance(
                model, StageModule
            ),
            f"the model is wrapped: remove {_CALLS.get(wrapper, wrapper)}, and cut the model "
            f"itself. {_WRAPPERS.get(wrapper)}": wrapper,
            # accelerate exchanges the forward of a model for mixed precision.
            f"accelerate's prepare() or a Trainer has changed the forward of the "
            f"{type(model).__name__}: cut the model before": "forward" in vars(model),
        },
    )


def _check_types(num_stages: object, by: object, boundaries: object, example: object) -> None:
    are_listed = isinstance(boundaries, Sequence) and not isinstance(boundaries, str)
    refuse(
        TopologyError,
        {
            f"num_stages is {num_stages!r}, expected an integer": (
                not isinstance(num_stages, int) or isinstance(num_stages, bool)
            ),
            f"by is {by!r}, expected a name, or a number for each layer": not isinstance(
                by, str | Sequence
            ),
            f"boundaries is {boundaries!r}, expected a list of indices or names": (
                boundaries is not None and not are_listed
            ),
            f"example is a {type(example).__name__}, expected the keyword arguments of the model's "
            f"forward, as {{'input_ids': ids}}": (
                example is not None and not isinstance(example, Mapping)
            ),
        },
    )


def _head_of(model: nn.Module, last: nn.Module, way: str) -> str:
    """Returns the name of the head whose logits may be deferred.

    Raises:
        TopologyError: If the last stage has no such head.
    """
    inner = inner_model(model)
    head = None if inner is None or way == "sequential" else inner.get_output_embeddings()
    name = next((name for name, part in model.named_modules() if part is head), "")
    is_linear = head is not None and type(head).forward is nn.Linear.forward
    is_linear = is_linear and "forward" not in vars(head)
    held = dict(last.named_parameters(remove_duplicate=False))
    if not is_linear or f"{name}.weight" not in held:
        kind, of = type(model).__name__, type(head)  # peft has a Linear, too
        what = "no head of transformers" if head is None else f"{of.__module__}.{of.__name__}"
        raise TopologyError(
            f"loss is 'chunked', and {kind} has {what} as its head, expected an nn.Linear on the "
            f"last stage: leave loss out"
        )
    return name


def _structural(
    model: nn.Module,
    conventions: Conventions,
    num_stages: int,
    *,
    by: str | Sequence[float],
    boundaries: Sequence[int | str] | None,
    example: Mapping[str, object] | None,
) -> tuple[list[Layer], list[int], list[Part], tuple[str, ...]]:
    """Runs a model and cuts it between its layers.

    Returns:
        The layers at which stages may begin; the index of each stage's first layer; the stages;
        the names of tensors other than logits that the model returns and no stage does.
    """
    has_inputs = any(isinstance(x, Tensor) for x in (example or {}).values())
    sample = conventions.arguments({**({} if has_inputs else sample_of(model)), **(example or {})})
    modules = layers_of(model, num_stages)
    flow = flow_of(model, modules, conventions.samples(sample))
    # No stage begins with a dropout between layers: it belongs to the layer before it. Calls before
    # the first layer with a state are on the first stage.
    begins = [i for i, call in enumerate(flow.calls) if has_state(modules[call.layer])]
    begins[:1] = [0] * bool(begins)
    edges = pairwise([*begins, len(flow.calls)])
    layers = [_layer(flow.calls[a:b], modules) for a, b in edges]
    starts = starts_of(layers, num_stages, by=by, boundaries=boundaries)

    returned = {n: x for n, x in flow.returned.items() if n not in flow.nested}
    others: tuple[str, ...] = ()
    # The model's own loss may add a term with a name such as aux_loss, and need router logits.
    losses = {n: x for n, x in flow.returned.items() if n.endswith((LOSS, ROUTED))}
    if "logits" in returned:
        others = tuple(n for n in returned if n != "logits" and not n.endswith(LOSS))
        returned = {"logits": returned["logits"]}
    returned.pop(LOSS, None)
    if not returned:
        raise TopologyError(f"{type(model).__name__} returns no tensor")
    parts = parts_of(model, modules, flow, [begins[i] for i in starts], returned, losses=losses)
    return layers, starts, parts, others


def _layer(calls: Sequence[Call], modules: Mapping[str, nn.Module]) -> Layer:
    """Returns a layer at which a stage may begin, with all calls up to the next such layer."""
    first = next(call for call in calls if has_state(modules[call.layer]))
    return Layer(
        first.name,
        {k: v for call in calls for k, v in _sizes(modules[call.layer]).items()},
        sum(call.flops for call in calls),
        sum(call.saved_bytes for call in calls),
    )


def _sizes(layer: nn.Module) -> dict[int, tuple[int, int]]:
    return {id(p): (p.nbytes, p.numel()) for p in layer.parameters()}
