"""Caches that stages carry: their memory, lengths of chunks, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from pipegrad.errors import StepError, TopologyError
from pipegrad.partition.carried_cache import _extended
from tests.support.partition.families import FAMILIES, GROUPED, HEADS, ROUTED, Family

pytest.importorskip("transformers")


def cut_of(family: str, **options: Any) -> Any:
    known = FAMILIES[family].with_layers(4)
    return pipegrad.cut(
        replace(known, options={**known.options, **options}).build(), 2, carry="cache"
    )


def test_keys_of_all_chunks_are_in_one_buffer() -> None:
    stage = cut_of("Llama 3.2").stages([0])[0]
    state: Any = None
    saved, addresses = list[Tensor](), set[int]()
    given, _ = stage.rules.in_time({"input_ids": torch.randint(3, 50, (2, 12))})

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    for end in range(3, 13, 3):
        part = {**given, "input_ids": given["input_ids"][:, end - 3 : end]}
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            *_, state = stage.forward([part, state])
        keys = [x for layer in state["layers"].values() for x in layer]
        assert [x.shape[-2] for x in keys] == [end] * 4
        assert {x.untyped_storage().nbytes() for x in keys} == {2 * 12 * 8 * 8}
        buffers = {x.untyped_storage().data_ptr() for x in keys}
        # What attention keeps for its backward is there.
        assert buffers <= {x.untyped_storage().data_ptr() for x in saved}
        addresses |= buffers
    assert len(addresses) == 4  # keys and values of two layers


def test_a_buffer_that_somebody_copied_is_made_again() -> None:
    old, new = (torch.randn(2, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 2))
    result = _extended(old, new, 5, 9)
    assert torch.equal(result, torch.cat([old, new], -2))
    assert torch.autograd.gradcheck(lambda a, b: _extended(a, b, 5, 9), (old, new))


@pytest.mark.parametrize(("length", "number"), [(61, 4), (4096, 8), (10_000, 3), (5, 5), (7, 1)])
def test_chunks_cost_as_much_as_each_other(length: int, number: int) -> None:
    cut = cut_of("Qwen3")
    lengths = cut.chunks(length, number)
    flops = sum(layer.flops for layer in cut.layers) / (2 * 32)

    def cost(begin: int, end: int) -> Any:
        seen = sum(range(begin + 1, end + 1))
        return flops * (end - begin) + 4 * 16 * 4 * seen  # of four layers, 16 wide

    assert sum(lengths) == length
    assert len(lengths) == number
    assert min(lengths) >= 1
    ends = [*accumulate(lengths)]
    costs = [cost(begin, end) for begin, end in pairwise([0, *ends])]
    largest_step = max(1, length // (16 * number))
    if length > 16 * number:
        assert max(costs) - min(costs) <= 2 * cost(length - largest_step, length)


def test_windows_make_late_chunks_no_shorter() -> None:
    lengths = cut_of("Mistral").chunks(4096, 4)
    assert max(lengths) - min(lengths) <= 2 * 64  # all are multiples of it
    assert cut_of("Qwen3").chunks(4096, 4)[0] > lengths[0] + 256


CUTS: dict[str, tuple[Any, str]] = {
    "an encoder": (FAMILIES["T5"], "has an encoder"),
    "both sides": (FAMILIES["BERT"], "takes no past_key_values"),
    "a decoder that sees later tokens": (
        replace(HEADS["BERT, next"], options={**HEADS["BERT, next"].options, "is_decoder": False}),
        "sees later tokens",
    ),
    "balance": (ROUTED["Qwen3-MoE"], "output_router_logits"),
    "a recurrent state": (
        Family(
            "BambaConfig", "BambaForCausalLM", GROUPED | {"mamba_n_heads": 4, "mamba_d_head": 8}
        ),
        "LinearAttentionLayer",
    ),
}


@pytest.mark.parametrize("what", CUTS)
def test_a_model_whose_gradients_would_differ_is_refused_at_the_cut(what: str) -> None:
    family, words = CUTS[what]
    with pytest.raises(TopologyError, match=words):
        pipegrad.cut(family.build(), 2, carry="cache")


def test_what_is_no_model_of_transformers_carries_no_cache() -> None:
    with pytest.raises(TopologyError, match="only models of transformers"):
        pipegrad.cut(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, carry="cache")
    with pytest.raises(TopologyError, match="expected None or 'cache'"):
        pipegrad.cut(FAMILIES["Qwen3"].build(), 2, carry="state")
    with pytest.raises(TopologyError, match="carry='cache'"):
        pipegrad.cut(FAMILIES["Qwen3"].build(), 2).chunks(8, 2)


LATER = torch.ones(8, 1, 11, 11)
STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "images": ({"pixel_values": torch.ones(8, 3, 4, 4)}, "pixel_values"),
    "some logits": ({"logits_to_keep": 1}, "logits_to_keep"),
    "later tokens": ({"attention_mask": LATER.bool()}, "shows later tokens"),
    "later tokens, added": ({"attention_mask": LATER * 0}, "shows later tokens"),
    "too long": ({"input_ids": torch.ones(8, 40, dtype=torch.long)}, "positions for 32"),
}


@pytest.mark.parametrize("what", STEPS)
def test_what_has_no_place_in_a_chunk_is_refused(what: str) -> None:
    given, words = STEPS[what]
    with pytest.raises(StepError, match=words):
        cut_of("GPT-2").stages([0])[0].rules.in_time(FAMILIES["GPT-2"].batch(1) | given)


def test_a_hidden_begin_is_refused_where_hidden_tokens_see_later_ones() -> None:
    cut = cut_of("Gemma3", attn_implementation="eager")
    with pytest.raises(StepError, match="hides the begin of a row"):
        cut.stages([0])[0].rules.in_time(FAMILIES["Gemma3"].batch(1))


def test_checkpoints_of_transformers_are_refused() -> None:
    model: Any = FAMILIES["Qwen3"].build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its name
        model.gradient_checkpointing_enable()
    cut = pipegrad.cut(model, 2, carry="cache")
    with pytest.raises(StepError, match="gives layers no cache"):
        cut.stages([1])[0].rules.in_time(FAMILIES["Qwen3"].batch(1))
