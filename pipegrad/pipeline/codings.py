"""Codings: the codec of each hop for activations and gradients, and the messages that it makes.

A user gives one of these::

    "int8", or a table, class or instance      everything, over all hops
    {"activations": ..., "gradients": ...}     either of them, over all hops
    {"0-1": ..., (2, 3): ...}                  over these hops, each as one of the two above

[Note: codecs] Both ranks of a hop have the same codec, and have the spec of a value before the
value crosses. From these both compute the length of its message. [Note: shapes] still holds: a
header has the spec of the *value*. A value crosses unencoded if it is not of floats, or if its
message would not be shorter. Both ranks decide that alike, because it depends on shape and dtype
alone.

The stage that receives a value computes with the decoded value, and its gradient goes back as if
the value had not changed (straight-through). A value is not encoded for stages of the producer's
own rank.

[Note: errors of a step] If a step fails, its gradients are dropped on all ranks. Then the errors of
its encoding must be dropped, too, and the errors of the step before must stay. Therefore the errors
of a step are pending until the next step begins. A rank may have ended a step that fails on another
rank later. The message of the loss decides, because it has the same sums on all ranks. To read it
before the next step costs little, because a step cannot begin on the last rank before it has ended
on the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipegrad.errors import PlanError, ScheduleError, StepError
from pipegrad.pipeline.edges import Spec
from pipegrad.plugins.codec import CARRIED, Carried, CodecSpec, EdgeCodec, codecs
from pipegrad.plugins.registry import ResolvedPlugin

NONE = "none"
CODECS = "errors of codecs"  # their state among the states of handlers
_SHOWN = 20  # hops in a message

Hop = tuple[int, int]  # two pipeline ranks, the lower one first
Codec = ResolvedPlugin[EdgeCodec]
Both = dict[Carried, Codec]  # kinds without an entry cross unencoded
CodecsSpec = CodecSpec | Mapping[Any, Any] | None


@dataclass(frozen=True)
class CodecChoice:
    """The codecs of all hops, for activations and gradients, in both directions.

    Attributes:
        hops: The codecs of some hops.
        others: The codecs of all other hops.
    """

    hops: Mapping[Hop, Both] = field(default_factory=dict)
    others: Both = field(default_factory=dict)

    @property
    def is_none(self) -> bool:
        """True if nothing is encoded."""
        return not (self.others or any(self.hops.values()))

    def of(self, hop: Hop, carried: Carried) -> Codec | None:
        """Returns the codec of a hop; None if values cross unencoded."""
        return self.hops.get(hop, self.others).get(carried)

    def coding(
        self, source: int, target: int, carried: Carried, feedback: Feedback
    ) -> Coding | None:
        """Returns the coding between two pipeline ranks; None if values cross unencoded."""
        codec = self.of((min(source, target), max(source, target)), carried)
        return None if codec is None else Coding(codec, carried, feedback)

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
        """The text that ranks compare: codecs with their distributions and options."""
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
    """Returns the choice of a user; the top of this file lists the forms of `spec`.

    Raises:
        ScheduleError: If `spec` has none of these forms, or names a hop twice.
        PluginError: If there is no such codec, or it does not take these options.
    """
    if not isinstance(spec, Mapping) or "name" in spec or set(spec) & set(CARRIED):
        return CodecChoice(others=_both(spec))
    choice = CodecChoice()
    for key, value in spec.items():
        hop = _hop(key)
        if hop in choice.hops:
            raise ScheduleError(f"codecs name the hop {_words([hop])} twice: {list(spec)}")
        choice = replace(choice, hops={**choice.hops, hop: _both(value)})
    return choice


def _hop(key: object) -> Hop:
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
        chosen = {carried: _resolved(spec[carried]) for carried in CARRIED if carried in spec}
        for carried, codec in chosen.items():
            if codec is not None and carried not in codec.plugin.carries:
                raise ScheduleError(
                    f"codec {codec} is given for {carried}, and is for "
                    f"{' and '.join(codec.plugin.carries)} alone"
                )
        return {carried: codec for carried, codec in chosen.items() if codec is not None}
    codec = _resolved(spec)
    return {} if codec is None else dict.fromkeys(codec.plugin.carries, codec)


def _resolved(spec: Any) -> Codec | None:  # noqa: ANN401 - of a user
    if spec is None or spec == NONE:
        return None
    codec = codecs.resolve(spec)
    wrong = [carried for carried in codec.plugin.carries if carried not in CARRIED]
    if wrong or not codec.plugin.carries:
        raise ScheduleError(
            f"codec {codec} carries {list(codec.plugin.carries)}, expected of {list(CARRIED)}"
        )
    return codec


def _words(hops: Collection[Hop]) -> str:
    return ", ".join(f"{a}-{b}" for a, b in hops)


# Where an error belongs: the link of a value whose gradient a rank sends once, and a microbatch.
Position = tuple[int, int]


class Coding:
    """A codec on a hop, for activations or for gradients."""

    def __init__(self, codec: Codec, carried: Carried, feedback: Feedback) -> None:
        self._codec = codec
        self._carried = carried
        has_feedback = carried == "gradients" and codec.plugin.feedback
        self._feedback = feedback if has_feedback else None
        self._on_wire: dict[tuple[tuple[int, ...], torch.dtype], Spec | None] = {}

    def on_wire(self, spec: Spec) -> Spec:
        """Returns the spec of a value's message; `spec` itself if the value is not encoded."""
        key = spec.shape, spec.dtype
        if key not in self._on_wire:
            self._on_wire[key] = self._message_of(spec)
        return self._on_wire[key] or spec

    def _message_of(self, spec: Spec) -> Spec | None:
        if not spec.dtype.is_floating_point:
            return None
        with self._named("nbytes"):
            nbytes = self._codec.plugin.nbytes(spec.shape, spec.dtype)
        if type(nbytes) is not int or nbytes < 0:
            raise StepError(
                f"codec {self._codec}: nbytes() of {spec} is {nbytes!r}, expected a number of bytes"
            )
        return Spec((nbytes,), torch.uint8, False) if nbytes < spec.nbytes else None

    @torch.no_grad()
    def encoded(self, value: Tensor, spec: Spec, position: Position) -> Tensor:
        """Returns the message of a value; the value itself if it is not encoded.

        Sync: on the current stream.
        """
        wire = self.on_wire(spec)
        if wire is spec:
            return value
        message = torch.empty(wire.shape, dtype=torch.uint8, device=value.device)
        if self._feedback is not None:
            value = self._feedback.total(position, value)
        with self._named("encode"):
            self._codec.plugin.encode(value, message, self._carried)
        if self._feedback is not None:
            # The receiver computes with the decoded value. Decoding it here as well gives the part
            # of the gradient that the message lacks.
            decoded = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            self.decode(message, decoded)
            self._feedback.add(position, value, decoded)
        return message

    @torch.no_grad()
    def decode(self, message: Tensor, value: Tensor) -> None:
        """Writes the value of a message.

        Sync: on the current stream.
        """
        with self._named("decode"):
            self._codec.plugin.decode(message, value, self._carried)

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"In {method}() of the codec {self._codec}, for {self._carried}.")
            raise


class Feedback:
    """The errors of all gradients that this rank has encoded, each as large as its gradient.

    See [Note: errors of a step].

    Args:
        cut: A digest of the cut: the contents of all stages, the values between them, their ranks.

    Attributes:
        pending: The errors of the last step; empty if nothing was encoded in it.
    """

    def __init__(self, cut: str = "") -> None:
        self._cut = cut
        self._errors: dict[Position, Tensor] = {}
        self.pending: dict[Position, Tensor] = {}
        self._has_failed: Callable[[], bool] | None = None  # None: it has not ended on this rank

    def decide(self) -> None:
        """Keeps the errors of the last step, or drops them if it failed; called between steps.

        If there are any, the host waits for the message of the loss.
        """
        pending, has_failed = self.pending, self._has_failed
        self.pending, self._has_failed = {}, None
        if pending and has_failed is not None and not has_failed():
            self._errors |= pending

    def end(self, has_failed: Callable[[], bool]) -> None:
        """Ends a step on this rank.

        Args:
            has_failed: Returns whether its gradients are wrong; it may wait for other ranks.
        """
        self._has_failed = has_failed

    def total(self, position: Position, gradient: Tensor) -> Tensor:
        """Returns a gradient and the error of the one before it; the gradient if there is none."""
        error = self._errors.get(position)
        # An error of another shape belongs to another batch.
        if error is None or (error.shape, error.dtype) != (gradient.shape, gradient.dtype):
            return gradient
        return gradient + error.to(gradient.device)

    def add(self, position: Position, total: Tensor, decoded: Tensor) -> None:
        """Keeps the error of a gradient, if its step ends well; `decoded` is overwritten."""
        error = decoded.neg_().add_(total)
        # nan and inf do not stay, because a step that overflowed would spoil all that follow.
        self.pending[position] = error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all errors, on the host, and their cut; empty if there are none.

        They come from steps that ended well: see `decide`.
        """
        self.decide()
        errors = {
            f"{link} of {microbatch}": error.detach().to("cpu", copy=True)
            for (link, microbatch), error in self._errors.items()
        }
        return {"cut": self._cut, "errors": errors} if errors else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces its errors by a `state_dict` of this rank; by nothing if that is empty.

        Raises:
            PlanError: If it is something else, or has errors of another cut.
        """
        self._errors.clear()
        self.pending.clear()
        self._has_failed = None
        # Positions are numbers. The same number is another value in another cut, often of the same
        # shape.
        if not isinstance(state, Mapping):
            raise PlanError(
                f"the state of codecs is a {type(state).__name__}, expected what state_dict() "
                f"returns"
            )
        if state and state.get("cut") != self._cut:
            raise PlanError(
                "the state of codecs is of another cut: of a model with other stages, or with "
                "stages on other ranks; it fits into its own cut alone"
            )
        for key, error in state.get("errors", {}).items():
            match = re.fullmatch(r"(\d+) of (\d+)", str(key))
            if match is None or not isinstance(error, Tensor):
                raise PlanError(
                    f"{key!r} is no error of a codec, but {type(error).__name__}: expected what "
                    f"state_dict() returns"
                )
            self._errors[int(match[1]), int(match[2])] = error.clone()
