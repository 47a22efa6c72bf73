"""Carried cache: keys and values of the earlier chunks of a text, with their gradients.

[Note: carried cache] A text is cut into sequence chunks, and a stage gets one after the other.
Attention needs the keys and values of all earlier chunks. Each stage keeps the keys and values of
its own layers in a cache of transformers, and passes it from one chunk to the next. After the
backward of a chunk, the gradients of its cache flow into the chunk before. The sum of all chunks'
gradients is therefore the gradient of the whole text.

Keys and values need memory for the whole text, once. The first chunk allocates a buffer of keys and
a buffer of values for each layer, as long as the text, and each chunk writes its part. Attention
and autograd get views that end with the current chunk. A later chunk writes after the end of these
views, and a forward that runs again writes the same values. These writes do not invalidate what
autograd saved, because they do not change the version of an earlier view.

Attention masks and positions come whole, because a chunk cannot compute them alone. Labels are
shifted before the text is cut, because the first label of a chunk belongs to the last token of the
chunk before.
"""
# ruff: noqa: ANN401 - caches of transformers take and return anything

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError, TopologyError, in_words, refuse
from pipegrad.partition.cutting.stage_module import OwnLayer
from pipegrad.partition.hf.conventions import SHIFTED

LENGTH = "_pipegrad_length"  # of the whole text: a step in chunks adds it to the batch
WHOLE = ("attention_mask", "position_ids")  # each chunk gets them for the whole text
TEXTS = ("input_ids", "inputs_embeds", "token_type_ids", "labels", *WHOLE)
_KEYS = ("DynamicLayer", "DynamicSlidingWindowLayer")  # layers of a cache with nothing but keys
_CANNOT = "the model cannot carry a cache between chunks of time"
_LARGEST_STEP = 128  # tokens: lengths of chunks are multiples of it, if they are long
_FEWEST_STEPS = 16  # of a chunk


class _Extend(torch.autograd.Function):
    """Writes new keys into a buffer, and returns a view of earlier and new keys.

    Sync: The caller's stream. The buffer lives as long as a view of it.
    """

    @staticmethod
    def forward(ctx: Any, before: Tensor | None, new: Tensor, buffer: Tensor, end: int) -> Tensor:
        ctx.number = 0 if before is None else before.shape[-2]
        # .data leaves the versions of earlier chunks' views, because nothing that these keep for
        # their backward is written.
        buffer.data[..., end - new.shape[-2] : end, :].copy_(new)
        return buffer.data[..., end - new.shape[-2] - ctx.number : end, :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (gradient,) = gradients
        before = gradient[..., : ctx.number, :] if ctx.number else None
        return before, gradient[..., ctx.number :, :], None, None


def _extended(before: Tensor | None, new: Tensor, end: int, length: int) -> Tensor:
    """Returns keys or values with the new ones appended, in the buffer of the earlier ones."""
    if type(new) is not Tensor:  # it has no memory of its own, such as a fake one
        return new if before is None else torch.cat([before, new], -2)
    shape = *new.shape[:-2], length, new.shape[-1]
    if before is None:
        buffer = new.new_empty(shape)
    elif (memory := before.untyped_storage()).nbytes() == new.nbytes // new.shape[-2] * length:
        stride = new.new_empty(shape, device="meta").stride()
        buffer = before.new_empty(0).set_(memory, 0, shape, stride)
    else:  # a copy of the keys, which is not in a buffer
        buffer = new.new_empty(shape)
        buffer[..., end - new.shape[-2] - before.shape[-2] : end - new.shape[-2], :] = before.data
    return _Extend.apply(before, new, buffer, end)  # type: ignore[no-any-return, no-untyped-call]


class _Carried:
    """A mixin for a cache layer of transformers.

    Attributes:
        carried: Keys and values that the next chunk sees; None before the first chunk.
        past: Number of tokens in earlier chunks.
        end: Number of tokens up to the end of this chunk.
        length: Number of tokens in the whole text.
        is_updated: True if this chunk has written its keys.
    """

    keys: Any
    values: Any
    carried: Any = None
    past = end = length = cumulative_length = 0
    is_updated = False

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that attention sees: of earlier chunks, then of this one."""
        if self.is_updated or keys.shape[-2] != self.end - self.past:
            raise StepError(
                f"a layer writes {keys.shape[-2]} keys into the cache for a chunk of "
                f"{self.end - self.past} tokens, or writes twice: give chunks=1"
            )
        if self.carried is None and self.past:  # another stage has the layer, and its keys
            stands = [x.new_zeros(*x.shape[:-2], self.past, x.shape[-1]) for x in (keys, values)]
            return torch.cat([stands[0], keys], -2), torch.cat([stands[1], values], -2)
        before = self.carried or (None, None)
        self.keys = _extended(before[0], keys, self.end, self.length)
        self.values = _extended(before[1], values, self.end, self.length)
        self.cumulative_length, self.is_updated = self.end, True
        self.carried = self.keys, self.values
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Returns the number of tokens, also if the layer is on another stage."""
        return self.cumulative_length


def _empty(config: Any) -> Any:
    """Returns a cache without content."""
    from transformers import DynamicCache

    return DynamicCache(config=config)


@cache
def _carried_kind() -> Any:
    """Returns the class of a cache layer that is carried.

    It keeps all keys, also if attention has a window, because some models have a window in their
    cache and none in their masks.
    """
    from transformers.cache_utils import DynamicLayer

    return type("CarriedLayer", (_Carried, DynamicLayer), {})


class CarriedCache:
    """The cache that stages pass from one chunk of a text to the next.

    Args:
        inner: The model of transformers, or the model inside of an adapter; None for other models.

    Raises:
        TopologyError: If the gradients of chunks would differ from the whole text's gradients.
    """

    def __init__(self, inner: Any | None) -> None:
        if inner is None:
            raise TopologyError(f"{_CANNOT}: only models of transformers have one")
        _check_model(inner)
        self._config = inner.config.get_text_config(decoder=True)

    def in_time(
        self, given: Mapping[str, object], shifted: Callable[[Tensor], Tensor] | None
    ) -> tuple[dict[str, object], dict[str, int | None]]:
        """Returns the inputs to cut into sequence chunks; see `BatchRules`.

        Raises:
            StepError: If an input cannot be cut into chunks.
        """
        wrong = [
            n for n, x in given.items() if isinstance(x, Tensor) and n not in (*TEXTS, "target")
        ]
        wrong += [n for n in ("logits_to_keep",) if n not in wrong and given.get(n)]
        text: Any = given.get("input_ids")
        text = given.get("inputs_embeds") if text is None else text
        refuse(
            StepError,
            {
                f"{sorted(wrong)} cannot be cut into chunks of time: these take texts alone, as "
                f"{list(TEXTS)}": wrong,
                "input_ids, or inputs_embeds, are needed to cut a text into chunks": text is None,
            },
        )
        self._check_mask(given.get(WHOLE[0]))
        values = {**given, LENGTH: text.shape[1]}
        labels = given.get("labels")
        if shifted is not None and isinstance(labels, Tensor):
            values["labels"] = shifted(labels)
            if "target" in given:
                values["target"] = {SHIFTED: values["labels"]}
        return values, dict.fromkeys(WHOLE)

    def _check_mask(self, mask: object) -> None:
        """Refuses a mask that lets a token see later tokens, because its chunk lacks them."""
        if mask is None:
            return
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            raise StepError("attention_mask is no tensor of two or four dimensions: give chunks=1")
        is_eager = self._config._attn_implementation == "eager"
        if mask.dim() == 2 and is_eager and ((mask[:, 0] == 0) & mask.any(1)).any():
            raise StepError(
                "attention_mask hides the begin of a row, and with eager attention a hidden token "
                "sees all of the text, of which a chunk has no later ones: pad on the right, or "
                "set attn_implementation='sdpa'"
            )
        if mask.dim() == 4:
            is_added = mask.is_floating_point() or is_eager
            if (mask.double() > -1e3 if is_added else mask.bool()).triu(1).any():
                raise StepError(
                    "attention_mask shows later tokens, which a chunk does not have: give chunks=1"
                )

    def lengths(self, length: int, number: int, *, flops: float) -> list[int]:
        """Returns lengths of chunks with equal costs; see `Cut.chunks`."""
        config = self._config
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        windows = [getattr(x, "sliding_window", length) for x in _empty(config).layers]

        def cost(end: int) -> Any:
            """Returns the operations of the first `end` tokens; each sees all tokens before it."""
            seen = sum(w * end - w * (w - 1) / 2 for w in (min(window, end) for window in windows))
            return flops * end + 4 * width * seen  # two products of a key and a query, twice each

        step = 1
        while step < _LARGEST_STEP and 2 * step * _FEWEST_STEPS * number <= length:
            step *= 2
        ends = [0]
        for part in range(1, number):
            end = step * bisect_left(range(0, length, step), cost(length) * part / number, key=cost)
            ends.append(min(max(end, ends[-1] + step), length - (number - part) * step))
        return [end - begin for begin, end in pairwise([*ends, length])]

    @contextmanager
    def chunk(
        self, module: nn.Module, batch: Any, state: Any
    ) -> Iterator[tuple[Mapping[str, object], Mapping[str, object], Callable[[], object]]]:
        """Yields the inputs of a stage for one chunk.

        Yields:
            The model's inputs for this chunk; the arguments that pass the cache, empty if the text
            is not cut; a function to call after the forward, which returns the state for the next
            chunk.
        """
        if LENGTH not in batch:
            yield batch, {}, lambda: None
            return
        batch = dict(batch)
        length, text = batch.pop(LENGTH), batch.get("input_ids")
        text = batch["inputs_embeds"] if text is None else text
        past = 0 if state is None else state["past"]
        end = past + text.shape[1]
        mask, positions = (batch.get(name) for name in WHOLE)
        if mask is not None:  # of each token alone, or with each key
            batch[WHOLE[0]] = mask[:, :end] if mask.dim() == 2 else mask[..., past:end, :end]
        if positions is not None:
            batch[WHOLE[1]] = positions[..., past:end]
        cached = self._cache({} if state is None else state["layers"], past, end, length)
        hidden = (
            positions if mask is None and positions is not None and positions.dim() == 2 else None
        )

        def handed_on() -> dict[str, Any]:
            written = {
                i: x.carried for i, x in enumerate(cached.layers) if getattr(x, "is_updated", False)
            }
            if missing := sorted(_layers_of(module) - written.keys()):
                raise StepError(
                    f"layers {missing} wrote no keys into the cache, so chunks of time would not "
                    f"see each other: give chunks=1"
                )
            return {"past": end, "layers": written}

        with documents(hidden, len(text), self._config._attn_implementation):
            yield batch, {"past_key_values": cached, "use_cache": True}, handed_on

    def _cache(self, layers: Mapping[int, Any], past: int, end: int, length: int) -> Any:
        """Returns the cache of a chunk, with the keys and values of earlier chunks."""
        result = _empty(self._config)
        for index, layer in enumerate(result.layers):
            if type(layer).__name__ in _KEYS:
                result.layers[index] = _carried_kind()()
                at = {"past": past, "end": end, "length": length, "cumulative_length": past}
                vars(result.layers[index]).update(at, carried=layers.get(index))
        return result


def _layers_of(module: nn.Module) -> set[int]:
    """Returns the cache indices of a stage's layers."""
    own = (part for part in module.modules() if isinstance(part, OwnLayer))
    parts: Iterator[Any] = (x for part in own for x in part.modules())
    return {x.layer_idx for x in parts if getattr(x, "layer_idx", None) is not None}


@contextmanager
def documents(positions: Tensor | None, rows: int, implementation: str) -> Iterator[None]:
    """Hides documents of a packed row from each other, as transformers does without a cache.

    Raises:
        StepError: If the row is packed and attention is a flash kernel, which would see all
            documents.
    """
    from transformers import masking_utils as masks

    found = None if positions is None else masks.find_packed_sequence_indices(positions)
    if positions is None or found is None:
        yield
        return
    if "flash" in implementation:
        raise StepError(
            f"position_ids begin anew inside of a row, and {implementation} hides no document of "
            f"an earlier chunk: set attn_implementation='sdpa'"
        )
    positions, found = positions.expand(rows, -1), found.expand(rows, -1)
    sizes, hidden = masks._preprocess_mask_arguments, masks.packed_sequence_compatibility_function

    def with_documents(
        config: Any, embeds: Any, mask: Any, cache: Any, position_ids: Any, *args: Any, **named: Any
    ) -> tuple[Any, ...]:
        is_early, mask, _, *others = sizes(
            config, embeds, mask, cache, position_ids, *args, **named
        )
        is_packed = position_ids is not None and mask is None
        return is_early, mask, found if is_packed else None, *others

    def of_whole(function: Any, _: Any, packed: Any) -> Any:
        return hidden(function, positions, packed)

    with (
        mock.patch.object(masks, sizes.__name__, with_documents),
        mock.patch.object(masks, hidden.__name__, of_whole),
    ):
        yield


@contextmanager
def shifted_loss(module: nn.Module, arguments: Mapping[str, object]) -> Iterator[None]:
    """Lets the model's own loss accept labels that are shifted already."""

    def of(loss: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: loss(*args, **named | {SHIFTED: arguments["labels"]})

    parts: list[Any] = [x for x in module.modules() if hasattr(type(x), "loss_function")]
    with ExitStack() as around:
        for part in parts:
            loss = of(part.loss_function)
            around.enter_context(mock.patch.object(part, "_loss_function", loss, create=True))
        yield


def _check_model(inner: Any) -> None:
    """Refuses a model if the gradients of chunks would differ from the whole text's gradients."""
    kind, config = type(inner).__name__, inner.config.get_text_config(decoder=True)
    takes = inspect.signature(inspect.unwrap(type(inner).forward)).parameters
    ahead = [
        name
        for name, part in inner.named_modules()
        if getattr(part, "layer_idx", None) is not None
        and getattr(part, "is_causal", True) is False
    ]
    kinds, failure = list[str](), ""
    try:
        kinds = [type(layer).__name__ for layer in _empty(config).layers]
    except Exception as error:  # noqa: BLE001 - any error about a configuration
        failure = f" ({in_words(error)})"
    others = {*kinds} - {*_KEYS, "DummyLayer"}
    reasons = {
        f"{kind} has an encoder, which sees the text as a whole": inner.config.is_encoder_decoder,
        f"{kind} takes no past_key_values": "past_key_values" not in takes,
        f"{[*ahead, ''][0]} sees later tokens, too": ahead,
        "output_router_logits adds a balance loss, which is a mean over the whole text and no sum "
        "over its chunks: set it to False": getattr(config, "output_router_logits", False),
        f"transformers makes none for {kind}{failure}": not kinds,
        f"it has {sorted(others)}, and only keys and values of attention are handed on with their "
        f"gradient": others,
    }
    refuse(TopologyError, {f"{_CANNOT}: {words}": holds for words, holds in reasons.items()})
