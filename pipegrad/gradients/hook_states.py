"""The states of handlers, such as error feedback: saved, and loaded on all ranks or on none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import AgreementError, PlanError, in_words


class Stateful(Protocol):
    """A handler, or what keeps the state of one."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; {} if there is none."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a result of `state_dict`; starts anew if it is empty."""


def hook_states(handlers: Mapping[str, Stateful], digest: str) -> dict[str, Any]:
    """Returns the states of all handlers that have one; empty if none has.

    Args:
        handlers: By name, what has the state of each handler.
        digest: Of the plan.
    """
    states = {
        name: state for name, stateful in handlers.items() if (state := stateful.state_dict())
    }
    return {"plan": digest, "handlers": states} if states else {}


def load_hook_states(
    state: Mapping[str, Any],
    handlers: Mapping[str, Stateful],
    digest: str,
    *,
    launching: Collection[str],
    ranks: Sequence[int],
) -> None:
    """Loads the states of handlers; see `GradientSync.load_state_dict`.

    Args:
        state: The saved state of this rank.
        handlers: As in `hook_states`.
        digest: Of the plan.
        launching: Handlers that launch collectives on this rank, or join replicas. Others have no
            state here.
        ranks: All ranks that call this, ascending.
    """
    hook_state = dict(state.get("handlers", {}))

    def load() -> dict[str, str]:
        if state and state.get("plan") != digest:
            raise PlanError(
                "what handlers kept is of another plan: of another model, other handlers, buckets "
                "or ranks; it fits into its own plan alone"
            )
        if unknown := sorted(hook_state.keys() - handlers.keys()):
            raise PlanError(f"what is to be loaded was kept by handlers {unknown}, not in use here")
        for name, stateful in handlers.items():
            try:
                stateful.load_state_dict(hook_state.get(name, {}))
            except Exception as error:
                raise PlanError(f"handler {name!r} cannot go on: {in_words(error)}") from error
        return {name: "what it kept" if hook_state.get(name) else "nothing" for name in launching}

    try:
        replies = dict(zip(ranks, agree("load_state_dict", load, ranks=ranks), strict=True))
        for name in handlers:
            sources = {rank: reply[name] for rank, reply in replies.items() if name in reply}
            same(f"what handler {name!r} goes on from", sources)
    except (PlanError, AgreementError) as error:
        # Ranks with and without a loaded state would compute different means. So all start anew.
        for stateful in handlers.values():
            stateful.load_state_dict({})
        if isinstance(error, PlanError):
            raise
        raise PlanError(str(error)) from error
