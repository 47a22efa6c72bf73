"""Which codec carries what over which hop: what a user may write."""

from __future__ import annotations

from typing import Any

import pytest

from pipegrad.errors import PluginError, ScheduleError
from pipegrad.pipeline.codings import choice_of
from pipegrad.plugins.codec import Carried
from pipegrad_codecs.int8 import Int8

BOTH = "activations int8, gradients int8"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (None, "none"),
        ("none", "none"),
        ({}, "none"),
        ("int8", f"all hops: {BOTH}"),
        (
            {"name": "int8", "feedback": False},
            "all hops: activations int8 feedback=False, gradients int8 feedback=False",
        ),
        ("topk", "all hops: gradients topk"),
        ({"activations": "fp8"}, "all hops: activations fp8"),
        ({"activations": None, "gradients": "none"}, "none"),
        ({"0-1": "int8", (3, 2): {"gradients": "topk"}}, f"0-1: {BOTH}; 2-3: gradients topk"),
        ({"1-0": "int8"}, f"0-1: {BOTH}"),
        ({"0-1": None}, "0-1: none"),
    ],
)
def test_what_a_user_writes_is_a_choice(spec: Any, words: str) -> None:
    assert str(choice_of(spec)) == words
    assert choice_of(spec).is_none is words.endswith("none")


def test_codecs_of_a_choice() -> None:
    for spec in (Int8, Int8(feedback=False)):
        codec = choice_of(spec).of((0, 1), "activations")
        assert codec is not None
        assert isinstance(codec.plugin, Int8)
    assert choice_of(Int8()).identity != choice_of(Int8(feedback=False)).identity
    # A hop that is named has its own codecs alone.
    choice = choice_of({"0-1": "int8", "1-2": {"gradients": "fp8"}})
    carried: tuple[Carried, ...] = ("activations", "gradients")
    codecs = {hop: [choice.of(hop, each) for each in carried] for hop in ((0, 1), (1, 2), (0, 2))}
    names = {hop: [codec and codec.name for codec in both] for hop, both in codecs.items()}
    assert names == {(0, 1): ["int8", "int8"], (1, 2): [None, "fp8"], (0, 2): [None, None]}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"activation": "int8"}, "the key 'activation'"),
        ({"activations": "int8", "0-1": "int8"}, r"the keys \['0-1'\]"),
        ({"0": "int8"}, "the key '0'"),
        ({"0-0": "int8"}, "the key '0-0'"),
        ({(0, 1, 2): "int8"}, "the key"),
        ({(0, True): "int8"}, "the key"),
        ({"0-1-2": "int8"}, "the key"),
        ({"-1-0": "int8"}, "the key"),
        ({"0-1": "int8", (1, 0): "int8"}, "twice"),
        ({"auto": "int8", "1-2": "int8"}, "the key 'auto'"),
        ({"activations": "topk"}, "for gradients alone"),
    ],
)
def test_what_is_no_choice_is_refused_in_words(spec: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        choice_of(spec)


@pytest.mark.parametrize(
    "spec", ["int9", "auto", 3, ["int8"], {"0-1": {"0-1": "int8"}}, object(), int]
)
def test_what_is_no_codec_is_refused_by_the_registry(spec: Any) -> None:
    with pytest.raises(PluginError):
        choice_of(spec)


def test_hops_that_nothing_crosses_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"the hops 2-3.*out of 0-1, 1-2"):
        choice_of({"0-1": "int8", "2-3": "int8"}).check([(0, 1), (1, 2)])
    choice_of("int8").check([])
