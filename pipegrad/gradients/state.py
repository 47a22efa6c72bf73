"""The states of a GradientSync, and the verbs that lead from one to the next: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from pipegrad.errors import StepError


@dataclass(frozen=True)
class Statistics:
    """Numbers of the last finished step on this rank.

    Attributes:
        steps: Steps finished so far.
        collectives: Collectives launched.
        reduced_bytes: Bytes of gradients that they reduced. A communication hook sends fewer.
        copies: Gradients copied out of a bucket; 0 if all are views.
        early: Parameters whose gradient was sent before the backward of their stage ended.
        published_bytes: Bytes of its parameter sync, to this rank and from it.
        exposed_seconds: Time for which `finish` waited for collectives, and `stage_first_use`
            before it for parameters.
    """

    steps: int = 0
    collectives: int = 0
    reduced_bytes: int = 0
    copies: int = 0
    early: int = 0
    published_bytes: int = 0
    exposed_seconds: float = 0.0


class State(Enum):
    """The states of a GradientSync."""

    BETWEEN = "between two steps"
    OPEN = "gradients accumulate"
    LEAVING = "some gradients are final, and may be on their way"
    CLOSED = "closed"


# For each verb, the states in which it may be called, and the state after it. In any other state it
# is refused. A gradient that becomes final also leads from OPEN to LEAVING, whichever verb or hook
# has made it final. A step that only accumulates stays OPEN until it is reduced.
_INSIDE = {State.OPEN: State.OPEN, State.LEAVING: State.LEAVING}
_BETWEEN = {State.BETWEEN: State.BETWEEN}
TRANSITIONS: Mapping[str, Mapping[State, State]] = {
    "prepare": {State.BETWEEN: State.OPEN, State.OPEN: State.OPEN},
    "stage_first_use": _BETWEEN | _INSIDE,
    "stage_last_backward": _INSIDE,
    "parameters_final": _INSIDE,
    "stage_final": {State.OPEN: State.LEAVING, State.LEAVING: State.LEAVING},
    "finish": {State.OPEN: State.BETWEEN, State.LEAVING: State.BETWEEN},
    "drop_gradients": dict.fromkeys(State, State.BETWEEN) | {State.CLOSED: State.CLOSED},
    "publish_if_due": _BETWEEN | _INSIDE,
    **dict.fromkeys(
        (
            "publish",
            "wait_parameters",
            "clip_grad_norm_",
            "non_finite",
            "check_replicas",
            "synchronize_parameters",
            "state_dict",
            "load_state_dict",
        ),
        _BETWEEN,
    ),
    "close": dict.fromkeys(State, State.CLOSED),
}


def refusal(verb: str, state: State) -> StepError:
    """Returns the error of a verb in a state that `TRANSITIONS` does not list for it.

    It names the verb to call first.
    """
    if state is State.CLOSED:
        return StepError("this GradientSync is closed: make another one, on all ranks")
    if verb == "prepare":
        return StepError("prepare() inside a step whose gradients are leaving: call finish()")
    if verb == "finish":
        return StepError("finish() without prepare(): there is no step to finish")
    if state is State.BETWEEN:
        return StepError(f"{verb}() outside a step: call prepare() first")
    return StepError(f"{verb}() inside a step: call finish() first")
