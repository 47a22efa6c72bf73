"""Which codec carries what over which hop: what a user may write, and what is chosen by times."""

from __future__ import annotations

from typing import Any

import pytest

from pipegrad.errors import PluginError, ScheduleError
from pipegrad.pipeline.coding.choice import CodecChoice, Hop, choice_of
from pipegrad.pipeline.coding.timing import Coded
from pipegrad.pipeline.coding.worth import slowest, worth_of
from pipegrad.plugins.codec import Carried
from pipegrad.schedules import build
from pipegrad.schedules.measured import Times
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
        ("auto", f"hops where it saves time: {BOTH}"),
        ({"auto": {"gradients": "topk"}}, "hops where it saves time: gradients topk"),
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
        ({"auto": "int8", "1-2": "int8"}, "alone"),
        ({"activations": "topk"}, "for gradients alone"),
    ],
)
def test_what_is_no_choice_is_refused_in_words(spec: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        choice_of(spec)


@pytest.mark.parametrize("spec", ["int9", 3, ["int8"], {"0-1": {"0-1": "int8"}}, object(), int])
def test_what_is_no_codec_is_refused_by_the_registry(spec: Any) -> None:
    with pytest.raises(PluginError):
        choice_of(spec)


def test_hops_that_nothing_crosses_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"the hops 2-3.*out of 0-1, 1-2"):
        choice_of({"0-1": "int8", "2-3": "int8"}).check([(0, 1), (1, 2)])
    choice_of("int8").check([])


# By times.


def worth(
    hop_seconds: tuple[float, ...],
    coding: float = 0.0,
    schedule: str = "1f1b",
    number: int = 8,
    latency_seconds: tuple[float, ...] = (),
) -> tuple[Hop, ...]:
    """Returns what is chosen where messages are a quarter, and coding takes so long."""
    num_ranks = len(hop_seconds) + 1
    carried: tuple[Carried, ...] = ("activations", "gradients")
    found: dict[tuple[Hop, Carried], Coded] = {
        ((hop, hop + 1), each): Coded(4000, 1000, coding / 2, coding / 2)
        for hop in range(num_ranks - 1)
        for each in carried
    }
    times = Times((0.01,) * num_ranks, (0.02,) * num_ranks, hop_seconds)
    made = build(schedule, num_ranks=num_ranks, num_microbatches=number)
    auto = choice_of("auto").auto
    return worth_of(made, times, found, auto, latency_seconds=latency_seconds)


@pytest.mark.parametrize(
    ("hop_seconds", "options", "wanted"),
    [
        ((0.0, 0.1, 0.0), {}, ((1, 2),)),
        ((0.1, 0.0, 0.1), {}, ((0, 1), (2, 3))),
        ((0.1, 0.1, 0.1), {}, ((0, 1), (1, 2), (2, 3))),
        ((0.0, 0.0), {}, ()),
        # Coding must take less than it saves.
        ((0.04,), {"coding": 0.002}, ((0, 1),)),
        ((0.04,), {"coding": 0.031}, ()),
        # A message would be there sooner, but both ranks would compute later.
        ((0.04,), {"coding": 0.029}, ()),
        # Messages are there before anybody waits; coding would only take the ranks' time.
        ((0.004,), {"coding": 0.001, "schedule": "gpipe", "number": 64}, ()),
        # All of a hop's time was taken as that of its bytes.
        ((0.1, 0.1), {"latency_seconds": (0.1, 0.0)}, ((1, 2),)),
        ((0.1,), {"coding": 0.01, "latency_seconds": (0.09,)}, ()),
        ((0.1,), {"latency_seconds": (0.2,)}, ()),  # by another measurement
    ],
)
def test_slow_hops_where_it_saves_time_have_a_codec(
    hop_seconds: tuple[float, ...], options: dict[str, Any], wanted: tuple[Hop, ...]
) -> None:
    assert worth(hop_seconds, **options) == wanted


def test_the_slowest_end_of_a_hop_counts() -> None:
    key: tuple[Hop, Carried] = ((0, 1), "activations")
    first, other = {key: Coded(8, 4, 0.1, 0.4)}, {key: Coded(16, 8, 0.2, 0.3)}
    assert slowest([{}, first, other]) == {key: Coded(16, 8, 0.2, 0.4)}


def test_a_decided_choice_has_no_others() -> None:
    decided = choice_of("auto").decided([(1, 2)])
    assert str(decided) == f"1-2: {BOTH}"
    assert str(CodecChoice(auto=choice_of("auto").auto).decided([])) == "none"
