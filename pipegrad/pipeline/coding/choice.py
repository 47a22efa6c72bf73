"""Choice: which codec carries what over which hop.

A user gives one of these::

    "int8", or a table, class or instance      everything, over all hops
    {"activations": ..., "gradients": ...}     either of them, over all hops
    {"0-1": ..., (2, 3): ...}                  over these hops, each as one of the two above
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipegrad.errors import ScheduleError
from pipegrad.plugins.codec import CARRIED, Carried, CodecSpec, EdgeCodec, codecs
from pipegrad.plugins.registry import ResolvedPlugin

NONE = "none"
_AUTO = "auto"
_NO_AUTO = (
    "codecs are 'auto', and no run chooses them: name the codec, on all hops or on some such as "
    "{'0-1': 'int8'}; `pipegrad plan --costs` says what a step takes with it"
)
_SHOWN = 20  # hops in a message

Hop = tuple[int, int]  # two pipeline ranks, the lower one first
Codec = ResolvedPlugin[EdgeCodec]
Both = dict[Carried, Codec]  # what is missing crosses as it is
CodecsSpec = CodecSpec | Mapping[Any, Any] | None


@dataclass(frozen=True)
class CodecChoice:
    """Which codec carries what over which hop, in both directions.

    Attributes:
        hops: By hop.
        others: Over all other hops.
    """

    hops: Mapping[Hop, Both] = field(default_factory=dict)
    others: Both = field(default_factory=dict)

    @property
    def is_none(self) -> bool:
        """Whether everything crosses as it is."""
        return not (self.others or any(self.hops.values()))

    def of(self, hop: Hop, carried: Carried) -> Codec | None:
        """Returns the codec of a hop; None if values cross as they are."""
        return self.hops.get(hop, self.others).get(carried)

    def check(self, known: Collection[Hop]) -> None:
        """Refuses hops that nothing crosses.

        Raises:
            ScheduleError: If there is one.
        """
        unknown = sorted(set(self.hops) - set(known))
        if unknown:
            pairs = sorted(known)
            more = " ..." if len(pairs) > _SHOWN else ""
            raise ScheduleError(
                f"codecs are given for the hops {_words(unknown)}, which nothing crosses: expected "
                f"pairs of pipeline ranks out of {_words(pairs[:_SHOWN]) or 'none'}{more}"
            )

    @property
    def identity(self) -> str:
        """What ranks compare: codecs with their distributions and options."""
        return self._words(lambda codec: f"{codec} {dict(codec.options)}")

    def __str__(self) -> str:
        return self._words(lambda codec: " ".join((codec.name, *map("=".join, codec.options))))

    def _words(self, words: Callable[[Codec], str]) -> str:
        parts = {f"{a}-{b}": both for (a, b), both in sorted(self.hops.items())}
        parts |= {"all hops": self.others} if self.others else {}
        named = {
            where: ", ".join(f"{carried} {words(codec)}" for carried, codec in both.items())
            for where, both in parts.items()
        }
        return "; ".join(f"{where}: {each or NONE}" for where, each in named.items()) or NONE


def choice_of(spec: CodecsSpec) -> CodecChoice:
    """Returns the choice that a user has made; see the top of this file.

    Raises:
        ScheduleError: If it is none.
        PluginError: If there is no such codec, or it does not take these options.
    """
    if not _is_by_hop(spec):
        return CodecChoice(others=_both(spec))
    assert isinstance(spec, Mapping)
    choice = CodecChoice()
    for key, value in spec.items():
        hop = _hop(key)
        if hop in choice.hops:
            raise ScheduleError(f"codecs name the hop {_words([hop])} twice: {list(spec)}")
        choice = replace(choice, hops={**choice.hops, hop: _both(value)})
    return choice


def _is_by_hop(spec: object) -> bool:
    return isinstance(spec, Mapping) and "name" not in spec and not set(spec) & set(CARRIED)


def _hop(key: object) -> Hop:
    if key == _AUTO:
        raise ScheduleError(_NO_AUTO)
    ranks: Any = key
    if isinstance(key, str) and re.fullmatch(r"\d+-\d+", key):
        ranks = tuple(map(int, key.split("-")))
    is_pair = isinstance(ranks, tuple) and len(ranks) == 2
    if not is_pair or any(type(r) is not int for r in ranks) or ranks[0] == ranks[1]:
        raise ScheduleError(
            f"codecs have the key {key!r}: expected 'activations' and 'gradients', or hops between "
            f"two pipeline ranks such as '0-1'; a codec and its options is {{'name': ..., ...}}"
        )
    low, high = sorted(ranks)
    return low, high


def _both(spec: Any) -> Both:  # noqa: ANN401 - of a user
    """Returns the codecs of a hop: one for both, or one for each of activations and gradients."""
    if isinstance(spec, Mapping) and set(spec) & set(CARRIED):
        if unknown := sorted(map(str, set(spec) - set(CARRIED))):
            raise ScheduleError(f"codecs have the keys {unknown}, expected {list(CARRIED)}")
        found = {carried: _resolved(spec[carried]) for carried in CARRIED if carried in spec}
        for carried, codec in found.items():
            if codec is not None and carried not in codec.plugin.carries:
                raise ScheduleError(
                    f"codec {codec} is given for {carried}, and is for "
                    f"{' and '.join(codec.plugin.carries)} alone"
                )
        return {carried: codec for carried, codec in found.items() if codec is not None}
    codec = _resolved(spec)
    return {} if codec is None else dict.fromkeys(codec.plugin.carries, codec)


def _resolved(spec: Any) -> Codec | None:  # noqa: ANN401 - of a user
    if spec is None or spec == NONE:
        return None
    if _AUTO in (spec, spec.get("name") if isinstance(spec, Mapping) else None):
        raise ScheduleError(_NO_AUTO)
    codec = codecs.resolve(spec)
    wrong = [carried for carried in codec.plugin.carries if carried not in CARRIED]
    if wrong or not codec.plugin.carries:
        raise ScheduleError(
            f"codec {codec} carries {list(codec.plugin.carries)}, expected of {list(CARRIED)}"
        )
    return codec


def _words(hops: Collection[Hop]) -> str:
    return ", ".join(f"{a}-{b}" for a, b in hops)
