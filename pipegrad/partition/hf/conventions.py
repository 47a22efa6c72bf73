"""Conventions: inputs, outputs and losses of transformers models.

Models that are not of transformers have no conventions, and compute no loss of their own.

[Note: tokens of images] A text has placeholder tokens for images, videos or sounds. The model puts
the features of these inputs there, in their order. The placeholders determine the number of an
input's rows that belong to a sample in two cases: each row is an image, and each image is one run
of tokens; or all rows have equally many tokens. For images of any size, and for their patches, a
grid determines this number. The model itself raises if a microbatch has more or fewer rows than
placeholders.

A sample without placeholders has no images, even if padding fills its rows. A microbatch of such
samples gets no images, as the uncut model does for texts alone.

[Note: one mean] The weight of a microbatch is its number of labels. This is right only if the
model's own loss is one mean over these labels. The names of classes and arguments suggest a mean,
and the first training forward of the last stage checks it: the loss of all labels, times their
number, must be the sum of the losses of parts of the labels, each times the part's number of
labels. Inputs, random numbers and balance losses are equal in these forwards, because the labels of
other parts are ignored and not removed. The first label of each row is a part, because a model that
shifts labels leaves it out. The lowest third is another part, because classes with other weights
have other values. Labels that cannot be ignored, such as numbers, are not checked.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError, TopologyError, refuse
from pipegrad.model.wrappers import is_imported_kind
from pipegrad.partition.hf.adapter import adapter_kinds, kind_of_prompt
from pipegrad.pipeline.stage import inner_module, parameters_of

_Tensors = dict[str, Tensor]  # by name

LOSS = "loss"
SHIFTED = "shift_labels"  # the label of each token is already the next token
_IGNORED = -100  # a label that has no loss
_SAMPLE_ROWS = 2
_SAMPLE_TOKENS = 61  # a prime: no dimension of a model has this size
_LIMITS = ("max_position_embeddings", "max_target_positions")
# Options that would make each stage send all its layers' values to the last stage.
_COLLECTED = ("output_hidden_states", "output_attentions")
_ROUTED = "output_router_logits"  # adds a balance loss of all layers to the model's loss
ROUTED = "router_logits"  # end of the name of its outputs: a tensor for each layer
_DROPPED = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
# Arguments that change the divisor of the loss.
_DIVISORS = ("num_items_in_batch", "shift_labels")
# Heads whose loss is one mean: over labels that are not ignored, or over samples.
_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
_MEANS = (
    *_TOKENS,
    "ForTokenClassification",
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForQuestionAnswering",
    "ForSemanticSegmentation",
    "ForSpeechToText",
    "Text2Text",
    "ModelWithLMHead",
    "MTModel",
    "EncoderDecoderModel",
    "GenerationDecoder",
)
_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")  # kinds of prompts that are no tokens
# Inputs of each kind, by name.
_KINDS = {
    "video": re.compile(r"video_|.*_videos$|second_per_grid"),
    "audio": re.compile(r"audio_|input_features|feature_attention"),
    "image": re.compile(r"image_|pixel_|.*_pixel_values$"),
}
_CTC = "ForCTC"  # by configuration a mean over samples, or a sum
_SEGMENTS = ("semantic_loss_ignore_index", "loss_ignore_index")
# Names in the code of a forward that computes a loss itself.
_LOSSES = {"loss_function", "CrossEntropyLoss", "cross_entropy"}
_SPAN = ("start_positions", "end_positions")  # two losses, each a mean over samples
# Names in the code of a forward that leaves out labels where the attention mask is 0.
_MASKED = {"shift_attention_mask", "active_loss"}
_FIRST_TOKENS = "bbox_first_token_mask"  # of Bros: a loss leaves out labels where it is False
# Heads whose labels may be numbers, which have no value to ignore.
_CLASSES = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification")
_NUMBERS = ("regression", "multi_label_classification")
_DECODED = ("decoder_input_ids", "decoder_inputs_embeds")
_MAKES_INPUTS = "prepare_decoder_input_ids_from_labels"
ASK = (
    "make the Scheduler with loss_fn= and loss_reduction='token_mean', where loss_fn returns (sum "
    "of losses, number of labels)"
)


def inner_model(model: nn.Module) -> Any | None:  # noqa: ANN401 - transformers may be missing
    """Returns a transformers model itself, or the one that peft has wrapped; None of others."""
    if is_imported_kind(model, "peft", "PeftModel"):
        model = model.get_base_model()  # type: ignore[operator]
    return model if is_imported_kind(model, "transformers", "PreTrainedModel") else None


class Conventions:
    """The inputs, the outputs and the loss of a model.

    Attributes:
        labels: Names of the arguments from which the model computes its own loss. Empty if it
            computes none, if its loss is no mean or several means, or if the code of its loss is
            not of transformers.
        can_ignore: True if its loss leaves out labels with the ignored value.
        accepts: Names of the arguments of its forward, in order; None if it accepts any.
    """

    def __init__(self, model: nn.Module, example: Mapping[str, object] | None = None) -> None:
        inner = inner_model(model)
        self._model = type(model).__name__
        self._is_known = inner is not None
        parameters = parameters_of(model)
        takes_any = parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.accepts = None if takes_any else tuple(p.name for p in parameters or ())
        self._defaults: dict[str, object] = {}
        self.labels: tuple[str, ...] = ()
        self._labels_tokens = self._shifts = self._takes_shifted = False
        self._tokens: dict[str, int] = {}  # kind of input -> its placeholder token
        self._masks = list[str]()  # arguments; the loss leaves out labels where they are 0
        self.can_ignore = self._makes_inputs = False
        self._by_sample = False
        self._ignored = _IGNORED
        self._positions = 0  # number of learnt positions; 0 if none are learnt
        self._collected: tuple[str, ...] = _COLLECTED
        if inner is None:
            return
        if "ADALORA" in adapter_kinds(model):
            raise TopologyError(
                "AdaLoRA adds a loss over the adapters of all layers, and moves ranks between "
                "layers, and no stage has all of them: use LoRA"
            )
        self._check(inner)
        self._positions = _positions_of(inner)
        text = inner.config.get_text_config()
        self._tokens = _tokens_of(inner)
        if not getattr(text, _ROUTED, False) and not (example or {}).get(_ROUTED):
            self._collected = (*_COLLECTED, _ROUTED)
        arguments = inspect.signature(type(inner).forward).parameters
        is_passed_on = takes_any and getattr(text, "use_cache", False)
        if "use_cache" in arguments or is_passed_on:
            # No cache, because layers fill it and it cannot travel. Training needs none.
            self._defaults["use_cache"] = False
        self._learn_loss(inner, arguments, kind_of_prompt(model))

    def _learn_loss(
        self,
        inner: Any,  # noqa: ANN401 - a transformers model
        arguments: Collection[str],
        prompt: str,
    ) -> None:
        """Finds the labels that the model's own loss counts, if it is a mean."""
        forward = inspect.unwrap(type(_head_of(inner)).forward)
        # A class derived from one of transformers may have its name, and may compute any loss.
        if not all(_is_transformers(x) for x in (forward, inspect.unwrap(type(inner).forward))):
            return
        # Models that neither call loss_function nor shift labels themselves compare each label with
        # its own token. An encoder-decoder shifts labels when it makes its decoder's inputs.
        loss = _head_of(inner).loss_function if _names(forward) & {"loss_function"} else None
        if loss is not None and not _is_transformers(loss):
            return  # a loss from outside of transformers may be no mean
        is_causal = getattr(loss, "__name__", "") == "ForCausalLMLoss"
        self._takes_shifted = is_causal
        is_causal |= bool(re.search(r"\blabels\[(\.\.\.|:), 1:\]", _source_of(forward)))
        variables = {*getattr(getattr(forward, "__code__", None), "co_varnames", ())}
        self._masks = ["attention_mask"] if loss is None and variables & _MASKED else []
        self._masks += [name for name in arguments if name == _FIRST_TOKENS]
        # After a learnt prompt the first label counts. A prefix goes into the cache instead.
        is_behind = prompt not in ("", *_PREFIXES)
        self._shifts = is_causal and not inner.config.is_encoder_decoder and not is_behind
        kinds = tuple(kind.__name__ for kind in type(inner).__mro__)
        is_mean = any(kind.endswith(_MEANS) for kind in kinds)
        if any(kind.endswith(_CTC) for kind in kinds):
            self._by_sample = is_mean = getattr(inner.config, "ctc_loss_reduction", "") == "mean"
        if any(kind.endswith("ForSemanticSegmentation") for kind in kinds):
            indices = (getattr(inner.config, name, None) for name in _SEGMENTS)
            self._ignored = next((index for index in indices if index is not None), _IGNORED)
            is_mean &= inner.config.num_labels > 1
        if is_mean and "is_impossible" not in arguments:
            self.labels = tuple(name for name in arguments if name in ("labels", *_SPAN))
            self._labels_tokens = any(kind.endswith(_TOKENS) for kind in kinds)
            self._makes_inputs = inner.config.get_text_config().is_encoder_decoder
            self._makes_inputs |= inner.config.is_encoder_decoder
            is_number = inner.config.num_labels == 1 or inner.config.problem_type in _NUMBERS
            self._by_sample |= is_number and any(kind.endswith(_CLASSES) for kind in kinds)
            self.can_ignore = self.labels == ("labels",) and not self._by_sample

    def _check(self, inner: Any) -> None:  # noqa: ANN401 - a transformers model
        parts = [part for part in vars(inner.config).values() if hasattr(part, "model_type")]
        for config in (inner.config, *parts):
            collected = [name for name in _COLLECTED if getattr(config, name, False) is True]
            dropped = [name for name in _DROPPED if getattr(config, name, 0)]
            what = f"the configuration of {self._model} sets"
            refuse(
                TopologyError,
                {
                    f"{what} {collected}, which collects values of layers on all stages: set them "
                    f"to False": collected,
                    f"{what} {dropped}, which skips layers at random, and ranks would skip "
                    f"different ones: set them to 0": dropped,
                },
            )

    def arguments(self, batch: Mapping[str, object]) -> dict[str, object]:
        """Returns the arguments of the model for a microbatch.

        Raises:
            StepError: If they have an option that does not work in a pipeline.
        """
        collected = [name for name in self._collected if batch.get(name)]
        cached = ["past_key_values"] if self._defaults and batch.get("past_key_values") else []
        divisors = [name for name in _DIVISORS if self.labels and batch.get(name) is not None]
        tokens = batch.get("input_ids")
        length = tokens.shape[1] if isinstance(tokens, Tensor) and tokens.dim() > 1 else 0
        refuse(
            StepError,
            {
                f"{[*collected, *cached]} cannot be had in a pipeline: layers of other stages "
                f"would have to give them. {_ROUTED} goes into the configuration before the cut, "
                f"or into the cut's example": collected or cached,
                f"texts have {length} tokens, and {self._model} has positions for "
                f"{self._positions} ({_LIMITS[0]}): cut them off, or into pieces": (
                    0 < self._positions < length and batch.get("position_ids") is None
                ),
                "return_dict is False, and a pipeline needs the names of the outputs": (
                    batch.get("return_dict") is False and self._defaults
                ),
                f"{divisors} cannot be given in a pipeline: its loss is the mean over all labels "
                f"of the batch already, which it counts itself": divisors,
            },
        )
        return (self._without_unseen(batch) if self._is_known else dict(batch)) | self._defaults

    def _of_kinds(self, batch: Mapping[str, object]) -> Iterator[tuple[str, Tensor, _Tensors]]:
        """Yields each kind of input in a batch, a mask of its tokens, and its tensors by name."""
        text = batch.get("input_ids")
        if not isinstance(text, Tensor) or text.dim() != 2:
            return
        left = {n: x for n, x in batch.items() if isinstance(x, Tensor) and x.dim()}
        for kind, pattern in _KINDS.items():
            given = {name: left.pop(name) for name in [*left] if pattern.match(name)}
            # An input with a value for each token belongs to the text.
            given = {name: x for name, x in given.items() if x.shape[:2] != text.shape}
            if given and kind in self._tokens:
                yield kind, text == self._tokens[kind], given

    def rows_of(self, batch: Mapping[str, object]) -> dict[str, list[int]]:
        """Returns the number of rows of each sample, by input; see [Note: tokens of images]."""
        result = dict[str, list[int]]()
        for kind, places, given in self._of_kinds(batch):
            tokens = places.sum(1).cpu()
            begins = (places & ~nn.functional.pad(places, (1, 0))[:, :-1]).sum(1).cpu()
            grid = given.get(f"{kind}_grid_thw", given.get(f"{kind}_grid_hw"))
            sizes = None if grid is None else grid.prod(-1).cpu()
            if any(x.dim() > 4 for x in given.values()) and f"{kind}_sizes" not in given:
                continue  # rows are samples, which are padded to equally many images
            for name, rows in ((name, len(x)) for name, x in given.items()):
                if sizes is not None:
                    found = _filled(tokens, sizes, in_patches=rows != len(sizes))
                elif int(begins.sum()) == rows:
                    found = begins
                else:
                    found = _filled(tokens, torch.ones(rows, dtype=torch.long))
                if found is not None and int(found.sum()) == rows:
                    result[name] = found.tolist()
        return result

    def samples_along(self, batch: Mapping[str, object]) -> dict[str, int | None]:
        """Returns the sample dimension of each input where it is not 0; None if it has none.

        For example, Qwen-VL has positions on several axes: ``(axes, rows, tokens)``. All three
        sizes are compared, because a batch may have as many rows as axes.
        """
        result = dict[str, int | None]()
        text = batch.get("input_ids", batch.get("inputs_embeds"))
        positions, kept = (batch.get(name) for name in ("position_ids", "logits_to_keep"))
        if isinstance(kept, Tensor):  # indices that count for all texts
            result["logits_to_keep"] = None
        if isinstance(positions, Tensor) and isinstance(text, Tensor) and positions.dim() == 3:
            rows, tokens = text.shape[:2]
            if positions.shape[1:] == (rows, tokens):
                result["position_ids"] = 1
            elif positions.shape[1:] == (1, tokens):
                result["position_ids"] = None
        return result

    def _without_unseen(self, batch: Mapping[str, object]) -> dict[str, object]:
        """Returns a batch without those images, videos and sounds that have no token in it."""
        unseen = {n for _, at, given in self._of_kinds(batch) if not at.any() for n in given}
        # Inputs without rows are unseen, also if there is no text of tokens.
        unseen |= {n for n, x in batch.items() if isinstance(x, Tensor) and x.dim() and not len(x)}
        return {name: x for name, x in batch.items() if name not in unseen}

    def samples(self, sample: Mapping[str, object]) -> list[Mapping[str, object]]:
        """Returns samples for the run of the cut, in the order in which to try them.

        The first has labels, because only the loss may read some values. Labels can be made if each
        token has one. The second has none, because a model may refuse these labels.
        """
        tokens = sample.get("decoder_input_ids", sample.get("input_ids"))
        if not self._labels_tokens or not isinstance(tokens, Tensor):
            return [sample]
        return [{"labels": tokens, **sample}, sample]

    def check(self, labels: Mapping[str, object], arguments: Mapping[str, object]) -> None:
        """Refuses labels whose weight is unknown.

        Raises:
            StepError: If the model ignores labels that count, or if there are further labels.
        """
        others = [n for n, x in arguments.items() if "label" in n and x is not None]
        others = sorted({*others} - {*self.labels})
        text: Any = arguments.get("input_ids", arguments.get("inputs_embeds"))
        length = math.inf if text is None else text.shape[1]
        answers: Any = {n: labels[n] for n in _SPAN if labels.get(n) is not None}
        late = [n for n, x in answers.items() if (x >= length).any()]
        label: Any = labels.get("labels")
        masks: Any = {n: arguments[n] for n in self._masks if arguments.get(n) is not None}
        masks = {} if label is None else masks
        masked = [n for n, mask in masks.items() if (self._counts(label) & (mask == 0)).any()]
        refuse(
            StepError,
            {
                f"{others} are given beside {list(labels)}, and a microbatch weighs by the latter "
                f"alone: leave {others} out, or {ASK}": others,
                f"{', '.join(late)} has answers behind the end of the text of {length} tokens. The "
                f"model ignores each end there by itself, so its loss is no mean over samples: "
                f"label an answer that is cut off with 0 at both ends": late,
                f"labels count where {', '.join(masked)} is 0, and the loss of {self._model} "
                f"leaves these out: set them to {_IGNORED}": masked,
            },
        )

    def weight(self, labels: Mapping[str, object]) -> Tensor:
        """Returns the number of labels with a loss: the weight of a microbatch.

        Raises:
            StepError: If labels are no tensors.
        """
        label = next(iter(labels.values()))
        if not isinstance(label, Tensor) or not label.dim():
            raise StepError(f"labels are {label!r:.40}, expected a tensor with a row a sample")
        if label.is_floating_point() or len(labels) > 1 or self._by_sample:
            return torch.tensor(float(len(label)), device=label.device)
        counted = label[..., 1:] if self._shifts and SHIFTED not in labels else label
        return self._counts(counted).sum()

    def _counts(self, label: Tensor) -> Tensor:
        """Returns a mask of the labels with a loss. Heads refuse or ignore all labels below 0."""
        return label >= 0 if self._ignored < 0 else label != self._ignored

    def parts(self, batch: Mapping[str, object], module: nn.Module) -> list[dict[str, object]]:
        """Returns a microbatch with all of its labels, then with parts: see [Note: one mean].

        The result is empty if labels cannot be ignored. This does not depend on their values.
        """
        label: Any = batch.get("labels")
        if not self.can_ignore or not isinstance(label, Tensor) or label.dtype != torch.int64:
            return []
        others = dict[str, object]()
        if self._makes_inputs and not any(batch.get(name) is not None for name in _DECODED):
            # Otherwise the model would make the decoder's inputs from a part of the labels.
            make = getattr(inner_model(inner_module(module)), _MAKES_INPUTS, None)
            if make is None:
                return []
            others = {_DECODED[0]: make(labels=label)}
        counts, part_of = self._counts(label), label.new_zeros(label.shape)
        order = (
            label.masked_fill(~counts, torch.iinfo(label.dtype).max).flatten().argsort(stable=True)
        )
        part_of.view(-1)[order[: -(-int(counts.sum()) // 3)]] = 1
        if label.dim() > 1:
            part_of[:, 0] = 2
        parts = [label.where(part_of == i, self._ignored) for i in range(min(label.dim() + 1, 3))]
        return [{**batch, **others, "labels": x} for x in (label, *parts)]

    def shifted(self, labels: Tensor) -> Tensor:
        """Returns labels shifted by one token if the model's loss shifts them, else unchanged.

        Raises:
            StepError: If its loss accepts no shifted labels.
        """
        if not self._shifts:
            return labels
        if not self._takes_shifted:
            raise StepError(
                f"{self._model} shifts labels in its forward, and a chunk of time lacks the first "
                f"label of the next one: make the Scheduler with loss_fn="
            )
        return nn.functional.pad(labels, (0, 1), value=self._ignored)[..., 1:]

    def safe(self, labels: Mapping[str, object], weight: Tensor) -> dict[str, object]:
        """Returns labels whose mean loss is a number even if none counts.

        Without a label that counts, all labels become 0, because the mean over none is nan, and so
        is its gradient. The loss still does not count: it is multiplied by the weight, which is 0.
        """
        return {
            name: torch.where(weight > 0, label, 0)
            if isinstance(label, Tensor) and not label.is_floating_point()
            else label
            for name, label in labels.items()
        }


def _tokens_of(inner: Any) -> dict[str, int]:  # noqa: ANN401 - a transformers model
    """Returns the placeholder tokens of images, videos and sounds, by kind."""
    names = {f"{kind}_token_{end}": kind for kind in _KINDS for end in ("id", "index")}
    found = [(kind, getattr(inner.config, name, None)) for name, kind in names.items()]
    return {kind: token for kind, token in found if isinstance(token, int)}


def _filled(tokens: Tensor, sizes: Tensor, *, in_patches: bool = False) -> Tensor | None:
    """Returns the number of images, or of patches, in each sample if images fill tokens in order.

    Returns:
        A number for each sample; None if an image would belong to two samples.
    """
    ends, filled = tokens.cumsum(0) * sizes.sum(), nn.functional.pad(sizes.cumsum(0), (1, 0))
    at = torch.searchsorted(filled * tokens.sum(), ends, right=True) - 1
    if not tokens.any() or not torch.equal(filled[at] * tokens.sum(), ends):
        return None
    counted = filled[at] if in_patches else at
    return counted.diff(prepend=counted.new_zeros(1))


def _head_of(inner: nn.Module) -> Any:  # noqa: ANN401 - a transformers model
    """Returns the model whose forward computes the loss of labels.

    It may be an inner model. For example, a caption model may leave its loss to its language model.
    """
    for module in inner.modules():
        forward = inspect.unwrap(type(module).forward)
        if _names(forward) & _LOSSES and "labels" in inspect.signature(forward).parameters:
            return module
    return inner


def _is_transformers(function: object) -> bool:
    return getattr(function, "__module__", "").startswith("transformers.")


def _names(function: object) -> set[str]:
    return {*getattr(getattr(function, "__code__", None), "co_names", ())}


def _source_of(function: Callable[..., object]) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # the model was defined outside of a file
        return ""


def _positions_of(inner: nn.Module) -> int:
    """Returns the number of positions with a learnt embedding; 0 if there are none."""
    text: Any = inner.config.get_text_config()  # type: ignore[operator, union-attr]
    limit = getattr(text, _LIMITS[0], None) or 0
    are_learnt = any(
        isinstance(module, nn.Embedding)
        and 0 <= module.num_embeddings - limit <= 2  # some models have two rows more
        and re.search("wpe|position", name)
        for name, module in inner.named_modules()
    )
    return int(limit) if are_learnt else 0


def sample_of(model: nn.Module) -> dict[str, object]:
    """Returns a small batch for a transformers model.

    Raises:
        TopologyError: If it is no such model, or if its main input is of another kind.
    """
    inner = inner_model(model)
    if inner is None:
        raise TopologyError(
            f"nobody knows what {type(model).__name__} takes: give example={{...}}, the keyword "
            f"arguments of its forward for a small batch"
        )
    config = inner.config
    # Some heads refuse several rows without a padding token.
    text = config.get_text_config()
    rows = _SAMPLE_ROWS if getattr(text, "pad_token_id", None) is not None else 1
    # A model without a limit has None or -1.
    limits = [limit for name in _LIMITS if (limit := getattr(text, name, None) or 0) > 0]
    tokens = torch.ones(rows, min([_SAMPLE_TOKENS, *limits]), dtype=torch.long)
    vision = getattr(config, "vision_config", None) or config
    main, sample = inner.main_input_name, dict[str, object]()
    if main == "input_ids":
        sample["input_ids"] = tokens
    elif main == "pixel_values" and hasattr(vision, "image_size"):
        size = vision.image_size
        height, width = size if isinstance(size, tuple | list) else (size, size)
        sample[main] = torch.zeros(rows, vision.num_channels, height, width, dtype=inner.dtype)
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        sample[main] = torch.zeros(
            rows, config.num_mel_bins, 2 * config.max_source_positions, dtype=inner.dtype
        )
    else:
        raise TopologyError(
            f"{type(inner).__name__} takes {main!r}: give example={{...}}, the keyword arguments "
            f"of its forward for a small batch"
        )
    if config.is_encoder_decoder:
        # A copy, because models call labels.view(-1), which fails on a slice of each row.
        sample["decoder_input_ids"] = tokens[:, :-2].clone()
    return sample
